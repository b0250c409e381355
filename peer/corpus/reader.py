"""Reads a corpus from its folder; a chunk is checked against its name when it is read from disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from peer.net.disk import Disk
from protocol.codec import blob_hash
from protocol.errors import UsageError, apart
from protocol.run import corpus
from protocol.run.corpus import CHUNKS, INDEX, Extent

_KEPT = 2
"""Chunks that stay in memory: what is read one after the other lies in one, or across the edge of two."""


class CorpusReader:
    """The sequences of the corpus in `folder`. `digest`: the one that it must have, if any. Raises UsageError."""

    def __init__(self, folder: Path, disk: Disk, digest: str = "") -> None:
        self.folder = folder
        self._disk = disk
        try:
            self.raw = disk.read(folder / INDEX)
            """The index, as it is named by its digest."""
        except OSError as error:
            raise UsageError(
                f"corpus {folder}: {error.strerror}; give the folder of a `potluck data build` that has finished"
            ) from None
        self.index = corpus.from_bytes(self.raw, str(folder))
        self.digest = blob_hash.name_of(self.raw)
        if digest and self.digest != digest:
            has, wanted = apart(self.digest, digest)
            raise UsageError(f"corpus {folder}: its digest is {has}, not {wanted}; use the run's own corpus")
        self._dtype = np.dtype(f"<u{self.index.id_bytes}")
        self._chunks: dict[str, NDArray[np.unsignedinteger]] = {}

    def sequences(self, at: Sequence[range]) -> NDArray[np.int64]:
        """The training sequences of these numbers, in order: ids int64 [n, L + 1]. Raises IndexError, UsageError."""
        rows = [self._rows(extent) for numbers in at for extent in self.index.extents(numbers)]
        return np.concatenate([np.zeros((0, self.index.sequence + 1), np.int64), *rows]).astype(np.int64, copy=False)

    def slots(self, seed: bytes, at: range) -> NDArray[np.int64]:
        """What the slots `at` of a run with this seed read: ids int64 [n, L + 1]. Raises UsageError."""
        return self.sequences(corpus.sequences(seed, self.index.sequences, at))

    def held_out(self, limit: int) -> NDArray[np.int64]:
        """At most `limit` held-out sequences: int64 [n, L + 1]. They are in a pseudo-random order, so the first are as good as any.
        Raises UsageError."""
        extent = self.index.held_out_chunk()
        count = min(limit, self.index.held_out_sequences)
        return self._rows(Extent(extent.name, extent.size, 0, count * self.index.stride)).astype(np.int64)

    def unigram_entropy(self) -> float:
        """Nats a token: of the distribution of the ids that are to be predicted in training, what a model that ignores context reaches
        at best. Reads the whole corpus. Raises UsageError."""
        counts = np.zeros(self.index.vocab_size, np.int64)
        for number in range(self.index.n_chunks):
            targets = self._rows(self.index.chunk(number))[:, 1:]
            counts += np.bincount(targets.reshape(-1), minlength=len(counts))
        share = counts[counts > 0] / counts.sum()
        return float(-(share * np.log(share)).sum())

    def require_whole(self, name: str) -> None:
        """Raises UsageError where chunks are missing; `name` is what the folder is called in it."""
        missing = self.missing()
        if missing:
            raise UsageError(
                f"{name}: {len(missing)} of its chunks are missing or cut off, such as {missing[0][:12]}…; copy it again, or build it"
                " again"
            )

    def missing(self) -> list[str]:
        """The chunks whose files are not there, or have another size; nothing else is looked at."""
        chunks = [self.index.chunk(number) for number in range(self.index.n_chunks)]
        return [chunk.name for chunk in (*chunks, self.index.held_out_chunk()) if not self._is_there(chunk)]

    def _is_there(self, chunk: Extent) -> bool:
        try:
            return self._disk.stat(self.folder / CHUNKS / chunk.name)[0] == chunk.size
        except OSError:
            return False

    def _rows(self, extent: Extent) -> NDArray[np.unsignedinteger]:
        """The sequences in these bytes of a chunk: [n, L + 1]."""
        ids = self._chunks.pop(extent.name, None)
        if ids is None:
            ids = self._checked(extent)
        self._chunks[extent.name] = ids
        while len(self._chunks) > _KEPT:
            del self._chunks[next(iter(self._chunks))]
        size = self.index.id_bytes
        return ids[extent.start // size : extent.end // size].reshape(-1, self.index.sequence + 1)

    def _checked(self, extent: Extent) -> NDArray[np.unsignedinteger]:
        # a withdrawal repeats these errors for everybody: they name no folder of this machine
        path, chunk = self.folder / CHUNKS / extent.name, f"corpus {self.digest[:12]}…: chunk {extent.name[:12]}…"
        try:
            raw = self._disk.read(path) if self._is_there(extent) else None
        except OSError as error:
            raise UsageError(f"{chunk}: {error.strerror}; check the disk") from None
        if raw is None or blob_hash.name_of(raw) != extent.name:
            reason = "is missing" if raw is None else "is damaged"
            raise UsageError(f"{chunk} {reason}; get it again, or build the corpus again")
        return np.frombuffer(raw, self._dtype)
