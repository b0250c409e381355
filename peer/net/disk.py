"""All that Potluck writes to disk, through a `Disk`, which the simulation replaces (tests/sim/disk.py).

A file that is written appears whole or not at all. A crash may tear what was appended, so readers check it. With `sync`
both survive a loss of power, without it only the end of a process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import math
import mmap
import os
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from protocol.errors import LocalError, UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Piece = bytes | memoryview
MEMORY = Path("/dev/shm")
"""Linux's shared file system in memory."""


def disk_error(path: Path, error: OSError) -> LocalError:
    """Returns the error for a failed write under `path`, which only the user can fix."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return UsageError(
            f"directory {path}: {error.strerror}; raise the hard limit (ulimit -Hn, LimitNOFILE= of a service),"
            " then start again"
        )
    return UsageError(
        f"directory {path}: {error.strerror or error}; free space or choose another folder, then start again"
        " (nothing half-written is kept)"
    )


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Raises `disk_error` in place of an OSError."""
    try:
        yield
    except OSError as error:
        raise disk_error(path, error) from None


NOT_THERE = frozenset(
    (errno.EPERM, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EBADF, errno.ENOTTY, errno.ENOLCK)
)
"""Errors of file systems without hard links, locks or synced folders. Others mean that something is wrong."""
LOCK_SECONDS = 3.0
"""Longest wait for a lock: a killed process has it until the system has freed its memory."""


def flush(descriptor: int, *, folder: bool = False) -> None:
    """Syncs a file, or a folder where the file system can. Raises OSError."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NOT_THERE and not (folder and error.errno == errno.EACCES):
            raise


def try_lock(file: BinaryIO) -> bool:
    """Locks a file while it is open. Returns False if another process has it. Raises OSError without locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN):
            return False
        raise
    return True


def _stand_in(folder: Path) -> BinaryIO | None:
    """Returns a file to lock in place of a folder on a file system without locks, None where that fails too."""
    name = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:32]
    path = Path(tempfile.gettempdir()) / f"potluck-lock-{name}"
    try:
        return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600), "wb")
    except OSError:
        return None


def _reserve(descriptor: int, size: int) -> None:
    """Allocates a file of `size` bytes, as a write to its pages that fails later would be a signal."""
    if hasattr(os, "posix_fallocate"):
        try:
            return os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            if error.errno not in NOT_THERE:
                raise
    zeros = bytes(1 << 20)
    for start in range(0, size, len(zeros)):
        os.pwrite(descriptor, zeros[: size - start], start)


class Disk:
    """The machine's file systems. Methods raise OSError where the disk refuses, unless they say UsageError.

    memory: a file system in memory
    """

    written_bytes = 0
    """Bytes written so far, except to files in memory and what the system writes of `arrays`."""
    _counting = threading.Lock()
    _memory = MEMORY

    def __init__(self, memory: Path = MEMORY) -> None:
        self._memory = memory

    def lock(self, folder: Path, who: str) -> BinaryIO:
        """Keeps other processes out of `folder`, which is made, until the lock is closed.

        who: what uses it, for the error
        Raises UsageError.
        """
        self.make_folder(folder)
        with disk_errors(folder):
            file = open(folder / "lock", "wb")  # noqa: SIM115  (held until it is closed)
        for stand_in in (False, True):
            held = _stand_in(folder) if stand_in else file
            if held is None:
                break
            until = time.monotonic() + LOCK_SECONDS
            try:
                while not (mine := try_lock(held)) and time.monotonic() < until:
                    time.sleep(0.05)
            except OSError:  # no locks there
                held.close()
                continue
            if not mine:
                held.close()
                raise UsageError(f"directory {folder}: another {who} uses it; stop that one or choose another folder")
            return held
        return open(folder / "lock", "wb")  # no locks anywhere: two processes in one folder are the user's risk

    def make_folder(self, path: Path) -> None:
        """Makes a folder and those above it. Raises UsageError."""
        with disk_errors(path):
            path.mkdir(parents=True, exist_ok=True)

    def names(self, folder: Path) -> list[str]:
        """Returns the names in a folder, sorted."""
        return sorted(os.listdir(folder))

    def stat(self, path: Path) -> tuple[int, int]:
        """Returns (bytes, modification time in seconds). Raises FileNotFoundError."""
        found = path.stat()
        return found.st_size, int(found.st_mtime)

    def read(self, path: Path, start: int = 0, size: int = -1) -> bytes:
        """Reads at most `size` bytes from byte `start` on; -1: all. Raises FileNotFoundError."""
        with open(path, "rb") as file:
            file.seek(start)
            return file.read(size)

    def open(self, path: Path) -> BinaryIO:
        """Opens a file for reading. Raises FileNotFoundError."""
        return open(path, "rb")

    def arrays(self, folder: Path, shapes: Sequence[tuple[int, ...]]) -> list[NDArray[np.float32]]:
        """Returns uninitialized arrays in an unnamed file of `folder`, whose space is freed with the last of them.

        The system keeps in memory what is used of them. Raises UsageError.
        """
        import numpy as np

        sizes = [-(-4 * math.prod(shape) // mmap.PAGESIZE) * mmap.PAGESIZE for shape in shapes]
        if not shapes:
            return []
        with disk_errors(folder), tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            _reserve(file.fileno(), sum(sizes))
            mapped = mmap.mmap(file.fileno(), sum(sizes))
        ends = itertools.accumulate(sizes)
        return [
            np.frombuffer(mapped, np.float32, math.prod(shape), end - size).reshape(shape)
            for shape, size, end in zip(shapes, sizes, ends, strict=True)
        ]

    def memory(self, size: int) -> Path | None:
        """Returns this user's folder in a file system in memory with room for `size` bytes, or None."""
        folder = self._memory / f"potluck-{os.getuid()}"
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, exist_ok=True)
            found, room = folder.lstat(), os.statvfs(folder)
            ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
            if ours and room.f_bavail * room.f_frsize >= size:
                return folder
        return None

    def write(
        self, path: Path, *pieces: Piece, seconds: int | None = None, sync: bool = True, over: Path | None = None
    ) -> None:
        """Writes a file, whole or not at all. Raises UsageError.

        seconds: its modification time
        over: a file that is no longer needed and whose pages are reused, as fresh ones cost more than the bytes
        """
        temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
        try:
            if over is not None:
                os.replace(over, temporary)
            with open(temporary, "wb" if over is None else "r+b") as file:
                file.writelines(pieces)
                file.truncate()
                self._count(path, file.tell())
                file.flush()
                if sync:
                    flush(file.fileno())
            if seconds is not None:
                self.set_seconds(temporary, seconds)
            os.replace(temporary, path)
            if sync:
                self.sync(path.parent)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise disk_error(path.parent, error) from None

    def append(self, path: Path, data: bytes) -> None:
        """Adds to the end of a file, synced. Raises UsageError; then the file is as before."""
        size = None
        try:
            with open(path, "ab") as file:
                size = file.tell()
                file.write(data)
                file.flush()
                flush(file.fileno())
            self._count(path, len(data))
            if size == 0:  # the name may be new, too
                self.sync(path.parent)
        except OSError as error:
            if size is not None:
                with contextlib.suppress(OSError):
                    os.truncate(path, size)
            raise disk_error(path.parent, error) from None

    def write_at(self, path: Path, start: int, data: Piece) -> None:
        """Writes into a file, which is made if it is missing; not synced."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            view = memoryview(data)
            while len(view):
                written = os.pwrite(descriptor, view, start)
                self._count(path, written)
                start, view = start + written, view[written:]
        finally:
            os.close(descriptor)

    def _count(self, path: Path, size: int) -> None:
        with self._counting:  # several threads write
            self.written_bytes += 0 if path.is_relative_to(self._memory) else size

    def truncate(self, path: Path, size: int) -> None:
        os.truncate(path, size)

    def sync(self, path: Path) -> None:
        """Makes a file's bytes, or the names in a folder, survive a loss of power."""
        folder = path.is_dir()
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except (PermissionError, IsADirectoryError):
            if folder:  # a file system whose folders cannot be opened
                return
            raise
        try:
            flush(descriptor, folder=folder)
        finally:
            os.close(descriptor)

    def set_seconds(self, path: Path, seconds: int) -> None:
        try:
            os.utime(path, (seconds, seconds))
        except OSError as error:
            if error.errno not in NOT_THERE:
                raise

    def rename(self, old: Path, new: Path) -> None:
        """Moves a file or a folder, in place of a file that is there."""
        os.replace(old, new)

    def remove(self, path: Path) -> None:
        """Removes a file, or a folder with all its contents, if it is there."""
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
