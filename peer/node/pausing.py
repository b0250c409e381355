"""Reasons for a peer's pauses: the hours of the day, the battery, a metered connection, and other programs that use the
processors or the busiest GPU."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import sys
from dataclasses import dataclass
from datetime import datetime, tzinfo
from pathlib import Path

import psutil

from peer.net import processes
from protocol.errors import UsageError

DAY_MINUTES = 24 * 60
BUSY_CPU, BUSY_GPU = 0.5, 0.25
"""Shares above which the machine is busy, after BUSY_SECONDS."""
CALM_CPU, CALM_GPU = 0.25, 0.1
"""Shares below which it is calm, after CALM_SECONDS: a game that loads a level is not over."""
BUSY_SECONDS, CALM_SECONDS = 10.0, 120.0
PROGRAM_SECONDS = 20.0
"""Longest wait for a program of the system."""
SUPPLIES = Path("/sys/class/power_supply")
"""Linux's power supplies, a folder each."""


@dataclass(frozen=True, slots=True)
class Hours:
    """From minute `begin` of the day up to minute `end`, which may be of the next day."""

    begin: int
    end: int

    @classmethod
    def parse(cls, text: str) -> Hours:
        """Hours such as `22-7` or `22:30-7:15`; 0-24 is always. Raises UsageError."""
        found = re.fullmatch(r"(\d\d?)(?::(\d\d))?-(\d\d?)(?::(\d\d))?", text, re.ASCII)
        if found is None:
            raise UsageError(f"--hours {text}: not understood; write them as 22-7 or 22:30-7:15")
        begin, end = (60 * int(found[i]) + int(found[i + 1] or 0) for i in (1, 3))
        if begin >= DAY_MINUTES or end > DAY_MINUTES or any(int(found[i] or 0) > 59 for i in (2, 4)):
            raise UsageError(f"--hours {text}: a day has no such hour; write them as 22-7 or 22:30-7:15")
        if begin == end:
            raise UsageError(f"--hours {text}: begins when it ends; leave it out to train always")
        return cls(begin, end)

    def has(self, wall: float, zone: tzinfo | None = None) -> bool:
        """Returns whether the moment `wall` (seconds since 1970) is among them, in `zone` (default: this machine's)."""
        local = datetime.fromtimestamp(wall, zone)
        minute = 60 * local.hour + local.minute
        if self.begin < self.end:
            return self.begin <= minute < self.end
        return minute >= self.begin or minute < self.end

    def __str__(self) -> str:
        return "-".join(f"{minute // 60:02}:{minute % 60:02}" for minute in (self.begin, self.end))


@dataclass(frozen=True, slots=True)
class Use:
    """The use of the machine by other programs, as shares in 0..1."""

    cpu: float
    gpu: float = 0.0


class Busy:
    """Whether other programs have the machine, with hysteresis. Pure; times are in seconds of a steady clock."""

    def __init__(self) -> None:
        self.is_busy = False
        self._since: float | None = None

    def see(self, now: float, use: Use) -> bool:
        """Takes a measurement, and returns whether the machine is busy."""
        if self.is_busy:
            turns, seconds = use.cpu < CALM_CPU and use.gpu < CALM_GPU, CALM_SECONDS
        else:
            turns, seconds = use.cpu > BUSY_CPU or use.gpu > BUSY_GPU, BUSY_SECONDS
        if not turns:
            self._since = None
        elif self._since is None:
            self._since = now
        elif now - self._since >= seconds:
            self.is_busy, self._since = not self.is_busy, None
        return self.is_busy


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Seconds of all processors since the system began: in total, at work, and at work for this process and its
    children."""

    total: float
    worked: float
    ours: float

    @classmethod
    def read(cls) -> CpuTimes:
        """Until now."""
        times = psutil.cpu_times()._asdict()
        worked = sum(times.get(kind, 0.0) for kind in ("user", "nice", "system", "irq", "softirq"))
        total = worked + sum(times.get(kind, 0.0) for kind in ("idle", "iowait", "steal"))
        ours = 0.0
        for process in _own_processes():
            with contextlib.suppress(psutil.Error):
                ours += sum(process.cpu_times()[:4])  # with its children that have ended
        return cls(total, worked, ours)


def others_share(before: CpuTimes, after: CpuTimes) -> float:
    """The share of the processors' time between the two that went to other programs."""
    total = after.total - before.total
    if total <= 0:
        return 0.0
    return min(1.0, max(0.0, (after.worked - before.worked - max(0.0, after.ours - before.ours)) / total))


def _own_processes() -> list[psutil.Process]:
    this = psutil.Process()
    return [this, *this.children(recursive=True)]


class OtherPrograms:
    """Measures what they use."""

    def __init__(self) -> None:
        self._before = CpuTimes.read()

    async def look(self) -> Use:
        """Since the last call."""
        before, self._before = self._before, CpuTimes.read()
        return Use(others_share(before, self._before), await _gpu())


async def _gpu() -> float:
    said = await _told("nvidia-smi", "pmon", "-c", "1", "-s", "u")
    return gpu_share(said, {os.getpid(), *(one.pid for one in _own_processes())})


async def _told(name: str, *arguments: str) -> str:
    """What a program of the system prints, in English; nothing if it is not installed or does not end."""
    program = shutil.which(name)
    if program is None:
        return ""
    pipe, nothing = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(
        program, *arguments, stdin=nothing, stdout=pipe, stderr=nothing, env=os.environ | {"LC_ALL": "C"}
    )
    try:
        async with asyncio.timeout(PROGRAM_SECONDS):
            said, _ = await process.communicate()
    except TimeoutError:
        return ""
    finally:
        if process.returncode is None:
            processes.send_signal(process)
            await process.wait()
    return said.decode(errors="replace")


def gpu_share(said: str, ours: set[int]) -> float:
    """The share of the busiest GPU for processes other than `ours`, from the table of `nvidia-smi pmon`; 0 where that
    is unreadable."""
    shares: dict[str, float] = {}
    columns: list[str] = []
    for line in said.splitlines():
        words = line.split()
        if words[:2] == ["#", "gpu"]:
            columns = words[1:]
        elif columns and not line.startswith("#") and len(words) >= len(columns):
            row = dict(zip(columns, words, strict=False))
            pid, used = row.get("pid", "-"), row.get("sm", "-")
            if pid.isdecimal() and used.isdecimal() and int(pid) not in ours:
                gpu = row.get("gpu", "")
                shares[gpu] = shares.get(gpu, 0.0) + int(used) / 100
    return min(1.0, max(shares.values(), default=0.0))


def on_battery(supplies: Path = SUPPLIES) -> bool:
    """Whether this machine runs on its battery; False where that is unknown.

    As systemd decides: a battery of the machine, not of a mouse, gives power, and nothing else does.
    """
    if sys.platform == "darwin":
        battery = psutil.sensors_battery()
        return battery is not None and battery.power_plugged is False
    gives = False
    for supply in supplies.iterdir() if supplies.is_dir() else ():
        if _line(supply / "type") == "Battery":
            gives |= _line(supply / "scope") != "Device" and _line(supply / "status") == "Discharging"
        elif _line(supply / "online") == "1":
            return False
    return gives


def _line(file: Path) -> str:
    """The content of a file of the kernel; empty where it has none."""
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""


async def on_metered_connection() -> bool:
    """Whether this machine's connection is metered, as NetworkManager knows or guesses; False where that is unknown."""
    return is_metered(await _told("nmcli", "-t", "-f", "GENERAL.METERED,IP4.GATEWAY,IP6.GATEWAY", "device", "show"))


def is_metered(said: str) -> bool:
    """Whether all devices with a gateway are metered; False if there is none. said: as nmcli prints them."""
    metered = []
    for device in said.split("\n\n"):
        fields = dict(line.split(":", 1) for line in device.splitlines() if ":" in line)
        if any(fields.get(f"IP{version}.GATEWAY", "--") not in ("", "--") for version in (4, 6)):
            metered.append(fields.get("GENERAL.METERED", "").startswith("yes"))
    return bool(metered) and all(metered)
