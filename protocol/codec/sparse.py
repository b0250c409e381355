"""The sparse update codec: top-k per tile, 2-bit values, entropy-coded indices (SparseLoCo; see docs/protocol.md).

*Entries.* Of every tile of n elements the k' largest are kept (protocol/codec/topk.py).

*Values.* Two bits each (`sym2`): sign bit + 2 * magnitude bit. With m = |v| over all kept entries of a tensor, summed
in ascending order in float64: t = mean(m); then eight times lo = mean(m <= t), hi = mean(m > t), t = (lo + hi) / 2; an
empty class takes the other's mean. The magnitude bit is m > t, the value +-lo or +-hi, both rounded once to fp32. Zero
counts as positive.

With `int4` four bits each, for a scale of each tile: scale = max |v| / 7, 0 where that is subnormal; v / scale, halves
to even, plus 8. The value is scale * (code - 8), rounded to fp32.

*Indices.* Tile by tile, ascending within one, in Rice codes (Rice, 1979; docs/adr/0006-rice-coded-indices.md): the gap
g = i - (index before it in the set, or -1) - 1 has its r low bits in *planes* (the lowest bit of all numbers, then the
next bit of all of them, and so on) and its quotient g >> r in unary: that many 0 and a 1. r is the least that minimizes
the longest set, k (1 + r) + ((n - k) >> r) bits.

*Payload*, little-endian: header `PSp`, version, value format 1, index format 1 (u8 each), k (u16); each segment's bytes
of quotients (u32); then for each tensor its centroids lo, hi as fp32 (none with `int4`), and its segments. A segment is
as many whole bands of tiles as have at most 2^16 n / k' elements, or one; it has the gaps' low bits, the codes, four to
a byte (with `int4` the scales as fp32, and two codes to a byte), and the quotients. Bits fill a byte from the lowest,
each field ends at a whole byte, and padding is 0. An update has one payload only, and `decode` refuses every other, so
equal updates have equal digests.

*Transformed updates.* With `transform = dct` arrays, entries and their values are those of the tiles' transforms
(protocol/codec/dct.py): error feedback, payloads, their norms and their comparisons too. `apply` transforms the total
of each tile back, `moves` a payload.

*Dense payloads* (`int8`, `fp32`) have every element, in tile order, and index format 0: no indices, lengths or
centroids. `fp32`: the values, 0 without a sign. `int8`: for each segment the scale of every tile (fp32), then a signed
byte an element, as `int4` with 127 for 7 and no 8.
"""

from __future__ import annotations

import functools
import itertools
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from protocol.codec import dct, topk
from protocol.codec.formats import Codec
from protocol.codec.topk import Array, Empty, Kept, Map, Positions, Tiled, Tiling
from protocol.errors import PotluckError

_STEP = 1 << 14  # gaps in the cache at a time

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.uint8] | npt.NDArray[np.uint16]


class Malformed(ValueError):
    """The bytes are not what the writer makes."""


def packed_size(count: int, bits: int) -> int:
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
    # i = (the quotients of its set so far, 2^r times) + (their low bits, l) + j for the j-th of a set, from 0. The
    # quotients add up to the number of 0 since the set began: end - start - j.
    # And l + j - 2^r j = 2^r - 1 - (the sum of 2^r - 1 - low).
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
_NUMBERS = {"sym2": (1, 1), "int4": (4, 1), "int8": (2, 0), "fp32": (3, 0)}  # of the formats of values and indices
_CENTROID_BYTES = {"sym2": 8, "int4": 0}  # of a tensor
_LENGTH = 4  # bytes of a segment's length of quotients
SEGMENT = 1 << 16  # entries: part of the format
BLOCK = 1 << 20  # elements that are summed up at a time
_AS_IS = np.arange(4, dtype=np.float32)  # a table by which codes stand for themselves
_CODES = (np.arange(256)[:, None] >> np.arange(0, 8, 2)) & 3  # [256, 4]: the codes of a byte


class PayloadError(PotluckError, ValueError):
    """The bytes are not a payload of this codec and these shapes, or the values to encode are not finite."""


@dataclass(frozen=True, slots=True)
class Sparse:
    """The kept entries of one tensor: unique flat row-major positions [n] int64 and values [n] fp32."""

    index: Positions
    values: Array


# --- sizes


def entries(codec: Codec, shapes: Sequence[Sequence[int]]) -> int:
    return sum(topk.tiling(tuple(shape), codec.topk).entries for shape in shapes)


def max_payload_size(codec: Codec, shapes: Sequence[Sequence[int]]) -> int:
    """The most bytes that a payload can have."""
    return _max_payload_size(codec, tuple(tuple(shape) for shape in shapes))


@functools.lru_cache(maxsize=4096)
def _max_payload_size(codec: Codec, shapes: tuple[tuple[int, ...], ...]) -> int:
    size = _HEADER.size
    for shape in shapes:
        parts = _segments(topk.tiling(tuple(shape), codec.topk))
        if codec.is_dense:
            size += sum(_dense_size(codec, part) for part in parts)
            continue
        size += _CENTROID_BYTES[codec.values]
        for part in parts:
            size += sum(_fields(codec, part)) + _LENGTH + _quotients(part)[1]
    return size


def _segments(tiling: Tiling) -> tuple[Tiling, ...]:
    return _cut(tiling, SEGMENT * tiling.n // tiling.keep)


@functools.lru_cache(maxsize=1024)
def _cut(tiling: Tiling, elements: int) -> tuple[Tiling, ...]:
    return tuple(tiling.cut(elements))


@functools.lru_cache(maxsize=4096)
def _fields(codec: Codec, part: Tiling) -> tuple[int, int]:
    """Bytes of a segment's index planes, and of its codes with their scales."""
    codes = packed_size(part.entries, 2)
    if codec.values == "int4":
        codes = 4 * part.tiles + packed_size(part.entries, 4)
    return packed_size(part.entries, rice_parameter(part.n, part.keep)), codes


@functools.lru_cache(maxsize=4096)
def _quotients(part: Tiling) -> tuple[int, int]:
    """The least and the most bytes of a segment's quotients."""
    return quotients_size(part.n, part.keep, part.tiles)


def _header(codec: Codec) -> bytes:
    return _HEADER.pack(_MAGIC, _VERSION, *_NUMBERS[codec.values], codec.topk)


# --- to bytes


def encode(codec: Codec, arrays: Sequence[npt.NDArray[np.floating]], run: Map = map) -> bytes:
    """The payload of fp32 `arrays`. Raises PayloadError if a value is not finite."""

    def kept(array: npt.NDArray[np.floating]) -> Kept:
        tiling = topk.tiling(array.shape, codec.topk)
        return topk.select(np.ascontiguousarray(array, dtype=np.float32).reshape(tiling.rows, tiling.cols), tiling, run)

    return pack(codec, map(kept, arrays), run)


def pack(codec: Codec, tensors: Iterable[Kept], run: Map = map) -> bytes:
    """The payload of selected entries. Raises PayloadError if a value is not finite."""
    if codec.is_dense:
        return b"".join([_header(codec), *run(functools.partial(_dense, codec), tensors)])
    lengths, pieces = [], []
    for centroids, segments in run(functools.partial(_tensor, codec), tensors):
        pieces.append(centroids)
        for fields in segments:
            pieces += fields
            lengths.append(len(fields[-1]))
    return b"".join([_header(codec), np.array(lengths, dtype="<u4").tobytes(), *pieces])


def _tensor(codec: Codec, kept: Kept) -> tuple[bytes, list[list[bytes]]]:
    """Centroids of one tensor, and the fields of its segments."""
    _check_finite(kept)
    if codec.values == "int4":
        return b"", [_written(kept, None, part) for part in _segments(kept.tiling)]
    centroids, codes = quantize(kept.values)
    segments = [_written(kept, codes, part) for part in _segments(kept.tiling)]
    return centroids.astype("<f4").tobytes(), segments


def _check_finite(kept: Kept) -> None:
    if not np.isfinite(kept.values).all():  # what is not finite is always among the largest
        raise PayloadError("update: has values that are not finite; nothing can be sent of it")


def _written(kept: Kept, codes: Bytes | None, part: Tiling) -> list[bytes]:
    """The fields of one segment; the quotients are the last. codes: None where a tile has a scale."""
    here = slice(part.first * part.keep, (part.first + part.tiles) * part.keep)
    low, quotients = rice(kept.index_TK[part.first : part.first + part.tiles], part.n)
    if codes is not None:
        return [low, fours(codes[here]), quotients]
    scale_S1, codes_SK = _scaled(kept.values[here].reshape(part.tiles, part.keep), 7)
    nibbles = np.zeros(2 * packed_size(part.entries, 4), dtype=np.uint8)
    nibbles[: part.entries] = (codes_SK + 8).reshape(-1)
    return [low, scale_S1.astype("<f4").tobytes(), (nibbles[0::2] | nibbles[1::2] << 4).tobytes(), quotients]


# --- from bytes


@dataclass(frozen=True, slots=True)
class _Tensor:
    """One tensor of a payload: the values [4] that its codes stand for, and the bytes of its segments. A dense one has
    no table."""

    codec: Codec
    table: Array
    segments: list[Bytes]


def decode(codec: Codec, shapes: Sequence[Sequence[int]], payload: bytes | memoryview, run: Map = map) -> list[Sparse]:
    """Returns the entries of tensors of these shapes. Raises PayloadError on anything that `encode` cannot have made:
    header, lengths and centroids are checked before all else, then padding, index order and range, and finiteness."""
    opened = _open(codec, shapes, payload)
    tilings = [topk.tiling(tuple(shape), codec.topk) for shape in shapes]
    offsets = [tiling.offsets for tiling in tilings]
    result = [Sparse(np.empty(t.entries, dtype=np.int64), np.empty(t.entries, dtype=np.float32)) for t in tilings]

    def job(place: _Place) -> None:
        part, sent = place.part, result[place.number]
        here = slice(part.first * part.keep, (part.first + part.tiles) * part.keep)
        index_SK, values_SK = _entries(place, opened[place.number], np.float32(1))
        np.add(offsets[place.number][index_SK], part.corners[:, None], out=sent.index[here].reshape(index_SK.shape))
        sent.values[here] = values_SK.reshape(-1)

    list(run(job, _places(tilings)))
    return result


def moves(codec: Codec, shapes: Sequence[Sequence[int]], payload: bytes | memoryview) -> list[Sparse]:
    """The elements that a payload changes, and by how much; `decode` without a transform. Raises PayloadError."""
    found = decode(codec, shapes, payload)
    if not codec.is_transformed:
        return found
    result = []
    for shape, sent in zip(shapes, found, strict=True):
        x = np.zeros(tuple(shape), dtype=np.float32)
        x.reshape(-1)[sent.index] = sent.values
        x = dct.transformed(x, topk.tiling(x.shape, codec.topk), inverse=True)
        result.append(Sparse(np.arange(x.size), x.reshape(-1)))
    return result


def decode_tiles(codec: Codec, shapes: Sequence[Sequence[int]], payload: bytes | memoryview) -> list[Tiled]:
    """As `decode`, in a form that takes less time and memory. Raises PayloadError."""
    result = []
    for number, (shape, tensor) in enumerate(zip(shapes, _open(codec, shapes, payload), strict=True)):
        tiling = topk.tiling(tuple(shape), codec.topk)
        if codec.values != "sym2":
            places = [replace(place, number=number) for place in _places([tiling])]
            found = [_entries(place, tensor, np.float32(1)) for place in places]
            index = np.concatenate([index_SK.reshape(-1) for index_SK, _ in found])
            result.append(Tiled(index, np.concatenate([values_SK.reshape(-1) for _, values_SK in found]), False))
            continue
        marked = np.empty(tiling.entries, dtype=np.uint16)
        for part, raw in zip(_segments(tiling), tensor.segments, strict=True):
            here = slice(part.first * part.keep, (part.first + part.tiles) * part.keep)
            index_SK, code_SK = _read(codec, part, number, _AS_IS, raw, np.float32(1))
            marked[here] = (index_SK | code_SK.astype(np.uint16) << np.uint16(topk.MARK)).reshape(-1)
        result.append(Tiled(marked, tensor.table, True))
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

    `empty` makes them. Every operation is rounded to fp32 on its own. Raises PayloadError.
    """
    weights = [np.float32(weight) for weight, _ in contributions]
    opened = [_open(codec, [x.shape for x in arrays], payload) for _, payload in contributions]
    new = empty([x.shape for x in arrays])

    def job(place: _Place) -> None:
        part, number = place.part, place.number
        shape = len(opened), part.tiles, part.keep
        index_MSK, values_MSK = np.empty(shape, dtype=np.uint16), np.empty(shape, dtype=np.float32)
        for m, (tensors, weight) in enumerate(zip(opened, weights, strict=True)):
            index_MSK[m], values_MSK[m] = _entries(place, tensors[number], weight)
        inverse = codec.is_transformed and arrays[number].ndim == 2
        _descend(arrays[number], new[number], part, index_MSK, values_MSK, eta, inverse)

    list(run(job, _places([topk.tiling(x.shape, codec.topk) for x in arrays])))
    return new


def aggregate(
    codec: Codec,
    shapes: Sequence[tuple[int, ...]],
    contributions: Sequence[tuple[float, bytes | memoryview]],
    into: Codec,
    run: Map = map,
    empty: Empty = topk.in_memory,
) -> bytes:
    """The payload, in the codec `into`, of the total that `apply` subtracts: its largest entries, with values of their
    own. A sum beyond fp32 counts as the largest value of fp32. Raises PayloadError."""
    zeros = empty(list(shapes))
    for array in zeros:
        array.fill(0)
    with np.errstate(over="ignore", invalid="ignore"):
        total = apply(codec, zeros, contributions, np.float32(-1), run, empty)
    return encode(into, [np.nan_to_num(array, copy=False) for array in total], run)


def _descend(
    old: Array,
    new: Array,
    part: Tiling,
    index_MSK: npt.NDArray[np.uint16],
    values_MSK: Array,
    eta: np.float32,
    inverse: bool,
) -> None:
    """Writes a part of new = old - eta * sum of the M contributions, transformed back if `inverse`. A block is summed
    up in tile order: B bands of A tiles, r rows and c columns each."""
    n, A = part.n, part.across
    old_BrAc, new_BrAc = (x.reshape(-1, part.tr, A, part.tc)[part.band : part.band + part.bands] for x in (old, new))
    blocks = _cut(part, BLOCK)
    buffer = np.empty(blocks[0].tiles * n, dtype=np.float32)
    corner_S = np.arange(0, buffer.size, n)[:, None]
    for block in blocks:
        total, first = buffer[: block.tiles * n], block.first - part.first
        here = slice(first, first + block.tiles)
        total.fill(0)
        if part.keep == n:
            for values_SN in values_MSK[:, here]:
                total += values_SN.reshape(-1)
        else:
            at = np.add(index_MSK[:, here], corner_S[: block.tiles], dtype=np.int64)
            np.add.at(total, at.reshape(-1), values_MSK[:, here].reshape(-1))  # one after the other, in this order
        if inverse:
            total[:] = dct.turned(total.reshape(-1, part.tr, part.tc), inverse=True).reshape(-1)
        if eta != 1:
            np.multiply(total, eta, out=total)
        total_BrAc = total.reshape(block.bands, A, part.tr, part.tc).transpose(0, 2, 1, 3)
        bands = slice(block.band - part.band, block.band - part.band + block.bands)
        np.subtract(old_BrAc[bands], total_BrAc, out=new_BrAc[bands])


def _open(codec: Codec, shapes: Sequence[Sequence[int]], payload: bytes | memoryview) -> list[_Tensor]:
    """Raises PayloadError if header, lengths or centroids cannot be those of a payload."""
    raw = np.frombuffer(payload, dtype=np.uint8)
    cut = [_segments(topk.tiling(tuple(shape), codec.topk)) for shape in shapes]
    if codec.is_dense:
        return _open_dense(codec, cut, raw)
    least = [_quotients(part)[0] for parts in cut for part in parts]
    most = [_quotients(part)[1] for parts in cut for part in parts]
    start = _HEADER.size + _LENGTH * len(least)
    if raw.size < start:
        raise PayloadError(f"payload: has {raw.size} bytes, must have at least {start}; refused")
    if raw[: _HEADER.size].tobytes() != _header(codec):
        raise PayloadError("payload: header is not that of the run's codec; refused")
    lengths = raw[_HEADER.size : start].view("<u4").tolist()
    if not all(a <= length <= b for a, length, b in zip(least, lengths, most, strict=True)):
        raise PayloadError("payload: bytes of quotients are not within what their tensor's shape allows; refused")
    todo = iter(lengths)
    head = _CENTROID_BYTES[codec.values]
    sizes = [[head, *(sum(_fields(codec, part)) + next(todo) for part in parts)] for parts in cut]
    total = start + sum(map(sum, sizes))
    if raw.size != total:
        raise PayloadError(f"payload: has {raw.size} bytes, must have {total}; refused")
    result, at = [], start
    for number, of_tensor in enumerate(sizes):
        ends = list(itertools.accumulate(of_tensor, initial=at))
        first, *segments = (raw[a:b] for a, b in itertools.pairwise(ends))
        result.append(_Tensor(codec, _table(number, first) if head else _AS_IS, segments))
        at = ends[-1]
    return result


def _table(number: int, raw: Bytes) -> Array:
    """Returns the values of tensor `number`'s codes. Raises PayloadError."""
    centroids = raw.view("<f4").astype(np.float32)
    if not np.isfinite(centroids).all():
        raise PayloadError(f"payload: tensor {number}: centroids are not finite; refused")
    if np.signbit(centroids).any() or centroids[0] > centroids[1]:
        raise PayloadError(f"payload: tensor {number}: centroids are not ordered; refused")
    return np.stack([centroids, -centroids], axis=1).reshape(4)


def _entries(place: _Place, tensor: _Tensor, weight: np.float32) -> tuple[npt.NDArray[np.uint16], Array]:
    """Indices within their tile and weight * values of a segment, [tiles, k'] each. Raises PayloadError."""
    part, raw = place.part, tensor.segments[place.segment]
    if not tensor.codec.is_dense:
        return _read(tensor.codec, part, place.number, tensor.table, raw, weight)
    every_SN = np.broadcast_to(np.arange(part.n, dtype=np.uint16), (part.tiles, part.n))
    return every_SN, weight * _read_dense(tensor.codec, part, place.number, raw)


def _read(
    codec: Codec, part: Tiling, number: int, table: Array, raw: Bytes, weight: np.float32
) -> tuple[npt.NDArray[np.uint16], Array]:
    """Indices within their tile and weight * values of a segment, [tiles, k'] each. Raises PayloadError."""
    low, rest = _fields(codec, part)
    planes, field, quotients = raw[:low], raw[low : low + rest], raw[low + rest :]
    shape = part.tiles, part.keep
    try:
        if codec.values == "int4":
            nibbles = np.stack([field[4 * part.tiles :] & 15, field[4 * part.tiles :] >> 4], axis=1).reshape(-1)
            if nibbles[part.entries :].any():
                raise Malformed("padding is not zero")
            codes_SK = nibbles[: part.entries].astype(np.int8).reshape(shape) - np.int8(8)
            values = weight * _unscaled(field[: 4 * part.tiles], codes_SK, 7, number)
        else:
            if _CODES[field[-1], part.entries % 4 or 4 :].any():
                raise Malformed("padding is not zero")
            values = (weight * table)[_CODES].take(field, axis=0).reshape(-1)[: part.entries]
        return unrice(planes, quotients, part.n, part.keep, part.tiles), values.reshape(shape)
    except Malformed as error:
        raise PayloadError(f"payload: tensor {number}: {error}; refused") from None


_CHUNK = 1 << 12  # values summed up at a time: of so many the sum is made anew for each of eight thresholds


def quantize(v: Array) -> tuple[npt.NDArray[np.float64], Bytes]:
    """Centroids lo, hi, and codes [entries] of the kept values `v` of one tensor."""
    lo, hi, t = _two_means(v)
    return np.array([lo, hi]), (v < 0).view(np.uint8) | (np.abs(v) > t).view(np.uint8) << np.uint8(1)


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


# --- dense payloads


def _dense_size(codec: Codec, part: Tiling) -> int:
    return 4 * part.entries if codec.values == "fp32" else 4 * part.tiles + part.entries


def _dense(codec: Codec, kept: Kept) -> bytes:
    """The segments of one tensor. Raises PayloadError if a value is not finite."""
    _check_finite(kept)
    if codec.values == "fp32":
        return (kept.values + np.float32(0)).astype("<f4").tobytes()
    pieces, tiling = [], kept.tiling
    for part in _segments(tiling):
        x_SN = kept.values.reshape(tiling.tiles, tiling.n)[part.first : part.first + part.tiles]
        scale_S1, codes_SN = _scaled(x_SN, 127)
        pieces += [scale_S1.astype("<f4").tobytes(), codes_SN.tobytes()]
    return b"".join(pieces)


def _open_dense(codec: Codec, cut: Sequence[Sequence[Tiling]], raw: Bytes) -> list[_Tensor]:
    """As `_open`."""
    sizes = [[_dense_size(codec, part) for part in parts] for parts in cut]
    total = _HEADER.size + sum(map(sum, sizes))
    if raw.size != total:
        raise PayloadError(f"payload: has {raw.size} bytes, must have {total}; refused")
    if raw[: _HEADER.size].tobytes() != _header(codec):
        raise PayloadError("payload: header is not that of the run's codec; refused")
    ends = itertools.accumulate(itertools.chain(*sizes), initial=_HEADER.size)
    segments = (raw[a:b] for a, b in itertools.pairwise(ends))
    return [_Tensor(codec, _AS_IS, list(itertools.islice(segments, len(parts)))) for parts in cut]


def _read_dense(codec: Codec, part: Tiling, number: int, raw: Bytes) -> Array:
    """Values [tiles, n] of a segment. Raises PayloadError."""
    if codec.values == "fp32":
        x = raw.view("<f4").astype(np.float32)
        if not np.isfinite(x).all() or ((x == 0) & np.signbit(x)).any():
            raise PayloadError(f"payload: tensor {number}: values are not finite, or a zero has a sign; refused")
        return x.reshape(part.tiles, part.n)
    return _unscaled(
        raw[: 4 * part.tiles], raw[4 * part.tiles :].view(np.int8).reshape(part.tiles, part.n), 127, number
    )


def _scaled(x_SN: Array, most: int) -> tuple[Array, npt.NDArray[np.int8]]:
    """The scale of each tile, and codes of its elements: whole numbers up to `most`."""
    scale_S1 = np.abs(x_SN).max(axis=1, keepdims=True) / np.float32(most)
    scale_S1[scale_S1 < np.finfo(np.float32).tiny] = 0
    return scale_S1, np.rint(x_SN / np.where(scale_S1 > 0, scale_S1, np.float32(np.inf))).astype(np.int8)


def _unscaled(scales: Bytes, codes_SN: npt.NDArray[np.int8], most: int, number: int) -> Array:
    """The inverse of `_scaled`. Raises PayloadError."""
    scale_S1 = scales.view("<f4").astype(np.float32)[:, None]
    is_scale = (scale_S1 == 0) & ~np.signbit(scale_S1) | (scale_S1 >= np.finfo(np.float32).tiny)
    is_full = np.abs(codes_SN.astype(np.int16)).max(axis=1, keepdims=True) == np.where(scale_S1 > 0, most, 0)
    is_finite = scale_S1.astype(np.float64) * most <= np.finfo(np.float32).max
    if not (is_scale & is_full & is_finite).all():
        raise PayloadError(f"payload: tensor {number}: scales are not those of their values; refused")
    return codes_SN * scale_S1
