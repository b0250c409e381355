"""Chains that lose a member, in the machines: what the leader answers, what a member does then, what a log may say of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from protocol.planning import memory
from protocol.rounds import chain_repair, validation
from protocol.rounds.leader import Fetch, Gone, Held, Lead, Received, Tell
from protocol.rounds.member import (
    Applied,
    Arranged,
    Broke,
    Failed,
    Fold,
    Mended,
    Pack,
    Packed,
    Resume,
    Stop,
    Tick,
    Train,
    Trained,
)
from protocol.rounds.member import Tell as Says
from protocol.run import layout
from protocol.run.manifest import Manifest, OuterSpec
from protocol.wire.plan import Plan, ReplicaSpec, StageSpec
from protocol.wire.session import Attest, Broken, Mend, Withdraw
from tests import tiny
from tests.unit import test_leader as leading
from tests.unit.test_member import Driver as MemberDriver
from tests.unit.test_member import log, offer

M = tiny.manifest(rounds=3)
CHAIN = ("c", "d", "e")
SPARES = {"f": leading.THIRD, "g": leading.THIRD}
SHARDS = layout.shard_names(M.model)


class Driver(leading.Driver):
    """A leader with a chain of c, d, e in round 1; f and g are spares who hold everything."""

    def __init__(self, *spares: str, **changes: Any) -> None:
        memory = {**leading.CHAIN, **{s: SPARES[s] for s in spares}}
        super().__init__(memory, tiny.manifest(rounds=3, start_peers=len(memory), **changes))
        self.decide(self.ready(*memory))
        self.attest(*memory, digests=dict.fromkeys(SHARDS, "same"))

    def attest(self, *peers: str, round: int | None = None, digest: str = "same", **options: Any) -> list[Any]:
        at = self.leader.round - 1 if round is None else round
        digests = options.get("digests", {"embed": digest})
        return self.do(*(Received(p, Attest(round=at, digests=digests)) for p in peers))

    def broken(self, peer: str, lost: str, epoch: int = 0, **changes: Any) -> list[Any]:
        said = Broken(round=self.leader.round, replica=0, epoch=epoch, peer=lost, reason="gave no sign of life")
        return self.do(Received(peer, dataclasses.replace(said, **changes)))

    def follow(self, mend: Mend) -> None:
        self.do(*(Received(p, mend) for p in mend.peers))

    def offered_by(self, mend: Mend, *peers: str, steps: int = 4) -> list[Any]:
        effects = []
        plan = chain_repair.mended(self.leader.plan, mend) if self.leader.plan and mend.peers else self.leader.plan
        assert plan is not None
        for peer in peers:
            stage = plan.replicas[0].stage_of(peer)
            shards = memory.stage_shards(self.manifest, stage.first, stage.last)
            parts = tuple(leading._part(peer, s, 1.0) for s in shards)
            made = dataclasses.replace(
                leading.Driver.offer(self, "c"),
                parts=parts,
                steps=steps,
                tokens=steps * self.manifest.train.step_tokens,
            )
            for effect in self.do(Received(peer, made)):
                effects += self.do(Held(effect.part.digest)) if isinstance(effect, Fetch) else [effect]
        return effects


def mend(effects: list[Any]) -> Mend:
    (found,) = [e.message for e in effects if isinstance(e, Tell)]
    assert isinstance(found, Mend)
    return found


# --- the leader


@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_ready_spare_takes_the_place_and_the_next_plan_keeps_it(position: int) -> None:
    driver = Driver("f")
    lost, reporter = CHAIN[position], CHAIN[position - 1]
    found = mend(effects := driver.broken(reporter, lost))
    expected = tuple("f" if p == lost else p for p in CHAIN)
    assert (found.epoch, found.peers, found.steps) == (1, expected, 0)
    assert set(effects[0].peers) == {*CHAIN, "f"}
    driver.follow(found)
    assert driver.at(1.0) == [], "everybody follows"
    effects = driver.offered_by(found, *expected)
    commit = driver.decide(effects)
    assert [s.peer for s in commit.contributions[0].shares] == list(expected)
    assert list(validation.problems(driver.manifest, driver.commits[0].plan, commit)) == []
    assert commit.plan is not None
    assert [r.peers for r in commit.plan.replicas] == [expected]
    assert commit.plan.spares == (), "who was lost was not heard since"


def test_who_was_lost_is_a_spare_again_once_it_was_heard() -> None:
    driver = Driver("f")
    found = mend(driver.broken("c", "d"))
    driver.follow(found)
    assert mend(driver.broken("d", "c")) == found, "a report of an older epoch gets the present mend"
    commit = driver.decide(driver.offered_by(found, *found.peers))
    assert commit.plan is not None
    assert commit.plan.spares == ("d",)


def test_a_mend_is_repeated_to_those_who_do_not_follow() -> None:
    driver = Driver("f")
    found = mend(driver.broken("c", "d"))
    driver.do(Received("c", found), Received("e", found))
    assert driver.at(1.0) == [Tell(("f",), found, False)]


def test_the_first_report_of_an_epoch_decides() -> None:
    driver = Driver("f", "g")
    assert mend(driver.broken("d", "e")).peers == ("c", "d", "f")
    assert mend(driver.broken("e", "d")).peers == ("c", "d", "f")
    assert mend(driver.broken("c", "d", epoch=1)).peers == ("c", "g", "f")


@pytest.mark.parametrize(
    "changes",
    [{"round": 2}, {"replica": 1}, {"replica": -1}, {"epoch": 7}],
)
def test_reports_of_nothing_are_ignored(changes: dict[str, Any]) -> None:
    assert Driver("f").broken("c", "d", **{"epoch": 0, **changes}) == []


def test_strangers_and_nodes_that_do_not_lead_mend_nothing() -> None:
    driver = Driver("f")
    assert driver.broken("x", "d") == driver.broken("f", "d") == []
    driver.do(Lead(False))
    assert driver.broken("c", "d") == []


@pytest.mark.parametrize("unready", ["gone", "behind", "wrong", "partly", "small"])
def test_a_spare_must_be_there_hold_the_state_and_have_the_memory(unready: str) -> None:
    driver = Driver("f")
    match unready:
        case "gone":
            driver.do(Gone("f"))
        case "behind":
            driver.leader.attests[0].pop("f")
        case "wrong":
            driver.leader.attests[0]["f"] = dict.fromkeys(SHARDS, "other")
        case "partly":
            driver.leader.attests[0]["f"].pop("block.1")
        case _:
            candidate = driver.leader.ready["f"]
            driver.leader.ready["f"] = dataclasses.replace(candidate, memory_bytes=candidate.memory_bytes // 10)
    first = mend(driver.broken("c", "d"))
    assert (first.epoch, first.peers) == (1, CHAIN), "the same members, once: it may be back"
    second = mend(driver.broken("c", "d", epoch=1))
    assert second.peers == ()
    driver.attest("d", digests=dict.fromkeys(SHARDS, "same"))
    commit = driver.decide(driver.at(leading.GONE))
    assert leading.left_out(commit) == [(0, "peer d: gave no sign of life; no spare is ready")]


def test_who_withdraws_is_replaced_at_once_or_ends_the_chain() -> None:
    assert mend(Driver("f").do(Received("e", Withdraw(round=1, reason="out of memory")))).peers == ("c", "d", "f")
    assert mend(Driver().do(Received("e", Withdraw(round=1, reason="out of memory")))).peers == ()


def test_who_is_gone_is_replaced_without_a_report() -> None:
    assert mend(Driver("f").do(Gone("c"))).peers == ("f", "d", "e")
    assert Driver().do(Gone("c")) == []


def test_who_is_absent_is_replaced_without_a_report_as_soon_as_a_spare_is_ready() -> None:
    absent = leading.Tick(frozenset({"c"}))
    driver = Driver("f")
    found = mend(driver.do(absent))
    assert (found.peers, found.reason) == (("f", "d", "e"), "peer c: its session ended")
    driver.follow(found)
    assert driver.do(absent) == []
    late = Driver("f")
    late.attest("f", digests={"embed": "same"})
    assert late.do(absent) == [], "it is waited upon while no spare holds the state"
    late.attest("f", digests=dict.fromkeys(SHARDS, "same"))
    assert mend(late.do(absent)).peers == ("f", "d", "e")


def test_who_is_absent_is_waited_upon_without_a_spare_that_is_there() -> None:
    assert Driver().do(leading.Tick(frozenset({"c"}))) == []
    driver = Driver("f")
    assert driver.do(leading.Tick(frozenset({"c", "f"}))) == []
    assert mend(driver.do(leading.Tick(frozenset({"c"})))).peers == ("f", "d", "e")


def test_who_offered_before_it_was_absent_is_not_replaced() -> None:
    driver = Driver("f")
    driver.offered_by(Mend(round=1, replica=0, epoch=0, peers=(), steps=0, reason=""), "c")
    assert driver.do(leading.Tick(frozenset({"c"}))) == []


def test_where_one_has_offered_the_steps_are_done() -> None:
    driver = Driver("f")
    assert driver.offered_by(Mend(round=1, replica=0, epoch=0, peers=(), steps=0, reason=""), "c", "e", steps=3) == []
    found = mend(driver.do(Gone("d")))
    assert (found.peers, found.steps) == (("c", "f", "e"), 3)
    commit = driver.decide(driver.offered_by(found, "f", steps=3))
    assert (commit.contributions[0].steps, len(commit.contributions[0].shares)) == (3, 3)


def test_an_offer_of_a_mended_chain_says_that_it_is_done() -> None:
    driver = Driver("f")
    found = mend(driver.broken("c", "d"))
    again = mend(driver.offered_by(found, "e", steps=2))
    assert (again.epoch, again.peers, again.steps) == (2, found.peers, 2)


def test_what_a_replaced_member_offers_does_not_count() -> None:
    driver = Driver("f")
    found = mend(driver.broken("c", "d"))
    stale = leading.Driver.offer(driver, "d")
    assert driver.do(Received("d", stale)) == []
    commit = driver.decide(driver.offered_by(found, *found.peers))
    assert "d" not in [s.peer for s in commit.contributions[0].shares]


def test_a_new_leader_learns_of_mends_from_those_who_follow() -> None:
    found = Mend(round=1, replica=0, epoch=3, peers=("c", "f", "e"), steps=0, reason="")
    driver = Driver("f")
    driver.do(Received("f", found))
    assert driver.leader.repairs.epoch(0) == 0, "a spare cannot appoint itself"
    driver.do(*(Received("c", dataclasses.replace(found, peers=p)) for p in (("c", "x", "e"), ("c", "e", "d"), ("c",))))
    assert driver.leader.repairs.epoch(0) == 0, "nor a member somebody whom the plan does not know"
    driver.do(Received("c", found))
    assert driver.leader.repairs.epoch(0) == 3
    assert mend(driver.broken("e", "f", epoch=3)).epoch == 4


def test_members_who_know_different_chains_get_one() -> None:
    driver = Driver("f", "g")
    found = mend(driver.broken("c", "d"))
    assert found.peers == ("c", "f", "e")
    assert mend(driver.broken("e", "g", epoch=1)) == dataclasses.replace(
        found, epoch=2, reason="its members knew different chains"
    )


def test_a_slow_member_is_replaced_only_if_there_is_a_spare() -> None:
    assert mend(Driver("f").broken("c", "d", reason=chain_repair.SLOW)).peers == ("c", "f", "e")
    assert mend(Driver("f").broken("c", "c", reason=chain_repair.SLOW)).peers == ("f", "d", "e")
    assert Driver().broken("c", "d", reason=chain_repair.SLOW) == []


def test_a_chain_that_breaks_again_and_again_ends_its_round() -> None:
    driver = Driver("f")
    peers = [mend(driver.broken("c", "nobody", epoch=epoch)).peers for epoch in range(chain_repair.MAX_EPOCHS)]
    assert peers == [CHAIN] * (chain_repair.MAX_EPOCHS - 1) + [()]


def test_a_full_replica_has_no_spare() -> None:
    driver = leading.opened({**leading.FULLS, **SPARES})
    said = Broken(round=1, replica=0, epoch=0, peer="b", reason="?")
    assert driver.do(Received("a", said), Gone("a")) == []


def test_a_log_may_name_spares_of_its_plan_only() -> None:
    driver = Driver("f")
    found = mend(driver.broken("c", "d"))
    commit, plan = driver.decide(driver.offered_by(found, *found.peers)), driver.commits[0].plan
    assert plan is not None
    for spares, expected in (((), "replica 0 has other peers than its plan and its spares"), (("f", "x"), None)):
        said = list(validation.problems(driver.manifest, dataclasses.replace(plan, spares=spares), commit))
        assert said == ([expected] if expected else [])
    made = commit.contributions[0]
    twice = dataclasses.replace(made, shares=(made.shares[0], made.shares[0], made.shares[2]))
    assert "counts a peer twice" in list(
        validation.problems(driver.manifest, plan, dataclasses.replace(commit, contributions=(twice,)))
    )


# --- a member: "me" is the second of three, "s" a spare


def chain_plan(round: int, *peers: str, spares: tuple[str, ...] = ("s",)) -> Plan:
    edges = ((0, 1), (1, 2), (2, 4))
    stages = tuple(StageSpec(peer=p, first=a, last=b) for p, (a, b) in zip(peers, edges, strict=True))
    return Plan(round=round, slot=0, replicas=(ReplicaSpec(k=4, stages=stages),), spares=spares)


PLAN = chain_plan(1, "a", "me", "z")


def member(plan: Plan = PLAN, manifest: Manifest = M) -> MemberDriver:
    driver = MemberDriver(manifest=manifest)
    commit = dataclasses.replace(log(0, run=manifest.run_id)[0], plan=plan)
    driver.settle(driver.learn(commit))
    return driver


def mends(epoch: int, *peers: str, steps: int = 0) -> Mend:
    return Mend(round=1, replica=0, epoch=epoch, peers=peers, steps=steps, reason="why")


def test_a_break_is_reported_until_there_is_a_mend_and_the_work_goes_on() -> None:
    driver = member()
    said = Says(Broken(round=1, replica=0, epoch=0, peer="z", reason="gone"))
    assert driver.do(Broke(1, 0, "z", "gone")) == [said]
    assert driver.do(Tick(), Tick())[-1] == said
    found = mends(1, "a", "me", "s")
    new = chain_plan(1, "a", "me", "s")
    assert driver.do(Mended(found)) == [Says(found), Resume(new, 0, 1, 0)]
    assert driver.do(Mended(found)) == [Says(found)]
    assert driver.do(Tick()) == []
    assert driver.do(Broke(1, 0, "z", "of the chain before")) == []
    assert driver.do(Mended(mends(1, "s", "me", "z"))) == [], "an epoch has one chain"
    assert driver.do(Trained(1, 4, 4, 2.0)) == [Pack(new, 0, 4, 4, 2.0)]


def test_of_a_slow_member_is_told_once() -> None:
    driver = member()
    (said,) = driver.do(Broke(1, 0, "z", chain_repair.SLOW))
    assert said not in driver.do(Tick(), Tick())


@pytest.mark.parametrize("peers", [("a", "s", "z"), ()])
def test_who_is_replaced_keeps_its_work(peers: tuple[str, ...]) -> None:
    driver = member()
    found = mends(1, *peers)
    effects = driver.do(Mended(found))
    assert effects[-1] == Stop(1)
    told = [] if peers else [found, Withdraw(round=1, reason="why")]
    assert [e.message for e in effects[:-1]] == told
    assert driver.do(Failed(1, 2, "stopped")) == [Fold(1)]
    assert driver.do(Packed(1, None)) == []
    assert driver.member.phase == "waiting"


def test_a_spare_trains_and_only_once_a_round() -> None:
    driver = member(chain_plan(1, "a", "b", "z", spares=("me",)))
    found = mends(2, "a", "me", "z", steps=3)
    assert driver.do(Mended(found)) == [Says(found), Train(chain_plan(1, "a", "me", "z", spares=("me",)), 0, 2, 3)]
    assert driver.do(Mended(mends(3, "a", "b", "z"))) == [Stop(1)]
    assert driver.do(Failed(1, 3, "stopped"), Packed(1, None)) == [Fold(1)]
    again = mends(4, "a", "me", "z")
    assert driver.do(Mended(again)) == [Says(again)]


@pytest.mark.parametrize("peers", [("a", "me", "x"), ("a", "me"), ("me", "a", "z"), ("s", "me", "s")])
def test_mends_that_the_plan_does_not_allow_are_ignored(peers: tuple[str, ...]) -> None:
    assert member().do(Mended(mends(1, *peers))) == []


def test_a_spare_that_is_not_ready_waits_to_be_told_again() -> None:
    plan = chain_plan(1, "a", "b", "z", spares=("me",))
    driver = MemberDriver()
    driver.learn(dataclasses.replace(log(0)[0], plan=plan))
    found = mends(1, "a", "me", "z")
    driver.do(Applied(0))
    assert driver.do(Mended(found)) == []
    driver.do(Arranged(0))
    assert driver.do(Mended(found))[0] == Says(found)


def test_what_was_begun_ahead_keeps_the_mended_chain() -> None:
    ahead = dataclasses.replace(M, outer=OuterSpec(overlap=1))
    driver = member(manifest=ahead)
    driver.do(Mended(mends(1, "a", "me", "s")), Trained(1, 4, 4, 2.0))
    effects = driver.do(Packed(1, dataclasses.replace(offer(1), parts=())))
    assert isinstance(effects[-1], Train)
    assert effects[-1].plan.replicas == chain_plan(1, "a", "me", "s").replicas
    assert driver.do(Broke(2, 0, "s", "gone")) == [Says(Broken(round=2, replica=0, epoch=0, peer="s", reason="gone"))]


def test_a_commit_ends_the_wait_for_a_mend() -> None:
    driver = member()
    driver.do(Broke(1, 0, "z", "gone"))
    first = dataclasses.replace(log(0)[0], plan=PLAN)
    commit = dataclasses.replace(log(1)[1], parent=first.digest)
    assert driver.learn(commit) == [Stop(1)]
    assert driver.do(Mended(mends(1, "a", "me", "s"))) == []
    assert driver.do(Failed(1, 2, "stopped")) == [Fold(1)]
