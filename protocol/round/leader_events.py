"""Events, effects, phases and transition table of a bootstrap node's view of a round (protocol/round/leader.py).

Plans and verdicts take seconds where there are many peers. So the machine asks (MakePlan, Judge), a thread answers
(bootstrap/background_jobs.py), and the answer returns as an event with its question.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from protocol.ledger import capacity, ranges
from protocol.planning import memory, partition, planner
from protocol.planning.partition import Candidate
from protocol.quorum.table import Row, Table, anywhere
from protocol.round.accusations import Accusation
from protocol.round.attestations import Attested
from protocol.round.judging import JudgingJob, Verdict
from protocol.run.manifest import Manifest
from protocol.wire.claims import Evaluation, Score
from protocol.wire.commit import Commit, Contribution, LeftOut, Part, Share
from protocol.wire.decree import Decree, Joined
from protocol.wire.plan import Plan, ReplicaSpec, StageSpec
from protocol.wire.session import (
    Aggregated,
    Attest,
    ChainFailure,
    ChainReconfig,
    Offer,
    Offered,
    TakeSeat,
    TimeUp,
    Withdraw,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """All that the next plan depends on.

    resting: planned only without a replica of candidates; fallen: only without one of those
    previous: the last plan with repaired chains; attested: before the round, None: all have the shards
    """

    manifest: Manifest
    candidates: tuple[Candidate, ...]
    resting: tuple[Candidate, ...] = ()
    fallen: tuple[Candidate, ...] = ()
    round: int
    previous: Plan | None
    contributions: tuple[Contribution, ...]
    left_out: tuple[LeftOut, ...]
    attested: Attested | None
    range_share: float = 1.0

    def answer(self, relay_bps: float = math.inf) -> Plan | None:
        """The plan, within a commit's bounds; None if there is no replica. relay_bps: bits a second of all relays."""
        plan = self._plan(self.candidates, relay_bps)
        if plan is None and self.resting:
            plan = self._plan((*self.candidates, *self.resting), relay_bps)
        if plan is None and self.fallen:
            plan = self._plan((*self.candidates, *self.resting, *self.fallen), relay_bps)
        of = {c.peer: c.range for c in (*self.candidates, *self.resting, *self.fallen)}
        plan = plan and ranges.limited(self.manifest, plan, of, self.range_share)
        return plan and capacity.bounded(self.manifest, plan, self.contributions, self.left_out)

    def _plan(self, candidates: tuple[Candidate, ...], relay_bps: float) -> Plan | None:
        return planner.make_plan(
            self.manifest,
            candidates,
            round=self.round,
            previous=self.previous,
            done={c.replica: c.steps for c in self.contributions},
            holds=self._holds if self.attested is not None else None,
            relay_bps=relay_bps,
        )

    def _holds(self, stage: StageSpec) -> bool:
        wanted = memory.stage_shards(self.manifest, stage.first, stage.last)
        return self.attested is not None and self.attested.holds(stage.peer, wanted)


class Phase(Enum):
    """The phase of a run."""

    GATHERING = "gathering"
    """Too few peers are ready for a first plan."""
    OPEN = "open"
    """A round is being trained; offers come in."""
    JUDGING = "judging"
    """Nobody is waited for any more; what was offered is being judged."""
    PLANNING = "planning"
    """What the round's commit says of the round is settled; the next plan is being made."""
    DECIDING = "deciding"
    """This node has proposed the round's commit."""
    CLOSING = "closing"
    """The last round is decided; the peers apply it and attest the final state."""
    OVER = "over"
    """The final state was compared."""


SETTLED = (Phase.JUDGING, Phase.PLANNING, Phase.DECIDING)
"""Phases in which nothing that happens changes what the round's commit says of the round."""


@dataclass(frozen=True, slots=True)
class Ready:
    """Event: a peer is announced and has a session. It is repeated when the announcement changes."""

    candidate: Candidate


@dataclass(frozen=True, slots=True)
class Gone:
    """Event: a peer gave no sign of life for `gone_after`, or `leaves`: it says so itself."""

    peer: str
    leaves: bool = False


@dataclass(frozen=True, slots=True)
class Received:
    """Event: a peer sent this; a ChainReconfig means that it follows. TABLE names it by the message."""

    peer: str
    message: Offer | Attest | Withdraw | ChainFailure | ChainReconfig | Evaluation | Score


@dataclass(frozen=True, slots=True)
class Held:
    """Event: a payload, or a list of parts, is durable here under this name."""

    digest: str


@dataclass(frozen=True, slots=True)
class Lead:
    """Event: whether this node leads from now on."""

    leads: bool


@dataclass(frozen=True, slots=True)
class Decided:
    """Event: the quorum has decided this commit."""

    commit: Commit


@dataclass(frozen=True, slots=True)
class DecreeSigned:
    """Event: an operator has signed this decree, and the signature is right."""

    operator: str
    decree: Decree
    signature: bytes


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """Event: a peer asks for admission by an invitation with valid signatures (protocol/ledger/access.py)."""

    joined: Joined


@dataclass(frozen=True, slots=True)
class Planned:
    """Event: the answer to `MakePlan`, however late; None where the candidates make not even one replica."""

    question: Question
    plan: Plan | None


@dataclass(frozen=True, slots=True)
class JudgingDone:
    """Event: the answer to `Judge`, however late: of each of its contributions, in their order."""

    case: JudgingJob
    verdicts: tuple[Verdict, ...]


@dataclass(frozen=True, slots=True)
class Recomputed:
    """Event: the answer to `Recompute`: the log gives `digest` of `shard` after `round`; empty if none was computed."""

    round: int
    shard: str = ""
    digest: str = ""


@dataclass(frozen=True, slots=True)
class AggregatesMade:
    """Event: the aggregates of this decided round are durable here."""

    made: Aggregated


@dataclass(frozen=True, slots=True)
class Tick:
    """Event: time passed. absent: see protocol/round/presence.py; living: operators alive, None: unknown."""

    absent: frozenset[str] = frozenset()
    living: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class Fetch:
    """Effect: fetch this payload from `peer`; the answer is `Held`."""

    peer: str
    part: Part


@dataclass(frozen=True, slots=True)
class StoreList:
    """Effect: make the list of these parts durable; the answer is `Held` with its name."""

    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class AnnounceShare:
    """Effect: tell all sessions that this share, offered to `round`, may be fetched: no offer is admitted any more."""

    round: int
    share: Share


@dataclass(frozen=True, slots=True)
class MakePlan:
    """Effect: answer this question on another thread; the answer is `Planned`. A newer question replaces it."""

    question: Question


@dataclass(frozen=True, slots=True)
class Judge:
    """Effect: judge these contributions on another thread; the answer is `JudgingDone`. A newer job replaces it."""

    case: JudgingJob


@dataclass(frozen=True, slots=True)
class Propose:
    """Effect: hand this commit to the quorum."""

    commit: Commit


@dataclass(frozen=True, slots=True)
class Send:
    """Effect: send this to those of `peers` that have a session. `first`: it is no repetition."""

    peers: tuple[str, ...]
    message: ChainReconfig | TimeUp | TakeSeat | Offered
    first: bool


@dataclass(frozen=True, slots=True)
class Recompute:
    """Effect: compute one of these shards after `round` from the log, on another thread; the answer is `Recomputed`.

    shards: the smallest one first
    """

    round: int
    shards: tuple[str, ...]

    def answer(self, compute: Callable[[str, int], str | None]) -> Recomputed:
        """The first shard whose digest `compute` gives."""
        found = ((shard, compute(shard, self.round)) for shard in self.shards)
        shard, digest = next(((shard, digest) for shard, digest in found if digest is not None), ("", ""))
        return Recomputed(self.round, shard, digest)


@dataclass(frozen=True, slots=True)
class Report:
    """Effect: show that `peer`'s bits of `shard` after `round` differ from the majority's; refuted: from the log's."""

    round: int
    peer: str
    shard: str
    refuted: bool = False


@dataclass(frozen=True, slots=True)
class Moved:
    """Effect: show that from `round` on the stages of `replica` have other numbers of blocks, and why."""

    round: int
    replica: int
    before: ReplicaSpec
    after: ReplicaSpec
    reason: str


@dataclass(frozen=True, slots=True)
class Resting:
    """Effect: show that `peer` is in no plan up to `round`, for broken promises, or bad scores if `scored`."""

    peer: str
    round: int
    scored: bool = False


@dataclass(frozen=True, slots=True)
class Done:
    """Effect: the run is over; its final state, after `round`, was compared."""

    round: int


def moves(manifest: Manifest, before: Plan | None, after: Plan | None, ready: Mapping[str, Candidate]) -> list[Moved]:
    """The chains that have other numbers of blocks after than before."""
    found = partition.moves(before, after)
    round = after.round if after is not None else 0
    return [Moved(round, n, old, new, partition.why_moved(manifest, old, new, ready)) for n, old, new in found]


Event = (
    Ready
    | Gone
    | Received
    | Held
    | AggregatesMade
    | Lead
    | Decided
    | DecreeSigned
    | JoinRequest
    | Planned
    | JudgingDone
    | Recomputed
    | Tick
)
Effect = (
    Fetch
    | StoreList
    | AnnounceShare
    | MakePlan
    | Judge
    | Recompute
    | Propose
    | Send
    | Report
    | Moved
    | Resting
    | Accusation
    | Done
)


_ROWS: tuple[Row[Phase], ...] = (
    Row(Phase.GATHERING, None, Phase.PLANNING, (MakePlan,), "we lead, and enough peers are ready or access changes"),
    Row(Phase.OPEN, None, Phase.JUDGING, (AnnounceShare, Judge), "we lead and no pending replica is worth waiting for"),
    Row(Phase.OPEN, None, Phase.JUDGING, (Judge,), "the same, and all payloads have been named before"),
    Row(Phase.OPEN, None, Phase.PLANNING, (MakePlan,), "the same, and what counts is known"),
    Row(Phase.OPEN, None, Phase.DECIDING, (Propose,), "the same in the last round, which no plan follows"),
    Row(Phase.JUDGING, JudgingDone, Phase.PLANNING, (MakePlan,), "what counts is known"),
    Row(Phase.JUDGING, JudgingDone, Phase.DECIDING, (Propose,), "the same in the last round, which no plan follows"),
    Row(Phase.JUDGING, JudgingDone, Phase.OPEN, (), "nothing counts, and it is too early for an empty commit"),
    Row(Phase.JUDGING, Lead, Phase.OPEN, (), "who leads has changed"),
    Row(Phase.JUDGING, Decided, Phase.OPEN, (), "another node led"),
    Row(Phase.JUDGING, Decided, Phase.CLOSING, (), "another node led, it was the last round"),
    Row(Phase.PLANNING, Planned, Phase.DECIDING, (Propose,), "the plan, or what was trained, is worth a commit"),
    Row(Phase.PLANNING, Planned, Phase.OPEN, (), "nothing was trained, and who is ready makes no replica"),
    Row(Phase.PLANNING, Planned, Phase.GATHERING, (), "who is ready makes no replica"),
    Row(Phase.PLANNING, Planned, Phase.PLANNING, (MakePlan,), "the same, because of accusations: these are forgotten"),
    Row(Phase.PLANNING, Lead, Phase.OPEN, (), "who leads has changed"),
    Row(Phase.PLANNING, Lead, Phase.GATHERING, (), "who leads has changed, no round is decided yet"),
    Row(Phase.PLANNING, Decided, Phase.OPEN, (), "another node led"),
    Row(Phase.PLANNING, Decided, Phase.CLOSING, (), "another node led, it was the last round"),
    Row(Phase.DECIDING, Decided, Phase.OPEN, (), "the next round begins"),
    Row(Phase.DECIDING, Decided, Phase.CLOSING, (), "it was the last round"),
    Row(Phase.DECIDING, Lead, Phase.OPEN, (), "who leads has changed"),
    Row(Phase.DECIDING, Lead, Phase.GATHERING, (), "who leads has changed, no round is decided yet"),
    Row(Phase.GATHERING, Decided, Phase.OPEN, (), "another node led"),
    Row(Phase.OPEN, Decided, Phase.OPEN, (), "another node led"),
    Row(Phase.OPEN, Decided, Phase.CLOSING, (), "another node led, it was the last round"),
    Row(Phase.CLOSING, None, Phase.OVER, (Done,), "all members attested the final state, or it is too late"),
    Row(Phase.CLOSING, Decided, Phase.CLOSING, (), "a commit too many, which no honest quorum decides"),
    Row(Phase.OVER, Decided, Phase.OVER, (), "a commit too many, which no honest quorum decides"),
    anywhere(Offer, (StoreList, Fetch), "it is admitted: its list is kept, and what is not held is fetched"),
    anywhere(Offer, (Fetch,), "the same, its list is held already"),
    anywhere(Offer, (StoreList,), "the same, all its payloads are held already"),
    anywhere(Held, (Offered,), "nothing of a share is lacking any more: its maker is told"),
    anywhere(Offer, (ChainReconfig,), "its reconfigured chain does not know yet that the steps are done"),
    anywhere(ChainFailure, (ChainReconfig,), "a chain lost a member, or a report is out of date"),
    anywhere(ChainFailure, (Accusation,), "a member says for the first time that this neighbour lies"),
    anywhere(Withdraw, (ChainReconfig,), "a member of a chain gives up"),
    anywhere(Gone, (ChainReconfig,), "a member of a chain is gone and a spare is ready, or it leaves"),
    anywhere(Tick, (ChainReconfig,), "a member is absent and a spare is ready, or somebody does not follow"),
    Row(Phase.OPEN, Tick, Phase.OPEN, (TimeUp,), "the time to train is over, some have offered and others have not"),
    Row(Phase.OPEN, Attest, Phase.OPEN, (TakeSeat,), "it came after the plan, and holds the state: it takes a seat"),
    anywhere(Attest, (Report,), "a peer has other bits than the majority"),
    anywhere(Attest, (Recompute,), "witnesses dispute a shard's bits"),
    anywhere(Attest, (Report, Recompute), "both"),
    anywhere(Recomputed, (Report,), "the log refutes what a peer attested"),
    anywhere(Recomputed, (Recompute,), "another shard's bits are disputed, too"),
    anywhere(Recomputed, (Report, Recompute), "both"),
    anywhere(Decided, (Moved,), "the next plan moves blocks between the stages of a chain"),
    anywhere(Received, (Accusation,), "a member of a chain, said to be lost again and again, is there"),
    anywhere(Decided, (Resting,), "a peer was planned again and again and brings nothing"),
)
TABLE = Table("leader", Phase, _ROWS)
