"""The hours of the day in which a peer trains. Pure.

They are those of the clock on the wall, whatever it does: in the night in which it is put back, what is between two and three may come
twice, and in the one in which it is put forward, not at all.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, tzinfo

from protocol.errors import UsageError

DAY = 24 * 60


@dataclass(frozen=True, slots=True)
class Hours:
    """From minute `begin` of the day up to minute `end`, which may be of the next day."""

    begin: int
    end: int

    def has(self, wall: float, zone: tzinfo | None = None) -> bool:
        """Whether the moment `wall` (seconds since 1970) is among them, in `zone` (default: this machine's)."""
        local = datetime.fromtimestamp(wall, zone)
        minute = 60 * local.hour + local.minute
        if self.begin < self.end:
            return self.begin <= minute < self.end
        return minute >= self.begin or minute < self.end

    def __str__(self) -> str:
        return f"{_shown(self.begin)}-{_shown(self.end)}"


def parse(text: str) -> Hours:
    """What was typed as `22-7` or `22:30-7:15`; 0-24 is always. Raises UsageError."""
    found = re.fullmatch(r"(\d\d?)(?::(\d\d))?-(\d\d?)(?::(\d\d))?", text, re.ASCII)
    if found is None:
        raise UsageError(f"--hours {text}: not understood; give such as 22-7, or 22:30-7:15")
    begin, end = (60 * int(found[i]) + int(found[i + 1] or 0) for i in (1, 3))
    if begin >= DAY or end > DAY or any(int(found[i] or 0) > 59 for i in (2, 4)):
        raise UsageError(f"--hours {text}: a day has no such hour; give such as 22-7, or 22:30-7:15")
    if begin == end:
        raise UsageError(f"--hours {text}: begins when it ends; leave it out to train always")
    return Hours(begin, end)


def _shown(minute: int) -> str:
    return f"{minute // 60:02}:{minute % 60:02}"
