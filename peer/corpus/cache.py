"""The cache of text: ranges of chunks and their digests, as blobs on disk, within a limit, checked when they are read.

Eviction is LRU by chunk, without ranges that are needed soon. Where the disk refuses, or all that fits is needed, a few
ranges are kept in memory.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path

from peer.net.blobs import BlobStore, Place
from peer.net.blobs.store import LEAVES
from peer.net.disk import Disk
from protocol.codec import blob_hash
from protocol.errors import UsageError

MEMORY_BYTES = 32 << 20
"""Of ranges that the disk does not take."""
RETRY_SECONDS = 60.0
"""After the disk has refused, until it is tried again."""
CHUNKS = 1024
"""Whose leaves are kept in memory too, 16 KiB each."""


class TextStore(BlobStore):
    """See the module's docstring. Raises UsageError if the folder cannot be made.

    limit: bytes on disk
    warn: called when the disk refuses
    """

    def __init__(
        self,
        folder: Path,
        limit: int,
        disk: Disk,
        warn: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(folder, limit, disk)
        self._warn = warn
        self._clock = clock
        self._bytes = limit
        self._leaves: OrderedDict[str, tuple[int, bytes]] = OrderedDict()  # with the chunk's size
        self._memory: OrderedDict[str, bytes] = OrderedDict()
        self._in_memory = 0
        self._needed: tuple[Place, ...] = ()
        self._newest, self._read = max((self.round_of(name) for name in self), default=0), ""
        self._disk_again = float("-inf")
        self._told = False
        self.make_space(0)

    @staticmethod
    def is_ours(name: str) -> bool:
        return blob_hash.is_name(name.removesuffix(LEAVES))

    @property
    def capacity(self) -> int:
        """Bytes that can be kept ahead of reading."""
        return MEMORY_BYTES if self._clock() < self._disk_again else max(self._bytes, MEMORY_BYTES)

    def need(self, places: Iterable[Place]) -> None:
        """Protects these in place of those before."""
        self._needed = tuple(places)
        with self._lock:
            self.protected = {name for place in self._needed if (name := self.name(place))}

    def name(self, place: Place) -> str:
        """Returns the blob name of a range or of leaves; empty for a range without leaves here."""
        if place.index < 0:
            return place.name + LEAVES
        leaves, start = self._leaves_of(place), blob_hash.LEAF_BYTES * place.index
        return leaves[start : start + blob_hash.LEAF_BYTES].hex()

    def has(self, name: str) -> bool:
        return name in self._memory or super().has(name)

    def holds(self, place: Place) -> bool:
        """Whether a range, or leaves, are here, unless they were damaged since."""
        return bool(self._leaves_of(place)) if place.index < 0 else self.has(self.name(place))

    def read(self, place: Place) -> bytes:
        """Returns a range, or leaves; empty if missing. Damaged ones are removed."""
        if place.index < 0:
            return self._leaves_of(place)
        name = self.name(place)
        return self._memory.get(name) or (self.get(name) if name else None) or b""

    def touch(self, place: Place) -> None:
        """Marks the chunk as the most recently read."""
        if self._read == place.name:
            return
        with self._lock:
            self._newest, self._read = self._newest + 2, place.name  # later than what came since
            leaves = self._leaves_of(place).hex()
            for start in range(0, len(leaves), 2 * blob_hash.LEAF_BYTES):
                self._is_newest(leaves[start : start + 2 * blob_hash.LEAF_BYTES])
            self._is_newest(place.name + LEAVES)

    def _is_newest(self, name: str) -> None:
        if name in self._known:
            self.add(name, self._newest, self._known[name].size)

    def put(
        self, data: bytes, round: int = 0, *, name: str | None = None, protect: bool = False, sync: bool = True
    ) -> str:
        """Keeps a range, or a chunk's leaves under `name`, already checked."""
        name = name or blob_hash.name_of(data)
        with self._lock:
            if not self.has(name) and not self._write(data, name):
                self._memory[name] = data
                self._in_memory += len(data)
                while self._in_memory > MEMORY_BYTES:
                    self._in_memory -= len(self._memory.popitem(last=False)[1])
        if name.endswith(LEAVES):
            self.need(self._needed)  # their ranges have names now
        return name

    def _write(self, data: bytes, name: str) -> bool:
        """Returns whether the disk took it."""
        if not self.make_space(len(data)) or self._clock() < self._disk_again:
            return False
        try:
            try:
                super().put(data, self._newest + 1, name=name, sync=False)
            except UsageError:
                self.disk.make_folder(self.folder)  # somebody removed it
                super().put(data, self._newest + 1, name=name, sync=False)
        except UsageError as error:
            self._disk_again = self._clock() + RETRY_SECONDS
            if not self._told:
                self._told = True
                reason = str(error).partition(": ")[2].partition(";")[0]
                self._warn(
                    f"directory {self.folder}: {reason}; text is kept in memory and fetched anew, free space to keep it"
                )
            return False
        self._told = False
        return True

    def _leaves_of(self, place: Place) -> bytes:
        """Returns a chunk's leaves, empty if they are missing or of another size."""
        if blob_hash.count(place.size) == 1:
            return bytes.fromhex(place.name)
        size, leaves = self._leaves.get(place.name, (place.size, b""))
        if not leaves and self.has(name := place.name + LEAVES):
            try:
                leaves = self._memory.get(name) or self.disk.read(self.folder / name)
            except OSError:
                leaves = b""
            if blob_hash.root(size, leaves) != place.name:
                return b""
            with self._lock:
                self._leaves[place.name] = size, leaves
                if len(self._leaves) > CHUNKS:
                    self._leaves.popitem(last=False)
        return leaves if size == place.size else b""
