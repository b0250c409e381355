"""Who got what from us: so that it is sent a few times, and the others are told who has it."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

SPREAD_SECONDS = 300.0
"""How long after the last request for a blob we remember who got it."""
SPREAD_BLOBS = 4096
NAMED_AT_ONCE = 8
"""Peers that one answer names."""


@dataclass(slots=True)
class _Spread:
    """One blob: bytes sent, bytes promised to open streams, and who got some."""

    asked_at: float
    sent: int = 0
    promised: int = 0
    receivers: dict[str, None] = field(default_factory=dict)
    turns: int = 0


class Spreading:
    """Who got which blob, or range of one, from us; each is sent about `copies` times. `most` of them are remembered, `seconds` after the last
    request."""

    def __init__(self, copies: int, most: int = SPREAD_BLOBS, seconds: float = SPREAD_SECONDS) -> None:
        self._copies = copies
        self._most = most
        self._seconds = seconds
        self._blobs: OrderedDict[str, _Spread] = OrderedDict()

    def admit(self, name: str, size: int, peer: str, insist: bool, now: float) -> list[str] | None:
        """None where `peer` is to be served, else the peers to ask instead."""
        spread = self._blobs.pop(name, None)
        if spread is None or (now - spread.asked_at > self._seconds and not spread.promised):
            spread = _Spread(now)
        spread.asked_at = now
        self._blobs[name] = spread
        if len(self._blobs) > self._most:
            self._blobs.popitem(last=False)
        others = [p for p in spread.receivers if p != peer]
        if others and not insist and spread.sent + spread.promised + size > self._copies * size:
            spread.turns += 1
            start = spread.turns % len(others)
            return (others[start:] + others[:start])[:NAMED_AT_ONCE]
        spread.promised += size
        spread.receivers[peer] = None
        return None

    def done(self, name: str, size: int, peer: str, sent: int) -> None:
        """An admitted peer's stream is over, after `sent` bytes."""
        spread = self._blobs.get(name)
        if spread is not None:
            spread.promised -= size
            spread.sent += sent
            if not sent:
                spread.receivers.pop(peer, None)
