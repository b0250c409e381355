"""Serves blobs, to a bounded number of peers, which then pass them on.

    -> {"blob": name, "size": bytes, "leaves": bool, "whole": bool, "insist": bool, "named_by": holder or ""}
    <- {"state": "wait"}, at once and repeatedly, while the blob is still being fetched here
    <- {"state": "here"}, then a frame with the whole blob if asked for; else one with the leaves if asked for, and:
       -> {"range": i}, in any order, at most about twice as many as there are
       <- a frame with range i for each, in that order
       {"state": "busy", "ask": [peers], "sure": bool}: enough copies were sent; these peers have the blob or get
       it, surely if from a peer that has it
       {"state": "absent"}

Blobs, ranges and text are packed (peer/net/compression.py).

After "busy", "absent" or a whole blob the stream is free for the next request. A request for text adds its place in a
chunk of the corpus (store.py), as nodes have whole chunks and peers some ranges: "in": [chunk, its bytes, number of the
range, or -1 for the leaves]. A file with a name: -> {"named": name} <- {"size": bytes, -1 if absent}, frames.

*SpreadTracker.* A stored blob is sent about `copies` times. Further peers are told who got it and ask there, so copies
multiply like the leaves of a tree. A peer that finds no other holder may insist.

*Fairness.* A few pieces for a peer are under way at once. With an upload limit, ranges are sent in turn, one for each
peer, as a token bucket allows.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Protocol

from peer.net import compression
from peer.net.base import REQUEST_SECONDS, Closed, Ended, Stream, Timeout, Transport
from peer.net.blobs.fetching import IDLE_SECONDS, Coming
from peer.net.blobs.store import Blob, BlobStore, Place
from peer.net.lru import LruDict
from peer.net.uplink import Uplink
from protocol.codec import blob_hash
from protocol.errors import RemoteError
from protocol.identity import short_peer
from protocol.wire import endpoints, framing
from protocol.wire.encoding import MessageError

SPREAD_SECONDS = 300.0
"""How long after the last request for a blob we remember who got it."""
SPREAD_BLOBS = 4096
NAMED_AT_ONCE = 8


@dataclass(slots=True)
class _Spread:
    """The serving of one blob: bytes sent, bytes promised to open streams, and by receiver the bytes that it got and
    its open streams."""

    asked_at: float
    sent: int = 0
    promised: int = 0
    receivers: dict[str, int] = field(default_factory=dict)
    streams: Counter[str] = field(default_factory=Counter)
    turns: int = 0


class SpreadTracker:
    """Remembers which peers got a blob or range from us, so that each is sent about `copies` times.

    most: remembered blobs
    seconds: after the last request for one
    """

    def __init__(self, copies: int, most: int = SPREAD_BLOBS, seconds: float = SPREAD_SECONDS) -> None:
        self._copies = copies
        self._seconds = seconds
        self._blobs = LruDict[str, _Spread](most)

    def admit(self, name: str, size: int, peer: str, insist: bool, now: float) -> list[str] | None:
        """None where `peer` is to be served, else the peers to ask instead.

        A peer that asks again has removed what it got, as a node that did not commit it: it is no holder any more.
        """
        spread = self._blobs.get(name)
        if spread is None or (now - spread.asked_at > self._seconds and not spread.promised):
            spread = _Spread(now)
        spread.asked_at = now
        self._blobs[name] = spread
        if spread.streams[peer] <= 0:
            spread.sent -= spread.receivers.pop(peer, 0)
        others = [p for p in spread.receivers if p != peer]
        if others and not insist and spread.sent + spread.promised + size > self._copies * size:
            spread.turns += 1
            start = spread.turns % len(others)
            return (others[start:] + others[:start])[:NAMED_AT_ONCE]
        spread.promised += size
        spread.receivers.setdefault(peer, 0)
        spread.streams[peer] += 1
        return None

    def done(self, name: str, size: int, peer: str, sent: int) -> None:
        """An admitted peer's stream is over, after `sent` bytes."""
        spread = self._blobs.get(name)
        if spread is not None:
            spread.promised -= size
            spread.sent += sent
            spread.streams[peer] -= 1
            spread.receivers[peer] = spread.receivers.get(peer, 0) + sent
            if not spread.receivers[peer]:
                del spread.receivers[peer]


COPIES = 2
NODE_COPIES = 6
"""How often a bootstrap node does: a server's uplink spares the homes'."""
STREAMS_PER_PEER = 128
PIECES_PER_PEER = 8
"""Pieces read and sent at once to one peer, however many streams it has."""
MOST_AHEAD = 8
"""Requests that a stream may have queued: a peer that does not read its answers is cut off."""
TEXTS, TEXT_SECONDS = 16384, 6 * 3600.0
"""Ranges of text whose receivers are remembered, 512 MiB, and for how long after the last request."""
CACHED_LEAVES = 1024
"""Blobs whose range digests are kept in memory, 1 KiB for each MiB of a blob; and as many forms of compression."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingTimeouts:
    """Seconds to wait."""

    request: float = REQUEST_SECONDS  # for a stream's first request
    range: float = 60.0  # for the next range of a large blob
    next: float = IDLE_SECONDS + 30.0  # for the next request on a stream
    wait: float = 30.0  # for a blob that is being fetched here, with a sign of life every `sign`
    sign: float = 5.0


SERVING_TIMEOUTS = ServingTimeouts()


class Text(Protocol):
    """Ranges of a corpus, and their digests."""

    def read(self, place: Place) -> bytes:
        """Returns the verified bytes at `place`; empty where they are not here. Called in threads."""

    def coming(self, place: Place, peer: str, named_by: str) -> Coming | None:
        """As `Fetcher.coming`, for what is at `place`."""


@dataclass(eq=False)
class BlobServer:
    """Serves a store's blobs, and those that `others` find (which are not spread: their holders are known)."""

    store: BlobStore
    _: KW_ONLY
    others: Callable[[str], Blob | None] = lambda name: None
    coming: Callable[[str, str, str], Coming | None] = lambda name, peer, named_by: None
    named: Mapping[str, bytes] = field(default_factory=dict)
    uplink: Uplink = field(default_factory=Uplink)
    warn: Callable[[str], None] = lambda text: None
    copies: int = COPIES
    patience: ServingTimeouts = SERVING_TIMEOUTS

    def __post_init__(self) -> None:
        self._spreading = SpreadTracker(self.copies)
        self._text: Text | None = None
        self._texts = SpreadTracker(COPIES, TEXTS, TEXT_SECONDS)
        self._is_there: Callable[[str], bool] = lambda peer: True
        self._leaves = LruDict[str, bytes](CACHED_LEAVES)
        self._forms = LruDict[str, int](CACHED_LEAVES)
        self._damaged: set[str] = set()
        self._streams: dict[str, int] = {}
        self._pieces: dict[str, asyncio.Semaphore] = {}

    @property
    def open_streams(self) -> int:
        return sum(self._streams.values())

    def add_text(self, text: Text, is_there: Callable[[str], bool] = lambda peer: True) -> None:
        """Serves `text`, too. `is_there(peer)`: whether it is worth while to send others to it."""
        self._text, self._is_there = text, is_there

    async def serve(self, transport: Transport) -> None:
        await transport.serve(endpoints.BLOB, self._handle)

    async def _handle(self, stream: Stream) -> None:
        peer = stream.remote
        if self._streams.get(peer, 0) >= STREAMS_PER_PEER:
            raise RemoteError(peer, f"blobs for {short_peer(peer)}: {STREAMS_PER_PEER} streams at once; it was closed")
        self._streams[peer] = self._streams.get(peer, 0) + 1
        self._pieces.setdefault(peer, asyncio.Semaphore(PIECES_PER_PEER))
        try:
            raw, ahead = await stream.recv(1024, timeout=self.patience.request), 0
            while isinstance(request := framing.unpack_message(raw), dict):
                if isinstance(request.get("named"), str):
                    return await self._send_named(stream, self.named.get(request["named"]))
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
                    raw = await stream.recv(1024, timeout=self.patience.next)
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
        blob = self.store.find(name)
        coming = self.coming(name, peer, _named_by(request)) if blob is None else None
        if coming is not None or (blob is not None and blob.size == size):
            now = asyncio.get_running_loop().time()
            ask = self._spreading.admit(name, size, peer, request.get("insist") is True, now)
            if ask is not None:
                return await _say(stream, "busy", ask=ask, sure=coming is None or coming.is_sure)
            sent = [0]
            try:
                if coming is None or await self._arrives(stream, coming):
                    await self._send(stream, name, size, self.store.find(name), request, sent)
                else:
                    await _say(stream, "absent")
            finally:
                self._spreading.done(name, size, peer, sent[0])
        else:
            await self._send(stream, name, size, self.others(name), request, [0])

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
                return await _say(stream, "busy", ask=there, sure=coming is None or coming.is_sure)
            self._texts.admit(key, size, peer, True, now)
        sent = 0
        try:
            if coming is not None and await self._arrives(stream, coming):
                data = await asyncio.to_thread(self._text.read, place)
            if not data:
                return await _say(stream, "absent")
            await _say(stream, "here")
            packed = await asyncio.to_thread(self._packed, place.name, data)
            await self.uplink.turn(peer, len(packed))
            await stream.send(packed)
            sent = len(data)
        finally:
            self._texts.done(key, size, peer, sent)

    async def _arrives(self, stream: Stream, coming: Coming) -> bool:
        """Waits for a blob that is on its way here, and says so at once and now and then; whether it came."""
        end = asyncio.get_running_loop().time() + self.patience.wait
        awaited = {coming.fetch, coming.lead or coming.fetch}
        while asyncio.get_running_loop().time() < end:
            await _say(stream, "wait")
            await asyncio.wait(awaited, timeout=self.patience.sign, return_when=asyncio.FIRST_COMPLETED)
            if coming.fetch.done():
                return not coming.fetch.cancelled() and coming.fetch.exception() is None
            if coming.lead is not None and coming.lead.cancelled():
                return False
            awaited -= {coming.lead} if coming.lead is not None and coming.lead.done() else set()
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
                every = range(blob_hash.count(size))
                data = await asyncio.to_thread(self._read, name, blob, leaves, every)
                await self.uplink.turn(stream.remote, len(data))
                await stream.send(data)
            sent[0] = size
            return
        if request.get("leaves") is True and len(leaves) > blob_hash.LEAF_BYTES:
            await self.uplink.turn(stream.remote, len(leaves))
            await stream.send(leaves)
        for _ in range(2 * blob_hash.count(size) + MOST_AHEAD):
            try:
                wanted = framing.unpack_message(await stream.recv(64, timeout=self.patience.range))
            except Ended:
                return
            index = wanted.get("range") if isinstance(wanted, dict) else None
            if not isinstance(index, int) or not 0 <= index < blob_hash.count(size):
                raise MessageError(
                    stream.remote, f"blobs for {short_peer(stream.remote)}: asks for no range; it was closed"
                )
            async with self._pieces[stream.remote]:
                data = await asyncio.to_thread(self._read, name, blob, leaves, (index,))
                await self.uplink.turn(stream.remote, len(data))
                await stream.send(data)
            begin, end = blob_hash.span(size, index)
            sent[0] += end - begin
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
        return leaves

    def _read(self, name: str, blob: Blob, leaves: bytes, indices: Iterable[int]) -> bytes:
        """Ranges that are right, packed: an honest peer's disk must not get it blamed."""
        pieces = []
        for index in indices:
            try:
                data = blob.read(index)
            except OSError:
                raise RemoteError("", f"blob {name[:12]}: it was removed meanwhile; another is asked") from None
            if not blob_hash.is_leaf(leaves, index, data):
                self._leaves.pop(name, None)
                self._damage(name, blob)
                raise RemoteError("", f"blob {name[:12]}: damaged on our disk; another is asked")
            pieces.append(data)
        return self._packed(name, b"".join(pieces))

    def _packed(self, name: str, data: bytes) -> bytes:
        """Packs a piece of a blob or of a chunk of the corpus, in the form that was best for its first one."""
        if (form := self._forms.get(name)) is None:
            self._forms[name] = form = compression.form_of(data)
        return compression.pack(data, form)

    def _damage(self, name: str, blob: Blob) -> None:
        self._damaged.add(name)
        self.store.remove(name)
        self.warn(f"file {blob.path}: its bytes changed on disk; it is not served any more, check the disk")


def _named_by(request: Mapping[str, object]) -> str:
    said = request.get("named_by")
    return said if isinstance(said, str) else ""


def _place(said: object) -> Place | None:
    """Returns the place of a requested range; None where there can be no such place."""
    match said:
        case [str(name), int(size), int(index)] if (
            blob_hash.is_name(name) and 0 <= size <= blob_hash.MAX_BLOB_BYTES and -1 <= index < blob_hash.count(size)
        ):
            return Place(name, size, index)
    return None


async def _say(stream: Stream, state: str, ask: Sequence[str] = (), sure: bool = False) -> None:
    await stream.send(framing.pack_message({"state": state, "ask": list(ask), "sure": sure}))
