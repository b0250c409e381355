"""Newcomers of an open run: judging of their work, the leader's machine, and commits that get no vote."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from protocol.ledger import standing
from protocol.ledger.standing import REST_ROUNDS, Finding, Reputation
from protocol.round import judging
from protocol.round.judging import JudgingJob, PreviousRound, Verdict
from protocol.round.leader_events import Decided, Effect, Gone, Held, Propose, Received, Resting, Send
from protocol.run import layout
from protocol.run.manifest import AdmissionSpec
from protocol.wire.commit import Commit, LeftOut
from protocol.wire.session import TakeSeat
from tests.support import judging as sent
from tests.support import tiny
from tests.support.judging import GOOD, PARENT, M, Sent, update
from tests.support.leader import FULL, QUICK, Driver
from tests.support.rules import of_standing

ALIKE = "it is almost the same as another's, which counts"
NOTHING = sent.times(GOOD[0], 0.0)


def named(one: Sent, who: int) -> tuple[str, judging.Update]:
    return sent.names(250)[who], update(one)


def newcomers(
    works: Sequence[Sent], among: Sequence[Sent] = GOOD[:4], before: PreviousRound | None = None
) -> dict[int, str]:
    """What is found of newcomers who send this, where those who are established send `among`."""
    counted = [named(one, i) for i, one in enumerate(among)]
    new = [named(one, 100 + i) for i, one in enumerate(works)]
    return sent.out(judging.judge_newcomers(M, PARENT, counted, new, before or PreviousRound()))


# --- how they are judged


def test_honest_newcomers_serve() -> None:
    assert newcomers(GOOD[4:]) == {}
    assert newcomers(GOOD[1:], GOOD[:1]) == {}
    assert newcomers(GOOD, []) == {}


@pytest.mark.parametrize("among", [0, 1, 2, 4, 7])
@pytest.mark.parametrize(
    ("work", "why"),
    [
        (NOTHING, "it changes nothing"),
        (GOOD[0], ALIKE),
        (sent.times(GOOD[0], 1.2), ALIKE),
        (sent.times(GOOD[7], 1e36), "is over 10 times the median"),
    ],
)
def test_zeros_copies_and_what_is_far_too_long_serve_nothing_among_however_few(
    work: Sent, why: str, among: int
) -> None:
    if why == ALIKE and among == 0:
        found = newcomers([GOOD[0], GOOD[5], work], [])
        assert list(found.values()) == [why], "one of the two that are alike serves, whoever was there before"
        assert not found.keys() & {1}
    elif "median" in why:
        assert among < 2 or why in newcomers([work], GOOD[:among])[0]
    else:
        assert newcomers([work], GOOD[:among]) == {0: why}


@pytest.mark.parametrize("enemy", sent.ENEMIES)
def test_who_works_against_those_who_count_serves_nothing(enemy: str) -> None:
    assert list(newcomers([GOOD[5], sent.ENEMIES[enemy], GOOD[6]])) == [1]
    assert list(newcomers([sent.ENEMIES[enemy]] * 2, GOOD[:6])) == [0, 1]


def test_thirty_newcomers_have_no_say_about_anybody() -> None:
    """Without probation the noise of thirty hides everything: no two agree. With it the four are judged
    as if alone, and each of the thirty against the four."""
    noise = [sent.encoded(sent.drawn(200 + i, 1.8)) for i in range(30)]
    undefended = sent.out(
        judging.judge(M, PARENT, sent.names(34), [update(x) for x in (*GOOD[:4], *noise)], PreviousRound())
    )
    assert len(undefended) < 10
    assert set(newcomers([*noise[:15], GOOD[5], *noise[15:]])) == set(range(31)) - {15}


def test_one_machines_work_under_thirty_names_serves_one_of_them() -> None:
    slightly = [sent.times(GOOD[5], 1 + i / 100) for i in range(30)]
    found = newcomers(slightly)
    assert len(found) == 29
    assert set(found.values()) == {ALIKE}


def test_the_work_of_the_round_before_serves_nothing() -> None:
    before = PreviousRound((), (update(GOOD[5]),))
    assert newcomers([sent.times(GOOD[5], 1.1)], before=before) == {0: "it repeats the round before"}


def case(works: Sequence[Sent], trial: Sequence[int]) -> tuple[Commit, dict[int, judging.Update]]:
    """The commit of a round with these works, those of `trial` by newcomers, as an honest leader makes it."""
    updates = {i: update(x) for i, x in enumerate(works)}
    all_count = sent.commit(works, [Verdict(1.0)] * len(works))
    name = {c.replica: judging.name_of(c) for c in all_count.contributions}
    old = [i for i in updates if i not in trial]
    found = dict(
        zip(
            old,
            judging.judge(M, PARENT, [name[i] for i in old], [updates[i] for i in old], PreviousRound()),
            strict=True,
        )
    )
    counted = [(name[i], updates[i]) for i in old if found[i].reason is None]
    new = judging.judge_newcomers(M, PARENT, counted, [(name[i], updates[i]) for i in trial], PreviousRound())
    found |= dict(zip(trial, new, strict=True))
    made = [
        dataclasses.replace(c, scale=found[c.replica].scale)
        for c in all_count.contributions
        if c.replica in old and found[c.replica].reason is None
    ]
    left = [
        LeftOut(
            replica=c.replica,
            reason="?",
            judged=name[c.replica],
            peers=c.peers,
            probation=found[c.replica].reason is None,
        )
        for c in all_count.contributions
        if c.replica in trial or found[c.replica].reason is not None
    ]
    return dataclasses.replace(all_count, contributions=tuple(made), left_out=tuple(left)), updates


def test_voters_come_to_the_same_verdict_and_name_any_other() -> None:
    copy = sent.times(GOOD[6], 1.1)
    works = [*GOOD[:5], sent.ENEMIES["flipped"], GOOD[6], copy, sent.ENEMIES["noise"], NOTHING]
    trial = (6, 7, 8, 9)
    said, updates = case(works, trial)
    assert [c.replica for c in said.contributions] == [0, 1, 2, 3, 4]
    serves = next(x.replica for x in said.left_out if x.probation)
    assert [(x.replica, x.probation) for x in said.left_out] == [
        (5, False),
        (6, serves == 6),
        (7, serves == 7),
        (8, False),
        (9, False),
    ]

    def why(of: Commit, known: dict[int, judging.Update] = updates) -> str | None:
        return judging.why_unjust(M, of, known, PreviousRound(), set(trial))

    assert why(said) is None
    assert why(said, {i: updates[i] for i in range(6)}) is None, "who lacks the newcomers' work checks the rest"
    assert why(said, {i: updates[i] for i in range(5)}) is None

    def with_left(number: int, **changes: Any) -> Commit:
        changed = (dataclasses.replace(x, **changes) if x.replica == number else x for x in said.left_out)
        return dataclasses.replace(said, left_out=tuple(changed))

    assert "replica 8 serves its probation, although it disagrees" in str(why(with_left(8, probation=True)))
    assert "replica 9 serves its probation, although it changes nothing" in str(why(with_left(9, probation=True)))
    other = {6: 7, 7: 6}[serves]
    assert f"replica {other} serves its probation, although {ALIKE}" in str(why(with_left(other, probation=True)))
    assert "there is nothing wrong with it" in str(why(with_left(serves, probation=False)))
    assert "laid to others" in str(why(with_left(8, faults="1")))


@pytest.mark.parametrize("count", [1, 40])
def test_whoever_is_there_on_probation_changes_nothing_for_the_others(count: int) -> None:
    alone, _ = case(GOOD[:6], ())
    noise = [sent.encoded(sent.drawn(300 + i)) for i in range(count)]
    among, _ = case([*GOOD[:6], *noise], tuple(range(6, 6 + count)))
    assert [(c.replica, c.scale) for c in among.contributions] == [(c.replica, c.scale) for c in alone.contributions]


# --- what the leader makes of it

FOUNDERS = tuple("abcd")
OPEN = AdmissionSpec(probation=2)


def swarm(rounds: int = 12, **admission: Any) -> Driver:
    """Four founders, whose first round is decided; "new" has come since and is planned for the second."""
    of = tiny.manifest(rounds=rounds, start_peers=4, admission=dataclasses.replace(OPEN, **admission))
    driver = Driver(dict.fromkeys((*FOUNDERS, "new", "other"), FULL), of)
    driver.decide(driver.ready(*FOUNDERS))
    driver.attest(*FOUNDERS)
    driver.ready("new")
    driver.attest("new", shards=layout.shard_names(of.model))
    driver.decide(driver.offered(*FOUNDERS))
    driver.attest(*FOUNDERS, "new")
    assert driver.leader.plan.replica_of("new") is not None
    return driver


def next_round(driver: Driver, *peers: str) -> Commit:
    commit = driver.decide(driver.offered(*peers))
    driver.attest(*peers)
    return commit


def test_a_newcomers_work_has_no_weight_for_its_rounds_and_then_counts() -> None:
    driver = swarm()
    everybody = (*FOUNDERS, "new")
    reasons = []
    for _ in range(2):
        commit = next_round(driver, *everybody)
        assert [c.peers for c in commit.contributions] == [(p,) for p in FOUNDERS]
        (out,) = commit.left_out
        assert (out.peers, out.probation, out.judged is not None) == (("new",), True, True)
        reasons.append(out.reason)
        assert of_standing(standing.of(driver.manifest, driver.commits[:-1]), commit) == []
    assert reasons == [
        "peer new: new here; its work is kept, and counts after 1 more round",
        "peer new: new here; its work is kept, and counts after this round",
    ]
    assert next_round(driver, *everybody).contributions[-1].peers == ("new",)
    assert not driver.leader.promises.rests("new", driver.leader.round), "to serve is no broken promise"


def test_a_node_that_starts_again_knows_the_same() -> None:
    driver = swarm()
    next_round(driver, *FOUNDERS, "new")
    again = Driver(driver.memory, driver.manifest, tuple(driver.commits))
    assert again.leader.standing == driver.leader.standing


def test_whoever_comes_by_a_seat_is_on_probation_from_its_first_contribution() -> None:
    of = tiny.manifest(rounds=12, start_peers=4, admission=OPEN, timing=QUICK)
    driver = Driver(dict.fromkeys((*FOUNDERS, "new"), FULL), of)
    driver.decide(driver.ready(*FOUNDERS))
    driver.attest(*FOUNDERS)
    driver.ready("new")
    seats = driver.attest("new", shards=layout.shard_names(of.model))
    assert any(isinstance(e, Send) and isinstance(e.message, TakeSeat) for e in seats)
    commit = driver.decide(driver.offered(*FOUNDERS, "new"))
    assert [(x.peers, x.probation) for x in commit.left_out] == [(("new",), True)]
    assert driver.leader.standing.left("new") == 1


def test_a_run_of_newcomers_alone_goes_on() -> None:
    """All founders are gone: as soon as the plan has none of them, the work of those who are there counts."""
    driver = swarm()
    driver.ready("other")
    next_round(driver, *FOUNDERS, "new")
    driver.attest("other", shards=layout.shard_names(driver.manifest.model))
    commit = next_round(driver, *FOUNDERS, "new")
    for peer in FOUNDERS:
        driver.do(Gone(peer))
    for _ in range(6):
        driver.now += driver.manifest.timing.round_deadline
        there = [
            p
            for p in ("new", "other")
            if driver.leader.plan is not None and driver.leader.plan.replica_of(p) is not None
        ]
        effects = driver.offered(*there)
        effects += driver.at(driver.now)
        if effects:
            commit = driver.decide([e for e in effects if not isinstance(e, Send)])
            driver.attest("new", "other")
    assert {c.peers for c in commit.contributions} >= {("new",)}


# --- which commits get no vote


def another(commit: Commit) -> Commit:
    """Another peer is said to have served."""
    return dataclasses.replace(
        commit, left_out=tuple(dataclasses.replace(x, peers=("other",)) for x in commit.left_out)
    )


# --- what is found again and again


def test_whoever_is_judged_out_again_and_again_loses_its_reputation_and_rests() -> None:
    def verdict(case: JudgingJob) -> list[Verdict]:
        return [Verdict(1.0, "noise", c.peers) if c.peers == ("new",) else Verdict(1.0) for c in case.contributions]

    driver = swarm(rounds=60, probation=0)
    told: list[Resting] = []
    for _ in range(40):
        plan = driver.leader.plan
        there = [p for p in (*FOUNDERS, "new") if plan is not None and plan.replica_of(p) is not None]
        effects: list[Effect] = []
        for peer in there:
            offer = driver.offer(peer)
            for effect in tiny.handle(driver.leader, Received(peer, offer), driver.now, verdict):
                effects.append(effect)
                for name in tiny.names(effect):
                    effects += tiny.handle(driver.leader, Held(name), driver.now, verdict)
        (commit,) = [e.commit for e in effects if isinstance(e, Propose)]
        driver.commits.append(commit)
        told += [e for e in driver.do(Decided(commit)) if isinstance(e, Resting)]
        driver.attest(*FOUNDERS, "new", shards=layout.shard_names(driver.manifest.model))
    known = driver.leader.standing.of("new")
    assert known.fell
    assert told[-1] == Resting("new", known.until)
    assert known.until > driver.leader.round + 10
    assert sum("new" in x.peers for c in driver.commits for x in c.left_out) == 4, "so often it was tried"
    assert standing.of(driver.manifest, driver.commits) == driver.leader.standing


def test_what_a_stranger_gains_who_throws_names_away() -> None:
    """With thirty fresh names: of each it has to bring 8 rounds of real work, for which it gets nothing at once, and
    which no peer can serve for two names; then findings after the fact, as of audits, halve its weight each time. So 8
    rounds of work buy less than two of harm."""
    of, names, harm, work = tiny.manifest(admission=AdmissionSpec(probation=8)), [f"x{i}" for i in range(30)], 0.0, 0
    for name in names:
        known = Reputation()
        while known.served < of.admission.probation:
            known, work = dataclasses.replace(known, served=known.served + 1), work + 1
        while not known.fell:
            harm += known.reputation
            known = known.found(Finding(name, False), 0)
    assert harm / work < 0.25
    fallen = Reputation().found(Finding("x", False), 0)
    for _ in range(3):
        fallen = fallen.found(Finding("x", False), 0)
    assert (fallen.served, fallen.until) == (0, REST_ROUNDS), "to come back takes longer than a new name"
