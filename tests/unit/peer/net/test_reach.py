"""How a peer finds out whether others reach it: what it concludes, and that nobody can be made to dial what is not the asker's."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from peer.net.base import Clock, call, serve_calls
from peer.net.daemon import Entrance
from peer.net.greeting import GREETING
from peer.net.memory import MemoryNetwork, MemoryTransport
from peer.net.reach import (
    AGAIN_SECONDS,
    DIAL_BACK_LIMITS,
    DialBackLimits,
    DialBackServer,
    Reachability,
    ReachContext,
    ReachMonitor,
    check_reachability,
    greets,
)
from protocol.errors import RemoteError
from protocol.wire import encoding, endpoints, framing
from protocol.wire.announcement import MOST_PORTS, Announcement, Dialled, DialMe
from tests.sim.loop import VirtualLoop
from tests.support.net import sockets, start

sockets = sockets

HOME, ROUTER, NODE = "192.168.1.2", "203.0.113.9", "198.51.100.7"
PORT, OUTSIDE = 4001, 40213
DEADLINE = 60.0


def run(story: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(random.Random(0))) as runner:
        runner.run(story)


def clock() -> Clock:
    loop = asyncio.get_running_loop()
    return Clock(steady=loop.time, wall=loop.time)


@dataclasses.dataclass
class Ports:
    """A host's open doors, as dial-backs find them: at `open` a libp2p host greets, at `silent` nothing comes. `dialled`: who was tried."""

    open: set[tuple[str, int]] = dataclasses.field(default_factory=set)
    silent: set[tuple[str, int]] = dataclasses.field(default_factory=set)
    dialled: list[tuple[str, int]] = dataclasses.field(default_factory=list)

    async def greets(self, host: str, port: int) -> bool:
        self.dialled.append((host, port))
        if (host, port) in self.silent:
            await asyncio.Event().wait()
        return (host, port) in self.open


class Town:
    """A peer `home` and others who answer dial-backs, over a network in memory."""

    def __init__(self, seen: str = f"/ip4/{ROUTER}/tcp/{OUTSIDE}") -> None:
        self.network = MemoryNetwork()
        self.home = self.network.transport("home")
        self.home.addresses = (f"/ip4/{HOME}/tcp/{PORT}/p2p/home", f"/ip4/127.0.0.1/tcp/{PORT}/p2p/home")
        self.network.hosts["home"] = seen
        self.ports = Ports()
        self.announced: tuple[str, ...] = ()
        self.others: dict[str, str] = {}

    async def node(self, name: str, bounds: DialBackLimits = DIAL_BACK_LIMITS, host: str = NODE) -> MemoryTransport:
        made = self.network.transport(name)
        self.others[name] = f"/ip4/{host}/tcp/31337/p2p/{name}"
        await DialBackServer(made, clock(), self.ports.greets, bounds).serve()
        return made

    async def liar(self, name: str, answer: bytes) -> None:
        async def lies(peer: str, request: bytes) -> bytes:
            return answer

        made = self.network.transport(name)
        self.others[name] = f"/ip4/{NODE}/tcp/31337/p2p/{name}"
        await serve_calls(made, endpoints.DIAL_BACK, lies)

    def around(self) -> ReachContext:
        async def others() -> AsyncIterator[str]:
            for name in self.others:
                yield name

        async def reach(peer: str) -> None: ...

        return ReachContext(
            transport=self.home,
            others=others,
            reach=reach,
            addresses=lambda peer: [self.others[peer]],
            announced=self.announced,
            hosts=lambda: frozenset({HOME, "127.0.0.1"}),
        )

    async def ask(self, node: str, *ports: int, by: MemoryTransport | None = None) -> Dialled:
        raw = await call(
            by or self.home, node, endpoints.DIAL_BACK, encoding.encode(DialMe(ports=ports)), timeout=DEADLINE
        )
        return encoding.expect(Dialled, encoding.decode(raw, node), node)


# --- who is dialled


def test_only_the_host_that_the_asker_comes_from_is_dialled() -> None:
    async def story() -> None:
        town = Town()
        await town.node("n")
        town.ports.open = {(ROUTER, PORT)}
        assert await town.ask("n", PORT, 22) == Dialled(host=ROUTER, ports=(PORT,))
        assert sorted(town.ports.dialled) == [(ROUTER, 22), (ROUTER, PORT), (ROUTER, OUTSIDE)]

    run(story())


@pytest.mark.parametrize("seen", ["", f"/ip4/{NODE}/tcp/1/p2p/relay/p2p-circuit", "/dns4/victim.example/tcp/1"])
def test_who_comes_from_nowhere_is_not_dialled(seen: str) -> None:
    """Through a relay, or from what is no IP address."""

    async def story() -> None:
        town = Town(seen)
        await town.node("n")
        assert await town.ask("n", PORT) == Dialled(host="")
        assert town.ports.dialled == []

    run(story())


@pytest.mark.parametrize("ports", [[], [0], [65536], [-1], [*range(1, MOST_PORTS + 2)], ["22"], "22", None])
def test_a_request_for_other_ports_is_refused(ports: Any) -> None:
    async def story() -> None:
        town = Town()
        await town.node("n")
        request = framing.pack_message({"t": "dialme", "ports": ports, "host": "198.51.100.99"})
        with pytest.raises(RemoteError, match="dropped"):
            await call(town.home, "n", endpoints.DIAL_BACK, request, timeout=DEADLINE)
        assert town.ports.dialled == []

    run(story())


def test_a_host_that_is_named_does_not_matter() -> None:
    async def story() -> None:
        town = Town()
        await town.node("n")
        request = framing.pack_message({"t": "dialme", "ports": [PORT], "host": "198.51.100.99", "peer": "victim"})
        await call(town.home, "n", endpoints.DIAL_BACK, request, timeout=DEADLINE)
        assert {host for host, _ in town.ports.dialled} == {ROUTER}

    run(story())


def test_neither_the_answer_nor_its_time_tells_a_closed_port_from_a_silent_one() -> None:
    async def story() -> None:
        took = []
        for silent in ({(ROUTER, 22)}, set()):
            town = Town()
            await town.node("n")
            town.ports.open, town.ports.silent = {(ROUTER, OUTSIDE)}, silent
            began = asyncio.get_running_loop().time()
            assert await town.ask("n", 22) == Dialled(host=ROUTER, ports=(OUTSIDE,))
            took.append(asyncio.get_running_loop().time() - began)
        assert took == [pytest.approx(DIAL_BACK_LIMITS.seconds, abs=0.1)] * 2

    run(story())


def test_an_answer_that_is_all_yes_does_not_wait() -> None:
    async def story() -> None:
        town = Town()
        await town.node("n")
        town.ports.open = {(ROUTER, PORT), (ROUTER, OUTSIDE)}
        began = asyncio.get_running_loop().time()
        assert await town.ask("n", PORT) == Dialled(host=ROUTER, ports=(PORT, OUTSIDE))
        assert asyncio.get_running_loop().time() - began < DIAL_BACK_LIMITS.seconds / 2

    run(story())


# --- how often


async def tries(ask: Callable[[], Coroutine[Any, Any, Dialled]], times: int) -> int:
    """How many of so many requests at once were answered."""
    done = await asyncio.gather(*(ask() for _ in range(times)), return_exceptions=True)
    refused = [error for error in done if isinstance(error, RemoteError) and "too often" in str(error)]
    assert len(refused) == sum(not isinstance(answer, Dialled) for answer in done)
    return times - len(refused)


BURST = DIAL_BACK_LIMITS.each[1]


def test_a_peer_may_ask_a_few_times_only() -> None:
    async def story() -> None:
        town = Town()
        await town.node("n")
        assert await tries(lambda: town.ask("n", PORT), 20) == BURST
        assert len(town.ports.dialled) == 2 * BURST
        await asyncio.sleep(2 / DIAL_BACK_LIMITS.each[0])
        assert await tries(lambda: town.ask("n", PORT), 20) == 2

    run(story())


@pytest.mark.parametrize(
    "hosts", [[f"/ip4/{ROUTER}/tcp/{i + 1}" for i in range(30)], [f"/ip6/2001:db8::{i + 1:x}/tcp/1" for i in range(30)]]
)
def test_many_names_at_one_address_count_as_one(hosts: list[str]) -> None:
    """Also within the 64 bits of IPv6 that a home has for itself."""

    async def story() -> None:
        town = Town()
        await town.node("n")
        answered = 0
        for i, host in enumerate(hosts):
            sybil = town.network.transport(f"s{i}")
            town.network.hosts[f"s{i}"] = host
            answered += await tries(lambda by=sybil: town.ask("n", PORT, by=by), 1)  # type: ignore[misc]
        # while they are asked one after another some more may
        assert BURST <= answered <= BURST + 1 + 30 * DIAL_BACK_LIMITS.seconds * DIAL_BACK_LIMITS.each[0]

    run(story())


@pytest.mark.parametrize(
    ("bounds", "most"),
    [
        (dataclasses.replace(DIAL_BACK_LIMITS, together=(0.001, 5.0)), 5),
        (dataclasses.replace(DIAL_BACK_LIMITS, at_once=3), 3),
        (
            dataclasses.replace(DIAL_BACK_LIMITS, kept=2),
            DIAL_BACK_LIMITS.at_once,
        ),  # to forget who asked does not lift what holds for all
    ],
)
def test_all_together_may_ask_so_often(bounds: DialBackLimits, most: int) -> None:
    async def story() -> None:
        town = Town()
        await town.node("n", bounds)
        sybils = []
        for i in range(40):
            sybils.append(town.network.transport(f"s{i}"))
            town.network.hosts[f"s{i}"] = f"/ip4/203.0.113.{i + 1}/tcp/1"
        free = iter(sybils)
        assert await tries(lambda: town.ask("n", PORT, by=next(free)), 40) == most

    run(story())


def test_who_may_not_ask_takes_nothing_from_the_others() -> None:
    async def story() -> None:
        town = Town()
        await town.node("n", dataclasses.replace(DIAL_BACK_LIMITS, together=(0.001, BURST + 1)))
        assert await tries(lambda: town.ask("n", PORT), 40) == BURST
        other = town.network.transport("other")
        town.network.hosts["other"] = "/ip4/203.0.113.77/tcp/1"
        assert (await town.ask("n", PORT, by=other)).host == "203.0.113.77"

    run(story())


# --- what is said to a port


@contextlib.asynccontextmanager
async def door(says: bytes, *, stays: bool = True) -> AsyncIterator[tuple[int, list[bytes]]]:
    """A TCP port that says so much to whoever comes, and what was said to it until it was hung up."""
    heard: list[bytes] = []
    done = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(says)
        with contextlib.suppress(OSError):
            if stays:
                heard.append(await reader.read())
        writer.close()
        done.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], heard
        async with asyncio.timeout(DEADLINE):
            await done.wait()
    finally:
        server.close()


@pytest.mark.parametrize(
    ("says", "is_one"),
    [
        (GREETING, True),
        (GREETING + b"more" * 10_000, True),
        (b"SSH-2.0-OpenSSH_9.2p1 Debian\r\n", False),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n" * 1000, False),
    ],
)
def test_only_the_greeting_counts_and_nothing_is_said(says: bytes, is_one: bool) -> None:
    async def story() -> None:
        async with door(says) as (port, heard):
            assert await greets("127.0.0.1", port) is is_one
        assert heard in ([b""], [])  # not a byte; the connection is reset where there was more to read

    asyncio.run(story())


def test_a_port_that_is_closed_or_hangs_up_does_not_greet() -> None:
    async def story() -> None:
        async with door(GREETING[:5], stays=False) as (port, _):
            assert not await greets("127.0.0.1", port)
        assert not await greets("127.0.0.1", port)

    asyncio.run(story())


# --- what follows from it


@pytest.mark.parametrize(
    ("seen", "open_ports", "how", "addresses"),
    [
        (f"/ip4/{HOME}/tcp/{PORT}", {(HOME, PORT)}, "direct", (f"/ip4/{HOME}/tcp/{PORT}",)),  # all in one local network
        (f"/ip4/{ROUTER}/tcp/{OUTSIDE}", {(ROUTER, PORT)}, "mapped", (f"/ip4/{ROUTER}/tcp/{PORT}",)),
        (f"/ip4/{ROUTER}/tcp/{OUTSIDE}", {(ROUTER, OUTSIDE)}, "mapped", (f"/ip4/{ROUTER}/tcp/{OUTSIDE}",)),
        (f"/ip4/{ROUTER}/tcp/{OUTSIDE}", set(), "private", ()),
        ("", set(), "", ()),
    ],
)
def test_how_a_peer_is_reached(
    seen: str, open_ports: set[tuple[str, int]], how: str, addresses: tuple[str, ...]
) -> None:
    async def story() -> None:
        town = Town(seen)
        town.ports.open = open_ports
        for name in ("n", "m", "unasked"):
            await town.node(name, host="192.168.1.7" if seen.startswith(f"/ip4/{HOME}") else NODE)
        found = await check_reachability(town.around())
        asked = ("n", "m") if how else ()
        assert found == Reachability(how=how, addresses=addresses, asked=asked)

    run(story())


def test_who_sees_us_in_its_own_network_cannot_tell_for_the_internet() -> None:
    async def story() -> None:
        town = Town(f"/ip4/{HOME}/tcp/{PORT}")
        town.ports.open = {(HOME, PORT)}
        await town.node("n")
        assert await check_reachability(town.around()) == Reachability()

    run(story())


def answer(*ports: int, host: str = ROUTER) -> bytes:
    return encoding.encode(Dialled(host=host, ports=ports))


@pytest.mark.parametrize(
    ("lie", "open_ports", "expected"),
    [
        (answer(PORT), set(), Reachability(how="private", asked=("liar", "n", "m"))),
        (
            answer(),
            {(ROUTER, PORT)},
            Reachability(how="mapped", addresses=(f"/ip4/{ROUTER}/tcp/{PORT}",), asked=("liar", "n", "m")),
        ),
        (  # an address that only one names is not announced: others would dial a stranger
            answer(22, host="198.51.100.99"),
            {(ROUTER, PORT)},
            Reachability(how="mapped", asked=("liar", "n")),
        ),
        (b"nonsense", set(), Reachability(how="private", asked=("n", "m"))),
        (encoding.encode(DialMe(ports=(1,))), set(), Reachability(how="private", asked=("n", "m"))),
        (
            framing.pack_message({"t": "dialled", "host": "x" * 900, "ports": [1]}),
            set(),
            Reachability(how="private", asked=("n", "m")),
        ),
        (
            framing.pack_message({"t": "dialled", "host": ROUTER, "ports": [*range(1, 100)]}),
            set(),
            Reachability(how="private", asked=("n", "m")),
        ),
    ],
)
def test_one_liar_does_not_decide(lie: bytes, open_ports: set[tuple[str, int]], expected: Reachability) -> None:
    async def story() -> None:
        town = Town()
        town.ports.open = open_ports
        await town.liar("liar", lie)
        for name in ("n", "m"):
            await town.node(name)
        assert await check_reachability(town.around()) == expected

    run(story())


@pytest.mark.parametrize(
    ("announced", "open_ports", "how", "dialled"),
    [
        (f"/ip4/{ROUTER}/tcp/9999", {(ROUTER, 9999)}, "mapped", 9999),
        (f"/ip4/{ROUTER}/tcp/9999", set(), "private", 9999),  # nobody answers where he says
        ("/ip4/198.51.100.50/tcp/9999", set(), "mapped", 9999),  # nobody can tell
        ("/dns4/home.example/tcp/9999", set(), "mapped", 9999),
    ],
)
def test_what_the_user_announces_is_tried(
    announced: str, open_ports: set[tuple[str, int]], how: str, dialled: int
) -> None:
    async def story() -> None:
        town = Town()
        town.announced, town.ports.open = (announced,), open_ports
        for name in ("n", "m"):
            await town.node(name)
        assert (await check_reachability(town.around())).how == how
        assert (ROUTER, dialled) in town.ports.dialled

    run(story())


def test_a_peer_looks_again_when_its_addresses_change_and_now_and_then() -> None:
    async def story() -> None:
        town, told, loop = Town(), list[tuple[float, str]](), asyncio.get_running_loop()
        for name in ("n", "m"):
            await town.node(name)
        look = ReachMonitor(
            town.around(), Reachability(how="private"), lambda found: told.append((loop.time(), found.how))
        )
        task = asyncio.create_task(look.run())
        await asyncio.sleep(AGAIN_SECONDS + 20)
        assert told == []  # nothing is told that was known
        town.ports.open = {(ROUTER, PORT)}
        look.changed()
        await asyncio.sleep(20)
        assert [how for _, how in told] == ["mapped"]
        town.ports.open = set()
        await asyncio.sleep(AGAIN_SECONDS + 20)
        assert [how for _, how in told] == ["mapped", "private"]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(story())


@pytest.mark.parametrize("reachable", ["public", "DIRECT", "x" * 10_000])
def test_nobody_announces_another_way_to_be_reached(reachable: str) -> None:
    with pytest.raises(ValueError, match="reachable must be one of"):
        Announcement(run="r", peer="p", reachable=reachable)


# --- with real daemons


@contextlib.asynccontextmanager
async def forwarder(port: int) -> AsyncIterator[tuple[int, list[int]]]:
    """A port that leads to another one of this machine, as a provider's, and how many have come through."""
    came: list[int] = []

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.append(1)
        there, back = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pump(reader, back), pump(there, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], came
    finally:
        server.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.usefixtures("sockets")
def test_a_daemon_is_dialled_back_and_a_remapped_port_is_reached(tmp_path: Path) -> None:
    async def story() -> None:
        port = free_port()
        async with contextlib.AsyncExitStack() as stack:
            outside, came = await stack.enter_async_context(forwarder(port))
            announce = (f"/ip4/127.0.0.1/tcp/{outside}",)
            node = await start(tmp_path / "node")
            stack.push_async_callback(node.aclose)
            await DialBackServer(node, Clock()).serve()
            peer = await start(tmp_path / "peer", port=port, entrance=Entrance(announce=announce))
            stack.push_async_callback(peer.aclose)
            await peer.connect(node.addresses, timeout=DEADLINE)

            async def others() -> AsyncIterator[str]:
                yield node.peer_id

            async def reach(peer: str) -> None: ...

            around = ReachContext(
                transport=peer,
                others=others,
                reach=reach,
                addresses=lambda peer: node.addresses,
                announced=announce,
            )
            found = await check_reachability(around)
            assert found.how == "direct"
            assert set(found.addresses) == {announce[0], f"/ip4/127.0.0.1/tcp/{port}"}

            async def echo(remote: str, request: bytes) -> bytes:
                return request

            await serve_calls(peer, "echo", echo)
            announced = [address for address in peer.addresses if f"/tcp/{outside}/" in address]
            assert announced == [f"{announce[0]}/p2p/{peer.peer_id}"]
            stranger = await start(tmp_path / "stranger")
            stack.push_async_callback(stranger.aclose)
            before = len(came)
            await stranger.connect(announced, timeout=DEADLINE)
            assert await call(stranger, peer.peer_id, "echo", b"hello", timeout=DEADLINE) == b"hello"
            assert len(came) == before + 2, "its greeting is heard first, then it is dialled"
            assert stranger.seen_at(peer.peer_id) == announce[0]

    asyncio.run(story())
