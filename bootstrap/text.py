"""The run's text, served from the folder of a corpus (docs/guides/data.md), which is only read. Each range is checked when it is read."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from peer.net.blobs import Blob, Coming, Place
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
        self._lock = threading.Lock()

    def read(self, place: Place) -> bytes:
        """A range of a chunk, or its leaves, checked; empty where it is not here."""
        with self._lock:
            leaves = self._leaves.get(place.name, b"") or self._read_leaves(place.name, place.size)
            if len(leaves) != place.leaves.length:
                return b""
            self._leaves[place.name] = leaves
            self._leaves.move_to_end(place.name)
            if len(self._leaves) > CACHED:
                self._leaves.popitem(last=False)
        if place.index < 0:
            return leaves
        try:
            data = Blob(self._disk, self._folder / corpus.CHUNKS / place.name, 0, place.size).read(place.index)
        except OSError:
            data = b""
        if not blob_hash.is_leaf(leaves, place.index, data):
            self._tell(place.name)
            return b""
        return data

    def coming(self, place: Place, peer: str, named_by: str) -> Coming | None:
        """Nothing is on its way to here."""

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
