"""The packed moments of a shard, for a peer that begins to train it (docs/results/churn.md).

First moments m: one payload of the update codec with a quarter of the entries, at 2 bits. Second moments v: of a matrix
the means of its rows r_i and columns c_j, from which v_ij = r_i c_j / mean(r) (Shazeer and Stern 2018, Adafactor,
algorithm 1); of a vector all. Muon has first moments only, its momentum. About 0.16 bytes a parameter instead of 8.

    u32   updates so far
    u64   bytes of the payload; the payload (protocol/codec/sparse.py)
    fp32  the second moments: for each tensor of the shard that AdamW trains, in its order, r and c, or all

The sender may lie, so the moments are bounded: the sum of all v is at most clip², |m| <= c sqrt(v) for each element,
with c² = (1 - b1)² / ((1 - b2) (1 - b1² / b2)) (Cauchy and Schwarz), and the squares of Muon's momentum sum to at most
clip².
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from protocol.codec import sparse
from protocol.codec.formats import Codec
from protocol.codec.sparse import PayloadError
from protocol.run import layout
from protocol.run.layout import ModelSpec
from protocol.run.manifest import TrainSpec

Array = NDArray[np.float32]
CODEC = Codec(1024)
_HEADER = struct.Struct("<IQ")
MOMENTUM = "momentum_buffer"
"""The name of Muon's one moment; AdamW's are `step`, `exp_avg` and `exp_avg_sq`."""
MOST_UPDATES = 1 << 24
"""fp32 counts exactly up to here."""


def largest(spec: ModelSpec, train: TrainSpec, shard: str) -> int:
    """The most bytes of a shard's packed moments."""
    means = sum(_means(shape) for _, shape in _by_adamw(spec, train, shard))
    return _HEADER.size + sparse.max_payload_size(CODEC, layout.shapes(spec, shard)) + 4 * means


def pack(spec: ModelSpec, train: TrainSpec, shard: str, state: Mapping[str, NDArray[np.generic]]) -> bytes | None:
    """Packs the moments of `shard` from `state` (`<parameter>/<moment>`); None where some are missing."""
    adamw, first = [name for name, _ in _by_adamw(spec, train, shard)], _first(spec, train, shard)
    if not all(key in state for key in (*first, *(f"{name}/exp_avg_sq" for name in adamw))):
        return None
    payload = sparse.encode(CODEC, [np.asarray(state[key], dtype=np.float32) for key in first])
    second = b"".join(_factors(np.asarray(state[f"{name}/exp_avg_sq"], dtype=np.float32)) for name in adamw)
    updates = min(MOST_UPDATES, *(int(float(state[f"{name}/step"])) for name in adamw))
    return _HEADER.pack(updates, len(payload)) + payload + second


def unpack(spec: ModelSpec, train: TrainSpec, shard: str, data: bytes) -> dict[str, Array]:
    """The inverse of `pack`, within the bounds. Raises PayloadError."""
    adamw = _by_adamw(spec, train, shard)
    means = 4 * sum(_means(shape) for _, shape in adamw)
    if len(data) < _HEADER.size:
        raise PayloadError("moments: shorter than their header")
    updates, size = _HEADER.unpack_from(data)
    if not 1 <= updates <= MOST_UPDATES or len(data) != _HEADER.size + size + means:
        raise PayloadError("moments: not as long as they say")
    view = memoryview(data)[_HEADER.size :]
    shapes = layout.shapes(spec, shard)
    found: dict[str, Array] = {}
    squares = 0.0
    for key, shape, x in zip(
        _first(spec, train, shard), shapes, sparse.decode(CODEC, shapes, view[:size]), strict=True
    ):
        found[key] = np.zeros(shape, np.float32)
        found[key].reshape(-1)[x.index] = x.values
        if key.endswith(MOMENTUM):
            squares += float(np.square(x.values, dtype=np.float64).sum())
    _short(train, squares)
    at = size
    for name, shape in adamw:
        end = at + 4 * _means(shape)
        v = _product(np.frombuffer(view[at:end], dtype="<f4").astype(np.float32), shape)
        at = end
        found |= {f"{name}/exp_avg_sq": v, f"{name}/step": np.array(updates, np.float32)}
    _bound(train, [(found[f"{name}/exp_avg"], found[f"{name}/exp_avg_sq"]) for name, _ in adamw])
    return found


def _by_adamw(spec: ModelSpec, train: TrainSpec, shard: str) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the tensors of a shard that AdamW trains."""
    return [(name, shape) for name, shape in layout.tensors(spec, shard) if not train.has_one_moment(shard, shape)]


def _first(spec: ModelSpec, train: TrainSpec, shard: str) -> list[str]:
    """The names of the first moments of a shard's tensors."""
    return [
        f"{name}/{MOMENTUM if train.has_one_moment(shard, shape) else 'exp_avg'}"
        for name, shape in layout.tensors(spec, shard)
    ]


def _bound(train: TrainSpec, pairs: Sequence[tuple[Array, Array]]) -> None:
    """Bounds AdamW's moments. Raises PayloadError."""
    _short(train, sum(float(np.sum(v, dtype=np.float64)) for _, v in pairs))
    b1, b2 = train.beta1, train.beta2
    most = (1 - b1) / math.sqrt((1 - b2) * (1 - b1**2 / b2)) if b1**2 < b2 else 1.0
    for m, v in pairs:
        limit = np.sqrt(v)
        limit *= np.float32(most)
        np.clip(m, -limit, limit, out=m)


def _short(train: TrainSpec, squares: float) -> None:
    """Raises PayloadError for a larger sum of squares than of clipped gradients."""
    if not squares <= 1.01 * train.clip**2:
        raise PayloadError("moments: larger than clipped gradients have")


def _means(shape: Sequence[int]) -> int:
    """The count of packed second moments of a tensor."""
    return sum(shape) if len(shape) == 2 else math.prod(shape)


def _factors(v: Array) -> bytes:
    if v.ndim != 2:
        return np.ascontiguousarray(v, dtype="<f4").tobytes()
    parts = (v.mean(axis=axis, dtype=np.float64) for axis in (1, 0))
    return b"".join(part.astype("<f4").tobytes() for part in parts)


def _product(numbers: Array, shape: Sequence[int]) -> Array:
    """v from its means. Raises PayloadError where they are no means of squares."""
    if not (np.isfinite(numbers).all() and (numbers >= 0).all()):
        raise PayloadError("moments: a mean of squares is negative, or no number")
    if len(shape) != 2:
        return numbers.reshape(shape)
    rows, columns = numbers[: shape[0]], numbers[shape[0] :]
    mean = float(rows.mean(dtype=np.float64))
    with np.errstate(over="ignore"):
        made: Array = np.outer(rows / np.float32(mean) if mean > 0 else rows, columns)
    return made
