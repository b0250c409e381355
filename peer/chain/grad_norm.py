"""The end of an inner step: one gradient norm for the whole replica, so that every stage clips by the same factor and steps.

    norm² = Σ over shards of |∇shard|²         clip: the trainer scales the gradient by min(1, clip / norm)

The squares travel from the last stage to the first in NORM frames, which grow on the way, with the loss and what each stage
measured. The norm and the loss come back in TOTAL frames. Squares are added shard by shard in canonical order, so the norm does
not depend on where the cuts are. Both frames carry the wish to stop: all stages end after the same inner step.

After the last step DONE travels from the last stage to the first; a stage that hears it may leave, because nobody behind it
needs its TOTAL any more. In a repaired chain RESUME travels from the last stage to the first with the most steps that anybody
behind has done, and back with the most of all. The chain goes on there (peer/chain/grad_norm.py).
"""

from __future__ import annotations

import asyncio
import math
import struct
from concurrent.futures import Executor
from dataclasses import astuple, dataclass, field

from peer.chain.frames import DONE, NORM, RESUME, TOTAL, Head
from peer.chain.link import Link
from peer.chain.neighbours import Neighbours
from peer.chain.timing import StageTiming, finite
from peer.training.trainer import StageTrainer
from protocol.wire.bounds import MAX_LOSS

MAX_STAGES = 64
_NORM = struct.Struct(">Bd")
_MEASURED = struct.Struct(">6d3I")
_TOTAL = struct.Struct(">Bdd")
_STANDING = struct.Struct(">IBdd")


@dataclass(frozen=True, slots=True)
class Norms:
    """The body of a NORM frame, for a stage and all behind it.

    `stop`: whether one of them wishes to end after this step; `loss`: nats per token; `sums`: squared gradient norms of their
    shards in canonical order; `stages`: what each stage measured.
    """

    stop: bool
    loss: float
    sums: list[float]
    stages: list[StageTiming]

    def before(self, behind: Norms) -> Norms:
        """The norms of this stage and of those behind it, whose loss is the replica's."""
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

    @classmethod
    def most_bytes(cls, shards: int) -> int:
        """The most bytes that `pack` gives for a model of this number of shards."""
        return _NORM.size + 8 * shards + MAX_STAGES * _MEASURED.size


@dataclass(frozen=True, slots=True)
class Total:
    """The newest TOTAL of a round: after it the replica has done `steps` inner steps. `stop`: it is to be the last."""

    steps: int = 0
    stop: bool = False
    norm: float = 0.0
    loss: float = 0.0

    def pack(self) -> bytes:
        """As the body of a RESUME frame."""
        return _STANDING.pack(self.steps, self.stop, self.norm, self.loss)

    @classmethod
    def unpack(cls, body: memoryview) -> Total | None:
        """None where these `RESUME_BYTES` cannot be one."""
        steps, stop, norm, loss = _STANDING.unpack(body)
        return cls(steps, stop == 1, norm, loss) if stop <= 1 and finite(norm, loss) and loss <= MAX_LOSS else None


RESUME_BYTES = _STANDING.size


def most_bytes(shards: int) -> int:
    """The most bytes of any of these frames' bodies, for a model of this number of shards."""
    return max(Norms.most_bytes(shards), RESUME_BYTES)


async def from_behind(near: Neighbours, step: int, shards: int) -> Norms | None:
    """What the stages behind this one, which hold this number of shards, tell of an inner step. None: this is the last stage.
    Raises NeighbourLost."""
    if near.following is None:
        return None
    frame = await near.receive(near.following, Head(NORM, step=step, width=shards), None)
    try:
        return Norms.unpack(frame.body, shards)
    except ValueError as error:
        near.following.blame(f"sent {error}")


async def settle(near: Neighbours, step: int, norms: Norms, steps: int) -> Total:
    """Tells `norms`, of this stage and all behind it, to the previous stage, and gives the TOTAL that all stages have, as the one after
    which `steps` steps of the round are done. The first stage makes it. Raises NeighbourLost."""
    if near.previous is None:
        stop, norm, loss = norms.stop, math.sqrt(sum(norms.sums)), min(norms.loss, MAX_LOSS)
    else:
        body = norms.pack()
        near.previous.send(Head(NORM, step=step, width=len(norms.sums)), body, len(body))
        told = (await near.receive(near.previous, Head(TOTAL, step=step), _TOTAL.size)).body
        wish, norm, loss = _TOTAL.unpack(told)
        if wish > 1 or not finite(norm, loss) or loss > MAX_LOSS:
            near.previous.blame("sent an impossible total")
        stop = wish == 1
    if near.following is not None:
        near.following.send(Head(TOTAL, step=step), _TOTAL.pack(stop, norm, loss), _TOTAL.size)
    return Total(steps, stop, norm, loss)


async def resume(near: Neighbours, ours: Total, steps: int) -> Total:
    """The most that any stage of a repaired chain has done in a round of `steps`. Raises NeighbourLost."""
    head, best = Head(RESUME), ours
    if near.following is not None:
        best = max(best, await _resume_from(near, near.following, steps), key=lambda total: total.steps)
    if near.previous is not None:
        near.previous.send(head, best.pack(), RESUME_BYTES)
        told = await _resume_from(near, near.previous, steps)
        if told.steps < best.steps:
            near.previous.blame(f"goes on after {told.steps} steps, {best.steps} are done")
        best = told
    if near.following is not None:
        near.following.send(head, best.pack(), RESUME_BYTES)
    return best


async def _resume_from(near: Neighbours, link: Link, steps: int) -> Total:
    total = Total.unpack((await near.receive(link, Head(RESUME), RESUME_BYTES)).body)
    if total is None or total.steps > steps:
        link.blame("sent an impossible place to go on")
    return total


async def finish(near: Neighbours) -> None:
    """After the last step: waits until all behind have done it. Raises NeighbourLost."""
    if near.following is not None:
        await near.receive(near.following, Head(DONE), 0)
    if near.previous is not None:
        near.previous.send(Head(DONE), b"", 0)


@dataclass(slots=True)
class StageProgress:
    """Where a stage stands in its round, whoever the other members are. `skipped`: steps that the chain did without it; `summed`:
    whether the gradients of the step after its last are complete."""

    total: Total = field(default_factory=Total)
    skipped: int = 0
    summed: bool = False


async def catch_up(
    trainer: StageTrainer, worker: Executor, progress: StageProgress, best: Total, first_step: int
) -> None:
    """Brings a stage to the place where its replica stands. If the others took the step whose gradients it has, it takes that step
    too; it forgets what was begun after it."""

    def work() -> None:  # after whatever an earlier chain left on the worker
        done = progress.skipped + trainer.steps
        if best.steps == done + 1 and progress.summed:
            trainer.step(first_step + done, best.norm)
            done += 1
        progress.summed = False
        progress.skipped += best.steps - done
        trainer.reset()

    progress.total = best
    await asyncio.get_running_loop().run_in_executor(worker, work)
