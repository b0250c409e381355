"""Which view of a run its watcher looks at, and what his keys change. Pure."""

from __future__ import annotations

from dataclasses import dataclass

VIEWS = ("run", "chains", "rounds", "credits", "health", "me")
"""In the order of their keys, 1 to 6."""
HELP = "/ filter p pause q quit"
"""With the views it fits into 80 characters; arrows and page keys scroll."""
_MOST_PATTERN = 40
_STEPS = {"\x1b[A": -1, "k": -1, "\x1b[B": 1, "j": 1, "\x1b[5~": -15, "\x1b[6~": 15}
"""Lines by which a key scrolls: arrows, j and k, page up and down."""


@dataclass(slots=True)
class Browsing:
    """`skip`: lines that were scrolled away; `pattern`: rows without it are not shown; `typing`: keys go into it."""

    view: str = VIEWS[0]
    skip: int = 0
    pattern: str = ""
    typing: bool = False
    paused: bool = False
    left: bool = False
    """Whether he has had enough."""

    def press(self, key: str) -> None:
        """A key: a character, or an escape sequence as a terminal sends it."""
        if self.typing:
            self._type(key)
        elif key in _STEPS:
            self.skip = max(0, self.skip + _STEPS[key])
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
        elif len(key) == 1 and key.isprintable() and len(self.pattern) < _MOST_PATTERN:
            self.pattern += key
