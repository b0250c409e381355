"""Several streams to one peer that carry frames as one.

What is under way in one stream is bounded by its window: at first 256 KB in libp2p, so that a larger frame costs a round trip
more, and a home link is not full; four streams have four windows (docs/results/chain.md). A frame of SPLIT bytes or more is cut into
as many slices as there are lanes, a smaller one goes whole on the first. There every frame begins with its length, 4 bytes,
big-endian, which says what comes on which lane. A slice may come in pieces: a sender with a limited uplink sends little at once, since
a burst that a router's queue cannot hold is lost, and TCP then takes longer than the link (docs/adr/0013).
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

from peer.net.base import SEND_SECONDS, Closed, Ended, Stream, nothing_came, short
from peer.net.uplink import Uplink
from protocol import framing
from protocol.errors import RemoteError
from protocol.framing import MAX_FRAME, PREFIX

LANES = 4
SPLIT = 64 * 1024
SMALL = 1024
"""Frames of so many bytes with their length, signs of life among them, do not wait for their turn."""


def sizes(frame: int, lanes: int) -> list[int]:
    """How many bytes of a frame of so many go on each lane."""
    if frame < SPLIT:
        return [frame] + [0] * (lanes - 1)
    cuts = [frame * i // lanes for i in range(lanes + 1)]
    return [b - a for a, b in itertools.pairwise(cuts)]


class Lanes:
    """See peer.net.base.Stream. Owns its streams: nobody else uses them any more."""

    def __init__(self, streams: Sequence[Stream], uplink: Uplink | None = None) -> None:
        self.remote, self.name = streams[0].remote, streams[0].name
        self._streams = streams
        self._sending = asyncio.Lock()
        self._uplink = uplink or Uplink()
        self._came: dict[int, bytearray] = {}  # slices of the frame that comes

    @property
    def received(self) -> int:
        return sum(stream.received for stream in self._streams)

    async def send(self, *parts: bytes | memoryview, timeout: float = SEND_SECONDS) -> None:
        frame = memoryview(framing.header(sum(len(part) for part in parts)) + b"".join(parts))
        first, *others = sizes(len(frame) - PREFIX, len(self._streams))
        ends = itertools.accumulate((PREFIX + first, *others))
        slices = [frame[a:b] for a, b in itertools.pairwise((0, *ends))]

        async def put(stream: Stream, data: memoryview) -> None:
            for at in range(0, len(data), self._uplink.piece):
                piece = data[at : at + self._uplink.piece]
                if len(frame) > SMALL:
                    await self._uplink.turn(self.remote, len(piece))
                await stream.send(piece, timeout=timeout)

        async with self._sending:  # the slices of two frames are in the same order on all lanes
            try:
                await asyncio.gather(*(put(s, x) for s, x in zip(self._streams, slices, strict=True)))
            except BaseException:
                await self.close()  # half a frame may be out
                raise

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
        most = PREFIX + max(min(limit, SPLIT - 1), limit // len(self._streams))
        if 0 not in self._came:
            self._came[0] = bytearray(await self._streams[0].recv(most))
        size = int.from_bytes(self._came[0][:PREFIX], "big")
        expected = sizes(size, len(self._streams))
        expected[0] += PREFIX
        if len(self._came[0]) < PREFIX or size > limit:
            raise self._no_frame(f"{len(self._came[0])} bytes of a frame of {size}")

        async def take(lane: int) -> None:
            came = self._came.setdefault(lane, bytearray())
            while len(came) < expected[lane]:
                piece = await self._streams[lane].recv(expected[lane] - len(came))
                if not piece:
                    raise self._no_frame("an empty piece")
                came += piece

        await asyncio.gather(*(take(lane) for lane in range(len(expected))))
        if len(self._came[0]) > expected[0]:
            raise self._no_frame(f"more than a frame of {size} bytes")
        frame = b"".join((memoryview(self._came[0])[PREFIX:], *(self._came[i] for i in range(1, len(expected)))))
        self._came = {}
        return frame

    def _no_frame(self, what: str) -> Closed:
        return Closed(self.remote, f"stream {self.name} with {short(self.remote)}: it sent {what}; open it again")

    async def finish(self) -> None:
        await asyncio.gather(*(stream.finish() for stream in self._streams))

    async def close(self) -> None:
        await asyncio.gather(*(stream.close() for stream in self._streams))
