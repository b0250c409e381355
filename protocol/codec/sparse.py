"""The sparse update codec: top-k per tile, 2-bit values, entropy-coded indices (SparseLoCo; see docs/protocol.md).

Entries. Of every tile of n elements the k' largest are kept (protocol/codec/topk.py).

Values: `sym2`, `ref2` or `fp32` (protocol/codec/two_bit.py).

Indices within the tile, tile by tile and ascending within one.
- `rice`: the gaps' low bits and unary quotients (protocol/codec/rice.py); docs/adr/0006-rice-coded-indices.md says why.
- `fixed`: ceil(log2 n) bits each: 14 bits per entry for tiles of 4096, and a length that is known beforehand.

Payload, little-endian: header `PSp`, version (u8), value format (u8: 0 fp32, 1 sym2, 2 ref2), index format (u8: 0 fixed,
1 rice), k (u16); for `rice` each segment's bytes of quotients (u32 each). Then for each tensor its centroids (sym2: lo, hi;
ref2: four; fp32: none) as fp32, and its segments. A segment is as many whole bands of tiles as have at most 2^16 n / k' elements, or
one; it has the indices, or the gaps' low bits, as planes; the codes, four to a byte (or fp32 values); the quotients. Each
field ends at a whole byte. An update has one payload only, and `decode` refuses every other, so equal updates have equal
digests.

Work goes block by block, over as many threads as `run` has. Beside its result `apply` needs for each thread some MB and 6
bytes per contribution for the entries of a segment, `decode` 20 bytes for each of them; `encode` needs 14 bytes for each entry
of a tensor (`ref2`: 46) and some MB, for each thread. What a payload says changes none of that.
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

from protocol.codec import rice, topk, two_bit
from protocol.codec.rice import Bytes
from protocol.codec.settings import INDICES, VALUES, Codec
from protocol.codec.topk import Array, Empty, Kept, Map, Positions, Tiled, Tiling
from protocol.errors import PotluckError

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
    return rice.rice_parameter(tiling.n, tiling.keep) if codec.indices == "rice" else (tiling.n - 1).bit_length()


@functools.lru_cache(maxsize=4096)
def _fields(codec: Codec, part: Tiling) -> tuple[int, int]:
    """Bytes of a segment's index planes and values."""
    values = 4 * part.entries if codec.values == "fp32" else rice.packed_size(part.entries, 2)
    return rice.packed_size(part.entries, _index_bits(codec, part)), values


@functools.lru_cache(maxsize=4096)
def _quotients(part: Tiling) -> tuple[int, int]:
    """The least and the most bytes of a segment's quotients."""
    return rice.quotients_size(part.n, part.keep, part.tiles)


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
    """The payload of what is kept of each tensor, wherever it was selected. Raises PayloadError if a value is not finite."""
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
    centroids, codes = two_bit.quantize(codec.values, kept.values)
    segments = [_written(codec, kept, codes, part) for part in _segments(kept.tiling)]
    return centroids.astype("<f4").tobytes(), segments


def _written(codec: Codec, kept: Kept, codes: Bytes, part: Tiling) -> list[bytes]:
    """The fields of one segment; with `rice` the quotients are the last."""
    index_SK = kept.index_TK[part.first : part.first + part.tiles]
    here = slice(part.first * part.keep, (part.first + part.tiles) * part.keep)
    field = kept.values[here].astype("<f4").tobytes() if codec.values == "fp32" else two_bit.fours(codes[here])
    if codec.indices == "fixed":
        return [rice.pack(index_SK.reshape(-1), _index_bits(codec, part)), field]
    low, quotients = rice.rice(index_SK, part.n)
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
    """What `decode` finds, in the form in which it takes least time and memory. Raises PayloadError where `decode` does."""
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
    """New arrays x - eta * total, total = 0 + w_1 sent_1 + w_2 sent_2 + ... over (weight, payload) in the given order. `empty`
    makes them. A thread of `run` takes a segment at a time: to wait for each other costs many threads more than they share.

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
    """Indices within their tile and weight * values, [tiles, k'] each, of a segment of tensor `number`. Raises PayloadError."""
    low, rest = _fields(codec, part)
    planes, field, quotients = raw[:low], raw[low : low + rest], raw[low + rest :]
    shape = part.tiles, part.keep
    try:
        if codec.values == "fp32":
            values = field.view("<f4").astype(np.float32)
            if not np.isfinite(values).all():
                raise rice.Malformed("values are not finite")
            values *= weight
        else:
            if _CODES[field[-1], part.entries % 4 or 4 :].any():
                raise rice.Malformed("padding is not zero")
            values = (weight * table)[_CODES].take(field, axis=0).reshape(-1)[: part.entries]
        if codec.indices == "rice":
            return rice.unrice(planes, quotients, part.n, part.keep, part.tiles), values.reshape(shape)
        index_SK = rice.unpack(planes, _index_bits(codec, part), part.entries).astype(np.uint16).reshape(shape)
        if index_SK[:, -1].max() >= part.n or (index_SK[:, 1:] <= index_SK[:, :-1]).any():
            raise rice.Malformed("indices are out of range or not ascending")
        return index_SK, values.reshape(shape)
    except rice.Malformed as error:
        raise PayloadError(f"payload: tensor {number}: {error}; refused") from None
