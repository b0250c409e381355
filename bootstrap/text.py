"""The run's text, served from the folder of a corpus (docs/guides/data.md), which is only read. Each range is checked when it is read."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from peer.net.blobs import Blob
from peer.net.blobs.ranges import LEAVES, Ranges
from peer.net.disk import Disk
from protocol.codec import blob_hash
from protocol.run import corpus

CACHED = 1024
"""Chunks whose range digests are kept in memory, 16 KiB each."""


class ServedText:
    """The corpus with this index in `folder`. `index`: as it is sent; `warn` hears of damage, once of each chunk."""

    def __init__(self, folder: Path, index: bytes, disk: Disk) -> None:
        self.index = index
        self.warn: Callable[[str], None] = lambda line: None
        self._folder = folder
        self._disk = disk
        self._damaged: set[str] = set()
        self._leaves: OrderedDict[str, bytes] = OrderedDict()

    async def find(self, name: str, size: int) -> Ranges | None:
        """The ranges of a chunk, if it is here."""
        leaves = self._leaves.get(name, b"") or await asyncio.to_thread(self._read_leaves, name, size)
        if len(leaves) != blob_hash.LEAF * blob_hash.count(size):
            return None
        self._leaves[name] = leaves
        self._leaves.move_to_end(name)
        if len(self._leaves) > CACHED:
            self._leaves.popitem(last=False)
        path = self._folder / corpus.CHUNKS / name
        return _Chunk(Blob(self._disk, path, 0, size), leaves, lambda: self._tell(name))

    def _read_leaves(self, name: str, size: int) -> bytes:
        """A chunk's leaves: from the file beside it, or made again; empty where there is no such chunk."""
        path = self._folder / corpus.CHUNKS / name
        try:
            if self._disk.stat(path)[0] != size:
                return b""
            try:
                leaves = self._disk.read(path.with_name(name + corpus.LEAVES))
            except FileNotFoundError:
                leaves = b""
            if blob_hash.root(size, leaves) != name:
                leaves = Blob(self._disk, path, 0, size).leaves()
        except OSError:
            return b""
        if blob_hash.root(size, leaves) != name:
            self._tell(name)
            return b""
        return leaves

    def _tell(self, name: str) -> None:
        if name not in self._damaged:
            self._damaged.add(name)
            self.warn(f"corpus {self._folder}: chunk {name[:12]}… is damaged; copy it again, or build the corpus again")


@dataclass(frozen=True, slots=True)
class _Chunk:
    blob: Blob
    leaves: bytes
    damaged: Callable[[], None]

    async def read(self, index: int) -> bytes:
        if index == LEAVES:
            return self.leaves
        try:
            data = await asyncio.to_thread(self.blob.read, index)
        except OSError:
            data = b""
        if not blob_hash.is_leaf(self.leaves, index, data):
            self.damaged()
            return b""
        return data
