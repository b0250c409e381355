"""What was decided for a round, and the proof of it.

A commit travels as a *record*, `{"c": body, "n": ballot, "v": {peer: signature of the vote}}` (protocol/wire/encoding.py); "g" has its
grounds, where it has any.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from protocol.wire import framing, grounds
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
from protocol.wire.double_vote import DoubleVote, vote_body
from protocol.wire.evaluation import Evaluation
from protocol.wire.grounds import DOMAIN as DOMAIN
from protocol.wire.grounds import MAX_GROUNDS, Sworn
from protocol.wire.invitation import MAX_JOINED, Joined
from protocol.wire.plan import Plan
from protocol.wire.schema import LATER, MAX_ITEMS, AtMost, Digest, packed, row
from protocol.wire.score import Score

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
    what they say (protocol/ledger/audits.py). `schedule`: how long the run is from here on; None: as the manifest says. `out`: the operators that
    were taken out so far (protocol/ledger/ousting.py). `board`: who operates the run from here on; None: as the manifest says. `idle`: how many
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
    out: Annotated[tuple[PeerId, ...], AtMost(16)] = ()
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
    """A decided commit with its proof: the signatures of the members that accepted it in `ballot`, and, where none may lie, the promises
    that allowed it there (protocol/wire/grounds.py)."""

    commit: Commit
    ballot: Ballot
    votes: Annotated[dict[PeerId, Signature], AtMost(16)]
    grounds: Annotated[tuple[Sworn, ...], AtMost(MAX_GROUNDS)] = ()


def voted_twice(one: Record, other: Record) -> tuple[DoubleVote, ...]:
    """The proofs against everybody who broke the rules of voting, by the signatures in two records of one round: votes for both in one ballot,
    or a vote in the lower ballot and a promise among the other's grounds that denies it."""
    lower, upper = sorted(
        (one, other), key=lambda r: (r.ballot, r.commit.digest)
    )  # all who find it have the same proof
    first, second = lower.commit, upper.commit
    where = [(r.run, len(r.out), r.round) for r in (first, second)]
    if where[0] != where[1] or first.digest == second.digest:
        return ()

    def proof(peer: str, digest: str, signed: bytes, promised: int = -1, accepted: int = -1) -> DoubleVote:
        return DoubleVote(
            peer=peer,
            term=len(first.out),
            round=first.round,
            ballot=lower.ballot,
            digest=first.digest,
            signature=lower.votes[peer],
            other=digest,
            signed=signed,
            promised=promised,
            accepted=accepted,
        )

    if lower.ballot == upper.ballot:
        return tuple(proof(p, second.digest, upper.votes[p]) for p in sorted(set(lower.votes) & set(upper.votes)))
    denied = {
        s.peer: proof(s.peer, s.digest, s.signature, s.ballot, s.accepted)
        for s in sorted(upper.grounds, key=lambda s: (s.peer, s.ballot))
        if s.peer in lower.votes
        and s.ballot > lower.ballot
        and (s.accepted < lower.ballot or (s.accepted == lower.ballot and s.digest != first.digest))
    }
    return tuple(denied.values())


def body_of(commit: Commit, ballot: int) -> bytes:
    """What the signature of a vote for `commit` in `ballot` is over."""
    return vote_body(commit.run, len(commit.out), commit.round, ballot, commit.digest)


def confirmation_body(run: str, round: int, digest: str) -> bytes:
    """What a confirmation's signature is over (protocol/ledger/confirming.py)."""
    return DOMAIN + framing.pack_message(["confirmed", run, round, digest])


def pledge_body(run: str, round: int, ballot: int, digest: str) -> bytes:
    """What a pledge's signature is over."""
    return DOMAIN + framing.pack_message(["pledge", run, round, ballot, digest])


def commit_body(commit: Commit) -> bytes:
    """The bytes whose sha256 is the commit's digest."""
    return DOMAIN + framing.pack_message({"t": "commit", **packed(commit)})


def votes_needed(members: int) -> int:
    """Of so many members: a majority, and of four and seven 2f + 1 of 3f + 1, so that any two such sets share an honest member even if f
    of them lie."""
    return members - liars_borne(members) if liars_borne(members) else members // 2 + 1


def liars_borne(members: int) -> int:
    """How many of so many members may lie without harm."""
    return (members - 1) // 3 if members in (4, 7) else 0


def is_majority(members: int) -> bool:
    """Whether fewer than all of so many members decide, and none may lie: then commits are confirmed."""
    return votes_needed(members) < members and not liars_borne(members)


def are_shown(members: int) -> bool:
    """Whether so many members show the promises that a commit stands on (protocol/wire/grounds.py): those that do not pledge."""
    return members > 1 and not liars_borne(members)


def is_decided(record: Record, members: tuple[str, ...]) -> bool:
    """Whether enough of `members`, those that the commit before names, voted for it, and were allowed to."""
    needed = votes_needed(len(members))
    if len(set(record.votes) & set(members)) < needed:
        return False
    if not are_shown(len(members)):
        return True
    return grounds.chain(record.grounds, members, needed, record.ballot, record.commit.digest) is not None
