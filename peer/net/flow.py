"""What passes between us and one peer, as far as it tells how long the peer may take to answer.

A question waits behind what we have sent before it: in the system's buffers, in the daemon's and at a narrow uplink may be many
megabytes. What may still be under way is a bucket that fills with what is sent and empties at the pace of a slow link.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from peer.net.token_bucket import TokenBucket

SLOW_BYTES_PER_SECOND = 125_000.0
ASK_SECONDS = 1.0
"""How often a peer is asked whether it is there, at most: what it does, or does not, must not cost us much."""
LONGEST_SECONDS = 30.0
"""Of waiting for what is under way; by then libp2p finds out by itself."""


@dataclass(slots=True)
class Flow:
    """All streams with one peer. `received`: bytes that came so far."""

    streams: int = 0
    received: int = 0
    _under_way: TokenBucket = field(default_factory=lambda: TokenBucket(SLOW_BYTES_PER_SECOND, 0.0))
    _asks: TokenBucket = field(default_factory=lambda: TokenBucket(1 / ASK_SECONDS, 1.0))

    def ask_in(self, now: float) -> float:
        """In how many seconds the peer may be asked again; 0: it is, at `now`."""
        return 0.0 if self._asks.take(now) else self._asks.wait(now, 1.0)

    def sent(self, size: int, now: float) -> None:
        """So many bytes were handed to the daemon at `now`, in steady seconds."""
        self._under_way.spend(now, size)

    def queue_seconds(self, now: float) -> float:
        """For how long what was sent may keep a slow link busy."""
        return min(LONGEST_SECONDS, self._under_way.wait(now))
