"""Announcements over sessions: what a node takes, what it tells, and how peers and monitors follow it."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bootstrap.roster import MAX_GONE, AnnouncementTable
from bootstrap.sessions import ANNOUNCEMENTS, Session
from peer.net import node_calls
from peer.net.base import MAX_RECORD, CallHandler, Clock, serve_calls
from peer.net.directory import PUBLISH_SECONDS, SAMPLE, TOGETHER, Directory
from peer.net.memory import MemoryNetwork, MemoryTransport
from peer.net.node_calls import CALL_SECONDS, RosterReader
from peer.net.rate_limits import TokenBucket
from protocol.errors import RemoteError
from protocol.identity import Identity
from protocol.run.manifest import Manifest
from protocol.wire import encoding, endpoints
from protocol.wire.announcement import MOST_LOOKED_UP, Announcement, Lookup, Roster, RosterRequest
from tests.sim.loop import VirtualLoop
from tests.support import tiny

M = tiny.manifest()
RUN = M.run_id
PEERS = [Identity(bytes([1, i] * 16)) for i in range(200)]
A, B, C = PEERS[:3]


def announcement(who: Identity, serial: int = 1, **changes: Any) -> Announcement:
    values = {"run": RUN, "peer": who.peer_id, "serial": serial, "addresses": (f"/memory/p2p/{who.peer_id}",)}
    return Announcement(**{**values, **changes})


def raw(who: Identity, serial: int = 1, **changes: Any) -> bytes:
    return encoding.seal(who, announcement(who, serial, **changes))


def answer(heard: AnnouncementTable, request: Lookup | RosterRequest) -> Roster:
    reply = encoding.decode(heard.answer(request), "node")
    assert isinstance(reply, Roster)
    return reply


def names(reply: Roster) -> list[str]:
    return [found.peer for body in reply.announcements if (found := node_calls.believed(body, RUN)) is not None]


# --- what a node takes


def test_an_announcement_counts_if_it_is_its_peers_and_newer() -> None:
    heard = AnnouncementTable(RUN, 0)
    assert heard.add(A.peer_id, raw(A, 5)) == announcement(A, 5)
    for who, body in (
        (A, raw(A, 5)),
        (A, raw(A, 4)),
        (A, raw(B, 6)),
        (B, raw(A, 6)),
        (A, encoding.seal(B, announcement(A, 6))),
        (A, raw(A, 6, run="another")),
        (A, raw(A, 6, device="d" * MAX_RECORD)),
        (A, b"junk"),
    ):
        assert heard.add(who.peer_id, body) is None
    assert heard.add(A.peer_id, raw(A, 6, memory_bytes=1)) is not None
    assert answer(heard, Lookup(peers=(A.peer_id,))).announcements == (raw(A, 6, memory_bytes=1),)


def test_a_peer_is_heard_as_often_as_its_session_and_the_node_allow() -> None:
    node = TokenBucket(1.0, 2.0)
    first, second = Session(), Session()
    told = [first.may_announce(node, 0.0) for _ in range(10)]
    assert told == [True, True, True, *[False] * 7], "the first one, and two of the node's allowance"
    assert second.may_announce(node, 0.0), "a newcomer is heard however much the others say"
    assert not second.may_announce(node, 0.0)
    assert first.may_announce(node, 100.0)
    alone = Session()
    assert sum(alone.may_announce(TokenBucket(1e9, 1e9), 0.0) for _ in range(100)) == ANNOUNCEMENTS.burst


# --- what it tells


def test_who_asks_for_some_gets_those_and_no_more_than_fit() -> None:
    heard = AnnouncementTable(RUN, 0)
    for who in PEERS:
        heard.add(who.peer_id, raw(who))
    everybody = tuple(p.peer_id for p in PEERS)
    assert names(answer(heard, Lookup(peers=(C.peer_id, "unknown", A.peer_id, C.peer_id)))) == [C.peer_id, A.peer_id]
    assert names(answer(heard, Lookup(peers=everybody))) == list(everybody[:MOST_LOOKED_UP])
    sampled = names(answer(heard, Lookup(sample=10**9)))
    assert len(set(sampled)) == len(sampled) == MOST_LOOKED_UP
    assert names(answer(heard, Lookup(sample=-1))) == []
    big = AnnouncementTable(RUN, 0)
    for who in PEERS:
        big.add(who.peer_id, raw(who, device="d" * 3500))
    for request in (Lookup(sample=MOST_LOOKED_UP), RosterRequest(position=-1)):
        assert len(big.answer(request)) <= endpoints.ROSTER_REPLY


def test_many_gone_peers_are_forgotten_and_who_missed_them_starts_anew() -> None:
    heard = AnnouncementTable(RUN, 1000)
    heard.add(A.peer_id, raw(A))
    at = answer(heard, RosterRequest(position=-1)).position
    for serial in range(1, MAX_GONE + 2):
        heard.add(B.peer_id, raw(B, serial))
        heard.remove(B.peer_id)
    reply = answer(heard, RosterRequest(position=at))
    assert reply.anew
    assert (names(reply), reply.gone) == ([A.peer_id], ())
    assert not answer(heard, RosterRequest(position=reply.position)).anew


Step = tuple[str, int]


@settings(max_examples=40)
@given(st.lists(st.tuples(st.sampled_from(["announce", "leave", "read", "restart"]), st.integers(0, 5)), max_size=40))
def test_a_reader_of_differences_knows_what_the_node_knows(steps: list[Step]) -> None:
    async def work() -> None:
        network = MemoryNetwork()
        node, watcher = network.transport(tiny.OPERATOR.peer_id), network.transport(A.peer_id)
        heard, now, there = AnnouncementTable(RUN, 1), 1, dict[str, Announcement]()

        async def serve(remote: str, request: bytes) -> bytes:
            ask = encoding.decode(request, remote)
            assert isinstance(ask, RosterRequest)
            return heard.answer(ask)

        await serve_calls(node, endpoints.ROSTER, serve)
        reader = RosterReader(watcher, RUN)
        for what, index in [*steps, ("read", 0)]:
            who, now = PEERS[index], now + 1
            match what:
                case "announce":
                    heard.add(who.peer_id, raw(who, now))
                    there[who.peer_id] = announcement(who, now)
                case "leave":
                    heard.remove(who.peer_id)
                    there.pop(who.peer_id, None)
                case "restart":
                    heard, there = AnnouncementTable(RUN, 100 * now), {}
                case "read":
                    await reader.refresh([tiny.OPERATOR.peer_id])
                    assert reader.known == there
        await node.aclose()
        await watcher.aclose()

    asyncio.run(work())


async def test_a_long_roster_comes_in_pages(swarm: Nodes) -> None:
    for who in PEERS:
        long = tuple(f"/dns4/{'d' * 60}.{'d' * 60}.{'d' * 60}/tcp/{port}/p2p/{who.peer_id}" for port in range(1, 14))
        swarm.heard.add(who.peer_id, raw(who, addresses=long))
    reader = RosterReader(swarm.me, RUN)
    await reader.refresh([tiny.OPERATOR.peer_id])
    assert sorted(reader.known) == sorted(p.peer_id for p in PEERS)
    assert len(swarm.asked) > 1
    swarm.asked.clear()
    swarm.heard.add(A.peer_id, raw(A, 2))
    await reader.refresh(["nobody", tiny.OPERATOR.peer_id])
    assert reader.known[A.peer_id].serial == 2
    assert len(swarm.asked) == 1


async def test_a_node_that_lies_is_not_believed_and_does_not_keep_us(swarm: Nodes) -> None:
    reader = RosterReader(swarm.me, RUN)
    forged = encoding.seal(B, announcement(A))
    swarm.reply = Roster(announcements=(forged, b"junk", raw(A, run="another")), position=5)
    await reader.refresh([tiny.OPERATOR.peer_id])
    assert reader.known == {}
    swarm.reply = Roster(announcements=(), position=5, more=True)
    with pytest.raises(RemoteError, match="does not end"):
        await reader.refresh([tiny.OPERATOR.peer_id])


# --- how a peer finds others


class Nodes:
    """A bootstrap node that knows what `heard` knows, or answers `reply`, and a peer with its directory."""

    def __init__(self, network: MemoryNetwork, manifest: Manifest) -> None:
        self.network = network
        self.node = network.transport(tiny.OPERATOR.peer_id)
        self.me = network.transport(PEERS[-1].peer_id)
        self.heard = AnnouncementTable(RUN, 0)
        self.asked: list[Lookup | RosterRequest] = []
        self.reply: Roster | None = None
        me = announcement(PEERS[-1], 0)
        self.directory = Directory(manifest, PEERS[-1], self.me, self.node.addresses, me)

    async def start(self) -> None:
        async def serve(remote: str, request: bytes) -> bytes:
            ask = encoding.decode(request, remote)
            assert isinstance(ask, Lookup | RosterRequest)
            self.asked.append(ask)
            return self.heard.answer(ask) if self.reply is None else encoding.encode(self.reply)

        await serve_calls(self.node, endpoints.ROSTER, serve)

    def peer(self, who: Identity) -> MemoryTransport:
        return self.network.transport(who.peer_id)

    async def stored(self, who: Identity) -> None:
        key = endpoints.announcements_key(RUN)
        assert await self.node.store(key, who.peer_id, raw(who), ttl=60.0)


@pytest.fixture
@contextlib.asynccontextmanager
async def swarm() -> AsyncIterator[Nodes]:
    network = MemoryNetwork()
    nodes = Nodes(network, M)
    await nodes.start()
    yield nodes
    for transport in list(network.peers.values()):
        await transport.aclose()


async def test_a_peer_asks_its_node_for_whom_it_needs_and_for_several_at_once(swarm: Nodes) -> None:
    for who in PEERS[:50]:
        swarm.peer(who)
        swarm.heard.add(who.peer_id, raw(who))
    await asyncio.gather(*(swarm.directory.reach(p.peer_id) for p in PEERS[:50]))
    assert len(swarm.asked) == 2, "the first alone, all who came meanwhile together"
    assert set(swarm.directory.known) == {p.peer_id for p in PEERS[:50]}
    await swarm.directory.reach(A.peer_id)
    assert len(swarm.asked) == 2
    swarm.directory.lost(A.peer_id)
    await swarm.directory.reach(A.peer_id)
    assert len(swarm.asked) == 3


@pytest.mark.slow
async def test_a_node_that_does_not_answer_holds_nobody_up() -> None:
    manifest = tiny.manifest(operators=tuple(key.peer_id for key in tiny.OPERATORS[:2]))
    asked: list[str] = []

    network = MemoryNetwork()
    nodes = [network.transport(peer) for peer in manifest.operators]
    heard = AnnouncementTable(manifest.run_id, 0)
    heard.add(A.peer_id, raw(A, run=manifest.run_id))

    def serves(node: MemoryTransport) -> CallHandler:
        async def serve(remote: str, request: bytes) -> bytes:
            asked.append(node.peer_id)
            if len(asked) == 1:
                await asyncio.Event().wait()
            ask = encoding.decode(request, remote)
            assert isinstance(ask, Lookup | RosterRequest)
            return heard.answer(ask)

        return serve

    for node in nodes:
        await serve_calls(node, endpoints.ROSTER, serves(node))
    me, there = (network.transport(who.peer_id) for who in (PEERS[-1], A))
    said = announcement(PEERS[-1], 0)
    directory = Directory(manifest, PEERS[-1], me, [x for node in nodes for x in node.addresses], said)
    async with asyncio.timeout(CALL_SECONDS):
        await directory.reach(A.peer_id)
    for transport in (*nodes, me, there):
        await transport.aclose()
    assert sorted(asked) == sorted(manifest.operators)


async def test_who_has_lost_the_nodes_finds_those_in_the_dht(swarm: Nodes) -> None:
    swarm.peer(A)
    await swarm.stored(A)
    await swarm.directory.reach(A.peer_id)
    with pytest.raises(RemoteError, match="no announcement is found"):
        await swarm.directory.reach(B.peer_id)
    await swarm.node.aclose()
    assert await swarm.directory.peers() == [A.peer_id]


async def test_some_who_are_there_are_found_and_older_news_does_not_count(swarm: Nodes) -> None:
    for who in PEERS:
        swarm.heard.add(who.peer_id, raw(who, 7))
    swarm.directory.learn([announcement(who, 9) for who in PEERS])
    found = await swarm.directory.peers()
    assert len(set(found)) == len(found) == MOST_LOOKED_UP
    assert {a.serial for a in swarm.directory.known.values()} == {9}


# --- what it costs


async def test_about_as_many_as_the_sample_are_in_the_dht_however_many_there_are() -> None:
    network, found = MemoryNetwork(), []
    for index in range(2000):
        who = Identity(index.to_bytes(32))
        transport = network.transport(who.peer_id)
        found.append(Directory(M, who, transport, (), announcement(who, 0)))
    assert all(directory.is_sampled for directory in found), "as long as they do not know of each other"
    for crowd in (SAMPLE, 2000, 20_000):
        for directory in found:
            directory.crowd = crowd
        sampled = sum(directory.is_sampled for directory in found) * crowd / 2000
        assert 0.6 * SAMPLE < sampled < 1.4 * SAMPLE or crowd == 20_000
    operator = Directory(M, tiny.OPERATOR, network.transport("node"), (), announcement(tiny.OPERATOR, 0))
    operator.crowd = 10**6
    assert operator.is_sampled


async def test_all_peers_together_announce_at_a_bounded_rate() -> None:
    directory = Directory(M, A, MemoryNetwork().transport(A.peer_id), (), announcement(A, 0))
    for crowd in (10, 100, 1000, 10_000, 100_000):
        directory.crowd = crowd
        assert directory.pace >= PUBLISH_SECONDS
        assert crowd / directory.pace <= TOGETHER
    size = len(raw(A, 2**62, addresses=("/ip4/203.0.113.200/tcp/31337/p2p/" + A.peer_id,) * 4))
    assert size / PUBLISH_SECONDS < 20_000 / 100, "far below 20 kB a second for a peer, at any number of peers"


def test_serials_grow_although_the_time_of_day_goes_back() -> None:
    loop = VirtualLoop(random.Random(0))
    clock = Clock(steady=loop.time, wall=lambda: 1e6 - loop.time())
    directory = Directory(M, A, MemoryNetwork().transport(A.peer_id), (), announcement(A, 0), clock)

    async def work() -> list[int]:
        told: asyncio.Queue[bytes] = asyncio.Queue()
        task = asyncio.ensure_future(directory.announce(told.put_nowait))
        found = []
        for step in range(3):
            directory.update(step=step)
            said = node_calls.believed(await told.get(), RUN)
            found.append(said.serial)
        task.cancel()
        return found

    asyncio.set_event_loop(loop)
    serials = loop.run_until_complete(work())
    loop.close()
    asyncio.set_event_loop(None)
    assert serials[0] < serials[1] < serials[2]
