"""Loss against bytes at the stage boundaries: the table over k and number formats, each direction on its own.

    python -m tests.benchmarks.boundary
    python -m tests.benchmarks.boundary --seeds 1 --arms 0:bf16:bf16 32:int4:bf16

One replica of the demo's recipe, cut into four stages: one process computes all, with projector and number formats inserted at the three
boundaries, which tests/unit/peer/training/test_exact_chains.py proves to be what a chain computes. After every round the outer step with
its sparse update. An arm is k:FORWARD:BACKWARD, and with :scaled behind it `train.scale_embedding_lr` is on; with :rounded values are
bf16 between its blocks, as on a GPU. All arms of a seed have the same θ(0), text and U.

Loss: nats per token on held-out text after the last round, of the model as the chain computes it, with projector and forward
format; `plain`: of the same parameters without them. Bytes: per token and boundary, scales included, without framing. Gap: to
the arm that is neither projected nor quantized (0:fp32:fp32, always run first), mean over the seeds and the standard error
of that mean over pairs.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import statistics
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from peer.demo import recipe
from peer.demo.recipe import demo_corpus
from peer.state.outer_optimizer import Outer
from peer.training.trainer import StageTrainer
from protocol.codec import formats, subspace
from protocol.run import init, layout
from protocol.run.corpus import slots
from protocol.run.manifest import Manifest
from tests.e2e.swarms import options
from tests.support.chains import project_at

BASE = "0:fp32:fp32"
D = recipe.MODEL.d_model
CUTS = tuple(range(2, recipe.MODEL.n_layers + 1))
VALID_SEQUENCES = 96
DECIDING = (f"{D // 8}:bf16:bf16", "60:int4:int4", f"{D // 8}:int4:int4", "22:int4:sym2", f"{D // 4}:int4:sym2")
"""k = d/8 in bf16; the same bytes in int4; its loss at a 24th of dense, twice; k = d/4."""


@functools.cache
def _basis(seed: bytes) -> np.ndarray:
    return subspace.basis(seed, D, D)


class Rounded(StageTrainer):
    """A processor that has between the blocks of a compressed chain what a GPU has."""

    forms: ClassVar = {"cpu": StageTrainer.forms["cuda"]}


def manifest(seed: int, rounds: int) -> Manifest:
    """The demo's recipe."""
    chosen = options(Path("run"), full=1, rounds=rounds, inner_steps=None, seed=seed)
    return recipe.make_manifest(chosen, demo_corpus().digest)


def trainer(arm: str, run: Manifest) -> StageTrainer:
    """The whole model with what the arm has at its boundaries."""
    k, forward, backward, *more = arm.split(":")
    train = dataclasses.replace(run.train, scale_embedding_lr="scaled" in more)
    shards, basis = layout.shard_names(run.model), _basis(run.seed_bytes) if int(k) else None
    made = (Rounded if "rounded" in more else StageTrainer)(run.model, train, shards, rank=int(k), basis=basis)
    project_at(made, CUTS, wires=(forward, backward))
    return made


def first_state(run: Manifest) -> dict[str, list[np.ndarray]]:
    """θ(0)."""
    return {shard: init.initial_shard(run.model, run.seed_bytes, shard) for shard in layout.shard_names(run.model)}


def train_round(trainer: StageTrainer, run: Manifest, r: int, slot: int) -> None:
    """A replica's inner steps of round r = 0, 1, ..., with the text from this slot on."""
    train, corpus = trainer.train, demo_corpus()
    for step in range(train.inner_steps):
        at = slots(slot, step, train.step_rows)
        ids = torch.tensor(corpus.slots(run.seed_bytes, at))
        for micro, part in enumerate(ids.reshape(train.micro_batches, train.rows, -1)):
            trainer.forward(micro, part)
            trainer.backward(micro)
        norm = math.sqrt(sum(value for _, value in trainer.grad_sumsq()))
        trainer.step(r * train.inner_steps + step + 1, norm)


def plain_loss(run: Manifest, theta: dict[str, list[np.ndarray]]) -> float:
    """Of the parameters as a plain model."""
    plain = StageTrainer(run.model, run.train, layout.shard_names(run.model))
    plain.begin_round(theta)
    return plain.evaluate(demo_corpus().held_out(VALID_SEQUENCES))


def losses(arm: str, seed: int, rounds: int) -> tuple[float, float]:
    """(loss, plain loss) of one run."""
    run = manifest(seed, rounds)
    replica = trainer(arm, run)
    outer = Outer(run.model, run.outer.codec, run.outer.beta, run.outer.eta)
    outer.theta = first_state(run)
    for r in range(rounds):
        replica.begin_round(outer.theta)
        train_round(replica, run, r, r * run.train.inner_steps * run.train.step_rows)
        for shard in outer.theta:
            outer.accumulate(shard, replica.displacement(shard))
            outer.apply(shard, [(1.0, outer.encode(shard)[0])])
    replica.begin_round(outer.theta)
    return replica.evaluate(demo_corpus().held_out(VALID_SEQUENCES)), plain_loss(run, outer.theta)


def _loss(
    arm: str, seed: int, rounds: int, kept: dict[tuple[str, int], tuple[float, float]], keep: Path | None
) -> tuple[float, float]:
    if (arm, seed) not in kept:
        kept[arm, seed] = losses(arm, seed, rounds)
        if keep is not None:
            with keep.open("a") as file:
                file.write(json.dumps([arm, seed, *kept[arm, seed]]) + "\n")
    return kept[arm, seed]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="*", default=DECIDING)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="JSON lines of what was run; it is not run again")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    lines = chosen.keep.read_text().splitlines() if chosen.keep is not None and chosen.keep.exists() else []
    kept = {(arm, seed): (loss, plain) for arm, seed, loss, plain in map(json.loads, lines)}
    print("| k | forward | backward | bytes forward | backward | under dense bf16 | loss | gap | plain gap |")
    print("|---|---|---|---|---|---|---|---|---|")
    base: list[tuple[float, float]] = []
    for arm in (BASE, *chosen.arms):
        found = [_loss(arm, seed, chosen.rounds, kept, chosen.keep) for seed in range(chosen.seeds)]
        base = base or found
        gaps, plain_gaps = ([x[i] - b[i] for x, b in zip(found, base, strict=True)] for i in (0, 1))
        error = f" ± {statistics.stdev(gaps) / math.sqrt(len(gaps)):.3f}" if len(gaps) > 1 else ""
        k, *kinds = arm.split(":")
        sizes = [formats.bytes_per_token(name, int(k) or D) for name in kinds[:2]]
        print(
            f"| {' '.join([k, *kinds[2:]])} | {kinds[0]} | {kinds[1]} | {sizes[0]} | {sizes[1]} | {4 * D / sum(sizes):.1f} x"
            f" | {statistics.mean(x[0] for x in found):.3f} | {statistics.mean(gaps):+.3f}{error}"
            f" | {statistics.mean(plain_gaps):+.3f} |",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
