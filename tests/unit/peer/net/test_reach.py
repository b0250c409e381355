"""How a peer finds out whether others reach it, and that no peer can be made to dial another host."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from peer.net.base import call, serve_calls
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
)
from protocol.errors import RemoteError
from protocol.wire import encoding, endpoints, framing
from protocol.wire.announcement import MOST_PORTS, Announcement, Dialled, DialMe
from tests.support.bandwidth import clock

pytestmark = pytest.mark.virtual

HOME, ROUTER, NODE = "192.168.1.2", "203.0.113.9", "198.51.100.7"
PORT, OUTSIDE = 4001, 40213
DEADLINE = 60.0


@dataclasses.dataclass
class Ports:
    """A host's ports: at `open` a libp2p host greets, at `silent` nothing comes. `dialled`: the ports tried."""

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


@pytest.fixture
@contextlib.asynccontextmanager
async def town() -> AsyncIterator[Town]:
    """One whose node "n" answers dial-backs."""
    made = Town()
    await made.node("n")
    yield made
    await made.home.aclose()


# --- who is dialled


async def test_only_the_host_that_the_asker_comes_from_is_dialled(town: Town) -> None:
    town.ports.open = {(ROUTER, PORT)}
    assert await town.ask("n", PORT, 22) == Dialled(host=ROUTER, ports=(PORT,))
    assert sorted(town.ports.dialled) == [(ROUTER, 22), (ROUTER, PORT), (ROUTER, OUTSIDE)]


@pytest.mark.parametrize("seen", ["", f"/ip4/{NODE}/tcp/1/p2p/relay/p2p-circuit", "/dns4/victim.example/tcp/1"])
async def test_who_comes_from_nowhere_is_not_dialled(seen: str) -> None:
    """Through a relay, or from what is no IP address."""
    town = Town(seen)
    await town.node("n")
    assert await town.ask("n", PORT) == Dialled(host="")
    assert town.ports.dialled == []


@pytest.mark.parametrize("ports", [[], [0], [65536], [-1], [*range(1, MOST_PORTS + 2)], ["22"], "22", None])
async def test_a_request_for_other_ports_is_refused(town: Town, ports: Any) -> None:
    request = framing.pack_message({"t": "dialme", "ports": ports, "host": "198.51.100.99"})
    with pytest.raises(RemoteError, match="dropped"):
        await call(town.home, "n", endpoints.DIAL_BACK, request, timeout=DEADLINE)
    assert town.ports.dialled == []


async def test_a_host_that_is_named_does_not_matter(town: Town) -> None:
    request = framing.pack_message({"t": "dialme", "ports": [PORT], "host": "198.51.100.99", "peer": "victim"})
    await call(town.home, "n", endpoints.DIAL_BACK, request, timeout=DEADLINE)
    assert {host for host, _ in town.ports.dialled} == {ROUTER}


async def test_neither_the_answer_nor_its_time_tells_a_closed_port_from_a_silent_one() -> None:
    took = []
    for silent in ({(ROUTER, 22)}, set()):
        town = Town()
        await town.node("n")
        town.ports.open, town.ports.silent = {(ROUTER, OUTSIDE)}, silent
        began = asyncio.get_running_loop().time()
        assert await town.ask("n", 22) == Dialled(host=ROUTER, ports=(OUTSIDE,))
        took.append(asyncio.get_running_loop().time() - began)
    assert took == [pytest.approx(DIAL_BACK_LIMITS.seconds, abs=0.1)] * 2


async def test_an_answer_that_is_all_yes_does_not_wait(town: Town) -> None:
    town.ports.open = {(ROUTER, PORT), (ROUTER, OUTSIDE)}
    began = asyncio.get_running_loop().time()
    assert await town.ask("n", PORT) == Dialled(host=ROUTER, ports=(PORT, OUTSIDE))
    assert asyncio.get_running_loop().time() - began < DIAL_BACK_LIMITS.seconds / 2


# --- how often


async def tries(ask: Callable[[], Coroutine[Any, Any, Dialled]], times: int) -> int:
    """How many of these requests at once were answered."""
    done = await asyncio.gather(*(ask() for _ in range(times)), return_exceptions=True)
    refused = [error for error in done if isinstance(error, RemoteError) and "too often" in str(error)]
    assert len(refused) == sum(not isinstance(answer, Dialled) for answer in done)
    return times - len(refused)


BURST = DIAL_BACK_LIMITS.each[1]


async def test_a_peer_may_ask_a_few_times_only(town: Town) -> None:
    assert await tries(lambda: town.ask("n", PORT), 20) == BURST
    assert len(town.ports.dialled) == 2 * BURST
    await asyncio.sleep(2 / DIAL_BACK_LIMITS.each[0])
    assert await tries(lambda: town.ask("n", PORT), 20) == 2


@pytest.mark.parametrize(
    "hosts", [[f"/ip4/{ROUTER}/tcp/{i + 1}" for i in range(30)], [f"/ip6/2001:db8::{i + 1:x}/tcp/1" for i in range(30)]]
)
async def test_many_names_at_one_address_count_as_one(town: Town, hosts: list[str]) -> None:
    """Also within the 64 bits of IPv6 that a home has for itself."""
    answered = 0
    for i, host in enumerate(hosts):
        sybil = town.network.transport(f"s{i}")
        town.network.hosts[f"s{i}"] = host
        answered += await tries(lambda by=sybil: town.ask("n", PORT, by=by), 1)  # type: ignore[misc]
    # while they are asked one after another some more may
    assert BURST <= answered <= BURST + 1 + 30 * DIAL_BACK_LIMITS.seconds * DIAL_BACK_LIMITS.each[0]


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
async def test_all_together_may_ask_so_often(bounds: DialBackLimits, most: int) -> None:
    town = Town()
    await town.node("n", bounds)
    sybils = []
    for i in range(40):
        sybils.append(town.network.transport(f"s{i}"))
        town.network.hosts[f"s{i}"] = f"/ip4/203.0.113.{i + 1}/tcp/1"
    free = iter(sybils)
    assert await tries(lambda: town.ask("n", PORT, by=next(free)), 40) == most


async def test_who_may_not_ask_takes_nothing_from_the_others() -> None:
    town = Town()
    await town.node("n", dataclasses.replace(DIAL_BACK_LIMITS, together=(0.001, BURST + 1)))
    assert await tries(lambda: town.ask("n", PORT), 40) == BURST
    other = town.network.transport("other")
    town.network.hosts["other"] = "/ip4/203.0.113.77/tcp/1"
    assert (await town.ask("n", PORT, by=other)).host == "203.0.113.77"


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
async def test_how_a_peer_is_reached(
    seen: str, open_ports: set[tuple[str, int]], how: str, addresses: tuple[str, ...]
) -> None:
    town = Town(seen)
    town.ports.open = open_ports
    for name in ("n", "m", "unasked"):
        await town.node(name, host="192.168.1.7" if seen.startswith(f"/ip4/{HOME}") else NODE)
    found = await check_reachability(town.around())
    asked = ("n", "m") if how else ()
    assert found == Reachability(how=how, addresses=addresses, asked=asked)


async def test_who_sees_us_in_its_own_network_cannot_tell_for_the_internet() -> None:
    town = Town(f"/ip4/{HOME}/tcp/{PORT}")
    town.ports.open = {(HOME, PORT)}
    await town.node("n")
    assert await check_reachability(town.around()) == Reachability()


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
async def test_one_liar_does_not_decide(lie: bytes, open_ports: set[tuple[str, int]], expected: Reachability) -> None:
    town = Town()
    town.ports.open = open_ports
    await town.liar("liar", lie)
    for name in ("n", "m"):
        await town.node(name)
    assert await check_reachability(town.around()) == expected


@pytest.mark.parametrize(
    ("announced", "open_ports", "how", "dialled"),
    [
        (f"/ip4/{ROUTER}/tcp/9999", {(ROUTER, 9999)}, "mapped", 9999),
        (f"/ip4/{ROUTER}/tcp/9999", set(), "private", 9999),  # no answer at the given address
        ("/ip4/198.51.100.50/tcp/9999", set(), "mapped", 9999),  # cannot be told
        ("/dns4/home.example/tcp/9999", set(), "mapped", 9999),
    ],
)
async def test_what_the_user_announces_is_tried(
    announced: str, open_ports: set[tuple[str, int]], how: str, dialled: int
) -> None:
    town = Town()
    town.announced, town.ports.open = (announced,), open_ports
    for name in ("n", "m"):
        await town.node(name)
    assert (await check_reachability(town.around())).how == how
    assert (ROUTER, dialled) in town.ports.dialled


async def test_a_peer_looks_again_when_its_addresses_change_and_now_and_then() -> None:
    town, told, loop = Town(), list[tuple[float, str]](), asyncio.get_running_loop()
    for name in ("n", "m"):
        await town.node(name)
    look = ReachMonitor(town.around(), Reachability(how="private"), lambda found: told.append((loop.time(), found.how)))
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


@pytest.mark.parametrize("reachable", ["public", "DIRECT", "x" * 10_000])
def test_nobody_announces_another_way_to_be_reached(reachable: str) -> None:
    with pytest.raises(ValueError, match="reachable must be one of"):
        Announcement(run="r", peer="p", reachable=reachable)
