"""What a token teaches: one small model by bytes, trained by replicas and chains of every kind, at equal tokens.

    python -m tests.benchmarks.arms --keep ROWS.jsonl f/muon c/muon/16:int4:int4 c/muon/16:int4:int4/anchors
    python -m tests.benchmarks.arms --keep ROWS.jsonl --seeds 3 --control

An arm is REPLICAS/OPTIMIZER[/k:FORWARD:BACKWARD][/OPTION,...]. REPLICAS has a letter for each replica: f for a full one,
c for a chain of four stages of rank k with these number formats at its three cuts. A chain is computed in one process
with projector and formats inserted at the cuts, which tests/unit/peer/training/test_exact_chains.py proves to be what a
chain computes. Text, model and pace are those of tests/benchmarks/regime.py; a step's rows are divided among the
replicas, so that all arms read the same tokens in as many steps. After each round the outer step with its sparse
update. All arms of a seed have the same θ(0), text and U.

    scaled    `train.scale_embedding_lr`
    blind     attention sees the present token only (a control)

Loss: nats per held-out token after the last round, `plain` of the parameters as a plain model, `through` as the first
chain computes it. Gap: to the arm of full replicas with the same optimizer and seed; mean and standard error over seeds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from peer.state.outer_optimizer import Outer
from peer.training.optimizer import Pace
from peer.training.trainer import StageTrainer
from protocol.codec import formats, subspace
from protocol.run import init, layout
from protocol.run.corpus import slots
from protocol.run.manifest import Manifest
from tests.benchmarks import regime
from tests.support.chains import project_at

CUTS = tuple(range(2, regime.MODEL.n_layers + 1))
VALID_SEQUENCES = 256
TOPK = 32
CONTROL = ("f/muon", "f/muon/blind", *(f"c/muon/{k}:fp32:fp32/scaled" for k in (4, 16, 64)))


@dataclass(frozen=True, slots=True)
class Arm:
    """One kind of training."""

    replicas: str
    optimizer: str
    rank: int = 0
    forward: str = "fp32"
    backward: str = "fp32"
    options: frozenset[str] = frozenset()

    @classmethod
    def of(cls, text: str) -> Arm:
        replicas, optimizer, *more = text.split("/")
        cut = [part.split(":") for part in more if ":" in part]
        options = frozenset(name for part in more if ":" not in part for name in part.split(","))
        if not cut:
            return cls(replicas, optimizer, options=options)
        (rank, forward, backward), *_ = cut
        return cls(replicas, optimizer, int(rank), forward, backward, options)

    @property
    def base(self) -> str:
        """The arm that this one is compared with."""
        return f"{'f' * len(self.replicas)}/{self.optimizer}"

    @property
    def compression(self) -> float:
        """Times fewer bytes at a cut than dense bf16, both directions."""
        d = regime.MODEL.d_model
        return 4 * d / sum(formats.bytes_per_token(name, self.rank or d) for name in (self.forward, self.backward))


def blind(stage: torch.nn.Module) -> None:
    """Lets each token see itself only."""

    def mask(ids: torch.Tensor) -> torch.Tensor:
        length = ids.shape[1]
        return torch.full((length, length), -math.inf).fill_diagonal_(0.0)[None, None]

    stage.mask = mask


def trainer(kind: str, arm: Arm, made: Manifest) -> StageTrainer:
    """A replica of this kind."""
    train = dataclasses.replace(made.train, scale_embedding_lr="scaled" in arm.options)
    rank = arm.rank if kind == "c" else 0
    basis = subspace.basis(made.seed_bytes, made.model.d_model, rank) if rank else None
    found = StageTrainer(made.model, train, layout.shard_names(made.model), rank=rank, basis=basis)
    if "blind" in arm.options:
        blind(found.stage)
    if kind == "c":
        project_at(found, CUTS, wires=(arm.forward, arm.backward))
    return found


def train_round(replica: StageTrainer, made: Manifest, first: int, rows: int, share: slice) -> None:
    """The inner steps of one round with this share of each step's rows."""
    for step in range(replica.train.inner_steps):
        ids = regime.text().slots(made.seed_bytes, slots(first, step, rows))[share]
        replica.forward(0, torch.tensor(ids.astype(np.int64)))
        replica.backward(0)
        norm = math.sqrt(sum(value for _, value in replica.grad_sumsq()))
        replica.step(replica.pace.before + step + 1, norm)


def run(arm: Arm, seed: int, rounds: int) -> dict[str, float]:
    """Losses of one training: `plain` and `through` after the last round, `half` plain after half of them."""
    made, count = regime.manifest(seed, arm.optimizer, rounds), len(arm.replicas)
    made = dataclasses.replace(made, outer=dataclasses.replace(made.outer, topk=TOPK))
    rows, inner, shards = made.train.rows, made.train.inner_steps, layout.shard_names(made.model)
    made = dataclasses.replace(made, train=dataclasses.replace(made.train, rows=rows // count))
    replicas = [trainer(kind, arm, made) for kind in arm.replicas]
    outers = [Outer(made.model, made.outer.codec, made.outer.beta, made.outer.eta) for _ in replicas]
    shared = outers[0]
    shared.theta = {shard: init.initial_shard(made.model, made.seed_bytes, shard) for shard in shards}
    held_out, found, began = regime.text().held_out(VALID_SEQUENCES), dict[str, float](), time.process_time()
    plain = StageTrainer(made.model, made.train, shards)
    if "blind" in arm.options:
        blind(plain.stage)
    for r in range(rounds):
        for m, (replica, outer) in enumerate(zip(replicas, outers, strict=True)):
            replica.begin_round(shared.theta, Pace(r * inner, inner, 1))
            share = slice(m * made.train.rows, (m + 1) * made.train.rows)
            train_round(replica, made, r * inner * rows, rows, share)
            for shard in shards:
                outer.accumulate(shard, replica.displacement(shard))
        for shard in shards:
            shared.apply(shard, [(1 / count, outer.encode(shard)[0]) for outer in outers])
        if r + 1 in (rounds // 2, rounds):
            plain.begin_round(shared.theta)
            found["plain" if r + 1 == rounds else "half"] = plain.evaluate(held_out)
    chain = next((c for kind, c in zip(arm.replicas, replicas, strict=True) if kind == "c"), None)
    if chain is not None:
        chain.begin_round(shared.theta)
        found["through"] = chain.evaluate(held_out)
    return {"through": found["plain"], **found, "seconds": time.process_time() - began}


Rows = dict[tuple[str, int], dict[str, float]]
"""Losses by arm and seed."""


def table(arms: Sequence[str], rows: Rows) -> None:
    """Prints what there is of these arms."""
    print("| arm | under dense bf16 | seeds | plain | gap | through | gap |")
    print("|---|---|---|---|---|---|---|")
    for text in arms:
        arm = Arm.of(text)
        seeds = sorted(seed for name, seed in rows if name == text and (arm.base, seed) in rows)
        if not seeds:
            continue
        cells = [text, f"{arm.compression:.1f} x" if "c" in arm.replicas else "", str(len(seeds))]
        for name in ("plain", "through"):
            values = [rows[text, seed][name] for seed in seeds]
            gaps = [value - rows[arm.base, seed]["plain"] for value, seed in zip(values, seeds, strict=True)]
            error = f" ± {statistics.stdev(gaps) / math.sqrt(len(gaps)):.4f}" if len(gaps) > 1 else ""
            cells += [f"{statistics.mean(values):.4f}", f"{statistics.mean(gaps):+.4f}{error}"]
        print(f"| {' | '.join(cells)} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arms", nargs="*")
    parser.add_argument("--control", action="store_true", help="the arms that show that context matters")
    parser.add_argument("--keep", type=Path, required=True, help="JSON lines of what was run; it is not run again")
    parser.add_argument("--rounds", type=int, default=regime.ROUNDS)
    parser.add_argument("--seeds", type=int, default=1)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    lines = chosen.keep.read_text().splitlines() if chosen.keep.exists() else []
    rows: Rows = {(x["arm"], x["seed"]): x for x in map(json.loads, lines) if x["rounds"] == chosen.rounds}
    arms = [*(CONTROL if chosen.control else ()), *chosen.arms]
    wanted = dict.fromkeys(name for text in arms for name in (Arm.of(text).base, text))
    for seed in range(chosen.seeds):
        for text in wanted:
            if (text, seed) not in rows:
                rows[text, seed] = run(Arm.of(text), seed, chosen.rounds)
                with chosen.keep.open("a") as file:
                    file.write(
                        json.dumps({"arm": text, "seed": seed, "rounds": chosen.rounds, **rows[text, seed]}) + "\n"
                    )
    print(f"bigram entropy of the held-out text: {regime.bigram_entropy():.3f}\n")
    table(list(wanted), rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
