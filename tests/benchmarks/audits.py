"""Training again: how well can somebody else tell from a contribution whether its sender trained? Prints the tables of docs/results/audits.md.

    python -m tests.benchmarks.audits ROWS.jsonl [--seeds 0] [--steps 5]     runs what ROWS.jsonl lacks
    python -m tests.benchmarks.audits ROWS.jsonl --table                     prints it

Eight honest replicas train a small model for ROUNDS rounds, with the trainer, outer step and codec that ship, in one process. Beside them a
liar of each kind follows the same model and sends what it likes; nothing of that is applied. In each round every liar and some of the
honest are trained again from the global state and the text that they were assigned, and what was sent is compared with what comes out.

*How* it begins: with the sender's own AdamW moments ("exact"), the same made small as they travel ("packed"), none ("fresh"), those of the
auditor, another replica, as they are after the round ("own"), and only the second of them ("own v").

The figures, over the places that were sent (s: the values that were sent; d: what the auditor learned there): the cosine of s and d; the same
without what both have in common with the sum of the others' contributions ("beyond"); the cosine of s - beta e with d, where e is the
sender's error feedback ("without e"), which the auditor would have to be sent; the slope of s over d; the share of equal signs; and the
worst cosine of a single shard.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from peer.state.outer_optimizer import Outer
from peer.training import moments as small_moments
from peer.training.trainer import StageTrainer
from protocol.run import init
from tests.benchmarks import teachers
from tests.benchmarks.teachers import MODEL, REPLICAS, ROWS, SEQUENCE, SHARDS, Arrays, Replica, Sent
from tests.parity import reference

ROUNDS = 40
FIRST = 3
"""The first round that is looked at: before it nobody has moments worth the name."""
HOW = ("own", "fresh", "packed", "exact")
LIES = ("text", "half", "fifth", "made up", "copy", "stale", "noise", "flip", "drift", "zero trained")
OTHER = 500
"""Rounds ahead lies the text that liars train on."""
State = dict[str, np.ndarray]
torch.set_num_threads(1)


class Learner(Replica):
    """A replica that remembers how it began a round."""

    def __init__(self, made: Any) -> None:
        super().__init__(made)
        self.moments: State = {}
        self.feedback: dict[str, Arrays] = {}
        self.delta: dict[str, Arrays] = {}

    def work(self, theta: dict[str, Arrays], round: int, windows: Callable[[int], np.ndarray], steps: int) -> None:
        self.moments = self.trainer.optimizer_state()
        self.delta = trained(self.trainer, theta, round, windows, steps)

    def give(self, changed: Callable[[str, Arrays], Arrays] = lambda shard, delta: delta) -> Sent:
        self.feedback = {s: [array.copy() for array in arrays] for s, arrays in self.outer.feedback.items()}
        return self.send(changed)


def trained(
    trainer: StageTrainer,
    theta: dict[str, Arrays],
    round: int,
    windows: Callable[[int], np.ndarray],
    steps: int,
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
    parts: int = 1,
) -> dict[str, Arrays]:
    """What a trainer learns in a round of so many steps; `parts`: micro-batches of a step."""
    pace = trainer.pace
    trainer.begin_round(theta, type(pace)(round * trainer.train.inner_steps, trainer.train.inner_steps, parts))
    for step in range(steps):
        ids = windows(step).astype(np.int64)
        for micro, rows in enumerate(np.split(ids, parts)):
            with around():
                trainer.forward(micro, torch.tensor(rows))
                trainer.backward(micro)
        norm = math.sqrt(sum(square for _, square in trainer.grad_sumsq()))
        trainer.step(round * trainer.train.inner_steps + step + 1, norm)
    return {shard: trainer.delta(shard) for shard in SHARDS}


class Lab:
    def __init__(self, seed: int, steps: int) -> None:
        made = teachers.manifest(seed)
        train = type(made.train)(
            inner_steps=steps, micro_batches=1, rows=ROWS, sequence=SEQUENCE, lr=4e-3, warmup_steps=4 * steps,
            total_steps=steps * ROUNDS,
        )  # fmt: skip
        self.made = type(made)(**{n: getattr(made, n) for n in type(made).__slots__} | {"train": train})
        self.steps = steps
        self.theta = {shard: init.initial_shard(MODEL, self.made.seed_bytes, shard) for shard in SHARDS}
        self.honest = [Learner(self.made) for _ in range(REPLICAS)]
        self.liars = {name: Learner(self.made) for name in LIES}
        self.outer = Outer(MODEL, self.made.outer.codec, self.made.outer.beta, self.made.outer.eta)
        text, _ = reference.sotu_tokens(teachers.TOKENIZER)
        config = {
            "sequence": SEQUENCE, "micro_batches": 1, "rows": ROWS, "inner_steps": steps,
            "replicas": [{}] * (REPLICAS + len(LIES) + 1),
        }  # fmt: skip
        self.windows = reference.text_windows(config, text, seed)
        self.random = np.random.default_rng(seed)
        self.past: list[list[Sent]] = []

    def lie(self, name: str, place: int, number: int, honest: list[Sent]) -> Sent:
        """What the liar at `place` sends; what it was assigned is the text of that place."""
        it, theta = self.liars[name], self.theta

        def assigned(step: int) -> np.ndarray:
            return self.windows(number, place, step)

        def other(step: int) -> np.ndarray:
            return self.windows(number + OTHER, place, step)

        match name:
            case "text":
                it.work(theta, number, other, self.steps)
                return it.give()
            case "half":
                it.work(theta, number, assigned, (self.steps + 1) // 2)
                return it.give()
            case "fifth":
                it.work(theta, number, assigned, max(1, self.steps // 5))
                return it.give()
            case "flip":
                it.work(theta, number, assigned, self.steps)
                return it.give(lambda shard, delta: [-array for array in delta])
            case "drift":
                it.work(theta, number, assigned, self.steps)
                own = it.give()
                return teachers.times(own, -3.0, ("block.1",))
            case "made up":  # the sum of what others sent a round ago, which is public
                it.moments = it.trainer.optimizer_state()
                before = self.past[-1] if self.past else honest
                return it.encoded(
                    {s: [sum(x) for x in zip(*(teachers.dense(u, s) for u in before), strict=True)] for s in SHARDS}
                )  # type: ignore[misc]
            case "copy":
                return honest[place % len(honest)]
            case "stale":  # what it would have sent honestly, a round ago
                last = getattr(it, "last", None)
                it.work(theta, number, assigned, self.steps)
                it.last = it.give()  # type: ignore[attr-defined]
                return last or it.last  # type: ignore[attr-defined]
            case "noise" | "zero trained":
                made = it.encoded(
                    {
                        s: [self.random.standard_normal(a.shape).astype(np.float32) for a in self.theta[s]]
                        for s in SHARDS
                    }
                )
                return made if name == "noise" else teachers.times(made, 1e-3)
        raise ValueError(name)

    def round(self, number: int) -> list[dict[str, Any]]:
        for i, replica in enumerate(self.honest):
            replica.work(self.theta, number, lambda step, i=i: self.windows(number, i, step), self.steps)
        honest = [replica.give() for replica in self.honest]
        lies = {name: self.lie(name, REPLICAS + n, number, honest) for n, name in enumerate(LIES)}
        rows = []
        if number >= FIRST and number % 3 == 0:
            for i in range(REPLICAS):
                rows += self.audited("honest", i, number, self.honest[i], honest[i], honest[:i] + honest[i + 1 :])
            for n, (name, sent) in enumerate(lies.items()):
                rows += self.audited(name, REPLICAS + n, number, self.liars[name], sent, honest)
        self.past.append(honest)
        for shard in SHARDS:
            for place, array in enumerate(self.theta[shard]):
                total = np.zeros(array.size, np.float32)
                for update in honest:
                    total[update[shard][place].index] += np.float32(1 / REPLICAS) * update[shard][place].values
                self.theta[shard][place] = array - total.reshape(array.shape)
        return rows

    def audited(
        self, name: str, place: int, number: int, sender: Learner, sent: Sent, others: list[Sent]
    ) -> list[dict[str, Any]]:
        auditor = self.honest[(place + 1) % REPLICAS].trainer.optimizer_state()
        rows = []
        for how in HOW if number in (6, 21) else HOW[:1]:
            found = []
            for text in (place, len(LIES) + REPLICAS):
                again = StageTrainer(MODEL, self.made.train, SHARDS)
                again.load_optimizer(begun(how, sender.moments, auditor, self.made.train))
                found.append(
                    trained(
                        again, self.theta, number, lambda step, text=text: self.windows(number, text, step), self.steps
                    )
                )
            rows.append({"what": name, "how": how, "round": number, **figures(sent, *found, sender, others)})
        return rows


def begun(how: str, sender: State, auditor: State, train: Any) -> State:
    """The moments that training again begins with."""
    match how:
        case "exact":
            return sender
        case "packed":
            found: State = {}
            for shard in SHARDS:
                data = small_moments.pack(MODEL, shard, sender)
                found |= small_moments.unpack(MODEL, train, shard, data) if data is not None else {}
            return found
        case "own":
            return auditor
        case "own v":
            return {n: np.zeros_like(a) if n.endswith("/exp_avg") else a for n, a in auditor.items()}
    return {}


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    norm = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / norm if norm > 0 else 0.0


def residuals(of: Sequence[np.ndarray], given: Sequence[np.ndarray]) -> list[np.ndarray]:
    """What is left of each vector without its projection on the others."""
    basis, _ = np.linalg.qr(np.stack(given, axis=1))
    return [x - basis @ (basis.T @ x) for x in of]


def at(sent: Sent, arrays: dict[str, Arrays], shard: str) -> np.ndarray:
    return np.concatenate(
        [a.reshape(-1)[x.index] for x, a in zip(sent[shard], arrays[shard], strict=True)], dtype=np.float64
    )


GROUPS = {
    "all": SHARDS,
    "blocks": tuple(n for n in SHARDS if n.startswith("block.")),
    "embed": ("embed",),
    "head": ("head",),
}


def flat(update: Sent, shards: Sequence[str]) -> np.ndarray:
    return np.concatenate([x.values for n in shards for x in update[n]]).astype(np.float64)


def seen(update: Sent, arrays: dict[str, Arrays], shards: Sequence[str]) -> np.ndarray:
    return np.concatenate([at(update, arrays, n) for n in shards])


def figures(
    sent: Sent, learned: dict[str, Arrays], plain: dict[str, Arrays], sender: Learner, others: list[Sent]
) -> dict[str, Any]:
    """Everything that is compared. `learned`: on the assigned text, `plain`: on other text."""
    found: dict[str, Any] = {}
    for name, shards in GROUPS.items():
        x: dict[str, list[float]] = {"cos": [], "diff": [], "beyond": [], "unit": []}
        for update in (sent, *others):
            s, d, p = flat(update, shards), seen(update, learned, shards), seen(update, plain, shards)
            x["cos"].append(cosine(s, d))
            x["diff"].append(cosine(s, d - p))
            x["unit"].append(cosine(s, d) - cosine(s, p))
            x["beyond"].append(cosine(*residuals((s, d), (p,))))
        for kind, (own, *rest) in x.items():
            found[f"{kind} {name}"] = own
            found[f"{kind} {name} than"] = own - float(np.mean(rest))
            found[f"{kind} {name} z"] = (own - float(np.mean(rest))) / float(np.std(rest))
            found[f"{kind} {name} rank"] = float(np.mean([own > r for r in rest]))
        if sender.feedback:
            s, d, p = flat(sent, shards), seen(sent, learned, shards), seen(sent, plain, shards)
            e = seen(sent, sender.feedback, shards)
            found[f"e {name}"] = cosine(s - 0.95 * e, d)
            found[f"e diff {name}"] = cosine(s - 0.95 * e, d - p)
            found[f"e beyond {name}"] = cosine(*residuals((s - 0.95 * e, d), (p,)))
    if sender.delta:
        found["dense"] = cosine(
            *(np.concatenate([a.reshape(-1) for n in SHARDS for a in x[n]]) for x in (sender.delta, learned))
        )
    return found


def summary(rows: Sequence[dict[str, Any]], figure: str) -> None:
    names = ["honest", *LIES]
    print(f"\n{figure}\n\n| | " + " | ".join(HOW) + " |\n|---" * 1 + "|---" * len(HOW) + "|")
    for name in names:
        cells = []
        for how in HOW:
            x = [r[figure] for r in rows if r["what"] == name and r["how"] == how]
            cells.append(f"{min(x):.3f} {np.quantile(x, 0.01):.3f} {np.median(x):.3f} {max(x):.3f}" if x else "")
        print(f"| {name} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("rows", type=Path)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--table", action="store_true")
    chosen = parser.parse_args()
    rows = [json.loads(line) for line in chosen.rows.read_text().splitlines()] if chosen.rows.exists() else []
    if chosen.table:
        for figure in ("cosine", "beyond", "without e", "slope", "signs", "shard", "dense"):
            summary([r for r in rows if r["steps"] == chosen.steps], figure)
        return
    known = {(r["seed"], r["steps"]) for r in rows}
    for seed in chosen.seeds:
        if (seed, chosen.steps) not in known:
            lab = Lab(seed, chosen.steps)
            for number in range(ROUNDS):
                found = lab.round(number)
                with chosen.rows.open("a") as file:
                    file.writelines(json.dumps({"seed": seed, "steps": chosen.steps, **row}) + "\n" for row in found)


if __name__ == "__main__":
    main()
