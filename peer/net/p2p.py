"""The transport over libp2p: hivemind's daemon (peer/net/daemon.py) and DHT (peer/net/dht.py) in our own event loop.

Only these three modules import hivemind. Two deviations from how hivemind uses them: we join without `initial_peers` and connect
afterwards, because its start fails when they are all down; and TCP only, because its daemon loses the last messages of a stream over QUIC.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Sequence
from pathlib import Path

from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from hivemind.proto import p2pd_pb2

from peer.net import daemon as daemons
from peer.net import keyfile
from peer.net.address import parse
from peer.net.base import BadAddress, Handler, StartFailed, Unreachable, Validate
from peer.net.daemon import CLOSE_SECONDS, PASSING, START_SECONDS, Daemon, dial_bytes, raw_id
from peer.net.dht import RETRY_SECONDS, RPC_SECONDS, Dht
from peer.net.stream import Endpoint, FrameStream
from protocol.errors import RemoteError
from protocol.identity import short_peer


class P2PTransport(Endpoint):
    """See peer.net.base.Transport. Made by `start`."""

    def __init__(self, daemon: Daemon, dht: Dht, addresses: Sequence[str]) -> None:
        super().__init__()
        self.peer_id = daemon.peer_id
        self.addresses = tuple(addresses)
        self.lost = daemon.lost
        self.daemon = daemon
        self.dht = dht
        self._closed = False
        daemon.watch(self.abort_all)

    # --- streams

    async def serve(self, name: str, handler: Handler) -> None:
        async def serve(info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            remote = info.peer_id.to_base58()
            with contextlib.suppress(asyncio.CancelledError):  # nothing comes after, and asyncio would call it an error
                await self.run(handler, self.stream(remote, name, reader, writer, writer.transport.abort))

        await self.daemon.within(self.daemon.p2p.add_binary_stream_handler(name, serve), CLOSE_SECONDS)

    async def open(self, peer: str, name: str, *, timeout: float) -> FrameStream:
        request = p2pd_pb2.Request(
            type=p2pd_pb2.Request.STREAM_OPEN,
            streamOpen=p2pd_pb2.StreamOpenRequest(peer=raw_id(peer), proto=[name], timeout=math.ceil(timeout)),
        )
        reader, writer = await self.daemon.ask(request, peer, f"peer {short_peer(peer)}", timeout)
        return self.stream(peer, name, reader, writer, writer.transport.abort)

    # --- connections and the DHT

    async def connect(self, addresses: Sequence[str], *, timeout: float) -> None:
        self.daemon.check()
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
        tasks = {asyncio.create_task(self._connect(p, known, timeout)) for p, known in by_peer.items()}
        for task in tasks:
            self.own(task)  # what is still dialling when the first is reached goes on
        reached: str | None = None
        while tasks and reached is None:
            done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                result = task.result()
                if isinstance(result, str):
                    reached = result
                else:
                    failures.append(result)
        if reached is None:
            raise failures[0] if failures else Unreachable("", "no address: nobody to connect to; give one")
        await self.dht.join(reached, timeout)

    async def _connect(self, peer: str, known: dict[str, bytes], timeout: float) -> str | RemoteError:
        """The peer, whose addresses are `known` as text and as bytes, or why it was not reached."""
        request = p2pd_pb2.Request(
            type=p2pd_pb2.Request.CONNECT,
            connect=p2pd_pb2.ConnectRequest(peer=raw_id(peer), addrs=list(known.values()), timeout=math.ceil(timeout)),
        )
        what = f"address {next(iter(known))}/p2p/{peer}"
        deadline = asyncio.get_running_loop().time() + timeout
        while True:
            left = deadline - asyncio.get_running_loop().time()
            try:
                _, writer = await self.daemon.ask(request, peer, what, max(left, 0.1))
            except RemoteError as error:
                if left < RETRY_SECONDS or not any(reason in str(error) for reason in PASSING):
                    return error
                await asyncio.sleep(RETRY_SECONDS)
            else:
                writer.close()
                return peer

    async def disconnect(self, peer: str) -> None:
        await self.daemon.disconnect(peer)

    async def store(self, key: str, subkey: str, value: bytes, *, ttl: float) -> bool:
        return await self.dht.store(key, subkey, value, ttl)

    async def get(self, key: str) -> dict[str, bytes]:
        return await self.dht.get(key)

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        if not self.lost.is_set():
            with contextlib.suppress(Exception):
                await self.dht.leave(CLOSE_SECONDS)
        self.daemon.closing()
        await self.shut()
        await self.daemon.aclose()


def _usable(address: str) -> bool:
    try:
        parse(address)
    except BadAddress:
        return False
    return True


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
) -> P2PTransport:
    """Starts the daemon, listening on TCP `host`:`port` (0: any), and joins through `bootstrap` (full addresses).

    The identity is made if its file is missing. Other peers may be reached through relays, and we serve as one. `timeout`: seconds
    that the start and the joining may each take; `rpc_seconds`: that one request of the DHT may take; `sockets`: the folder for
    Unix sockets, whose path is short. Raises UsageError (PortInUse, StartFailed, BadAddress, IdentityError), LocalError,
    ClockWrong, Unreachable if no bootstrap node was reached.
    """
    identity = keyfile.load_or_create(identity_file)
    for text in bootstrap:
        parse(text)
    daemons.check_port(host, port)
    sockets = sockets or daemons.socket_base()
    daemons.sweep(sockets)
    daemon = await Daemon.start(identity_file, host, port, sockets, timeout)
    close = daemon.aclose
    try:
        if daemon.peer_id != identity.peer_id:
            raise StartFailed(f"{identity_file}: the network daemon reads another identity from it; remove the file")
        dht = await Dht.begin(daemon, validate, rpc_seconds)
        transport = P2PTransport(daemon, dht, [a for a in await daemon.addresses() if _usable(a)])
        close = transport.aclose
        if bootstrap:
            await transport.connect(bootstrap, timeout=timeout)
    except BaseException:
        await close()
        raise
    return transport
