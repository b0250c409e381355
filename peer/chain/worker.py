"""A stage's worker thread: the model's work runs there, one job after the other, and every job is timed.

A job that outlives a cancelled run ends before any later one begins, because there is one thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Generic, TypeVar

from peer.chain import quantize
from peer.chain.frames import BACKWARD, FORWARD
from peer.chain.trace import Trace
from peer.training.trainer import StageTrainer
from protocol.errors import LocalError

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


OTHER = 0
"""The kind of a job that is neither a forward nor a backward."""
_NOTED_S = 1e-4
"""Shorter waits are not worth a line in the trace."""


class TimedWorker:
    """`seconds`: what the jobs of this inner step took, by kind; `waits`: how long the worker waited for a forward and for a backward.
    `executor` has one thread. Where the device works by itself a job is launched, and timed by the device. Where nobody waits for what a job made,
    because this stage is the whole model, its seconds are told by whatever job waits for the device."""

    def __init__(self, trainer: StageTrainer, executor: Executor, trace: Trace | None) -> None:
        self.executor = executor
        self.seconds: dict[int, float] = {}
        self.waits: dict[int, float] = {}
        self._trainer, self._trace = trainer, trace
        self._whole = {"embed", "head"} <= set(trainer.shards)
        self.begin_step()

    def begin_step(self) -> None:
        """Counts from 0 again."""
        self.seconds = {FORWARD: 0.0, BACKWARD: 0.0, OTHER: 0.0}
        self.waits = {FORWARD: 0.0, BACKWARD: 0.0}

    async def run(self, kind: int, work: Callable[..., T], *args: object) -> T:
        """The result of `work` on the worker thread, when it is there. Raises like `launching`."""
        job = self.launching(kind, work, *args)
        return await asyncio.get_running_loop().run_in_executor(self.executor, lambda: job().wait())

    async def begin(self, waiter: Executor, work: Callable[..., object], *args: object) -> None:
        """`work`, of no kind, on the worker thread: returns when it is launched, and the next job goes on behind it; `waiter`, another thread, tells its
        seconds, if it takes any from then on, in the step that is under way when it has ended. Raises like `launching`."""
        launched = await asyncio.get_running_loop().run_in_executor(self.executor, self.launching(OTHER, work, *args))
        if not launched.there:
            waiter.submit(launched.wait)

    def launching(self, kind: int, work: Callable[..., T], *args: object) -> Callable[[], Launched[T]]:
        """For the worker thread: `work`, measured. What torch raises (no memory left, most often) becomes a LocalError."""

        def launch() -> Launched[T]:
            start = time.perf_counter()
            with _told():
                first = None if self._whole else self._trainer.mark()
                made = work(*args)
                last = None if self._whole else self._trainer.mark()
                if first is None or last is None:
                    if not self._whole:
                        self._trainer.synchronize()
                    self._note(kind, work, start, time.perf_counter())
                    return Launched(lambda: made)

            def wait() -> T:
                with _told():
                    last.synchronize()
                    seconds = 1e-3 * first.elapsed_time(last)
                end = time.perf_counter()
                self._note(kind, work, end - seconds, end)
                return made

            return Launched(wait, there=False)

        return launch

    def _note(self, kind: int, work: Callable[..., object], start: float, end: float) -> None:
        self.seconds[kind] += end - start
        if self._trace is not None:
            self._trace(work.__name__.strip("_"), start, end)

    def waited(self, kind: int, start: float, end: float) -> None:
        """The worker had nothing to do between these times (time.perf_counter), until a job of this kind."""
        self.waits[kind] += end - start
        if self._trace is not None and end - start > _NOTED_S:
            self._trace("wait for forward" if kind == FORWARD else "wait for backward", start, end)


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """What goes wrong within, in one line."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        reason = (str(error).splitlines() or ["out of memory"])[0]
        raise LocalError(f"training: {reason}; lower the resources you offer, or restart") from error
    except quantize.BadTensor as error:
        raise LocalError(f"training: {error}; this is a bug") from error
