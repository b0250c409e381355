"""Why a commit may be accepted in a higher ballot: signed promises are shown, and who lied in one is named."""

from __future__ import annotations

import dataclasses
import random

import pytest

from protocol import identity
from protocol.errors import LocalError
from protocol.quorum.paxos_events import Heard, Learned, Named, Refused
from protocol.wire import encoding
from protocol.wire.ballot import Accept, Prepare, Promise, Vote
from protocol.wire.commit import Commit, Record, body_of, is_decided, voted_twice
from protocol.wire.grounds import MAX_GROUNDS, Sworn, are_signed, chain
from tests import tiny
from tests.unit.test_paxos import NAMES, A, B, C, Cluster

ME, SECOND, THIRD = tiny.OPERATORS[:3]
MEMBERS = (A, B, C)
BALLOT = 3
"""One of A's."""


def said(who: str, ballot: int, accepted: int = -1, digest: str = "") -> Sworn:
    return Sworn(peer=who, ballot=ballot, accepted=accepted, digest=digest, signature=b"")


@pytest.mark.parametrize(
    ("grounds", "ballot", "allowed"),
    [
        ((), 0, True),
        ((), 3, False),
        ((said(A, 3),), 3, False),
        ((said(A, 3), said("x", 3)), 3, False),
        ((said(A, 3), said(A, 3)), 3, False),
        ((said(A, 3), said(B, 3), said(B, 3)), 3, False),
        ((said(A, 3), said(B, 4)), 3, False),
        ((said(A, 3), said(B, 3)), 3, True),
        ((said(A, 3), said(B, 3, 0, "this")), 3, True),
        ((said(A, 3), said(B, 3, 0, "other")), 3, False),
        ((said(A, 3, 0, "other"), said(B, 3, 1, "this")), 3, False),
        ((said(A, 3, 0, "other"), said(B, 3, 1, "this"), said(B, 1), said(C, 1)), 3, True),
        ((said(A, 3), said(B, 3, 1, "this"), said(B, 1), said(C, 1, 0, "other")), 3, False),
        ((said(A, 3), said(B, 3, 3, "this")), 3, False),
    ],
)
def test_a_majority_has_to_have_promised_and_the_newest_that_they_accepted_has_to_be_this(
    grounds: tuple[Sworn, ...], ballot: int, allowed: bool
) -> None:
    found = chain(grounds, MEMBERS, 2, ballot, "this")
    assert (found is not None) == allowed
    if allowed and ballot:
        assert found == grounds, "all of them are needed"


def test_what_is_not_needed_is_not_handed_on() -> None:
    needed = (said(A, 3), said(B, 3))
    assert chain((said(C, 7), *needed, said(A, 2)), MEMBERS, 2, 3, "this") == needed


def test_a_promise_that_was_changed_is_signed_no_more() -> None:
    cluster = Cluster(3)
    run = cluster.manifest.run_id
    true = tiny.sworn(ME, run, BALLOT, 0, "d" * 64)
    assert are_signed((true,), run, 0, 0, identity.verify)
    for changes in ({"peer": B}, {"ballot": 6}, {"accepted": -1}, {"digest": "e" * 64}, {"signature": b"?" * 64}):
        assert not are_signed((dataclasses.replace(true, **changes),), run, 0, 0, identity.verify)  # type: ignore[arg-type]
    for of in (("f" * 64, 0, 0), (run, 1, 0), (run, 0, 1)):
        assert not are_signed((true,), *of, identity.verify)


def test_a_record_comes_back_with_its_grounds_and_not_without_right_signatures() -> None:
    cluster = Cluster(3)
    run, commit = cluster.manifest.run_id, dataclasses.replace(cluster.commit(A), leader=A, members=MEMBERS)
    grounds = (tiny.sworn(ME, run, BALLOT), tiny.sworn(THIRD, run, BALLOT))
    record = tiny.record(commit, ME, THIRD, ballot=BALLOT, grounds=grounds)
    assert encoding.decode_record(encoding.encode_record(record), "x") == record
    assert is_decided(record, MEMBERS)
    assert not is_decided(dataclasses.replace(record, grounds=grounds[:1]), MEMBERS)
    assert is_decided(dataclasses.replace(record, grounds=()), (A, B, C, NAMES[3])) is False, "four need three votes"
    wrong = dataclasses.replace(record, grounds=(grounds[0], dataclasses.replace(grounds[1], signature=b"?" * 64)))
    with pytest.raises(encoding.MessageError, match="a signature is wrong"):
        encoding.decode_record(encoding.encode_record(wrong), "x")
    many = dataclasses.replace(record, grounds=grounds[:1] * (MAX_GROUNDS + 1))
    with pytest.raises(LocalError):
        encoding.encode_record(many)


def test_honest_nodes_show_what_their_commit_stands_on_through_several_ballots() -> None:
    """A's commit is accepted by A alone, then by A and B without being decided, and finished by B and C."""
    cluster = Cluster(3)
    cluster.cut = lambda sender, to, message: isinstance(message, Vote) or to == C
    cluster.propose(A, 1.0)
    for _ in range(3):
        cluster.restart(A)
        cluster.pass_time(2)
    cluster.kill(A)
    cluster.cut = lambda sender, to, message: False
    cluster.pass_time(2 * cluster.lease)
    for name in (B, C):
        (record,) = cluster.logs[name]
        assert record.commit.time == 1.0
        assert record.ballot > 0
        assert len({s.ballot for s in record.grounds}) >= 2, "and what the accepted one stood on"
        assert is_decided(record, MEMBERS)
        assert not is_decided(dataclasses.replace(record, grounds=()), MEMBERS)


class Liar:
    """A has a commit decided with B in ballot 0, and then asks C to accept another one in a higher ballot."""

    def __init__(self) -> None:
        self.cluster = cluster = Cluster(3)
        self.to_a = list[object]()

        def cut(sender: str, to: str, message: object) -> bool:
            if sender == C and to == A:
                self.to_a.append(message)
            return C in (sender, to)

        cluster.cut = cut
        cluster.propose(A, 1.0)
        (self.first,) = cluster.logs[B]
        self.second = dataclasses.replace(self.first.commit, time=2.0)
        self.run = cluster.manifest.run_id

    def asks(self, grounds: tuple[Sworn, ...], commit: Commit | None = None) -> Vote | None:
        """C's answer."""
        self.to_a.clear()
        accept = Accept(round=0, ballot=BALLOT, commit=commit or self.second, grounds=grounds)
        self.cluster.do(C, Heard(A, accept))
        return next((m for m in self.to_a if isinstance(m, Vote)), None)

    def promise_of_c(self) -> Sworn:
        self.cluster.do(C, Heard(A, Prepare(round=0, ballot=BALLOT)))
        (promise,) = [m for m in self.to_a if isinstance(m, Promise)]
        assert promise.commit is None
        return Sworn(peer=C, ballot=BALLOT, accepted=-1, digest="", signature=promise.signature)

    def of_c(self, vote: Vote, grounds: tuple[Sworn, ...]) -> Record:
        votes = {A: ME.sign(body_of(self.second, BALLOT)), C: vote.signature}
        return Record(commit=self.second, ballot=BALLOT, votes=votes, grounds=grounds)


def lies(liar: Liar) -> dict[str, tuple[Sworn, ...]]:
    """What A may swear instead of the truth, so that C votes."""
    nothing = tiny.sworn(ME, liar.run, BALLOT)
    accepted_it = tiny.sworn(ME, liar.run, BALLOT, 0, liar.second.digest)
    return {"nothing": (nothing,), "the other one": (accepted_it,)}


@pytest.mark.parametrize("lie", ["nothing", "the other one"])
def test_who_denies_a_vote_to_have_another_commit_accepted_has_signed_the_proof(lie: str) -> None:
    liar = Liar()
    cluster = liar.cluster
    grounds = (*lies(liar)[lie], liar.promise_of_c())
    vote = liar.asks(grounds)
    assert vote is not None, "C cannot know"
    second = liar.of_c(vote, grounds)
    cluster.do(C, Learned(A, second))
    assert cluster.logs[C] == [second]
    (proof,) = voted_twice(liar.first, second)
    assert voted_twice(second, liar.first) == (proof,)
    assert (proof.peer, proof.promised) == (A, BALLOT)
    assert proof.is_true(liar.run)
    cluster.kill(A)
    cluster.cut = lambda sender, to, message: False
    cluster.pass_time(cluster.manifest.timing.heartbeat + 1)
    for name in (B, C):
        assert [e.proof for e in cluster.other[name] if isinstance(e, Named)] == [proof]
        assert cluster.nodes[name].may_oust == (proof, -1)


def test_an_invented_ballot_between_has_to_be_shown_too() -> None:
    """A says that it accepted the other commit in a ballot of its own after the first: what that stood on is asked for, and A's promise of that
    ballot denies the vote as well."""
    liar = Liar()
    other = liar.second.digest
    liar.cluster.do(C, Heard(A, Prepare(round=0, ballot=BALLOT)))
    true = [m for m in liar.to_a if isinstance(m, Promise)][-1]
    of_c = Sworn(peer=C, ballot=BALLOT, accepted=-1, digest="", signature=true.signature)
    liar.cluster.do(C, Heard(A, Prepare(round=0, ballot=2 * BALLOT)))
    later = [m for m in liar.to_a if isinstance(m, Promise)][-1]
    of_c_later = Sworn(peer=C, ballot=2 * BALLOT, accepted=-1, digest="", signature=later.signature)
    claim = tiny.sworn(ME, liar.run, 2 * BALLOT, BALLOT, other)

    def asks(grounds: tuple[Sworn, ...]) -> bool:
        liar.to_a.clear()
        liar.cluster.do(C, Heard(A, Accept(round=0, ballot=2 * BALLOT, commit=liar.second, grounds=grounds)))
        return any(isinstance(m, Vote) for m in liar.to_a)

    assert not asks((claim, of_c_later)), "nothing shows that it could be accepted there"
    true_of_a = tiny.sworn(ME, liar.run, BALLOT, 0, liar.first.commit.digest)
    assert not asks((claim, of_c_later, true_of_a, of_c)), "by what A says it is another one"
    grounds = (claim, of_c_later, tiny.sworn(ME, liar.run, BALLOT), of_c)
    liar.cluster.restart(C)
    assert asks(grounds)
    votes = {A: ME.sign(body_of(liar.second, 2 * BALLOT)), C: THIRD.sign(body_of(liar.second, 2 * BALLOT))}
    second = Record(commit=liar.second, ballot=2 * BALLOT, votes=votes, grounds=grounds)
    (proof,) = voted_twice(liar.first, second)
    assert (proof.peer, proof.promised) == (A, BALLOT)
    assert proof.is_true(liar.run)


@pytest.mark.parametrize("what", ["none", "one", "the truth", "unsigned", "twice", "too many"])
def test_a_member_votes_for_nothing_that_its_proposer_does_not_show_to_be_allowed(what: str) -> None:
    liar = Liar()
    of_c = liar.promise_of_c()
    lie = tiny.sworn(ME, liar.run, BALLOT)
    grounds = {
        "none": (),
        "one": (of_c,),
        "the truth": (tiny.sworn(ME, liar.run, BALLOT, 0, liar.first.commit.digest), of_c),
        "unsigned": (dataclasses.replace(lie, signature=b""), of_c),
        "twice": (of_c, of_c),
        "too many": (lie, of_c, tiny.sworn(SECOND, liar.run, 2)),
    }[what]
    assert liar.asks(grounds) is None
    refused = [e for e in liar.cluster.other[C] if isinstance(e, Refused)]
    assert [(e.peer, e.unfair.lie) for e in refused] == [(A, True)]
    true = (tiny.sworn(ME, liar.run, BALLOT, 0, liar.first.commit.digest), of_c)
    assert liar.asks(true, liar.first.commit) is None, "who lied is not heard for a while"
    liar.cluster.restart(C)
    assert liar.asks(true, liar.first.commit) is not None, "the commit itself is as fair as it was"


class Witness:
    """Drops half of all messages, and keeps what each member signs."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.votes = set[tuple[str, int, int, str]]()
        self.promises = list[tuple[int, Sworn]]()

    def cut(self, sender: str, to: str, message: object) -> bool:
        match message:
            case Vote():
                self.votes.add((sender, message.round, message.ballot, message.digest))
            case Promise():
                digest = message.commit.digest if message.commit is not None else ""
                self.promises.append((message.round, said(sender, message.ballot, message.accepted, digest)))
        return self._rng.random() < 0.5


def test_what_honest_members_sign_never_proves_anything_against_them() -> None:
    """Whatever is lost, and whoever starts again: no promise denies a vote."""
    denied = 0
    for seed in range(100):
        rng = random.Random(seed)
        cluster, witness = Cluster(3), Witness(rng)
        cluster.cut = witness.cut
        for _ in range(12):
            name = rng.choice(NAMES[:3])
            cluster.propose(name, rng.random())
            if rng.random() < 0.3:
                cluster.restart(name)
            cluster.pass_time(rng.choice((0, 1, cluster.lease)))
        for who, round, ballot, digest in witness.votes:
            for of, s in witness.promises:
                if (s.peer, of) == (who, round) and s.ballot > ballot:
                    denied += 1
                    assert s.accepted > ballot or (s.accepted, s.digest) == (ballot, digest), f"seed {seed}"
    assert denied > 50, "votes and later promises of one member were compared"
