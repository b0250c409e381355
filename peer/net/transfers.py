"""What real transfers say of a line, second by second.

A line that carried more than we thought for FAST_SECONDS can carry more. Less is no evidence: mostly there is little to send, or who
receives is slow. But where sends to several peers at once wait all the time for SLOW_SECONDS, it is our uplink that is slow. And where our own limit has
held everything back for HELD_SECONDS, and nobody waited for a peer to read, the uplink may have more: a step up is tried. A line
changes seldom and plans follow what is announced, so a revision changes much or nothing, and after one down there is rest for an hour. The
downlink is never taken to be slower: who waits for bytes cannot tell whose line is slow.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

from peer.net.bandwidth import line_bps

FAST_SECONDS = 30
SLOW_SECONDS = 60
HELD_SECONDS = 60
REMEMBERED = max(FAST_SECONDS, SLOW_SECONDS, HELD_SECONDS)
"""Seconds, at most."""
FASTER, SLOWER = 1.15, 0.97
"""Times what we thought. Less is close: an uplink that peers wait for is full, and nine tenths of too much is too much."""
MOSTLY = 0.9
"""Of the seconds."""
MOST_DOWN, MOST_UP = 0.5, 2.0
"""By which one revision changes a rate at most."""
REST_SECONDS = 3600.0
RANGE = (0.25, 64.0)
"""Of the rate with which we began is what we end with, whatever others do."""


@dataclass(frozen=True, slots=True)
class Second:
    """What passed in one second between us and peers elsewhere: bytes, how many peers a send waited for at its end, and whether our own
    limit held something back then."""

    sent: int
    received: int
    waiting: int
    held: bool


class Transfers:
    """Of one line. `up_bps`, `down_bps`: bits a second, to begin with; None: somebody said so, and it stays."""

    def __init__(self, up_bps: int | None, down_bps: int | None) -> None:
        self.up_bps = up_bps
        self.down_bps = down_bps
        self._first = (up_bps, down_bps)
        self._seconds: deque[Second] = deque(maxlen=REMEMBERED)
        self._rests_until = float("-inf")

    def take(self, now: float, second: Second) -> bool:
        """Whether a rate is another one now."""
        self._seconds.append(second)
        changed = False
        if self.up_bps is not None:
            wanted = self._up(self.up_bps, now)
            if wanted is not None:
                changed, self.up_bps = True, _within(wanted, self.up_bps, self._first[0])
        if self.down_bps is not None:
            passed = self._passed(FAST_SECONDS, received=True)
            if passed > FASTER * self.down_bps:
                changed, self.down_bps = True, _within(passed, self.down_bps, self._first[1])
        if changed:
            self._seconds.clear()
        return changed

    def _up(self, known: int, now: float) -> float | None:
        """What the uplink has instead, if that follows."""
        passed = self._passed(FAST_SECONDS)
        if passed > FASTER * known:
            return passed
        if now < self._rests_until:
            return None
        slow = self._passed(SLOW_SECONDS)
        if 0 < slow < SLOWER * known and self._mostly(
            SLOW_SECONDS, [s.waiting > 1 and not s.held for s in self._seconds]
        ):
            self._rests_until = now + REST_SECONDS
            return slow
        if self._mostly(HELD_SECONDS, [s.held and not s.waiting for s in self._seconds]):
            return FASTER * known
        return None

    def _passed(self, seconds: int, received: bool = False) -> float:
        """Bits a second of the line, of the last so many seconds: the mean or the median, whichever is less, since what is sent waits in
        our own buffers at first. 0 before so many have passed."""
        if len(self._seconds) < seconds:
            return 0.0
        counts = [s.received if received else s.sent for s in list(self._seconds)[-seconds:]]
        found = min(statistics.mean(counts), statistics.median(counts))
        return line_bps(found) if found else 0.0

    def _mostly(self, seconds: int, marks: list[bool]) -> bool:
        return len(marks) >= seconds and sum(marks[-seconds:]) >= MOSTLY * seconds


def _within(wanted: float, known: int, first: int | None) -> int:
    """`wanted`, as far as one revision, and all of them, may go."""
    assert first is not None
    least, most = max(MOST_DOWN * known, RANGE[0] * first), min(MOST_UP * known, RANGE[1] * first)
    return round(min(max(wanted, least), most))
