"""Streams through relays are like others; no relay changes them unseen or carries more than it wants to."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from peer.net.base import Closed, Ended, NotServed, Stream, Timeout, Unreachable, call, serve_calls
from peer.net.memory import MemoryNetwork, MemoryTransport
from peer.net.relay import RelayServer, transport
from peer.net.relay.channel import CHANGED, SILENT, KeepAlive, RelayFault
from peer.net.relay.transport import RELAY_LIMITS, RelayedTransport, RelayLimits, Relays, RelayTimeouts
from peer.net.stream import CHUNK
from protocol.errors import RemoteError
from protocol.identity import Identity, short_peer
from protocol.wire import endpoints, relaying
from protocol.wire.relaying import WINDOW
from tests.support import tiny, volunteers

A, B, C, D = (Identity(bytes([9, i] * 16)) for i in range(4))
R1, R2, R3 = (Identity(bytes([8, i] * 16)).peer_id for i in range(3))
DEADLINE = 60.0
PLENTY = 10**12
"""Bits a second that no test reaches."""
QUICK = RelayTimeouts(direct=0.05, offer=30.0, next=0.05)


class Homes(MemoryNetwork):
    """A network in which no home reaches another."""

    def __init__(self) -> None:
        super().__init__()
        self.homes: set[str] = set()
        self.silent: set[str] = set()
        """Homes to which others still have a connection, over which nothing comes."""

    async def reach(self, peer: str, other: str, timeout: float) -> None:
        await asyncio.sleep(0)
        if {peer, other} <= self.homes and other in self.silent:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await asyncio.Event().wait()
            raise Timeout(other, f"peer {short_peer(other)}: no answer within {timeout:g} s")
        if {peer, other} <= self.homes:
            raise Unreachable(other, f"peer {short_peer(other)}: no answer in time; check the address")


@dataclass
class Lab:
    """Homes and relays."""

    network: Homes = field(default_factory=Homes)
    servers: dict[str, RelayServer] = field(default_factory=dict)
    homes: list[RelayedTransport] = field(default_factory=list)

    async def home(self, who: Identity, relays: Sequence[str], **options: Any) -> RelayedTransport:
        self.network.homes.add(who.peer_id)
        direct = self.network.transport(who.peer_id)
        home = RelayedTransport(direct, who, lambda: relays, **{"patience": QUICK, **options})
        await home.accept()
        self.homes.append(home)
        return home

    async def relay(self, who: str, bps: int = PLENTY, limits: RelayLimits = RELAY_LIMITS) -> RelayServer:
        transport = self.network.transport(who)
        self.servers[who] = server = RelayServer(transport, bps, lambda peer: peer in self.network.peers, limits=limits)
        await server.serve()
        return server

    async def pair(self) -> tuple[RelayServer, RelayedTransport, RelayedTransport]:
        """A relay and two homes, of which the second echoes."""
        server = await self.relay(R1)
        a, b = await self.home(A, [R1]), await self.home(B, [R1])
        await b.serve("echo", echo)
        return server, a, b

    async def kill(self, who: str) -> None:
        await self.network.peers[who].aclose()


@pytest.fixture
@contextlib.asynccontextmanager
async def lab() -> AsyncIterator[Lab]:
    """One of which nothing is left in the end."""
    made, before = Lab(), asyncio.all_tasks()
    try:
        yield made
    finally:
        for home in made.homes:
            await home.aclose()
        for server in made.servers.values():
            server.close()
        for transport in list(made.network.peers.values()):
            await transport.aclose()
        async with asyncio.timeout(DEADLINE):
            await asyncio.gather(*asyncio.all_tasks() - before, return_exceptions=True)


async def echo(stream: Stream) -> None:
    with contextlib.suppress(Ended):
        while True:
            await stream.send(await stream.recv())


async def said(stream: Stream, frame: bytes) -> bool:
    """Whether an echo comes back."""
    await stream.send(frame)
    return await stream.recv() == frame


def address(who: Identity) -> list[str]:
    return [f"/memory/p2p/{who.peer_id}"]


async def eventually(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.001)


# --- they are streams


async def test_a_stream_through_a_relay_is_a_stream(lab: Lab) -> None:
    server = await lab.relay(R1)
    a, b = await lab.home(A, [R1]), await lab.home(B, [R1])
    remotes: list[str] = []

    async def hears(stream: Stream) -> None:
        remotes.append(stream.remote)
        await echo(stream)

    await b.serve("echo", hears)
    await a.connect(address(B), timeout=10.0)
    assert a.is_behind(B.peer_id)
    stream = await a.open(B.peer_id, "echo", timeout=10.0)
    assert (stream.remote, stream.name) == (B.peer_id, "echo")
    for size in (0, 1, 5, relaying.RECORD, CHUNK + 1, 3 * WINDOW + 17):
        data = bytes(i * 7 % 251 for i in range(1000)) * (size // 1000 + 1)
        sending = asyncio.create_task(stream.send(data[:size]))
        assert await stream.recv() == data[:size]
        await sending
    await stream.finish()
    with pytest.raises(Ended):
        await stream.recv()
    await stream.close()
    assert remotes == [A.peer_id]
    await eventually(lambda: server.circuits == 0)
    assert a.traffic.sent["echo"] > 3 * WINDOW
    assert a.traffic.bytes_sent < 1.2 * a.traffic.sent["echo"], "counted twice"


async def test_calls_and_refusals_work_both_ways(lab: Lab) -> None:
    await lab.relay(R1)
    a, b = await lab.home(A, [R1]), await lab.home(B, [R1])

    async def answer(peer: str, request: bytes) -> bytes:
        if request == b"no":
            raise RemoteError(peer, "not today")
        return request[::-1] + peer[-4:].encode()

    for home in (a, b):
        await serve_calls(home, "ask", answer)
    assert await call(a, B.peer_id, "ask", b"abc", timeout=10.0) == b"cba" + A.peer_id[-4:].encode()
    assert await call(b, A.peer_id, "ask", b"abc", timeout=10.0) == b"cba" + B.peer_id[-4:].encode()
    with pytest.raises(RemoteError, match="not today"):
        await call(a, B.peer_id, "ask", b"no", timeout=10.0)
    with pytest.raises(Closed, match="gone"):
        await call(a, B.peer_id, "not served", b"", timeout=10.0)
    assert not a.relays.is_avoided(R1)


@pytest.mark.parametrize("patience", [{"again": 0.0}, {"soon": 0.0}])
async def test_a_direct_way_is_taken_as_soon_as_there_is_one(lab: Lab, patience: dict[str, float]) -> None:
    server = await lab.relay(R1)
    a = await lab.home(A, [R1], patience=dataclasses.replace(QUICK, **patience))
    b = await lab.home(B, [R1])
    await b.serve("echo", echo)
    await a.connect(address(B), timeout=10.0)
    lab.network.homes.clear()
    await (await a.open(B.peer_id, "echo", timeout=10.0)).close()
    await eventually(lambda: not a.is_behind(B.peer_id))
    await eventually(lambda: server.circuits == 0)
    stream = await a.open(B.peer_id, "echo", timeout=10.0)
    assert server.circuits == 0
    await stream.close()


async def test_who_can_be_reached_is_reached_without_a_relay(lab: Lab) -> None:
    server, a, _ = await lab.pair()
    lab.network.homes.clear()
    await a.connect(address(B), timeout=10.0)
    stream = await a.open(B.peer_id, "echo", timeout=10.0)
    assert await said(stream, b"x")
    assert not a.is_behind(B.peer_id)
    with pytest.raises(NotServed) as refused:
        await a.open(B.peer_id, "nothing", timeout=10.0)
    assert str(refused.value).count("does not serve nothing") == 1, "one reason, said once"
    assert server.passed == 0
    assert server.refused == 0
    await stream.close()


async def test_a_direct_way_that_is_silent_holds_no_stream_up(lab: Lab) -> None:
    server, a, _ = await lab.pair()
    lab.network.silent.add(B.peer_id)
    assert not a.is_behind(B.peer_id)
    stream = await a.open(B.peer_id, "echo", timeout=10.0)
    assert await said(stream, b"x")
    assert server.circuits == 1
    await stream.close()


async def test_who_is_nowhere_is_told_with_both_reasons(lab: Lab) -> None:
    await lab.relay(R1)
    a = await lab.home(A, [R1])
    lab.network.homes.add(B.peer_id)
    for attempt in (a.connect(address(B), timeout=10.0), a.open(B.peer_id, "echo", timeout=10.0)):
        with pytest.raises(Unreachable, match=f"relay {short_peer(R1)}: is not connected"):
            await attempt
    assert not a.is_behind(B.peer_id)


async def test_a_peer_that_closes_is_not_the_relays_fault(lab: Lab) -> None:
    await lab.relay(R1)
    a, b = await lab.home(A, [R1]), await lab.home(B, [R1])

    async def rude(stream: Stream) -> None:
        await stream.recv()
        raise RemoteError(stream.remote, "enough")

    await b.serve("rude", rude)
    stream = await a.open(B.peer_id, "rude", timeout=10.0)
    await stream.send(b"x")
    with pytest.raises(Closed) as caught:
        await stream.recv()
    assert not isinstance(caught.value, RelayFault)
    assert a.relays.kept(B.peer_id) == R1
    await stream.close()


# --- relays that lie

Twist = Callable[[int, bytes], Sequence[bytes]]
"""Number and bytes of a record that goes to the peer that was asked for -> what is passed on instead."""


class Liar:
    """Passes on what `twist` makes of records; `to`: leads to that peer, not to the one that is asked for."""

    def __init__(self, transport: MemoryTransport, twist: Twist, to: str | None = None) -> None:
        self.transport, self.twist, self.to = transport, twist, to
        self.streams: list[Stream] = []

    async def serve(self, stream: Stream) -> None:
        peer = relaying.ask_of(await stream.recv())
        onward = await self.transport.open(self.to or peer, endpoints.RELAYED, timeout=10.0)
        self.streams += [stream, onward]
        await stream.send(relaying.pack_answer(relaying.HERE))

        async def pump(source: Stream, target: Stream, twist: Twist) -> None:
            number = 0
            with contextlib.suppress(RemoteError):
                while True:
                    for record in twist(number, await source.recv()):
                        await target.send(record)
                    number += 1
            await target.close()

        await asyncio.gather(pump(stream, onward, self.twist), pump(onward, stream, lambda number, record: [record]))


async def liar(lab: Lab, who: str, twist: Twist, to: str | None = None) -> Liar:
    transport = lab.network.transport(who)
    made = Liar(transport, twist, to)
    await transport.serve(endpoints.RELAY, made.serve)
    return made


def of_the_sixth(change: Callable[[bytes], Sequence[bytes]]) -> Twist:
    return lambda number, record: change(record) if number == 6 else [record]


class Swap:
    """The sixth record comes after the seventh."""

    held: bytes = b""

    def __call__(self, number: int, record: bytes) -> list[bytes]:
        if number == 6:
            self.held = record
            return []
        return [record, self.held] if number == 7 else [record]


TWISTS: dict[str, Twist] = {
    "flip": of_the_sixth(lambda record: [record[:-20] + bytes([record[-20] ^ 4]) + record[-19:]]),
    "drop": of_the_sixth(lambda record: []),
    "repeat": of_the_sixth(lambda record: [record, record]),
    "cut": of_the_sixth(lambda record: [record[:-1]]),
    "invent": of_the_sixth(lambda record: [bytes(100), record]),
    "swap": Swap(),
}


@pytest.mark.parametrize("twist", TWISTS)
async def test_a_relay_that_lies_is_named_and_avoided_and_nothing_wrong_comes_through(lab: Lab, twist: str) -> None:
    await liar(lab, R1, TWISTS[twist])
    a, b = await lab.home(A, [R1]), await lab.home(B, [R1, R2])
    came: list[bytes] = []
    ended: list[RemoteError] = []

    async def hear(stream: Stream) -> None:
        try:
            while True:
                came.append(await stream.recv())
        except RemoteError as error:
            ended.append(error)

    await b.serve("hear", hear)
    stream = await a.open(B.peer_id, "hear", timeout=10.0)
    sent = [bytes([i]) * 1000 for i in range(20)]
    with contextlib.suppress(Closed):  # the other side has noticed meanwhile
        for frame in sent:
            await stream.send(frame)
    await eventually(lambda: bool(ended))
    (error,) = ended
    assert isinstance(error, RelayFault)
    assert (error.relay, error.peer, error.what) == (R1, A.peer_id, CHANGED)
    assert short_peer(R1) in str(error)
    assert came == sent[: len(came)]
    assert len(came) < len(sent)
    assert b.relays.is_avoided(R1)
    assert not b.relays.is_avoided(R2)
    await stream.close()


@pytest.mark.parametrize("number", [0, 1])
async def test_a_handshake_that_is_changed_is_named_and_another_relay_is_taken(lab: Lab, number: int) -> None:
    """The first message from the peer that asks, or the second: the proof of its identity."""

    def change(n: int, record: bytes) -> list[bytes]:
        return [bytes([record[0] ^ 1]) + record[1:]] if n == number else [record]

    await liar(lab, R1, change)
    await lab.relay(R2)
    patience = dataclasses.replace(QUICK, next=30.0)
    a, b = await lab.home(A, [R1, R2], patience=patience), await lab.home(B, [R1, R2])
    await b.serve("echo", echo)
    if number == 0:
        alone = await lab.home(C, [R1])
        with pytest.raises(Unreachable, match=f"relay {short_peer(R1)} {CHANGED}"):
            await alone.open(B.peer_id, "echo", timeout=10.0)
        assert alone.relays.is_avoided(R1)
    for _ in range(3):
        stream = await a.open(B.peer_id, "echo", timeout=10.0)
        with contextlib.suppress(Closed):
            await stream.send(b"x")
            assert await stream.recv() == b"x"
            break
    else:
        pytest.fail("no way was found")
    await stream.close()


async def test_a_relay_that_leads_to_somebody_else_is_found_out(lab: Lab) -> None:
    await liar(lab, R1, lambda number, record: [record], to=C.peer_id)
    a, c = await lab.home(A, [R1]), await lab.home(C, [R1])
    await c.serve("echo", echo)
    with pytest.raises(Unreachable, match=f"relay {short_peer(R1)} {CHANGED}"):
        await a.open(B.peer_id, "echo", timeout=10.0)
    assert a.relays.is_avoided(R1)


async def test_a_relay_that_passes_a_stream_on_to_another_is_found_out(lab: Lab) -> None:
    honest = lab.network.transport(R2)
    one = await liar(lab, R1, lambda number, record: [record])
    one.transport = honest  # what comes to R1 goes on from R2
    a, b = await lab.home(A, [R1]), await lab.home(B, [R1, R2])
    await b.serve("echo", echo)
    with pytest.raises(Unreachable, match=f"relay {short_peer(R1)} {CHANGED}"):
        await a.open(B.peer_id, "echo", timeout=10.0)


async def test_a_relay_that_passes_nothing_on_is_named_and_the_next_stream_takes_another(lab: Lab) -> None:
    silent: set[int] = set()

    def hold(number: int, record: bytes) -> list[bytes]:
        return [] if silent else [record]

    await liar(lab, R1, hold)
    signs = KeepAlive(ask=0.05, silent=0.3)
    a = await lab.home(A, [R1], signs=signs)
    b = await lab.home(B, [R1, R2])
    await b.serve("echo", echo)
    stream = await a.open(B.peer_id, "echo", timeout=10.0)
    assert await said(stream, b"x")
    silent.add(1)
    await stream.send(b"y")
    with pytest.raises(RelayFault) as caught:
        await stream.recv()
    assert caught.value.relay == R1
    assert caught.value.what.startswith(SILENT)
    assert a.relays.is_avoided(R1)
    await stream.close()


async def test_a_relay_that_is_late_is_avoided_by_the_next_stream(lab: Lab) -> None:
    late = asyncio.Event()

    async def relay(stream: Stream) -> None:
        """Holds everything back for longer than its peers put up with."""
        peer = relaying.ask_of(await stream.recv())
        onward = await transport.open(peer, endpoints.RELAYED, timeout=10.0)
        await stream.send(relaying.pack_answer(relaying.HERE))

        async def pump(source: Stream, target: Stream) -> None:
            with contextlib.suppress(RemoteError):
                while True:
                    record = await source.recv()
                    if late.is_set():
                        await asyncio.sleep(0.2)
                    await target.send(record)
            await target.close()

        await asyncio.gather(pump(stream, onward), pump(onward, stream))

    transport = lab.network.transport(R1)
    await transport.serve(endpoints.RELAY, relay)
    a = await lab.home(A, [R1], signs=KeepAlive(ask=0.05, silent=DEADLINE, late=0.15))
    b = await lab.home(B, [R1])
    await b.serve("echo", echo)
    stream = await a.open(B.peer_id, "echo", timeout=10.0)
    late.set()
    await eventually(lambda: a.relays.is_avoided(R1))
    assert a.relays.kept(B.peer_id) is None
    assert await said(stream, b"still")
    await stream.close()


async def test_a_relay_that_dies_ends_the_stream_at_once_and_the_next_takes_another(lab: Lab) -> None:
    for relay in (R1, R2, R3):
        await lab.relay(relay)
    a, b = await lab.home(A, [R1, R2, R3]), await lab.home(B, [R1, R2, R3])
    await b.serve("echo", echo)
    for left in (3, 2, 1):
        stream = await a.open(B.peer_id, "echo", timeout=10.0)
        assert await said(stream, b"x")
        kept = a.relays.kept(B.peer_id)
        assert kept in lab.network.peers
        assert len(lab.network.peers) == 2 + left
        await lab.kill(kept)
        with pytest.raises(RelayFault, match=short_peer(kept)):
            await stream.recv()
        await stream.close()
    with pytest.raises(Unreachable):
        await a.open(B.peer_id, "echo", timeout=10.0)


async def test_the_quickest_relay_is_kept(lab: Lab) -> None:
    gate = asyncio.Event()

    class Slow(Liar):
        async def serve(self, stream: Stream) -> None:
            await gate.wait()
            await super().serve(stream)

    transport = lab.network.transport(R1)
    await transport.serve(endpoints.RELAY, Slow(transport, lambda number, record: [record]).serve)
    await lab.relay(R2)
    a, b = await lab.home(A, [R1, R2]), await lab.home(B, [R1, R2])
    await b.serve("echo", echo)
    await a.connect(address(B), timeout=10.0)
    assert a.relays.kept(B.peer_id) == R2
    gate.set()
    await (await a.open(B.peer_id, "echo", timeout=10.0)).close()
    assert a.relays.kept(B.peer_id) == R2


# --- what a relay carries


async def test_a_relay_serves_those_who_are_connected_and_no_more_than_it_says(lab: Lab) -> None:
    limits = dataclasses.replace(RELAY_LIMITS, circuits=3, of_a_peer=2)
    server = await lab.relay(R1, limits=limits)
    a, b, c, d = [await lab.home(who, [R1]) for who in (A, B, C, D)]
    await b.serve("echo", echo)
    open = [await home.open(B.peer_id, "echo", timeout=10.0) for home in (a, a, c)]
    for home in (a, c, d):
        with pytest.raises(Unreachable, match="as much as it can"):
            await home.open(B.peer_id, "echo", timeout=10.0)
    assert (server.circuits, server.refused) == (3, 3)
    for stream in open:
        await stream.close()
    await eventually(lambda: server.circuits == 0)
    await (await d.open(B.peer_id, "echo", timeout=10.0)).close()
    await b.aclose()
    with pytest.raises(Unreachable, match="not connected"):
        await d.open(B.peer_id, "echo", timeout=10.0)
    with pytest.raises(Unreachable):
        await d.open(D.peer_id, "echo", timeout=10.0)


async def test_a_relay_passes_on_no_more_than_its_limit_in_fair_shares(lab: Lab) -> None:
    """A home with eight streams gets about as much as one with one, and both no more than there is."""
    bps = 8_000_000
    server = await lab.relay(R1, bps=bps)
    a, b, c, d = [await lab.home(who, [R1]) for who in (A, B, C, D)]
    got: dict[str, int] = {A.peer_id: 0, C.peer_id: 0}

    async def hear(stream: Stream) -> None:
        with contextlib.suppress(RemoteError):
            while True:
                size = len(await stream.recv())
                got[stream.remote] += size

    for home in (b, d):
        await home.serve("hear", hear)

    async def pour(stream: Stream) -> None:
        with contextlib.suppress(RemoteError):
            while True:
                await stream.send(bytes(30_000))

    one = [await a.open(B.peer_id, "hear", timeout=10.0)]
    many = [await c.open(D.peer_id, "hear", timeout=10.0) for _ in range(8)]
    clock = asyncio.get_running_loop().time
    began, before = clock(), server.passed
    pouring = [asyncio.create_task(pour(stream)) for stream in one + many]
    await eventually(lambda: min(got.values()) > 250_000)
    shares = dict(got)
    passed, seconds = server.passed - before, clock() - began
    assert max(shares.values()) < 2 * min(shares.values()), "eight streams got more than one"
    assert 8 * passed <= bps * (seconds + 0.1)
    for task in pouring:
        task.cancel()
    await asyncio.gather(*pouring, return_exceptions=True)
    await asyncio.gather(*(stream.close() for stream in one + many))


async def test_a_reader_that_does_not_read_holds_a_bounded_amount_and_only_its_own_stream(lab: Lab) -> None:
    server = await lab.relay(R1)
    signs = KeepAlive(ask=0.02, silent=1.0)
    a, b = await lab.home(A, [R1], signs=signs), await lab.home(B, [R1])
    reading = asyncio.Event()
    got = 0

    async def late(stream: Stream) -> None:
        nonlocal got
        await reading.wait()
        with contextlib.suppress(RemoteError):
            while True:
                size = len(await stream.recv())
                got += size

    await b.serve("late", late)
    await b.serve("echo", echo)
    slow = await a.open(B.peer_id, "late", timeout=10.0)
    sent = 0

    async def pour() -> None:
        nonlocal sent
        while sent < 4 * WINDOW:
            await slow.send(bytes(16_384))
            sent += 16_384

    pouring = asyncio.create_task(pour())
    quick = await a.open(B.peer_id, "echo", timeout=10.0)
    began = asyncio.get_running_loop().time()
    while asyncio.get_running_loop().time() < began + 1.5 * signs.silent:  # signs of life come all the same
        await quick.send(bytes(50_000))
        assert len(await quick.recv()) == 50_000
    assert not pouring.done()
    assert sent <= WINDOW
    assert server.circuits == 2
    reading.set()
    await pouring
    await eventually(lambda: got == sent)
    await quick.close()
    await slow.close()


async def test_a_sender_that_ignores_the_window_is_stopped_by_its_receiver(lab: Lab) -> None:
    await lab.relay(R1)
    b = await lab.home(B, [R1])
    stop, ended = asyncio.Event(), list[RemoteError]()

    async def late(stream: Stream) -> None:
        await stop.wait()
        try:
            while True:
                await stream.recv()
        except RemoteError as error:
            ended.append(error)

    await b.serve("late", late)
    direct = lab.network.transport(A.peer_id)
    carrier = await direct.open(R1, endpoints.RELAY, timeout=10.0)
    shake = transport.handshake(initiator=True, relay=R1)
    await carrier.send(relaying.pack_ask(B.peer_id))
    await carrier.send(shake.write(b""))
    assert relaying.answer_of(await carrier.recv()) == relaying.HERE
    shake.read(await carrier.recv())
    await carrier.send(shake.write(relaying.pack_hello(A, shake.own_static, "late")))
    seal, _ = shake.ciphers
    with contextlib.suppress(RemoteError):
        for _ in range(2 * WINDOW // relaying.RECORD):
            await carrier.send(seal.seal(bytes([relaying.DATA]) + bytes(relaying.RECORD)))
    with pytest.raises(RemoteError):
        await told(carrier, [])
    stop.set()
    await eventually(lambda: bool(ended))
    assert "more than it may" in str(ended)
    assert not b.relays.is_avoided(R1)
    await carrier.close()


async def test_a_circuit_that_carries_nothing_ends(lab: Lab) -> None:
    server = await lab.relay(R1, limits=dataclasses.replace(RELAY_LIMITS, idle=0.2))
    a, b = await lab.home(A, [R1]), await lab.home(B, [R1])
    await b.serve("echo", echo)
    stream = await a.open(B.peer_id, "echo", timeout=10.0)
    with pytest.raises(Closed):
        await stream.recv()
    await eventually(lambda: server.circuits == 0)
    await stream.close()


async def test_a_bootstrap_node_relays_between_those_who_have_sessions_with_it(tmp_path: Path) -> None:
    swarm = volunteers.Swarm(tmp_path, volunteers.manifest())
    swarm.relay_bps = PLENTY
    async with asyncio.timeout(DEADLINE), swarm:
        x, y = swarm.start("x"), swarm.start("y")
        await swarm.until(lambda: swarm.machine.has_session(x.id) and swarm.machine.has_session(y.id))
        nodes = [tiny.OPERATOR.peer_id]
        await RelayedTransport(y.transport, y.identity, lambda: nodes).accept()
        relays = Relays(x.identity, x.transport, lambda: nodes)
        await relays.reach(y.id)
        stranger = Relays(C, swarm.network.transport(C.peer_id), lambda: nodes)
        with pytest.raises(Unreachable, match="not connected"):
            await stranger.reach(y.id)
        await swarm.stop("y")
        await swarm.until(lambda: not swarm.machine.has_session(y.id))
        with pytest.raises(Unreachable, match="not connected"):
            await relays.reach(y.id)


# --- strangers


async def told(stream: Stream, messages: Sequence[bytes]) -> None:
    """Says all of them, and hears what comes until the end."""
    for message in messages:
        await stream.send(message)
    while True:
        await stream.recv()


async def test_nonsense_ends_only_its_own_stream(lab: Lab) -> None:
    server = await lab.relay(R1)
    stranger = lab.network.transport(C.peer_id)
    a, b = await lab.home(A, [R1]), await lab.home(B, [R1])
    await b.serve("echo", echo)
    for ask in (b"", b"\xff", relaying.pack_answer("here"), relaying.pack_ask("nobody")[:-1], bytes(10_000)):
        stream = await stranger.open(R1, endpoints.RELAY, timeout=10.0)
        await stream.send(ask)
        with pytest.raises(Closed):
            await stream.recv()
        await stream.close()
    lab.network.homes.clear()
    stream = await stranger.open(B.peer_id, endpoints.RELAYED, timeout=10.0)  # no relay of this run
    with pytest.raises(Closed):
        await stream.recv()
    await stream.close()
    lab.network.homes |= {A.peer_id, B.peer_id}
    through = lab.network.peers[R1]
    for words in ([b""], [bytes(32)], [bytes(32), bytes(200)], [bytes(2000)]):
        stream = await through.open(B.peer_id, endpoints.RELAYED, timeout=10.0)
        with pytest.raises(Closed):
            await told(stream, words)
        await stream.close()
    stream = await a.open(B.peer_id, "echo", timeout=10.0)
    assert await said(stream, b"still")
    await stream.close()
    await eventually(lambda: server.circuits == 0)


async def test_a_silent_stranger_does_not_hold_a_circuit(lab: Lab) -> None:
    server = await lab.relay(R1, limits=dataclasses.replace(RELAY_LIMITS, ask=0.1))
    stream = await lab.network.transport(C.peer_id).open(R1, endpoints.RELAY, timeout=10.0)
    with pytest.raises((Closed, Timeout)):
        await stream.recv(timeout=30.0)
    assert server.circuits == 0
    await stream.close()
