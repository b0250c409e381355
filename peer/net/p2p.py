"""The transport over libp2p: hivemind's daemon (peer/net/daemon.py) and DHT (peer/net/dht.py) in our own event loop.

Only these three modules import hivemind. We join without `initial_peers` and connect afterwards, as its start fails
when they are all down.
"""

from __future__ import annotations

from peer.net import torchless  # noqa: F401 (before hivemind)

# isort: split

import asyncio
import contextlib
import functools
import math
import socket
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from hivemind.proto import p2pd_pb2

from peer.net import greeting, keyfile, processes
from peer.net import sockets as sockets_of
from peer.net.address import OwnAddresses, interface_hosts, is_circuit, parse
from peer.net.base import BadAddress, Handler, StartFailed, Timeout, TransportLost, Unreachable, Validate, cancel
from peer.net.daemon import (
    ANSWER_SECONDS,
    CLOSE_SECONDS,
    PASSING,
    START_SECONDS,
    UNDIALLED,
    Daemon,
    dial_bytes,
    raw_id,
)
from peer.net.dht import RETRY_SECONDS, RPC_SECONDS, Dht, Latest
from peer.net.greeting import why_unknown
from peer.net.guests import FROM_OPERATORS, TURNS_TO_OPEN, Limits, StreamTurns, Turns
from peer.net.incoming import IncomingStream, StreamOrigin
from peer.net.lru import LruDict
from peer.net.stream import Endpoint, FrameStream, ending
from protocol.errors import RemoteError
from protocol.identity import short_peer
from protocol.wire import endpoints

MOVED_SECONDS = 2.0
"""A peer has so long to answer after we lost an address: its connection is on another address, or dead."""
MAX_SEEN = 4096
PUNCH_SECONDS = 0.25
"""Interval of the checks whether a router's hole was punched."""
LIST_SECONDS, SETTLED_SECONDS = 10.0, 30.0
"""Interval of asking the daemon for our addresses, once neither they nor the interfaces' have changed for so long."""
SILENT_SECONDS = 5.0
"""A silent stream is served after so long, for its handler to end it."""
SAYS_NOTHING = "opens streams, says nothing, and closes them"
SIGNALS_ONLY = "its router lets nobody in, and there is no hole in it yet"
MAX_CHECKS = 32


class P2PTransport(Endpoint):
    """See peer.net.base.Transport. Made by `start`."""

    def __init__(self, daemon: Daemon, dht: Dht, own: OwnAddresses) -> None:
        super().__init__(Limits(together=processes.most_streams()))
        self.peer_id = daemon.peer_id
        self.addresses = own.listed
        self._own = own
        self._changed_at = asyncio.get_running_loop().time()
        self._list_at = 0.0
        self.lost = daemon.lost
        self.daemon = daemon
        self.dht = dht
        self.disconnect = daemon.disconnect
        self.store, self.prefer, self.get = dht.store, dht.prefer, dht.get
        self._closed = False
        self._seen = LruDict[str, str](MAX_SEEN)
        self._signals: set[str] = set()  # peers whose last answer came through a circuit
        self._checks: dict[str, asyncio.Task[bool]] = {}
        self._later: dict[str, asyncio.TimerHandle] = {}  # peers that are pinged as soon as they may be
        self._handlers: dict[str, Handler] = {}
        self.turns = Turns()
        self.guests.expel = daemon.expelling.end
        dht.count(self.guests)
        daemon.enter(self._arrived)
        daemon.watch(self.abort_all)

    # --- streams

    async def serve(self, name: str, handler: Handler) -> None:
        self._handlers[name] = handler
        await self.daemon.serve(name)

    def _arrived(self, came: StreamOrigin, conn: socket.socket, head: int) -> None:
        """Decides whether an incoming stream is served, and when, before anything is made of it."""
        handler, guest, now = self._handlers.get(came.name), IncomingStream(conn), asyncio.get_running_loop().time()
        if self._closed or handler is None or not self.guests.enter(came.peer, came.where, came.name, guest, now):
            conn.close()
            return
        guest.over = lambda: self.guests.leave(came.peer, guest)
        self._seen[came.peer] = came.where
        conn.recv(head)
        if guest.is_silent():
            if self.guests.may_be_silent(came.peer, came.name, guest, now):
                guest.when_said(functools.partial(self._said, handler, came, guest), SILENT_SECONDS)
            else:
                guest.abort()
        else:
            self._said(handler, came, guest)

    def _said(self, handler: Handler, came: StreamOrigin, guest: IncomingStream) -> None:
        """Serves a stream on which its opener has spoken, as soon as its rate allows."""
        loop = asyncio.get_running_loop()
        self.guests.speaks(came.peer, guest)
        if guest.is_over():  # closed without a byte
            guest.abort()
            if not self.guests.carries(came.peer, came.name):
                self.guests.offend(came.peer, SAYS_NOTHING, loop.time())
            return
        begin = functools.partial(self._take_turn, handler, came, guest)
        if wait := self.guests.wait(came.peer, came.name, loop.time()):
            guest.later = loop.call_later(wait, begin)
        else:
            begin()

    def _take_turn(self, handler: Handler, came: StreamOrigin, guest: IncomingStream) -> None:
        address, now = self.guests.account(came.peer, came.where), asyncio.get_running_loop().time()
        serve = functools.partial(self._serve_now, handler, came, guest)
        if self.is_uncounted(came.peer, came.name) or self.turns.at_once(came.peer, address, now, TURNS_TO_OPEN):
            serve()
        else:
            self.turns.in_line(came.peer, address, serve, TURNS_TO_OPEN)

    def _serve_now(self, handler: Handler, came: StreamOrigin, guest: IncomingStream) -> None:
        guest.later = None
        if guest.is_over():  # closed while it waited
            guest.abort()
            return
        guest.served = True
        self.own(asyncio.get_running_loop().create_task(self._attend_to(handler, came, guest)))

    async def _attend_to(self, handler: Handler, came: StreamOrigin, guest: IncomingStream) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        try:
            transport, _ = await loop.connect_accepted_socket(lambda: protocol, guest.conn)
        except OSError:
            return guest.over()
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        stream = guest.stream = self.stream(came.peer, came.name, reader, writer, ending(writer))
        if not self.is_uncounted(came.peer, came.name):
            address, passes = self.guests.account(came.peer, came.where), came.name == endpoints.QUORUM
            stream.turns = StreamTurns(self.turns, came.peer, address, passes)
        if guest.ended:  # refused meanwhile
            stream.abort()
        await self.attend(handler, stream, guest)

    async def open(self, peer: str, name: str, *, timeout: float) -> FrameStream:
        request = p2pd_pb2.Request(
            type=p2pd_pb2.Request.STREAM_OPEN,
            streamOpen=p2pd_pb2.StreamOpenRequest(peer=raw_id(peer), proto=[name], timeout=math.ceil(timeout)),
        )
        reader, writer, where = await self.daemon.ask(request, peer, f"peer {short_peer(peer)}", timeout)
        if is_circuit(where):
            writer.transport.abort()
            raise Unreachable(peer, f"peer {short_peer(peer)}: {SIGNALS_ONLY}; try again")
        self._seen[peer] = where
        stream = self.stream(peer, name, reader, writer, ending(writer))
        if name in FROM_OPERATORS:
            stream.turns = StreamTurns(self.turns, peer, "", passes=True)
        return stream

    def seen_at(self, peer: str) -> str:
        return self._seen.get(peer, "")

    # --- connections and the DHT

    async def connect(self, addresses: Sequence[str], *, timeout: float) -> None:
        self.daemon.check()
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout
        by_peer: dict[str, dict[str, bytes]] = {}
        failures: list[RemoteError] = []
        for text in addresses:
            try:
                address = parse(text)
                raw = dial_bytes(address)
            except BadAddress as error:
                failures.append(Unreachable("", str(error)))
            else:
                if address.peer != self.peer_id:
                    by_peer.setdefault(address.peer, {})[address.dial] = raw
        tasks = [asyncio.create_task(self._connect(p, known, timeout)) for p, known in by_peer.items()]
        for task in tasks:
            self.own(task)  # the others go on dialling when the first is reached
        reached: str | None = None
        for answer in asyncio.as_completed(tasks):
            result = await answer
            if isinstance(result, str):
                reached = result
                break
            failures.append(result)
        for task in tasks:  # their exceptions are of no interest
            task.add_done_callback(lambda late: late.cancelled() or late.exception())
        if reached is None:
            raise failures[0] if failures else Unreachable("", "no address: nobody to connect to; give one")
        await self.dht.join(reached, max(end - loop.time(), RPC_SECONDS))

    async def _connect(self, peer: str, known: dict[str, bytes], timeout: float) -> str | RemoteError:
        """Dials `peer` at its `known` addresses, as text and as bytes. Returns it, or why it was not reached.

        The daemon takes an old connection for alive, so the peer has to answer a ping. A circuit does not count: over
        it libp2p punches a hole in a router, if it can.
        """
        request = _dial(peer, known.values(), timeout)
        what = f"address {next(iter(known))}/p2p/{peer}"
        deadline = asyncio.get_running_loop().time() + timeout
        if any(map(is_circuit, known)):
            await self._end_circuit(peer)
        while True:
            left = deadline - asyncio.get_running_loop().time()
            try:
                await self._greeted(peer, known, what, max(left, 0.1))
                _, writer, _ = await self.daemon.ask(request, peer, what, max(left, 0.1))
            except RemoteError as error:
                if UNDIALLED in str(error) and (why := await why_unknown(known)):
                    return Unreachable(peer, f"{what}: {why}; check the address")
                if left < RETRY_SECONDS or not any(reason in str(error) for reason in PASSING):
                    return error
                await asyncio.sleep(RETRY_SECONDS)
            else:
                writer.close()
                if await asyncio.shield(self._check(peer)):
                    if peer not in self._signals:
                        return peer
                    if deadline - asyncio.get_running_loop().time() > 2 * PUNCH_SECONDS:
                        await asyncio.sleep(PUNCH_SECONDS)
                        continue
                    with contextlib.suppress(RemoteError):
                        await self.daemon.disconnect(peer)  # libp2p tries a hole for each new circuit
                    return Unreachable(peer, f"{what}: {SIGNALS_ONLY}; try again")
                if deadline - asyncio.get_running_loop().time() < RETRY_SECONDS:
                    return Timeout(peer, f"{what}: no answer within {timeout:g} s; check the address and the link")

    async def _greeted(self, peer: str, known: Collection[str], what: str, left: float) -> None:
        """Checks that a libp2p host is there before the daemon dials it (peer/net/greeting.py). Raises Unreachable."""
        if any(map(is_circuit, known)):
            return
        asked = asyncio.create_task(greeting.why_silent(known, min(left, greeting.SECONDS)))
        try:
            while not asked.done():  # who has moved may connect to us meanwhile
                if await self._is_connected(peer):
                    return
                await asyncio.wait({asked}, timeout=RETRY_SECONDS)
        finally:
            await cancel(asked)
        if (reason := asked.result()) and not await self._is_connected(peer):
            raise Unreachable(peer, f"{what}: {reason}; check the address and that it runs")

    async def _is_connected(self, peer: str) -> bool:
        """Returns whether the daemon has a connection to it, alive or not."""
        try:
            return peer in await self.daemon.within(self.daemon.connected(), CLOSE_SECONDS)
        except TimeoutError:
            return False

    async def _end_circuit(self, peer: str) -> None:
        """Ends the circuits to an unconnected `peer`: the daemon would take them for a connection, and not dial."""
        with contextlib.suppress(RemoteError, TimeoutError):
            through = await self.daemon.within(self.daemon.connected(circuits=True), CLOSE_SECONDS)
            if peer in through and peer not in await self.daemon.within(self.daemon.connected(), CLOSE_SECONDS):
                await self.daemon.disconnect(peer)

    def doubt(self, peer: str) -> None:
        if self._closed or peer in self._later:
            return
        loop = asyncio.get_running_loop()
        if (wait := self.flow(peer).ask_in(loop.time())) > 0:
            self._later[peer] = loop.call_later(wait, self._doubt_again, peer)
        else:
            self._check(peer, several=False)

    def _doubt_again(self, peer: str) -> None:
        del self._later[peer]
        self.doubt(peer)

    def _check(self, peer: str, seconds: float = ANSWER_SECONDS, *, several: bool = True) -> asyncio.Task[bool]:
        """Pings `peer`, and ends the connections to it unless it answers; concurrent callers share one ping.

        seconds: for the answer, besides the time that queued bytes may take
        several: whether other connections may be alive besides the one that answers; else one of them counts as dead
        """
        task = self._checks.get(peer)
        if task is None:
            self._checks[peer] = task = asyncio.create_task(self._answers(peer, seconds, several))
            task.add_done_callback(lambda task: self._checks.pop(peer))
            self.own(task)
        return task

    async def _answers(self, peer: str, seconds: float, several: bool) -> bool:
        flow = self.flow(peer)
        received = flow.received
        seconds += flow.queue_seconds(asyncio.get_running_loop().time())
        with contextlib.suppress(RemoteError, TransportLost, TimeoutError):
            where = await self.daemon.answers(peer, seconds)
            if where is not None:
                (self._signals.add if is_circuit(where) else self._signals.discard)(peer)
            is_there = where is not None or flow.received > received
            if is_there and several:
                return True
            connections = (await self.daemon.within(self.daemon.connected(), CLOSE_SECONDS)).count(peer)
            if is_there and connections < 2:
                return True
            await self.daemon.disconnect(peer)
            if connections > 1:  # it has moved, and the daemon knows from the newer one where it listens
                request = _dial(peer, (), MOVED_SECONDS)
                _, writer, _ = await self.daemon.ask(request, peer, f"peer {short_peer(peer)}", MOVED_SECONDS)
                writer.close()
        return False

    async def look(self) -> bool:
        before, now = self.addresses, asyncio.get_running_loop().time()
        if interface_hosts() == self._own.hosts and now - self._changed_at > SETTLED_SECONDS and now < self._list_at:
            return False
        self._list_at = now + LIST_SECONDS
        with contextlib.suppress(TimeoutError):  # the daemon is busy
            listed = await self.daemon.within(self.daemon.addresses(), CLOSE_SECONDS)
            lost = self._own.update(listed, interface_hosts())
            self.addresses = self._own.listed
            if lost:
                await self._check_all(await self.daemon.within(self.daemon.connected(), CLOSE_SECONDS))
        if set(self.addresses) == set(before):
            return False
        self._changed_at = now
        return True

    async def _check_all(self, peers: Sequence[str]) -> None:
        gate = asyncio.Semaphore(MAX_CHECKS)

        async def check(peer: str) -> None:
            async with gate:
                await asyncio.shield(self._check(peer, MOVED_SECONDS, several=False))

        await asyncio.gather(*(check(peer) for peer in set(peers)))

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        for handle in self._later.values():
            handle.cancel()
        if not self.lost.is_set():
            with contextlib.suppress(Exception):
                await self.dht.leave(CLOSE_SECONDS)
        self.daemon.closing()
        await self.shut()
        await self.daemon.aclose()


def _dial(peer: str, addresses: Iterable[bytes], seconds: float) -> Any:
    """A request for a connection to `peer`, at these addresses or at others that the daemon knows."""
    connect = p2pd_pb2.ConnectRequest(peer=raw_id(peer), addrs=list(addresses), timeout=math.ceil(seconds))
    return p2pd_pb2.Request(type=p2pd_pb2.Request.CONNECT, connect=connect)


async def start(
    identity_file: Path,
    *,
    host: str = "0.0.0.0",
    port: int = 0,
    bootstrap: Sequence[str] = (),
    validate: Validate,
    timeout: float = START_SECONDS,
    rpc_seconds: float = RPC_SECONDS,
    sockets: Path | None = None,
    announce: Sequence[str] = (),
    relays: Sequence[str] = (),
    latest: Latest = lambda value: math.inf,
    sparing: bool = False,
) -> P2PTransport:
    """Starts the daemon, listening on TCP `host`:`port` (0: any), and joins through `bootstrap` (full addresses).

    Long because each setting of a transport comes in here:
    identity_file: created if it is missing
    timeout: seconds that the start and the joining may each take
    rpc_seconds: that one request of the DHT may take
    sockets: folder for Unix sockets, with a short path
    announce: addresses (without a peer id) to announce besides our own
    relays: full addresses of public peers that carry signals to us, if our router blocks connections
    latest: until when a valid record may be kept
    sparing: use little memory, for more processor time

    Raises UsageError (PortInUse, StartFailed, BadAddress, IdentityError), LocalError, ClockWrong, and Unreachable if no
    bootstrap node was reached.
    """
    identity = keyfile.load_or_create(identity_file)
    for text in bootstrap:
        parse(text)
    sockets_of.check_port(host, port)
    sockets = sockets or sockets_of.socket_base()
    sockets_of.sweep(sockets)
    daemon = await Daemon.start(identity_file, host, port, sockets, timeout, announce, relays, sparing)
    close = daemon.aclose
    try:
        if daemon.peer_id != identity.peer_id:
            raise StartFailed(f"{identity_file}: the network daemon reads another identity from it; remove the file")
        dht = await Dht.begin(daemon, validate, rpc_seconds, latest)
        own = OwnAddresses()
        own.update(await daemon.addresses(), interface_hosts())
        transport = P2PTransport(daemon, dht, own)
        close = transport.aclose
        if bootstrap:
            await transport.connect(bootstrap, timeout=timeout)
    except BaseException:
        await close()
        raise
    return transport
