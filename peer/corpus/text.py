"""The training text of a peer: the run's corpus, read from a folder or from elsewhere.

`corpus.sequences` says which sequences a slot is; a `Text` gives their ids. Shapes: n sequences, L positions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from peer.net.disk import Disk
from peer.net.lru import LruDict
from protocol.codec import blob_hash
from protocol.errors import UsageError, apart, os_errors
from protocol.run import corpus
from protocol.run.corpus import CHUNKS, INDEX, CorpusIndex, Extent
from protocol.run.manifest import Manifest

_CACHED_CHUNKS = 2
"""Neighbouring sequences are in one chunk, or across the edge of two."""


class CorpusReader:
    """Reads the corpus in `folder`. `digest`: that it must have, if any. Raises UsageError."""

    def __init__(self, folder: Path, disk: Disk, digest: str = "") -> None:
        self.folder = folder
        self._disk = disk
        with os_errors(f"corpus {folder}", "give the folder of a `potluck data build` that has finished"):
            self.raw = disk.read(folder / INDEX)
            """The index, as it is named by its digest."""
        self.index = corpus.from_bytes(self.raw, str(folder))
        self.digest = blob_hash.name_of(self.raw)
        if digest and self.digest != digest:
            has, wanted = apart(self.digest, digest)
            raise UsageError(f"corpus {folder}: its digest is {has}, not {wanted}; use the run's own corpus")
        self._dtype = np.dtype(f"<u{self.index.id_bytes}")
        self._chunks = LruDict[str, NDArray[np.unsignedinteger]](_CACHED_CHUNKS)

    def sequences(self, at: Sequence[range]) -> NDArray[np.int64]:
        """Returns the training sequences of these numbers: ids [n, L + 1]. Raises IndexError, UsageError."""
        rows = [self._rows(extent) for numbers in at for extent in self.index.extents(numbers)]
        return np.concatenate([np.zeros((0, self.index.sequence + 1), np.int64), *rows]).astype(np.int64, copy=False)

    def slots(self, seed: bytes, at: range) -> NDArray[np.int64]:
        """Returns what the slots `at` of a run with this seed read: ids [n, L + 1]. Raises UsageError."""
        return self.sequences(corpus.sequences(seed, self.index.sequences, at))

    def held_out(self, limit: int) -> NDArray[np.int64]:
        """Returns the first `limit` held-out sequences, whose order is pseudo-random: [n, L + 1]. Raises UsageError."""
        extent = self.index.held_out_chunk()
        count = min(limit, self.index.held_out_sequences)
        return self._rows(Extent(extent.name, extent.size, 0, count * self.index.stride)).astype(np.int64)

    def unigram_entropy(self) -> float:
        """Returns the entropy of the ids to be predicted, in nats a token: the best loss without context.

        Reads the whole corpus. Raises UsageError.
        """
        counts = np.zeros(self.index.vocab_size, np.int64)
        for number in range(self.index.n_chunks):
            targets = self._rows(self.index.chunk(number))[:, 1:]
            counts += np.bincount(targets.reshape(-1), minlength=len(counts))
        share = counts[counts > 0] / counts.sum()
        return float(-(share * np.log(share)).sum())

    def require_whole(self, name: str) -> None:
        """Raises UsageError if chunks are missing; `name`: of the folder, for the error."""
        if missing := self.missing():
            raise UsageError(
                f"{name}: {len(missing)} of its chunks are missing or cut off, such as {missing[0][:12]}…;"
                " copy it again, or build it again"
            )

    def missing(self) -> list[str]:
        """Returns the chunks whose files are missing or have another size."""
        chunks = [self.index.chunk(number) for number in range(self.index.n_chunks)]
        return [chunk.name for chunk in (*chunks, self.index.held_out_chunk()) if not self._is_there(chunk)]

    def _is_there(self, chunk: Extent) -> bool:
        try:
            return self._disk.stat(self.folder / CHUNKS / chunk.name)[0] == chunk.size
        except OSError:
            return False

    def _rows(self, extent: Extent) -> NDArray[np.unsignedinteger]:
        """Returns the sequences in these bytes of a chunk: [n, L + 1]."""
        ids = self._chunks.get(extent.name)
        self._chunks[extent.name] = ids = self._checked(extent) if ids is None else ids
        size = self.index.id_bytes
        return ids[extent.start // size : extent.end // size].reshape(-1, self.index.sequence + 1)

    def _checked(self, extent: Extent) -> NDArray[np.unsignedinteger]:
        # other peers read these errors in a withdrawal, so they name no folder of this machine
        path, chunk = self.folder / CHUNKS / extent.name, f"corpus {self.digest[:12]}…: chunk {extent.name[:12]}…"
        with os_errors(chunk, "check the disk"):
            raw = self._disk.read(path) if self._is_there(extent) else None
        if raw is None or blob_hash.name_of(raw) != extent.name:
            reason = "is missing" if raw is None else "is damaged"
            raise UsageError(f"{chunk} {reason}; get it again, or build the corpus again")
        return np.frombuffer(raw, self._dtype)


class Text(Protocol):
    """The training text of a peer."""

    @property
    def index(self) -> CorpusIndex: ...

    async def sequences(self, slots: range) -> NDArray[np.int64]:
        """Returns the ids [n, L + 1] of these slots, in order, once they are there. Raises RemoteError, UsageError."""
        ...

    def expect(self, slots: Sequence[range]) -> None:
        """Has these slots fetched ahead, in place of those before: they will be read in this order, perhaps not all."""
        ...

    async def held_out(self, limit: int) -> NDArray[np.int64]:
        """Returns `limit` held-out sequences [n, L + 1] at most, always the same. Raises RemoteError, UsageError."""
        ...

    async def aclose(self) -> None: ...


class LocalText:
    """A corpus in a folder; see Text. `seed`: the run's."""

    def __init__(self, reader: CorpusReader, seed: bytes) -> None:
        self.index = reader.index
        self._reader = reader
        self._seed = seed

    async def sequences(self, slots: range) -> NDArray[np.int64]:
        return await asyncio.to_thread(self._reader.slots, self._seed, slots)

    def expect(self, slots: Sequence[range]) -> None:
        """Does nothing: all slots are there."""

    async def held_out(self, limit: int) -> NDArray[np.int64]:
        return await asyncio.to_thread(self._reader.held_out, limit)

    async def aclose(self) -> None:
        """Does nothing."""


def open_corpus(folder: Path, disk: Disk, manifest: Manifest) -> CorpusReader:
    """The run's corpus in `folder`. Raises UsageError where it is another one, or not fit for the run."""
    reader = CorpusReader(folder, disk, manifest.data.corpus)
    check(reader.index, manifest)
    return reader


def check(index: CorpusIndex, manifest: Manifest) -> None:
    """Raises UsageError where the run cannot be trained on the corpus that its manifest names."""
    sequence, tokenizer = manifest.train.sequence, manifest.tokenizer.digest
    wrong: tuple[str, object, object] | None = None
    if index.sequence != sequence:
        wrong = "train.sequence", index.sequence, sequence
    elif index.vocab_size > manifest.model.vocab_size:
        wrong = "model.vocab_size", index.vocab_size, manifest.model.vocab_size
    elif index.tokenizer != tokenizer:
        wrong = "tokenizer.digest", *apart(index.tokenizer, tokenizer)
    if wrong is not None:
        name, built, asked = wrong
        raise UsageError(
            f"corpus {manifest.data.corpus[:12]}…: was built for {name} = {built}, the manifest says"
            f" {asked}; the operator must build the corpus for the manifest, or write the manifest for the corpus"
        )
