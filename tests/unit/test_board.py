"""Who operates a run changes by decree: which decrees can be, who decides then, and what nodes make of it (protocol/ledger/board.py)."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from bootstrap.decrees import Decrees
from protocol.errors import RemoteError
from protocol.identity import Identity
from protocol.ledger import access, board, confirming, ousting, validation
from protocol.ledger.history import History
from protocol.quorum.paxos_events import Certified, Heard, Learned, Proposed
from protocol.round.leader import Leader
from protocol.round.leader_events import Petition
from protocol.run.manifest import Manifest
from protocol.wire import encoding
from protocol.wire.ballot import Confirmed
from protocol.wire.bounds import LONGEST_PLACE
from protocol.wire.commit import DOMAIN, Commit, Record, confirmation_body
from protocol.wire.decree import (
    APPOINT,
    DISMISS,
    MAX_APPOINTED,
    MAX_OPERATORS,
    MAX_PLACES,
    QUORUM,
    Board,
    Decree,
    Enacted,
    Motion,
    Operator,
)
from protocol.wire.encoding import MessageError
from protocol.wire.schema import SchemaError, build, plain
from protocol.wire.sealed import seal
from tests import tiny
from tests.unit.test_paxos import NAMES, A, B, C, Cluster

D, E = NAMES[3:5]
KEYS = dict(zip(NAMES, tiny.OPERATORS, strict=True))
ONE, THREE = tiny.manifest(operators=NAMES[:1], quorum=1), tiny.manifest(operators=NAMES[:3], quorum=3)
PLACE = "/ip4/198.51.100.7/tcp/4001"


def operators(*names: str) -> tuple[Operator, ...]:
    return tuple(Operator(peer=name, places=(PLACE,)) for name in names)


def decree(action: str, manifest: Manifest = THREE, number: int = 0, **more: Any) -> Decree:
    return Decree(run=manifest.run_id, number=number, action=action, **more)


def appoint(*names: str, manifest: Manifest = THREE, number: int = 0) -> Decree:
    return decree(APPOINT, manifest, number, operators=operators(*names))


def signed(wish: Decree, *names: str) -> Enacted:
    body = DOMAIN + encoding.encode(wish)
    return Enacted(decree=wish, signatures={name: KEYS[name].sign(body) for name in names})


def first(manifest: Manifest, enacted: Enacted | None, members: tuple[str, ...] | None = None) -> Commit:
    """The commit of round 0 that brings this decree."""
    return Commit(
        run=manifest.run_id, round=0, parent=manifest.run_id, time=0.0, contributions=(), left_out=(), diverged=(), digests={},
        plan=None, leader=manifest.operators[0], members=members or manifest.first_members, decrees=int(enacted is not None),
        decree=enacted, board=board.after(manifest, None, enacted),
    )  # fmt: skip


def following(
    head: Commit, enacted: Enacted | None = None, members: tuple[str, ...] | None = None, **more: Any
) -> Commit:
    """The one after it."""
    then = board.after(THREE, head, enacted)
    fields = {"round": head.round + 1, "parent": head.digest, "decree": enacted, "board": then} | more
    count = head.decrees + (enacted is not None)
    return dataclasses.replace(head, decrees=count, members=members or head.members, **fields)  # type: ignore[arg-type]


# --- what a decree makes of a board


def test_a_board_is_what_the_manifest_says_until_a_decree_changes_it() -> None:
    now = board.of(THREE, None)
    assert (now.names, now.quorum) == (NAMES[:3], 3)
    head = first(THREE, signed(appoint(D, E), A, B))
    assert board.of(THREE, head).names == NAMES[:5]
    assert board.of(THREE, head).operators[3:] == operators(D, E)
    assert board.of(THREE, head).quorum == 3, "who is appointed does not decide yet"
    fewer = board.changed(THREE, head, decree(DISMISS, subject=B))
    assert (fewer.names, fewer.quorum) == ((A, C, D, E), 3)
    more = board.changed(THREE, head, decree(QUORUM, quorum=5))
    assert (more.names, more.quorum) == (NAMES[:5], 5)
    moved = board.changed(THREE, head, decree(APPOINT, operators=(Operator(peer=A, places=(PLACE,)),)))
    assert (moved.names, moved.operators[0].places) == (NAMES[:5], (PLACE,))


def test_where_an_operator_was_taken_out_fewer_decide_until_the_operators_say_otherwise() -> None:
    head = dataclasses.replace(first(THREE, None), out=(A,), members=(B, C), leader=B)
    then = board.changed(THREE, head, appoint(D))
    assert (then.names, then.quorum) == ((B, C, D), 2)
    assert ousting.is_complete(then, (B, C), (A,))
    assert "cannot come back under that key" in (board.why_not(THREE, head, appoint(A)) or "")
    later = following(head, signed(appoint(D), B, C))
    assert access.why_unlawful(THREE, head, later) is None
    more = board.changed(THREE, later, decree(QUORUM, number=1, quorum=3))
    assert ousting.completed(more, (B, C), (A,), {B, C, D}) == (B, C, D)


def test_every_commit_after_it_carries_the_board() -> None:
    head = first(THREE, signed(appoint(D), A, B))
    later = following(head)
    assert later.board == head.board
    assert access.why_unlawful(THREE, head, later) is None
    otherwise = "says otherwise who operates the run than was decreed"
    for wrong in (None, dataclasses.replace(board.of(THREE, head), quorum=1), board.of(THREE, None)):
        assert access.why_unlawful(THREE, head, dataclasses.replace(later, board=wrong)) == otherwise
    assert access.why_unlawful(THREE, None, dataclasses.replace(first(THREE, None), board=head.board)) == otherwise


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        (appoint(A, A), "it names an operator twice"),
        (decree(APPOINT, operators=(Operator(peer="me"),)), "is no key"),
        (decree(APPOINT, operators=(Operator(peer=D, places=("\x1b[2J",)),)), "an address of it is none"),
        (decree(APPOINT, operators=(Operator(peer=A),)), "nothing would change"),
        (decree(DISMISS, subject=D), "is no operator of it"),
        (decree(DISMISS, subject=A), "3 operators decide, and there would be 2"),
        (decree(QUORUM, quorum=5), "5 operators decide, and there would be 3"),
        (decree(QUORUM, quorum=2), "2 operators cannot decide; 1, 3, 4, 5 or 7 can"),
        (decree(QUORUM, quorum=3), "nothing would change"),
    ],
)
def test_what_no_commit_can_bring_whoever_signed_it(wish: Decree, said: str) -> None:
    enacted = signed(wish, A, B, C)
    assert said in (board.why_not(THREE, None, wish) or "")
    assert said in (access.why_unlawful(THREE, None, first(THREE, enacted)) or "")
    petitions = access.Petitions()
    for name in (A, B, C):
        petitions.hear(name, wish, enacted.signatures[name])
    assert petitions.enacted(THREE, None) is None, "nor does a leader propose it"


def test_a_run_has_sixteen_operators_at_most() -> None:
    fresh = [Identity(bytes([9, i] * 16)).peer_id for i in range(MAX_OPERATORS)]
    head = first(THREE, signed(appoint(*fresh[:7]), A, B))
    full = following(head, signed(appoint(*fresh[7:13], number=1), A, B))
    assert access.why_unlawful(THREE, head, full) is None
    assert len(board.of(THREE, full).operators) == MAX_OPERATORS
    assert "16 operators at most" in (board.why_not(THREE, full, appoint(fresh[13], number=2)) or "")


def test_messages_bound_what_a_board_and_a_decree_may_hold() -> None:
    many = plain(appoint(*(f"p{i}" for i in range(MAX_APPOINTED))))
    assert build(Decree, many).operators[0].peer == "p0"
    with pytest.raises(SchemaError, match="at most 7"):
        build(Decree, many | {"operators": [*many["operators"], {"peer": "q"}]})
    for places in ([PLACE] * (MAX_PLACES + 1), ["x" * (LONGEST_PLACE + 1)]):
        with pytest.raises(SchemaError, match="at most"):
            build(Operator, {"peer": "p", "places": places})
    for quorum in (0, 8):
        with pytest.raises(SchemaError, match=r"in 1\.\.7"):
            build(Board, {"operators": [], "quorum": quorum})
    with pytest.raises(SchemaError, match="at most 16"):
        build(Board, {"operators": [{"peer": "p"}] * 17, "quorum": 1})
    longest = Operator(peer="P" * 64, places=("x" * LONGEST_PLACE,) * MAX_PLACES)
    whole = decree(APPOINT, operators=(longest,) * MAX_APPOINTED, reason="x" * 200)
    asked = Motion(sealed=seal(tiny.OPERATOR, whole))
    assert encoding.decode(encoding.encode(asked), "p") == asked, "the longest one travels"


@pytest.mark.parametrize(
    "changes",
    [{"operators": ()}, {"subject": D}, {"quorum": 3}, {"action": QUORUM}, {"action": DISMISS}, {"action": "ban"}],
)
def test_a_decree_says_one_thing(changes: dict[str, Any]) -> None:
    assert appoint(D).is_sound
    wrong = dataclasses.replace(appoint(D), **changes)
    assert not wrong.is_sound
    assert access.why_not_decreed(THREE, None, signed(wrong, A, B, C)) == "has a decree that says nothing"


def test_a_decree_cannot_be_used_again_nor_at_another_time_nor_in_another_run() -> None:
    old = signed(appoint(D), A, B)
    head = first(THREE, old)
    gone = following(head, signed(decree(DISMISS, number=1, subject=D), A, B))
    assert access.why_unlawful(THREE, head, gone) is None
    assert board.of(THREE, gone).names == NAMES[:3]
    again = following(gone, old)
    assert access.why_unlawful(THREE, gone, again) == "has a decree of another time"
    early = signed(appoint(D, number=5), A, B)
    assert access.why_unlawful(THREE, None, first(THREE, early)) == "has a decree of another time"
    other = tiny.manifest(operators=NAMES[:3], quorum=3, seed=9)
    elsewhere = signed(dataclasses.replace(appoint(D), run=other.run_id), A, B)
    assert access.why_unlawful(THREE, None, first(THREE, elsewhere)) == "has a decree of another time"


def test_those_who_decide_before_sign_it_and_nobody_else_counts() -> None:
    few = "has a decree that too few of its members signed"
    assert access.why_unlawful(THREE, None, first(THREE, signed(appoint(D), A))) == few
    assert access.why_unlawful(THREE, None, first(THREE, signed(appoint(D), A, D))) == few
    head = first(THREE, signed(appoint(D), A, B))
    assert access.why_unlawful(THREE, head, following(head, signed(appoint(E, number=1), A, D))) == few
    then = following(head, signed(decree(DISMISS, number=1, subject=A), B, C), (B, C, D))
    assert access.why_unlawful(THREE, head, then) is None
    by_new = following(then, signed(appoint(E, number=2), B, D))
    assert access.why_unlawful(THREE, then, by_new) is None, "who decides now signs"
    assert access.why_unlawful(THREE, then, following(then, signed(appoint(E, number=2), A, B))) == few


# --- who decides next


def test_a_commit_names_members_of_the_new_board_and_as_many_as_it_says() -> None:
    names = "names other members than operators of the run"
    wish = signed(appoint(B, C, manifest=ONE), A)
    head = first(ONE, wish)
    assert validation.why_not_next(ONE, None, tiny.record(head, KEYS[A])) is None
    three = signed(decree(QUORUM, ONE, 1, quorum=3), A)
    for members, said in (((A, B, C), None), ((A,), names), ((A, B), names), ((A, B, D), names), ((A, B, B), names)):
        then = dataclasses.replace(following(head, three), members=members, board=board.after(ONE, head, three))
        assert validation.why_not_next(ONE, head, tiny.record(then, KEYS[A])) == said


def test_a_commit_that_changes_the_board_is_decided_by_those_before_and_the_next_by_those_after() -> None:
    head = first(ONE, signed(appoint(B, C, manifest=ONE), A))
    three = signed(decree(QUORUM, ONE, 1, quorum=3), A)
    then = dataclasses.replace(following(head, three, (A, B, C)), board=board.after(ONE, head, three))
    lacks = "lacks the votes of a majority"
    assert validation.why_not_next(ONE, head, tiny.record(then, KEYS[A])) is None
    assert validation.why_not_next(ONE, head, tiny.record(then, KEYS[B], KEYS[C])) == lacks
    later = dataclasses.replace(then, round=2, parent=then.digest, decree=None)
    assert validation.why_not_next(ONE, then, tiny.record(later, KEYS[A])) == lacks
    assert validation.why_not_next(ONE, then, tiny.record(later, KEYS[B], KEYS[C])) is None


def test_who_gives_signs_of_life_is_chosen_first() -> None:
    five = Board(operators=operators(*NAMES[:5]), quorum=3)
    assert ousting.completed(five, (A, B, C), (), {A, B, C, D, E}) == (A, B, C)
    without = dataclasses.replace(five, operators=operators(A, C, D, E))
    assert ousting.completed(without, (A, B, C), (), {A, C, E}) == (A, C, E)
    one = dataclasses.replace(five, quorum=1)
    assert ousting.completed(one, (A, B, C), (), {B, C, D}) == (B,), "of those who decided"


def test_no_typing_error_can_stop_a_run() -> None:
    """Who is appointed decides nothing; more decide, or others, where enough of them give signs of life."""
    assert board.why_too_few(THREE, None, appoint(D), {A, B}) is None
    head = first(ONE, signed(appoint(B, C, manifest=ONE), A))
    three = decree(QUORUM, ONE, 1, quorum=3)
    assert "1 of the 3 who would decide give signs of life" in (board.why_too_few(ONE, head, three, {A}) or "")
    assert board.why_too_few(ONE, head, three, {A, B}) is None
    gone = decree(DISMISS, ONE, 1, subject=A)
    assert "0 of the 1 who would decide" in (board.why_too_few(ONE, head, gone, {A}) or "")
    assert board.why_too_few(ONE, head, gone, {A, C}) is None
    petitions = access.Petitions()
    enacted = signed(three, A)
    petitions.hear(A, three, enacted.signatures[A])
    assert petitions.enacted(ONE, head, frozenset({A})) is None, "it is looked at again when it is proposed"
    assert petitions.enacted(ONE, head, frozenset({A, C})) == enacted


def test_a_node_refuses_in_one_line_what_cannot_be_and_answers_whose_decree_dismissed_him() -> None:
    heard: list[Petition] = []

    async def hand_in(event: Petition) -> None:
        heard.append(event)

    head = first(ONE, signed(appoint(B, C, manifest=ONE), A))
    leader = Leader(ONE, (head,), (), 0.0)
    decrees = Decrees(leader, hand_in, lambda motion: None, (head,), lambda: None, lambda: frozenset({A}))

    def hear(wish: Decree, name: str = A) -> str | None:
        try:
            asyncio.run(decrees.hear(Motion(sealed=seal(KEYS[name], wish))))
        except RemoteError as error:
            return str(error)
        return None

    few = "that decree cannot be: 1 of the 3 who would decide give signs of life, and a round would need 2; start their nodes first"
    assert hear(decree(QUORUM, ONE, 1, quorum=3)) == few
    assert hear(appoint(D, manifest=ONE, number=1), B) == f"{B[-8:]} is not among the operators who decide rounds now"
    assert heard == []
    assert hear(appoint(D, manifest=ONE, number=1)) is None
    assert [event.operator for event in heard] == [A]
    assert hear(appoint(B, C, manifest=ONE), D) is None, "who asks whether it was decided may be no operator any more"
    assert len(heard) == 1, "and nothing follows from it"


def test_a_node_tells_once_what_waits_for_other_operators() -> None:
    leader, told = Leader(THREE, (), (), 0.0), list[str]()

    async def hand_in(event: Petition) -> None:
        leader.handle(event, 0.0)

    decrees = Decrees(leader, hand_in, lambda motion: None, (), lambda: None, frozenset, told.append)
    for name in (A, A, B, B):
        asyncio.run(decrees.hear(Motion(sealed=seal(KEYS[name], appoint(D)))))
    assert told == [f"decree appoint: 1 of 2 operators have signed it ({A[-8:]}); it waits for others"]


# --- nodes


class Changing(Cluster):
    """A cluster to which nodes come that the manifest does not name."""

    def come(self, *names: str) -> None:
        for name in names:
            self.logs[name], self.votes[name], self.held[name], self.other[name] = [], [], set(), []
            self.restart(name)

    def decide(self, by: str, wish: Decree | None = None, *signers: str) -> Commit:
        """The next commit, which this node proposes."""
        head, commit = self.nodes[by].head, self.commit(by, self.now)
        enacted = None if wish is None else signed(wish, *signers)
        then = board.after(self.manifest, head, enacted)
        count = commit.decrees + (enacted is not None)
        round = self.nodes[by].round
        self.do(by, Proposed(dataclasses.replace(commit, decree=enacted, decrees=count, board=then)))
        self.pass_time(4)
        assert len(self.logs[by]) == round + 1, "it is decided"
        return self.logs[by][-1].commit


def test_a_run_of_one_becomes_one_of_three_and_outlives_the_one() -> None:
    cluster = Changing(1)
    manifest = cluster.manifest
    cluster.come(B, C)
    cluster.decide(A, appoint(B, C, manifest=manifest), A)
    assert cluster.logs[B] == cluster.logs[A], "who is appointed gets the log"
    cluster.pass_time(2)
    assert cluster.nodes[A].leadership.present == {A, B, C}
    commit = cluster.decide(A, decree(QUORUM, manifest, 1, quorum=3), A)
    assert commit.members == (A, B, C)
    cluster.decide(A)
    assert len(cluster.logs[A][-1].votes) >= 2
    cluster.kill(A)
    cluster.pass_time(cluster.lease)
    (leader,) = [name for name in cluster.leaders() if name in (B, C)]
    cluster.decide(leader)
    assert set(cluster.logs[leader][-1].votes) == {B, C}
    cluster.come(D)
    cluster.decide(leader, appoint(D, manifest=manifest, number=2), B, C)
    cluster.pass_time(2)
    cluster.decide(leader, decree(DISMISS, manifest, 3, subject=A), B, C)
    assert set(cluster.nodes[leader].members) == {B, C, D}
    cluster.kill(B if leader == C else C)
    cluster.pass_time(cluster.lease)
    cluster.decide(leader)
    assert set(cluster.logs[leader][-1].votes) == {leader, D}
    assert cluster.logs[D] == cluster.logs[leader]


def test_who_is_dismissed_hears_of_it_and_its_votes_count_no_more() -> None:
    cluster = Changing(3, 4)
    manifest = cluster.manifest
    cluster.pass_time(2)
    cluster.decide(A, decree(DISMISS, manifest, subject=A), B, C)
    assert cluster.logs[A] == cluster.logs[B], "it gets the commit that says so"
    assert set(cluster.nodes[B].members) == {B, C, D}
    assert cluster.nodes[B].reached == (B, C, D, A)
    assert not cluster.nodes[A].leads
    cluster.do(A, Proposed(cluster.commit(A)))
    assert len(cluster.logs[A]) == len(cluster.logs[B]) == 1
    (leader,) = cluster.leaders()
    cluster.decide(leader)
    assert A not in cluster.logs[leader][-1].votes
    assert cluster.nodes[leader].reached == (B, C, D), "from then on nobody talks to it"


def certificate(record: Record, *names: str) -> Confirmed:
    commit = record.commit
    body = confirmation_body(commit.run, commit.round, commit.digest)
    return Confirmed(round=commit.round, digest=commit.digest, by={name: KEYS[name].sign(body) for name in names})


def history() -> list[Record]:
    """Of three operators A, B and C: D and E come, decide in the place of A and B, and these are dismissed."""
    wishes = [
        (signed(appoint(D, E), A, B), (A, B, C), (A, B)),
        (signed(decree(DISMISS, number=1, subject=A), B, C), (B, C, D), (A, B)),
        (signed(decree(DISMISS, number=2, subject=B), C, D), (C, D, E), (C, D)),
        (None, (C, D, E), (D, E)),
        (None, (C, D, E), (D, E)),
    ]
    records: list[Record] = []
    for enacted, members, voters in wishes:
        before = records[-1].commit if records else None
        made = first(THREE, enacted, members) if before is None else following(before, enacted, members)
        made = dataclasses.replace(made, leader=voters[0])
        assert validation.why_not_next(THREE, before, tiny.record(made, *map(KEYS.get, voters))) is None  # type: ignore[arg-type]
        records.append(tiny.record(made, *(KEYS[name] for name in voters)))
    return records


def test_who_decides_nothing_takes_the_log_by_a_certificate_of_those_who_came_later() -> None:
    """Its own log says that A, B and C decide; two of these are gone, and a certificate of D and E is all there is."""
    cluster, records = Changing(3), history()
    cluster.come(D, E)
    node = E
    for record in records:
        cluster.do(node, Learned(D, record))
    assert cluster.logs[node] == [], "nothing is confirmed yet"
    cluster.do(node, Heard(D, certificate(records[-1], D)))
    cluster.do(node, Heard(D, certificate(records[-2], A, B, C)))
    assert cluster.logs[node] == [], "nor by those who did not decide it"
    cluster.do(node, Heard(C, certificate(records[-1], D, E)))
    assert cluster.logs[node] == records


def test_a_peer_follows_the_log_through_changes_of_the_board() -> None:
    records = history()
    found = History(THREE)
    for record in records:
        assert found.learn(record) is None
    assert found.head == -1
    found.confirm(certificate(records[-1], A, B, C))
    assert found.head == -1, "those do not decide any more"
    found.confirm(certificate(records[-1], D, E))
    assert found.head == 4
    assert board.of(THREE, found.commits[4]).names == (C, D, E)


def test_an_old_certificate_that_is_told_again_does_not_hide_a_newer_confirmation() -> None:
    records = history()
    known = confirming.Confirming(A, 1.0, 0.0)
    names = (A, B, C, D, E)

    def hear(told: Confirmed) -> None:
        known.hear(told, names, lambda peer, body, signature: True, THREE.run_id)

    hear(certificate(records[4], D))
    hear(certificate(records[3], D, E))
    assert known.newest((D,)) == (4, records[4].commit.digest)
    hear(certificate(records[3], D))
    assert known.newest((D,)) == (3, records[3].commit.digest), "what one says for itself is newer: it was cut off"


def test_a_node_that_is_behind_gets_the_newest_certificate_with_the_log() -> None:
    cluster = Changing(3, 4)
    cluster.kill(D)
    for _ in range(3):
        cluster.decide(A)
    assert [e for e in cluster.other[A] if isinstance(e, Certified)]
    cluster.kill(C)
    cluster.pass_time(cluster.lease)
    cluster.restart(D)
    cluster.pass_time(3)
    assert cluster.logs[D] == cluster.logs[A], "one of two that confirmed it is gone"


def test_nobody_decodes_a_board_of_a_stranger_as_a_commit() -> None:
    head = first(THREE, signed(appoint(D), A, B))
    raw = encoding.encode_record(tiny.record(head, KEYS[A], KEYS[B]))
    assert encoding.decode_record(raw, "p").commit == head
    with pytest.raises(MessageError):
        encoding.decode_record(raw[:-1], "p")


def test_a_rival_that_nobody_follows_gives_its_place_to_what_is_followed() -> None:
    """E knows a decided commit of a liar first; the others' chain takes its place, and a stranger's record does not."""
    cluster, records = Changing(3), history()
    cluster.come(D, E)
    ahead = cluster.nodes[E].ahead
    second = records[1].commit
    rival = tiny.record(dataclasses.replace(second, time=9.0), KEYS[A], KEYS[B])
    for record in (records[0], rival):
        cluster.do(E, Learned(A, record))
    assert ahead.end == 1
    cluster.do(E, Learned(A, tiny.record(records[2].commit, KEYS[E])))
    assert ahead.end == 1, "nobody who decides has voted for that"
    cluster.do(E, Learned(D, records[2]))
    assert ahead.end == 0
    for record in records:
        cluster.do(E, Learned(D, record))
    cluster.do(E, Heard(D, certificate(records[-1], D, E)))
    assert cluster.logs[E] == records
