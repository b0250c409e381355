"""When a peer pauses: by the clock on the wall, on battery, on a metered connection, while others use the machine."""

from __future__ import annotations

import asyncio
import sys
from datetime import datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer import events
from peer.cli.join import Pauses, by_hours, while_busy
from peer.net.base import Clock
from peer.node.pausing import (
    Busy,
    CpuTimes,
    Hours,
    OtherPrograms,
    Use,
    gpu_share,
    is_metered,
    on_battery,
    on_metered_connection,
    others_share,
)
from protocol.errors import UsageError
from tests.support import systemd

BERLIN = ZoneInfo("Europe/Berlin")
PMON = """\
# gpu         pid   type     sm    mem    enc    dec    jpg    ofa    command
# Idx           #    C/G      %      %      %      %      %      %    name
    0       1423     G      2      1      -      -      -      -    Xorg
    0      53100     C     98     40      -      -      -      -    python
    1      60001   C+G     30     12      -      -      -      -    a game
    1      60002     G      -      -      -      -      -      -    steam
"""


def at(text: str, fold: int = 0) -> float:
    """Of a clock in Berlin."""
    return datetime.fromisoformat(text).replace(tzinfo=BERLIN, fold=fold).timestamp()


@pytest.mark.parametrize(
    ("typed", "inside", "outside"),
    [
        ("22-7", ["22:00", "23:59", "00:00", "06:59"], ["07:00", "12:00", "21:59"]),
        ("9-17", ["09:00", "16:59"], ["08:59", "17:00", "00:00"]),
        ("22:30-7:15", ["22:30", "07:14"], ["22:29", "07:15"]),
        ("0-24", ["00:00", "12:00", "23:59"], []),
        ("18-24", ["18:00", "23:59"], ["00:00", "17:59"]),
        ("18-0", ["18:00", "23:59"], ["00:00", "17:59"]),
    ],
)
def test_hours_of_a_day(typed: str, inside: list[str], outside: list[str]) -> None:
    found = Hours.parse(typed)
    for minute in (*inside, *outside):
        assert found.has(at(f"2026-11-24T{minute}:00"), BERLIN) == (minute in inside), minute
    assert Hours.parse(str(found)) == found


@given(st.integers(0, 1439), st.integers(0, 1439), st.integers(0, 1439))
def test_hours_and_the_rest_of_the_day_are_the_day(begin: int, end: int, minute: int) -> None:
    if begin != end:
        moment = at("2026-11-24T00:00:00") + 60 * minute
        assert Hours(begin, end).has(moment, BERLIN) != Hours(end, begin).has(moment, BERLIN)


def test_when_the_clock_is_put_back_an_hour_comes_twice_and_forward_not_at_all() -> None:
    early = Hours.parse("2-3")
    assert early.has(at("2026-10-25T02:30:00", fold=0), BERLIN)
    assert early.has(at("2026-10-25T02:30:00", fold=1), BERLIN)
    assert at("2026-10-25T02:30:00", fold=1) - at("2026-10-25T02:30:00", fold=0) == 3600
    spring = at("2026-03-29T00:00:00")
    assert not any(early.has(spring + 60 * minute, BERLIN) for minute in range(23 * 60))
    night = Hours.parse("22-7")
    for evening, there in (("2026-03-28", 8), ("2026-10-24", 10), ("2026-11-24", 9)):
        begin = at(f"{evening}T12:00:00")
        assert sum(night.has(begin + 60 * minute, BERLIN) for minute in range(24 * 60)) == 60 * there


@pytest.mark.parametrize(
    "typed", ["", "22", "22-", "-7", "24-7", "22-25", "22:60-7", "8-8", "22-7-9", "²2-7", "0-24:01"]
)
def test_hours_that_are_none_are_refused(typed: str) -> None:
    with pytest.raises(UsageError, match="--hours"):
        Hours.parse(typed)


def test_a_short_burst_is_no_game_and_a_short_rest_not_its_end() -> None:
    seen, game, rest, between = Busy(), Use(0.1, 0.9), Use(0.05, 0.0), Use(0.4, 0.2)
    assert not seen.see(0, game)
    assert not seen.see(5, game)
    assert not seen.see(6, rest)
    assert not seen.see(7, game)
    assert not seen.see(16, game)
    assert seen.see(17, game)
    assert seen.see(18, rest)
    assert seen.see(137, rest)
    assert seen.see(138, between), "not free yet: what is between the bounds changes nothing"
    assert seen.see(139, rest)
    assert seen.see(258, rest)
    assert not seen.see(259, rest)
    assert not seen.see(269, between)
    assert not seen.see(300, between)


def test_what_we_use_ourselves_is_not_counted() -> None:
    begin = CpuTimes(total=1000, worked=500, ours=100)
    assert others_share(begin, CpuTimes(total=1040, worked=530, ours=130)) == 0
    assert others_share(begin, CpuTimes(total=1040, worked=530, ours=110)) == 0.5
    assert others_share(begin, CpuTimes(total=1040, worked=540, ours=100)) == 1
    assert others_share(begin, CpuTimes(total=1040, worked=500, ours=90)) == 0, "a child has ended"
    assert others_share(begin, begin) == 0
    now = CpuTimes.read()
    assert 0 < now.ours <= now.worked <= now.total


@pytest.mark.parametrize(
    ("said", "ours", "share"),
    [(PMON, {53100}, 0.3), (PMON, {53100, 60001}, 0.02), (PMON, set(), 1.0), ("", set(), 0.0), ("no GPU", set(), 0.0)],
)
def test_the_share_of_a_gpu_that_others_have(said: str, ours: set[int], share: float) -> None:
    assert gpu_share(said, ours) == pytest.approx(share)


def test_nvidia_smi_is_asked_where_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = systemd.programs(tmp_path / "bin", "nvidia-smi")
    (tmp_path / "bin" / "nvidia-smi").write_text(f'#!/bin/sh\necho "$*" > {calls}\ncat << EOF\n{PMON}EOF\n')
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    assert asyncio.run(OtherPrograms().look()).gpu == pytest.approx(1.0)
    assert calls.read_text().split()[0] == "pmon"


BATTERY, MOUSE, PLUG = {"type": "Battery", "scope": "System"}, {"type": "Battery", "scope": "Device"}, {"type": "Mains"}


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such folder")
@pytest.mark.parametrize(
    ("supplies", "runs_on_it"),
    [
        ([BATTERY | {"status": "Discharging"}, PLUG | {"online": "0"}], True),
        ([{"type": "Battery", "status": "Discharging"}], True),
        ([BATTERY | {"status": "Full"}, BATTERY | {"status": "Discharging"}], True),
        ([BATTERY | {"status": "Discharging"}, PLUG | {"online": "1"}], False),
        ([BATTERY | {"status": "Discharging"}, PLUG | {"online": "0"}, {"type": "USB", "online": "1"}], False),
        ([BATTERY | {"status": "Not charging"}, PLUG | {"online": "0"}], False),
        ([BATTERY | {"status": "Unknown"}], False),
        ([BATTERY], False),
        ([MOUSE | {"status": "Discharging"}], False),
        ([PLUG | {"online": "0"}], False),
        ([{}], False),
        ([], False),
    ],
)
def test_a_machine_runs_on_its_battery(tmp_path: Path, supplies: list[dict[str, str]], runs_on_it: bool) -> None:
    for number, files in enumerate(supplies):
        (tmp_path / str(number)).mkdir()
        for name, content in files.items():
            (tmp_path / str(number) / name).write_text(content + "\n")
    assert on_battery(tmp_path) is runs_on_it


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such folder")
def test_a_machine_without_the_folder_does_not(tmp_path: Path) -> None:
    assert not on_battery(tmp_path / "none")


PHONE = "GENERAL.METERED:yes (guessed)\nIP4.GATEWAY:192.168.43.1\nIP6.GATEWAY:\n"
CABLE = "GENERAL.METERED:no (guessed)\nIP4.GATEWAY:192.168.1.1\nIP6.GATEWAY:fe80\\:\\:1\n"
NOWHERE = "GENERAL.METERED:yes\nIP4.GATEWAY:--\nIP6.GATEWAY:\n"
LOOPBACK = "GENERAL.METERED:unknown\nIP4.GATEWAY:\nIP6.GATEWAY:\n"
ONLY_IPV6 = "GENERAL.METERED:yes\nIP4.GATEWAY:\nIP6.GATEWAY:fe80\\:\\:1\n"


@pytest.mark.parametrize(
    ("devices", "metered"),
    [
        ([PHONE, LOOPBACK], True), ([ONLY_IPV6, NOWHERE], True), ([CABLE, LOOPBACK], False), ([PHONE, CABLE], False),
        ([NOWHERE, LOOPBACK], False), ([], False), (["Error: NetworkManager is not running."], False),
    ],
)  # fmt: skip
def test_a_connection_is_metered_if_there_is_no_other(devices: list[str], metered: bool) -> None:
    assert is_metered("\n".join(devices)) is metered


async def test_nmcli_is_asked_where_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = systemd.programs(tmp_path / "bin", "nmcli")
    (tmp_path / "bin" / "nmcli").write_text(f'#!/bin/sh\necho "$LC_ALL $*" > {calls}\ncat << EOF\n{PHONE}EOF\n')
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    assert not await on_metered_connection()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    assert await on_metered_connection()
    said = "C -t -f GENERAL.METERED,IP4.GATEWAY,IP6.GATEWAY device show"
    assert calls.read_text().split() == said.split(), "its words would be those of the user's language"


class Watched:
    """Work that goes on until it is broken off, under pauses; `now` is the time, `use` what others use."""

    def __init__(self) -> None:
        self.now, self.use = at("2026-11-24T12:00:00"), Use(0.0)
        self.told: list[events.Body] = []
        self.begun, self.left = asyncio.Event(), asyncio.Event()
        self.is_over = False
        self.pauses = Pauses(
            [
                by_hours(Hours.parse("22-7"), Clock(wall=lambda: self.now - 3600 * self.shift())),
                while_busy(Clock(steady=lambda: self.now), self.others),
            ],
            self.told.append,
            freed=self.left.set,
            seconds=0.0,
        )

    def shift(self) -> float:
        """Hours by which this machine is behind Berlin."""
        offset = datetime.fromtimestamp(self.now).astimezone().utcoffset()
        berlin = datetime.fromtimestamp(self.now, BERLIN).utcoffset()
        assert offset is not None
        assert berlin is not None
        return (offset - berlin).total_seconds() / 3600

    async def others(self) -> Use:
        return self.use

    async def work(self) -> None:
        self.begun.set()
        while not self.is_over:
            await asyncio.sleep(0)

    async def tell(self, count: int) -> None:
        while len(self.told) < count:
            await asyncio.sleep(0)


async def test_it_works_in_its_hours_pauses_for_others_and_ends_when_its_work_does() -> None:
    watched = Watched()
    doing = asyncio.create_task(watched.pauses.between(watched.work))
    await watched.tell(1)
    assert watched.told == [events.Paused(reason="outside of its hours, 22:00-07:00")]
    assert not watched.begun.is_set()

    watched.now = at("2026-11-24T22:00:00")
    await watched.begun.wait()
    assert watched.told[1:] == [events.Resumed()]

    watched.begun.clear()
    watched.use = Use(0.9, 0.1)
    while not watched.left.is_set():
        watched.now += 1
        await asyncio.sleep(0)
    watched.left.clear()
    await watched.tell(3)
    assert watched.told[2] == events.Paused(reason="other programs use 90% of the processors and 10% of the GPU")
    watched.use = Use(0.0)
    while not watched.begun.is_set():
        watched.now += 1
        await asyncio.sleep(0)
    watched.is_over = True
    await doing
    assert [type(body) for body in watched.told] == [events.Paused, events.Resumed] * 2


@pytest.mark.parametrize(("moment", "works"), [("2026-11-24T12:00:00", False), ("2026-11-24T23:00:00", True)])
async def test_a_request_to_end_is_heard_in_a_pause_and_in_work(moment: str, works: bool) -> None:
    watched = Watched()
    watched.now = at(moment)
    doing = asyncio.create_task(watched.pauses.between(watched.work))
    await (watched.begun.wait() if works else watched.tell(1))
    doing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await doing


async def test_a_timeout_of_the_work_itself_is_no_pause() -> None:
    async def fail() -> None:
        raise TimeoutError("of its own")

    with pytest.raises(TimeoutError, match="of its own"):
        await Pauses([], [].append, lambda: None).between(fail)


async def test_a_look_that_fails_is_told_once_and_ends_nothing() -> None:
    told: list[events.Body] = []
    looks, done = [], 0

    async def broken() -> str | None:
        looks.append(1)
        raise OSError("no such table")

    async def work() -> None:
        nonlocal done
        for _ in range(5):
            await asyncio.sleep(0)
        done += 1

    await Pauses([broken], told.append, lambda: None, seconds=0.0).between(work)
    assert done == 1
    assert len(looks) == 1
    (said,) = told
    assert isinstance(said, events.Warning)
    assert "no such table" in said.text
