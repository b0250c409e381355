"""AdamW's moments of a shard, small enough to be sent to a peer that begins to train it (docs/results/churn.md).

First moments m: one payload of the update codec with a quarter of the entries, at 2 bits. Second moments v: of a matrix the means of its
rows r_i and of its columns c_j, from which v_ij = r_i c_j / mean(r) (Shazeer and Stern 2018, Adafactor, algorithm 1); of a vector all.
About 0.16 bytes a parameter instead of 8.

    u32   updates so far
    u64   bytes of the payload; the payload (protocol/codec/sparse.py)
    fp32  the second moments: for each tensor of the shard, in its order, r and c, or all

Who sends it may be an enemy, so what comes is bounded by what is true of every honest sender. Gradients are clipped, so that the sum of
all v is at most clip². And |m| <= c sqrt(v) for each element, with c² = (1 - b1)² / ((1 - b2) (1 - b1² / b2)) (Cauchy and Schwarz): the
first updates are no larger than others are.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from protocol.codec import sparse
from protocol.codec.sparse import Codec, PayloadError
from protocol.run import layout
from protocol.run.layout import ModelSpec
from protocol.run.manifest import TrainSpec

Array = NDArray[np.float32]
CODEC = Codec(1024)
_HEADER = struct.Struct("<IQ")
MOST_UPDATES = 1 << 24
"""fp32 counts exactly up to here."""


def largest(spec: ModelSpec, shard: str) -> int:
    """The most bytes that a shard's moments have."""
    shapes = layout.shapes(spec, shard)
    return _HEADER.size + sparse.max_payload_size(CODEC, shapes) + 4 * sum(_means(shape) for shape in shapes)


def pack(spec: ModelSpec, shard: str, state: Mapping[str, NDArray[np.generic]]) -> bytes | None:
    """The moments of `shard` in `state` (`<parameter>/<moment>`); None where they are not all there."""
    names = [name for name, _ in layout.tensors(spec, shard)]
    if not all(f"{name}/exp_avg_sq" in state for name in names):
        return None
    first = [np.asarray(state[f"{name}/exp_avg"], dtype=np.float32) for name in names]
    payload = sparse.encode(CODEC, first)
    second = b"".join(_factors(np.asarray(state[f"{name}/exp_avg_sq"], dtype=np.float32)) for name in names)
    updates = min(MOST_UPDATES, *(int(float(state[f"{name}/step"])) for name in names))
    return _HEADER.pack(updates, len(payload)) + payload + second


def unpack(spec: ModelSpec, train: TrainSpec, shard: str, data: bytes) -> dict[str, Array]:
    """What `pack` made of it, within bounds. Raises PayloadError."""
    tensors = layout.tensors(spec, shard)
    means = 4 * sum(_means(shape) for _, shape in tensors)
    if len(data) < _HEADER.size:
        raise PayloadError("moments: shorter than their header")
    updates, size = _HEADER.unpack_from(data)
    if not 1 <= updates <= MOST_UPDATES or len(data) != _HEADER.size + size + means:
        raise PayloadError("moments: not as long as they say")
    view = memoryview(data)[_HEADER.size :]
    sent = sparse.decode(CODEC, [shape for _, shape in tensors], view[:size])
    found: dict[str, Array] = {}
    at = size
    for (name, shape), x in zip(tensors, sent, strict=True):
        end = at + 4 * _means(shape)
        v = _product(np.frombuffer(view[at:end], dtype="<f4").astype(np.float32), shape)
        at = end
        m = np.zeros(shape, np.float32)
        m.reshape(-1)[x.index] = x.values
        found |= {f"{name}/exp_avg": m, f"{name}/exp_avg_sq": v, f"{name}/step": np.array(updates, np.float32)}
    _bound(train, [(found[f"{name}/exp_avg"], found[f"{name}/exp_avg_sq"]) for name, _ in tensors])
    return found


def _bound(train: TrainSpec, pairs: Sequence[tuple[Array, Array]]) -> None:
    """Makes the moments what an honest sender's can be. Raises PayloadError."""
    total = sum(float(np.sum(v, dtype=np.float64)) for _, v in pairs)
    if not total <= 1.01 * train.clip**2:
        raise PayloadError("moments: larger than clipped gradients have")
    b1, b2 = train.beta1, train.beta2
    most = (1 - b1) / math.sqrt((1 - b2) * (1 - b1**2 / b2)) if b1**2 < b2 else 1.0
    for m, v in pairs:
        limit = np.sqrt(v)
        limit *= np.float32(most)
        np.clip(m, -limit, limit, out=m)


def _means(shape: Sequence[int]) -> int:
    """How many numbers stand for a tensor's second moments."""
    return sum(shape) if len(shape) == 2 else math.prod(shape)


def _factors(v: Array) -> bytes:
    if v.ndim != 2:
        return np.ascontiguousarray(v, dtype="<f4").tobytes()
    parts = (v.mean(axis=axis, dtype=np.float64) for axis in (1, 0))
    return b"".join(part.astype("<f4").tobytes() for part in parts)


def _product(numbers: Array, shape: Sequence[int]) -> Array:
    """v. Raises PayloadError where the numbers are no means of squares."""
    if not (np.isfinite(numbers).all() and (numbers >= 0).all()):
        raise PayloadError("moments: a mean of squares is negative, or no number")
    if len(shape) != 2:
        return numbers.reshape(shape)
    rows, columns = numbers[: shape[0]], numbers[shape[0] :]
    mean = float(rows.mean(dtype=np.float64))
    with np.errstate(over="ignore"):
        made: Array = np.outer(rows / np.float32(mean) if mean > 0 else rows, columns)
    return made
