"""Which node's word moves a volunteer, and how far (protocol/round/member.py)."""

from __future__ import annotations

import dataclasses
import time

import msgpack
import pytest

from protocol.round.member_events import (
    Committed,
    Connected,
    Effect,
    EndIn,
    Finish,
    LogRead,
    ReadLog,
    Told,
    Trained,
    Unbelieved,
    UpdateEncoded,
)
from protocol.round.stragglers import GRACE_SHARE
from protocol.run.manifest import Manifest
from protocol.wire import encoding, framing
from protocol.wire.commit import Commit
from protocol.wire.encoding import MessageError, RecordHead
from protocol.wire.session import Finished, Heartbeat, TakeSeat, TimeUp
from tests.support import tiny
from tests.support.member import ME, TOKENS, Driver, M, log, offer, plan

SECONDS = M.timing.training_seconds
A, B, C, D = NODES = tuple(o.peer_id for o in tiny.OPERATORS[:4])
SPARE = tiny.OPERATORS[4]
FOUR = dataclasses.replace(M, operators=NODES, quorum=4)


def decide(driver: Driver, round: int, leader: str) -> list[Effect]:
    """The commit of `round`, which `leader` proposed, is decided."""
    made, before = driver.member.manifest, driver.member.commits.get(round - 1)
    parent = made.run_id if before is None else before.digest
    commit = tiny.commit(
        made,
        round=round,
        parent=parent,
        plan=plan(round + 1, ME) if round < made.rounds else None,
        leader=leader,
    )
    return driver.settle(driver.do(Committed(tiny.record(commit, *tiny.OPERATORS[:3]))))


def of_four(leader: str = A, manifest: Manifest = FOUR) -> Driver:
    """A member that trains round 1 of a run with four nodes, of which `leader` leads."""
    driver = Driver(manifest=manifest)
    decide(driver, 0, leader)
    return driver


def ends_of(effects: list[Effect]) -> list[EndIn]:
    return [e for e in effects if isinstance(e, EndIn)]


def test_orders_count_from_the_node_that_leads_by_the_log() -> None:
    driver = of_four(leader=C)
    driver.now = SECONDS
    for node in (A, B, D, SPARE.peer_id):
        assert driver.do(Told(node, TimeUp(round=1))) == []
    assert driver.do(Told(C, TimeUp(round=1))) == [EndIn(1, 0.0)]


def test_in_a_later_turn_of_the_round_enough_nodes_say_who_leads() -> None:
    driver = of_four(leader=D)
    driver.now = SECONDS

    def leader_after(node: str, turn: int, round: int = 1) -> str:
        assert driver.do(Told(node, Heartbeat(phase="x", round=round, turn=turn))) == []
        return driver.member.leader

    assert driver.member.leader == D
    assert leader_after(B, 2) == D
    assert leader_after(B, 2**40) == D, "one may lie"
    assert leader_after(SPARE.peer_id, 2) == D, "it is no member"
    assert leader_after(C, 2, round=2) == D, "that is another round"
    assert leader_after(C, 2) == B
    assert leader_after(B, 1) == A, "nobody but C says that it is in turn 2"
    assert driver.do(Told(A, TimeUp(round=1))) == [EndIn(1, 0.0)]
    decide(driver, 1, A)
    assert driver.member.leader == A


@pytest.mark.parametrize("order", [TimeUp(round=1), TakeSeat(round=1, replica=0, seconds=9.0)])
def test_the_user_is_told_once_of_a_node_that_gives_orders_again_and_again(order: TimeUp | TakeSeat) -> None:
    driver, found = of_four(), list[Effect]()
    for round in (1, 2, 3):
        assert found == [], "it may be about to lead"
        found += driver.do(*[Told(B, dataclasses.replace(order, round=round))] * 9)
        driver.do(Trained(round, 4, TOKENS, 2.0), UpdateEncoded(round, offer(round)))
        decide(driver, round, A)
    assert found == [Unbelieved(B)]


def test_a_leader_that_says_at_once_that_the_time_is_over_ends_no_training_early() -> None:
    """Nor does a volunteer end its rounds ever earlier for it."""
    driver = of_four(manifest=dataclasses.replace(FOUR, rounds=20))
    for round in range(1, 20):
        (end,) = ends_of(driver.do(Told(A, TimeUp(round=round))))
        assert end.seconds >= (1 - GRACE_SHARE) * SECONDS
        driver.do(Trained(round, 4, TOKENS, 2.0), UpdateEncoded(round, offer(round)))
        (end,) = ends_of(decide(driver, round, A))
        assert end.seconds >= (1 - GRACE_SHARE) * SECONDS


def test_who_cannot_know_when_its_round_began_ends_when_the_leader_says_so() -> None:
    """It was started again within the round, and read the log."""
    driver = Driver(manifest=FOUR)
    driver.do(Connected())
    decide(driver, 0, A)
    driver.settle(driver.do(LogRead()))
    assert driver.do(Told(A, TimeUp(round=1))) == [EndIn(1, 0.0)]


def test_one_node_does_not_end_the_run() -> None:
    driver = of_four()
    for round in (1, 2, 3):
        driver.do(Trained(round, 4, TOKENS, 2.0), UpdateEncoded(round, offer(round)))
        decide(driver, round, A)
    for node in (D, D, SPARE.peer_id):
        assert Finish() not in driver.do(Told(node, Finished(round=3)))
    assert Finish() in driver.do(Told(B, Finished(round=3)))


def test_a_newcomer_that_is_told_that_the_run_is_over_begins_when_the_log_says_that_it_is_not() -> None:
    driver = Driver(manifest=FOUR)
    driver.do(Connected(), Told(D, Finished(round=3)))
    assert ends_of(decide(driver, 0, A)) == []
    assert ends_of(driver.settle(driver.do(LogRead()))) != []


def test_records_of_later_rounds_that_no_honest_node_signed_have_nobody_read_the_log() -> None:
    driver = of_four()
    far = dataclasses.replace(log(0)[0], run=FOUR.run_id, round=10**6)
    assert driver.do(Committed(tiny.record(far, tiny.OPERATORS[3], SPARE))) == []
    assert driver.member.newest == 0
    assert driver.do(Committed(tiny.record(far, *tiny.OPERATORS[2:4]))) == [ReadLog(driver.member.history.tip)]


def head_of(commit: Commit, *voters: int) -> RecordHead:
    raw = encoding.encode_record(tiny.record(commit, *(tiny.OPERATORS[i] for i in voters)))
    return encoding.record_head(raw, A)


def test_a_record_is_decoded_if_it_can_be_news() -> None:
    driver = of_four()
    known = driver.member.commits[0]
    after = tiny.commit(FOUR, known, plan=plan(2, ME), leader=A)
    for head, news in (
        (head_of(known, 0, 1, 2), False),
        (head_of(dataclasses.replace(known, time=9.0), 3), False),
        (head_of(dataclasses.replace(known, time=9.0), 0, 1, 2), True),
        (head_of(after, 2, 3), False),
        (head_of(after, 0, 1, 2), True),
        (head_of(dataclasses.replace(after, round=7), 3), False),
        (head_of(dataclasses.replace(after, round=7), 2, 3), True),
    ):
        assert driver.member.is_news(head) == news
        assert head.whole().commit.round == head.commit.round


def test_a_dear_record_that_nobody_decided_is_not_decoded() -> None:
    driver = of_four()
    after = tiny.commit(FOUR, driver.member.commits[0], plan=plan(2, ME), leader=A)
    plain = framing.unpack_message(encoding.encode_record(tiny.record(after, tiny.OPERATORS[3])))
    plain["c"] |= {"left_out": [[0, ""]] * 50_000, "diverged": [["", ""]] * 50_000}
    began = time.process_time()
    framing.unpack_message(msgpack.packb(plain))
    whole = time.process_time() - began
    for changes in ({}, {"v": {name: bytes(64) for name in NODES}}):
        for round in (0, 1, 7):
            raw = msgpack.packb({**plain, **changes, "c": {**plain["c"], "round": round}})
            began = time.process_time()
            head = encoding.record_head(raw, D)
            if driver.member.is_news(head):
                with pytest.raises(MessageError, match="a signature is wrong"):
                    head.whole()
            assert time.process_time() - began < whole
