"""Reads a corpus from its folder; a chunk is checked against its name when it is first used."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from peer.net.disk import Disk
from protocol.codec import blob_hash
from protocol.errors import UsageError
from protocol.run import corpus
from protocol.run.corpus import Extent

INDEX = "index"
CHUNKS = "chunks"
TOKENIZER = "tokenizer.json"
"""What is in a corpus's folder."""


class CorpusReader:
    """The sequences of the corpus in `folder`. `digest`: the one that it must have, if any. Raises UsageError."""

    def __init__(self, folder: Path, disk: Disk, digest: str = "") -> None:
        self._folder = folder
        self._disk = disk
        try:
            raw = disk.read(folder / INDEX)
        except OSError as error:
            raise UsageError(
                f"corpus {folder}: {error.strerror}; give the folder of a `potluck data build` that has finished"
            ) from None
        self.index = corpus.from_bytes(raw, str(folder))
        self.digest = blob_hash.name_of(raw)
        if digest and self.digest != digest:
            raise UsageError(
                f"corpus {folder}: its digest is {self.digest[:12]}…, not {digest[:12]}…; use the run's own corpus"
            )
        self._dtype = np.dtype(f"<u{self.index.id_bytes}")
        self._chunks: dict[str, NDArray[np.unsignedinteger]] = {}

    def sequences(self, at: Sequence[range]) -> NDArray[np.int64]:
        """The training sequences of these numbers, in order: ids int64 [n, L + 1]. Raises IndexError, UsageError."""
        rows = [self._rows(extent) for numbers in at for extent in self.index.extents(numbers)]
        return np.concatenate([np.zeros((0, self.index.sequence + 1), np.int64), *rows]).astype(np.int64, copy=False)

    def held_out(self, limit: int) -> NDArray[np.int64]:
        """At most `limit` held-out sequences: int64 [n, L + 1]. They are in a pseudo-random order, so the first are as good as any.
        Raises UsageError."""
        extent = self.index.held_out_chunk()
        count = min(limit, self.index.held_out_sequences)
        return self._rows(Extent(extent.name, extent.size, 0, count * self.index.stride)).astype(np.int64)

    def missing(self) -> list[str]:
        """The chunks whose files are not there, or have another size; nothing else is looked at."""
        chunks = [self.index.chunk(number) for number in range(self.index.n_chunks)]
        return [chunk.name for chunk in (*chunks, self.index.held_out_chunk()) if not self._is_there(chunk)]

    def _is_there(self, chunk: Extent) -> bool:
        try:
            return self._disk.stat(self._folder / CHUNKS / chunk.name)[0] == chunk.size
        except OSError:
            return False

    def _rows(self, extent: Extent) -> NDArray[np.unsignedinteger]:
        """The sequences in these bytes of a chunk: [n, L + 1]."""
        if extent.name not in self._chunks:
            self._chunks[extent.name] = self._checked(extent)
        size = self.index.id_bytes
        ids = self._chunks[extent.name][extent.start // size : extent.end // size]
        return ids.reshape(-1, self.index.sequence + 1)

    def _checked(self, extent: Extent) -> NDArray[np.unsignedinteger]:
        path = self._folder / CHUNKS / extent.name
        try:
            ids = np.memmap(path, self._dtype, "r") if self._is_there(extent) else None
        except (OSError, ValueError) as error:
            raise UsageError(f"corpus {self._folder}: chunk {extent.name[:12]}…: {error}; check the disk") from None
        if ids is None or blob_hash.name_of(ids.data.cast("B")) != extent.name:
            reason = "is missing" if ids is None else "is damaged"
            raise UsageError(
                f"corpus {self._folder}: chunk {extent.name[:12]}… {reason}; get it again, or build the corpus again"
            )
        return ids
