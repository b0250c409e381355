"""One stage's part in its replica's inner steps: micro-batches through the chain, one global norm, one optimizer step.

Streams are bidirectional, one per boundary (peer/chain/link.py). An inner step, per stage:

    micro-batches   FORWARD  Z  to the next stage        BACKWARD  G U  to the previous one
    gather          NORM     squared norms of the shards' gradients, the loss and what each stage measured grow from the last
                             stage to the first, right behind the last gradients
                    TOTAL    global norm and loss go forward; every stage steps, the first one at once
    the end         DONE     after the last step, from the last stage to the first: who hears it may leave
    a repaired      RESUME   from the last stage to the first: the most steps that anybody behind has done, and their last TOTAL;
    chain                    and back: the most of all. The chain goes on there

A stage that is free goes backward if a gradient is there, else forward if activations are (peer/chain/scheduler.py). Both directions are first in,
first out, so gradients add up in micro-batch order whatever arrives when: the bits do not depend on timing. Only the
first stage limits how many micro-batches are under way: after each step it picks the depth anew from what all stages
measured (protocol/planning/pipeline_model.py), within what their memory holds. A stage whose memory is too small for the depth
keeps only what came in and computes the rest anew before it goes backward. Every stage knows the token ids from the data
assignment; a checksum of them comes with each frame. NORM and TOTAL carry the wish to stop, so that all stages end after
the same inner step.

What a stage keeps when its chain breaks is its `StageProgress` (peer/chain/progress.py). DONE lets nobody leave while somebody may still need
its TOTAL.

A full replica runs the same code without neighbours. The model's work runs on the caller's one
worker thread, so a job that outlives a cancelled run ends before any later one begins; frames are encoded and decoded on
other threads. Over 400 lines, because the order of an inner step, its ending and its failures are one thing to read.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import struct
import time
import zlib
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from peer.chain import activation_stats, quantize
from peer.chain.activation_stats import Measure, Running, Statistics
from peer.chain.link import (
    ABORT,
    BACKWARD,
    DONE,
    FORWARD,
    GOODBYE_S,
    HEAD_BYTES,
    NAME_BYTES,
    NORM,
    RESUME,
    TOTAL,
    ChainBroken,
    Frame,
    Head,
    Link,
    Refused,
)
from peer.chain.progress import TOTAL_BYTES, StageProgress, Total, catch_up
from peer.chain.scheduler import BackwardFirstScheduler
from peer.chain.timing import Norms, StageTiming, StepReport, finite, pick_depth
from peer.net.base import Stream
from peer.training.trainer import StageTrainer
from protocol.codec import boundary_formats
from protocol.errors import LocalError, PotluckError, UsageError
from protocol.run import layout
from protocol.wire.framing import MAX_FRAME

__all__ = ["ChainBroken", "StopSign", "run_steps"]

T = TypeVar("T")
_TOTAL = struct.Struct(">Bdd")
_ANY_DEPTH = 2**32 - 1


class StopSign(Protocol):
    """An asyncio.Event or a threading.Event: set to end after the inner step under way."""

    def is_set(self) -> bool: ...


class Trace(Protocol):
    """Takes what this stage did and when (time.perf_counter); see peer/chain/trace.py."""

    def __call__(self, name: str, start: float, end: float, /, **facts: int | float) -> None: ...


class _Run:
    """The state of one call of `run_steps`."""

    def __init__(
        self,
        trainer: StageTrainer,
        worker: Executor,
        codec: Executor,
        wires: tuple[str, str],
        windows: Callable[[int], np.ndarray],
        depths: tuple[int, int, int],
        stop: StopSign | None,
        trace: Trace | None,
        statistics: Statistics,
        first_step: int,
        stage_progress: StageProgress,
    ) -> None:
        self.statistics = statistics
        self.trainer, self.worker, self.windows, self.stop, self.trace = trainer, worker, windows, stop, trace
        self.first_step, self.stage_progress = first_step, stage_progress
        self._codec = codec
        self.previous: Link | None = None
        self.following: Link | None = None
        self.arrived = asyncio.Event()
        names = layout.shard_names(trainer.spec)
        self.train, self.vocab = trainer.train, trainer.spec.vocab_size
        self.depth, self.plain_depth, self.most_depth = depths
        self._wires = {FORWARD: wires[0], BACKWARD: wires[1]}
        self._codes = {kind: boundary_formats.FORMATS.index(wire) for kind, wire in self._wires.items()}
        self._shape = (self.train.rows, self.train.sequence, trainer.width)
        self._sizes = {kind: quantize.size(self._shape, wire) for kind, wire in self._wires.items()}
        self._before, self._shards = names.index(trainer.shards[0]), len(names)
        self._ids: list[tuple[Tensor, int]] = []
        self._losses: list[float] = []
        self._seconds_per_microbatch, self._stage_seconds = 0.0, tuple[float, ...]()
        self._seconds = {FORWARD: 0.0, BACKWARD: 0.0, 0: 0.0}
        self._waits = {FORWARD: 0.0, BACKWARD: 0.0}
        self._transfers = (0.0, 0.0)
        self._decoded = {FORWARD: 0, BACKWARD: 0}

    def connect(self, stream: Stream, group: asyncio.TaskGroup, timeout: float) -> Link:
        """A link that takes what this stage may be sent. Raises UsageError if a micro-batch is too large for a frame."""
        if (frame := HEAD_BYTES + max(self._sizes.values())) > MAX_FRAME:
            raise UsageError(
                f"micro-batch: a frame has {frame} bytes, at most {MAX_FRAME}; the manifest needs fewer rows"
            )
        limit = max(*self._sizes.values(), Norms.most_bytes(self._shards), TOTAL_BYTES)
        queue = min(self.train.micro_batches, self.most_depth) + 1
        return Link(stream, group, self.arrived, self._decode, queue=queue, limit=limit, timeout=timeout)

    async def job(self, kind: int, work: Callable[..., T], *args: object) -> T:
        """Runs `work` on the worker thread."""
        return await asyncio.get_running_loop().run_in_executor(self.worker, self._timed(kind, work, *args))

    def _timed(self, kind: int, work: Callable[..., T], *args: object) -> Callable[[], T]:
        """For the worker thread: `work`, measured. What torch raises (no memory left, most often) becomes a LocalError."""

        def timed() -> T:
            start = time.perf_counter()
            try:
                done = work(*args)
                self.trainer.synchronize()
                return done
            except (RuntimeError, MemoryError) as error:
                reason = (str(error).splitlines() or ["out of memory"])[0]
                raise LocalError(f"training: {reason}; lower the resources you offer, or restart") from error
            except quantize.BadTensor as error:
                raise LocalError(f"training: {error}; this is a bug") from error
            finally:
                end = time.perf_counter()
                self._seconds[kind] += end - start
                if self.trace is not None:
                    self.trace(work.__name__.strip("_"), start, end)

        return timed

    async def receive(self, link: Link, expected: Head, body_bytes: int | None) -> Frame:
        """The one frame of `link` that may come now; None: of any length. Raises ChainBroken, also where the other link broke."""
        try:
            async with asyncio.timeout(link.timeout):
                while not link.ready:
                    self.arrived.clear()
                    self._check()
                    await self.arrived.wait()
        except TimeoutError:
            link.silent()
        return link.take(expected, body_bytes)

    def _check(self) -> None:
        """Raises what broke a link. Nothing that came before it is of use to a stage that has to wait."""
        for link in self._links:
            if link.failed is not None:
                raise link.failed

    async def resume(self, steps: int) -> None:
        """Agrees with the others where the repaired chain goes on in a round of `steps`; see the module's docstring."""
        head, best = Head(RESUME), self.stage_progress.total
        if self.following is not None:
            best = max(best, await self._resume_from(self.following, steps), key=lambda total: total.steps)
        if self.previous is not None:
            self.previous.send(head, best.pack(), TOTAL_BYTES)
            told = await self._resume_from(self.previous, steps)
            if told.steps < best.steps:
                self.previous.blame(f"goes on after {told.steps} steps, {best.steps} are done")
            best = told
        if self.following is not None:
            self.following.send(head, best.pack(), TOTAL_BYTES)
        await catch_up(self.trainer, self.worker, self.stage_progress, best, self.first_step)

    async def _resume_from(self, link: Link, steps: int) -> Total:
        body = (await self.receive(link, Head(RESUME), TOTAL_BYTES)).body
        total = Total.unpack(body)
        if total is None or total.steps > steps:
            link.blame("sent an impossible place to go on")
        return total

    async def finish(self) -> None:
        """After the last step: waits until all behind have done it."""
        if self.following is not None:
            await self.receive(self.following, Head(DONE), 0)
        if self.previous is not None:
            self.previous.send(Head(DONE), b"", 0)

    async def step(self, step: int) -> StepReport:
        """One inner step; `stage_progress.total` says whether somebody wishes to stop after it."""
        start, sent, depth = time.perf_counter(), self._sent(), self.depth
        self._losses = []
        self._seconds, self._waits = dict.fromkeys(self._seconds, 0.0), dict.fromkeys(self._waits, 0.0)
        for link in self._links:
            link.most_waiting = 0
        if self.following is not None:
            self.following.ping()
        await self.job(0, self._load, step)
        await self._micro_batches(step)
        self.stage_progress.summed = True
        norm, loss = await self._gather(step)
        await self.job(0, self.trainer.step, step, norm)
        self.stage_progress.summed = False
        after, end = self._sent(), time.perf_counter()
        report = StepReport(
            step=step,
            loss=loss,
            norm=norm,
            tokens=self.train.step_tokens,
            seconds=end - start,
            busy_s=sum(self._seconds.values()),
            wait_forward_s=self._waits[FORWARD],
            wait_backward_s=self._waits[BACKWARD],
            forward_link_s=self._transfers[0],
            backward_link_s=self._transfers[1],
            forward_bytes=after[0] - sent[0],
            backward_bytes=after[1] - sent[1],
            depth=depth if self.previous is None else self.depth,
            queued=max((link.most_waiting for link in self._links), default=0),
            activations=None if self.previous is None else replace(self._running(self.previous, FORWARD)),
            gradients=None if self.following is None else replace(self._running(self.following, BACKWARD)),
            seconds_per_microbatch=self._seconds_per_microbatch,
            stage_seconds_per_microbatch=self._stage_seconds,
        )
        if self.trace is not None:
            self.trace("inner step", start, end, step=step, depth=report.depth, queued=report.queued)
        return report

    def _sent(self) -> tuple[int, int]:
        following, previous = self.following, self.previous
        return following.sent_bytes if following else 0, previous.sent_bytes if previous else 0

    def _load(self, step: int) -> None:
        """On the worker: the token ids of the step [rows, L+1] per micro-batch, and their checksums."""
        shape = (self.train.step_rows, self.train.sequence + 1)
        ids = quantize.ids_from(self.windows(step), shape, self.vocab, self.trainer.device)
        parts = ids.reshape(self.train.micro_batches, self.train.rows, -1)
        self._ids = [(part, zlib.crc32(part.cpu().numpy().astype("<i8").tobytes())) for part in parts]

    # --- micro-batches

    async def _micro_batches(self, step: int) -> None:
        """Every micro-batch forward and backward."""
        last = self.following is None
        ended, prepared = {FORWARD: 0, BACKWARD: 0}, {FORWARD: 0, BACKWARD: 0}

        def done(kind: int, outward: Tensor | None) -> None:
            if kind == FORWARD and not last:
                self._send(self.following, FORWARD, step, ended[kind], outward)
            else:
                self._send(self.previous, BACKWARD, step, ended[kind], outward)
            ended[kind] += 1

        def comes() -> bool:
            """Whether there is what the next forward needs."""
            if self.previous is not None:
                return self.previous.ready
            return last or prepared[FORWARD] - prepared[BACKWARD] < self.depth

        async def prepare() -> bool:
            """Whether there was something to prepare."""
            micro = prepared[BACKWARD]
            may = micro < self.train.micro_batches and not turns.has(BACKWARD)
            if may and self.following is not None and self.following.ready:
                gradient = await self._take(self.following, BACKWARD, step, micro)
                if micro >= ended[FORWARD]:
                    self.following.blame("sent gradients before it got activations")
                prepared[BACKWARD] += 1
                turns.put(BACKWARD, self._timed(BACKWARD, self._backward, micro, gradient))
                return True
            micro = prepared[FORWARD]
            may = micro < self.train.micro_batches and not turns.has(FORWARD)
            if may and comes():
                inward = None if self.previous is None else await self._take(self.previous, FORWARD, step, micro)
                prepared[FORWARD] += 1
                turns.put(FORWARD, self._timed(FORWARD, self._forward, micro, inward))
                return True
            return False

        turns = BackwardFirstScheduler[Tensor | None](
            self.worker, (BACKWARD, FORWARD), done, self.arrived.set, self._waited
        )
        try:
            while ended[FORWARD if last else BACKWARD] < self.train.micro_batches:
                self.arrived.clear()
                turns.check()
                if await prepare():
                    continue
                if turns.idle:
                    waits_behind = prepared[FORWARD] > prepared[BACKWARD] or self.previous is None
                    await self._arrival(self.following if waits_behind and not last else self.previous)
                else:
                    await self.arrived.wait()
        finally:
            turns.end()

    async def _arrival(self, owing: Link | None) -> None:
        """Waits for anything to come. Raises ChainBroken in the name of the neighbour who owes it, if nothing does."""
        assert owing is not None
        self._check()
        try:
            async with asyncio.timeout(min(link.timeout for link in self._links)):
                await self.arrived.wait()
        except TimeoutError:
            owing.silent()

    def _waited(self, kind: int, start: float, end: float) -> None:
        """The worker had nothing to do."""
        self._waits[kind] += end - start
        if self.trace is not None and end - start > 1e-4:
            self.trace("wait for forward" if kind == FORWARD else "wait for backward", start, end)

    async def _take(self, link: Link, kind: int, step: int, micro: int) -> Tensor:
        """The micro-batch's tensor from a neighbour, checked."""
        running = self._running(link, kind)
        try:
            frame = await self.receive(link, self._head(kind, step, micro), self._sizes[kind])
            if kind == FORWARD:
                if frame.head.check != self._ids[micro][1]:
                    link.refuse("trains on other text; all peers of a run need the same files")
                if not 1 <= frame.head.depth <= self.most_depth:
                    link.refuse(f"lets {frame.head.depth} micro-batches under way, this stage holds {self.most_depth}")
                self.depth = frame.head.depth
            assert frame.value is not None
            found: tuple[Tensor, Measure] | quantize.BadTensor = await frame.value
            if isinstance(found, quantize.BadTensor):
                link.refuse(f"sent bad {'activations' if kind == FORWARD else 'gradients'}: {found}")
        except Refused:
            running.refused += 1
            raise
        value, seen = found
        running.add(seen)
        return value

    def _running(self, link: Link, kind: int) -> Running:
        return self.statistics.of(link.stream.remote, kind, self._shape[-1])

    def _send(self, link: Link | None, kind: int, step: int, micro: int, values: Tensor | None) -> None:
        """Has the tensor encoded, and sends it in its turn."""
        if link is not None:
            body = asyncio.get_running_loop().run_in_executor(self._codec, self._encoded, kind, values)
            link.send(self._head(kind, step, micro), body, self._sizes[kind])

    def _encoded(self, kind: int, values: Tensor) -> bytes:
        try:
            return quantize.encode(values, self._wires[kind])
        except quantize.BadTensor as error:
            raise LocalError(f"training: {error}; the run's learning rate may be too high") from error

    def _decode(self, kind: int, body: memoryview) -> Awaitable[tuple[Tensor, Measure] | quantize.BadTensor]:
        """Begins to decode."""
        nth, self._decoded[kind] = self._decoded[kind], self._decoded[kind] + 1

        def decode() -> tuple[Tensor, Measure] | quantize.BadTensor:
            try:
                x, largest = quantize.decode_measured(body, self._shape, self._wires[kind], self.trainer.device)
                return x, activation_stats.measure(x, largest, nth)
            except quantize.BadTensor as error:
                return error

        return asyncio.get_running_loop().run_in_executor(self._codec, decode)

    @property
    def _links(self) -> list[Link]:
        return [link for link in (self.previous, self.following) if link is not None]

    def _head(self, kind: int, step: int, micro: int) -> Head:
        check = self._ids[micro][1] if kind == FORWARD else 0
        return Head(kind, self._codes[kind], self.depth, step, micro, *self._shape, check)

    def _forward(self, micro: int, inward: Tensor | None) -> Tensor | None:
        """On the worker: one forward; in the last stage its backward too. Returns what is to be sent."""
        again = self.depth > self.plain_depth
        outward = self.trainer.forward(micro, self._ids[micro][0], inward, recompute=again)
        if not isinstance(outward, float):
            return outward
        self._losses.append(outward)
        return self.trainer.backward(micro)

    def _backward(self, micro: int, gradient: Tensor) -> Tensor | None:
        """On the worker: one backward. Returns what is to be sent."""
        return self.trainer.backward(micro, gradient)

    # --- the end of a step

    async def _gather(self, step: int) -> tuple[float, float]:
        """The replica's gradient norm and its mean loss, the same on every stage, as is the wish to stop.

        Squares are added shard by shard in canonical order, so the norm does not depend on where the cuts are.
        """
        sums = [value for _, value in await self.job(0, self.trainer.grad_sumsq)]
        stop = self.stop is not None and self.stop.is_set()
        if self.following is None:
            norms = Norms(stop, sum(self._losses) / len(self._losses), sums, [self._measured()])
        else:
            behind = await self._norms(self.following, step)
            norms = Norms(stop or behind.stop, behind.loss, sums + behind.sums, [self._measured(), *behind.stages])
        self._seconds_per_microbatch, loss, stop = norms.stages[0].seconds_per_microbatch, norms.loss, norms.stop
        if self.previous is not None:
            body = norms.pack()
            self.previous.send(Head(NORM, step=step, width=len(norms.sums)), body, len(body))
            total = (await self.receive(self.previous, Head(TOTAL, step=step), _TOTAL.size)).body
            wished, norm, loss = _TOTAL.unpack(total)
            if wished > 1 or not finite(norm, loss):
                self.previous.blame("sent an impossible total")
            stop = wished == 1
        else:
            norm = math.sqrt(sum(norms.sums))
        self.stage_progress.total = Total(step - self.first_step + 1, stop, norm, loss)
        if self.following is not None:
            self.following.send(Head(TOTAL, step=step), _TOTAL.pack(stop, norm, loss), _TOTAL.size)
        if self.previous is None and self.following is not None:
            self._stage_seconds = tuple(m.seconds_per_microbatch for m in norms.stages)
            self.depth = min(pick_depth(norms.stages, self.train.micro_batches), self.most_depth)
        return norm, loss

    async def _norms(self, following: Link, step: int) -> Norms:
        """What came from behind."""
        count = self._shards - self._before - len(self.trainer.shards)
        frame = await self.receive(following, Head(NORM, step=step, width=count), None)
        try:
            return Norms.unpack(frame.body, count)
        except ValueError as error:
            following.blame(f"sent {error}")

    def _measured(self) -> StageTiming:
        count = self.train.micro_batches
        forward, backward = self._seconds[FORWARD] / count, self._seconds[BACKWARD] / count
        if self.following is not None and self.depth > self.plain_depth:
            backward = max(0.0, backward - forward)
        ahead = self.previous.measured() if self.previous is not None else (0.0, 0.0)
        behind = self.following.measured() if self.following is not None else (0.0, 0.0)
        self._transfers = count * ahead[1], count * behind[1]
        return StageTiming(forward, backward, *ahead, *behind, self.plain_depth, self.most_depth)


async def run_steps(
    trainer: StageTrainer,
    worker: Executor,
    *,
    first_step: int,
    steps: int,
    wires: tuple[str, str],
    timeout: float,
    windows: Callable[[int], np.ndarray],
    previous: Stream | None = None,
    following: Stream | None = None,
    depth: int = 8,
    plain_depth: int | None = None,
    most_depth: int | None = None,
    stop: StopSign | None = None,
    on_step: Callable[[StepReport], None] | None = None,
    trace: Trace | None = None,
    statistics: Statistics | None = None,
    stage_progress: StageProgress | None = None,
    resume: bool = False,
) -> tuple[StepReport, ...]:
    """Runs inner steps `first_step` .. `first_step + steps - 1` (counted from 1 over the run) of this stage.

    `wires`: number formats forward and backward. `windows(step)` gives the replica's integer tokens
    [micro_batches * rows, L+1]; it is called on the worker thread. `timeout`: seconds to wait for one frame of a neighbour.
    `depth`: micro-batches under way in the first step, used by the first stage. This stage's memory holds all activations
    of `plain_depth` of them and the inputs of `most_depth` (None: any number). `statistics` go on with this call. `resume`: the chain was repaired, all its stages
    begin where `stage_progress`, kept from the round's chain before, and those of the others let them. Returns the steps of this call:
    fewer if `stop` was set on any stage. Streams stay open on success; on a failure the neighbours are told, and then and on
    cancellation they are closed. `stage_progress` is right even then. Raises ChainBroken (names the member) or LocalError.
    """
    if ("embed" in trainer.shards) != (previous is None) or ("head" in trainer.shards) != (following is None):
        raise LocalError(f"stage {trainer.shards[0]}..{trainer.shards[-1]}: wrong neighbours; this is a bug")
    most = most_depth or _ANY_DEPTH
    plain = min(plain_depth or most, most)
    if following is None:  # it goes backward right after forward
        plain = _ANY_DEPTH
    if min(depth, plain, most) < 1:
        raise LocalError("a stage needs room for at least one micro-batch; this is a bug")
    streams = [stream for stream in (previous, following) if stream is not None]
    reports: list[StepReport] = []
    codec = ThreadPoolExecutor(len(streams) or 1, "boundary", initializer=torch.set_num_threads, initargs=(1,))
    try:
        async with asyncio.TaskGroup() as group:
            run = _Run(
                trainer,
                worker,
                codec,
                wires,
                windows,
                (min(depth, most), plain, most),
                stop,
                trace,
                statistics or Statistics(),
                first_step,
                stage_progress or StageProgress(),
            )
            run.previous = None if previous is None else run.connect(previous, group, timeout)
            run.following = None if following is None else run.connect(following, group, timeout)
            if resume:
                await run.resume(steps)
            else:
                await run.job(0, trainer.reset)
            while run.stage_progress.total.steps < steps and not run.stage_progress.total.stop:
                report = await run.step(first_step + run.stage_progress.total.steps)
                reports.append(report)
                if on_step is not None:
                    on_step(report)
            await run.finish()
            for link in run._links:
                await link.stop()
    except BaseExceptionGroup as failures:
        error = _worst(failures)
        await _leave(streams, error.peer if isinstance(error, ChainBroken) else "")
        raise error from None
    except asyncio.CancelledError:
        for stream in streams:
            await stream.close()
        raise
    except BaseException:
        await _leave(streams, "")
        raise
    finally:
        codec.shutdown(wait=False)
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
    return min(leaves, key=lambda error: isinstance(error, ChainBroken))


async def _leave(streams: Sequence[Stream], blamed: str) -> None:
    """Tells the neighbours who is to blame (nobody: this member), then closes; neither may hold us up."""

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
