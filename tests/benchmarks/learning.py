"""Does it learn, and does mixing pay? Prints the tables of docs/results/learning.md.

    python -m tests.benchmarks.learning [--rounds N] [--seeds 3]

For each seed: two full replicas and a chain of three, against three chains of three, same tokens, in memory (the swarm of
processes ends with the same bits: tests/e2e/test_demo.py). All losses are those of the auditor's replay.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from peer.cli import main as cli
from peer.demo import swarm as demo
from tests.e2e.swarms import options

ARMS: dict[str, dict[str, Any]] = {
    "2 full + 1 chain": {"full": 2, "chains": 1},
    "3 chains": {"full": 0, "chains": 3},
}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--seeds", type=int, default=3)
    chosen = parser.parse_args()
    table: dict[str, list[dict[str, Any]]] = {}
    for arm, swarm in ARMS.items():
        for seed in range(chosen.seeds):
            with tempfile.TemporaryDirectory(prefix="potluck-learning-") as name:
                out = Path(name) / "run"
                run = options(
                    out,
                    **swarm,
                    stages=3,
                    rank="64",
                    rounds=chosen.rounds,
                    inner_steps=None,
                    seed=seed,
                )
                asyncio.run(demo.run(run, cli.main))
                table.setdefault(arm, []).append(json.loads(Path(f"{out}.json").read_text()))
    print("\n| arm | seed | nats per token | bits per byte | below unigram entropy | tokens | same bits | seconds |")
    print("|---|---|---|---|---|---|---|---|")
    for arm, results in table.items():
        for seed, r in enumerate(results):
            print(
                f"| {arm} | {seed} | {r['val_loss_last']:.4f} | {r['val_bits_per_byte_last']:.4f} |"
                f" {100 * r['below_unigram']:.1f} % | {r['tokens']:,} | {r['same_bits']} | {r['seconds']:.0f} |"
            )
    means = {arm: statistics.mean(r["val_loss_last"] for r in results) for arm, results in table.items()}
    print("\nmeans:", ", ".join(f"{arm} {mean:.4f}" for arm, mean in means.items()))
    return 0 if means["2 full + 1 chain"] <= means["3 chains"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
