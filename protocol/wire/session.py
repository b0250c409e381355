"""What a peer and a bootstrap node tell each other in a session. Units are in the names: bytes, seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from protocol.wire import bounds
from protocol.wire.commit import Aggregate, Part, Share
from protocol.wire.decree import Joined
from protocol.wire.schema import AtMost, Digest

MAX_TOLD = 4096


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
    """A node has all payloads and lists of these offers to `round`.

    It tells the maker of each; and all peers as soon as it admits no other offer to `round`, so that no peer makes an
    update of others': then they may be fetched.
    """

    round: bounds.Round
    shares: Annotated[tuple[Share, ...], AtMost(MAX_TOLD)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregated:
    """The aggregates of a decided round, which the node serves (protocol/ledger/aggregation.py)."""

    round: bounds.Round
    aggregates: Annotated[tuple[Aggregate, ...], AtMost(bounds.MAX_SHARDS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdraw:
    """The sender cannot finish `round`; its replica sits out."""

    round: bounds.Round
    reason: bounds.Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """The sender leaves the run. It is planned again when it opens another session; its offers still count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainFailure:
    """The sender's chain lost `peer`; it keeps its work and waits. generation: reconfigurations so far."""

    round: bounds.Round
    replica: bounds.Count
    generation: bounds.Count
    peer: bounds.PeerId
    reason: bounds.Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainReconfig:
    """New members of a replica's chain (protocol/round/chain_repair.py); a member that follows sends it back.

    Without `peers` the chain's round is over. steps > 0: this many are done, and members offer them.
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
    """The receiver, in no replica of the plan, trains the seat `replica`; `seconds` of the training time are left."""

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
    """A sign of life. turn: the leadership turn that the node is in (protocol/quorum/leadership.py)."""

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
    """Last word of a session: not admitted, or not yet (`waits` for a commit). version: of the node, if another."""

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
NodeMessage = NotAdmitted | Finished | Offered | Aggregated | TimeUp | TakeSeat | ChainReconfig
"""Messages of a bootstrap node."""
