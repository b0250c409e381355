"""What the process of a peer and its helpers, one process for each further device, tell each other, and how.

They talk over a pair of connected sockets without a name: nobody else can open it, and its end shows that the other process has ended. So
what comes is believed, and may be pickled.
"""

from __future__ import annotations

import pickle
import socket
import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from peer.training.schedule import Pace
from protocol.run.layout import ModelSpec
from protocol.run.manifest import TrainSpec

_SIZE = struct.Struct(">Q")


@dataclass(frozen=True, slots=True)
class Begin:
    """The first one: what a helper is for. It answers Done."""

    spec: ModelSpec
    train: TrainSpec
    device: str
    threads: int


@dataclass(frozen=True, slots=True)
class Seat:
    """A place in a group of processes (peer/training/group.py). `folder`: where they find each other, which only their user may read;
    `secrets`: by rank, what each of them shows to the others; `seconds`: that one exchange may take."""

    folder: str
    rank: int
    size: int
    secrets: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Join:
    """Be a member of this group, and of no other one. The answer is Done."""

    seat: Seat


@dataclass(frozen=True, slots=True)
class Take:
    """The group's first member gives its parameters now, and the arrays of its optimizer's state with these names and shapes; None: the
    helper's own state is the same. A round goes on, or begins, at this pace."""

    pace: Pace
    state: tuple[tuple[str, tuple[int, ...]], ...] | None


@dataclass(frozen=True, slots=True)
class Compute:
    """One micro-batch of an inner step, forward and backward; ids [B, L+1]."""

    turn: int
    micro: int
    ids: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Tell:
    """Answer with what came of the micro-batches: Computed."""

    turn: int


@dataclass(frozen=True, slots=True)
class Computed:
    """The mean loss, nats per token, of each micro-batch that was asked for, in order; and `pieces` of a StageTrainer."""

    turn: int
    losses: tuple[float, ...]
    pieces: int


@dataclass(frozen=True, slots=True)
class AddUp:
    """Add up the gradients of all members of the group now."""


@dataclass(frozen=True, slots=True)
class Step:
    """Clip by this norm and take this inner step."""

    step: int
    norm: float


@dataclass(frozen=True, slots=True)
class Reset:
    """Forget the inner step that was begun."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Answer Done with this number, to show that all before it is done."""

    number: int


@dataclass(frozen=True, slots=True)
class Done:
    """What was asked for is done; `number`: of an Ask, else 0."""

    number: int = 0


@dataclass(frozen=True, slots=True)
class Failed:
    """The helper could not do something; it leaves everything undone until it is given a place in another group. `together`: that something
    was an exchange with the others, any of whom may be the cause."""

    why: str
    together: bool = False


Order = Begin | Join | Take | Compute | Tell | AddUp | Step | Reset | Ask
Answer = Done | Computed | Failed


def send(way: socket.socket, message: Order | Answer) -> None:
    """Raises OSError where the other process has ended, or does not read for as long as the socket's timeout."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    way.sendall(_SIZE.pack(len(body)) + body)


def receive(way: socket.socket) -> object:
    """The next message. Raises EOFError where the other process has ended, OSError where nothing comes for as long as the timeout."""
    (size,) = _SIZE.unpack(_exactly(way, _SIZE.size))
    return pickle.loads(_exactly(way, size))


def _exactly(way: socket.socket, size: int) -> bytearray:
    found, at = bytearray(size), 0
    while at < size:
        read = way.recv_into(memoryview(found)[at:])
        if not read:
            raise EOFError
        at += read
    return found
