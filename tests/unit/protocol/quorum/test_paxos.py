"""The quorum: every row of its table, leaders that die or come back, and what a restart must not forget."""

from __future__ import annotations

import dataclasses

import pytest

from protocol.quorum.leadership import REPLACE_LEASES
from protocol.quorum.paxos_events import (
    Decided,
    Fetch,
    FetchList,
    Heard,
    Held,
    Leads,
    Learned,
    Listed,
    Objection,
    Proposed,
    Refused,
    Skipped,
    Stalled,
    Tick,
)
from protocol.wire import encoding
from protocol.wire.ballot import Accept, Pledge, Prepare, Promise, Reject, Vote
from protocol.wire.bounds import MAX_BALLOT
from protocol.wire.commit import Record, is_decided
from protocol.wire.session import Heartbeat
from tests.support import tiny
from tests.support.paxos import (
    NAMES,
    PARTS,
    PAYLOAD,
    SHARE,
    WITH_PAYLOAD,
    A,
    B,
    C,
    Cluster,
    D,
    E,
    is_kind,
    leader_that_stalls,
)


def test_a_single_member_decides_with_one_write() -> None:
    cluster = Cluster(1)
    assert cluster.leaders() == [A]
    cluster.propose(A)
    (record,) = cluster.logs[A]
    assert is_decided(record, (A,))
    assert cluster.votes[A] == [], "the log record is the vote"
    assert Decided(record) in cluster.other[A]


@pytest.mark.parametrize("size", [4, 7])
def test_in_calm_weather_two_exchanges_decide(size: int) -> None:
    cluster = Cluster(size)
    sent: list[object] = []
    cluster.cut = lambda sender, to, message: sent.append(message) is not None
    assert cluster.leaders() == [A]
    for time in (1.0, 2.0, 3.0):
        cluster.propose(A, time)
    assert [[r.commit.time for r in log] for log in cluster.logs.values()] == [[1.0, 2.0, 3.0]] * size
    kinds = {type(m) for m in sent if not isinstance(m, Record)}
    assert kinds == {Accept, Pledge, Vote}
    assert cluster.logs[A][0].commit.leader == A
    assert cluster.logs[A][0].commit.members == NAMES[:size]


def test_a_dead_leader_is_replaced_within_a_lease_and_leads_no_more_when_it_is_back() -> None:
    cluster = Cluster(4)
    cluster.propose(A, 1.0)
    cluster.kill(A)
    cluster.pass_time(cluster.lease)
    assert cluster.leaders() == [B]
    cluster.propose(B, 2.0)
    cluster.restart(A)
    cluster.pass_time(cluster.lease / 2)
    assert [r.commit.time for r in cluster.logs[A]] == [1.0, 2.0]
    assert cluster.leaders() == [B]
    assert Leads(True) in cluster.other[B]


def test_what_a_dead_leader_may_have_decided_is_finished_by_the_next() -> None:
    cluster = Cluster(4)
    cluster.cut = lambda sender, to, message: (isinstance(message, Accept) and to == D) or isinstance(message, Vote)
    cluster.propose(A, 1.0)
    assert cluster.votes[B][-1].commit is not None
    cluster.kill(A)
    cluster.cut = is_kind()
    cluster.pass_time(cluster.lease + 3)
    assert [r.commit.time for r in cluster.logs[B]] == [r.commit.time for r in cluster.logs[C]] == [1.0]
    assert cluster.logs[B][0].commit.leader == A, "the value is the old leader's"
    cluster.restart(A)
    cluster.pass_time(3)
    assert [r.commit.time for r in cluster.logs[A]] == [1.0]


def test_a_restarted_leader_does_not_use_its_ballot_for_another_commit() -> None:
    cluster = Cluster(4)
    cluster.cut = is_kind(Vote)
    cluster.propose(A, 1.0)
    cluster.restart(A)
    cluster.pass_time(0)
    cluster.cut = is_kind()
    cluster.propose(A, 2.0)
    cluster.pass_time(3)
    assert [[r.commit.time for r in log] for log in cluster.logs.values()] == [[1.0]] * 4
    assert cluster.logs[A][0].ballot > 0


def test_two_that_believe_to_lead_decide_one_commit() -> None:
    cluster = Cluster(4)
    cluster.cut = lambda sender, to, message: {sender, to} == {A, B} or (to == A and isinstance(message, Record))
    cluster.pass_time(cluster.lease)
    assert cluster.leaders() == [A, B]
    cluster.propose(B, 2.0)
    cluster.propose(A, 1.0)
    cluster.pass_time(10)
    assert len({r.commit.digest for log in cluster.logs.values() for r in log if r.commit.round == 0}) == 1
    cluster.cut = is_kind()
    cluster.pass_time(5)
    assert len({log[0].commit.digest for log in cluster.logs.values()}) == 1


def test_a_lower_ballot_is_rejected_and_tried_again_higher() -> None:
    cluster = Cluster(4)
    for name in (B, C):
        cluster.votes[name].append(Promise(round=0, ballot=9))
        cluster.restart(name)
    cluster.propose(A, 1.0)
    assert cluster.logs[A] == []
    cluster.pass_time(5)
    assert cluster.logs[A][0].ballot > 9
    assert all(len(log) == 1 for log in cluster.logs.values())


@pytest.mark.parametrize("size", [4, 7])
def test_ballots_that_nobody_honest_has_come_to_are_not_heard(size: int) -> None:
    """Else one member could use up the ballots that there are, and no member could propose any more."""
    cluster = Cluster(size)
    liar = NAMES[size - 1]
    highest = max(b for b in range(MAX_BALLOT - size, MAX_BALLOT) if b % size == size - 1)
    for name in NAMES[: size - 1]:
        for ballot in (highest, 10**9 * size + size - 1):
            cluster.do(name, Heard(liar, Prepare(round=0, ballot=ballot)))
            cluster.do(name, Heard(liar, Reject(round=0, ballot=0, promised=ballot)))
    cluster.propose(A, 1.0)
    cluster.do(A, Heard(liar, Reject(round=0, ballot=cluster.nodes[A].ballot, promised=MAX_BALLOT)))
    cluster.pass_time(5)
    assert all(len(log) == 1 for log in cluster.logs.values())
    for vote in (vote for votes in cluster.votes.values() for vote in votes):
        assert encoding.decode(encoding.encode(vote), "vote") == vote


def test_a_commit_whose_digest_was_computed_beforehand_is_proposed_as_it_is() -> None:
    """The digest of a commit of many replicas is long work, which a node gives to a thread before it proposes."""
    cluster = Cluster(4)
    ours = cluster.nodes[A].of_ours(cluster.commit(A))
    assert (ours.leader, ours.members) == (A, NAMES[:4])
    cluster.do(A, Proposed(ours))
    assert cluster.logs[A][0].commit is ours
    assert all(log[0].commit.digest == ours.digest for log in cluster.logs.values())


@pytest.mark.parametrize("lie", [True, False])
def test_who_proposes_what_is_not_fair_gets_no_vote_and_leads_this_round_no_more(lie: bool) -> None:
    cluster = Cluster(4)
    unfair = Objection("weighs one replica twice", lie)
    cluster.unfair = lambda name, commit: unfair if commit.time == 666.0 else None
    cluster.propose(A, 666.0)
    for name in (B, C, D):
        assert cluster.logs[name] == []
        assert cluster.nodes[name].leader == B
    refused = [[e for e in cluster.other[name] if isinstance(e, Refused)] for name in (B, C, D)]
    assert refused == [[Refused(A, 0, unfair)], [Refused(A, 0, unfair)], []], "D follows two others"
    cluster.propose(B, 1.0)
    cluster.pass_time(3)
    assert [[r.commit.time for r in log] for log in cluster.logs.values()] == [[1.0]] * 4


def test_a_leader_that_lets_a_due_round_wait_is_skipped_after_a_lease() -> None:
    cluster = leader_that_stalls()
    for name in (B, C, D):
        assert cluster.nodes[name].leader == B
    skipped = [[e for e in cluster.other[name] if isinstance(e, Skipped)] for name in (B, C, D)]
    assert skipped == [[Skipped(A, 0)], [Skipped(A, 0)], []], "D follows two others"
    cluster.propose(B, 1.0)
    cluster.pass_time(3)
    assert len(cluster.logs[C]) == 1


def test_nobody_is_skipped_while_too_few_give_signs_of_life() -> None:
    cluster = Cluster(4)
    cluster.kill(A, C)
    for _ in range(3 * int(cluster.lease)):
        cluster.now += 1.0
        cluster.do(B, Tick(due=True))
    assert not any(isinstance(e, Skipped) for e in cluster.other[B])


def test_without_enough_members_it_stalls_and_says_who_is_missing() -> None:
    cluster = Cluster(4)
    cluster.kill(A, C)
    cluster.pass_time(cluster.lease)
    assert [e for e in cluster.other[B] if isinstance(e, Stalled)] == [Stalled((A, C))]
    cluster.propose(B, 1.0)
    cluster.pass_time(20)
    assert cluster.logs[B] == []
    cluster.restart(C)
    cluster.pass_time(3)
    assert len(cluster.logs[B]) == len(cluster.logs[C]) == 1
    assert Stalled(()) in cluster.other[B]


def test_a_spare_operator_takes_the_place_of_a_member_that_stays_away() -> None:
    cluster = Cluster(4, operators=5)
    cluster.kill(C)
    cluster.propose(A, 1.0)
    assert cluster.logs[A][0].commit.members == (A, B, C, D)
    cluster.pass_time(REPLACE_LEASES * cluster.lease)
    cluster.propose(A, 2.0)
    assert cluster.logs[A][1].commit.members == (A, B, E, D)
    assert len(cluster.logs[E]) == 2
    cluster.kill(B)
    cluster.propose(A, 3.0)
    assert set(cluster.logs[A][2].votes) == {A, D, E}, "the newcomer votes"
    cluster.restart(C)
    cluster.pass_time(3)
    assert len(cluster.logs[C]) == 3


def test_strangers_and_wrong_owners_have_no_vote() -> None:
    cluster = Cluster(4, operators=5)
    commit = dataclasses.replace(cluster.commit(A), leader=A, members=NAMES[:4])
    for sender, message in [
        (E, Prepare(round=0, ballot=4)),
        (B, Accept(round=0, ballot=0, commit=commit)),
        (A, Accept(round=0, ballot=0, commit=dataclasses.replace(commit, parent="another"))),
        (A, Accept(round=0, ballot=0, commit=dataclasses.replace(commit, members=(A,)))),
    ]:
        cluster.do(C, Heard(sender, message))
    assert cluster.votes[C] == []
    stranger = tiny.record(commit, *tiny.OPERATORS[4:7])
    cluster.do(C, Learned(A, stranger))
    assert cluster.logs[C] == []
    forged = Vote(round=0, ballot=0, digest=commit.digest, signature=b"forged")
    cluster.cut = is_kind(Vote)
    cluster.propose(A)
    cluster.do(A, Heard(B, forged))
    assert cluster.logs[A] == []


def test_who_is_behind_is_helped() -> None:
    cluster = Cluster(4)
    cluster.cut = lambda sender, to, message: to == C
    for time in (1.0, 2.0):
        cluster.propose(A, time)
    assert cluster.logs[C] == []
    cluster.cut = is_kind()
    cluster.do(C, Heard(B, Heartbeat(phase="following", round=2)))
    assert len(cluster.logs[C]) == 2


def test_a_member_votes_once_it_holds_the_payloads() -> None:
    cluster = Cluster(4)
    cluster.propose(A)
    for name in (A, C):
        for event in (Listed(SHARE.root, PARTS), Held(PAYLOAD)):
            cluster.do(name, event)
    cluster.propose(A, 1.0, WITH_PAYLOAD)
    assert len(cluster.logs[A]) == 1
    assert [e for e in cluster.other[B] if isinstance(e, Fetch | FetchList)] == [FetchList((A, "p"), SHARE)]
    cluster.do(B, Listed(SHARE.root, PARTS))
    assert [e for e in cluster.other[B] if isinstance(e, Fetch)] == [Fetch((A, "p"), part) for part in PARTS]
    assert len(cluster.logs[A]) == 1
    cluster.do(B, Held(PAYLOAD))
    assert len(cluster.logs[A]) == len(cluster.logs[D]) == 2, "enough hold it; the record goes to all"
