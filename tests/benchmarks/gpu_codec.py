"""Measures the outer step with updates that are made on an accelerator. Prints a table.

    python -m tests.benchmarks.gpu_codec [--device cuda] [--small]

The model is the 512M one of tests/benchmarks/codec.py with all of its shards, or a tiny one with `--small`; k = 32.
Feedback and θ are on the host, the trained parameters on the device. The host alone makes the first round's payloads
from the same feedback, too. If its payloads or its feedback differ in a bit, the benchmark stops with an error.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from peer.state.outer_optimizer import Outer
from peer.training import update
from peer.training.update import DeviceUpdate, Moved
from protocol.codec import topk
from protocol.codec.formats import TILE, Codec
from protocol.codec.topk import Array
from protocol.run import layout
from protocol.run.layout import ModelSpec
from tests.benchmarks.codec import CONTRIBUTIONS, MODEL_512M, uneven

K = 32
BETA = 0.95
SMALL = ModelSpec(vocab_size=640, d_model=128, n_layers=2, n_heads=2, d_ff=192, context=32)
THREADS = 16
"""Threads for one shard, at most."""
SIDE_BY_SIDE = 4
"""Shards that are worked on at a time."""
HOW = {1: "shard after shard", SIDE_BY_SIDE: f"{SIDE_BY_SIDE} shards at a time"}


@dataclass(slots=True)
class Peer:
    """The state of one peer.

    local: the trained parameters, on the device.
    offered: payloads of all rounds, by shard.
    """

    outer: Outer
    local: dict[str, list[Tensor]]
    on_device: DeviceUpdate
    offered: dict[str, list[bytes]] = field(default_factory=dict)

    def update(self, shard: str) -> None:
        """Makes a payload with the device."""
        moved: list[Moved] = list(zip(self.outer.theta[shard], self.local[shard], strict=True))
        payload, _ = self.outer.update(functools.partial(self.on_device.accumulate, moved), shard)
        self.offered.setdefault(shard, []).append(payload)

    def update_alone(self, shard: str) -> None:
        """Makes a payload as a peer does without an accelerator."""
        local = [x.cpu().numpy() for x in self.local[shard]]
        self.outer.accumulate(shard, list(zip(self.outer.theta[shard], local, strict=True)))
        self.offered.setdefault(shard, []).append(self.outer.encode(shard)[0])


def make_peer(device: torch.device, model: ModelSpec, threads: int) -> Peer:
    """Returns a peer whose feedback and θ are drawn from a seed for each shard."""
    outer = Outer(model, Codec(K), BETA, 1.0, threads=threads)
    local: dict[str, list[Tensor]] = {}

    def make(numbered: tuple[int, str]) -> None:
        rng, shard = np.random.default_rng(numbered[0]), numbered[1]
        shapes = layout.shapes(model, shard)
        outer.feedback[shard] = [uneven(shape, rng) for shape in shapes]
        outer.theta[shard] = [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]
        local[shard] = [torch.from_numpy(x).to(device) * 0.99 for x in outer.theta[shard]]

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(make, enumerate(layout.shard_names(model))))
    return Peer(outer, local, DeviceUpdate(device))


def seconds(work: Callable[[str], object], shards: Sequence[str], at_a_time: int = 1) -> float:
    """Returns the seconds of the clock for `work` on every shard."""
    with ThreadPoolExecutor(at_a_time) as pool:
        began = time.perf_counter()
        list(pool.map(work, shards))
        return time.perf_counter() - began


def measure(device: str, model: ModelSpec, contributions: int = CONTRIBUTIONS) -> list[tuple[str, str]]:
    """Returns the rows of the table: name and figure. Raises ValueError if the device's bytes are not the host's."""
    threads, shards, dense = (
        min(THREADS, os.cpu_count() or 1),
        layout.shard_names(model),
        4 * layout.total_parameters(model),
    )
    peer = make_peer(torch.device(device), model, threads)
    rows = [("parameters", f"{dense / 4e6:,.1f} M"), *_on_device(peer.local, dense)]
    alone = Peer(Outer(model, Codec(K), BETA, 1.0, threads=threads), peer.local, peer.on_device)
    alone.outer.theta = dict(peer.outer.theta)
    alone.outer.feedback = {shard: [x.copy() for x in peer.outer.feedback[shard]] for shard in shards}
    rows.append((f"update by the host alone, {threads} threads", f"{seconds(alone.update_alone, shards):.3f} s"))
    rows.append(("update with the device, the first", f"{seconds(peer.update, shards):.3f} s"))
    _compare(alone, peer)
    before, took = np.array([peer.on_device.bytes_to_device, peer.on_device.bytes_to_host]), dict[int, list[float]]()
    for i in range(1, contributions):
        at_a_time = list(HOW)[i % 2]
        took.setdefault(at_a_time, []).append(seconds(peer.update, shards, at_a_time))
    crossed = np.array([peer.on_device.bytes_to_device, peer.on_device.bytes_to_host]) - before
    for at_a_time, clocks in sorted(took.items()):
        rows.append((f"update with the device, {HOW[at_a_time]}", f"{statistics.median(clocks):.3f} s"))
    up, down = crossed / max(1, contributions - 1) / dense
    sent = sum(len(offered[0]) for offered in peer.offered.values()) / dense
    rows.append(("bytes up, down, and offered, over dense fp32", f"{up:.4f}, {down:.4f}, {sent:.4f}"))
    scratch: dict[str, list[Array]] = {shard: [] for shard in shards}

    def apply(shard: str) -> None:
        peer.outer.apply(shard, [(1 / contributions, p) for p in peer.offered[shard]], scratch[shard])

    seconds(apply, shards)  # fresh memory costs as much as the sums
    for at_a_time, how in HOW.items():
        rows.append((f"apply {contributions}, {how}", f"{seconds(apply, shards, at_a_time):.3f} s"))
    return rows


def _on_device(tensors: dict[str, list[Tensor]], dense: int) -> list[tuple[str, str]]:
    """Measures torch.topk and the product's selection, each in its second call."""
    rows = []
    for name, work in (("torch.topk of chunks of 4096", _topk), ("selection of the kept", _select)):
        for _ in range(2):
            _wait()
            began = time.perf_counter()
            for of_shard in tensors.values():
                for x in of_shard:
                    work(x)
            _wait()
            clock = time.perf_counter() - began
        rows.append((f"{name}, on the device", f"{clock:.4f} s, {dense / clock / 1e9:.1f} GB/s"))
    return rows


def _topk(x: Tensor) -> None:
    if x.numel() % TILE == 0:
        torch.topk(x.reshape(-1, TILE), K, dim=1)


def _select(x: Tensor) -> None:
    tiling = topk.tiling(tuple(x.shape), K)
    for part in tiling.cut(update.PART):
        rows = x.reshape(tiling.rows, tiling.cols)[part.band * part.tr :][: part.rows]
        update.select(update.tiles(rows, part), part.keep)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _compare(alone: Peer, peer: Peer) -> None:
    """Raises ValueError if the payloads or the feedback of both differ in a bit."""
    for shard, offered in alone.offered.items():
        same = [offered == peer.offered[shard]]
        for a, b in zip(alone.outer.feedback[shard], peer.outer.feedback[shard], strict=True):
            same.append(np.array_equal(a.view(np.uint32), b.view(np.uint32)))
        if not all(same):
            raise ValueError(f"{shard}: the device's payload or feedback is not the host's")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true")
    chosen = parser.parse_args()
    print("| what | figure |\n|---|---|")
    for what, figure in measure(chosen.device, SMALL if chosen.small else MODEL_512M):
        print(f"| {what} | {figure} |")


if __name__ == "__main__":
    main()
