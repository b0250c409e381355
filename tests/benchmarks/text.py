"""How much text peers fetch for what they read, how often an inner step waits for it, and how often the operator sends each range.

    python -m tests.benchmarks.text [--pace TOKENS_A_SECOND] [--rounds N] [--steps N]

One node with an uplink of 100 Mb/s, a chain of four and two full replicas, each with a network daemon of its own on this machine; the corpus
is noise, sequences of 1,023 tokens. Nobody computes: an inner step of 16 sequences takes as long as it would at this pace, by
default ten times the 10,000 tokens a second at which two cores train some millions of parameters. As in training, a step's text is
asked for while the one before is computed. In each round a replica does within a tenth of the steps that it was expected to do, of the
ones that it was given (1.25 times as many, and one).
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from pathlib import Path

from peer.net.uplink import Uplink
from protocol.run import corpus
from tests.support.text_swarm import STEP, L, Reader, TextSwarm, given, write_noise

UPLINK_BPS = 100_000_000
CHAIN, FULL = 4, 2


async def train(reader: Reader, slot: int, slots: int, steps: int, seconds: float) -> int:
    """One round of one peer: how many of its steps waited."""
    reader.text.expect([range(slot, slot + slots)])
    waits = 0
    task = asyncio.create_task(reader.text.sequences(corpus.slots(slot, 0, STEP)))
    await asyncio.sleep(1.0)  # the outer step, of which others have seconds
    for step in range(steps):
        waits += not task.done()
        await task
        last = (step + 1) * STEP >= slots
        if not last:
            task = asyncio.create_task(reader.text.sequences(corpus.slots(slot, step + 1, STEP)))
        await asyncio.sleep(seconds)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return waits


async def measure(folder: Path, pace: float, rounds: int, expected: int) -> None:
    """Prints the figures."""
    replicas, draw = 1 + FULL, random.Random(0)
    noise = write_noise(folder / "corpus", rounds * replicas * given(expected) + 1000)
    async with TextSwarm(noise, folder, "p2p", uplink=Uplink(UPLINK_BPS)) as swarm:
        chains = [[await swarm.start() for _ in range(size)] for size in (CHAIN, *[1] * FULL)]
        seconds, slot, steps_done = STEP * L / pace, 0, 0
        first = waited = 0
        for round in range(rounds):
            begun = []
            for chain in chains:
                steps = round_steps(draw, expected)
                steps_done += steps * len(chain)
                begun += [train(member, slot, given(expected), steps, seconds) for member in chain]
                slot += given(expected)
            found = sum(await asyncio.gather(*begun))
            first, waited = (found, waited) if not round else (first, waited + found)
        copies = swarm.copies()
        trained = steps_done * STEP * noise.index.stride
        fetched = sum(peer.text.fetched_bytes for peer in swarm.peers)
        print(
            f"pace {pace:,.0f} tokens/s, {rounds} rounds of about {expected} steps ({expected * STEP * 2048 / 1e6:.1f} MB)"
        )
        print(f"fetched {fetched / 1e6:.1f} MB for {trained / 1e6:.1f} MB trained on: {fetched / trained:.3f}")
        print(f"steps that waited: {first} in the first round, {waited} in the others, of {steps_done}")
        print(f"the node sent each range {sum(copies) / len(copies):.2f} times, at most {max(copies)}")


def round_steps(draw: random.Random, expected: int) -> int:
    """Steps of a round."""
    return round(expected * draw.uniform(0.92, 1.08))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--pace", type=float, default=100_000.0)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=40)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="potluck-text-") as name:
        asyncio.run(measure(Path(name), chosen.pace, chosen.rounds, chosen.steps))
