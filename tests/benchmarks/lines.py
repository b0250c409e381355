"""What homes' lines leave of a swarm's tokens, in virtual time.

    python -m tests.benchmarks.lines --homes 8 20 --overlap 0 1 --seeds 0 1

Every home trains the whole model and has a line of UP and DOWN. The processes are the real `Peer` and `BootstrapNode`
(tests/sim/paces.py). The model is small, and lines are as much slower as its updates are smaller than PRESET's; states
are not fetched, and messages take no time of a line. Printed: tokens that reach commits, in parts of what the machines
can train, and of what the planner's objective predicts; seconds of the median round; bytes of payloads that all send in
a round, in parts of those that all others need.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
from collections.abc import Sequence
from dataclasses import replace

from protocol.codec import sparse
from protocol.codec.formats import Codec
from protocol.planning import partition
from protocol.planning.arrange import arrange
from protocol.planning.partition import Candidate
from protocol.run import layout
from protocol.run.layout import ModelSpec
from protocol.run.manifest import Manifest
from protocol.run.presets import PRESETS
from tests.sim import paces
from tests.sim.paces import Machine, PacedSwarm
from tests.support import tiny

MODEL = ModelSpec(vocab_size=256, d_model=64, n_layers=4, n_heads=2, d_ff=256, context=8, residual_width=16)
TOPK = 512
"""Of MODEL's updates: their lists are then as small beside them as PRESET's."""
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


def measure(homes: int, overlap: int, seed: int) -> tuple[float, float, int, float, float]:
    """(tokens that reach commits, in parts of those that can be trained; the same as predicted; replicas; seconds of
    the median round; payload bytes that all send in a round, in parts of those that all and a node need)."""
    manifest = paces.manifest(SECONDS, homes, model=MODEL, overlap=overlap)
    preset, outer = update_bytes(PRESETS[PRESET].model, manifest.outer.codec), replace(manifest.outer, topk=TOPK)
    manifest = replace(manifest, outer=outer)
    scale = update_bytes(MODEL, outer.codec) / preset
    draw = random.Random(seed)
    machines = [Machine(draw.choice(PACES), up=UP * scale, down=DOWN * scale) for _ in range(homes)]
    swarm = PacedSwarm(machines, manifest, seed, own=layout.shard_names(MODEL))

    sent: list[int] = []

    async def script(swarm: PacedSwarm) -> None:
        for number in (WARM, WARM + ROUNDS):
            await swarm.round(number)
            sent.append(swarm.world.network.bulk_bytes)

    swarm.run(script)
    possible = paces.possible(manifest, [[machine.pace] for machine in machines])
    durations = swarm.durations()
    median = statistics.median(durations[r] for r in range(WARM + 1, WARM + ROUNDS + 1))
    count = len(swarm.plans[-1].replicas)
    needed = ROUNDS * count * count * update_bytes(MODEL, outer.codec)
    return (
        swarm.rate(WARM, WARM + ROUNDS) / possible,
        predicted(manifest, machines) / possible,
        count,
        median,
        (sent[1] - sent[0]) / needed,
    )


def predicted(manifest: Manifest, machines: Sequence[Machine]) -> float:
    """Tokens a second that the planner promises."""
    whole = partition.stage_operations(manifest)[0, manifest.model.n_layers] * manifest.train.micro_batches
    homes = [
        Candidate(
            peer=f"home-{i}",
            memory_bytes=tiny.full_memory(manifest),
            up_bps=round(machine.up),
            down_bps=round(machine.down),
            speed_flops=round(whole / machine.pace),
        )
        for i, machine in enumerate(machines)
    ]
    return sum(replica.rate for replica in arrange(manifest, homes)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--homes", type=int, nargs="+", default=[8])
    parser.add_argument("--overlap", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    chosen = parser.parse_args()
    print("| homes | overlap | seed | replicas | tokens | predicted | seconds of a round | bytes |")
    print("|---|---|---|---|---|---|---|---|")
    for homes, overlap, seed in itertools.product(chosen.homes, chosen.overlap, chosen.seeds):
        tokens, promised, count, median, sent = measure(homes, overlap, seed)
        print(
            f"| {homes} | {overlap} | {seed} | {count} | {tokens:.3f} | {promised:.3f} | {median:.1f} | {sent:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
