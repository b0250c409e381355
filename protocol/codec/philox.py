"""Random bits and near-normal numbers that follow from a seed, bit for bit the same on every machine.

Bits are the raw output of Philox4x64-10 (Salmon et al., SC'11) under a key of 128 bits: the first 16 bytes, read as a
little-endian number, of sha256(length of seed as u32 little-endian, seed, name). Near-normal numbers are Irwin-Hall:
the sum of the four 16-bit lanes of a 64-bit word, less its mean, times one fp32 factor. Any part of a stream can be
made by itself.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from protocol.codec.topk import Map

_LANE_MEAN = 2 * 65_535  # of the sum of four lanes
_LANE_STD = math.sqrt(4 * (65_536**2 - 1) / 12)
_WORDS = 4  # of a counter
_EVEN_LANES, _LANE = np.uint64(0x0000_FFFF_0000_FFFF), np.uint64(16)
BLOCK = 1 << 13
PART = 1 << 20


def _philox(seed: bytes, name: str, first: int = 0) -> np.random.Philox:
    """The stream `name` from word `first` on, a multiple of four."""
    digest = hashlib.sha256(len(seed).to_bytes(4, "little") + seed + name.encode()).digest()
    return np.random.Philox(key=int.from_bytes(digest[:16], "little"), counter=first // _WORDS)


def bits(seed: bytes, name: str, n: int) -> npt.NDArray[np.uint64]:
    """The first `n` 64-bit words of the stream `name`; a shorter call gives a prefix of a longer one."""
    return np.asarray(_philox(seed, name).random_raw(n), dtype=np.uint64)


def sample(seed: bytes, name: str, n: int, share: float) -> npt.NDArray[np.bool_]:
    """Which of `n` elements are in a random sample [n]: each with the probability `share`, in units of 2^-16. An
    element has one lane of the stream `name`; a shorter call gives a prefix of a longer one."""
    lanes = bits(seed, name, -(-n // 4)).astype("<u8").view("<u2")[:n]
    found: npt.NDArray[np.bool_] = lanes < round(share * 65_536)
    return found


def normal_like(
    seed: bytes,
    name: str,
    shape: Sequence[int],
    std: float,
    *,
    out: npt.NDArray[np.float32] | None = None,
    run: Map = map,
    part: int = PART,
) -> npt.NDArray[np.float32]:
    """Near-normal fp32 numbers of the given shape, mean 0, standard deviation `std`. Each is made of one word of the
    stream `name`, in row-major order. `out`: a contiguous array of this shape, which they are written into. `run` may
    do the jobs of `part` numbers (a multiple of four) on several threads; the numbers do not depend on it."""
    made = np.empty(shape, dtype=np.float32) if out is None else out
    flat, scale = made.reshape(-1), np.float32(std / _LANE_STD)

    def job(first: int) -> None:
        stream, end = _philox(seed, name, first), min(first + part, flat.size)
        for start in range(first, end, BLOCK):
            block = flat[start : min(start + BLOCK, end)]
            _scaled_sums(np.asarray(stream.random_raw(block.size), dtype=np.uint64), scale, block)

    list(run(job, range(0, flat.size, part)))
    return made


def _scaled_sums(words: npt.NDArray[np.uint64], scale: np.float32, out: npt.NDArray[np.float32]) -> None:
    """Of each word the sum of its lanes, less the mean, times `scale`. Changes `words`."""
    odd = words >> _LANE
    odd &= _EVEN_LANES
    words &= _EVEN_LANES
    words += odd  # two sums of two lanes in each word, 17 bits each
    pairs = words.view(np.uint32)
    out[:] = pairs[0::2] + pairs[1::2]  # at most 2^18: exact in fp32
    out -= np.float32(_LANE_MEAN)
    out *= scale
