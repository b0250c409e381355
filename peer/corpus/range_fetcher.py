"""Brings ranges of a corpus into the store: what is read now first, then what will be read.

Each range is a small blob for the downloader (peer/net/blobs/fetching.py): it asks one origin after the other (peer/corpus/origins.py),
a second one when the first is slow, and those that a node names.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from peer.corpus.cache import TextStore
from peer.corpus.origins import Origins
from peer.net.base import now
from peer.net.blobs import Fetcher, Place
from protocol.errors import RemoteError

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
