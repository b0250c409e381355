"""A peer that is started again goes by what it found of its line before, and a probe costs little of what joining takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from peer.net import link_monitor
from peer.net.bandwidth import LEAST_WAY_BYTES, WAY_BYTES, probe_bytes
from peer.net.disk import Disk
from peer.net.link_monitor import EARLIER, UNKNOWN, RateConfig, StoredRates
from tests.support.bandwidth import MBPS, Heard, Shaped, a_line, at_home, virtually

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


def test_what_is_known_is_not_measured_again() -> None:
    async def work() -> None:
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

    virtually(work())


def test_what_was_not_known_is_measured() -> None:
    async def work() -> None:
        network, heard = Shaped(20 * MBPS, 100 * MBPS), Heard()
        known = StoredRates(up_bps=19_000_000)
        line = a_line(await at_home(network, node=None), heard, said=RateConfig(None, None, None, stored=known))
        await line.measure()
        assert line.up_bps == 19_000_000
        assert line.down_bps == pytest.approx(100 * MBPS, rel=0.15)
        assert network.up.bytes < 100_000

    virtually(work())


def test_what_the_user_said_is_not_remembered() -> None:
    async def work() -> None:
        line = a_line(await at_home(Shaped(20 * MBPS, 100 * MBPS), node=None), Heard(), up=7_000_000)
        assert line.found == UNKNOWN
        await line.measure()
        assert line.found == StoredRates(None, line.down_bps)

    virtually(work())


@pytest.mark.parametrize("mbps", [5, 100, 500])
def test_a_probe_costs_little_of_what_a_small_model_is(mbps: int) -> None:
    async def work() -> None:
        network, heard = Shaped(mbps * MBPS, mbps * MBPS), Heard()
        most = probe_bytes(4 * 1_000_000)
        line = a_line(await at_home(network, node=None), heard, said=RateConfig(None, None, None, most=most))
        await line.measure()
        assert most == LEAST_WAY_BYTES
        assert max(network.up.bytes, network.down.bytes) < 1.1 * LEAST_WAY_BYTES
        assert min(mbps, 50) / 4 * MBPS < line.down_bps < 1.15 * mbps * MBPS

    virtually(work())


def test_of_a_large_model_a_line_is_measured_as_well_as_can_be() -> None:
    assert probe_bytes(4 * 512_000_000) == WAY_BYTES
    assert probe_bytes(4 * 6_843_648) < 2_000_000
