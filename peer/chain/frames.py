"""The frames between two stages of a chain: a header and a body.

The header (`Head`) is packed big-endian. Kinds:

    FORWARD, BACKWARD   a micro-batch's activations to the next stage, or its gradients to the previous one
    NORM, TOTAL         the end of an inner step (peer/chain/grad_norm.py)
    RESUME, DONE        where a repaired chain goes on, and the end of a round (the same)
    PING, ECHO          measure the link (peer/chain/link.py)
    BEAT                a sign of life (peer/chain/link.py)
    ABORT               a goodbye; the body names the member to blame, and is empty if that is the sender

Nothing that a neighbour sends is trusted: any frame but the expected one is refused in the neighbour's name.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Awaitable
from typing import Any, NamedTuple

from protocol.errors import RemoteError

FORWARD, BACKWARD, NORM, TOTAL, PING, ECHO, ABORT, BEAT, RESUME, DONE = range(1, 11)
NAME_BYTES = 128
_HEAD = struct.Struct(">BBIIIIIIId")
HEAD_BYTES = _HEAD.size


class NeighbourLost(RemoteError):
    """A member left, fell silent or sent impossible content.

    peer: the member to blame.
    reason: what it did.
    reported: whether it was reported already.
    """

    reported = False

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(peer, f"chain member {peer}: {reason}; it needs a spare in its place")
        self.reason = reason


class Refused(NeighbourLost):
    """A member sent another frame than the expected one, or one with impossible content."""


class Head(NamedTuple):
    """A frame's header; fields that a kind does not need are 0.

    code: the number format of the values.
    depth: micro-batches that may be under way.
    step: the inner step, counted over the run.
    micro: the micro-batch, from 0.
    rows, length, width: the tensor's shape.
    check: CRC-32 of the micro-batch's token ids; in a PING the last round trip in microseconds.
    stamp: seconds, by the sender's clock.
    """

    kind: int
    code: int = 0
    depth: int = 0
    step: int = 0
    micro: int = 0
    rows: int = 0
    length: int = 0
    width: int = 0
    check: int = 0
    stamp: float = 0.0

    def pack(self) -> bytes:
        """The header's `HEAD_BYTES` bytes."""
        return _HEAD.pack(*self)

    @classmethod
    def unpack(cls, frame: bytes | memoryview) -> Head:
        """The header at the beginning of a frame that is long enough."""
        return cls(*_HEAD.unpack_from(frame))


class Frame(NamedTuple):
    """A received frame. `value`: the decoded body of a FORWARD or BACKWARD frame."""

    head: Head
    body: memoryview
    value: Awaitable[Any] | None


def parse(remote: str, frame: memoryview) -> tuple[Head, memoryview]:
    """The header and the body of a frame. Raises NeighbourLost if it is too short, or a goodbye."""
    if len(frame) < HEAD_BYTES:
        raise NeighbourLost(remote, f"sent a frame of {len(frame)} bytes")
    head, body = Head.unpack(frame), frame[HEAD_BYTES:]
    if head.kind == ABORT:
        name = bytes(body[:NAME_BYTES]).decode("ascii", "replace")
        if name and name.isalnum():
            raise NeighbourLost(name, f"left the chain, says {remote}")
        raise NeighbourLost(remote, "left the chain")
    if not math.isfinite(head.stamp):
        raise NeighbourLost(remote, "sent an impossible time")
    return head, body


def compare(remote: str, head: Head, body: memoryview, expected: Head, body_bytes: int | None) -> None:
    """Raises Refused for another frame than the expected one. Depth, check and stamp may have any value."""
    known = head._replace(depth=expected.depth, check=expected.check, stamp=expected.stamp)
    if known != expected or (body_bytes is not None and len(body) != body_bytes):
        raise Refused(remote, f"sent {head} with {len(body)} bytes, not {expected} with {body_bytes}")
