"""The acceptor: what it promised and accepted it never takes back, and what it says is on its disk before."""

from __future__ import annotations

import dataclasses

import pytest

from protocol import identity
from protocol.rounds.acceptor import Acceptor, Ballots
from protocol.rounds.paxos_events import Fetch, Save, Send
from protocol.wire.ballot import Accept, Prepare, Promise, Reject, Vote
from protocol.wire.commit import Commit, vote_body
from tests import tiny
from tests.unit.test_paxos import PART, WITH_PAYLOAD

MEMBERS = tuple(o.peer_id for o in tiny.OPERATORS[:3])
A, B, C = MEMBERS
M = tiny.manifest(operators=MEMBERS, quorum=3)
COMMIT = Commit(
    run=M.run_id,
    round=0,
    parent=M.run_id,
    time=1.0,
    contributions=(),
    left_out=(),
    diverged=(),
    digests={},
    plan=None,
    leader=A,
    members=MEMBERS,
)
OTHER = dataclasses.replace(COMMIT, time=2.0)


def acceptor(vote: Promise | None = None, held: tuple[str, ...] = ()) -> Acceptor:
    return Acceptor(M, vote or Promise(round=0), held, tiny.OPERATORS[2].sign)


def accept(of: Acceptor, ballot: int, commit: Commit = COMMIT, fetch: bool = True) -> list[Save | Send | Fetch]:
    return of.accept(A, Accept(round=0, ballot=ballot, commit=commit), None, MEMBERS, fetch)


def prepare(of: Acceptor, ballot: int) -> list[Save | Send]:
    return of.prepare(B, Prepare(round=0, ballot=ballot))


def test_a_promise_is_saved_before_it_is_given_and_is_kept() -> None:
    member = acceptor()
    promise = Promise(round=0, ballot=4)
    assert prepare(member, 4) == [Save(promise), Send(B, promise)]
    assert prepare(member, 4) == [Send(B, promise)], "the same answer again"
    rejected = [Send(B, Reject(round=0, ballot=3, promised=4))]
    assert prepare(member, 3) == rejected
    assert accept(member, 3) == [Send(A, Reject(round=0, ballot=3, promised=4))]
    assert member.position.phase is Ballots.PROMISED


def test_a_vote_is_saved_before_it_is_given_and_is_signed() -> None:
    member = acceptor()
    saved, sent = accept(member, 0)
    assert saved == Save(Promise(round=0, ballot=0, accepted=0, commit=COMMIT))
    assert isinstance(sent, Send)
    assert isinstance(sent.message, Vote)
    assert identity.verify(C, vote_body(M.run_id, 0, 0, COMMIT.digest), sent.message.signature)
    assert accept(member, 0) == [sent], "the same answer again"
    assert accept(member, 0, OTHER) == [], "one ballot has one commit"
    assert member.position.phase is Ballots.ACCEPTED


def test_who_prepares_later_hears_what_was_accepted() -> None:
    member = acceptor()
    accept(member, 0)
    bound = Promise(round=0, ballot=4, accepted=0, commit=COMMIT)
    assert prepare(member, 4) == [Save(bound), Send(B, bound)]
    assert accept(member, 0) == [Send(A, Reject(round=0, ballot=0, promised=4))]
    assert accept(member, 4, OTHER)[0] == Save(Promise(round=0, ballot=4, accepted=4, commit=OTHER))


@pytest.mark.parametrize("ballot", [3, 4])
def test_a_restarted_acceptor_is_bound_by_its_durable_vote(ballot: int) -> None:
    member = acceptor(Promise(round=0, ballot=4, accepted=0, commit=COMMIT))
    assert member.position.phase is Ballots.ACCEPTED
    (answer,) = prepare(member, ballot)
    assert isinstance(answer, Send)
    assert answer.message == (member.vote if ballot == 4 else Reject(round=0, ballot=3, promised=4))
    assert acceptor(Promise(round=0, ballot=4)).position.phase is Ballots.PROMISED


def test_it_votes_once_it_holds_every_payload() -> None:
    member, commit = acceptor(), dataclasses.replace(COMMIT, contributions=WITH_PAYLOAD)
    assert accept(member, 0, commit) == [Fetch((A, "p"), PART)]
    assert accept(member, 0, commit) == [Fetch((A, "p"), PART)], "asked again, it fetches again"
    assert accept(member, 0, commit, fetch=False) == []
    assert member.waiting == (A, Accept(round=0, ballot=0, commit=commit))
    assert member.position.phase is Ballots.FREE
    member.held.add(PART.digest)
    assert isinstance(accept(member, 0, commit)[0], Save)
    assert member.waiting is None


def test_a_commit_that_does_not_follow_gets_no_vote() -> None:
    member = acceptor()
    for change in ({"parent": "?"}, {"run": "?"}, {"round": 1}, {"members": (A,)}, {"leader": "?"}):
        assert accept(member, 0, dataclasses.replace(COMMIT, **change)) == []  # type: ignore[arg-type]
    assert member.vote == Promise(round=0)


def test_with_the_next_round_it_is_free_again_but_not_of_a_vote_for_a_later_one() -> None:
    member = acceptor()
    accept(member, 0)
    member.begin(1)
    assert (member.vote, member.position.phase) == (Promise(round=1), Ballots.FREE)
    ahead = Promise(round=5, ballot=2)
    late = acceptor(ahead)
    late.begin(1)
    assert (late.vote, late.position.phase) == (ahead, Ballots.PROMISED)
