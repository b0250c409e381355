"""A corpus of which a peer has what it reads: fetched ahead, each range checked, kept within a limit, served to others.

Each range is a small blob for the downloader (peer/net/blobs/fetching.py). A plan gives a replica more slots than it is
expected to read (protocol/planning/allotment.py). So what is fetched at once is what was read in the last rounds, and
from there on a little more than was read already:

    max(usual, read + MARGIN max(usual, read)),        usual = min(most, MOST_ABOVE_MEAN mean) of the last ROUNDS rounds

all in slots; in the first round a quarter of the given slots. Shapes: n sequences, L positions.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from peer import events
from peer.corpus import text
from peer.corpus.mirrors import Mirror, MirrorBusy, Mirrors
from peer.net.base import cancel, now, wait_for_event
from peer.net.blobs import BlobStore, Coming, Fetcher, Place, fetch_named
from peer.net.blobs.holders import Absent, Corrupt, Holders
from peer.net.blobs.store import LEAVES
from peer.net.disk import Disk
from peer.net.lru import LruDict
from peer.net.network import Network
from peer.net.rate_limits import Cooldown
from protocol.codec import blob_hash
from protocol.errors import RemoteError, UsageError
from protocol.identity import short_peer
from protocol.run import corpus
from protocol.run.corpus import CorpusIndex, Extent
from protocol.run.manifest import Manifest
from protocol.wire import endpoints

# --- cache

MEMORY_BYTES = 32 << 20
RETRY_SECONDS = 60.0
CHUNKS = 1024


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
        self._leaves = LruDict[str, tuple[int, bytes]](CHUNKS)  # with the chunk's size
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
        """Returns whether a range, or leaves, are here, unless they were damaged since."""
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
        return leaves if size == place.size else b""


# --- fetched

ROUNDS = 4
MOST_ABOVE_MEAN = 1.1
MARGIN = 0.08
FIRST_ROUND_PART = 4
CACHE_SHARE = 0.8
"""Share of the cache that is filled ahead of reading."""
MAX_AHEAD_BYTES = 256 << 20
MAX_AHEAD = 16
"""Ranges that are fetched at once: 512 KiB, 0.04 s of a link of 100 Mb/s, and all that a kill can cost."""
MAX_URGENT = 8
"""Further ranges at once, while a reader waits."""
MAX_READ_TRIES = 5
"""How often a range that was damaged on disk before it was read is fetched again."""
POLL_SECONDS = 0.25
REST_SECONDS = (2.0, 30.0)
"""An origin that failed is not asked for so long: at first, and at most; twice as long each time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchTimeouts:
    """Seconds."""

    retry: float = 1.0  # until a range that no origin gave is asked for again
    hopeless: float = 45.0  # a reader fails after so long without a new range
    silence: float = 10.0  # an origin that does not answer counts as gone after so long


FETCH_TIMEOUTS = FetchTimeouts()


class Lookahead:
    """Decides how many slots are fetched ahead. `least`: slots that one range has anyway."""

    def __init__(self, least: int) -> None:
        self._least = least
        self._rounds: deque[int] = deque(maxlen=ROUNDS)

    def end(self, read: int) -> None:
        """Ends a round in which `read` slots were read."""
        if read:
            self._rounds.append(read)

    def usual(self, given: int) -> int:
        """Slots that are likely to be read of those that a plan has given."""
        if not self._rounds:
            return min(given, max(self._least, given // FIRST_ROUND_PART))
        mean = sum(self._rounds) / len(self._rounds)
        return min(given, max(self._rounds), math.ceil(MOST_ABOVE_MEAN * mean))

    def target(self, given: int, read: int) -> int:
        """Slots, from the first given one on, that should be here once `read` of them were read."""
        usual = self.usual(given)
        margin = max(self._least, math.ceil(MARGIN * max(usual, read)))
        return min(given, max(usual, read + margin if read else 0))


class Origins(Holders):
    """The holders of text: the run's bootstrap nodes, peers that these name, and mirrors.

    Nodes are asked for a chunk in an order that all peers share, so that they hear of each other; then the mirrors.

    nodes: returns the run's nodes
    warn: called once for each node or mirror that fails, and for each holder that lies
    """

    def __init__(self, nodes: Callable[[], Iterable[str]], mirrors: Sequence[str], warn: Callable[[str], None]) -> None:
        super().__init__(lambda line: warn(f"text: {line}"))
        self._nodes = nodes
        self._mirrors = tuple(mirrors)
        self._rests = Cooldown(*REST_SECONDS)

    def of(self, chunk: str) -> list[str]:
        """Returns the origins to ask for a chunk, in order, without those that rest."""
        nodes = sorted(self._nodes(), key=lambda node: hashlib.sha256(f"{chunk} {node}".encode()).digest())
        return [origin for origin in (*nodes, *self._mirrors) if not self.is_avoided(origin)]

    def order(self, holders: Sequence[str], size: int) -> deque[str]:
        """Returns them as they are given, those that did not answer lately last."""
        return deque(sorted(dict.fromkeys(holders), key=self.is_last))

    def is_avoided(self, peer: str) -> bool:
        return super().is_avoided(peer) or self._rests.is_resting(peer, now())

    def gave(self, peer: str) -> None:
        super().gave(peer)
        self._rests.end(peer)

    def failed(self, peer: str, error: RemoteError) -> None:
        """Several requests that fail at the same time count once."""
        super().failed(peer, error)
        is_known = peer in self._mirrors or peer in self._nodes()
        if isinstance(error, Absent) and not is_known:
            return
        if is_known and not self._rests.times(peer) and not isinstance(error, Absent | Corrupt):
            self._warn(f"{error}; others are asked")
        if not self._rests.is_resting(peer, now()) or isinstance(error, MirrorBusy):
            self._rests.begin(peer, now(), error.seconds if isinstance(error, MirrorBusy) else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextAccess:
    """The transport and limits of text fetching."""

    network: Network
    folder: Path  # of the cache
    limit: int  # bytes of the cache
    disk: Disk
    patience: FetchTimeouts = FETCH_TIMEOUTS
    mirrors: Mirrors | None = None  # the client of the manifest's mirrors, closed with the text; None: a new one

    @property
    def nodes(self) -> list[str]:
        """The operators' nodes now, without ourselves."""
        return [node for node in self.network.directory.operators if node != self.network.transport.peer_id]


@dataclass(eq=False)
class FetchedText:
    """See the module's docstring, and peer.corpus.text.Text. Made by `open_text`.

    fetched_bytes: of all ranges that came and were right
    read_bytes: of sequences that were read
    waits: how often a reader found something missing
    """

    index: CorpusIndex
    seed: bytes
    store: TextStore
    origins: Origins
    fetcher: Fetcher
    access: TextAccess
    mirrors: Mirrors

    def __post_init__(self) -> None:
        self.fetched_bytes = self.read_bytes = self.waits = 0
        self._network = self.access.network
        self._patience = self.access.patience
        self._dtype = np.dtype(f"<u{self.index.id_bytes}")
        self._lookahead = Lookahead(-(-blob_hash.RANGE_BYTES // self.index.stride))
        self._expected: list[range] = []
        self._read: dict[range, int] = {}
        self._began: float | None = None
        self._has_reported = False
        self._todo: deque[Place] = deque()
        self._urgent: Counter[Place] = Counter()
        self._tasks: dict[Place, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._last: RemoteError | None = None
        self._paused_until = float("-inf")
        self._has_warned = False
        self._again: asyncio.TimerHandle | None = None

    @property
    def is_fetching(self) -> bool:
        """Whether text that will be read soon is still missing."""
        return bool(self._tasks or self._todo or self._urgent)

    async def sequences(self, slots: range) -> NDArray[np.int64]:
        extents = list(self._extents(slots))
        self.waits += not all(map(self.store.holds, _places(extents)))
        found = await self._rows(extents)
        self.read_bytes += found.size * self.index.id_bytes
        for expected in self._expected:
            if expected.start <= slots.start and slots.stop <= expected.stop:
                self._read[expected] = max(self._read.get(expected, 0), slots.stop - expected.start)
        self._look_ahead()
        return found

    def expect(self, slots: Sequence[range]) -> None:
        new = [given for given in slots if len(given)]
        for old in self._expected:
            if old not in new:
                self._lookahead.end(self._read.pop(old, 0))
        self._expected = new
        self._look_ahead()

    async def held_out(self, limit: int) -> NDArray[np.int64]:
        chunk, count = self.index.held_out_chunk(), min(limit, self.index.held_out_sequences)
        return await self._rows([Extent(chunk.name, chunk.size, 0, count * self.index.stride)] if count else [])

    def read(self, place: Place) -> bytes:
        """Returns a range of a chunk, or its leaves, for other peers; empty if it is not here."""
        return self.store.read(place)

    def coming(self, place: Place, peer: str, named_by: str) -> Coming | None:
        """See Fetcher.coming."""
        return self.fetcher.coming(self.store.name(place), peer, named_by)

    async def aclose(self) -> None:
        """Ends what is under way; what came stays on disk."""
        self._todo.clear()
        if self._again is not None:
            self._again.cancel()
        await cancel(*self._tasks.values())
        await self.fetcher.aclose()
        await self.mirrors.aclose()

    # --- reading

    async def _rows(self, extents: list[Extent]) -> NDArray[np.int64]:
        places = list(dict.fromkeys(_places(extents)))
        for _ in range(MAX_READ_TRIES):
            await self._need(places)
            data = await asyncio.to_thread(self._bytes, extents)
            if data is not None:
                ids = np.frombuffer(data, self._dtype).reshape(-1, self.index.sequence + 1)
                return ids.astype(np.int64)
        raise UsageError("text: what was fetched is gone or damaged whenever it is read; check the disk")

    def _bytes(self, extents: list[Extent]) -> bytes | None:
        """Returns the bytes of all extents, None if some are not here after all."""
        out = bytearray()
        for extent in extents:
            begin = extent.ranges.start * blob_hash.RANGE_BYTES
            self.store.touch(Place(extent.name, extent.size, -1))
            pieces = [self.store.read(Place(extent.name, extent.size, index)) for index in extent.ranges]
            if not all(pieces):
                return None
            out += b"".join(pieces)[extent.start - begin : extent.end - begin]
        return bytes(out)

    def _extents(self, slots: range) -> Iterator[Extent]:
        for numbers in corpus.sequences(self.seed, self.index.sequences, slots):
            yield from self.index.extents(numbers)

    # --- fetching

    def _look_ahead(self) -> None:
        """Has what will be read fetched, in order, as far as the cache has room."""
        room = min(MAX_AHEAD_BYTES, int(CACHE_SHARE * self.store.capacity))
        places: dict[Place, None] = {}
        for place in self._ahead():
            if place not in places:
                places[place] = None
                room -= place.length
            if room < 0:
                break
        if self._began is None and not all(map(self.store.holds, places)):  # a restarted peer has the first ones
            self._began = now()
        self.store.need(places)
        self._todo = deque(place for place in places if not self.store.holds(place))
        self._pump()

    def _ahead(self) -> Iterator[Place]:
        for given in self._expected:
            read = self._read.get(given, 0)
            target = self._lookahead.target(len(given), read)
            yield from _places(self._extents(range(given.start + max(0, read - 1), given.start + target)))

    async def _need(self, places: Sequence[Place]) -> None:
        """Returns when these are here. Raises RemoteError when they cannot be had."""
        began = now()
        missing = waited = [place for place in places if not self.store.holds(place)]
        self._urgent.update(waited)
        try:
            while missing:
                self._pump()
                await wait_for_event(self._changed, POLL_SECONDS)
                left = [place for place in missing if not self.store.holds(place)]
                if len(left) < len(missing):
                    began = now()
                elif now() - began > self._patience.hopeless:
                    raise self._last or RemoteError("nobody", "text: nobody gives it; it is tried again")
                missing = left
        finally:
            self._urgent -= Counter(waited)

    def _pump(self) -> None:
        """Starts as many fetches as may run at once. Ranges fetched ahead do not delay a reader that waits."""
        if now() < self._paused_until:
            return
        for place in self._urgent:
            if len(self._tasks) < MAX_AHEAD + MAX_URGENT and not self.store.holds(place):
                self._begin(place)
        waits: list[Place] = []  # for its chunk's leaves
        while self._todo and len(self._tasks) < MAX_AHEAD and len(waits) < MAX_AHEAD:
            place = self._todo.popleft()
            if not self.store.holds(place) and not self._begin(place):
                waits.append(place)
        self._todo.extendleft(reversed(waits))

    def _begin(self, place: Place) -> bool:
        """Fetches a range, or first the leaves of its chunk. Returns whether the range is on its way."""
        wanted = place if self.store.holds(place.leaves) else place.leaves
        if wanted not in self._tasks:
            self._tasks[wanted] = task = asyncio.create_task(self._fetch(wanted))
            task.add_done_callback(lambda task: self._ended(wanted, task))
        return wanted == place

    def _ended(self, place: Place, task: asyncio.Task[None]) -> None:
        del self._tasks[place]
        if task.cancelled():
            return
        task.result()
        self._changed.set()
        self._changed = asyncio.Event()
        self._pump()
        if not self.is_fetching and not self._has_reported and self._began is not None and self.fetched_bytes:
            self._has_reported = True
            seconds, tokens = round(now() - self._began, 3), self.index.sequences * self.index.sequence
            self._network.emit(events.TextFetched(bytes=self.fetched_bytes, seconds=seconds, tokens=tokens))

    async def _fetch(self, place: Place) -> None:
        name, origins = self.store.name(place), self.origins.of(place.name)
        try:
            if not origins:
                raise self._last or RemoteError("nobody", "text: nobody can be asked for it; it is tried again")
            self.store.remove(name)  # what is there is damaged
            await self.fetcher.fetch(name, place.length, origins, owner=name, place=place)
        except RemoteError as error:
            self._last = error if error is self._last else RemoteError(error.peer, f"text: {error}")
            self._todo.appendleft(place)
            self._pause()
        else:
            self.fetched_bytes += place.length
            self._has_warned = False

    def _pause(self) -> None:
        """Pauses before the next try, since no origin gave a range."""
        self._paused_until = now() + self._patience.retry
        if not self._has_warned:
            self._has_warned = True
            self._network.warn(f"text: nobody gives what is to be read ({self._last}); it is tried again")
        if self._again is not None:
            self._again.cancel()
        self._again = asyncio.get_running_loop().call_later(self._patience.retry, self._pump)


def _places(extents: Iterable[Extent]) -> Iterator[Place]:
    """Yields what these bytes are read from, in order."""
    for extent in extents:
        yield Place(extent.name, extent.size, -1)
        for index in extent.ranges:
            yield Place(extent.name, extent.size, index)


# --- opening


async def open_text(manifest: Manifest, access: TextAccess) -> FetchedText:
    """Opens the run's text. Raises RemoteError where no origin has its index, UsageError."""
    network, directory = access.network, access.network.directory
    mirrors = access.mirrors or Mirrors()
    try:
        places = mirrors.all(manifest.data.mirrors)
        await asyncio.to_thread(access.disk.make_folder, access.folder)
        index = await _index(manifest.data.corpus, access, places)
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
    return FetchedText(index, manifest.seed_bytes, store, origins, fetcher, access, mirrors)


async def _index(digest: str, access: TextAccess, mirrors: list[Mirror]) -> CorpusIndex:
    """Returns the corpus's index, from our disk, a bootstrap node or a mirror. Raises RemoteError."""
    path = access.folder / corpus.INDEX
    try:
        raw = await asyncio.to_thread(access.disk.read, path)
    except OSError:
        raw = b""
    if blob_hash.name_of(raw) != digest:
        raw = await _fetch_index(digest, access, mirrors)
        with contextlib.suppress(UsageError):  # a full disk shows again where it matters
            await asyncio.to_thread(access.disk.write, path, raw)
    return corpus.from_bytes(raw, f"{digest[:12]}…")


async def _fetch_index(digest: str, access: TextAccess, mirrors: list[Mirror]) -> bytes:
    why, network = "nobody is asked", access.network
    places: list[str | Mirror] = [*access.nodes, *mirrors]
    for place in places:
        try:
            if isinstance(place, Mirror):
                name, raw = place.name, await place.whole(corpus.INDEX, corpus.MAX_INDEX)
            else:
                await network.directory.reach(place)
                name = short_peer(place)
                raw = await fetch_named(network.transport, place, endpoints.CORPUS_NAME, limit=corpus.MAX_INDEX)
        except RemoteError as error:
            why = str(error)
            continue
        if blob_hash.name_of(raw) == digest:
            return raw
        why = f"index from {name}: not that of the run's corpus"
        network.warn(f"text: {why}; others are asked")
    raise RemoteError(
        "nobody",
        f"text: nobody gives the index of the run's corpus ({why}); tell the operator,"
        " or name its folder with --corpus",
    )
