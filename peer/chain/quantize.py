"""The only place where wire bytes become tensors, and tensors wire bytes. Little-endian; no header of its own; no
state.

Values of a token (the last dimension, W) as one of protocol/codec/formats.py's formats:

    bf16, fp32   rounded to nearest even
    int8, int4   s, then q = round(x / s) in -127..127 or -7..7; s = max |x| / 127 or 7, rounded up to bf16, per token
    sym2         s = rms of the token as bf16, then 2 bits a value: whether x >= 0, and whether |x| >= 0.982 s; read as
                 +-0.453 s or +-1.510 s, the least mean square error of two bits for a normal distribution (Max, 1960)
    tah4         tiles of 64 after TAH-Quant; p, low, s, then q = round((x - low) / s) in 0..15, low = min,
                 s = (max - min) / 15

int4's q are stored as q + 8; of two 4-bit values the first is in the low half of its byte, and so on for four of 2 bits
(the sign is the lower one); `sym2` fills a token's last byte with zeros. In a tile of `tah4` whose largest magnitude is
over twice the second largest, that value changes places with the first and the tile is rotated by the orthonormal
Hadamard matrix: the outlier becomes an offset of all values, which `low` takes up. p is its place, 255 without
rotation. Each part of an encoding is one block: all s, then all q; all p, all low, all s, all q. (The paper gives 3
bits to the tiles of low entropy; here all have 4. Our `int4` is symmetric and has zero.) `sym2` is for gradients: what
it loses of them is small beside the noise that they have, while of activations it is lost in every token
(docs/results/learning.md).

No value that is accepted is larger than LIMIT in magnitude: a sum over 2^16 tokens of products of two such values,
squared, is 2^112, which fp32 still holds (2^128), so nothing that is computed from accepted values in one step
overflows. Activations of an honest run are below 2^16 even where single channels run away, gradients of a mean loss
below 1.

Token ids never travel: every stage knows them. Decoding copies into memory that torch allocated: kernels may sum in
another order at another alignment, and where the network put the bytes must not change bits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from peer.training import compiled
from protocol.codec import formats
from protocol.errors import PotluckError

LIMIT = 2.0**20
"""Largest magnitude of a value that is accepted. Half of it is sent at most: rounding may add a little."""
_STEPS = {"int8": 127, "int4": 7}
_THRESHOLD, _NEAR, _FAR = 0.98159883, 0.45278004, 1.5104176
_PLAIN = 255
"""p of a tile that is not rotated."""
_TINY = 2.0**-120
"""Scale of a token that is all zero."""


class BadTensor(PotluckError, ValueError):
    """Bytes or values that are not the tensor which was expected."""


def size(shape: Sequence[int], wire: str) -> int:
    """Bytes of an encoded tensor of this shape."""
    return math.prod(shape[:-1]) * formats.bytes_per_token(wire, shape[-1])


def encode(x: Tensor, wire: str, *, limit: float = LIMIT / 2) -> bytes:
    """The values of `x` [.., W] as bytes. Raises BadTensor if one is not finite or over `limit`, by default half of
    what is accepted."""
    x = x.detach()
    if not x.numel():
        return b""
    if wire in ("bf16", "fp32"):
        x = x.to(torch.bfloat16 if wire == "bf16" else torch.float32)
        return _checked(_largest(x), (x,), limit)
    if wire == "tah4":
        _check(float(_largest(x)), limit)
        return _encode_tiles(x.float().reshape(-1, formats.tah4_tile(x.shape[-1])))
    x_TW = x.reshape(-1, x.shape[-1])
    if wire == "sym2":
        largest, *parts = compiled.where_it_pays(_encode_sym2, x.device)(x_TW)
    else:
        largest, *parts = compiled.where_it_pays(_encode_steps, x.device)(x_TW, _STEPS[wire])
    return _checked(largest, parts, limit)


def decode(raw: bytes | memoryview, shape: Sequence[int], wire: str, device: torch.device) -> Tensor:
    """fp32 tensor of this shape. Raises BadTensor if the length is wrong or a value is not finite or over LIMIT."""
    return decode_measured(raw, shape, wire, device)[0]


def decode_measured(
    raw: bytes | memoryview, shape: Sequence[int], wire: str, device: torch.device, form: torch.dtype = torch.float32
) -> tuple[Tensor, float]:
    """Returns the result of `decode`, rounded to `form`, and its largest magnitude before, which the check needs
    anyway."""
    if len(raw) != size(shape, wire):
        raise BadTensor(f"has {len(raw)} bytes of values, not {size(shape, wire)} for {wire} {tuple(shape)}")
    width, tokens = shape[-1], math.prod(shape[:-1])
    if not tokens * width:
        return torch.empty(tuple(shape), device=device, dtype=form), 0.0
    if wire in ("bf16", "fp32"):
        x = _tensor(raw, torch.bfloat16 if wire == "bf16" else torch.float32, device).float()
        largest = _largest(x)
    elif wire == "tah4":
        x = _decode_tiles(memoryview(raw), formats.tah4_tile(width), device)
        largest = _largest(x)
    elif wire == "sym2":
        scale_T, packed = _scales_and_values(raw, tokens, torch.uint8, device)
        levels = _levels(device)
        decoding = compiled.where_it_pays(_decode_sym2, device)
        x, largest = decoding(scale_T, packed.reshape(tokens, -1), levels, width, form)
    else:
        scale_T, q = _scales_and_values(raw, tokens, torch.int8 if wire == "int8" else torch.uint8, device)
        x, largest = compiled.where_it_pays(_decode_steps, device)(scale_T, q, width, form)
    if device.type == "cuda":
        largest = _fetched([largest]).view(torch.float32)
    return x.to(form).reshape(tuple(shape)), _check(largest.item(), LIMIT)


def _checked(largest: Tensor, parts: Sequence[Tensor], limit: float) -> bytes:
    """The bytes of all parts, if the largest magnitude is in range."""
    if largest.device.type != "cuda":
        _check(largest.item(), limit)
        return b"".join(map(_raw, parts))
    whole = _fetched([largest.float(), *parts])
    _check(whole[:4].view(torch.float32).item(), limit)
    return whole[4:].numpy().tobytes()


def _fetched(tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of all of them, on the host. The GPU is waited for once, when everything is on its way, and only for
    what this stream has."""
    flat = [x.contiguous().view(-1).view(torch.uint8) for x in tensors]
    whole = torch.empty(sum(map(len, flat)), dtype=torch.uint8, pin_memory=True)
    for part, there in zip(flat, whole.split([len(part) for part in flat]), strict=True):
        there.copy_(part, non_blocking=True)
    torch.cuda.current_stream(tensors[0].device).synchronize()
    return whole


def _largest(x: Tensor) -> Tensor:
    """The largest magnitude []; not finite where a value is not. The extremes tell, without a copy."""
    return torch.stack(x.aminmax()).abs().amax()


def _largest_of_tokens(x_TW: Tensor) -> Tensor:
    """Returns the largest magnitude, in the compiled pass that makes x; uncompiled, in two more passes."""
    return x_TW.abs().amax(1).amax() if x_TW.is_cuda else _largest(x_TW)


def _check(largest: float, limit: float) -> float:
    """The largest magnitude. Raises BadTensor unless it is finite and in range."""
    if not math.isfinite(largest):
        raise BadTensor("values are not finite")
    if largest > limit:
        raise BadTensor(f"a value has magnitude {largest:.3g}, at most {limit:.0f}")
    return largest


# --- int8, int4


def _encode_steps(x_TW: Tensor, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    x_TW = x_TW.float()
    largest_T1 = x_TW.abs().amax(1, keepdim=True)
    scale_T1 = _round_up((largest_T1 / steps).clamp_min(_TINY))
    q_TW = torch.round(x_TW / scale_T1.float()).clamp(-steps, steps)
    return largest_T1.amax(), scale_T1, q_TW.to(torch.int8) if steps > 7 else _pack((q_TW + 8).to(torch.uint8))


def _decode_steps(scale_T: Tensor, q: Tensor, width: int, form: torch.dtype) -> tuple[Tensor, Tensor]:
    q_TW = (q.float() if q.dtype == torch.int8 else _unpack(q) - 8).reshape(-1, width)
    x_TW = q_TW * scale_T.float()[:, None]
    return x_TW.to(form), _largest_of_tokens(x_TW)


# --- sym2; C bytes of a token


def _encode_sym2(x_TW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x_TW = x_TW.float()
    size_TW = x_TW.abs()
    scale_T1 = x_TW.square().mean(1, keepdim=True).sqrt().clamp_min(_TINY).to(torch.bfloat16)
    q_TW = (x_TW >= 0).to(torch.uint8) | (size_TW >= _THRESHOLD * scale_T1.float()).to(torch.uint8) << 1
    q_TC4 = functional.pad(q_TW, (0, -x_TW.shape[1] % 4)).unflatten(1, (-1, 4))
    return (
        size_TW.amax(1).amax(),
        scale_T1,
        q_TC4[..., 0] | q_TC4[..., 1] << 2 | q_TC4[..., 2] << 4 | q_TC4[..., 3] << 6,
    )


def _decode_sym2(
    scale_T: Tensor, packed_TC: Tensor, levels: Tensor, width: int, form: torch.dtype
) -> tuple[Tensor, Tensor]:
    x_TW = functional.embedding(packed_TC.int(), levels).flatten(1)[:, :width] * scale_T.float()[:, None]
    return x_TW.to(form), _largest_of_tokens(x_TW)


@functools.cache
def _levels(device: torch.device) -> Tensor:
    """[256, 4]: the values of a byte, by scale 1."""
    q = torch.arange(256)[:, None] >> torch.arange(0, 8, 2) & 3
    return (torch.where(q >= 2, _FAR, _NEAR) * torch.where(q & 1 == 1, 1.0, -1.0)).to(device)


# --- tah4; N tiles of A values


@functools.cache
def _hadamard(size: int, device: torch.device) -> Tensor:
    """Orthonormal and symmetric; its first row and column are constant."""
    h = torch.ones(1, 1)
    while len(h) < size:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    return (h / math.sqrt(size)).to(device)


def _swap(x_NA: Tensor, place_N: Tensor) -> Tensor:
    """Each tile with its first value and the one at its place exchanged."""
    place_N1 = place_N[:, None]
    first_N1, other_N1 = x_NA[:, :1].clone(), x_NA.gather(1, place_N1)
    swapped = x_NA.scatter(1, place_N1, first_N1)
    swapped[:, :1] = other_N1
    return swapped


def _encode_tiles(x_NA: Tensor) -> bytes:
    largest_N2, place_N2 = x_NA.abs().topk(2, dim=1)
    rotated_N = largest_N2[:, 0] > 2 * largest_N2[:, 1]
    place_N = place_N2[:, 0]
    if bool(rotated_N.any()):
        turned = _swap(x_NA[rotated_N], place_N[rotated_N]) @ _hadamard(x_NA.shape[1], x_NA.device)
        x_NA = x_NA.clone()
        x_NA[rotated_N] = turned
    low_N1 = -_round_up(-x_NA.amin(1, keepdim=True))
    scale_N1 = _round_up(((x_NA.amax(1, keepdim=True) - low_N1.float()) / 15).clamp_min(_TINY))
    q_NA = torch.round((x_NA - low_N1.float()) / scale_N1.float()).clamp(0, 15).to(torch.uint8)
    p_N = torch.where(rotated_N, place_N, _PLAIN).to(torch.uint8)
    return _raw(p_N) + _raw(low_N1) + _raw(scale_N1) + _raw(_pack(q_NA))


def _decode_tiles(raw: memoryview, size: int, device: torch.device) -> Tensor:
    count = len(raw) // (size // 2 + 5)
    p_N = _tensor(raw[:count], torch.uint8, device).long()
    low_N1 = _tensor(raw[count : 3 * count], torch.bfloat16, device).float()[:, None]
    scale_N1 = _tensor(raw[3 * count : 5 * count], torch.bfloat16, device).float()[:, None]
    x_NA = _unpack(_tensor(raw[5 * count :], torch.uint8, device)).reshape(count, size) * scale_N1 + low_N1
    rotated_N = p_N != _PLAIN
    if bool(rotated_N.any()):
        place_N = p_N[rotated_N]
        if int(place_N.max()) >= size:
            raise BadTensor("a tile's outlier has an impossible place")
        x_NA[rotated_N] = _swap(x_NA[rotated_N] @ _hadamard(size, device), place_N)
    return x_NA


# --- bytes


def _round_up(x: Tensor) -> Tensor:
    """The smallest bf16 that is not below x (finite fp32). By its bits: a compiler may leave out a rounding that is
    only between two steps."""
    bits = x.view(torch.int32)
    return (torch.where(bits > 0, bits + 0xFFFF, bits) & ~0xFFFF).view(torch.float32).to(torch.bfloat16)


def _pack(q: Tensor) -> Tensor:
    """Pairs of 4-bit values (uint8) as bytes."""
    pairs = q.reshape(-1, 2)
    return pairs[:, 0] | pairs[:, 1] << 4


def _unpack(packed: Tensor) -> Tensor:
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten().float()


_SAME_SIZE = {torch.bfloat16: torch.int16, torch.float32: torch.int32}


def _raw(x: Tensor) -> bytes:
    x = x.contiguous().cpu()
    whole = x.view(_SAME_SIZE.get(x.dtype, x.dtype)).numpy()
    return whole.astype(whole.dtype.newbyteorder("<"), copy=False).tobytes()


def _scales_and_values(
    raw: bytes | memoryview, tokens: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The bf16 scale of each token [T], and what is behind them."""
    raw = memoryview(raw)
    if device.type != "cuda":
        return _tensor(raw[: 2 * tokens], torch.bfloat16, device), _tensor(raw[2 * tokens :], dtype, device)
    whole = torch.empty(len(raw), dtype=torch.uint8, pin_memory=True)
    whole.numpy()[:] = np.frombuffer(raw, dtype=np.uint8)
    there = whole.to(device, non_blocking=True)
    return there[: 2 * tokens].view(torch.bfloat16), there[2 * tokens :].view(dtype)


def _tensor(raw: bytes | memoryview, dtype: torch.dtype, device: torch.device) -> Tensor:
    whole = torch.empty(len(raw) // dtype.itemsize, dtype=_SAME_SIZE.get(dtype, dtype))
    whole.numpy()[:] = np.frombuffer(raw, dtype=whole.numpy().dtype.newbyteorder("<"))
    return whole.view(dtype).to(device)


def ids_from(array: np.ndarray, shape: Sequence[int], vocab_size: int) -> Tensor:
    """int64 tensor from an integer array of exactly this shape. Raises BadTensor."""
    if array.shape != tuple(shape) or array.dtype.kind not in "iu":
        raise BadTensor(f"token windows are {array.dtype} {array.shape}, not integers {tuple(shape)}")
    if array.size and not (int(array.min()) >= 0 and int(array.max()) < vocab_size):
        raise BadTensor(f"a token id is outside the vocabulary of {vocab_size}")
    return torch.tensor(array.astype(np.int64))
