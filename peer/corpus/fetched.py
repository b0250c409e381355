"""A corpus of which a peer has what it reads: fetched ahead, each range checked, kept within a limit, and served to others.

How far ahead: peer/corpus/fetched.py. From whom: origins.py, mirrors.py. What is kept: cache.py. Shapes: n sequences, L positions.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from peer import events
from peer.corpus import text
from peer.corpus.cache import TextStore
from peer.corpus.mirrors import Busy, Mirror, Mirrors
from peer.net.base import now
from peer.net.blobs import Coming, Fetcher, Place, fetch_named
from peer.net.blobs.holders import Absent, Corrupt, Holders
from peer.net.disk import Disk
from peer.net.network import Network
from peer.net.token_bucket import Cooldown
from protocol.codec import blob_hash
from protocol.errors import RemoteError, UsageError
from protocol.identity import short_peer
from protocol.run import corpus, data_order
from protocol.run.corpus import CorpusIndex, Extent
from protocol.run.manifest import Manifest
from protocol.wire import endpoints

ROUNDS = 4
MOST_ABOVE_MEAN = 1.1
MARGIN = 0.08
FIRST = 4


class Lookahead:
    """What it takes to say so. `least`: slots that are fetched together anyway."""

    def __init__(self, least: int) -> None:
        self._least = least
        self._rounds: deque[int] = deque(maxlen=ROUNDS)

    def end(self, read: int) -> None:
        """A round in which so many slots were read is over."""
        if read:
            self._rounds.append(read)

    def usual(self, given: int) -> int:
        """Slots of so many given ones that are likely to be read."""
        if not self._rounds:
            return min(given, max(self._least, given // FIRST))
        mean = sum(self._rounds) / len(self._rounds)
        return min(given, max(self._rounds), math.ceil(MOST_ABOVE_MEAN * mean))

    def target(self, given: int, read: int) -> int:
        """Slots of the given ones, from the first on, that should be here when so many were read."""
        usual = self.usual(given)
        margin = max(self._least, math.ceil(MARGIN * max(usual, read)))
        return min(given, max(usual, read + margin if read else 0))


REST_SECONDS = (2.0, 30.0)
"""How long whoever failed is not asked: at first, and at most; twice as long each time."""


class Origins(Holders):
    """Everybody who is asked for text. `nodes()`, the run's nodes now, are asked for a chunk in an order that is the same for all peers, so
    that these hear of each other; then the mirrors. `warn` hears once of each of these that fails, and of everybody who lies."""

    def __init__(self, nodes: Callable[[], Iterable[str]], mirrors: Sequence[str], warn: Callable[[str], None]) -> None:
        super().__init__(lambda line: warn(f"text: {line}"))
        self._nodes = nodes
        self._mirrors = tuple(mirrors)
        self._rests = Cooldown(*REST_SECONDS)

    def of(self, chunk: str) -> list[str]:
        """Whom to ask for a chunk, one after the other: those that do not rest."""
        nodes = sorted(self._nodes(), key=lambda node: hashlib.sha256(f"{chunk} {node}".encode()).digest())
        return [origin for origin in (*nodes, *self._mirrors) if not self.is_avoided(origin)]

    def order(self, holders: Sequence[str], size: int) -> deque[str]:
        """As they are given, those that did not answer lately behind the others."""
        return deque(sorted(dict.fromkeys(holders), key=self.is_last))

    def is_avoided(self, peer: str) -> bool:
        return super().is_avoided(peer) or self._rests.is_resting(peer, now())

    def gave(self, peer: str) -> None:
        super().gave(peer)
        self._rests.end(peer)

    def failed(self, peer: str, error: RemoteError) -> None:
        """What was asked of it at the same time fails, too: that counts once."""
        super().failed(peer, error)
        is_known = peer in self._mirrors or peer in self._nodes()
        if isinstance(error, Absent) and not is_known:
            return
        if is_known and not self._rests.times(peer) and not isinstance(error, Absent | Corrupt):
            self._warn(f"{error}; others are asked")
        if not self._rests.is_resting(peer, now()) or isinstance(error, Busy):
            self._rests.begin(peer, now(), error.seconds if isinstance(error, Busy) else 0.0)


AHEAD = 16
"""Ranges that are fetched at once: 512 KiB, 0.04 s of a line of 100 Mb/s, and all that a kill can cost."""
URGENT = 8
"""Further ranges at once, while a reader waits."""
LOOK_SECONDS = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Seconds: `retry`, until a range that nobody gave is asked for again; `hopeless`, without anything that came after which who waits
    is told that it cannot be had; `silence`, after which who does not answer counts as gone."""

    retry: float = 1.0
    hopeless: float = 45.0
    silence: float = 10.0


PATIENCE = Patience()


class RangeFetcher:
    """See the module's docstring. `fetched_bytes`: of all ranges that came; `quiet` is called when all that is wanted is here."""

    def __init__(
        self,
        store: TextStore,
        fetcher: Fetcher,
        origins: Origins,
        warn: Callable[[str], None],
        quiet: Callable[[], None] = lambda: None,
        patience: Patience = PATIENCE,
    ) -> None:
        self.fetched_bytes = 0
        self._store = store
        self._fetcher = fetcher
        self._origins = origins
        self._warn = warn
        self._quiet = quiet
        self._patience = patience
        self._todo: deque[Place] = deque()
        self._urgent: Counter[Place] = Counter()
        self._tasks: dict[Place, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._last: RemoteError | None = None
        self._paused_until = float("-inf")
        self._told = False
        self._again: asyncio.TimerHandle | None = None

    @property
    def is_busy(self) -> bool:
        """Whether something is under way, or still to be asked for."""
        return bool(self._tasks or self._todo or self._urgent)

    def want(self, places: Iterable[Place]) -> None:
        """These will be read, in this order; replaces what was wanted before."""
        self._todo = deque(place for place in places if not self._store.holds(place))
        self._pump()

    async def need(self, places: Sequence[Place]) -> None:
        """Returns when these are here. Raises RemoteError when they cannot be had."""
        began = now()
        missing = waited = [place for place in places if not self._store.holds(place)]
        self._urgent.update(waited)
        try:
            while missing:
                self._pump()
                await self._any_change()
                left = [place for place in missing if not self._store.holds(place)]
                if len(left) < len(missing):
                    began = now()
                elif now() - began > self._patience.hopeless:
                    raise self._last or RemoteError("nobody", "text: nobody gives it; it is tried again")
                missing = left
        finally:
            self._urgent -= Counter(waited)

    async def aclose(self) -> None:
        """Ends what is under way; what came stays."""
        self._todo.clear()
        if self._again is not None:
            self._again.cancel()
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await self._fetcher.aclose()

    def _pump(self) -> None:
        """Begins as many fetches as may be under way. Ranges fetched ahead do not delay a reader that waits."""
        if now() < self._paused_until:
            return
        for place in self._urgent:
            if len(self._tasks) < AHEAD + URGENT and not self._store.holds(place):
                self._begin(place)
        waits: list[Place] = []  # for its chunk's leaves
        while self._todo and len(self._tasks) < AHEAD and len(waits) < AHEAD:
            place = self._todo.popleft()
            if not self._store.holds(place) and not self._begin(place):
                waits.append(place)
        self._todo.extendleft(reversed(waits))

    def _begin(self, place: Place) -> bool:
        """Fetches a range, or first the leaves of its chunk; whether the range is on its way."""
        wanted = place if self._store.holds(place.leaves) else place.leaves
        if wanted not in self._tasks:
            self._tasks[wanted] = task = asyncio.create_task(self._fetch(wanted))
            task.add_done_callback(lambda task: self._ended(wanted, task))
        return wanted == place

    def _ended(self, place: Place, task: asyncio.Task[None]) -> None:
        del self._tasks[place]
        if not task.cancelled():
            task.result()
            self._changed.set()
            self._changed = asyncio.Event()
            self._pump()
            if not self.is_busy:
                self._quiet()

    async def _fetch(self, place: Place) -> None:
        name, origins = self._store.name(place), self._origins.of(place.name)
        try:
            if not origins:
                raise self._last or RemoteError("nobody", "text: nobody can be asked for it; it is tried again")
            self._store.remove(name)  # what is there is damaged
            await self._fetcher.fetch(name, place.length, origins, owner=name, place=place)
        except RemoteError as error:
            self._last = error if error is self._last else RemoteError(error.peer, f"text: {error}")
            self._todo.appendleft(place)
            self._pause()
        else:
            self.fetched_bytes += place.length
            self._told = False

    def _pause(self) -> None:
        """No origin gave a range: pauses before the next try."""
        self._paused_until = now() + self._patience.retry
        if not self._told:
            self._told = True
            self._warn(f"text: nobody gives what is to be read ({self._last}); it is tried again")
        if self._again is not None:
            self._again.cancel()
        self._again = asyncio.get_running_loop().call_later(self._patience.retry, self._pump)

    async def _any_change(self) -> None:
        try:
            async with asyncio.timeout(LOOK_SECONDS):
                await self._changed.wait()
        except TimeoutError:
            return


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
        self._lookahead = Lookahead(-(-blob_hash.RANGE // index.stride))
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
        for numbers in data_order.sequences(self._seed, self._index.sequences, slots):
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
            begin = extent.ranges.start * blob_hash.RANGE
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """What it takes to fetch text."""

    network: Network
    folder: Path
    """For what is kept."""
    limit: int
    """Bytes of it, at most."""
    disk: Disk
    patience: Patience = PATIENCE
    mirrors: Mirrors | None = None
    """The client of the manifest's mirrors, which is closed with the text; None: the usual one."""

    @property
    def nodes(self) -> list[str]:
        """The operators' nodes now, without ourselves."""
        return [node for node in self.network.directory.operators if node != self.network.transport.peer_id]


async def open_text(manifest: Manifest, access: Access) -> FetchedText:
    """The run's text. Raises RemoteError where nobody has its index, UsageError."""
    network, directory = access.network, access.network.directory
    mirrors = access.mirrors or Mirrors()
    try:
        places = mirrors.all(manifest.data.mirrors)
        await asyncio.to_thread(access.disk.make_folder, access.folder)
        index = await _index(manifest, access, places)
        text.check(index, manifest)
        store = await asyncio.to_thread(TextStore, access.folder, access.limit, access.disk, network.warn)
    except BaseException:
        await mirrors.aclose()
        raise
    sources = {mirror.name: mirror for mirror in places}
    origins = Origins(lambda: access.nodes, list(sources), network.warn)
    fetcher = Fetcher(
        network.transport,
        store,
        reach=directory.reach,
        lost=directory.lost,
        timeout=access.patience.silence,
        holders=origins,
        sources=sources,
    )
    closes = (mirrors.aclose,)
    return FetchedText(index, manifest.seed_bytes, store, fetcher, origins, network.emit, access.patience, closes)


async def _index(manifest: Manifest, access: Access, mirrors: list[Mirror]) -> CorpusIndex:
    """The corpus's index: from our disk, a bootstrap node or a mirror. Raises RemoteError."""
    digest, path = manifest.data.corpus, access.folder / corpus.INDEX
    try:
        raw = await asyncio.to_thread(access.disk.read, path)
    except OSError:
        raw = b""
    if blob_hash.name_of(raw) != digest:
        raw = await _fetch_index(digest, access, mirrors)
        with contextlib.suppress(UsageError):  # a full disk shows again where it matters
            await asyncio.to_thread(access.disk.write, path, raw)
    return corpus.from_bytes(raw, f"{digest[:12]}…")


async def _fetch_index(digest: str, access: Access, mirrors: list[Mirror]) -> bytes:
    failures: list[str] = []
    places: list[str | Mirror] = [*access.nodes, *mirrors]
    for place in places:
        name = place.name if isinstance(place, Mirror) else short_peer(place)
        try:
            if isinstance(place, Mirror):
                raw = await place.whole(corpus.INDEX, corpus.MAX_INDEX)
            else:
                await access.network.directory.reach(place)
                raw = await fetch_named(access.network.transport, place, endpoints.CORPUS_NAME, limit=corpus.MAX_INDEX)
        except RemoteError as error:
            failures.append(str(error))
            continue
        if blob_hash.name_of(raw) == digest:
            return raw
        failures.append(f"index from {name}: not that of the run's corpus")
        access.network.warn(f"text: {failures[-1]}; others are asked")
    why = failures[-1] if failures else "nobody is asked"
    raise RemoteError(
        "nobody",
        f"text: nobody gives the index of the run's corpus ({why}); tell the operator, or name its folder with --corpus",
    )
