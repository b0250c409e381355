"""Several streams to one peer that carry frames as one.

A stream's window bounds the bytes under way; sixteen streams have sixteen windows (docs/adr/0011). A frame is cut into
slices of SLICE bytes or more, one for each stripe in turn, and the next frame begins where it ended. The first slice
begins with the frame's length, 4 bytes, big-endian.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

from peer.net.base import SEND_SECONDS, Closed, Ended, Stream, nothing_came
from peer.net.uplink import Uplink
from protocol.errors import RemoteError
from protocol.identity import short_peer
from protocol.wire import framing
from protocol.wire.framing import MAX_FRAME, PREFIX

STRIPES = 16
SLICE = 32 * 1024
SMALL = 1024
"""Frames up to this size, signs of life among them, do not wait for their turn."""


def slices(first: int, frame: int, stripes: int) -> list[tuple[int, int]]:
    """Returns the stripe and bytes of each slice of a frame, whose first slice is on stripe `first`."""
    count = max(1, min(stripes, frame // SLICE))
    cuts = [frame * i // count for i in range(count + 1)]
    return [((first + i) % stripes, b - a) for i, (a, b) in enumerate(itertools.pairwise(cuts))]


class StripedStream:
    """See peer.net.base.Stream. Owns its streams."""

    def __init__(self, streams: Sequence[Stream], uplink: Uplink | None = None) -> None:
        self.remote, self.name = streams[0].remote, streams[0].name
        self._streams = streams
        self._sending = asyncio.Lock()
        self._uplink = uplink or Uplink()
        self._send_at = self._recv_at = 0  # the stripes where the next frames begin
        self._came: dict[int, bytearray] = {}  # slices of the frame that comes

    @property
    def received(self) -> int:
        return sum(stream.received for stream in self._streams)

    @property
    def pending(self) -> int:
        return sum(stream.pending for stream in self._streams)

    async def send(self, *parts: bytes | memoryview, timeout: float = SEND_SECONDS) -> None:
        frame = memoryview(framing.header(sum(len(part) for part in parts)) + b"".join(parts))

        async def put(stream: Stream, data: memoryview) -> None:
            for at in range(0, len(data), self._uplink.piece):
                piece = data[at : at + self._uplink.piece]
                if len(frame) > SMALL:
                    await self._uplink.turn(self.remote, len(piece))
                await stream.send(piece, timeout=timeout)

        async with self._sending:  # the slices of two frames are in the same order on all stripes
            puts, at = [], 0
            for stripe, size in self._slices(self._send_at, len(frame) - PREFIX):
                puts.append(put(self._streams[stripe], frame[at : at + size]))
                at += size
            self._send_at = (self._send_at + len(puts)) % len(self._streams)
            try:
                await asyncio.gather(*puts)
            except BaseException:
                await self.close()  # half a frame may be out
                raise

    def _slices(self, first: int, frame: int) -> list[tuple[int, int]]:
        """As `slices`, with the length that goes before the first."""
        (stripe, size), *others = slices(first, frame, len(self._streams))
        return [(stripe, PREFIX + size), *others]

    async def recv(self, limit: int = MAX_FRAME, *, timeout: float | None = None) -> bytes:
        try:
            async with asyncio.timeout(timeout):
                return await self._next(limit)
        except TimeoutError:
            raise nothing_came(self, timeout) from None
        except Ended:
            raise
        except RemoteError:
            await self.close()
            raise

    async def _next(self, limit: int) -> bytes:
        first = self._recv_at
        most = PREFIX + max(min(limit, 2 * SLICE), -(-limit // len(self._streams)))
        if first not in self._came:
            self._came[first] = bytearray(await self._streams[first].recv(most))
        beginning = self._came[first]
        size = int.from_bytes(beginning[:PREFIX], "big")
        if len(beginning) < PREFIX or size > limit:
            raise self._no_frame(f"{len(beginning)} bytes of a frame of {size}")
        expected = self._slices(first, size)
        if len(beginning) > expected[0][1]:
            raise self._no_frame(f"more than a slice of a frame of {size} bytes")

        async def take(stripe: int, size: int) -> None:
            came = self._came.setdefault(stripe, bytearray())
            while len(came) < size:
                piece = await self._streams[stripe].recv(size - len(came))
                if not piece:
                    raise self._no_frame("an empty piece")
                came += piece

        await asyncio.gather(*(take(stripe, size) for stripe, size in expected))
        others = (self._came[stripe] for stripe, _ in expected[1:])
        frame = b"".join((memoryview(beginning)[PREFIX:], *others))
        self._came, self._recv_at = {}, (first + len(expected)) % len(self._streams)
        return frame

    def _no_frame(self, what: str) -> Closed:
        return Closed(self.remote, f"stream {self.name} with {short_peer(self.remote)}: it sent {what}; open it again")

    async def finish(self) -> None:
        await asyncio.gather(*(stream.finish() for stream in self._streams))

    async def close(self) -> None:
        await asyncio.gather(*(stream.close() for stream in self._streams))
