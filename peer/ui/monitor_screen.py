"""The screen of `potluck monitor`: that of a run, and views of it by keys (peer/ui/browsing.py)."""

from __future__ import annotations

import contextlib
import copy
import sys
import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.text import Text

from peer.events import Event
from peer.ui import views
from peer.ui.browsing import HELP, VIEWS, Browsing
from peer.ui.keys import Keys, can_read
from peer.ui.lines import MARKS, Note
from peer.ui.screen import Plain, Screen, render
from peer.ui.state import State, state
from peer.ui.watched import Watched
from protocol.run.manifest import Manifest

_STDIN = 0


class MonitorScreen(Screen):
    """Shows a run and takes keys, where there is a terminal for either. `leave` is called, on another thread, when its watcher has had
    enough. `me`: the watcher's own peer, if he has one. `news_age()`: seconds since a node last answered, as peer/ui/monitor.py has it."""

    refresh_per_second = 0.5
    """A key has the screen drawn at once, too."""

    def __init__(
        self,
        manifest: Manifest,
        console: Console | None = None,
        leave: Callable[[], None] = lambda: None,
        me: str | None = None,
        news_age: Callable[[], float | None] = lambda: None,
    ) -> None:
        super().__init__(manifest, console=console)
        self.watched = Watched(manifest)
        self.view = self.watched.view
        self.told = 0
        """Events that were taken, for whoever asks whether there are more."""
        self.browsing: Browsing | None = None
        """None where there are no keys."""
        self._paused: Watched | None = None
        self._leave = leave
        self._me = me
        self._news_age = news_age
        self._was_silent = False
        self._keys = contextlib.ExitStack()

    def state(self) -> State:
        """As of now. Any thread may ask."""
        with self._lock:
            self.view.news_age = self._news_age()
            return state(self.watched, time.time())

    def heard(self) -> tuple[int, int | None]:
        """What differs whenever there is something else to show: events that were taken, seconds of silence. Any thread may ask."""
        with self._lock:
            self.view.news_age = age = self._news_age()
            return self.told, int(age) if age is not None and self.view.is_silent else None

    def take(self, event: Event) -> None:
        """A Sink that prints nothing."""
        with self._lock:
            self._take(event)

    def say(self, text: str) -> None:
        """Tells the watcher something that is no event."""
        with self._lock:
            self._news, self.told = True, self.told + 1
            self.view.notes.append(Note(time.time(), "good", text))
        if self._live is None:
            print(f"{MARKS['good']} {text}", file=sys.stderr, flush=True)

    def press(self, key: str) -> None:
        """A key was typed."""
        with self._lock:
            assert self.browsing is not None
            self._news = True
            self.browsing.press(key)
            if not self.browsing.paused:
                self._paused = None
            elif self._paused is None:
                self._paused = copy.deepcopy(self.watched)
            left = self.browsing.left
        if left:
            self._leave()
        elif self._live is not None:
            self._live.refresh()

    def __enter__(self) -> MonitorScreen:
        super().__enter__()
        if self._live is not None and can_read(_STDIN):
            self.browsing = Browsing()
            self._keys.enter_context(Keys(_STDIN, self.press))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._keys.close()
        with self._lock:
            self.browsing = None
        super().__exit__(kind, error, trace)

    def _take(self, event: Event) -> None:
        self._news, self.told = True, self.told + 1
        self.watched.feed(event)

    def has_news(self) -> bool:
        """While nobody answers, the seconds are counted."""
        news, silent = super().has_news(), self.heard()[1] is not None
        news, self._was_silent = news or silent or self._was_silent, silent
        return news

    def _drawn(self, width: int, height: int) -> RenderableType:
        self.view.news_age = self._news_age()
        if self.browsing is None:
            return super()._drawn(width, height)
        shown = self._paused or self.watched
        shown.view.news_age = self.view.news_age
        return draw(shown, self.browsing, width, height, ascii_only=self.console.options.ascii_only, me=self._me)


def draw(
    watched: Watched, browsing: Browsing, width: int, height: int, *, ascii_only: bool = False, me: str | None = None
) -> RenderableType:
    """One frame of exactly `width` x `height` characters, the last line of which says the keys. `me`: the watcher's own peer."""
    body: RenderableType
    if browsing.view == "run":
        body = render(watched.view, width, height - 1, ascii_only=ascii_only)
    else:
        known = state(watched, watched.view.now)
        mine = browsing.view == "me"
        sheet = views.mine(known, watched.credits, me) if mine else views.sheet(browsing.view, known)
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
        line.append(f"  {HELP}", style="bright_black")
    line.truncate(width, overflow="ellipsis")
    return line
