"""What was decided for a round, and the proof of it.

A commit travels as a *record*, `{"c": body, "n": ballot, "v": {peer: signature of the vote}}` (protocol/wire/encoding.py).
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from protocol.wire import framing
from protocol.wire.audit import Audit
from protocol.wire.bounds import (
    MAX_SHARDS,
    Ballot,
    Count,
    Loss,
    Norm,
    NormOfAll,
    PeerId,
    Round,
    RunId,
    Scale,
    Shard,
    Signature,
    Size,
    Time,
)
from protocol.wire.decree import Board, Enacted, Schedule
from protocol.wire.evaluation import Evaluation
from protocol.wire.invitation import MAX_JOINED, Joined
from protocol.wire.plan import Plan
from protocol.wire.schema import LATER, MAX_ITEMS, AtMost, Digest, packed, row
from protocol.wire.score import Score

DOMAIN = b"potluck/1/"
"""The first bytes of every signed text of the protocol."""
MAX_EVALUATIONS = 4
MAX_SCORES = 32
MAX_AUDITS = 8


@row
@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One shard's payload: its digest (a blob's name, protocol/codec/blob_hash.py), its bytes, and the L2 norm of what it sends."""

    shard: Shard
    digest: Digest
    size: Size
    norm: Norm


@row
@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One stage's parts within a contribution: the name of their list (protocol/ledger/part_lists.py), the bytes of all payloads, the
    L2 norm of all that they send, and the list's own bytes."""

    peer: PeerId
    root: Digest
    size: Size
    norm: NormOfAll
    listed: Size


@row
@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """One replica's committed contribution; its weight in the mean is tokens / sum of tokens, and its update is multiplied by `scale`
    (protocol/round/judging.py) and by `standing` (protocol/ledger/standing.py). A share may be a spare's of the round's plan, in the
    place of a member that was lost."""

    replica: Count
    tokens: Count
    steps: Count
    loss: Loss | None
    shares: Annotated[tuple[Share, ...], AtMost(4096)]
    scale: Scale = 1.0
    standing: Scale = 1.0

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError("tokens must be at least 1")

    @property
    def peers(self) -> tuple[str, ...]:
        """Who made it, in the order of the stages."""
        return tuple(share.peer for share in self.shares)


@row
@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A planned replica whose work is not in the commit, and why."""

    replica: Count
    """Its number."""
    reason: Annotated[str, AtMost(4096)]
    """Why, for a reader."""
    judged: Annotated[str, AtMost(64)] | None = None
    """The name of its contribution, which was complete, where that was judged (protocol/round/judging.py)."""
    peers: Annotated[tuple[PeerId, ...], AtMost(4096)] = ()
    """Who made it, in the order of the stages, where it was judged."""
    probation: bool = False
    """Whether nothing is wrong with it, and it has no weight since its makers are on probation (protocol/ledger/standing.py)."""


@row
@dataclass(frozen=True, slots=True, kw_only=True)
class Diverged:
    """A peer whose digest of `shard` after the previous round differs from the majority's."""

    peer: PeerId
    """Who."""
    shard: Shard
    """In what."""


@dataclass(frozen=True, kw_only=True)
class Commit:
    """What was decided for one round (round 0: the first plan, and who may take part). `parent` is the previous commit's digest, the run
    id for round 0. `digests`: the majority's shard digests of the state *before* this round, as far as attested. `leader`
    proposed it; `members` decide the next round. `decrees`: how many the run has had, with the one that comes with this commit, if one does.
    `joined`: who comes in by an invitation; the next plan may have them. `evaluations`: what was found of an earlier state
    (protocol/ledger/evaluation.py). `scores`: what contributions of earlier rounds were worth (protocol/ledger/scoring.py); `audits`: whether they are
    what they say (protocol/ledger/audits.py). `schedule`: how long the run is from here on; None: as the manifest says. `board`: who operates the run from here on; None: as the manifest says. `idle`: how many
    rounds brought no work so far, with this one, if it brought none (protocol/ledger/schedule.py)."""

    run: RunId
    round: Round
    parent: RunId
    time: Time
    contributions: Annotated[tuple[Contribution, ...], AtMost(MAX_ITEMS)]
    left_out: Annotated[tuple[LeftOut, ...], AtMost(MAX_ITEMS)]
    diverged: Annotated[tuple[Diverged, ...], AtMost(MAX_ITEMS)]
    digests: Annotated[dict[Shard, Digest], AtMost(MAX_SHARDS)]
    plan: Plan | None
    leader: PeerId = ""
    members: Annotated[tuple[PeerId, ...], AtMost(16)] = ()
    decrees: Count = 0
    decree: Enacted | None = None
    evaluations: Annotated[tuple[Evaluation, ...], AtMost(MAX_EVALUATIONS)] = ()
    joined: Annotated[tuple[Joined, ...], AtMost(MAX_JOINED)] = ()
    schedule: Schedule | None = None
    scores: Annotated[tuple[Score, ...], AtMost(MAX_SCORES)] = ()
    audits: Annotated[tuple[Audit, ...], AtMost(MAX_AUDITS)] = ()
    board: Board | None = None
    idle: Count = field(default=0, metadata=LATER)

    @functools.cached_property
    def digest(self) -> str:
        return hashlib.sha256(commit_body(self)).hexdigest()

    @property
    def shares(self) -> tuple[Share, ...]:
        """Those of all contributions, in commit order."""
        return tuple(share for c in self.contributions for share in c.shares)

    def tokens_of(self, peer: str) -> int:
        """Tokens of the contributions in which `peer` has a share."""
        return sum(c.tokens for c in self.contributions if any(share.peer == peer for share in c.shares))

    def tried(self, peer: str) -> str:
        """Why the work in which `peer` has a share has no weight, where that is its probation, for a reader; else nothing."""
        return next((x.reason for x in self.left_out if x.probation and peer in x.peers), "")

    def includes(self, peer: str, root: str) -> bool:
        """Whether exactly the parts in the list with this name, of `peer`, were committed."""
        return any(s.peer == peer and s.root == root for s in self.shares)

    def payloads(self, shard: str, lists: Mapping[str, tuple[Part, ...]]) -> tuple[tuple[float, Part, str], ...]:
        """(weight times scale and standing, part, sender) of every committed payload of `shard`, in commit order. `lists`: root -> parts of every share."""
        total = sum(c.tokens for c in self.contributions)
        return tuple(
            (c.tokens / total * (c.scale * c.standing), part, share.peer)
            for c in self.contributions
            for share in c.shares
            for part in lists[share.root]
            if part.shard == shard
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A decided commit with its proof: the signatures of the members that accepted it in `ballot`."""

    commit: Commit
    ballot: Ballot
    votes: Annotated[dict[PeerId, Signature], AtMost(16)]


def body_of(commit: Commit, ballot: int) -> bytes:
    """What the signature of a vote for `commit` in `ballot` is over."""
    return DOMAIN + framing.pack_message(["vote", commit.run, commit.round, ballot, commit.digest])


def pledge_body(run: str, round: int, ballot: int, digest: str) -> bytes:
    """What a pledge's signature is over."""
    return DOMAIN + framing.pack_message(["pledge", run, round, ballot, digest])


def commit_body(commit: Commit) -> bytes:
    """The bytes whose sha256 is the commit's digest."""
    return DOMAIN + framing.pack_message({"t": "commit", **packed(commit)})


def liars_borne(members: int) -> int:
    """The largest f of which 3f + 1 are at most this many members: f of them may lie without harm."""
    return (members - 1) // 3


def votes_needed(members: int) -> int:
    """The votes that decide: n - f. Two such sets share f + 1 members, one of whom is honest, and f silent members stop nothing."""
    return members - liars_borne(members)


def is_decided(record: Record, members: tuple[str, ...]) -> bool:
    """Whether enough of `members`, those that the commit before names, voted for it."""
    return len(set(record.votes) & set(members)) >= votes_needed(len(members))
