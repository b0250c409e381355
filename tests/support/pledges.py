"""Parts that unit tests of pledges share with others."""

from __future__ import annotations

import dataclasses

from protocol.quorum.paxos_events import Heard, Learned
from protocol.wire.ballot import Accept, Pledge, Promise, Reject
from protocol.wire.commit import Commit, pledge_body
from protocol.wire.session import Heartbeat
from tests.support import tiny
from tests.support.paxos import NAMES, A, B, C, Cluster, D, is_kind

MEMBERS = NAMES[:4]
M = tiny.manifest(operators=MEMBERS, quorum=4)


def pledges(commit: Commit, ballot: int, *who: int) -> dict[str, bytes]:
    body = pledge_body(M.run_id, commit.round, ballot, commit.digest)
    return {NAMES[i]: tiny.OPERATORS[i].sign(body) for i in who}


def shown_another() -> Cluster:
    """B asks for pledges of its own commit, and hears then that C has accepted what A proposed."""
    cluster = Cluster(4)
    first = dataclasses.replace(cluster.commit(A, 1.0), leader=A, members=MEMBERS)
    proof = pledges(first, 0, 0, 2, 3)
    cluster.cut = lambda sender, to, message: not isinstance(message, Heartbeat)
    cluster.do(C, Heard(A, Accept(round=0, ballot=0, commit=first, certified=0, pledges=proof)))
    cluster.kill(A)
    cluster.pass_time(cluster.lease + 1)
    cluster.propose(B, 2.0)
    ballot = cluster.nodes[B].ballot
    for name in (C, D):
        cluster.do(B, Heard(name, Promise(round=0, ballot=ballot)))
    asked = dataclasses.replace(cluster.commit(B, 2.0), leader=B, members=MEMBERS)
    for _ in range(2):
        cluster.do(C, Heard(B, Accept(round=0, ballot=ballot, commit=asked)))
    cluster.do(B, Heard(C, dataclasses.replace(cluster.votes[C][-1], ballot=ballot)))
    cluster.do(D, Heard(B, Accept(round=0, ballot=ballot, commit=first, certified=0, pledges=proof)))
    cluster.cut = is_kind()
    cluster.pass_time(6)
    return cluster


def learned_while_asking() -> Cluster:
    """B asks for pledges, and learns what was decided without it."""
    cluster = Cluster(4)
    first = dataclasses.replace(cluster.commit(A, 1.0), leader=A, members=MEMBERS)
    cluster.kill(A)
    cluster.pass_time(cluster.lease + 1)
    cluster.cut = is_kind(Pledge)
    cluster.propose(B, 2.0)
    cluster.do(B, Learned(C, tiny.record(first, *(tiny.OPERATORS[i] for i in (0, 2, 3)))))
    return cluster


def rejected() -> Cluster:
    """A asks for pledges, while C and D have promised more."""
    cluster = Cluster(4)
    cluster.cut = is_kind(Pledge)
    cluster.propose(A, 1.0)
    node = cluster.nodes[A]
    before = node.phase
    cluster.do(A, Heard(D, Reject(round=0, ballot=0, promised=5)))
    assert node.phase is before
    cluster.do(A, Heard(C, Reject(round=0, ballot=0, promised=5)))
    assert node.phase is not before
    cluster.cut = is_kind()
    cluster.pass_time(5)
    return cluster
