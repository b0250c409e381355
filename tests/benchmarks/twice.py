"""A chain whose stages have little memory: computing activations twice where that pays, beside only where there is no room for others to wait.

    python -m tests.benchmarks.twice          # about three minutes

The stages, their schedule, frames and measuring are real, in one process; computing is replaced by a wait (tests/benchmarks/chain.py), and each frame
arrives `LATENCY` later. Both ways in turn, medians of STEPS steps after those in which the depth is found; beside them what
protocol/planning/pipeline_model.py says of the depth that was picked.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from peer.chain.grad_norm import StepReport
from peer.chain.pipeline import StageSetup, run_steps
from peer.net.base import Stream
from peer.training.trainer import make_worker
from protocol.errors import PotluckError
from protocol.planning import pipeline_model
from protocol.planning.pipeline_model import Depths, LinkCost, StageCost
from protocol.run.manifest import TrainSpec
from tests.benchmarks.chain import SPEC, STAGES, Paced, zeros
from tests.support.chains import Wired

LATENCY = 0.1
"""Seconds, one way."""
PACE = 0.05
"""Seconds that a stage computes for a micro-batch."""
MICRO_BATCHES = 32
FOUND, STEPS = 3, 3
CASES = {
    "all stages": [Depths(plain=2, held=40, most=64)] * 3,
    "the first stage": [Depths(plain=2, held=40, most=64), *[Depths(plain=40, held=40, most=64)] * 2],
    "the third stage": [*[Depths(plain=40, held=40, most=64)] * 2, Depths(plain=2, held=40, most=64)],
    "nobody": [Depths(plain=40, held=40, most=64)] * 3,
}
"""Who has room for the activations of two micro-batches only, and for more that wait. The last stage has room."""


class Again(Paced):
    """Computes a forward once more where it is asked to."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.twice: set[int] = set()

    def forward(self, micro: int, ids: torch.Tensor, wire: torch.Tensor | None, *, recompute: bool) -> Any:
        self.twice.discard(micro)
        if recompute:
            self.twice.add(micro)
        return super().forward(micro, ids, wire, recompute=recompute)

    def backward(self, micro: int, wire: torch.Tensor | None = None) -> Any:
        if micro in self.twice:
            self.wait(self.seconds_per_microbatch / 3)
        return super().backward(micro, wire)


class Far:
    """A stream whose frames arrive late, as many as there are under way."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._came: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        self._reading = asyncio.create_task(self._read())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def _read(self) -> None:
        with contextlib.suppress(PotluckError):  # that is the end
            while True:
                frame = await self._stream.recv(1 << 24)
                self._came.put_nowait((time.perf_counter() + LATENCY, frame))

    async def recv(self, limit: int = 1 << 24, *, timeout: float | None = None) -> bytes:
        there, frame = await asyncio.wait_for(self._came.get(), timeout)
        await asyncio.sleep(there - time.perf_counter())
        return frame


class Apart(Wired):
    """The streams between peers that are far from each other."""

    def _late(self, stream: Any) -> Any:
        return Far(stream)


async def chain(depths: Sequence[Depths], twice: pipeline_model.Twice) -> list[StepReport]:
    """The steps that the first stage reports; `twice`: who computes activations twice."""
    train = TrainSpec(
        inner_steps=100, micro_batches=MICRO_BATCHES, rows=1, sequence=16, lr=1e-3, warmup_steps=0, total_steps=1000
    )
    async with Apart(STAGES) as wired, asyncio.TaskGroup() as group:
        tasks = []
        for i, room in enumerate([*depths, Depths(plain=64, held=64, most=64)]):
            setup = StageSetup(
                trainer=Again(train, i, SPEC.d_model, PACE),  # type: ignore[arg-type]
                worker=make_worker(1),
                wires=("int4", "sym2"),
                read=functools.partial(zeros, train),
                timeout=60.0,
                depths=room,
                pick_depth=functools.partial(pipeline_model.pick_depth, twice=twice),
                computes_twice=twice,
            )
            streams = {"previous": wired.previous[i], "following": wired.following[i]}
            tasks.append(group.create_task(run_steps(setup, first_step=1, steps=FOUND + STEPS, **streams)))
    return list(tasks[0].result())


def only_without_room(stages: Sequence[StageCost], links: Sequence[LinkCost], micro_batches: int, depth: int) -> bool:
    """Who computed twice before."""
    return len(stages) > 1 and depth > stages[0].depths.held


def main() -> None:
    print(
        "| little memory has | seconds a step where only those without room compute twice | predicted | where it pays | predicted |"
    )
    print("|---|---|---|---|---|")
    for name, depths in CASES.items():
        stages = [
            StageCost(forward=PACE / 3, backward=2 * PACE / 3, depths=room)
            for room in (*depths, Depths(plain=64, held=64, most=64))
        ]
        links = [LinkCost(forward=0.0, backward=0.0, latency=LATENCY)] * (STAGES - 1)
        row = [name]
        for rule in (only_without_room, pipeline_model.computes_twice):
            steps = asyncio.run(chain(depths, rule))[FOUND:]
            seconds = statistics.median(step.seconds for step in steps)
            predicted = pipeline_model.step_seconds(stages, links, MICRO_BATCHES, steps[-1].depth, twice=rule)
            row += [f"{seconds:.2f} (depth {steps[-1].depth})", f"{predicted:.2f}"]
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
