"""Changes of the operators: possible decrees, the members afterwards, and nodes (protocol/ledger/board.py)."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from protocol.identity import Identity
from protocol.ledger import access, board, history
from protocol.ledger.history import History
from protocol.quorum.paxos_events import Learned
from protocol.round.leader import Leader
from protocol.run.manifest import Manifest
from protocol.wire import encoding
from protocol.wire.bounds import LONGEST_PLACE
from protocol.wire.commit import DOMAIN, Commit, Record
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
from protocol.wire.encoding import seal
from protocol.wire.schema import SchemaError, build, plain
from tests.support import tiny
from tests.support.access import Desk
from tests.support.paxos import NAMES, A, B, C, Cluster, D, E

F, G = NAMES[5:7]
KEYS = dict(zip(NAMES, tiny.OPERATORS, strict=True))
ONE, FOUR = tiny.manifest(operators=NAMES[:1], quorum=1), tiny.manifest(operators=NAMES[:4], quorum=4)
PLACE = "/ip4/198.51.100.7/tcp/4001"


def operators(*names: str) -> tuple[Operator, ...]:
    return tuple(Operator(peer=name, places=(PLACE,)) for name in names)


def decree(action: str, manifest: Manifest = FOUR, number: int = 0, **more: Any) -> Decree:
    return Decree(run=manifest.run_id, number=number, action=action, **more)


def appoint(*names: str, manifest: Manifest = FOUR, number: int = 0) -> Decree:
    return decree(APPOINT, manifest, number, operators=operators(*names))


def signed(wish: Decree, *names: str) -> Enacted:
    body = DOMAIN + encoding.encode(wish)
    return Enacted(decree=wish, signatures={name: KEYS[name].sign(body) for name in names})


def first(manifest: Manifest, enacted: Enacted | None, members: tuple[str, ...] | None = None) -> Commit:
    """The commit of round 0 that brings this decree."""
    said = {"decrees": int(enacted is not None), "decree": enacted, "board": board.after(manifest, None, enacted)}
    return tiny.commit(manifest, members=members or manifest.first_members, **said)


def following(
    head: Commit, enacted: Enacted | None = None, members: tuple[str, ...] | None = None, **more: Any
) -> Commit:
    """The one after it."""
    then = board.after(FOUR, head, enacted)
    fields = {"round": head.round + 1, "parent": head.digest, "decree": enacted, "board": then} | more
    count = head.decrees + (enacted is not None)
    return dataclasses.replace(head, decrees=count, members=members or head.members, **fields)  # type: ignore[arg-type]


# --- what a decree makes of a board


def test_a_board_is_what_the_manifest_says_until_a_decree_changes_it() -> None:
    now = board.of(FOUR, None)
    assert (now.names, now.quorum) == (NAMES[:4], 4)
    head = first(FOUR, signed(appoint(E, F, G), A, B, C))
    assert board.of(FOUR, head).names == NAMES
    assert board.of(FOUR, head).operators[4:] == operators(E, F, G)
    assert board.of(FOUR, head).quorum == 4, "who is appointed does not decide yet"
    fewer = board.changed(FOUR, head, decree(DISMISS, subject=B))
    assert (fewer.names, fewer.quorum) == ((A, C, D, E, F, G), 4)
    more = board.changed(FOUR, head, decree(QUORUM, quorum=7))
    assert (more.names, more.quorum) == (NAMES, 7)
    moved = board.changed(FOUR, head, decree(APPOINT, operators=(Operator(peer=A, places=(PLACE,)),)))
    assert (moved.names, moved.operators[0].places) == (NAMES, (PLACE,))


def test_every_commit_after_it_carries_the_board() -> None:
    head = first(FOUR, signed(appoint(E), A, B, C))
    later = following(head)
    assert later.board == head.board
    assert access.why_unlawful(FOUR, head, later) is None
    otherwise = "says otherwise who operates the run than was decreed"
    for wrong in (None, dataclasses.replace(board.of(FOUR, head), quorum=1), board.of(FOUR, None)):
        assert access.why_unlawful(FOUR, head, dataclasses.replace(later, board=wrong)) == otherwise
    assert access.why_unlawful(FOUR, None, dataclasses.replace(first(FOUR, None), board=head.board)) == otherwise


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        (appoint(A, A), "it names an operator twice"),
        (decree(APPOINT, operators=(Operator(peer="me"),)), "is no key"),
        (decree(APPOINT, operators=(Operator(peer=E, places=("\x1b[2J",)),)), "an address of it is none"),
        (decree(APPOINT, operators=(Operator(peer=A),)), "nothing would change"),
        (decree(DISMISS, subject=E), "is no operator of it"),
        (decree(DISMISS, subject=A), "4 operators decide, and there would be 3"),
        (decree(QUORUM, quorum=7), "7 operators decide, and there would be 4"),
        (decree(QUORUM, quorum=3), "3 nodes bear no dishonest one, and stop when one is lost; use 1, 4 or 7"),
        (decree(QUORUM, quorum=5), "5 nodes bear one dishonest one, as 4 do; use 1, 4 or 7"),
        (decree(QUORUM, quorum=4), "nothing would change"),
    ],
)
def test_what_no_commit_can_bring_whoever_signed_it(wish: Decree, said: str) -> None:
    enacted = signed(wish, A, B, C, D)
    assert said in (board.why_not(FOUR, None, wish) or "")
    assert said in (access.why_unlawful(FOUR, None, first(FOUR, enacted)) or "")
    petitions = access.SignedDecrees()
    for name in (A, B, C, D):
        petitions.add(name, wish, enacted.signatures[name])
    assert petitions.enacted(FOUR, None) is None, "nor does a leader propose it"


def test_a_run_has_sixteen_operators_at_most() -> None:
    fresh = [Identity(bytes([9, i] * 16)).peer_id for i in range(MAX_OPERATORS)]
    head = first(FOUR, signed(appoint(*fresh[:7]), A, B, C))
    full = following(head, signed(appoint(*fresh[7:12], number=1), A, B, C))
    assert access.why_unlawful(FOUR, head, full) is None
    assert len(board.of(FOUR, full).operators) == MAX_OPERATORS
    assert "16 operators at most" in (board.why_not(FOUR, full, appoint(fresh[12], number=2)) or "")


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
    [{"operators": ()}, {"subject": E}, {"quorum": 4}, {"action": QUORUM}, {"action": DISMISS}, {"action": "ban"}],
)
def test_a_decree_says_one_thing(changes: dict[str, Any]) -> None:
    assert appoint(E).is_sound
    wrong = dataclasses.replace(appoint(E), **changes)
    assert not wrong.is_sound
    assert access.why_not_decreed(FOUR, None, signed(wrong, A, B, C)) == "has a decree that says nothing"


def test_those_who_decide_before_sign_it_and_nobody_else_counts() -> None:
    few = "has a decree that too few of its members signed"
    assert access.why_unlawful(FOUR, None, first(FOUR, signed(appoint(E), A, B))) == few
    assert access.why_unlawful(FOUR, None, first(FOUR, signed(appoint(E), A, B, E))) == few
    head = first(FOUR, signed(appoint(E), A, B, C))
    assert access.why_unlawful(FOUR, head, following(head, signed(appoint(F, number=1), A, B, E))) == few
    then = following(head, signed(decree(DISMISS, number=1, subject=A), B, C, D), (B, C, D, E))
    assert access.why_unlawful(FOUR, head, then) is None
    by_new = following(then, signed(appoint(F, number=2), B, C, E))
    assert access.why_unlawful(FOUR, then, by_new) is None, "who decides now signs"
    assert access.why_unlawful(FOUR, then, following(then, signed(appoint(F, number=2), A, B, C))) == few


# --- who decides next


def test_a_commit_names_members_of_the_new_board_and_as_many_as_it_says() -> None:
    names = "names other members than operators of the run"
    wish = signed(appoint(B, C, D, manifest=ONE), A)
    head = first(ONE, wish)
    assert history.why_not_next(ONE, None, tiny.record(head, KEYS[A])) is None
    four = signed(decree(QUORUM, ONE, 1, quorum=4), A)
    for members, said in (
        ((A, B, C, D), None),
        ((A,), names),
        ((A, B, C), names),
        ((A, B, C, E), names),
        ((A, B, C, C), names),
    ):
        then = dataclasses.replace(following(head, four), members=members, board=board.after(ONE, head, four))
        assert history.why_not_next(ONE, head, tiny.record(then, KEYS[A])) == said


def test_a_commit_that_changes_the_board_is_decided_by_those_before_and_the_next_by_those_after() -> None:
    head = first(ONE, signed(appoint(B, C, D, manifest=ONE), A))
    four = signed(decree(QUORUM, ONE, 1, quorum=4), A)
    then = dataclasses.replace(following(head, four, (A, B, C, D)), board=board.after(ONE, head, four))
    few = "has too few votes"
    assert history.why_not_next(ONE, head, tiny.record(then, KEYS[A])) is None
    assert history.why_not_next(ONE, head, tiny.record(then, KEYS[B], KEYS[C], KEYS[D])) == few
    later = dataclasses.replace(then, round=2, parent=then.digest, decree=None)
    assert history.why_not_next(ONE, then, tiny.record(later, KEYS[A])) == few
    assert history.why_not_next(ONE, then, tiny.record(later, KEYS[B], KEYS[C])) == few
    assert history.why_not_next(ONE, then, tiny.record(later, KEYS[B], KEYS[C], KEYS[D])) is None


def test_who_gives_signs_of_life_is_chosen_first() -> None:
    six = Board(operators=operators(*NAMES[:6]), quorum=4)
    assert board.completed(six, (A, B, C, D), {A, B, C, D, E, F}) == (A, B, C, D)
    without = dataclasses.replace(six, operators=operators(A, C, D, E, F))
    assert board.completed(without, (A, B, C, D), {A, C, D, F}) == (A, C, D, F)
    one = dataclasses.replace(six, quorum=1)
    assert board.completed(one, (A, B, C, D), {B, C, E}) == (B,), "of those who decided"


def test_no_typing_error_can_stop_a_run() -> None:
    """An appointed operator decides nothing; more decide, or others, where enough of them give signs of life."""
    assert board.why_too_few(FOUR, None, appoint(E), {A, B}) is None
    head = first(ONE, signed(appoint(B, C, D, manifest=ONE), A))
    four = decree(QUORUM, ONE, 1, quorum=4)
    assert "2 of the 4 who would decide give signs of life" in (board.why_too_few(ONE, head, four, {A, B}) or "")
    assert board.why_too_few(ONE, head, four, {A, B, D}) is None
    gone = decree(DISMISS, ONE, 1, subject=A)
    assert "0 of the 1 who would decide" in (board.why_too_few(ONE, head, gone, {A}) or "")
    assert board.why_too_few(ONE, head, gone, {A, C}) is None
    petitions = access.SignedDecrees()
    enacted = signed(four, A)
    petitions.add(A, four, enacted.signatures[A])
    assert petitions.enacted(ONE, head, frozenset({A})) is None, "it is looked at again when it is proposed"
    assert petitions.enacted(ONE, head, frozenset({A, C, D})) == enacted


def test_a_node_refuses_in_one_line_what_cannot_be_and_answers_whose_decree_dismissed_him() -> None:
    head = first(ONE, signed(appoint(B, C, D, manifest=ONE), A))
    desk = Desk(Leader(ONE, (head,), (), 0.0), lambda: frozenset({A}))

    def hear(wish: Decree, name: str = A) -> str | None:
        return desk.refuses(wish, KEYS[name])

    few = "1 of the 4 who would decide give signs of life, and a round would need 3; start their nodes first"
    assert hear(decree(QUORUM, ONE, 1, quorum=4)) == f"that decree cannot be: {few}"
    assert hear(appoint(E, manifest=ONE, number=1), B) == f"{B[-8:]} is not among the operators who decide rounds now"
    assert desk.taken == []
    assert hear(appoint(E, manifest=ONE, number=1)) is None
    assert [event.operator for event in desk.taken] == [A]
    assert hear(appoint(B, C, D, manifest=ONE), E) is None, "an operator that asks may have been dismissed"
    assert len(desk.taken) == 1, "and nothing follows from it"


def test_a_node_tells_once_what_waits_for_other_operators() -> None:
    desk = Desk(Leader(FOUR, (), (), 0.0))
    for name in (A, A, B, B):
        assert desk.refuses(appoint(E), KEYS[name]) is None
    signers = ", ".join(name[-8:] for name in sorted((A, B)))
    assert desk.told == [
        f"decree appoint: 1 of 3 operators have signed it ({A[-8:]}); it waits for others",
        f"decree appoint: 2 of 3 operators have signed it ({signers}); it waits for others",
    ]


# --- nodes


class Changing(Cluster):
    """A cluster to which nodes come that the manifest does not name."""

    def come(self, *names: str) -> None:
        for name in names:
            self.logs[name], self.votes[name], self.held[name], self.other[name] = [], [], set(), []
            self.restart(name)


def changing_log() -> list[Record]:
    """Of four operators A, B, C and D: E and F come, decide in the place of A and B, and these are dismissed."""
    wishes = [
        (signed(appoint(E, F), A, B, C), (A, B, C, D), (A, B, C)),
        (signed(decree(DISMISS, number=1, subject=A), B, C, D), (B, C, D, E), (A, B, C)),
        (signed(decree(DISMISS, number=2, subject=B), C, D, E), (C, D, E, F), (C, D, E)),
        (None, (C, D, E, F), (D, E, F)),
        (None, (C, D, E, F), (D, E, F)),
    ]
    records: list[Record] = []
    for enacted, members, voters in wishes:
        before = records[-1].commit if records else None
        made = first(FOUR, enacted, members) if before is None else following(before, enacted, members)
        made = dataclasses.replace(made, leader=voters[0])
        assert history.why_not_next(FOUR, before, tiny.record(made, *map(KEYS.get, voters))) is None  # type: ignore[arg-type]
        records.append(tiny.record(made, *(KEYS[name] for name in voters)))
    return records


def test_a_node_and_a_peer_follow_the_log_through_changes_of_the_board() -> None:
    records, cluster, found = changing_log(), Changing(4), History(FOUR)
    cluster.come(E, F)
    for record in records:
        cluster.do(F, Learned(E, record))
        assert not found.learn(record)
    assert cluster.logs[F] == records
    assert board.of(FOUR, found.commits[4]).names == (C, D, E, F)
