"""Announcements of peers, queries for them, and the reachability check (docs/adr/0023-dial-back.md).

Every announcement is sealed by its peer, so a node that passes it on can withhold it, but cannot change it.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Annotated

from protocol.wire import bounds
from protocol.wire.schema import MAX_ITEMS, AtMost, Within, row

VERSION = 1
MAX_SPEED = 10**18
"""Operations a second: more than any one machine."""
AXES = 3
"""Of a place (protocol/planning/coordinates.py)."""
NODE_DEVICE = "bootstrap"
"""What a bootstrap node gives for its device."""
REACHABLE = ("", "direct", "mapped", "private")
"""Reachability: unknown, at an own address, at a router's port, or only outbound and by hole punching."""
MOST_APART = 16
"""Peers of whom one says that it cannot reach them."""
FARTHEST = 10_000.0
"""Milliseconds along an axis that a place may have: no two points of the Earth are so far apart."""


@row
@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """Running means over what a stage received at one boundary (peer/chain/neighbours.py)."""

    rms: bounds.Magnitude
    """Root mean square of the values."""
    largest: bounds.Magnitude
    """Largest magnitude."""
    sampled: bounds.Count
    """Frames whose root mean square was computed."""
    frames: bounds.Count
    """Frames that were accepted."""
    refused: bounds.Count
    """Frames that were refused."""


@row
@dataclass(frozen=True, slots=True, kw_only=True)
class ChainReport:
    """The time and bytes of a stage's inner step, by part (peer/chain/pipeline.py)."""

    seconds: bounds.Seconds
    """The inner step."""
    busy_s: bounds.Seconds
    """Seconds of computing."""
    wait_forward_s: bounds.Seconds
    """Seconds of waiting for activations."""
    wait_backward_s: bounds.Seconds
    """Seconds of waiting for gradients."""
    forward_link_s: bounds.Seconds
    """Seconds in which activations from the previous stage came through the link."""
    backward_link_s: bounds.Seconds
    """Seconds in which gradients from the next stage came through the link."""
    forward_bytes: bounds.Size
    """Bytes sent to the next stage, headers included."""
    backward_bytes: bounds.Size
    """Bytes sent to the previous stage, headers included."""
    depth: bounds.Count
    """Micro-batches that the chain had in work at once."""
    queued: bounds.Count
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
    """A peer's description of itself."""

    run: bounds.RunId
    peer: bounds.PeerId
    version: bounds.Count = VERSION
    """The version of Potluck's protocol that it speaks."""
    addresses: Annotated[tuple[bounds.Address, ...], AtMost(64)] = ()
    """The multiaddresses that it listens on."""
    memory_bytes: bounds.Memory = 0
    """Memory for training that Potluck may use there, above an idle process."""
    host_bytes: bounds.Memory | None = None
    """The same of the host beside a GPU; 0 where the GPU uses the host's memory, null of a processor."""
    up_bps: bounds.Rate = 0
    """Bits per second that it can send."""
    down_bps: bounds.Rate = 0
    """Bits per second that it can receive."""
    speed_flops: Annotated[int, Within(0, MAX_SPEED)] = 0
    """Floating-point operations a second that its training reached (protocol/planning/partition.py); 0 while that is
    unknown."""
    device: bounds.Word = "cpu"
    """`cpu`, `cuda` or `mps`; `2 x cuda` where two of them are one peer, each with `memory_bytes`; `bootstrap` for a
    bootstrap node."""
    serial: bounds.Count = 0
    """Grows with each of its announcements: Unix time in milliseconds."""
    phase: bounds.Word = "starting"
    """Its present activity, in its own word."""
    round: bounds.Round = 0
    step: bounds.Count = 0
    """Its newest inner step in that round."""
    loss: bounds.Loss | None = None
    """Nats per token of that step."""
    bytes_sent: bounds.Size = 0
    """All bytes that it has sent since it was started, as of its last whole round."""
    bytes_received: bounds.Size = 0
    """All bytes that it has received since it was started, as of its last whole round."""
    bytes_written: bounds.Size = 0
    """Bytes written to disk since its start, as of its last whole round, except for state in mapped files."""
    chain: ChainReport | None = None
    """Its newest inner step in a chain; null outside of one."""
    coordinates: Annotated[tuple[bounds.Offset, ...], AtMost(AXES)] = ()
    """Its place (protocol/planning/coordinates.py); empty while that is unknown."""
    reachable: bounds.Word = ""
    """How others reach it: `direct`, `mapped` by its router, `private` if that lets nobody in; empty while it is not
    known."""
    apart: Annotated[tuple[bounds.PeerId, ...], AtMost(MOST_APART)] = ()
    """Peers that it could not reach as neighbours in a chain, not even through relays."""
    refused: bounds.Count = 0
    """Times that it has refused a peer that used too much of it (peer/net/guests.py)."""
    name: bounds.Name = ""
    """Its owner's name for it; others may have the same name, and nothing is decided by it."""

    def __post_init__(self) -> None:
        if not is_place(self.coordinates) and self.coordinates:
            raise ValueError(f"coordinates must be {AXES} numbers of at most {FARTHEST:g}, or none")
        if not 0 <= self.speed_flops <= MAX_SPEED:
            raise ValueError(f"speed_flops must be in 0..{MAX_SPEED}")
        if self.reachable not in REACHABLE:
            raise ValueError(f"reachable must be one of {REACHABLE}")


def is_place(coordinates: tuple[float, ...]) -> bool:
    """Returns whether these are coordinates that a peer can have, in ms."""
    return len(coordinates) == AXES and all(abs(x) <= FARTHEST for x in coordinates)


MOST_PORTS = 4
"""That one request names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DialMe:
    """Please try at which of these TCP ports of the host that I come from a libp2p host answers."""

    ports: Annotated[tuple[bounds.Port, ...], AtMost(MOST_PORTS)]

    def __post_init__(self) -> None:
        if not self.ports:
            raise ValueError("ports must have an entry")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialled:
    """The answer. host: the IP address that you come from, or empty; ports: those that answered, yours included."""

    host: bounds.Word
    ports: Annotated[tuple[bounds.Port, ...], AtMost(MOST_PORTS + 1)] = ()

    def __post_init__(self) -> None:
        if self.host:
            ipaddress.ip_address(self.host[:64])


MOST_LOOKED_UP = 64
"""Announcements of one answer to a Lookup."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """Please send the announcements of `peers`, and of `sample` others by chance, as far as you know them."""

    peers: Annotated[tuple[bounds.PeerId, ...], AtMost(4 * MOST_LOOKED_UP)] = ()
    sample: bounds.Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RosterRequest:
    """Please send what is new after `position`, which an earlier answer gave; -1: everything."""

    position: bounds.Since


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """The answer to both. gone: peers that left since `position`; more: ask again; anew: earlier answers are void."""

    announcements: Annotated[tuple[bounds.Sealed, ...], AtMost(MAX_ITEMS)]
    gone: Annotated[tuple[bounds.PeerId, ...], AtMost(MAX_ITEMS)] = ()
    position: bounds.Since = -1
    more: bool = False
    anew: bool = False


DirectoryMessage = Announcement | Lookup | RosterRequest | Roster | DialMe | Dialled
