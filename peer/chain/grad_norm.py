"""The end of an inner step: one gradient norm for the whole replica, measurements of each stage, and round progress.

    norm² = Σ over shards of |∇shard|²         clip: the trainer scales the gradient by min(1, clip / norm)

The squares travel from the last stage to the first in NORM frames, with the loss and the measurements. The norm and the
loss come back in TOTAL frames. Squares are added shard by shard in canonical order, so the norm does not depend on
where the cuts are. Both frames carry the wish to stop: all stages end after the same inner step.

After the last step DONE travels from the last stage to the first. In a repaired chain RESUME travels from the last
stage to the first with the most steps of any stage behind, and back with the most of all, where the chain goes on. The
first stage steps when all squares are in, so the stages of a broken chain differ by one step at most, and a stage that
is one step behind can take it once it has the norm.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import struct
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import astuple, dataclass, field

from peer.chain.frames import DONE, NORM, RESUME, TOTAL, Head
from peer.chain.link import Link
from peer.chain.neighbours import Neighbours
from peer.training.trainer import StageTrainer
from protocol.planning.pipeline_model import Depths, LinkCost, StageCost
from protocol.wire.announcement import ChainReport
from protocol.wire.bounds import MAX_LOSS

MAX_STAGES = 64
_NORM = struct.Struct(">Bd")
_MEASURED = struct.Struct(">6d3I")
_TOTAL = struct.Struct(">Bdd")
_STANDING = struct.Struct(">IBdd")
RESUME_BYTES = _STANDING.size

Costs = tuple[list[StageCost], list[LinkCost]]
"""Of the stages of a chain, or those from one on, and of the boundaries between them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport(ChainReport):
    """One complete inner step."""

    step: int
    """Counted from the run's beginning."""
    loss: float
    norm: float
    """Of the whole replica's gradient, before the clip."""
    tokens: int
    """Of the whole replica."""
    wait_text_s: float
    """Seconds of waiting for text, that of the next step too."""
    seconds_per_microbatch: float
    """Of forward and backward, without what was computed a second time."""
    stage_seconds_per_microbatch: tuple[float, ...] = ()
    """The same of every stage, where this is the first of several."""
    took: Costs | None = None
    """Of this stage and those behind it."""


@dataclass(frozen=True, slots=True)
class StageTiming:
    """The measurements of one stage in an inner step.

    forward_s, backward_s: seconds of computing per micro-batch.
    *_delay, *_transfer: of frames forward from the previous stage and backward from the next (peer/chain/link.py:
        LinkClock).
    plain, held, most: micro-batches under way that fit into its memory (pipeline_model: Depths).
    """

    forward_s: float
    backward_s: float
    forward_delay: float
    forward_transfer: float
    backward_delay: float
    backward_transfer: float
    plain: int
    held: int
    most: int

    @property
    def seconds_per_microbatch(self) -> float:
        """Of forward and backward together."""
        return self.forward_s + self.backward_s

    def plausible(self) -> bool:
        """Returns whether a stage can have measured this."""
        times = (self.forward_s, self.backward_s, self.forward_transfer, self.backward_transfer)
        known = all(math.isfinite(value) for value in (self.forward_delay, self.backward_delay))
        return known and finite(*times) and max(times) < 1e6 and 1 <= self.plain <= self.held <= self.most


def costs(stages: Sequence[StageTiming]) -> Costs:
    """Of consecutive stages."""
    return [
        StageCost(forward=m.forward_s, backward=m.backward_s, depths=Depths(plain=m.plain, held=m.held, most=m.most))
        for m in stages
    ], [
        LinkCost(
            forward=b.forward_transfer,
            backward=a.backward_transfer,
            latency=max(0.0, (b.forward_delay + a.backward_delay) / 2),
        )
        for a, b in itertools.pairwise(stages)
    ]


def finite(*values: float) -> bool:
    """Returns whether all of them are numbers from 0 on."""
    return all(math.isfinite(value) and value >= 0 for value in values)


@dataclass(frozen=True, slots=True)
class Norms:
    """The body of a NORM frame, for a stage and all behind it.

    stop: whether one of them asks to end after this step.
    loss: nats per token.
    sums: squared gradient norms of their shards in canonical order.
    """

    stop: bool
    loss: float
    sums: list[float]
    stages: list[StageTiming]

    def before(self, behind: Norms) -> Norms:
        """Of this stage and of those behind it, whose loss is the replica's."""
        return Norms(self.stop or behind.stop, behind.loss, self.sums + behind.sums, self.stages + behind.stages)

    def pack(self) -> bytes:
        """As a frame's body."""
        records = b"".join(_MEASURED.pack(*astuple(stage)) for stage in self.stages)
        return (
            _NORM.pack(self.stop, min(self.loss, MAX_LOSS)) + struct.pack(f">{len(self.sums)}d", *self.sums) + records
        )

    @classmethod
    def unpack(cls, body: bytes | memoryview, shards: int) -> Norms:
        """The norms of this number of shards. Raises ValueError with what is wrong with them."""
        rest = len(body) - _NORM.size - 8 * shards
        if rest <= 0 or rest % _MEASURED.size:
            raise ValueError(f"norms of {len(body)} bytes")
        wish, loss = _NORM.unpack_from(body)
        sums = list(struct.unpack_from(f">{shards}d", body, _NORM.size))
        stages = [StageTiming(*values) for values in _MEASURED.iter_unpack(body[-rest:])]
        if wish > 1 or not finite(loss, *sums, sum(sums)) or loss > MAX_LOSS:
            raise ValueError("impossible gradient norms")
        if not all(stage.plausible() for stage in stages):
            raise ValueError("impossible measurements")
        return cls(wish == 1, loss, sums, stages)


@dataclass(frozen=True, slots=True)
class Total:
    """The newest TOTAL of a round, after which `steps` inner steps are done; `stop`: the last one."""

    steps: int = 0
    stop: bool = False
    norm: float = 0.0
    loss: float = 0.0

    def pack(self) -> bytes:
        """As the body of a RESUME frame."""
        return _STANDING.pack(self.steps, self.stop, self.norm, self.loss)

    @classmethod
    def unpack(cls, body: memoryview) -> Total | None:
        """None where these RESUME_BYTES are impossible."""
        steps, stop, norm, loss = _STANDING.unpack(body)
        return cls(steps, stop == 1, norm, loss) if stop <= 1 and finite(norm, loss) and loss <= MAX_LOSS else None


def most_bytes(shards: int) -> int:
    """The most bytes of these frames' bodies, for a model of this number of shards."""
    return max(_NORM.size + 8 * shards + MAX_STAGES * _MEASURED.size, RESUME_BYTES)


async def from_behind(near: Neighbours, step: int, shards: int) -> Norms | None:
    """The norms of the stages behind this one, which hold `shards` shards; None in the last stage. Raises
    NeighbourLost."""
    if near.following is None:
        return None
    frame = await near.receive(near.following, Head(NORM, step=step, width=shards), None)
    try:
        return Norms.unpack(frame.body, shards)
    except ValueError as error:
        near.following.blame(f"sent {error}")


async def exchange_total(near: Neighbours, step: int, norms: Norms, steps: int) -> Total:
    """Sends `norms`, of this stage and all behind it, to the previous stage, and returns the TOTAL of all stages, after
    which `steps` steps of the round are done. The first stage makes it. Raises NeighbourLost."""
    if near.previous is None:
        stop, norm, loss = norms.stop, math.sqrt(sum(norms.sums)), min(norms.loss, MAX_LOSS)
    else:
        body = norms.pack()
        near.previous.send(Head(NORM, step=step, width=len(norms.sums)), body, len(body))
        answer = (await near.receive(near.previous, Head(TOTAL, step=step), _TOTAL.size)).body
        wish, norm, loss = _TOTAL.unpack(answer)
        if wish > 1 or not finite(norm, loss) or loss > MAX_LOSS:
            near.previous.blame("sent an impossible total")
        stop = wish == 1
    if near.following is not None:
        near.following.send(Head(TOTAL, step=step), _TOTAL.pack(stop, norm, loss), _TOTAL.size)
    return Total(steps, stop, norm, loss)


async def resume(near: Neighbours, ours: Total, steps: int) -> Total:
    """The progress of the foremost stage of a repaired chain, in a round of `steps`. Raises NeighbourLost."""
    head, best = Head(RESUME), ours
    if near.following is not None:
        best = max(best, await _resume_from(near, near.following, steps), key=lambda total: total.steps)
    if near.previous is not None:
        near.previous.send(head, best.pack(), RESUME_BYTES)
        total = await _resume_from(near, near.previous, steps)
        if total.steps < best.steps:
            near.previous.blame(f"goes on after {total.steps} steps, {best.steps} are done")
        best = total
    if near.following is not None:
        near.following.send(head, best.pack(), RESUME_BYTES)
    return best


async def _resume_from(near: Neighbours, link: Link, steps: int) -> Total:
    total = Total.unpack((await near.receive(link, Head(RESUME), RESUME_BYTES)).body)
    if total is None or total.steps > steps:
        link.blame("sent an impossible place to go on")
    return total


async def finish(near: Neighbours) -> None:
    """Waits until all stages behind have done the last step. Raises NeighbourLost."""
    if near.following is not None:
        await near.receive(near.following, Head(DONE), 0)
    if near.previous is not None:
        near.previous.send(Head(DONE), b"", 0)


@dataclass(slots=True)
class StageProgress:
    """The progress of a stage in its round, across changes of the other members.

    skipped: steps that the chain did without it.
    summed: whether the gradients of its next step are complete.
    """

    total: Total = field(default_factory=Total)
    skipped: int = 0
    summed: bool = False


async def catch_up(
    trainer: StageTrainer, worker: Executor, progress: StageProgress, best: Total, first_step: int
) -> None:
    """Brings a stage to the progress of its replica: takes the step whose gradients it has, if the others did, and
    forgets the step under way."""

    def work() -> None:  # after the jobs that an earlier chain left on the worker
        done = progress.skipped + trainer.steps
        if best.steps == done + 1 and progress.summed:
            trainer.step(first_step + done, best.norm)
            done += 1
        progress.summed = False
        progress.skipped += best.steps - done
        trainer.reset()

    progress.total = best
    await asyncio.get_running_loop().run_in_executor(worker, work)
