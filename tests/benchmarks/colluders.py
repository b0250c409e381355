"""Measures the loss when replicas collude that know the rule and all updates. Prints a table of judging.md.

    python -m tests.benchmarks.colluders ROWS.jsonl [--cells honest:3:8 search:3:8 ...] [--seeds 0] [--unscored]
    python -m tests.benchmarks.colluders ROWS.jsonl --table

The first command trains the runs that ROWS.jsonl lacks, the second prints the table of docs/results/judging.md. A cell
is an attack, the colluders, and the replicas with them. Runs are those of tests/benchmarks/teachers.py, scored
as in tests/benchmarks/scores.py: a
replica that scores find bad is out for the rest of the run. `progress`: of the round's step along the honest mean, over
the length of that mean. Attacks:

    against   minus the sum of the honest updates, at the usual length
    search    of many made updates (`Run.made_of`) those that pass the rule with the least progress: before each round
              the rule is asked about all of them
    turns     the same in every other round; in the others they are honest
    sleeper   the same, after twenty honest rounds
    drift     honest work, and in each round more of the opposite of all that was learned so far, as long as it passes

When all colluders are found, the others go on alone.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from protocol.run import layout
from tests.benchmarks import scores, teachers
from tests.benchmarks.teachers import BAD_AFTER, MODEL, ROUNDS, SHARDS, Sent, dense, times

CELLS = [
    f"{name}:{bad}:{of}"
    for bad, of in ((1, 5), (2, 7), (2, 8), (3, 8), (5, 16))
    for name in ("honest", "against", "search", "turns", "sleeper", "drift")
]
AGREEING = (0.1, 0.3, 1.0)
"""Parts of the honest sum, over that of noise, in an update that opposes none or some."""
DRIFT = 0.05
"""Of an honest update's length, by which colluders that drift go further in a round."""


def vector(sent: Sent) -> np.ndarray:
    return np.concatenate([array.ravel() for shard in SHARDS for array in dense(sent, shard)])


def length(sent: Sent) -> float:
    return math.sqrt(sum(float((x.values**2).sum()) for shard in SHARDS for x in sent[shard]))


def usual(honest: list[Sent]) -> float:
    """The median length of updates."""
    return statistics.median(length(update) for update in honest)


def progress(honest: np.ndarray, made: np.ndarray, scales: Sequence[tuple[float, float]]) -> float:
    """Of the weighted mean of updates (all of the `honest` ones first) along the mean of these, over its length."""
    along = np.concatenate([honest, made]) @ honest.mean(axis=0) / float(np.square(honest.mean(axis=0)).sum())
    return sum(s * w * float(x) for (s, w), x in zip(scales, along, strict=True)) / sum(w for _, w in scales)


class Run(scores.Run):
    """A run with colluders. chosen: how often which update was the worst that passes."""

    def __init__(self, name: str, bad: int, seed: int, scored: bool, count: int) -> None:
        super().__init__(name, bad, seed, False, count)
        self.scored, self.progress, self.chosen = scored, list[float](), dict[str, int]()
        self.learned, self.drifted = np.zeros(1), 0
        self._honest: list[Sent] = []
        self._made: list[Sent] = []

    def is_honest(self, replica: int, round: int) -> bool:
        rests = {"turns": round % 2 == 1, "sleeper": round < BAD_AFTER}
        return replica < self.good or rests.get(self.name, False)

    def round(self, number: int) -> None:
        super().round(number)
        if not self.scored:
            self.found.clear()
        if {replica for _, replica in self.found}.issuperset(range(self.good, len(self.replicas))):
            del self.replicas[self.good :]
        del self.past[:-1]

    def applied(self, sent: list[Sent], scales: list[tuple[float, float]]) -> None:
        rows = np.stack([vector(update) for update in sent])
        self.learned = self.learned + rows[: self.good].mean(axis=0)
        self.progress.append(progress(rows[: self.good], rows[self.good :], scales))
        super().applied(sent, scales)

    def evil(self, i: int, round: int, honest: list[Sent]) -> Sent:
        if honest is not self._honest:
            self._honest, self._made = honest, self.worst(round, honest)
        return self._made[i - len(honest)]

    def worst(self, round: int, honest: list[Sent]) -> list[Sent]:
        """The updates of this round's colluders."""
        bad = len(self.replicas) - len(honest)
        if self.name == "against":
            return self.made_of(round, honest, bad, len(honest), 0.0)
        if self.name == "drift":
            return self.drift(round, honest)
        found, rows = list[tuple[float, str, list[Sent]]](), np.stack([vector(update) for update in honest])
        for targets in sorted({0, 1, bad, min(len(honest), bad + 1)}):
            for agreeing in AGREEING[: None if targets < len(honest) else 1]:
                made = self.made_of(round, honest, bad, targets, agreeing)
                verdicts = self.verdicts(round, [*honest, *made])
                scales = [(v.scale, v.weight if v.reason is None else 0.0) for v in verdicts]
                left = progress(rows, np.stack([vector(update) for update in made]), scales)
                found.append((left, f"{targets}:{agreeing}", made))
        _, name, made = min(found, key=lambda x: x[0])
        self.chosen[name] = self.chosen.get(name, 0) + 1
        return made

    def drift(self, round: int, honest: list[Sent]) -> list[Sent]:
        """Honest updates, and one DRIFT more of the opposite of what was learned than before, or as much as passes."""
        own = [vector(replica.send()) for replica in self.replicas[len(honest) :]]
        away = -DRIFT * self.learned / max(1e-30, float(np.linalg.norm(self.learned)))
        norm, made = usual(honest), list[Sent]()
        for drifted in range(self.drifted + 1, -1, -1):
            made = [self.encoded(x + drifted * float(np.linalg.norm(x)) * away, norm) for x in own]
            self.drifted = drifted
            if all(v.reason is None for v in self.verdicts(round, [*honest, *made])[len(honest) :]):
                break
        return made

    def made_of(self, round: int, honest: list[Sent], bad: int, targets: int, agreeing: float) -> list[Sent]:
        """Updates as long as the honest ones: minus the sum of some of these, plus so much of the sum of the others,
        plus noise of its own, so that they are not alike."""
        rows = np.stack([vector(update) for update in honest])
        norm, drawn = usual(honest), np.random.default_rng([7, round])
        order = [(round + i) % len(rows) for i in range(len(rows))]
        core = np.zeros(rows.shape[1])
        for some, factor in ((order[:targets], -1.0), (order[targets:], agreeing)):
            total = rows[some].sum(axis=0)
            core += factor * total / max(1e-30, float(np.linalg.norm(total)))
        return [self.encoded(core + drawn.permutation(rows[0]) / norm, norm) for _ in range(bad)]

    def encoded(self, values: np.ndarray, norm: float) -> Sent:
        """These values after the codec, so long."""
        update = self.replicas[-1].encoded(_arrays(values))
        return times(update, norm / length(update))


def _arrays(values: np.ndarray) -> dict[str, list[np.ndarray]]:
    shapes = [(shard, shape) for shard in SHARDS for shape in layout.shapes(MODEL, shard)]
    parts = np.split(values.astype(np.float32), np.cumsum([math.prod(shape) for _, shape in shapes])[:-1])
    found: dict[str, list[np.ndarray]] = {shard: [] for shard in SHARDS}
    for (shard, shape), part in zip(shapes, parts, strict=True):
        found[shard].append(part.reshape(shape))
    return found


def train(name: str, bad: int, count: int, seed: int, scored: bool) -> dict[str, Any]:
    run, began = Run(name, bad, seed, scored, count), time.monotonic()
    for number in range(ROUNDS):
        run.round(number)
    return {
        "attack": name, "bad": bad, "of": count, "seed": seed, "scored": scored, "loss": run.loss(),
        "progress": statistics.mean(run.progress), "honest_out": run.honest_out, "honest": run.rounds,
        "bad_in": run.bad_in, "found": run.found, "reasons": run.reasons, "chosen": run.chosen,
        "seconds": time.monotonic() - began,
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> None:
    base = {(r["bad"], r["of"], r["seed"]): r["loss"] for r in rows if r["attack"] == "honest"}
    cells: dict[tuple[int, int, str, bool], list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda r: (r["of"], r["bad"], r["attack"] != "honest", r["attack"], r["seed"])):
        cells.setdefault((row["bad"], row["of"], row["attack"], row["scored"]), []).append(row)
    print("| colluders | attack | seeds | loss | than the honest run | progress | honest left out | found in round |")
    print("|---|---|---|---|---|---|---|---|")
    for (bad, of, attack, scored), runs in cells.items():
        honest = [base.get((bad, of, row["seed"]), math.nan) for row in runs]
        worse = ", ".join(f"{100 * (row['loss'] / x - 1):+.2f}" for row, x in zip(runs, honest, strict=True))
        found = [[str(round) for round, replica in row["found"] if replica >= of - bad] for row in runs]
        columns = [
            f"{bad} of {of}", attack if scored else f"{attack}, unscored", ", ".join(str(row["seed"]) for row in runs),
            ", ".join(f"{row['loss']:.3f}" for row in runs), "-" if attack == "honest" else f"{worse} %",
            ", ".join(f"{row['progress']:.2f}" for row in runs),
            f"{sum(row['honest_out'] for row in runs)} of {sum(row['honest'] for row in runs)}",
            "-" if attack == "honest" else "; ".join(" ".join(x) or "never" for x in found),
        ]  # fmt: skip
        print(f"| {' | '.join(columns)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", nargs="*", default=CELLS)
    parser.add_argument("--unscored", dest="option", action="store_false")
    teachers.campaign(parser, ("attack", "bad", "of", "seed", "scored"), train, table)


if __name__ == "__main__":
    main()
