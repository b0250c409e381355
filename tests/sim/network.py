"""A bad network between the processes of a simulation, under the transport that tests and `potluck demo --in-memory`
use.

Bytes take their time. While two nodes are parted nothing passes between them, and their streams may break. On the
streams of sessions and votes whole messages are lost, doubled and overtaken as well: the machines must bear it.
"""

from __future__ import annotations

import asyncio
import math
import random
from typing import TYPE_CHECKING

from peer.net.base import Timeout, Unreachable
from peer.net.memory import MemoryNetwork, MemoryTransport, Pipe
from protocol.identity import short_peer
from protocol.wire import endpoints, framing

if TYPE_CHECKING:
    from tests.sim.world import World

MESSAGES = (endpoints.SESSION, endpoints.QUORUM)
"""Streams on which each write is one message."""
BULK = (endpoints.BLOB, endpoints.PIPE)
"""Streams of payloads, states and activations, which take a line from each other, but for what is said between them."""
HELD_SECONDS = 1.0
"""How often it is tried to pass on what a parted network holds up."""


def is_said(data: bytes) -> bool:
    """Returns whether a frame is a question or an answer, and nothing of a blob."""
    try:
        return isinstance(framing.unpack_message(data[framing.PREFIX :]), dict)
    except framing.FrameError:
        return False


class SimPipe(Pipe):
    """One direction of a stream between two processes."""

    def __init__(self, loop: asyncio.AbstractEventLoop, world: World, link: tuple[str, str], name: str) -> None:
        super().__init__(loop)
        self._loop, self._world, self._link, self._name = loop, world, link, name
        self._rng = random.Random(f"{world.seed} {link} {next(world.streams)}")
        self._first = True
        self._at = 0.0
        self._over = False

    def write(self, data: bytes, /) -> None:
        if self._closed:
            raise ConnectionResetError
        self._world.point(self._link[0], f"network: send to {self._name.split('/')[1]}")
        if self._name in MESSAGES and not self._first:
            self._world.tells(self._link[0], data[framing.PREFIX :])
        super().write(data)
        self._world.point(self._link[0], f"network: sent to {self._name.split('/')[1]}")

    def carry(self, data: bytes) -> None:
        world, copies = self._world, 1
        lossy = self._name in MESSAGES and not self._first
        self._first = False  # a session that is not opened tests nothing
        if lossy:
            copies = 0 if world.chance(world.weather.drop, self._rng) else 1
            copies += copies and world.chance(world.weather.duplicate, self._rng)
            world.stats["dropped" if copies == 0 else "doubled" if copies == 2 else "sent"] += 1
        for _ in range(copies):
            bulk = self._name in BULK and not is_said(data)
            at = world.network.sent(*self._link, len(data), bulk) + world.delay(self._rng)
            if not (lossy and world.chance(world.weather.overtake, self._rng)):
                at = self._at = max(
                    at, math.nextafter(self._at, math.inf)
                )  # a heap of timers mixes up what is due at once
            self._loop.call_at(at, self._arrive, data)

    def _arrive(self, data: bytes) -> None:
        if self._over:
            return
        if self._world.parted(*self._link):
            self._world.stats["held up"] += 1
            self._at = max(self._at, self._loop.time() + HELD_SECONDS)
            self._loop.call_at(self._at, self._arrive, data)
        else:
            self.reader.feed_data(data)

    def end(self) -> None:
        self._loop.call_at(max(self._at, self._loop.time() + self._world.delay(self._rng)), self._end)

    def _end(self) -> None:
        self._over = True
        self.reader.feed_eof()


class SimNetwork(MemoryNetwork):
    """The network of one simulated run."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self.rates: dict[str, tuple[float, float]] = {}
        """Bits a second that a node sends and receives with, of those whose lines are not without limit."""
        self.bulk_bytes = 0
        """That all have sent."""
        self._free: dict[tuple[str, bool], float] = {}

    def sent(self, sender: str, receiver: str, size: int, bulk: bool) -> float:
        """When bytes that are sent now have passed the sender's uplink and then the receiver's downlink. What is in
        bulk goes one after the other; messages take no time, for models here are small and messages are not."""
        at = self._world.now
        self.bulk_bytes += size if bulk else 0
        for line in ((sender, True), (receiver, False)) if bulk else ():
            if line[0] in self.rates:
                up, down = self.rates[line[0]]
                at = max(at, self._free.get(line, 0.0)) + 8 * size / (up if line[1] else down)
                self._free[line] = at
        return at

    def pipe(self, loop: asyncio.AbstractEventLoop, sender: str, receiver: str, name: str) -> SimPipe:
        return SimPipe(loop, self._world, (sender, receiver), name)

    async def reach(self, peer: str, other: str, timeout: float) -> None:
        self._world.point(peer, "network: dial")
        await asyncio.sleep(self._world.delay(self._world.rng))
        if self._world.parted(peer, other) or self._world.parted(other, peer):
            await asyncio.sleep(timeout)
            raise Unreachable(other, f"peer {short_peer(other)}: the network is parted")

    async def ask(self, peer: str) -> None:
        self._world.point(peer, "network: DHT")
        await asyncio.sleep(self._world.delay(self._world.rng))
        if self._world.chance(self._world.weather.fetch_failure, self._world.rng):
            raise Timeout(peer, "DHT: no answer; try again")

    def vanish(self, transport: MemoryTransport) -> None:
        """The process behind a transport is dead: it is not found, and its streams end at the other side."""
        if self.peers.get(transport.peer_id) is transport:
            del self.peers[transport.peer_id]
        transport.abort_all()
