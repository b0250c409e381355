"""Files of named fp32 tensors in the safetensors format, written piece by piece and read into existing arrays.

The library copies all tensors, and a model's embedding may be too large for that. Tensors are in the order of their
names, so the end of a shard's file is its canonical bytes.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from peer.net.disk import Disk
from protocol.codec.topk import Empty, in_memory

Array = NDArray[np.float32]
PIECE = 1 << 20


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


def read(disk: Disk, path: Path, empty: Empty = in_memory) -> tuple[dict[str, Array], dict[str, str]]:
    """The tensors by name, in their order, in arrays that `empty` makes, and the metadata. Raises OSError and
    Damaged."""
    size, _ = disk.stat(path)
    with disk.open(path) as file:
        length = int.from_bytes(file.read(8), "little")
        if length > size - 8:
            raise Damaged("it is shorter than its header")
        shapes, metadata = _header(file.read(length), size - 8 - length)
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


def _header(raw: bytes, size: int) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Names and shapes of tensors that have `size` bytes in all, and the metadata. Raises Damaged."""
    try:
        found = json.loads(raw)
        metadata = {str(key): str(value) for key, value in found.pop("__metadata__", {}).items()}
        shapes, end = {}, 0
        for name in sorted(found):
            shapes[name] = tuple(int(n) for n in found[name]["shape"])
            begin, end = end, end + 4 * math.prod(shapes[name])
            if (
                found[name]["dtype"] != "F32"
                or found[name]["data_offsets"] != [begin, end]
                or min(shapes[name], default=0) < 0
            ):
                raise Damaged(f"tensor {name} is not where it should be")
    except Damaged:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise Damaged("its header cannot be read") from None
    if end != size:
        raise Damaged("its tensors are not as long as the file")
    return shapes, metadata
