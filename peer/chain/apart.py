"""Peers that we could not reach as neighbours in a chain: no plan is to put us beside them again and again.

A dial that fails for as long as a neighbour is waited for may have met a machine that was just switched off. The second one in a
row is believed: the peer is told to be *apart* from us, in our announcement (protocol/wire/announcement.py), and the planner
takes others (protocol/planning/objective.py). It may be let in later, so after a while it is tried again; each time that it fails
once more it is left alone for twice as long.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable

from peer.net.rate_limits import Cooldown
from protocol.identity import short_peer
from protocol.wire.announcement import MOST_APART

APART_SECONDS = 600.0
"""How long a peer counts as apart the first time,"""
MOST_SECONDS = 6 * 3600.0
"""and at most."""
REMEMBERED = 4 * MOST_APART
"""Peers whose failures are remembered."""


class Apart:
    """`announce(apart=peers)` changes what we say of ourselves, `warn` hears of each peer once, with the reason."""

    def __init__(self, announce: Callable[..., None], warn: Callable[[str], None]) -> None:
        self._announce = announce
        self._warn = warn
        self._failed: OrderedDict[str, None] = OrderedDict()  # those whose last dial failed
        self._cooldown = Cooldown(APART_SECONDS, MOST_SECONDS, REMEMBERED)
        self._apart: dict[str, asyncio.TimerHandle] = {}

    @property
    def peers(self) -> tuple[str, ...]:
        """Those whom no plan should put beside us."""
        return tuple(self._apart)

    def reached(self, peer: str) -> None:
        """A dial of `peer` succeeded."""
        self._failed.pop(peer, None)
        self._cooldown.end(peer)
        if peer in self._apart:
            self._join(peer)

    def failed(self, peer: str, why: str) -> None:
        """A dial of `peer` failed as long as it could."""
        known = peer in self._failed
        self._failed[peer] = None
        self._failed.move_to_end(peer)
        if len(self._failed) > REMEMBERED:
            self._failed.popitem(last=False)
        if not known or peer in self._apart:
            return
        if len(self._apart) == MOST_APART:
            self._apart.pop(self.peers[0]).cancel()
        loop = asyncio.get_running_loop()
        seconds = self._cooldown.begin(peer, loop.time())
        self._apart[peer] = loop.call_later(seconds, self._join, peer)
        self._announce(apart=self.peers)
        if self._cooldown.times(peer) == 1:
            self._warn(
                f"chain: peer {short_peer(peer)} cannot be reached: {why}; plans put it elsewhere for a while, forward this machine's"
                " port in its router, or let a bootstrap node relay"
            )

    def close(self) -> None:
        """Waits for nothing any more."""
        for timer in self._apart.values():
            timer.cancel()
        self._apart.clear()

    def _join(self, peer: str) -> None:
        """It may be a neighbour again; the next failure counts at once."""
        self._apart.pop(peer).cancel()
        self._announce(apart=self.peers)
