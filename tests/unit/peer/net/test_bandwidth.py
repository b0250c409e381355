"""What a line carries is measured well on lines of many kinds, costs little on slow ones, and no node can make it
nonsense or hang; a node bounds what it gives. Over streams in memory, on a virtual clock."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from peer.net import bandwidth as served
from peer.net import link_monitor
from peer.net.bandwidth import (
    BOUNDS_BPS,
    HEAD,
    PIECE,
    PROBE_TIMEOUTS,
    WAY_BYTES,
    Arrivals,
    BandwidthServer,
    Busy,
    ProbeLimits,
    measure,
)
from peer.net.base import Closed, Ended, Handler, Stream
from peer.net.link_monitor import LATER_SECONDS, LinkMonitor, RateConfig, measured_downlink
from peer.net.memory import MemoryNetwork
from peer.net.stream import FrameStream
from protocol.errors import RemoteError
from protocol.wire import endpoints
from tests.support import networks
from tests.support.bandwidth import MBPS, Heard, Shaped, a_line, at_home, clock

pytestmark = pytest.mark.virtual

# --- good nodes


@pytest.mark.parametrize("trip", [0.005, 0.04, 0.15])
@pytest.mark.parametrize(("down", "up"), [(5, 1), (20, 5), (100, 20), (100, 40), (250, 50), (500, 500)])
async def test_a_line_is_measured_both_ways(down: float, up: float, trip: float) -> None:
    network, heard = Shaped(up * MBPS, down * MBPS, trip), Heard()
    line = a_line(await at_home(network, node=None), heard)
    await line.measure()
    (told,) = heard.measured
    assert line.up_bps == told.up_bps == pytest.approx(up * MBPS, rel=0.15)
    assert line.down_bps == told.down_bps == pytest.approx(down * MBPS, rel=0.15)
    assert told.round_trip_ms == pytest.approx(1000 * trip, abs=10)
    assert max(network.up.bytes, network.down.bytes) < (16e6 if down > 5 else 1e6), "a slow line costs far less"
    assert told.bytes_sent <= WAY_BYTES
    assert told.seconds < 10.0
    assert heard.warnings == []


async def test_a_downlink_that_was_measured_before_is_not_measured_again() -> None:
    network, heard = Shaped(20 * MBPS, 100 * MBPS), Heard()
    home = await at_home(network, node=None)
    known = await measured_downlink(home, ("node",), clock())
    came = network.down.bytes
    ours = networks.network(home, clock=clock(), nodes=["node"])
    line = LinkMonitor(RateConfig(None, None, None, known), ours, random.Random(1), heard.told.append)
    await line.measure()
    (told,) = heard.measured
    assert line.down_bps == told.down_bps == known.bps == pytest.approx(100 * MBPS, rel=0.15)
    assert line.up_bps == pytest.approx(20 * MBPS, rel=0.15)
    assert told.bytes_received == known.bytes
    assert network.down.bytes - came < known.bytes / 10


def test_a_moment_of_nothing_does_not_count() -> None:
    arrivals = Arrivals(0.0, 0.01)
    for number in range(1, 201):
        pause = 0.2 if number > 150 else 0.0
        arrivals.add(number * 0.01 + pause, 10_000)
    assert arrivals.rate == pytest.approx(1e6, rel=0.01)


def test_what_waited_in_our_buffers_is_no_line() -> None:
    """A machine that is late reads a tenth of a second's bytes at once."""
    arrivals = Arrivals(0.0, 0.01)
    for number in range(1, 401):
        moment = number // 20 * 0.2 if number % 20 < 15 else number * 0.01
        arrivals.add(moment + number * 1e-6, 10_000)
    assert 0.9e6 < (arrivals.rate or 0.0) < 1.3e6


def test_a_beginning_is_not_taken_for_the_line() -> None:
    """The rate doubles with every round trip; and while it does, it is not believed."""
    arrivals, now, size = Arrivals(0.0, 0.05), 0.0, 1000
    for _ in range(8):
        for _ in range(20):
            now += 0.05 / 20
            arrivals.add(now, size)
        size *= 2
        assert not arrivals.steady
    for _ in range(400):
        now += 0.05 / 20
        arrivals.add(now, size)
    assert arrivals.steady
    assert arrivals.rate == pytest.approx(20 * size / 0.05, rel=0.01)


def test_too_little_says_nothing() -> None:
    arrivals = Arrivals(0.0, 0.05)
    for number in range(10):
        arrivals.add(float(number), 1000)
    assert arrivals.rate is None
    assert not arrivals.steady


async def test_without_a_line_in_between_it_takes_no_time() -> None:
    """As on one machine: bounded, whatever the rate seems to be."""
    network, heard = MemoryNetwork(), Heard()
    line = a_line(await at_home(network, node=None), heard)
    await line.measure()
    assert (line.up_bps, line.down_bps) == (BOUNDS_BPS[1], BOUNDS_BPS[1])
    assert heard.measured[0].seconds < 0.5


# --- what the user said


async def test_what_the_user_said_is_not_measured() -> None:
    network, heard = Shaped(20 * MBPS, 100 * MBPS), Heard()
    home = await at_home(network, node=None)
    line = a_line(home, heard, up=7_000_000, down=70_000_000)
    assert line.is_configured
    assert (line.up_bps, line.down_bps, line.uplink.bps) == (7_000_000, 70_000_000, None)
    only_up = a_line(home, heard, up=7_000_000)
    await only_up.measure()
    assert only_up.up_bps == 7_000_000
    assert only_up.down_bps == pytest.approx(100 * MBPS, rel=0.15)
    assert only_up.uplink.bps is None, "nine tenths of what was measured, and nothing was"
    assert heard.measured[0].bytes_sent == 0


async def test_the_limit_is_nine_tenths_of_what_was_measured() -> None:
    home = await at_home(Shaped(20 * MBPS, 100 * MBPS), node=None)
    line = a_line(home, Heard())
    assert line.uplink.bps is None
    await line.measure()
    assert line.uplink.bps == pytest.approx(0.9 * line.up_bps, abs=1)
    limited = a_line(home, Heard(), limit=3_000_000)
    await limited.measure()
    assert limited.uplink.bps == 3_000_000


# --- bad nodes


async def says_nothing(stream: Stream) -> None:
    await asyncio.sleep(1000)


async def is_busy(stream: Stream) -> None: ...


async def sends_garbage(stream: Stream) -> None:
    await stream.recv()
    await stream.send(random.Random(0).randbytes(PIECE))


def after_pings(answer: Callable[[Stream, int], Awaitable[None]]) -> Handler:
    """Answers what is empty as a node should, and what is not as `answer(stream, wanted)` does."""

    async def serve(stream: Stream) -> None:
        while True:
            try:
                request = await stream.recv()
            except Ended:
                return
            wanted = int.from_bytes(request[:HEAD], "big")
            if wanted or len(request) > HEAD:
                await answer(stream, wanted)
            else:
                await stream.send(b"")

    return serve


async def more(stream: Stream, wanted: int) -> None:
    await stream.send(bytes(wanted + 1))


async def much_more(stream: Stream, wanted: int) -> None:
    while True:
        await stream.send(bytes(1 << 20))


async def less(stream: Stream, wanted: int) -> None:
    await stream.send(bytes(max(wanted, 1) - 1) if wanted else b"x")


async def nothing(stream: Stream, wanted: int) -> None:
    await asyncio.sleep(1000)


async def a_byte_a_second(stream: Stream, wanted: int) -> None:
    """Within a frame: what comes is never whole."""
    assert isinstance(stream, FrameStream)
    while True:
        await asyncio.sleep(1)
        await stream.send(b"x")


async def slowly(stream: Stream, wanted: int) -> None:
    await asyncio.sleep(0.3)
    await stream.send(bytes(wanted))


HOSTILE: dict[str, Handler] = {
    "nothing": says_nothing,
    "busy": is_busy,
    "garbage": sends_garbage,
    "more": after_pings(more),
    "much more": after_pings(much_more),
    "less": after_pings(less),
    "silent": after_pings(nothing),
    "a byte a second": after_pings(a_byte_a_second),
}


@pytest.mark.parametrize("kind", HOSTILE)
async def test_no_node_makes_a_start_hang_or_a_line_nonsense(kind: str) -> None:
    network, heard, loop = Shaped(20 * MBPS, 100 * MBPS), Heard(), asyncio.get_running_loop()
    home = await at_home(network, bad=HOSTILE[kind])
    line = a_line(home, heard, ("bad",))
    began = loop.time()
    await line.measure()
    assert loop.time() - began <= line_start_seconds()
    assert (line.up_bps, line.down_bps) == (10_000_000, 50_000_000)
    assert line.uplink.bps is None, "a guess is no reason to hold back"
    (warning,) = heard.warnings
    assert "bandwidth: not measured" in warning
    assert "give --up and --down" in warning
    assert "\n" not in warning
    assert home.open_streams == 0
    assert home.traffic.bytes_received < 40 * WAY_BYTES / 10


def line_start_seconds() -> float:
    return link_monitor.START_SECONDS + 1.0


@pytest.mark.parametrize("bad", [*HOSTILE.values(), after_pings(slowly)], ids=[*HOSTILE, "slow"])
async def test_another_node_is_asked(bad: Handler) -> None:
    network, heard = Shaped(20 * MBPS, 100 * MBPS), Heard()
    line = a_line(await at_home(network, bad=bad, node=None), heard, ("bad", "node"))
    await line.measure()
    assert line.up_bps == pytest.approx(20 * MBPS, rel=0.15)
    assert line.down_bps == pytest.approx(100 * MBPS, rel=0.15)
    assert heard.warnings == []


async def test_who_is_busy_is_asked_again() -> None:
    network, loop = Shaped(20 * MBPS, 100 * MBPS), asyncio.get_running_loop()
    busy_until, good = loop.time() + 8.0, BandwidthServer(clock())
    home, node = network.transport("home"), network.transport("node")

    async def serve(stream: Stream) -> None:
        if loop.time() >= busy_until:
            await good.answer(stream)

    await node.serve(endpoints.BANDWIDTH, serve)
    line = a_line(home, Heard())
    await line.measure()
    assert busy_until < loop.time() < busy_until + 10
    assert line.up_bps == pytest.approx(20 * MBPS, rel=0.15)


async def test_one_way_is_measured_and_the_other_is_not() -> None:
    async def only_down(stream: Stream, wanted: int) -> None:
        await stream.send(bytes(wanted) if wanted else b"x")

    network, heard = Shaped(20 * MBPS, 100 * MBPS), Heard()
    line = a_line(await at_home(network, node=after_pings(only_down)), heard)
    await line.measure()
    assert line.down_bps == pytest.approx(100 * MBPS, rel=0.15)
    (told,) = heard.measured
    assert (told.up_bps, told.down_bps, told.bytes_sent) == (10_000_000, line.down_bps, 0)
    (warning,) = heard.warnings
    assert "10 Mb/s up are announced" in warning
    assert line.uplink.bps is None


async def test_what_could_not_be_measured_is_measured_later() -> None:
    network, heard, loop = Shaped(20 * MBPS, 100 * MBPS), Heard(), asyncio.get_running_loop()
    good = BandwidthServer(clock())

    async def serve(stream: Stream) -> None:
        if loop.time() > 60:
            await good.answer(stream)

    home = await at_home(network, node=serve)
    line = a_line(home, heard)
    await line.measure()
    assert (line.up_bps, heard.measured) == (10_000_000, [])
    running = asyncio.create_task(line.run())
    await asyncio.sleep(LATER_SECONDS + 30)
    running.cancel()
    (told,) = heard.measured
    assert line.up_bps == told.up_bps == pytest.approx(20 * MBPS, rel=0.15)
    assert line.down_bps == told.down_bps == pytest.approx(100 * MBPS, rel=0.15)
    assert line.uplink.bps == round(0.9 * line.up_bps)
    await asyncio.gather(running, return_exceptions=True)


# --- what a node gives


async def test_a_node_measures_with_few_at_once_and_gives_back_what_was_not_taken() -> None:
    network, node_side = MemoryNetwork(), BandwidthServer(clock())
    node = network.transport("node")
    await node_side.serve(node)
    peers = [network.transport(f"peer-{i}") for i in range(served.MAX_PROBES + 1)]
    streams = [await peer.open("node", endpoints.BANDWIDTH, timeout=1.0) for peer in peers]
    for stream in streams:
        await stream.send(bytes(HEAD))
    for stream in streams[:-1]:
        assert await stream.recv(0) == b""
    with pytest.raises(Ended):
        await streams[-1].recv(0)
    with pytest.raises(Busy):
        await measure(peers[-1], "node", clock(), up=True)
    for stream in streams:
        await stream.finish()
        await stream.close()
    while node_side.probes:
        await asyncio.sleep(0.01)
    for _ in range(3 * served.PROBE_LIMITS.bytes_per_minute // served.PROBE_BYTES):  # each takes a ping's worth
        stream = await peers[0].open("node", endpoints.BANDWIDTH, timeout=1.0)
        await stream.send(bytes(HEAD))
        await stream.recv(0)
        await stream.finish()
        await stream.close()
        while node_side.probes:
            await asyncio.sleep(1e-6)
    assert (await measure(peers[-1], "node", clock(), up=True)).bps == BOUNDS_BPS[1]


async def test_a_node_gives_so_much_a_minute() -> None:
    loop, network = asyncio.get_running_loop(), MemoryNetwork()
    node, home = network.transport("node"), network.transport("home")
    most = 2 * served.PROBE_BYTES
    await BandwidthServer(clock(), ProbeLimits(bytes_per_minute=most)).serve(node)
    taken, refused, end = 0, 0, loop.time() + 180
    while loop.time() < end:
        try:
            taken += (await measure(home, "node", clock(), up=False)).bytes
        except Busy:
            refused += 1
            await asyncio.sleep(1)
    assert refused
    assert 2 * most < taken <= 4 * most


@pytest.mark.parametrize(
    "request_", [b"", b"\0\0\0", (PIECE + 1).to_bytes(HEAD, "big"), b"\xff" * HEAD, bytes(HEAD + PIECE + 1)]
)
async def test_a_node_closes_on_who_asks_too_much_or_nothing(request_: bytes) -> None:
    network, node_side = MemoryNetwork(), BandwidthServer(clock())
    node, home = network.transport("node"), network.transport("home")
    await node_side.serve(node)
    stream = await home.open("node", endpoints.BANDWIDTH, timeout=1.0)
    await stream.send(request_)
    with pytest.raises(Closed):
        await stream.recv()
    await stream.close()
    assert node_side.probes == 0


async def pings(stream: Stream, asks: int, every: float = 0.0) -> int:
    """How often these bytes are asked for until the node refuses."""
    answers = 0
    while True:
        try:
            await stream.send(asks.to_bytes(HEAD, "big"))
            await stream.recv(asks)
        except RemoteError:
            return answers
        answers += 1
        await asyncio.sleep(every)


@pytest.mark.parametrize("asks", [PIECE, 0])
async def test_a_node_ends_a_probe_that_takes_too_much(asks: int) -> None:
    network, node_side = MemoryNetwork(), BandwidthServer(clock())
    node, home = network.transport("node"), network.transport("home")
    await node_side.serve(node)
    stream = await home.open("node", endpoints.BANDWIDTH, timeout=1.0)
    assert await pings(stream, asks) <= served.PROBE_BYTES // max(asks, served.LEAST_BYTES)


async def test_a_node_does_not_wait_for_who_does_nothing() -> None:
    network, node_side, loop = MemoryNetwork(), BandwidthServer(clock()), asyncio.get_running_loop()
    node, home = network.transport("node"), network.transport("home")
    await node_side.serve(node)
    idle = await home.open("node", endpoints.BANDWIDTH, timeout=1.0)
    began = loop.time()
    with pytest.raises(Closed):
        await idle.recv()
    assert loop.time() - began <= served.PROBE_LIMITS.idle_s
    slow = await home.open("node", endpoints.BANDWIDTH, timeout=1.0)
    began = loop.time()
    assert await pings(slow, 0, every=1.0) <= served.PROBE_LIMITS.probe_s
    assert loop.time() - began <= served.PROBE_LIMITS.probe_s + 1
    assert node_side.probes == 0


def test_patience_is_less_than_a_start() -> None:
    assert 2 * (PROBE_TIMEOUTS.way + PROBE_TIMEOUTS.answer) <= link_monitor.START_SECONDS
