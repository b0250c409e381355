"""A stage's worker thread within an inner step: it alternates between forward and backward jobs, and times them.

Whenever the worker is free the scheduler gives it the prepared job of the kind that it did not do last, else the other.
The event loop prepares at most one job of each kind while the worker does another. Only the event loop calls.

On a GPU a job only launches its work. The worker launches the next one meanwhile, at most AHEAD of them; a thread of
its own waits for the device. Jobs end in the order of their launch.
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
from peer.chain.trace import SHORTEST_WAIT_SECONDS, Trace
from peer.training.trainer import StageTrainer
from protocol.errors import LocalError

T = TypeVar("T")
AHEAD = 2
"""Jobs that are launched and have not ended, at most."""
OTHER = 0
"""The kind of a job that is neither a forward nor a backward."""


@dataclass(frozen=True, slots=True)
class Launched(Generic[T]):
    """A job whose work was launched.

    wait: returns its result when that is there; may raise.
    there: the work has ended already.
    """

    wait: Callable[[], T]
    there: bool = True


class AlternatingScheduler(Generic[T]):
    """The turns of one inner step.

    worker, waiter: executors of one thread, which run jobs and wait for launched ones.
    kinds: of jobs; the first one is preferred at the beginning.
    done: called in the event loop with (kind, result) of each job, in the order of their ends.
    stirred: called in the event loop after `done`, and when a job raised: `check` raises that.
    waited: called with (kind, start, end) when the worker was idle between (time.perf_counter) until a job of this
        kind.
    """

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
        self._room = threading.Semaphore(AHEAD - 1)  # for launched jobs beside the newest
        self._prepared: dict[int, Callable[[], Launched[T]]] = {}
        self._after: dict[int, int] = {}
        self._begun = dict.fromkeys(kinds, 0)
        self._last = kinds[1]  # the kind of the newest turn
        self._open = 0  # jobs that were put and have not ended, as far as the event loop knows
        self._turning = False  # whether the worker takes turns
        self._under_way = 0  # jobs that were taken and have not ended
        self._idle_since: float | None = time.perf_counter()
        self._over = False

    @property
    def idle(self) -> bool:
        """Whether all jobs have ended."""
        return not self._open

    def has(self, kind: int) -> bool:
        """Whether a job of this kind waits for its turn."""
        return kind in self._prepared

    def put(self, kind: int, job: Callable[[], Launched[T]], *, after: int = 0) -> None:
        """Prepares a job of a kind of which none waits. It begins after this number of jobs of the other kind."""
        with self._lock:
            self._prepared[kind], self._after[kind] = job, after
            since, self._idle_since = self._idle_since, None
            rests, self._turning = not self._turning, True
        self._open += 1
        if since is not None:
            self._waited(kind, since, time.perf_counter())
        if rests:
            self._worker.submit(self._work)

    def check(self) -> None:
        """Raises what a job raised."""
        if self._failed is not None:
            raise self._failed

    def end(self) -> None:
        """Drops prepared jobs and the results of those under way."""
        with self._lock:
            self._over = True
            self._prepared.clear()

    def _work(self) -> None:
        """On the worker: job after job. The next turn is taken before the end of one is reported."""
        turn = self._turn()
        while turn is not None:
            kind, job = turn
            try:
                launched = job()
            except BaseException as error:
                self._call(self._fail, error)
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
        """Waits for a job, on the waiter if its work goes on, and reports it."""
        try:
            result = launched.wait()
        except BaseException as error:
            self._call(self._fail, error)
            return
        finally:
            if not launched.there:
                self._room.release()
        with self._lock:
            self._under_way -= 1
            if not self._turning and not self._under_way:
                self._idle_since = time.perf_counter()
        self._call(self._finish, kind, result)

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

    def _call(self, what: Callable[..., None], *args: object) -> None:
        with self._lock:
            if not self._over:
                self._loop.call_soon_threadsafe(what, *args)

    def _finish(self, kind: int, result: T) -> None:
        self._open -= 1
        if not self._over:
            self._done(kind, result)
            self._stirred()

    def _fail(self, error: BaseException) -> None:
        self._failed = error
        self._stirred()


class TimedWorker:
    """Times the jobs of an inner step: by the device where that works by itself, else by the host.

    executor: has one thread.
    seconds: of jobs, by kind.
    waits: seconds of idleness before a forward and before a backward.
    """

    def __init__(self, trainer: StageTrainer, executor: Executor, trace: Trace | None) -> None:
        self.executor = executor
        self._trainer, self._trace = trainer, trace
        self._whole = {"embed", "head"} <= set(trainer.shards)
        self.begin_step()

    def begin_step(self) -> None:
        """Counts from 0."""
        self.seconds = {FORWARD: 0.0, BACKWARD: 0.0, OTHER: 0.0}
        self.waits = {FORWARD: 0.0, BACKWARD: 0.0}

    async def run(self, work: Callable[..., T], *args: object) -> T:
        """The result of `work`, of kind OTHER. Raises like `job`."""
        job = self.job(OTHER, work, *args)
        return await asyncio.get_running_loop().run_in_executor(self.executor, lambda: job().wait())

    async def begin(self, waiter: Executor, work: Callable[..., object], *args: object) -> None:
        """Launches `work`, of kind OTHER, and lets the next job follow; `waiter`, another thread, adds its seconds to
        the step in which it ends. Raises like `job`."""
        launched = await asyncio.get_running_loop().run_in_executor(self.executor, self.job(OTHER, work, *args))
        if not launched.there:
            waiter.submit(launched.wait)

    def job(self, kind: int, work: Callable[..., T], *args: object) -> Callable[[], Launched[T]]:
        """`work` as a timed job for the worker thread. What torch raises becomes a LocalError."""

        def launch() -> Launched[T]:
            start = time.perf_counter()
            with _as_local_error():
                first = None if self._whole else self._trainer.mark()
                made = work(*args)
                last = None if self._whole else self._trainer.mark()
                if first is None or last is None:
                    if not self._whole:
                        self._trainer.synchronize()
                    self._note(kind, work, start, time.perf_counter())
                    return Launched(lambda: made)

            def wait() -> T:
                with _as_local_error():
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
        """The worker was idle between these times (time.perf_counter), until a job of this kind."""
        self.waits[kind] += end - start
        if self._trace is not None and end - start > SHORTEST_WAIT_SECONDS:
            self._trace("wait for forward" if kind == FORWARD else "wait for backward", start, end)


@contextlib.contextmanager
def _as_local_error() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        reason = (str(error).splitlines() or ["out of memory"])[0]
        raise LocalError(f"training: {reason}; lower the resources you offer, or restart") from error
    except quantize.BadTensor as error:
        raise LocalError(f"training: {error}; this is a bug") from error
