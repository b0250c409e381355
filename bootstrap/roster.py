"""The announcements of the peers that have a session with this node, and the answers to questions about them.

Its cost is bounded: announcements are small and limited in rate, for each peer and for all together, and only those
of peers with sessions are kept. An older announcement never replaces a newer one.
"""

from __future__ import annotations

import itertools
import random
from collections import OrderedDict, deque

from peer.net.base import MAX_RECORD
from protocol.wire import encoding, endpoints
from protocol.wire.announcement import MOST_LOOKED_UP, Announcement, Lookup, Roster, RosterRequest

MAX_GONE = 4096
_ENTRY_BYTES = 96
"""Most bytes of an entry of an answer besides its announcement: a peer id and heads."""


class AnnouncementTable:
    """The newest announcement of each peer, in order of arrival.

    position: where the count of changes begins; later than any position of this node in an earlier life
    """

    def __init__(self, run: str, position: int) -> None:
        self._run = run
        self._begin = self._position = position
        self._known: OrderedDict[str, tuple[int, int, bytes]] = OrderedDict()
        self._gone: deque[tuple[int, str]] = deque()

    def __contains__(self, peer: str) -> bool:
        return peer in self._known

    def __len__(self) -> int:
        return len(self._known)

    def add(self, peer: str, raw: bytes) -> Announcement | None:
        """Keeps a sealed announcement. Returns None if it is not one of this run by `peer`, or not newer."""
        if len(raw) > MAX_RECORD:
            return None
        found = encoding.unseal_announcement(raw, peer, self._run)
        if found is None or found.serial <= self._known.get(peer, (0, -1, b""))[1]:
            return None
        self._position += 1
        self._known[peer] = (self._position, found.serial, raw)
        self._known.move_to_end(peer)
        return found

    def remove(self, peer: str) -> None:
        if self._known.pop(peer, None) is not None:
            self._position += 1
            self._gone.append((self._position, peer))
            if len(self._gone) > MAX_GONE:
                self._begin, _ = self._gone.popleft()

    def answer(self, request: Lookup | RosterRequest) -> bytes:
        """Returns the reply to a call, at most ROSTER_REPLY bytes."""
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
        size, fit = _ENTRY_BYTES, 0
        for _, _, raw in changes:
            size += _ENTRY_BYTES + len(raw)
            if size > endpoints.ROSTER_REPLY:
                break
            fit += 1
        sent, more = changes[:fit], fit < len(changes)
        return Roster(
            announcements=tuple(raw for _, _, raw in sent if raw),
            gone=tuple(peer for _, peer, raw in sent if not raw),
            position=sent[-1][0] if more else self._position,
            more=more,
            anew=anew,
        )
