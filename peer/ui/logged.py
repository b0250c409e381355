"""A round of the log as plain data: what `potluck log show --json` prints.

The classes are the schema, and docs/events.md lists them.
"""

from __future__ import annotations

from dataclasses import dataclass

from peer import events
from protocol.ledger import part_lists
from protocol.wire.commit import Commit, Contribution, Diverged, Record
from protocol.wire.commit import LeftOut as PlannedOut
from protocol.wire.decree import Decree, Operator, Schedule
from protocol.wire.invitation import Joined
from protocol.wire.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedContribution(events.Contribution):
    """One replica's committed work, and what the round's plan says of that replica."""

    weight: float
    """Its weight in the mean: its share of all tokens."""
    norm: float
    """L2 norm of its whole update."""
    kind: str
    """`full`, `chain`, or `unplanned` where the plan does not know it."""
    rank: int | None
    """Values per token that cross the chain's boundaries; 0: all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedLeftOut:
    """A replica whose work does not enter the mean, and what the round's plan says of it."""

    replica: int
    """Its number in the round's plan."""
    reason: str
    """Why, for a reader."""
    kind: str
    """`full`, `chain`, or `unplanned` where the plan does not know it."""
    rank: int | None
    """Values per token that cross the chain's boundaries; 0: all of them."""
    peers: tuple[str, ...]
    """Who made its work, where that was judged; else its members in the plan, in the order of the stages."""
    probation: bool = False
    """Whether nothing is wrong with its work, and it has no weight since its makers are on probation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedAudit:
    """What a peer found when it trained another one's contribution again."""

    peer: str
    """Who says so."""
    round: int
    """Of the contribution."""
    replica: int
    """Whose it is."""
    agreement: float
    """How much better it fits the text that it was assigned than other text, in standard deviations; an honest one has more than 2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedEvaluation(events.Evaluation):
    """What a peer says that it measured, and of which state."""

    round: int
    """The round after which the state was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedDecree:
    """What the operators have decided."""

    number: int
    """How many decrees the run has had before."""
    action: str
    """`ban`, `admit`, `open`, `close`, `set`, `appoint`, `dismiss` or `quorum`."""
    subject: str
    """The peer or the operator, where it is about one; else empty."""
    reason: str
    """Why, for a reader."""
    schedule: Schedule | None
    """How long the run is, and what strangers may have, from the round after on; where it says that."""
    operators: tuple[Operator, ...] = ()
    """Who is appointed, and where their nodes are."""
    quorum: int | None = None
    """How many operators decide from the next round on, where it says that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedGuest:
    """A peer that comes in by an invitation."""

    peer: str
    """Who."""
    operator: str
    """Who has signed the invitation."""
    invitation: str
    """The invitation's id."""
    count: int
    """How many it lets in."""
    expires: int
    """Until when, Unix seconds."""
    reason: str
    """For whom or what it was made, for a reader."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRound:
    """A decided round, with the proof that it was decided."""

    run: str
    """The run's id."""
    time: float
    """When it was decided, Unix seconds on its leader's clock."""
    digest: str
    """SHA-256 of the commit."""
    parent: str
    """The digest of the commit before; the run's id in round 0."""
    leader: str
    """The bootstrap node that proposed it."""
    ballot: int
    """The ballot in which it was decided."""
    voters: tuple[str, ...]
    """The bootstrap nodes whose votes are in the log."""
    round: int
    """The decided round; 0 decides the first plan only."""
    contributions: tuple[LoggedContribution, ...]
    """What enters the mean."""
    left_out: tuple[LoggedLeftOut, ...]
    """Replicas whose work does not."""
    diverged: tuple[Diverged, ...]
    """Peers whose digest of a shard after the round before differs from the majority's."""
    plan: Plan | None
    """The next round's replicas, stages and spares; null after the last round, or while nobody is there."""
    digests: dict[str, str]
    """The majority's SHA-256 by shard, of the state before this round, as far as it was attested."""
    members: tuple[str, ...]
    """The bootstrap nodes that vote on the next round."""
    evaluations: tuple[LoggedEvaluation, ...]
    """What was measured of an earlier state, on text that nobody trains on."""
    scores: tuple[events.Score, ...]
    """What contributions of earlier rounds were worth, as others say who measured it."""
    audits: tuple[LoggedAudit, ...]
    """What others found who trained earlier contributions again."""
    decree: LoggedDecree | None
    """What the operators have decided about who may take part, if they have."""
    invited: tuple[LoggedGuest, ...]
    """Who comes in by an invitation."""


def logged(record: Record, plan: Plan | None) -> LoggedRound:
    """A record of the log; `plan` is that of its round."""
    commit = record.commit
    told = events.commit_of(commit)
    total = sum(c.tokens for c in commit.contributions)
    return LoggedRound(
        run=commit.run,
        time=commit.time,
        digest=commit.digest,
        parent=commit.parent,
        leader=commit.leader,
        ballot=record.ballot,
        voters=tuple(sorted(record.votes)),
        round=commit.round,
        contributions=tuple(
            _contribution(made, shown, plan, total)
            for made, shown in zip(commit.contributions, told.contributions, strict=True)
        ),
        left_out=tuple(_left_out(left, plan) for left in commit.left_out),
        diverged=commit.diverged,
        plan=commit.plan,
        digests=commit.digests,
        members=commit.members,
        evaluations=evaluations(commit),
        scores=tuple(events.score(x) for x in commit.scores),
        audits=audits(commit),
        decree=None if commit.decree is None else _decree(commit.decree.decree),
        invited=tuple(_guest(joined) for joined in commit.joined),
    )


def _decree(decree: Decree) -> LoggedDecree:
    return LoggedDecree(
        number=decree.number,
        action=decree.action,
        subject=decree.subject,
        reason=decree.reason,
        schedule=decree.schedule,
        operators=decree.operators,
        quorum=decree.quorum,
    )


def _guest(joined: Joined) -> LoggedGuest:
    invitation = joined.invitation
    return LoggedGuest(
        peer=joined.peer,
        operator=joined.operator,
        invitation=invitation.key,
        count=invitation.count,
        expires=invitation.expires,
        reason=invitation.reason,
    )


def evaluations(commit: Commit) -> tuple[LoggedEvaluation, ...]:
    """What a commit says of an earlier state."""
    return tuple(
        LoggedEvaluation(
            peer=x.peer,
            round=x.round,
            sequences=x.sequences,
            loss=x.loss,
            bits_per_byte=x.bits_per_byte,
            sample=x.sample,
        )
        for x in commit.evaluations
    )


def audits(commit: Commit) -> tuple[LoggedAudit, ...]:
    """What a commit says of earlier contributions that were trained again."""
    return tuple(
        LoggedAudit(peer=x.peer, round=x.round, replica=x.replica, agreement=x.agreement) for x in commit.audits
    )


def _contribution(made: Contribution, shown: events.Contribution, plan: Plan | None, total: int) -> LoggedContribution:
    kind, rank, _ = _planned(plan, made.replica)
    return LoggedContribution(
        replica=shown.replica,
        tokens=shown.tokens,
        steps=shown.steps,
        loss=shown.loss,
        bytes=shown.bytes,
        peers=shown.peers,
        scale=shown.scale,
        standing=shown.standing,
        weight=made.tokens / total,
        norm=part_lists.total(share.norm for share in made.shares),
        kind=kind,
        rank=rank,
    )


def _left_out(left: PlannedOut, plan: Plan | None) -> LoggedLeftOut:
    kind, rank, peers = _planned(plan, left.replica)
    return LoggedLeftOut(
        replica=left.replica,
        reason=left.reason,
        kind=kind,
        rank=rank,
        peers=left.peers or peers,
        probation=left.probation,
    )


def _planned(plan: Plan | None, number: int) -> tuple[str, int | None, tuple[str, ...]]:
    """(kind, rank, members) of a replica."""
    spec = plan.find(number) if plan is not None else None
    if spec is None:
        return "unplanned", None, ()
    return "chain" if spec.is_chain else "full", spec.rank, spec.peers
