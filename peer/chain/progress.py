"""Where a stage stands in its round: what it keeps when its chain loses a member, and takes into the next one.

The first stage steps once all squared norms are in, so when it has done a step, every other stage has all gradients of it; and when
a stage has done it, so have those before it (peer/chain/pipeline.py). Hence the stages of a chain that broke differ by one step at
most, and whoever is one behind can take it when it is told the norm. A newcomer begins with the step that is under way.
"""

from __future__ import annotations

import asyncio
import struct
from concurrent.futures import Executor
from dataclasses import dataclass

from peer.chain.timing import finite
from peer.training.trainer import StageTrainer

_TOTAL = struct.Struct(">IBdd")
TOTAL_BYTES = _TOTAL.size


@dataclass(frozen=True, slots=True)
class Total:
    """The newest TOTAL of a round: after it the replica has done `steps` inner steps. `stop`: it is to be the last."""

    steps: int = 0
    stop: bool = False
    norm: float = 0.0
    loss: float = 0.0

    def pack(self) -> bytes:
        return _TOTAL.pack(self.steps, self.stop, self.norm, self.loss)

    @classmethod
    def unpack(cls, body: memoryview) -> Total | None:
        """None where these `TOTAL_BYTES` cannot be one."""
        steps, stop, norm, loss = _TOTAL.unpack(body)
        return cls(steps, stop == 1, norm, loss) if stop <= 1 and finite(norm, loss) else None


@dataclass(slots=True)
class StageProgress:
    """Where a stage stands in its round, whoever the other members are. `skipped`: steps of the chain that it was no part of;
    `summed`: whether the gradients of the step after its last are complete."""

    total: Total = Total()
    skipped: int = 0
    summed: bool = False


async def catch_up(
    trainer: StageTrainer, worker: Executor, stage_progress: StageProgress, best: Total, first_step: int
) -> None:
    """Brings a stage to the place where its replica stands: takes the step whose gradients it has, if the others took it, and
    forgets what was begun after it."""

    def work() -> None:  # after whatever an earlier chain left on the worker
        done = stage_progress.skipped + trainer.steps
        if best.steps == done + 1 and stage_progress.summed:
            trainer.step(first_step + done, best.norm)
            done += 1
        stage_progress.summed = False
        stage_progress.skipped += best.steps - done
        trainer.reset()

    stage_progress.total = best
    await asyncio.get_running_loop().run_in_executor(worker, work)
