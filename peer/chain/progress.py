"""Where a stage stands in its round: what it keeps when its chain loses a member, and takes into the next chain.

The first stage steps when all squared norms are in. So when it has done a step, every other stage has all gradients of that step;
and when any stage has done it, all stages before it have (peer/chain/grad_norm.py). Hence the stages of a broken chain differ by one
step at most. A stage that is one step behind can take it as soon as it is told the norm. A newcomer begins with the step that is
under way.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor
from dataclasses import dataclass, field

from peer.chain.grad_norm import Total
from peer.training.trainer import StageTrainer


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
