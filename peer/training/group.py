"""The group of the processes that train one replica on several devices of one machine: how they find each other, and add up.

torch.distributed carries it out: gloo between CPUs, NCCL between GPUs. A sum has the same bits for all members, and the same on every run:
each element is added up in one order, which follows from the number of members and the tensor's size.

*Nobody else takes part.* The members find each other through a file in a folder that only their user may read. They talk over this machine's
loopback interface: what gloo and NCCL listen on cannot be reached from other machines. Other users of this machine can connect to it. So,
before anything is exchanged, every member shows a secret that it was given by the peer's process; a group with a stranger in it is none.

*Nothing waits for ever.* An exchange that takes too long raises a RuntimeError, as does the end of a member.

A process is in one group at most.
"""

from __future__ import annotations

import functools
import os
import secrets
import socket
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from peer.training.helper_messages import Seat

_FILE = "members"


def new_secrets(size: int) -> tuple[int, ...]:
    """One for each member, which nobody guesses."""
    return tuple(secrets.randbits(63) for _ in range(size))


def join(seat: Seat, device: torch.device) -> None:
    """Takes this place, and returns when all members have taken theirs. Raises RuntimeError where one of them does not, or is a stranger."""
    leave()
    loopback, cuda = _loopback(), device.type == "cuda"
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = loopback
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"  # what takes too long raises, instead of ending the process
    limit = timedelta(seconds=seat.seconds)
    store = dist.FileStore(str(Path(seat.folder) / _FILE), seat.size)
    store.set_timeout(limit)
    dist.init_process_group(
        "nccl" if cuda else "gloo", store=store, rank=seat.rank, world_size=seat.size, timeout=limit
    )
    shown = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(seat.size)]
    dist.all_gather(shown, torch.tensor([seat.secrets[seat.rank]], device=device))
    if tuple(int(one) for one in shown) != seat.secrets:
        leave()
        raise RuntimeError("a stranger has answered in place of a helper")


def leave() -> None:
    """Out of the group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def add_up(tensors: Iterable[Tensor]) -> None:
    """Each becomes the sum of what all members have in its place. Raises RuntimeError; then they are worth nothing."""
    for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
        work.wait()


def give(tensors: Iterable[Tensor]) -> None:
    """Each becomes what the first member has in its place. Raises RuntimeError; then they are worth nothing."""
    for work in [dist.broadcast(tensor, 0, async_op=True) for tensor in tensors]:
        work.wait()


@functools.cache
def _loopback() -> str:
    """The name of the interface that only this machine reaches. Raises RuntimeError."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.address == "::1" or (a.family == socket.AF_INET and a.address.startswith("127.")) for a in addresses):
            return name
    raise RuntimeError("this machine has no loopback interface")
