"""Work of low priority, on threads of their own beside a round's training."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from peer.state.storage import Shards
from protocol.round import member_events
from protocol.run import layout

T = TypeVar("T")
Then = Callable[[int, Shards, Mapping[str, str]], Awaitable[None]]
"""Continues after the digests of a state: (round, theta, digests). The peer may hold another state by then."""


def lower_priority() -> None:
    """Lowers the priority of the calling thread. On Linux only: elsewhere threads have none."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + 10)


class BackgroundExecutor:
    """A thread of low priority for tensor work; `make` makes it. It is started by the first work and ends with `end`.

    It must end: torch keeps OpenMP helpers for each such thread, which slow training down (docs/results/doctor.md).
    """

    def __init__(self, make: Callable[[], ThreadPoolExecutor]) -> None:
        self._make = make
        self._worker: ThreadPoolExecutor | None = None

    @property
    def worker(self) -> ThreadPoolExecutor:
        if self._worker is None:
            self._worker = self._make()
            self._worker.submit(lower_priority)
        return self._worker

    async def __call__(self, work: Callable[..., T], *args: object) -> T:
        """Runs `work` there, and returns or raises what it does."""
        return await asyncio.get_running_loop().run_in_executor(self.worker, work, *args)

    def end(self) -> None:
        """Ends the thread after the work under way; drops work that has not begun."""
        if self._worker is not None:
            self._worker.shutdown(wait=False, cancel_futures=True)
            self._worker = None


class Attester:
    """Computes the digests of a peer's states while the next round trains; `put` hands them to the member machine."""

    def __init__(self, put: Callable[[member_events.Digested], None]) -> None:
        self._put = put
        self._worker = ThreadPoolExecutor(1, "quiet", initializer=lower_priority)
        self._task: asyncio.Task[None] | None = None

    def begin(self, round: int, theta: Shards, then: Then | None = None) -> None:
        """Queues `theta`, the state after `round`. Training does not change these arrays."""
        self._task = asyncio.create_task(self._work(self._task, round, theta, then))

    async def done(self) -> None:
        """Waits for all states in the queue and their `then`. Raises what that raised."""
        if self._task is not None:
            task, self._task = self._task, None
            await task

    def close(self) -> None:
        self._worker.shutdown(wait=False)

    async def _work(self, before: asyncio.Task[None] | None, round: int, theta: Shards, then: Then | None) -> None:
        if before is not None:
            await before
        found = await asyncio.get_running_loop().run_in_executor(self._worker, digests, theta)
        self._put(member_events.Digested(round, found))
        if then is not None:
            await then(round, theta, found)


def digests(theta: Shards) -> dict[str, str]:
    return {shard: layout.shard_digest(arrays) for shard, arrays in theta.items()}
