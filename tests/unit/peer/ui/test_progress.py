"""The line of a command that takes long: only on a terminal, only after a while, and gone in the end."""

from __future__ import annotations

import io

from peer.ui.progress import QUIET_SECONDS, Phase, Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def screen(self) -> str:
        """What is on the line: carriage returns go back to its beginning."""
        shown = ""
        for part in self.getvalue().split("\r"):
            shown = part + shown[len(part) :]
        return shown.rstrip()


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_time_left_follows_from_what_is_done() -> None:
    done = 0.0
    phase = Phase("replaying 120 rounds", 100.0, 120.0, lambda: done)
    assert phase.text(103.0) == "replaying 120 rounds: 3 s"
    done = 30.0
    assert phase.text(110.0) == "replaying 120 rounds: 25 %, 30 s left"
    done = 119.0
    assert phase.text(219.0) == "replaying 120 rounds: 99 %, 1 s left"
    done = 130.0
    assert phase.text(230.0) == "replaying 120 rounds: 100 %, 0 s left"
    assert Phase("reading the log", 100.0).text(165.0) == "reading the log: 1:05 min"
    assert Phase("replaying 0 rounds", 100.0, 0.0).text(101.0) == "replaying 0 rounds: 1 s"


def test_a_terminal_shows_it_after_a_while_and_is_clean_in_the_end() -> None:
    out, clock = Terminal(), Clock()
    with Progress(out, clock) as progress:
        progress.begin("reading a long log")
        progress.draw()
        assert out.getvalue() == ""
        clock.now += QUIET_SECONDS
        progress.draw()
        assert out.screen() == "reading a long log: 2 s"
        progress.begin("writing", 10.0, lambda: 5.0)
        clock.now += 4.0
        progress.draw()
        assert out.screen() == "writing: 50 %, 4 s left"
        progress.clear()
        assert out.screen() == ""
        progress.draw()
    assert out.screen() == ""
    before = out.getvalue()
    progress.draw()
    assert out.getvalue() == before


def test_what_is_quick_shows_nothing() -> None:
    out, clock = Terminal(), Clock()
    with Progress(out, clock) as progress:
        progress.begin("reading")
        progress.draw()
    assert out.getvalue() == ""


def test_pipes_get_nothing() -> None:
    out, clock = io.StringIO(), Clock()
    with Progress(out, clock) as progress:
        progress.begin("reading")
        clock.now += 100.0
        assert not progress.is_shown
    assert out.getvalue() == ""
