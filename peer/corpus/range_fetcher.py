"""Brings ranges of a corpus into the cache: what is read now first, then what will be read, from one origin after the other.

Missing ranges that lie side by side are asked for together, a *piece*; PARALLEL pieces at once. An origin that fails, lies or has
nothing to give rests, and the next one is asked (peer/corpus/origins.py); one that names other peers is asked again, and insists, when these
do not have it. Somebody who waits does not wait for a slow origin: after OVERDUE_SECONDS another is asked for the same.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from peer.corpus.cache import Chunk, Key, RangeCache
from peer.corpus.origins import Absent, Lie, Named, Origin, Origins
from peer.net.blobs.ranges import LEAVES
from protocol.errors import RemoteError

PARALLEL = 4
HEDGES = 2
"""More pieces, for who waits."""
PIECE = 4
"""Ranges of one piece, at most: PARALLEL pieces are 512 KiB, 0.04 s of a line of 100 Mb/s, and all that a kill can cost."""
ASKED = 16
"""Origins that one piece is asked of, at most."""
OVERDUE_SECONDS = 2.0
COMING_SECONDS = 3.0
"""How long another peer waits here for the ranges of a request that are on their way."""
LOOK_SECONDS = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Seconds: `retry`, until a piece that nobody gave is asked for again; `hopeless`, without anything that came after which who waits
    is told that it cannot be had; `silence`, after which who does not answer counts as gone."""

    retry: float = 1.0
    hopeless: float = 45.0
    silence: float = 10.0


PATIENCE = Patience()


@dataclass(slots=True)
class _Flight:
    """A range that was asked for: when, and of whom. `hedged`: for the second time."""

    since: float
    origins: set[str] = field(default_factory=set)
    hedged: bool = False


class RangeFetcher:
    """See the module's docstring. `fetched_bytes`: of all ranges that came; `quiet` is called when all that is wanted is here."""

    def __init__(
        self,
        cache: RangeCache,
        origins: Origins,
        warn: Callable[[str], None],
        quiet: Callable[[], None] = lambda: None,
        patience: Patience = PATIENCE,
    ) -> None:
        self.fetched_bytes = 0
        self._cache = cache
        self._origins = origins
        self._warn = warn
        self._quiet = quiet
        self._patience = patience
        self._todo: deque[Key] = deque()
        self._urgent: dict[Key, int] = {}
        self._flying: dict[Key, _Flight] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._last: RemoteError | None = None
        self._paused_until = float("-inf")
        self._told = False
        self._again: asyncio.TimerHandle | None = None

    @property
    def is_busy(self) -> bool:
        """Whether something is under way, or still to be asked for."""
        return bool(self._tasks or self._todo or self._urgent)

    def want(self, keys: Iterable[Key]) -> None:
        """These will be read, in this order; replaces what was wanted before."""
        self._todo = deque(key for key in keys if not self._cache.has(*key) and key not in self._flying)
        self._pump()

    async def need(self, keys: Sequence[Key]) -> None:
        """Returns when these are here. Raises RemoteError when they cannot be had."""
        began = _now()
        missing = [key for key in keys if not self._cache.has(*key)]
        for key in missing:
            self._urgent[key] = self._urgent.get(key, 0) + 1
        waited = list(missing)
        try:
            while missing:
                self._pump()
                await self._any_change()
                left = [key for key in missing if not self._cache.has(*key)]
                if len(left) < len(missing):
                    began = _now()
                elif _now() - began > self._patience.hopeless:
                    raise self._last or RemoteError("nobody", "text: nobody gives it; it is tried again")
                missing = left
        finally:
            for key in waited:
                self._urgent[key] -= 1
                if not self._urgent[key]:
                    del self._urgent[key]

    async def coming(self, chunk: Chunk, index: int, end: float) -> None:
        """Returns when a range that is on its way has come, at `end` by the loop's clock at the latest."""
        while (chunk, index) in self._flying and not self._cache.has(chunk, index) and _now() < end:
            await self._any_change()

    async def aclose(self) -> None:
        """Ends what is under way; what came stays."""
        self._todo.clear()
        if self._again is not None:
            self._again.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- what is asked for next

    def _pump(self) -> None:
        """Begins as many pieces as may be under way. Who waits is not held up by what is fetched ahead."""
        most = PARALLEL + HEDGES
        if _now() >= self._paused_until:
            while len(self._tasks) < most and (piece := self._first_of(self._free())):
                self._begin(piece, hedged=False)
            while len(self._tasks) < PARALLEL and (piece := self._ahead()):
                self._begin(piece, hedged=False)
        late = [key for key in self._urgent if self._is_late(key)]
        if late and len(self._tasks) < most:
            self._begin(_beside(late), hedged=True)

    def _free(self) -> list[Key]:
        """What somebody waits for, and nobody was asked for."""
        return [key for key in self._urgent if key not in self._flying and not self._cache.has(*key)]

    def _is_late(self, key: Key) -> bool:
        flight = self._flying.get(key)
        return (
            flight is not None
            and not flight.hedged
            and not self._cache.has(*key)
            and _now() - flight.since > OVERDUE_SECONDS
        )

    def _ahead(self) -> list[Key]:
        """The first piece of what is wanted that nobody was asked for."""
        free: list[Key] = []
        while self._todo and not free:
            key = self._todo.popleft()
            if key not in self._flying and not self._cache.has(*key):
                free.append(key)
        while free and self._todo and len(free) < PIECE and _is_next(free[-1], self._todo[0]):
            free.append(self._todo.popleft())
        piece = self._first_of(free)
        if piece != free:  # the chunk's leaves are not here yet
            self._todo.extendleft(reversed(free))
        return piece

    def _first_of(self, free: list[Key]) -> list[Key]:
        """The first piece of these. A chunk's leaves come before its ranges."""
        for key in free:
            if self._is_ready(key):
                return _beside([key, *(other for other in free if other != key and self._is_ready(other))])
            if (key[0], LEAVES) not in self._flying:
                return [(key[0], LEAVES)]
        return []

    def _is_ready(self, key: Key) -> bool:
        return key[1] == LEAVES or self._cache.has(key[0], LEAVES)

    def _begin(self, piece: list[Key], hedged: bool) -> None:
        asked = set[str]()
        for key in piece:
            if hedged:
                self._flying[key].hedged = True
                asked |= self._flying[key].origins
            else:
                self._flying[key] = _Flight(_now())
        task = asyncio.create_task(self._fetch(piece, asked, hedged))
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.result()
            self._change()
            self._pump()
            if not self.is_busy:
                self._quiet()

    # --- one piece

    async def _fetch(self, piece: list[Key], asked: set[str], hedged: bool) -> None:
        chunk, missing = piece[0][0], [index for _, index in piece]
        waiting = deque((origin, False, missing) for origin in self._origins.order(chunk))
        insisted: set[str] = set()
        rests = self._origins.rests
        try:
            while missing and waiting and len(asked) + len(insisted) < ASKED:
                origin, insist, wanted = waiting.popleft()
                wanted = [index for index in wanted if index in missing]
                if not wanted or origin.name in (insisted if insist else asked) or rests.is_resting(origin):
                    continue
                (insisted if insist else asked).add(origin.name)
                named = await self._ask(origin, chunk, wanted, insist)
                missing = [index for index in missing if not self._cache.has(chunk, index)]
                if named:
                    waiting.appendleft((origin, True, list(named)))  # when they do not have it either
                    waiting.extendleft(
                        (self._origins.peer(peer), False, indices) for peer, indices in reversed(_by_peer(named))
                    )
        finally:
            if not hedged:
                for key in piece:
                    del self._flying[key]
        if missing and not hedged:
            self._todo.extendleft((chunk, index) for index in reversed(missing) if index != LEAVES)
            self._pause()
        elif not missing:
            self._told = False

    async def _ask(self, origin: Origin, chunk: Chunk, indices: list[int], insist: bool) -> Named:
        """Asks one origin; whom it names."""
        came, known = 0, self._origins.is_known(origin)

        async def take(index: int, data: bytes) -> None:
            nonlocal came
            if not await asyncio.to_thread(self._cache.put, chunk, index, data):
                if index != LEAVES and not self._cache.has(chunk, LEAVES):
                    raise RemoteError("", f"{origin.name}: the digests of chunk {chunk.name[:12]} are gone")
                what = "digests" if index == LEAVES else f"bytes for range {index}"
                raise Lie(origin.name, f"{origin.name}: sent wrong {what} of chunk {chunk.name[:12]}")
            came += 1
            self.fetched_bytes += len(data)
            self._change()

        flights = [flight for index in indices if (flight := self._flying.get((chunk, index))) is not None]
        for flight in flights:
            flight.origins.add(origin.name)
        try:
            others = await origin.ask(chunk, indices, insist, take)
        except RemoteError as error:
            self._last = RemoteError(error.peer, f"text: {error}")
            self._origins.rests.failed(origin, error, known)
            return {}
        finally:
            for flight in flights:
                flight.origins.discard(origin.name)
        if came:
            self._origins.rests.worked(origin)
        elif not others and known:
            absent = Absent(origin.name, f"{origin.name}: does not have it")
            self._last = RemoteError(origin.name, f"text: {absent}")
            self._origins.rests.failed(origin, absent, known)
        return others

    def _pause(self) -> None:
        """Nobody gave a piece: tries again a little later."""
        self._paused_until = _now() + self._patience.retry
        if not self._told:
            self._told = True
            why = f" ({self._last})" if self._last is not None else ""
            self._warn(f"text: nobody gives what is to be read{why}; it is tried again")
        if self._again is not None:
            self._again.cancel()
        self._again = asyncio.get_running_loop().call_later(self._patience.retry, self._pump)

    # --- who waits

    def _change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _any_change(self) -> None:
        try:
            async with asyncio.timeout(LOOK_SECONDS):
                await self._changed.wait()
        except TimeoutError:
            return


def _by_peer(named: Named) -> list[tuple[str, list[int]]]:
    """The peers that are named, and for which ranges; the one that is named first for most comes first."""
    found: dict[str, list[int]] = {}
    for index, peers in named.items():
        for peer in peers:
            found.setdefault(peer, []).append(index)
    return sorted(found.items(), key=lambda item: -sum(named[index][0] == item[0] for index in item[1]))


def _is_next(key: Key, following: Key) -> bool:
    """Whether two ranges lie side by side."""
    return key[0] == following[0] and key[1] != LEAVES and following[1] == key[1] + 1


def _beside(keys: Collection[Key]) -> list[Key]:
    """The first of these, and those of the same chunk that can be asked for with it."""
    first = next(iter(keys))
    if first[1] == LEAVES:
        return [first]
    return [key for key in keys if key[0] == first[0] and key[1] != LEAVES][:PIECE]


def _now() -> float:
    return asyncio.get_running_loop().time()
