"""Peak memory of a chain's stage beside the planner's formula, for every depth from 1 to 16.

    python -m tests.benchmarks.memory [--recompute]

One process per depth: the first of two stages, one inner step of 16 micro-batches whose gradients come back as late as the
depth allows. Above an idle process: one that has torch loaded and has trained a tiny stage. The formula is
protocol/planner.py's, with the depth in place of its least window; with --recompute only the inputs are kept.
Exits with 1 if a peak is off by more than a tenth.
"""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys

import numpy as np
import torch

from peer import resources
from peer.trainer import StageTrainer
from protocol import layout, planner
from protocol.layout import ModelSpec
from protocol.manifest import TrainSpec
from tests import tiny

MICRO_BATCHES = 16
MODEL = ModelSpec(vocab_size=4096, d_model=256, n_layers=8, n_heads=4, d_ff=704, context=256)
TRAIN = TrainSpec(
    inner_steps=1, micro_batches=MICRO_BATCHES, rows=4, sequence=256, lr=1e-3, warmup_steps=0, total_steps=9
)
CUT = 4
WITHIN = 0.1


def step(model: ModelSpec, train: TrainSpec, cut: int, depth: int, recompute: bool) -> object:
    """One inner step of the first stage; returns all that a peer keeps."""
    shards = layout.shard_names(model)[: cut + 1]
    rng = np.random.default_rng(0)
    theta = {s: [rng.standard_normal(shape, np.float32) * 0.02 for shape in layout.shapes(model, s)] for s in shards}
    feedback = {s: [np.zeros_like(array) + 1 for array in theta[s]] for s in shards}
    trainer = StageTrainer(model, train, shards)
    trainer.begin_round(theta)
    gradient = torch.full((train.rows, train.sequence, model.d_model), 1e-3)
    for micro in range(train.micro_batches + depth):
        if micro >= depth:
            trainer.backward(micro - depth, gradient)
        if micro < train.micro_batches:
            ids = torch.tensor(rng.integers(0, model.vocab_size, (train.rows, train.sequence + 1)))
            trainer.forward(micro, ids, recompute=recompute)
    trainer.step(1, 1.0)
    return trainer, theta, feedback


def measure(depth: int, recompute: bool) -> int:
    """Bytes of the peak above an idle process."""
    torch.set_num_threads(1)
    small = dataclasses.replace(MODEL, vocab_size=64, d_model=8, n_heads=1, d_ff=8)
    step(small, dataclasses.replace(TRAIN, rows=1, sequence=8), CUT, 1, recompute)
    idle = resources.peak_rss()
    kept = step(MODEL, TRAIN, CUT, depth, recompute)
    peak = resources.peak_rss()
    del kept
    return peak - idle


def formula(depth: int, recompute: bool) -> int:
    manifest = tiny.manifest(model=MODEL, train=TRAIN)
    one = planner.activation_bytes(manifest, 0, CUT)
    fixed = planner.stage_memory(manifest, 0, CUT) - one * planner.in_flight(manifest, 0, CUT)
    return fixed + (one if recompute else one * depth)  # the first stage's inputs are token ids: nothing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--depth", type=int, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.depth is not None:
        print(measure(chosen.depth, chosen.recompute))
        return 0
    worst = 0.0
    print("| depth | peak | formula | off by |\n|---|---|---|---|")
    for depth in range(1, MICRO_BATCHES + 1):
        command = [sys.executable, "-m", "tests.benchmarks.memory", "--depth", str(depth)]
        command += ["--recompute"] if chosen.recompute else []
        peak = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        expected = formula(depth, chosen.recompute)
        worst = max(worst, abs(peak / expected - 1))
        print(
            f"| {depth} | {peak / 1e6:.1f} MB | {expected / 1e6:.1f} MB | {100 * (peak / expected - 1):+.1f} % |",
            flush=True,
        )
    return 0 if worst <= WITHIN else 1


if __name__ == "__main__":
    raise SystemExit(main())
