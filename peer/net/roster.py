"""Asks bootstrap nodes who is there (protocol/wire/announcement.py). Announcements are believed for their peers' signatures only."""

from __future__ import annotations

from collections.abc import Sequence

from peer.net.base import Transport, call
from protocol.errors import RemoteError
from protocol.identity import short_peer
from protocol.wire import encoding, endpoints
from protocol.wire.announcement import Announcement, Lookup, Roster, RosterRequest

CALL_SECONDS = 10.0
MOST_PEERS = 32_768
"""That are kept of what one node tells."""
_PAGES = 256
"""That are read at once; more are for the next time."""


async def ask(transport: Transport, node: str, request: Lookup | RosterRequest) -> Roster:
    """A node's answer. Raises RemoteError, TransportLost."""
    raw = await call(
        transport,
        node,
        endpoints.ROSTER,
        encoding.encode(request),
        timeout=CALL_SECONDS,
        limit=endpoints.ROSTER_REPLY + 1024,
    )
    return encoding.expect(Roster, encoding.decode(raw, node), node)


async def look_up(
    transport: Transport, run: str, node: str, peers: Sequence[str] = (), sample: int = 0
) -> dict[str, Announcement]:
    """What `node` knows of `peers`, and of so many others, by peer id. Raises RemoteError, TransportLost."""
    reply = await ask(transport, node, Lookup(peers=tuple(peers), sample=sample))
    return {found.peer: found for raw in reply.announcements if (found := believed(raw, run)) is not None}


def believed(raw: bytes, run: str) -> Announcement | None:
    """The announcement in an envelope, or None where it is none of `run` signed by its peer."""
    try:
        peer, message = encoding.unseal(raw)
    except encoding.MessageError:
        return None
    if not isinstance(message, Announcement) or message.peer != peer or message.run != run:
        return None
    return message


class RosterReader:
    """Everybody whom a bootstrap node knows, kept up to date by what has changed since. `known`: by peer id, as of the last answer."""

    def __init__(self, transport: Transport, run: str) -> None:
        self.known: dict[str, Announcement] = {}
        self._transport = transport
        self._run = run
        self._node = ""
        self._position = -1

    async def refresh(self, nodes: Sequence[str]) -> None:
        """Reads what is new from the first of `nodes` that answers. Raises RemoteError where none does, TransportLost."""
        last = RemoteError("nobody", "roster: no bootstrap node to ask; check the manifest")
        for node in nodes:
            try:
                return await self._read(node)
            except RemoteError as error:
                last = error
        raise last

    async def _read(self, node: str) -> None:
        for _ in range(_PAGES):
            position = self._position if node == self._node else -1
            reply = await ask(self._transport, node, RosterRequest(position=position))
            if reply.more and reply.position <= position:
                raise RemoteError(node, f"roster of {short_peer(node)}: does not end; another is asked")
            if reply.anew or node != self._node:
                self.known.clear()
            self._node, self._position = node, reply.position
            for peer in reply.gone:
                self.known.pop(peer, None)
            for raw in reply.announcements:
                found = believed(raw, self._run)
                if found is not None and (found.peer in self.known or len(self.known) < MOST_PEERS):
                    self.known[found.peer] = found
            if not reply.more:
                return
