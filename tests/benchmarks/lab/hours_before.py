"""Rows of commit 2dc8998 for tests/benchmarks/hours.py: run with a checkout of that commit as working folder.

    PYTHONPATH=. python HERE/hours_before.py --keep ROWS.jsonl --corpus FOLDER [--seeds 3] [--swarms two ...]

FOLDER: the text of tests/benchmarks/regime.py (`python -c "from tests.benchmarks import regime; print(regime.text().folder)"`).
The same training as there, by that commit's own trainers, outer step, planner and daemons; AdamW, and chains with the
rank of the plan (as a share of the width), int4 both ways, as its `init` wrote them. The learning rate falls as there.
"""

import argparse
import itertools
import json
import math
import os
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from peer.corpus.reader import CorpusReader
from peer.demo import recipe
from peer.net.disk import LocalDisk
from peer.state.outer_optimizer import Outer
from peer.training import schedule
from peer.training.schedule import Pace
from peer.training.trainer import StageTrainer
from protocol.codec import subspace
from protocol.planning.arrange import arrange
from protocol.planning.partition import Candidate
from protocol.run import data_order, init, layout, presets
from protocol.run.layout import ModelSpec
from protocol.run.manifest import ChainSpec, OuterSpec, TimingSpec, TrainSpec
from tests import plans, tiny
from tests.chains import project_at
from tests.e2e.swarms import options
from tests.sim import paces

ROWS, WHOLE, FIRST, DECAY = 4, 60, 3, 0.2
MODEL = ModelSpec(vocab_size=257, d_model=128, n_layers=4, n_heads=4, d_ff=352, context=256)


def learning_rate(train, step):
    """As `Falling` in tests/benchmarks/hours.py."""
    left = 1 - step / train.total_steps
    return train.lr * min(1.0, step / train.warmup_steps, 0.1 + 0.9 * max(0.0, left) / DECAY)


schedule.learning_rate = learning_rate


def card(number, memory, up, down, tflops):
    return Candidate(
        peer=f"p{number:02}",
        memory_bytes=int(0.9e9 * memory),
        device="cuda",
        up_bps=int(1e6 * up),
        down_bps=int(1e6 * down),
        speed_flops=int(1e12 * tflops),
    )


def homes(*found):
    return [card(i, memory, up, 5 * up, tflops) for i, (memory, up, tflops) in enumerate(found)]


SWARMS = {
    "two": ("1b", lambda: homes((24, 20, 30), (24, 20, 30))),
    "eight": (
        "1b",
        lambda: homes(
            (8, 20, 10), (8, 20, 12), (8, 20, 10), (12, 20, 15), (12, 20, 18), (16, 20, 20), (24, 20, 35), (24, 20, 30)
        ),
    ),
    "ten": (
        "512m",
        lambda: homes(
            (8, 20, 10),
            (8, 20, 12),
            (12, 20, 15),
            (12, 40, 18),
            (8, 20, 10),
            (16, 20, 20),
            (24, 20, 30),
            (8, 1000, 12),
            (8, 1000, 12),
            (12, 20, 15),
        ),
    ),
    "fifty": ("1b", lambda: [replace(c, device="cuda") for c in plans.volunteers(random.Random(0), 50)]),
}


def manifest_of(preset):
    of = presets.PRESETS[preset]
    train = TrainSpec(
        inner_steps=of.inner_steps,
        micro_batches=of.micro_batches,
        rows=of.rows,
        sequence=of.sequence,
        lr=of.lr,
        warmup_steps=10,
        total_steps=100_000,
        scale_embedding_lr=True,
    )
    timing = TimingSpec(round_seconds=of.round_seconds, round_deadline=max(120.0, 2 * of.round_seconds))
    return tiny.manifest(
        model=of.model(of.vocab_size, of.sequence),
        train=train,
        timing=timing,
        outer=OuterSpec(),
        chains=ChainSpec(rank=of.ranks),
    )


def committed(rates, seconds):
    made = paces.manifest(seconds, len(rates))
    machines = [paces.Machine(pace=seconds / 200 * max(rates) / rate) for rate in rates]
    swarm = paces.PacedSwarm(machines, made)

    async def script(swarm):
        await swarm.round(6)

    swarm.run(script)
    return swarm.rate(2, 6) / paces.possible(made, [[m.pace] for m in machines])


class Trained:
    def __init__(self, made, stages, rows, rank, lr):
        spec, train = made.model, replace(made.train, rows=rows, lr=lr, scale_embedding_lr=True)
        self.rows = rows
        shards = layout.shard_names(spec)
        if stages > 1:
            k = rank * spec.d_model // 64  # rank: in 64ths of the width
            self.trainer = StageTrainer(
                spec,
                train,
                shards,
                rank=k,
                basis=subspace.basis(made.seed_bytes, spec.d_model, spec.d_model) if k else None,
            )
        else:
            self.trainer = StageTrainer(spec, train, shards)
        self.cuts = [1 + i * spec.n_layers // stages for i in range(1, stages)]
        self.project()
        self.outer = Outer(spec, made.outer.codec, made.outer.beta, made.outer.eta)

    def project(self):
        """A copied trainer needs it again: what was put in before closes over the original."""
        if self.cuts:
            project_at(self.trainer, self.cuts, wires=("int4", "int4"))


class SmallSwarm:
    def __init__(self, made, replicas, rate, lr):
        self.made, self.rounds, self.slot = made, 0, 0
        self.replicas = [
            Trained(made, min(s, made.model.n_layers), max(1, round(ROWS * r / rate)), k, lr) for s, r, k in replicas
        ]
        self.outer = Outer(made.model, made.outer.codec, made.outer.beta, made.outer.eta)
        self.outer.theta = {
            s: init.initial_shard(made.model, made.seed_bytes, s) for s in layout.shard_names(made.model)
        }

    def round(self, length):
        inner, theta = self.made.train.inner_steps, self.outer.theta
        sent = {shard: [] for shard in theta}
        total = sum(replica.rows for replica in self.replicas)
        for replica in self.replicas:
            replica.trainer.begin_round(theta, Pace(self.rounds * inner, inner, 1, total_steps=length * inner))
            for step in range(inner):
                at = data_order.slots(self.slot, step, replica.rows)
                replica.trainer.forward(0, torch.tensor(TEXT.slots(self.made.seed_bytes, at)))
                replica.trainer.backward(0)
                norm = math.sqrt(sum(value for _, value in replica.trainer.grad_sumsq()))
                replica.trainer.step(self.rounds * inner + step + 1, norm)
            self.slot += inner * replica.rows
            for shard in theta:
                replica.outer.accumulate(shard, replica.trainer.displacement(shard))
                sent[shard].append((replica.rows / total, replica.outer.encode(shard)[0]))
        for shard, payloads in sent.items():
            self.outer.apply(shard, payloads)
        self.rounds += 1

    def loss(self):
        plain = StageTrainer(self.made.model, self.made.train, layout.shard_names(self.made.model))
        plain.begin_round(self.outer.theta)
        return plain.evaluate(TEXT.held_out(256))

    def ended(self):
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


def small_manifest(seed):
    made = recipe.make_manifest(
        options(Path("run"), full=1, rounds=WHOLE, seed=seed, inner_steps=None), "0" * 64, MODEL
    )
    train = replace(
        made.train,
        inner_steps=15,
        micro_batches=1,
        rows=ROWS,
        sequence=256,
        warmup_steps=WHOLE * 15 // 20,
        total_steps=WHOLE * 15,
    )
    return replace(made, model=MODEL, train=train, outer=replace(made.outer, topk=1024))


def curve(swarm, least, most):
    """Up to the loss `least`, or to the first training of `most` rounds or more."""
    found = []
    for length in itertools.count():
        while swarm.rounds < FIRST * 2**length:
            swarm.round(10**6)
        found.append(swarm.ended())
        print(f"    {found[-1][0]} rounds: {found[-1][1]:.4f}", flush=True)
        if found[-1][1] <= least or found[-1][0] >= most:
            return found


def main():
    global TEXT
    parser = argparse.ArgumentParser()
    parser.add_argument("--keep", type=Path, required=True)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--swarms", nargs="*", default=list(SWARMS))
    parser.add_argument("--twenty", action="store_true")
    parser.add_argument("--plans", action="store_true")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    TEXT = CorpusReader(chosen.corpus, LocalDisk())
    if chosen.twenty:
        for number in range(20):
            draw = random.Random(number)
            machines = [replace(c, device="cuda") for c in plans.volunteers(draw, draw.randint(4, 200))]
            preset = ("178m", "512m", "1b", "7b")[number % 4]
            found = arrange(manifest_of(preset), machines)[0]
            row = {"product": "2dc8998 plan", "swarm": preset, "seed": number}
            for kind, chains in (("full", False), ("chains", True)):
                row[kind] = sum(round(r.rate) for r in found if (len(r.members) > 1) == chains)
            with chosen.keep.open("a") as file:
                file.write(json.dumps(row) + "\n")
        return
    for seed in range(1 if chosen.plans else chosen.seeds):
        for name in chosen.swarms:
            kept = [json.loads(line) for line in chosen.keep.read_text().splitlines()] if chosen.keep.exists() else []
            rows = {(x["product"], x["swarm"], x["seed"]): x for x in kept}
            if ("2dc8998", name, seed) in rows:
                continue
            preset, machines = SWARMS[name]
            made = manifest_of(preset)
            replicas = [
                (len(r.members), r.rate, 64 * r.rank // made.model.d_model) for r in arrange(made, machines())[0]
            ]
            share = committed([r for _, r, _ in replicas], presets.PRESETS[preset].round_seconds)
            print(name, seed, [(s, round(r), k) for s, r, k in replicas], f"{share:.3f}", flush=True)
            if chosen.plans:
                continue
            now, alone = rows["now", name, seed], dict(map(tuple, rows["alone", "", seed]["points"]))
            swarm = SmallSwarm(small_manifest(seed), replicas, now["best_alone"], chosen.lr)
            points = curve(swarm, alone[WHOLE], 2 * now["points"][-1][0])
            row = {
                "product": "2dc8998",
                "swarm": name,
                "seed": seed,
                "replicas": [[s, round(r)] for s, r, _ in replicas],
                "ranks": [k for s, _, k in replicas],
                "committed": round(share, 3),
                "of_rows": sum(r.rows for r in swarm.replicas) / ROWS,
                "points": points,
            }
            with chosen.keep.open("a") as file:
                file.write(json.dumps(row) + "\n")


main()
