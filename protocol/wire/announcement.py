"""What a peer says of itself: to its bootstrap nodes, and some peers in the DHT."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from protocol.wire.bounds import (
    Address,
    Count,
    Loss,
    Magnitude,
    Memory,
    Name,
    Offset,
    PeerId,
    Rate,
    Round,
    RunId,
    Seconds,
    Size,
    Word,
)
from protocol.wire.schema import AtMost, Within, row

VERSION = 1
MAX_SPEED = 10**18
"""Operations a second: more than any one machine."""
AXES = 3
"""Of a place (protocol/planning/coordinates.py)."""
NODE_DEVICE = "bootstrap"
"""What a bootstrap node gives for its device."""
REACHABLE = ("", "direct", "mapped", "private")
"""How others reach a peer: it is not known; at an address of its own; at one of a router in front of it; they cannot connect to it,
unless it connects to them or a hole can be made in its router."""
MOST_APART = 16
"""Peers of whom one says that it cannot reach them."""
FARTHEST = 10_000.0
"""Milliseconds along an axis that a place may have: no two points of the Earth are so far apart."""


@row
@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """Running means over what a stage received at one boundary (peer/chain/neighbours.py)."""

    rms: Magnitude
    """Root mean square of the values."""
    largest: Magnitude
    """Largest magnitude."""
    sampled: Count
    """Frames whose root mean square was computed."""
    frames: Count
    """Frames that were accepted."""
    refused: Count
    """Frames that were refused."""


@row
@dataclass(frozen=True, slots=True, kw_only=True)
class ChainReport:
    """Where the time of a stage's inner step went, and what it sent (peer/chain/pipeline.py)."""

    seconds: Seconds
    """The inner step."""
    busy_s: Seconds
    """Seconds of computing."""
    wait_forward_s: Seconds
    """Seconds of waiting for activations."""
    wait_backward_s: Seconds
    """Seconds of waiting for gradients."""
    forward_link_s: Seconds
    """Seconds in which activations from the previous stage came through the link."""
    backward_link_s: Seconds
    """Seconds in which gradients from the next stage came through the link."""
    forward_bytes: Size
    """Bytes sent to the next stage, headers included."""
    backward_bytes: Size
    """Bytes sent to the previous stage, headers included."""
    depth: Count
    """Micro-batches that the chain had in work at once."""
    queued: Count
    """The most frames that waited for this stage."""
    activations: Means | None = None
    """Of the activations that came from the previous stage; null for the first stage."""
    gradients: Means | None = None
    """Of the gradients that came from the next stage; null for the last stage."""

    def share(self, seconds: float) -> float:
        """Seconds of the step as a share of it, 0 to 1."""
        return min(1.0, max(0.0, seconds / max(self.seconds, 1e-3)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """What a peer says of itself."""

    run: RunId
    """The run's id."""
    peer: PeerId
    """Its peer id."""
    version: Count = VERSION
    """The version of Potluck's protocol that it speaks."""
    addresses: Annotated[tuple[Address, ...], AtMost(64)] = ()
    """The multiaddresses that it listens on."""
    memory_bytes: Memory = 0
    """Memory for training that Potluck may use there, above an idle process."""
    host_bytes: Memory | None = None
    """The same of the host beside a GPU; 0 where the GPU uses the host's memory, null of a processor."""
    up_bps: Rate = 0
    """Bits per second that it can send."""
    down_bps: Rate = 0
    """Bits per second that it can receive."""
    speed_flops: Annotated[int, Within(0, MAX_SPEED)] = 0
    """Floating-point operations a second that its training reached (protocol/planning/speed.py); 0 while that is unknown."""
    device: Word = "cpu"
    """`cpu`, `cuda` or `mps`; `2 x cuda` where two of them are one peer; `bootstrap` for a bootstrap node."""
    serial: Count = 0
    """Grows with each of its announcements: Unix time in milliseconds."""
    phase: Word = "starting"
    """Its present activity, in its own word."""
    round: Round = 0
    """Its round."""
    step: Count = 0
    """Its newest inner step in that round."""
    loss: Loss | None = None
    """Nats per token of that step."""
    bytes_sent: Size = 0
    """All bytes that it has sent since it was started, as of its last whole round."""
    bytes_received: Size = 0
    """All bytes that it has received since it was started, as of its last whole round."""
    bytes_written: Size = 0
    """All bytes that it has written to disk since it was started, as of its last whole round."""
    chain: ChainReport | None = None
    """Its newest inner step in a chain; null outside of one."""
    coordinates: Annotated[tuple[Offset, ...], AtMost(AXES)] = ()
    """Its place (protocol/planning/coordinates.py); empty while that is unknown."""
    reachable: Word = ""
    """How others reach it: `direct`, `mapped` by its router, `private` if that lets nobody in; empty while it is not known."""
    apart: Annotated[tuple[PeerId, ...], AtMost(MOST_APART)] = ()
    """Peers that it could not reach as neighbours in a chain, not even through relays."""
    refused: Count = 0
    """Times that it has refused a peer that used too much of it (peer/net/guests.py)."""
    name: Name = ""
    """Its owner's name for it; others may have the same name, and nothing is decided by it."""

    def __post_init__(self) -> None:
        if not is_place(self.coordinates) and self.coordinates:
            raise ValueError(f"coordinates must be {AXES} numbers of at most {FARTHEST:g}, or none")
        if not 0 <= self.speed_flops <= MAX_SPEED:
            raise ValueError(f"speed_flops must be in 0..{MAX_SPEED}")
        if self.reachable not in REACHABLE:
            raise ValueError(f"reachable must be one of {REACHABLE}")
        if len(self.apart) > MOST_APART:
            raise ValueError(f"apart must name at most {MOST_APART} peers")


def is_place(coordinates: tuple[float, ...]) -> bool:
    """Whether these are coordinates that a peer can have, in ms."""
    return len(coordinates) == AXES and all(abs(x) <= FARTHEST for x in coordinates)
