"""Who is there, as far as peers have announced themselves in their sessions with this node, and what others are told of it.

Nothing remote decides what this costs: a peer is heard as often as its allowance says, all peers together as often as this
node's does, an announcement is small, and only those of peers with sessions are kept. A newer one never gives way to an older one.
"""

from __future__ import annotations

import itertools
import random
from collections import OrderedDict, deque

from peer.net.base import MAX_RECORD
from protocol.wire import encoding, endpoints
from protocol.wire.announcement import MOST_LOOKED_UP, Announcement, Lookup, Roster, RosterRequest

GONE = 4096
"""Peers that have gone of which we still tell."""
_OVERHEAD = 96
"""Bytes of an entry of an answer besides its announcement, at most: a peer id and heads."""


class Heard:
    """The newest announcement of each peer, in the order in which they came. `position`: where the count of changes begins; later
    than where any node of this name was before, so that nobody takes our numbers for another's."""

    def __init__(self, run: str, position: int) -> None:
        self._run = run
        self._begin = self._position = position
        self._known: OrderedDict[str, tuple[int, int, bytes]] = OrderedDict()
        self._gone: deque[tuple[int, str]] = deque()

    def __contains__(self, peer: str) -> bool:
        return peer in self._known

    def __len__(self) -> int:
        return len(self._known)

    def take(self, peer: str, raw: bytes) -> Announcement | None:
        """`peer` says this of itself. None where it is no announcement of this run by `peer`, or not newer than what is known."""
        if len(raw) > MAX_RECORD:
            return None
        found = encoding.unseal_announcement(raw, peer, self._run)
        if found is None or found.serial <= self._known.get(peer, (0, -1, b""))[1]:
            return None
        self._position += 1
        self._known[peer] = (self._position, found.serial, raw)
        self._known.move_to_end(peer)
        return found

    def find(self, peer: str) -> Announcement | None:
        """The newest announcement of `peer`."""
        known = self._known.get(peer)
        return None if known is None else encoding.unseal_announcement(known[2], peer, self._run)

    def remove(self, peer: str) -> None:
        """`peer` has gone."""
        if self._known.pop(peer, None) is not None:
            self._position += 1
            self._gone.append((self._position, peer))
            if len(self._gone) > GONE:
                self._begin, _ = self._gone.popleft()

    def answer(self, request: Lookup | RosterRequest) -> bytes:
        """The reply to a call, at most ROSTER_REPLY bytes."""
        reply = self._look_up(request) if isinstance(request, Lookup) else self._since(request.position)
        return encoding.encode(reply)

    def _look_up(self, request: Lookup) -> Roster:
        names = list(dict.fromkeys(p for p in request.peers[:MOST_LOOKED_UP] if p in self._known))
        by_chance = min(request.sample, MOST_LOOKED_UP - len(names), len(self._known))
        if by_chance > 0:
            names += random.sample(list(self._known), by_chance)
        return Roster(announcements=tuple(self._known[p][2] for p in dict.fromkeys(names)))

    def _since(self, position: int) -> Roster:
        anew = not self._begin <= position <= self._position
        position = -1 if anew else position
        changes: list[tuple[int, str, bytes]] = []
        for peer, (at, _, raw) in reversed(self._known.items()):
            if at <= position:
                break
            changes.append((at, peer, raw))
        if not anew:
            newest = itertools.takewhile(lambda gone: gone[0] > position, reversed(self._gone))
            changes += [(at, peer, b"") for at, peer in newest]
        changes.sort()
        size, fit = _OVERHEAD, 0
        for _, _, raw in changes:
            size += _OVERHEAD + len(raw)
            if size > endpoints.ROSTER_REPLY:
                break
            fit += 1
        told, more = changes[:fit], fit < len(changes)
        return Roster(
            announcements=tuple(raw for _, _, raw in told if raw),
            gone=tuple(peer for _, peer, raw in told if not raw),
            position=told[-1][0] if more else self._position,
            more=more,
            anew=anew,
        )
