"""Should the embedding of a compressed chain learn at sqrt(d / k) times the rate (`train.scale_embedding_lr`)? Prints the table of docs/results/boundary.md.

    python -m tests.benchmarks.embedding --keep ROWS.jsonl --next     # one run, the next that ROWS.jsonl does not have
    python -m tests.benchmarks.embedding --keep ROWS.jsonl            # all of them
    python -m tests.benchmarks.embedding --keep ROWS.jsonl --table    # none

Two replicas of the demo's model in one process, with half the sequences of a step each, and the project's trainer, data order and
outer step with the paper's density: 32 entries of 4096. Both of them, one or none is a chain of four stages of rank d/8 or d/32 with fp32 at its boundaries, as
tests/benchmarks/boundary.py computes it, with and without the option. All runs of a seed have the same θ(0), text and U.

Loss: nats per held-out token of θ after the last round, as a plain model and as the chain computes it. Gap: of the plain ones, to
the run of the seed in which nobody is compressed. Gain: what the option takes off the gap; mean and standard error over the seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from peer.demo.recipe import demo_corpus
from peer.state.outer_optimizer import Outer
from tests.benchmarks import boundary
from tests.benchmarks.boundary import BASE, VALID_SEQUENCES, D

REPLICAS = 2
WIRES = "fp32:fp32"
TOPK = 32
COMPRESSED = {"all": REPLICAS, "half": REPLICAS // 2}
PARTS = (8, 32)
"""d / k."""


@dataclass(frozen=True, slots=True)
class Run:
    """One training; `part`: d / k, 0 where nobody is compressed."""

    compressed: str
    part: int
    scaled: bool
    seed: int
    rounds: int


Found = dict[Run, tuple[float, float, float]]
"""(plain loss, loss as the chain computes it, seconds of the processor) of what was run."""


def losses(run: Run) -> tuple[float, float]:
    """(plain loss, loss of the first replica as it computes it)."""
    made = boundary.manifest(run.seed, run.rounds)
    train = replace(made.train, micro_batches=made.train.micro_batches // REPLICAS)
    made = replace(made, train=train, outer=replace(made.outer, topk=TOPK))
    arm = f"{D // run.part}:{WIRES}{':scaled' if run.scaled else ''}" if run.part else BASE
    chains = COMPRESSED.get(run.compressed, 0)
    replicas = [boundary.trainer(arm if m < chains else BASE, made) for m in range(REPLICAS)]
    outers = [Outer(made.model, made.outer.codec, made.outer.beta, made.outer.eta) for _ in replicas]
    shared = outers[0]
    shared.theta = boundary.first_state(made)
    slots = train.inner_steps * train.step_rows
    for r in range(run.rounds):
        for m, (replica, outer) in enumerate(zip(replicas, outers, strict=True)):
            replica.begin_round(shared.theta)
            boundary.train_round(replica, made, r, (r * REPLICAS + m) * slots)
            for shard in shared.theta:
                outer.accumulate(shard, replica.displacement(shard))
        for shard in shared.theta:
            shared.apply(shard, [(1 / REPLICAS, outer.encode(shard)[0]) for outer in outers])
    replicas[0].begin_round(shared.theta)
    held_out = demo_corpus().held_out(VALID_SEQUENCES)
    return boundary.plain_loss(made, shared.theta), replicas[0].evaluate(held_out)


def todo(seeds: int, rounds: int) -> Iterator[Run]:
    """All runs; whole seeds one after the other, so that what there is at any time can be compared."""
    for seed in range(seeds):
        yield Run("none", 0, False, seed, rounds)
        for part in PARTS:
            for compressed in COMPRESSED:
                for scaled in (False, True):
                    yield Run(compressed, part, scaled, seed, rounds)


def print_table(found: Found, seeds: int, rounds: int) -> None:
    """What there is."""
    print("| compressed | k/d | seed | gap | gap with the option | gain | as the chain computes it: gain |")
    print("|---|---|---|---|---|---|---|")
    for part in PARTS:
        for compressed in COMPRESSED:
            gains, chain_gains = [], []
            for seed in range(seeds):
                base = found.get(Run("none", 0, False, seed, rounds))
                without, scaled = (found.get(Run(compressed, part, s, seed, rounds)) for s in (False, True))
                if base is None or without is None or scaled is None:
                    continue
                gains.append(without[0] - scaled[0])
                chain_gains.append(without[1] - scaled[1])
                print(
                    f"| {compressed} | 1/{part} | {seed} | {without[0] - base[0]:+.4f} | {scaled[0] - base[0]:+.4f} |"
                    f" {gains[-1]:+.4f} | {chain_gains[-1]:+.4f} |"
                )
            print(f"| {compressed} | 1/{part} | mean | | | {_mean(gains)} | {_mean(chain_gains)} |")
    plain = [f"{loss[0]:.4f}" for run, loss in sorted(found.items(), key=lambda x: x[0].seed) if not run.part]
    print(
        f"\nNobody compressed: {', '.join(plain)}. Seconds of a run: {statistics.median(x[2] for x in found.values()):.0f}"
    )


def _mean(values: list[float]) -> str:
    if len(values) < 2:
        return ""
    return f"{statistics.mean(values):+.4f} ± {statistics.stdev(values) / math.sqrt(len(values)):.4f}"


def read(path: Path) -> Found:
    """What a file has."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {Run(*run): (plain, chain, took) for *run, plain, chain, took in map(json.loads, lines)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, required=True, help="JSON lines of what was run; it is not run again")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--next", action="store_true", help="one run only; exit 3 when there is none left")
    parser.add_argument("--table", action="store_true", help="only print what was run")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    found = read(chosen.keep)
    left = [run for run in todo(chosen.seeds, chosen.rounds) if run not in found]
    if chosen.next and not left:
        return 3
    for run in () if chosen.table else left[:1] if chosen.next else left:
        began = time.process_time()
        found[run] = (*losses(run), time.process_time() - began)
        line = json.dumps([run.compressed, run.part, run.scaled, run.seed, run.rounds, *found[run]])
        print(line, flush=True)
        with chosen.keep.open("a") as file:
            file.write(line + "\n")
    if not chosen.next:
        print_table(found, chosen.seeds, chosen.rounds)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
