"""`potluck doctor`: checks whether this machine can join a run. Each finding has one remedy.

Without a run it checks the machine alone. With one it does what `potluck join` does before it trains, fetches nothing
large, and predicts the machine's role in the next plan. Another process (peer/cli/examination.py) does the checks; it
is killed when the time is over, so that this one ends in time.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json as jsons
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from peer.cli import running
from peer.cli.options import Devices, Dir, Host, Port, with_options
from peer.net import children
from peer.node.open_run import here, parse_run
from protocol.errors import UsageError

GOOD, WARNING, BAD, UNKNOWN = "good", "warning", "bad", "unknown"
MARKS = {GOOD: "✓", WARNING: "!", BAD: "✗", UNKNOWN: "?"}
MACHINE_STEPS = ("python", "torch", "open files", "memory", "port", "disk")
"""Checks of the machine, in order."""
RUN_STEPS = ("run", "reach", "clock", "line", "speed", "role")
"""Checks of its place in a run, after the former."""
OPTIONAL_STEPS = ("speed", "role")
"""Joining works without them."""
WITHIN_SECONDS = 45.0
"""Default time limit. With GRACE_SECONDS and the start of the command it is less than a minute."""
GRACE_SECONDS = 5.0
"""Time for the checks to end after the limit, before they are killed."""
OUT_OF_TIME = 75
"""Exit code of the checks when their time is over."""
LONGER_SECONDS = 300
"""Limit that is advised if the time was too short."""
KILLED_SECONDS = 1.0
"""Wait for the system to end a killed process; one that hangs in the system cannot be killed."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check."""

    about: str
    state: str
    """GOOD, WARNING, BAD: joining would not work; or UNKNOWN."""
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{MARKS[self.state]} {self.about}: {self.text}" + (f"; {self.remedy}" if self.remedy else "")


Find = Callable[[Finding], None]


@dataclass(frozen=True, slots=True)
class Time:
    """A time limit that several processes share."""

    until: float
    """By the steady clock, which all processes of a machine share."""

    @classmethod
    def of(cls, seconds: float) -> Time:
        """A limit that begins now."""
        return cls(time.monotonic() + seconds)

    def left(self, but: float = 0.0) -> float:
        """Seconds left, minus `but` for later steps."""
        return max(0.0, self.until - but - time.monotonic())


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorOptions:
    """The options of `potluck doctor`."""

    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="The run that this machine is to join, as for potluck join (default: the one in which the peer in"
            " --dir has been, if any).",
            show_default=False,
        ),
    ] = None
    dir: Dir = Path("potluck-peer")
    host: Host = "0.0.0.0"
    port: Port = 0
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto"
    devices: Devices = None
    memory: Annotated[str, typer.Option(help='Memory to offer, such as "8GB"; auto: most of what is free.')] = "auto"
    threads: Annotated[int, typer.Option(min=1, help="CPU threads for training.")] = max(1, (os.cpu_count() or 2) // 2)
    within: Annotated[
        float, typer.Option(min=1, help="Seconds that it may take; what was not looked at by then is said.")
    ] = WITHIN_SECONDS
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object: findings, and whether joining would work.")
    ] = False

    def to_json(self) -> str:
        """For another process."""
        return jsons.dumps(dataclasses.asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> DoctorOptions:
        """Of `to_json`."""
        fields = jsons.loads(text)
        return cls(**fields | {"dir": Path(fields["dir"])})


def _start(options: DoctorOptions, context: typer.Context) -> None:
    time = Time.of(options.within)
    if options.run is None:
        with contextlib.suppress(UsageError):
            options = dataclasses.replace(options, run=here(options.dir))
    running.run(_doctor(options, time), interrupted=1)


command = with_options(DoctorOptions, _start)


async def _doctor(options: DoctorOptions, time: Time) -> None:
    """Prints the findings as they come. Raises SystemExit: 0 if joining would work, else 1."""
    found: list[Finding] = []

    def find(finding: Finding) -> None:
        found.append(finding)
        if not options.json:
            print(finding, flush=True)

    if options.run is not None:
        parse_run(options.run)
    await _examined(options, time, find)
    bad, unknown = ([f.about for f in found if f.state == state] for state in (BAD, UNKNOWN))
    if options.json:
        works = False if bad else None if unknown else True
        print(jsons.dumps({"would_work": works, "findings": [dataclasses.asdict(one) for one in found]}))
    elif bad:
        print(f"potluck join would not work here: {', '.join(bad)}")
    elif unknown:
        print(f"whether potluck join would work here is not known: {', '.join(unknown)}")
    elif options.run is not None:
        print("potluck join would work here")
    else:
        print("this machine can join a run; name one to know more")
    raise SystemExit(1 if bad or unknown else 0)


async def _examined(options: DoctorOptions, time: Time, find: Find) -> None:
    """Runs the checks in another process and passes on its findings, and the steps that it did not reach in time."""
    steps = MACHINE_STEPS if options.run is None else MACHINE_STEPS + RUN_STEPS
    current, code = steps[0], OUT_OF_TIME
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "peer.cli.examination", options.to_json(), str(time.until)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert child.stdout is not None
    try:
        async with asyncio.timeout(time.left() + GRACE_SECONDS):
            async for line in child.stdout:
                said = jsons.loads(line)
                if "step" in said:
                    current = said["step"]
                else:
                    find(Finding(**said))
            code = await child.wait()
    except TimeoutError:
        pass
    finally:
        await _end(child, GRACE_SECONDS if time.left() else 0.0)
    if code == OUT_OF_TIME:
        for finding in _unfinished(steps[steps.index(current) :], options.within):
            find(finding)
    elif code:
        text = f"the check ended with exit code {code}"
        remedy = "close other programs, and try again; install Potluck again if that does not help"
        find(Finding(current, BAD, text, remedy))


def _unfinished(steps: tuple[str, ...], within: float) -> list[Finding]:
    """Findings for the steps that are missing when the time is over; the first was under way."""
    remedy = f"try again when this machine has less to do, or give it more time (--within {LONGER_SECONDS})"
    under_way, never = f"it was still looked at when {within:g} s were over", f"not looked at: {within:g} s were over"
    return [
        Finding(step, WARNING if step in OPTIONAL_STEPS else UNKNOWN, never if i else under_way, remedy)
        for i, step in enumerate(steps)
    ]


async def _end(child: asyncio.subprocess.Process, seconds: float) -> None:
    """Ends the process and all that it has started; it has some seconds to end itself."""
    try:
        if child.returncode is None and seconds:
            children.send(child, signal.SIGTERM)
            await _wait(child, seconds)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        await _wait(child, KILLED_SECONDS)


async def _wait(child: asyncio.subprocess.Process, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await child.wait()
