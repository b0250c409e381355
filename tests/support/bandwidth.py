"""Parts that unit tests of bandwidth share with others."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from peer import events
from peer.net import bandwidth
from peer.net.bandwidth import (
    BandwidthServer,
)
from peer.net.base import Clock, Handler
from peer.net.link_monitor import LinkMonitor, RateConfig
from peer.net.memory import IN_FLIGHT, MemoryNetwork, MemoryTransport, Pipe
from protocol.wire import endpoints
from tests.support import networks

MBPS = 1e6
FIRST_WINDOW = 14_480
"""Bytes that TCP sends before anything is acknowledged."""


class Way:
    """One direction of a line: `bps`, and a window that doubles once a round trip, as TCP's does at first."""

    def __init__(self, loop: asyncio.AbstractEventLoop, bps: float, trip: float) -> None:
        self.bytes = 0
        self._loop, self._bps, self._trip = loop, bps, trip
        self._began: float | None = None
        self._free = 0.0

    def sent(self, size: int) -> float:
        """When bytes that are sent now are at the other side."""
        now = self._loop.time()
        self._began = now if self._began is None else self._began
        self.bytes += size
        trips = max(self._free, now) - self._began
        window = 8 * FIRST_WINDOW / self._trip * 2 ** min(trips / self._trip, 40)
        self._free = max(self._free, now) + 8 * size * bandwidth.GOODPUT**-1 / min(self._bps, window)
        return self._free + self._trip / 2


class ShapedPipe(Pipe):
    """A direction of a stream; all that go the same way share the line."""

    def __init__(self, loop: asyncio.AbstractEventLoop, way: Way) -> None:
        super().__init__(loop)
        self._loop, self._way, self._last = loop, way, 0.0
        self._under_way, self._less = 0, asyncio.Event()

    def carry(self, data: bytes) -> None:
        self._last = self._way.sent(len(data))
        self._under_way += len(data)
        self._loop.call_at(self._last, self._arrive, data)

    def _arrive(self, data: bytes) -> None:
        self._under_way -= len(data)
        self._less.set()
        self.reader.feed_data(data)

    async def drain(self) -> None:
        await super().drain()
        while self._under_way > IN_FLIGHT:
            self._less.clear()
            await self._less.wait()

    def end(self) -> None:
        self._loop.call_at(max(self._last, self._loop.time()) + 1e-9, self.reader.feed_eof)


class Shaped(MemoryNetwork):
    """Home's line is `up` and `down` bits a second, `trip` seconds there and back; no other line has a limit."""

    def __init__(self, up: float, down: float, trip: float = 0.04) -> None:
        super().__init__()
        loop = asyncio.get_running_loop()
        self.up, self.down = Way(loop, up, trip), Way(loop, down, trip)

    def pipe(self, loop: asyncio.AbstractEventLoop, sender: str, receiver: str, name: str) -> Pipe:
        return ShapedPipe(loop, self.up if sender == "home" else self.down)


def clock() -> Clock:
    loop = asyncio.get_running_loop()
    return Clock(steady=loop.time, wall=loop.time)


async def at_home(network: MemoryNetwork, **nodes: Handler | None) -> MemoryTransport:
    """Home's transport; `nodes`: how each answers, None: as it should."""
    for name, handler in nodes.items():
        node = network.transport(name)
        if handler is None:
            await BandwidthServer(clock()).serve(node)
        else:
            await node.serve(endpoints.BANDWIDTH, handler)
    return network.transport("home")


class Heard:
    """What a line tells."""

    def __init__(self) -> None:
        self.told: list[events.Body] = []

    @property
    def measured(self) -> list[events.Measured]:
        return [body for body in self.told if isinstance(body, events.Measured)]

    @property
    def warnings(self) -> list[str]:
        return [body.text for body in self.told if isinstance(body, events.Warning)]


def a_line(
    home: MemoryTransport,
    heard: Heard,
    nodes: tuple[str, ...] = ("node",),
    addresses: Callable[[str], list[str]] = lambda peer: [f"/ip4/203.0.113.7/tcp/1/p2p/{peer}"],
    said: RateConfig | None = None,
    **given: int,
) -> LinkMonitor:
    said = said or RateConfig(up_bps=given.get("up"), down_bps=given.get("down"), limit_bps=given.get("limit"))
    ours = networks.network(home, clock=clock(), addresses=addresses, nodes=nodes, limit=said.limit_bps)
    return LinkMonitor(said, ours, random.Random(1), heard.told.append)
