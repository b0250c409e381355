"""What every peer derives from the seed before its first step: θ(0), shard by shard, and the basis U.

    python -m tests.benchmarks.start                   # 7B: all shards of θ(0), each dropped before the next; U [4096, 2048]
    python -m tests.benchmarks.start --layers 2        # the same with fewer blocks
    python -m tests.benchmarks.start --rank 512 --d 8192 --layers 1

Prints seconds, processor seconds (on a machine that others use, half of these is what two idle cores would need), how many of these
the system took, most of them to give fresh memory, and the most memory above the start.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from peer.training import device
from protocol.codec import subspace
from protocol.codec.topk import Map
from protocol.run import init, layout
from protocol.run.layout import ModelSpec

SEED = b"potluck/1"


def timed(name: str, count: float, work: Callable[[], None]) -> None:
    """Does `work`, which makes `count` of something, and prints a row."""
    rss, began, cpu = device.peak_rss(), time.perf_counter(), os.times()
    work()
    seconds, end = time.perf_counter() - began, os.times()
    system = end.system - cpu.system
    busy, peak = end.user - cpu.user + system, (device.peak_rss() - rss) / 1e6
    print(
        f"| {name} | {seconds:.1f} | {busy:.1f} | {system:.1f} | {1e9 * busy / count:.2f} | {peak:.0f} MB |", flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--d", type=int, default=4096)
    parser.add_argument("--ff", type=int, default=11_008)
    parser.add_argument("--vocab", type=int, default=128_000)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rank", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=2)
    chosen = parser.parse_args()
    spec = ModelSpec(
        vocab_size=chosen.vocab, d_model=chosen.d, n_layers=chosen.layers, n_heads=chosen.d // 128, d_ff=chosen.ff, context=1024
    )  # fmt: skip

    def draw(run: Map) -> None:
        for shard in layout.shard_names(spec):
            init.initial_shard(spec, SEED, shard, run=run)

    print(
        "| what | seconds | processor seconds | of them the system's | ns each | peak above the start |\n|---|---|---|---|---|---|"
    )
    parameters, d, k = layout.total_parameters(spec), chosen.d, chosen.rank
    with ThreadPoolExecutor(chosen.threads) as pool:
        timed(f"θ(0), {parameters / 1e9:.2f} G parameters", parameters, lambda: draw(pool.map))
        timed(f"U [{d}, {k}], d k² = {d * k * k / 1e9:.2f} G", d * k * k, lambda: _basis(d, k, pool.map))


def _basis(d: int, k: int, run: Map) -> None:
    subspace.basis(SEED, d, k, run)


if __name__ == "__main__":
    main()
