"""Measures the latency to other peers, and so our network coordinates (protocol/planning/coordinates.py).

A measurement is a stream of PINGS empty frames, each answered with the coordinates of the other side. The quickest one
counts. Only peers that we are connected to anyway are measured, one every PROBE_SECONDS.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Sequence

from peer.net.base import Clock, Stream, Transport
from protocol.errors import RemoteError
from protocol.identity import short_peer
from protocol.planning import coordinates
from protocol.planning.coordinates import Place
from protocol.wire import endpoints, framing
from protocol.wire.announcement import AXES

PROBE_SECONDS = 15.0
PINGS = 4
ANSWER_SECONDS = 5.0
ANSWER_BYTES = 64
SURE = 0.5
"""A place whose distances are off by more is not told: it would be worse than none."""
TOLD_MS = 3.0
"""Who has moved by less tells nothing new: plans would not differ."""


class Latency:
    """One per process. `tell(coordinates)` is called when our place has changed enough to be announced."""

    def __init__(
        self, transport: Transport, clock: Clock, tell: Callable[[tuple[float, ...]], None], draw: random.Random
    ) -> None:
        self.place = Place(at=tuple(draw.gauss(0.0, 1.0) for _ in range(AXES)))
        self._told: tuple[float, ...] = ()
        self._transport = transport
        self._clock = clock
        self._tell = tell
        self._draw = draw

    async def serve(self) -> None:
        await self._transport.serve(endpoints.PING, self._answer)

    async def run(self, connected: Callable[[], Sequence[str]]) -> None:
        """Measures a connected peer from time to time. Never returns. Raises TransportLost."""
        while True:
            await asyncio.sleep(PROBE_SECONDS)
            peers = sorted(connected())
            if peers:
                with contextlib.suppress(RemoteError):
                    await self.probe(self._draw.choice(peers))

    async def probe(self, peer: str) -> None:
        """Measures the way to `peer`, and moves. Raises RemoteError, TransportLost."""
        stream = await self._transport.open(peer, endpoints.PING, timeout=ANSWER_SECONDS)
        quickest, answer = float("inf"), b""
        try:
            for _ in range(PINGS):
                began = self._clock.steady()
                await stream.send(b"", timeout=ANSWER_SECONDS)
                answer = await stream.recv(ANSWER_BYTES, timeout=ANSWER_SECONDS)
                quickest = min(quickest, self._clock.steady() - began)
            await stream.finish()
        finally:
            await stream.close()
        self.place = coordinates.moved(self.place, _place(peer, answer), 1000 * quickest / 2)
        far = not self._told or coordinates.distance(self._told, self.place.at) > TOLD_MS
        if self.place.error <= SURE and far:
            self._told = tuple(round(x, 1) for x in self.place.at)
            self._tell(self._told)

    async def _answer(self, stream: Stream) -> None:
        for _ in range(PINGS):
            await stream.recv(ANSWER_BYTES, timeout=ANSWER_SECONDS)
            await stream.send(framing.pack_message([*self.place.at, self.place.error]), timeout=ANSWER_SECONDS)


def _place(peer: str, answer: bytes) -> Place:
    try:
        match framing.unpack_message(answer):
            case [*at, float(error)] if all(isinstance(x, float) for x in at):
                return Place(at=tuple(at), error=error)
    except (framing.FrameError, ValueError):
        pass
    raise RemoteError(peer, f"peer {short_peer(peer)}: says that it is nowhere; its latency is not used")
