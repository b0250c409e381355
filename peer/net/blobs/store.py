"""Blobs on disk.

    FOLDER/<name>               a whole blob; its round is the file's modification time, in seconds
    FOLDER/parts/<name>         ranges of a blob that is being fetched, each at its place
    FOLDER/parts/<name>.leaves  the digests of its ranges
    FOLDER/<name>.leaves        the same of a blob of which a store has some ranges only (peer/corpus/fetched.py)

A blob becomes visible only when it is whole, checked and durable. The ranges in a part file are those whose digest is
right, so a fetch resumes after any kill. A store with a limit evicts unprotected blobs, oldest rounds first.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from peer.net.disk import Disk, disk_error, disk_errors
from protocol.codec import blob_hash

NO_ROUND = 2**31 - 1
"""In place of a round: a blob that belongs to none stays until it is removed, and does not count against the limit."""
PIECE = 1 << 20
LEAVES = ".leaves"


@dataclass(frozen=True, slots=True)
class Place:
    """Range `index` of the large blob `name`, which has `size` bytes; index -1: the digests of its ranges, its leaves.

    A range is a small blob itself, whose name is its digest.
    """

    name: str
    size: int
    index: int

    @property
    def leaves(self) -> Place:
        """The place of the digests of the same blob's ranges."""
        return dataclasses.replace(self, index=-1)

    @property
    def length(self) -> int:
        if self.index < 0:
            return blob_hash.LEAF_BYTES * blob_hash.count(self.size)
        start, end = blob_hash.span(self.size, self.index)
        return end - start


@dataclass(frozen=True, slots=True)
class Blob:
    """The bytes of a blob on disk: `size` bytes of the file `path` on `disk`, from byte `start` on."""

    disk: Disk
    path: Path
    start: int
    size: int

    def leaves(self) -> bytes:
        """The digests of its ranges. Raises OSError."""
        return blob_hash.leaves_of(self._pieces())[1]

    def read(self, index: int) -> bytes:
        """Range `index`. Raises OSError."""
        begin, end = blob_hash.span(self.size, index)
        return self.disk.read(self.path, self.start + begin, end - begin)

    def _pieces(self) -> Iterator[bytes]:
        left = self.size
        with self.disk.open(self.path) as file:
            file.seek(self.start)
            while left and (piece := file.read(min(left, PIECE))):
                left -= len(piece)
                yield piece


@dataclass(slots=True)
class _Known:
    """A counted blob. `synced`: whether it was written with `sync` since the store was opened."""

    round: int
    size: int
    synced: bool = False


class BlobStore:
    """A folder with one file per blob. `limit`: bytes, None for no limit. Safe to use from several threads."""

    def __init__(self, folder: Path, limit: int | None = None, disk: Disk | None = None) -> None:
        self.folder = folder
        self.disk: Disk = disk or Disk()
        self.limit = limit
        self.used = 0
        """Bytes of whole blobs that belong to a round."""
        self.protected: set[str] = set()
        """Names that are never evicted."""
        self._parts = folder / "parts"
        self._lock = threading.RLock()
        self._known: dict[str, _Known] = {}
        self._of_round: dict[int, set[str]] = {}
        self._rounds: list[int] = []
        """The keys of that, ascending. A run has more blobs than a round should take the time to look through."""
        self._loose: set[str] = set()
        self.disk.make_folder(self._parts)
        with disk_errors(folder):
            for name in self.disk.names(folder):
                if name.startswith("."):
                    self.disk.remove(folder / name)
                elif self.is_ours(name):
                    size, round = self.disk.stat(folder / name)
                    self.add(name, round, size)

    # --- what is there

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._known))

    @staticmethod
    def is_ours(name: str) -> bool:
        """Returns whether a file of this name is counted."""
        return blob_hash.is_name(name)

    def has(self, name: str) -> bool:
        return name in self._known

    def round_of(self, name: str) -> int:
        """The round that a blob belongs to; -1 where it is not here."""
        known = self._known.get(name)
        return -1 if known is None else known.round

    def newer(self, round: int) -> set[str]:
        with self._lock:
            later = self._rounds[bisect.bisect_right(self._rounds, round) :]
            return {name for each in later if each < NO_ROUND for name in self._of_round[each]}

    def older(self, round: int) -> list[set[str]]:
        """The names of each round up to `round`, oldest first."""
        with self._lock:
            return [self._of_round[each].copy() for each in self._rounds[: bisect.bisect_right(self._rounds, round)]]

    def of_no_round(self) -> set[str]:
        with self._lock:
            return set(self._of_round.get(NO_ROUND, ()))

    def find(self, name: str) -> Blob | None:
        """Returns a stored blob, or None."""
        known = self._known.get(name)
        return None if known is None else Blob(self.disk, self.folder / name, 0, known.size)

    def get(self, name: str) -> bytes | None:
        """The blob, or None where it is not here; a file that no longer matches its name is removed."""
        if name not in self._known:
            return None
        try:
            data = self.disk.read(self.folder / name)
        except OSError:
            data = b""
        if blob_hash.name_of(data) != name:
            self.remove(name)
            return None
        return data

    # --- what comes and goes

    def put(
        self, data: bytes, round: int = 0, *, name: str | None = None, protect: bool = False, sync: bool = True
    ) -> str:
        """Stores `data` durably (see peer/net/disk.py) as one of `round`'s. Returns its name. Raises UsageError."""
        name = name or blob_hash.name_of(data)
        if protect:
            self.protected.add(name)
        known = self._known.get(name)
        if known is None or (sync and not known.synced):
            if known is not None:
                round = known.round
            elif round != NO_ROUND:
                self.make_space(len(data))
            self.disk.write(self.folder / name, data, seconds=round, sync=sync)
            self.add(name, round, len(data), synced=sync)
        return name

    def put_of_no_round(self, pieces: Sequence[memoryview], name: str) -> None:
        """Stores the bytes of a blob durably, which stays until it is removed. Raises UsageError."""
        self.disk.write(self.folder / name, *pieces, seconds=NO_ROUND)
        self.add(name, NO_ROUND, sum(piece.nbytes for piece in pieces), synced=True)

    def renew(self, name: str, round: int) -> None:
        """Makes a blob one of `round`, durably, if it is of an earlier one: it is named again. Raises UsageError."""
        with self._lock:
            known = self._known.get(name)
            if known is not None and known.round < round:
                with disk_errors(self.folder):
                    self.disk.set_seconds(self.folder / name, round)
                    self.disk.sync(self.folder / name)
                self.add(name, round, known.size, synced=known.synced)

    def make_space(self, size: int) -> bool:
        """Removes what is not protected, oldest rounds first, until `size` more bytes fit; whether they do."""
        if self.limit is None:
            return True
        with self._lock:
            for round in list(self._rounds) if self.used + size > self.limit else ():
                free = self._of_round[round] - self.protected if round != NO_ROUND else set[str]()
                for name in sorted(free, key=lambda name: (len(name), name)):  # leaves after their ranges
                    if self.used + size <= self.limit:
                        return True
                    self.remove(name)
            return self.used + size <= self.limit

    def remove(self, name: str) -> None:
        with self._lock:
            if self._forget(name):
                self.disk.remove(self.folder / name)

    def release(self, name: str) -> None:
        """Removes a blob unless it is protected: others may need the same bytes."""
        with self._lock:
            if name not in self.protected:
                self.remove(name)

    def _forget(self, name: str) -> bool:
        """Counts a blob no more; whether it was counted."""
        known = self._known.pop(name, None)
        if known is None:
            return False
        self.used -= known.size if known.round != NO_ROUND else 0
        names = self._of_round[known.round]
        names.remove(name)
        if not names:
            del self._of_round[known.round]
            del self._rounds[bisect.bisect_left(self._rounds, known.round)]
        return True

    def settle(self, round: int, committed: Collection[str]) -> set[str]:
        """Removes what was stored for a decided round and not committed, once it is unprotected. Returns the names."""
        with self._lock:
            self._loose |= self._of_round.get(round, set()).difference(committed)
            gone = self._loose - self.protected
            self._loose -= gone
            for name in gone:
                self.remove(name)
            return gone

    def part(self, name: str, size: int) -> Part:
        """The ranges of a blob that are here already. One user at a time."""
        return Part(self, name, size)

    def drop_parts(self, keep: Collection[str]) -> None:
        """Removes the begun blobs that are not among `keep`."""
        for name in self.disk.names(self._parts):
            if name.removesuffix(LEAVES) not in keep:
                self.disk.remove(self._parts / name)

    def add(self, name: str, round: int, size: int, *, synced: bool = False) -> None:
        """Counts a blob whose file is in the folder."""
        with self._lock:
            self._forget(name)
            self._known[name] = _Known(round, size, synced)
            self.used += size if round != NO_ROUND else 0
            if round not in self._of_round:
                self._of_round[round] = set()
                bisect.insort(self._rounds, round)
            self._of_round[round].add(name)


class Part:
    """A large blob that is being fetched. `missing`: ranges that are not here, all of them without the leaves."""

    def __init__(self, store: BlobStore, name: str, size: int) -> None:
        self.name = name
        self.size = size
        self.leaves: bytes | None = None
        self.missing = set(range(blob_hash.count(size)))
        self._store = store
        self._disk = store.disk
        self._path = store._parts / name
        self._leaves = store._parts / (name + LEAVES)
        with contextlib.suppress(FileNotFoundError):
            self._learn(self._disk.read(self._leaves))

    def learn(self, leaves: bytes) -> bool:
        """Takes the digests of the ranges, if they make the blob's name. Raises UsageError."""
        if not self._learn(leaves):
            return False
        self._disk.write(self._leaves, leaves, sync=False)
        return True

    def _learn(self, leaves: bytes) -> bool:
        if (
            len(leaves) != blob_hash.LEAF_BYTES * blob_hash.count(self.size)
            or blob_hash.root(self.size, leaves) != self.name
        ):
            return False
        with contextlib.suppress(FileNotFoundError), self._disk.open(self._path) as file:
            for index in sorted(self.missing):
                begin, end = blob_hash.span(self.size, index)
                file.seek(begin)
                data = file.read(end - begin)
                if not data:
                    break  # the file ends here
                if blob_hash.is_leaf(leaves, index, data):
                    self.missing.discard(index)
        self.leaves = leaves
        return True

    def write(self, index: int, data: bytes) -> bool:
        """Keeps a range if its digest is right. Raises UsageError; then nothing of the blob is kept."""
        if self.leaves is None or not blob_hash.is_leaf(self.leaves, index, data):
            return False
        try:
            self._disk.write_at(self._path, index * blob_hash.RANGE_BYTES, data)
        except OSError as error:
            self._discard()
            raise disk_error(self._store.folder, error) from None
        self.missing.discard(index)
        return True

    def finish(self, round: int, check: Callable[[bytes], object] | None = None, *, sync: bool = True) -> None:
        """Makes the whole blob visible and durable (see peer/net/disk.py), unless `check` raises. Raises UsageError."""
        assert not self.missing
        if check is not None:
            try:
                check(self._disk.read(self._path))
            except BaseException:
                self._discard()
                raise
        if round != NO_ROUND:
            self._store.make_space(self.size)
        with disk_errors(self._store.folder):
            if sync:
                self._disk.sync(self._path)
            self._disk.set_seconds(self._path, round)
            self._disk.rename(self._path, self._store.folder / self.name)
            if sync:
                self._disk.sync(self._store.folder)
        self._disk.remove(self._leaves)
        self._store.add(self.name, round, self.size)

    def _discard(self) -> None:
        self._disk.remove(self._path)
        self._disk.remove(self._leaves)
