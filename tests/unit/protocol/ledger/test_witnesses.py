"""Whose attestations count: those whose work is in the log, by what it was."""

from __future__ import annotations

import dataclasses

from protocol.planning.allotment import NEW, allot
from protocol.round.attestations import WITNESS_MOST, WITNESS_ROUNDS, Witnesses
from protocol.wire.commit import Commit, Contribution, Diverged
from protocol.wire.plan import Plan, ReplicaSpec, StageSpec
from tests.support import tiny

M = tiny.manifest()


def contribution(tokens: int, *peers: str) -> Contribution:
    return tiny.contribution(0, *peers, tokens=tokens)


def commit(*contributions: Contribution, plan: Plan | None = None) -> Commit:
    return tiny.commit(M, contributions=contributions, plan=plan)


def planned(*peers: str) -> Plan:
    stages = [(StageSpec(peer=peer, first=0, last=4),) for peer in peers]
    return allot(M, 1, [ReplicaSpec(number=NEW, stages=s) for s in stages], (), {})


def test_before_anything_was_contributed_the_members_of_the_plan_count_once_each() -> None:
    assert Witnesses().weights() == {}
    assert Witnesses([commit(plan=planned("a", "b"))]).weights() == {"a": 1, "b": 1}


def test_who_contributed_counts_by_its_replicas_tokens_of_the_last_rounds() -> None:
    witnesses = Witnesses([commit(plan=planned("planned"))])
    witnesses.add(commit(contribution(8, "old")))
    for _ in range(WITNESS_ROUNDS):
        witnesses.add(commit(contribution(4, "a"), contribution(3, "b", "c"), contribution(2, "d")))
        witnesses.add(commit())  # which has no contribution
    assert witnesses.weights() == {
        "a": 4 * WITNESS_ROUNDS,
        "b": 3 * WITNESS_ROUNDS,
        "c": 3 * WITNESS_ROUNDS,
        "d": 2 * WITNESS_ROUNDS,
    }


def test_nobody_has_more_than_a_third_of_the_weight() -> None:
    weights = Witnesses(
        [commit(contribution(1000, "datacentre"), contribution(1, "a"), contribution(1, "b"))]
    ).weights()
    assert weights == {"datacentre": 1002 // WITNESS_MOST, "a": 1, "b": 1}
    two = Witnesses([commit(contribution(1000, "a"), contribution(700, "b"))]).weights()
    assert two["a"] == two["b"], "of two nobody decides alone"
    assert Witnesses([commit(contribution(1, "a"))]).weights() == {"a": 1}


def test_planned_peers_that_the_log_refuted_are_remembered() -> None:
    refuted = tuple(Diverged(peer=peer, shard="embed", refuted=True) for peer in ("a", "stranger"))
    witnesses = Witnesses([commit(plan=planned("a", "b"))])
    witnesses.add(dataclasses.replace(commit(), diverged=(*refuted, Diverged(peer="b", shard="embed"))))
    assert witnesses.refuted == {"a"}


def test_a_leader_that_is_started_again_counts_what_the_log_has() -> None:
    log = [commit(plan=planned("a")), commit(contribution(3, "a"), contribution(5, "b"))]
    one = Witnesses()
    for c in log:
        one.add(c)
    assert one.weights() == Witnesses(log).weights() == {"a": 2, "b": 2}


def test_an_auditor_counts_more_than_all_others() -> None:
    log = [commit(contribution(8, "a"), contribution(8, "b"), contribution(8, "c"))]
    witnesses = Witnesses(log, frozenset({"auditor"}))
    weights = witnesses.weights()
    assert weights["auditor"] > sum(weight for peer, weight in weights.items() if peer != "auditor")
