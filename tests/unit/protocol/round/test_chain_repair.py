"""Chains that lose a member: the leader's answer, the member's, and what a log may say of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from protocol.round import chain_repair
from protocol.round.accusations import LIES
from protocol.round.leader_events import Gone, Lead, Ready, Received, Send
from protocol.round.leader_events import Tick as LeaderTick
from protocol.round.member import RESEND_SECONDS
from protocol.round.member_events import (
    Applied,
    ChainFailed,
    Connected,
    EncodeUpdate,
    EndIn,
    Failed,
    KeepInFeedback,
    Phase,
    ShardsHeld,
    Stop,
    Tick,
    Trained,
    TrainOrder,
    UpdateEncoded,
)
from protocol.round.member_events import Send as Says
from protocol.run.manifest import Manifest, OuterSpec
from protocol.wire.commit import Commit
from protocol.wire.plan import Plan, ReplicaSpec, StageSpec, Work
from protocol.wire.session import ChainFailure, ChainReconfig, Withdraw
from tests.support import leader as leading
from tests.support.chain_repair import SHARDS, SPARES, Driver, M, reconfig
from tests.support.member import Driver as MemberDriver
from tests.support.member import log, offer
from tests.support.rules import of_work

CHAIN = ("c", "d", "e")


# --- the leader


@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_ready_spare_takes_the_place_and_the_next_plan_keeps_it(position: int) -> None:
    driver = Driver("f")
    lost, reporter = CHAIN[position], CHAIN[position - 1]
    found = reconfig(effects := driver.failure(reporter, lost))
    expected = tuple("f" if p == lost else p for p in CHAIN)
    assert (found.generation, found.peers, found.steps) == (1, expected, 0)
    assert set(effects[0].peers) == {*CHAIN, "f"}
    driver.follow(found)
    assert driver.at(1.0) == [], "everybody follows"
    effects = driver.offered_by(found, *expected)
    commit = driver.decide(effects)
    assert [s.peer for s in commit.contributions[0].shares] == list(expected)
    assert (of_work(driver.manifest, driver.commits[0].plan, commit)) == []
    assert [r.peers for r in commit.plan.replicas] == [expected]
    assert commit.plan.spares == (), "who was lost was not heard since"


def test_who_was_lost_is_a_spare_again_once_it_was_heard() -> None:
    driver = Driver("f")
    found = reconfig(driver.failure("c", "d"))
    driver.follow(found)
    assert reconfig(driver.failure("d", "c")) == found, "a report of an older generation gets the present reconfig"
    commit = driver.decide(driver.offered_by(found, *found.peers))
    assert commit.plan.spares == ("d",)


def test_a_reconfiguration_is_repeated_to_those_who_do_not_follow() -> None:
    driver = Driver("f")
    found = reconfig(driver.failure("c", "d"))
    driver.do(Received("c", found), Received("e", found))
    assert driver.at(1.0) == [Send(("f",), found, False)]


def test_the_first_report_of_a_generation_decides() -> None:
    driver = Driver("f", "g")
    assert reconfig(driver.failure("d", "e")).peers == ("c", "d", "f")
    assert reconfig(driver.failure("e", "d")).peers == ("c", "d", "f")
    assert reconfig(driver.failure("c", "d", generation=1)).peers == ("c", "g", "f")


@pytest.mark.parametrize(
    "changes",
    [{"round": 2}, {"replica": 1}, {"replica": -1}, {"generation": 7}],
)
def test_reports_of_nothing_are_ignored(changes: dict[str, Any]) -> None:
    assert Driver("f").failure("c", "d", **{"generation": 0, **changes}) == []


def test_strangers_and_nodes_that_do_not_lead_change_nothing() -> None:
    driver = Driver("f")
    assert driver.failure("x", "d") == driver.failure("f", "d") == []
    driver.do(Lead(False))
    assert driver.failure("c", "d") == []


@pytest.mark.parametrize("unready", ["gone", "behind", "wrong", "partly", "small"])
def test_a_spare_must_be_there_hold_the_state_and_have_the_memory(unready: str) -> None:
    driver = Driver("f", silent=("f",) if unready == "behind" else ())
    match unready:
        case "gone":
            driver.do(Gone("f"))
        case "wrong":
            driver.attest("f", digest="other", shards=SHARDS)
        case "partly":
            driver.attest("f", shards=[s for s in SHARDS if s != "block.1"])
        case "small":
            candidate = driver.leader.ready["f"]
            driver.do(Ready(dataclasses.replace(candidate, memory_bytes=candidate.memory_bytes // 10)))
    first = reconfig(driver.failure("c", "d"))
    assert (first.generation, first.peers) == (1, CHAIN), "the same members, once: it may be back"
    second = reconfig(driver.failure("c", "d", generation=1))
    assert second.peers == ()
    driver.attest("d", shards=SHARDS)
    commit = driver.decide(driver.at(leading.GONE))
    assert leading.left_out(commit) == [(0, "peer d: gave no sign of life; no spare is ready")]


def test_who_withdraws_is_replaced_at_once_or_ends_the_chain() -> None:
    assert reconfig(Driver("f").do(Received("e", Withdraw(round=1, reason="out of memory")))).peers == ("c", "d", "f")
    assert reconfig(Driver().do(Received("e", Withdraw(round=1, reason="out of memory")))).peers == ()


def test_who_is_gone_is_replaced_without_a_report() -> None:
    assert reconfig(Driver("f").do(Gone("c"))).peers == ("f", "d", "e")
    assert Driver().do(Gone("c")) == []


def test_who_is_absent_is_replaced_without_a_report_as_soon_as_a_spare_is_ready() -> None:
    absent = LeaderTick(frozenset({"c"}))
    driver = Driver("f")
    found = reconfig(driver.do(absent))
    assert (found.peers, found.reason) == (("f", "d", "e"), "peer c: its session ended")
    driver.follow(found)
    assert driver.do(absent) == []
    late = Driver("f")
    late.attest("f", shards=("embed",))
    assert late.do(absent) == [], "it is waited upon while no spare holds the state"
    late.attest("f", shards=SHARDS)
    assert reconfig(late.do(absent)).peers == ("f", "d", "e")


def test_who_is_absent_is_waited_upon_without_a_spare_that_is_there() -> None:
    assert Driver().do(LeaderTick(frozenset({"c"}))) == []
    driver = Driver("f")
    assert driver.do(LeaderTick(frozenset({"c", "f"}))) == []
    assert reconfig(driver.do(LeaderTick(frozenset({"c"})))).peers == ("f", "d", "e")


def test_who_offered_before_it_was_absent_is_not_replaced() -> None:
    driver = Driver("f")
    driver.offered_by(ChainReconfig(round=1, replica=0, generation=0, peers=(), steps=0, reason=""), "c")
    assert driver.do(LeaderTick(frozenset({"c"}))) == []


def test_where_one_has_offered_the_steps_are_done() -> None:
    driver = Driver("f")
    assert (
        driver.offered_by(
            ChainReconfig(round=1, replica=0, generation=0, peers=(), steps=0, reason=""), "c", "e", steps=3
        )
        == []
    )
    found = reconfig(driver.do(Gone("d")))
    assert (found.peers, found.steps) == (("c", "f", "e"), 3)
    commit = driver.decide(driver.offered_by(found, "f", steps=3))
    assert (commit.contributions[0].steps, len(commit.contributions[0].shares)) == (3, 3)


def test_an_offer_of_a_reconfigured_chain_says_that_it_is_done() -> None:
    driver = Driver("f")
    found = reconfig(driver.failure("c", "d"))
    again = reconfig(driver.offered_by(found, "e", steps=2))
    assert (again.generation, again.peers, again.steps) == (2, found.peers, 2)


def test_what_a_replaced_member_offers_does_not_count() -> None:
    driver = Driver("f")
    found = reconfig(driver.failure("c", "d"))
    stale = leading.Driver.offer(driver, "d")
    assert driver.do(Received("d", stale)) == []
    commit = driver.decide(driver.offered_by(found, *found.peers))
    assert "d" not in [s.peer for s in commit.contributions[0].shares]


def test_a_new_leader_learns_of_reconfigurations_from_those_who_follow() -> None:
    found = ChainReconfig(round=1, replica=0, generation=3, peers=("c", "f", "e"), steps=0, reason="")
    driver = Driver("f")
    driver.do(Received("c", found), Received("c", dataclasses.replace(found, peers=())))
    assert driver.leader.roster.generation(0) == 0, "there is no other leader who could have said it"
    driver.do(Lead(True))
    driver.do(Received("f", found))
    assert driver.leader.roster.generation(0) == 0, "a spare cannot appoint itself"
    driver.do(*(Received("c", dataclasses.replace(found, peers=p)) for p in (("c", "x", "e"), ("c", "e", "d"), ("c",))))
    assert driver.leader.roster.generation(0) == 0, "nor a member somebody whom the plan does not know"
    driver.do(Received("c", dataclasses.replace(found, generation=2**64 - 1)))
    assert driver.leader.roster.generation(0) == 0, "nor a member a number that no leader gives"
    driver.do(Received("c", found))
    assert driver.leader.roster.generation(0) == 3
    assert reconfig(driver.failure("e", "f", generation=3)).generation == 4


def test_a_spare_that_was_replaced_is_not_taken_again_in_the_round() -> None:
    """It has trained, and trains once a round: a chain with it would wait until it is taken for lost."""
    driver = Driver("f", "g")
    assert reconfig(driver.failure("c", "d")).peers == ("c", "f", "e")
    assert reconfig(driver.failure("c", "f", generation=1)).peers == ("c", "g", "e")
    late = ChainFailure(round=1, replica=0, generation=1, peer="c", reason="gave no sign of life")
    driver.do(Received("f", late))  # it is heard of again
    found = reconfig(driver.failure("c", "g", generation=2))
    assert "f" not in found.peers


def test_members_who_know_different_chains_get_one() -> None:
    driver = Driver("f", "g")
    found = reconfig(driver.failure("c", "d"))
    assert found.peers == ("c", "f", "e")
    assert reconfig(driver.failure("e", "g", generation=1)) == dataclasses.replace(
        found, generation=2, reason="its members knew different chains"
    )


def test_a_slow_member_is_replaced_only_if_there_is_a_spare() -> None:
    assert reconfig(Driver("f").failure("c", "d", reason=chain_repair.SLOW)).peers == ("c", "f", "e")
    assert reconfig(Driver("f").failure("c", "c", reason=chain_repair.SLOW)).peers == ("f", "d", "e")
    assert Driver().failure("c", "d", reason=chain_repair.SLOW) == []


def test_a_chain_that_fails_again_and_again_ends_its_round() -> None:
    driver = Driver("f")
    peers = [
        reconfig(driver.failure("c", "nobody", generation=generation)).peers
        for generation in range(chain_repair.MAX_GENERATIONS)
    ]
    assert peers == [CHAIN] * (chain_repair.MAX_GENERATIONS - 1) + [()]


def test_a_full_replica_has_no_spare() -> None:
    driver = leading.opened({**leading.FULLS, **SPARES})
    said = ChainFailure(round=1, replica=0, generation=0, peer="b", reason="?")
    assert driver.do(Received("a", said), Gone("a")) == []


# --- a member: "me" is the second of three, "s" a spare


def chain_plan(round: int, *peers: str, spares: tuple[str, ...] = ("s",)) -> Plan:
    edges = ((0, 1), (1, 2), (2, 4))
    stages = tuple(StageSpec(peer=p, first=a, last=b) for p, (a, b) in zip(peers, edges, strict=True))
    return Plan(round=round, replicas=(ReplicaSpec(stages=stages),), spares=spares)


PLAN = chain_plan(1, "a", "me", "z")


def member(plan: Plan = PLAN, manifest: Manifest = M) -> MemberDriver:
    driver = MemberDriver(manifest=manifest)
    driver.settle(driver.learn(commits(plan, manifest=manifest)[0]))
    return driver


def commits(*plans: Plan, manifest: Manifest = M) -> list[Commit]:
    """A log with these plans."""
    made: list[Commit] = []
    for commit, plan in zip(log(len(plans) - 1, run=manifest.run_id), plans, strict=True):
        parent = made[-1].digest if made else commit.parent
        made.append(dataclasses.replace(commit, plan=plan, parent=parent))
    return made


def reconfigs(generation: int, *peers: str, steps: int = 0) -> ChainReconfig:
    return ChainReconfig(round=1, replica=0, generation=generation, peers=peers, steps=steps, reason="why")


def test_a_failure_is_reported_until_the_chain_is_reconfigured_and_the_work_goes_on() -> None:
    driver = member()
    said = Says(ChainFailure(round=1, replica=0, generation=0, peer="z", reason="gone"))
    assert driver.do(ChainFailed(1, 0, "z", "gone")) == [said]
    assert driver.do(Tick(), Tick())[-1] == said
    found = reconfigs(1, "a", "me", "s")
    new = chain_plan(1, "a", "me", "s")
    assert driver.do(found) == [Says(found), TrainOrder(new, 0, 1, 0, resume=True)]
    assert driver.do(found) == [Says(found)]
    assert driver.do(Tick()) == []
    assert driver.do(ChainFailed(1, 0, "z", "of the chain before")) == []
    assert driver.do(reconfigs(1, "s", "me", "z")) == [], "a generation has one chain"
    assert driver.do(Trained(1, 4, 4, 2.0)) == [EncodeUpdate(new, 0, 4, 4, 2.0)]


def test_accusations_are_repeated_to_nodes_that_may_have_missed_them() -> None:
    driver = member()
    said = Says(ChainFailure(round=1, replica=0, generation=0, peer="z", reason=f"{LIES}zeros"))
    driver.do(ChainFailed(1, 0, "z", f"{LIES}zeros"), reconfigs(1, "a", "me", "s"))
    driver.do(Tick())
    assert said not in driver.do(Tick())
    driver.now += RESEND_SECONDS
    assert said in driver.do(Tick()), "the chain goes on, but a node may not have heard why"
    driver.do(Failed(1, 2, "stopped"), UpdateEncoded(1, None))
    plans = [PLAN, *(chain_plan(round, "a", "b", "z") for round in (2, 3))]
    driver.settle(driver.learn(*commits(*plans)[1:]))
    driver.now += RESEND_SECONDS
    assert said not in driver.do(Tick()), "nodes that are connected have heard it by now"
    assert said in driver.do(Connected()), "one that was started again has not"


def test_of_a_slow_member_is_told_once() -> None:
    driver = member()
    (said,) = driver.do(ChainFailed(1, 0, "z", chain_repair.SLOW))
    assert said not in driver.do(Tick(), Tick())


@pytest.mark.parametrize("peers", [("a", "s", "z"), ()])
def test_who_is_replaced_keeps_its_work(peers: tuple[str, ...]) -> None:
    driver = member()
    found = reconfigs(1, *peers)
    driver.do(ChainFailed(1, 0, "z", "gone"))
    effects = driver.do(found)
    assert effects[-1] == Stop(1)
    told = [] if peers else [found, Withdraw(round=1, reason="why")]
    assert [e.message for e in effects[:-1]] == told
    assert driver.do(Failed(1, 2, "stopped")) == [KeepInFeedback(1)]
    assert driver.do(UpdateEncoded(1, None)) == []
    assert driver.member.phase is Phase.WAITING


def test_a_spare_trains_and_only_once_a_round() -> None:
    driver = member(chain_plan(1, "a", "b", "z", spares=("me",)))
    found = reconfigs(2, "a", "me", "z", steps=1)
    assert driver.do(found) == [
        Says(found),
        TrainOrder(chain_plan(1, "a", "me", "z", spares=("me",)), 0, 2, 1),
        EndIn(1, M.timing.training_seconds),
    ]
    assert driver.do(reconfigs(3, "a", "b", "z")) == [Stop(1)]
    assert driver.do(Failed(1, 3, "stopped"), UpdateEncoded(1, None)) == [KeepInFeedback(1)]
    again, said = reconfigs(4, "a", "me", "z"), Withdraw(round=1, reason="it has trained in this round already")
    assert driver.do(again) == [Says(again), Says(said)], "the leader does not wait for it"
    assert driver.do(again) == [Says(again)]


@pytest.mark.parametrize("peers", [("a", "me", "x"), ("a", "me"), ("me", "a", "z"), ("s", "me", "s")])
def test_reconfigurations_that_the_plan_does_not_allow_are_ignored(peers: tuple[str, ...]) -> None:
    assert member().do(reconfigs(1, *peers)) == []


def test_a_chain_that_works_is_not_ended() -> None:
    driver = member()
    assert driver.do(reconfigs(1)) == []
    driver.do(ChainFailed(1, 0, "z", chain_repair.SLOW))
    assert driver.do(reconfigs(1), reconfigs(2)) == [], "a slow chain works"
    assert driver.member.phase is Phase.TRAINING


def test_more_steps_than_the_round_has_are_not_said_to_be_done() -> None:
    assert member().do(reconfigs(1, "a", "me", "s", steps=PLAN.replica(0).work.steps + 1)) == []


def test_a_spare_that_is_not_ready_waits_to_be_told_again() -> None:
    plan = chain_plan(1, "a", "b", "z", spares=("me",))
    driver = MemberDriver()
    driver.learn(dataclasses.replace(log(0)[0], plan=plan))
    found = reconfigs(1, "a", "me", "z")
    driver.do(Applied(0))
    assert driver.do(found) == []
    driver.do(ShardsHeld(0))
    assert driver.do(found)[0] == Says(found)


def test_what_was_begun_ahead_keeps_the_reconfigured_chain() -> None:
    ahead = dataclasses.replace(M, outer=OuterSpec(overlap=1))
    promised = Work(slot=8, steps=4, micro_batches=2)
    plan = PLAN.replaced(dataclasses.replace(PLAN.replica(0), following=promised))
    driver = member(plan, ahead)
    driver.do(reconfigs(1, "a", "me", "s"), Trained(1, 4, 4, 2.0))
    effects = driver.do(UpdateEncoded(1, dataclasses.replace(offer(1), parts=())))
    assert isinstance(effects[-1], TrainOrder)
    (expected,) = chain_plan(1, "a", "me", "s").replicas
    assert effects[-1].plan.replicas == (dataclasses.replace(expected, work=promised),)
    assert driver.do(ChainFailed(2, 0, "s", "gone")) == [
        Says(ChainFailure(round=2, replica=0, generation=0, peer="s", reason="gone"))
    ]


def test_a_commit_ends_the_wait_for_a_reconfiguration() -> None:
    driver = member()
    driver.do(ChainFailed(1, 0, "z", "gone"))
    first = dataclasses.replace(log(0)[0], plan=PLAN)
    commit = dataclasses.replace(log(1)[1], parent=first.digest)
    assert driver.learn(commit) == [Stop(1)]
    assert driver.do(reconfigs(1, "a", "me", "s")) == []
    assert driver.do(Failed(1, 2, "stopped")) == [KeepInFeedback(1)]
