"""A planned peer that brings nothing is planned less, and wins trust back slowly (protocol/round/presence.py)."""

from __future__ import annotations

import dataclasses
from typing import Any

from protocol.planning.partition import Candidate
from protocol.round import presence
from protocol.round.leader_events import Decided, Effect, Propose, Question, Resting
from protocol.round.presence import MOST_PAUSE_ROUNDS, Promises
from protocol.wire.commit import Commit, LeftOut
from protocol.wire.plan import Plan
from tests.support import tiny
from tests.support.leader import DEADLINE, FULL, SHARDS, Driver

M = tiny.manifest()
FULLS = {"a": FULL, "b": FULL, "c": FULL}


def decided(round: int, *done: str) -> Commit:
    work = tuple(tiny.contribution(i, peer) for i, peer in enumerate(done))
    return tiny.commit(M, round=round, contributions=work)


def planned_in(rounds: int, delivers: Any) -> list[int]:
    """The rounds of the first `rounds` in which a peer is planned that delivers where `delivers(round)` is true."""
    known, found, rests = Promises(), list[int](), False
    for round in range(1, rounds + 1):
        missed = 0.0 if rests or delivers(round) else 1.0
        found += [] if rests else [round]
        done = () if rests or missed else ("peer",)
        rests = known.rests("peer", round + 1, missed)  # the plan is made before the round is decided
        known.settle(decided(round, *done), {"peer": missed} if missed else {})
        assert rests == known.rests("peer", round + 1)
    return found


def test_who_never_delivers_is_waited_for_more_and_more_rarely() -> None:
    assert planned_in(300, lambda round: False) == [1, 2, 4, 8, 16, 32, 64, 128, 192, 256]


def test_once_may_happen_to_anybody_and_a_third_of_the_rounds_too() -> None:
    assert planned_in(100, lambda round: round != 7) == list(range(1, 101))
    assert len(planned_in(300, lambda round: round % 3 != 0)) == 300, "a strike for every two halves that go"
    assert len(planned_in(300, lambda round: round % 2 != 0)) < 200


def test_trust_comes_back_slowly() -> None:
    """After twenty broken promises it takes thirteen kept ones until one may be broken without a rest."""
    known = Promises()
    for round in range(20):
        known.settle(decided(round), {"peer": 1.0})
    rests = []
    for round in range(100, 115):
        rests.append(known.rests("peer", round, 1.0))
        known.settle(decided(round, "peer"), {})
    assert rests == [True] * 13 + [False] * 2


def test_a_rest_is_bounded() -> None:
    known = Promises()
    until = [known.settle(decided(round), {"peer": 1.0}) for round in range(100)][-1]
    assert until == {"peer": 99 + MOST_PAUSE_ROUNDS}
    assert known.rests("peer", 99 + MOST_PAUSE_ROUNDS)
    assert not known.rests("peer", 100 + MOST_PAUSE_ROUNDS)


# --- who broke a promise


def plan(*replicas: tuple[str, ...]) -> Plan:
    return Plan(round=1, replicas=tuple(tiny.replica(number, *peers) for number, peers in enumerate(replicas)))


def test_of_a_chain_those_are_struck_who_were_lost_or_each_half() -> None:
    there, done = plan(("a",), ("b", "c", "d"), ("e",)), decided(1, "a")
    assert presence.broken(there, done, offered=(), lost=()) == {"b": 0.5, "c": 0.5, "d": 0.5, "e": 1.0}
    assert presence.broken(there, done, offered=(), lost=("c", "x")) == {"c": 1.0, "e": 1.0}
    assert presence.broken(there, done, offered=("b", "e"), lost=()) == {"c": 0.5, "d": 0.5}
    assert presence.broken(None, done, offered=(), lost=()) == {}
    reason = LeftOut(replica=2, reason="judged: it changes nothing", judged="0" * 64, peers=("e",), faults="1")
    judged = dataclasses.replace(
        done, left_out=(reason, dataclasses.replace(reason, replica=1, peers=("b", "c", "d"), faults="010"))
    )
    assert presence.broken(there, judged, offered=("b", "c", "d", "e"), lost=()) == {"c": 0.5, "e": 1.0}
    too_late = dataclasses.replace(done, left_out=(dataclasses.replace(reason, judged=None),))
    assert presence.broken(there, too_late, offered=("b", "c", "d", "e"), lost=()) == {}


# --- the leader


def rounds_with(driver: Driver, silent: str, rounds: int) -> tuple[list[tuple[str, ...]], list[Effect]]:
    """The planned peers of each round, in which `silent` attests and never offers, and the last effects."""
    found, told = [], list[Effect]()
    for _ in range(rounds):
        peers = tuple(p for r in driver.leader.plan.replicas for p in r.peers)
        found.append(peers)
        driver.attest(*driver.memory, shards=SHARDS)
        effects = driver.offered(*(p for p in peers if p != silent))
        if silent in peers:
            assert not effects, "it is waited for"
            driver.now += DEADLINE
            effects = driver.at(driver.now)
        (commit,) = [e.commit for e in effects if isinstance(e, Propose)]
        driver.commits.append(commit)
        driver.now += 1.0
        told = driver.do(Decided(commit))
    return found, told


def test_a_leader_plans_a_peer_that_never_offers_more_and_more_rarely_and_says_so() -> None:
    driver = Driver(FULLS, dataclasses.replace(M, rounds=100, start_peers=3))
    driver.decide(driver.ready(*FULLS))
    there, told = rounds_with(driver, "c", 2)
    assert told == [Resting("c", 3)]
    there += rounds_with(driver, "c", 14)[0]
    assert [number for number, peers in enumerate(there, 1) if "c" in peers] == [1, 2, 4, 8, 16]
    assert all({"a", "b"} <= set(peers) for peers in there)


def test_where_nobody_else_makes_a_replica_who_rests_is_planned_all_the_same() -> None:
    candidate = Candidate(peer="a", memory_bytes=FULL, up_bps=10**7)
    question = Question(
        manifest=M, candidates=(), resting=(candidate,), round=3, previous=None, contributions=(), left_out=(),
        attested=None
    )  # fmt: skip
    found = question.answer()
    assert [r.peers for r in found.replicas] == [("a",)]
    other = dataclasses.replace(question, candidates=(dataclasses.replace(candidate, peer="b"),)).answer()
    assert [r.peers for r in other.replicas] == [("b",)]
