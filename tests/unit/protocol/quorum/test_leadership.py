"""The leader, missing members, and the replacement of a silent member."""

from __future__ import annotations

from protocol.quorum.leadership import REPLACE_LEASES, Leadership, Role
from protocol.quorum.paxos_events import Leads
from tests.support import tiny

A, B, C, D, SPARE = (o.peer_id for o in tiny.OPERATORS[:5])
MEMBERS = (A, B, C, D)
M = tiny.manifest(operators=(*MEMBERS, SPARE), quorum=4)
LEASE = M.timing.gone_after


def node(peer: str) -> Leadership:
    return Leadership(M, peer, 0.0)


def test_the_leader_of_the_round_before_goes_on_while_it_gives_signs_of_life() -> None:
    b = node(B)
    assert b.leader(MEMBERS, before=D) == D
    assert b.leader(MEMBERS, before=SPARE) == A, "who is no member does not lead"
    b.heard(D, LEASE - 1)
    b.heard(None, 2 * LEASE - 2)
    assert b.elect(MEMBERS, D) == []
    assert b.leader(MEMBERS, before=D) == D
    b.heard(None, 2 * LEASE - 1)
    b.elect(MEMBERS, D)
    assert b.leader(MEMBERS, before=D) == A, "the next one in order"


def test_a_node_is_told_when_it_begins_and_when_it_ceases_to_lead() -> None:
    b = node(B)
    assert b.elect(MEMBERS, A) == []
    b.heard(None, LEASE)
    assert b.elect(MEMBERS, A) == [Leads(True)]
    assert b.elect(MEMBERS, A) == []
    assert (b.leads, b.position.phase) == (True, Role.LEADING)
    for other in (C, D):
        b.heard(other, LEASE + 1)
        b.turned(other, 0, 2)
    assert b.elect(MEMBERS, A) == [Leads(False)], "two others say that it is C's turn"
    assert not b.leads


def test_nobody_makes_way_where_no_spare_operator_is_there() -> None:
    a = node(A)
    a.heard(B, REPLACE_LEASES * LEASE)
    assert a.next_members(MEMBERS) == MEMBERS


def test_strangers_signs_of_life_and_turns_do_not_count() -> None:
    b = node(B)
    b.heard("stranger", LEASE)
    b.turned("stranger", 0, 3)
    b.turned("another", 0, 3)
    b.elect(MEMBERS, A)
    assert b.present == {B}
    assert b.turn == 1, "it follows the lease alone"
