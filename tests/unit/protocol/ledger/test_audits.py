"""Which contributions are trained again and by whom, what of it has a place in a commit, and what two of one opinion decide."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from typing import Any

import pytest

from protocol.identity import Identity, short_peer
from protocol.ledger import audits, claims, rules, run_state, standing
from protocol.ledger.audits import EXAMINERS, KEPT_ROUNDS, LEAST_AGREEMENT, Audits, Found, Turn
from protocol.ledger.claims import Claims
from protocol.round import fairness
from protocol.round.leader_events import Received
from protocol.run.manifest import JudgingSpec, Manifest
from protocol.wire.claims import Audit
from protocol.wire.commit import MAX_AUDITS, Commit, Contribution
from protocol.wire.plan import Plan
from tests.support import tiny
from tests.support.leader import Driver
from tests.support.rules import due as open_for
from tests.support.rules import of_claims
from tests.support.tiny import contribution, replica

KEYS = tuple(Identity(bytes([8, i] * 16)) for i in range(8))
NAMES = tuple(key.peer_id for key in KEYS)
OF_NAME = dict(zip(NAMES, KEYS, strict=True))
WELL, BADLY = LEAST_AGREEMENT + 1, LEAST_AGREEMENT - 1


def run(share: float) -> Manifest:
    return tiny.manifest(rounds=10_000, start_peers=4, judging=JudgingSpec(audit_share=share))


ALL = run(1.0)
"""Half of all contributions are audited."""


def commit(round: int, *said: Audit, work: tuple[Contribution, ...] = (), **changes: Any) -> Commit:
    plan = Plan(round=round + 1, replicas=tuple(replica(i, p) for i, p in enumerate(NAMES)))
    return tiny.commit(ALL, **{"round": round, "contributions": work, "plan": plan, "audits": said, **changes})


EVERYBODY = tuple(contribution(i, p) for i, p in enumerate(NAMES))


def says(turn: Turn, peer: str, agreement: float, **changes: Any) -> Audit:
    plain = Audit(peer="", round=turn.round, replica=turn.replica, agreement=agreement, signature=b"")
    return claims.signed(OF_NAME[peer], turn.of, dataclasses.replace(plain, **changes))


def opened() -> tuple[Audits, Turn]:
    """A run in which one contribution is to be audited, and its turn."""
    for round in itertools.count(1):
        found = Audits(ALL).after(commit(round, work=EVERYBODY))
        if found.turns:
            only = dataclasses.replace(found, turns=found.turns[:1])
            return only, only.turns[0]
    raise AssertionError


# --- who


def test_each_is_audited_with_the_same_chance_and_examines_as_often_as_it_is_fast() -> None:
    share, rounds = 0.4, 4000
    work = tuple(contribution(i, p, tokens=64 * (1 + i % 2)) for i, p in enumerate(NAMES))
    found = [turn for r in range(rounds) for turn in audits.turns(run(share), commit(r, work=work))]
    expected = rounds * share / audits.TRAININGS
    for counted, weights in (
        (Counter(turn.maker for turn in found), dict.fromkeys(NAMES, 1.0)),
        (Counter(turn.examiners[0] for turn in found), {p: (1 + i % 2) / 1.5 for i, p in enumerate(NAMES)}),
    ):
        for name in NAMES:
            assert counted[name] == pytest.approx(weights[name] * expected, rel=0.2)
    spent = sum(audits.TRAININGS * work[turn.replica].tokens for turn in found)
    assert spent == pytest.approx(share * rounds * sum(c.tokens for c in work), rel=0.1), "the share of their time"
    for turn in found:
        assert len({turn.maker, *turn.examiners}) == 1 + EXAMINERS


def test_who_it_is_follows_from_the_digest_of_the_commit() -> None:
    drawn = [list(audits.turns(ALL, commit(3, work=EVERYBODY, time=float(t)))) for t in range(50)]
    assert len({tuple(t.replica for t in turns) for turns in drawn}) > 25
    again = list(audits.turns(ALL, commit(3, work=EVERYBODY, time=7.0)))
    assert again == drawn[7]


def test_chains_are_not_audited_and_do_not_examine_and_neither_does_who_is_planned_no_more() -> None:
    work = (
        contribution(0, NAMES[0]),
        contribution(1, NAMES[1], NAMES[2]),
        contribution(2, NAMES[3]),
        contribution(3, NAMES[4]),
    )
    plan = Plan(round=1, replicas=(replica(0, NAMES[0]), replica(1, NAMES[1], NAMES[2]), replica(2, NAMES[3])))
    found = [t for r in range(200) for t in audits.turns(ALL, commit(r, work=work, plan=plan))]
    assert {t.maker for t in found} == {NAMES[0], NAMES[3], NAMES[4]}
    assert {p for t in found for p in t.examiners} == {NAMES[0], NAMES[3]}
    alone = (contribution(0, NAMES[0]), contribution(1, NAMES[1], NAMES[2]))
    assert not [t for r in range(200) for t in audits.turns(ALL, commit(r, work=alone))], "nobody else could"
    assert not [t for r in range(200) for t in audits.turns(run(0.0), commit(r, work=EVERYBODY))]
    with pytest.raises(ValueError, match="audit_share must be in"):
        JudgingSpec(audit_share=1.5)


# --- what has a place


def test_what_has_no_place() -> None:
    known, turn = opened()
    first, second = turn.examiners[:2]
    right = says(turn, first, WELL)
    assert known.why_not(right) is None
    stranger = next(p for p in NAMES if p not in (turn.maker, *turn.examiners))
    for said, why in (
        (
            says(turn, first, WELL, round=turn.round + 1),
            f"is of replica {turn.replica} in round {turn.round + 1}, which is",
        ),
        (says(turn, second, WELL), f"is of {short_peer(second)}, whose turn it is not"),
        (says(turn, turn.maker, WELL), f"is of {short_peer(turn.maker)}, whose turn it is not"),
        (says(turn, stranger, WELL), f"is of {short_peer(stranger)}, whose turn it is not"),
        (dataclasses.replace(right, agreement=BADLY), f"is not signed by {short_peer(first)}"),
        (dataclasses.replace(says(turn, second, WELL), peer=first), f"is not signed by {short_peer(first)}"),
        (says(dataclasses.replace(turn, of="f" * 64), first, WELL), f"is not signed by {short_peer(first)}"),
    ):
        found = known.why_not(said)
        assert found is not None
        assert found.startswith(why)
        assert (of_claims(known, commit(turn.round + 1, said))) == [f"has an audit that {found}"]
        heard = Claims()
        heard.add(open_for(known), said)
        assert heard.next(open_for(known), Audit) == ()
    twice = of_claims(known, commit(turn.round + 1, right, right))
    assert twice == [f"has an audit that is told by {short_peer(first)} for the second time"]


def test_a_late_one_has_a_place_for_some_rounds() -> None:
    known, turn = opened()
    said = says(turn, turn.examiners[0], BADLY)
    for later in range(1, KEPT_ROUNDS):
        known = known.after(commit(turn.round + later, work=EVERYBODY))
        assert known.why_not(said) is None
    assert known.after(commit(turn.round + KEPT_ROUNDS)).why_not(said) is not None
    assert len(known.turns) <= KEPT_ROUNDS * len(NAMES), "what a run remembers is bounded"


def test_a_commit_has_few_and_the_rest_follow() -> None:
    known = functools.reduce(Audits.after, (commit(r, work=EVERYBODY) for r in range(KEPT_ROUNDS - 1)), Audits(ALL))
    heard = Claims()
    for turn in known.turns:
        heard.add(open_for(known), says(turn, turn.examiners[0], WELL))
        heard.add(open_for(known), says(turn, turn.examiners[0], BADLY))
    first = heard.next(open_for(known), Audit)
    assert len(first) == MAX_AUDITS < len(known.turns)
    assert {x.agreement for x in first} == {WELL}, "who has said something does not take it back"
    known = known.after(commit(KEPT_ROUNDS, *first))
    heard.forget(open_for(known))
    second = heard.next(open_for(known), Audit)
    assert len(second) == MAX_AUDITS
    assert not set(first) & set(second)


# --- what follows


def told(*agreements: float) -> tuple[list[Found], Audits, Turn]:
    """What comes out where the examiners say this, one after the other as their turns come."""
    known, turn = opened()
    out: list[Found] = []
    for place, agreement in enumerate(agreements):
        said = says(turn, turn.examiners[place], agreement)
        assert known.why_not(said) is None, place
        then = commit(turn.round + 1 + place, said)
        out += known.found(then)
        known = known.after(then)
    return out, known, turn


def test_one_who_finds_enough_ends_it() -> None:
    found, known, _ = told(WELL)
    assert (found, known.turns) == ([], ())


def test_one_alone_who_finds_too_little_is_a_claim() -> None:
    found, known, turn = told(BADLY)
    assert found == []
    assert known.turns[0].wanted == turn.examiners[1:]


def test_two_who_find_too_little_decide() -> None:
    found, known, turn = told(BADLY, BADLY)
    assert found == [Found(turn.maker, turn.round, False)]
    assert known.turns == ()


def test_whoever_is_alone_with_an_opinion_bears_it() -> None:
    found, known, turn = told(BADLY, WELL)
    assert (found, len(known.turns)) == ([], 1)
    found, known, turn = told(BADLY, WELL, WELL)
    assert found == [Found(turn.examiners[0], turn.round, True)]
    found, known, turn = told(BADLY, WELL, BADLY)
    assert found == [Found(turn.maker, turn.round, False), Found(turn.examiners[1], turn.round, True)]
    assert known.turns == ()


# --- the leader and the voters


def test_the_next_commit_says_what_was_found_and_voters_look() -> None:
    found_by = dict.fromkeys(NAMES[:4], tiny.full_memory(ALL))
    driver, other = Driver(found_by, ALL), Driver(found_by, ALL)
    for one in (driver, other):
        one.decide(one.ready(*NAMES[:4]))
        one.attest(*NAMES[:4])
    while not driver.leader.standing.audits.turns:
        decided = driver.decide(driver.offered(*NAMES[:4]))
        assert other.decide(other.offered(*NAMES[:4])) == decided
        for one in (driver, other):
            one.attest(*NAMES[:4])
    turn = driver.leader.standing.audits.turns[0]
    said = says(turn, turn.examiners[0], BADLY)
    driver.do(Received(turn.maker, said))  # in somebody else's session
    driver.do(Received(turn.examiners[1], says(turn, turn.examiners[1], WELL)))  # out of its turn
    driver.do(Received(turn.examiners[0], said))
    found = driver.decide(driver.offered(*NAMES[:4]))
    assert found.audits == (said,)
    other.offered(*NAMES[:4])
    sight = fairness.view_of(other.leader, found.time, 0.0, True)
    assert fairness.lie_in(sight, found) is None
    false = dataclasses.replace(found, audits=(dataclasses.replace(said, agreement=9.0),))
    lie = fairness.lie_in(sight, false)
    assert lie is not None
    assert lie.reason == f"has an audit that is not signed by {short_peer(turn.examiners[0])}"
    known = run_state.fold(ALL, driver.commits[:-1])
    assert lie.reason in [x.reason for x in rules.check(known, false)], "so does potluck log verify"


# --- what it costs


def test_whose_work_two_found_to_be_another_rests_and_whoever_is_alone_loses_half() -> None:
    for agreements, lost in (((BADLY, BADLY), "maker"), ((BADLY, WELL, WELL), "first"), ((WELL,), ""), ((BADLY,), "")):
        first = next(c for r in itertools.count(1) if len(list(audits.turns(ALL, c := commit(r, work=EVERYBODY)))) == 1)
        now = standing.of(ALL, [first])
        (turn,) = now.audits.turns
        for place, agreement in enumerate(agreements):
            now = now.after(commit(first.round + 1 + place, says(turn, turn.examiners[place], agreement)))
        for name in NAMES:
            known = now.of(name)
            if lost == "maker" and name == turn.maker:
                assert (known.fell, known.until) == (True, now.round + standing.REST_ROUNDS)
                assert now.rests(name)
            elif lost == "first" and name == turn.examiners[0]:
                assert known.reputation == 1 - standing.LOSS
            else:
                assert (known.reputation, known.fell) == (1.0, False)
