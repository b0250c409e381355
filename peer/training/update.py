"""A round's update on the device that trains: e = β e + δ and the largest magnitudes of every tile
(protocol/codec/topk.py), bit for bit as peer/state/outer_optimizer.py and `topk.select` on the host; and the loading of
the next round's parameters.

Feedback e and state θ live on the host. They go to the device in parts, some whole bands of tiles of one tensor each.
δ = θ - θ_local is made there; e comes back, with the packed indices of the selected entries (`pack`), whose values the
host takes from e. Several parts are under way, one to a lane, so that copies in both directions and the work overlap.

A selection key of 64 bits has the bits of |x| above n - 1 - i for the i-th of a tile's n elements, so keys differ, and
of equal magnitudes the first has the largest key. Packed indices have at most twice the bytes of the payload.

Arrays that recur every round are pinned at their third sight, until they are freed; mapped files never.

Shape letters: T tiles, N elements of a tile, K entries of a tile, E entries in all.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from queue import SimpleQueue

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from peer.training.device import is_shortage
from protocol.codec import topk
from protocol.codec.formats import TILE
from protocol.codec.topk import MARK, Array, Kept, Map, Tiling
from protocol.errors import LocalError
from protocol.planning.memory import LANES, PART

PINNED_LEAST_BYTES = 1 << 20
PINNED_SIGHTS = 3

_lock = threading.RLock()  # the end of an array may come anywhere, here too
_seen: dict[int, int] = {}
"""Sights of each living array, by its id; at PINNED_SIGHTS it is pinned, if that is possible."""
_pinned: set[int] = set()


def pinned(array: NDArray[np.float32], device: torch.device) -> bool:
    """Notes a sight of the contiguous array. Whether it is pinned, for `device`."""
    if (
        device.type != "cuda"
        or array.nbytes < PINNED_LEAST_BYTES
        or not (array.flags.owndata and array.flags.writeable)
    ):
        return False
    key = id(array)
    with _lock:
        if key not in _seen:
            weakref.finalize(array, _forget, key, array.ctypes.data).atexit = False
        _seen[key] = _seen.get(key, 0) + 1
        if _seen[key] == PINNED_SIGHTS and _pin(array, device):
            _pinned.add(key)
        return key in _pinned


def _pin(array: NDArray[np.float32], device: torch.device) -> bool:
    library = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if int(library.cudaHostRegister(array.ctypes.data, array.nbytes, 0)) == 0:
        return True
    with contextlib.suppress(RuntimeError):  # else the next call to the device would raise this error
        torch.zeros(1, device=device)
    return False


def _forget(key: int, address: int) -> None:
    with _lock:
        del _seen[key]
        if key in _pinned:
            _pinned.remove(key)
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


"""PART: elements of a part, unless one band has more. A lane takes about 2 * 4 bytes for each on the host, and 40 on
the device."""
_MAGNITUDE = 0x7FFFFFFF
_PLACE = TILE.bit_length() - 1


Moved = tuple[Array, Tensor]
"""Of a tensor θ on the host and the trained values on the device, which differ by δ."""


def tiles(x: Tensor, tiling: Tiling) -> Tensor:
    """The elements [T, N] of the contiguous tensor, or of the bands, that `tiling` cuts."""
    return x.view(tiling.bands, tiling.tr, tiling.across, tiling.tc).transpose(1, 2).reshape(tiling.tiles, tiling.n)


def select(x_TN: Tensor, keep: int) -> Tensor:
    """Indices [T, K] int16, ascending, of every tile's largest magnitudes; of equal ones the first; a value that is not
    finite is larger than all others."""
    T, n = x_TN.shape
    if keep == n:
        return torch.arange(n, dtype=torch.int16, device=x_TN.device).expand(T, n)
    key_TN = (x_TN.view(torch.int32) & _MAGNITUDE).to(torch.int64)
    key_TN <<= _PLACE
    key_TN |= torch.arange(n - 1, -1, -1, device=x_TN.device)
    top_TK = torch.topk(key_TN, keep, dim=1, sorted=False).values
    return (n - 1 - (top_TK & (TILE - 1))).to(torch.int16).sort(dim=1).values


def pack(index_TK: Tensor, n: int) -> Tensor:
    """The indices of tiles of `n` elements as bytes, on their device: none where all are kept; a bit for each element
    where that is at most MARK bits an entry; else the low bytes, and behind them the high four bits, two to a byte."""
    T, keep = index_TK.shape
    if keep == n:
        return torch.empty(0, dtype=torch.uint8, device=index_TK.device)
    if _is_map(n, keep):
        element = torch.zeros(T, n, dtype=torch.uint8, device=index_TK.device).scatter_(1, index_TK.long(), 1)
        return _packed_bits(element.view(-1), 1)
    index_E = index_TK.reshape(-1)
    return torch.cat([(index_E & 0xFF).to(torch.uint8), _packed_bits((index_E >> 8).to(torch.uint8), 4)])


def unpack(raw: np.ndarray, part: Tiling) -> np.ndarray:
    """The inverse of `pack` for the tiles of `part`: indices [T, K]."""
    tiles, n, keep, entries = part.tiles, part.n, part.keep, part.entries
    if keep == n:
        return np.broadcast_to(np.arange(n, dtype=np.uint16), (tiles, n))
    if _is_map(n, keep):
        bits = np.unpackbits(raw, count=tiles * n, bitorder="little").view(bool)
        return (np.flatnonzero(bits) % n).astype(np.uint16).reshape(tiles, keep)
    low, high = raw[:entries], raw[entries:]
    index_E = low.astype(np.uint16)
    index_E[0::2] |= (high[: (entries + 1) // 2] & np.uint16(15)) << np.uint16(8)
    index_E[1::2] |= (high[: entries // 2] >> np.uint8(4)).astype(np.uint16) << np.uint16(8)
    return index_E.reshape(tiles, keep)


def _is_map(n: int, keep: int) -> bool:
    return n <= MARK * keep


def _packed_bits(x: Tensor, bits: int) -> Tensor:
    """Numbers of 1 or 4 bits as bytes, the first in the lowest bits."""
    each = 8 // bits
    columns = torch.nn.functional.pad(x, (0, -len(x) % each)).view(-1, each).unbind(1)
    return functools.reduce(torch.bitwise_or, (column << (bits * i) for i, column in enumerate(columns)))


class DeviceUpdate:
    """Works on `device`, on as many parts at a time as there are lanes and threads of callers, which may bring several
    shards at once. Its buffers stay: to pin memory takes longer than to use it."""

    def __init__(self, device: torch.device | str, lanes: int = LANES) -> None:
        self._device = torch.device(device)
        self._lanes = [_Lane(self._device) for _ in range(lanes)]
        self._free: SimpleQueue[_Lane] = SimpleQueue()
        for lane in self._lanes:
            self._free.put(lane)

    @property
    def bytes_to_host(self) -> int:
        return sum(lane.bytes_to_host for lane in self._lanes)

    @property
    def bytes_to_device(self) -> int:
        return sum(lane.bytes_to_device for lane in self._lanes)

    @property
    def buffer_bytes(self) -> int:
        return sum(lane.buffer_bytes for lane in self._lanes)

    def accumulate(
        self, moved: Sequence[Moved], feedback: Sequence[Array], beta: np.float32, k: int, run: Map
    ) -> list[Kept]:
        """e = β e + δ in place, for each contiguous array e of `feedback`. Returns its largest magnitudes, `k` of every
        4096. Raises LocalError, and leaves e unchanged, if a value from the device is not finite; ValueError for wrong
        shapes. Parts that run out of the device's memory are repeated alone at the end."""
        if [e.shape for e in feedback] != [tuple(local.shape) for _, local in moved]:
            raise ValueError("the pseudo-gradient's shapes are not those of the feedback; this is a bug")
        ends = torch.stack([end for _, local in moved for end in torch.aminmax(local.detach())])
        if not bool(torch.isfinite(ends).all()):  # waits for the trainer's work, too
            raise LocalError("the pseudo-gradient is not finite; this round's work is dropped")
        kept, jobs = [], []
        for e, (theta, local) in zip(feedback, moved, strict=True):
            tiling = topk.tiling(e.shape, k)
            index_TK = np.empty((tiling.tiles, tiling.keep), dtype=np.uint16)
            kept.append(Kept(tiling, index_TK, np.empty(tiling.entries, dtype=np.float32)))
            in_place = pinned(e, self._device), pinned(theta, self._device)
            for part in tiling.cut(PART):
                at = slice(part.band * part.tr * part.cols, (part.band * part.tr + part.rows) * part.cols)
                jobs.append(_Job(part, kept[-1], e.reshape(-1)[at], in_place, theta.reshape(-1)[at], local, at))
        late: list[_Job] = []
        list(run(functools.partial(self._work, float(beta), late.append), jobs))
        for job in late:
            self._work(float(beta), None, job)
        return kept

    def load(self, pairs: Sequence[tuple[Tensor, Array]]) -> None:
        """Writes arrays into parameters of the same shapes, on own threads, and waits for the end."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # earlier work may read them
        pieces = [
            (parameter.detach().view(-1)[at : at + PART], array.reshape(-1)[at : at + PART], in_place)
            for parameter, array in pairs
            for in_place in (pinned(array, self._device),)
            for at in range(0, array.size, PART)
        ]
        with ThreadPoolExecutor(len(self._lanes), "load") as pool:
            list(pool.map(self._load, pieces))

    def _load(self, piece: tuple[Tensor, Array, bool]) -> None:
        with self._lane() as lane:
            lane.into(*piece)

    def _work(self, beta: float, short: Callable[[_Job], None] | None, job: _Job) -> None:
        """`short` gets a job that runs out of memory beside the others."""
        try:
            with self._lane() as lane:
                job.run(lane, beta)
        except RuntimeError as error:
            if short is None or not is_shortage(error):
                raise
            short(job)

    @contextmanager
    def _lane(self) -> Iterator[_Lane]:
        """A free lane, on its stream."""
        lane = self._free.get()
        try:
            try:
                with torch.no_grad(), lane.stream():
                    yield lane
            finally:
                lane.wait()  # for all uses of its buffers
        finally:
            self._free.put(lane)


class _Lane:
    """A stream of the device, and pinned buffers on the host."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bytes_to_host = 0
        self.bytes_to_device = 0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._buffers: dict[str, Tensor] = {}

    @property
    def buffer_bytes(self) -> int:
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values())

    def stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def wait(self) -> None:
        """Waits for the work of the stream."""
        if self._stream is not None:
            self._stream.synchronize()

    def up(self, name: str, array: Array, in_place: bool) -> Tensor:
        """A copy of the flat array on the device. `in_place`: it is pinned."""
        return self._held(name, array, in_place).to(self.device, non_blocking=True, copy=True)

    def into(self, x: Tensor, array: Array, in_place: bool) -> None:
        """Writes the flat array into x, until `wait`."""
        x.copy_(self._held("theta", array, in_place), non_blocking=True)

    def _held(self, name: str, array: Array, in_place: bool) -> Tensor:
        self.bytes_to_device += array.nbytes
        if in_place:
            return torch.from_numpy(array)
        buffer = self._buffer(name, array.size, torch.float32)
        np.copyto(buffer.numpy(), array)
        return buffer

    def down(self, name: str, x: Tensor) -> np.ndarray:
        """The values of x, flat, from `wait` to the next use of the buffer."""
        buffer = self._buffer(name, x.numel(), x.dtype)
        buffer.copy_(x.reshape(-1), non_blocking=True)
        self.bytes_to_host += buffer.nbytes
        return buffer.numpy()

    def onto(self, array: Array, x: Tensor) -> Array:
        """Writes x into a pinned array."""
        torch.from_numpy(array).copy_(x, non_blocking=True)
        self.bytes_to_host += array.nbytes
        return array

    def _buffer(self, name: str, size: int, dtype: torch.dtype) -> Tensor:
        if name not in self._buffers or self._buffers[name].numel() < size:
            self._buffers[name] = torch.empty(size, dtype=dtype, pin_memory=self._stream is not None)
        return self._buffers[name][:size]


@dataclass(frozen=True, slots=True)
class _Job:
    """One part of a tensor.

    kept: where the part's entries go.
    in_place: whether e and θ are pinned.
    local: the trained values of the whole tensor.
    at: the flat elements of the part.
    """

    part: Tiling
    kept: Kept
    e: Array
    in_place: tuple[bool, bool]
    theta: Array
    local: Tensor
    at: slice

    def run(self, lane: _Lane, beta: float) -> None:
        """Leaves this part of e unchanged if it raises."""
        part, first = self.part, self.part.first
        e_in_place, theta_in_place = self.in_place
        delta = lane.up("theta", self.theta, theta_in_place).sub_(self.local.reshape(-1)[self.at])
        # two kernels: the product is rounded before the sum
        x = lane.up("e", self.e, e_in_place).mul_(beta).add_(delta)
        packed = pack(select(tiles(x, part), part.keep), part.n)
        raw = lane.down("index", packed)
        e = lane.onto(self.e, x) if e_in_place else lane.down("e", x)
        lane.wait()
        if not e_in_place:
            np.copyto(self.e, e)
        here = self.kept.index_TK[first : first + part.tiles]
        np.copyto(here, unpack(raw, part))
        at = part.offsets[here] + replace(part, band=0).corners[:, None]
        self.kept.values[first * part.keep : (first + part.tiles) * part.keep] = e[at.reshape(-1)]
