"""The update on the trainer's device: e = β e + δ, and the largest magnitudes of every tile (protocol/codec/topk.py), bit for bit as
peer/state/outer_optimizer.py and `topk.select` do it on the host; and the way of the next round's parameters to the device.

Feedback e and the global state θ are at home on the host. Each is sent to the device part by part, some whole bands of tiles of one
tensor at a time, from where it is, if it could be pinned (peer/training/pinned.py), or through pinned buffers. δ = θ - θ_local is made
there; e comes back, and of what is kept only the indices, packed (`pack`), since the host takes the values from e. Several parts are
under way at a time, one to a lane, so that copies in both directions and the device's work overlap.

Order of magnitudes: a key of 64 bits has the bits of |x| above n - 1 - i for the i-th of a tile's n elements. Keys differ, and
of equal magnitudes the first has the largest key: the k' largest keys are one set, whatever order the device works in.

Packed indices are what crosses to the host beside the feedback, and at most twice the payload. For an entry of a payload has at least
b + 2 bits, b = ceil(log2 N), with `fixed` indices and 3 + r with `rice` (protocol/codec/sparse.py): 12 bits are at most twice that where
b >= 4 or r >= 3, and elsewhere the N bits of a map are.

Shape letters: T tiles, N elements of a tile, K entries of a tile, E entries in all; of a chain's embedding V tokens, D model width, S subspace width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from queue import SimpleQueue

import numpy as np
import torch
from torch import Tensor

from peer.training.device import is_shortage
from peer.training.pinned import pinned
from protocol.codec import topk
from protocol.codec.formats import TILE
from protocol.codec.topk import MARK, Array, Kept, Map, Tiling
from protocol.errors import LocalError
from protocol.planning.memory import LANES, PART

"""PART: elements of a part, where one band has no more. A lane holds about 2 * 4 bytes for each on the host, and 40 on the device."""
_MAGNITUDE = 0x7FFFFFFF
_PLACE = TILE.bit_length() - 1


class WithinSubspace:
    """(A0 - A) U^T [V, D], all on the device: what a chain's embedding moved. Only the rows that are worked on are ever made."""

    def __init__(self, a0_VS: Tensor, a_VS: Tensor, u_DS: Tensor) -> None:
        self.a0_VS, self.a_VS, self.u_DS = a0_VS, a_VS, u_DS
        self.shape = len(a_VS), len(u_DS)

    def rows(self, first: int, last: int) -> Tensor:
        """Those from `first` up to, not including, `last`."""
        return (self.a0_VS[first:last] - self.a_VS[first:last]) @ self.u_DS.T


Moved = tuple[Array | None, Tensor | WithinSubspace]
"""δ of a tensor: θ, on the host, minus the trained values on the device; or, where the first is None, the second itself."""


def tiles(x: Tensor, tiling: Tiling) -> Tensor:
    """The elements [T, N] of the contiguous tensor, or of the bands, that `tiling` cuts."""
    return x.view(tiling.bands, tiling.tr, tiling.across, tiling.tc).transpose(1, 2).reshape(tiling.tiles, tiling.n)


def select(x_TN: Tensor, keep: int) -> Tensor:
    """Indices [T, K] int16, ascending, of every tile's largest magnitudes; of equal ones the first; what is not finite is larger than
    all that is."""
    n = x_TN.shape[1]
    key_TN = (x_TN.view(torch.int32) & _MAGNITUDE).to(torch.int64)
    key_TN <<= _PLACE
    key_TN |= torch.arange(n - 1, -1, -1, device=x_TN.device)
    top_TK = torch.topk(key_TN, keep, dim=1, sorted=False).values
    return (n - 1 - (top_TK & (TILE - 1))).to(torch.int16).sort(dim=1).values


def pack(index_TK: Tensor, n: int) -> Tensor:
    """The indices of tiles of `n` elements as bytes, on their device: nothing where all are kept; a bit for each element where that is
    not more than MARK bits an entry; else the low byte of every index, and then their high four bits, two of them to a byte."""
    T, keep = index_TK.shape
    if keep == n:
        return torch.empty(0, dtype=torch.uint8, device=index_TK.device)
    if _is_map(n, keep):
        element = torch.zeros(T, n, dtype=torch.uint8, device=index_TK.device).scatter_(1, index_TK.long(), 1)
        return _joined(element.view(-1), 1)
    index_E = index_TK.reshape(-1)
    return torch.cat([(index_E & 0xFF).to(torch.uint8), _joined((index_E >> 8).to(torch.uint8), 4)])


def unpack(raw: np.ndarray, part: Tiling) -> np.ndarray:
    """The indices [T, K] that `pack` had of the tiles of `part`."""
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


def _joined(x: Tensor, bits: int) -> Tensor:
    """Numbers of so many bits, 1 or 4, as bytes: the first is the lowest."""
    each = 8 // bits
    columns = torch.nn.functional.pad(x, (0, -len(x) % each)).view(-1, each).unbind(1)
    return functools.reduce(torch.bitwise_or, (column << (bits * i) for i, column in enumerate(columns)))


class DeviceUpdate:
    """Works on `device`, on so many parts at a time as `lanes` and its callers' threads allow, which may come with several shards at
    once. Its buffers stay for the next round: to pin memory takes longer than to use it."""

    def __init__(self, device: torch.device | str, lanes: int = LANES) -> None:
        self._device = torch.device(device)
        self._lanes = [_Lane(self._device) for _ in range(lanes)]
        self._free: SimpleQueue[_Lane] = SimpleQueue()
        for lane in self._lanes:
            self._free.put(lane)

    @property
    def bytes_to_host(self) -> int:
        """That came from the device so far."""
        return sum(lane.bytes_to_host for lane in self._lanes)

    @property
    def bytes_to_device(self) -> int:
        return sum(lane.bytes_to_device for lane in self._lanes)

    @property
    def buffer_bytes(self) -> int:
        """The host's memory that the buffers take."""
        return sum(lane.buffer_bytes for lane in self._lanes)

    def accumulate(
        self, moved: Sequence[Moved], feedback: Sequence[Array], beta: np.float32, k: int, run: Map
    ) -> list[Kept]:
        """e = β e + δ in place, for each of the contiguous arrays e of `feedback`, and its largest magnitudes with `k` of every 4096. Raises LocalError,
        and leaves e as it was, if a value from the device is not finite; ValueError for wrong shapes. Parts for which the device is short
        of memory come last, one after the other."""
        if [e.shape for e in feedback] != [tuple(local.shape) for _, local in moved]:
            raise ValueError("the pseudo-gradient's shapes are not those of the feedback; this is a bug")
        trained = [local.a_VS if isinstance(local, WithinSubspace) else local for _, local in moved]
        ends = torch.stack([end for local in trained for end in torch.aminmax(local.detach())])
        if not bool(torch.isfinite(ends).all()):  # waits for the trainer's work, too
            raise LocalError("the pseudo-gradient is not finite; this round's work is dropped")
        kept, jobs = [], []
        for e, (theta, local) in zip(feedback, moved, strict=True):
            tiling = topk.tiling(e.shape, k)
            index_TK = np.empty((tiling.tiles, tiling.keep), dtype=np.uint16)
            kept.append(Kept(tiling, index_TK, np.empty(tiling.entries, dtype=np.float32)))
            in_place = pinned(e, self._device), theta is not None and pinned(theta, self._device)
            for part in tiling.cut(PART):
                at = slice(part.band * part.tr * part.cols, (part.band * part.tr + part.rows) * part.cols)
                old = None if theta is None else theta.reshape(-1)[at]
                jobs.append(_Job(part, kept[-1], e.reshape(-1)[at], in_place, old, local, at))
        # matrix products stay on this thread: cuBLAS keeps a workspace for each thread and stream
        late = [job for job in jobs if isinstance(job.local, WithinSubspace)]
        at_once = [job for job in jobs if not isinstance(job.local, WithinSubspace)]
        list(run(functools.partial(self._work, float(beta), late.append), at_once))
        for job in late:
            self._work(float(beta), None, job)
        return kept

    def load(self, pairs: Sequence[tuple[Tensor, Array]]) -> None:
        """Writes arrays into parameters of the same shapes; on threads of its own. Returns when it is done."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # what was given to the device before may read them
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
        """`short` gets the job if the device has no memory for it beside the others."""
        try:
            with self._lane() as lane:
                job.run(lane, beta)
        except RuntimeError as error:
            if short is None or not is_shortage(error):
                raise
            short(job)

    @contextmanager
    def _lane(self) -> Iterator[_Lane]:
        """One that is free, and its stream."""
        lane = self._free.get()
        try:
            try:
                with torch.no_grad(), lane.stream():
                    yield lane
            finally:
                lane.wait()  # nothing reads or writes its buffers any more
        finally:
            self._free.put(lane)


class _Lane:
    """A stream of the device, and buffers on the host that the device reads and writes by itself."""

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
        """Until the device has done what it was given."""
        if self._stream is not None:
            self._stream.synchronize()

    def up(self, name: str, array: Array, in_place: bool) -> Tensor:
        """A copy of the flat array on the device. `in_place`: the device can read it where it is."""
        return self._held(name, array, in_place).to(self.device, non_blocking=True, copy=True)

    def into(self, x: Tensor, array: Array, in_place: bool) -> None:
        """Writes the flat array into x, of the same size; done once `wait` has returned."""
        x.copy_(self._held("theta", array, in_place), non_blocking=True)

    def _held(self, name: str, array: Array, in_place: bool) -> Tensor:
        self.bytes_to_device += array.nbytes
        if in_place:
            return torch.from_numpy(array)
        buffer = self._buffer(name, array.size, torch.float32)
        np.copyto(buffer.numpy(), array)
        return buffer

    def down(self, name: str, x: Tensor) -> np.ndarray:
        """The values of x, flat, once `wait` has returned, and until the next use of the buffer."""
        buffer = self._buffer(name, x.numel(), x.dtype)
        buffer.copy_(x.reshape(-1), non_blocking=True)
        self.bytes_to_host += buffer.nbytes
        return buffer.numpy()

    def onto(self, array: Array, x: Tensor) -> Array:
        """The same, written into an array that the device can write where it is."""
        torch.from_numpy(array).copy_(x, non_blocking=True)
        self.bytes_to_host += array.nbytes
        return array

    def _buffer(self, name: str, size: int, dtype: torch.dtype) -> Tensor:
        if name not in self._buffers or self._buffers[name].numel() < size:
            self._buffers[name] = torch.empty(size, dtype=dtype, pin_memory=self._stream is not None)
        return self._buffers[name][:size]


@dataclass(frozen=True, slots=True)
class _Job:
    """One part of a tensor, the flat elements `at`: those of e and θ, all trained values, and where the part's entries go. `in_place`: the device can
    read and write e, and read θ, where they are."""

    part: Tiling
    kept: Kept
    e: Array
    in_place: tuple[bool, bool]
    theta: Array | None
    local: Tensor | WithinSubspace
    at: slice

    def run(self, lane: _Lane, beta: float) -> None:
        """Leaves this part of e as it was if it raises."""
        part, first = self.part, self.part.first
        if isinstance(self.local, WithinSubspace):
            row = part.band * part.tr
            local = self.local.rows(row, row + part.rows).reshape(-1)
        else:
            local = self.local.reshape(-1)[self.at]
        e_in_place, theta_in_place = self.in_place
        delta = local if self.theta is None else lane.up("theta", self.theta, theta_in_place).sub_(local)
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
