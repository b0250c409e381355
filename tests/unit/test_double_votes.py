"""A member that votes for two commits of one round: its own signatures name it, and nobody goes on."""

from __future__ import annotations

import dataclasses

import pytest

from protocol.rounds.paxos_events import Forked, Heard, Learned
from protocol.wire.ballot import Accept
from protocol.wire.commit import Record, voted_twice
from tests import tiny
from tests.unit.test_paxos import NAMES, A, B, C, Cluster


def records(cluster: Cluster, ballots: tuple[int, int] = (0, 0)) -> tuple[Record, Record]:
    """Two commits of round 0, each with the votes of A, which lies, and of one other member."""
    first, second = (
        dataclasses.replace(cluster.commit(A, time), leader=A, members=cluster.manifest.first_members)
        for time in (1.0, 2.0)
    )
    a, b, c = tiny.OPERATORS[:3]
    return tiny.record(first, a, b, ballot=ballots[0]), tiny.record(second, a, c, ballot=ballots[1])


def forked() -> tuple[Cluster, Record, Record]:
    """B has the one, C the other in its log; A has left."""
    cluster = Cluster(3)
    first, second = records(cluster)
    cluster.cut = lambda sender, to, message: {sender, to} == {B, C}
    cluster.do(B, Learned(A, first))
    cluster.do(C, Learned(A, second))
    cluster.kill(A)
    cluster.cut = lambda sender, to, message: False
    return cluster, first, second


def test_signatures_name_who_voted_for_two_commits_in_one_ballot_and_nobody_else() -> None:
    cluster = Cluster(3)
    first, second = records(cluster)
    assert voted_twice(first, second) == (A,)
    assert voted_twice(first, first) == ()
    assert voted_twice(*records(cluster, (0, 3))) == (), "a member may vote for another commit in a later ballot"


def test_within_a_sign_of_life_both_honest_nodes_know_who_lied_and_decide_nothing_more() -> None:
    cluster, first, second = forked()
    cluster.pass_time(cluster.manifest.timing.heartbeat + 1)
    assert [e for e in cluster.other[B] if isinstance(e, Forked)] == [Forked(second, (A,))]
    assert [e for e in cluster.other[C] if isinstance(e, Forked)] == [Forked(first, (A,))]
    cluster.restart(A)
    cluster.propose(B, 3.0)
    cluster.pass_time(2 * cluster.lease)
    assert len(cluster.logs[B]) == len(cluster.logs[C]) == 1, "and it is told once"
    assert sum(isinstance(e, Forked) for name in (B, C) for e in cluster.other[name]) == 2


@pytest.mark.parametrize("name", [B, C])
def test_a_node_that_starts_again_finds_it_again(name: str) -> None:
    cluster, _, _ = forked()
    cluster.restart(name)
    cluster.pass_time(cluster.manifest.timing.heartbeat + 1)
    assert [e.liars for e in cluster.other[name] if isinstance(e, Forked)] == [(A,)]


def test_who_has_stopped_gives_no_votes() -> None:
    cluster, _, _ = forked()
    cluster.pass_time(cluster.manifest.timing.heartbeat + 1)
    votes = len(cluster.votes[C])
    commit = dataclasses.replace(cluster.commit(C, 3.0), leader=A, members=NAMES[:3])
    cluster.do(C, Heard(A, Accept(round=1, ballot=0, commit=commit)))
    assert len(cluster.votes[C]) == votes
