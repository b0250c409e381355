"""The worker's turns within an inner step: whenever it is free it takes the prepared job of the kind that it did not do last, else the other.

The event loop prepares jobs while the worker does another, at most one of each kind, so that the worker never waits for the
loop where there is something to do, and yet decides at the last moment. Only the event loop calls; what the threads change
is under one lock.

A device such as a GPU works by itself: there a job only launches its work. The worker launches the next one meanwhile, so that
the device finds it when it is done, and no more than AHEAD at a time, so that turns are not decided long before. A thread of its own waits
for the device. Jobs end in the order in which they were launched.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
AHEAD = 2
"""Jobs that are launched and have not ended, at most."""


@dataclass(frozen=True, slots=True)
class Launched(Generic[T]):
    """A job whose work was launched. `wait` returns what it made when that is there, and may raise; `there`: at once, it has ended."""

    wait: Callable[[], T]
    there: bool = True


class AlternatingScheduler(Generic[T]):
    """`worker`, `waiter`: executors of one thread, which do jobs and wait for those that are only launched.
    `kinds`: of jobs, first the one that is taken where none was done before. `done(kind, result)` is called in the event loop, in the order in which jobs end;
    `stirred()` after it, and when a job raised: `check` raises that. `waited(kind, start, end)`: the worker had nothing to do
    between (time.perf_counter) and goes on with this kind."""

    def __init__(
        self,
        worker: Executor,
        waiter: Executor,
        kinds: tuple[int, int],
        done: Callable[[int, T], None],
        stirred: Callable[[], None],
        waited: Callable[[int, float, float], None],
    ) -> None:
        self._worker, self._waiter, self._kinds = worker, waiter, kinds
        self._done, self._stirred, self._waited = done, stirred, waited
        self._loop = asyncio.get_running_loop()
        self._failed: BaseException | None = None
        self._lock = threading.Lock()
        self._room = threading.Semaphore(AHEAD - 1)  # for what is launched beside the newest
        self._prepared: dict[int, Callable[[], Launched[T]]] = {}
        self._after: dict[int, int] = {}
        self._begun = dict.fromkeys(kinds, 0)
        self._last = kinds[1]  # what the worker took last
        self._unheard = 0  # jobs that were put and have not ended, as far as the event loop knows
        self._turning = False  # whether the worker takes turns
        self._under_way = 0  # jobs that were taken and have not ended
        self._idle_since: float | None = time.perf_counter()
        self._over = False

    @property
    def idle(self) -> bool:
        """Whether all that was put has been done."""
        return not self._unheard

    def has(self, kind: int) -> bool:
        """Whether a job of this kind waits for its turn."""
        return kind in self._prepared

    def put(self, kind: int, job: Callable[[], Launched[T]], *, after: int = 0) -> None:
        """A kind of which no job waits. `after`: it begins when so many jobs of the other kind were begun."""
        with self._lock:
            self._prepared[kind], self._after[kind] = job, after
            since, self._idle_since = self._idle_since, None
            rests, self._turning = not self._turning, True
        self._unheard += 1
        if since is not None:
            self._waited(kind, since, time.perf_counter())
        if rests:
            self._worker.submit(self._work)

    def check(self) -> None:
        """Raises what a job raised."""
        if self._failed is not None:
            raise self._failed

    def end(self) -> None:
        """What is prepared is dropped; of a job under way nothing is heard any more."""
        with self._lock:
            self._over = True
            self._prepared.clear()

    def _work(self) -> None:
        """On the worker: job after job. Who hears that one has ended finds the next one's place free already."""
        turn = self._turn()
        while turn is not None:
            kind, job = turn
            try:
                launched = job()
            except BaseException as error:
                self._tell(self._fail, error)
                return
            if launched.there:
                turn = self._turn()
                self._end(kind, launched)
            else:
                self._waiter.submit(self._end, kind, launched)
                self._room.acquire()
                turn = self._turn()
            del launched  # the next job may need its memory

    def _end(self, kind: int, launched: Launched[T]) -> None:
        """Tells what a job made, when it is there; on the waiter, if not at once."""
        try:
            result = launched.wait()
        except BaseException as error:
            self._tell(self._fail, error)
            return
        finally:
            if not launched.there:
                self._room.release()
        with self._lock:
            self._under_way -= 1
            if not self._turning and not self._under_way:
                self._idle_since = time.perf_counter()
        self._tell(self._finish, kind, result)

    def _turn(self) -> tuple[int, Callable[[], Launched[T]]] | None:
        with self._lock:
            for kind, other in sorted((self._kinds, self._kinds[::-1]), key=lambda pair: pair[0] == self._last):
                if kind in self._prepared and self._begun[other] >= self._after[kind]:
                    self._last = kind
                    self._begun[kind] += 1
                    self._under_way += 1
                    return kind, self._prepared.pop(kind)
            self._turning = False
            if not self._under_way:
                self._idle_since = time.perf_counter()
            return None

    def _tell(self, what: Callable[..., None], *args: object) -> None:
        with self._lock:
            if not self._over:
                self._loop.call_soon_threadsafe(what, *args)

    def _finish(self, kind: int, result: T) -> None:
        self._unheard -= 1
        if not self._over:
            self._done(kind, result)
            self._stirred()

    def _fail(self, error: BaseException) -> None:
        self._failed = error
        self._stirred()
