"""The hours to a loss: of a swarm, of its best machine alone, and of the same swarm at commit 2dc8998.

    python -m tests.benchmarks.hours --keep docs/results/hours.jsonl [--seeds 3] [--swarms two eight]
    python -m tests.benchmarks.hours --keep docs/results/hours.jsonl --plans      # twenty swarms, plans only

Three figures make an hour. The replicas of a swarm and their tokens a second are the planner's, for the model of a
preset. What of them reaches commits is measured in virtual time: the real daemons, with a machine as fast as each
replica (tests/sim/paces.py). What a token teaches is trained: a small model by bytes (tests/benchmarks/regime.py), by
the same replicas, each of which reads rows in proportion to its tokens a second, so that a round has the same length
for all. Chains have the number formats of a run and as many stages as in the plan, at most one a block.

The best machine alone trains the small model for WHOLE rounds without outer steps; that stands for the 20 tokens a
parameter of the preset. The three losses are those that it has after a quarter, a half and all of that. Each length is
a training of its own, at whose end the learning rate falls: a state is kept after some rounds, and from each the rate
falls. Between lengths a loss is linear in the logarithm of the rounds.

Rows are kept, and what is there is not computed again. Those of 2dc8998 are made in a checkout of that commit by
hours_before.py in the lab folder of tests/benchmarks at commit a4620914; each is trained for twice the rounds of the
product, since longer does not matter.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from peer.state.outer_optimizer import Outer
from peer.training.optimizer import Pace
from peer.training.trainer import StageTrainer
from protocol.planning.arrange import arrange
from protocol.planning.partition import Candidate
from protocol.run import init, layout, presets
from protocol.run.corpus import slots
from protocol.run.manifest import Manifest, OuterSpec, TimingSpec, TrainSpec
from tests.benchmarks import regime
from tests.sim import paces
from tests.support import plans, tiny
from tests.support.chains import Oracle

ROWS = 4
"""Of an inner step of the best machine alone; each of 256 tokens."""
WHOLE = 60
"""Rounds that it trains."""
FIRST = 3
"""Rounds after which the first state is kept, then after twice as many, and so on; the fifth ends with WHOLE."""
SHARES = (0.25, 0.5, 1.0)
"""Of them, after which its losses are those that are asked for."""
TOPK = 1024
"""Entries of every 4096. A run has thousands of rounds, and an entry that is not sent at once waits for a hundred: 2 %
of them. WHOLE rounds with the 32 of a run would send each entry once at most."""
DECAY = 0.2
"""Of a training, in which the learning rate falls."""
VALID_SEQUENCES = 256
PLANS = 20
OLD_CHAIN = 0.39
"""Of what a full replica's token teaches, a chain's at 2dc8998 taught, at most (docs/results/learning.md)."""
WARM, MEASURED = 2, 4
"""Rounds in virtual time: before the paces are known, and those that count."""
HOST = 32 * 10**9
"""Bytes of memory beside a card."""
Rows = dict[tuple[str, str, int], dict[str, Any]]
"""By product, swarm and seed."""


def _card(number: int, memory: float, up: float, down: float, tflops: float) -> Candidate:
    """A home with a card: GB, Mb/s, TFLOP/s that training gets out of it."""
    return Candidate(
        peer=f"p{number:02}",
        memory_bytes=int(0.9e9 * memory),
        host_bytes=HOST,
        device="cuda",
        up_bps=int(1e6 * up),
        down_bps=int(1e6 * down),
        speed_flops=int(1e12 * tflops),
    )


def _homes(*homes: tuple[float, float, float]) -> list[Candidate]:
    """Memory, Mb/s up and TFLOP/s of each; five times as fast down."""
    return [_card(i, memory, up, 5 * up, tflops) for i, (memory, up, tflops) in enumerate(homes)]


SWARMS: dict[str, tuple[str, str, Callable[[], list[Candidate]]]] = {
    "two": ("1b", "two homes with 24 GB", lambda: _homes((24, 20, 30), (24, 20, 30))),
    "eight": (
        "1b",
        "eight homes with 8 to 24 GB",
        lambda: _homes(
            (8, 20, 10), (8, 20, 12), (8, 20, 10), (12, 20, 15), (12, 20, 18), (16, 20, 20), (24, 20, 35), (24, 20, 30)
        ),
    ),
    "ten": (
        "512m",
        "ten homes, two of them on one LAN",
        lambda: _homes(
            (8, 20, 10), (8, 20, 12), (12, 20, 15), (12, 40, 18), (8, 20, 10), (16, 20, 20), (24, 20, 30),
            (8, 1000, 12), (8, 1000, 12), (12, 20, 15),
        ),
    ),
    "fifty": (
        "1b",
        "fifty homes as in planner.md",
        lambda: [replace(c, device="cuda", host_bytes=HOST) for c in plans.volunteers(random.Random(0), 50)],
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Replica:
    """One of a plan.

    stages: how many
    rate: tokens a second
    """

    stages: int
    rate: float


# --- tokens a second


def manifest_of(preset: str, optimizer: str = "muon") -> Manifest:
    """A run of this preset."""
    of = presets.PRESETS[preset]
    train = TrainSpec(
        inner_steps=of.inner_steps, micro_batches=of.micro_batches, rows=of.rows, sequence=of.model.context, lr=of.lr,
        warmup_steps=10, total_steps=100_000, optimizer=optimizer,
    )  # fmt: skip
    timing = TimingSpec(round_seconds=of.round_seconds, round_deadline=max(120.0, 2 * of.round_seconds))
    return tiny.manifest(model=of.model, train=train, timing=timing, outer=OuterSpec())


def planned(name: str) -> list[Replica]:
    """The matchmaker's plan of a swarm."""
    preset, _, machines = SWARMS[name]
    return [Replica(len(r.members), r.rate) for r in arrange(manifest_of(preset), machines())[0]]


def best_alone(name: str) -> float:
    """Tokens a second of the machine that trains most by itself, without rounds; of the fastest, as if its memory held
    the model, where no machine's does."""
    preset, _, machines = SWARMS[name]
    made, found = manifest_of(preset), machines()
    for candidates in (found, [replace(c, memory_bytes=10**12, host_bytes=10**12) for c in found]):
        if rates := [r.rate for c in candidates for r in arrange(made, [c])[0]]:
            return max(rates)
    raise AssertionError("no machine computes")


def committed(replicas: Sequence[Replica], seconds: float) -> float:
    """The share of what these train that is in commits: real daemons in virtual time, rounds of so many seconds."""
    made = paces.manifest(seconds, len(replicas))
    fastest = max(r.rate for r in replicas)
    machines = [paces.Machine(pace=seconds / 200 * fastest / r.rate) for r in replicas]
    swarm = paces.PacedSwarm(machines, made)

    async def script(swarm: paces.PacedSwarm) -> None:
        await swarm.round(WARM + MEASURED)

    swarm.run(script)
    return swarm.rate(WARM, WARM + MEASURED) / paces.possible(made, [[machine.pace] for machine in machines])


# --- what tokens teach


@cache
def held_out() -> np.ndarray:
    return regime.text().held_out(VALID_SEQUENCES)


class Falling(Pace):
    """A learning rate that warms up, stays, and falls to a tenth in the last DECAY of `total_steps`.

    So trainings of several lengths have their beginning in common. It costs 0.012 nats against a cosine, in all arms.
    """

    def rate(self, train: TrainSpec, step: int) -> float:
        """The learning rate of inner step `step`."""
        left = 1 - step / (self.total_steps or train.total_steps)
        return train.lr * min(1.0, step / train.warmup_steps, 0.1 + 0.9 * max(0.0, left) / DECAY)


class Trained:
    """One replica of the small model: a trainer, and the error feedback of each of its members."""

    def __init__(self, made: Manifest, stages: int, rows: int) -> None:
        spec, train = made.model, replace(made.train, rows=rows)
        blocks = [i * spec.n_layers // stages for i in range(1, stages)]
        self.rows, self.trainer = rows, StageTrainer(spec, train, layout.shard_names(spec))
        if blocks:
            wires = (made.chains.forward, made.chains.backward)
            self.trainer = Oracle(spec, train, [1 + block for block in blocks], wires)
        self.outers = [Outer(spec, made.outer.codec, made.outer.beta, made.outer.eta) for _ in range(len(blocks) + 1)]

    def payloads(self, theta: Mapping[str, Any]) -> Iterator[tuple[str, bytes]]:
        """The update's payloads, with the shard of each; the feedback loses them."""
        moved = [(shard, self.outers[0], self.trainer.displacement(shard)) for shard in theta]
        for i, outer in enumerate(self.outers[1:]):
            moved.append(("anchor", outer, [(theta["anchor"][0], self.trainer.copies[i].detach().numpy())]))
        for shard, outer, displacement in moved:
            outer.accumulate(shard, displacement)
            yield shard, outer.encode(shard)[0]


class SmallSwarm:
    """Replicas of the small model, which train it together; one replica alone has no outer step."""

    def __init__(self, made: Manifest, replicas: Sequence[Replica], rate: float, alone: bool = False) -> None:
        self.made, self.alone, self.rounds, self.slot = made, alone, 0, 0
        rows = [max(1, round(ROWS * r.rate / rate)) for r in replicas]
        stages = [min(r.stages, made.model.n_layers) for r in replicas]
        self.replicas = [Trained(made, *both) for both in zip(stages, rows, strict=True)]
        self.outer = Outer(made.model, made.outer.codec, made.outer.beta, made.outer.eta)
        self.outer.theta = {
            s: init.initial_shard(made.model, made.seed_bytes, s) for s in layout.shard_names(made.model)
        }

    def round(self, length: int) -> None:
        """One round of a training of so many."""
        inner, theta = self.made.train.inner_steps, self.outer.theta
        sent: dict[str, list[tuple[float, bytes]]] = {shard: [] for shard in theta}
        total = sum(replica.rows for replica in self.replicas)
        for replica in self.replicas:
            pace = Falling(self.rounds * inner, inner, 1, total_steps=length * inner)
            replica.trainer.begin_round(theta, pace)
            for step in range(inner):
                at = slots(self.slot, step, replica.rows)
                replica.trainer.forward(0, torch.tensor(regime.text().slots(self.made.seed_bytes, at)))
                replica.trainer.backward(0)
                norm = math.sqrt(sum(value for _, value in replica.trainer.grad_sumsq()))
                replica.trainer.step(self.rounds * inner + step + 1, norm)
            self.slot += inner * replica.rows
            if self.alone:
                self.outer.theta = {s: [b.copy() for _, b in replica.trainer.displacement(s)] for s in theta}
                continue
            for shard, payload in replica.payloads(theta):
                sent[shard].append((replica.rows / total, payload))
        for shard, payloads in sent.items():
            if payloads:
                self.outer.apply(shard, payloads)
        self.rounds += 1

    def loss(self) -> float:
        """Nats per held-out byte, as a plain model."""
        plain = StageTrainer(self.made.model, self.made.train, layout.shard_names(self.made.model))
        plain.begin_round(self.outer.theta)
        return plain.evaluate(held_out())

    def ended(self) -> tuple[int, float]:
        """The rounds and the loss of the training that ends with the next rounds, DECAY of them all. A child process
        does them: this swarm stays as it is."""
        length = round(self.rounds / (1 - DECAY))
        reader, writer = os.pipe()
        if not (child := os.fork()):
            try:
                while self.rounds < length:
                    self.round(length)
                os.write(writer, str(self.loss()).encode())
            finally:
                os._exit(0)
        os.close(writer)
        with open(reader, "rb") as told:
            loss = float(told.read())
        os.waitpid(child, 0)
        return length, loss


def curve(swarm: SmallSwarm, least: float, most: float) -> list[tuple[int, float]]:
    """(rounds, loss) of trainings, each twice as long as the one before, up to one with at most the loss `least`, or
    with `most` rounds."""
    found: list[tuple[int, float]] = []
    for length in itertools.count():
        until = FIRST * 2**length
        while swarm.rounds < until:
            swarm.round(10**6)
        found.append(swarm.ended())
        print(f"    {found[-1][0]} rounds: {found[-1][1]:.4f}", flush=True)
        if found[-1][1] <= least or found[-1][0] >= most:
            return found
    raise AssertionError


def rounds_to(points: Sequence[Sequence[float]], loss: float) -> float:
    """Rounds after which the curve has this loss; inf if it never has."""
    for (a, x), (b, y) in itertools.pairwise(points):
        if y <= loss <= x:
            return math.exp(math.log(a) + (math.log(b) - math.log(a)) * (x - loss) / (x - y))
    return points[0][0] if points[0][1] <= loss else math.inf


# --- rows


def small_manifest(seed: int) -> Manifest:
    """Of the small model's training; every rate but the warm-up's is that of `round`."""
    made = regime.manifest(seed, "muon", WHOLE, replace(regime.MODEL, residual_width=42))
    return replace(made, outer=replace(made.outer, topk=TOPK))


def plain_manifest(seed: int) -> Manifest:
    """The same of a plain model, which the best machine trains alone."""
    return replace(small_manifest(seed), model=regime.MODEL)


def drawn(number: int) -> tuple[str, list[Candidate]]:
    """A preset and 4 to 200 home machines."""
    draw = random.Random(number)
    found = plans.volunteers(draw, draw.randint(4, 200))
    preset = ("178m", "512m", "1b", "7b")[number % 4]
    return preset, [replace(c, device="cuda", host_bytes=HOST) for c in found]


def compare_plans(rows: Rows) -> None:
    """Prints what the plans of PLANS swarms teach an hour, now and at 2dc8998."""
    print("| preset | machines | 2dc8998: full, chains | now: full, chains | tokens | learning |")
    print("|---|---|---|---|---|---|")
    for number in range(PLANS):
        preset, machines = drawn(number)
        found = arrange(manifest_of(preset), machines)[0]
        now = [sum(r.rate for r in found if (len(r.members) > 1) == chains) for chains in (False, True)]
        old = [rows["2dc8998 plan", preset, number][kind] for kind in ("full", "chains")]
        learned = sum(now) / (old[0] + OLD_CHAIN * old[1]) if sum(old) else math.inf
        cells = [preset, str(len(machines)), *(f"{full:,.0f} + {chains:,.0f}" for full, chains in (old, now))]
        print(
            f"| {' | '.join(cells)} | {sum(now) / sum(old) if sum(old) else math.inf:.2f} | {learned:.2f} |", flush=True
        )


def read(path: Path) -> Rows:
    """What is kept."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {(x["product"], x["swarm"], x["seed"]): x for x in map(json.loads, lines)}


def losses(rows: Rows, seed: int) -> list[float]:
    """Those that are asked for, of the best machine alone: SHARES of WHOLE."""
    points = dict(map(tuple, rows["alone", "", seed]["points"]))
    return [points[round(share * WHOLE)] for share in SHARES]


def compute(product: str, swarm: str, seed: int, rows: Rows) -> dict[str, Any]:
    """One row."""
    row: dict[str, Any] = {"product": product, "swarm": swarm, "seed": seed}
    if product == "alone":
        made = SmallSwarm(plain_manifest(seed), [Replica(1, 1.0)], 1.0, alone=True)
        return {**row, "points": curve(made, 0.0, WHOLE)}
    replicas, rate = planned(swarm), best_alone(swarm)
    share = committed(replicas, presets.PRESETS[SWARMS[swarm][0]].round_seconds)
    made = SmallSwarm(small_manifest(seed), replicas, rate)
    of_rows = sum(replica.rows for replica in made.replicas) / ROWS
    return {
        **row,
        "replicas": [[r.stages, round(r.rate)] for r in replicas],
        "best_alone": round(rate),
        "committed": round(share, 3),
        "of_rows": of_rows,
        "points": curve(made, losses(rows, seed)[-1], 4 * WHOLE),
    }


def hours(rows: Rows, product: str, swarm: str, seed: int) -> list[float]:
    """Of a swarm to each of the losses; inf where its trainings were too short."""
    row, now = rows[product, swarm, seed], rows.get(("now", swarm, seed), rows[product, swarm, seed])
    parameters = layout.total_parameters(replace(manifest_of(SWARMS[swarm][0]).model, residual_width=0))
    whole = presets.TOKENS_PER_PARAMETER * parameters / now["best_alone"] / 3600
    rate = sum(rate for _, rate in row["replicas"]) / now["best_alone"]
    return [
        rounds_to(row["points"], loss) / WHOLE * whole * row["of_rows"] / rate / row["committed"]
        for loss in losses(rows, seed)
    ]


def table(rows: Rows, seeds: int) -> None:
    """Prints what there is."""
    print("| swarm | loss after | best alone | 2dc8998 | now | of 2dc8998 | of the best alone |")
    print("|---|---|---|---|---|---|---|")
    for swarm, (preset, about, _) in SWARMS.items():
        there = [seed for seed in range(seeds) if ("now", swarm, seed) in rows]
        if not there:
            continue
        parameters = layout.total_parameters(replace(manifest_of(preset).model, residual_width=0))
        alone = presets.TOKENS_PER_PARAMETER * parameters / rows["now", swarm, there[0]]["best_alone"] / 3600
        for i, share in enumerate(SHARES):
            now = [hours(rows, "now", swarm, seed)[i] for seed in there]
            both = [seed for seed in there if ("2dc8998", swarm, seed) in rows]
            old = [hours(rows, "2dc8998", swarm, seed)[i] for seed in both]
            of_old = [a / b for a, b in zip(now, old, strict=False)]
            cells = [f"{about}, {preset}", f"{share:.0%}", f"{share * alone:,.0f}", _mean(old), _mean(now)]
            cells += [_mean(of_old, 2), _mean([x / (share * alone) for x in now], 2)]
            print(f"| {' | '.join(cells)} |")


def _mean(values: Sequence[float], digits: int = 0) -> str:
    """Mean, and in brackets the least and the most."""
    if not values:
        return "-"
    least, mean, most = (f"{x:,.{digits}f}" for x in (min(values), statistics.mean(values), max(values)))
    return f"{mean} ({least} to {most})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, required=True, help="JSON lines of what was computed")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--swarms", nargs="*", default=list(SWARMS), choices=list(SWARMS))
    parser.add_argument("--plans", action="store_true", help="compare plans, and train nothing")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    rows = read(chosen.keep)
    if chosen.plans:
        compare_plans(rows)
        return 0
    for seed in range(chosen.seeds):
        for product, swarm in (("alone", ""), *(("now", swarm) for swarm in chosen.swarms)):
            if (product, swarm, seed) not in rows:
                print(f"{product} {swarm}, seed {seed}", flush=True)
                rows[product, swarm, seed] = compute(product, swarm, seed, rows)
                with chosen.keep.open("a") as file:
                    file.write(json.dumps(rows[product, swarm, seed]) + "\n")
    table(rows, chosen.seeds)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
