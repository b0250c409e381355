"""Training ahead: what is begun before its plan is known, and what becomes of it."""

from __future__ import annotations

import dataclasses

import pytest

from protocol.planning.allotment import NEW, allot
from protocol.quorum.table import TableError
from protocol.round.member import Ahead, Overlap, is_same_work
from protocol.round.member_events import Failed, Send, Stop, Trained, TrainOrder
from protocol.run.manifest import OuterSpec
from protocol.wire.commit import Commit
from protocol.wire.plan import Plan, ReplicaSpec, StageSpec
from protocol.wire.session import ChainFailure, Offer
from tests.support import tiny

M = tiny.manifest(rounds=3, outer=OuterSpec(overlap=1))


def full(peer: str, number: int = NEW) -> ReplicaSpec:
    return ReplicaSpec(number=number, rank=0, stages=(StageSpec(peer=peer, first=0, last=4),))


PLAN = allot(M, 1, [full("a"), full("me")], (), {})
NEXT = allot(M, 2, PLAN.replicas, (), {}, PLAN)
MINE = dataclasses.replace(NEXT.replica(1), following=None)
EXPECTED = Plan(round=2, replicas=(MINE,))
ORDER = TrainOrder(PLAN, 1)
TRAINED = Trained(2, 4, 32, 2.0)


def offer(round: int = 1) -> Offer:
    return Offer(round=round, replica=1, parts=(), tokens=32, steps=4, loss=None)


def decided(plan: Plan | None) -> Commit:
    return Commit(
        run=M.run_id,
        round=1,
        parent="",
        time=0.0,
        contributions=(),
        left_out=(),
        diverged=(),
        digests={},
        plan=plan,
    )


def running() -> Overlap:
    overlap = Overlap(M)
    assert overlap.begin(offer(), ORDER, None, M.rounds) == [TrainOrder(EXPECTED, 1)]
    assert (overlap.state, overlap.running) == (Ahead.RUNNING, TrainOrder(EXPECTED, 1))
    return overlap


def ready() -> Overlap:
    overlap = running()
    overlap.finished(TRAINED)
    assert (overlap.state, overlap.running) == (Ahead.READY, None)
    assert overlap.order == TrainOrder(EXPECTED, 1)
    return overlap


def is_empty(overlap: Overlap) -> bool:
    return (overlap.state, overlap.order, overlap.running) == (Ahead.NONE, None, None)


def test_a_reconfigured_chain_is_expected_to_stay_as_it_is() -> None:
    stages = (StageSpec(peer="s", first=0, last=2), StageSpec(peer="me", first=2, last=4))
    chain = dataclasses.replace(PLAN.replica(1), rank=4, stages=stages)
    trained = PLAN.replaced(chain)
    (order,) = Overlap(M).begin(offer(), TrainOrder(trained, 1), None, M.rounds)
    assert order.plan.replicas == (dataclasses.replace(chain, work=MINE.work, following=None),)


def test_nothing_is_begun_without_overlap_after_the_last_round_or_without_a_promise() -> None:
    without = Overlap(dataclasses.replace(M, outer=OuterSpec()))
    assert without.begin(offer(), ORDER, None, M.rounds) == []
    last = Overlap(M)
    assert last.begin(offer(M.rounds), ORDER, None, M.rounds) == []
    unpromised = PLAN.replaced(dataclasses.replace(PLAN.replica(1), following=None))
    assert Overlap(M).begin(offer(), TrainOrder(unpromised, 1), None, M.rounds) == []
    assert is_empty(without)
    assert is_empty(last)


def test_what_is_decided_already_is_not_guessed() -> None:
    other = Overlap(M)
    elsewhere = dataclasses.replace(MINE, work=dataclasses.replace(MINE.work, slot=99))
    assert other.begin(offer(), ORDER, decided(NEXT.replaced(elsewhere)), M.rounds) == []
    assert is_empty(other)
    assert Overlap(M).begin(offer(), ORDER, decided(NEXT), M.rounds) == [TrainOrder(EXPECTED, 1)]


def test_what_runs_or_is_ready_is_taken_as_the_rounds_work() -> None:
    overlap = running()
    assert overlap.take() is None
    assert is_empty(overlap)
    overlap = ready()
    assert overlap.take() == TRAINED
    assert is_empty(overlap)


def test_what_is_not_wanted_is_stopped_and_waited_for() -> None:
    overlap = running()
    assert overlap.drop() == [Stop(2)]
    assert (overlap.state, overlap.running) == (Ahead.DROPPED, None)
    assert overlap.drop() == [], "it is told once"
    overlap.finished(Failed(2, 1, "stopped"))
    assert is_empty(overlap)


def test_what_was_dropped_is_not_used_even_if_it_was_done() -> None:
    overlap = running()
    overlap.drop()
    overlap.finished(TRAINED)
    assert is_empty(overlap)


def test_ready_work_that_is_not_wanted_is_forgotten_at_once() -> None:
    overlap = ready()
    assert overlap.drop() == []
    assert is_empty(overlap)


def test_who_fails_ahead_has_nothing() -> None:
    overlap = running()
    overlap.finished(Failed(2, 1, "?"))
    assert is_empty(overlap)


def test_a_chain_that_trains_ahead_may_lose_a_member() -> None:
    failure = ChainFailure(round=2, replica=1, generation=0, peer="a", reason="lost")
    assert running().chain_failed(failure) == [Send(failure)]
    with pytest.raises(TableError):
        ready().chain_failed(failure)


@pytest.mark.parametrize(
    ("plan", "same"),
    [
        (NEXT, True),
        (dataclasses.replace(NEXT, replicas=(NEXT.replica(1),)), True),
        (dataclasses.replace(NEXT, replicas=(NEXT.replica(1), full("b", 2))), True),
        (dataclasses.replace(NEXT, replicas=(NEXT.replica(0),)), False),
        (NEXT.replaced(full("b", 1)), False),
        (NEXT.replaced(dataclasses.replace(MINE, rank=4)), False),
        (NEXT.replaced(dataclasses.replace(MINE, work=PLAN.replica(1).work)), False),
        (dataclasses.replace(NEXT, round=3), False),
        (None, False),
    ],
)
def test_the_same_work_is_the_same_replica_of_the_same_round_and_data(plan: Plan | None, same: bool) -> None:
    assert is_same_work(TrainOrder(EXPECTED, 1), decided(plan)) is same
