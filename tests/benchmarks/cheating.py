"""Stages that lie, and honest ones: how many lies a chain of four finds within the round, and how often it accuses somebody honest.

    python -m tests.benchmarks.cheating --keep cheating.jsonl                  # everything (an hour of one core)
    python -m tests.benchmarks.cheating --arms 16:int4:sym2 --seeds 1 --rounds 20

Four real stages of a small model train the demo's text in one process; what crosses a boundary is encoded, decoded and screened as in
peer/chain/neighbours.py. An arm is k:FORWARD:BACKWARD. An honest round is STEPS inner steps of MICRO micro-batches. Of every SPIKES rounds one
has a *spike*: in one step the learning rate is SPIKE times what it should be.

Of every LIES rounds, before it is trained honestly, the state of all stages and screens is kept and each lie is tried from there: each KIND, of
activations and of gradients, by each stage that sends them, from a random micro-batch of the first half of the round on. The lie is *found* when
somebody accuses the liar before the round's end. It is *laid to others* when somebody accuses anybody else first; what the
liar itself says of others does not count. What was accepted until
then has been trained on, and the other stages have passed on what they made of it.
"""

from __future__ import annotations

import argparse
import collections
import copy
import dataclasses
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from peer.chain import quantize
from peer.chain.frames import BACKWARD, FORWARD
from peer.chain.screening import NEW_ROUNDS, Screen, Screens, hops
from peer.demo.text import SEQUENCE, demo_corpus
from peer.training.schedule import learning_rate
from peer.training.trainer import StageTrainer
from protocol.codec import subspace
from protocol.run import data_order, init, layout
from protocol.run.layout import ModelSpec
from protocol.run.manifest import TrainSpec

STAGES, STEPS, MICRO, ROWS, D = 4, 8, 4, 1, 64
SPEC = ModelSpec(vocab_size=4096, d_model=D, n_layers=STAGES, n_heads=4, d_ff=2 * D, context=SEQUENCE)
ARMS = ("16:int4:sym2", "16:int4:int4", "32:bf16:bf16", "0:int4:sym2")
LIMIT = quantize.LIMIT / 4
SPIKES, SPIKE, LIES, HISTORY = 8, 10.0, 25, 16
KINDS = ("noise", "zeros", "x4", "x0.25", "flipped", "replayed")


@dataclasses.dataclass(frozen=True, slots=True)
class Lie:
    """What `stage` sends instead of frames of this direction, from this micro-batch of the round on."""

    kind: str
    direction: int
    stage: int
    since: int

    def of(self, x: Tensor, earlier: Sequence[Tensor], draw: random.Random) -> Tensor:
        """What is sent for `x`; `earlier`: what it has sent before."""
        if self.kind == "noise":
            return torch.randn(x.shape) * x.square().mean(-1, keepdim=True).sqrt()
        if self.kind == "replayed":
            return draw.choice(earlier)
        return {"zeros": 0.0, "x4": 4.0, "x0.25": 0.25, "flipped": -1.0}[self.kind] * x


class Accused(Exception):
    """`by` has found that `stage` lies."""

    def __init__(self, by: int, stage: int, why: str) -> None:
        super().__init__(f"stage {by} accuses stage {stage}: {why}")
        self.by, self.stage = by, stage


class Chain:
    """Four stages, and their screens by receiver and direction."""

    def __init__(self, arm: str, seed: int, rounds: int) -> None:
        rank, *self.wires = arm.split(":")
        key = f"cheating/{seed}".encode().ljust(32, b"/")
        train = TrainSpec(
            inner_steps=STEPS, micro_batches=MICRO, rows=ROWS, sequence=SEQUENCE, lr=2e-3, warmup_steps=20,
            total_steps=rounds * STEPS,
        )  # fmt: skip
        names = layout.shard_names(SPEC)
        basis = subspace.basis(key, D, int(rank)) if int(rank) else None
        cuts = (names[:2], names[2:3], names[3:4], names[4:])
        self.stages = [StageTrainer(SPEC, train, shards, rank=int(rank), basis=basis) for shards in cuts]
        theta = {shard: init.initial_shard(SPEC, key, shard) for shard in names}
        for stage in self.stages:
            stage.begin_round(theta)
        draws = [Screens(1000 * seed + i) for i in range(STAGES)]
        width, wires = int(rank) or D, dict(zip((FORWARD, BACKWARD), self.wires, strict=True))
        self.screens = {
            (i, kind): draws[i].of(kind, "", width, wires[kind])
            for kind, receivers in ((FORWARD, range(1, STAGES)), (BACKWARD, range(STAGES - 1)))
            for i in receivers
        }
        self.sent: dict[tuple[int, int], collections.deque[Tensor]] = collections.defaultdict(
            lambda: collections.deque(maxlen=HISTORY)
        )
        self.corpus, self.key = demo_corpus(), key
        self.false, self._round = list[str](), 0
        self._liar: int | None = None

    def state(self) -> tuple[list[StageTrainer], dict[tuple[int, int], Screen]]:
        """What `train` changes, but for what was sent."""
        return copy.deepcopy((self.stages, self.screens))

    def train(self, round: int, spike: int | None, lie: Lie | None, draw: random.Random) -> float:
        """One round, with the spike in this step; the loss. Raises Accused, unless all are honest: then `false` has who was accused."""
        self.false, self._round, self._liar = [], round, None if lie is None else lie.stage
        for (by, kind), screen in self.screens.items():
            screen.begin(f"stage {by - 1 if kind == FORWARD else by + 1}", round, hops(kind, by, STAGES))
        loss = 0.0
        for step in range(STEPS):
            at = data_order.slots(round * STEPS * MICRO * ROWS, step, MICRO * ROWS)
            ids = torch.tensor(self.corpus.slots(self.key, at).astype(np.int64))
            for micro, part in enumerate(ids.reshape(MICRO, ROWS, -1)):
                now = lie if lie is not None and step * MICRO + micro >= lie.since else None
                loss += self._micro_batch(micro, part, now, lie is None, draw) / (STEPS * MICRO)
            norm = math.sqrt(sum(value for stage in self.stages for _, value in stage.grad_sumsq()))
            for stage in self.stages:
                usual = stage.train
                if step == spike:
                    stage.train = dataclasses.replace(usual, lr=SPIKE * usual.lr)
                stage.step(round * STEPS + step + 1, norm)
                rate = learning_rate(stage.train, stage.pace.place(stage.train, round * STEPS + step + 1))
                stage.train = usual
            for screen in self.screens.values():
                screen.follow(rate)
        return loss

    def _micro_batch(self, micro: int, ids: Tensor, lie: Lie | None, keep: bool, draw: random.Random) -> float:
        x: Tensor | None = None
        for i, stage in enumerate(self.stages):
            x = stage.forward(micro, ids, x)
            if i < STAGES - 1:
                x = self._cross(FORWARD, i, i + 1, x, ids, lie, keep, draw)
        assert x is not None
        gradient: Tensor | None = None
        for i in reversed(range(STAGES)):
            gradient = self.stages[i].backward(micro, gradient)
            if i and gradient is not None:
                gradient = self._cross(BACKWARD, i, i - 1, gradient, ids, lie, keep, draw)
        return float(x)

    def _cross(
        self, kind: int, sender: int, by: int, x: Tensor, ids: Tensor, lie: Lie | None, keep: bool, draw: random.Random
    ) -> Tensor:
        if keep:
            self.sent[sender, kind].append(x)
        if lie is not None and (lie.stage, lie.direction) == (sender, kind):
            x = lie.of(x, self.sent[sender, kind], draw)
        wire, screen = self.wires[kind == BACKWARD], self.screens[by, kind]
        if sender == self._liar:
            x = x.clamp(-LIMIT, LIMIT)
        try:
            came = quantize.decode(quantize.encode(x, wire), x.shape, wire, x.device)
        except quantize.BadTensor:
            self._overflow(sender)
            raise
        why = screen.judge(screen.sample(came), ids.numpy())
        if why is not None and self._liar is None:
            self.false.append(f"stage {by} accuses stage {sender}: {why}")
            screen.begin(f"spare {len(self.false)}", self._round, hops(kind, by, STAGES))
        elif why is not None and self._liar != by:
            raise Accused(by, sender, why)
        return came

    def _overflow(self, sender: int) -> None:
        """An honest stage that cannot send what it made of lies says who lied, if it can (peer/chain/neighbours.py)."""
        for kind, stage in ((FORWARD, sender - 1), (BACKWARD, sender + 1)):
            screen = self.screens.get((sender, kind))
            if screen is not None and screen.doubt is not None:
                raise Accused(sender, stage, screen.doubt)
        if self._liar is not None:
            raise Accused(sender, sender, "cannot go on")


def every_lie(draw: random.Random) -> Iterator[Lie]:
    for kind in KINDS:
        for direction, stages in ((FORWARD, range(STAGES - 1)), (BACKWARD, range(1, STAGES))):
            for stage in stages:
                yield Lie(kind, direction, stage, draw.randrange(STEPS * MICRO // 2))


def run(arm: str, seed: int, rounds: int, note: Callable[..., None]) -> None:
    """One run; `note(field=value)` hears of each round and of each lie."""
    draw = random.Random(f"{arm} {seed}")
    torch.manual_seed(seed)
    chain = Chain(arm, seed, rounds)
    for round in range(1, rounds + 1):
        if round > NEW_ROUNDS + 1 and round % LIES == LIES // 3:
            stages, screens = chain.state()
            for lie in every_lie(draw):
                chain.stages, chain.screens = copy.deepcopy((stages, screens))
                accused: Accused | None = None
                try:
                    chain.train(round, None, lie, draw)
                except Accused as error:
                    accused = error
                found = accused is not None and accused.stage == lie.stage
                note(round=round, lie=dataclasses.asdict(lie), found=found, said=str(accused) if accused else None)
            chain.stages, chain.screens = stages, screens
        spike = draw.randrange(STEPS) if round % SPIKES == SPIKES // 2 else None
        loss = chain.train(round, spike, None, draw)
        note(round=round, spike=spike, false=chain.false[0] if chain.false else None, loss=loss)


def table(lines: Sequence[dict[str, object]]) -> Iterator[str]:
    """What docs/results/cheating.md has."""
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
