"""What `potluck doctor` looks at, what it says of that, and the time that it has. Known to the command and to the process that looks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

GOOD, WARNING, BAD, UNKNOWN = "good", "warning", "bad", "unknown"
MARKS = {GOOD: "✓", WARNING: "!", BAD: "✗", UNKNOWN: "?"}

HERE = ("python", "torch", "open files", "memory", "port", "disk")
"""What is looked at of this machine, in this order;"""
THERE = ("run", "reach", "clock", "line", "speed", "role")
"""and then of its place in a run, where one is named."""
NOT_NEEDED = ("speed", "role")
"""Joining works, whatever these are."""

WITHIN_SECONDS = 45.0
"""That all of it may take, unless told otherwise: with GRACE_SECONDS, and the start of the command itself, less than a minute."""
GRACE_SECONDS = 5.0
"""That looking may go on when its time is over, to end what it began. It is killed then."""
OUT_OF_TIME = 75
"""Exit code of who looks, when the time was over before it was done."""
LONGER = 300
"""Seconds that are advised where the time was too short."""


@dataclass(frozen=True, slots=True)
class Finding:
    """`state`: GOOD, WARNING, BAD, with which joining would not work, or UNKNOWN, where nobody can say whether it would; `text` says what was
    found, `remedy` what to do; empty where nothing is to be done."""

    about: str
    state: str
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{MARKS[self.state]} {self.about}: {self.text}" + (f"; {self.remedy}" if self.remedy else "")


Find = Callable[[Finding], None]


@dataclass(frozen=True, slots=True)
class Time:
    """The one owner of the time: all is over at `until`, by the steady clock, which is the same one in all processes of a machine."""

    until: float

    @classmethod
    def of(cls, seconds: float) -> Time:
        """So many, from now on."""
        return cls(time.monotonic() + seconds)

    def left(self, but: float = 0.0) -> float:
        """Seconds that a step may take which leaves so many to those after it."""
        return max(0.0, self.until - but - time.monotonic())


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What was typed; see `potluck doctor --help`."""

    run: str | None
    folder: str
    host: str
    port: int
    device: str
    devices: str | None
    memory: str
    threads: int
    within: float
    json: bool


def not_looked_at(steps: tuple[str, ...], within: float) -> list[Finding]:
    """Of the steps that are not done when the time is over, the first of which was under way."""
    remedy = f"try again when this machine has less to do, or give it more time (--within {LONGER})"
    under_way, never = f"it was still looked at when {within:g} s were over", f"not looked at: {within:g} s were over"
    return [
        Finding(step, WARNING if step in NOT_NEEDED else UNKNOWN, never if i else under_way, remedy)
        for i, step in enumerate(steps)
    ]
