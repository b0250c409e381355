"""A member that votes for two commits of one round: its own signatures name it, nobody confirms either, and the others take it out."""

from __future__ import annotations

import dataclasses

import pytest

from protocol.ledger import access, ousting
from protocol.ledger.confirming import GRACE_HEARTBEATS
from protocol.quorum.paxos_events import Certified, Forked, Heard, Learned, Named, Ousted, Proposed
from protocol.quorum.suspects import Suspects
from protocol.wire import encoding
from protocol.wire.ballot import Accept, Confirmed, Holds
from protocol.wire.commit import DOMAIN, Commit, Record, voted_twice
from protocol.wire.decree import OUST, Decree, Enacted
from protocol.wire.double_vote import DoubleVote
from protocol.wire.session import Heartbeat
from tests import tiny
from tests.unit.test_paxos import NAMES, A, B, C, Cluster

D = NAMES[3]


def records(cluster: Cluster, ballots: tuple[int, int] = (0, 0)) -> tuple[Record, Record]:
    """Two commits of round 0, each with the votes of A, which lies, and of one other member."""
    first, second = (
        dataclasses.replace(cluster.commit(A, time), leader=A, members=cluster.manifest.first_members)
        for time in (1.0, 2.0)
    )
    a, b, c = tiny.OPERATORS[:3]
    return tiny.record(first, a, b, ballot=ballots[0]), tiny.record(second, a, c, ballot=ballots[1])


def forked(operators: int = 3) -> tuple[Cluster, Record, Record]:
    """B has the one, C the other in its log; A has left."""
    cluster = Cluster(3, operators)
    first, second = records(cluster)
    cluster.cut = lambda sender, to, message: {sender, to} == {B, C}
    cluster.do(B, Learned(A, first))
    cluster.do(C, Learned(A, second))
    cluster.kill(A)
    cluster.cut = lambda sender, to, message: False
    return cluster, first, second


def of_kind(cluster: Cluster, kind: type, name: str) -> list[object]:
    return [e for e in cluster.other[name] if isinstance(e, kind)]


def taken_out(cluster: Cluster, proof: DoubleVote, after: int, *signers: int, number: int = 0) -> Enacted:
    """The decree that takes the liar out, signed by operators."""
    decree = Decree(
        run=cluster.manifest.run_id, number=number, action=OUST, subject=proof.peer, proof=proof, after=after
    )
    body = DOMAIN + encoding.encode(decree)
    signatures = {tiny.OPERATORS[i].peer_id: tiny.OPERATORS[i].sign(body) for i in signers}
    return Enacted(decree=decree, signatures=signatures)


def with_decree(cluster: Cluster, name: str, enacted: Enacted, time: float = 5.0) -> Commit:
    """What the leader's machine proposes then."""
    out = ousting.out_after(cluster.nodes[name].head, enacted)
    return dataclasses.replace(cluster.commit(name, time), decree=enacted, decrees=1, out=out)


def test_signatures_name_who_voted_for_two_commits_in_one_ballot_and_nobody_else() -> None:
    cluster = Cluster(3)
    first, second = records(cluster)
    (proof,) = voted_twice(first, second)
    assert proof.peer == A
    assert proof.is_true(cluster.manifest.run_id)
    assert voted_twice(first, first) == ()
    one, other = records(cluster, (0, 3))
    run, (a, b, c) = cluster.manifest.run_id, tiny.OPERATORS[:3]
    assert voted_twice(one, other) == (), "a member may vote for another commit in a later ballot"
    told = tiny.sworn(a, run, 3, 0, one.commit.digest)
    for grounds in ((told, tiny.sworn(c, run, 3)), (tiny.sworn(b, run, 3, 1, "e" * 64), tiny.sworn(c, run, 3))):
        assert voted_twice(one, dataclasses.replace(other, grounds=grounds)) == (), "nobody denies a vote"


@pytest.mark.parametrize(
    "change",
    [
        {"peer": B},
        {"round": 1},
        {"term": 1},
        {"ballot": 1},
        {"digest": "f" * 64},
        {"signature": b"?" * 64},
        {"other": ""},
    ],
)
def test_a_proof_that_was_changed_proves_nothing(change: dict[str, object]) -> None:
    cluster = Cluster(3)
    (proof,) = voted_twice(*records(cluster))
    assert not dataclasses.replace(proof, **change).is_true(cluster.manifest.run_id)  # type: ignore[arg-type]
    assert not proof.is_true("f" * 64)
    same = dataclasses.replace(proof, other=proof.digest, signed=proof.signature)
    assert not same.is_true(cluster.manifest.run_id), "one vote is none too many"


def test_a_proof_travels_in_few_bytes_and_comes_back_the_same() -> None:
    (proof,) = voted_twice(*records(Cluster(3)))
    raw = encoding.encode(proof)
    assert len(raw) < 500
    assert encoding.decode(raw, "x") == proof


def test_nobody_confirms_either_commit_and_both_honest_nodes_know_within_a_sign_of_life_who_lied() -> None:
    cluster, first, second = forked()
    (proof,) = voted_twice(first, second)
    cluster.pass_time(cluster.manifest.timing.heartbeat + 1)
    for name in (B, C):
        (named,) = of_kind(cluster, Named, name)
        assert isinstance(named, Named)
        assert (named.proof.peer, {named.proof.digest, named.proof.other}) == (A, {proof.digest, proof.other})
        assert cluster.nodes[name].may_oust == (named.proof, -1)
    cluster.restart(A)
    cluster.propose(B, 3.0)
    cluster.pass_time(2 * cluster.lease)
    assert len(cluster.logs[B]) == len(cluster.logs[C]) == 1, "nothing more is decided"
    for name in (B, C):
        assert len(of_kind(cluster, Named, name)) == 1, "it is told once"
        assert of_kind(cluster, Certified, name) == [], "no peer applies it"
        assert of_kind(cluster, Forked, name) == []


@pytest.mark.parametrize("name", [B, C])
def test_a_node_that_starts_again_finds_it_again(name: str) -> None:
    cluster, _, _ = forked()
    cluster.restart(name)
    cluster.pass_time(cluster.manifest.timing.heartbeat + 1)
    assert [e.proof.peer for e in cluster.other[name] if isinstance(e, Named)] == [A]
    assert of_kind(cluster, Certified, name) == []


def test_who_has_stopped_gives_no_votes() -> None:
    cluster, _, _ = forked()
    cluster.pass_time(cluster.manifest.timing.heartbeat + 1)
    votes = len(cluster.votes[C])
    commit = dataclasses.replace(cluster.commit(C, 3.0), leader=A, members=NAMES[:3])
    cluster.do(C, Heard(A, Accept(round=1, ballot=0, commit=commit)))
    assert len(cluster.votes[C]) == votes


def test_two_decided_commits_of_different_ballots_name_who_denied_its_vote() -> None:
    cluster = two_of_different_ballots()
    for name in (B, C):
        ((proof),) = [e.proof for e in cluster.other[name] if isinstance(e, Named)]
        assert (proof.peer, proof.ballot, proof.promised) == (A, 0, 3)
        assert cluster.nodes[name].is_stopped
        assert cluster.nodes[name].may_oust == (proof, -1)
        assert of_kind(cluster, Certified, name) == [], "no peer applies either"
    raw = encoding.encode(proof)
    assert len(raw) < 500
    assert encoding.decode(raw, "x") == proof
    run = cluster.manifest.run_id
    assert proof.is_true(run)
    for changes in (
        {"promised": 6},
        {"promised": 0},
        {"accepted": 0},
        {"accepted": 1},
        {"promised": -1},
        {"other": "e" * 64},
    ):
        assert not dataclasses.replace(proof, **changes).is_true(run)  # type: ignore[arg-type]


def test_a_liars_word_alone_makes_no_conflict() -> None:
    """All honest logs are the same: the second commit is nowhere, and what was decided is confirmed."""
    cluster = Cluster(3)
    first, second = records(cluster)
    for name in (B, C):
        cluster.do(name, Learned(A, first))
    cluster.do(B, Learned(A, second))
    cluster.pass_time(cluster.manifest.timing.heartbeat + 1)
    assert cluster.nodes[B].suspects.conflict is None
    assert [e.proof.peer for e in cluster.other[C] if isinstance(e, Named)] == [A], "the others hear of it"
    for name in (B, C):
        assert cluster.nodes[name].is_stopped
        assert len(of_kind(cluster, Certified, name)) == 1
        assert cluster.nodes[name].may_oust is not None
        assert cluster.nodes[name].may_oust[1] == 0, "nothing is undone"  # type: ignore[index]


def test_one_of_four_that_votes_twice_is_named_and_stops_nobody() -> None:
    cluster = Cluster(4)
    cluster.propose(A, 1.0)
    (record,) = cluster.logs[B]
    other = dataclasses.replace(record.commit, time=7.0)
    cluster.do(B, Learned(A, tiny.record(other, tiny.OPERATORS[0], ballot=record.ballot)))
    cluster.propose(A, 2.0)
    assert [e.proof.peer for e in cluster.other[B] if isinstance(e, Named)] == [A]
    assert [len(log) for log in cluster.logs.values()] == [2] * 4


# --- confirming


def confirmations(cluster: Cluster) -> list[tuple[str, int]]:
    return [(n, e.certificate.round) for n in NAMES[:3] for e in cluster.other[n] if isinstance(e, Certified)]


def test_in_calm_weather_a_commit_is_certified_at_once() -> None:
    cluster = Cluster(3)
    for round in range(3):
        cluster.propose(A, float(round))
        assert sorted(confirmations(cluster)) == sorted((n, r) for n in NAMES[:3] for r in range(round + 1))


def test_a_dead_member_costs_one_grace_and_not_one_in_each_round() -> None:
    cluster = Cluster(3)
    cluster.kill(C)
    cluster.propose(A, 1.0)
    assert confirmations(cluster) == [], "it may be alive, and know another commit"
    cluster.pass_time(GRACE_HEARTBEATS * cluster.manifest.timing.heartbeat)
    assert sorted(confirmations(cluster)) == sorted([(A, 0), (B, 0)])
    for round in (1, 2):
        cluster.propose(A, 1.0 + round)
        assert {(A, round), (B, round)} <= set(confirmations(cluster)), "it is not waited for again"
    cluster.restart(C)
    cluster.pass_time(cluster.manifest.timing.heartbeat + 1)
    cluster.cut = lambda sender, to, message: isinstance(message, Holds | Heartbeat) and sender == C
    cluster.propose(A, 9.0)
    assert (A, 3) not in confirmations(cluster), "it is back, and waited for"


def test_a_confirmation_counts_for_its_own_commit_with_its_own_signature_only() -> None:
    cluster = Cluster(3)
    cluster.cut = lambda sender, to, message: isinstance(message, Confirmed)
    cluster.propose(A, 1.0)
    assert confirmations(cluster) == []
    commit = cluster.logs[A][0].commit
    for digest, signer in ((commit.digest, 0), ("f" * 64, 1)):
        body = tiny.OPERATORS[signer].sign(b"something else")
        cluster.do(A, Heard(B, Confirmed(round=0, digest=digest, by={B: body})))
    assert confirmations(cluster) == []


# --- taking the liar out


def two_of_different_ballots() -> Cluster:
    """B and C hold different commits: A voted for the one, and then promised a higher ballot as if it had not."""
    cluster = Cluster(3)
    first, second = records(cluster, (0, 3))
    run, (a, _, c) = cluster.manifest.run_id, tiny.OPERATORS[:3]
    second = dataclasses.replace(second, grounds=(tiny.sworn(a, run, 3), tiny.sworn(c, run, 3)))
    cluster.cut = lambda sender, to, message: {sender, to} == {B, C}
    cluster.do(B, Learned(A, first))
    cluster.do(C, Learned(A, second))
    cluster.cut = lambda sender, to, message: False
    cluster.pass_time(cluster.manifest.timing.heartbeat + 1)
    return cluster


def liar_that_is_taken_out() -> Cluster:
    """B hears of the decree from its operator, C from B, and A by the record."""
    cluster, _, second = forked()
    cluster.pass_time(cluster.manifest.timing.heartbeat + 1)
    proof, after = cluster.nodes[B].may_oust or (None, 0)
    assert proof is not None
    enacted = taken_out(cluster, proof, after, 1, 2)
    cluster.do(B, Ousted(enacted))
    cluster.pass_time(1)
    cluster.do(B, Proposed(with_decree(cluster, B, enacted)))
    cluster.pass_time(5)
    (record,) = cluster.logs[C]
    assert record.commit.out == (A,)
    cluster.logs[A] = [second]
    cluster.restart(A)
    cluster.do(A, Learned(B, record))
    return cluster


def test_a_node_that_did_not_hear_of_the_decree_follows_who_asks_for_its_vote() -> None:
    cluster = liar_that_is_taken_out()
    assert len(cluster.logs[B]) == len(cluster.logs[C]) == 1
    assert cluster.logs[A] == [], "the liar's own node cuts its log off, too"


@pytest.mark.parametrize("operators", [3, 4])
def test_the_others_take_the_liar_out_and_decide_the_round_anew(operators: int) -> None:
    cluster, first, second = forked(operators)
    cluster.pass_time(cluster.manifest.timing.heartbeat + 1)
    (proof, after) = cluster.nodes[B].may_oust or (None, None)
    assert proof is not None
    assert after == -1
    enacted = taken_out(cluster, proof, after, 1, 2)
    for name in (B, C):
        cluster.do(name, Ousted(enacted))
        assert (cluster.nodes[name].round, cluster.nodes[name].members) == (0, (B, C))
    cluster.pass_time(3)
    (leader,) = [name for name in cluster.leaders() if name in (B, C)]
    cluster.do(leader, Proposed(with_decree(cluster, leader, enacted)))
    cluster.pass_time(3)
    for name in (B, C):
        (record,) = cluster.logs[name]
        assert record.commit not in (first.commit, second.commit)
        assert (record.commit.out, record.commit.decree) == ((A,), enacted)
        assert record.commit.members == ((B, C) if operators == 3 else (B, C, D))
        assert not cluster.nodes[name].is_stopped
    cluster.propose(leader, 6.0)
    cluster.pass_time(1)
    assert len(cluster.logs[B]) == len(cluster.logs[C]) == 2, "and the run goes on"


def test_votes_of_honest_members_for_the_round_that_is_decided_anew_are_no_proof_against_them() -> None:
    cluster, first, _ = forked()
    cluster.pass_time(cluster.manifest.timing.heartbeat + 1)
    (proof, after) = cluster.nodes[B].may_oust or (None, 0)
    assert proof is not None
    enacted = taken_out(cluster, proof, after, 1, 2)
    anew = dataclasses.replace(
        with_decree(cluster, B, enacted), leader=B, members=(B, C), round=0, parent=cluster.manifest.run_id
    )
    assert voted_twice(first, tiny.record(anew, tiny.OPERATORS[1], tiny.OPERATORS[2])) == ()


def test_a_node_that_was_away_and_the_liar_itself_follow_the_record() -> None:
    cluster, _, second = forked()
    cluster.pass_time(cluster.manifest.timing.heartbeat + 1)
    proof, after = cluster.nodes[B].may_oust or (None, 0)
    assert proof is not None
    enacted = taken_out(cluster, proof, after, 1, 2)
    for name in (B, C):
        cluster.do(name, Ousted(enacted))
    cluster.pass_time(3)
    (leader,) = [name for name in cluster.leaders() if name in (B, C)]
    cluster.do(leader, Proposed(with_decree(cluster, leader, enacted)))
    cluster.pass_time(3)
    (record,) = cluster.logs[C]
    cluster.logs[A] = [second]
    cluster.restart(A)
    cluster.do(A, Learned(B, record))
    assert cluster.logs[A] == []
    cluster.do(A, Learned(B, record))
    assert cluster.logs[A] == [record]
    assert A in cluster.nodes[A].out


def test_nobody_is_taken_out_without_a_true_proof_nor_by_too_few_nor_from_an_older_round_on() -> None:
    cluster, first, second = forked()
    (proof,) = voted_twice(first, second)
    m = cluster.manifest

    def why(enacted: Enacted, head: Commit | None = None) -> str | None:
        return access.why_not_decreed(m, head, enacted)

    assert why(taken_out(cluster, proof, -1, 1, 2)) is None
    assert why(taken_out(cluster, proof, -1, 1)) == "has a decree that too few of the others signed"
    assert why(taken_out(cluster, proof, -1, 0, 1)) == "has a decree that too few of the others signed"
    assert why(taken_out(cluster, proof, -1, 1, 3)) == "has a decree that too few of the others signed"
    false = dataclasses.replace(proof, signed=b"?" * 64)
    assert why(taken_out(cluster, false, -1, 1, 2)) == "takes somebody out with a false proof"
    later = dataclasses.replace(proof, round=5)
    assert why(taken_out(cluster, later, -1, 1, 2)) == "takes somebody out from another round on"
    assert why(taken_out(cluster, proof, 0, 1, 2)) == "takes somebody out from another round on"
    assert why(taken_out(cluster, proof, 0, 1, 2), first.commit) is None, "a later round may be the one, too"
    other = dataclasses.replace(taken_out(cluster, proof, -1, 1, 2), signatures={})
    assert why(other) == "has a decree that too few of the others signed"


def test_who_waits_for_the_decree_takes_nothing_that_was_decided_without_it() -> None:
    cluster, first, second = forked()
    cluster.pass_time(cluster.manifest.timing.heartbeat + 1)
    (proof, after) = cluster.nodes[B].may_oust or (None, 0)
    assert proof is not None
    cluster.do(B, Ousted(taken_out(cluster, proof, after, 1, 2)))
    cluster.do(B, Learned(A, second))
    cluster.do(B, Learned(A, first))
    assert cluster.logs[B] == []
    cluster.restart(B)
    cluster.do(B, Learned(A, first))
    assert cluster.logs[B] == [], "nor after a restart"
    votes = len(cluster.votes[B])
    cluster.do(B, Heard(A, Accept(round=0, ballot=0, commit=second.commit)))
    assert len(cluster.votes[B]) == votes


def test_who_decided_the_last_record_is_read_from_the_log_once() -> None:
    cluster, read = Cluster(3), list[int]()
    first, _ = records(cluster)

    def recorded(round: int) -> Record:
        read.append(round)
        return first

    suspects = Suspects(cluster.manifest, recorded)
    last, other = (
        dataclasses.replace(first, commit=dataclasses.replace(first.commit, round=round)) for round in (1, 2)
    )
    assert suspects.members_of(last) == suspects.members_of(last) == cluster.manifest.first_members
    assert read == [0]
    suspects.members_of(other)
    assert read == [0, 1]
