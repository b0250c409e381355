"""The sparse update codec: top-k per tile, 2-bit values, entropy-coded indices (SparseLoCo; see docs/protocol.md).

Entries. Of every tile of n elements the k' largest are kept (protocol/codec/topk.py).

Values: `sym2`, `ref2` or `fp32` (protocol/codec/sparse.py).

Indices within the tile, tile by tile and ascending within one.
- `rice`: the gaps' low bits and unary quotients (protocol/codec/sparse.py); docs/adr/0006-rice-coded-indices.md says
  why.
- `fixed`: ceil(log2 n) bits each: 14 bits per entry for tiles of 4096, and a length that is known beforehand.

Payload, little-endian: header `PSp`, version (u8), value format (u8: 0 fp32, 1 sym2, 2 ref2), index format (u8: 0
fixed, 1 rice), k (u16); for `rice` each segment's bytes of quotients (u32 each). Then for each tensor its centroids
(sym2: lo, hi; ref2: four; fp32: none) as fp32, and its segments. A segment is as many whole bands of tiles as have at
most 2^16 n / k' elements, or one; it has the indices, or the gaps' low bits, as planes; the codes, four to a byte (or
fp32 values); the quotients. Each field ends at a whole byte. An update has one payload only, and `decode` refuses every
other, so equal updates have equal digests.

Work goes block by block, over as many threads as `run` has. Beside its result `apply` needs for each thread some MB and
6 bytes per contribution for the entries of a segment, `decode` 20 bytes for each of them; `encode` needs 14 bytes for
each entry of a tensor (`ref2`: 46) and some MB, for each thread. What a payload says changes none of that.

How the kept values of a tensor become codes of two bits: the formats `sym2` and `ref2` of protocol/codec/sparse.py, and
`fp32` without.

All means are float64; every centroid is rounded once to fp32.
- `sym2`: code = sign bit + 2 * magnitude bit. With m = |v| over all kept entries of the tensor, summed in ascending
  order: t = mean(m); then eight times: lo = mean(m <= t), hi = mean(m > t), t = (lo + hi) / 2; an empty class takes the
  other's mean. The magnitude bit is m > t; the value is +-lo or +-hi. Zero counts as positive.
- `ref2`, the reference code's quantizer: c = v - mean(v), s = 6 std(v) / 4 (std with n - 1; s = 1 where that is 0),
  code = clip(rint(c / s + 2), 0, 3); the value is mean(v) + the mean of c within the bin (0 for an empty bin).
- `fp32`: the value itself.

Streams of bits: numbers of a fixed width as planes, and the gaps of index sets in Rice codes.

Planes: numbers of b bits are stored as the lowest bit of all of them, then the next bit of all of them, and so on. Bits
fill a byte from the lowest; what is left of the last byte is zero.

Rice codes (Rice, 1979), for sets of k of n indices: the gap g between neighbours, g = i - (index before it in the set,
or -1) - 1 >= 0, as its r low bits, in planes, and in another stream its quotient g >> r in unary: so many 0 and a 1. r
is the least that minimizes the longest set, k (1 + r) + ((n - k) >> r) bits.

Whoever reads trusts nothing: what the writers here cannot have made raises Malformed, and memory is reserved only for
what the caller's counts and the bytes at hand stand for.
"""

from __future__ import annotations

import functools
import itertools
import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from protocol.codec import topk
from protocol.codec.formats import INDICES, VALUES, Codec
from protocol.codec.topk import Array, Empty, Kept, Map, Positions, Tiled, Tiling
from protocol.errors import PotluckError

_STEP = 1 << 14  # gaps in the cache at a time

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.uint8] | npt.NDArray[np.uint16]


class Malformed(ValueError):
    """The bytes are not what the writer makes."""


def packed_size(count: int, bits: int) -> int:
    """Bytes of `count` numbers of `bits` bits."""
    return -(-count * bits // 8)


def pack_planes(numbers: Numbers, bits: int) -> bytes:
    """`bits` planes: the lowest bit of each number, then the next bit of each, without gaps."""
    planes = np.empty((bits, numbers.size), dtype=bool)
    for bit, plane in enumerate(planes):
        np.not_equal(numbers & numbers.dtype.type(1 << bit), 0, out=plane)
    return np.packbits(planes, bitorder="little").tobytes()


def unpack_planes(raw: Bytes, bits: int, count: int) -> Numbers:
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
    return pack_planes(gap & np.uint16((1 << r) - 1), r), np.packbits(unary, bitorder="little").tobytes()


def unrice(low: Bytes, quotients: Bytes, n: int, k: int, sets: int) -> npt.NDArray[np.uint16]:
    """The inverse of `rice`: [sets, k], ascending and below n. Raises Malformed."""
    r = rice_parameter(n, k)
    low_SK = unpack_planes(low, r, sets * k).reshape(sets, k)
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


_HEADER = struct.Struct("<3sBBBH")
_MAGIC, _VERSION = b"PSp", 2
_CENTROIDS = {"fp32": 0, "sym2": 2, "ref2": 4}
_LENGTH = 4  # bytes of a segment's length of quotients
SEGMENT = 1 << 16  # entries: part of the format
BLOCK = 1 << 20  # elements that are summed up at a time
_AS_IS = np.arange(4, dtype=np.float32)  # a table by which codes stand for themselves
_CODES = (np.arange(256)[:, None] >> np.arange(0, 8, 2)) & 3  # [256, 4]: the codes of a byte


class PayloadError(PotluckError, ValueError):
    """The bytes are not a payload of this codec and these shapes, or the values to encode are not finite."""


@dataclass(frozen=True, slots=True)
class Sparse:
    """What is kept of one tensor: unique flat row-major positions [n] int64 and values [n] fp32."""

    index: Positions
    values: Array


# --- sizes


def entries(codec: Codec, shapes: Sequence[Sequence[int]]) -> int:
    """How many entries a payload of these shapes carries."""
    return sum(topk.tiling(tuple(shape), codec.topk).entries for shape in shapes)


def max_payload_size(codec: Codec, shapes: Sequence[Sequence[int]]) -> int:
    """The most bytes that a payload can have; with `fixed` indices, every payload's exact length."""
    return _max_payload_size(codec, tuple(tuple(shape) for shape in shapes))


@functools.lru_cache(maxsize=4096)
def _max_payload_size(codec: Codec, shapes: tuple[tuple[int, ...], ...]) -> int:
    size = _HEADER.size
    for shape in shapes:
        size += 4 * _CENTROIDS[codec.values]
        for part in _segments(topk.tiling(tuple(shape), codec.topk)):
            size += sum(_fields(codec, part)) + (_LENGTH + _quotients(part)[1] if codec.indices == "rice" else 0)
    return size


def entropy_size(codec: Codec, shapes: Sequence[Sequence[int]]) -> float:
    """Bytes of log2 C(n, k') bits a tile and of the bare values: the shortest code for index sets without structure."""
    size_bits = 0.0
    for shape in shapes:
        t = topk.tiling(tuple(shape), codec.topk)
        subsets = math.lgamma(t.n + 1) - math.lgamma(t.keep + 1) - math.lgamma(t.n - t.keep + 1)
        size_bits += t.tiles * subsets / math.log(2) + t.entries * (32 if codec.values == "fp32" else 2)
    return size_bits / 8


def _segments(tiling: Tiling) -> tuple[Tiling, ...]:
    return _cut(tiling, SEGMENT * tiling.n // tiling.keep)


@functools.lru_cache(maxsize=1024)
def _cut(tiling: Tiling, elements: int) -> tuple[Tiling, ...]:
    return tuple(tiling.cut(elements))


def _index_bits(codec: Codec, tiling: Tiling) -> int:
    """Width of the planes: whole indices, or the gaps' low bits."""
    return rice_parameter(tiling.n, tiling.keep) if codec.indices == "rice" else (tiling.n - 1).bit_length()


@functools.lru_cache(maxsize=4096)
def _fields(codec: Codec, part: Tiling) -> tuple[int, int]:
    """Bytes of a segment's index planes and values."""
    values = 4 * part.entries if codec.values == "fp32" else packed_size(part.entries, 2)
    return packed_size(part.entries, _index_bits(codec, part)), values


@functools.lru_cache(maxsize=4096)
def _quotients(part: Tiling) -> tuple[int, int]:
    """The least and the most bytes of a segment's quotients."""
    return quotients_size(part.n, part.keep, part.tiles)


def _header(codec: Codec) -> bytes:
    return _HEADER.pack(_MAGIC, _VERSION, VALUES[codec.values], INDICES[codec.indices], codec.topk)


# --- to bytes


def encode(codec: Codec, arrays: Sequence[npt.NDArray[np.floating]], run: Map = map) -> bytes:
    """The payload of fp32 `arrays`. Raises PayloadError if a value is not finite."""

    def kept(array: npt.NDArray[np.floating]) -> Kept:
        tiling = topk.tiling(array.shape, codec.topk)
        return topk.select(np.ascontiguousarray(array, dtype=np.float32).reshape(tiling.rows, tiling.cols), tiling, run)

    return pack(codec, map(kept, arrays), run)


def pack(codec: Codec, tensors: Iterable[Kept], run: Map = map) -> bytes:
    """The payload of what is kept of each tensor, wherever it was selected. Raises PayloadError if a value is not
    finite."""
    lengths, pieces = [], []
    for centroids, segments in run(functools.partial(_tensor, codec), tensors):
        pieces.append(centroids)
        for fields in segments:
            pieces += fields
            if codec.indices == "rice":
                lengths.append(len(fields[-1]))
    return b"".join([_header(codec), np.array(lengths, dtype="<u4").tobytes(), *pieces])


def _tensor(codec: Codec, kept: Kept) -> tuple[bytes, list[list[bytes]]]:
    """Centroids of one tensor, and the fields of its segments."""
    if not np.isfinite(kept.values).all():  # what is not finite is always among the largest
        raise PayloadError("update: has values that are not finite; nothing can be sent of it")
    centroids, codes = quantize(codec.values, kept.values)
    segments = [_written(codec, kept, codes, part) for part in _segments(kept.tiling)]
    return centroids.astype("<f4").tobytes(), segments


def _written(codec: Codec, kept: Kept, codes: Bytes, part: Tiling) -> list[bytes]:
    """The fields of one segment; with `rice` the quotients are the last."""
    index_SK = kept.index_TK[part.first : part.first + part.tiles]
    here = slice(part.first * part.keep, (part.first + part.tiles) * part.keep)
    field = kept.values[here].astype("<f4").tobytes() if codec.values == "fp32" else fours(codes[here])
    if codec.indices == "fixed":
        return [pack_planes(index_SK.reshape(-1), _index_bits(codec, part)), field]
    low, quotients = rice(index_SK, part.n)
    return [low, field, quotients]


# --- from bytes


@dataclass(frozen=True, slots=True)
class _Tensor:
    """One tensor of a payload: the values [4] that its codes stand for (fp32: none), and the bytes of its segments."""

    table: Array
    segments: list[Bytes]


def decode(codec: Codec, shapes: Sequence[Sequence[int]], payload: bytes | memoryview, run: Map = map) -> list[Sparse]:
    """What `payload` says of tensors of these shapes. Raises PayloadError on anything that `encode` cannot have made:
    header, lengths and centroids are checked before all else, then padding, index order and range, and finiteness."""
    opened = _open(codec, shapes, payload)
    tilings = [topk.tiling(tuple(shape), codec.topk) for shape in shapes]
    offsets = [tiling.offsets for tiling in tilings]
    result = [Sparse(np.empty(t.entries, dtype=np.int64), np.empty(t.entries, dtype=np.float32)) for t in tilings]

    def job(place: _Place) -> None:
        raw, table = opened[place.number].segments[place.segment], opened[place.number].table
        part, sent = place.part, result[place.number]
        here = slice(part.first * part.keep, (part.first + part.tiles) * part.keep)
        index_SK, values_SK = _read(codec, part, place.number, table, raw, np.float32(1))
        np.add(offsets[place.number][index_SK], part.corners[:, None], out=sent.index[here].reshape(index_SK.shape))
        sent.values[here] = values_SK.reshape(-1)

    list(run(job, _places(tilings)))
    return result


def decode_tiles(codec: Codec, shapes: Sequence[Sequence[int]], payload: bytes | memoryview) -> list[Tiled]:
    """What `decode` finds, in the form in which it takes least time and memory. Raises PayloadError where `decode`
    does."""
    result = []
    for number, (shape, tensor) in enumerate(zip(shapes, _open(codec, shapes, payload), strict=True)):
        tiling = topk.tiling(tuple(shape), codec.topk)
        marked = np.empty(tiling.entries, dtype=np.uint16)
        coded = codec.values != "fp32"
        values = tensor.table if coded else np.empty(tiling.entries, dtype=np.float32)
        for part, raw in zip(_segments(tiling), tensor.segments, strict=True):
            here = slice(part.first * part.keep, (part.first + part.tiles) * part.keep)
            index_SK, found_SK = _read(codec, part, number, _AS_IS, raw, np.float32(1))
            marked[here] = index_SK.reshape(-1)
            if coded:
                marked[here] |= found_SK.reshape(-1).astype(np.uint16) << np.uint16(topk.MARK)
            else:
                values[here] = found_SK.reshape(-1)
        result.append(Tiled(marked, values, coded))
    return result


@dataclass(frozen=True, slots=True)
class _Place:
    """A segment: the number of its tensor, its own within that, and its tiles."""

    number: int
    segment: int
    part: Tiling


def _places(tilings: Sequence[Tiling]) -> list[_Place]:
    cut = enumerate(map(_segments, tilings))
    return [_Place(number, segment, part) for number, parts in cut for segment, part in enumerate(parts)]


def apply(
    codec: Codec,
    arrays: Sequence[Array],
    contributions: Sequence[tuple[float, bytes | memoryview]],
    eta: np.float32,
    run: Map = map,
    empty: Empty = topk.in_memory,
) -> list[Array]:
    """New arrays x - eta * total, total = 0 + w_1 sent_1 + w_2 sent_2 + ... over (weight, payload) in the given order.
    `empty` makes them. A thread of `run` takes a segment at a time: to wait for each other costs many threads more than
    they share.

    Every operation is rounded to fp32 on its own, multiply and add apart. Raises PayloadError.
    """
    weights = [np.float32(weight) for weight, _ in contributions]
    opened = [_open(codec, [x.shape for x in arrays], payload) for _, payload in contributions]
    new = empty([x.shape for x in arrays])

    def job(place: _Place) -> None:
        part, number = place.part, place.number
        shape = len(opened), part.tiles, part.keep
        index_MSK, values_MSK = np.empty(shape, dtype=np.uint16), np.empty(shape, dtype=np.float32)
        for m, (tensors, weight) in enumerate(zip(opened, weights, strict=True)):
            tensor = tensors[number]
            index_MSK[m], values_MSK[m] = _read(
                codec, part, number, tensor.table, tensor.segments[place.segment], weight
            )
        _descend(arrays[number], new[number], part, index_MSK, values_MSK, eta)

    list(run(job, _places([topk.tiling(x.shape, codec.topk) for x in arrays])))
    return new


def _descend(
    old: Array, new: Array, part: Tiling, index_MSK: npt.NDArray[np.uint16], values_MSK: Array, eta: np.float32
) -> None:
    """Writes a part of new = old - eta * sum of the M contributions. A block is summed up in tile order: B bands of A
    tiles, r rows and c columns each."""
    n, A = part.n, part.across
    old_BrAc, new_BrAc = (x.reshape(-1, part.tr, A, part.tc)[part.band : part.band + part.bands] for x in (old, new))
    blocks = _cut(part, BLOCK)
    buffer = np.empty(blocks[0].tiles * n, dtype=np.float32)
    corner_S = np.arange(0, buffer.size, n)[:, None]
    for block in blocks:
        total, first = buffer[: block.tiles * n], block.first - part.first
        here = slice(first, first + block.tiles)
        at = np.add(index_MSK[:, here], corner_S[: block.tiles], dtype=np.int64)
        total.fill(0)
        np.add.at(total, at.reshape(-1), values_MSK[:, here].reshape(-1))  # one after the other, in this order
        if eta != 1:
            np.multiply(total, eta, out=total)
        total_BrAc = total.reshape(block.bands, A, part.tr, part.tc).transpose(0, 2, 1, 3)
        bands = slice(block.band - part.band, block.band - part.band + block.bands)
        np.subtract(old_BrAc[bands], total_BrAc, out=new_BrAc[bands])


def _open(codec: Codec, shapes: Sequence[Sequence[int]], payload: bytes | memoryview) -> list[_Tensor]:
    """Raises PayloadError if header, lengths or centroids cannot be those of a payload."""
    raw = np.frombuffer(payload, dtype=np.uint8)
    cut = [_segments(topk.tiling(tuple(shape), codec.topk)) for shape in shapes]
    least = [0 if codec.indices == "fixed" else _quotients(part)[0] for parts in cut for part in parts]
    most = [0 if codec.indices == "fixed" else _quotients(part)[1] for parts in cut for part in parts]
    start = _HEADER.size + (_LENGTH * len(least) if codec.indices == "rice" else 0)
    if raw.size < start:
        raise PayloadError(f"payload: has {raw.size} bytes, must have at least {start}; refused")
    if raw[: _HEADER.size].tobytes() != _header(codec):
        raise PayloadError("payload: header is not that of the run's codec; refused")
    lengths = raw[_HEADER.size : start].view("<u4").tolist() if codec.indices == "rice" else least
    if not all(a <= length <= b for a, length, b in zip(least, lengths, most, strict=True)):
        raise PayloadError("payload: bytes of quotients are not within what their tensor's shape allows; refused")
    head, todo = 4 * _CENTROIDS[codec.values], iter(lengths)
    sizes = [[head, *(sum(_fields(codec, part)) + next(todo) for part in parts)] for parts in cut]
    total = start + sum(map(sum, sizes))
    if raw.size != total:
        raise PayloadError(f"payload: has {raw.size} bytes, must have {total}; refused")
    result, at = [], start
    for number, of_tensor in enumerate(sizes):
        ends = list(itertools.accumulate(of_tensor, initial=at))
        first, *segments = (raw[a:b] for a, b in itertools.pairwise(ends))
        result.append(_Tensor(_table(codec, number, first), segments))
        at = ends[-1]
    return result


def _table(codec: Codec, number: int, raw: Bytes) -> Array:
    """What the codes of tensor `number` stand for. Raises PayloadError."""
    centroids = raw.view("<f4").astype(np.float32)
    if not np.isfinite(centroids).all():
        raise PayloadError(f"payload: tensor {number}: centroids are not finite; refused")
    if codec.values != "sym2":
        return centroids
    if np.signbit(centroids).any() or centroids[0] > centroids[1]:
        raise PayloadError(f"payload: tensor {number}: centroids are not ordered; refused")
    return np.stack([centroids, -centroids], axis=1).reshape(4)


def _read(
    codec: Codec, part: Tiling, number: int, table: Array, raw: Bytes, weight: np.float32
) -> tuple[npt.NDArray[np.uint16], Array]:
    """Indices within their tile and weight * values, [tiles, k'] each, of a segment of tensor `number`. Raises
    PayloadError."""
    low, rest = _fields(codec, part)
    planes, field, quotients = raw[:low], raw[low : low + rest], raw[low + rest :]
    shape = part.tiles, part.keep
    try:
        if codec.values == "fp32":
            values = field.view("<f4").astype(np.float32)
            if not np.isfinite(values).all():
                raise Malformed("values are not finite")
            values *= weight
        else:
            if _CODES[field[-1], part.entries % 4 or 4 :].any():
                raise Malformed("padding is not zero")
            values = (weight * table)[_CODES].take(field, axis=0).reshape(-1)[: part.entries]
        if codec.indices == "rice":
            return unrice(planes, quotients, part.n, part.keep, part.tiles), values.reshape(shape)
        index_SK = unpack_planes(planes, _index_bits(codec, part), part.entries).astype(np.uint16).reshape(shape)
        if index_SK[:, -1].max() >= part.n or (index_SK[:, 1:] <= index_SK[:, :-1]).any():
            raise Malformed("indices are out of range or not ascending")
        return index_SK, values.reshape(shape)
    except Malformed as error:
        raise PayloadError(f"payload: tensor {number}: {error}; refused") from None


_CHUNK = 1 << 12  # values summed up at a time: of so many the sum is made anew for each of eight thresholds


def quantize(kind: str, v: Array) -> tuple[npt.NDArray[np.float64], Bytes]:
    """Centroids and codes [entries] of the kept values `v` of one tensor (see the module's docstring)."""
    if kind == "fp32":
        return np.zeros(0), np.zeros(0, dtype=np.uint8)
    if kind == "sym2":
        lo, hi, t = _two_means(v)
        return np.array([lo, hi]), (v < 0).view(np.uint8) | (np.abs(v) > t).view(np.uint8) << np.uint8(1)
    v64 = v.astype(np.float64)
    shift = v64.mean()
    c = v64 - shift
    std = math.sqrt(np.square(c).sum() / (c.size - 1)) if c.size > 1 else 0.0
    codes = np.clip(np.rint(c / (6 * std / 4 or 1.0) + 2), 0, 3).astype(np.int64)
    counts = np.bincount(codes, minlength=4)
    sums = np.bincount(codes, weights=c, minlength=4)
    return shift + sums / np.maximum(counts, 1), codes.astype(np.uint8)


def fours(codes: Bytes) -> bytes:
    """Four codes to a byte, the first in its lowest bits; zeros at the end."""
    whole = np.zeros((-(-codes.size // 4), 4), dtype=np.uint8)
    whole.reshape(-1)[: codes.size] = codes
    whole <<= np.arange(0, 8, 2, dtype=np.uint8)
    return np.bitwise_or.reduce(whole, axis=1).tobytes()


def _two_means(v: Array) -> tuple[float, float, np.float32]:
    """lo, hi and the largest fp32 that is at most t: fp32 values are above it if, and only if, they are above t."""
    m = np.abs(v)
    m.sort()
    sums = [0.0]  # of the first 0, _CHUNK, 2 _CHUNK, ... values
    for start in range(0, m.size, _CHUNK):
        sums.append(_add_up(sums[-1], m[start : start + _CHUNK]))
    t = sums[-1] / m.size
    lo = hi = t
    for _ in range(8):
        low = int(np.searchsorted(m, _at_most(t), side="right"))
        below = _add_up(sums[low // _CHUNK], m[low // _CHUNK * _CHUNK : low])
        hi = (sums[-1] - below) / (m.size - low) if low < m.size else below / low
        lo = below / low if low else hi
        t = (lo + hi) / 2
    return lo, hi, _at_most(t)


def _add_up(start: float, values: Array) -> float:
    """start + values[0] + values[1] + ..., one after the other."""
    return float(np.cumsum(np.concatenate([[start], values]))[-1])


def _at_most(t: float) -> np.float32:
    rounded = np.float32(t)
    return rounded if float(rounded) <= t else np.nextafter(rounded, np.float32(-np.inf))
