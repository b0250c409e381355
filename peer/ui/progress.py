"""The progress of a command that takes more than two seconds: one line on the error stream, if that is a terminal."""

from __future__ import annotations

import math
import shutil
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

from peer.ui.text import duration, percent

QUIET_SECONDS = 2.0
"""Nothing is shown before."""
SHOWN_SECONDS = 0.5
"""From one drawing to the next."""
LEAST_SHARE = 0.02
"""Of the work that must be done before the time left is told."""


@dataclass(slots=True)
class Phase:
    """A part of the work. Amounts are in any unit; times are in seconds on one clock."""

    what: str
    began: float
    total: float = math.nan
    """Unknown until it is set."""
    done: Callable[[], float] = lambda: 0.0

    def text(self, now: float) -> str:
        """`replaying 120 rounds: 34 %, 1:20 min left`; without a total `reading the log: 12 s`."""
        share = self.done() / self.total if self.total > 0 else 0.0
        seconds = now - self.began
        if not share >= LEAST_SHARE:
            return f"{self.what}: {duration(seconds)}"
        share = min(share, 1.0)
        return f"{self.what}: {percent(share)}, {duration(seconds * (1 - share) / share)} left"


class Progress:
    """Shows the phase under way while the block runs, and removes the line at its end; a context manager.

    stream: default: the error stream; shown only if it is a terminal.
    now: monotonic seconds.
    """

    def __init__(self, stream: TextIO | None = None, now: Callable[[], float] = time.monotonic) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._now = now
        self._quiet_until = now() + QUIET_SECONDS
        self._phase: Phase | None = None
        self._drawn = 0
        """Characters of the line that is there."""
        self._lock = threading.Lock()
        self._over = threading.Event()
        self.is_shown = self._stream.isatty()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Progress:
        if self.is_shown:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self.is_shown:
            self._thread.join()
        self.clear()

    def begin(self, what: str, total: float = math.nan, done: Callable[[], float] = lambda: 0.0) -> None:
        """Begins a phase. `total`, `done`: the amount of its work, and what is done of it, asked by another thread."""
        with self._lock:
            self._phase = Phase(what, self._now(), total, done)

    def clear(self) -> None:
        """Removes the line, so that others can print; it comes again."""
        with self._lock:
            self._replace("")

    def draw(self) -> None:
        """Writes the line anew, once the work has taken long enough."""
        with self._lock:
            if self._phase is not None and self._now() >= self._quiet_until and not self._over.is_set():
                self._replace(self._phase.text(self._now()))

    def _run(self) -> None:
        while not self._over.wait(SHOWN_SECONDS):
            self.draw()

    def _replace(self, text: str) -> None:
        text = text[: max(0, shutil.get_terminal_size().columns - 1)]
        if text or self._drawn:
            self._stream.write("\r" + text.ljust(self._drawn) + ("" if text else "\r"))
            self._stream.flush()
        self._drawn = len(text)
