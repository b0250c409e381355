"""What a peer and a bootstrap node tell each other in a session. Units are in the names: bytes, seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from protocol.wire import bounds
from protocol.wire.commit import Part, Share
from protocol.wire.decree import Joined
from protocol.wire.schema import AtMost, Digest

MAX_TOLD = 4096
"""Shares of one Offered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A stage's share of its replica's contribution to `round`."""

    round: bounds.Round
    replica: bounds.Count
    parts: Annotated[tuple[Part, ...], AtMost(bounds.MAX_SHARDS)]
    tokens: bounds.Count
    steps: bounds.Count
    loss: bounds.Loss | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """A node has all payloads of these offers to `round`, and their lists (protocol/ledger/part_lists.py), and they are
    valid: others may fetch them at once."""

    round: bounds.Round
    shares: Annotated[tuple[Share, ...], AtMost(MAX_TOLD)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdraw:
    """The sender cannot finish `round`; its replica sits out."""

    round: bounds.Round
    reason: bounds.Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """The sender leaves the run: it is waited for no more, and planned again when it has opened another session. What
    it has offered still counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainFailure:
    """The sender's chain for `round` has lost `peer`. The sender keeps its work and waits for a ChainReconfig.

    `generation` is the number of times that the chain of this replica was reconfigured in the round.
    """

    round: bounds.Round
    replica: bounds.Count
    generation: bounds.Count
    peer: bounds.PeerId
    reason: bounds.Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainReconfig:
    """The members of a replica's chain from now on, under a new generation (protocol/round/chain_repair.py).

    Without `peers` the chain's round is over. `steps` > 0: this many inner steps are done and no more are needed; the
    members offer them. A member sends the message back when it follows it.
    """

    round: bounds.Round
    replica: bounds.Count
    generation: bounds.Count
    peers: Annotated[tuple[bounds.PeerId, ...], AtMost(4096)]
    steps: bounds.Count
    reason: bounds.Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeUp:
    """The time to train `round` is over and others have offered: the receiver offers what it has done."""

    round: bounds.Round


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeSeat:
    """The receiver, whom the plan of `round` has in no replica, trains the seat with the number `replica`; `seconds` of
    the time to train are left."""

    round: bounds.Round
    replica: bounds.Count
    seconds: bounds.Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Attest:
    """The digests of the sender's shards after `round` was applied."""

    round: bounds.Round
    digests: Annotated[dict[bounds.Shard, Digest], AtMost(bounds.MAX_SHARDS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """A sign of life. `turn`: which member leads the round, as a node of the quorum sees it
    (protocol/quorum/leadership.py)."""

    phase: bounds.Word
    round: bounds.Round
    step: bounds.Count = 0
    loss: bounds.Loss | None = None
    turn: bounds.Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Opens a session with a bootstrap node. `joining`: by which invitation the sender comes in, if by one."""

    run: bounds.RunId
    version: bounds.Count
    joining: Joined | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Announced:
    """The sender's newest announcement, sealed (protocol/wire/encoding.py), so that others believe it too."""

    sealed: bounds.Sealed


@dataclass(frozen=True, slots=True, kw_only=True)
class NotAdmitted:
    """The node's last word in a session: the peer may not take part in the run; not yet, where it `waits` for the
    commit that lets it in. `version`: that of the protocol which the node speaks, where the peer speaks another one."""

    reason: bounds.Reason
    waits: bool = False
    version: bounds.Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRequest:
    """Please send the commits after round `after`."""

    after: bounds.Since


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The run is over and everybody's state was compared."""

    round: bounds.Round


PeerMessage = Hello | Announced | Heartbeat | Leave | LogRequest | Offer | Withdraw | Attest | ChainFailure
"""Messages of a peer. A Heartbeat and a LogRequest also travel between nodes; a peer sends a ChainReconfig back."""
NodeMessage = NotAdmitted | Finished | Offered | TimeUp | TakeSeat | ChainReconfig
"""Messages of a bootstrap node."""
