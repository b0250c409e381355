"""Ranges of addresses: what is one, what of a plan it may have, and how many sessions."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterable
from typing import Any

import pytest

from bootstrap.sessions import AdmissionControl
from peer.net.base import Clock
from protocol.ledger import access, ranges, schedule, standing
from protocol.ledger.ranges import RELAYED, range_of
from protocol.planning import memory
from protocol.planning.partition import Candidate
from protocol.round import fairness
from protocol.round.leader import Leader
from protocol.round.leader_events import DecreeSigned, Ready
from protocol.run.manifest import AdmissionSpec, Manifest
from protocol.wire import encoding
from protocol.wire.commit import DOMAIN, Commit
from protocol.wire.decree import SET, Decree, Limits, Schedule
from protocol.wire.plan import Plan, ReplicaSpec, Seat, StageSpec, Work
from tests.support import tiny
from tests.support.leader import FULL, Driver

HOME = "81.2.69.0/24"


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("/ip4/81.2.69.144/tcp/4001", HOME),
        ("/ip4/81.2.69.7/udp/1/quic", HOME),
        ("/ip4/81.2.70.144/tcp/4001", "81.2.70.0/24"),
        ("/ip6/2a02:8109:9a80:1234:5::6/tcp/1", "2a02:8109:9a80::/48"),
        ("/ip6/2a02:8109:9a80:ffff::1/tcp/1", "2a02:8109:9a80::/48"),
        ("/ip6/::ffff:81.2.69.144/tcp/1", HOME),
        ("/ip4/81.2.69.144/tcp/4001/p2p/12D3KooW/p2p-circuit", RELAYED),
        ("/ip4/127.0.0.1/tcp/1", ""),
        ("/ip6/::1/tcp/1", ""),
        ("/ip4/10.1.2.3/tcp/1", ""),
        ("/ip4/172.17.0.1/tcp/1", ""),
        ("/ip4/100.64.0.9/tcp/1", ""),
        ("/ip6/fd00::1/tcp/1", ""),
        ("/ip6/::ffff:127.0.0.1/tcp/1", ""),
        ("", ""),
        ("/dns4/example.org/tcp/1", ""),
        ("nonsense", ""),
    ],
)
def test_a_range_is_what_one_contract_has_and_this_machine_is_none(where: str, expected: str) -> None:
    assert range_of(where) == expected


def manifest(**admission: Any) -> Manifest:
    return tiny.manifest(start_peers=4, rounds=20, admission=AdmissionSpec(**{"range_share": 0.25, **admission}))


M = manifest()
SHARE = M.admission.range_share


def limited(where: dict[str, str], planned: Plan, share: float = SHARE) -> Plan:
    return ranges.limited(M, planned, where, share)


def replica(number: int, *peers: str, steps: int = 4) -> ReplicaSpec:
    size = tiny.LAYERS // len(peers)
    stages = tuple(StageSpec(peer=p, first=i * size, last=(i + 1) * size) for i, p in enumerate(peers))
    return ReplicaSpec(number=number, stages=stages, work=Work(steps=steps, micro_batches=2))


def plan(*replicas: ReplicaSpec, forming: tuple[ReplicaSpec, ...] = ()) -> Plan:
    since = (0,) * len(forming)
    return Plan(round=1, replicas=replicas, forming=forming, forming_since=since, next_number=99)


def shares(of: Plan, where: dict[str, str]) -> float:
    """The part of all tokens, by blocks, that HOME has, counted another way."""
    ours, whole = 0.0, 0.0
    for r in of.replicas:
        for stage in r.stages:
            tokens = r.work.steps * (stage.last - stage.first)
            whole += tokens
            ours += tokens if where.get(stage.peer) == HOME else 0
    return ours / whole


def test_of_a_range_that_has_too_much_the_youngest_are_spares() -> None:
    full = [replica(i, f"p{i}") for i in range(10)]
    where = {f"p{i}": HOME for i in range(4, 10)}
    found = limited(where, plan(*full))
    assert [r.number for r in found.replicas] == [0, 1, 2, 3, 4]
    assert found.spares == ("p5", "p6", "p7", "p8", "p9")
    assert shares(found, where) <= 0.25
    assert limited(where, found) is found
    assert limited(where, plan(*full), 1.0).count == 10


def test_everybody_may_have_an_equal_share() -> None:
    where = {"a": HOME, "b": HOME, "c": "1.1.1.0/24"}
    two = plan(replica(0, "a"), replica(1, "b"), replica(2, "c"))
    assert [r.peers for r in limited(where, two).replicas] == [("a",), ("c",)]
    alone = plan(replica(0, "a"), replica(1, "b"))
    assert limited(where, alone) is alone, "nobody else is there"
    assert limited(where, plan(replica(0, "a", steps=4), replica(1, "c", steps=1))).count == 2, "one of each stays"


def test_chains_and_what_is_forming_count_by_blocks() -> None:
    where = dict.fromkeys(("x", "y", "z", "w"), HOME)
    mixed = plan(replica(0, "a"), replica(1, "b"), replica(2, "x", "c"), replica(3, "y", "d"), replica(4, "z", "e"))
    found = limited(where, mixed)
    assert [r.number for r in found.replicas] == [0, 1, 2, 3]
    assert found.spares == ("e", "z")
    coming = plan(
        replica(0, "a"), replica(1, "b"), replica(2, "x"), forming=(replica(-1, "y", "z"), replica(-1, "c", "d"))
    )
    found = limited(where, coming)
    assert ([r.number for r in found.replicas], [r.peers for r in found.forming]) == ([0, 1, 2], [("c", "d")])
    assert len(found.forming_since) == 1


def test_a_seat_goes_to_nobody_whose_range_has_its_share() -> None:
    where = {"x": HOME, "y": HOME, "z": "1.1.1.0/24"}
    some = dataclasses.replace(
        plan(*(replica(i, p) for i, p in enumerate("abcx"))),
        seats=(Seat(number=5, work=Work(steps=4, micro_batches=2)),),
    )
    assert not ranges.has_room(M, some, where, "y", SHARE)
    assert ranges.has_room(M, some, where, "z", SHARE)
    assert ranges.has_room(M, some, where, "b-friend", SHARE)


# --- the leader


def crowd(driver: Driver, names: Iterable[str]) -> None:
    """They are ready, all of one range."""
    for name in names:
        driver.do(Ready(Candidate(peer=name, memory_bytes=FULL, up_bps=10**7, range=HOME)))


def all_offer(driver: Driver) -> Commit:
    """All that are planned offer; the commit."""
    plan = driver.leader.plan
    return driver.decide(
        driver.offered(*(p for p in driver.memory if plan is not None and plan.replica_of(p) is not None))
    )


def thirty(**admission: Any) -> tuple[Driver, list[str]]:
    """Four founders and thirty identities of one range, after the plan that has seen all."""
    names = [f"x{i:02}" for i in range(30)]
    driver = Driver(dict.fromkeys((*"abcd", *names), FULL), manifest(**admission))
    driver.decide(driver.ready(*"abcd"))
    driver.attest(*"abcd")
    shards = memory.stage_shards(driver.manifest, 0, tiny.LAYERS)
    crowd(driver, names)
    for _ in range(3):
        driver.attest(*names, *"abcd", shards=shards)
        all_offer(driver)
    return driver, names


def test_thirty_identities_of_one_range_have_together_no_more_than_its_share() -> None:
    driver, names = thirty()
    for commit in driver.commits:
        assert commit.plan is not None
        assert shares(commit.plan, dict.fromkeys(names, HOME)) <= 0.25
        total = sum(c.tokens for c in commit.contributions)
        assert sum(c.tokens for c in commit.contributions if c.peers[0] in names) <= 0.25 * total
    assert sum(r.peers[0] in names for r in driver.commits[-1].plan.replicas) == 1
    without, names = thirty(range_share=1.0)
    assert without.commits[-1].plan is not None
    assert shares(without.commits[-1].plan, dict.fromkeys(names, HOME)) > 0.8


def test_a_plan_for_one_range_is_doubted_by_whoever_sees_it() -> None:
    driver, names = thirty(range_share=1.0)
    commit, before = driver.commits[-1], driver.commits[:-1]
    honest, _ = thirty()
    other = Driver(driver.memory, M, tuple(before))
    other.ready(*"abcd")
    crowd(other, names)
    sight = fairness.view_of(other.leader, commit.time, 1.0, True)
    found = fairness.doubt_in(sight, commit)
    assert found.reason == "plans 88% for one range of addresses"
    assert not found.lie
    assert fairness.doubt_in(sight, dataclasses.replace(commit, plan=honest.commits[-1].plan)) is None, (
        "thirty are spares"
    )
    unseen = dataclasses.replace(sight, ready={p: dataclasses.replace(c, range="") for p, c in sight.ready.items()})
    assert fairness.doubt_in(unseen, dataclasses.replace(commit, plan=honest.commits[-1].plan)) is None, "nor here"


def decreed(driver: Driver, **changes: Any) -> Limits:
    """The operator sets these limits with the next commit."""
    now, last = driver.manifest, schedule.limits(driver.manifest, None)
    limits = dataclasses.replace(last, **changes)
    lasts = Schedule(rounds=now.rounds, total_steps=now.train.total_steps, limits=limits)
    wish, key = Decree(run=now.run_id, number=0, action=SET, schedule=lasts), tiny.OPERATOR
    driver.do(DecreeSigned(key.peer_id, wish, key.sign(DOMAIN + encoding.encode(wish))))
    return limits


def test_limits_that_are_decreed_hold_from_the_commit_that_brings_them() -> None:
    driver, names = thirty(range_share=1.0)
    before = tuple(driver.commits)
    limits = decreed(driver, range_share=0.25, range_sessions=2, probation=9)
    driver.attest(*driver.memory, shards=memory.stage_shards(driver.manifest, 0, tiny.LAYERS))
    commit = all_offer(driver)
    assert before[-1].plan is not None
    where = dict.fromkeys(names, HOME)
    assert shares(before[-1].plan, where) > 0.8
    assert shares(commit.plan, where) <= 0.25
    assert driver.leader.standing.limits == standing.of(driver.manifest, driver.commits).limits == limits
    assert driver.leader.standing.left(names[0]) > 0, "who had served what was asked has more to serve"

    async def hand_in(event: object) -> None:
        """No peer is invited."""

    refused = AdmissionControl(driver.leader, hand_in, Clock()).crowded("x", ["y", "z"])
    assert refused is not None
    other = Driver(driver.memory, driver.manifest, before)
    other.ready(*"abcd")
    crowd(other, names)
    sight = fairness.view_of(other.leader, commit.time, 1.0, True)
    large = dataclasses.replace(before[-1].plan, round=commit.plan.round)
    found = fairness.doubt_in(sight, dataclasses.replace(commit, plan=large))
    assert "for one range of addresses" in found.reason
    assert fairness.doubt_in(sight, commit) is None
    assert access.why_unlawful(driver.manifest, before[-1], commit) is None
    otherwise = dataclasses.replace(commit, schedule=schedule.of(driver.manifest, None))
    assert access.why_unlawful(driver.manifest, before[-1], otherwise) is not None
    driver.attest(*driver.memory, shards=memory.stage_shards(driver.manifest, 0, tiny.LAYERS))
    after = driver.decide(driver.offered(*(peer for replica in commit.plan.replicas for peer in replica.peers)))
    assert after.schedule == commit.schedule, "they stay"


def test_those_for_whom_an_operator_vouches_are_limited_by_no_range() -> None:
    key = tiny.OPERATORS[3].peer_id
    driver = Driver({key: FULL}, manifest(keys=(key,)))
    crowd(driver, [key])
    assert [c.range for c in driver.leader.standing.marked(driver.leader.ready.values())] == [""]


# --- sessions


def test_so_many_strangers_of_a_range_have_a_session_and_an_operator_may_admit_more() -> None:
    key = tiny.OPERATORS[3].peer_id
    leader = Leader(manifest(range_sessions=2, keys=(key,)), (), (), 0.0)

    async def hand_in(event: object) -> None:
        """No peer is invited."""

    admission = AdmissionControl(leader, hand_in, Clock())
    assert admission.crowded("x", ["y"]) is None
    refused = admission.crowded("x", ["y", "z"])
    assert refused.waits
    assert admission.crowded("x", ["y", key]) is None, "who is admitted takes nobody's place"
    assert admission.crowded(key, ["y", "z"]) is None
    unlimited = AdmissionControl(Leader(manifest(), (), (), 0.0), hand_in, Clock())
    assert unlimited.crowded("x", [str(i) for i in range(99)]) is None
    assert asyncio.run(admission.welcome("x", None)) is None
