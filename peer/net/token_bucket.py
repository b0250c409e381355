"""Token buckets: limits of a rate and of a burst. `now` is in steady seconds."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple


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
    """A bucket of `rate` for each key. The `most` keys used last are kept; a key that was forgotten has a full bucket again."""

    def __init__(self, rate: Rate, most: int) -> None:
        self._rate = rate
        self._most = most
        self._buckets: OrderedDict[object, TokenBucket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def of(self, key: object, rate: Rate | None = None) -> TokenBucket:
        """The bucket of `key`, a new one of `rate` if that is given."""
        bucket = self._buckets.setdefault(key, TokenBucket(*(rate or self._rate)))
        self._buckets.move_to_end(key)
        if len(self._buckets) > self._most:
            self._buckets.popitem(last=False)
        return bucket
