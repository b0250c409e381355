"""A peer with a new identity for each broken promise is not waited for again and again (protocol/round/presence.py)."""

from __future__ import annotations

import dataclasses

from protocol.ledger import standing
from protocol.round import presence
from protocol.round.leader_events import Decided, Effect, Propose
from protocol.round.stragglers import GRACE_SHARE
from protocol.wire.plan import Plan
from tests.support import tiny
from tests.support.leader import FULL, SHARDS, Driver

M = tiny.manifest(rounds=200, start_peers=3)
"""Without seats."""
SECONDS = M.timing.training_seconds
KNOWN = ("a", "b", "c")
EARLY = 5.0
"""Seconds after which the others have offered."""


class Run:
    """A leader with three peers that bring their work after EARLY seconds, in each round."""

    def __init__(self) -> None:
        self.driver = Driver(dict.fromkeys(KNOWN, FULL), M)
        self.driver.decide(self.driver.ready(*KNOWN))
        self.round()

    def comes(self, *peers: str) -> None:
        """They are there from the next plan on."""
        for peer in peers:
            self.driver.memory[peer] = FULL
        self.driver.ready(*peers)

    def round(self, bring: tuple[str, ...] = (), late: tuple[str, ...] = ()) -> float:
        """`bring`: newcomers who are as quick as the others; `late`: who take as long as they have. Seconds until it is
        decided."""
        driver = self.driver
        began, plan = driver.now, driver.leader.plan
        planned = {peer for replica in plan.replicas for peer in replica.peers}
        assert {*KNOWN, *bring, *late} <= planned, "newcomers are planned as everybody is"
        driver.attest(*driver.memory, shards=SHARDS)
        driver.now = began + EARLY
        effects = driver.offered(*bring, *KNOWN)
        effects = self._later(effects, began + (1 + GRACE_SHARE) * SECONDS - 0.1)
        if late and not self._proposed(effects):
            effects = driver.offered(*late)
        effects = self._later(effects, began + M.timing.round_deadline)
        (commit,) = self._proposed(effects)
        took = driver.now - began
        driver.commits.append(commit.commit)
        driver.do(Decided(commit.commit))
        assert {c.shares[0].peer for c in commit.commit.contributions} >= {*KNOWN, *bring}
        return took

    def _proposed(self, effects: list[Effect]) -> list[Propose]:
        return [e for e in effects if isinstance(e, Propose)]

    def _later(self, effects: list[Effect], at: float) -> list[Effect]:
        return effects if self._proposed(effects) else self.driver.at(at)


def test_who_has_a_new_identity_for_each_round_is_waited_for_more_and_more_rarely() -> None:
    run, waited = Run(), []
    run.comes("stranger 1")
    run.round()  # planned from the next one on
    for number in range(1, 65):
        run.comes(f"stranger {number + 1}")
        if run.round() > EARLY:
            waited.append(number)
    assert waited == [1, 2, 4, 8, 16, 32, 64]


def test_newcomers_who_bring_their_work_give_the_others_trust_back() -> None:
    run = Run()
    run.comes("stranger")
    run.round()
    run.comes("honest")
    assert run.round() > EARLY
    assert run.round(bring=("honest",)) > EARLY, "for the stranger"
    run.comes("slow")
    run.round(bring=("honest",))
    assert run.round(bring=("honest",), late=("slow",)) > EARLY, "it has the time that it was given"
    assert run.driver.leader.standing.of("slow").served == 1


def test_while_nobody_waits_for_them_newcomers_count_as_soon_as_they_are_quick_and_get_no_strike() -> None:
    run = Run()
    for number in range(9):
        run.comes(f"stranger {number}")
        run.round()
    assert not run.driver.leader.newcomers.are_waited_for
    run.comes("slow", "quick")
    run.round()
    assert run.round(bring=("quick",), late=("slow",)) == EARLY
    assert run.driver.leader.standing.of("quick").served == 1
    assert not run.driver.leader.promises.rests("slow", run.driver.leader.round, 1.0), "it has no strike yet"


def plan(*peers: tuple[str, ...]) -> Plan:
    return Plan(round=1, replicas=tuple(tiny.replica(number, *members) for number, members in enumerate(peers)))


def test_who_is_new_follows_from_the_log() -> None:
    run = Run()
    after = run.driver.leader.standing
    assert presence.are_new(after, plan(("a",), ("x",), ("x", "b"), ("y", "z"))) == {1, 3}
    assert presence.are_new(after, plan(("x",), ("y",))) == frozenset(), "somebody has to begin"
    assert presence.are_new(after, None) == frozenset()
    assert presence.are_new(standing.of(M, run.driver.commits), plan(("a",), ("x",))) == {1}


def test_work_that_has_no_weight_yet_is_a_newcomers() -> None:
    base = Run().driver.leader.standing
    there = plan(("a",), ("x",))
    known = {**base.known, "x": standing.Reputation(served=2)}
    after = dataclasses.replace(
        base, limits=dataclasses.replace(base.limits, probation=5), plan=there, known=known, founders=frozenset(KNOWN)
    )
    assert presence.are_new(after, there) == {1}
    assert presence.are_new(dataclasses.replace(after, limits=base.limits), there) == frozenset()
