"""Measures the size and the speed of sparse updates. Prints the tables of docs/results/codec.md.

    python -m tests.benchmarks.codec [size | speed] [--rounds 5] [--repeat 7]

`size`: two full replicas of the demo's model train with each k, and their error feedbacks are encoded in every layout.
The table compares them with the entropy of the index sets. `speed`: the 512M model of SparseLoCo, tensor by tensor, on
two threads; a plain torch.topk over the same memory runs in each repetition. Exits with 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import zstandard
from hivemind.compression import serialize_torch_tensor
from hivemind.proto.runtime_pb2 import CompressionType

from peer.demo import recipe
from peer.demo.recipe import demo_corpus
from peer.state.outer_optimizer import Outer
from peer.training.trainer import StageTrainer
from protocol.codec import sparse, topk
from protocol.codec.formats import TILE, Codec
from protocol.codec.topk import Array
from protocol.run import init, layout
from protocol.run.corpus import slots
from protocol.run.layout import ModelSpec
from tests.e2e.swarms import options
from tests.support.plain_codec import entropy_size

THREADS = 2
MODEL_512M = ModelSpec(vocab_size=32_000, d_model=1536, n_layers=12, n_heads=12, d_ff=5440, context=2048)
SHARDS = {"embed": 1, "block.0": 12, "head": 1}
"""Shards of MODEL_512M that are measured, and the number of each kind in the model."""
OVER_ENTROPY, UNDER_DENSE, ENCODE, APPLY, MEMORY = 1.05, 375.0, 1.5, 0.5, 0.10
"""Targets: size over entropy; dense fp32 over size at k = 32; seconds over topk's; extra bytes over the shard's."""
KS = (32, 64, 128)
CONTRIBUTIONS = 8
DENSE = ("FLOAT16", "MEANSTD_16BIT", "UNIFORM_8BIT", "QUANTILE_8BIT")
"""Formats of hivemind's averagers for a dense tensor (BLOCKWISE_8BIT needs another package)."""


# --- size


def feedbacks(k: int, rounds: int) -> Iterator[list[Array]]:
    """Yields the error feedback of every shard of the first replica before each round encodes it."""
    corpus = demo_corpus()
    manifest = recipe.make_manifest(options(Path("unused"), rounds=None, full=2, inner_steps=None), corpus.digest)
    train, model, shards = manifest.train, manifest.model, layout.shard_names(manifest.model)
    outers = [Outer(model, Codec(k), manifest.outer.beta, manifest.outer.eta) for _ in range(2)]
    trainers = [StageTrainer(model, train, shards) for _ in outers]
    for outer in outers:
        outer.theta = {shard: init.initial_shard(model, manifest.seed_bytes, shard) for shard in shards}
    slot = 0
    for r in range(rounds):
        payloads: list[dict[str, bytes]] = []
        for m, (outer, trainer) in enumerate(zip(outers, trainers, strict=True)):
            trainer.begin_round(outer.theta)
            for step in range(train.inner_steps):
                at = slots(slot, step, train.step_rows)
                step_ids = torch.tensor(corpus.slots(manifest.seed_bytes, at))
                for micro, ids in enumerate(step_ids.chunk(train.micro_batches)):
                    trainer.forward(micro, ids)
                    trainer.backward(micro)
                norm = sum(square for _, square in trainer.grad_sumsq()) ** 0.5
                trainer.step(r * train.inner_steps + step + 1, norm)
            slot += train.inner_steps * train.step_rows
            payloads.append({})
            for shard in shards:
                outer.accumulate(shard, trainer.displacement(shard))
                if m == 0:
                    yield [e.copy() for e in outer.feedback[shard]]
                payloads[-1][shard], _ = outer.encode(shard)
        for outer in outers:
            for shard in shards:
                outer.apply(shard, [(1 / len(outers), p[shard]) for p in payloads])


def index_codes(index_TK: npt.NDArray[np.uint16], n: int) -> dict[str, float]:
    """Returns the bits of index sets [tiles, keep] of tiles of n in the codes of docs/adr/0006-rice-coded-indices.md.

    Only lengths are computed. A parameter that is chosen for each tile takes four bits.
    """
    T, K = index_TK.shape
    gap_TK = np.diff(index_TK.astype(np.int64), axis=1, prepend=-1) - 1
    rs = range(n.bit_length())
    rice_rT = np.stack([K * (1 + r) + (gap_TK >> r).sum(axis=1) for r in rs])
    golomb = [int((2 * np.floor(np.log2((gap_TK >> r) + 1)) + 1 + r).sum()) for r in rs]
    return {
        "entropy": T * math.log2(math.comb(n, K)),
        "Rice": rice_rT[sparse.rice_parameter(n, K)].sum(),
        "Rice, best r per tensor": rice_rT.sum(axis=1).min(),
        "Rice, best r per tile": rice_rT.min(axis=0).sum() + 4 * T,
        "Elias-Fano": T * min(K * (1 + r) + ((n - 1) >> r) for r in rs),
        "exp-Golomb, best per tensor": min(golomb),
        "whole": T * K * (n - 1).bit_length(),
    }


def layouts(k: int, arrays: Sequence[Array]) -> dict[str, bytes]:
    """Encodes the same entries in every layout. The public SparseLoCo client sends a whole byte for a 2-bit code."""
    payload = sparse.encode(Codec(k), arrays)
    sent = sparse.decode(Codec(k), [a.shape for a in arrays], payload)
    tilings = [topk.tiling(a.shape, k) for a in arrays]
    whole, codes = [], []
    for tiling, one in zip(tilings, sent, strict=True):
        row, col = np.divmod(one.index, tiling.cols)
        within = (row % tiling.tr * tiling.tc + col % tiling.tc).astype(np.uint16)
        whole.append(sparse.pack_planes(within, (tiling.n - 1).bit_length()))
        codes.append(np.signbit(one.values) + 2 * (np.abs(one.values) > np.abs(one.values).min()).astype(np.uint8))
    indices = b"".join(whole)
    return {
        "rice + 2": payload,
        "12 + 2 (whole indices)": indices + b"".join(sparse.fours(c.astype(np.uint8)) for c in codes),
        "12 + 8 (public client)": indices + b"".join(c.tobytes() for c in codes),
    }


def size(rounds: int) -> int:
    """Prints the table of sizes and returns the number of missed targets."""
    torch.set_num_threads(1)  # more than there are free cores spin against each other
    zstd = zstandard.ZstdCompressor(level=19)
    missed = 0
    print(
        "| k | layout | bytes a round | bits per entry | over entropy | under dense fp32 |\n|---|---|---|---|---|---|"
    )
    for k in KS:
        codec, total, entropy = Codec(k), Counter[str](), "entropy of the sets + 2"
        codes: dict[str, Counter[str]] = {"trained": Counter(), "without structure": Counter()}
        rng = np.random.default_rng(k)
        squares: list[float] = [0.0, 0.0]  # dense and sparse bytes of the matrices whose tiles have 4096 elements
        for arrays in feedbacks(k, rounds):
            shapes = [a.shape for a in arrays]
            total["entries"] += sparse.entries(codec, shapes)
            total["dense fp32"] += 4 * sum(a.size for a in arrays)
            total[entropy] += round(entropy_size(codec, shapes))
            for name, payload in layouts(k, arrays).items():
                total[name] += len(payload)
                total[f"{name}, zstd -19"] += len(zstd.compress(payload))
            for array in arrays:
                tiling = topk.tiling(array.shape, k)
                kept = topk.select(array.reshape(tiling.rows, tiling.cols), tiling, map)
                codes["trained"].update(index_codes(kept.index_TK, tiling.n))
                kept = topk.select(rng.random((tiling.rows, tiling.cols), dtype=np.float32), tiling, map)
                codes["without structure"].update(index_codes(kept.index_TK, tiling.n))
            if square := [a for a in arrays if a.ndim == 2 and not any(s % 64 for s in a.shape)]:
                squares[0] += 4 * sum(a.size for a in square)
                squares[1] += len(sparse.encode(codec, square))
        entries = total.pop("entries")
        for name, count in sorted(total.items(), key=lambda item: item[1]):
            per_entry = "" if "dense" in name else f"{8 * count / entries:.2f}"
            over, under = count / total[entropy], total["dense fp32"] / count
            print(f"| {k} | {name} | {count / rounds:,.0f} | {per_entry} | {over:.3f} | {under:.1f} |")
        print(f"| {k} | rice + 2, tiles of 4096 only | | | | {squares[0] / squares[1]:.1f} |")
        for sets, counts in codes.items():
            print(f"index bits per entry, k = {k}, sets {sets}:", end=" ")
            print(", ".join(f"{name} {count / entries:.2f}" for name, count in counts.items()))
        missed += total["rice + 2"] > OVER_ENTROPY * total[entropy]
        missed += k == 32 and squares[0] / squares[1] < UNDER_DENSE
    arrays = [torch.from_numpy(e) for shard in feedbacks(32, rounds=1) for e in shard]
    for name in DENSE:
        count = sum(serialize_torch_tensor(e, getattr(CompressionType, name)).ByteSize() for e in arrays)
        print(f"| | hivemind {name} | {count:,} | | | {4 * sum(e.numel() for e in arrays) / count:.1f} |")
    return missed


# --- speed


def uneven(shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Returns normal values whose rows and columns have log-normal scales."""
    x = rng.standard_normal(shape, dtype=np.float32)
    for axis in range(len(shape)):
        line = [1] * len(shape)
        line[axis] = shape[axis]
        x *= np.exp(0.5 * rng.standard_normal(line)).astype(np.float32)
    return x


def seconds(work: Callable[[], object]) -> tuple[float, float]:
    """Returns the seconds of the clock, and those of all cores together."""
    began, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - began, time.process_time() - cpu


def peak_bytes(work: Callable[[], object]) -> int:
    """Returns the most memory that `work` takes at a time, its result included."""
    tracemalloc.start()
    work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def speed(repeat: int, k: int) -> int:
    """Prints the table of speeds and returns the number of missed targets."""
    torch.set_num_threads(THREADS)
    rng = np.random.default_rng(0)
    codec, eta = Codec(k), np.float32(1)
    steps = ("topk", "encode", "apply")
    took: dict[str, list[float]] = {step: [0.0] * repeat for step in steps}
    cpu: dict[str, list[float]] = {step: [0.0] * repeat for step in steps}
    held: dict[str, float] = dict.fromkeys(steps[1:], 0.0)
    with ThreadPoolExecutor(THREADS) as pool:
        for shard, count in SHARDS.items():
            shapes = layout.shapes(MODEL_512M, shard)
            arrays = [uneven(shape, rng) for shape in shapes]
            sent = []
            for m in range(CONTRIBUTIONS):
                moved = [np.roll(a, 64 * m + m, axis=0) for a in arrays]
                sent.append((1 / CONTRIBUTIONS, sparse.encode(codec, moved, pool.map)))
            chunks = [torch.from_numpy(a).reshape(-1, TILE) for a in arrays if a.size % TILE == 0]
            work: dict[str, Callable[[], object]] = {
                "topk": lambda chunks=chunks: [torch.topk(c, k, dim=1) for c in chunks],
                "encode": lambda arrays=arrays: sparse.encode(codec, arrays, pool.map),
                "apply": lambda arrays=arrays, sent=sent: sparse.apply(codec, arrays, sent, eta, pool.map),
            }
            dense = 4 * sum(a.size for a in arrays)
            held["encode"] = max(held["encode"], peak_bytes(work["encode"]) / dense)
            held["apply"] = max(held["apply"], peak_bytes(work["apply"]) / dense - 1)
            for i in range(repeat):
                for step in steps:
                    clock, cores = seconds(work[step])
                    took[step][i] += count * clock
                    cpu[step][i] += count * cores
    dense = 4 * layout.total_parameters(MODEL_512M)
    print(
        f"\nk = {k}, {THREADS} threads, median of {repeat} (least to most);"
        f" the model's dense fp32 has {dense / 1e9:.2f} GB\n"
    )
    print("| step | GB/s of dense fp32 | times torch.topk | target | CPU time over topk's | extra memory |")
    print("|---|---|---|---|---|---|")
    missed = 0
    for step, target in (("topk", None), ("encode", ENCODE), ("apply", APPLY)):
        ratios = sorted(a / b for a, b in zip(took[step], took["topk"], strict=True))
        ratio, rate = statistics.median(ratios), dense / statistics.median(took[step]) / 1e9
        extra = f"{100 * held[step]:.1f} % of the shard" if step in held else ""
        spread = f" ({ratios[0]:.2f} to {ratios[-1]:.2f})" if target else ""
        name = {"apply": f"decode and apply {CONTRIBUTIONS}"}.get(step, step)
        of_cpu = statistics.median(a / b for a, b in zip(cpu[step], cpu["topk"], strict=True))
        print(f"| {name} | {rate:.2f} | {ratio:.2f}{spread} | {target or ''} | {of_cpu:.2f} | {extra} |")
        missed += target is not None and (ratio > target or held[step] > MEMORY)
    return missed


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", nargs="?", choices=["size", "speed"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeat", type=int, default=7)
    chosen = parser.parse_args()
    missed = 0
    if chosen.part != "speed":
        missed += size(chosen.rounds)
    if chosen.part != "size":
        missed += sum(speed(chosen.repeat, k) for k in KS)
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
