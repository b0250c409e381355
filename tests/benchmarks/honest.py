"""Trains honest chains of all kinds and checks that the screen accuses nobody (peer/chain/screening.py).

    python -m tests.benchmarks.honest --rounds 10000 --keep honest.jsonl      # an hour of one core
    python -m tests.benchmarks.honest --rounds 60                             # as in the test suite

A seed draws a `Setup`: 2 to 4 stages, 1 to 50 inner steps a round, the same in each round or not, warm-up or none,
AdamW or Muon, number formats, residual widths, lengths of text, and the share of an update that is sent. It also draws
events: blocks that move, a new peer in the place of a member, rounds without a screen, and steps with ten times their
learning rate. Everything is trained. Exits with 1 if anybody was accused.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from peer.chain.screening import Screens
from tests.benchmarks.screened import Chain, Setup

STEPS = (1, 1, 2, 2, 3, 4, 6, 8, 12, 16, 25, 50)
"""Inner steps of a round, at most; each is drawn as often as the others."""
STEPS_A_RUN = 240
"""Inner steps of a run, at least, but no more than MOST_ROUNDS rounds."""
MOST_ROUNDS = 160
FORWARD = ("bf16", "fp32", "int8", "int4", "int4", "tah4")
BACKWARD = ("bf16", "fp32", "int8", "int4", "sym2", "sym2")


def setup_of(draw: random.Random) -> Setup:
    """Draws a chain and its training."""
    inner, stages, muon = draw.choice(STEPS), draw.choice((2, 2, 3, 4)), draw.random() < 0.4
    rounds = min(MOST_ROUNDS, max(8, STEPS_A_RUN // inner))
    warm_up = min(draw.choice((0, 2, 9, 20, 100)), rounds * inner // 2)
    return Setup(
        stages=stages,
        layers=stages + draw.randint(0, 2),
        width=draw.choice((32, 32, 64)),
        vocabulary=draw.choice((512, 512, 512, 4096)),
        residual_width=draw.choice((0, 8, 16)),
        forward=draw.choice(FORWARD),
        backward=draw.choice(BACKWARD),
        optimizer="muon" if muon else "adamw",
        lr=draw.choice((3e-3, 1e-2)) if muon else draw.choice((3e-4, 1e-3, 3e-3)),
        warmup_steps=warm_up,
        inner_steps=inner,
        micro_batches=draw.choice((1, 1, 2, 4)) if inner < 25 else 1,
        sequence=draw.choice((64, 64, 128)),
        topk=draw.choice((32, 128, 256, 1024)),
        rounds=rounds,
    )


def run(seed: int) -> Iterator[dict[str, Any]]:
    """Trains a run and yields a line of figures for each round with a screen."""
    draw = random.Random(f"honest {seed}")
    torch.manual_seed(seed)
    setup, said = setup_of(draw), list[str]()
    chain = Chain(setup, seed, lambda by, sender, why: said.append(f"stage {by} accuses stage {sender}: {why}"))
    uneven, restless = draw.random() < 0.4, draw.random() < 0.5
    for round in range(1, setup.rounds + 1):
        if restless and draw.random() < 0.06:
            chain.cut(tuple(sorted(draw.sample(range(1, setup.layers), setup.stages - 1))))
        if restless and draw.random() < 0.03:
            chain.peers[draw.randrange(setup.stages)] = Screens(1000 * seed + round)
        screened = not (restless and draw.random() < 0.03)
        steps = draw.randint(1, setup.inner_steps) if uneven else setup.inner_steps
        spike = draw.randrange(steps) if restless and draw.random() < 0.03 else -1
        said.clear()
        chain.closest = 0.0
        loss = chain.play(round, steps, screened=screened, spike=spike)
        if screened:
            yield {
                "seed": seed, "round": round, "steps": steps, "spike": spike >= 0, "loss": loss, "said": said[:3],
                "closest": chain.closest,
            }  # fmt: skip


def campaign(rounds: int, first: int, keep: Path | None) -> list[dict[str, Any]]:
    """Trains whole runs, from the seed `first` on, until they have `rounds` rounds."""
    noted, seed = list[dict[str, Any]](), first
    while len(noted) < rounds:
        lines = list(run(seed))
        accused = sum(bool(line["said"]) for line in lines)
        if keep is not None:
            with keep.open("a") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)
        if accused:
            first_accused = next(x for x in lines if x["said"])
            setup = asdict(setup_of(random.Random(f"honest {seed}")))
            print(f"seed {seed}: {accused} rounds, {first_accused}, {setup}", flush=True)
        noted += lines
        seed += 1
    return noted


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--keep", type=Path, help="JSON lines of what was trained")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    noted = campaign(chosen.rounds, chosen.first, chosen.keep)
    accused, last = sum(bool(line["said"]) for line in noted), noted[-1]["seed"]
    steps = sum(line["steps"] for line in noted)
    print(
        f"{len(noted)} honest rounds of {last - chosen.first + 1} runs, seeds {chosen.first} to {last},"
        f" {steps} inner steps, {time.monotonic() - began:.0f} s: {accused} rounds with an accusation"
    )
    near = sorted(noted, key=lambda line: line["closest"], reverse=True)[:3]
    print(
        "nearest to an accusation: "
        + ", ".join(f"{x['closest']:.2f} (seed {x['seed']}, round {x['round']})" for x in near)
    )
    return 1 if accused else 0


if __name__ == "__main__":
    raise SystemExit(main())
