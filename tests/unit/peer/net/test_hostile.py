"""Real nodes against a peer that speaks hivemind's own protocols, and speaks them badly.

The attacker is hivemind as it is, with its limits raised; what it sends is neither deep nor many, since a refusal does
not depend on that.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgpack
import psutil
import pytest
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PHandlerError
from hivemind.proto import dht_pb2
from hivemind.utils import get_dht_time

from peer.net import base, blobs, daemon, p2p
from peer.net.base import Closed, Stream, Transport, Unreachable
from peer.net.blobs.serving import ServingTimeouts
from peer.net.keyfile import load_or_create
from protocol.identity import Identity
from protocol.wire import endpoints
from protocol.wire.framing import END, MAX_FRAME, pack_message
from tests.support.net import SOCKETS, SOON, sockets, swarm

pytestmark = pytest.mark.slow

sockets = sockets
LARGE = 64 << 20
Handlers = dict[str, Callable[[Any, Any], Awaitable[Any]]]


@contextlib.asynccontextmanager
async def attacker(folder: Path, victim: Transport, handlers: Handlers | None = None) -> AsyncIterator[P2P]:
    """A plain hivemind daemon, connected to `victim`; `handlers` replace those of a DHT node."""
    load_or_create(folder / "attacker")
    other = await daemon.Net.within(SOCKETS).create(
        initial_peers=list(victim.addresses),
        identity_path=str(folder / "attacker"),
        host_maddrs=["/ip4/127.0.0.1/tcp/0"],
        check_if_identity_free=False,
        nat_port_map=False,
        persistent_conn_max_msg_size=LARGE,
    )
    try:
        for name, handler in (handlers or {}).items():
            kind = {"ping": dht_pb2.PingRequest, "find": dht_pb2.FindRequest, "store": dht_pb2.StoreRequest}[name]
            await other.add_protobuf_handler(f"DHTProtocol.rpc_{name}", handler, kind)
        yield other
    finally:
        await daemon.stop(other)
        for path in SOCKETS.glob("p2p*.sock"):
            path.unlink()


async def dht(who: P2P, victim: Transport, name: str, request: Any, answer: Any) -> Any:
    """A call of the victim's DHT node."""
    peer = PeerID.from_base58(victim.peer_id)
    async with asyncio.timeout(SOON):
        return await who.call_protobuf_handler(peer, f"DHTProtocol.rpc_{name}", request, answer)


def storing(subkey: bytes, value: bytes, *, key: str = "peers", expires: float = 60.0) -> Any:
    return dht_pb2.StoreRequest(
        keys=[DHTID.generate(key).to_bytes()],
        subkeys=[subkey],
        values=[value],
        expiration_time=[get_dht_time() + expires],
        in_cache=[False],
    )


async def stored(who: Transport, key: str, value: bytes, ttl: float = 60.0) -> None:
    """Until it is: on a busy machine a call may take longer than its time."""
    while not await who.store(key, who.peer_id, value, ttl=ttl):
        await asyncio.sleep(0.1)


async def still_there(victim: Transport, other: Transport) -> None:
    """Everything that a peer needs of its network works."""
    await stored(other, "alive", b"yes", ttl=60 + time.time() % 100)
    while other.peer_id not in await victim.get("alive"):
        await asyncio.sleep(0.1)
    assert not victim.lost.is_set()


async def test_nested_records_are_refused_before_they_are_decoded(tmp_path: Path) -> None:
    inner = msgpack.packb(msgpack.ExtType(0x40, msgpack.packb(msgpack.ExtType(0x40, b"\x90"))))
    nested = msgpack.packb(
        msgpack.ExtType(0x50, msgpack.packb([None, 0.0, [[msgpack.ExtType(0x40, inner), b"", 1.0]]]))
    )
    in_record = [pack_message("peer"), msgpack.packb(["peers", msgpack.ExtType(0x40, inner)])]

    async with swarm("p2p", tmp_path, 2) as (victim, other), attacker(tmp_path, victim) as bad:
        for subkey, value in ((DHTProtocol.IS_DICTIONARY, nested), (inner, b"\xc0"), tuple(in_record)):
            with contextlib.suppress(P2PHandlerError):
                answer = await dht(bad, victim, "store", storing(subkey, value), dht_pb2.StoreResponse)
                assert list(answer.store_ok) == [False]
        assert await victim.get("peers") == {}
        await still_there(victim, other)


async def test_records_without_subkey_or_bounds_are_refused(tmp_path: Path) -> None:
    subkey = pack_message("peer")

    async with swarm("p2p", tmp_path, 2) as (victim, other), attacker(tmp_path, victim) as bad:
        good = storing(subkey, pack_message(["peers", b"value"]))
        assert list((await dht(bad, victim, "store", good, dht_pb2.StoreResponse)).store_ok) == [True]
        for request in (
            storing(DHTProtocol.IS_REGULAR_VALUE, pack_message(["peers", b"value"])),
            storing(subkey, pack_message(["peers", bytes(4097)])),
            storing(subkey, pack_message(["others", b"value"])),
            storing(subkey, pack_message(["peers", b"later"]), expires=10_000.0),
            storing(subkey, pack_message(["peers", b"later"]), expires=float("inf")),
            storing(pack_message("x" * 200), pack_message(["peers", b"value"])),
        ):
            answer = await dht(bad, victim, "store", request, dht_pb2.StoreResponse)
            assert list(answer.store_ok) == [False]
        assert await victim.get("peers") == {"peer": b"value"}
        await still_there(victim, other)


async def test_a_request_over_the_daemons_limit_costs_no_memory(tmp_path: Path) -> None:
    async with swarm("p2p", tmp_path, 2) as (victim, other), attacker(tmp_path, victim) as bad:
        assert isinstance(victim, p2p.P2PTransport)
        process = psutil.Process(victim.daemon.pid)
        before = process.memory_info().rss
        for _ in range(3):
            request = storing(pack_message("peer"), bytes(30 << 20))
            with pytest.raises(TimeoutError):  # the daemon drops it without a word
                async with asyncio.timeout(3):
                    await dht(bad, victim, "store", request, dht_pb2.StoreResponse)
        assert process.memory_info().rss - before < 64 << 20
        await still_there(victim, other)


def node(**handlers: Callable[[Any, Any], Awaitable[Any]]) -> Handlers:
    """The handlers of a DHT node that answers pings and does the rest as given."""
    node_id = DHTID.generate().to_bytes()
    info = dht_pb2.NodeInfo(node_id=node_id)

    async def ping(request: Any, context: Any) -> Any:
        return dht_pb2.PingResponse(peer=info, dht_time=get_dht_time(), available=True)

    return {"ping": ping, **handlers}


async def meets(victim: Transport, bad: P2P) -> None:
    """The victim takes the attacker for a DHT node."""
    assert isinstance(victim, p2p.P2PTransport)
    found = None
    while found is None:
        found = await victim.dht.node.protocol.call_ping(bad.peer_id)
    while found not in victim.dht.node.protocol.routing_table:
        await asyncio.sleep(0.01)


async def _hangs(request: Any, context: Any) -> Any:
    await asyncio.Event().wait()


async def _too_large(request: Any, context: Any) -> Any:
    result = dht_pb2.FindResult(type=dht_pb2.FOUND_REGULAR, value=bytes(6 << 20), expiration_time=get_dht_time() + 60)
    return dht_pb2.FindResponse(results=[result] * len(request.keys))


@functools.cache
def _many_peers() -> list[bytes]:
    return [PeerID.from_base58(Identity(i.to_bytes(32, "big")).peer_id).to_bytes() for i in range(5000)]


async def _strangers(request: Any, context: Any) -> Any:
    result, near = dht_pb2.FindResult(type=dht_pb2.NOT_FOUND), int.from_bytes(request.keys[0], "big")
    result.nearest_peer_ids.extend(_many_peers())
    result.nearest_node_ids.extend((near ^ (i + 1)).to_bytes(20, "big") for i in range(len(_many_peers())))
    return dht_pb2.FindResponse(results=[result] * len(request.keys))


@pytest.mark.parametrize("find", [_hangs, _too_large, _strangers])
async def test_a_node_that_never_answers_or_too_much_keeps_nobody_from_reading(find: Any, tmp_path: Path) -> None:
    """Oversized answers never arrive at all: the daemon drops them, and hivemind would wait for ever."""
    _many_peers()
    async with swarm("p2p", tmp_path, 3, rpc_seconds=1.0) as (victim, a, b):
        async with attacker(tmp_path, victim, node(find=find, store=_hangs)) as bad:
            await meets(victim, bad)
            await stored(a, "peers", b"a")
            while await victim.get("peers") != {a.peer_id: b"a"}:
                await asyncio.sleep(0.1)
            await stored(victim, "peers", b"v")
            while set(await a.get("peers")) != {a.peer_id, victim.peer_id}:
                await asyncio.sleep(0.1)
        await still_there(victim, b)


async def test_joining_through_a_node_that_never_answers_ends(tmp_path: Path) -> None:
    async with swarm("p2p", tmp_path, 1, rpc_seconds=0.5) as (victim,):
        hanging = {"ping": _hangs, "find": _hangs, "store": _hangs}
        async with attacker(tmp_path, victim, hanging) as bad:
            with pytest.raises(Unreachable, match="answers, but not to the DHT"):
                await victim.connect([str(m) for m in await bad.get_visible_maddrs()], timeout=SOON)
        assert not victim.lost.is_set()


async def test_an_answer_that_comes_when_its_call_was_given_up_ends_nothing(tmp_path: Path) -> None:
    """hivemind's reader of all answers dies of one for a call that was cancelled and not yet cleared away."""
    asked, answer = asyncio.Event(), asyncio.Event()

    async def late(request: Any, context: Any) -> Any:
        asked.set()
        await answer.wait()
        return dht_pb2.FindResponse(results=[])

    async with swarm("p2p", tmp_path, 2) as (victim, other):
        assert isinstance(victim, p2p.P2PTransport)
        pending = victim.daemon.pending
        async with attacker(tmp_path, victim, node(find=late)) as bad:
            find = victim.daemon.p2p.call_protobuf_handler(
                bad.peer_id, "DHTProtocol.rpc_find", dht_pb2.FindRequest(keys=[b"0" * 20]), dht_pb2.FindResponse
            )
            calling = asyncio.create_task(find)
            await asked.wait()
            (waits,) = [future for future in pending.values() if not future.done()]
            waits.cancel()  # as a deadline does; what waits for it runs only later
            entries = dict(pending)
            with pytest.raises(asyncio.CancelledError):
                await calling
            pending.update(entries)
            answer.set()
            await still_there(victim, other)


# --- our streams


@pytest.mark.parametrize(
    "sent",
    [(MAX_FRAME + 1).to_bytes(4, "big"), b"\xff\xff\xff\xfe", (1001).to_bytes(4, "big") + bytes(1001), b"\0\0", END],
)
async def test_frames_that_cannot_be_end_the_stream_at_once(sent: bytes, tmp_path: Path) -> None:
    seen: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()

    async def serve(stream: Stream) -> None:
        try:
            await stream.recv(1000)
        except Exception as error:
            seen.set_result(error)
            raise

    async with swarm("p2p", tmp_path, 2) as (victim, other), attacker(tmp_path, victim) as bad:
        await victim.serve("limited", serve)
        _, reader, writer = await bad.call_binary_stream_handler(PeerID.from_base58(victim.peer_id), "limited")
        with contextlib.suppress(ConnectionError):
            writer.write(sent + bytes(1 << 20 if sent[0] else 0))
            await writer.drain()
            if len(sent) == 2:
                writer.write_eof()
            async with asyncio.timeout(SOON):
                while await reader.read(1 << 16):
                    pass
        writer.transport.abort()
        assert isinstance(await seen, Closed)
        await still_there(victim, other)


async def test_who_opens_a_stream_and_says_nothing_is_not_waited_for(tmp_path: Path) -> None:
    async def nothing(remote: str, request: bytes) -> bytes:
        return b""

    async with swarm("p2p", tmp_path, 2) as (victim, other), attacker(tmp_path, victim) as bad:
        await base.serve_calls(victim, "call", nothing, timeout=0.3)
        await blobs.BlobServer(blobs.BlobStore(tmp_path / "blobs"), patience=ServingTimeouts(request=0.3)).serve(victim)
        for name in ("call", endpoints.BLOB):
            _, reader, writer = await bad.call_binary_stream_handler(PeerID.from_base58(victim.peer_id), name)
            with contextlib.suppress(ConnectionError):
                writer.write(b"\0\0")
                async with asyncio.timeout(SOON):
                    while await reader.read(1 << 16):
                        pass
            writer.transport.abort()
        assert isinstance(victim, p2p.P2PTransport)
        while victim.open_streams:
            await asyncio.sleep(0.01)
        await still_there(victim, other)
