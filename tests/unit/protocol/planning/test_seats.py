"""Seats: a peer that comes within a round trains in it and holds no peer up (protocol/round/stragglers.py)."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from protocol.ledger.part_lists import share_of
from protocol.planning.allotment import MOST_SEATS, NEW, REPLICAS_PER_SEAT, allot
from protocol.round.leader_events import Effect, Gone, Lead, Propose, Received, Send
from protocol.round.member_events import EndIn, TrainOrder
from protocol.round.stragglers import OVERRUN, SEAT_LEAST_SHARE, SEAT_PATIENCE_SECONDS
from protocol.run.manifest import OuterSpec
from protocol.wire.commit import Commit
from protocol.wire.plan import Plan, ReplicaSpec, Seat, StageSpec, Work
from protocol.wire.session import ChainReconfig, TakeSeat, TimeUp, Withdraw
from tests.support import leader as leading
from tests.support import tiny
from tests.support.leader import CHAIN, FULL, FULLS, SHARDS, Driver
from tests.support.member import ME
from tests.support.member import Driver as MemberDriver
from tests.support.rules import of_work

SECONDS = 40.0
TIMING = dataclasses.replace(tiny.manifest().timing, round_seconds=SECONDS)
AT = 10.0
"""Seconds after the round began when the newcomer has the state."""


def opened(memory: dict[str, int] = FULLS, **changes: Any) -> Driver:
    """A round that is open, in a run with rounds of SECONDS; `new` has a session."""
    driver = leading.opened(dict(memory), timing=TIMING, **changes)
    driver.memory["new"] = FULL
    driver.ready("new")
    driver.at(AT)
    return driver


def seat_of(driver: Driver, index: int = 0) -> Seat:
    plan = driver.leader.plan
    return plan.seats[index]


def given(seat: Seat, seconds: float) -> list[Effect]:
    return [Send(("new",), TakeSeat(round=1, replica=seat.number, seconds=seconds), True)]


def seated(memory: dict[str, int] = FULLS, **changes: Any) -> Driver:
    """The newcomer has its seat."""
    driver = opened(memory, **changes)
    assert driver.attest("new", shards=SHARDS) == given(seat_of(driver), SECONDS - AT)
    return driver


def committed(driver: Driver, effects: list[Effect]) -> Commit:
    """The commit that is proposed, which an auditor finds in order."""
    before = driver.commits[0]
    commit = driver.decide(effects)
    assert (of_work(driver.manifest, before.plan, commit)) == []
    return commit


# --- the plan


def test_a_plan_has_a_seat_and_one_more_for_every_so_many_replicas_under_numbers_and_text_of_their_own() -> None:
    run = tiny.manifest(timing=TIMING)
    for count, seats in (
        (1, 1),
        (REPLICAS_PER_SEAT - 1, 1),
        (REPLICAS_PER_SEAT, 2),
        (MOST_SEATS * REPLICAS_PER_SEAT, MOST_SEATS),
    ):
        stages = [(StageSpec(peer=f"p{i}", first=0, last=4),) for i in range(count)]
        plan = allot(run, 1, [ReplicaSpec(number=NEW, stages=s) for s in stages], (), {})
        assert len(plan.seats) == seats
        everybody = [(r.number, r.work) for r in plan.replicas] + [(s.number, s.work) for s in plan.seats]
        assert [number for number, _ in everybody] == list(range(plan.next_number))
        slots = sorted(
            slot for _, w in everybody for slot in range(w.slot, w.slot + w.steps * w.micro_batches * run.train.rows)
        )
        assert slots == list(range(plan.next_slot)), "no text is given twice, and none is forgotten"


def test_rounds_that_end_with_a_number_of_steps_have_no_seats() -> None:
    driver = leading.opened(dict(FULLS))
    driver.memory["new"] = FULL
    driver.ready("new")
    assert driver.leader.plan.seats == ()
    assert driver.attest("new", shards=SHARDS) == []


# --- the leader


def test_who_has_the_state_within_the_round_takes_a_seat_and_its_work_is_in_the_rounds_commit() -> None:
    driver = seated()
    seat = seat_of(driver)
    driver.at(SECONDS)
    assert driver.offered("new", steps=2) == []
    commit = committed(driver, driver.offered("a", "b"))
    assert [(c.replica, c.steps, c.tokens) for c in commit.contributions][2] == (
        seat.number, 2, 2 * driver.manifest.train.step_tokens,
    )  # fmt: skip
    assert commit.contributions[2].shares[0].peer == "new"
    assert [(r.number, r.peers) for r in commit.plan.replicas][2] == (seat.number, ("new",)), "it is planned now"
    assert commit.plan.replicas[2].work.steps == commit.plan.replicas[0].work.steps, "by its pace, not by what it did"


def test_a_seat_is_told_of_again_as_often_as_the_newcomer_says_what_it_has() -> None:
    driver = seated()
    driver.at(AT + 5.0)
    assert driver.attest("new", shards=SHARDS) == given(seat_of(driver), SECONDS - AT - 5.0)
    driver.at(SECONDS + 1.0)
    assert given(seat_of(driver), 0.0)[0] in driver.attest("new", shards=SHARDS)


def test_a_newcomer_that_was_forming_takes_a_seat_and_forms_no_more() -> None:
    driver = leading.opened(dict(FULLS), timing=TIMING)
    driver.memory["new"] = FULL
    driver.ready("new")
    driver.attest("new", shards=())
    driver.now = SECONDS
    assert [r.peers for r in driver.decide(driver.offered("a", "b")).plan.forming] == [("new",)]  # type: ignore[union-attr]
    driver.attest("a", "b")
    (told,) = driver.attest("new", shards=SHARDS)
    assert isinstance(told, Send)
    assert isinstance(told.message, TakeSeat)
    driver.now = 2 * SECONDS
    commit = driver.decide(driver.offered("new", "a", "b"))
    assert ([r.peers for r in commit.plan.replicas], commit.plan.forming) == ([("a",), ("b",), ("new",)], ())


@pytest.mark.parametrize(
    ("memory", "shards", "at"),
    [
        (FULL, SHARDS[:-1], AT),
        (FULL, (), AT),
        (FULL - 1, SHARDS, AT),
        (FULL, SHARDS, SECONDS * (1 - SEAT_LEAST_SHARE) + 0.1),
    ],
    ids=["a shard is lacking", "it holds nothing", "it has too little memory", "it comes too late"],
)
def test_who_gets_no_seat(memory: int, shards: tuple[str, ...], at: float) -> None:
    driver = opened()
    driver.memory["new"] = memory
    driver.ready("new")
    driver.at(at)
    assert driver.attest("new", shards=shards) == []


def test_who_is_in_a_replica_or_has_another_state_gets_no_seat() -> None:
    driver = opened({**FULLS, **CHAIN})
    assert driver.attest("a", "c", shards=SHARDS) == []
    assert not any(isinstance(e, Send) for e in driver.attest("new", shards=SHARDS, digest="other"))


def test_more_newcomers_than_seats_wait_for_the_next_plan() -> None:
    driver = seated()
    driver.memory["late"] = FULL
    driver.ready("late")
    assert driver.attest("late", shards=SHARDS) == []
    driver.at(SECONDS)
    driver.offered("new")
    commit = committed(driver, driver.offered("a", "b"))
    assert [r.peers for r in commit.plan.replicas] == [("a",), ("b",), ("new",), ("late",)]


def test_a_round_waits_a_moment_for_a_seat_and_no_longer() -> None:
    driver = seated()
    driver.at(SECONDS)
    assert driver.offered("a", "b") == []
    asked = [e for e in driver.at(SECONDS + SEAT_PATIENCE_SECONDS - 0.1) if isinstance(e, Send)]
    assert asked == [Send(("new",), TimeUp(round=1), False)]
    commit = committed(driver, driver.at(SECONDS + SEAT_PATIENCE_SECONDS))
    assert [c.replica for c in commit.contributions] == [0, 1]
    assert leading.left_out(commit) == [(2, "no offer after 40 s")]
    assert ("new",) in [r.peers for r in commit.plan.replicas]


def test_planned_replicas_are_waited_for_as_ever_beside_a_seat() -> None:
    alone, beside = opened(), seated()
    for driver in (alone, beside):
        driver.at(SECONDS)
        driver.offered("a")
    now, ends = SECONDS, list[float]()
    while len(ends) < 2:
        now += 1.0
        ends += [now for driver in (alone, beside) if any(isinstance(e, Propose) for e in driver.at(now))]
    assert ends[0] == ends[1]


@pytest.mark.parametrize("how", ["withdraws", "goes"])
def test_a_newcomer_that_gives_up_holds_nobody_up(how: str) -> None:
    driver = seated()
    driver.do(Gone("new") if how == "goes" else Received("new", Withdraw(round=1, reason="?")))
    driver.at(SECONDS)
    commit = committed(driver, driver.offered("a", "b"))
    assert [c.replica for c in commit.contributions] == [0, 1]
    assert [x.replica for x in commit.left_out] == [2]


def test_a_node_that_does_not_lead_learns_of_a_seat_by_the_offer() -> None:
    driver = opened()
    driver.do(Lead(False))
    assert driver.attest("new", shards=SHARDS) == []
    seat = seat_of(driver)
    leader = seated()
    offer = leader.offer("new")
    assert len(driver.do(Received("new", offer))) == 1 + len(offer.parts), "it fetches what is offered"
    driver.memory["liar"] = FULL
    driver.ready("liar")
    driver.attest("liar", shards=SHARDS)
    assert driver.do(Received("liar", offer)) == [], "the seat is taken"
    assert driver.leader.roster.seat_of("new") == seat.number


# --- what an auditor and the other members see


def wrong_with(**changes: Any) -> list[str]:
    """What an auditor finds in a commit whose last contribution, a seat's, has these changes."""
    driver = seated()
    driver.at(SECONDS)
    driver.offered("new", steps=2)
    commit = driver.decide(driver.offered("a", "b"))
    last = dataclasses.replace(commit.contributions[-1], **changes)
    changed = dataclasses.replace(commit, contributions=(*commit.contributions[:-1], last))
    return of_work(driver.manifest, driver.commits[0].plan, changed)


def test_a_seat_counts_by_its_steps_once_and_for_nobody_who_works_elsewhere() -> None:
    share = share_of("b", (leading.part("new", "embed", 1.0),))
    assert wrong_with() == []
    assert wrong_with(tokens=10**6) == ["replica 2: its weight is wrong (2 steps cannot have 1000000 tokens)"]
    assert wrong_with(shares=(share,)) == ["counts a peer twice"]
    assert wrong_with(replica=9) == ["decides about replicas [0, 1, 9], the plan has [0, 1]"]


# --- the newcomer


def log_with_seats() -> tuple[Any, list[Commit]]:
    """A run and its first commit, whose plan has another peer and a seat."""
    run = tiny.manifest(rounds=5, timing=TIMING)
    other = ReplicaSpec(number=NEW, stages=(StageSpec(peer="other", first=0, last=run.model.n_layers),))
    plan = allot(run, 1, [other], (), {})
    return run, [tiny.commit(run, plan=plan)]


def newcomer() -> tuple[MemberDriver, Plan]:
    run, commits = log_with_seats()
    driver = MemberDriver(manifest=run)
    driver.settle(driver.learn(*commits))
    assert commits[0].plan is not None
    return driver, commits[0].plan


def test_a_newcomer_trains_its_seat_for_the_rest_of_the_round() -> None:
    driver, plan = newcomer()
    driver.now = 7.0
    order, end = driver.do(TakeSeat(round=1, replica=plan.seats[0].number, seconds=12.0))
    assert isinstance(order, TrainOrder)
    assert order.plan.replica(order.replica).peers == (ME,)
    assert order.plan.replica(order.replica).work == plan.seats[0].work
    assert end == EndIn(1, 12.0 - OVERRUN * TIMING.training_seconds)
    assert driver.do(TakeSeat(round=1, replica=plan.seats[0].number, seconds=11.0)) == [], (
        "it is told again, and trains already"
    )


@pytest.mark.parametrize(
    "seat",
    [
        TakeSeat(round=2, replica=1, seconds=9.0),
        TakeSeat(round=0, replica=1, seconds=9.0),
        TakeSeat(round=1, replica=0, seconds=9.0),
        TakeSeat(round=1, replica=7, seconds=9.0),
    ],
)
def test_what_is_no_seat_of_the_plan_is_not_taken(seat: TakeSeat) -> None:
    driver, plan = newcomer()
    assert plan.seats[0].number == 1
    assert driver.do(seat) == []


def test_who_has_work_in_the_round_takes_no_seat() -> None:
    run, commits = log_with_seats()
    mine = ReplicaSpec(number=NEW, stages=(StageSpec(peer=ME, first=0, last=run.model.n_layers),))
    plan = allot(run, 1, [mine], (), {})
    driver = MemberDriver(manifest=run)
    driver.settle(driver.learn(dataclasses.replace(commits[0], plan=plan)))
    assert driver.do(TakeSeat(round=1, replica=plan.seats[0].number, seconds=9.0)) == []


def test_a_seat_makes_no_chain() -> None:
    """A reconfiguration cannot name a seat."""
    driver, plan = newcomer()
    reconfig = ChainReconfig(round=1, replica=plan.seats[0].number, generation=1, peers=(ME,), steps=0, reason="?")
    assert driver.do(reconfig) == []


def test_with_overlap_who_took_a_seat_trains_ahead_from_the_next_round_on() -> None:
    run = tiny.manifest(timing=TIMING, outer=OuterSpec(overlap=1))
    plan = allot(run, 1, [ReplicaSpec(number=NEW, stages=(StageSpec(peer="a", first=0, last=4),))], (), {})
    taken = plan.taken(plan.seats[0].number, ("new",), 4)
    assert taken.following is None
    following = allot(run, 2, plan.seated(taken).replicas, (), {}, plan.seated(taken))
    assert [r.following is not None for r in following.replicas] == [True, True]
    assert following.replicas[1].work.slot >= plan.next_slot
    assert isinstance(following.replicas[1].work, Work)
