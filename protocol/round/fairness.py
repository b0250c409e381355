"""Votes of a quorum member: it votes for commits that it could have proposed itself. Pure.

The leading node may lie, so each member compares a proposal with its own view (`NodeView`) before it votes
(protocol/quorum/acceptor.py). It finds one of two kinds of faults:

    a lie    no honest node writes this: it breaks a rule of the log (protocol/ledger/rules.py)
    a doubt  this node has seen something else: complete work is left out, a peer lacks the memory for its stage, the
             plan trains far less than this node's own plan. Honest nodes may differ for a while.

A commit with either gets no vote, and its leader is skipped (protocol/quorum/leadership.py): for many rounds after a
lie, for this round after a doubt. One doubt accuses nobody, and a second one in the same round is ignored, so that lost
messages cannot block honest nodes. A leader that gives reason for doubts again and again is accused (`DoubtRecord`). A
node that has just started doubts nothing, and unknown facts are no reason.

A doubt may rest on what this node missed, such as a quarrel that was reported while it was away. So where more leaders
than may lie give reason for the same doubt, it is dropped for REMEMBERED_ROUNDS.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from protocol.identity import short_peer
from protocol.ledger import board, ranges, rules, schedule
from protocol.ledger.run_state import RunState
from protocol.planning import arrange, budget, partition
from protocol.planning.partition import Candidate
from protocol.planning.planner import arranged
from protocol.quorum.paxos_events import Objection
from protocol.round import judging, presence, stragglers
from protocol.round.leader import Leader
from protocol.round.leader_events import Phase, Question
from protocol.run.manifest import Manifest
from protocol.wire.bounds import LEAST_COMPARED
from protocol.wire.commit import Aggregate, Commit, Contribution, liars_borne
from protocol.wire.plan import Plan

CLOCK_TOLERANCE_SECONDS = 86400.0
"""Seconds that the time of day in a commit may differ from a member's own."""
LEAST_PLAN_RATE = 0.6
"""A plan brings at least this share of the tokens per second of a member's own plan of the same peers."""
RANGE_SLACK = 2.0
"""Factor of a range's share that a plan may have: nodes see different addresses of a peer."""
ACCUSE_WEIGHT = 2.0
"""So many doubts about one leader are as bad as a lie."""
FORGIVEN_PER_ROUND = 0.25
"""Of a doubt, with every round of the leader that gives no reason for any."""
REMEMBERED_ROUNDS = 64
"""For so long a node remembers who gave it reason for which doubt."""
_FIGURES = re.compile(r"\d[\d.e+]*")


@dataclass(frozen=True, kw_only=True)
class NodeView:
    """A node's view when it is asked to vote."""

    state: RunState
    """The log, as this node has it."""
    chains: Plan | None
    """The plan of the open round with its repaired chains and its taken seats, None where the round has none."""
    wall: float
    """The time of day, in Unix seconds."""
    settled: bool = False
    """Whether this node has run for a lease or longer."""
    waited: float = 0.0
    """Seconds since the round began."""
    complete: Mapping[int, Contribution] = field(default_factory=dict)
    """Contributions of which all is here, by replica."""
    since: Mapping[int, float] = field(default_factory=dict)
    """Seconds after the round's beginning at which each was complete."""
    ready: Mapping[str, Candidate] = field(default_factory=dict)
    """Announced peers."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """Digests of shards that more than half of the witnesses' weight attests."""
    attested: Mapping[str, Set[str]] = field(default_factory=dict)
    """All digests that anybody attests, by shard, and those that the log gives."""
    known: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """What each peer attests, by shard."""
    living: Set[str] = frozenset()
    """Members of the quorum that give signs of life."""
    present: Set[str] = frozenset()
    """Operators that give signs of life."""

    @property
    def manifest(self) -> Manifest:
        return self.state.manifest


def lie_in(sight: NodeView, commit: Commit) -> Objection | None:
    """The first violation of a rule in `commit` (protocol/ledger/rules.py), None where there is none."""
    return next((Objection(found.reason, True) for found in rules.check(sight.state, commit)), None)


def wrong_verdict_in(
    sight: NodeView, commit: Commit, read: Callable[[str], bytes], known: judging.Lookup = judging.no_lookup
) -> Objection | None:
    """A verdict that is not the rule's, or None. read: by name; known: contents. Raises what these raise."""
    here = [sight.complete[x.replica] for x in commit.left_out if x.judged is not None and x.replica in sight.complete]
    out = [c for c in here if any(x.judged == judging.name_of(c) for x in commit.left_out)]
    updates = {c.replica: judging.held(sight.manifest, c, read, known) for c in (*commit.contributions, *out)}
    trial = sight.state.standing.tried(commit)
    judged = len(commit.contributions) + sum(x.judged is not None for x in commit.left_out)
    last = sight.state.last if judged >= LEAST_COMPARED or trial else ()
    before = judging.PreviousRound(
        sight.state.medians, tuple(judging.held(sight.manifest, c, read, known) for c in last)
    )
    why = judging.why_unjust(sight.manifest, commit, updates, before, trial)
    return None if why is None else Objection(f"is unjust: {why}", True)


def wrong_refutation_in(sight: NodeView, commit: Commit, compute: Callable[[str, int], str | None]) -> Objection | None:
    """What a commit says that the log refutes, and it does not; or a doubt where this node cannot tell, or heard the
    peer attest what the log gives. compute: the digest of a shard after a round, None if it is not known here."""
    for d in (d for d in commit.diverged if d.refuted):
        digest = compute(d.shard, commit.round - 1)
        name = f"says that the log refutes what {short_peer(d.peer)} attests of {d.shard}"
        if digest is not None and digest != commit.digests[d.shard]:
            return Objection(f"{name}, and the log does not", True)
        if digest is None and sight.settled:
            return Objection(f"{name}, which this node cannot compute", False, about=d.peer)
        if digest is not None and sight.settled and sight.known.get(d.peer, {}).get(d.shard) == digest:
            return Objection(f"{name}, which was attested here as the log has it", False, about=d.peer)
    return None


def wrong_aggregates_in(
    sight: NodeView, commit: Commit, make: Callable[[Commit], Sequence[Aggregate]]
) -> Objection | None:
    """Aggregates that are not those of the log, or None. make: the aggregates of a commit; raises what that raises."""
    head = sight.state.head
    if head is None or not commit.aggregates or tuple(make(head)) == commit.aggregates:
        return None
    return Objection(f"names other aggregates of round {head.round} than the log gives", True)


def doubt_in(sight: NodeView, commit: Commit) -> Objection | None:
    """The first doubt about a commit without lies, None if there is none. Takes as long as a plan of its peers."""
    found = next(_doubts(sight, commit), None) if sight.settled else None
    return None if found is None else Objection(found.reason, False, about=found.about)


# --- what this node has seen otherwise


class Doubt(NamedTuple):
    """A reason to doubt a commit."""

    reason: str
    """What is odd, as the end of "the commit ..."."""
    about: str = ""
    """The peer that the commit says to have diverged, where this is about its work; else empty."""


def _doubts(sight: NodeView, commit: Commit) -> Iterator[Doubt]:
    if abs(commit.time - sight.wall) > CLOCK_TOLERANCE_SECONDS:
        yield Doubt("has a time that is more than a day from this node's")
    yield from map(Doubt, board.member_doubts(sight.manifest, sight.state.head, commit, sight.living, sight.present))
    lease = sight.manifest.timing.gone_after
    only_guests = commit.joined and not (commit.contributions or commit.plan or commit.decree)
    if only_guests and sight.state.latest is not None and sight.waited < lease / 2:
        yield Doubt("ends a round for newcomers alone, before anybody could bring work")
    yield from _left_out(sight, commit)
    for contribution in commit.contributions:
        here = sight.complete.get(contribution.replica)
        if here is None:
            continue
        here = dataclasses.replace(
            here, scale=contribution.scale, weight=contribution.weight, standing=contribution.standing
        )
        if here != contribution:
            yield Doubt(f"counts other work of replica {contribution.replica} than was offered here")
    for shard, digest in commit.digests.items():
        if shard in sight.digests and digest not in sight.attested.get(shard, ()):
            yield Doubt(f"says of the state of {shard} what nobody attested here")
    if commit.plan is not None:
        yield from map(Doubt, _feasible(sight, commit.plan))
        yield from map(Doubt, _worth(sight, commit, commit.plan))
        of = {peer: known.range for peer, known in sight.ready.items()}
        part, most = ranges.largest(sight.manifest, commit.plan, of, _range_share(sight, commit))
        if part > RANGE_SLACK * most:
            yield Doubt(f"plans {part:.0%} for one range of addresses")


def _left_out(sight: NodeView, commit: Commit) -> Iterator[Doubt]:
    """Work that is complete here is left out only where the round was over before it came."""
    manifest, lease = sight.manifest, sight.manifest.timing.gone_after
    judged = {x.replica: x.judged for x in commit.left_out if x.judged is not None}
    makers = {x.replica: x.peers for x in commit.left_out}
    named = {x.replica for x in commit.left_out if judged.get(x.replica) is None}
    for number in sorted(judged.keys() & sight.complete.keys()):
        if judged[number] != judging.name_of(sight.complete[number]) or makers[number] != sight.complete[number].peers:
            yield Doubt(f"judges other work of replica {number} than was offered here")
    wrong = {d.peer for d in commit.diverged}
    planned = sight.chains.replicas if sight.chains is not None else ()
    about = {r.number: peer for r in planned for peer in r.peers if peer in wrong}
    taken = {c.replica for c in commit.contributions}
    offered = [(at, sight.complete[n].tokens) for n, at in sight.since.items() if n in sight.complete and n in taken]
    new = presence.are_new(sight.state.standing, sight.state.plan)
    for number in sorted(named & sight.complete.keys()):
        spec = sight.chains.find(number) if sight.chains is not None else None
        if sight.waited - sight.since.get(number, sight.waited) >= lease:
            yield Doubt(f"leaves out replica {number}, all of whose work has been here for long", about.get(number, ""))
        elif sight.waited + lease / 2 >= manifest.timing.round_deadline or number in new:
            continue
        elif spec is not None and not stragglers.timed_out(manifest, offered, [spec], sight.waited + lease / 2):
            yield Doubt(
                f"leaves out replica {number}, all of whose work is here, before the round was over",
                about.get(number, ""),
            )


def _feasible(sight: NodeView, plan: Plan) -> Iterator[str]:
    """Everybody can hold what he is given, as far as this node has heard of him."""
    for replica in (*plan.replicas, *plan.forming):
        for stage in replica.stages:
            known = sight.ready.get(stage.peer)
            if known is not None and not budget.fits(sight.manifest, known.budget, stage.first, stage.last):
                yield f"plans more for {short_peer(stage.peer)} than it has memory for"


def _worth(sight: NodeView, commit: Commit, plan: Plan) -> Iterator[str]:
    """What is planned brings about as much as this node's own planner makes of the same peers."""
    if not plan.peers <= sight.ready.keys():
        return  # it has not heard of all: it cannot tell
    share = _range_share(sight, commit)
    limited = share < 1  # then strangers may be spares, of whom another node sees a range
    idle = {peer for peer in plan.spares if limited and not sight.state.standing.is_exempt(peer)}
    there = tuple(sight.ready[peer] for peer in sorted(plan.peers - idle))
    stages = [(r.number, r.stages) for r in plan.replicas]
    if not plan.spares and sight.chains and stages == [(r.number, r.stages) for r in sight.chains.replicas]:
        return  # nothing changes, and everybody trains
    question = Question(
        manifest=sight.manifest,
        candidates=there,
        round=plan.round,
        previous=sight.chains or sight.state.latest,
        contributions=commit.contributions,
        left_out=commit.left_out,
        attested=None,
        range_share=share,
    )
    own = question.answer()
    if own is None:
        return
    value, most = _rate(sight.manifest, there, plan), _rate(sight.manifest, there, own)
    if value < LEAST_PLAN_RATE * most:
        yield f"plans {value:.4g} tokens a second where {most:.4g} are possible"


def _range_share(sight: NodeView, commit: Commit) -> float:
    """Returns the largest share of the plan in `commit` for strangers of one address range."""
    return schedule.limits(sight.manifest, commit.schedule).range_share


def _rate(manifest: Manifest, there: tuple[Candidate, ...], plan: Plan) -> float:
    """Tokens per second of a plan as soon as all that is forming has begun."""
    later = {peer for replica in plan.forming for peer in replica.peers}
    replicas = [*plan.forming, *(replica for replica in plan.replicas if later.isdisjoint(replica.peers))]
    return sum(arrange.rates(manifest, there, [arranged(replica) for replica in replicas], float("inf")))


# --- what a node sees


def view_of(
    leader: Leader,
    wall: float,
    now: float,
    settled: bool,
    living: Set[str] = frozenset(),
    present: Set[str] = frozenset(),
) -> NodeView:
    """A snapshot of what this node knows. settled: whether it has run for a lease."""
    verdicts, waited = leader.seen(now)
    known = leader.attestations.of(leader.round - 1)
    attested: dict[str, set[str]] = {}
    for digests in known.values():
        for shard, digest in digests.items():
            attested.setdefault(shard, set()).add(digest)
    for shard, digest in leader.attestations.proven(leader.round - 1).items():
        attested.setdefault(shard, set()).add(digest)
    return NodeView(
        state=leader.state,
        chains=leader.roster.plan,
        wall=wall,
        settled=settled,
        waited=waited,
        complete=dict(verdicts.complete),
        since=dict(verdicts.since),
        ready={c.peer: c for c in leader.marked(leader.ready.values())},
        digests=leader.attestations.sure(leader.round - 1),
        attested=attested,
        known={peer: dict(digests) for peer, digests in known.items()},
        living=living,
        present=present,
    )


def is_due(leader: Leader, now: float) -> bool:
    """Returns whether this node would propose the commit of the open round now, if it led."""
    manifest = leader.manifest
    if leader.phase not in (Phase.GATHERING, Phase.OPEN) or leader.aggregates is None:
        return False
    verdicts, waited = leader.seen(now)
    if not leader.has_begun:
        if leader.phase is Phase.OPEN and waited < manifest.timing.gone_after:
            return False
        there = leader.candidates()
        enough = len(there) >= manifest.start_peers
        return enough and partition.split(manifest, partition.strongest(manifest, there)) is not None
    if verdicts.pending and waited < manifest.timing.round_deadline:
        new = leader.newcomers.numbers  # another node may be more patient with them than this one
        return bool(verdicts.complete) and not stragglers.waits(manifest, leader.roster, verdicts, new, waited)
    return bool(verdicts.complete) or waited >= manifest.timing.gone_after


class DoubtRecord:
    """A node's doubts about each leader."""

    def __init__(self) -> None:
        self._weight: dict[str, float] = {}
        self._doubted = -1
        self._raised: dict[
            str, dict[str, int]
        ] = {}  # by what is doubted: which leaders gave reason, and in which round last

    def weigh(self, leader: str, round: int, found: Objection | None, members: int) -> Objection | None:
        """The objection that remains: none for a second doubt in a round, an accusation for repeated ones."""
        if found is None or found.lie:
            return found
        if self._is_wrong(leader, round, found, members) or self._doubted == round:
            return None
        self._doubted = round
        if found.about:
            return found  # the leader, or that peer, lies: which one cannot be told
        self._weight[leader] = self._weight.get(leader, 0.0) + 1.0
        again = self._weight[leader] >= ACCUSE_WEIGHT
        return (
            dataclasses.replace(found, reason=f"{found.reason}, not for the first time", again=True) if again else found
        )

    def _is_wrong(self, leader: str, round: int, found: Objection, members: int) -> bool:
        """Returns whether more leaders than may lie give reason for this doubt; then none of them is blamed for it."""
        self._raised = {
            what: recent
            for what, since in self._raised.items()
            if (recent := {other: at for other, at in since.items() if at + REMEMBERED_ROUNDS >= round})
        }
        leaders = self._raised.setdefault(_FIGURES.sub("#", found.reason), {})
        leaders[leader] = round
        if len(leaders) <= max(1, liars_borne(members)):
            return False
        for other in leaders:
            self._weight.pop(other, None)
        return True

    def decided(self, leader: str) -> None:
        """A round is decided that `leader` proposed: nothing was wrong with it."""
        left = self._weight.pop(leader, 0.0) - FORGIVEN_PER_ROUND
        if left > 0:
            self._weight[leader] = left
