"""What a peer and a bootstrap node tell each other in a session. Units are in the names: bytes, seconds."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.wire.commit import Part, Share
from protocol.wire.schema import Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A stage's share of its replica's contribution to `round`."""

    round: int
    replica: int
    parts: tuple[Part, ...]
    tokens: int
    steps: int
    loss: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """A node has all payloads of these offers to `round`, and their lists (protocol/rounds/part_lists.py), and they are valid: others may
    fetch them at once."""

    round: int
    shares: tuple[Share, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdraw:
    """The sender cannot finish `round`; its replica sits out."""

    round: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainFailure:
    """The sender's chain for `round` has lost `peer`. The sender keeps its work and waits for a ChainReconfig.

    `generation` is the number of times that the chain of this replica was reconfigured in the round.
    """

    round: int
    replica: int
    generation: int
    peer: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainReconfig:
    """The members of a replica's chain from now on, under a new generation (protocol/rounds/chain_repair.py).

    Without `peers` the chain's round is over. `steps` > 0: this many inner steps are done and no more are needed; the
    members offer them. A member sends the message back when it follows it.
    """

    round: int
    replica: int
    generation: int
    peers: tuple[str, ...]
    steps: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeUp:
    """The time to train `round` is over and others have offered: the receiver offers what it has done."""

    round: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Attest:
    """The digests of the sender's shards after `round` was applied."""

    round: int
    digests: dict[str, Digest]


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """A sign of life."""

    phase: str
    round: int
    step: int = 0
    loss: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Opens a session with a bootstrap node."""

    run: str
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Announced:
    """The sender's newest announcement, sealed (protocol/wire/sealed.py), so that others believe it too."""

    sealed: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRequest:
    """Please send the commits after round `after`."""

    after: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The run is over and everybody's state was compared."""

    round: int
