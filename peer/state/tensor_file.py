"""Files of named fp32 tensors in the safetensors format, written piece by piece and read into existing arrays.

The library copies all tensors, and a model's embedding may be too large for that. Tensors are in the order of their
names, so the end of a shard's file is its canonical bytes.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from peer.net.disk import Disk
from protocol.codec.topk import Empty, in_memory

Array = NDArray[np.float32]
PIECE = 1 << 20
_TYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
"""Of tensors that can be read; numpy has no bf16."""


class Damaged(ValueError):
    """The file is not one that `pieces` made."""


def pieces(
    tensors: Mapping[str, NDArray[np.generic]], metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """The file's bytes. Raises ValueError for what is not fp32."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in sorted(tensors):
        array, begin = tensors[name], end
        if array.dtype != np.float32:
            raise ValueError(f"tensor {name}: {array.dtype}, not float32; this is a bug")
        end += array.nbytes
        header[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": [begin, end]}
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    yield len(raw).to_bytes(8, "little") + raw
    for name in sorted(tensors):
        yield np.ascontiguousarray(tensors[name], dtype="<f4").data.cast("B")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a file has a tensor: type, shape, position of the first byte."""

    dtype: str
    shape: tuple[int, ...]
    begin: int


def places(disk: Disk, path: Path) -> tuple[dict[str, Place], dict[str, str]]:
    """Where any file in the format has its tensors, by name, and its metadata. Raises OSError and Damaged."""
    size, _ = disk.stat(path)
    with disk.open(path) as file:
        length = int.from_bytes(file.read(8), "little")
        if length > size - 8:
            raise Damaged("it is shorter than its header")
        raw = file.read(length)
    try:
        found = json.loads(raw)
        metadata = {str(key): str(value) for key, value in found.pop("__metadata__", {}).items()}
        known = {}
        for name, said in found.items():
            shape, (begin, end) = tuple(map(int, said["shape"])), map(int, said["data_offsets"])
            each = _TYPES.get(said["dtype"], np.dtype("u1")).itemsize
            if min(shape, default=0) < 0 or not 0 <= begin <= end <= size - 8 - length:
                raise Damaged(f"tensor {name} is not where it should be")
            if said["dtype"] in _TYPES and end - begin != each * math.prod(shape):
                raise Damaged(f"tensor {name} has not as many values as its shape")
            known[name] = Place(str(said["dtype"]), shape, 8 + length + begin)
    except Damaged:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise Damaged("its header cannot be read") from None
    return known, metadata


def read(disk: Disk, path: Path, empty: Empty = in_memory) -> tuple[dict[str, Array], dict[str, str]]:
    """The tensors by name, in their order, in arrays that `empty` makes, and the metadata. Raises OSError and
    Damaged."""
    found, metadata = places(disk, path)
    shapes, (size, _) = {name: found[name].shape for name in sorted(found)}, disk.stat(path)
    begin = at = size - sum(4 * math.prod(shape) for shape in shapes.values())
    for name, shape in shapes.items():
        if (found[name].dtype, found[name].begin) != ("F32", at):
            raise Damaged(f"tensor {name} is not where it should be")
        at += 4 * math.prod(shape)
    with disk.open(path) as file:
        if begin != 8 + int.from_bytes(file.read(8), "little"):
            raise Damaged("its tensors are not as long as the file")
        file.seek(begin)
        arrays = empty(list(shapes.values()))
        fill(file, arrays)
    return dict(zip(shapes, arrays, strict=True)), metadata


def fill(file: BinaryIO, arrays: Sequence[Array]) -> None:
    """Reads the arrays' little-endian values, one after the other, from where the file is. Raises OSError, Damaged if
    it ends before."""
    for array in arrays:
        raw, at = array.reshape(-1).view(np.uint8), 0
        while at < raw.size:
            piece = file.read(min(PIECE, raw.size - at))
            if not piece:
                raise Damaged("it ends before its tensors")
            raw[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
            at += len(piece)
        if sys.byteorder == "big":
            array.byteswap(inplace=True)


def load(disk: Disk, path: Path, place: Place, array: Array) -> None:
    """Reads a tensor of any type of `_TYPES` into an array of its shape, as fp32. Raises OSError, Damaged."""
    if place.dtype not in _TYPES:
        raise Damaged(f"has {place.dtype}; weights are {', '.join(_TYPES)}")
    kind, flat, at = _TYPES[place.dtype], array.reshape(-1), 0
    with disk.open(path) as file:
        file.seek(place.begin)
        while at < flat.size:
            piece = file.read(min(PIECE, (flat.size - at) * kind.itemsize))
            if not piece or len(piece) % kind.itemsize:
                raise Damaged("ends before its last value")
            values = np.frombuffer(piece, kind)
            wide = (values.astype(np.uint32) << 16).view(np.float32) if place.dtype == "BF16" else values
            flat[at : at + values.size] = wide
            at += values.size
