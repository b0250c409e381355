"""Everything that follows from the manifest's seed, bit for bit the same on every machine: random bits,
near-normal numbers, and θ(0).

Bits are the raw output of Philox4x64-10 (Salmon et al., SC'11) under a key of 128 bits: the first 16 bytes,
read as a little-endian number, of sha256(length of seed as u32 little-endian, seed, name). Near-normal
numbers are Irwin-Hall: the sum of the four 16-bit lanes of one 64-bit word is an exact integer; less its mean
it is exact in fp32 too, and one fp32 multiplication scales it. They end at 3.46 standard deviations.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from protocol.run import layout
from protocol.run.layout import ModelSpec

INIT_STD = 0.02
_LANE_MEAN = 2 * 65_535  # of the sum of four lanes
_LANE_STD = math.sqrt(4 * (65_536**2 - 1) / 12)
_BLOCK = 1 << 20


def _philox(seed: bytes, name: str) -> np.random.Philox:
    digest = hashlib.sha256(len(seed).to_bytes(4, "little") + seed + name.encode()).digest()
    return np.random.Philox(key=int.from_bytes(digest[:16], "little"))


def bits(seed: bytes, name: str, n: int) -> npt.NDArray[np.uint64]:
    """The first `n` 64-bit words of the stream `name`; a shorter call gives a prefix of a longer one."""
    return np.asarray(_philox(seed, name).random_raw(n), dtype=np.uint64)


def normal_like(seed: bytes, name: str, shape: Sequence[int], std: float) -> npt.NDArray[np.float32]:
    """Near-normal fp32 numbers of the given shape, mean 0; one word of the stream `name` each, in row-major
    order."""
    stream = _philox(seed, name)
    out = np.empty(math.prod(shape), dtype=np.float32)
    scale = np.float32(std / _LANE_STD)
    for start in range(0, out.size, _BLOCK):
        part = out[start : start + _BLOCK]
        words = np.asarray(stream.random_raw(part.size), dtype=np.uint64)
        total = np.zeros(part.size, dtype=np.int64)
        for lane in range(4):
            total += ((words >> np.uint64(16 * lane)) & np.uint64(0xFFFF)).astype(np.int64)
        np.multiply((total - _LANE_MEAN).astype(np.float32), scale, out=part)
    return out.reshape(shape)


def initial_shard(spec: ModelSpec, seed: bytes, shard: str) -> list[npt.NDArray[np.float32]]:
    """One shard of θ(0): norms 1, matrices of std 0.02; those that end a residual branch 0.02 / sqrt(2
    layers)."""
    arrays = []
    for name, shape in layout.tensors(spec, shard):
        if len(shape) == 1:
            arrays.append(np.ones(shape, dtype=np.float32))
            continue
        ends_branch = name.endswith(("o_proj.weight", "down_proj.weight"))
        std = INIT_STD / math.sqrt(2 * spec.n_layers) if ends_branch else INIT_STD
        arrays.append(normal_like(seed, "theta0/" + name, shape, std))
    return arrays
