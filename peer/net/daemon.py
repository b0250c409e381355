"""hivemind's network daemon (p2pd): its process, its sockets, and our requests to it.

Deviations from plain hivemind 1.1.12:
- requests use connections of our own, as a failed `stream_open` leaks a socket, here and in the daemon;
- the daemon is watched, as calls hang for ever when it dies; its sockets live in a folder of their own, which is swept;
- its pending calls are a `Pending`, as an answer to a call that was just given up ends its reader of all answers;
- a port is probed first, as libp2p shares it (SO_REUSEPORT) with another daemon of the same user;
- it offers only libp2p's usual relay, for signals: 128 KiB and two minutes a circuit (docs/adr/0023-dial-back.md);
- it has a lower priority than the process that it serves, and its own process group, as a leaving peer needs it.
"""

from __future__ import annotations

from peer.net import torchless  # noqa: F401 (before hivemind)

# isort: split

import asyncio
import contextlib
import functools
import ipaddress
import logging
import math
import re
import shutil
import signal
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import multiaddr
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, read_pbmsg_safe, write_pbmsg
from hivemind.proto import p2pd_pb2
from hivemind.utils.multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from peer.net import processes
from peer.net import sockets as sockets_of
from peer.net.address import Address, best_first, interface_hosts, is_circuit, on_interfaces, tcp
from peer.net.base import (
    BadAddress,
    NotServed,
    OtherPeer,
    StartFailed,
    Timeout,
    TransportLost,
    Unreachable,
    cancel,
    log,
    until,
)
from peer.net.incoming import Arrive, Disconnector, StreamListener, StreamOrigin
from peer.net.sockets import SocketFolder, port_error
from protocol.errors import RemoteError, shown
from protocol.identity import short_peer

T = TypeVar("T")

START_SECONDS = 60.0
CLOSE_SECONDS = 5.0
SPARING = "GOGC=20"
"""For a daemon with little memory: it collects garbage at a fifth more than it needs, not at twice as much."""
NO_RELAY = '{"Relay": {"Enabled": false}}'
"""Settings of a daemon that relays nothing: `-relay=0` leaves on what its own settings have on. Where it relays, it
reads a table of all networks at its start, in 0.4 s of processor time and 26 MB."""
NICE = 5
"""Lowers its priority: besides a busy process of ours it gets a quarter of a core."""
PING = "/ipfs/ping/1.0.0"
"""libp2p's ping: 32 bytes that the other daemon sends back, however busy its process is."""
PING_BYTES = 32
ANSWER_SECONDS = 5.0
"""A connection without an answer counts as dead after so long; libp2p itself takes 40 s."""

logging.getLogger("hivemind").setLevel(logging.ERROR)


_SILENT = "network daemon: it does not answer; start this peer again"


class Pending(dict[Any, asyncio.Future[Any]]):
    """hivemind's unary calls in progress, without those that are answered or cancelled and not yet cleared away."""

    def __contains__(self, call: object) -> bool:
        future = self.get(call)
        return future is not None and not future.done()


class Net(P2P):  # type: ignore[misc]
    """P2P with daemon flags that `create` hides, its sockets in `folder`, a lower priority, and no stream handling."""

    sparing = False
    settings = ""

    @classmethod
    def _make_process_args(cls, *args: Any, **kwargs: Any) -> Any:
        if "trustedRelays" in kwargs:
            kwargs["relayDiscovery"] = False
        little = ("env", SPARING) if cls.sparing and shutil.which("env") else ()
        nice = ("nice", "-n", NICE) if shutil.which("nice") else ()
        if cls.settings:
            kwargs["f"] = cls.settings
        return P2P._make_process_args(
            *processes.own_group_command(),
            *little,
            *nice,
            *args,
            **kwargs,
            connHi=4096,
            connLo=2048,
            relayService=False,
        )

    @classmethod
    def within(cls, folder: Path, sparing: bool = False, relaying: bool = True) -> type[Net]:
        settings = ""
        if not relaying:
            settings = str(folder / "daemon.json")
            Path(settings).write_text(NO_RELAY)
        return type("Net", (cls,), {"_UNIX_SOCKET_PREFIX": f"/unix{folder}/", "sparing": sparing, "settings": settings})

    def _start_listening(self) -> None:
        """See `Daemon.enter`."""


class Daemon:
    """A running daemon. `p2p` is hivemind's handle of it; `lost` is set when it has ended. Made by `start`."""

    def __init__(self, p2p: P2P, folder: SocketFolder, port: int = 0, everywhere: bool = False) -> None:
        self.p2p = p2p
        self.folder = folder
        self._port = port  # of our own addresses, which the daemon does not list beside those that it is to announce
        self._everywhere = everywhere
        self.peer_id: str = p2p.peer_id.to_base58()
        self.pid: int = p2p._child.pid
        self.lost = asyncio.Event()
        self.pending = Pending(p2p._client.control._pending_calls)
        """hivemind's unary calls in progress."""
        p2p._client.control._pending_calls = self.pending
        self._closing = False
        self._watcher: asyncio.Task[None] | None = None
        control = p2p._client.control
        self._entry_path = str(control.listen_maddr.value_for_protocol("unix"))
        self._entry: StreamListener | None = None
        self.expelling = Disconnector(str(control.daemon_connector.control_maddr.value_for_protocol("unix")), _ending)

    def enter(self, arrive: Arrive) -> None:
        """Hands incoming streams of the served names to `arrive` from now on."""
        self._entry = StreamListener(self._entry_path, _came, arrive)

    async def serve(self, name: str) -> None:
        """Accepts streams under `name`. Raises TimeoutError, TransportLost."""
        await self.within(self.p2p.add_binary_stream_handler(name, None), CLOSE_SECONDS)

    @classmethod
    async def start(
        cls,
        identity_file: Path,
        host: str,
        port: int,
        sockets: Path,
        timeout: float,
        announce: Sequence[str] = (),
        relays: Sequence[str] = (),
        sparing: bool = False,
    ) -> Daemon:
        """Starts a daemon that listens on TCP `host`:`port` (0: any), with its folder of sockets in `sockets`.

        announce, relays, sparing: as in peer/net/p2p.py
        Raises UsageError (PortInUse, StartFailed).
        """
        hosts = sockets_of.hosts(host, port) or [host]
        loopback = ipaddress.ip_address(host).is_loopback
        relaying = bool(relays or announce) or not loopback
        folder = SocketFolder(sockets)
        try:
            p2p = await Net.within(folder.path, sparing, relaying).create(
                host_maddrs=[tcp(one, port) for one in hosts],
                identity_path=str(identity_file),
                check_if_identity_free=False,
                nat_port_map=not loopback,
                use_relay=relaying,
                announce_maddrs=announce or None,
                use_auto_relay=bool(relays),
                trusted_relays=relays or None,
                force_reachability="private" if relays else None,
                startup_timeout=timeout,
            )
        except BaseException as error:
            folder.close()
            if isinstance(error, P2PDaemonError | OSError):
                text = " ".join(str(error).split())
                if "address already in use" in text:
                    raise port_error(host, port, "in use") from None
                raise StartFailed(
                    f"network daemon: did not start within {timeout:g} s ({text[:160]}); "
                    "is the machine overloaded? try again, or reinstall hivemind"
                ) from None
            raise
        everywhere = not announce and not relays and ipaddress.ip_address(host).is_unspecified
        return cls(p2p, folder, port if announce else 0, everywhere)

    def watch(self, ended: Callable[[], None]) -> None:
        """Sets `lost` and calls `ended` when the daemon's process, or our control connection to it, ends."""
        self._watcher = asyncio.create_task(self._watch(ended))

    async def _watch(self, ended: Callable[[], None]) -> None:
        child = asyncio.create_task(self.p2p._child.wait())
        control = self.p2p._client.control._read_task
        try:
            await asyncio.wait({child, control}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            child.cancel()
        self.lost.set()
        ended()
        if not self._closing:
            log.error("network daemon: it ended unexpectedly; everything that talks to peers stops")

    def check(self) -> None:
        """Raises TransportLost if the daemon has ended, or is about to."""
        if self._closing or self.lost.is_set():
            raise TransportLost("network daemon: it has ended; start this peer again")

    async def addresses(self) -> list[str]:
        listed: list[str] = []
        with contextlib.suppress(ValueError):  # a node without addresses
            listed += [str(address) for address in await self.p2p.get_visible_maddrs(latest=True)]
        if self._port:
            own = [f"{tcp(host, self._port)}/p2p/{self.peer_id}" for host in sorted(interface_hosts())]
            return [*listed, *best_first(own)]
        if self._everywhere:
            listed += on_interfaces(listed, interface_hosts())
        return best_first(dict.fromkeys(listed))

    async def ask(
        self, request: Any, peer: str, what: str, timeout: float
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, str]:
        """Sends a request over its own connection. Returns that, and the other end's address if it opened a stream.

        what: names the other side in errors
        Raises Unreachable, Timeout, TransportLost.
        """
        self.check()
        writer: asyncio.StreamWriter | None = None
        agreed = False
        try:
            async with asyncio.timeout(timeout):
                reader, writer = await self.p2p._client.control.daemon_connector.open_connection()
                response = p2pd_pb2.Response()
                await write_pbmsg(writer, request)
                await read_pbmsg_safe(reader, response)
            if response.type == p2pd_pb2.Response.ERROR:
                reason = _reason(response.error.msg)
                text = f"{what}: {reason}; check the address and that it runs"
                if (other := _OTHER_PEER.search(response.error.msg)) is not None:
                    raise OtherPeer(peer, text, other[1])
                raise (NotServed if reason == NOT_SERVED else Unreachable)(peer, text)
            agreed = True
            where = response.streamInfo.addr
            return reader, writer, str(Multiaddr(where)) if where else ""
        except TimeoutError:
            raise Timeout(peer, f"{what}: no answer within {timeout:g} s; check the address and the link") from None
        except (OSError, EOFError):
            raise TransportLost(_SILENT) from None
        finally:
            if writer is not None and not agreed:
                writer.transport.abort()

    async def connected(self, *, circuits: bool = False) -> list[str]:
        """Returns the peer of every connection, alive or dead, or of every circuit, which is no connection."""
        listed = await self.p2p.list_peers()
        return [p.peer_id.to_base58() for p in listed if any(is_circuit(str(a)) for a in p.addrs) == circuits]

    async def answers(self, peer: str, timeout: float) -> str | None:
        """Pings `peer`. Returns the address at which it answers, empty if it is not known, None without an answer."""
        request = p2pd_pb2.Request(
            type=p2pd_pb2.Request.STREAM_OPEN,
            streamOpen=p2pd_pb2.StreamOpenRequest(peer=raw_id(peer), proto=[PING], timeout=math.ceil(timeout)),
        )
        try:
            async with asyncio.timeout(timeout):
                reader, writer, where = await self.ask(request, peer, f"peer {short_peer(peer)}", timeout)
                try:
                    writer.write(bytes(PING_BYTES))
                    await reader.readexactly(PING_BYTES)
                finally:
                    writer.transport.abort()
        except NotServed:
            return ""  # that is an answer too
        except (RemoteError, OSError, EOFError, TimeoutError):
            return None
        return where

    async def disconnect(self, peer: str) -> None:
        """Ends all connections to `peer`, and so all streams. Raises Timeout, TransportLost."""
        request = _disconnect(peer)
        with contextlib.suppress(Unreachable):
            _, writer, _ = await self.ask(request, peer, f"peer {short_peer(peer)}", CLOSE_SECONDS)
            writer.close()

    async def within(self, work: Coroutine[Any, Any, T], timeout: float) -> T:
        """Awaits `work` under a deadline, while the daemon lives. Raises TimeoutError, TransportLost."""
        try:
            self.check()
        except TransportLost:
            work.close()
            raise
        try:
            if (done := await until(self.lost.wait(), work, timeout)) is not None:
                return done.result()
            self.check()
            raise TimeoutError
        except TimeoutError:
            raise
        except (OSError, EOFError):
            raise TransportLost(_SILENT) from None

    def closing(self) -> None:
        """Sends no more requests, and expects the daemon to end."""
        self._closing = True

    async def aclose(self) -> None:
        self.closing()
        self.expelling.close()
        if self._entry is not None:
            self._entry.close()
        await stop(self.p2p)
        self.folder.close()
        if self._watcher is not None:
            await cancel(self._watcher)


async def stop(p2p: P2P) -> None:
    """Ends a daemon's process and everything that hivemind leaves running for it."""
    child, control = p2p._child, p2p._client.control
    own = (p2p._listen_task, p2p._reader_task, control._read_task, control._write_task)
    processes.send_signal(child, signal.SIGTERM)
    p2p._child = None  # else it would be signalled otherwise (peer/net/processes.py)
    p2p._terminate()
    try:
        async with asyncio.timeout(CLOSE_SECONDS):
            await child.wait()
    except TimeoutError:
        processes.send_signal(child)
        await child.wait()
    await asyncio.gather(*(task for task in own if task is not None), return_exceptions=True)
    child._transport.close()


def dial_bytes(address: Address) -> bytes:
    """Encodes an address for the daemon, which cannot read relays' peer ids as hivemind writes them.

    Raises BadAddress.
    """
    try:
        return bytes(multiaddr.Multiaddr(address.dial).to_bytes())
    except (MultiaddrError, ValueError) as error:
        raise BadAddress(f"address {address.dial}: {shown(error)}; check the host's name") from None


def raw_id(peer: str) -> bytes:
    """Encodes a peer id for the daemon. Raises Unreachable."""
    try:
        return bytes(PeerID.from_base58(peer).to_bytes())
    except ValueError:
        raise Unreachable(peer, f"peer {short_peer(peer)}: not a peer id; check it") from None


def _disconnect(peer: str) -> Any:
    return p2pd_pb2.Request(type=p2pd_pb2.Request.DISCONNECT, disconnect=p2pd_pb2.DisconnectRequest(peer=raw_id(peer)))


def _ending(peer: str) -> bytes:
    """The request to end all connections to `peer`, with its length before it."""
    raw: bytes = _disconnect(peer).SerializeToString()
    return bytes([len(raw)]) + raw


@functools.lru_cache(4096)
def _came(raw: bytes) -> StreamOrigin:
    """Parses what the daemon says of a stream, the same for all of a peer's of one name. Raises ValueError."""
    try:
        info = StreamInfo.from_protobuf(p2pd_pb2.StreamInfo.FromString(raw))
    except Exception as error:  # protobuf's, the library's of addresses, or that of peer ids
        raise ValueError(shown(error)) from None
    return StreamOrigin(info.peer_id.to_base58(), str(info.addr), info.proto)


NOT_SERVED = "does not serve this; it may be another version"
UNDIALLED = "no address of it can be dialled from this machine"
_REASONS = (
    ("connection refused", "connection refused"),
    ("peer id mismatch", "another peer answers at this address"),
    ("protocols not supported", NOT_SERVED),
    ("protocol not supported", NOT_SERVED),
    ("no good addresses", UNDIALLED),
    ("no addresses", "its address is not known"),
    ("failed to find any peer", "its address is not known"),
    ("routing: not found", "its address is not known"),
    ("dial backoff", "it could not be reached a moment ago"),
    ("no route to host", "no route to its host"),
    ("network is unreachable", "its network cannot be reached"),
    ("i/o timeout", "no answer in time"),
    ("deadline exceeded", "no answer in time"),
    ("dial to self attempted", "it is this peer itself"),
)
PASSING = ("no answer in time", "could not be reached a moment ago")
"""Reasons for which a peer is dialled again while there is time."""


_OTHER_PEER = re.compile(r"remote key matches (12D3KooW[1-9A-HJ-NP-Za-km-z]{44})")


def _reason(text: str) -> str:
    for known, said in _REASONS:
        if known in text:
            return said
    return " ".join(text.split())[:160]
