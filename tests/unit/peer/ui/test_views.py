"""The monitor's screen with keys: every view at every size, what keys do, and that the terminal is left as it was."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import queue
import select
import signal
import termios
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from peer import events
from peer.events import Event
from peer.ui import views
from peer.ui.monitor_screen import VIEWS, Browsing, can_read, draw, keys
from peer.ui.run_view import RunView
from peer.ui.state import state
from protocol.run import manifest as manifests
from tests.support import potluck
from tests.support.state import EXTREMES, HOSTILE, watched
from tests.support.watched import BEGAN, MadeUp, says

DEADLINE = 60.0


def drawn(
    of: RunView, browsing: Browsing, width: int, height: int, *, ascii_only: bool = False, me: str | None = None
) -> list[str]:
    console = Console(width=width, height=height, file=io.StringIO(), record=True, legacy_windows=False)
    console.print(draw(of, browsing, width, height, ascii_only=ascii_only, me=me))
    return console.export_text().rstrip("\n").split("\n")


def text(of: RunView, browsing: Browsing) -> str:
    return "\n".join(drawn(of, browsing, 120, 40))


def hostile() -> RunView:
    """A run in which everybody says what hurts most."""
    made = MadeUp(5)
    one = watched(made, 3)
    for value in EXTREMES:
        for peer in made.ids:
            said = says(HOSTILE, 4, 2**31, value, bytes_sent=2**63)
            one.feed(Event(value, peer, said))
        one.feed(Event(value, "bootstrap", events.Warning(text=HOSTILE)))
    one.feed(made.commit(4, float("inf")))
    return one


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60), (60, 16)], ids=str)
def test_a_frame_has_the_size_of_the_screen_whatever_is_in_it(view: str, size: tuple[int, int]) -> None:
    runs = (RunView(MadeUp(5).manifest), watched(MadeUp(5), 3), watched(MadeUp(100), 2), hostile())
    me = MadeUp(5).ids[1]
    for of in runs:
        for ascii_only in (False, True):
            lines = drawn(of, Browsing(view=view), *size, ascii_only=ascii_only, me=me)
            assert len(lines) == size[1]
            assert max(map(len, lines)) <= size[0]
            assert all(line.isprintable() for line in lines)
            assert "6 me" in lines[-1]
            if ascii_only:
                assert "".join(lines).isascii()


def test_each_view_says_what_it_is_for() -> None:
    made = MadeUp(5)
    of = watched(made, 20)
    ids = [peer[-8:] for peer in made.ids]
    chains = text(of, Browsing(view="chains"))
    for shown in (*ids, "chain 0", "blocks 2-3", "spare", "training", "1 full, 1 chain"):
        assert shown in chains
    assert "→ link from " in next(line for line in chains.splitlines() if "%→" in line), "in the row of who waits"
    assert "its chain waits for it" in chains
    narrow = "\n".join(drawn(of, Browsing(view="chains"), 80, 24))
    assert "%→" in narrow
    assert "its chain waits for it" in narrow
    rounds = text(of, Browsing(view="rounds"))
    for shown in ("20", "1:00 min", "4,096", "chain 0: its offer came too late"):
        assert shown in rounds
    contributors = text(of, Browsing(view="credits"))
    for shown in ("credits: 4 contributors,", "40,960", ids[0], "52.6%"):
        assert shown in contributors
    health = text(of, Browsing(view="health"))
    for shown in (
        "✓ 1 of 1 bootstrap node there; a round needs 1 vote",
        "there, leads, voted",
        "every round has one result",
        "2 peers: reached directly",
    ):
        assert shown in health
    of.feed(Event(BEGAN, "bootstrap", events.Forked(round=3)))
    assert "✗ round 3 has two decided results" in text(of, Browsing(view="health"))


def test_nothing_is_cut_of_the_health_of_thousands_on_the_smallest_screen() -> None:
    made = MadeUp(4 * 999)
    of = RunView(made.manifest)
    for event in made.begin():
        of.feed(event)
    browsing = Browsing()
    browsing.view = "health"
    shown = "\n".join(drawn(of, browsing, 80, 24))
    for how in ("reached directly", "through an open port", "by a relay or by hole punching", "not known yet"):
        assert any("999 peers: " in line and how in line for line in shown.splitlines())
    assert "…" not in shown.rpartition("\n")[0]


def test_who_trains_too_sees_what_he_does_and_has_brought() -> None:
    made = MadeUp(5)
    of = watched(made, 20)

    def mine(me: str | None) -> str:
        return "\n".join(drawn(of, Browsing(view="me"), 120, 40, me=me))

    full, spare = mine(made.ids[0]), mine(made.ids[4])
    for shown in (
        "your peer is a full replica now: training ",
        "step 3 of 4, loss ",
        "you trained 40,960 tokens, 52.6% of the run: rank 1 of 4",
    ):
        assert shown in full
    assert "your peer is a spare now" in spare
    assert "you are in no round yet" in spare
    assert "your peer is not there now" in mine(made.ids[4][:-1] + "x")
    assert "--dir names another folder" in mine(None)
    of.join_line = "/ip4/203.0.113.5/tcp/1/p2p/a#b"
    assert "potluck join /ip4/203.0.113.5/tcp/1/p2p/a#b" in mine(None)
    of.is_open = False
    assert "by invitation" in mine(None)
    assert "potluck join" not in mine(None)
    for peer in made.ids:
        assert "…" not in "".join(drawn(of, Browsing(view="me"), 80, 24, me=peer)), "nothing is cut"


def test_keys() -> None:
    browsing = Browsing()
    seen = []
    for key in ("2", "6", "\t", "\t", "x", "\x1b[99~", "3"):
        browsing.press(key)
        seen.append(browsing.view)
    assert seen == ["chains", "me", "run", "chains", "chains", "chains", "rounds"]
    for key in "/a2q\x7fq":
        browsing.press(key)
    assert (browsing.pattern, browsing.typing, browsing.view, browsing.left) == ("a2q", True, "rounds", False)
    browsing.press("\n")
    assert not browsing.typing
    browsing.press("\x1b")
    assert browsing.pattern == ""
    for key in "p":
        browsing.press(key)
        assert browsing.paused
    browsing.press(" ")
    assert not browsing.paused
    browsing.press("q")
    assert browsing.left


def test_a_filter_and_scrolling() -> None:
    made = MadeUp(100)
    of, browsing = watched(made, 2), Browsing(view="chains")
    assert "1-36 of 100" in text(of, browsing)
    assert "arrows scroll" in text(of, browsing)
    browsing.press("\x1b[6~")
    assert "16-51 of 100" in text(of, browsing)
    for _ in range(20):
        browsing.press("\x1b[6~")
    assert "65-100 of 100" in text(of, browsing)
    browsing.press("k")
    assert "64-99 of 100" in text(of, browsing), "what was scrolled beyond the end counts for nothing"
    for key in f"/{made.ids[50][-6:].lower()}\n":
        browsing.press(key)
    assert "1-2 of 2 " in text(of, browsing), "it, and whoever waits for its link"
    assert made.ids[50][-8:] in text(of, browsing)
    for key in "/nobody\n":
        browsing.press(key)
    assert "nobody has that" in text(of, browsing)


def test_every_table_has_as_many_cells_as_columns() -> None:
    of = state(watched(MadeUp(5), 3), BEGAN)
    for view in VIEWS[1:-1]:
        sheet = views.sheet(view, of)
        assert sheet.rows
        assert {len(row) for row in sheet.rows} == {len(sheet.columns)}


# --- a terminal


def test_keys_come_one_by_one_and_the_terminal_is_as_before() -> None:
    here, there = pty.openpty()
    before = termios.tcgetattr(there)
    got: queue.Queue[str] = queue.Queue()
    try:
        with contextlib.suppress(ZeroDivisionError), keys(there, got.put):
            assert not termios.tcgetattr(there)[3] & termios.ICANON
            os.write(here, b"2\x1b[Aq\x1b")
            assert [got.get(timeout=DEADLINE) for _ in range(4)] == ["2", "\x1b[A", "q", "\x1b"]
            raise ZeroDivisionError
        assert termios.tcgetattr(there) == before
    finally:
        os.close(here)
        os.close(there)


def test_what_is_no_terminal_has_no_keys() -> None:
    wake, end = os.pipe()
    assert not can_read(wake)
    os.close(wake)
    os.close(end)
    assert not can_read(wake)


class Terminal:
    """`potluck monitor` in a terminal of its own."""

    def __init__(self, folder: Path, *options: str) -> None:
        made = MadeUp(5)
        (folder / "run.toml").write_text(manifests.to_toml(made.manifest))
        with open(folder / "events.jsonl", "w") as file:
            file.writelines(event.to_json() + "\n" for event in made.all(3))
        self.here, self.there = pty.openpty()
        termios.tcsetwinsize(self.there, (24, 80))
        self.before = termios.tcgetattr(self.there)
        terminal = {"stdin": self.there, "stdout": self.there, "stderr": self.there, "start_new_session": True}
        words = ("monitor", "run.toml", "--replay", "events.jsonl", *options)
        self.process = potluck.Popen(*words, cwd=folder, env=os.environ | {"TERM": "xterm"}, **terminal)
        self.screen = ""

    def until(self, wanted: str) -> None:
        end = time.monotonic() + DEADLINE
        while wanted not in self.screen:
            ready, _, _ = select.select([self.here], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"no {wanted!r} in {self.screen[-3000:]}"
            self.screen += os.read(self.here, 65536).decode("utf-8", "replace")

    def type(self, keys: str) -> None:
        os.write(self.here, keys.encode())

    def ends(self) -> int:
        reader = threading.Thread(target=self._drain, daemon=True)
        reader.start()
        return self.process.wait(DEADLINE)

    def _drain(self) -> None:
        try:
            while self.process.poll() is None:
                self.screen += os.read(self.here, 65536).decode("utf-8", "replace")
        except OSError:
            pass


@pytest.mark.timeout(120)
@pytest.mark.parametrize("end", ["q", "SIGTERM"])
def test_on_a_terminal_keys_work_and_every_end_restores_it(tmp_path: Path, end: str) -> None:
    terminal = Terminal(tmp_path)
    terminal.until("q quit")
    terminal.type("5")
    terminal.until("every round has one result")
    assert not termios.tcgetattr(terminal.there)[3] & termios.ICANON
    if end == "q":
        terminal.type("q")
    else:
        terminal.process.send_signal(getattr(signal, end))
    assert terminal.ends() == 0
    assert termios.tcgetattr(terminal.there) == terminal.before
    assert "Traceback" not in terminal.screen
