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
    Milliseconds,
    Name,
    Offset,
    PeerId,
    Rate,
    Round,
    RunId,
    Size,
    Word,
)
from protocol.wire.schema import AtMost, Within

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainReport:
    """A chain member's last inner step. `times_ms`: of the step, computing, waiting for activations, for gradients, and those
    of receiving activations and gradients over its links; `counts`: bytes sent forward and backward, depth, most frames that
    waited. `activations`, `gradients`: running means of rms and largest magnitude and the refused frames, of what came
    from the previous and from the next stage; empty where there is none. What makes them: peer/chain/pipeline.py, peer/chain/activation_stats.py.
    """

    times_ms: Annotated[tuple[Milliseconds, ...], AtMost(6)]
    counts: Annotated[tuple[Size, ...], AtMost(4)]
    activations: Annotated[tuple[Magnitude, ...], AtMost(3)] = ()
    gradients: Annotated[tuple[Magnitude, ...], AtMost(3)] = ()

    def __post_init__(self) -> None:
        if (len(self.times_ms), len(self.counts)) != (6, 4):
            raise ValueError("times_ms must have 6 entries and counts 4")
        if not {len(self.activations), len(self.gradients)} <= {0, 3}:
            raise ValueError("activations and gradients must have 3 entries each, or none")
        if min(*self.times_ms, *self.counts, *self.activations, *self.gradients) < 0:
            raise ValueError("no entry may be negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """What a peer says of itself. `memory_bytes` is what Potluck may use above an idle process, of what trains, `host_bytes` that of
    the host beside a GPU, 0 where the GPU uses the host's memory, None of a processor; `speed_flops` the
    floating-point operations a second that its training reached (protocol/planning/speed.py), 0 while that is unknown;
    `bytes_sent`, `bytes_received`, `bytes_written`: over the network and to disk, since it was started; `chain`: of a
    member of a chain. `coordinates`: its place (protocol/planning/coordinates.py), empty while that is unknown. `reachable`: one of
    REACHABLE. `apart`: peers that it could not reach as neighbours in a chain, not even through
    relays. `refused`: how often it has refused somebody who used too much of it (peer/net/guests.py). `name`: what its owner calls it; it
    decides nothing, and anybody may take it."""

    run: RunId
    peer: PeerId
    version: Count = VERSION
    addresses: Annotated[tuple[Address, ...], AtMost(64)] = ()
    memory_bytes: Memory = 0
    host_bytes: Memory | None = None
    up_bps: Rate = 0
    down_bps: Rate = 0
    speed_flops: Annotated[int, Within(0, MAX_SPEED)] = 0
    device: Word = "cpu"
    serial: Count = 0
    phase: Word = "starting"
    round: Round = 0
    step: Count = 0
    loss: Loss | None = None
    bytes_sent: Size = 0
    bytes_received: Size = 0
    bytes_written: Size = 0
    chain: ChainReport | None = None
    coordinates: Annotated[tuple[Offset, ...], AtMost(AXES)] = ()
    reachable: Word = ""
    apart: Annotated[tuple[PeerId, ...], AtMost(MOST_APART)] = ()
    refused: Count = 0
    name: Name = ""

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
