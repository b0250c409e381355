"""Serving blobs: who is served, by whom else, and how fast.

    -> {"blob": name, "size": bytes, "leaves": bool, "whole": bool, "insist": bool, "named_by": who sent us here, or ""}
    <- {"state": "wait"}, at once and now and then, while the blob is still on its way here
    <- {"state": "here"}, then one frame with the whole blob, if that was asked for; else one with the leaves, if they were, and:
       -> {"range": i}, in any order, about twice as many as there are at most
       <- one frame with range i for each, in that order
       {"state": "busy", "ask": [peers], "sure": bool}: enough copies were sent, these peers have it or are getting it, surely
       if they get it from a peer that has it
       {"state": "absent"}

After "busy", "absent" or a whole blob the stream is free for the next request. A request for text says where in a chunk of the corpus it is
(store.py), since nodes have whole chunks and peers some ranges: "in": [chunk, its bytes, number of the range, or -1 for the digests of all].
And for what has a name instead of a digest: -> {"named": name} <- {"size": bytes, -1 if it is not here}, frames.

*Spreading.* A stored blob is sent about `copies` times; whoever asks then is told who got it, and asks there, so that copies
multiply like the leaves of a tree and a home uplink sends its own payload about twice, however many peers there are. A
peer that is still getting a blob lets others wait for it (who may wait for whom: fetching.py). Who finds nobody else may
insist. So an operator sends a range of text about twice, however many peers read it.

*Fairness.* However many streams a peer has, a few pieces for it are under way at once. With an upload limit, ranges are sent in turn, one for each requesting peer, as a token bucket allows.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from peer.net.base import REQUEST_SECONDS, Closed, Ended, Stream, Timeout, Transport
from peer.net.blobs.idle import KEPT_SECONDS
from peer.net.blobs.spreading import Spreading
from peer.net.blobs.store import Blob, BlobStore, Place
from peer.net.uplink import Uplink
from protocol.codec import blob_hash
from protocol.errors import RemoteError
from protocol.identity import short_peer
from protocol.wire import endpoints, framing
from protocol.wire.encoding import MessageError

COPIES = 2
"""How often a peer sends a blob."""
NODE_COPIES = 6
"""How often a bootstrap node does: a server's uplink spares the homes'."""
STREAMS_PER_PEER = 128
"""At once; a payload or shard takes one."""
PIECES_PER_PEER = 8
"""That are read from disk and sent at once to one peer, however many streams it has: others get their share."""
MOST_AHEAD = 8
"""Requests of one stream that were there before the one before was answered. Who asks without listening is not answered for long: what it
has left behind would have to be read when it is gone."""
TEXTS, TEXT_SECONDS = 16384, 6 * 3600.0
"""Ranges of text of which we know who got them, 512 MiB, and for how long after the last request."""
CACHED_LEAVES = 1024
"""Blobs whose range digests are kept in memory: 1 KiB for each MiB of a blob."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How many seconds are waited: `request`: for the first request on a stream; `range`: for the next range of a large blob; `next`: for
    the next request on a stream; `wait`: by a peer for a blob that is on its way here, which is told so every `sign`."""

    request: float = REQUEST_SECONDS
    range: float = 60.0
    next: float = KEPT_SECONDS + 30.0
    wait: float = 30.0
    sign: float = 5.0


PATIENCE = Patience()


Coming = tuple["asyncio.Future[None]", bool]
"""A blob that is on its way here, and whether that surely leads to somebody who has it (fetching.py)."""


class Text(Protocol):
    """Ranges of a corpus, and their digests."""

    def read(self, place: Place) -> bytes:
        """Those at `place`, right; empty where they are not here. Called in threads."""

    def coming(self, place: Place, peer: str, named_by: str) -> Coming | None:
        """As `Fetcher.coming`, for what is at `place`."""


class BlobServer:
    """Serves a store's blobs, and those that `others` find (which are not spread: their holders are known)."""

    def __init__(
        self,
        store: BlobStore,
        *,
        others: Callable[[str], Blob | None] = lambda name: None,
        coming: Callable[[str, str, str], Coming | None] = lambda name, peer, named_by: None,
        named: Mapping[str, bytes] | None = None,
        uplink: Uplink | None = None,
        warn: Callable[[str], None] = lambda text: None,
        copies: int = COPIES,
        patience: Patience = PATIENCE,
    ) -> None:
        self.uplink = uplink or Uplink()
        self._store = store
        self._others = others
        self._coming = coming
        self._named = named or {}
        self._warn = warn
        self._patience = patience
        self._spreading = Spreading(copies)
        self._text: Text | None = None
        self._texts = Spreading(COPIES, TEXTS, TEXT_SECONDS)
        self._is_there: Callable[[str], bool] = lambda peer: True
        self._leaves: OrderedDict[str, bytes] = OrderedDict()
        self._damaged: set[str] = set()
        self._streams: dict[str, int] = {}
        self._pieces: dict[str, asyncio.Semaphore] = {}

    @property
    def open_streams(self) -> int:
        """How many streams are being served."""
        return sum(self._streams.values())

    def add_text(self, text: Text, is_there: Callable[[str], bool] = lambda peer: True) -> None:
        """Serves `text`, too. `is_there(peer)`: whether it is worth while to send others to it."""
        self._text, self._is_there = text, is_there

    async def serve(self, transport: Transport) -> None:
        """Lets others ask."""
        await transport.serve(endpoints.BLOB, self._handle)

    async def _handle(self, stream: Stream) -> None:
        peer = stream.remote
        if self._streams.get(peer, 0) >= STREAMS_PER_PEER:
            raise RemoteError(peer, f"blobs for {short_peer(peer)}: {STREAMS_PER_PEER} streams at once; it was closed")
        self._streams[peer] = self._streams.get(peer, 0) + 1
        self._pieces.setdefault(peer, asyncio.Semaphore(PIECES_PER_PEER))
        try:
            raw, ahead = await stream.recv(1024, timeout=self._patience.request), 0
            while isinstance(request := framing.unpack_message(raw), dict):
                if isinstance(request.get("named"), str):
                    return await self._send_named(stream, self._named.get(request["named"]))
                if not blob_hash.is_name(request.get("blob")):
                    return
                if "in" in request:
                    await self._answer_text(stream, request)
                else:
                    await self._answer(stream, request["blob"], request)
                ahead += stream.pending > 0
                if ahead > MOST_AHEAD:
                    raise RemoteError(peer, f"blobs for {short_peer(peer)}: asks without listening; it was closed")
                try:
                    raw = await stream.recv(1024, timeout=self._patience.next)
                except (Closed, Timeout):
                    return
        except framing.FrameError as error:
            raise MessageError(peer, f"blobs for {short_peer(peer)}: {error}; it was closed") from None
        finally:
            self._streams[peer] -= 1
            if not self._streams[peer]:
                del self._streams[peer], self._pieces[peer]

    async def _send_named(self, stream: Stream, data: bytes | None) -> None:
        await stream.send(framing.pack_message({"size": -1 if data is None else len(data)}))
        view = memoryview(data or b"")
        for start in range(0, len(view), blob_hash.RANGE_BYTES):
            async with self._pieces[stream.remote]:
                await self.uplink.turn(stream.remote, blob_hash.RANGE_BYTES)
                await stream.send(view[start : start + blob_hash.RANGE_BYTES])

    async def _answer(self, stream: Stream, name: str, request: Mapping[str, object]) -> None:
        size, peer = request.get("size"), stream.remote
        if not isinstance(size, int) or not 0 <= size <= blob_hash.MAX_BLOB_BYTES:
            raise MessageError(peer, f"blobs for {short_peer(peer)}: asks for an impossible size; it was closed")
        blob = self._store.find(name)
        coming = self._coming(name, peer, _named_by(request)) if blob is None else None
        if coming is not None or (blob is not None and blob.size == size):
            now = asyncio.get_running_loop().time()
            ask = self._spreading.admit(name, size, peer, request.get("insist") is True, now)
            if ask is not None:
                return await _say(stream, "busy", ask=ask, sure=blob is not None or (coming is not None and coming[1]))
            sent = [0]
            try:
                if coming is None or await self._arrives(stream, coming[0]):
                    await self._send(stream, name, size, self._store.find(name), request, sent)
                else:
                    await _say(stream, "absent")
            finally:
                self._spreading.done(name, size, peer, sent[0])
        else:
            await self._send(stream, name, size, self._others(name), request, [0])

    async def _answer_text(self, stream: Stream, request: Mapping[str, object]) -> None:
        peer, place = stream.remote, _place(request.get("in"))
        if place is None:
            raise MessageError(peer, f"blobs for {short_peer(peer)}: asks for no place; it was closed")
        if self._text is None:
            return await _say(stream, "absent")
        data = await asyncio.to_thread(self._text.read, place)
        coming = None if data else self._text.coming(place, peer, _named_by(request))
        if not data and coming is None:
            return await _say(stream, "absent")
        key, size, insist = f"{place.name} {place.index}", place.length, request.get("insist") is True
        now = asyncio.get_running_loop().time()
        ask = self._texts.admit(key, size, peer, insist, now)
        if ask is not None:
            if there := [other for other in ask if self._is_there(other)]:
                return await _say(stream, "busy", ask=there, sure=coming is None or coming[1])
            self._texts.admit(key, size, peer, True, now)
        sent = 0
        try:
            if coming is not None and await self._arrives(stream, coming[0]):
                data = await asyncio.to_thread(self._text.read, place)
            if not data:
                return await _say(stream, "absent")
            await _say(stream, "here")
            await self.uplink.turn(peer, len(data))
            await stream.send(data)
            sent = len(data)
        finally:
            self._texts.done(key, size, peer, sent)

    async def _arrives(self, stream: Stream, coming: asyncio.Future[None]) -> bool:
        """Waits for a blob that is on its way here, and says so at once and now and then; whether it came."""
        end = asyncio.get_running_loop().time() + self._patience.wait
        while asyncio.get_running_loop().time() < end:
            await _say(stream, "wait")
            done, _ = await asyncio.wait({coming}, timeout=self._patience.sign)
            if done:
                return not coming.cancelled() and coming.exception() is None
        return False

    async def _send(
        self, stream: Stream, name: str, size: int, blob: Blob | None, request: Mapping[str, object], sent: list[int]
    ) -> None:
        """The blob's ranges as they are asked for; `sent[0]` counts their bytes."""
        leaves = None if blob is None or blob.size != size else await self._leaves_of(name, blob)
        if blob is None or leaves is None:
            return await _say(stream, "absent")
        await _say(stream, "here")
        if request.get("whole") is True and size <= blob_hash.WHOLE_BYTES:
            async with self._pieces[stream.remote]:
                data = await asyncio.to_thread(self._read_whole, name, blob, leaves)
                await self.uplink.turn(stream.remote, size)
                await stream.send(data)
            sent[0] = size
            return
        if request.get("leaves") is True and len(leaves) > blob_hash.LEAF_BYTES:
            await self.uplink.turn(stream.remote, len(leaves))
            await stream.send(leaves)
        for _ in range(2 * blob_hash.count(size) + MOST_AHEAD):
            try:
                wanted = framing.unpack_message(await stream.recv(64, timeout=self._patience.range))
            except Ended:
                return
            index = wanted.get("range") if isinstance(wanted, dict) else None
            if not isinstance(index, int) or not 0 <= index < blob_hash.count(size):
                raise MessageError(
                    stream.remote, f"blobs for {short_peer(stream.remote)}: asks for no range; it was closed"
                )
            async with self._pieces[stream.remote]:
                data = await asyncio.to_thread(self._read, name, blob, leaves, index)
                await self.uplink.turn(stream.remote, len(data))
                await stream.send(data)
            sent[0] += len(data)
        raise RemoteError(
            stream.remote,
            f"blobs for {short_peer(stream.remote)}: asks for the same ranges again and again; it was closed",
        )

    async def _leaves_of(self, name: str, blob: Blob) -> bytes | None:
        """The blob's range digests, or None where its bytes on disk are not those of its name."""
        leaves = self._leaves.get(name)
        if leaves is None:
            with contextlib.suppress(OSError):
                found = await asyncio.to_thread(blob.leaves)
                if blob_hash.root(blob.size, found) == name:
                    leaves = found
                elif name not in self._damaged:
                    self._damage(name, blob)
        if leaves is not None:
            self._leaves[name] = leaves
            self._leaves.move_to_end(name)
            if len(self._leaves) > CACHED_LEAVES:
                self._leaves.popitem(last=False)
        return leaves

    def _read_whole(self, name: str, blob: Blob, leaves: bytes) -> bytes:
        return b"".join(self._read(name, blob, leaves, index) for index in range(blob_hash.count(blob.size)))

    def _read(self, name: str, blob: Blob, leaves: bytes, index: int) -> bytes:
        """A range that is right: an honest peer's disk must not get it blamed."""
        try:
            data = blob.read(index)
        except OSError:
            raise RemoteError("", f"blob {name[:12]}: it was removed meanwhile; another is asked") from None
        if not blob_hash.is_leaf(leaves, index, data):
            self._leaves.pop(name, None)
            self._damage(name, blob)
            raise RemoteError("", f"blob {name[:12]}: damaged on our disk; another is asked")
        return data

    def _damage(self, name: str, blob: Blob) -> None:
        self._damaged.add(name)
        self._store.remove(name)
        self._warn(f"file {blob.path}: its bytes changed on disk; it is not served any more, check the disk")


def _named_by(request: Mapping[str, object]) -> str:
    said = request.get("named_by")
    return said if isinstance(said, str) else ""


def _place(said: object) -> Place | None:
    """What a request says of where a range is; None where there can be no such place."""
    match said:
        case [str(name), int(size), int(index)] if (
            blob_hash.is_name(name) and 0 <= size <= blob_hash.MAX_BLOB_BYTES and -1 <= index < blob_hash.count(size)
        ):
            return Place(name, size, index)
    return None


async def _say(stream: Stream, state: str, ask: Sequence[str] = (), sure: bool = False) -> None:
    await stream.send(framing.pack_message({"state": state, "ask": list(ask), "sure": sure}))
