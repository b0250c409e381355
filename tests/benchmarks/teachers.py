"""Measures the loss when some of eight replicas train badly on purpose. Prints the table of docs/results/judging.md.

    python -m tests.benchmarks.teachers ROWS.jsonl [--cells honest:0 flip:1 ...] [--seeds 0]
    python -m tests.benchmarks.teachers ROWS.jsonl --table

The first command trains the runs that ROWS.jsonl lacks, the second prints the table. In each run eight replicas train a
small model on the demo's text for ROUNDS rounds, with the product's trainer, outer step, codec and judging, in one
process and without a network: the updates that a leader would commit are applied. A cell is an attack and the number of
replicas that carry it out. With `--undefended` every contribution counts whole. The enemies know all honest updates of
the round. A replica that is judged out is planned again in the next round, and has to be found in every round.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from peer.state.outer_optimizer import Outer
from peer.training.trainer import StageTrainer
from protocol.codec import sparse
from protocol.codec.sparse import Sparse
from protocol.ledger import run_state
from protocol.round import judging
from protocol.round.comparing import Update
from protocol.run import init, layout
from protocol.run.layout import ModelSpec
from protocol.run.manifest import Manifest, OuterSpec, TrainSpec
from tests.parity import reference
from tests.support import displacement, tiny

REPLICAS, ROUNDS, STEPS, ROWS = 8, 40, 5, 4
SEQUENCE = 64
MODEL = ModelSpec(vocab_size=4096, d_model=64, n_layers=3, n_heads=4, d_ff=176, context=SEQUENCE)
SHARDS = layout.shard_names(MODEL)
TOKENIZER = "peer/assets/sotu-4k.json"
COUNTS = (1, 2, 3)
"""About an eighth, a quarter and a third of the replicas."""
BAD_AFTER = 20
"""Rounds in which a slow starter is honest."""
Sent = dict[str, list[Sparse]]
Arrays = list[np.ndarray]
torch.set_num_threads(1)


def manifest(seed: int) -> Manifest:
    train = TrainSpec(
        inner_steps=STEPS,
        micro_batches=1,
        rows=ROWS,
        sequence=SEQUENCE,
        lr=4e-3,
        warmup_steps=20,
        total_steps=STEPS * ROUNDS,
    )
    return tiny.manifest(model=MODEL, train=train, seed=seed, rounds=ROUNDS, outer=OuterSpec(topk=32))


class Replica:
    """A replica that trains, and its updates."""

    def __init__(self, made: Manifest) -> None:
        self.made = made
        self.outer = Outer(MODEL, made.outer.codec, made.outer.beta, made.outer.eta)
        self.trainer = StageTrainer(MODEL, made.train, SHARDS)

    def train(self, theta: dict[str, Arrays], round: int, windows: Callable[[int], np.ndarray]) -> None:
        self.trainer.begin_round(theta)
        for step in range(STEPS):
            self.trainer.forward(0, torch.tensor(windows(step).astype(np.int64)))
            self.trainer.backward(0)
            norm = math.sqrt(sum(square for _, square in self.trainer.grad_sumsq()))
            self.trainer.step(round * STEPS + step + 1, norm)

    def send(self, changed: Callable[[str, Arrays], Arrays] = lambda shard, delta: delta) -> Sent:
        """Returns the update of a round's work; `changed` may change a shard's displacement, as an enemy does."""
        found: Sent = {}
        for shard in SHARDS:
            delta = changed(shard, self.trainer.delta(shard))
            self.outer.accumulate(shard, displacement.of(delta))
            payload, _ = self.outer.encode(shard)
            found[shard] = self.decoded(shard, payload)
        return found

    def decoded(self, shard: str, payload: bytes) -> list[Sparse]:
        return sparse.decode(self.made.outer.codec, layout.shapes(MODEL, shard), payload)

    def encoded(self, of: dict[str, Arrays]) -> Sent:
        """Returns arrays after the codec."""
        codec = self.made.outer.codec
        return {shard: self.decoded(shard, sparse.encode(codec, arrays)) for shard, arrays in of.items()}


def times(sent: Sent, factor: float, shards: Sequence[str] = SHARDS) -> Sent:
    """Returns a multiple of an update in some of its shards."""
    return {
        shard: [Sparse(x.index, x.values * np.float32(factor if shard in shards else 1.0)) for x in tensors]
        for shard, tensors in sent.items()
    }


def dense(sent: Sent, shard: str) -> Arrays:
    found = []
    for tensor, shape in zip(sent[shard], layout.shapes(MODEL, shard), strict=True):
        array = np.zeros(shape, np.float32)
        array.reshape(-1)[tensor.index] = tensor.values
        found.append(array)
    return found


class Run:
    """A run in which the last `bad` of `count` replicas carry out the attack `name`; with "honest" they are absent."""

    def __init__(self, name: str, bad: int, seed: int, defended: bool, count: int = REPLICAS) -> None:
        self.name, self.bad, self.defended, self.good = name, bad, defended, count - bad
        count = self.good if name == "honest" else count
        self.made = manifest(seed)
        self.theta = {shard: init.initial_shard(MODEL, self.made.seed_bytes, shard) for shard in SHARDS}
        self.replicas = [Replica(self.made) for _ in range(count)]
        self.outer = Outer(MODEL, self.made.outer.codec, self.made.outer.beta, self.made.outer.eta)
        text, self.held_out = reference.sotu_tokens(TOKENIZER)
        self.config = {
            "model": {n: getattr(MODEL, n) for n in ModelSpec.__slots__},
            "sequence": SEQUENCE, "micro_batches": 1, "rows": ROWS, "inner_steps": STEPS,
            "replicas": [{"stages": [(0, MODEL.n_layers)], "k": 0}] * count, "wire": "fp32",
        }  # fmt: skip
        self.windows = reference.text_windows(self.config, text, seed)
        self.random = np.random.default_rng(1000 + seed)
        self.past: list[list[Sent]] = []
        self.medians: list[float] = []
        self.committed: list[Sent] = []
        self.honest_out, self.bad_in, self.rounds, self.reasons = 0, 0, 0, dict[str, int]()

    def is_honest(self, replica: int, round: int) -> bool:
        return replica < self.good or (self.name == "starter" and round < BAD_AFTER)

    def round(self, number: int) -> None:
        """Trains, lets the enemies act, judges and applies."""
        honest: list[Sent] = []
        for i, replica in enumerate(self.replicas):
            if self.is_honest(i, number) or self.name in ("flip", "clip", "starter", "drift", "stale"):
                replica.train(self.theta, number, lambda step, i=i: self.windows(number, i, step))
            elif self.name == "text":
                replica.train(self.theta, number, lambda step: self.windows(0, 0, 0))
            if self.is_honest(i, number):
                honest.append(replica.send())
        sent = [*honest, *(self.evil(i, number, honest) for i in range(len(honest), len(self.replicas)))]
        self.past.append(sent)
        scales = self.judged(number, sent)
        self.applied(sent, scales)

    def applied(self, sent: list[Sent], scales: list[tuple[float, float]]) -> None:
        """The outer step."""
        weights = [scale * weight / sum(weight for _, weight in scales) for scale, weight in scales]
        for shard in SHARDS:
            for array, *tensors in zip(self.theta[shard], *(update[shard] for update in sent), strict=True):
                total = np.zeros(array.size, np.float32)
                for weight, tensor in zip(weights, tensors, strict=True):
                    total[tensor.index] += np.float32(weight) * tensor.values
                array -= np.float32(self.made.outer.eta) * total.reshape(array.shape)

    def judged(self, number: int, sent: list[Sent]) -> list[tuple[float, float]]:
        """Returns the scale and the weight of each update, weight 0 for those that are left out."""
        norms = [
            math.sqrt(sum(float(np.sum(x.values.astype(np.float64) ** 2)) for s in SHARDS for x in u[s])) for u in sent
        ]
        if not self.defended:
            return [(1.0, 1.0)] * len(sent)
        verdicts = self.verdicts(number, sent)
        for i, verdict in enumerate(verdicts):
            good = self.is_honest(i, number)
            self.rounds += good
            self.honest_out += good and verdict.reason is not None
            self.bad_in += not good and verdict.reason is None
            if verdict.reason is not None:
                kind = ("honest: " if good else "") + verdict.reason.split(" (")[0]
                self.reasons[kind] = self.reasons.get(kind, 0) + 1
        kept = [i for i, verdict in enumerate(verdicts) if verdict.reason is None]
        self.committed = [sent[i] for i in kept]
        self.medians.append(float(np.median([norms[i] * verdicts[i].scale for i in kept])))
        return [(v.scale, v.weight if v.reason is None else 0.0) for v in verdicts]

    def verdicts(self, number: int, sent: list[Sent]) -> list[judging.Verdict]:
        """Returns what the rule says of updates."""
        before = judging.PreviousRound(
            tuple(self.medians[-run_state.MEDIANS_KEPT :]),
            tuple(Update(lambda shard, u=u: [u[shard]]) for u in self.committed),
        )
        names = [hashlib.sha256(f"{number} {i}".encode()).hexdigest() for i in range(len(sent))]
        return judging.judge(self.made, names[0], names, [Update(lambda shard, u=u: [u[shard]]) for u in sent], before)

    def evil(self, i: int, round: int, honest: list[Sent]) -> Sent:
        """Returns the update of enemy `i`."""
        replica = self.replicas[i]
        match self.name:
            case "flip" | "starter":
                return replica.send(lambda shard, delta: [-array for array in delta])
            case "clip":
                return times(replica.send(lambda shard, delta: [-array for array in delta]), 9.9)
            case "noise":
                return self.like(honest[0], replica, lambda shard, shape: self.random.standard_normal(shape))
            case "stale":
                own = replica.send()
                return self.past[-1][i] if round % 4 else own
            case "copy":
                return honest[(i + round) % len(honest)]
            case "text":
                return replica.send()
            case "zero":
                return times(honest[0], 0.0)
            case "drift":
                return times(replica.send(), -3.0, ("block.1",))
            case "little":
                stacked = {s: [np.stack(a) for a in zip(*(dense(u, s) for u in honest), strict=True)] for s in SHARDS}
                return replica.encoded({s: [(a.mean(0) - a.std(0)) for a in arrays] for s, arrays in stacked.items()})
        raise ValueError(self.name)

    def like(self, other: Sent, replica: Replica, drawn: Callable[[str, tuple[int, ...]], np.ndarray]) -> Sent:
        """Returns an update of drawn values, each shard as long as that of another update."""
        made = replica.encoded(
            {s: [drawn(s, shape).astype(np.float32) for shape in layout.shapes(MODEL, s)] for s in SHARDS}
        )
        for shard in SHARDS:
            norms = [math.sqrt(sum(float((x.values**2).sum()) for x in update[shard])) for update in (other, made)]
            made = times(made, norms[0] / norms[1], (shard,))
        return made

    def loss(self) -> float:
        """Returns the held-out loss, nats per token."""
        named = {
            name: torch.tensor(array)
            for shard in SHARDS
            for (name, _), array in zip(layout.tensors(MODEL, shard), self.theta[shard], strict=True)
        }
        return float(reference.validation(self.config, named, self.held_out, rows=512))


ATTACKS = ("flip", "clip", "noise", "stale", "copy", "text", "zero", "drift", "little", "starter")


def train(name: str, bad: int, seed: int, defended: bool) -> dict[str, Any]:
    run, began = Run(name, bad, seed, defended), time.monotonic()
    for number in range(ROUNDS):
        run.round(number)
    return {
        "attack": name, "bad": bad, "seed": seed, "defended": defended, "loss": run.loss(),
        "honest_out": run.honest_out, "honest": run.rounds, "bad_in": run.bad_in, "reasons": run.reasons,
        "seconds": time.monotonic() - began,
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> None:
    seeds = sorted({row["seed"] for row in rows})
    for seed in seeds:
        found = {(r["attack"], r["bad"], r["defended"]): r for r in rows if r["seed"] == seed}
        print(f"\nseed {seed}\n\n| attack | bad of {REPLICAS} | undefended | judged | than the honest run |"
              " bad rounds let in | honest rounds left out |\n|---|---|---|---|---|---|---|")  # fmt: skip
        for (name, bad, defended), row in sorted(found.items(), key=lambda x: (x[0][1], x[0][0])):
            if not defended:
                continue
            plain, base = found.get((name, bad, False)), found.get(("honest", bad, False))
            worse = f"{100 * (row['loss'] / base['loss'] - 1):+.2f} %" if base else "?"
            bare = f"{plain['loss']:.3f}" if plain else "not run"
            print(
                f"| {name} | {bad} | {bare} | {row['loss']:.3f} | {worse} | {row['bad_in']} |"
                f" {row['honest_out']} of {row['honest']} |"
            )


def campaign(
    parser: argparse.ArgumentParser,
    key: Sequence[str],
    train: Callable[..., dict[str, Any]],
    table: Callable[[list[dict[str, Any]]], None],
) -> None:
    """Trains the rows of a benchmark that a file lacks, or prints their table.

    parser: has `cells`, NAME:COUNT..., and an `option`; the rest is added
    key: the fields of a row that tell it from others, in the order of the arguments of `train`: NAME, COUNT..., the
        seed, the option
    """
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("rows", type=Path)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--table", action="store_true")
    chosen = parser.parse_args()
    rows = [json.loads(line) for line in chosen.rows.read_text().splitlines()] if chosen.rows.exists() else []
    if chosen.table:
        return table(rows)
    known = {tuple(row[field] for field in key) for row in rows}
    for seed in chosen.seeds:
        for cell in chosen.cells:
            name, *counts = cell.split(":")
            arguments = (name, *map(int, counts), seed, chosen.option)
            if arguments not in known:
                with chosen.rows.open("a") as file:
                    file.write(json.dumps(train(*arguments)) + "\n")
                print(cell, flush=True)


def main() -> None:
    cells = ["honest:0", *(f"{attack}:{n}" for n in COUNTS for attack in ("honest", *ATTACKS))]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", nargs="*", default=cells)
    parser.add_argument("--undefended", dest="option", action="store_false")
    campaign(parser, ("attack", "bad", "seed", "defended"), train, table)


if __name__ == "__main__":
    main()
