"""The processes that train one replica on several devices of a machine: their messages, and their group.

The peer's process and a helper talk over a pair of connected sockets without a name, or to another machine over a
connection on which both have shown a secret (peer/training/site.py). Messages are msgpack of plain values, arrays of
token ids, and the dataclasses of `_KINDS`. An order is the name of a helper's method (peer/training/helper.py) and its
arguments.

Members of the group add up gradients by torch.distributed: gloo between CPUs, NCCL between GPUs; a sum has the same
bits for all members and in every run. The members find each other through a file in a private folder and talk over the
loopback interface, or those of several machines through a store at an address of rank 0; every member first shows a
secret from the peer's process. An exchange that takes too long raises a
RuntimeError, as does the end of a member.
"""

from __future__ import annotations

import functools
import itertools
import os
import secrets
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from peer.training.optimizer import Pace
from protocol.run.layout import ModelSpec, RopeScaling
from protocol.run.manifest import TrainSpec

_SIZE = struct.Struct(">Q")
_FILE = "members"

# --- messages


@dataclass(frozen=True, slots=True)
class Join:
    """A group to join, in place of the former one.

    folder: where the members find each other; only their user may read it.
    secrets: by rank, what each member shows to the others.
    seconds: for one exchange.
    port: of the first member's machine, where members on several machines find each other.
    """

    folder: str
    rank: int
    size: int
    secrets: tuple[int, ...]
    seconds: float
    port: int = 0


@dataclass(frozen=True, slots=True)
class Computed:
    """Results of the micro-batches since the last step.

    losses: mean of each in order, nats per token.
    piece_rows: of the StageTrainer.
    norms: of the gradients that only this process has, with their shards.
    """

    turn: int
    losses: tuple[float, ...]
    piece_rows: int = 0
    norms: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Done:
    """The answer of a helper that has begun or joined (number 0), or has done all orders before an `ask`."""

    number: int = 0


@dataclass(frozen=True, slots=True)
class Failed:
    """An order failed; the helper ignores all orders until the next `join`.

    together: in an exchange with other members, any of whom may be the cause.
    """

    why: str
    together: bool = False


Answer = Done | Computed | Failed


_KINDS = {kind.__name__: kind for kind in (Join, Computed, Done, Failed, Pace, ModelSpec, RopeScaling, TrainSpec)}
_ARRAY, _KIND = 0, 1
MOST_BYTES = 1 << 30
"""Of a message; the longest has the token ids of a micro-batch."""


def send(way: socket.socket, message: object) -> None:
    """Raises OSError where the other process has ended, or does not read for as long as the socket's timeout."""
    body = msgpack.packb(message, default=_plain)
    way.sendall(_SIZE.pack(len(body)) + body)


def receive(way: socket.socket) -> Any:
    """The next message; lists and tuples are tuples. Raises EOFError where the other process has ended, or sends what
    is no message; OSError after the socket's timeout."""
    (size,) = _SIZE.unpack(_exactly(way, _SIZE.size))
    if size > MOST_BYTES:
        raise EOFError
    try:
        return msgpack.unpackb(_exactly(way, size), use_list=False, ext_hook=_built, max_ext_len=MOST_BYTES)
    except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
        raise EOFError from error


def _plain(value: object) -> msgpack.ExtType:
    if isinstance(value, np.ndarray):
        return msgpack.ExtType(_ARRAY, msgpack.packb((value.shape, value.astype("<i8").tobytes())))
    if type(value).__name__ not in _KINDS:
        raise TypeError(f"{type(value).__name__} is in no message; this is a bug")
    named: Any = value
    content = (type(value).__name__, *(getattr(named, field.name) for field in fields(named)))
    return msgpack.ExtType(_KIND, msgpack.packb(content, default=_plain))


def _built(code: int, data: bytes) -> object:
    found = msgpack.unpackb(data, use_list=False, ext_hook=_built, max_ext_len=MOST_BYTES)
    if code == _ARRAY:
        shape, raw = found
        return np.frombuffer(raw, "<i8").reshape(shape).copy()
    name, *values = found
    kind: Any = _KINDS[name]
    return kind(**dict(zip((field.name for field in fields(kind)), values, strict=True)))


def _exactly(way: socket.socket, size: int) -> bytearray:
    found, at = bytearray(size), 0
    while at < size:
        read = way.recv_into(memoryview(found)[at:])
        if not read:
            raise EOFError
        at += read
    return found


# --- the group


def new_secrets(size: int) -> tuple[int, ...]:
    """A random secret for each member."""
    return tuple(secrets.randbits(63) for _ in range(size))


def listen(host: str | None) -> tuple[socket.socket | None, int]:
    """A free port at this address only, for the members of a group, and its number; None, 0 without an address. Raises
    OSError."""
    if host is None:
        return None, 0
    found = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    return found, int(found.getsockname()[1])


def join_group(
    join: Join, device: torch.device, ends: tuple[str, str] | None = None, listening: socket.socket | None = None
) -> None:
    """Returns when all members have joined. Raises RuntimeError where one does not, or is a stranger.

    ends: addresses of this machine, and of the first member's; None: all are on one machine.
    listening: the first member's, of `listen`.
    """
    leave_group()
    cuda, interface = device.type == "cuda", _interface("127.0.0.1" if ends is None else ends[0])
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = interface
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"  # what takes too long raises, instead of ending the process
    limit = timedelta(seconds=join.seconds)
    store: dist.Store
    if ends is None:
        store = dist.FileStore(str(Path(join.folder) / _FILE), join.size)
    else:
        first = {} if listening is None else {"master_listen_fd": listening.detach()}
        store = dist.TCPStore(
            ends[1], join.port, join.size, bool(first), timeout=limit, wait_for_workers=False, **first
        )
    store.set_timeout(limit)
    dist.init_process_group(
        "nccl" if cuda else "gloo", store=store, rank=join.rank, world_size=join.size, timeout=limit
    )
    shown = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(join.size)]
    dist.all_gather(shown, torch.tensor([join.secrets[join.rank]], device=device))
    if tuple(int(one) for one in shown) != join.secrets:
        leave_group()
        raise RuntimeError("a stranger has answered in place of a helper")


def leave_group() -> None:
    """Leaves the group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def add_up(tensors: Iterable[Tensor]) -> None:
    """Each becomes the sum over all members. Raises RuntimeError; their values are undefined then."""
    for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
        work.wait()


def add_up_at(ranks: Iterable[int], tensors: Iterable[Tensor]) -> None:
    """As `add_up`, for the member of its rank alone; the others' values are undefined."""
    for work in [dist.reduce(tensor, rank, async_op=True) for rank, tensor in zip(ranks, tensors, strict=True)]:
        work.wait()


def broadcast(tensors: Iterable[Tensor], ranks: Iterable[int] | None = None) -> None:
    """Each becomes the value of the member of its rank; None: of the first one. Raises RuntimeError; their values are
    undefined then."""
    pairs = zip(tensors, itertools.repeat(0) if ranks is None else ranks, strict=ranks is not None)
    for work in [dist.broadcast(tensor, rank, async_op=True) for tensor, rank in pairs]:
        work.wait()


def give(tensor: Tensor, rank: int) -> None:
    """Sends a tensor to another member, which takes it. Raises RuntimeError."""
    dist.send(tensor, rank)


def take(tensor: Tensor, rank: int) -> Tensor:
    """Receives into the tensor what another member gives. Raises RuntimeError."""
    dist.recv(tensor, rank)
    return tensor


@functools.cache
def _interface(host: str) -> str:
    """The name of the interface with this address. Raises RuntimeError."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(known.address.partition("%")[0] == host for known in addresses):
            return name
    raise RuntimeError(f"this machine has no interface with the address {host}")
