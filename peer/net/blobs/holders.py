"""What is known of the holders of blobs: how fast each was, and which are not asked for a while."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from peer.net.base import Closed, Timeout, Unreachable, now
from peer.net.lru import LruDict
from peer.net.rate_limits import Cooldown
from protocol.codec import blob_hash
from protocol.errors import RemoteError

DEPTH = (2, 64)
"""Least and most ranges that are asked of one holder ahead of time."""
SLACK_RANGES = 8
"""Asked for beyond what the link holds, as a busy holder answers later than it did at first."""
OVERDUE_SECONDS = 2.0
"""After this, plus PATIENCE times its expected time, a range is also asked of an idle holder; and, plus PATIENCE times
the time in which most holders answer, another holder besides one that has not begun to send."""
PATIENCE = 4
"""All lines are busy after a round: a peer that asked further holders sooner would have each blob sent twice."""
WAIT_SECONDS = 30.0
"""Longest time that a holder may let us wait for a blob that it is still fetching."""
NEW_SHARE = 0.2
AVOID_SECONDS = 600.0
REST_SECONDS = 30.0
"""A holder that did not answer is asked last for so long, or until it answers."""
MAX_REST_SECONDS = 480.0
"""The same, at most, for one that breaks its promises repeatedly."""
MAX_MEASURED = 512
LATELY = 16
"""Answers that count as the newest."""


class Corrupt(RemoteError):
    """A holder sent bytes that are not those of the blob."""


class Absent(RemoteError):
    """A holder does not have the blob."""


@dataclass(slots=True)
class Speed:
    """One holder's speed: seconds until the first range comes, and seconds a byte; 0: not known yet."""

    latency: float = 0.0
    seconds_per_byte: float = 0.0

    def answered(self, seconds: float) -> None:
        """Adds the seconds from asking for the first range until it came."""
        self.latency = _mean(self.latency, seconds)

    def arrived(self, seconds: float, size: int) -> None:
        """Adds the seconds in which a range of `size` bytes came."""
        self.seconds_per_byte = _mean(self.seconds_per_byte, seconds / max(size, 1))

    def expected(self, size: int) -> float:
        """Expected seconds for `size` bytes."""
        return self.latency + size * self.seconds_per_byte

    @property
    def depth(self) -> int:
        """Ranges to ask for ahead of time: 1.5 round trips' worth, and SLACK_RANGES."""
        if not self.seconds_per_byte:
            return DEPTH[0]
        ahead = SLACK_RANGES + math.ceil(1.5 * self.latency / (self.seconds_per_byte * blob_hash.RANGE_BYTES))
        return max(DEPTH[0], min(DEPTH[1], ahead))


def _mean(old: float, new: float) -> float:
    return (1 - NEW_SHARE) * old + NEW_SHARE * new if old else new


class Holders:
    """The records of holders. `warn` is called for each that sends wrong bytes."""

    def __init__(self, warn: Callable[[str], None] = lambda text: None) -> None:
        self._warn = warn
        self._speeds = LruDict[str, Speed](MAX_MEASURED)
        self._replies = deque[float](maxlen=LATELY)
        self._avoided = Cooldown(AVOID_SECONDS)
        self._silent = Cooldown(REST_SECONDS)
        self._broken = Cooldown(REST_SECONDS, MAX_REST_SECONDS, MAX_MEASURED)

    def order(self, holders: Sequence[str], size: int) -> deque[str]:
        """Returns the expected fastest first, unmeasured ones as the median, those that did not answer lately last."""
        known = sorted(s.expected(size) for p in holders if (s := self._speeds.get(p)) is not None)
        middle = known[len(known) // 2] if known else 0.0

        def expected(peer: str) -> tuple[bool, float]:
            speed = self._speeds.get(peer)
            return self.is_last(peer), middle if speed is None else speed.expected(size)

        return deque(sorted(dict.fromkeys(holders), key=expected))

    def speed(self, peer: str) -> Speed:
        """Returns the measurements of `peer`, to be continued."""
        self._speeds[peer] = speed = self._speeds.get(peer) or Speed()
        return speed

    def replied(self, seconds: float) -> None:
        """Adds the seconds from asking any holder for a blob until it said whether it is there."""
        self._replies.append(seconds)

    def patience(self) -> float:
        """Returns the seconds after which a holder that has not answered is late: most answered sooner lately."""
        usual = statistics.median_low(self._replies) if self._replies else 0.0
        return min(WAIT_SECONDS, OVERDUE_SECONDS + PATIENCE * usual)

    def is_last(self, peer: str) -> bool:
        """Returns whether it is asked after the others."""
        return self._silent.is_resting(peer, now()) or self._broken.is_resting(peer, now())

    def silent(self, peer: str) -> None:
        self._silent.begin(peer, now())

    def answered(self, peer: str) -> None:
        self._silent.end(peer)

    def gave(self, peer: str) -> None:
        self._broken.end(peer)
        self._silent.end(peer)

    def broke_promise(self, peer: str) -> None:
        """Notes that `peer` had us wait for a blob that did not come soon; after several it is asked last."""
        self._broken.begin(peer, now())

    def breaks_promises(self, peer: str) -> bool:
        """Returns whether it broke promises repeatedly, and lately."""
        return self._broken.times(peer) > 1 and self._broken.is_resting(peer, now())

    def is_avoided(self, peer: str) -> bool:
        return self._avoided.is_resting(peer, now())

    def failed(self, peer: str, error: RemoteError) -> None:
        """Notes a failure of `peer`; one that sent wrong bytes is not asked for AVOID_SECONDS."""
        if isinstance(error, Unreachable | Closed | Timeout):
            self.silent(peer)
        elif isinstance(error, Corrupt) and not self.is_avoided(peer):
            self._avoided.begin(peer, now())
            self._warn(f"{error}; it is not asked again for {AVOID_SECONDS / 60:g} minutes")


def rank(name: str, peer: str) -> bytes:
    """Orders the peers that wait for a blob (fetching.py)."""
    return hashlib.sha256(f"{name} {peer}".encode()).digest()
