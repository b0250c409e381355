"""Several streams to one peer that carry frames as one.

What is under way in one stream is bounded by its window: at first 256 KB in libp2p, so that a larger frame costs a round trip
more, and a home link is not full; four streams have four windows (docs/results/chain.md). A frame of SPLIT bytes or more is cut into
as many slices as there are lanes, a smaller one goes whole on the first. There every frame begins with its length, 4 bytes,
big-endian, which says what comes on which lane.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

from peer.net.base import SEND_SECONDS, Closed, Ended, Stream, nothing_came, short
from protocol import framing
from protocol.errors import RemoteError
from protocol.framing import MAX_FRAME, PREFIX

LANES = 4
SPLIT = 64 * 1024


def sizes(frame: int, lanes: int) -> list[int]:
    """How many bytes of a frame of so many go on each lane."""
    if frame < SPLIT:
        return [frame] + [0] * (lanes - 1)
    cuts = [frame * i // lanes for i in range(lanes + 1)]
    return [b - a for a, b in itertools.pairwise(cuts)]


class Lanes:
    """See peer.net.base.Stream. Owns its streams: nobody else uses them any more."""

    def __init__(self, streams: Sequence[Stream]) -> None:
        self.remote, self.name = streams[0].remote, streams[0].name
        self._streams = streams
        self._sending = asyncio.Lock()
        self._came: dict[int, bytes] = {}  # slices of the frame that comes

    @property
    def received(self) -> int:
        return sum(stream.received for stream in self._streams)

    async def send(self, *parts: bytes | memoryview, timeout: float = SEND_SECONDS) -> None:
        frame = memoryview(b"".join(parts))
        ends = itertools.accumulate(sizes(len(frame), len(self._streams)))
        slices = [frame[a:b] for a, b in itertools.pairwise((0, *ends))]
        head = framing.header(len(frame))
        async with self._sending:  # the slices of two frames are in the same order on all lanes
            try:
                await asyncio.gather(
                    self._streams[0].send(head, slices[0], timeout=timeout),
                    *(s.send(x, timeout=timeout) for s, x in zip(self._streams[1:], slices[1:], strict=True) if x),
                )
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
        if 0 not in self._came:
            most = max(min(limit, SPLIT - 1), limit // len(self._streams))
            self._came[0] = await self._streams[0].recv(PREFIX + most)
        head, first = self._came[0][:PREFIX], memoryview(self._came[0])[PREFIX:]
        size = int.from_bytes(head, "big")
        expected = sizes(size, len(self._streams))
        if len(head) < PREFIX or size > limit or len(first) != expected[0]:
            raise self._no_frame(f"{len(first)} bytes of a frame of {size}")

        async def take(lane: int) -> None:
            self._came[lane] = await self._streams[lane].recv(expected[lane])

        lanes = [i for i, x in enumerate(expected) if i and x]
        await asyncio.gather(*(take(i) for i in lanes if i not in self._came))
        if any(len(self._came[i]) != expected[i] for i in lanes):
            raise self._no_frame(f"slices that are no frame of {size} bytes")
        frame = b"".join((first, *(self._came[i] for i in lanes)))
        self._came = {}
        return frame

    def _no_frame(self, what: str) -> Closed:
        return Closed(self.remote, f"stream {self.name} with {short(self.remote)}: it sent {what}; open it again")

    async def finish(self) -> None:
        await asyncio.gather(*(stream.finish() for stream in self._streams))

    async def close(self) -> None:
        await asyncio.gather(*(stream.close() for stream in self._streams))
