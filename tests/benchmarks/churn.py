"""Measures the loss of runs in which replicas are replaced. Prints the tables of docs/results/churn.md.

    python -m tests.benchmarks.churn [--rounds 12] [--seeds 3] [--topk 256] [--optimizer muon] [--arms NAME ...]

Four full replicas of a small model train on the demo's text in one process, with the product's trainer and outer step.
After every round the next of them is replaced, so each one every four rounds. All arms of a seed see the same text in
the same order and as many tokens. They differ in the state with which a new replica begins.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from peer.corpus.text import CorpusReader
from peer.demo import recipe
from peer.demo.recipe import demo_corpus
from peer.state.outer_optimizer import Array, Outer
from peer.training import moments
from peer.training.optimizer import Pace
from peer.training.trainer import StageTrainer
from protocol.codec import sparse
from protocol.codec.formats import Codec
from protocol.run import init, layout
from protocol.run.corpus import slots
from protocol.run.layout import ModelSpec
from protocol.run.manifest import OPTIMIZERS, Manifest
from tests.e2e.swarms import options

REPLICAS = 4
MODEL = ModelSpec(vocab_size=4096, d_model=64, n_layers=3, n_heads=2, d_ff=176, context=128)
SEQUENCES = 128
"""Held-out sequences of which the loss is computed."""
LOOKS = 4
"""Rounds between two computations of the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """What becomes of the state of a replica that is replaced.

    feedback: its error feedback is `lost`; `moves` to the new replica; is `merged` into that of a replica that stays;
        or is `sent` in its last payloads.
    payloads: number of the last payloads; 0: the whole feedback is sent, dense.
    topk: only a payload with this many entries of every 4096 moves or is merged; 0: all of the feedback.
    moments: those of the new replica are `fresh`; `move` from the old one; or are copied from another replica:
        `another`: all of them.
        `second`: second moments only, with zeros for the first.
        `factored`: the same, with the means of rows and columns only of each matrix.
        `small`: all, in the form in which peers send them (peer/training/moments.py).
    warm_up: steps in which the learning rate of the new replica rises.
    """

    churn: bool = True
    feedback: str = "lost"
    topk: int = 0
    moments: str = "fresh"
    payloads: int = 1
    warm_up: int = 0


ARMS = {
    "no churn": Arm(churn=False),
    "nothing moves": Arm(),
    "feedback moves": Arm(feedback="moves"),
    "moments move": Arm(moments="move"),
    "killed: moments of another": Arm(moments="another"),
    "killed: small moments of another": Arm(moments="small"),
    "feedback moves, moments of another": Arm(feedback="moves", moments="another"),
    "1024 of the feedback merged, small moments of another": Arm(feedback="merged", topk=1024, moments="small"),
    "1024 of the feedback move, small moments of another": Arm(feedback="moves", topk=1024, moments="small"),
    "dense last payload, moments of another": Arm(feedback="sent", payloads=0, moments="another"),
    "4 last payloads, moments of another": Arm(feedback="sent", payloads=4, moments="another"),
    "killed: second moments of another": Arm(moments="second"),
    "killed: second moments of another, factored": Arm(moments="factored"),
    "killed: warm-up of 5 steps": Arm(warm_up=5),
}


class Replica:
    """The error feedback and the trainer of a full replica. θ is the same for all; `Swarm` has it."""

    def __init__(self, manifest: Manifest, codec: Codec) -> None:
        self.outer = Outer(manifest.model, codec, manifest.outer.beta, manifest.outer.eta)
        self.trainer = StageTrainer(manifest.model, manifest.train, layout.shard_names(manifest.model))
        self.young = 0
        """Inner steps for which the rate still rises."""

    def norm(self) -> float:
        """Returns the L2 norm of the error feedback."""
        arrays = [e for shard in self.outer.feedback.values() for e in shard]
        return float(np.sqrt(sum(float(np.sum(np.square(e, dtype=np.float64))) for e in arrays)))


@dataclass(slots=True)
class Result:
    """Measurements of one arm and seed.

    losses: nats per token of held-out text, by round.
    norms: norm of a leaving replica's last contribution, over the median of the others'.
    held: norm of the feedback that it leaves, over that of its last pseudo-gradient.
    sent: the same norm, over the median norm of the others' contributions.
    """

    losses: dict[int, float]
    norms: list[float]
    held: list[float]
    sent: list[float]
    seconds: float


class Swarm:
    """Four replicas in one process."""

    def __init__(self, manifest: Manifest, corpus: CorpusReader, arm: Arm) -> None:
        self.manifest, self.corpus, self.arm = manifest, corpus, arm
        self.codec = manifest.outer.codec
        self.shards = layout.shard_names(manifest.model)
        self.replicas = [Replica(manifest, self.codec) for _ in range(REPLICAS)]
        self.theta = Outer(manifest.model, self.codec, manifest.outer.beta, manifest.outer.eta)
        self.theta.theta = {s: init.initial_shard(manifest.model, manifest.seed_bytes, s) for s in self.shards}
        self.slot = 0

    def run(self, rounds: int) -> Result:
        """Trains, and replaces one replica after every round."""
        began = time.process_time()
        found = Result({}, [], [], [], 0.0)
        for r in range(1, rounds + 1):
            leaving = (r - 1) % REPLICAS if self.arm.churn and r < rounds else None
            self._round(r, leaving, found)
            if leaving is not None:
                self._replace(leaving)
            if r % LOOKS == 0:
                self.replicas[0].trainer.begin_round(self.theta.theta)
                losses = self.replicas[0].trainer.evaluate(self.corpus.held_out(SEQUENCES))
                found.losses[r] = losses
        found.seconds = time.process_time() - began
        return found

    def _round(self, r: int, leaving: int | None, found: Result) -> None:
        sent: list[dict[str, list[Array]]] = []
        norms: list[float] = []
        for m, replica in enumerate(self.replicas):
            self._train(r, replica)
            sent.append({})
            square, pseudo = 0.0, 0.0
            for shard in self.shards:
                displacement = replica.trainer.displacement(shard)
                pseudo += sum(float(np.sum(np.square(a - b))) for a, b in displacement)
                replica.outer.accumulate(shard, displacement)
                sent[-1][shard] = self._send(replica.outer, shard, m == leaving)
                square += sum(float(np.sum(np.square(x, dtype=np.float64))) for x in sent[-1][shard])
            norms.append(float(np.sqrt(square)))
            if m == leaving:
                found.held.append(replica.norm() / float(np.sqrt(pseudo)))
        if leaving is not None:
            others = [n for m, n in enumerate(norms) if m != leaving]
            found.norms.append(norms[leaving] / statistics.median(others))
            found.sent.append(self.replicas[leaving].norm() / statistics.median(others))
        for shard in self.shards:
            for i, theta in enumerate(self.theta.theta[shard]):
                for one in sent:
                    theta -= self.theta.eta * np.float32(1 / REPLICAS) * one[shard][i]

    def _send(self, outer: Outer, shard: str, leaves: bool) -> list[Array]:
        """Returns the entries of a shard that a replica sends, dense, and takes them from its feedback."""
        payloads = self.arm.payloads if leaves and self.arm.feedback == "sent" else 1
        before = [e.copy() for e in outer.feedback[shard]]
        if not payloads:
            outer.feedback[shard] = [np.zeros_like(e) for e in before]
            return before
        for _ in range(payloads):
            outer.encode(shard)
        return [a - b for a, b in zip(before, outer.feedback[shard], strict=True)]

    def _train(self, r: int, replica: Replica) -> None:
        train = self.manifest.train
        first = (r - 1) * train.inner_steps
        replica.trainer.begin_round(self.theta.theta, Pace(first, train.inner_steps, train.micro_batches))
        for step in range(train.inner_steps):
            at = slots(self.slot, step, train.step_rows)
            step_ids = torch.tensor(self.corpus.slots(self.manifest.seed_bytes, at))
            for micro, ids in enumerate(step_ids.chunk(train.micro_batches)):
                replica.trainer.forward(micro, ids)
                replica.trainer.backward(micro)
            norm = sum(square for _, square in replica.trainer.grad_sumsq()) ** 0.5
            if replica.young:
                share = 1 - replica.young / (self.arm.warm_up + 1)
                replica.trainer.train = dataclasses.replace(train, lr=train.lr * share)
                replica.young -= 1
            replica.trainer.step(first + step + 1, norm)
            replica.trainer.train = train
        self.slot += train.inner_steps * train.step_rows

    def _replace(self, m: int) -> None:
        old, new, living = self.replicas[m], Replica(self.manifest, self.codec), self.replicas[(m + 1) % REPLICAS]
        moved = old.outer.feedback
        if self.arm.topk:
            codec = Codec(self.arm.topk)
            packed = {shard: sparse.encode(codec, arrays) for shard, arrays in moved.items()}
            moved = {s: _dense(codec, layout.shapes(self.manifest.model, s), p) for s, p in packed.items()}
        match self.arm.feedback:
            case "moves":
                new.outer.feedback = moved
            case "merged":
                for shard, arrays in moved.items():
                    for e, x in zip(living.outer.feedback[shard], arrays, strict=True):
                        e += x
        if self.arm.moments != "fresh":
            new.trainer.begin_round(self.theta.theta)  # a parameter has a place for moments then
            state = (old if self.arm.moments == "move" else living).trainer.optimizer_state()
            if self.arm.moments in ("second", "factored"):
                state = {k: np.zeros_like(v) if k.endswith("/exp_avg") else v for k, v in state.items()}
            if self.arm.moments == "factored":
                state = {k: _factored(v) if k.endswith("/exp_avg_sq") else v for k, v in state.items()}
            if self.arm.moments == "small":
                state = self._small(state)
            new.trainer.load_optimizer(state)
        new.young = self.arm.warm_up
        self.replicas[m] = new

    def _small(self, state: Mapping[str, NDArray[np.generic]]) -> dict[str, NDArray[np.generic]]:
        """Returns the moments as they are after a transfer."""
        model, train = self.manifest.model, self.manifest.train
        found: dict[str, NDArray[np.generic]] = {}
        for shard in self.shards:
            data = moments.pack(model, train, shard, state)
            assert data is not None
            found |= moments.unpack(model, train, shard, data)
        return found


def _dense(codec: Codec, shapes: Sequence[tuple[int, ...]], payload: bytes) -> list[Array]:
    """Returns the entries of a payload as dense arrays."""
    made = [np.zeros(shape, np.float32) for shape in shapes]
    for array, x in zip(made, sparse.decode(codec, shapes, payload), strict=True):
        array.reshape(-1)[x.index] = x.values
    return made


def _factored(moment: Array) -> Array:
    """Returns a matrix made of the means of its rows and columns (Shazeer and Stern 2018, Adafactor, algorithm 1).

    A vector is returned as it is.
    """
    if moment.ndim < 2:
        return moment
    rows, columns = moment.mean(axis=1, dtype=np.float64), moment.mean(axis=0, dtype=np.float64)
    return (np.outer(rows, columns) / max(float(rows.mean()), 1e-300)).astype(np.float32)


def make_manifest(seed: int, topk: int, optimizer: str) -> Manifest:
    """Returns the demo's recipe with MODEL and half the text in a step."""
    made = recipe.make_manifest(
        options(Path("unused"), rounds=None, full=4, inner_steps=None, seed=seed), demo_corpus().digest, MODEL
    )
    outer, train = (
        dataclasses.replace(made.outer, topk=topk),
        dataclasses.replace(made.train, micro_batches=1, optimizer=optimizer),
    )
    return dataclasses.replace(made, outer=outer, train=train)


def _read(path: Path | None, topk: int, optimizer: str) -> dict[tuple[str, int], Result]:
    """Reads the results in a file, by arm and seed."""
    found = {}
    for text in path.read_text().splitlines() if path is not None and path.exists() else ():
        line = json.loads(text)
        if (line.pop("topk"), line.pop("optimizer", "adamw")) == (topk, optimizer):
            key = line.pop("arm"), line.pop("seed")
            found[key] = Result(**{**line, "losses": {int(r): loss for r, loss in line["losses"].items()}})
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--topk", type=int, default=256)
    parser.add_argument("--optimizer", default="adamw", choices=OPTIMIZERS)
    parser.add_argument("--arms", nargs="*", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--out", type=Path, help="a line of JSON for each result; what it has is not done again")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    known = _read(chosen.out, chosen.topk, chosen.optimizer)
    table: dict[str, list[Result]] = {}
    for arm in chosen.arms:
        for seed in range(chosen.seeds):
            found = known.get((arm, seed))
            if found is None:
                manifest = make_manifest(seed, chosen.topk, chosen.optimizer)
                found = Swarm(manifest, demo_corpus(), ARMS[arm]).run(chosen.rounds)
                of = {"arm": arm, "seed": seed, "topk": chosen.topk, "optimizer": chosen.optimizer}
                line = json.dumps({**of, **dataclasses.asdict(found)})
                print(line, flush=True)
                if chosen.out is not None:
                    with chosen.out.open("a") as file:
                        file.write(line + "\n")
            table.setdefault(arm, []).append(found)
    print_table(table, chosen.rounds)
    return 0


def print_table(table: dict[str, list[Result]], rounds: int) -> None:
    """Prints losses, and by seed their distance from those without churn."""
    base = table.get("no churn", [])
    looks = list(range(LOOKS, rounds + 1, LOOKS))
    print(f"\n| arm | {' | '.join(f'round {r}' for r in looks)} | above no churn at {rounds}, by seed | norm |")
    print("|---|" + "---|" * (len(looks) + 2))
    for arm, results in table.items():
        means = [statistics.mean(x.losses[r] for x in results) for r in looks]
        over = [
            f"{100 * (x.losses[looks[-1]] / b.losses[looks[-1]] - 1):.2f}" for x, b in zip(results, base, strict=False)
        ]
        shares = [
            f" ({100 * (m / statistics.mean(b.losses[r] for b in base) - 1):+.2f} %)"
            if base and arm != "no churn"
            else ""
            for m, r in zip(means, looks, strict=True)
        ]
        cells = " | ".join(f"{m:.4f}{s}" for m, s in zip(means, shares, strict=True))
        norm = f"{max(max(x.norms) for x in results):.2f}" if results[0].norms else ""
        print(f"| {arm} | {cells} | {', '.join(over) if arm != 'no churn' else ''} | {norm} |")


if __name__ == "__main__":
    raise SystemExit(main())
