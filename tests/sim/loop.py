"""An event loop in which time costs nothing: when there is nothing to do, the clock jumps to the next timer.

What would run on another thread runs in the loop, later, in the order in which an executor of one thread would run it.
Tasks and futures are hashed by their number, so that a set of them is walked through in the same order in every
process.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any

THREAD_SECONDS = 0.3
"""What runs on a thread takes up to so long."""


class Deadlock(Exception):
    """Nothing will ever happen again."""


class _Task(asyncio.Task[Any]):
    """A task that is hashed by its number."""

    def __init__(self, coro: Coroutine[Any, Any, Any], *, number: int, **options: Any) -> None:
        self.number = number
        super().__init__(coro, **options)

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return self is other


class _Future(asyncio.Future[Any]):
    """A future that is hashed by its number."""

    def __init__(self, *, number: int, loop: asyncio.AbstractEventLoop) -> None:
        self.number = number
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return self is other


class VirtualLoop(asyncio.BaseEventLoop):
    """Begins at time 0. `rng` draws how long threads take."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._now = 0.0
        self._numbers = itertools.count()
        self._rng = rng
        self._free_at: dict[Executor, float] = {}
        self._selector = self
        self.set_task_factory(self._make_task)

    def time(self) -> float:
        return self._now

    def create_future(self) -> asyncio.Future[Any]:
        return _Future(number=next(self._numbers), loop=self)

    def run_in_executor(self, executor: Executor | None, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Does it some time later; after whatever was handed to the same executor, if one is named."""
        future = self.create_future()

        def work() -> None:
            if future.cancelled():
                return
            try:
                result = func(*args)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        at = self._now + self._rng.random() ** 4 * THREAD_SECONDS
        if executor is not None:
            at = self._free_at[executor] = max(at, self._free_at.get(executor, 0.0))
        self.call_at(at, work)
        return future

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, Any], **options: Any
    ) -> asyncio.Task[Any]:
        return _Task(coro, number=next(self._numbers), loop=loop, **options)

    # --- what asyncio's base class asks of a loop: this one is its own selector, which has nothing to select from

    def select(self, timeout: float | None) -> list[Any]:
        """Lets `timeout` seconds pass. Raises Deadlock where there is nothing to wait for."""
        if timeout is None:
            raise Deadlock
        self._now += max(timeout, 0.0)
        return []

    def _process_events(self, events: list[Any]) -> None:
        assert not events

    def _write_to_self(self) -> None:
        return
