"""Random bits and near-normal numbers that follow from a seed, bit for bit the same on every machine.

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

_LANE_MEAN = 2 * 65_535  # of the sum of four stripes
_LANE_STD = math.sqrt(4 * (65_536**2 - 1) / 12)
BLOCK = 1 << 20
"""Numbers that are made at a time."""


def _philox(seed: bytes, name: str) -> np.random.Philox:
    digest = hashlib.sha256(len(seed).to_bytes(4, "little") + seed + name.encode()).digest()
    return np.random.Philox(key=int.from_bytes(digest[:16], "little"))


def bits(seed: bytes, name: str, n: int) -> npt.NDArray[np.uint64]:
    """The first `n` 64-bit words of the stream `name`; a shorter call gives a prefix of a longer one."""
    return np.asarray(_philox(seed, name).random_raw(n), dtype=np.uint64)


def normal_like(
    seed: bytes, name: str, shape: Sequence[int], std: float, *, block: int = BLOCK
) -> npt.NDArray[np.float32]:
    """Near-normal fp32 numbers of the given shape, mean 0, standard deviation `std`. Each is made of one word of the stream `name`,
    in row-major order, `block` at a time."""
    stream = _philox(seed, name)
    out = np.empty(math.prod(shape), dtype=np.float32)
    scale = np.float32(std / _LANE_STD)
    for start in range(0, out.size, block):
        part = out[start : start + block]
        words = np.asarray(stream.random_raw(part.size), dtype=np.uint64)
        total = np.zeros(part.size, dtype=np.int64)
        for lane in range(4):
            total += ((words >> np.uint64(16 * lane)) & np.uint64(0xFFFF)).astype(np.int64)
        np.multiply((total - _LANE_MEAN).astype(np.float32), scale, out=part)
    return out.reshape(shape)
