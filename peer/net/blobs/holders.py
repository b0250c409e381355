"""Who holds blobs: how fast each holder was, and whom we do not trust for a while."""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from peer.net.base import Closed, Timeout, Unreachable, now
from peer.net.cooldown import Cooldown
from protocol.codec import blob_hash
from protocol.errors import RemoteError

DEPTH = (2, 64)
"""Least and most ranges that are asked of one holder ahead of time."""
SLACK = 8
"""Ranges that are asked for ahead of time beyond what the way holds: a holder that computes, or whose line others use, too, answers later than it
did at first. Without it fewer ranges would be under way the later they come, and come the later for it."""
SHARE = 0.2
"""Of a new measurement in the mean."""
AVOID_SECONDS = 600.0
"""How long a holder that sent wrong bytes is not asked."""
REST_SECONDS = 30.0
"""How long a holder that did not answer is asked after all others; until it answers."""
MOST_REST_SECONDS = 480.0
"""The same, at most, of one that breaks its promises again and again."""
MEASURED = 512
"""Holders whose speed is remembered."""


class Corrupt(RemoteError):
    """A holder sent bytes that are not those of the blob."""


class Absent(RemoteError):
    """A holder does not have the blob."""


@dataclass(slots=True)
class Speed:
    """Of one holder: seconds until the first range that is asked for comes, seconds per byte; 0 where it is not known yet."""

    latency: float = 0.0
    seconds_per_byte: float = 0.0

    def answered(self, seconds: float) -> None:
        """The first range came so many seconds after it was asked for."""
        self.latency = _mean(self.latency, seconds)

    def arrived(self, seconds: float, size: int) -> None:
        """A range of `size` bytes took so many seconds to come."""
        self.seconds_per_byte = _mean(self.seconds_per_byte, seconds / max(size, 1))

    def expected(self, size: int) -> float:
        """Seconds that `size` bytes will take, by what was measured."""
        return self.latency + size * self.seconds_per_byte

    @property
    def depth(self) -> int:
        """Enough ranges to fill the way there and back one and a half times, and some more."""
        ahead = (
            SLACK + math.ceil(1.5 * self.latency / (self.seconds_per_byte * blob_hash.RANGE_BYTES))
            if self.seconds_per_byte
            else 0
        )
        return max(DEPTH[0], min(DEPTH[1], ahead))


def _mean(old: float, new: float) -> float:
    return (1 - SHARE) * old + SHARE * new if old else new


class Holders:
    """What we remember of those who served us. `warn` hears of whom we do not trust any more."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._speeds: OrderedDict[str, Speed] = OrderedDict()
        self._avoided = Cooldown(AVOID_SECONDS)
        self._silent = Cooldown(REST_SECONDS)
        self._broken = Cooldown(REST_SECONDS, MOST_REST_SECONDS, MEASURED)

    def order(self, holders: Sequence[str], size: int) -> deque[str]:
        """The likely fastest first; who was not measured yet is taken to be as fast as the middle of the others. Last are those that did
        not answer lately: as long as one is away, it would cost every blob some seconds."""
        known = sorted(s.expected(size) for p in holders if (s := self._speeds.get(p)) is not None)
        middle = known[len(known) // 2] if known else 0.0

        def expected(peer: str) -> tuple[bool, float]:
            speed = self._speeds.get(peer)
            return self.is_last(peer), middle if speed is None else speed.expected(size)

        return deque(sorted(dict.fromkeys(holders), key=expected))

    def speed(self, peer: str) -> Speed:
        """What was measured of `peer`, to be gone on with."""
        self._speeds[peer] = speed = self._speeds.pop(peer, None) or Speed()
        if len(self._speeds) > MEASURED:
            self._speeds.popitem(last=False)
        return speed

    def is_last(self, peer: str) -> bool:
        """Whether it is asked after the others."""
        return self._silent.is_resting(peer, now()) or self._broken.is_resting(peer, now())

    def silent(self, peer: str) -> None:
        """`peer` does not answer, or is gone."""
        self._silent.begin(peer, now())

    def answered(self, peer: str) -> None:
        """`peer` is there."""
        self._silent.end(peer)

    def gave(self, peer: str) -> None:
        """`peer` gives what it was asked for."""
        self._broken.end(peer)
        self._silent.end(peer)

    def broke_promise(self, peer: str) -> None:
        """`peer` said that the blob was on its way, and it was not, or not soon. That happens; who does it again and again is asked after
        all others for longer each time, and not at all where others only named it."""
        self._broken.begin(peer, now())

    def breaks_promises(self, peer: str) -> bool:
        """Whether it does so again and again, and did of late."""
        return self._broken.times(peer) > 1 and self._broken.is_resting(peer, now())

    def is_avoided(self, peer: str) -> bool:
        """Whether `peer` is not asked for now."""
        return self._avoided.is_resting(peer, now())

    def failed(self, peer: str, error: RemoteError) -> None:
        """`peer` did not give what it was asked for. One that sent what cannot be is not asked for a while."""
        if isinstance(error, Unreachable | Closed | Timeout):
            self.silent(peer)
        elif isinstance(error, Corrupt) and not self.is_avoided(peer):
            self._avoided.begin(peer, now())
            self._warn(f"{error}; it is not asked again for {AVOID_SECONDS / 60:g} minutes")


def rank(name: str, peer: str) -> bytes:
    """Where `peer` stands in the order of those who wait for a blob."""
    return hashlib.sha256(f"{name} {peer}".encode()).digest()
