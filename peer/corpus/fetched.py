"""A corpus of which a peer has what it reads: fetched ahead, each range checked, kept within a limit, and served to others.

How far ahead: peer/corpus/lookahead.py. From whom: origins.py, mirrors.py. What is kept: cache.py. Shapes: n sequences, L positions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from peer import events
from peer.corpus.cache import TextStore
from peer.corpus.lookahead import Lookahead
from peer.corpus.origins import Origins
from peer.corpus.range_fetcher import PATIENCE, Patience, RangeFetcher
from peer.net.base import now
from peer.net.blobs import Coming, Fetcher, Place
from protocol.codec import blob_hash
from protocol.errors import UsageError
from protocol.run import corpus
from protocol.run.corpus import CorpusIndex, Extent

FULL = 0.8
"""Share of what can be kept that is fetched ahead."""
MOST_AHEAD = 256 << 20
"""Bytes."""
TRIES = 5
"""How often what was damaged on disk between its coming and its reading is fetched again."""


@dataclass(slots=True)
class Counts:
    """`read_bytes`: of sequences that were trained on. `waits`: how often a reader found something missing; `reads`: how often one read."""

    read_bytes: int = 0
    reads: int = 0
    waits: int = 0


class FetchedText:
    """See the module's docstring, and Text. `seed`: the run's; `closes` are called in the end."""

    def __init__(
        self,
        index: CorpusIndex,
        seed: bytes,
        store: TextStore,
        fetcher: Fetcher,
        origins: Origins,
        emit: events.Emit,
        patience: Patience = PATIENCE,
        closes: Sequence[Callable[[], Awaitable[None]]] = (),
    ) -> None:
        self._closes = closes
        self.counts = Counts()
        self._index = index
        self._seed = seed
        self._store = store
        self._emit = emit
        self._coming = fetcher.coming
        self._fetcher = RangeFetcher(store, fetcher, origins, self._warn, self._quiet, patience)
        self._dtype = np.dtype(f"<u{index.id_bytes}")
        self._lookahead = Lookahead(-(-blob_hash.RANGE_BYTES // index.stride))
        self._expected: list[range] = []
        self._read: dict[range, int] = {}
        self._began: float | None = None
        self._told = False

    @property
    def index(self) -> CorpusIndex:
        """Of the run's corpus."""
        return self._index

    @property
    def fetched_bytes(self) -> int:
        """Bytes that came, and were right."""
        return self._fetcher.fetched_bytes

    @property
    def is_fetching(self) -> bool:
        """Whether text that will be read soon is still missing."""
        return self._fetcher.is_busy

    async def sequences(self, slots: range) -> NDArray[np.int64]:
        """The ids [n, L + 1] of these slots, in order; waits until they are there. Raises RemoteError, UsageError."""
        extents = list(self._extents(slots))
        self.counts.reads += 1
        self.counts.waits += not all(map(self._store.holds, _places(extents)))
        found = await self._rows(extents)
        self.counts.read_bytes += found.size * self._index.id_bytes
        for expected in self._expected:
            if expected.start <= slots.start and slots.stop <= expected.stop:
                self._read[expected] = max(self._read.get(expected, 0), slots.stop - expected.start)
        self._look_ahead()
        return found

    def expect(self, slots: Sequence[range]) -> None:
        """These slots will be read soon, in this order, though perhaps not all. Replaces what was expected before. The first may have been
        read in part."""
        new = [given for given in slots if len(given)]
        for old in self._expected:
            if old not in new:
                self._lookahead.end(self._read.pop(old, 0))
        self._expected = new
        self._look_ahead()

    async def held_out(self, limit: int) -> NDArray[np.int64]:
        """At most `limit` held-out sequences [n, L + 1], always the same. Raises RemoteError, UsageError."""
        chunk, count = self._index.held_out_chunk(), min(limit, self._index.held_out_sequences)
        return await self._rows([Extent(chunk.name, chunk.size, 0, count * self._index.stride)] if count else [])

    def read(self, place: Place) -> bytes:
        """A range of a chunk, or its leaves, for others; empty where they are not here."""
        return self._store.read(place)

    def coming(self, place: Place, peer: str, named_by: str) -> Coming | None:
        """The same, where they are on their way (see Fetcher.coming)."""
        return self._coming(self._store.name(place), peer, named_by)

    async def aclose(self) -> None:
        """Ends what is under way; what came stays on disk."""
        await self._fetcher.aclose()
        for close in self._closes:
            await close()

    # --- ahead

    def _look_ahead(self) -> None:
        """Has fetched what will be read."""
        room, places, seen = min(MOST_AHEAD, int(FULL * self._store.capacity)), list[Place](), set[Place]()
        for given in self._expected:
            read = self._read.get(given, 0)
            begin = max(0, read - 1)
            target = self._lookahead.target(len(given), read)
            for place in _places(self._extents(range(given.start + begin, given.start + target))):
                if place not in seen:
                    seen.add(place)
                    places.append(place)
                    room -= place.length
                if room < 0:
                    break
            if room < 0:
                break
        if self._began is None and not all(map(self._store.holds, places)):  # who comes back has the first ones
            self._began = now()
        self._store.need(places)
        self._fetcher.want(places)

    def _extents(self, slots: range) -> Iterator[Extent]:
        for numbers in corpus.sequences(self._seed, self._index.sequences, slots):
            yield from self._index.extents(numbers)

    # --- reading

    async def _rows(self, extents: list[Extent]) -> NDArray[np.int64]:
        places = list(dict.fromkeys(_places(extents)))
        for _ in range(TRIES):
            await self._fetcher.need(places)
            data = await asyncio.to_thread(self._bytes, extents)
            if data is not None:
                ids = np.frombuffer(data, self._dtype).reshape(-1, self._index.sequence + 1)
                return ids.astype(np.int64)
        raise UsageError("text: what was fetched is gone or damaged whenever it is read; check the disk")

    def _bytes(self, extents: list[Extent]) -> bytes | None:
        """The bytes of all extents; None where some are not here after all."""
        out = bytearray()
        for extent in extents:
            begin = extent.ranges.start * blob_hash.RANGE_BYTES
            self._store.touch(Place(extent.name, extent.size, -1))
            pieces = [self._store.read(Place(extent.name, extent.size, index)) for index in extent.ranges]
            if not all(pieces):
                return None
            out += b"".join(pieces)[extent.start - begin : extent.end - begin]
        return bytes(out)

    # --- what is told

    def _quiet(self) -> None:
        """All that is wanted is here."""
        if not self._told and self._began is not None and self.fetched_bytes:
            self._told = True
            tokens = self._index.sequences * self._index.sequence
            self._emit(
                events.TextFetched(bytes=self.fetched_bytes, seconds=round(now() - self._began, 3), tokens=tokens)
            )

    def _warn(self, line: str) -> None:
        self._emit(events.Warning(text=line))


def _places(extents: Iterable[Extent]) -> Iterator[Place]:
    """What has to be here to read these bytes, in order."""
    for extent in extents:
        yield Place(extent.name, extent.size, -1)
        for index in extent.ranges:
            yield Place(extent.name, extent.size, index)
