"""Measures which of eight replicas are found bad by scores, and when. Prints the tables of docs/results/judging.md.

    python -m tests.benchmarks.scores ROWS.jsonl [--cells honest:0 text:2 ...] [--seeds 0] [--alone]
    python -m tests.benchmarks.scores ROWS.jsonl --table

The first command trains the runs that ROWS.jsonl lacks, the second prints the tables. Runs and attacks are those of
tests/benchmarks/teachers.py. Each contribution that counts in a round is scored as a peer scores it
(peer/node/evaluating.py), on SEQUENCES of each kind of text, and entered into the product's book
(protocol/ledger/scoring.py). There is one measurement for all three scorers, since all would measure the same. A
replica that is found bad is out for the rest of the run. With `--alone` judging only clips, so that nothing but scores
finds anybody.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from typing import Any

import numpy as np

from peer.node.evaluating import STEP
from peer.training import inference
from protocol.ledger.scoring import ScoreBook, Scored
from protocol.run.manifest import JudgingSpec
from protocol.wire.claims import Mark
from tests.benchmarks import teachers
from tests.benchmarks.teachers import MODEL, REPLICAS, ROUNDS, SEQUENCE, STEPS, Sent

SEQUENCES = 8
SCORERS = ("a", "b", "c")
CELLS = ("honest:0", "text:2", "stale:2", "starter:2", "drift:2", "drift:3")


class Run(teachers.Run):
    """A run with scores.

    found: (round, replica) of each replica that was found bad.
    gains: (is honest, gain, edge) of each score, over the round's medians.
    """

    def __init__(self, name: str, bad: int, seed: int, alone: bool, count: int = REPLICAS) -> None:
        super().__init__(name, bad, seed, True, count)
        if alone:
            self.made = dataclasses.replace(self.made, judging=JudgingSpec(agreement=0.0, copies=1.0))
        self.book, self.found, self.scored_seconds = ScoreBook(), list[tuple[int, int]](), 0.0
        self.gains: list[tuple[bool, float, float]] = []
        self.scales: list[tuple[float, float]] = []
        starts = np.arange((len(self.held_out) - 1) // SEQUENCE) * SEQUENCE
        self.pool = self.held_out[starts[:, None] + np.arange(SEQUENCE + 1)].astype(np.int64)

    def judged(self, number: int, sent: list[Sent]) -> list[tuple[float, float]]:
        out = {replica for _, replica in self.found}
        scales = super().judged(number, sent)
        self.scales = [(scale, 0.0 if i in out else weight) for i, (scale, weight) in enumerate(scales)]
        return self.scales

    def round(self, number: int) -> None:
        super().round(number)
        began, sent = time.perf_counter(), self.past[-1]
        measure = inference.Measured(MODEL, self.theta, "cpu")
        drawn = np.random.default_rng(number)
        other = self.pool[drawn.choice(len(self.pool), SEQUENCES, replace=False)]
        plain, values = self.mean(measure, other), dict[int, tuple[float, float]]()
        for i in (i for i, (_, weight) in enumerate(self.scales) if weight > 0):
            own = np.concatenate([self.windows(number, i, step) for step in range(STEPS)]).astype(np.int64)
            own = own[drawn.choice(len(own), SEQUENCES, replace=False)]
            before = self.mean(measure, own)
            with measure.moved(sent[i].items(), STEP * self.made.outer.eta * self.scales[i][0]):
                values[i] = self.mean(measure, own) - before, self.mean(measure, other) - plain
        self.scored_seconds += time.perf_counter() - began
        typical = statistics.median(gain for gain, _ in values.values())
        edge = statistics.median(gain - elsewhere for gain, elsewhere in values.values())
        self.gains += [
            (self.is_honest(i, number), gain / typical, (gain - elsewhere) / edge)
            for i, (gain, elsewhere) in values.items()
        ]
        scored = [
            Scored(
                peers=(str(i),),
                part=1.0,
                due=SCORERS,
                told=dict.fromkeys(SCORERS, Mark(replica=i, assigned=gain, other=elsewhere)),
            )
            for i, (gain, elsewhere) in values.items()
        ]
        self.book, bad = self.book.after(number, scored, number)
        self.found += [(number, int(peer)) for peer in bad]

    def mean(self, measure: inference.Measured, windows: np.ndarray) -> float:
        return measure(windows) / windows[:, 1:].size


def train(name: str, bad: int, seed: int, alone: bool) -> dict[str, Any]:
    run, began = Run(name, bad, seed, alone), time.perf_counter()
    for number in range(ROUNDS):
        run.round(number)
    rows = {
        kind: [
            np.percentile([x[at] for x in run.gains if x[0] is honest] or [0], [5, 50, 95]).round(3).tolist()
            for at in (1, 2)
        ]
        for kind, honest in (("honest", True), ("bad", False))
    }  # fmt: skip
    return {
        "attack": name, "bad": bad, "seed": seed, "alone": alone, "loss": run.loss(), "found": run.found, "gains": rows,
        "bad_in": run.bad_in,
        "honest_scored": sum(x[0] for x in run.gains), "bad_scored": sum(not x[0] for x in run.gains),
        "most": max(max(x.idle, x.edgeless) for p, x in run.book.of.items() if p.isdigit() and int(p) < REPLICAS - bad),
        "seconds": time.perf_counter() - began, "scored_seconds": run.scored_seconds,
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> None:
    print(
        "| attack | bad of 8 | judging | seed | gain, honest | gain, bad | edge, honest | edge, bad |"
        " found in round | loss | honest found |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        honest = REPLICAS - row["bad"]
        bad = [round for round, replica in row["found"] if replica >= honest]
        shown = [
            " ".join(f"{x:.2f}" for x in row["gains"][kind][at]) if row[f"{kind}_scored"] else "-"
            for at in (0, 1)
            for kind in ("honest", "bad")
        ]
        wrong = [r for r in row["found"] if r[1] < honest]
        print(
            f"| {row['attack']} | {row['bad']} | {'clips only' if row['alone'] else 'on'} | {row['seed']} |"
            f" {' | '.join(shown)} | {', '.join(map(str, bad)) or 'never'} | {row['loss']:.3f} |"
            f" {len(wrong)}, at {row['honest_scored']} marks |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", nargs="*", default=CELLS)
    parser.add_argument("--alone", dest="option", action="store_true")
    teachers.campaign(parser, ("attack", "bad", "seed", "alone"), train, table)


if __name__ == "__main__":
    main()
