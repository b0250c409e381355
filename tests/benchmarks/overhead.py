"""What a chain costs beside the model's arithmetic: two stages on this machine against one process with both cores.

    python -m tests.benchmarks.overhead

d = 512, 8 layers, sequences of 256 tokens; real processes, daemons and streams over loopback, k = d/8 in bf16. The chain's
stages have one thread each, the single process two. Printed: tokens per second and their ratio; of each stage's step, the
shares of computing, of waiting (for the fill, for what the other stage computes more, and for bytes) and of neither. The same step by
the cost model, with the seconds of computing that the stages measured and a wire that costs nothing, says how much of the waiting is the
schedule's; what the step took longer is the wire's and the event loop's share. Exits with 1 if that is over a tenth.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from peer.chain.pipeline import StageSetup, run_steps
from peer.training.trainer import StageTrainer, make_worker
from protocol.codec import subspace
from protocol.planning import pipeline_model
from protocol.planning.pipeline_model import LinkCost, StageCost
from protocol.run import init, layout
from protocol.run.layout import ModelSpec
from protocol.run.manifest import TrainSpec
from protocol.wire.schema import plain
from tests.benchmarks.chain import Processes, joined, say

MODEL = ModelSpec(vocab_size=4096, d_model=512, n_layers=8, n_heads=8, d_ff=1408, context=256)
TRAIN = TrainSpec(inner_steps=1, micro_batches=8, rows=1, sequence=256, lr=1e-4, warmup_steps=0, total_steps=99)
K = MODEL.d_model // 8
CUT = 5
"""Shards of the first of two stages: the embedding and half of the blocks."""
WITHIN = 0.1


async def be_stage(stage: int, stages: int, steps: int, folder: Path) -> None:
    names = layout.shard_names(MODEL)
    shards = names if stages == 1 else (names[:CUT], names[CUT:])[stage]
    k, basis = (0, None) if stages == 1 else (K, subspace.basis(b"overhead", MODEL.d_model, K))
    trainer = StageTrainer(MODEL, TRAIN, shards, rank=k, basis=basis)
    trainer.begin_round({s: init.initial_shard(MODEL, b"overhead", s) for s in {"embed", *shards}})

    async def read(step: int) -> np.ndarray:
        return np.random.default_rng(step).integers(0, MODEL.vocab_size, (TRAIN.step_rows, TRAIN.sequence + 1))

    async with joined(stage, "127.0.0.1", folder) as (previous, following):
        torch.set_num_threads(2 // stages)
        worker = make_worker(2 // stages)
        setup = StageSetup(trainer=trainer, worker=worker, wires=("bf16", "bf16"), timeout=300.0, read=read)
        reports = await run_steps(setup, first_step=1, steps=steps, previous=previous, following=following)
        say(reports=plain(reports))


def measure(stages: int, steps: int) -> list[list[dict[str, Any]]]:
    """Each stage's reports, the first step left out."""
    with tempfile.TemporaryDirectory(prefix="potluck-overhead-") as folder:
        base = [sys.executable, "-m", "tests.benchmarks.overhead", "--stages", str(stages), "--steps", str(steps + 1)]
        processes = Processes([[*base, "--folder", folder, "--stage", str(i)] for i in range(stages)])
        try:
            processes.introduce()
            return [processes.hear(s)["reports"][1:] for s in processes.stages]
        finally:
            processes.kill()


def free_wire(stages: Sequence[dict[str, Any]]) -> float:
    """Seconds of a step by the stages' reports of it, had the wire cost nothing: micro-batches in their schedule, and what else
    each stage computed, at the same time as the others."""
    costs = [
        StageCost(forward=r["seconds_per_microbatch"] / 3, backward=r["seconds_per_microbatch"] * 2 / 3) for r in stages
    ]
    links = [LinkCost(forward=0.0, backward=0.0, latency=0.0)] * (len(stages) - 1)
    rest = max(r["busy_s"] - r["seconds_per_microbatch"] * TRAIN.micro_batches for r in stages)
    return rest + pipeline_model.step_seconds(costs, links, TRAIN.micro_batches, stages[0]["depth"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--stages", type=int, default=2, help=argparse.SUPPRESS)
    parser.add_argument("--stage", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.stage is not None:
        asyncio.run(be_stage(chosen.stage, chosen.stages, chosen.steps, chosen.folder))
        return 0
    speeds = {}
    for stages in (1, chosen.stages):
        found = measure(stages, chosen.steps)
        seconds = statistics.median(r["seconds"] for r in found[0])
        speeds[stages] = TRAIN.step_tokens / seconds
        print(f"{stages} process(es): {speeds[stages]:.0f} tokens a second")
        for stage, reports in enumerate(found):
            busy = sum(r["busy_s"] for r in reports) / sum(r["seconds"] for r in reports)
            waits = sum(r["wait_forward_s"] + r["wait_backward_s"] for r in reports) / sum(
                r["seconds"] for r in reports
            )
            print(f"  stage {stage}: computing {busy:.1%}, waiting {waits:.1%}, neither {1 - busy - waits:.1%}")
        beyond = statistics.median(
            1 - free_wire(reports) / reports[0]["seconds"] for reports in zip(*found, strict=True)
        )
        print(f"  wire and event loop: {beyond:.1%} of the step")
    print(f"chain of {chosen.stages} against one process: {speeds[chosen.stages] / speeds[1]:.2f}")
    return 0 if beyond <= WITHIN else 1


if __name__ == "__main__":
    raise SystemExit(main())
