"""A disk in memory that its process dies upon: between any two operations, in the middle of an append, with or without
the power.

Names and bytes are kept twice, as they are and as they would be after a loss of power. A process that is killed finds
what was there. After a loss of power, what was not synced may be there or not, each file for itself, and the end of
what was appended may be torn off.
"""

from __future__ import annotations

import dataclasses
import io
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from peer.net.disk import Piece
from protocol.codec import topk

MEMORY = Path("/memory")
"""The folder of files in memory."""


@dataclass(slots=True)
class File:
    """What a name stands for. `synced`: the bytes that survive a loss of power, None where none do."""

    data: bytes
    seconds: int = 0
    synced: bytes | None = None


@dataclass(slots=True)
class Files:
    """What is on one machine's disk, for all of its processes. `durable`: the names that survive a loss of power."""

    there: dict[Path, File] = field(default_factory=dict)
    durable: dict[Path, File] = field(default_factory=dict)
    has_memory: bool = True
    """Whether the machine has room in memory for files that outlive a process, not a loss of power."""

    def lose_power(self, rng: random.Random) -> None:
        """What was not synced is there or not; a folder has its old or its new name as a whole; memory is lost."""
        self.there = {path: file for path, file in self.there.items() if path.parent != MEMORY}
        kept, before = dict(self.durable), {id(file): path for path, file in self.durable.items()}
        renamed: dict[Path, bool] = {}
        for path, file in self.there.items():
            if path in kept:
                continue
            if id(file) not in before:
                if rng.random() < 0.5:
                    kept[path] = file
            elif renamed.setdefault(path.parent, rng.random() < 0.5):
                del kept[before[id(file)]]
                kept[path] = file
        for file in kept.values():
            if file.synced is not None and rng.random() < 0.5:
                file.data = file.synced
            elif file.synced is None and rng.random() < 0.5:
                file.data = file.data[: rng.randrange(len(file.data) + 1)]
        self.there = {path: dataclasses.replace(file, synced=file.data) for path, file in kept.items()}
        self.durable = dict(self.there)


class SimDisk:
    """One life's view of `files`. `point(where)` comes before every operation, and raises where the process dies."""

    written_bytes = 0

    def __init__(self, files: Files, point: Callable[[str], None], rng: random.Random) -> None:
        self._files = files
        self._point = point
        self._rng = rng

    def kept(self, path: Path, data: bytes) -> None:
        """These bytes are there now, synced, or in memory."""

    def lock(self, folder: Path, who: str) -> io.BytesIO:
        self._point("disk: lock")
        return io.BytesIO()

    def make_folder(self, path: Path) -> None:
        self._point("disk: make folder")

    def names(self, folder: Path) -> list[str]:
        self._point("disk: list")
        start = f"{folder}/"
        inside = (str(path) for path in self._files.there)
        return sorted({path[len(start) :].split("/", 1)[0] for path in inside if path.startswith(start)})

    def stat(self, path: Path) -> tuple[int, int]:
        file = self._file(path)
        return len(file.data), file.seconds

    def read(self, path: Path, start: int = 0, size: int = -1) -> bytes:
        data = self._file(path).data
        return data[start:] if size < 0 else data[start : start + size]

    def open(self, path: Path) -> BinaryIO:
        return io.BytesIO(self._file(path).data)

    def arrays(self, folder: Path, shapes: Sequence[tuple[int, ...]]) -> list[NDArray[np.float32]]:
        return topk.in_memory(shapes)

    def memory(self, size: int) -> Path | None:
        return MEMORY if self._files.has_memory else None

    def write(
        self, path: Path, *pieces: Piece, seconds: int | None = None, sync: bool = True, over: Path | None = None
    ) -> None:
        data = b"".join(pieces)
        if over is not None:
            self._point(f"disk: give up {_kind(over)}")
            self._files.there.pop(over, None)
        self._point(f"disk: write {_kind(path)}")
        self._files.there[path] = File(data, seconds or 0, data if sync else None)
        if sync:
            self._files.durable[path] = self._files.there[path]
            if over is not None:
                self._files.durable.pop(over, None)
        if sync or path.parent == MEMORY:
            self.kept(path, data)
        self._point(f"disk: wrote {_kind(path)}")

    def append(self, path: Path, data: bytes) -> None:
        file = self._files.there.setdefault(path, File(b"", 0, b""))
        self._files.durable[path] = file
        try:
            self._point(f"disk: append to {_kind(path)}")
        except BaseException:
            file.data = file.synced = file.data + data[: self._rng.randrange(len(data))]
            raise
        file.data = file.synced = file.data + data
        self.kept(path, data)
        self._point(f"disk: appended to {_kind(path)}")

    def write_at(self, path: Path, start: int, data: Piece) -> None:
        self._point(f"disk: write into {_kind(path)}")
        file = self._files.there.setdefault(path, File(b""))
        file.data = file.data[:start].ljust(start, b"\0") + bytes(data) + file.data[start + len(data) :]

    def truncate(self, path: Path, size: int) -> None:
        self._point(f"disk: truncate {_kind(path)}")
        file = self._file(path)
        file.data = file.data[:size]

    def sync(self, path: Path) -> None:
        self._point("disk: sync")
        files = self._files
        if path in files.there:
            files.there[path].synced = files.there[path].data
            return
        for old in [p for p in files.durable if p.is_relative_to(path) and p not in files.there]:
            files.durable[old] = files.durable.pop(old)
        known = {id(file) for file in files.durable.values()}
        files.durable = {p: f for p, f in files.durable.items() if not p.is_relative_to(path) or p in files.there}
        for p, file in files.there.items():
            if p.is_relative_to(path) and (p.parent == path or id(file) in known):
                files.durable[p] = file

    def set_seconds(self, path: Path, seconds: int) -> None:
        self._file(path).seconds = seconds

    def rename(self, old: Path, new: Path) -> None:
        self._point(f"disk: rename to {_kind(new)}")
        there = self._files.there
        for path in [p for p in there if p.is_relative_to(old)]:
            there[new / path.relative_to(old) if path != old else new] = there.pop(path)
        self._point(f"disk: renamed to {_kind(new)}")

    def remove(self, path: Path) -> None:
        self._point("disk: remove")
        if self._files.there.pop(path, None) is None:
            for found in [p for p in self._files.there if path in p.parents]:
                del self._files.there[found]

    def _file(self, path: Path) -> File:
        self._point("disk: read")
        if path not in self._files.there:
            raise FileNotFoundError(2, "No such file", str(path))
        return self._files.there[path]


def _kind(path: Path) -> str:
    """What a file is, whatever its round or digest."""
    name = path.name.lstrip(".")
    if path.parent == MEMORY:
        return "a copy in memory"
    if path.parent.name == "blobs":
        return "a payload"
    if path.parent.name.lstrip(".").startswith("checkpoint-"):
        return "a checkpoint's file"
    return name.split("-")[0].split(".")[0]
