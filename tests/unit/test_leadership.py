"""Who leads, who is missing, and who takes a silent member's place."""

from __future__ import annotations

from protocol.quorum.leadership import REPLACE_LEASES, Leadership, Role
from protocol.quorum.paxos_events import Leads, Stalled
from tests import tiny

A, B, C, SPARE = (o.peer_id for o in tiny.OPERATORS[:4])
MEMBERS = (A, B, C)
M = tiny.manifest(operators=(*MEMBERS, SPARE), quorum=3)
LEASE = M.timing.gone_after


def node(peer: str) -> Leadership:
    return Leadership(M, peer, 0.0)


def test_the_leader_of_the_round_before_goes_on_while_it_gives_signs_of_life() -> None:
    b = node(B)
    assert b.leader(MEMBERS, before=C) == C
    b.heard(C, LEASE - 1)
    b.heard(None, 2 * LEASE - 2)
    assert b.leader(MEMBERS, before=C) == C
    b.heard(None, 2 * LEASE - 1)
    assert b.leader(MEMBERS, before=C) == B, "A is silent too: B is the first of those that are not"
    b.heard(A, 2 * LEASE)
    assert b.leader(MEMBERS, before=C) == A
    assert b.leader(MEMBERS, before=SPARE) == A, "who is no member does not lead"


def test_a_node_is_told_when_it_begins_and_when_it_ceases_to_lead() -> None:
    b = node(B)
    assert b.elect(MEMBERS, A) == []
    b.heard(None, LEASE)
    assert b.elect(MEMBERS, A) == [Leads(True)]
    assert b.elect(MEMBERS, A) == []
    assert (b.leads, b.position.phase) == (True, Role.LEADING)
    b.heard(A, LEASE + 1)
    assert b.elect(MEMBERS, A) == [Leads(False)]
    assert not b.leads


def test_it_says_once_that_too_few_members_are_there_and_once_that_enough_are() -> None:
    b = node(B)
    assert b.stalled(MEMBERS) == []
    b.heard(SPARE, LEASE)
    assert b.stalled(MEMBERS) == [Stalled((A, C))]
    assert b.stalled(MEMBERS) == []
    b.heard(C, LEASE)
    assert b.stalled(MEMBERS) == [Stalled(())]
    assert node(SPARE).leader((), A) is None


def test_a_member_that_is_silent_for_long_makes_way_for_an_operator_that_is_there() -> None:
    a, late = node(A), REPLACE_LEASES * LEASE
    a.heard(SPARE, late - 1)
    assert a.next_members(MEMBERS) == MEMBERS
    a.heard(B, late)
    assert a.next_members(MEMBERS) == (A, B, SPARE)
    a.heard(C, late)
    assert a.next_members(MEMBERS) == MEMBERS


def test_nobody_makes_way_where_no_spare_operator_is_there() -> None:
    a = node(A)
    a.heard(B, REPLACE_LEASES * LEASE)
    assert a.next_members(MEMBERS) == MEMBERS


def test_strangers_signs_of_life_do_not_count() -> None:
    b = node(B)
    b.heard("stranger", LEASE)
    assert b.leader(("stranger", B), "stranger") == B
