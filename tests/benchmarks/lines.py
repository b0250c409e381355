"""What homes' lines leave of a swarm's tokens, in virtual time.

    python -m tests.benchmarks.lines --homes 8 20 --overlap 0 1 --seeds 0 1

Every home trains the whole model and has a line of UP and DOWN. The processes are the real `Peer` and `BootstrapNode`
(tests/sim/paces.py). The model is small, and lines are as much slower as its updates are smaller than PRESET's; states
are not fetched, and messages take no time of a line. Printed: tokens
that reach commits, in parts of what the machines can train; seconds of the median round; bytes that all send in a
round, unscaled.
"""

from __future__ import annotations

import argparse
import random
import statistics

from protocol.codec import sparse
from protocol.codec.formats import Codec
from protocol.run import layout
from protocol.run.layout import ModelSpec
from protocol.run.presets import PRESETS
from tests.sim import paces
from tests.sim.paces import Machine, PacedSwarm

MODEL = ModelSpec(vocab_size=256, d_model=64, n_layers=4, n_heads=2, d_ff=256, context=8, residual_width=16)
PRESET = "512m"
"""Whose updates the lines carry."""
UP, DOWN = 20e6, 100e6
"""Bits a second."""
SECONDS = 120.0
"""Of a round."""
PACES = (0.5, 1.0, 2.0)
WARM, ROUNDS = 3, 6
"""Rounds until paces are known, and those that are measured."""


def update_bytes(model: ModelSpec, codec: Codec) -> int:
    """The longest update of a model."""
    return sum(sparse.max_payload_size(codec, layout.shapes(model, shard)) for shard in layout.shard_names(model))


def measure(homes: int, overlap: int, seed: int) -> tuple[float, float, int]:
    """(tokens that reach commits, in parts of those that can be trained; seconds of the median round; bytes that all
    send in a round)."""
    manifest = paces.manifest(SECONDS, homes, model=MODEL, overlap=overlap)
    codec = manifest.outer.codec
    scale = update_bytes(MODEL, codec) / update_bytes(PRESETS[PRESET].model, codec)
    draw = random.Random(seed)
    machines = [Machine(draw.choice(PACES), up=UP * scale, down=DOWN * scale) for _ in range(homes)]
    swarm = PacedSwarm(machines, manifest, seed)

    sent: list[int] = []

    async def script(swarm: PacedSwarm) -> None:
        for number in (WARM, WARM + ROUNDS):
            await swarm.round(number)
            sent.append(sum(x.transport.traffic.bytes_sent for x in (*swarm.nodes, *swarm.peers)))

    swarm.run(script)
    possible = paces.possible(manifest, [[machine.pace] for machine in machines])
    durations = swarm.durations()
    median = statistics.median(durations[r] for r in range(WARM + 1, WARM + ROUNDS + 1))
    return swarm.rate(WARM, WARM + ROUNDS) / possible, median, (sent[1] - sent[0]) // ROUNDS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--homes", type=int, nargs="+", default=[8])
    parser.add_argument("--overlap", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    chosen = parser.parse_args()
    print("| homes | overlap | seed | tokens | seconds of a round | bytes of a round |\n|---|---|---|---|---|---|")
    for homes in chosen.homes:
        for overlap in chosen.overlap:
            for seed in chosen.seeds:
                tokens, median, sent = measure(homes, overlap, seed)
                print(f"| {homes} | {overlap} | {seed} | {tokens:.3f} | {median:.1f} | {sent} |", flush=True)


if __name__ == "__main__":
    main()
