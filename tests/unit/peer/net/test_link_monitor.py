"""What real transfers show about a line: more, less or nothing, and how seldom the rate changes."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest

from peer import events
from peer.net import link_monitor
from peer.net.bandwidth import GOODPUT, LEAST_WAY_BYTES, WAY_BYTES, probe_bytes
from peer.net.base import Stream
from peer.net.disk import Disk
from peer.net.link_monitor import (
    EARLIER,
    FAST_SECONDS,
    HELD_SECONDS,
    MAX_STEP_DOWN,
    MAX_STEP_UP,
    RANGE,
    REST_SECONDS,
    SLOW_SECONDS,
    UNKNOWN,
    RateConfig,
    RateEstimator,
    SecondOfTraffic,
    StoredRates,
)
from peer.net.memory import MemoryNetwork, MemoryTransport
from peer.net.uplink import Uplink
from tests.support.bandwidth import MBPS, Heard, Shaped, a_line, at_home

pytestmark = pytest.mark.virtual

UP, DOWN = 20_000_000, 100_000_000


def of(bps: float) -> int:
    """Bytes of ours that such a line carries in a second."""
    return round(bps * GOODPUT / 8)


def after(transfers: RateEstimator, second: SecondOfTraffic, seconds: int, begin: float = 0.0) -> list[int]:
    """The seconds in which a rate changed."""
    return [i for i in range(seconds) if transfers.add(begin + i, second)]


def test_a_line_that_carried_more_has_more() -> None:
    up, down = RateEstimator(UP, DOWN), RateEstimator(UP, DOWN)
    assert after(up, SecondOfTraffic(of(30e6), 0, 0, False), 3 * FAST_SECONDS) == [FAST_SECONDS - 1]
    assert (up.up_bps, up.down_bps) == (pytest.approx(30e6, rel=0.01), DOWN)
    assert after(down, SecondOfTraffic(0, of(150e6), 0, False), 3 * FAST_SECONDS) == [FAST_SECONDS - 1]
    assert (down.up_bps, down.down_bps) == (UP, pytest.approx(150e6, rel=0.01))


@pytest.mark.parametrize(
    "second",
    [
        SecondOfTraffic(0, 0, 0, False),
        SecondOfTraffic(of(2e6), of(9e6), 0, False),  # there is little to send
        SecondOfTraffic(of(2e6), 0, 1, False),  # one peer reads slowly
        SecondOfTraffic(of(1.1 * UP), of(1.1 * DOWN), 0, False),  # not much more
        SecondOfTraffic(of(0.99 * UP), 0, 3, False),  # not much less
        SecondOfTraffic(0, of(2e6), 3, True),  # nothing leaves at all: no line is that slow
    ],
)
def test_what_shows_nothing_changes_nothing(second: SecondOfTraffic) -> None:
    transfers = RateEstimator(UP, DOWN)
    assert after(transfers, second, 1000) == []
    assert (transfers.up_bps, transfers.down_bps) == (UP, DOWN)


def test_a_burst_is_no_line() -> None:
    """What is sent waits in our own buffers at first."""
    transfers = RateEstimator(UP, DOWN)
    for now in range(600):
        burst = now % 10 < 3
        assert not transfers.add(
            now, SecondOfTraffic(of(3 * UP) if burst else 0, of(3 * DOWN) if burst else 0, 0, False)
        )


def test_an_uplink_for_which_several_peers_wait_is_slow() -> None:
    transfers = RateEstimator(UP, DOWN)
    slow = SecondOfTraffic(of(12e6), 0, 2, False)
    assert after(transfers, slow, SLOW_SECONDS) == [SLOW_SECONDS - 1]
    assert transfers.up_bps == pytest.approx(12e6, rel=0.01)


def test_who_reads_slowly_together_does_not_starve_us() -> None:
    """The other side may be an enemy: a step an hour, half at most, and never less than a quarter of the first."""
    transfers = RateEstimator(UP, DOWN)
    enemies = SecondOfTraffic(of(64_000), 0, 5, False)
    day = after(transfers, enemies, round(3.5 * REST_SECONDS))
    assert day[0] == SLOW_SECONDS - 1
    assert all(b - a >= REST_SECONDS for a, b in itertools.pairwise(day))
    assert transfers.up_bps == round(RANGE[0] * UP)
    once = RateEstimator(UP, DOWN)
    after(once, enemies, SLOW_SECONDS)
    assert once.up_bps == round(MAX_STEP_DOWN * UP)


def test_one_revision_goes_so_far() -> None:
    transfers = RateEstimator(UP, DOWN)
    after(transfers, SecondOfTraffic(of(1e9), of(10e9), 0, False), FAST_SECONDS)
    assert (transfers.up_bps, transfers.down_bps) == (MAX_STEP_UP * UP, MAX_STEP_UP * DOWN)


def test_an_uplink_that_only_our_limit_holds_back_is_tried_with_more_until_it_is_too_much() -> None:
    """The line has 30; what we send is what the limit, nine tenths, lets out, or what the line carries."""
    transfers, changes, now = RateEstimator(UP, None), list[int](), 0
    while now < 2 * REST_SECONDS and len(changes) < 5:
        assert transfers.up_bps is not None
        sends = min(0.9 / GOODPUT * transfers.up_bps, 30e6)
        full = sends >= 30e6
        if transfers.add(now, SecondOfTraffic(of(sends), 0, 2 if full else 0, not full)):
            changes.append(transfers.up_bps)
        now += 1
    assert changes[:4] == [pytest.approx(UP * x, rel=0.01) for x in (1.15, 1.3225, 1.5209, 1.749)]
    assert changes[4] == pytest.approx(30e6, rel=0.01), "no more than the line has, within minutes"
    assert 5 * HELD_SECONDS <= now < REST_SECONDS
    rest = after(transfers, SecondOfTraffic(of(0.9 / GOODPUT * 30e6), 0, 0, True), round(0.9 * REST_SECONDS), begin=now)
    assert rest == [], "then it is left alone for an hour"


def test_what_was_given_stays() -> None:
    transfers = RateEstimator(None, None)
    assert after(transfers, SecondOfTraffic(of(1e9), of(1e9), 0, False), 100) == []
    assert (transfers.up_bps, transfers.down_bps) == (None, None)


# --- a line, over streams


async def receives(stream: Stream) -> None:
    while True:
        await stream.recv()


async def sends(home: MemoryTransport, peer: str, bps: float) -> None:
    stream = await home.open(peer, "bulk", timeout=1.0)
    while True:
        await asyncio.sleep(0.1)
        await stream.send(bytes(of(bps) // 10))


@pytest.mark.parametrize(
    ("where", "ours", "counts"),
    [
        ("203.0.113.9", "192.168.1.2", True),
        ("203.0.113.9", "203.0.113.9", False),
        ("192.168.1.9", "192.168.1.2", False),
        ("", "192.168.1.2", False),
    ],
)
async def test_what_passes_to_peers_elsewhere_counts(where: str, ours: str, counts: bool) -> None:
    """Not what a peer behind the same router or at our own address gets, or an unknown peer."""
    network, heard = MemoryNetwork(), Heard()
    home, peer = network.transport("home"), network.transport("peer")
    home.addresses = (f"/ip4/{ours}/tcp/4001/p2p/home",)
    await peer.serve("bulk", receives)
    line = a_line(home, heard, (), lambda peer: [f"/ip4/{where}/tcp/1/p2p/{peer}"] if where else [])
    await line.measure()
    assert [type(body) for body in heard.told] == [events.Warning]
    assert (line.up_bps, line.down_bps) == (10_000_000, 50_000_000)
    tasks = [asyncio.create_task(line.run()), asyncio.create_task(sends(home, "peer", 15e6))]
    await asyncio.sleep(FAST_SECONDS + 5)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert [m.by for m in heard.measured] == (["transfers"] if counts else [])
    assert line.up_bps == (pytest.approx(15e6, rel=0.02) if counts else 10_000_000)
    await home.aclose()
    await peer.aclose()


async def test_a_limit_may_change_while_others_wait() -> None:
    uplink, loop = Uplink(8_000_000), asyncio.get_running_loop()
    assert not uplink.holds
    tasks = [asyncio.create_task(uplink.turn("a", 1_000_000)) for _ in range(4)]
    await asyncio.sleep(1.0)
    assert uplink.holds
    uplink.limit(80_000_000)
    await asyncio.gather(*tasks)
    assert loop.time() == pytest.approx(1.0 + 3_000_000 / 10_000_000, abs=0.05)
    more = asyncio.create_task(uplink.turn("a", 1_000_000_000))
    await asyncio.sleep(0.1)
    uplink.limit(None)
    await more
    assert loop.time() == pytest.approx(1.4, abs=0.1)
    assert not uplink.holds


# --- what is known from before

HOME, DAY = ("192.168.1.7",), 86_400.0
FOUND = StoredRates(20_000_000, 100_000_000)


@pytest.mark.parametrize(
    ("hosts", "after", "expected"),
    [
        (HOME, 0.0, FOUND),
        (HOME, 6.9 * DAY, FOUND),
        (HOME, 7.1 * DAY, UNKNOWN),
        (HOME, -2 * DAY, UNKNOWN),
        (("10.0.0.3",), 0.0, UNKNOWN),
        ((), 0.0, UNKNOWN),
    ],
)
def test_it_holds_for_days_and_in_the_same_place(
    tmp_path: Path, hosts: tuple[str, ...], after: float, expected: StoredRates
) -> None:
    disk = Disk()
    link_monitor.write_rates(disk, tmp_path, FOUND, HOME, 1e9)
    assert link_monitor.read_rates(disk, tmp_path, hosts, 1e9 + after) == expected


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"1", b'{"time": "x", "hosts": []}', b'{"time": 1e9, "hosts": ["192.168.1.7"]}', b"\xff",
     b'{"time": 1e9, "hosts": ["192.168.1.7"], "up_bps": -5, "down_bps": "fast"}'],
)  # fmt: skip
def test_a_damaged_file_says_nothing(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / link_monitor.STORED_FILE).write_bytes(raw)
    assert link_monitor.read_rates(Disk(), tmp_path, HOME, 1e9) == UNKNOWN


async def test_what_is_known_is_not_measured_again() -> None:
    network, heard = Shaped(20 * MBPS, 100 * MBPS), Heard()
    home = await at_home(network, node=None)
    first = a_line(home, heard)
    await first.measure()
    sent, came = network.up.bytes, network.down.bytes
    second = a_line(home, heard, said=RateConfig(None, None, None, stored=first.found))
    await second.measure()
    assert (second.up_bps, second.down_bps) == (first.up_bps, first.down_bps)
    assert second.uplink.bps == first.uplink.bps
    assert heard.measured[-1].by == EARLIER
    assert (network.up.bytes, network.down.bytes) == (sent, came)


async def test_what_was_not_known_is_measured() -> None:
    network, heard = Shaped(20 * MBPS, 100 * MBPS), Heard()
    known = StoredRates(up_bps=19_000_000)
    line = a_line(await at_home(network, node=None), heard, said=RateConfig(None, None, None, stored=known))
    await line.measure()
    assert line.up_bps == 19_000_000
    assert line.down_bps == pytest.approx(100 * MBPS, rel=0.15)
    assert network.up.bytes < 100_000


async def test_what_the_user_said_is_not_remembered() -> None:
    line = a_line(await at_home(Shaped(20 * MBPS, 100 * MBPS), node=None), Heard(), up=7_000_000)
    assert line.found == UNKNOWN
    await line.measure()
    assert line.found == StoredRates(None, line.down_bps)


@pytest.mark.parametrize("mbps", [5, 100, 500])
async def test_a_probe_costs_little_of_what_a_small_model_is(mbps: int) -> None:
    network, heard = Shaped(mbps * MBPS, mbps * MBPS), Heard()
    most = probe_bytes(4 * 1_000_000)
    line = a_line(await at_home(network, node=None), heard, said=RateConfig(None, None, None, most=most))
    await line.measure()
    assert most == LEAST_WAY_BYTES
    assert max(network.up.bytes, network.down.bytes) < 1.1 * LEAST_WAY_BYTES
    assert min(mbps, 50) / 4 * MBPS < line.down_bps < 1.15 * mbps * MBPS


def test_of_a_large_model_a_line_is_measured_as_well_as_can_be() -> None:
    assert probe_bytes(4 * 512_000_000) == WAY_BYTES
    assert probe_bytes(4 * 6_843_648) < 2_000_000
