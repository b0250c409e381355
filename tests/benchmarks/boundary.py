"""Loss against bytes at the stage boundaries: the table over k and number formats, each direction on its own.

    python -m tests.benchmarks.boundary --seeds 1 --rounds 40
    python -m tests.benchmarks.boundary --arms 0:bf16:bf16 32:int4:bf16

The demo's recipe with every replica a chain of four stages, in memory. An arm is k:FORWARD:BACKWARD. Loss: nats per token on held-out
text after the last round, by the auditor's replay. Bytes: per token, boundary and direction, without framing. Gap: to the arm
that is neither projected nor quantized (0:bf16:bf16, always run first). Gaps are ratios of means over the seeds.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import statistics
import tempfile
from pathlib import Path

from peer import demo
from protocol import boundary
from protocol.manifest import Manifest
from tests.e2e.swarms import options

BASE = "0:bf16:bf16"
D = demo.MODEL.d_model
ARMS = (
    f"{D // 8}:bf16:bf16", f"{D // 4}:int8:int8", f"{D // 4}:int8:bf16", f"{D // 2}:int4:int4", f"{D // 2}:int4:int8",
    f"{D // 2}:tah4:int8", f"{D // 4}:int4:int4", f"{D // 4}:int4:int8", f"{D // 4}:tah4:int8", f"{D // 8}:int8:int8",
    f"{D // 8}:int4:int8", f"{D // 8}:int4:int4", f"{D // 32}:bf16:bf16", "0:int4:int8", "0:tah4:int8", "0:int8:int8",
)  # fmt: skip


def loss(arm: str, seed: int, rounds: int | None, replicas: int) -> float:
    """Of one run."""
    k, forward, backward = arm.split(":")
    with tempfile.TemporaryDirectory(prefix="potluck-boundary-") as name:
        out = Path(name) / "run"
        run = options(out, full=0, chains=replicas, stages=4, k=(int(k),), rounds=rounds, inner_steps=None, seed=seed)
        make_manifest = demo.make_manifest  # the demo has no option for formats: they would be two more of its many

        def changed(options: demo.DemoOptions) -> Manifest:
            made = make_manifest(options)
            return dataclasses.replace(
                made, chains=dataclasses.replace(made.chains, forward=forward, backward=backward)
            )  # fmt: skip

        demo.make_manifest = changed
        try:
            asyncio.run(demo.run(run))
        finally:
            demo.make_manifest = make_manifest
        return float(json.loads(Path(f"{out}.json").read_text())["val_loss_last"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="*", default=ARMS)
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=3)
    chosen = parser.parse_args()
    print("| k | forward | backward | bytes forward | bytes backward | under dense bf16 | loss | gap |")
    print("|---|---|---|---|---|---|---|---|")
    base = 0.0
    for arm in (BASE, *chosen.arms):
        mean = statistics.mean(loss(arm, seed, chosen.rounds, chosen.replicas) for seed in range(chosen.seeds))
        base = base or mean
        k, *formats = arm.split(":")
        sizes = [boundary.bytes_per_token(name, int(k) or D) for name in formats]
        print(
            f"| {k} | {formats[0]} | {formats[1]} | {sizes[0]} | {sizes[1]} | {4 * D / sum(sizes):.1f} x | {mean:.4f} |"
            f" {100 * (mean / base - 1):+.2f} % |",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
