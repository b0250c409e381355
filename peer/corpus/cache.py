"""The ranges of a corpus that are here: on disk, within a limit, each checked whenever it is read.

    FOLDER/<chunk>/leaves     the chunk's size (8 bytes, little-endian) and the digests of its ranges, which make its name
                              (protocol/codec/blob_hash.py)
    FOLDER/<chunk>/<number>   a range

A range has a file of its own: so what a kill leaves is whole, what is used is known from the names alone, and every range can go by itself.
When space is needed, ranges of the chunk go that was read longest ago, but never those that are needed soon. Whatever
happens to the folder shows when a range is read, and costs no more than to fetch it again. Where the disk refuses, or all that
fits is needed, ranges are kept in memory, a few.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from peer.net.blobs.ranges import LEAVES
from peer.net.disk import Disk
from protocol.codec import blob_hash
from protocol.errors import UsageError

MEMORY_BYTES = 32 << 20
"""Of ranges that the disk does not take."""
RETRY_SECONDS = 60.0
"""After the disk has refused, until it is tried again."""
_LEAVES = "leaves"
_SIZE = 8


@dataclass(frozen=True, slots=True)
class Chunk:
    """A blob of the corpus: its name and its size in bytes."""

    name: str
    size: int

    def length(self, index: int) -> int:
        """Bytes of a range, or of the leaves."""
        if index == LEAVES:
            return blob_hash.LEAF * blob_hash.count(self.size)
        start, end = blob_hash.span(self.size, index)
        return end - start


Key = tuple[Chunk, int]
"""A range of a chunk, or its leaves."""


@dataclass(slots=True)
class _Held:
    """What is on disk of a chunk: its ranges, and their bytes with the leaves. `size` of the chunk and `leaves`: once they were read and are
    right."""

    ranges: set[int] = field(default_factory=set)
    used: int = 0
    size: int = -1
    leaves: bytes = b""


class RangeCache:
    """See the module's docstring. `limit`: bytes on disk. `warn` hears of a disk that refuses. Every method may be called from any thread.
    Raises UsageError where the folder cannot be made."""

    def __init__(
        self,
        folder: Path,
        limit: int,
        disk: Disk,
        warn: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._limit = limit
        self._disk = disk
        self._warn = warn
        self._clock = clock
        self._lock = threading.RLock()
        self._chunks: OrderedDict[str, _Held] = OrderedDict()  # read longest ago first
        self._memory: OrderedDict[Key, bytes] = OrderedDict()
        self._in_memory = 0
        self._needed: dict[str, set[int]] = {}
        self._disk_again = float("-inf")
        self._told = False
        self.used = 0
        """Bytes on disk."""
        disk.make_folder(folder)
        self._look()

    @property
    def capacity(self) -> int:
        """Bytes that can be kept ahead of reading."""
        return MEMORY_BYTES if self._clock() < self._disk_again else max(self._limit, MEMORY_BYTES)

    def need(self, keys: Iterable[Key]) -> None:
        """From now on these are never removed; those before may be."""
        needed: dict[str, set[int]] = {}
        for chunk, index in keys:
            needed.setdefault(chunk.name, {LEAVES}).add(index)
        self._needed = needed

    def has(self, chunk: Chunk, index: int) -> bool:
        """Whether a range was here when it was last looked for. Never waits for the disk."""
        held = self._chunks.get(chunk.name)
        return (chunk, index) in self._memory or (held is not None and index in held.ranges)

    def read(self, chunk: Chunk, index: int) -> bytes:
        """A range, or the leaves; empty where it is not here. What is damaged is removed."""
        with self._lock:
            leaves = self._leaves(chunk)
            if not leaves or index == LEAVES:
                return leaves
            data = self._memory.get((chunk, index), b"")
            held = self._chunks.get(chunk.name)
            if data or held is None or index not in held.ranges:
                return data
            self._chunks.move_to_end(chunk.name)
            try:
                data = self._disk.read(self._path(chunk.name, index))
            except OSError:
                data = b""
            if not blob_hash.is_leaf(leaves, index, data):
                self._remove(chunk.name, index)
                data = b""
            return data

    def put(self, chunk: Chunk, index: int, data: bytes) -> bool:
        """Keeps a range, or the leaves, if they are right: whether they are. The leaves come first."""
        with self._lock:
            if index == LEAVES:
                if len(data) != chunk.length(LEAVES) or blob_hash.root(chunk.size, data) != chunk.name:
                    return False
            else:
                leaves = self._leaves(chunk)
                if len(data) != chunk.length(index) or not leaves or not blob_hash.is_leaf(leaves, index, data):
                    return False
            if not self.has(chunk, index) and not self._write(chunk, index, data):
                self._keep_in_memory(chunk, index, data)
            return True

    # --- the disk

    def _look(self) -> None:
        """Learns what is there."""
        found: list[tuple[int, str]] = []
        try:
            for name in self._disk.names(self._folder):
                if blob_hash.is_name(name):
                    found.append((self._disk.stat(self._folder / name)[1], name))
            for _, name in sorted(found):
                held = _Held()
                for file in self._disk.names(self._folder / name):
                    if file == _LEAVES or file.isdecimal():
                        held.ranges.add(LEAVES if file == _LEAVES else int(file))
                        held.used += self._disk.stat(self._folder / name / file)[0]
                    else:
                        self._disk.remove(self._folder / name / file)  # what a kill left in the middle of a write
                self._chunks[name] = held
                self.used += held.used
        except OSError as error:
            raise UsageError(
                f"directory {self._folder}: {error.strerror}; remove it, what it holds is fetched again"
            ) from None
        self._make_space(0)

    def _leaves(self, chunk: Chunk) -> bytes:
        """The leaves, if they are here. What a stranger says of the size changes nothing."""
        data = self._memory.get((chunk, LEAVES), b"")
        held = self._chunks.get(chunk.name)
        if data or held is None or LEAVES not in held.ranges:
            return data
        if not held.leaves:
            try:
                raw = self._disk.read(self._path(chunk.name, LEAVES))
            except OSError:
                raw = b""
            size, leaves = int.from_bytes(raw[:_SIZE], "little"), raw[_SIZE:]
            if not leaves or blob_hash.root(size, leaves) != chunk.name:
                self._remove(chunk.name, LEAVES)
                return b""
            held.size, held.leaves = size, leaves
        return held.leaves if held.size == chunk.size else b""

    def _write(self, chunk: Chunk, index: int, data: bytes) -> bool:
        """Whether the disk took it."""
        pieces = (chunk.size.to_bytes(_SIZE, "little"), data) if index == LEAVES else (data,)
        size = sum(map(len, pieces))
        if not self._make_space(size) or self._clock() < self._disk_again:
            return False
        try:
            try:
                self._disk.write(self._path(chunk.name, index), *pieces, sync=False)
            except UsageError:
                self._disk.make_folder(self._folder / chunk.name)  # the chunk is new, or its folder was removed
                self._disk.write(self._path(chunk.name, index), *pieces, sync=False)
        except UsageError as error:
            self._disk_again = self._clock() + RETRY_SECONDS
            if not self._told:
                self._told = True
                reason = str(error).partition(": ")[2].partition(";")[0]
                self._warn(
                    f"directory {self._folder}: {reason}; text is kept in memory and fetched anew, free space to keep it"
                )
            return False
        self._told = False
        held = self._chunks.setdefault(chunk.name, _Held())
        self._chunks.move_to_end(chunk.name)
        if index not in held.ranges:
            held.ranges.add(index)
            held.used += size
            self.used += size
        if index == LEAVES:
            held.size, held.leaves = chunk.size, data
        return True

    def _make_space(self, size: int) -> bool:
        """Removes what was read longest ago until so many more bytes fit; whether they do."""
        for name in list(self._chunks):
            if self.used + size <= self._limit:
                return True
            held, needed = self._chunks[name], self._needed.get(name, set())
            for index in sorted(held.ranges - needed - {LEAVES}):
                if self.used + size <= self._limit:
                    return True
                self._remove(name, index)
            if not needed and not held.ranges - {LEAVES}:
                self._remove(name, LEAVES)
        return self.used + size <= self._limit

    def _remove(self, name: str, index: int) -> None:
        held, path = self._chunks[name], self._path(name, index)
        size = 0
        if index in held.ranges:
            held.ranges.discard(index)
            try:
                size = self._disk.stat(path)[0]
                self._disk.remove(path)
            except OSError:
                size = blob_hash.RANGE  # somebody else removed it; only the last range of a chunk is shorter
        if index == LEAVES:
            held.leaves = b""
        size = min(size, held.used)
        held.used -= size
        self.used -= size
        if not held.ranges:
            self.used -= held.used
            del self._chunks[name]
            try:
                self._disk.remove(self._folder / name)
            except OSError:
                return

    def _path(self, name: str, index: int) -> Path:
        return self._folder / name / (_LEAVES if index == LEAVES else str(index))

    # --- memory

    def _keep_in_memory(self, chunk: Chunk, index: int, data: bytes) -> None:
        self._memory[(chunk, index)] = data
        self._in_memory += len(data)
        while self._in_memory > MEMORY_BYTES:
            _, oldest = self._memory.popitem(last=False)
            self._in_memory -= len(oldest)
