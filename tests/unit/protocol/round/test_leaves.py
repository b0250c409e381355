"""A peer that leaves says so, and holds nothing up: neither its round nor the next plan nor the end of the run."""

from __future__ import annotations

import dataclasses

import pytest

from protocol.planning.partition import Candidate
from protocol.round import stragglers
from protocol.round.leader import LEAVES_REASON
from protocol.round.leader_events import Done, Effect, Gone, MakePlan, Planned, Propose, Ready, Send, Tick
from protocol.wire.commit import Commit
from protocol.wire.session import ChainReconfig, Leave
from tests.support.leader import CHAIN, FULL, FULLS, GONE, SHARDS, THIRD, Driver, opened


def leaves(driver: Driver, peer: str) -> list[Effect]:
    """The peer says so, and what has to be planned is planned."""
    effects = driver.do(Gone(peer, leaves=True))
    done: list[Effect] = []
    for effect in effects:
        if isinstance(effect, MakePlan):
            done += driver.do(Planned(effect.question, effect.question.answer()))
        else:
            done.append(effect)
    return done


def planned(commit: Commit) -> set[str]:
    return set() if commit.plan is None else set(commit.plan.peers)


def test_a_round_does_not_wait_for_a_full_replica_that_leaves() -> None:
    driver = opened(FULLS)
    assert driver.offered("a") == []
    commit = driver.decide(leaves(driver, "b"))
    assert (driver.now, [x.reason for x in commit.left_out]) == (0.0, [f"peer b: {LEAVES_REASON}"])
    assert planned(commit) == {"a"}


def test_who_leaves_after_its_offer_is_committed_and_planned_no_more() -> None:
    driver = opened(FULLS)
    driver.offered("b")
    assert leaves(driver, "b") == []
    commit = driver.decide(driver.offered("a"))
    assert len(commit.contributions) == 2
    assert planned(commit) == {"a"}


def test_who_leaves_while_nobody_has_offered_is_not_waited_for_later() -> None:
    driver = opened(FULLS)
    assert leaves(driver, "b") == []
    assert [c.replica for c in driver.decide(driver.offered("a")).contributions] == [0]


def test_who_opens_another_session_is_planned_again() -> None:
    driver = opened(FULLS)
    leaves(driver, "b")
    driver.ready("b")
    driver.attest("b")
    assert planned(driver.decide(driver.offered("a"))) == {"a", "b"}


@pytest.mark.parametrize("spare", [True, False])
def test_a_member_of_a_chain_that_leaves_is_replaced_at_once_or_its_chain_ends(spare: bool) -> None:
    memory = {**CHAIN, "a": FULL, **({"f": THIRD} if spare else {})}
    driver = opened(memory)
    plan = driver.leader.plan
    (chain,) = [r for r in plan.replicas if r.is_chain]
    driver.attest(*memory, shards=SHARDS)
    (told,) = [e for e in leaves(driver, chain.peers[1]) if isinstance(e, Send)]
    assert isinstance(told.message, ChainReconfig)
    expected = (chain.peers[0], plan.spares[0], chain.peers[2]) if spare else ()
    assert told.message.peers == expected
    assert LEAVES_REASON in told.message.reason


def test_a_spare_that_leaves_takes_nobodys_place() -> None:
    memory = {**CHAIN, "a": FULL, "f": THIRD}
    driver = opened(memory)
    plan = driver.leader.plan
    driver.attest(*memory, shards=SHARDS)
    assert leaves(driver, plan.spares[0]) == []
    (chain,) = [r for r in plan.replicas if r.is_chain]
    (told,) = [e for e in leaves(driver, chain.peers[0]) if isinstance(e, Send)]
    assert isinstance(told.message, ChainReconfig)
    assert told.message.peers == ()


def test_the_last_one_that_leaves_ends_no_round_and_the_next_one_goes_on() -> None:
    driver = opened({"a": FULL})
    assert leaves(driver, "a") == []
    assert driver.at(3 * GONE) == []
    commit = driver.decide(driver.ready("a"))
    assert (planned(commit), commit.idle) == ({"a"}, 1)


def test_whoever_leaves_at_the_end_is_not_waited_for() -> None:
    driver = opened(FULLS)
    while driver.leader.plan is not None:
        driver.decide(driver.offered("a", "b"))
        driver.attest("a", *("b" if driver.leader.plan is not None else ""))
    assert leaves(driver, "b") == [Done(driver.leader.round - 1)]


def test_nobody_speaks_for_others_and_a_stranger_that_leaves_changes_nothing() -> None:
    driver = opened(FULLS)
    assert leaves(driver, "stranger") == []
    assert dataclasses.fields(Leave) == (), "it names nobody: it is about whose session it came in"
    assert len(driver.decide(driver.offered("a", "b")).contributions) == 2


# --- who is killed says nothing


def test_a_peer_without_a_session_is_waited_for_in_proportion_to_the_round() -> None:
    """Not for a lease: the others have brought their work after a second."""
    driver = opened(FULLS)
    driver.now = 1.0
    driver.offered("a")
    absent, now = frozenset({"b"}), 1.0
    while now < stragglers.ABSENT:
        driver.now = now
        assert not [e for e in driver.do(Tick(absent)) if isinstance(e, Propose)]
        now += 0.25
    driver.now = stragglers.ABSENT
    commit = driver.decide(driver.do(Tick(absent)))
    assert stragglers.ABSENT < GONE
    assert [x.reason for x in commit.left_out] == ["peer b: gone"]


def test_whoever_has_another_session_in_time_is_waited_for_again() -> None:
    driver = opened(FULLS)
    driver.now = 5.0
    driver.offered("a")
    driver.now = 6.0
    assert driver.do(Tick(frozenset({"b"}))) == []
    driver.now = 11.0
    assert driver.do(Ready(Candidate(peer="b", memory_bytes=FULL, up_bps=10**7)), Tick()) == []
    assert len(driver.decide(driver.offered("b")).contributions) == 2


def test_nobody_without_a_session_is_given_up_while_nobody_waits() -> None:
    driver = opened(FULLS)
    driver.now = GONE - 1.0
    assert driver.do(Tick(frozenset({"b"}))) == []
    assert driver.leader.phase.value == "open"
