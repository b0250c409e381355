"""A stage's worker thread: the model's work runs there, one job after the other, and every job is timed.

A job that outlives a cancelled run ends before any later one begins, because there is one thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from typing import TypeVar

from peer.chain import quantize
from peer.chain.frames import BACKWARD, FORWARD
from peer.chain.scheduler import Launched
from peer.chain.trace import Trace
from peer.training.trainer import StageTrainer
from protocol.errors import LocalError

T = TypeVar("T")
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
