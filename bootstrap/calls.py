"""The calls that a bootstrap node answers anybody: of the log, and of who is there. How often one asks
is bounded where its streams come in (peer/net/guests.py)."""

from __future__ import annotations

import asyncio

from bootstrap.archive import Archive
from bootstrap.roster import Heard
from bootstrap.sessions import unexpected
from peer.net.base import Transport, serve_calls
from protocol.wire import encoding, endpoints
from protocol.wire.announcement import Lookup, RosterRequest
from protocol.wire.session import LogRequest

MAX_REQUEST = 8192


class Calls:
    """Answers from the `archive` and the `roster`."""

    def __init__(self, archive: Archive, roster: Heard) -> None:
        self._archive = archive
        self._roster = roster

    async def serve(self, transport: Transport) -> None:
        """Lets others ask."""
        await serve_calls(transport, endpoints.LOG, self._log, limit=MAX_REQUEST)
        await serve_calls(transport, endpoints.ROSTER, self._who_is_there, limit=MAX_REQUEST)

    async def _log(self, remote: str, request: bytes) -> bytes:
        ask = encoding.expect(LogRequest, encoding.decode(request, remote), remote)
        return await asyncio.to_thread(self._archive.after, ask.after)

    async def _who_is_there(self, remote: str, request: bytes) -> bytes:
        ask = encoding.decode(request, remote)
        if not isinstance(ask, Lookup | RosterRequest):
            raise unexpected(remote, "roster", ask)
        return self._roster.answer(ask)
