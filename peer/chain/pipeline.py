"""One stage's part in its replica's inner steps: micro-batches through the chain, one global norm, one optimizer step.

Streams are bidirectional, one per boundary (peer/chain/link.py). An inner step, per stage:

    micro-batches   FORWARD  Z  to the next stage        BACKWARD  G U  to the previous one
    gather          NORM, TOTAL: one gradient norm for all (peer/chain/grad_norm.py); every stage steps
    the end         DONE, after the last step; in a repaired chain RESUME comes before the first

The schedule is 1F1B: whenever the worker thread is free, the scheduler gives it the prepared job of the kind that it
did not do last, else the other. The event loop prepares at most one job of each kind meanwhile, and only it calls. On a
GPU a job only launches its work. The worker launches the next one meanwhile, at most AHEAD of them; a thread of its own
waits for the device. Jobs end in the order of their launch.

Both directions are first in, first out, so gradients add up in micro-batch order and the bits do not depend on timing.
The first stage limits the micro-batches under way in the chain, the *depth*, and sets it after each step. A stage with
memory for fewer lets the others wait in its queue, or keeps the inputs only and computes the forward a second time.

A full replica runs the same code without neighbours. What survives a broken chain is in `StageProgress`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import asdict, astuple, dataclass, field
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from peer.chain import grad_norm, quantize
from peer.chain.frames import ABORT, BACKWARD, FORWARD, NAME_BYTES, Head, NeighbourLost
from peer.chain.grad_norm import Costs, Norms, StageProgress, StageTiming, StepReport, catch_up, costs
from peer.chain.link import GOODBYE_S, HEAD_START_S, LIVENESS, Link, Liveness
from peer.chain.neighbours import BoundarySpec, Neighbours, Statistics
from peer.chain.reading import Ids, Read, Reading, StopSign
from peer.chain.screening import Place
from peer.chain.trace import SHORTEST_WAIT_SECONDS, Trace
from peer.net.base import Stream
from peer.training.trainer import StageTrainer, mean_loss, set_thread_cores
from protocol.errors import LocalError, PotluckError
from protocol.planning import pipeline_model
from protocol.planning.pipeline_model import UNBOUNDED, Depths, LinkCost, StageCost
from protocol.round.accusations import LIES
from protocol.run import layout
from protocol.wire.announcement import Means

__all__ = ["NeighbourLost", "StageSetup", "run_steps"]

# --- the worker

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
        """Returns whether a job of this kind waits for its turn."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSetup:
    """The inputs of a stage's inner steps, for any neighbours.

    worker: an executor with one thread.
    wires: number formats forward and backward.
    read: gives a step's token ids [micro_batches * rows, L+1]; may wait (peer/chain/reading.py).
    timeout: seconds to wait for one frame of a neighbour.
    depth: micro-batches under way in the first step, used by the first stage.
    depths: that fit into this stage's memory.
    stop: ends the steps of all stages after the one under way.
    on_step: gets the report of every step.
    statistics: of received values; they go on with these steps.
    place: finds the screens of received values; None: nothing is screened.
    on_lost: gets a lost neighbour, before that one notices.
    took: costs of the step before; None: unknown.
    """

    trainer: StageTrainer
    worker: Executor
    wires: tuple[str, str]
    read: Read
    timeout: float
    depth: int = 8
    depths: Depths = UNBOUNDED
    stop: StopSign | None = None
    on_step: Callable[[StepReport], None] | None = None
    trace: Trace | None = None
    statistics: Statistics = field(default_factory=Statistics)
    place: Place | None = None
    on_lost: Callable[[NeighbourLost], None] | None = None
    liveness: Liveness = LIVENESS
    pick_depth: Callable[[Sequence[StageCost], Sequence[LinkCost], int], int] = pipeline_model.pick_depth
    computes_twice: pipeline_model.Twice = pipeline_model.computes_twice
    took: Costs | None = None


@dataclass(frozen=True, slots=True)
class StepText:
    """The token ids of an inner step by micro-batch, [B, L+1] each.

    tensors: for the trainer; pinned for a GPU.
    arrays: the same on the host.
    checks: their CRC-32.
    """

    tensors: Sequence[Tensor] = ()
    arrays: Sequence[NDArray[np.int64]] = ()
    checks: Sequence[int] = ()


class _Run:
    """The state of one call of `run_steps`."""

    def __init__(self, setup: StageSetup, codec: Executor, waiter: Executor, depths: Depths, steps: range) -> None:
        trainer = setup.trainer
        self.setup, self.trainer, self.train, self.first_step = setup, trainer, trainer.train, steps.start
        self.depths = depths
        self.worker, self._codec, self._waiter = TimedWorker(trainer, setup.worker, setup.trace), codec, waiter
        self.reading = Reading(self._read, steps.stop - 1, setup.stop, setup.trace)
        names = layout.shard_names(trainer.spec)
        self._behind = names.index("head") - names.index(trainer.own[-1])
        boundary = BoundarySpec(
            shape=(self.train.rows, self.train.sequence, trainer.width),
            wires={FORWARD: setup.wires[0], BACKWARD: setup.wires[1]},
            micro_batches=self.train.micro_batches,
            most_depth=depths.most,
            most_bytes=grad_norm.most_bytes(len(names)),
            device=trainer.device,
            form=trainer.stage.form,
        )
        self.near = Neighbours(boundary, codec, setup.statistics, min(setup.depth, depths.most))
        self._text = StepText()
        self._losses: list[Tensor] = []
        self._stage_seconds: tuple[float, ...] = ()
        self._transfers, self._took = (0.0, 0.0), setup.took

    def screen(self, kind: int, neighbour: str) -> None:
        """Screens what comes from a neighbour from now on."""
        if self.setup.place is not None:
            shard = self.trainer.own[0 if kind == FORWARD else -1]
            wire = self.setup.wires[kind == BACKWARD]
            self.near.screens[kind] = self.setup.place.of(kind, neighbour, shard, self.trainer.width, wire)

    async def _read(self, step: int) -> StepText | quantize.BadTensor:
        """The text of a step, prepared on a codec thread, or its fault."""

        def prepare(ids: Ids) -> StepText | quantize.BadTensor:
            train, trainer = self.train, self.trainer
            try:
                whole = quantize.ids_from(ids, (train.step_rows, train.sequence + 1), trainer.spec.vocab_size)
            except quantize.BadTensor as error:
                return error
            if trainer.device.type == "cuda":
                whole = whole.pin_memory()
            tensors = whole.reshape(train.micro_batches, train.rows, -1).unbind()
            arrays = [part.numpy() for part in tensors]
            return StepText(tensors, arrays, [zlib.crc32(part.astype("<i8", copy=False)) for part in arrays])

        return await asyncio.get_running_loop().run_in_executor(self._codec, prepare, await self.setup.read(step))

    async def step(self, step: int, progress: StageProgress) -> StepReport:
        """One inner step; `progress.total` says whether a stage asks to stop after it."""
        near = self.near
        start, sent, depth = time.perf_counter(), self._sent(), near.depth
        self.worker.begin_step()
        for link in near.links:
            link.most_waiting = 0
        if near.following is not None:
            near.following.ping()
        self._losses, waited = [], self.reading.waited
        text = await self.reading.take(step)
        if isinstance(text, quantize.BadTensor):
            raise LocalError(f"training: {text}; this is a bug")
        self._text = text
        self.reading.ask(step + 1)
        near.begin_step(text.checks, text.arrays)
        await self._micro_batches(step)
        progress.summed = True
        own = await self._gather(step, progress)
        await self.worker.begin(self._waiter, self.trainer.step, step, progress.total.norm)
        if near.screens:
            near.end_step(self.trainer.pace.rate(self.train, step))
        progress.summed = False
        after, end = self._sent(), time.perf_counter()
        report = StepReport(
            step=step,
            loss=progress.total.loss,
            norm=progress.total.norm,
            tokens=self.train.step_tokens,
            seconds=end - start,
            busy_s=sum(self.worker.seconds.values()),
            wait_forward_s=self.worker.waits[FORWARD],
            wait_backward_s=self.worker.waits[BACKWARD],
            wait_text_s=self.reading.waited - waited,
            forward_link_s=self._transfers[0],
            backward_link_s=self._transfers[1],
            forward_bytes=after[0] - sent[0],
            backward_bytes=after[1] - sent[1],
            depth=depth if near.previous is None else near.depth,
            queued=max((link.most_waiting for link in near.links), default=0),
            activations=self._received(near.previous, FORWARD),
            gradients=self._received(near.following, BACKWARD),
            seconds_per_microbatch=own.seconds_per_microbatch,
            stage_seconds_per_microbatch=self._stage_seconds,
            took=self._took,
        )
        if self.setup.trace is not None:
            self.setup.trace("inner step", start, end, step=step, depth=report.depth, queued=report.queued)
        return report

    def _sent(self) -> tuple[int, int]:
        following, previous = self.near.following, self.near.previous
        return following.sent_bytes if following else 0, previous.sent_bytes if previous else 0

    def _received(self, link: Link | None, kind: int) -> Means | None:
        return None if link is None else Means(**asdict(self.near.running(link, kind)))

    # --- micro-batches

    async def _micro_batches(self, step: int) -> None:
        near, previous, following, count = self.near, self.near.previous, self.near.following, self.train.micro_batches
        ended, prepared = {FORWARD: 0, BACKWARD: 0}, {FORWARD: 0, BACKWARD: 0}

        def done(kind: int, outward: Tensor | None) -> None:
            if kind == FORWARD and following is not None:
                near.send(following, FORWARD, step, ended[kind], outward)
            else:
                near.send(previous, BACKWARD, step, ended[kind], outward)
            ended[kind] += 1

        def has_input_and_room() -> bool:
            if previous is not None and not previous.ready:
                return False
            return following is None or prepared[FORWARD] - prepared[BACKWARD] < self._window()

        async def prepare() -> bool:
            """Prepares one job. False where there is none."""
            micro = prepared[BACKWARD]
            if following is not None and micro < count and following.ready and not turns.has(BACKWARD):
                gradient = await near.take(following, BACKWARD, step, micro)
                if micro >= ended[FORWARD]:
                    following.blame("sent gradients before it got activations")
                prepared[BACKWARD] += 1
                turns.put(BACKWARD, self.worker.job(BACKWARD, self._backward, micro, gradient))
                return True
            micro = prepared[FORWARD]
            if micro < count and not turns.has(FORWARD) and has_input_and_room():
                inward = None if previous is None else await near.take(previous, FORWARD, step, micro)
                prepared[FORWARD] += 1
                after = 0 if following is None else prepared[FORWARD] - self._window()
                turns.put(FORWARD, self.worker.job(FORWARD, self._forward, micro, inward), after=after)
                return True
            return False

        turns = AlternatingScheduler[Tensor | None](
            self.worker.executor, self._waiter, (BACKWARD, FORWARD), done, near.arrived.set, self.worker.waited
        )
        try:
            while ended[FORWARD if following is None else BACKWARD] < count:
                near.arrived.clear()
                turns.check()
                if await prepare():
                    continue
                if turns.idle:
                    waits_behind = prepared[FORWARD] > prepared[BACKWARD] or previous is None
                    await near.wait(following if waits_behind and following is not None else previous)
                else:
                    await near.arrived.wait()
        finally:
            turns.end()

    def _recomputes(self) -> bool:
        """Returns whether forwards are computed a second time in this step."""
        if self.near.following is None:
            return False
        if self._took is None or self.near.depth > self.depths.held:  # `took` may be of a time with more room
            return self.near.depth > self.depths.held
        return self.setup.computes_twice(*self._took, self.train.micro_batches, self.near.depth)

    def _window(self) -> int:
        """The most micro-batches between their forward and their backward here."""
        return self.depths.window(self.near.depth, self._recomputes())

    def _forward(self, micro: int, inward: Tensor | None) -> Tensor | None:
        """On the worker: one forward; in the last stage its backward too. Returns what is to be sent."""
        outward = self.trainer.forward(micro, self._text.tensors[micro], inward, recompute=self._recomputes())
        if self.near.following is not None:
            return outward
        self._losses.append(outward)
        gradient = self._backward(micro)
        if micro + 1 == self.train.micro_batches:
            self.trainer.synchronize()  # the step's seconds are counted from here on
        return gradient

    def _backward(self, micro: int, gradient: Tensor | None = None) -> Tensor | None:
        """On the worker: one backward. Returns what is to be sent."""
        inward = self.trainer.backward(micro, gradient)
        if micro + 1 == self.train.micro_batches:
            self.trainer.launch_norms()
        return inward

    # --- the end of a step

    async def _gather(self, step: int, progress: StageProgress) -> StageTiming:
        """Makes `progress.total` the replica's norm, its mean loss and the wish to stop: the same on every stage.
        Returns what this stage measured."""
        near = self.near
        sums = [value for _, value in await self.worker.run(self.trainer.grad_sumsq)]
        stop = (self.setup.stop is not None and self.setup.stop.is_set()) or not await self.reading.has_next()
        behind = await grad_norm.from_behind(near, step, self._behind)
        loss = behind.loss if behind is not None else await self.worker.run(mean_loss, self._losses)
        norms = Norms(stop, loss, sums, [own := self._measured()])
        if behind is not None:
            norms = norms.before(behind)
        self._took = costs(norms.stages)
        progress.total = await grad_norm.exchange_total(near, step, norms, step - self.first_step + 1)
        if near.previous is None and near.following is not None:
            self._stage_seconds = tuple(m.seconds_per_microbatch for m in norms.stages)
            depth = self.setup.pick_depth(*self._took, self.train.micro_batches)
            near.depth = min(depth, self.depths.most)
        return own

    def _measured(self) -> StageTiming:
        near, count = self.near, self.train.micro_batches
        forward, backward = self.worker.seconds[FORWARD] / count, self.worker.seconds[BACKWARD] / count
        if self._recomputes():
            backward = max(0.0, backward - forward)
        ahead = near.previous.clock.measured() if near.previous is not None else (0.0, 0.0)
        behind = near.following.clock.measured() if near.following is not None else (0.0, 0.0)
        self._transfers = count * ahead[1], count * behind[1]
        return StageTiming(forward, backward, *ahead, *behind, *astuple(self.depths))


async def run_steps(
    setup: StageSetup,
    *,
    first_step: int,
    steps: int,
    previous: Stream | None = None,
    following: Stream | None = None,
    progress: StageProgress | None = None,
    resume: bool = False,
) -> tuple[StepReport, ...]:
    """Runs inner steps `first_step` .. `first_step + steps - 1` (counted from 1 over the run) of this stage. Returns
    their reports: fewer if `stop` was set on any stage. Raises NeighbourLost (names the member) or LocalError.

    Streams stay open on success. On a failure the neighbours get a goodbye; then, and on cancellation, they are closed.

    progress: of the round so far; right even after a failure.
    resume: the chain was repaired; its stages agree where to begin.
    """
    trainer = setup.trainer
    if ("embed" in trainer.shards) != (previous is None) or ("head" in trainer.shards) != (following is None):
        raise LocalError(f"stage {trainer.own[0]}..{trainer.own[-1]}: wrong neighbours; this is a bug")
    depths = setup.depths
    if following is None:  # it goes backward right after forward
        depths = Depths(plain=depths.most, held=depths.most, most=depths.most)
    if min(setup.depth, depths.plain) < 1:
        raise LocalError("a stage needs room for at least one micro-batch; this is a bug")
    progress = progress or StageProgress()
    streams = [stream for stream in (previous, following) if stream is not None]
    reports: list[StepReport] = []
    codec = ThreadPoolExecutor(len(streams) or 1, "boundary", initializer=set_thread_cores, initargs=(1,))
    waiter = ThreadPoolExecutor(1, "device")
    run = _Run(setup, codec, waiter, depths, range(first_step, first_step + steps))
    near = run.near
    try:
        async with asyncio.TaskGroup() as group:
            if previous is not None:
                run.screen(FORWARD, previous.remote)
                near.previous = near.connect(previous, group, setup.timeout, setup.liveness)
            if following is not None:
                run.screen(BACKWARD, following.remote)
                near.following = near.connect(following, group, setup.timeout, setup.liveness)
            if resume:
                best = await grad_norm.resume(near, progress.total, steps)
                await catch_up(trainer, setup.worker, progress, best, first_step)
            else:
                await run.worker.run(trainer.reset)
            while progress.total.steps < steps and not progress.total.stop:
                report = await run.step(first_step + progress.total.steps, progress)
                reports.append(report)
                if setup.on_step is not None:
                    setup.on_step(report)
            await grad_norm.finish(near)
            for link in near.links:
                await link.stop()
    except BaseExceptionGroup as failures:
        error = _worst(failures)
        if isinstance(error, NeighbourLost) and setup.on_lost is not None:
            setup.on_lost(error)
            error.reported = True
            if error.reason.startswith(LIES):
                await asyncio.sleep(HEAD_START_S)
        await _leave(streams, error.peer if isinstance(error, NeighbourLost) else "")
        raise error from error.__cause__
    except asyncio.CancelledError:
        for stream in streams:
            await stream.close()
        raise
    except BaseException:
        await _leave(streams, "")
        raise
    finally:
        for threads in (codec, waiter):
            threads.shutdown(wait=False)
        await run.reading.aclose()
    return tuple(reports)


def _worst(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one error to report: bugs and our own failures before a neighbour's, which they may have caused."""
    leaves: list[BaseException] = []
    todo: list[BaseException] = [failures]
    while todo:
        item = todo.pop(0)
        if isinstance(item, BaseExceptionGroup):
            todo.extend(item.exceptions)
        else:
            leaves.append(item)
    return min(leaves, key=lambda error: isinstance(error, NeighbourLost))


async def _leave(streams: Sequence[Stream], blamed: str) -> None:
    """Sends the neighbours the blamed peer (empty: this member), then closes; neither is waited for."""

    async def leave(stream: Stream) -> None:
        with contextlib.suppress(PotluckError, TimeoutError):
            async with asyncio.timeout(GOODBYE_S):
                if stream.remote != blamed:
                    name = blamed.encode("ascii", "replace")[:NAME_BYTES]
                    await stream.send(Head(ABORT).pack(), name)
                    await stream.finish()
                    await stream.close()  # after finish: waits until the goodbye was read
        await stream.close()

    await asyncio.gather(*(leave(stream) for stream in streams), return_exceptions=True)
