"""A peer comes back after a change of address: a network in memory whose dead connections are silent."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from bootstrap.calls import AnnouncementTable
from bootstrap.sessions import Sessions as NodeSessions
from peer.net import node_calls
from peer.net.address import OwnAddresses, interface_hosts, on_interfaces
from peer.net.base import Clock, Closed, Stream, Timeout, Traffic, Transport, Unreachable, answer, serve_calls
from peer.net.directory import CIRCUITS, LOOK_SECONDS, PUBLISH_SECONDS, Contacts, Directory
from peer.net.memory import MemoryNetwork, MemoryTransport, Pipe
from peer.net.network import Network
from peer.net.node_calls import NEXT_SECONDS
from peer.net.stream import MAX_QUEUE_SECONDS, SLOW_BYTES_PER_SECOND, Flow, FrameStream
from peer.net.uplink import Uplink
from peer.node.sessions import Sessions
from protocol.identity import Identity
from protocol.wire import encoding, endpoints
from protocol.wire.announcement import Announcement, Lookup, RosterRequest
from protocol.wire.encoding import Message
from protocol.wire.session import Announced, Heartbeat
from tests.support import tiny
from tests.support.moved import M, virtual_clock

A, B, C = (Identity(bytes([3, i] * 16)) for i in range(3))
ECHO = "echo"
SOON_S = 35.0
"""Virtual seconds in which everybody is back; libp2p by itself takes 40 to notice."""
ANSWER_S = 5.0
pytestmark = pytest.mark.virtual


class Wire(Pipe):
    """One direction of a stream: passes what is sent while both ends are where they were when it was opened."""

    def __init__(self, loop: asyncio.AbstractEventLoop, lives: Callable[[], bool]) -> None:
        super().__init__(loop)
        self._lives = lives

    def carry(self, data: bytes) -> None:
        if self._lives():
            super().carry(data)

    def end(self) -> None:
        if self._lives():
            super().end()


class Internet(MemoryNetwork):
    """Where connections are between addresses. `connections`: pair of peers -> where they were when it was made."""

    def __init__(self) -> None:
        super().__init__()
        self.connections: dict[frozenset[str], tuple[tuple[str, ...], ...]] = {}
        self._numbers = itertools.count()

    def join(self, who: Identity) -> Host:
        host = Host(self, who.peer_id, lambda key, subkey, value: True)
        self.peers[who.peer_id] = host
        self.move(who)
        return host

    def move(self, who: Identity) -> str:
        """Gives `who` another address."""
        address = f"/memory/{next(self._numbers)}/p2p/{who.peer_id}"
        self.peers[who.peer_id].addresses = (address,)
        return address

    def where(self, *peers: str) -> tuple[tuple[str, ...], ...]:
        return tuple(self.peers[p].addresses if p in self.peers else () for p in sorted(peers))

    def lives(self, *peers: str) -> bool:
        """Whether two peers have a connection that is not dead."""
        return self.connections.get(frozenset(peers)) == self.where(*peers)

    def pipe(self, loop: asyncio.AbstractEventLoop, sender: str, receiver: str, name: str) -> Pipe:
        begun = self.where(sender, receiver)
        return Wire(loop, lambda: begun == self.where(sender, receiver) and self.lives(sender, receiver))


class Host(MemoryTransport):
    """A peer whose daemon takes a connection for alive until the other side is asked, as libp2p's does."""

    _internet: Internet

    def __init__(self, internet: Internet, peer_id: str, validate: Any) -> None:
        super().__init__(internet, peer_id, validate)
        self._internet = internet

    async def open(self, peer: str, name: str, *, timeout: float) -> FrameStream:
        if frozenset((self.peer_id, peer)) not in self._internet.connections:
            raise Unreachable(peer, "its address is not known")
        return await super().open(peer, name, timeout=timeout)

    async def connect(self, addresses: Sequence[str], *, timeout: float) -> None:
        peer = addresses[0].rpartition("/p2p/")[2]
        if self._internet.lives(self.peer_id, peer):
            return
        self._hang_up(peer)
        if not set(addresses) & set(self._internet.peers[peer].addresses):
            await asyncio.sleep(timeout)
            raise Unreachable(peer, "nobody is there any more")
        both = frozenset((self.peer_id, peer))
        self._internet.connections[both] = self._internet.where(*both)

    async def look(self) -> bool:
        changed = await super().look()
        if changed:
            for both in list(self._internet.connections):
                for peer in both - {self.peer_id}:
                    if self.peer_id in both and not self._internet.lives(*both):
                        self._hang_up(peer)
        return changed

    def doubt(self, peer: str) -> None:
        def ask() -> None:
            if not self._internet.lives(self.peer_id, peer):
                self._hang_up(peer)

        asyncio.get_running_loop().call_later(ANSWER_S, ask)

    def _hang_up(self, peer: str) -> None:
        self._internet.connections.pop(frozenset((self.peer_id, peer)), None)
        for stream in list(self._streams):
            if stream.remote == peer:
                stream.abort()


World = tuple["Internet", "Node", "list[Member]"]


class Node:
    """A bootstrap node's sessions and roster, and its directory."""

    def __init__(self, internet: Internet) -> None:
        self.transport = internet.join(tiny.OPERATOR)
        self.heard = AnnouncementTable(M.run_id, 0)
        self.clock = virtual_clock()
        self.sessions = NodeSessions(M, self.clock, self._hear, lambda session: None, self.transport)
        self.moved: list[str] = []
        self.directory = directory(tiny.OPERATOR, self.transport, (), self.moved.extend)

    async def start(self) -> list[asyncio.Task[None]]:
        async def roster(remote: str, request: bytes) -> bytes:
            ask = encoding.decode(request, remote)
            assert isinstance(ask, Lookup | RosterRequest)
            return self.heard.answer(ask)

        await self.transport.serve(endpoints.SESSION, self.sessions.serve)
        await serve_calls(self.transport, endpoints.ROSTER, roster)
        tell = self.directory.announce(lambda sealed: None)
        return [asyncio.create_task(work) for work in (tell, self.directory.publish(), self.directory.watch())]

    async def _hear(self, peer: str, session: Any, message: Message) -> None:
        match message:
            case Announced(sealed=sealed):
                found = self.heard.add(peer, sealed)
                if found is not None:
                    self.directory.learn([found])
            case Heartbeat():
                session.post(encoding.encode(Heartbeat(phase="leading", round=1)))


class Member:
    """A volunteer's directory and sessions, which echoes too."""

    def __init__(self, internet: Internet, who: Identity, node: Node) -> None:
        self.who = who
        self.transport = internet.join(who)
        self.moved: list[str] = []
        self.directory = directory(who, self.transport, node.transport.addresses, self.moved.extend)
        self.sessions = Sessions(Network(self.transport, self.directory, Clock(), lambda body: None, Uplink()))

    async def start(self) -> list[asyncio.Task[None]]:
        async def echo(stream: Stream) -> None:
            while True:
                await stream.send(await stream.recv())

        async def on_message(node: str, message: Any) -> None: ...

        async def on_open() -> None: ...

        await self.transport.serve(ECHO, echo)
        tell = self.directory.announce(lambda sealed: self.sessions.tell(Announced(sealed=sealed)))
        works = (
            tell,
            self.directory.publish(),
            self.directory.watch(),
            self.sessions.run(on_message, on_open, lambda head: True),
        )
        return [asyncio.create_task(work) for work in works]


def directory(who: Identity, transport: Host, bootstrap: Sequence[str], moved: Callable[[Sequence[str]], None]) -> Any:
    said = Announcement(run=M.run_id, peer=who.peer_id, addresses=transport.addresses)
    return Directory(M, who, transport, bootstrap, said, virtual_clock(), moved)


@pytest.fixture
@contextlib.asynccontextmanager
async def world() -> AsyncIterator[World]:
    """Both members are known to the node."""
    internet = Internet()
    node = Node(internet)
    members = [Member(internet, who, node) for who in (A, B)]
    tasks = [task for part in (node, *members) for task in await part.start()]
    try:
        await until(lambda: all(m.who.peer_id in node.heard for m in members), SOON_S)
        yield internet, node, members
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for transport in list(internet.peers.values()):
            await transport.aclose()


async def until(wanted: Callable[[], bool], seconds: float) -> None:
    """Waits for a condition, for a limited number of virtual seconds."""
    clock = asyncio.get_running_loop().time
    end = clock() + seconds
    while not wanted():
        assert clock() < end, "it did not happen"
        await asyncio.sleep(0.1)


async def says(transport: Host, peer: str) -> bytes:
    stream = await transport.open(peer, ECHO, timeout=10.0)
    await stream.send(b"there?")
    return await stream.recv(timeout=10.0)


async def test_a_peer_that_moves_is_announced_at_its_new_address_and_only_there(world: World) -> None:
    internet, node, members = world
    mover, other = members
    peer = mover.who.peer_id
    await other.directory.reach(peer)
    assert await says(other.transport, peer) == b"there?"
    new = internet.move(mover.who)

    def back() -> bool:
        known = node.directory.known.get(peer)
        return known is not None and known.addresses == (new,) and internet.lives(peer, tiny.OPERATOR.peer_id)

    await until(back, SOON_S)
    assert mover.moved == [new]

    def stored() -> bool:
        _, raw = internet.records[endpoints.announcements_key(M.run_id)][peer]
        found = encoding.unseal_announcement(raw, peer, M.run_id)
        return found is not None and found.addresses == (new,)

    await until(stored, PUBLISH_SECONDS)
    other.directory.lost(peer)  # it did not answer
    await other.directory.reach(peer)
    assert other.directory.known[peer].addresses == (new,)
    assert await says(other.transport, peer) == b"there?"


async def test_a_way_in_that_was_found_and_a_few_relays_are_announced_and_nobody_has_moved(world: World) -> None:
    _, node, members = world
    mover, _ = members
    peer = mover.who.peer_id
    (own,) = mover.transport.addresses
    found = f"/ip4/203.0.113.9/tcp/4001/p2p/{peer}"
    circuits = tuple(f"/ip4/198.51.100.7/tcp/{i}/p2p/r{i}/p2p-circuit/p2p/{peer}" for i in range(1, 7))

    def announces(*addresses: str) -> Callable[[], bool]:
        def holds() -> bool:
            known = node.directory.known.get(peer)
            return known is not None and known.addresses == addresses

        return holds

    mover.directory.found([found])
    await until(announces(own, found), SOON_S)
    mover.transport.addresses = (own, *circuits)
    await until(announces(own, found, *circuits[:CIRCUITS]), SOON_S)
    mover.transport.addresses = (own, found, *circuits[:1])  # the daemon knows it now, too
    await until(announces(own, found, circuits[0]), SOON_S)
    assert mover.moved == []


async def test_when_the_node_moves_its_peers_come_back_to_where_it_is(world: World) -> None:
    internet, node, members = world
    new = internet.move(tiny.OPERATOR)
    before = dict(node.sessions.open)

    def back() -> bool:
        fresh = {peer for peer, session in node.sessions.open.items() if session is not before.get(peer)}
        return fresh == {m.who.peer_id for m in members}

    await until(back, SOON_S)
    assert node.moved == [new]
    assert all(internet.lives(m.who.peer_id, tiny.OPERATOR.peer_id) for m in members)


async def test_a_node_that_moves_says_so_at_once(world: World) -> None:
    internet, _, _ = world
    new, peer = internet.move(tiny.OPERATOR), tiny.OPERATOR.peer_id

    def stored() -> bool:
        _, raw = internet.records[endpoints.announcements_key(M.run_id)][peer]
        found = encoding.unseal_announcement(raw, peer, M.run_id)
        return found is not None and found.addresses == (new,)

    await until(stored, LOOK_SECONDS + 0.5)


@pytest.mark.parametrize("mover", [tiny.OPERATOR, C], ids=["the node", "the watcher"])
async def test_who_watches_is_answered_soon_after_a_move(world: World, mover: Identity) -> None:
    """The old connection is dead after ANSWER_S; the node is found by then, and no look is missed."""
    internet, node, _ = world
    contacts = Contacts(M, internet.join(C), node.transport.addresses)

    async def look(transport: Transport, peer: str) -> object:
        return await node_calls.look_up_peers(transport, M.run_id, peer)

    await contacts.call(tiny.OPERATOR.peer_id, look)
    internet.move(mover)
    began = asyncio.get_running_loop().time()
    await contacts.call(tiny.OPERATOR.peer_id, look)
    assert asyncio.get_running_loop().time() - began < NEXT_SECONDS + ANSWER_S + 1.0
    assert internet.lives(C.peer_id, tiny.OPERATOR.peer_id)


async def test_an_announcement_from_elsewhere_replaces_the_way_that_was_known(world: World) -> None:
    internet, _, members = world
    mover, other = members
    peer = mover.who.peer_id
    await other.directory.reach(peer)
    assert peer in other.directory.reached
    known = other.directory.known[peer]
    other.directory.learn([known])
    assert peer in other.directory.reached, "it says the same"
    new = internet.move(mover.who)
    told = Announcement(run=M.run_id, peer=peer, addresses=(new,), serial=known.serial + 1)
    other.directory.learn([told])
    assert peer not in other.directory.reached
    await other.directory.reach(peer)
    assert await says(other.transport, peer) == b"there?"


async def test_who_is_silent_is_doubted_and_who_is_slow_is_not() -> None:
    """A frame comes in pieces, of which each takes two thirds of the silence that makes a peer doubtful."""
    loop = asyncio.get_running_loop()
    reader, writer, doubted, clock = asyncio.StreamReader(), Pipe(loop), list[tuple[str, float]](), loop.time
    stream = FrameStream("there", ECHO, reader, writer, reader.feed_eof, Traffic(), Flow())

    def doubt(peer: str) -> None:
        doubted.append((peer, clock()))
        if len(doubted) == 2:
            stream.abort()

    for at, piece in enumerate((b"\x00\x00\x00\x04", b"ab", b"c", b"d")):
        loop.call_later(2.0 * (at + 1), reader.feed_data, piece)
    assert await answer(stream, doubt, timeout=30.0, silence=3.0) == b"abcd"
    assert doubted == []
    with pytest.raises(Timeout, match="nothing came for 2 s"):
        await answer(stream, doubt, timeout=2.0, silence=3.0)
    assert doubted == []
    begun = clock()
    with pytest.raises(Closed):
        await answer(stream, doubt, silence=3.0)
    assert doubted == [("there", begun + 3.0), ("there", begun + 6.0)]


def test_what_was_sent_before_a_question_gives_its_answer_more_time() -> None:
    flow = Flow()
    assert flow.queue_seconds(now=7.0) == 0.0
    flow.sent(int(2 * SLOW_BYTES_PER_SECOND), now=10.0)
    assert flow.queue_seconds(now=10.5) == pytest.approx(1.5)
    flow.sent(int(SLOW_BYTES_PER_SECOND), now=11.0)
    assert flow.queue_seconds(now=11.0) == pytest.approx(2.0)
    assert flow.queue_seconds(now=20.0) == 0.0
    flow.sent(1 << 30, now=20.0)
    assert flow.queue_seconds(now=20.0) == MAX_QUEUE_SECONDS
    assert [flow.ask_in(now) for now in (0.0, 0.5, 0.75, 1.0, 1.5, 2.0)] == [0.0, 0.5, 0.25, 0.0, 0.5, 0.0]


def test_an_address_that_the_machine_has_lost_is_not_ours_although_others_saw_us_there() -> None:
    def at(*hosts: str) -> list[str]:
        return [f"/ip4/{host}/tcp/4001/p2p/{A.peer_id}" for host in hosts]

    home, cafe, router, here = "192.168.1.7", "10.0.0.9", "203.0.113.5", "127.0.0.1"
    own = OwnAddresses()
    assert own.update([*at(home, here), "/ip4/1.2.3.4/udp/1/quic-v1"], frozenset({home, here})) is False
    assert own.listed == tuple(at(home, here))
    assert own.update(at(home, here, router), frozenset({home, here})) is False, "somebody saw us behind our router"
    assert own.listed == tuple(at(home, here, router))
    assert own.update(at(home, here), frozenset({here})) is True, "between two networks"
    assert own.listed == tuple(at(home, here, router)), "there is no other yet"
    assert own.update(at(cafe, here, home), frozenset({cafe, here})) is False, "it has gone before"
    assert own.listed == tuple(at(cafe, here))
    assert own.update(at(here), frozenset({home, here})) is True, "back home, and the daemon does not know it yet"
    assert own.listed == tuple(at(cafe, here))
    assert own.update(at(home, here), frozenset({home, here})) is False
    assert own.listed == tuple(at(home, here))
    assert here in interface_hosts()


def test_a_new_address_of_an_interface_is_ours_before_the_daemon_lists_it() -> None:
    def at(port: int, *hosts: str) -> list[str]:
        return [f"/ip{6 if ':' in host else 4}/{host}/tcp/{port}/p2p/{A.peer_id}" for host in hosts]

    listed = [*at(4001, "127.0.0.1", "192.168.1.7"), *at(31, "203.0.113.5"), *at(4002, "::1")]
    hosts = {"127.0.0.1", "10.0.0.9", "::1", "2001:db8::9"}
    assert sorted(on_interfaces(listed, hosts)) == sorted(
        [*at(4001, "127.0.0.1", "10.0.0.9"), *at(4002, "::1", "2001:db8::9")]
    )
    assert on_interfaces(at(4001, "192.168.1.7"), hosts) == [], "it does not listen everywhere"
    assert on_interfaces(at(4001, "127.0.0.1"), {"2001:db8::9"}) == [], "not at IPv6"
