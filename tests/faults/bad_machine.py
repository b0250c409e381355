"""Faults of a machine for a command and its children: a wrong clock, a slow disk, a disk with less than usual."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

BYTES_A_SECOND = 10e6
MOST = 1.2
"""So much more than that the system may let through in a moment."""
SOURCE = Path(__file__).with_name("bad_machine.c")
GROUPS = Path("/sys/fs/cgroup")

Place = tuple[str, ...]
"""What a command begins with."""


def wrong_clock(folder: Path, off: int) -> dict[str, str]:
    """The environment of programs whose time of day is `off` seconds late."""
    return {**_preloaded(folder), "WALL_OFF": str(off)}


@contextlib.contextmanager
def slow_disk(folder: Path) -> Iterator[tuple[Place, dict[str, str]]]:
    """The beginning of a command, and its environment: at most BYTES_A_SECOND go to the disk of `folder`."""
    with contextlib.ExitStack() as stack:
        place, env = Place(), dict[str, str]()
        try:
            place = stack.enter_context(_limited(_disk_of(folder)))
        except OSError:  # the system limits nothing here, or not for us
            env = {**_preloaded(folder), "DISK_BYTES_A_SECOND": f"{BYTES_A_SECOND:.0f}"}
        yield place, env


def poor_disk(folder: Path, disk: Path) -> dict[str, str]:
    """The environment in which `disk` has no links, locks, sockets, rights, times of files or synced folders."""
    return {**_preloaded(folder), "POOR_DISK": str(disk)}


def _preloaded(folder: Path) -> dict[str, str]:
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("a C compiler, and Linux: a machine is made worse with them")
    library = folder / "bad_machine.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl"], check=True)
    return {"LD_PRELOAD": str(library)}


def _disk_of(folder: Path) -> str:
    """MAJOR:MINOR of the whole disk on which it is. Raises OSError."""
    device = folder.stat().st_dev
    place = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve(strict=True)
    whole = place.parent if (place / "partition").exists() else place
    return (whole / "dev").read_text().strip()


@contextlib.contextmanager
def _limited(disk: str) -> Iterator[Place]:
    """A control group whose processes write to that disk no faster. Raises OSError where there is no such thing."""
    old = GROUPS / "blkio"
    group = (old if old.is_dir() else GROUPS) / f"potluck-disk-{os.getpid()}"
    name, limit = ("blkio.throttle.write_bps_device", f"{disk} {BYTES_A_SECOND:.0f}")
    if not old.is_dir():
        name, limit = "io.max", f"{disk} wbps={BYTES_A_SECOND:.0f}"
    group.mkdir()
    try:
        (group / name).write_text(limit)
        yield "sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs")
    finally:
        group.rmdir()
