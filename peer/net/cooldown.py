"""Cooldowns: keys that are not used for a while after a failure, and longer after each further one. `now` is in steady seconds."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(slots=True)
class _Rest:
    until: float = float("-inf")
    times: int = 0


class Cooldown:
    """Keys that rest: `seconds` the first time, and twice as long each further one, up to `longest` (default: no longer than the first).

    `most`: keys that are remembered; the one that began to rest longest ago is forgotten first.
    `forgiven`: seconds after a rest that make up for one time (default: only `end` does, for all of them).
    """

    def __init__(
        self, seconds: float, longest: float | None = None, most: int = 1024, forgiven: float = float("inf")
    ) -> None:
        self._seconds = seconds
        self._longest = seconds if longest is None else longest
        self._most = most
        self._forgiven = forgiven
        self._rests: OrderedDict[str, _Rest] = OrderedDict()

    def __len__(self) -> int:
        return len(self._rests)

    def is_resting(self, key: str, now: float) -> bool:
        """Whether `key` rests at `now`."""
        return key in self._rests and self._rests[key].until > now

    def times(self, key: str) -> int:
        """The number of rests of `key` that are not forgiven."""
        return self._rests[key].times if key in self._rests else 0

    def begin(self, key: str, now: float, seconds: float = 0.0) -> float:
        """Begins a rest of `key` of at least `seconds`. Returns the rest's length in seconds."""
        rest = self._rests.pop(key, None) or _Rest()
        if rest.times:
            rest.times = max(0, rest.times - int(max(0.0, now - rest.until) / self._forgiven))
        seconds = max(seconds, min(self._longest, self._seconds * 2.0 ** min(rest.times, 32)))
        rest.times += 1
        rest.until = max(rest.until, now + seconds)
        self._rests[key] = rest
        if len(self._rests) > self._most:
            self._rests.popitem(last=False)
        return seconds

    def end(self, key: str) -> None:
        """Forgets the rests of `key`, which works again: its next rest is as short as the first."""
        self._rests.pop(key, None)
