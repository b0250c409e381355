"""Whether other programs use this machine: a game, a render, a compiler. Two shares are looked at: of all processors' time that goes to
other processes, by what the system counts, and of the GPU that computes most for them, by `nvidia-smi` where there is one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from dataclasses import dataclass

import psutil

from peer.net import processes

BUSY_CPU, BUSY_GPU = 0.5, 0.25
"""Shares above which others have the machine, once they had as much for BUSY_SECONDS,"""
CALM_CPU, CALM_GPU = 0.25, 0.1
"""and below which it is free again, after CALM_SECONDS: a game that loads a level is not over."""
BUSY_SECONDS, CALM_SECONDS = 10.0, 120.0
SMI_SECONDS = 20.0
"""That nvidia-smi may take."""


@dataclass(frozen=True, slots=True)
class Use:
    """By others, as shares in 0..1."""

    cpu: float
    gpu: float = 0.0


class Busy:
    """Tells from what it is shown whether others have the machine. Pure; times are in seconds of a steady clock."""

    def __init__(self) -> None:
        self.is_busy = False
        self._since: float | None = None

    def see(self, now: float, use: Use) -> bool:
        """Whether they have, `use` being what they use at `now`."""
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
class Spent:
    """Seconds of processors: of all of them since the system began, those of them in which they worked, and those for us."""

    total: float
    worked: float
    ours: float


def others_share(before: Spent, after: Spent) -> float:
    """Of the processors' time between the two, that which went to others."""
    total = after.total - before.total
    if total <= 0:
        return 0.0
    return min(1.0, max(0.0, (after.worked - before.worked - max(0.0, after.ours - before.ours)) / total))


def spent() -> Spent:
    """Until now."""
    all_of = psutil.cpu_times()._asdict()
    worked = sum(all_of.get(kind, 0.0) for kind in ("user", "nice", "system", "irq", "softirq"))
    total = worked + sum(all_of.get(kind, 0.0) for kind in ("idle", "iowait", "steal"))
    ours = 0.0
    for process in _own():
        with contextlib.suppress(psutil.Error):
            ours += sum(process.cpu_times()[:4])  # its own, and that of its children that have ended
    return Spent(total, worked, ours)


def _own() -> list[psutil.Process]:
    this = psutil.Process()
    return [this, *this.children(recursive=True)]


class Others:
    """What they use, from look to look."""

    def __init__(self) -> None:
        self._before = spent()

    async def look(self) -> Use:
        """Since the last look."""
        before, self._before = self._before, spent()
        return Use(others_share(before, self._before), await _gpu())


async def _gpu() -> float:
    """0 where there is none that nvidia-smi knows."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0.0
    pipe, nothing = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(
        program, "pmon", "-c", "1", "-s", "u", stdin=nothing, stdout=pipe, stderr=nothing
    )
    try:
        async with asyncio.timeout(SMI_SECONDS):
            said, _ = await process.communicate()
    except TimeoutError:
        return 0.0
    finally:
        if process.returncode is None:
            processes.send_signal(process)
            await process.wait()
    return gpu_share(said.decode(errors="replace"), {os.getpid(), *(one.pid for one in _own())})


def gpu_share(said: str, ours: set[int]) -> float:
    """Of the GPU that works most for processes other than `ours`, by the table of `nvidia-smi pmon`; 0 where it cannot be read."""
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
