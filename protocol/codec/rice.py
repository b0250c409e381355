"""Streams of bits: numbers of a fixed width as planes, and the gaps of index sets in Rice codes.

Planes: numbers of b bits are stored as the lowest bit of all of them, then the next bit of all of them, and so on. Bits fill a
byte from the lowest; what is left of the last byte is zero.

Rice codes (Rice, 1979), for sets of k of n indices: the gap g between neighbours, g = i - (index before it in the set, or
-1) - 1 >= 0, as its r low bits, in planes, and in another stream its quotient g >> r in unary: so many 0 and a 1. r is the
least that minimizes the longest set, k (1 + r) + ((n - k) >> r) bits.

Whoever reads trusts nothing: what the writers here cannot have made raises Malformed, and memory is reserved only for what
the caller's counts and the bytes at hand stand for.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

_STEP = 1 << 14  # gaps in the cache at a time

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.uint8] | npt.NDArray[np.uint16]


class Malformed(ValueError):
    """The bytes are not what the writer makes."""


def packed_size(count: int, bits: int) -> int:
    """Bytes of `count` numbers of `bits` bits."""
    return -(-count * bits // 8)


def pack(numbers: Numbers, bits: int) -> bytes:
    """`bits` planes: the lowest bit of each number, then the next bit of each, without gaps."""
    planes = np.empty((bits, numbers.size), dtype=bool)
    for bit, plane in enumerate(planes):
        np.not_equal(numbers & numbers.dtype.type(1 << bit), 0, out=plane)
    return np.packbits(planes, bitorder="little").tobytes()


def unpack(raw: Bytes, bits: int, count: int) -> Numbers:
    """The inverse of `pack`, as the narrowest type. Raises Malformed if the padding is not zero."""
    flat = np.unpackbits(raw, bitorder="little")
    if flat[count * bits :].any():
        raise Malformed("padding is not zero")
    numbers: Numbers = np.zeros(count, dtype=np.uint8) if bits <= 8 else np.zeros(count, dtype=np.uint16)
    for plane in flat[: count * bits].reshape(bits, count)[::-1]:
        numbers += numbers  # a shift, but faster
        numbers |= plane
    return numbers


@functools.lru_cache(maxsize=256)
def rice_parameter(n: int, k: int) -> int:
    """r for sets of k of n indices."""
    return min(range(n.bit_length()), key=lambda r: k * (1 + r) + ((n - k) >> r))


def quotients_size(n: int, k: int, sets: int) -> tuple[int, int]:
    """The least and the most bytes of the unary quotients of so many sets."""
    most = k + ((n - k) >> rice_parameter(n, k))
    return -(-sets * k // 8), -(-sets * most // 8)


def rice(index_SK: npt.NDArray[np.uint16], n: int) -> tuple[bytes, bytes]:
    """Low bits and quotients of sets [sets, k] of indices below n, ascending within a set."""
    gap_SK = index_SK.copy()
    gap_SK[:, 1:] -= index_SK[:, :-1] + np.uint16(1)
    gap, r = gap_SK.reshape(-1), rice_parameter(n, index_SK.shape[1])
    ends = np.cumsum((gap >> np.uint16(r)) + np.uint16(1), dtype=np.int64)
    unary = np.zeros(int(ends[-1]), dtype=bool)
    unary[ends - 1] = True
    return pack(gap & np.uint16((1 << r) - 1), r), np.packbits(unary, bitorder="little").tobytes()


def unrice(low: Bytes, quotients: Bytes, n: int, k: int, sets: int) -> npt.NDArray[np.uint16]:
    """The inverse of `rice`: [sets, k], ascending and below n. Raises Malformed."""
    r = rice_parameter(n, k)
    low_SK = unpack(low, r, sets * k).reshape(sets, k)
    ends = np.flatnonzero(np.unpackbits(quotients, bitorder="little").view(bool))
    if ends.size != sets * k or quotients[-1] == 0:
        raise Malformed("quotients are not one for each entry")
    # i = (the quotients of its set so far, 2^r times) + (their low bits, l) + j for the j-th of a set, from 0. The quotients add
    # up to the number of 0 since the set began: end - start - j. And l + j - 2^r j = 2^r - 1 - (the sum of 2^r - 1 - low).
    ends_SK = ends.reshape(sets, k)
    starts = np.concatenate([[0], ends_SK[:-1, -1] + 1]) << r
    starts -= (1 << r) - 1
    low_SK ^= low_SK.dtype.type((1 << r) - 1)
    index_SK = np.empty((sets, k), dtype=np.uint16)
    step = max(1, _STEP // k)
    for at in range(0, sets, step):
        i_SK = ends_SK[at : at + step] << r
        i_SK -= starts[at : at + step, None]
        i_SK -= np.cumsum(low_SK[at : at + step], axis=1, dtype=np.int32)
        if i_SK[:, -1].max() >= n:
            raise Malformed("indices are out of range")
        index_SK[at : at + step] = i_SK
    return index_SK
