"""Training ahead: what is begun before its plan is known, and what becomes of it."""

from __future__ import annotations

import dataclasses

import pytest

from protocol.planning import planner
from protocol.rounds.member_events import Failed, Send, Stop, Trained, TrainOrder
from protocol.rounds.overlap import Ahead, Overlap, is_same_work
from protocol.rounds.table import TableError
from protocol.run.manifest import OuterSpec
from protocol.wire.commit import Commit
from protocol.wire.plan import Plan, ReplicaSpec, StageSpec
from protocol.wire.session import ChainFailure, Offer
from tests import tiny

M = tiny.manifest(rounds=3, outer=OuterSpec(overlap=1))
PLAN = Plan(
    round=1,
    slot=0,
    replicas=tuple(ReplicaSpec(rank=0, stages=(StageSpec(peer=p, first=0, last=4),)) for p in ("a", "me")),
)
EXPECTED = dataclasses.replace(PLAN, round=2, slot=planner.following(M, PLAN))
TRAINED = Trained(2, 4, 32, 2.0)


def offer(round: int = 1) -> Offer:
    return Offer(round=round, replica=1, parts=(), tokens=32, steps=4, loss=None)


def decided(plan: Plan) -> Commit:
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
    assert overlap.begin(offer(), PLAN, PLAN, None) == [TrainOrder(EXPECTED, 1)]
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
    chain = ReplicaSpec(rank=4, stages=(StageSpec(peer="s", first=0, last=2), StageSpec(peer="me", first=2, last=4)))
    trained = dataclasses.replace(PLAN, replicas=(PLAN.replicas[0], chain))
    (order,) = Overlap(M).begin(offer(), PLAN, trained, None)
    assert (order.plan.replicas, order.plan.slot) == (trained.replicas, EXPECTED.slot)


@pytest.mark.parametrize("plan", [PLAN, None])
def test_nothing_is_begun_without_overlap_after_the_last_round_or_without_a_plan(plan: Plan | None) -> None:
    without = Overlap(dataclasses.replace(M, outer=OuterSpec()))
    assert without.begin(offer(), PLAN, PLAN, None) == []
    last = Overlap(M)
    assert last.begin(offer(M.rounds), plan, PLAN, None) == []
    assert Overlap(M).begin(offer(), None, PLAN, None) == []
    assert is_empty(without)
    assert is_empty(last)


def test_what_is_decided_already_is_not_guessed() -> None:
    other = Overlap(M)
    assert other.begin(offer(), PLAN, PLAN, decided(dataclasses.replace(EXPECTED, slot=99))) == []
    assert is_empty(other)
    assert Overlap(M).begin(offer(), PLAN, PLAN, decided(EXPECTED)) == [TrainOrder(EXPECTED, 1)]


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
        (EXPECTED, True),
        (dataclasses.replace(EXPECTED, replicas=(*EXPECTED.replicas, EXPECTED.replicas[0])), True),
        (dataclasses.replace(EXPECTED, replicas=(EXPECTED.replicas[1], EXPECTED.replicas[1])), True),
        (dataclasses.replace(EXPECTED, replicas=EXPECTED.replicas[::-1]), False),
        (dataclasses.replace(EXPECTED, replicas=EXPECTED.replicas[:1]), False),
        (dataclasses.replace(EXPECTED, slot=EXPECTED.slot + 1), False),
        (dataclasses.replace(EXPECTED, round=3), False),
        (None, False),
    ],
)
def test_the_same_work_is_the_same_replica_of_the_same_round_and_data(plan: Plan | None, same: bool) -> None:
    assert is_same_work(TrainOrder(EXPECTED, 1), plan) is same
