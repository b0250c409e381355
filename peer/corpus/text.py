"""What a peer trains on: the run's corpus, wherever its bytes come from.

A plan gives a replica a range of slots (protocol/planning/allotment.py). `data_order.sequences`, with the run's seed, says which
sequences of the corpus these are; `Text` gives their ids. `LocalText` has the whole corpus in a folder.

Shapes: n sequences, L positions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from peer.corpus.reader import CorpusReader
from peer.net.disk import Disk
from protocol.errors import UsageError, apart
from protocol.run.corpus import CorpusIndex
from protocol.run.manifest import Manifest


class Text(Protocol):
    """What a peer trains on."""

    @property
    def index(self) -> CorpusIndex:
        """Of the run's corpus."""
        ...

    async def sequences(self, slots: range) -> NDArray[np.int64]:
        """The ids [n, L + 1] of these slots, in order; waits until they are there. Raises RemoteError, UsageError."""
        ...

    def expect(self, slots: Sequence[range]) -> None:
        """These slots will be read soon, in this order, though perhaps not all, and are fetched ahead. Replaces what was expected
        before. The first may have been read in part."""
        ...

    async def held_out(self, limit: int) -> NDArray[np.int64]:
        """At most `limit` sequences [n, L + 1] of the held-out part, always the same. Raises RemoteError, UsageError."""
        ...

    async def aclose(self) -> None:
        """Ends what goes on behind the scenes."""
        ...


class LocalText:
    """A corpus that lies in a folder; nothing is fetched. `seed`: the run's."""

    def __init__(self, reader: CorpusReader, seed: bytes) -> None:
        self._reader = reader
        self._seed = seed

    @property
    def index(self) -> CorpusIndex:
        """Of the run's corpus."""
        return self._reader.index

    async def sequences(self, slots: range) -> NDArray[np.int64]:
        """The ids [n, L + 1] of these slots, in order. Raises UsageError where a chunk is missing or damaged."""
        return await asyncio.to_thread(self._reader.slots, self._seed, slots)

    def expect(self, slots: Sequence[range]) -> None:
        """Nothing is to be done: all slots are there."""

    async def held_out(self, limit: int) -> NDArray[np.int64]:
        """At most `limit` held-out sequences [n, L + 1]. Raises UsageError."""
        return await asyncio.to_thread(self._reader.held_out, limit)

    async def aclose(self) -> None:
        """Nothing goes on."""


def open_corpus(folder: Path, disk: Disk, manifest: Manifest) -> CorpusReader:
    """The run's corpus in `folder`. Raises UsageError where it is another one, or not fit for the run."""
    reader = CorpusReader(folder, disk, manifest.data.corpus)
    check(reader.index, manifest)
    return reader


def check(index: CorpusIndex, manifest: Manifest) -> None:
    """Raises UsageError where the run cannot be trained on the corpus that its manifest names."""
    differences = (
        ("train.sequence", index.sequence, manifest.train.sequence, index.sequence == manifest.train.sequence),
        (
            "model.vocab_size",
            index.vocab_size,
            manifest.model.vocab_size,
            index.vocab_size <= manifest.model.vocab_size,
        ),
        (
            "tokenizer.digest",
            *apart(index.tokenizer, manifest.tokenizer.digest),
            index.tokenizer == manifest.tokenizer.digest,
        ),
    )
    for name, built, asked, fits in differences:
        if not fits:
            raise UsageError(
                f"corpus {manifest.data.corpus[:12]}…: was built for {name} = {built}, the manifest says {asked}; the operator must"
                " build the corpus for the manifest, or write the manifest for the corpus"
            )
