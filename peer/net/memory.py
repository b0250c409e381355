"""A network inside one event loop, for tests and for runs in one process. It behaves as p2p does, without sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Sequence

from peer.net.base import Handler, NotServed, TransportLost, Unreachable, Validate, check_record
from peer.net.stream import Endpoint, FrameStream
from protocol.identity import short_peer

IN_FLIGHT = 512 * 1024
"""A sender waits when the other side has left twice this many bytes unread."""


class Pipe:
    """One direction: the writer of one side feeds the reader of the other, which pauses it when it is full."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.reader = asyncio.StreamReader(limit=IN_FLIGHT, loop=loop)
        self.reader.set_transport(self)  # type: ignore[arg-type]
        self._room = asyncio.Event()
        self._room.set()
        self._closed = False

    def pause_reading(self) -> None:
        self._room.clear()

    def resume_reading(self) -> None:
        self._room.set()

    def write(self, data: bytes, /) -> None:
        if self._closed:
            raise ConnectionResetError
        self.carry(data)

    def carry(self, data: bytes) -> None:
        self.reader.feed_data(data)

    async def drain(self) -> None:
        await asyncio.sleep(0)  # a sender without pause must not keep the loop for itself
        await self._room.wait()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._room.set()
            self.end()

    def end(self) -> None:
        """Tells the other side that nothing more comes."""
        self.reader.feed_eof()

    async def wait_closed(self) -> None:
        return


class MemoryTransport(Endpoint):
    """One peer of a MemoryNetwork; see peer.net.base.Transport."""

    def __init__(self, network: MemoryNetwork, peer_id: str, validate: Validate) -> None:
        super().__init__()
        self.peer_id = peer_id
        self.addresses: tuple[str, ...] = (f"/memory/p2p/{peer_id}",)
        self._seen: tuple[str, ...] = self.addresses
        self.lost = asyncio.Event()
        self.validate = validate
        self._network = network
        self._handlers: dict[str, Handler] = {}

    async def serve(self, name: str, handler: Handler) -> None:
        self._handlers[name] = handler

    async def open(self, peer: str, name: str, *, timeout: float) -> FrameStream:
        self._check()
        await self._network.reach(self.peer_id, peer, timeout)
        other = self._network.peers.get(peer)
        if other is None or other is self:
            raise Unreachable(peer, f"peer {short_peer(peer)}: nobody is there; check that it runs")
        handler = other._handlers.get(name)
        if handler is None:
            raise NotServed(peer, f"peer {short_peer(peer)}: does not serve {name}; it may be another version")
        loop = asyncio.get_running_loop()
        there = self._network.pipe(loop, self.peer_id, peer, name)
        back = self._network.pipe(loop, peer, self.peer_id, name)

        def cut() -> None:
            there.close()
            back.close()

        theirs = other.stream(self.peer_id, name, there.reader, back, cut)
        where = self._network.hosts.get(self.peer_id, "")
        other.own(loop.create_task(other.run(handler, theirs, where)))
        return self.stream(peer, name, back.reader, there, cut)

    async def connect(self, addresses: Sequence[str], *, timeout: float) -> None:
        self._check()
        for address in addresses:
            peer = address.rpartition("/p2p/")[2]
            with contextlib.suppress(Unreachable):
                await self._network.reach(self.peer_id, peer, timeout)
                if peer in self._network.peers:
                    return
        first = addresses[0] if addresses else "none"
        raise Unreachable(
            first.rpartition("/p2p/")[2], f"address {first}: nobody is there; check the address and that it runs"
        )

    async def disconnect(self, peer: str) -> None:
        """Does nothing: there is no connection to close."""

    async def look(self) -> bool:
        self._check()
        before, self._seen = self._seen, self.addresses
        return self._seen != before

    def seen_at(self, peer: str) -> str:
        return self._network.hosts.get(peer, "")

    def doubt(self, peer: str) -> None:
        """Does nothing: no peer here is silent."""

    async def store(self, key: str, subkey: str, value: bytes, *, ttl: float) -> bool:
        check_record(value, ttl)
        self._check()
        await self._network.ask(self.peer_id)
        if not all(peer.validate(key, subkey, value) for peer in self._network.peers.values()):
            return False
        expires = asyncio.get_running_loop().time() + ttl
        records = self._network.records.setdefault(key, {})
        if subkey in records and records[subkey][0] >= expires:
            return False
        records[subkey] = (expires, bytes(value))
        return True

    def prefer(self, peers: Collection[str]) -> None:
        """There is space for all."""

    async def get(self, key: str) -> dict[str, bytes]:
        self._check()
        await self._network.ask(self.peer_id)
        now = asyncio.get_running_loop().time()
        records = self._network.records.get(key, {})
        return {
            subkey: value
            for subkey, (expires, value) in records.items()
            if expires > now and self.validate(key, subkey, value)
        }

    def _check(self) -> None:
        if self._network.peers.get(self.peer_id) is not self:
            raise TransportLost("network: this peer has left it; start it again")

    async def aclose(self) -> None:
        if self._network.peers.get(self.peer_id) is self:
            del self._network.peers[self.peer_id]
        await self.shut()


class MemoryNetwork:
    """The present peers, and the records that they stored.

    records: key -> subkey -> (expiry by the loop's clock, value)
    hosts: the addresses that peers seem to come from, where it matters
    """

    def __init__(self) -> None:
        self.peers: dict[str, MemoryTransport] = {}
        self.records: dict[str, dict[str, tuple[float, bytes]]] = {}
        self.hosts: dict[str, str] = {}

    def transport(self, peer_id: str, validate: Validate = lambda key, subkey, value: True) -> MemoryTransport:
        """A new peer; call inside the running loop."""
        if peer_id in self.peers:
            raise ValueError(f"peer {peer_id} is already there")
        self.peers[peer_id] = transport = MemoryTransport(self, peer_id, validate)
        return transport

    # --- what a worse network does worse (tests/sim/network.py)

    def pipe(self, loop: asyncio.AbstractEventLoop, sender: str, receiver: str, name: str) -> Pipe:
        """One direction of a stream that is opened under `name`."""
        return Pipe(loop)

    async def reach(self, peer: str, other: str, timeout: float) -> None:
        """Returns when `peer` has found its way to `other`, whether anybody is there or not. Raises Unreachable."""
        await asyncio.sleep(0)

    async def ask(self, peer: str) -> None:
        """Returns when `peer` has been to the DHT and back. Raises Timeout."""
        await asyncio.sleep(0)
