"""Compares weights for replicas of unequal pace, and late work. Prints the tables of docs/results/uneven.md.

    python -m tests.benchmarks.weights                              # every arm, three seeds
    python -m tests.benchmarks.weights --arms tokens root --seeds 1 --rounds 2

Four full replicas of a small model train in one process, with the demo's recipe otherwise and the product's trainer,
data order and outer step. Every arm reads as many tokens in as many rounds: equal paces are 10 inner steps each, uneven
ones 4, 4, 16 and 16. The learning rate follows the run (`Pace` in peer/training/optimizer.py). All arms of a seed have
the same θ(0) and read the text in the same order. A step's micro-batches are computed at once, which changes the
rounding of their sum only.

A replica's update has a weight in the sum of the outer step. With n replicas, s_m inner steps and t_m tokens:

    tokens        t_m / Σ t
    root          √t_m / Σ √t
    same          1 / n
    normalized    s p_m / s_m, s = Σ p_m s_m, p_m = 1 / n: the means of a step, times the effective number of steps
                  (FedNova, Wang et al. 2020, arXiv:2007.07481, section 4)
    share         the same with p_m = t_m / Σ t, the replica's share of the text, as in FedNova: here 1.36 / n each
    longer        1.36 / n with equal paces: the gain of a longer outer step alone

The effective number of steps, Σ w_m s_m, is 13.6 for `tokens`, `share` and `longer`, 12 for `root`, and else 10.

Further arms:

    micro-batches    weights by tokens; the slow replicas do as many steps as the fast ones, with a quarter of the rows
    late             equal paces; every replica is late in every third round, in turn, and its pseudo-gradient stays
                     in its error feedback; the weights are those of the others
    absent           the same, but late work is not computed

Loss: nats per token on the whole held-out text after the last round. Gap: to `equal paces` of the same seed, mean and
standard error over the seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from peer.corpus.text import CorpusReader
from peer.demo import recipe
from peer.demo.recipe import demo_corpus
from peer.state.outer_optimizer import Outer
from peer.training.optimizer import Pace
from peer.training.trainer import StageTrainer
from protocol.run import init, layout
from protocol.run.corpus import slots
from protocol.run.layout import ModelSpec
from protocol.run.manifest import Manifest
from protocol.wire.plan import Work
from tests.e2e.swarms import options

MOST_STEPS = 16
MICRO_BATCHES, ROWS = 4, 1
"""Of a whole inner step: half the sequences of the demo's."""
MODEL = ModelSpec(vocab_size=4096, d_model=64, n_layers=2, n_heads=4, d_ff=176, context=128)
"""Half the demo's width and blocks, so that the tables take minutes."""
EVERY = 3
"""A replica is late in one of this many rounds."""

Weights = Callable[[Sequence[int], Sequence[int]], list[float]]
"""Maps (inner steps, tokens) of the replicas that are there to their weights."""


def _shares(values: Sequence[float]) -> list[float]:
    return [value / sum(values) for value in values]


def _normalized(steps: Sequence[int], shares: Sequence[float]) -> list[float]:
    effective = sum(share * count for share, count in zip(shares, steps, strict=True))
    return [effective * share / count for share, count in zip(shares, steps, strict=True)]


WEIGHTS: dict[str, Weights] = {
    "tokens": lambda steps, tokens: _shares(tokens),
    "root": lambda steps, tokens: _shares([math.sqrt(count) for count in tokens]),
    "same": lambda steps, tokens: _shares([1] * len(steps)),
    "normalized": lambda steps, tokens: _normalized(steps, _shares([1] * len(steps))),
    "share": lambda steps, tokens: _normalized(steps, _shares(tokens)),
    "longer": lambda steps, tokens: [1.36 * share for share in _shares(tokens)],
}


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to share and to weigh the work.

    work: (inner steps, micro-batches of each), by replica.
    weights: a name of WEIGHTS.
    late: whether replicas are late in turn.
    done: whether late work is computed.
    """

    work: tuple[tuple[int, int], ...]
    weights: str = "tokens"
    late: bool = False
    done: bool = True


EQUAL = ((10, MICRO_BATCHES),) * 4
UNEVEN = ((4, MICRO_BATCHES),) * 2 + ((MOST_STEPS, MICRO_BATCHES),) * 2
ARMS = {
    "equal paces": Arm(EQUAL),
    "longer": Arm(EQUAL, "longer"),
    **{name: Arm(UNEVEN, name) for name in WEIGHTS if name != "longer"},
    "micro-batches": Arm(((MOST_STEPS, 1),) * 2 + ((MOST_STEPS, MICRO_BATCHES),) * 2),
    "late": Arm(EQUAL, late=True),
    "absent": Arm(EQUAL, late=True, done=False),
}


def _manifest(seed: int, rounds: int) -> Manifest:
    chosen = options(Path("unused"), full=4, rounds=rounds, inner_steps=MOST_STEPS, seed=seed)
    made = recipe.make_manifest(chosen, demo_corpus().digest, MODEL)
    return replace(made, train=replace(made.train, micro_batches=MICRO_BATCHES, rows=ROWS))


def _train(manifest: Manifest, corpus: CorpusReader, trainer: StageTrainer, work: Work) -> None:
    """Computes one replica's inner steps of a round."""
    rows = work.micro_batches * manifest.train.rows
    before = trainer.pace.before
    for step in range(work.steps):
        at = slots(work.slot, step, rows)
        trainer.forward(0, torch.tensor(corpus.slots(manifest.seed_bytes, at)))
        trainer.backward(0)
        norm = math.sqrt(sum(square for _, square in trainer.grad_sumsq()))
        trainer.step(before + step + 1, norm)


def _loss(arm: Arm, manifest: Manifest) -> float:
    """Trains one run and returns its nats per held-out token."""
    model, train, shards = manifest.model, manifest.train, layout.shard_names(manifest.model)
    corpus = demo_corpus()
    shared, *others = (Outer(model, manifest.outer.codec, manifest.outer.beta, manifest.outer.eta) for _ in arm.work)
    outers = [shared, *others]
    shared.theta = {shard: init.initial_shard(model, manifest.seed_bytes, shard) for shard in shards}
    trainers = [StageTrainer(model, train, shards) for _ in arm.work]
    slot = 0
    for r in range(1, manifest.rounds + 1):
        there: list[tuple[int, int, dict[str, bytes]]] = []
        for m, (steps, micro_batches) in enumerate(arm.work):
            work = Work(slot=slot, steps=steps, micro_batches=micro_batches)
            slot += steps * micro_batches * train.rows
            late = arm.late and r % EVERY == m % EVERY
            if late and not arm.done:
                continue
            trainers[m].begin_round(shared.theta, Pace((r - 1) * train.inner_steps, steps, micro_batches=1))
            _train(manifest, corpus, trainers[m], work)
            for shard in shards:
                outers[m].accumulate(shard, trainers[m].displacement(shard))
            if not late:
                payloads = {shard: outers[m].encode(shard)[0] for shard in shards}
                there.append((steps, train.tokens(steps, micro_batches), payloads))
        weights = WEIGHTS[arm.weights]([steps for steps, _, _ in there], [tokens for _, tokens, _ in there])
        for shard in shards:
            shared.apply(shard, [(w, p[shard]) for w, (_, _, p) in zip(weights, there, strict=True)])
    trainers[0].begin_round(shared.theta)
    return trainers[0].evaluate(corpus.held_out(corpus.index.held_out_sequences))


def _row(name: str, found: Sequence[float], base: Sequence[float]) -> str:
    gaps = [x - b for x, b in zip(found, base, strict=True)]
    error = f" ± {statistics.stdev(gaps) / math.sqrt(len(gaps)):.4f}" if len(gaps) > 1 else ""
    return (
        f"| {name} | {' | '.join(f'{x:.4f}' for x in found)} | {statistics.mean(found):.4f} |"
        f" {statistics.mean(gaps):+.4f}{error} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="*", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="JSON lines of what was run; it is not run again")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    lines = chosen.keep.read_text().splitlines() if chosen.keep is not None and chosen.keep.exists() else []
    kept = {(name, seed, rounds): value for name, seed, rounds, value in map(json.loads, lines)}

    arms = tuple(dict.fromkeys(("equal paces", *chosen.arms)))
    for key in [(name, seed, chosen.rounds) for seed in range(chosen.seeds) for name in arms]:
        if key not in kept:
            kept[key] = _loss(ARMS[key[0]], _manifest(seed=key[1], rounds=key[2]))
            if chosen.keep is not None:
                with chosen.keep.open("a") as file:
                    file.write(json.dumps([*key, kept[key]]) + "\n")
    found = {name: [kept[name, seed, chosen.rounds] for seed in range(chosen.seeds)] for name in arms}
    print(f"| arm | {' | '.join(f'seed {seed}' for seed in range(chosen.seeds))} | mean | gap |")
    print("|---|" + "---|" * (chosen.seeds + 2))
    for name in arms:
        print(_row(name, found[name], found["equal paces"]))
    print(f"{time.process_time():.0f} s of CPU")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
