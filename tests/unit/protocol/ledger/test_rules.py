"""The list of rules: every lie breaks its rule for all callers, honest logs break none, and each rule is needed."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from peer import events
from peer.log.reader import BadPayload
from peer.log.replay import verify
from peer.node.log_reader import Follower
from protocol.identity import Identity
from protocol.ledger import access, part_lists, rules, run_state
from protocol.ledger.history import BadCommit, follow
from protocol.ledger.rules import RULES
from protocol.ledger.run_state import RunState
from protocol.round import fairness, judging
from protocol.run.manifest import AdmissionSpec, Manifest
from protocol.wire import encoding
from protocol.wire.claims import Evaluation, Mark, Score
from protocol.wire.commit import DOMAIN, Aggregate, Commit, Contribution, Diverged, LeftOut, Share
from protocol.wire.decree import BAN, SET, Board, Decree, Enacted, Joined, Operator, Schedule
from protocol.wire.plan import Plan, ReplicaSpec, Seat, StageSpec, Work
from tests.support import tiny

LAYERS = tiny.LAYERS
OPERATOR = tiny.OPERATOR
RUN = tiny.manifest(rounds=12, start_peers=4, admission=AdmissionSpec(probation=2))
FOUNDERS = ("f0", "f1", "f2", "f3")
STEPS, MICRO_BATCHES = 4, 2
SLOTS = STEPS * MICRO_BATCHES
SIGNATURE = b"\0" * 64
KEY = Identity(b"\7" * 32).peer_id
Change = Callable[[Commit], Commit]


# --- an honest run: four founders, a chain with a spare, and a newcomer


def full(peer: str) -> tuple[StageSpec, ...]:
    return (StageSpec(peer=peer, first=0, last=LAYERS),)


CHAIN = (StageSpec(peer="c0", first=0, last=1), StageSpec(peer="c1", first=1, last=LAYERS))


def planned(state: RunState, *members: tuple[StageSpec, ...], seats: int = 0) -> Plan:
    """The next plan, with these replicas: those that were there keep their numbers."""
    before = state.latest
    slot, number = (before.next_slot, before.next_number) if before is not None else (0, 0)
    known = {r.stages: r.number for r in before.replicas} if before is not None else {}
    replicas, free = [], []
    for stages in members:
        own = known.get(stages, number)
        number += own == number
        work = Work(slot=slot, steps=STEPS, micro_batches=MICRO_BATCHES)
        replicas.append(ReplicaSpec(number=own, stages=stages, work=work))
        slot += SLOTS
    for _ in range(seats):
        free.append(Seat(number=number, work=Work(slot=slot, steps=STEPS, micro_batches=MICRO_BATCHES)))
        number, slot = number + 1, slot + SLOTS
    return Plan(
        round=state.round + 1,
        replicas=tuple(replicas),
        seats=tuple(free),
        spares=("spare",),
        next_number=number,
        next_slot=slot,
    )


def contribution(number: int, *peers: str) -> Contribution:
    root = tiny.digest("/".join(peers))
    shares = tuple(Share(peer=p, root=root, size=8, norm=1.0, listed=part_lists.longest(RUN)) for p in peers)
    tokens = RUN.train.tokens(STEPS, MICRO_BATCHES)
    return Contribution(replica=number, tokens=tokens, steps=STEPS, loss=2.0, shares=shares)


def judged(number: int, *peers: str, probation: bool = False) -> LeftOut:
    name = judging.name_of(contribution(number, *peers))
    faults = "" if probation else "1" * len(peers)
    return LeftOut(replica=number, reason="judged", judged=name, peers=peers, probation=probation, faults=faults)


def next_commit(state: RunState, plan: Plan | None, out: Sequence[LeftOut] = ()) -> Commit:
    """An honest commit of the open round: what is not left out is counted."""
    gone = {x.replica for x in out}
    specs = [r for r in state.plan.replicas if r.number not in gone] if state.plan is not None else []
    made = [contribution(r.number, *r.peers) for r in specs]
    weights = state.standing.weigh(made)
    weighed = tuple(dataclasses.replace(c, standing=w) for c, w in zip(made, weights, strict=True))
    return tiny.commit(RUN, state.head, time=1.0, contributions=weighed, left_out=tuple(out), plan=plan)


EVERYBODY = (*map(full, FOUNDERS), CHAIN)


def swarm() -> list[Commit]:
    """Two rounds: the newcomer "new" is planned for round 2."""
    state = run_state.begin(RUN)
    log = [next_commit(state, planned(state, *EVERYBODY))]
    state = state.apply(log[-1])
    log.append(next_commit(state, planned(state, *EVERYBODY, full("new"), seats=1)))
    return log


def third(state: RunState) -> Commit:
    """The commit of round 2: the newcomer is on probation."""
    return next_commit(state, planned(state, *EVERYBODY, full("new")), [judged(5, "new", probation=True)])


def fallen() -> list[Commit]:
    """The work of "f3" was left out until it lost its reputation; then it is not planned, and there is a seat."""
    log, state = swarm()[:1], run_state.fold(RUN, swarm()[:1])
    while not state.standing.rests("f3"):
        log.append(next_commit(state, planned(state, *EVERYBODY), [judged(3, "f3")]))
        state = state.apply(log[-1])
    others = [stages for stages in EVERYBODY if stages != full("f3")]
    log.append(next_commit(state, planned(state, *others, seats=1), [judged(3, "f3")]))
    return log


def without_fallen(state: RunState) -> Commit:
    return next_commit(state, planned(state, *(stages for stages in EVERYBODY if stages != full("f3"))))


def last() -> list[Commit]:
    """All rounds but the last one."""
    log, state = list[Commit](), run_state.begin(RUN)
    for _ in range(RUN.rounds):
        log.append(next_commit(state, planned(state, *EVERYBODY)))
        state = state.apply(log[-1])
    return log


def over() -> list[Commit]:
    return [*last(), next_commit(run_state.fold(RUN, last()), None)]


# --- the table


def says(**changes: Any) -> Change:
    return lambda commit: dataclasses.replace(commit, **changes)


def plan_says(**changes: Any) -> Change:
    def change(commit: Commit) -> Commit:
        assert commit.plan is not None
        return dataclasses.replace(commit, plan=dataclasses.replace(commit.plan, **changes))

    return change


def replica(index: int, **changes: Any) -> Change:
    """One replica of the plan, with these changes."""

    def change(commit: Commit) -> Commit:
        there = list(commit.plan.replicas)
        there[index] = dataclasses.replace(there[index], **changes)
        return plan_says(replicas=tuple(there))(commit)

    return change


def work(index: int, **changes: Any) -> Change:
    """One contribution, with these changes."""

    def change(commit: Commit) -> Commit:
        there = list(commit.contributions)
        there[index] = dataclasses.replace(there[index], **changes)
        return dataclasses.replace(commit, contributions=tuple(there))

    return change


def share(index: int, **changes: Any) -> Change:
    """The first share of one contribution, with these changes."""
    return lambda c: work(index, shares=(dataclasses.replace(c.contributions[index].shares[0], **changes),))(c)


def adds(*more: Contribution) -> Change:
    return lambda c: dataclasses.replace(c, contributions=(*c.contributions, *more))


def drops(index: int, *instead: LeftOut) -> Change:
    """One contribution is not counted, and this is left out."""

    def change(commit: Commit) -> Commit:
        kept = tuple(c for i, c in enumerate(commit.contributions) if i != index)
        return dataclasses.replace(commit, contributions=kept, left_out=(*instead, *commit.left_out))

    return change


def left(**changes: Any) -> Change:
    """What is left out, with these changes."""
    return lambda c: dataclasses.replace(c, left_out=tuple(dataclasses.replace(x, **changes) for x in c.left_out))


def decreed(wish: Decree, *keys: Identity, count: int = 1) -> Change:
    body = DOMAIN + encoding.encode(wish)
    return says(decree=Enacted(decree=wish, signatures={k.peer_id: k.sign(body) for k in keys}), decrees=count)


def ban(subject: str, **changes: Any) -> Decree:
    return Decree(**{"run": RUN.run_id, "number": 0, "action": BAN, "subject": subject, **changes})


def invited(*seeds: int, operator: Identity = OPERATOR, count: int = 1) -> tuple[Joined, ...]:
    """Peers with these seeds show an invitation for `count`."""
    ticket = access.issue(operator, b"\5" * 32, RUN.run_id, expires=10**6, count=count, reason="")
    return tuple(ticket.joined(Identity(bytes([seed]) * 32).peer_id) for seed in seeds)


def gap(second: int) -> tuple[StageSpec, ...]:
    return (StageSpec(peer="c0", first=0, last=1), StageSpec(peer="c1", first=second, last=LAYERS))


SHORT = Schedule(rounds=1, total_steps=10**6)
SIXTEENTH = Work(slot=0, steps=1, micro_batches=1)
EVALUATION = Evaluation(peer=KEY, round=1, sequences=1, loss=1.0, bits_per_byte=1.0, signature=SIGNATURE)
SCORE = Score(peer=KEY, round=1, marks=(Mark(replica=0, assigned=0.1, other=0.1),), signature=SIGNATURE)


@dataclass(frozen=True)
class Lie:
    """A commit that no honest leader writes."""

    rule: str
    reason: str
    change: Change
    log: Callable[[], list[Commit]] = swarm
    honest: Callable[[RunState], Commit] = third
    before: str = ""
    """What a reader of the log finds before it asks the rules, where it finds something."""


LIES = [
    Lie("is_within_run", "the run has 12 rounds only", lambda c: c, over, lambda s: next_commit(s, None)),
    Lie("counts_idle_rounds", "counts 1 rounds without work", says(idle=1)),
    Lie("counts_idle_rounds", "counts 0 rounds without work", lambda c: says(contributions=(), left_out=tuple(
        LeftOut(replica=n, reason="?") for n in range(6)))(c)),
    Lie("says_something", "says nothing", lambda c: says(contributions=(), plan=None, left_out=tuple(
        LeftOut(replica=n, reason="?") for n in range(6)))(c)),
    Lie("is_lawful", "how long the run is", says(schedule=Schedule(rounds=99, total_steps=10**6))),
    Lie("is_lawful", "counts 3 decrees", says(decrees=3)),
    Lie("is_lawful", "who operates the run", says(board=Board(operators=(Operator(peer=KEY),), quorum=1)),
        before="names other members"),
    Lie("is_lawful", "too few of its members signed", decreed(ban("f0"))),
    Lie("is_lawful", "too few of its members signed", decreed(ban("f0"), tiny.OPERATORS[1])),
    Lie("is_lawful", "wrong signature", says(decree=Enacted(
        decree=ban("f0"), signatures={OPERATOR.peer_id: SIGNATURE}), decrees=1)),
    Lie("is_lawful", "decree of another time", decreed(ban("f0", number=7), OPERATOR)),
    Lie("is_lawful", "decree of another time", decreed(ban("f0", run="0" * 64), OPERATOR)),
    Lie("is_lawful", "comes too late", lambda c: says(schedule=SHORT)(
        decreed(ban("", action=SET, schedule=SHORT), OPERATOR)(c))),
    Lie("is_lawful", "lets in", says(joined=invited(1, operator=tiny.OPERATORS[1]))),
    Lie("admits_invited_peers", "may take part already", says(joined=invited(1))),
    Lie("plans_admitted_peers", "plans f1, and it is banned", decreed(ban("f1"), OPERATOR)),
    Lie("decides_every_replica", "decides about replicas", drops(0)),
    Lie("decides_every_replica", "decides about replicas", adds(contribution(0, "f0"))),
    Lie("decides_every_replica", "decides about replicas", adds(contribution(99, "x"))),
    Lie("decides_every_replica", "decides about replicas", says(left_out=())),
    Lie("counts_planned_peers", "has other peers", work(0, shares=())),
    Lie("counts_planned_peers", "has other peers", share(0, peer="stranger")),
    Lie("counts_planned_peers", "has other peers", share(0, peer="spare")),
    Lie("counts_planned_peers", "has other peers", work(4, shares=contribution(4, "c1", "c0").shares)),
    Lie("counts_peers_once", "counts a peer twice", share(0, peer="f1")),
    Lie("counts_peers_once", "counts a peer twice", work(4, shares=contribution(4, "spare", "spare").shares)),
    Lie("weighs_by_tokens", "its weight is wrong", work(0, tokens=10**6)),
    Lie("weighs_by_tokens", "its weight is wrong", work(0, steps=1)),
    Lie("weighs_by_tokens", "its weight is wrong", work(0, steps=8, tokens=RUN.train.tokens(8, MICRO_BATCHES))),
    Lie("counts_no_diverged_peer", "the state of f0 differed", says(diverged=(Diverged(peer="f0", shard="embed"),))),
    Lie("refutes_by_a_digest", "not by what", says(diverged=(Diverged(peer="x", shard="embed", refuted=True),))),
    Lie("has_readable_lists", "list of parts", share(0, listed=0)),
    Lie("has_readable_lists", "list of parts", share(0, listed=2**40)),
    Lie("counts_no_probation", "counts replica 5, which is on probation", lambda c: adds(
        contribution(5, "new"))(says(left_out=())(c))),
    Lie("seats_no_resting_peer", "for whom the log says no place", adds(contribution(5, "f3")), fallen, without_fallen),
    Lie("weighs_by_reputation", "counts with 0.5", work(0, standing=0.5)),
    Lie("weighs_by_reputation", "counts with 1e-06", work(0, standing=1e-6)),
    Lie("leaves_out_its_makers", "was not judged", left(judged=None)),
    Lie("leaves_out_its_makers", "of others than its plan", drops(4, judged(4, "f0", "x"))),
    Lie("blames_known_makers", "does not say whose work", drops(0, dataclasses.replace(judged(0, "f0"), peers=()))),
    Lie("blames_known_makers", "to others than its makers", drops(0, dataclasses.replace(judged(0, "f0"),
        faults="01"))),
    Lie("names_makers_once", "names a peer twice", drops(0, judged(0, "f1"))),
    Lie("ends_no_probation_late", "a probation that is over", drops(0, judged(0, "f0", probation=True))),
    Lie("names_aggregates", "which has none", says(aggregates=(
        Aggregate(shard="embed", digest="0" * 64, size=1),))),
    Lie("has_due_evaluations", "is not due", says(evaluations=(EVALUATION,))),
    Lie("has_due_evaluations", "for the second time", says(evaluations=(EVALUATION, EVALUATION))),
    Lie("has_due_scores", "has a score", says(scores=(SCORE,))),
    Lie("has_due_scores", "for the second time", says(scores=(SCORE, SCORE))),
    Lie("plans_next_round", "plans round 7", plan_says(round=7)),
    Lie("plans_next_round", "after the last one", lambda c: c, last, lambda s: next_commit(s, planned(s, *EVERYBODY))),
    Lie("plans_whole_models", "not the whole model", replica(0, stages=(StageSpec(peer="f0", first=0, last=1),))),
    Lie("plans_whole_models", "not the whole model", replica(4, stages=gap(2))),
    Lie("plans_whole_models", "not the whole model", replica(4, stages=gap(0))),
    Lie("plans_whole_models", "not the whole model", replica(0, stages=())),
    Lie("plans_whole_models", "without blocks", replica(0, stages=(
        *full("f0"), StageSpec(peer="x", first=LAYERS, last=LAYERS)))),
    Lie("plans_whole_models", "not the whole model", plan_says(
        forming=(ReplicaSpec(number=9, stages=gap(2)),), forming_since=(1,))),
    Lie("plans_peers_once", "plans a peer twice", replica(0, stages=full("f1"))),
    Lie("plans_peers_once", "plans a peer twice", plan_says(
        forming=tuple(ReplicaSpec(number=n, stages=full("x")) for n in (9, 10)), forming_since=(1, 1))),
    Lie("plans_spares_apart", "plans a spare", plan_says(spares=("f0",))),
    Lie("plans_spares_apart", "names a spare twice", plan_says(spares=("spare", "spare"))),
    Lie("plans_no_resting_peer", "for whom the log says no place", lambda c: c, fallen,
        lambda s: next_commit(s, planned(s, *EVERYBODY))),
    Lie("numbers_are_new", "under the numbers", replica(0, number=1)),
    Lie("numbers_are_new", "under the numbers", plan_says(next_number=3)),
    Lie("numbers_are_new", "which was another one", replica(0, number=6), lambda: [*swarm(), third(
        run_state.fold(RUN, swarm()))],
        lambda s: next_commit(s, planned(s, *EVERYBODY), [judged(5, "new", probation=True)])),
    Lie("numbers_are_new", "skips numbers", plan_says(next_number=2**40)),
    Lie("text_is_given_once", "given already", replica(0, work=SIXTEENTH)),
    Lie("text_is_given_once", "given already", lambda c: replica(0, work=c.plan.replicas[1].work)(c)),  # type: ignore[union-attr]
    Lie("text_is_given_once", "given already", lambda c: replica(0, following=c.plan.replicas[0].work)(c)),  # type: ignore[union-attr]
    Lie("text_is_given_once", "skips text", plan_says(next_slot=2**61)),
    Lie("text_is_given_once", "skips text", plan_says(next_slot=0)),
]  # fmt: skip
NAMES = [f"{i} {lie.rule}: {lie.reason}" for i, lie in enumerate(LIES)]


def audited(manifest: Manifest, commits: Sequence[Commit]) -> list[str]:
    """What `potluck log verify` says of the last of these, which the only operator has signed."""

    async def log() -> AsyncIterator[bytes]:
        for commit in commits:
            yield encoding.encode_record(tiny.record(commit))

    async def nothing(digest: str, size: int) -> bytes:
        raise BadPayload("it is not here")

    found = asyncio.run(verify(manifest, log(), nothing, lambda problem: None))
    return [x.reason for x in found.problems if x.round == commits[-1].round and "list of parts" not in str(x)[:40]]


def reported(commits: Sequence[Commit]) -> list[str]:
    """Violations that a peer reports of the last of these, which it follows one after the other."""
    found = list[events.Body]()
    follower = Follower(RUN, found.append)
    for end in range(len(commits) + 1):
        follower.follow(dict(enumerate(commits[:end])))
    assert follower.state.head == commits[-1], "it goes on"
    return [x.reason for x in found if isinstance(x, events.Violation) and x.round == commits[-1].round]


def lists(reason: str) -> bool:
    """Whether it is about lists that are not there, as nothing is in these logs."""
    return reason.startswith("list of parts")


@pytest.mark.parametrize("lie", LIES, ids=NAMES)
def test_a_lie_breaks_its_rule_for_voters_auditors_and_peers(lie: Lie) -> None:
    log = lie.log()
    state = run_state.fold(RUN, log)
    commit = lie.change(lie.honest(state))
    found = [(v.rule, v.reason) for v in rules.check(state, commit)]
    assert any(rule == lie.rule and lie.reason in reason for rule, reason in found), found
    unfair = fairness.lie_in(fairness.NodeView(state=state, chains=None, wall=1.0), commit)
    assert unfair.lie
    assert any((lie.before or lie.reason) in reason for reason in audited(RUN, [*log, commit]))
    assert any(reason in {reason for _, reason in found} for reason in reported([*log, commit]))


@pytest.mark.parametrize("rule", RULES, ids=[rule.__name__ for rule in RULES])
def test_without_any_one_rule_a_lie_is_missed(rule: rules.Rule) -> None:
    if rule is rules.is_readable:
        pytest.skip("its lie has a test of its own in test_fairness.py: a commit of 64 MiB")
    others = [other for other in RULES if other is not rule]
    missed = []
    for lie in (lie for lie in LIES if lie.rule == rule.__name__):
        state = run_state.fold(RUN, lie.log())
        found = [v.reason for v in rules.check(state, lie.change(lie.honest(state)), others)]
        missed.append(not any(lie.reason in reason for reason in found))
    assert any(missed)


@pytest.mark.parametrize(
    ("log", "honest"), [(swarm, third), (fallen, without_fallen), (last, lambda s: next_commit(s, None))]
)
def test_an_honest_log_breaks_no_rule(log: Callable[[], list[Commit]], honest: Callable[[RunState], Commit]) -> None:
    commits = log()
    commits.append(honest(run_state.fold(RUN, commits)))
    for end in range(len(commits)):
        state = run_state.fold(RUN, commits[:end])
        assert list(rules.check(state, commits[end])) == []
    assert [reason for reason in audited(RUN, commits) if not lists(reason)] == []
    assert reported(commits) == []


def test_a_state_is_the_same_however_the_log_is_folded() -> None:
    log = fallen()
    state = run_state.begin(RUN)
    for commit in log:
        state = state.apply(commit)
    assert state == run_state.fold(RUN, log)
    assert (state.round, state.head, state.latest) == (len(log), log[-1], log[-1].plan)
    assert state.medians == run_state.medians(log)


def test_what_a_record_stands_on_is_checked_before_any_rule() -> None:
    """The run, the round, the parent, the leader, the members and the votes: no reader goes on after such a record."""
    log = swarm()
    honest = third(run_state.fold(RUN, log))
    follow(RUN, log[-1], encoding.encode_record(tiny.record(honest)))
    for change in (
        says(run="0" * 64),
        says(round=7),
        says(parent="0" * 64),
        says(leader=KEY),
        says(members=(KEY,)),
        replica(0, work=Work(slot=0, steps=99, micro_batches=MICRO_BATCHES)),
    ):
        with pytest.raises(BadCommit):
            follow(RUN, log[-1], encoding.encode_record(tiny.record(change(honest))))
    with pytest.raises(BadCommit):
        follow(RUN, log[-1], encoding.encode_record(tiny.record(honest, tiny.OPERATORS[1])))
