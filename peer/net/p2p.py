"""The transport over libp2p: hivemind's daemon (p2pd) and DHT in our own event loop. Nothing else imports hivemind, which is
why this module is long.

Deviations from plain hivemind 1.1.12, each because of something it does:
- streams are opened with our own request, because its `stream_open` leaks a socket, here and in the daemon, when it fails;
- we join without `initial_peers` and connect afterwards, because its start fails when they are all down;
- the daemon is watched, because calls hang for ever when it dies; its sockets live in a folder of their own, which is swept;
- TCP only, because its daemon loses the last messages of a stream over QUIC;
- its msgpack decoder is replaced (`safe_loads`), because it can be made to recurse until the process crashes;
- its pending calls are kept by `_Pending`, because an answer to a call that was just given up ends its reader of all answers;
- what a DHT node keeps is bounded (`_Storage`), because an answer with too many records never arrives;
- DHT records must be `subkey -> [key, value]`, so that a validator learns the key (hivemind has only its hash).
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import math
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgpack
from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import ValidationError
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, read_pbmsg_safe, write_pbmsg
from hivemind.proto import p2pd_pb2
from hivemind.utils.multiaddr import Multiaddr
from hivemind.utils.multiaddr.exceptions import Error as MultiaddrError
from hivemind.utils.serializer import MSGPackSerializer
from peer.net.address import Address, parse
from peer.net.base import (
    MAX_RECORD,
    MAX_TTL,
    BadAddress,
    ClockWrong,
    Handler,
    PortInUse,
    StartFailed,
    Timeout,
    TransportLost,
    Unreachable,
    Validate,
    check_record,
    log,
)
from peer.net.stream import Endpoint, FrameStream
from protocol.errors import RemoteError, UsageError, shown
from protocol.identity import short_peer
from protocol.wire.framing import FrameError, unpack_message

from peer.net import keyfile

T = TypeVar("T")

START_SECONDS = 60.0
DHT_SECONDS = 20.0
"""Deadline of one store or get as a whole."""
RPC_SECONDS = 4.0
"""Deadline of one request of the DHT to one peer."""
PINGS = 5
"""How often a node is pinged before we give up joining the DHT through it."""
RETRY_SECONDS = 0.5
CLOSE_SECONDS = 5.0
SKEW_SECONDS = 60.0
"""How far beyond MAX_TTL a record's expiry may lie by our clock: the writer's may be ahead."""
_FOLDER = "potluck-net-"
_FOLDER_PATH_MAX = 48
"""The path of a Unix socket has at most 103 bytes; its name takes 50 of them."""
MAX_KEY_BYTES = 3 << 20
"""Most bytes of records that we keep under one key. The daemon drops an answer of over 4 MiB without a word."""
_SUBKEY_BYTES = 128
_RECORD_BYTES = _SUBKEY_BYTES + 16
"""Of a record in an answer, besides its value, at most."""
_DICTIONARY = 0x50
"""hivemind's extension type of a DHT dictionary."""

logging.getLogger("hivemind").setLevel(logging.ERROR)


def safe_loads(raw: bytes) -> object:
    """Decodes what the DHT may carry: one plain value, or one dictionary of plain values. Never recurses.

    hivemind decodes extension types inside extension types by recursion, before any validator runs. Raises FrameError.
    """
    if raw[:1] not in (b"\xc7", b"\xc8", b"\xc9", b"\xd4", b"\xd5", b"\xd6", b"\xd7", b"\xd8"):
        return unpack_message(raw)
    try:
        outer = msgpack.unpackb(raw)  # without a hook an extension stays a pair (code, bytes)
    except (ValueError, msgpack.exceptions.UnpackException):
        raise FrameError("DHT dictionary: not valid msgpack") from None
    if not isinstance(outer, msgpack.ExtType) or outer.code != _DICTIONARY:
        raise FrameError("DHT dictionary: another extension type")
    match unpack_message(outer.data):
        case [_, _, list(items)]:
            pass
        case _:
            raise FrameError("DHT dictionary: not of the expected form")
    dictionary = DictionaryDHTValue()  # the sender's size limit is not taken over
    with dictionary.freeze():
        for item in items:
            match item:
                case [str(subkey), bytes(value), float(expires)] if math.isfinite(expires):
                    dictionary.store(subkey, value, expires)
                case _:
                    raise FrameError("DHT dictionary: not of the expected form")
    return dictionary


MSGPackSerializer.loads = staticmethod(safe_loads)


class _Validator(RecordValidatorBase):  # type: ignore[misc]
    """Caps size and expiry, checks the form, and asks `validate`; refuses records without subkey."""

    def __init__(self, validate: Validate) -> None:
        self._validate = validate

    def validate(self, record: DHTRecord) -> bool:
        try:
            return self._check(record)
        except Exception:  # whatever a remote record provokes must not reach hivemind, which would tell the sender
            log.debug("a DHT record was refused", exc_info=True)
            return False

    def _check(self, record: DHTRecord) -> bool:
        subkey = unpack_message(record.subkey, limit=_SUBKEY_BYTES)
        pair = unpack_message(record.value, limit=MAX_RECORD + 512, depth=1)
        match subkey, pair:
            case str(), [str(key), bytes(value)]:
                return (
                    len(value) <= MAX_RECORD
                    and record.expiration_time <= time.time() + MAX_TTL + SKEW_SECONDS
                    and DHTID.from_bytes(record.key) == DHTID.generate(key)
                    and bool(self._validate(key, subkey, value))
                )
        return False


class _Storage(DHTLocalStorage):  # type: ignore[misc]
    """What we keep for others: for each key at most MAX_KEY_BYTES, so that our answer to a reader can arrive, and nothing of a
    record that is not newer than the one we have."""

    def store_subkey(self, key: DHTID, subkey: str, value: bytes, expiration_time: float) -> bool:
        held = self.get(key)
        if held is not None:
            known = held.value.get(subkey)
            size = sum(_RECORD_BYTES + len(item.value) for item in held.value.data.values())
            if known is not None and known.expiration_time >= expiration_time:
                return False
            if size + _RECORD_BYTES + len(value) - (len(known.value) if known else 0) > MAX_KEY_BYTES:
                return False
        return bool(super().store_subkey(key, subkey, value, expiration_time))


class _Pending(dict[Any, asyncio.Future[Any]]):
    """hivemind's unary calls in progress. Not among them: those that are answered or cancelled, but not yet cleared away."""

    def __contains__(self, call: object) -> bool:
        future = self.get(call)
        return future is not None and not future.done()


class _Net(P2P):  # type: ignore[misc]
    """P2P with the daemon's flags that `create` hides, and with its sockets in `folder`."""

    @staticmethod
    def _make_process_args(*args: Any, **kwargs: Any) -> Any:
        return P2P._make_process_args(*args, **kwargs, connHi=4096, connLo=2048)

    @classmethod
    def within(cls, folder: str) -> type[_Net]:
        return type("Net", (cls,), {"_UNIX_SOCKET_PREFIX": f"/unix{folder}/"})


class P2PTransport(Endpoint):
    """See peer.net.base.Transport. Made by `start`."""

    def __init__(self, peer_id: str, p2p: P2P, folder: str) -> None:
        super().__init__()
        self.peer_id = peer_id
        self.addresses: tuple[str, ...] = ()
        self.lost = asyncio.Event()
        self._p2p = p2p
        self._folder = folder
        self._dht: DHTNode | None = None
        self._closing = False
        self._watcher = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        """Ends everything when the daemon's process or our control connection to it ends."""
        child = asyncio.create_task(self._p2p._child.wait())
        control = self._p2p._client.control._read_task
        try:
            await asyncio.wait({child, control}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            child.cancel()
        self.lost.set()
        self.abort_all()
        if not self._closing:
            log.error("network daemon: it ended unexpectedly; everything that talks to peers stops")

    def _check(self) -> None:
        if self._closing or self.lost.is_set():
            raise TransportLost("network daemon: it has ended; start this peer again")

    async def _begin(self, validate: Validate) -> None:
        self._dht = await DHTNode.create(
            p2p=self._p2p,
            record_validator=_Validator(validate),
            wait_timeout=RPC_SECONDS,
            cache_locally=False,
            cache_on_store=False,
            cache_nearest=0,
            cache_refresh_before_expiry=0,
        )
        self._dht.protocol.storage, self._dht.protocol.cache = _Storage(), _Storage()
        with contextlib.suppress(ValueError):  # a node without addresses
            found = [str(address) for address in await self._p2p.get_visible_maddrs(latest=True)]
            self.addresses = tuple(address for address in found if _usable(address))

    # --- streams

    async def serve(self, name: str, handler: Handler) -> None:
        async def serve(info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            remote = info.peer_id.to_base58()
            with contextlib.suppress(asyncio.CancelledError):  # nothing comes after, and asyncio would call it an error
                await self.run(handler, self.stream(remote, name, reader, writer, writer.transport.abort))

        await self._within(self._p2p.add_binary_stream_handler(name, serve), CLOSE_SECONDS)

    async def open(self, peer: str, name: str, *, timeout: float) -> FrameStream:
        request = p2pd_pb2.Request(
            type=p2pd_pb2.Request.STREAM_OPEN,
            streamOpen=p2pd_pb2.StreamOpenRequest(peer=_raw(peer), proto=[name], timeout=math.ceil(timeout)),
        )
        reader, writer = await self._ask(request, peer, f"peer {short_peer(peer)}", timeout)
        return self.stream(peer, name, reader, writer, writer.transport.abort)

    async def _ask(
        self, request: Any, peer: str, what: str, timeout: float
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """One request to our daemon over a connection of its own, which is closed unless the daemon says yes."""
        self._check()
        writer: asyncio.StreamWriter | None = None
        agreed = False
        try:
            async with asyncio.timeout(timeout):
                reader, writer = await self._p2p._client.control.daemon_connector.open_connection()
                response = p2pd_pb2.Response()
                await write_pbmsg(writer, request)
                await read_pbmsg_safe(reader, response)
            if response.type == p2pd_pb2.Response.ERROR:
                raise Unreachable(peer, f"{what}: {_reason(response.error.msg)}; check the address and that it runs")
            agreed = True
            return reader, writer
        except TimeoutError:
            raise Timeout(peer, f"{what}: no answer within {timeout:g} s; check the address and the link") from None
        except (OSError, EOFError):
            raise TransportLost("network daemon: it does not answer; start this peer again") from None
        finally:
            if writer is not None and not agreed:
                writer.transport.abort()

    # --- connections and the DHT

    async def connect(self, addresses: Sequence[str], *, timeout: float) -> None:
        self._check()
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
        await self._join(reached, timeout)

    async def _connect(self, peer: str, known: dict[str, bytes], timeout: float) -> str | RemoteError:
        """The peer, whose addresses are `known` as text and as bytes, or why it was not reached."""
        request = p2pd_pb2.Request(
            type=p2pd_pb2.Request.CONNECT,
            connect=p2pd_pb2.ConnectRequest(peer=_raw(peer), addrs=list(known.values()), timeout=math.ceil(timeout)),
        )
        what = f"address {next(iter(known))}/p2p/{peer}"
        deadline = asyncio.get_running_loop().time() + timeout
        while True:
            left = deadline - asyncio.get_running_loop().time()
            try:
                _, writer = await self._ask(request, peer, what, max(left, 0.1))
            except RemoteError as error:
                if left < RETRY_SECONDS or not any(reason in str(error) for reason in _PASSING):
                    return error
                await asyncio.sleep(RETRY_SECONDS)
            else:
                writer.close()
                return peer

    async def _join(self, peer: str, timeout: float) -> None:
        """Enters the DHT through a connected peer, unless we are in it."""
        assert self._dht is not None
        protocol = self._dht.protocol
        if len(protocol.routing_table.uid_to_peer_id):
            return
        found = None
        for _ in range(PINGS):  # one that is busy answers a later ping
            try:
                found = await self._within(protocol.call_ping(PeerID.from_base58(peer), validate=True), timeout)
            except ValidationError as error:
                if "local time" in str(error):
                    raise ClockWrong(
                        f"clock: it differs by more than 3 s from that of {short_peer(peer)}; set it right (NTP), try again"
                    ) from None
            except TimeoutError:
                pass
            if found is not None:
                break
            await asyncio.sleep(RETRY_SECONDS)
        if found is None:
            raise Unreachable(
                peer, f"peer {short_peer(peer)}: answers, but not to the DHT; check that it is a Potluck peer"
            )
        await asyncio.sleep(0)  # lets hivemind enter it in the routing table
        with contextlib.suppress(TimeoutError):
            await self._within(self._dht.find_nearest_nodes([self._dht.node_id]), timeout)

    async def store(self, key: str, subkey: str, value: bytes, *, ttl: float) -> bool:
        check_record(value, ttl)
        assert self._dht is not None
        if not self._dht.protocol.record_validator._validate(key, subkey, value):
            return False
        try:
            stored = self._dht.store(key, [key, value], time.time() + ttl, subkey=subkey)
            return bool(await self._within(stored, DHT_SECONDS))
        except TimeoutError:
            return False

    async def get(self, key: str) -> dict[str, bytes]:
        assert self._dht is not None
        try:
            found = await self._within(self._dht.get(key, latest=True), DHT_SECONDS)
        except TimeoutError:
            raise Timeout("", f"DHT: no answer within {DHT_SECONDS:g} s; try again") from None
        if found is None or not isinstance(found.value, dict):
            return {}
        return {subkey: item.value[1] for subkey, item in found.value.items()}

    async def _within(self, work: Coroutine[Any, Any, T], timeout: float) -> T:
        """`work` under a deadline (TimeoutError) and only as long as the daemon lives (TransportLost)."""
        try:
            self._check()
        except TransportLost:
            work.close()
            raise
        task = asyncio.ensure_future(work)
        lost = asyncio.ensure_future(self.lost.wait())
        try:
            await asyncio.wait({task, lost}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            self._check()
            raise TimeoutError
        finally:
            task.cancel()
            lost.cancel()
            await asyncio.gather(task, lost, return_exceptions=True)

    async def aclose(self) -> None:
        if self._closing:
            return
        if self._dht is not None and not self.lost.is_set():
            with contextlib.suppress(Exception):
                await self._within(self._dht.shutdown(), CLOSE_SECONDS)
        self._closing = True
        await self.shut()
        await _stop(self._p2p, self._folder)
        self._watcher.cancel()
        await asyncio.gather(self._watcher, return_exceptions=True)


async def _stop(p2p: P2P, folder: str) -> None:
    """Ends a daemon and everything that hivemind leaves running for it."""
    child, control = p2p._child, p2p._client.control
    own = (p2p._listen_task, p2p._reader_task, control._read_task, control._write_task)
    p2p._terminate()
    try:
        async with asyncio.timeout(CLOSE_SECONDS):
            await child.wait()
    except TimeoutError:
        child.kill()
        await child.wait()
    await asyncio.gather(*(task for task in own if task is not None), return_exceptions=True)
    child._transport.close()
    shutil.rmtree(folder, ignore_errors=True)


def dial_bytes(address: Address) -> bytes:
    """What the daemon dials. Raises BadAddress: its library knows more rules about host names than we do."""
    try:
        return bytes(Multiaddr(address.dial).to_bytes())
    except (MultiaddrError, ValueError) as error:
        raise BadAddress(f"address {address.dial}: {shown(error)}; check the host's name") from None


def _usable(address: str) -> bool:
    try:
        parse(address)
    except BadAddress:
        return False
    return True


def _raw(peer: str) -> bytes:
    try:
        return bytes(PeerID.from_base58(peer).to_bytes())
    except ValueError:
        raise Unreachable(peer, f"peer {short_peer(peer)}: not a peer id; check it") from None


_REASONS = (
    ("connection refused", "connection refused"),
    ("peer id mismatch", "another peer answers at this address"),
    ("protocols not supported", "does not serve this; it may be another version"),
    ("protocol not supported", "does not serve this; it may be another version"),
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
_PASSING = ("no answer in time", "could not be reached a moment ago")
"""Reasons of a busy machine, or of libp2p's own memory of one: dialled again while there is time."""


def _reason(text: str) -> str:
    """The daemon's many lines in a few words."""
    for known, said in _REASONS:
        if known in text:
            return said
    return " ".join(text.split())[:160]


def check_port(host: str, port: int) -> None:
    """Raises PortInUse or UsageError if we cannot listen there. libp2p itself would share the port with another daemon of
    the same user (SO_REUSEPORT) without a word."""
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        raise UsageError(f"--host {host}: not an IP address; give one of this machine's, or 0.0.0.0") from None
    if not 0 <= port < 65536:
        raise UsageError(f"--port {port}: not a port; give one between 1 and 65535, or 0 for any")
    with socket.socket(socket.AF_INET if version == 4 else socket.AF_INET6) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            raise _port_error(host, port, error.strerror or str(error)) from None


def _port_error(host: str, port: int, reason: str) -> UsageError:
    if "in use" in reason:
        return PortInUse(f"port {port}: another program listens on it; choose another one with --port")
    return StartFailed(f"port {port} on {host}: {reason}; choose others with --host and --port")


def _socket_base() -> str:
    """Where socket folders are made."""
    base = os.path.realpath(tempfile.gettempdir())
    return base if len(base.encode()) <= _FOLDER_PATH_MAX else "/tmp"


def _sweep() -> None:
    """Removes socket folders of processes that were killed."""
    for folder in Path(_socket_base()).glob(_FOLDER + "*"):
        with contextlib.suppress(OSError):
            if folder.stat().st_uid != os.getuid() or time.time() - folder.stat().st_mtime < START_SECONDS:
                continue
            alive = False
            for path in folder.glob("p2pd-*.sock"):
                with socket.socket(socket.AF_UNIX) as probe:
                    alive |= probe.connect_ex(str(path)) == 0
            if not alive:
                shutil.rmtree(folder, ignore_errors=True)


async def start(
    identity_file: Path,
    *,
    host: str = "0.0.0.0",
    port: int = 0,
    bootstrap: Sequence[str] = (),
    validate: Validate,
    relay: bool = True,
    timeout: float = START_SECONDS,
) -> P2PTransport:
    """Starts the daemon, listening on TCP `host`:`port` (0: any), and joins through `bootstrap` (full addresses).

    The identity is made if its file is missing. `relay`: other peers may be reached through relays, and we serve as one.
    Raises UsageError (PortInUse, StartFailed, BadAddress, IdentityError), LocalError, ClockWrong, Unreachable if no
    bootstrap node was reached.
    """
    identity = keyfile.load_or_create(identity_file)
    for text in bootstrap:
        parse(text)
    check_port(host, port)
    _sweep()
    family = ipaddress.ip_address(host)
    folder = tempfile.mkdtemp(prefix=_FOLDER, dir=_socket_base())
    try:
        p2p = await _Net.within(folder).create(
            host_maddrs=[f"/ip{family.version}/{host}/tcp/{port}"],
            identity_path=str(identity_file),
            check_if_identity_free=False,
            nat_port_map=not family.is_loopback,
            use_relay=relay,
            startup_timeout=timeout,
        )
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, P2PDaemonError | OSError):
            text = " ".join(str(error).split())
            if "address already in use" in text:
                raise _port_error(host, port, "in use") from None
            raise StartFailed(
                f"network daemon: did not start within {timeout:g} s ({text[:160]}); "
                "is the machine overloaded? try again, or reinstall hivemind"
            ) from None
        raise
    control = p2p._client.control
    control._pending_calls = _Pending(control._pending_calls)
    transport = P2PTransport(identity.peer_id, p2p, folder)
    try:
        if p2p.peer_id.to_base58() != identity.peer_id:
            raise StartFailed(f"{identity_file}: the network daemon reads another identity from it; remove the file")
        await transport._begin(validate)
        if bootstrap:
            await transport.connect(bootstrap, timeout=timeout)
    except BaseException:
        await transport.aclose()
        raise
    return transport
