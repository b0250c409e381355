"""The only place where wire bytes become tensors, and tensors wire bytes. Little-endian; no header of its own.

Numbers travel as `bf16` (rounded to nearest even) or `fp32`, token ids as uint16 when the vocabulary has at most 65,536
entries, else uint32. Decoding copies into memory that torch allocated: kernels may sum in another order at another
alignment, and where the network put the bytes must not change bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from protocol.errors import PotluckError

WIRES = {"bf16": 2, "fp32": 4}
"""Number formats and their bytes per value."""


class BadTensor(PotluckError, ValueError):
    """Bytes or values that are not the tensor which was expected."""


def size(shape: Sequence[int], wire: str) -> int:
    """Bytes of an encoded tensor of this shape."""
    return math.prod(shape) * WIRES[wire]


def id_bytes(vocab_size: int) -> int:
    """Bytes of one token id."""
    return 2 if vocab_size <= 1 << 16 else 4


def encode(x: Tensor, wire: str) -> bytes:
    """The values of `x` as bytes. Raises BadTensor if one is not finite."""
    x = x.detach().to(torch.bfloat16 if wire == "bf16" else torch.float32)
    if not bool(torch.isfinite(x).all()):
        raise BadTensor("values are not finite")
    whole = x.contiguous().cpu().view(torch.int16 if wire == "bf16" else torch.int32).numpy()
    return whole.astype(whole.dtype.newbyteorder("<"), copy=False).tobytes()


def decode(raw: bytes | memoryview, shape: Sequence[int], wire: str, device: torch.device) -> Tensor:
    """fp32 tensor of this shape. Raises BadTensor if the length is wrong or a value is not finite."""
    if len(raw) != size(shape, wire):
        raise BadTensor(f"has {len(raw)} bytes of values, not {size(shape, wire)} for {wire} {tuple(shape)}")
    short = wire == "bf16"
    whole = torch.empty(math.prod(shape), dtype=torch.int16 if short else torch.int32)
    whole.numpy()[:] = np.frombuffer(raw, dtype="<i2" if short else "<i4")
    x = whole.view(torch.bfloat16 if short else torch.float32).reshape(tuple(shape))
    if not bool(torch.isfinite(x).all()):
        raise BadTensor("values are not finite")
    return x.to(device=device, dtype=torch.float32)


def encode_ids(ids: Tensor, vocab_size: int) -> bytes:
    """Token ids (any integer tensor, each in 0..vocab_size-1) as bytes."""
    return ids.cpu().numpy().astype("<u2" if id_bytes(vocab_size) == 2 else "<u4").tobytes()


def decode_ids(raw: bytes | memoryview, shape: Sequence[int], vocab_size: int, device: torch.device) -> Tensor:
    """int64 tensor of this shape. Raises BadTensor if the length is wrong or an id is outside the vocabulary."""
    width = id_bytes(vocab_size)
    if len(raw) != math.prod(shape) * width:
        raise BadTensor(f"has {len(raw)} bytes of token ids, not {math.prod(shape) * width} for {tuple(shape)}")
    return _ids(np.frombuffer(raw, dtype=f"<u{width}").reshape(tuple(shape)), vocab_size, device)


def ids_from(array: np.ndarray, shape: Sequence[int], vocab_size: int, device: torch.device) -> Tensor:
    """int64 tensor from an integer array of exactly this shape. Raises BadTensor."""
    if array.shape != tuple(shape) or array.dtype.kind not in "iu":
        raise BadTensor(f"token windows are {array.dtype} {array.shape}, not integers {tuple(shape)}")
    return _ids(array, vocab_size, device)


def _ids(array: np.ndarray, vocab_size: int, device: torch.device) -> Tensor:
    if array.size and not (int(array.min()) >= 0 and int(array.max()) < vocab_size):
        raise BadTensor(f"a token id is outside the vocabulary of {vocab_size}")
    return torch.tensor(array.astype(np.int64), device=device)
