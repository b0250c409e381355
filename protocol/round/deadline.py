"""When a volunteer's training of a round ends: so early that its offer is there in time. Pure; a part of its machine (protocol/round/member.py)."""

from __future__ import annotations

from protocol.round import grace
from protocol.run.manifest import Manifest
from protocol.wire.session import Offer

FORGIVEN = 0.75
"""Of the seconds by which a peer was asked to finish earlier than it would have, those that the next round ends earlier by."""
COPIES = 2
"""A payload leaves its sender so many times (docs/protocol.md, Blobs)."""


class Deadline:
    """All times are seconds on the clock of who asks. `up_bps`: bits a second that offers leave with, 0 where that is unknown."""

    def __init__(self, manifest: Manifest, up_bps: int) -> None:
        self.up_bps = up_bps
        self.began = 0.0
        """When the newest commit was heard of, and so the round after it."""
        self._seconds = manifest.timing.training_seconds
        self._trained_at = self._lead = 0.0
        self._ends = self._late = 0.0

    def measured(self, up_bps: int) -> None:
        """Offers leave with so many bits a second from now on."""
        self.up_bps = up_bps

    def left(self, now: float) -> float:
        """Seconds from now on to train in the round that is under way. On a slow line commits come late; by how much shows when we are
        asked to finish."""
        self._late *= FORGIVEN
        self._ends = max(now, self.began + self._seconds - min(self._lead + self._late, self._seconds / 2))
        return self._ends - now

    def left_of(self, now: float, seconds: float, size: int) -> float:
        """The same for who came within the round, of whose time so many `seconds` are left. It has sent nothing yet; others' offers have
        `size` bytes. A seat is hardly waited for (protocol/round/seats.py): its last inner step ends before the time is over."""
        self.began = now - max(0.0, self._seconds - seconds)
        self._lead = max(self._lead, self._upload_seconds(size))
        return max(0.0, self.left(now) - grace.OVERRUN * self._seconds)

    def asked(self, now: float) -> None:
        """We are asked to finish now."""
        self._late += max(0.0, self._ends - now)
        self._ends = now

    def trained(self, now: float) -> None:
        """The last inner step is done."""
        self._trained_at = now

    def encoded(self, now: float, offer: Offer) -> None:
        """The offer is ready to leave."""
        self._lead = now - self._trained_at + self._upload_seconds(sum(part.size for part in offer.parts))

    def _upload_seconds(self, size: int) -> float:
        """Until an archive has so many bytes: an uplink sends each COPIES times."""
        return COPIES * 8 * size / self.up_bps if self.up_bps else 0.0
