"""Start of a peer's network, in memory: when there is a second one, with which relays, and with no question."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pytest

from bootstrap.calls import AnnouncementTable
from peer.net.base import Clock, Transport, serve_calls
from peer.net.memory import MemoryNetwork, MemoryTransport
from peer.net.reach import DialBackServer, Reachability
from peer.node.open_run import Door, Run
from peer.node.way_in import RELAYS, REMEMBERED_SECONDS, NetworkStart
from protocol.identity import Identity
from protocol.run.manifest import HintSpec, Manifest
from protocol.wire import encoding, endpoints
from protocol.wire.announcement import Announcement, Lookup
from tests.support import tiny

pytestmark = pytest.mark.virtual

M = tiny.manifest()
OPERATOR = tiny.OPERATOR.peer_id
VOLUNTEERS = [Identity(bytes([7, i] * 16)) for i in range(10)]
HOME, ROUTER, PORT, MAPPED = "192.168.1.2", "203.0.113.9", 4001, 43159
LISTENS = f"/ip4/{HOME}/tcp/{PORT}/p2p/home"
CIRCUIT = f"/ip4/198.51.100.1/tcp/31337/p2p/{OPERATOR}/p2p-circuit/p2p/home"


class Street:
    """A bootstrap node, volunteers that announce how they are reached, and a home that starts again and again."""

    def __init__(self, folder: Path) -> None:
        self.network = MemoryNetwork()
        self.network.hosts["home"] = f"/ip4/{ROUTER}/tcp/50000"
        self.folder = folder
        self.open: set[int] = set()
        self.dialled = 0
        self.doors: list[Door] = []
        self.heard = AnnouncementTable(M.run_id, 0)
        self.meanwhile: list[Transport] = []

    async def greets(self, host: str, port: int) -> bool:
        self.dialled += 1
        return (host, port) in {(ROUTER, port) for port in self.open}

    async def public(self, who: Identity, number: int, reachable: str = "direct", *, there: bool = True) -> None:
        made = self.network.transport(who.peer_id)
        address = f"/ip4/198.51.100.{number}/tcp/31337/p2p/{who.peer_id}"
        made.addresses = (address,)
        loop = asyncio.get_running_loop()
        await DialBackServer(made, Clock(steady=loop.time, wall=loop.time), self.greets).serve()
        said = Announcement(run=M.run_id, peer=who.peer_id, addresses=(address,), reachable=reachable, serial=1)
        self.heard.add(who.peer_id, encoding.seal(who, said))
        await made.store(endpoints.announcements_key(M.run_id), who.peer_id, encoding.seal(who, said), ttl=600.0)
        if who.peer_id == OPERATOR:

            async def roster(peer: str, request: bytes) -> bytes:
                return self.heard.answer(encoding.expect(Lookup, encoding.decode(request, peer), peer))

            await serve_calls(made, endpoints.ROSTER, roster)
        if not there:
            await made.aclose()

    async def begin(self, folder: Path, door: Door, run: str) -> Transport:
        self.doors.append(door)
        made: MemoryTransport = self.network.transport("home")
        made.addresses = (LISTENS, CIRCUIT) if door.relays else (LISTENS,)
        return made

    async def find_reach(self, manifest: Manifest = M, **door: Any) -> Reachability | None:
        """Starts once; what was found."""
        line = f"/ip4/198.51.100.1/tcp/31337/p2p/{OPERATOR}"
        door = {"host": "0.0.0.0", **door}

        async def meanwhile(transport: Transport) -> None:
            self.meanwhile.append(transport)

        way_in = NetworkStart(Run(None, M.run_id, (line,)), self.folder, Door(**door), self.begin, meanwhile)
        transport, found = await way_in.find_reach(await way_in.start(), manifest)
        assert self.network.peers["home"] is transport
        await transport.aclose()
        return found


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "private"


async def test_a_private_peer_is_started_again_with_relays_and_remembers_it_for_a_day(
    tmp_path: Path, mark: Path
) -> None:
    street = Street(tmp_path)
    await street.public(tiny.OPERATOR, 1)
    await street.public(VOLUNTEERS[0], 2)
    found = await street.find_reach()
    assert (found.how, set(found.asked)) == ("private", {OPERATOR, VOLUNTEERS[0].peer_id})
    relays = [f"/ip4/198.51.100.{i}/tcp/31337/p2p/{p}" for i, p in ((1, OPERATOR), (2, VOLUNTEERS[0].peer_id))]
    assert street.doors == [Door(host="0.0.0.0"), Door(host="0.0.0.0", relays=tuple(relays))]
    assert len(street.meanwhile) == 1

    dialled = street.dialled
    assert await street.find_reach() == Reachability(how="private")
    assert street.dialled == dialled
    assert len(street.doors) == 4

    old = time.time() - REMEMBERED_SECONDS - 60
    os.utime(mark, (old, old))
    street.open = {PORT}
    found = await street.find_reach()
    assert (found.how, found.addresses) == ("mapped", (f"/ip4/{ROUTER}/tcp/{PORT}",))
    assert not mark.exists()
    assert len(street.doors) == 5


async def test_a_router_that_maps_a_port_late_is_waited_for(tmp_path: Path, mark: Path) -> None:
    street = Street(tmp_path)
    await street.public(tiny.OPERATOR, 1)
    street.open = {MAPPED}

    async def maps() -> None:
        await asyncio.sleep(5.0)
        home = street.network.peers["home"]
        home.addresses = (f"/ip4/{ROUTER}/tcp/{MAPPED}/p2p/home", LISTENS)

    late = asyncio.create_task(maps())
    found = await street.find_reach()
    await late
    assert (found.how, found.addresses) == ("mapped", (f"/ip4/{ROUTER}/tcp/{MAPPED}",))
    assert len(street.doors) == 1
    assert not mark.exists()


async def test_only_who_answers_now_and_is_reached_by_everybody_carries_signals(tmp_path: Path) -> None:
    """libp2p would wait for minutes for one that does not."""

    street = Street(tmp_path)
    await street.public(tiny.OPERATOR, 1)
    await street.public(VOLUNTEERS[0], 2, there=False)
    await street.public(VOLUNTEERS[1], 3, "private")
    await street.public(VOLUNTEERS[2], 4, "")
    for number in range(3, 10):
        await street.public(VOLUNTEERS[number], number + 2, "mapped")
    await street.find_reach()
    chosen = street.doors[-1].relays
    assert len(chosen) == RELAYS
    assert chosen[0].endswith(OPERATOR)
    assert {address.split("/")[2] for address in chosen[1:]} <= {f"198.51.100.{i}" for i in range(5, 12)}


async def test_nodes_that_one_node_does_not_know_are_found_in_the_dht(tmp_path: Path) -> None:
    street = Street(tmp_path)
    await street.public(VOLUNTEERS[0], 2, "")  # of which the first node has not heard
    street.heard.remove(VOLUNTEERS[0].peer_id)
    await street.public(tiny.OPERATOR, 1)
    both = tiny.manifest(operators=(OPERATOR, VOLUNTEERS[0].peer_id))
    assert both.run_id != M.run_id
    said = Announcement(
        run=both.run_id,
        peer=VOLUNTEERS[0].peer_id,
        addresses=(f"/ip4/198.51.100.2/tcp/31337/p2p/{VOLUNTEERS[0].peer_id}",),
    )
    key, node = endpoints.announcements_key(both.run_id), street.network.peers[VOLUNTEERS[0].peer_id]
    await node.store(key, node.peer_id, encoding.seal(VOLUNTEERS[0], said), ttl=600.0)
    await street.find_reach(both)
    assert [address.rpartition("/")[2] for address in street.doors[-1].relays] == list(both.operators)


async def test_a_manifest_has_nobody_asked_in_others_networks(tmp_path: Path) -> None:
    street = Street(tmp_path)
    await street.public(tiny.OPERATOR, 1)
    for number, inside in enumerate(("10.0.0.1", "169.254.169.254", "127.0.0.1"), 1):
        await street.public(VOLUNTEERS[number], number + 1, "private")
        hint = f"/ip4/{inside}/tcp/22/p2p/{VOLUNTEERS[number].peer_id}"
        found = await street.find_reach(tiny.manifest(hints=HintSpec(bootstrap=(hint,))), announce=(LISTENS,))
        assert set(found.asked) == {OPERATOR}
    await street.public(VOLUNTEERS[0], 9, "private")
    hint = f"/ip4/198.51.100.9/tcp/31337/p2p/{VOLUNTEERS[0].peer_id}"
    found = await street.find_reach(tiny.manifest(hints=HintSpec(bootstrap=(hint,))), announce=(LISTENS,))
    assert set(found.asked) == {OPERATOR, VOLUNTEERS[0].peer_id}


async def test_what_is_announced_is_no_reason_to_start_again(tmp_path: Path) -> None:
    street = Street(tmp_path)
    await street.public(tiny.OPERATOR, 1)
    announced = {"announce": (f"/ip4/{ROUTER}/tcp/9999",), "port": PORT}
    found = await street.find_reach(**announced)
    assert found.how == "private"  # no answer
    street.open = {9999}
    found = await street.find_reach(**announced)
    assert found.how == "mapped"
    assert [door.relays for door in street.doors] == [(), ()]


async def test_who_listens_to_itself_only_asks_nobody(tmp_path: Path) -> None:
    street = Street(tmp_path)
    await street.public(tiny.OPERATOR, 1)
    assert await street.find_reach(host="127.0.0.1") is None
    assert (street.dialled, len(street.doors)) == (0, 1)


async def test_without_anybody_to_ask_it_goes_on(tmp_path: Path) -> None:
    street = Street(tmp_path)
    await street.public(tiny.OPERATOR, 1, there=False)
    assert await street.find_reach() == Reachability()
    assert len(street.doors) == 1
