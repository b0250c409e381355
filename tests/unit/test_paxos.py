"""The quorum: every row of its table, leaders that die or come back, and what a restart must not forget."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from protocol import identity
from protocol.ledger.confirming import GRACE_HEARTBEATS
from protocol.ledger.part_lists import share_of
from protocol.ledger.validation import why_not_next
from protocol.quorum.leadership import LIAR_ROUNDS, REPLACE_LEASES, SLOW_ROUNDS
from protocol.quorum.paxos import LONELY_LEASES, Quorum
from protocol.quorum.paxos_events import (
    Append,
    Appended,
    Decided,
    Effect,
    Event,
    Fetch,
    FetchList,
    Heard,
    Held,
    Judge,
    Judged,
    Leads,
    Learned,
    Listed,
    Proposed,
    Refused,
    Save,
    Send,
    SendLog,
    Skipped,
    Stalled,
    Tick,
    Undo,
)
from protocol.quorum.table import Position
from protocol.quorum.unfair import Unfair
from protocol.run import layout
from protocol.run.manifest import Manifest
from protocol.wire import encoding
from protocol.wire.ballot import Accept, Confirmed, Holds, Pledge, Prepare, Promise, Reject, Vote
from protocol.wire.bounds import MAX_BALLOT
from protocol.wire.commit import Commit, Contribution, Part, Record, is_decided
from protocol.wire.decree import Enacted
from protocol.wire.plan import Plan, ReplicaSpec, StageSpec
from protocol.wire.session import Heartbeat, LogRequest
from tests import tiny

NAMES = tuple(o.peer_id for o in tiny.OPERATORS)
A, B, C = NAMES[:3]
PAYLOAD = tiny.digest("payload")
PARTS = tuple(Part(shard=s, digest=PAYLOAD, size=8, norm=1.0) for s in layout.shard_names(tiny.manifest().model))
SHARE = share_of("p", PARTS)
WITH_PAYLOAD = (Contribution(replica=0, tokens=64, steps=1, loss=1.0, shares=(SHARE,)),)
REPLICA = ReplicaSpec(stages=(StageSpec(peer="p", first=0, last=tiny.LAYERS),))
"""Planned for every round, so that WITH_PAYLOAD may be proposed."""


def manifest(quorum: int, operators: int = 0) -> Manifest:
    return tiny.manifest(operators=NAMES[: operators or quorum], quorum=quorum)


class Cluster:
    """Nodes whose messages arrive at once, but for those that `cut` catches; a node's disk survives `restart`."""

    def __init__(self, quorum: int, operators: int = 0) -> None:
        self.manifest = manifest(quorum, operators)
        self.lease = self.manifest.timing.gone_after
        self.now = 0.0
        self.cut: Callable[[str, str, object], bool] = lambda sender, to, message: False
        self.unfair: Callable[[str, Commit], Unfair | None] = lambda name, commit: None
        self.logs: dict[str, list[Record]] = {n: [] for n in self.manifest.operators}
        self.votes: dict[str, list[Promise]] = {n: [] for n in self.manifest.operators}
        self.held: dict[str, set[str]] = {n: set() for n in self.manifest.operators}
        self.other: dict[str, list[Effect]] = {n: [] for n in self.manifest.operators}
        self.ousts: dict[str, Enacted] = {}
        self.positions: list[Position[Any]] = []
        """Those of machines that began again."""
        self.nodes: dict[str, Quorum] = {}
        for name in self.manifest.operators:
            self.restart(name)
        self.pass_time(0.0)

    def restart(self, name: str) -> None:
        log, votes = self.logs[name], self.votes[name]
        self.nodes[name] = Quorum(
            self.manifest,
            name,
            log[-1] if log else None,
            votes[-1] if votes else None,
            self.held[name],
            tiny.OPERATORS[NAMES.index(name)].sign,
            identity.verify,
            self.now,
            lambda round: log[round] if 0 <= round < len(log) else None,
            self.ousts.get(name),
        )

    def kill(self, *names: str) -> None:
        for name in names:
            del self.nodes[name]

    def do(self, name: str, event: Event) -> None:
        if name not in self.nodes:
            return
        for effect in self.nodes[name].handle(event, self.now):
            match effect:
                case Save(vote):
                    self.votes[name].append(vote)
                case Send(to, message) if not self.cut(name, to, message):
                    if isinstance(message, LogRequest):
                        self.send_log(to, name, message.after)
                    else:
                        self.do(to, Heard(name, message))
                case SendLog(to, after):
                    self.send_log(name, to, after)
                case Append(record):
                    assert (
                        why_not_next(self.manifest, self.logs[name][-1].commit if self.logs[name] else None, record)
                        is None
                    )
                    self.logs[name].append(record)
                    if self.ousts.get(name) == record.commit.decree:
                        self.ousts.pop(name, None)
                    self.do(name, Appended(record))
                case Undo(enacted):
                    self.undo(name, enacted)
                    return
                case Judge(_, commit):
                    self.do(name, Judged(commit.digest, self.unfair(name, commit)))
                case FetchList(_, share) if share.root in self.held[name]:
                    self.do(name, Listed(share.root, PARTS))
                case Send():
                    pass
                case _:
                    self.other[name].append(effect)

    def undo(self, name: str, enacted: Enacted) -> None:
        assert enacted.decree.after is not None
        log, votes = self.logs[name], self.votes[name]
        del log[enacted.decree.after + 1 :]
        self.ousts[name] = enacted
        self.positions.append(self.nodes[name].position)
        self.nodes[name].begin(
            log[-1] if log else None, votes[-1] if votes else None, self.held[name], self.now, enacted
        )

    def send_log(self, sender: str, to: str, after: int) -> None:
        for record in self.logs[sender][after + 1 :]:
            if sender in self.nodes and not self.cut(sender, to, record):
                self.do(to, Learned(sender, record))

    def pass_time(self, seconds: float) -> None:
        for _ in range(int(seconds) + 1):
            for name in list(self.nodes):
                self.do(name, Tick())
            self.now += 1.0

    def leaders(self) -> list[str]:
        return [n for n, q in self.nodes.items() if q.leads]

    def commit(self, name: str, time: float = 0.0, contributions: tuple[Contribution, ...] = ()) -> Commit:
        node = self.nodes[name]
        return Commit(
            run=self.manifest.run_id,
            round=node.round,
            parent=node.head.digest if node.head else self.manifest.run_id,
            time=time,
            contributions=contributions,
            left_out=(),
            diverged=(),
            digests={},
            plan=Plan(round=node.round + 1, replicas=(REPLICA,)),
            decrees=node.head.decrees if node.head else 0,
            out=node.head.out if node.head else (),
        )

    def propose(self, name: str, time: float = 0.0, contributions: tuple[Contribution, ...] = ()) -> None:
        self.do(name, Proposed(self.commit(name, time, contributions)))


def is_kind(*kinds: type) -> Callable[[str, str, object], bool]:
    return lambda sender, to, message: isinstance(message, kinds)


def test_a_single_member_decides_with_one_write() -> None:
    cluster = Cluster(1)
    assert cluster.leaders() == [A]
    cluster.propose(A)
    (record,) = cluster.logs[A]
    assert is_decided(record, (A,))
    assert cluster.votes[A] == [], "the log record is the vote"
    assert Decided(record) in cluster.other[A]


@pytest.mark.parametrize("size", [3, 4, 5, 7])
def test_in_calm_weather_one_exchange_decides_and_two_where_members_may_lie(size: int) -> None:
    cluster = Cluster(size)
    sent: list[object] = []
    cluster.cut = lambda sender, to, message: sent.append(message) is not None
    assert cluster.leaders() == [A]
    for time in (1.0, 2.0, 3.0):
        cluster.propose(A, time)
    assert [[r.commit.time for r in log] for log in cluster.logs.values()] == [[1.0, 2.0, 3.0]] * size
    kinds = {type(m) for m in sent if not isinstance(m, Record)}
    assert kinds == ({Accept, Vote, Holds, Confirmed} if size in (3, 5) else {Accept, Pledge, Vote})
    assert cluster.logs[A][0].commit.leader == A
    assert cluster.logs[A][0].commit.members == NAMES[:size]


def test_a_dead_leader_is_replaced_within_a_lease_and_leads_no_more_when_it_is_back() -> None:
    cluster = Cluster(3)
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
    cluster = Cluster(3)
    cluster.cut = lambda sender, to, message: (isinstance(message, Accept) and to == C) or isinstance(message, Vote)
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
    cluster = Cluster(3)
    cluster.cut = is_kind(Vote)
    cluster.propose(A, 1.0)
    cluster.restart(A)
    cluster.pass_time(0)
    cluster.cut = is_kind()
    cluster.propose(A, 2.0)
    cluster.pass_time(3)
    assert [[r.commit.time for r in log] for log in cluster.logs.values()] == [[1.0]] * 3
    assert cluster.logs[A][0].ballot > 0


def test_two_that_believe_to_lead_decide_one_commit() -> None:
    cluster = Cluster(3)
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
    cluster = Cluster(3)
    cluster.do(B, Heard(C, Prepare(round=0, ballot=8)))
    cluster.do(C, Heard(C, Prepare(round=0, ballot=8)))
    cluster.propose(A, 1.0)
    assert cluster.logs[A] == []
    cluster.pass_time(5)
    assert cluster.logs[A][0].ballot > 8
    assert all(len(log) == 1 for log in cluster.logs.values())


@pytest.mark.parametrize("size", [3, 4, 5, 7])
def test_ballots_that_nobody_honest_has_come_to_are_not_heard(size: int) -> None:
    """Else one member could use up the ballots that there are, and nobody could propose any more."""
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
    cluster = Cluster(3)
    ours = cluster.nodes[A].of_ours(cluster.commit(A))
    assert (ours.leader, ours.members) == (A, NAMES[:3])
    cluster.do(A, Proposed(ours))
    assert cluster.logs[A][0].commit is ours
    assert all(log[0].commit.digest == ours.digest for log in cluster.logs.values())


@pytest.mark.parametrize(("lie", "rounds"), [(True, LIAR_ROUNDS), (False, 1)])
def test_who_proposes_what_is_not_fair_gets_no_vote_and_is_skipped(lie: bool, rounds: int) -> None:
    cluster = Cluster(3)
    unfair = Unfair("weighs one replica twice", lie)
    cluster.unfair = lambda name, commit: unfair if commit.time == 666.0 else None
    cluster.propose(A, 666.0)
    for name in (B, C):
        assert cluster.logs[name] == []
        assert [e for e in cluster.other[name] if isinstance(e, Refused)] == [Refused(A, 0, unfair)]
        assert cluster.nodes[name].leader == B
    cluster.propose(B, 1.0)
    cluster.pass_time(3)
    assert [[r.commit.time for r in log] for log in cluster.logs.values()] == [[1.0]] * 3
    leadership = cluster.nodes[C].leadership
    leadership.begin(rounds)
    assert leadership.leader((A, C), A) == A, "not for ever"
    leadership.begin(rounds - 1)
    assert leadership.leader((A, C), A) == C


def claim_of_what_is_not_fair() -> Cluster:
    """B leads after A, which says that it has accepted what nobody has seen and nobody honest accepts."""
    cluster = Cluster(3)
    cluster.unfair = lambda name, commit: Unfair("weighs one replica twice", True) if commit.time == 666.0 else None
    cluster.cut = is_kind(Accept)
    cluster.propose(A, 666.0)
    cluster.cut = is_kind()
    for name in (B, C):
        cluster.nodes[name].leadership.skip(A, 9)
    cluster.pass_time(0)
    cluster.propose(B, 1.0)
    return cluster


def test_a_claim_to_have_accepted_what_is_not_fair_does_not_bind_the_next_leader() -> None:
    """C's promise shows that it cannot have been decided. As long as C is silent it might be: then the round waits."""
    cluster = claim_of_what_is_not_fair()
    assert not any(isinstance(e, Refused) and e.peer == B for e in cluster.other[B]), "nobody accuses itself"
    cluster.pass_time(3)
    assert [r.commit.time for r in cluster.logs[C]] == [1.0]
    cluster = claim_of_what_is_not_fair()
    cluster.kill(C)
    cluster.pass_time(5)
    if not cluster.logs[B]:
        cluster.restart(C)
        cluster.pass_time(5)
    assert [r.commit.time for r in cluster.logs[C]] == [1.0]


def test_what_was_accepted_and_is_doubted_is_decided_by_those_who_are_left() -> None:
    """A proposed it, was alone in accepting it, and has crashed since. B doubts it; C, who could tell whether it was decided, is gone."""
    cluster = Cluster(3)
    cluster.unfair = lambda name, commit: (
        Unfair("leaves out work", False) if commit.time == 666.0 and name != A else None
    )
    cluster.cut = is_kind(Accept)
    cluster.propose(A, 666.0)
    cluster.kill(A)
    cluster.cut = is_kind()
    cluster.kill(C)
    cluster.pass_time(cluster.lease + 1)
    cluster.restart(A)
    cluster.pass_time(2)
    assert B in cluster.leaders(), "it has skipped A"
    cluster.propose(B, 1.0)
    cluster.pass_time(2 * cluster.lease)
    assert [r.commit.time for r in cluster.logs[B]][:1] == [666.0]
    assert [r.commit.time for r in cluster.logs[A]][:1] == [666.0]


def accepted_and_then_doubted() -> Cluster:
    """A restarted and finds that what it had accepted alone differs from what it sees now; it has nothing else to propose."""
    cluster = Cluster(3)
    cluster.cut = is_kind(Accept)
    cluster.propose(A, 666.0)
    (commit,) = [vote.commit for vote in cluster.votes[A] if vote.commit is not None]
    cluster.restart(A)
    cluster.nodes[A].acceptor.judge(commit.digest, Unfair("is doubtful now", False))
    cluster.cut = is_kind()
    cluster.pass_time(5)
    return cluster


def test_what_was_accepted_alone_and_is_doubted_later_is_not_proposed() -> None:
    cluster = accepted_and_then_doubted()
    assert cluster.logs[A] == []
    cluster.propose(A, 1.0)
    cluster.pass_time(3)
    assert [r.commit.time for r in cluster.logs[A]] == [1.0]


def test_where_all_are_skipped_nobody_is() -> None:
    leadership = Cluster(3).nodes[C].leadership
    for name in (A, B, C):
        leadership.skip(name, 1)
    assert leadership.leader((A, B), A) == A
    assert leadership.leader((A, B, C), A) == C, "nobody skips itself"


def test_members_that_have_all_come_to_skip_each_other_decide_nevertheless() -> None:
    cluster = Cluster(3)
    for node in cluster.nodes.values():
        for other in NAMES[:3]:
            node.leadership.skip(other, SLOW_ROUNDS)
    cluster.pass_time(1)
    assert [name for name, node in cluster.nodes.items() if node.leads] == [A, B, C]
    for name in (A, B, C):
        cluster.propose(name, float(NAMES.index(name)))
    cluster.pass_time(int(LONELY_LEASES * cluster.lease) - 3)
    assert not any(cluster.logs.values()), "nobody hears another one"
    cluster.pass_time(int(2 * cluster.lease))
    decided = [cluster.logs[name] for name in (A, B, C)]
    assert [len(log) for log in decided] == [1, 1, 1]
    assert len({log[0].commit.digest for log in decided}) == 1


def leader_that_stalls() -> Cluster:
    """A leads and proposes nothing, while the others would."""
    cluster = Cluster(3)
    for _ in range(int(cluster.lease) + 1):
        cluster.now += 1.0
        for name in cluster.nodes:
            cluster.do(name, Tick(due=name != A))
    return cluster


def test_a_leader_that_lets_a_due_round_wait_is_skipped_after_a_lease() -> None:
    cluster = leader_that_stalls()
    for name in (B, C):
        assert [e for e in cluster.other[name] if isinstance(e, Skipped)] == [Skipped(A, 0)]
        assert cluster.nodes[name].leader == B
    cluster.propose(B, 1.0)
    cluster.pass_time(3)
    assert len(cluster.logs[C]) == 1


def test_nobody_is_skipped_while_too_few_give_signs_of_life() -> None:
    cluster = Cluster(3)
    cluster.kill(A, C)
    for _ in range(3 * int(cluster.lease)):
        cluster.now += 1.0
        cluster.do(B, Tick(due=True))
    assert not any(isinstance(e, Skipped) for e in cluster.other[B])


def test_a_vote_is_on_disk_before_it_is_sent() -> None:
    cluster = Cluster(3)
    commit = dataclasses.replace(cluster.commit(A), leader=A, members=NAMES[:3])
    asked = cluster.nodes[B].handle(Heard(A, Accept(round=0, ballot=0, commit=commit)), 0.0)
    assert Judge(A, commit) in asked
    effects = cluster.nodes[B].handle(Judged(commit.digest, None), 0.0)
    kinds = [type(e.message) if isinstance(e, Send) else type(e) for e in effects]
    assert kinds.index(Save) < kinds.index(Vote)
    effects = cluster.nodes[C].handle(Heard(B, Prepare(round=0, ballot=1)), 0.0)
    kinds = [type(e.message) if isinstance(e, Send) else type(e) for e in effects]
    assert kinds.index(Save) < kinds.index(Promise)


def test_a_member_votes_once_it_holds_the_payloads() -> None:
    cluster = Cluster(3)
    cluster.propose(A)
    for event in (Listed(SHARE.root, PARTS), Held(PAYLOAD)):
        cluster.do(A, event)
    cluster.propose(A, 1.0, WITH_PAYLOAD)
    assert len(cluster.logs[A]) == 1
    assert [e for e in cluster.other[B] if isinstance(e, Fetch | FetchList)] == [FetchList((A, "p"), SHARE)]
    cluster.do(B, Listed(SHARE.root, PARTS))
    assert [e for e in cluster.other[B] if isinstance(e, Fetch)] == [Fetch((A, "p"), part) for part in PARTS]
    assert len(cluster.logs[A]) == 1
    cluster.do(B, Held(PAYLOAD))
    assert len(cluster.logs[A]) == len(cluster.logs[C]) == 2, "a majority holds it; the record goes to all"


def test_without_a_majority_it_stalls_and_says_who_is_missing() -> None:
    cluster = Cluster(3)
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
    cluster = Cluster(3, operators=4)
    cluster.kill(C)
    cluster.propose(A, 1.0)
    assert cluster.logs[A][0].commit.members == (A, B, C)
    cluster.pass_time(REPLACE_LEASES * cluster.lease)
    cluster.propose(A, 2.0)
    assert cluster.logs[A][1].commit.members == (A, B, NAMES[3])
    assert len(cluster.logs[NAMES[3]]) == 2
    cluster.kill(B)
    cluster.propose(A, 3.0)
    assert set(cluster.logs[A][2].votes) == {A, NAMES[3]}, "the newcomer votes"
    cluster.restart(C)
    cluster.pass_time(3)
    assert len(cluster.logs[C]) == 2, "who is no member takes what is confirmed only, and B may be alive"
    cluster.pass_time((GRACE_HEARTBEATS + 1) * cluster.manifest.timing.heartbeat)
    assert len(cluster.logs[C]) == 3


def test_strangers_and_wrong_owners_have_no_vote() -> None:
    cluster = Cluster(3, operators=4)
    commit = dataclasses.replace(cluster.commit(A), leader=A, members=NAMES[:3])
    for sender, message in [
        (NAMES[3], Prepare(round=0, ballot=3)),
        (B, Accept(round=0, ballot=0, commit=commit)),
        (A, Accept(round=0, ballot=0, commit=dataclasses.replace(commit, parent="another"))),
        (A, Accept(round=0, ballot=0, commit=dataclasses.replace(commit, members=(A,)))),
    ]:
        cluster.do(C, Heard(sender, message))
    assert cluster.votes[C] == []
    stranger = tiny.record(commit, *tiny.OPERATORS[3:5])
    cluster.do(C, Learned(A, stranger))
    assert cluster.logs[C] == []
    forged = Vote(round=0, ballot=0, digest=commit.digest, signature=b"forged")
    cluster.cut = is_kind(Vote)
    cluster.propose(A)
    cluster.do(A, Heard(B, forged))
    assert cluster.logs[A] == []


def test_who_is_behind_is_helped() -> None:
    cluster = Cluster(3)
    cluster.cut = lambda sender, to, message: to == C
    for time in (1.0, 2.0):
        cluster.propose(A, time)
    assert cluster.logs[C] == []
    cluster.cut = is_kind()
    cluster.do(C, Heard(B, Heartbeat(phase="following", round=2)))
    assert len(cluster.logs[C]) == 2
