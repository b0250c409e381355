"""What was decided for a round, and the proof of it.

A commit travels as a *record*, `{"c": body, "n": ballot, "v": {peer: signature of the vote}}`
(protocol/wire/encoding.py).
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Protocol

from protocol.wire import bounds, framing
from protocol.wire.claims import Evaluation, Score
from protocol.wire.decree import MAX_JOINED, Board, Enacted, Joined, Schedule
from protocol.wire.plan import Plan
from protocol.wire.schema import LATER, MAX_ITEMS, AtMost, Digest, packed, row

DOMAIN = b"potluck/1/"
"""The first bytes of every signed text of the protocol."""
MAX_EVALUATIONS = 4
MAX_SCORES = 32


@row
@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One shard's payload."""

    shard: bounds.Shard
    digest: Digest
    """The blob's name (protocol/codec/blob_hash.py)."""
    size: bounds.Size
    """Its bytes."""
    norm: bounds.Norm
    """L2 norm of what it sends."""


@row
@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregate:
    """The aggregate of one shard's payloads in a round (protocol/ledger/aggregation.py)."""

    shard: bounds.Shard
    digest: Digest
    """The blob's name (protocol/codec/blob_hash.py)."""
    size: bounds.Size
    """Its bytes."""


@row
@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One stage's parts within a contribution."""

    peer: bounds.PeerId
    """The peer that made them."""
    root: Digest
    """The name of their list (protocol/ledger/part_lists.py)."""
    size: bounds.Size
    """Bytes of all payloads."""
    norm: bounds.NormOfAll
    """L2 norm of all that they send."""
    listed: bounds.Size
    """Bytes of the list itself."""


@row
@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """One replica's committed contribution."""

    replica: bounds.Count
    """The replica's number in the round's plan."""
    tokens: bounds.Count
    """Trained tokens; its part in the mean is its share of all tokens."""
    steps: bounds.Count
    """Inner steps."""
    loss: bounds.Loss | None
    """Nats per token of its first inner step, before the round changed anything; null if it is unknown."""
    shares: Annotated[tuple[Share, ...], AtMost(4096)]
    """Those of its members, in the order of the stages; a spare's in the place of a member that was lost."""
    scale: bounds.Scale = 1.0
    """A factor of its update, less than 1 where it is longer than others' (protocol/round/judging.py)."""
    standing: bounds.Scale = 1.0
    """A factor of its update, from what the log says of its members (protocol/ledger/standing.py)."""
    weight: bounds.Scale = 1.0
    """A factor of its tokens in the mean, less than 1 where others are like it or opposed to it (judging.py)."""

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError("tokens must be at least 1")

    @property
    def peers(self) -> tuple[str, ...]:
        return tuple(share.peer for share in self.shares)

    @property
    def size(self) -> int:
        """Bytes of its payloads."""
        return sum(share.size for share in self.shares)


def faults_of(peers: Sequence[str], guilty: Collection[str]) -> str:
    """`LeftOut.faults` of work that `peers` made, by the fault of the `guilty` ones."""
    return "".join("01"[peer in guilty] for peer in peers) if guilty else ""


@row
@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A planned replica whose work is not in the commit, and why."""

    replica: bounds.Count
    reason: Annotated[str, AtMost(4096)]
    judged: Annotated[str, AtMost(64)] | None = None
    """The name of its contribution, which was complete, where that was judged (protocol/round/judging.py)."""
    peers: Annotated[tuple[bounds.PeerId, ...], AtMost(4096)] = ()
    """Who made it, in the order of the stages, where it was judged."""
    probation: bool = False
    """Whether nothing is wrong with it, and it has no weight since its makers are on probation
    (protocol/ledger/standing.py)."""
    faults: Annotated[str, AtMost(4096)] = ""
    """For each of `peers` 1 if it is at fault, else 0; empty: none is, as where it is only like another's."""

    @property
    def guilty(self) -> tuple[str, ...]:
        """The peers of `peers` that are at fault."""
        return tuple(peer for peer, mark in zip(self.peers, self.faults, strict=False) if mark == "1")


@row
@dataclass(frozen=True, slots=True, kw_only=True)
class Diverged:
    """A peer whose digest of `shard` after the previous round differs from the majority's."""

    peer: bounds.PeerId
    """Who."""
    shard: bounds.Shard
    """In what."""
    refuted: bool = False
    """Whether the log gives `Commit.digests` of it, as the leader and its voters computed: a finding against it."""


@dataclass(frozen=True, kw_only=True)
class Commit:
    """A decided round: the updates that enter the mean, and the plan of the next round."""

    run: bounds.RunId
    round: bounds.Round
    """The decided round; 0 decides the first plan, and who may take part."""
    parent: bounds.RunId
    """The digest of the commit before; the run's id in round 0."""
    time: bounds.Time
    """When it was proposed, Unix seconds on its leader's clock."""
    contributions: Annotated[tuple[Contribution, ...], AtMost(MAX_ITEMS)]
    """The work that enters the mean."""
    left_out: Annotated[tuple[LeftOut, ...], AtMost(MAX_ITEMS)]
    """Replicas whose work does not, each with its reason."""
    diverged: Annotated[tuple[Diverged, ...], AtMost(MAX_ITEMS)]
    """Peers whose digest of a shard after the round before differs from the majority's."""
    digests: Annotated[dict[bounds.Shard, Digest], AtMost(bounds.MAX_SHARDS)]
    """The majority's SHA-256 by shard, of the state before this round, as far as it was attested."""
    plan: Plan | None
    """The next round's replicas, stages and spares; null after the last round, or while nobody is there."""
    leader: bounds.PeerId = ""
    """The bootstrap node that proposed it."""
    members: Annotated[tuple[bounds.PeerId, ...], AtMost(16)] = ()
    """The bootstrap nodes that vote on the next round."""
    decrees: bounds.Count = 0
    """Decrees of the run so far, with the one of this commit."""
    decree: Enacted | None = None
    """A decision of the operators, if one comes with this commit."""
    evaluations: Annotated[tuple[Evaluation, ...], AtMost(MAX_EVALUATIONS)] = ()
    """Held-out losses of an earlier state (protocol/ledger/run_state.py)."""
    joined: Annotated[tuple[Joined, ...], AtMost(MAX_JOINED)] = ()
    """Peers that come in by an invitation; the next plan may have them."""
    schedule: Schedule | None = None
    """How long the run is from here on; null: as the manifest says."""
    scores: Annotated[tuple[Score, ...], AtMost(MAX_SCORES)] = ()
    """What contributions of earlier rounds were worth (protocol/ledger/scoring.py)."""
    board: Board | None = None
    """The operators of the run from here on; null: as the manifest says."""
    idle: bounds.Count = field(default=0, metadata=LATER)
    """Rounds that brought no work so far: the run has so many more (protocol/ledger/schedule.py)."""
    aggregates: Annotated[tuple[Aggregate, ...], AtMost(bounds.MAX_SHARDS)] = field(default=(), metadata=LATER)
    """Those of the round before, of each shard, if it has any (protocol/ledger/aggregation.py)."""

    @functools.cached_property
    def digest(self) -> str:
        return hashlib.sha256(DOMAIN + framing.pack_message({"t": "commit", **packed(self)})).hexdigest()

    @property
    def shares(self) -> tuple[Share, ...]:
        return tuple(share for c in self.contributions for share in c.shares)

    @functools.cached_property
    def payload_bytes(self) -> int:
        """Bytes of all payloads."""
        return sum(c.size for c in self.contributions)

    @property
    def tokens(self) -> int:
        """Trained tokens of all contributions."""
        return sum(c.tokens for c in self.contributions)

    @property
    def loss(self) -> float | None:
        """Mean nats per token of the contributions' first inner steps, by tokens; None if none is known."""
        known = [(c.loss, c.tokens) for c in self.contributions if c.loss is not None]
        return sum(loss * n for loss, n in known) / sum(n for _, n in known) if known else None

    def tried(self, peer: str) -> str:
        """Why the work of `peer` has no weight because of its probation, for a reader; else empty."""
        return next((x.reason for x in self.left_out if x.probation and peer in x.peers), "")

    def includes(self, peer: str, root: str) -> bool:
        """Returns whether exactly the parts in the list with this name, of `peer`, were committed."""
        return any(s.peer == peer and s.root == root for s in self.shares)

    def payloads(self, shard: str, lists: Mapping[str, tuple[Part, ...]]) -> tuple[tuple[float, Part, str], ...]:
        """(weight times scale and standing, part, sender) of every committed payload of `shard`, in commit order.
        `lists`: root -> parts of every share."""
        total = sum(c.tokens * c.weight for c in self.contributions)
        return tuple(
            (c.tokens * c.weight / total * (c.scale * c.standing), part, share.peer)
            for c in self.contributions
            for share in c.shares
            for part in lists[share.root]
            if part.shard == shard
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A decided commit with its proof."""

    commit: Commit
    """The decision."""
    ballot: bounds.Ballot
    """The ballot in which it was decided."""
    votes: Annotated[dict[bounds.PeerId, bounds.Signature], AtMost(16)]
    """The signatures of the members that accepted it, by member."""


def body_of(commit: Commit, ballot: int) -> bytes:
    """Returns the bytes that a vote for `commit` in `ballot` signs."""
    return vote_body(commit.run, commit.round, ballot, commit.digest)


def vote_body(run: str, round: int, ballot: int, digest: str) -> bytes:
    """Returns the bytes that a vote for the commit with this digest signs."""
    return DOMAIN + framing.pack_message(["vote", run, round, ballot, digest])


def pledge_body(run: str, round: int, ballot: int, digest: str) -> bytes:
    """Returns the bytes that a pledge signs."""
    return DOMAIN + framing.pack_message(["pledge", run, round, ballot, digest])


def liars_borne(members: int) -> int:
    """The largest f of which 3f + 1 are at most this many members: f of them may lie without harm."""
    return (members - 1) // 3


def votes_needed(members: int) -> int:
    """n - f votes decide: two such sets share an honest member, and f silent members stop nothing."""
    return members - liars_borne(members)


class Voted(Protocol):
    """A record or its head, with votes by member."""

    @property
    def votes(self) -> Mapping[str, bytes]: ...


def is_decided(record: Voted, members: tuple[str, ...]) -> bool:
    """Returns whether enough of `members`, those that the commit before names, voted for it."""
    return len(set(record.votes) & set(members)) >= votes_needed(len(members))
