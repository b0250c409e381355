"""The shards of a later role, fetched and kept up to date while this peer trains in the one that it has.

A peer that will train other blocks (protocol/planning/planner.py) goes on as it is meanwhile. What it lacks is built here, beside its
own θ; each commit that comes before all is there is applied to it too. As soon as it stands at the state that the peer itself has, it is
taken over, and attested.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from peer.state.recovery import Recovery
from peer.state.storage import Shards


class WarmUp:
    """One per peer. `applied()`: the round of its state; `ready` is called when there may be something to `take`."""

    def __init__(self, recovery: Recovery, applied: Callable[[], int], ready: Callable[[], None]) -> None:
        self.shards: tuple[str, ...] = ()
        """What is being built; nothing as soon as it was taken."""
        self._recovery = recovery
        self._applied = applied
        self._ready = ready
        self._round = -1
        self._built: Shards | None = None
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def want(self, shards: Sequence[str]) -> None:
        """Builds just these from now on; what was begun for others is given up, but what came of it is on disk."""
        if set(shards) != set(self.shards):
            await self.aclose()
            self.shards = tuple(shards)
            if shards:
                self._task = asyncio.create_task(self._work(self.shards))

    def take(self) -> Shards | None:
        """The shards, once, if they stand at the peer's state. Raises what ended the work."""
        if self._task is not None and self._task.done():
            self._task.result()
        if self._built is None:
            return None
        if self._round < self._applied():
            self._news.set()  # it follows first
            return None
        built, self._built, self.shards = self._built, None, ()
        self._news.set()  # it ends
        return built

    async def aclose(self) -> None:
        """Ends the work."""
        task, self._task, self._built, self.shards = self._task, None, None, ()
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _work(self, shards: tuple[str, ...]) -> None:
        """Raises LocalError."""
        try:
            self._round = self._applied()
            beside = await self._recovery.beside(shards, self._round)
            while self.shards:
                while self._round < self._applied():
                    self._built = None
                    await self._recovery.advance(beside, shards, self._round + 1)
                    self._round += 1
                self._built = beside.theta
                self._news.clear()
                self._ready()
                await self._news.wait()
        finally:
            self._ready()
