"""Attacks with calls, blobs and the DHT."""

from __future__ import annotations

import asyncio
import contextlib
import time

from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, P2PHandlerError
from hivemind.proto import dht_pb2

from peer.net import blobs
from peer.net.bandwidth import HEAD, PIECE
from protocol.codec import blob_hash
from protocol.identity import Identity
from protocol.run import layout
from protocol.wire import calls, encoding, endpoints, framing
from protocol.wire.announcement import Announcement, DialMe, Lookup, RosterRequest
from protocol.wire.calls import Handover, MomentsRequest
from protocol.wire.decree import BAN, Decree, Motion
from protocol.wire.session import LogRequest
from tests.hostile.attacks.attacker import AT_ONCE, Attack, Attacker
from tests.hostile.ground import SOON
from tests.support.volunteers import TOKENIZER

ASKS = ("asks the DHT too often",)


async def log_calls(enemy: Attacker) -> None:
    """calls for the whole log, each on a stream of its own"""
    await enemy.calls(enemy.node, endpoints.LOG, encoding.encode(LogRequest(after=-1)))


async def states(enemy: Attacker) -> None:
    """questions for a peer's states"""
    await enemy.calls(enemy.victim, endpoints.STATES, b"")


async def dial_back(enemy: Attacker) -> None:
    """requests to dial back"""
    await enemy.calls(enemy.node, endpoints.DIAL_BACK, encoding.encode(DialMe(ports=(1, 2, 3))))


async def lookups(enemy: Attacker) -> None:
    """questions for 64 peers and a sample of others"""
    names = tuple(Identity(number.to_bytes(32, "big")).peer_id for number in range(1, 65))
    await enemy.calls(enemy.node, endpoints.ROSTER, encoding.encode(Lookup(peers=names, sample=2**31)))


async def rosters(enemy: Attacker) -> None:
    """questions for everybody who is there"""
    await enemy.calls(enemy.node, endpoints.ROSTER, encoding.encode(RosterRequest(position=-1)))


async def decrees(enemy: Attacker) -> None:
    """decrees that nobody but the enemy has signed"""

    def motion(number: int) -> bytes:
        decree = Decree(run=enemy.manifest.run_id, number=number % 10, action=BAN, subject=enemy.victim, reason="r")
        return encoding.encode(Motion(sealed=encoding.seal(enemy.identity, decree)))

    await enemy.calls(enemy.node, endpoints.DECREES, motion)


async def moments(enemy: Attacker) -> None:
    """moments of one shard after the other, for a peer that trains none"""
    names = layout.shard_names(enemy.manifest.model)
    await enemy.calls(
        enemy.victim, endpoints.MOMENTS, lambda number: calls.write(MomentsRequest(shard=names[number % len(names)]))
    )


async def handovers(enemy: Attacker) -> None:
    """error feedback that is announced and never there"""
    names = layout.shard_names(enemy.manifest.model)

    def handover(number: int) -> bytes:
        name = blob_hash.name_of(number.to_bytes(8, "big"))
        said = Handover(
            serial=number + 1,
            heir=enemy.victim,
            shard=names[number % len(names)],
            topk=64,
            blob=name,
            size=200,
        )
        return calls.write(said)

    await enemy.calls(enemy.victim, endpoints.HANDOVER, handover)


async def pings(enemy: Attacker) -> None:
    """measurements of the way to a peer, one after the other"""

    async def one() -> None:
        stream = await enemy.open(enemy.victim, endpoints.PING)
        try:
            for _ in range(4):
                await stream.send(b"")
                await stream.recv(timeout=5.0)
        finally:
            await stream.close()

    await enemy.over_and_over(one, AT_ONCE)


async def quorum(enemy: Attacker) -> None:
    """votes of somebody who is no operator"""

    async def one() -> None:
        stream = await enemy.open(enemy.node, endpoints.QUORUM)
        try:
            await stream.send(encoding.encode(LogRequest(after=-1)))
        finally:
            await stream.close()

    await enemy.over_and_over(one, AT_ONCE)


async def bandwidth(enemy: Attacker) -> None:
    """measurements of the line, one after the other, as much as is given"""
    piece = PIECE.to_bytes(HEAD, "big")
    await enemy.on_streams(enemy.node, endpoints.BANDWIDTH, lambda number: piece, beside=16)


# --- blobs


async def tokenizer(enemy: Attacker) -> None:
    """the tokenizer, fetched from the node again and again"""
    name = endpoints.TOKENIZER_NAME
    limit = len(TOKENIZER) + (1 << 20)
    await enemy.over_and_over(lambda: blobs.fetch_named(enemy.transport, enemy.node, name, limit=limit), AT_ONCE)


async def absent(enemy: Attacker) -> None:
    """blobs that nobody has, asked for on streams that are kept"""

    def frame(number: int) -> bytes:
        name = blob_hash.name_of(number.to_bytes(8, "big"))
        return framing.pack_message({"blob": name, "size": 1000, "leaves": True, "insist": True})

    await enemy.on_streams(enemy.victim, endpoints.BLOB, frame, beside=4 * AT_ONCE)


async def whole(enemy: Attacker) -> None:
    """one payload of the log, again and again, whole, on streams that are kept"""
    name, size = await payload(enemy)
    request = framing.pack_message({"blob": name, "size": size, "whole": True, "insist": True})
    await enemy.on_streams(enemy.node, endpoints.BLOB, lambda number: request, beside=4 * AT_ONCE)


async def same_range(enemy: Attacker) -> None:
    """the first range of one payload, again and again, in one request that never ends"""
    name, size = await payload(enemy)
    begin = framing.pack_message({"blob": name, "size": size, "insist": True})
    again = framing.pack_message({"range": 0})

    async def one() -> None:
        stream = await enemy.open(enemy.node, endpoints.BLOB)
        try:
            await stream.send(begin)
            while True:
                await stream.send(again)
                await stream.recv(timeout=SOON)
                enemy.done.times += 1
        finally:
            await stream.close()

    await enemy.over_and_over(one, 2 * AT_ONCE)


async def ranges_of_text(enemy: Attacker) -> None:
    """ranges of text of which there are none"""
    name = blob_hash.name_of(b"none")
    request = framing.pack_message({"blob": name, "in": [name, 64 << 20, 5], "insist": True})
    await enemy.on_streams(enemy.node, endpoints.BLOB, lambda number: request)


async def unread_blobs(enemy: Attacker) -> None:
    """payloads asked for and never read"""
    name, size = await payload(enemy)
    request = framing.pack_message({"blob": name, "size": size, "whole": True, "insist": True})

    async def one() -> None:
        stream = await enemy.open(enemy.node, endpoints.BLOB)
        for _ in range(1000):
            await stream.send(request)
            enemy.done.times += 1
        await stream.close()

    await enemy.over_and_over(one, 2 * AT_ONCE)


async def payload(enemy: Attacker) -> tuple[str, int]:
    """Name and size of something that the newest commit names."""
    session = await enemy.session()
    while True:
        await enemy.say(session, LogRequest(after=0))
        message = encoding.decode_any(bytes(await session.recv(timeout=SOON)), enemy.node)
        shares = getattr(getattr(message, "commit", None), "shares", ())
        if shares:
            await session.close()
            return shares[0].root, shares[0].listed


# --- the DHT


async def stores(enemy: Attacker) -> None:
    """records of the DHT under keys that nobody reads"""
    await asks_dht(enemy, lambda number: store(enemy, f"potluck/1/{number}/peers", number))


async def made_up_records(enemy: Attacker) -> None:
    """announcements of made-up peers under the run's key in the DHT"""
    key = endpoints.announcements_key(enemy.manifest.run_id)
    await asks_dht(enemy, lambda number: store(enemy, key, number))


async def finds(enemy: Attacker) -> None:
    """questions for 16 keys of the DHT at once"""

    async def ask(number: int) -> None:
        keys = [DHTID.generate(f"{number} {i}").to_bytes() for i in range(16)]
        await rpc(enemy, "rpc_find", dht_pb2.FindRequest(keys=keys), dht_pb2.FindResponse)

    await asks_dht(enemy, ask)


async def dht_pings(enemy: Attacker) -> None:
    """pings of the DHT, each as another of its nodes"""

    async def ask(number: int) -> None:
        node = dht_pb2.NodeInfo(node_id=DHTID.generate(number).to_bytes())
        await rpc(enemy, "rpc_ping", dht_pb2.PingRequest(peer=node, validate=False), dht_pb2.PingResponse)

    await asks_dht(enemy, ask)


async def asks_dht(enemy: Attacker, ask: object) -> None:
    """Asks over and over."""

    async def one() -> None:
        with contextlib.suppress(P2PDaemonError, P2PHandlerError):
            async with asyncio.timeout(SOON):
                await ask(enemy.done.times)  # type: ignore[operator]

    await enemy.over_and_over(one, AT_ONCE)


async def store(enemy: Attacker, key: str, number: int) -> None:
    """One store of a record of a peer that is made up."""
    who = Identity((number + 1).to_bytes(32, "big"))
    said = Announcement(run=enemy.manifest.run_id, peer=who.peer_id, serial=int(1000 * time.time()))
    request = dht_pb2.StoreRequest(
        keys=[DHTID.generate(key).to_bytes()],
        subkeys=[framing.pack_message(who.peer_id)],
        values=[framing.pack_message([key, encoding.seal(who, said)])],
        expiration_time=[time.time() + 100],
        in_cache=[False],
    )
    await rpc(enemy, "rpc_store", request, dht_pb2.StoreResponse)


async def rpc(enemy: Attacker, name: str, request: object, answer: object) -> None:
    """One request to the node's DHT."""
    call = enemy.transport.daemon.p2p.call_protobuf_handler
    await call(PeerID.from_base58(enemy.node), f"DHTProtocol.{name}", request, answer)


ATTACKS = (
    Attack(work=log_calls),
    Attack(work=states),
    Attack(work=dial_back),
    Attack(work=lookups),
    Attack(work=rosters),
    Attack(work=decrees),
    Attack(work=moments),
    Attack(work=handovers),
    Attack(work=pings),
    Attack(work=quorum),
    Attack(work=bandwidth),
    Attack(work=tokenizer),
    Attack(work=absent),
    Attack(work=whole),
    Attack(work=same_range),
    Attack(work=ranges_of_text),
    Attack(work=unread_blobs),
    Attack(work=stores, told=ASKS),
    Attack(work=made_up_records, told=ASKS),
    Attack(work=finds, told=ASKS),
    Attack(work=dht_pings, told=(*ASKS, "is another node of the DHT all the time")),
)
