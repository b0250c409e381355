"""Limits how many blobs are fetched at once, in turns by their owners.

A blob's owner is the peer that offered it. While others wait, a fetch gives its place up after a while.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

PLACES = 64
OF_AN_OWNER = 16
"""Places that one owner has at most."""
STALLED_SECONDS = 3.0
"""After so long without a byte a fetch gives way."""
TURN_SECONDS = 30.0
"""After so long any does."""
LOOK_SECONDS = 1.0


@dataclass(slots=True, eq=False)
class _Turn:
    """A fetch that has a place: its owner, its start, and since when it has had `came` bytes."""

    owner: str
    began: float
    progress: Callable[[], int]
    came: int
    moved: float
    over: asyncio.Event = field(default_factory=asyncio.Event)


class Gate:
    """`places` in all, `of_an_owner` at most for each."""

    def __init__(self, places: int = PLACES, of_an_owner: int = OF_AN_OWNER) -> None:
        self._places = places
        self._of_an_owner = of_an_owner
        self._turns: set[_Turn] = set()
        self._of: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._looking: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    async def run(self, owner: str, work: Callable[[], Coroutine[Any, Any, None]], progress: Callable[[], int]) -> None:
        """Does `work` in one or more turns: it is cancelled when others get the place, and started again.

        progress: returns the bytes that have come
        """
        while True:
            await self._enter(owner)
            now = asyncio.get_running_loop().time()
            turn = _Turn(owner, now, progress, progress(), now)
            self._turns.add(turn)
            task = asyncio.create_task(work())
            over = asyncio.create_task(turn.over.wait())
            try:
                await asyncio.wait({task, over}, return_when=asyncio.FIRST_COMPLETED)
                if task.done():
                    return task.result()
            finally:
                for one in (task, over):
                    one.cancel()
                await asyncio.gather(task, over, return_exceptions=True)
                self._turns.discard(turn)
                self._leave(owner)

    async def _enter(self, owner: str) -> None:
        if self._of.total() < self._places and self._of[owner] < self._of_an_owner and owner not in self._waiting:
            self._of[owner] += 1
            return
        place = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(place)
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self._leave(owner)
            else:
                self._forget(owner, place)
            raise

    def _forget(self, owner: str, place: asyncio.Future[None]) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._waiting[owner].remove(place)
            if not self._waiting[owner]:
                del self._waiting[owner]

    def _leave(self, owner: str) -> None:
        self._of[owner] -= 1
        if not self._of[owner]:
            del self._of[owner]
        self._grant()

    def _grant(self) -> None:
        """Gives free places to the owners who have the fewest, in turn."""
        while self._of.total() < self._places:
            may = [owner for owner in self._waiting if self._of[owner] < self._of_an_owner]
            if not may:
                return
            owner = min(may, key=self._of.__getitem__)
            queue = self._waiting.pop(owner)
            place = queue.popleft()
            if queue:
                self._waiting[owner] = queue  # at the end
            if not place.done():
                self._of[owner] += 1
                place.set_result(None)

    async def _look(self) -> None:
        """While somebody waits: ends turns that do not move, or that were long."""
        while self._waiting:
            await asyncio.sleep(LOOK_SECONDS)
            now = asyncio.get_running_loop().time()
            long: list[_Turn] = []
            for turn in self._turns:
                came = turn.progress()
                if came != turn.came:
                    turn.came, turn.moved = came, now
                if now - turn.moved >= STALLED_SECONDS:
                    turn.over.set()
                elif now - turn.began >= TURN_SECONDS:
                    long.append(turn)
            long.sort(key=lambda turn: (-self._of[turn.owner], turn.began))
            for turn in long[: len(self._waiting)]:
                turn.over.set()

    def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
