"""Attests what a peer holds: the digests of its shards, computed on a thread for which nobody waits while the next round trains."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from peer.state.storage import Shards
from protocol.round import member_events
from protocol.run import layout

Then = Callable[[int, Shards, Mapping[str, str]], Awaitable[None]]
"""What follows on the digests of a round's state: that state is told, since the peer may hold another one by then."""


class Attester:
    """One per peer. `put` hands events to the member machine."""

    def __init__(self, put: Callable[[member_events.Digested], None]) -> None:
        self._put = put
        self._quiet = ThreadPoolExecutor(1, "quiet", initializer=be_quiet)
        self._task: asyncio.Task[None] | None = None

    def begin(self, round: int, theta: Shards, then: Then | None = None) -> None:
        """Compares `theta`, the state after `round`, with the others', after what was begun before: training, which goes on
        meanwhile, does not change these arrays."""
        self._task = asyncio.create_task(self._work(self._task, round, theta, then))

    async def done(self) -> None:
        """Waits for all that was begun, and for what follows on it. Raises what that raised."""
        if self._task is not None:
            task, self._task = self._task, None
            await task

    def close(self) -> None:
        """Ends the thread."""
        self._quiet.shutdown(wait=False)

    async def _work(self, before: asyncio.Task[None] | None, round: int, theta: Shards, then: Then | None) -> None:
        if before is not None:
            await before
        found = await asyncio.get_running_loop().run_in_executor(self._quiet, digests, theta)
        self._put(member_events.Digested(round, found))
        if then is not None:
            await then(round, theta, found)


def digests(theta: Shards) -> dict[str, str]:
    """Of each shard."""
    return {shard: layout.shard_digest(arrays) for shard, arrays in theta.items()}


def be_quiet() -> None:
    """Whoever computes goes first. Elsewhere than on Linux a thread has no priority."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + 10)
