"""Rate limits: token buckets, and cooldowns after failures. `now` is in steady seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from peer.net.lru import LruDict


class Rate(NamedTuple):
    """`per_second` on average, and `burst` at once."""

    per_second: float
    burst: float


@dataclass(slots=True)
class TokenBucket:
    """A bucket of at most `burst` tokens that gains `per_second` each second. A new one is full."""

    per_second: float
    burst: float
    left: float = float("inf")
    at: float = 0.0

    def take(self, now: float, amount: float = 1.0) -> bool:
        """Takes `amount` if the bucket has it. Returns whether it had."""
        if self.wait(now, amount) > 0:
            return False
        self.left -= amount
        return True

    def spend(self, now: float, amount: float = 1.0) -> float:
        """Takes `amount`, also more than the bucket has. Returns the seconds until that debt is paid."""
        self.wait(now)
        self.left -= amount
        return self.wait(now)

    def wait(self, now: float, amount: float = 0.0) -> float:
        """Returns the seconds until the bucket has `amount`."""
        self.left = min(self.burst, self.left + max(0.0, now - self.at) * self.per_second)
        self.at = now
        return max(0.0, amount - self.left) / self.per_second


class TokenBuckets:
    """A bucket of `rate` for each key. The `most` keys used last are kept; a forgotten one starts full again."""

    def __init__(self, rate: Rate, most: int) -> None:
        self._rate = rate
        self._buckets = LruDict[object, TokenBucket](most)

    def __len__(self) -> int:
        return len(self._buckets)

    def of(self, key: object, rate: Rate | None = None) -> TokenBucket:
        """The bucket of `key`, a new one of `rate` if that is given."""
        self._buckets[key] = bucket = self._buckets.get(key) or TokenBucket(*(rate or self._rate))
        return bucket


@dataclass(slots=True)
class _Rest:
    until: float = float("-inf")
    times: int = 0


class Cooldown:
    """Keys that rest after a failure, and longer after each further one.

    seconds: of the first rest; each further one is twice as long
    longest: of a rest (default: as the first)
    most: keys that are remembered; the one that began to rest longest ago is forgotten first
    forgiven: seconds after a rest that make up for one (default: only `end` does, for all)
    """

    def __init__(
        self, seconds: float, longest: float | None = None, most: int = 1024, forgiven: float = float("inf")
    ) -> None:
        self._seconds = seconds
        self._longest = seconds if longest is None else longest
        self._forgiven = forgiven
        self._rests = LruDict[str, _Rest](most)

    def __len__(self) -> int:
        return len(self._rests)

    def is_resting(self, key: str, now: float) -> bool:
        return key in self._rests and self._rests[key].until > now

    def times(self, key: str) -> int:
        """The number of rests of `key` that are not forgiven."""
        return self._rests[key].times if key in self._rests else 0

    def begin(self, key: str, now: float, seconds: float = 0.0) -> float:
        """Begins a rest of `key` of at least `seconds`. Returns the rest's length in seconds."""
        self._rests[key] = rest = self._rests.get(key) or _Rest()
        if rest.times:
            rest.times = max(0, rest.times - int(max(0.0, now - rest.until) / self._forgiven))
        seconds = max(seconds, min(self._longest, self._seconds * 2.0 ** min(rest.times, 32)))
        rest.times += 1
        rest.until = max(rest.until, now + seconds)
        return seconds

    def end(self, key: str) -> None:
        """Forgets the rests of `key`, which works again: its next rest is as short as the first."""
        self._rests.pop(key, None)
