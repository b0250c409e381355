"""Single ranges of large blobs, from whoever has some of them: the text of a run, of which a peer reads a small part.

On a stream of blobs (peer/net/blobs/serving.py), as often as wanted:

    -> {"blob": name, "size": bytes, "ranges": [numbers, at most MOST], "insist": bool}
    <- for each number, in that order: {"data": the range, empty where it is not given, "ask": [peers that got it from us]}

The number LEAVES stands for the digests of the blob's ranges. Who has none of the blob answers as who has others of its ranges. A range that is
on its way here is waited for.

*Spreading.* Each range is given about `copies` times; whoever asks then is told who got it. So an operator sends a range about twice,
however many peers read it. Who finds it nowhere else may insist.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from peer.net.base import Closed, Stream, Transport, answer
from peer.net.blobs.idle import IdleStreams
from peer.net.blobs.spreading import Spreading
from peer.net.uplink import Uplink
from protocol.codec import blob_hash
from protocol.errors import RemoteError
from protocol.identity import short_peer
from protocol.wire import endpoints, framing
from protocol.wire.encoding import MessageError

LEAVES = -1
MOST = 64
"""Ranges of one request."""
COPIES = 2
"""How often a range is given."""
REMEMBERED = 16384
"""Ranges of which we know who got them; 512 MiB."""
REMEMBERED_SECONDS = 6 * 3600.0
NAMED = 4
"""Peers that are asked of those that one answer names."""
HEAD_BYTES = 1024
"""Of an answer, beside the range."""


class Ranges(Protocol):
    """A blob of `size` bytes of which some ranges are here."""

    async def read(self, index: int) -> bytes:
        """Range `index`, or the leaves; empty where it is not here. It is right: an honest peer's disk must not get it blamed."""
        ...


Find = Callable[[str, int], Awaitable[Ranges | None]]
"""(name, size) -> what is here of that blob."""


async def nothing(name: str, size: int) -> Ranges | None:
    """Where no ranges are served."""
    return None


class RangeServer:
    """Answers requests for ranges. `is_there(peer)`: whether it is worth while to send others to it."""

    def __init__(
        self, find: Find, uplink: Uplink, *, copies: int = COPIES, is_there: Callable[[str], bool] = lambda peer: True
    ) -> None:
        self._find = find
        self._uplink = uplink
        self._is_there = is_there
        self._spreading = Spreading(copies, REMEMBERED, REMEMBERED_SECONDS)

    async def answer(self, stream: Stream, name: str, request: Mapping[str, object]) -> None:
        """Gives what one request asks for. Raises MessageError for one that makes no sense."""
        size, indices, peer = request.get("size"), request.get("ranges"), stream.remote
        if (
            not isinstance(size, int)
            or not 0 <= size <= blob_hash.MAX_BLOB
            or not isinstance(indices, list)
            or len(indices) > MOST
            or not all(isinstance(i, int) and LEAVES <= i < blob_hash.count(size) for i in indices)
        ):
            raise MessageError(peer, f"blobs for {short_peer(peer)}: asks for no ranges; it was closed")
        stream.costs(len(indices) / 4)
        found, insist = await self._find(name, size), request.get("insist") is True
        for index in indices:
            data, others = b"", list[str]()
            if found is not None:
                data, others = await self._give(found, name, size, index, peer, insist)
            await stream.send(framing.pack_message({"data": data, "ask": others}))

    async def _give(
        self, found: Ranges, name: str, size: int, index: int, peer: str, insist: bool
    ) -> tuple[bytes, list[str]]:
        length, key, now = _length(size, index), f"{name} {index}", asyncio.get_running_loop().time()
        others = self._spreading.admit(key, length, peer, insist, now)
        if others is not None:
            there = [other for other in others if self._is_there(other)][:NAMED]
            if there:
                return b"", there
            self._spreading.admit(key, length, peer, True, now)
        sent = 0
        try:
            data = await found.read(index)
            if data:
                await self._uplink.turn(peer, len(data))
                sent = len(data)
            return data, []
        finally:
            self._spreading.done(key, length, peer, sent)


class RangeClient:
    """Asks peers for ranges. `reach(peer)` is awaited before one is asked, `lost(peer)` called when it is gone. `timeout`: seconds of
    silence after which it counts as gone."""

    def __init__(
        self,
        transport: Transport,
        *,
        reach: Callable[[str], Awaitable[None]] | None = None,
        lost: Callable[[str], None] = lambda peer: None,
        timeout: float = 10.0,
    ) -> None:
        self._transport = transport
        self._reach = reach
        self._lost = lost
        self._timeout = timeout
        self._idle = IdleStreams()

    async def ask(
        self,
        peer: str,
        name: str,
        size: int,
        indices: Sequence[int],
        insist: bool,
        take: Callable[[int, bytes], Awaitable[None]],
    ) -> dict[int, list[str]]:
        """Has `take(index, data)` called with each range that `peer` gives, unchecked; `take` may refuse one by raising RemoteError. The
        peers that it names for each of the others, if it does. Raises RemoteError."""
        request = {"blob": name, "size": size, "ranges": list(indices[:MOST]), "insist": insist}
        stream, usable = None, False
        others: dict[int, list[str]] = {}
        try:
            async with asyncio.timeout(self._timeout):
                stream, frame = await self._begin(peer, framing.pack_message(request), _length(size, indices[0]))
            for number, index in enumerate(indices[:MOST]):
                if number:
                    frame = await self._answer(stream, _length(size, index))
                data, named = _given(frame, peer)
                if data:
                    await take(index, data)
                elif named:
                    others[index] = [other for other in named if other != self._transport.peer_id][:NAMED]
            usable = True
            return others
        except TimeoutError:
            self._lost(peer)
            raise RemoteError(peer, f"peer {short_peer(peer)}: no answer for {self._timeout:g} s") from None
        except framing.FrameError as error:
            raise RemoteError(peer, f"peer {short_peer(peer)}: {error}") from None
        finally:
            if stream is not None and usable:
                await self._idle.keep(stream)
            elif stream is not None:
                await stream.close()

    async def aclose(self) -> None:
        """Closes the streams that are kept."""
        await self._idle.aclose()

    async def _begin(self, peer: str, request: bytes, length: int) -> tuple[Stream, bytes]:
        """A stream to a peer, and its first answer."""
        kept = self._idle.take(peer)
        if kept is not None:
            try:
                return kept, await self._first(kept, request, length)
            except Closed:
                self._lost(peer)  # it may be elsewhere now
        if self._reach is not None:
            await self._reach(peer)
        stream = await self._transport.open(peer, endpoints.BLOB, timeout=self._timeout)
        return stream, await self._first(stream, request, length)

    async def _first(self, stream: Stream, request: bytes, length: int) -> bytes:
        try:
            await stream.send(request)
            return await self._answer(stream, length)
        except BaseException:
            await stream.close()
            raise

    async def _answer(self, stream: Stream, length: int) -> bytes:
        return await answer(stream, self._transport.doubt, length + HEAD_BYTES, timeout=self._timeout)


def _length(size: int, index: int) -> int:
    """Bytes of a range, or of the leaves."""
    if index == LEAVES:
        return blob_hash.LEAF * blob_hash.count(size)
    start, end = blob_hash.span(size, index)
    return end - start


def _given(frame: bytes, peer: str) -> tuple[bytes, list[str]]:
    match framing.unpack_message(frame):
        case {"data": bytes(data), "ask": list(others)}:
            return data, [other for other in others if isinstance(other, str)]
    raise RemoteError(peer, f"peer {short_peer(peer)}: sent no answer")
