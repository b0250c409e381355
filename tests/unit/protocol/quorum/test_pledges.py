"""Quorums that bear liars: pledges, certificates and turns."""

from __future__ import annotations

import dataclasses

from protocol import identity
from protocol.quorum.acceptor import Acceptor
from protocol.quorum.leadership import Leadership
from protocol.quorum.paxos_events import Heard, Objection, Save, Send
from protocol.wire.ballot import Accept, Pledge, Prepare, Promise, Vote
from protocol.wire.commit import Commit, liars_borne, votes_needed
from tests.support import tiny
from tests.support.paxos import A, B, C, Cluster, D, is_kind
from tests.support.pledges import MEMBERS, M, learned_while_asking, pledges, rejected, shown_another

COMMIT = tiny.commit(M, time=1.0)
OTHER = dataclasses.replace(COMMIT, time=2.0)


def acceptor() -> Acceptor:
    member = Acceptor(M, Promise(round=0), (), tiny.OPERATORS[2].sign, identity.verify)
    for commit in (COMMIT, OTHER):
        member.judge(commit.digest, None)
    return member


def ask(member: Acceptor, ballot: int, commit: Commit, certified: int = -1, *who: int) -> list[type]:
    """The kinds of what it does."""
    proof = pledges(commit, certified, *who)
    accept = Accept(round=0, ballot=ballot, commit=commit, certified=certified, pledges=proof)
    effects = member.accept(A, accept, None, MEMBERS)
    return [type(e.message) if isinstance(e, Send) else type(e) for e in effects]


def test_so_many_votes_are_needed_and_so_many_liars_borne() -> None:
    assert [votes_needed(n) for n in range(1, 8)] == [1, 2, 3, 3, 4, 5, 5]
    assert [liars_borne(n) for n in range(1, 8)] == [0, 0, 0, 1, 1, 1, 2]


def test_a_member_pledges_one_commit_in_a_ballot_and_remembers_it_on_its_disk() -> None:
    member = acceptor()
    assert ask(member, 0, COMMIT) == [Save, Pledge]
    assert ask(member, 0, COMMIT) == [Pledge], "the same answer again"
    assert ask(member, 0, OTHER) == []
    restarted = Acceptor(M, member.vote, (), tiny.OPERATORS[2].sign, identity.verify)
    restarted.judge(OTHER.digest, None)
    assert ask(restarted, 0, OTHER) == []
    assert ask(member, 1, OTHER) == [Save, Pledge], "in a higher ballot it is free: nothing was certified"


def test_it_accepts_only_what_enough_members_pledged_in_this_ballot() -> None:
    member = acceptor()
    assert ask(member, 0, COMMIT, 0, 0, 1) == [Save, Pledge], "two of four: asked for a pledge"
    forged = Accept(round=0, ballot=0, commit=COMMIT, certified=0, pledges=pledges(OTHER, 0, 0, 1, 2))
    assert not any(isinstance(e, Send) and isinstance(e.message, Vote) for e in member.accept(A, forged, None, MEMBERS))
    assert ask(member, 0, COMMIT, 0, 0, 1, 2) == [Save, Vote]
    assert ask(member, 0, COMMIT, 0, 0, 1, 2) == [Vote]


def test_who_has_accepted_a_commit_pledges_another_one_only_if_that_was_certified_later() -> None:
    member = acceptor()
    ask(member, 0, COMMIT, 0, 0, 1, 2)
    assert ask(member, 4, OTHER) == [Save, Promise], "it shows the certificate that binds it"
    assert ask(member, 4, OTHER) == [Promise]
    assert member.vote.commit == COMMIT
    assert ask(member, 4, COMMIT) == [Save, Pledge]
    assert ask(member, 8, OTHER, 5, 0, 1, 3) == [Save, Pledge]
    assert (member.vote.accepted, member.vote.commit) == (5, OTHER), "it is bound by the later one now"
    assert member.is_proof(OTHER, 5, member.vote.pledges, MEMBERS)


def test_what_is_certified_is_believed_to_be_fair() -> None:
    """Of 2f + 1 that pledged it, f + 1 are honest and could have proposed it."""
    member = acceptor()
    member.judge(OTHER.digest, Objection("leaves out replica 1", False))
    assert ask(member, 1, OTHER) == []
    assert ask(member, 4, OTHER, 1, 0, 1, 3) == [Save, Pledge]
    fresh = Acceptor(M, Promise(round=0), (), tiny.OPERATORS[2].sign, identity.verify)
    assert ask(fresh, 4, OTHER, 1, 0, 1, 3) == [Save, Pledge], "the first that it hears of"


def test_a_false_claim_to_have_accepted_something_binds_nobody() -> None:
    cluster = Cluster(4)
    cluster.cut = is_kind(Accept)
    cluster.propose(A, 1.0)
    cluster.kill(A)
    cluster.cut = lambda sender, to, message: sender == D and isinstance(message, Promise)
    cluster.pass_time(cluster.lease + 1)
    assert cluster.leaders() == [B]
    cluster.propose(B, 2.0)
    ballot = cluster.nodes[B].ballot
    false = dataclasses.replace(cluster.commit(B, 666.0), leader=A, members=MEMBERS)
    lie = Promise(round=0, ballot=ballot, accepted=ballot - 1, commit=false, pledges=dict.fromkeys(MEMBERS, b"?"))
    cluster.do(B, Heard(D, lie))
    cluster.cut = is_kind()
    cluster.pass_time(3)
    assert [r.commit.time for r in cluster.logs[C]] == [2.0]


def locked() -> Cluster:
    """C alone has accepted what A proposed, in ballot 0; no other member knows that it was certified."""
    cluster = Cluster(4)
    cluster.cut = lambda sender, to, message: isinstance(message, Accept) and message.certified == 0 and to != C
    cluster.propose(A, 1.0)
    assert [cluster.votes[n][-1].commit is not None for n in (B, C, D)] == [False, True, False]
    return cluster


def test_what_may_have_been_decided_is_proposed_again_even_if_its_holder_is_heard_last() -> None:
    cluster = locked()
    cluster.kill(A)
    cluster.cut = lambda sender, to, message: C in (sender, to) and isinstance(message, Prepare | Promise)
    cluster.pass_time(cluster.lease + 1)
    cluster.propose(B, 2.0)
    cluster.cut = is_kind()
    cluster.pass_time(10)
    assert [[r.commit.time for r in cluster.logs[n]] for n in (B, C, D)] == [[1.0]] * 3


def test_a_certificate_that_comes_late_is_what_is_decided() -> None:
    cluster = shown_another()
    assert [[r.commit.time for r in cluster.logs[n]] for n in (B, C, D)] == [[1.0]] * 3


def test_what_is_learned_while_pledges_are_asked_for_is_what_is_decided() -> None:
    assert [r.commit.time for r in learned_while_asking().logs[B]] == [1.0]


def test_one_member_that_rejects_everything_does_not_stop_a_round_and_more_than_may_lie_do() -> None:
    cluster = rejected()
    assert [len(log) for log in cluster.logs.values()] == [1] * 4


def test_who_does_not_lead_gets_no_promise() -> None:
    cluster = Cluster(4)
    cluster.do(C, Heard(D, Prepare(round=0, ballot=3)))
    assert cluster.votes[C] == []


def test_turns_follow_as_many_as_cannot_all_lie_and_nobody_runs_ahead() -> None:
    leadership = Leadership(M, C, 0.0)
    leadership.turned(D, 0, 2**40)
    leadership.elect(MEMBERS, A)
    assert leadership.leader(MEMBERS, A) == A, "one may lie"
    for _ in range(3):
        leadership.next_turn(MEMBERS)
    assert leadership.leader(MEMBERS, A) == B, "one turn ahead of the honest, not more"
    leadership.turned(B, 0, 2)
    leadership.elect(MEMBERS, A)
    assert leadership.leader(MEMBERS, A) == C
    assert leadership.leads
    leadership.begin(1)
    assert leadership.leader(MEMBERS, B) == B, "each round begins with turn 0, of the leader before"
    leadership.turned(B, 0, 7)
    leadership.turned(D, 0, 7)
    leadership.elect(MEMBERS, B)
    assert leadership.leader(MEMBERS, B) == B, "what is said of another round counts nothing"


def test_a_restarted_node_hears_of_the_turn_of_its_round() -> None:
    cluster = Cluster(4)
    cluster.propose(A, 1.0)
    for name in (B, C, D):
        cluster.nodes[name].leadership.next_turn(MEMBERS)
    cluster.restart(A)
    cluster.pass_time(cluster.manifest.timing.heartbeat + 1)
    assert cluster.leaders() == [B]
