"""The acceptor: what it promised and accepted it never takes back, and what it says is on its disk before."""

from __future__ import annotations

import dataclasses

import pytest

from protocol import identity
from protocol.ledger import part_lists
from protocol.ledger.part_lists import share_of
from protocol.quorum.acceptor import MOST_JUDGED, Acceptor, Answer, Ballots
from protocol.quorum.paxos_events import Fetch, FetchList, Held, Judge, Judged, Listed, Objection, Refused, Save, Send
from protocol.wire.ballot import Accept, Pledge, Prepare, Promise, Reject, Vote
from protocol.wire.commit import Commit, Share, body_of, pledge_body
from protocol.wire.plan import Plan
from tests.support import tiny
from tests.support.paxos import PARTS, PAYLOAD, REPLICA, SHARE, WITH_PAYLOAD

MEMBERS = tuple(o.peer_id for o in tiny.OPERATORS[:4])
A, B, C, D = MEMBERS
M = tiny.manifest(operators=MEMBERS, quorum=4)
COMMIT = tiny.commit(M, time=1.0)
OTHER = dataclasses.replace(COMMIT, time=2.0)
PLANNED = dataclasses.replace(COMMIT, plan=Plan(round=1, replicas=(REPLICA,)))
NEXT = dataclasses.replace(COMMIT, round=1, parent=PLANNED.digest, contributions=WITH_PAYLOAD)
LISTS = {
    part_lists.root_of(parts): parts
    for parts in (
        PARTS,
        PARTS[1:],
        PARTS[::-1],
        (dataclasses.replace(PARTS[0], size=1 << 30), *PARTS[1:]),
        tuple(dataclasses.replace(p, norm=1e200) for p in PARTS),
    )
}


def acceptor(vote: Promise | None = None, held: tuple[str, ...] = ()) -> Acceptor:
    member = Acceptor(M, vote or Promise(round=0), held, tiny.OPERATORS[2].sign, identity.verify)
    for commit in (COMMIT, OTHER, PLANNED, NEXT):
        member.judge(commit.digest, None)
    return member


def certificate(ballot: int, commit: Commit = COMMIT) -> dict[str, bytes]:
    """The pledges of three members."""
    body = pledge_body(M.run_id, commit.round, ballot, commit.digest)
    return {who.peer_id: who.sign(body) for who in (*tiny.OPERATORS[:2], tiny.OPERATORS[3])}


def accept(
    of: Acceptor,
    ballot: int,
    commit: Commit = COMMIT,
    event: type = Accept,
    head: Commit | None = None,
    *,
    certified: bool = False,
) -> list[Answer]:
    """`certified`: three members have pledged it in this ballot."""
    asked = Accept(round=commit.round, ballot=ballot, commit=commit)
    if certified:
        asked = dataclasses.replace(asked, certified=ballot, pledges=certificate(ballot, commit))
    return of.accept(A, asked, head, MEMBERS, event)


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


def test_a_pledge_and_a_vote_are_saved_before_they_are_given_and_are_signed() -> None:
    member = acceptor()
    saved, sent = accept(member, 0)
    assert saved == Save(Promise(round=0, ballot=0, pledged=COMMIT.digest))
    assert isinstance(sent, Send)
    assert isinstance(sent.message, Pledge)
    assert identity.verify(C, pledge_body(M.run_id, 0, 0, COMMIT.digest), sent.message.signature)
    saved, sent = accept(member, 0, certified=True)
    bound = Promise(round=0, ballot=0, accepted=0, commit=COMMIT, pledged=COMMIT.digest, pledges=certificate(0))
    assert saved == Save(bound)
    assert isinstance(sent, Send)
    assert isinstance(sent.message, Vote)
    assert identity.verify(C, body_of(COMMIT, 0), sent.message.signature)
    assert accept(member, 0, certified=True) == [sent], "the same answer again"
    assert accept(member, 0, OTHER, certified=True) == [], "one ballot has one commit"
    assert member.position.phase is Ballots.ACCEPTED


def test_who_prepares_later_hears_what_was_accepted() -> None:
    member = acceptor()
    accept(member, 0, certified=True)
    bound = Promise(round=0, ballot=4, accepted=0, commit=COMMIT, pledges=certificate(0))
    assert prepare(member, 4) == [Save(bound), Send(B, bound)]
    assert accept(member, 0) == [Send(A, Reject(round=0, ballot=0, promised=4))]
    saved, _ = accept(member, 4, OTHER, certified=True)
    assert isinstance(saved, Save)
    assert (saved.vote.accepted, saved.vote.commit) == (4, OTHER)


@pytest.mark.parametrize("ballot", [3, 4])
def test_a_restarted_acceptor_is_bound_by_its_durable_vote(ballot: int) -> None:
    member = acceptor(Promise(round=0, ballot=4, accepted=0, commit=COMMIT))
    assert member.position.phase is Ballots.ACCEPTED
    (answer,) = prepare(member, ballot)
    assert isinstance(answer, Send)
    assert answer.message == (member.vote if ballot == 4 else Reject(round=0, ballot=3, promised=4))
    assert acceptor(Promise(round=0, ballot=4)).position.phase is Ballots.PROMISED


def test_it_votes_once_it_holds_every_payload() -> None:
    member = acceptor(Promise(round=1))
    assert accept(member, 0, NEXT, head=PLANNED) == [FetchList((A, "p"), SHARE)]
    assert accept(member, 0, NEXT, head=PLANNED) == [FetchList((A, "p"), SHARE)], "asked again, it fetches again"
    assert not member.know(tiny.digest("another"), PARTS)
    assert member.know(SHARE.root, PARTS)
    parts = [Fetch((A, "p"), part) for part in PARTS]
    assert accept(member, 0, NEXT, Listed, PLANNED) == parts
    assert accept(member, 0, NEXT, head=PLANNED) == parts
    assert member.waiting == (A, Accept(round=1, ballot=0, commit=NEXT))
    assert member.position.phase is Ballots.FREE
    assert not member.hold(tiny.digest("another"))
    assert member.hold(PAYLOAD)
    assert isinstance(accept(member, 0, NEXT, Held, PLANNED)[0], Save)
    assert member.waiting is None


def test_a_restarted_member_reads_the_lists_again_before_it_votes() -> None:
    """Its lists are on its disk, as its payloads are, and it does not know yet what they name."""
    member = acceptor(Promise(round=1), held=(SHARE.root, PAYLOAD))
    assert accept(member, 0, NEXT, head=PLANNED) == [FetchList((A, "p"), SHARE)]
    assert member.know(SHARE.root, PARTS)
    assert isinstance(accept(member, 0, NEXT, Listed, PLANNED)[0], Save)


@pytest.mark.parametrize(
    "share",
    [
        dataclasses.replace(SHARE, size=SHARE.size + 1),
        dataclasses.replace(SHARE, norm=SHARE.norm / 2),
        dataclasses.replace(SHARE, listed=SHARE.listed - 1),
        share_of("p", PARTS[1:]),
        share_of("p", PARTS[::-1]),
        share_of("p", (dataclasses.replace(PARTS[0], size=1 << 30), *PARTS[1:])),
        share_of("p", tuple(dataclasses.replace(p, norm=1e200) for p in PARTS)),
    ],
)
def test_it_does_not_vote_for_what_its_list_does_not_say(share: Share) -> None:
    member, parts = acceptor(Promise(round=1), held=(PAYLOAD,)), LISTS[share.root]
    member.know(share.root, parts)
    made = dataclasses.replace(WITH_PAYLOAD[0], shares=(share,))
    (refused,) = accept(member, 0, dataclasses.replace(NEXT, contributions=(made,)), head=PLANNED)
    assert isinstance(refused, Refused)
    assert (refused.peer, refused.unfair.lie) == (A, True)
    assert member.vote == Promise(round=1)
    assert member.waiting is None


def test_it_does_not_vote_for_a_replica_that_is_not_planned() -> None:
    for change in ({"replica": 7}, {"shares": (SHARE, SHARE)}):
        member = acceptor(Promise(round=1), held=(PAYLOAD,))
        member.know(SHARE.root, PARTS)
        commit = dataclasses.replace(NEXT, contributions=(dataclasses.replace(WITH_PAYLOAD[0], **change),))  # type: ignore[arg-type]
        (refused,) = accept(member, 0, commit, head=PLANNED)
        assert isinstance(refused, Refused)
        assert refused.unfair.reason.startswith(f"replica {commit.contributions[0].replica} is not the planned")
        assert member.vote == Promise(round=1)


def test_lists_of_work_that_is_not_planned_are_not_fetched() -> None:
    (planned,) = WITH_PAYLOAD
    others = [dataclasses.replace(SHARE, root=tiny.digest(f"list {i}")) for i in range(20)]
    for made in (
        [dataclasses.replace(planned, shares=tuple(others))],
        [dataclasses.replace(planned, replica=7 + i, shares=(share,)) for i, share in enumerate(others)],
        [dataclasses.replace(planned, shares=(share,)) for share in others],
    ):
        member = acceptor(Promise(round=1), held=(PAYLOAD,))
        (refused,) = accept(member, 0, dataclasses.replace(NEXT, contributions=tuple(made)), head=PLANNED)
        assert isinstance(refused, Refused)
        assert refused.unfair.lie


def test_a_list_that_is_too_long_is_not_fetched_and_one_that_never_comes_gets_no_vote() -> None:
    member = acceptor(Promise(round=1), held=(PAYLOAD,))
    long = dataclasses.replace(SHARE, listed=part_lists.longest(M) + 1)
    made = dataclasses.replace(WITH_PAYLOAD[0], shares=(long,))
    assert accept(member, 0, dataclasses.replace(NEXT, contributions=(made,)), head=PLANNED) == []
    assert accept(member, 0, NEXT, head=PLANNED) == [FetchList((A, "p"), SHARE)]
    assert member.vote == Promise(round=1)


def test_a_commit_that_does_not_follow_gets_no_vote() -> None:
    member = acceptor()
    assert accept(member, 0, dataclasses.replace(COMMIT, parent="?")) == [], "nobody is accused: its log will tell"
    for change in ({"run": "?"}, {"round": 1}, {"members": (A,)}, {"leader": "?"}, {"leader": B}):
        (refused,) = accept(member, 0, dataclasses.replace(COMMIT, **change))  # type: ignore[arg-type]
        assert isinstance(refused, Refused)
    assert member.vote == Promise(round=0)


def test_it_votes_once_the_commit_is_found_to_be_fair_and_asks_once() -> None:
    member, unknown = acceptor(), dataclasses.replace(COMMIT, time=3.0)
    assert accept(member, 0, unknown) == [Judge(A, unknown)]
    assert accept(member, 0, unknown) == [], "asked again, it is found out already"
    assert member.judge(unknown.digest, None) == []
    assert isinstance(accept(member, 0, unknown, Judged)[0], Save)


def test_an_unfair_commit_gets_no_vote_whoever_asks_and_how_often() -> None:
    member, unknown = acceptor(), dataclasses.replace(COMMIT, time=3.0)
    accept(member, 0, unknown)
    unfair = Objection("gives a replica another's weight", True)
    assert member.judge(unknown.digest, unfair) == [Refused(A, 0, unfair)]
    assert accept(member, 0, unknown) == accept(member, 1, unknown) == []
    assert member.vote == Promise(round=0)
    assert isinstance(accept(member, 0)[0], Save), "a fair one gets it"


def test_a_sender_has_so_many_commits_judged_in_a_round() -> None:
    member = acceptor()
    commits = [dataclasses.replace(COMMIT, time=10.0 + i) for i in range(MOST_JUDGED + 1)]
    asked = [accept(member, 0, commit) for commit in commits]
    assert asked == [*([Judge(A, commit)] for commit in commits[:-1]), []]
    member.begin(1)
    assert not member.verdicts


def test_with_the_next_round_it_is_free_again_but_not_of_a_vote_for_a_later_one() -> None:
    member = acceptor()
    accept(member, 0, certified=True)
    member.begin(1)
    assert (member.vote, member.position.phase) == (Promise(round=1), Ballots.FREE)
    ahead = Promise(round=5, ballot=2)
    late = acceptor(ahead)
    late.begin(1)
    assert (late.vote, late.position.phase) == (ahead, Ballots.PROMISED)


def test_lists_are_known_for_one_round() -> None:
    member = acceptor(Promise(round=1), held=(PAYLOAD,))
    member.know(SHARE.root, PARTS)
    member.begin(2)
    assert member.lists == {}
