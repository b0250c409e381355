"""Peers that we could not reach as neighbours in a chain: no plan is to put us beside them again and again.

A dial that fails for as long as a neighbour is waited for may have met a machine that was just switched off. The second one in a
row is believed: the peer is told to be *apart* from us, in our announcement (protocol/wire/announcement.py), and the planner
takes others (protocol/planning/objective.py). It may be let in later, so after a while it is tried again; each time that it fails
once more it is left alone for twice as long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from protocol.identity import short_peer
from protocol.wire.announcement import MOST_APART

FAILURES = 2
"""Dials in a row that fail until a peer counts as apart."""
APART_SECONDS = 600.0
"""How long the first time,"""
MOST_SECONDS = 6 * 3600.0
"""and at most."""
REMEMBERED = 4 * MOST_APART
"""Peers whose failures are counted."""


@dataclass(slots=True)
class _Failures:
    """Of one peer, since it was reached last."""

    dials: int = 0
    seconds: float = APART_SECONDS
    until: asyncio.TimerHandle | None = None


class Apart:
    """`announce(apart=peers)` changes what we say of ourselves, `warn` hears of each peer once, with the reason."""

    def __init__(self, announce: Callable[..., None], warn: Callable[[str], None]) -> None:
        self._announce = announce
        self._warn = warn
        self._failures: dict[str, _Failures] = {}

    @property
    def peers(self) -> tuple[str, ...]:
        """Those whom no plan should put beside us."""
        return tuple(peer for peer, failures in self._failures.items() if failures.until is not None)

    def reached(self, peer: str) -> None:
        """A dial of `peer` succeeded."""
        failures = self._failures.pop(peer, None)
        if failures is not None and failures.until is not None:
            failures.until.cancel()
            self._announce(apart=self.peers)

    def failed(self, peer: str, why: str) -> None:
        """A dial of `peer` failed as long as it could."""
        failures = self._failures.pop(peer, None) or _Failures()
        self._failures[peer] = failures  # the newest is the last
        while len(self._failures) > REMEMBERED:
            self._forget(next(iter(self._failures)))
        failures.dials += 1
        if failures.dials < FAILURES or failures.until is not None:
            return
        if len(self.peers) == MOST_APART:
            self._forget(self.peers[0])
        failures.until = asyncio.get_running_loop().call_later(failures.seconds, self._again, peer)
        self._announce(apart=self.peers)
        if failures.seconds == APART_SECONDS:
            self._warn(
                f"chain: peer {short_peer(peer)} cannot be reached: {why}; plans put it elsewhere for a while, forward this machine's"
                " port in its router, or let a bootstrap node relay"
            )

    def close(self) -> None:
        """Waits for nothing any more."""
        for peer in list(self._failures):
            self._forget(peer)

    def _forget(self, peer: str) -> None:
        failures = self._failures.pop(peer)
        if failures.until is not None:
            failures.until.cancel()

    def _again(self, peer: str) -> None:
        """The next failure counts at once."""
        failures = self._failures[peer]
        failures.until = None
        failures.seconds = min(2 * failures.seconds, MOST_SECONDS)
        self._announce(apart=self.peers)
