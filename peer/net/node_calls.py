"""Calls to bootstrap nodes: for the roster (protocol/wire/announcement.py), the log, and the operators' decrees."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence

from peer.net import compression
from peer.net.base import Transport, call, cancel
from protocol.errors import RemoteError
from protocol.identity import short_peer
from protocol.wire import encoding, endpoints, framing
from protocol.wire.announcement import Announcement, Lookup, Roster, RosterRequest
from protocol.wire.decree import Motion, Motions
from protocol.wire.session import LogRequest

CALL_SECONDS = 10.0
NEXT_SECONDS = 1.0
"""After which another node is asked besides, where one has not answered: it may just have died."""


async def ask_in_turn(nodes: Iterable[str], ask: Callable[[str], Awaitable[bool]]) -> None:
    """Asks nodes in turn until `ask` returns true; a slow one does not delay the next. Raises what `ask` raises."""
    left, asked = list(nodes), set[asyncio.Task[bool]]()
    try:
        while left or asked:
            if left:
                asked.add(asyncio.ensure_future(ask(left.pop(0))))
            done, asked = await asyncio.wait(
                asked, timeout=NEXT_SECONDS if left else None, return_when=asyncio.FIRST_COMPLETED
            )
            if any(task.result() for task in done):
                return
    finally:
        await cancel(*asked)


async def log_page(transport: Transport, node: str, after: int, seconds: float = CALL_SECONDS) -> list[bytes]:
    """Returns a page of the records after round `after`, none at the end of the log. Raises RemoteError."""
    request = encoding.encode(LogRequest(after=after))
    reply = await call(transport, node, endpoints.LOG, request, timeout=seconds, limit=framing.MAX_MESSAGE)
    try:
        found = framing.unpack_message(compression.unpack(reply, framing.MAX_MESSAGE), values=MOST_RECORDS)
    except (framing.FrameError, compression.Malformed) as error:
        raise RemoteError(node, f"log of {short_peer(node)}: {error}; ask another bootstrap node") from None
    if not isinstance(found, list) or not all(isinstance(raw, bytes) for raw in found):
        raise RemoteError(node, f"log of {short_peer(node)}: not a list of commits; ask another bootstrap node")
    return found


async def send_motion(transport: Transport, node: str, motion: Motion) -> Motions:
    """A node's answer. Raises RemoteError."""
    raw = await call(transport, node, endpoints.DECREES, encoding.encode(motion), timeout=CALL_SECONDS)
    try:
        return encoding.decode(raw, node, Motions)
    except RemoteError as error:
        raise RemoteError(node, f"{error}; is it of the same version?") from None


async def ask_operators(transport: Transport, node: str) -> Motions:
    """Returns the run's operators as that node names them, without a motion. Raises RemoteError."""
    return await send_motion(transport, node, Motion())


MOST_RECORDS = endpoints.LOG_REPLY // 64
"""In a page of the log: no record is shorter than a signature."""
MOST_PEERS = 32_768
"""That are kept of what one node tells."""
_PAGES = 256
"""That are read at once; more are for the next time."""


async def ask_roster(transport: Transport, node: str, request: Lookup | RosterRequest) -> Roster:
    """A node's answer. Raises RemoteError, TransportLost."""
    raw = await call(
        transport,
        node,
        endpoints.ROSTER,
        encoding.encode(request),
        timeout=CALL_SECONDS,
        limit=endpoints.ROSTER_REPLY + 1024,
    )
    return encoding.decode(raw, node, Roster)


async def look_up_peers(
    transport: Transport, run: str, node: str, peers: Sequence[str] = (), sample: int = 0
) -> dict[str, Announcement]:
    """Returns `node`'s announcements of `peers` and of `sample` others, by id. Raises RemoteError, TransportLost."""
    reply = await ask_roster(transport, node, Lookup(peers=tuple(peers), sample=sample))
    return {
        found.peer: found
        for raw in reply.announcements[: len(peers) + sample]
        if (found := encoding.unseal_announcement(raw, None, run)) is not None
    }


class RosterReader:
    """Follows a bootstrap node's roster by its changes. `known`: the announcements, by peer id."""

    def __init__(self, transport: Transport, run: str) -> None:
        self.known: dict[str, Announcement] = {}
        self._transport = transport
        self._run = run
        self._node = ""
        self._position = -1

    async def refresh(self, nodes: Sequence[str]) -> None:
        """Reads the changes from the first of `nodes` that answers. Raises RemoteError if none does, TransportLost."""
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
            reply = await ask_roster(self._transport, node, RosterRequest(position=position))
            if reply.more and reply.position <= position:
                raise RemoteError(node, f"roster of {short_peer(node)}: does not end; another is asked")
            if reply.anew or node != self._node:
                self.known.clear()
            self._node, self._position = node, reply.position
            for peer in reply.gone:
                self.known.pop(peer, None)
            for raw in reply.announcements:
                found = encoding.unseal_announcement(raw, None, self._run)
                if found is not None and (found.peer in self.known or len(self.known) < MOST_PEERS):
                    self.known[found.peer] = found
            if not reply.more:
                return
