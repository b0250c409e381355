"""Validity rules for a commit: the only list of what an honest leader does not write. Pure.

A rule is a function of the state before a commit (protocol/ledger/run_state.py) and of the commit, so every reader of
the log can check it: voters, auditors (`potluck log verify`), peers and monitors. A rule yields reasons that complete
the sentence "the commit ...". Three checks need more than the log:

    protocol/ledger/history.py     the record itself: votes, run, round, parent, members
    protocol/round/judging.py      verdicts on contributions, which need their payloads
    protocol/round/fairness.py     doubts: a commit that follows the rules, and does not fit what a voter has seen
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from protocol.identity import short_peer
from protocol.ledger import access, aggregation, capacity, claims, part_lists, schedule
from protocol.ledger.run_state import RunState
from protocol.run.manifest import Manifest
from protocol.wire.commit import Commit, Contribution
from protocol.wire.plan import Plan, ReplicaSpec, Work

Rule = Callable[[RunState, Commit], Iterable[str]]
"""(state before the commit, commit) -> one reason for each violation."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A rule that a commit breaks."""

    rule: str
    """The name of the rule's function."""
    reason: str
    """What is wrong, as the end of the sentence "the commit ..."."""

    def __str__(self) -> str:
        return self.reason


def check(state: RunState, commit: Commit, rules: Sequence[Rule] | None = None) -> Iterator[Violation]:
    """Every violation in `commit`, which comes after `state`. `rules`: those to check, None: all."""
    for rule in RULES if rules is None else rules:
        for reason in rule(state, commit):
            yield Violation(rule.__name__, reason)


# --- the record


def is_readable(state: RunState, commit: Commit) -> Iterator[str]:
    """Its record, with every vote, fits into a message."""
    if not capacity.can_be_read(commit):
        yield "is so long that nobody could read its record"


def is_within_run(state: RunState, commit: Commit) -> Iterator[str]:
    """The run has not ended before it."""
    last = schedule.last_round(state.manifest, commit)
    if commit.round > last:
        yield f"the run has {last} rounds only"


def counts_idle_rounds(state: RunState, commit: Commit) -> Iterator[str]:
    """It carries how many rounds had no work (protocol/ledger/schedule.py)."""
    right = schedule.idle_after(state.manifest, state.head, has_work=bool(commit.contributions))
    if commit.idle != right:
        yield f"counts {commit.idle} rounds without work where there were {right}"


def says_something(state: RunState, commit: Commit) -> Iterator[str]:
    """It has work, a plan, a decree or a newcomer, unless it is the last one."""
    idle = not (commit.contributions or commit.plan or commit.decree or commit.joined)
    if idle and not schedule.is_over(state.manifest, commit):
        yield "says nothing: no work, no plan, and nobody who may take part now or no more"


# --- access


def is_lawful(state: RunState, commit: Commit) -> Iterator[str]:
    """Decrees have enough signatures, invitations are valid, and what follows from decrees is carried on."""
    if (unlawful := access.why_unlawful(state.manifest, state.head, commit)) is not None:
        yield unlawful


def plans_admitted_peers(state: RunState, commit: Commit) -> Iterator[str]:
    """Every planned peer may take part."""
    now = state.standing.access.after(commit.decree)
    for peer in sorted(commit.plan.peers) if commit.plan is not None else ():
        if (why := now.why_not(peer)) is not None:
            yield f"plans {short_peer(peer)}, and {why}"


def admits_invited_peers(state: RunState, commit: Commit) -> Iterator[str]:
    """An invitation admits no banned peer, and none more often than it says."""
    now = state.standing.access.after(commit.decree)
    for joined in commit.joined:
        if (why := now.why_not_join(joined)) is not None:
            yield f"lets in {short_peer(joined.peer)}, and {why}"
        now = now.after(None, (joined,))


# --- the round's work


def decides_every_replica(state: RunState, commit: Commit) -> Iterator[str]:
    """Each planned replica contributes or is left out, once; seats that were taken may be."""
    plan = state.plan
    planned = [r.number for r in plan.replicas] if plan is not None else []
    decided = sorted([c.replica for c in commit.contributions] + [x.replica for x in commit.left_out])
    seats = {seat.number for seat in plan.seats} if plan is not None else set[int]()
    if decided != sorted([*planned, *seats.intersection(decided)]):
        yield f"decides about replicas {decided}, the plan has {sorted(planned)}"


def counts_planned_peers(state: RunState, commit: Commit) -> Iterator[str]:
    """A contribution is of the planned peers, or of spares in their places."""
    for contribution, spec in _work(state, commit):
        if not _are_members(state, spec, contribution):
            yield f"replica {contribution.replica} has other peers than its plan and its spares"


def counts_peers_once(state: RunState, commit: Commit) -> Iterator[str]:
    """No peer has a share in two contributions."""
    if _repeated(share.peer for share in commit.shares):
        yield "counts a peer twice"


def weighs_by_tokens(state: RunState, commit: Commit) -> Iterator[str]:
    """The tokens of a contribution are those of its inner steps, of which it was given enough."""
    for contribution, spec in _work(state, commit):
        tokens = state.manifest.train.tokens(contribution.steps, spec.work.micro_batches)
        if not 1 <= contribution.steps <= spec.work.steps or contribution.tokens != tokens:
            said = f"{contribution.steps} steps cannot have {contribution.tokens} tokens"
            yield f"replica {contribution.replica}: its weight is wrong ({said})"


def counts_no_diverged_peer(state: RunState, commit: Commit) -> Iterator[str]:
    """No peer contributes whose state differed from the majority's."""
    wrong = {d.peer for d in commit.diverged}
    for contribution in commit.contributions:
        for peer in wrong.intersection(contribution.peers):
            yield f"replica {contribution.replica} counts although the state of {short_peer(peer)} differed"


def refutes_by_a_digest(state: RunState, commit: Commit) -> Iterator[str]:
    """What refutes an attestation is in the commit: the digest that the log gives."""
    for d in commit.diverged:
        if d.refuted and d.shard not in commit.digests:
            yield f"says that the log refutes {short_peer(d.peer)} in {d.shard}, and not by what"


def has_readable_lists(state: RunState, commit: Commit) -> Iterator[str]:
    """The list of parts of a share has a size that a list can have."""
    for contribution in commit.contributions:
        for share in contribution.shares:
            if not part_lists.may_be_fetched(state.manifest, share):
                name = f"replica {contribution.replica}: {short_peer(share.peer)}"
                yield f"{name} has a list of parts that no share of the run can have"


def counts_no_probation(state: RunState, commit: Commit) -> Iterator[str]:
    """Work of a replica on probation has no weight."""
    for contribution in commit.contributions:
        if state.standing.is_on_probation(contribution.replica, contribution.peers):
            yield f"counts replica {contribution.replica}, which is on probation"


def seats_no_resting_peer(state: RunState, commit: Commit) -> Iterator[str]:
    """A peer that rests takes no seat."""
    for contribution in commit.contributions:
        resting = any(state.standing.rests(peer) for peer in contribution.peers)
        if state.standing.is_seat(contribution.replica) and resting:
            yield f"gives replica {contribution.replica} to one for whom the log says no place"


def weighs_by_reputation(state: RunState, commit: Commit) -> Iterator[str]:
    """The standing of each contribution follows from the log."""
    weights = state.standing.weigh(commit.contributions)
    for contribution, weight in zip(commit.contributions, weights, strict=True):
        if contribution.standing != weight:
            said = f"counts with {contribution.standing:.6g} of its weight"
            yield f"replica {contribution.replica} {said}, by what the log says of its makers with {weight:.6g}"


def leaves_out_its_makers(state: RunState, commit: Commit) -> Iterator[str]:
    """Makers are named for judged work only, and are the planned peers or spares."""
    for left in commit.left_out:
        if left.peers and (left.judged is None or state.standing.spec_of(left.replica, left.peers) is None):
            yield f"replica {left.replica} is said to be of others than its plan and its spares, or was not judged"


def blames_known_makers(state: RunState, commit: Commit) -> Iterator[str]:
    """Work that was judged and left out has named makers, and those at fault are among them."""
    for left in commit.left_out:
        if left.judged is not None and not left.peers:
            yield f"leaves out replica {left.replica} as judged, and does not say whose work it was"
        fits = len(left.faults) in (0, len(left.peers)) and set(left.faults) <= {"0", "1"}
        if not fits or (left.probation and left.faults):
            yield f"lays the fault of replica {left.replica} to others than its makers, or finds none"


def names_makers_once(state: RunState, commit: Commit) -> Iterator[str]:
    """No peer made two of the replicas that were counted or judged."""
    blamed = [peer for left in commit.left_out for peer in left.peers]
    if blamed and _repeated([*(share.peer for share in commit.shares), *blamed]):
        yield "names a peer twice"


def ends_no_probation_late(state: RunState, commit: Commit) -> Iterator[str]:
    """Work is left out for a probation only where that lasts."""
    for left in commit.left_out:
        if left.probation and not state.standing.is_on_probation(left.replica, left.peers):
            yield f"leaves out replica {left.replica} for a probation that is over"


def names_aggregates(state: RunState, commit: Commit) -> Iterator[str]:
    """It names the aggregates of the round before, of every shard, if that has any."""
    manifest, head = state.manifest, state.head
    if head is None or not aggregation.is_aggregated(manifest, head):
        if commit.aggregates:
            yield f"names aggregates of round {commit.round - 1}, which has none"
    elif (why := aggregation.why_not(manifest, commit.aggregates)) is not None:
        yield f"names aggregates of round {commit.round - 1}, and {why}"


# --- claims


def has_due_evaluations(state: RunState, commit: Commit) -> Iterator[str]:
    """Evaluations are of the state that is due, of its evaluators, signed, and one each."""
    return claims.why_not(state, commit, claims.EVALUATION)


def has_due_scores(state: RunState, commit: Commit) -> Iterator[str]:
    """Scores are of contributions to be scored, of their scorers, signed, and one each."""
    return claims.why_not(state, commit, claims.SCORE)


# --- the next plan


def plans_next_round(state: RunState, commit: Commit) -> Iterator[str]:
    """The plan is of the next round, and the run has one."""
    if commit.plan is None:
        return
    if commit.plan.round != commit.round + 1:
        yield f"plans round {commit.plan.round}, not the next one"
    if schedule.is_over(state.manifest, commit):
        yield "plans a round after the last one"


def plans_whole_models(state: RunState, commit: Commit) -> Iterator[str]:
    """The stages of a replica are the whole model, in order, each with a block."""
    for replica in _replicas(commit.plan):
        edges = [0, *(stage.last for stage in replica.stages)]
        if [s.first for s in replica.stages] != edges[:-1] or edges[-1] != state.manifest.model.n_layers:
            yield f"plans replica {replica.number} with stages that are not the whole model"
        elif any(stage.last <= stage.first for stage in replica.stages):
            yield f"plans replica {replica.number} with a stage without blocks"


def plans_peers_once(state: RunState, commit: Commit) -> Iterator[str]:
    """No peer is in two replicas that train, or in two that form."""
    plan = commit.plan
    if plan is not None and any(_repeated(p for r in part for p in r.peers) for part in (plan.replicas, plan.forming)):
        yield "plans a peer twice"


def plans_spares_apart(state: RunState, commit: Commit) -> Iterator[str]:
    """A spare trains in no replica, and is named once."""
    plan = commit.plan
    if plan is None:
        return
    if set(plan.spares).intersection(p for replica in plan.replicas for p in replica.peers):
        yield "plans a spare"
    if _repeated(plan.spares):
        yield "names a spare twice"


def plans_no_resting_peer(state: RunState, commit: Commit) -> Iterator[str]:
    """Those who rest are planned only where the others make not even one replica."""
    plan = commit.plan
    resting = {peer for peer in plan.peers if state.standing.rests(peer)} if plan is not None else set[str]()
    if resting and any(resting.isdisjoint(replica.peers) for replica in _replicas(plan)):
        yield f"plans {', '.join(sorted(map(short_peer, resting)))}, for whom the log says no place"


def numbers_are_new(state: RunState, commit: Commit) -> Iterator[str]:
    """A number names one replica of the run, for ever."""
    plan, latest = commit.plan, state.latest
    if plan is None:
        return
    numbers = [r.number for r in plan.replicas] + [seat.number for seat in plan.seats]
    if _repeated(numbers) or not all(0 <= n < plan.next_number for n in numbers):
        yield f"plans replicas under the numbers {numbers}"
    first = latest.next_number if latest is not None else 0
    known = _numbers(latest)
    for replica in plan.replicas:
        if 0 <= replica.number < first and replica.number not in known:
            yield f"plans replica {replica.number}, which was another one"
    if not first <= plan.next_number <= first + plan.count + len(plan.seats):
        yield "skips numbers of replicas"


def text_is_given_once(state: RunState, commit: Commit) -> Iterator[str]:
    """Every slot of text is given to one replica, in turn, and none is left out."""
    plan, latest = commit.plan, state.latest
    if plan is None:
        return
    first = latest.next_slot if latest is not None else 0
    at = first
    for start, length in sorted((work.slot, _slots(state.manifest, work)) for work in _new_work(latest, plan)):
        if start < at:
            yield "gives out text that was given already"
            return
        at = start + length
    train = state.manifest.train
    most = train.inner_steps * train.micro_batches * train.rows
    if not at <= plan.next_slot <= first + most * 2 * (plan.count + len(plan.seats)):
        yield "skips text"


# --- parts of rules


def _work(state: RunState, commit: Commit) -> Iterator[tuple[Contribution, ReplicaSpec]]:
    """Each contribution, with the planned replica or the seat whose work it is."""
    if state.plan is None:
        return
    for contribution in commit.contributions:
        spec = state.plan.taken(contribution.replica, contribution.peers, state.manifest.model.n_layers)
        if spec is not None:
            yield contribution, spec


def _are_members(state: RunState, spec: ReplicaSpec, contribution: Contribution) -> bool:
    if contribution.peers == spec.peers:
        return True
    return state.plan is not None and spec.is_chain and state.plan.allows(spec, contribution.peers)


def _replicas(plan: Plan | None) -> tuple[ReplicaSpec, ...]:
    """Returns the replicas that train and those that are forming."""
    return (*plan.replicas, *plan.forming) if plan is not None else ()


def _numbers(plan: Plan | None) -> frozenset[int]:
    """The numbers that a plan has given, of replicas and seats."""
    if plan is None:
        return frozenset()
    return frozenset([*(r.number for r in plan.replicas), *(seat.number for seat in plan.seats)])


def _new_work(latest: Plan | None, plan: Plan) -> Iterator[Work]:
    """The work that `plan` gives and `latest` had not given."""
    yield from (seat.work for seat in plan.seats)
    for replica in plan.replicas:
        before = latest.find(replica.number) if latest is not None else None
        if before is None or replica.work != before.following:
            yield replica.work
        if replica.following is not None:
            yield replica.following


def _slots(manifest: Manifest, work: Work) -> int:
    return work.steps * work.micro_batches * manifest.train.rows


def _repeated(items: Iterable[Hashable]) -> bool:
    there = list(items)
    return len(set(there)) < len(there)


RULES: tuple[Rule, ...] = (
    is_readable,
    is_within_run,
    counts_idle_rounds,
    is_lawful,
    says_something,
    plans_admitted_peers,
    admits_invited_peers,
    decides_every_replica,
    counts_planned_peers,
    counts_peers_once,
    weighs_by_tokens,
    counts_no_diverged_peer,
    refutes_by_a_digest,
    has_readable_lists,
    counts_no_probation,
    seats_no_resting_peer,
    weighs_by_reputation,
    leaves_out_its_makers,
    blames_known_makers,
    names_makers_once,
    ends_no_probation_late,
    names_aggregates,
    has_due_evaluations,
    has_due_scores,
    plans_next_round,
    plans_whole_models,
    plans_peers_once,
    plans_spares_apart,
    plans_no_resting_peer,
    numbers_are_new,
    text_is_given_once,
)
