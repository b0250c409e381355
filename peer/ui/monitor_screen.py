"""The screen of `potluck monitor`: keys choose among views of a run."""

from __future__ import annotations

import atexit
import contextlib
import copy
import os
import re
import select
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.text import Text

from peer.events import Event
from peer.ui import views
from peer.ui.lines import MARKS, Note
from peer.ui.run_view import RunView
from peer.ui.screen import Plain, Screen, render
from peer.ui.state import State, state
from protocol.run.manifest import Manifest

_KEY = re.compile(r"\x1b\[[0-9;]*[A-Za-z~]|\x1bO[A-Z]|.", re.DOTALL)
"""An escape sequence, as of an arrow key, or one character."""
VIEWS = ("run", "chains", "rounds", "credits", "health", "me")
"""In the order of their keys, 1 to 6."""
HELP = ("/ filter", "p pause", "q quit")
"""Fits into 80 characters with the views; as much from its end as there is space for. Arrows and page keys scroll."""
LONGEST_PATTERN = 40
SCROLL_LINES = {"\x1b[A": -1, "k": -1, "\x1b[B": 1, "j": 1, "\x1b[5~": -15, "\x1b[6~": 15}
"""By key: arrows, j and k, page up and down."""
_STDIN = 0


def can_read(fd: int) -> bool:
    """Returns whether `fd` is a terminal and this process is in its foreground."""
    try:
        return os.isatty(fd) and os.tcgetpgrp(fd) == os.getpgrp()
    except OSError:
        return False


@contextlib.contextmanager
def keys(fd: int, press: Callable[[str], None]) -> Iterator[None]:
    """Reads single keys from the terminal `fd` in a thread and passes them to `press`.

    Ctrl-C and Ctrl-Z keep their meaning. The terminal is restored at the end, and at the exit of the process.
    """
    before, (wake, end) = termios.tcgetattr(fd), os.pipe()

    def restore() -> None:
        with contextlib.suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(fd, termios.TCSADRAIN, before)

    def read() -> None:
        while wake not in select.select([fd, wake], [], [])[0]:
            try:
                typed = os.read(fd, 256)
            except OSError:  # the terminal is gone
                return
            if not typed:
                return
            for key in _KEY.findall(typed.decode("utf-8", "replace")):
                press(key)

    thread = threading.Thread(target=read, daemon=True)
    atexit.register(restore)
    tty.setcbreak(fd)
    thread.start()
    try:
        yield
    finally:
        os.write(end, b".")
        thread.join()
        os.close(wake)
        os.close(end)
        restore()
        atexit.unregister(restore)


@dataclass(slots=True)
class Browsing:
    """The user's choice of a view."""

    view: str = VIEWS[0]
    skip: int = 0
    """Lines scrolled away."""
    pattern: str = ""
    """Filter of rows."""
    typing: bool = False
    """Whether keys go into the pattern."""
    paused: bool = False
    left: bool = False
    """Whether the user has quit."""

    def press(self, key: str) -> None:
        """Applies a key: a character, or an escape sequence."""
        if self.typing:
            self._type(key)
        elif key in SCROLL_LINES:
            self.skip = max(0, self.skip + SCROLL_LINES[key])
        elif key in ("q", "Q"):
            self.left = True
        elif key in ("p", " "):
            self.paused = not self.paused
        elif key == "/":
            self.typing = True
        elif key == "\x1b":
            self.pattern, self.skip = "", 0
        elif key == "\t":
            self._show(VIEWS[(VIEWS.index(self.view) + 1) % len(VIEWS)])
        elif key in ("1", "2", "3", "4", "5", "6"):
            self._show(VIEWS[int(key) - 1])

    def _show(self, view: str) -> None:
        self.view, self.skip = view, 0

    def _type(self, key: str) -> None:
        self.skip = 0
        if key in ("\r", "\n"):
            self.typing = False
        elif key == "\x1b":
            self.typing, self.pattern = False, ""
        elif key in ("\x7f", "\b"):
            self.pattern = self.pattern[:-1]
        elif len(key) == 1 and key.isprintable() and len(self.pattern) < LONGEST_PATTERN:
            self.pattern += key


class MonitorScreen(Screen):
    """Shows a run; on a terminal, keys choose views.

    leave: called in another thread when the user quits.
    me: the user's own peer.
    news_age, join_line: as of peer/ui/monitor.py.
    """

    refresh_per_second = 0.5
    """A key draws the screen at once."""

    def __init__(
        self,
        manifest: Manifest,
        console: Console | None = None,
        leave: Callable[[], None] = lambda: None,
        me: str | None = None,
        news_age: Callable[[], float | None] = lambda: None,
        join_line: Callable[[], str] = lambda: "",
    ) -> None:
        super().__init__(manifest, console=console)
        self.changes = 0
        """Events and messages so far."""
        self.browsing: Browsing | None = None
        """None without keys."""
        self._paused: RunView | None = None
        self._leave = leave
        self._me = me
        self._news_age, self._join_line = news_age, join_line
        self._was_silent = False
        self._keys = contextlib.ExitStack()

    def state(self) -> State:
        """The present snapshot. Any thread may call it."""
        with self._lock:
            self._ask()
            return state(self.view, time.time())

    def version(self) -> tuple[int, int | None]:
        """Differs when there is something new to show: changes, and seconds of silence. Any thread may call it."""
        with self._lock:
            self.view.news_age = age = self._news_age()
            return self.changes, int(age) if age is not None and self.view.is_silent else None

    def take(self, event: Event) -> None:
        """A Sink that prints nothing."""
        with self._lock:
            self._take(event)

    def say(self, text: str, level: str = "good") -> None:
        """Shows a message that is no event."""
        with self._lock:
            self._news, self.changes = True, self.changes + 1
            self.view.notes.append(Note(time.time(), level, text))
        if self._live is None:
            print(f"{MARKS[level]} {text}", file=sys.stderr, flush=True)

    def press(self, key: str) -> None:
        """Applies a key."""
        with self._lock:
            assert self.browsing is not None
            self._news = True
            self.browsing.press(key)
            if not self.browsing.paused:
                self._paused = None
            elif self._paused is None:
                self._paused = copy.deepcopy(self.view)
            left = self.browsing.left
        if left:
            self._leave()
        elif self._live is not None:
            self._live.refresh()

    def __enter__(self) -> MonitorScreen:
        super().__enter__()
        if self._live is not None and can_read(_STDIN):
            self.browsing = Browsing()
            self._keys.enter_context(keys(_STDIN, self.press))
        return self

    def __exit__(self, *error: object) -> None:
        self._keys.close()
        with self._lock:
            self.browsing = None
        super().__exit__(*error)

    def _ask(self) -> None:
        self.view.news_age, self.view.join_line = self._news_age(), self._join_line()

    def _take(self, event: Event) -> None:
        self.changes += 1
        super()._take(event)

    def has_news(self) -> bool:
        """Also while no node answers, to count the seconds."""
        news, silent = super().has_news(), self.version()[1] is not None
        news, self._was_silent = news or silent or self._was_silent, silent
        return news

    def _drawn(self, width: int, height: int) -> RenderableType:
        self._ask()
        if self.browsing is None:
            return super()._drawn(width, height)
        shown = self._paused or self.view
        shown.news_age = self.view.news_age
        return draw(shown, self.browsing, width, height, ascii_only=self.console.options.ascii_only, me=self._me)


def draw(
    view: RunView, browsing: Browsing, width: int, height: int, *, ascii_only: bool = False, me: str | None = None
) -> RenderableType:
    """One frame of exactly `width` x `height` characters; the last line names the keys. me: the user's own peer."""
    body: RenderableType
    if browsing.view == "run":
        body = render(view, width, height - 1, ascii_only=ascii_only)
    else:
        known = state(view, view.now)
        mine = browsing.view == "me"
        sheet = views.mine(known, view.credits, me) if mine else views.sheet(browsing.view, known)
        body, browsing.skip = views.draw(
            sheet, width, height - 1, browsing.pattern, browsing.skip, ascii_only=ascii_only
        )
    frame = Group(body, _keys_line(browsing, width))
    return Plain(frame) if ascii_only else frame


def _keys_line(browsing: Browsing, width: int) -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")
    for number, view in enumerate(VIEWS, 1):
        line.append(f" {number} {view} ", style="bold reverse" if view == browsing.view else "bright_black")
    if browsing.typing:
        line.append(f"  filter: {browsing.pattern}_", style="bold")
    else:
        line.append("  paused" if browsing.paused else "", style="bold")
        line.append(f"  filter: {browsing.pattern} (Esc)" if browsing.pattern else "", style="bold")
        helps = (f"  {' '.join(HELP[at:])}" for at in range(len(HELP)))
        line.append(next((x for x in helps if line.cell_len + len(x) <= width), ""), style="bright_black")
    line.truncate(width, overflow="ellipsis")
    return line
