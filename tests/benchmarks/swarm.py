"""Compares the memory, bytes and seconds of a swarm, by role, with the formulas (docs/results/round.md).

    python -m tests.benchmarks.swarm [RESULT.json]

Runs the demo with processes over hivemind, or reads the result of an earlier demo, and prints the tables. Exits with 1
if boundary bytes, framing included, are more than 3 % off their formula, or payloads more than 5 % above the entropy of
their index sets and the bits of their values.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from peer.chain import frames
from peer.demo import recipe
from peer.demo.recipe import demo_corpus
from protocol.codec import formats, sparse
from protocol.planning import memory
from protocol.run import layout
from tests.e2e.swarms import options
from tests.support.plain_codec import entropy_size

TOLERANCE = 0.03
PAYLOAD_TOLERANCE = 0.05


def run() -> dict[str, Any]:
    """Runs a demo of five rounds and returns its result."""
    with tempfile.TemporaryDirectory(prefix="potluck-benchmark-") as name:
        out = Path(name) / "run"
        arguments = ["demo", "--no-screen", "--rounds", "5", "--out", str(out), "--json", str(out) + ".json"]
        subprocess.run([sys.executable, "-m", "peer.cli", *arguments], check=True)
        return dict(json.loads(Path(str(out) + ".json").read_text()))


def main() -> int:
    result = json.loads(Path(sys.argv[1]).read_text()) if len(sys.argv) > 1 else run()
    chosen = options(Path("unused"), full=2, chains=1, stages=3, residual_width=42)
    manifest = recipe.make_manifest(chosen, demo_corpus().digest)
    wrong = 0

    print("role         peak RSS above idle   announced   bytes sent a round   seconds a round by phase")
    announced = {p.name: p.memory_bytes for p in recipe.make_peers(manifest, chosen)}
    for name, peak in result["peak_rss_above_idle_bytes"].items():
        phases = " ".join(f"{k} {v:.2f}" for k, v in result["phase_seconds"][name].items())
        sent = result["bytes_sent_per_peer_per_round"][name]
        print(f"{name:12} {peak / 1e6:14.1f} MB {announced[name] / 1e6:11.1f} MB {sent:16,.0f} B   {phases}")

    spec, codec = manifest.model, manifest.outer.codec
    shapes = [layout.shapes(spec, shard) for shard in layout.shard_names(spec)]
    payload = result["payload_bytes_per_replica_per_round"]
    most = sum(sparse.max_payload_size(codec, of_shard) for of_shard in shapes)
    entropy = sum(entropy_size(codec, of_shard) for of_shard in shapes)
    print(f"payload of a replica and round, bytes: {payload:,.0f}; at most {most:,}; entropy {entropy:,.0f}", end="")
    print(f"; {100 * (payload / entropy - 1):+.2f} %")
    wrong += payload > min(most, (1 + PAYLOAD_TOLERANCE) * entropy)

    train = manifest.train
    framing = frames.HEAD_BYTES / (train.rows * train.sequence)
    for way, name in (("", manifest.chains.forward), ("backward_", manifest.chains.backward)):
        measured, formula = (
            result[f"boundary_{way}bytes_per_token"],
            formats.bytes_per_token(name, spec.written),
        )
        wrong += report(f"boundary {way or 'forward_'}bytes a token", measured, formula, framing)
    print(f"largest stage: {max(memory.stage_memory(manifest, i, i + 1) for i in range(spec.n_layers)) / 1e6:.1f} MB")
    return 1 if wrong else 0


def report(what: str, measured: float, formula: float, framing: float) -> bool:
    """Prints a line. Returns whether the figure is out of tolerance."""
    off = measured / (formula + framing) - 1
    print(f"{what}: {measured:,.2f}; formula {formula:,.2f} + framing {framing:,.2f}; off by {100 * off:+.2f} %")
    return abs(off) > TOLERANCE


if __name__ == "__main__":
    raise SystemExit(main())
