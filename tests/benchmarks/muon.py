"""Muon against AdamW at 1, 4 and 8 replicas, each at its best learning rate. Prints the tables of docs/results/muon.md.

    python -m tests.benchmarks.muon --keep ROWS.jsonl
    python -m tests.benchmarks.muon --keep ROWS.jsonl --replicas 1 --rates 3e-3 6e-3 --seeds 1
    python -m tests.benchmarks.muon --time          # what an inner step costs with each, at d = 512

Full replicas of the demo's model in one process, with the project's own trainer, data order and outer step (tests/benchmarks/weights.py).
Every run reads as many tokens in as many steps and rounds: a step's sequences are divided among the replicas, so that more
replicas have smaller steps each. All runs of a seed have the same θ(0) and read the same text in each round.

First every learning rate with the first seed; then, of each optimizer and number of replicas, the best of these with the other seeds. While
the best one is the lowest or the highest that was tried, half or twice of it is tried, too. It may be stopped at any time: what is in
ROWS.jsonl is not run again, and `--table` prints what there is.

Loss: nats per token on the whole held-out text after the last round. Seconds: of the processor, with evaluation.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from peer.demo import recipe
from peer.demo.recipe import demo_corpus
from peer.training.trainer import StageTrainer
from protocol.errors import LocalError
from protocol.run import init, layout
from protocol.run.layout import ModelSpec
from protocol.run.manifest import OPTIMIZERS, Manifest, TrainSpec
from tests.benchmarks import weights
from tests.benchmarks.weights import Arm
from tests.e2e.swarms import options

REPLICAS = (1, 4, 8)
ROWS = 8
"""Sequences of a step of all replicas."""
RATES = (1.5e-3, 3e-3, 6e-3)
WIDEST = 4
"""How many times the rates are extended, at the most."""


@dataclass(frozen=True, slots=True)
class Run:
    """One training."""

    optimizer: str
    replicas: int
    rate: float
    seed: int


Found = dict[Run, tuple[float, float]]
"""(loss, seconds) of what was run."""


def manifest(run: Run, rounds: int) -> Manifest:
    """The demo's recipe, with a replica's part of a step in one micro-batch."""
    chosen = options(Path("unused"), full=run.replicas, rounds=rounds, inner_steps=None, seed=run.seed)
    made = recipe.make_manifest(chosen, demo_corpus().digest)
    train = replace(made.train, micro_batches=1, rows=ROWS // run.replicas, lr=run.rate, optimizer=run.optimizer)
    return replace(made, train=train)


def todo(found: Found, replicas: Sequence[int], rates: Sequence[float], seeds: int) -> Iterator[Run]:
    """What is to be run next, in order, by what was found until then."""
    pairs = [(optimizer, count) for count in replicas for optimizer in OPTIMIZERS]
    for pair in pairs:
        yield from (Run(*pair, rate, 0) for rate in rates)
    for pair in pairs:
        for _ in range(WIDEST):
            tried = sorted(run.rate for run in found if (run.optimizer, run.replicas, run.seed) == (*pair, 0))
            best = best_rate(found, *pair)
            if best not in (tried[0], tried[-1]) or len(rates) == 1:
                break
            yield Run(*pair, best / 2 if best == tried[0] else best * 2, 0)
    for seed in range(1, seeds):
        for pair in pairs:
            yield Run(*pair, best_rate(found, *pair), seed)


def best_rate(found: Found, optimizer: str, replicas: int) -> float:
    """The one with the lowest loss with the first seed."""
    runs = [run for run in found if (run.optimizer, run.replicas, run.seed) == (optimizer, replicas, 0)]
    return min(runs, key=lambda run: found[run][0]).rate


def losses(found: Found, optimizer: str, replicas: int, rate: float) -> dict[int, float]:
    """Of one learning rate, by seed."""
    return {
        run.seed: loss
        for run, (loss, _) in sorted(found.items(), key=lambda item: item[0].seed)
        if (run.optimizer, run.replicas, run.rate) == (optimizer, replicas, rate)
    }


def print_tables(found: Found) -> None:
    """What there is."""
    rates = sorted({run.rate for run in found})
    print("| replicas | optimizer |" + "".join(f" {rate:g} |" for rate in rates) + " seconds |")
    print("|---|---|" + "---|" * (len(rates) + 1))
    pairs = [(o, n) for n in sorted({run.replicas for run in found}) for o in OPTIMIZERS]
    pairs = [(o, n) for o, n in pairs if any((run.optimizer, run.replicas, run.seed) == (o, n, 0) for run in found)]
    for optimizer, replicas in pairs:
        first = [losses(found, optimizer, replicas, rate).get(0) for rate in rates]
        cells = "".join(f" {x:.4f} |" if x is not None else " |" for x in first)
        took = [s for run, (_, s) in found.items() if (run.optimizer, run.replicas) == (optimizer, replicas)]
        print(f"| {replicas} | {optimizer} |{cells} {statistics.median(took):.0f} |")
    print("\n| replicas | optimizer | best rate | by seed | mean | less than AdamW's |")
    print("|---|---|---|---|---|---|")
    base: dict[int, float] = {}
    for optimizer, replicas in pairs:
        rate = best_rate(found, optimizer, replicas)
        values = losses(found, optimizer, replicas, rate)
        base = values if optimizer == OPTIMIZERS[0] else base
        gains = [base[seed] - loss for seed, loss in values.items() if seed in base]
        error = f" ± {statistics.stdev(gains) / math.sqrt(len(gains)):.4f}" if len(gains) > 1 else ""
        less = f" {statistics.mean(gains):.4f}{error} " if optimizer != OPTIMIZERS[0] and gains else " "
        print(
            f"| {replicas} | {optimizer} | {rate:g} | {', '.join(f'{x:.4f}' for x in values.values())} |"
            f" {statistics.mean(values.values()):.4f} |{less}|"
        )


def print_times(steps: int) -> None:
    """Of an inner step of 2,048 tokens of 8 blocks 512 wide, both optimizers by turns."""
    spec = ModelSpec(vocab_size=4096, d_model=512, n_layers=8, n_heads=8, d_ff=1408, context=256)
    train = TrainSpec(inner_steps=1, micro_batches=8, rows=1, sequence=256, lr=1e-4, warmup_steps=0, total_steps=99)
    shards = layout.shard_names(spec)
    theta = {shard: init.initial_shard(spec, b"muon", shard) for shard in shards}
    trainers = {o: StageTrainer(spec, replace(train, optimizer=o), shards) for o in OPTIMIZERS}
    took: dict[str, list[tuple[float, float]]] = {optimizer: [] for optimizer in OPTIMIZERS}
    for trainer in trainers.values():
        trainer.begin_round(theta)
    for step in range(steps + 1):
        for optimizer, trainer in trainers.items():
            began = time.process_time()
            for micro in range(trainer.train.micro_batches):
                trainer.forward(micro, torch.randint(spec.vocab_size, (trainer.train.rows, trainer.train.sequence + 1)))
                trainer.backward(micro)
            norm = math.sqrt(sum(square for _, square in trainer.grad_sumsq()))
            done = time.process_time()
            trainer.step(step + 1, norm)
            if step:  # memory is taken in the first
                took[optimizer].append((done - began, time.process_time() - done))
    print("| optimizer | forward and backward | optimizer |\n|---|---|---|")
    for optimizer, found in took.items():
        model, own = (statistics.median(times) for times in zip(*found, strict=True))
        print(f"| {optimizer} | {model:.2f} s | {own:.2f} s |")


def read(path: Path | None, rounds: int) -> Found:
    """What a file has of runs of so many rounds."""
    lines = path.read_text().splitlines() if path is not None and path.exists() else []
    return {Run(*run): (loss, took) for *run, length, loss, took in map(json.loads, lines) if length == rounds}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", nargs="*", type=int, default=REPLICAS, choices=[1, 2, 4, 8])
    parser.add_argument("--rates", nargs="*", type=float, default=RATES)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="JSON lines of what was run; it is not run again")
    parser.add_argument("--time", action="store_true", help="measure an inner step instead")
    parser.add_argument("--table", action="store_true", help="only print what was run")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.time:
        print_times(steps=5)
        return 0
    found = read(chosen.keep, chosen.rounds)
    for run in () if chosen.table else todo(found, chosen.replicas, chosen.rates, chosen.seeds):
        if run not in found:
            made, began = manifest(run, chosen.rounds), time.process_time()
            try:
                loss = weights.loss(Arm(((made.train.inner_steps, 1),) * run.replicas), made)
            except LocalError:  # what is not finite is no loss
                loss = math.inf
            found[run] = loss, time.process_time() - began
            line = json.dumps([run.optimizer, run.replicas, run.rate, run.seed, chosen.rounds, *found[run]])
            print(line, flush=True)
            if chosen.keep is not None:
                with chosen.keep.open("a") as file:
                    file.write(line + "\n")
    print_tables(found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
