"""What peers call themselves reaches screens as harmless text, and no peer can pass for another."""

from __future__ import annotations

import dataclasses
import itertools
import random
import unicodedata

import pytest

from peer import events
from peer.events import Event
from peer.ui.lines import Lines
from peer.ui.run_view import RunView
from peer.ui.state import state
from peer.ui.text import LONGEST_NAME, MOST_NAMES, Names, harmless_name, meant, readable
from protocol.errors import UsageError
from protocol.identity import Identity, short_peer
from protocol.wire.commit import LeftOut
from tests.support.watched import BEGAN, MadeUp, decided, peer_id

HOSTILE = [
    "\x1b[2J\x1b[31mred\x07",
    "\u202eadmin\u202c\u200f\u2066",
    "x" * 10_000,
    "a\nb\r\tc",
    "<script>alert(1)</script>",
    "n" + "\u0301" * 60,
    "\u0301\u0302",
    "[bold]loud[/bold]",
    "\ud800\udfff",
    "\x00\x9b31m",
    "\u2028\u2029\u00ad\ufeff",
    "👩‍👩‍👧‍👦 家族",
]


@pytest.mark.parametrize("said", HOSTILE)
def test_names_of_enemies_are_harmless(said: str) -> None:
    name = harmless_name(said)
    assert len(name) <= LONGEST_NAME
    assert name.isprintable()
    assert all(c.isalnum() or c in " -_." or unicodedata.category(c).startswith("M") for c in name)
    assert all(not (unicodedata.combining(a) and unicodedata.combining(b)) for a, b in itertools.pairwise(name))
    assert harmless_name(name) == name, "once is enough"


@pytest.mark.parametrize("name", ["Ada", "gpu-7", "home_box.2", "Zoë", "Ада", "עדה", "エイダ", "my old PC"])
def test_names_of_everybody_are_kept(name: str) -> None:
    assert harmless_name(name) == name


def ready(peer: str, name: str) -> events.Ready:
    return events.Ready(run="run", peer=peer, memory_bytes=10**9, name=name)


def test_equal_names_are_told_apart_and_given_ones_stay() -> None:
    ada, other, laptop = map(peer_id, range(3))
    names = Names({laptop: "laptop"})
    for peer, said in ((ada, "Ada"), (other, "Ada"), (laptop, "Ada")):
        names.learn(peer, said)
    assert names == {ada: f"Ada·{ada[-4:]}", other: f"Ada·{other[-4:]}", laptop: "laptop"}
    names.learn(ada, "\x1b")
    assert ada not in names, "what is left of it is no name"


def test_who_looks_like_somebody_else_is_not_named_in_his_place() -> None:
    ada, thief = peer_id(0), peer_id(1)
    names = Names()
    names.learn(thief, short_peer(ada))
    names.learn(ada, "Ada")
    shown = readable(f"peer {short_peer(thief)} was silent, {short_peer(ada)} was not", names)
    assert shown == f"{names[thief]} was silent, {names[ada]} was not"
    assert names[thief] != names[ada]


def test_a_screen_keeps_only_so_many_names() -> None:
    names = Names()
    for number in range(MOST_NAMES + 50):
        names.learn(peer_id(number), "x")
    assert len(names) == MOST_NAMES
    names.learn(peer_id(3), "y")
    assert names[peer_id(3)].startswith("y·"), "whoever has one may change it"


def test_screens_and_lines_call_peers_by_their_names() -> None:
    made, lines = MadeUp(5), Lines()
    watched = RunView(made.manifest)
    for event in made.begin():
        watched.feed(event)
    named = Event(BEGAN, "bootstrap", ready(made.ids[0], "Ada"))
    watched.feed(named)
    watched.feed(made.commit(1))
    assert any("Ada·" in line for line in lines.of(named))
    found = state(watched, BEGAN + 100)
    shown = f"Ada·{made.ids[0][-4:]}"
    assert shown in {p.name for p in found.peers}
    assert shown in {c.name for c in found.contributors}
    assert shown in {r.name for r in found.replicas}
    (line,) = lines.of(Event(BEGAN, "bootstrap", events.Gone(peer=made.ids[0])))
    assert f"{shown} is gone" in line


@pytest.mark.parametrize("said", ["Ada", ""])
def test_one_peer_has_one_name_wherever_it_is_shown_also_of_rounds_before_it_was_known(said: str) -> None:
    made = MadeUp(5)
    me, plan = made.ids[0], made.plan(3)
    left = LeftOut(replica=77, reason=f"peer {short_peer(me)}: judged: it is a copy", judged="0" * 64, peers=(me,))
    watched = RunView(made.manifest)
    for event in (*made.begin(), made.commit(1)):
        watched.feed(event)
    for round, by in ((2, 77), (3, 0)):
        plan = made.plan(round + 1)
        commit = decided(round, left_out=(dataclasses.replace(left, replica=by),), plan=plan)
        watched.feed(Event(BEGAN + 60 * round, "bootstrap", commit))
        watched.feed(Event(BEGAN + 60 * round, "bootstrap", ready(me, said)))
    found = state(watched, BEGAN + 200)
    name = f"Ada·{me[-4:]}" if said else short_peer(me)
    (again,), (before,) = (r.left_out for r in found.recent[:2])
    assert (again.replica, again.reason) == (before.replica, before.reason) == (name, "judged: it is a copy")
    assert {c.name for c in found.contributors if c.peer == me} == {name}
    assert {c.reason for c in found.contributors if c.peer == me} == {"judged: it is a copy"}
    assert {p.name for p in found.peers if p.peer == me} == {r.name for r in found.replicas[:1]} == {name}
    assert [m.text for m in found.messages if "without" in m.text] == [
        f"round 3 without {name}: judged: it is a copy",
        f"round 2 without {short_peer(me)}: judged: it is a copy",
    ]


# --- a peer that is typed


PEERS = [Identity(random.Random(seed).randbytes(32)).peer_id for seed in range(50)]
ZOE, OTHER = PEERS[:2]


@pytest.mark.parametrize(
    "form",
    [
        "{id}", "{end8}", "{end4}", "Zoë·{end4}", "Zoë·{end4}:", "Zoe-{end4}", "peer {end8}", '"Zoë·{end4}"',
        "'{end8}'", "…{end4}", "...{end8}", "~{end4}", "12D3Koo…{end8}", "Zoë (…{end4})", " {end8} ", "Zoë:{end4}",
        "Zoë·{id}", "/ip4/1.2.3.4/tcp/5/p2p/{id}",
    ],
)  # fmt: skip
def test_what_screens_show_of_a_peer_names_it(form: str) -> None:
    typed = form.format(id=ZOE, end8=ZOE[-8:], end4=ZOE[-4:])
    assert meant("PEER", typed, PEERS, {ZOE: "Zoë", OTHER: "Zoë"}) == ZOE


def test_every_name_that_a_screen_shows_is_taken_back() -> None:
    names = Names()
    for peer, said in zip(PEERS, [*HOSTILE, "Zoë", "a b", "A.B-c_d", "1234", ZOE[-4:]] * 3, strict=False):
        names.learn(peer, said)
        shown = names.get(peer, short_peer(peer))
        assert meant("PEER", shown, PEERS) == peer


@pytest.mark.parametrize(
    "typed", ["Zoë", "zoë", "", "…", "Zoë·", f"12D3Koo…{ZOE[-3:]}", f"Zoë·{ZOE[-4:-1]}…", ZOE[:20] + "…", "Zoë Bean"]
)
def test_a_name_alone_and_what_is_cut_off_name_nobody(typed: str) -> None:
    with pytest.raises(UsageError, match=r"^PEER .*; give the whole id"):
        meant("PEER", typed, PEERS, {ZOE: "Zoë"})


def test_whoever_takes_the_end_of_another_id_for_a_name_gets_nobody_banned() -> None:
    """The operator who types that name without the id behind it is asked which peer is meant."""
    with pytest.raises(UsageError) as refused:
        meant("PEER", ZOE[-4:], PEERS, {OTHER: ZOE[-4:]})
    assert ZOE in str(refused.value)
    assert OTHER in str(refused.value)
    assert meant("PEER", f"{ZOE[-4:]}·{OTHER[-4:]}", PEERS, {OTHER: ZOE[-4:]}) == OTHER


def test_an_end_that_several_have_is_refused_and_names_them() -> None:
    twins = [f"12D3KooW{letter * 40}zMYD" for letter in "ab"]
    with pytest.raises(UsageError) as refused:
        meant("PEER", "Zoë·zMYD", [*PEERS, *twins], {twins[0]: "Zoë"})
    assert all(twin in str(refused.value) for twin in twins)
