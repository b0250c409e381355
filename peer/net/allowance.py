"""How often something may be done: a token bucket."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Allowance:
    """`per_second` on average and `burst` at once. A new one is full."""

    per_second: float
    burst: float
    left: float = float("inf")
    at: float = 0.0

    def take(self, now: float, amount: float = 1.0) -> bool:
        """Whether so many more are allowed at `now`, in steady seconds."""
        self.left = min(self.burst, self.left + (now - self.at) * self.per_second)
        self.at = now
        if self.left < amount:
            return False
        self.left -= amount
        return True
