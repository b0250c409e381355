"""Measures whether a chain of four finds stages that lie within the round, and how often it accuses honest ones.

    python -m tests.benchmarks.cheating --keep cheating.jsonl                  # everything (an hour of one core)
    python -m tests.benchmarks.cheating --arms 16:int8:int4 --seeds 1 --rounds 20

Four real stages of a small model train on the demo's text in one process (tests/benchmarks/screened.py). An arm is
w:FORWARD:BACKWARD, with the residual width w. An honest round has STEPS inner steps of MICRO micro-batches. One of
every SPIKES rounds has a *spike*: a step with ten times the learning rate.

One of every LIES rounds is tried with lies before it is trained honestly. Each lie begins from the same state of all
stages and screens: each KIND, of activations and of gradients, by each stage that sends them, from a random micro-batch
of the first half of the round on. A lie is *found* when somebody accuses the liar before the round's end. It is *laid
to others* when somebody accuses another stage first; the liar's own accusations do not count. Until then the other
stages train on the lie and pass on the results.

A lie is cut off at the largest magnitude that can be sent, so that no liar is found by a frame that is out of range. An
honest stage that cannot send the results of a lie accuses the neighbour that its screens doubt, as in the product.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from peer.chain import quantize
from peer.chain.frames import BACKWARD, FORWARD
from peer.chain.screening import NEW_ROUNDS
from tests.benchmarks.screened import Chain, Setup

STAGES, STEPS, MICRO = 4, 8, 4
ARMS = ("16:int8:int4", "20:int8:int4", "32:bf16:bf16", "0:int8:int4")
LIMIT = quantize.LIMIT / 2
"""Largest magnitude that a stage can send (`quantize.encode`)."""
SPIKES, LIES, HISTORY = 8, 25, 16
KINDS = ("noise", "zeros", "x4", "x0.25", "flipped", "replayed")


@dataclasses.dataclass(frozen=True, slots=True)
class Lie:
    """Replaces the frames of `stage` in this direction, from the micro-batch `since` of the round on."""

    kind: str
    direction: int
    stage: int
    since: int

    def of(self, x: Tensor, earlier: Sequence[Tensor], draw: random.Random) -> Tensor:
        """Returns the lie that is sent instead of `x`; `earlier`: frames that were sent before."""
        if self.kind == "noise":
            return torch.randn(x.shape) * x.square().mean(-1, keepdim=True).sqrt()
        if self.kind == "replayed":
            return draw.choice(earlier)
        return {"zeros": 0.0, "x4": 4.0, "x0.25": 0.25, "flipped": -1.0}[self.kind] * x


class Accused(Exception):
    """Raised when `by` accuses `stage`."""

    def __init__(self, by: int, stage: int, why: str) -> None:
        super().__init__(f"stage {by} accuses stage {stage}: {why}")
        self.by, self.stage = by, stage


class Liars:
    """A chain with a liar, and the frames that its stages have sent."""

    def __init__(self, arm: str, seed: int, rounds: int) -> None:
        width, forward, backward = arm.split(":")
        setup = Setup(
            stages=STAGES, layers=STAGES, residual_width=int(width), forward=forward, backward=backward,
            inner_steps=STEPS, micro_batches=MICRO, rounds=rounds,
        )  # fmt: skip
        self.chain = Chain(setup, seed, self._said)
        self.false = list[str]()
        self._sent: dict[tuple[int, int], collections.deque[Tensor]] = collections.defaultdict(
            lambda: collections.deque(maxlen=HISTORY)
        )
        self._lie: Lie | None = None

    def train(self, round: int, spike: int, lie: Lie | None, draw: random.Random) -> float:
        """Trains one round, with its spike in step `spike` (-1: none), and returns the loss.

        Raises Accused if there is a lie; accusations of honest stages go to `false`.
        """
        self.false, self._lie = [], lie

        def send(kind: int, sender: int, micro: int, x: Tensor) -> Tensor:
            if lie is None:
                self._sent[sender, kind].append(x)
                return x
            if (lie.stage, lie.direction) == (sender, kind) and micro >= lie.since:
                x = lie.of(x, self._sent[sender, kind], draw)
            if sender == lie.stage:
                x = x.nan_to_num().clamp(-LIMIT, LIMIT)
            if not bool((x.abs() <= LIMIT).all()):
                self._overflow(sender)
            return x

        return self.chain.play(round, STEPS, send, spike=spike)

    def _said(self, by: int, sender: int, why: str) -> None:
        if self._lie is None:
            self.false.append(f"stage {by} accuses stage {sender}: {why}")
        elif by != self._lie.stage:
            raise Accused(by, sender, why)

    def _overflow(self, sender: int) -> None:
        """Raises Accused for an honest stage that cannot send a lie's results, as peer/chain/neighbours.py does."""
        for kind, stage in ((FORWARD, sender - 1), (BACKWARD, sender + 1)):
            screen = self.chain.screens.get((sender, kind))
            if screen is not None and screen.doubt is not None:
                raise Accused(sender, stage, screen.doubt)
        raise Accused(sender, sender, "cannot go on")


def every_lie(draw: random.Random) -> Iterator[Lie]:
    for kind in KINDS:
        for direction, stages in ((FORWARD, range(STAGES - 1)), (BACKWARD, range(1, STAGES))):
            for stage in stages:
                yield Lie(kind, direction, stage, draw.randrange(STEPS * MICRO // 2))


def run(arm: str, seed: int, rounds: int, note: Callable[..., None]) -> None:
    """Trains one run; `note(field=value)` is called for each round and each lie."""
    draw = random.Random(f"{arm} {seed}")
    torch.manual_seed(seed)
    liars = Liars(arm, seed, rounds)
    for round in range(1, rounds + 1):
        if round > NEW_ROUNDS + 1 and round % LIES == LIES // 3:
            before = liars.chain.state()
            for lie in every_lie(draw):
                accused: Accused | None = None
                try:
                    liars.train(round, -1, lie, draw)
                except Accused as error:
                    accused = error
                found = accused is not None and accused.stage == lie.stage
                note(round=round, lie=dataclasses.asdict(lie), found=found, said=str(accused) if accused else None)
                liars.chain.restore(before)
        spike = draw.randrange(STEPS) if round % SPIKES == SPIKES // 2 else None
        loss = liars.train(round, -1 if spike is None else spike, None, draw)
        note(round=round, spike=spike, false=liars.false[0] if liars.false else None, loss=loss)


def table(lines: Sequence[dict[str, object]]) -> Iterator[str]:
    """Returns the lines of the tables of docs/results/cheating.md."""
    lies = [line for line in lines if "lie" in line]
    honest = [line for line in lines if "lie" not in line]
    yield "| lie | of | tried | found in the round | laid to others first | not found |"
    yield "|---|---|---|---|---|---|"
    for kind in (*KINDS, None):
        for direction in (FORWARD, BACKWARD) if kind else (None,):
            some = [x for x in lies if _matches(x["lie"], kind, direction)]
            if not some:
                continue
            found = sum(bool(x["found"]) for x in some)
            missed = sum(x["said"] is None for x in some)
            of = {FORWARD: "activations", BACKWARD: "gradients", None: ""}[direction]
            share = f"{found} ({100 * found / len(some):.1f} %)"
            yield f"| {kind or 'all'} | {of} | {len(some)} | {share} | {len(some) - found - missed} | {missed} |"
    yield ""
    yield "| arm | honest rounds | with a spike | false alarms |"
    yield "|---|---|---|---|"
    for arm in (*dict.fromkeys(x["arm"] for x in honest), None):
        some = [x for x in honest if arm in (None, x["arm"])]
        spikes, false = (sum(x[name] is not None for x in some) for name in ("spike", "false"))
        yield f"| {arm or 'all'} | {len(some)} | {spikes} | {false} |"


def _matches(lie: object, kind: str | None, direction: int | None) -> bool:
    assert isinstance(lie, dict)
    return kind in (None, lie["kind"]) and direction in (None, lie["direction"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="*", default=ARMS)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seeds", type=int, nargs="*", default=range(5))
    parser.add_argument("--keep", type=Path, help="JSON lines of what was run; a run that is whole is not run again")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    lines = chosen.keep.read_text().splitlines() if chosen.keep is not None and chosen.keep.exists() else []
    known = [json.loads(line) for line in lines]
    whole = {(x["arm"], x["seed"]) for x in known if x["round"] == chosen.rounds and "lie" not in x}
    known = [x for x in known if (x["arm"], x["seed"]) in whole]
    for seed in chosen.seeds:
        for arm in chosen.arms:
            if (arm, seed) in whole:
                continue

            def note(arm: str = arm, seed: int = seed, **fields: object) -> None:
                known.append({"arm": arm, "seed": seed, **fields})
                if chosen.keep is not None:
                    with chosen.keep.open("a") as file:
                        file.write(json.dumps(known[-1]) + "\n")

            run(arm, seed, chosen.rounds, note)
    print("\n".join(table(known)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
