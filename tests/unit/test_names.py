"""What peers call themselves reaches screens as harmless text, and nobody can pass for another."""

from __future__ import annotations

import itertools
import unicodedata

import pytest

from peer import events
from peer.events import Event
from peer.ui.lines import Lines
from peer.ui.names import LONGEST, MOST, Names, harmless_name
from peer.ui.text import readable
from peer.ui.watched import Watched, state
from protocol.identity import short_peer
from tests.watched import BEGAN, MadeUp, peer_id

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
    assert len(name) <= LONGEST
    assert name.isprintable()
    assert all(c.isalnum() or c in " -_." or unicodedata.category(c).startswith("M") for c in name)
    assert all(not (unicodedata.combining(a) and unicodedata.combining(b)) for a, b in itertools.pairwise(name))
    assert harmless_name(name) == name, "once is enough"


@pytest.mark.parametrize("name", ["Ada", "gpu-7", "home_box.2", "Zoë", "Ада", "עדה", "エイダ", "my old PC"])
def test_names_of_everybody_are_kept(name: str) -> None:
    assert harmless_name(name) == name


def ready(peer: str, name: str) -> events.Ready:
    return events.Ready(peer=peer, memory_bytes=10**9, up_bps=1, down_bps=1, speed_flops=1, device="cpu", name=name)


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
    for number in range(MOST + 50):
        names.learn(peer_id(number), "x")
    assert len(names) == MOST
    names.learn(peer_id(3), "y")
    assert names[peer_id(3)].startswith("y·"), "whoever has one may change it"


def test_screens_and_lines_call_peers_by_their_names() -> None:
    made, lines = MadeUp(5), Lines()
    watched = Watched(made.manifest)
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
