"""`potluck doctor`: would this machine do, and if not, what is to be done? Each finding has one remedy.

Without a run it looks at this machine alone. With one it does what `potluck join` does before it trains, fetches nothing large, and
says what role the next plan would give to this machine, and how many tokens a day. The looking is done by another process
(peer/cli/examination.py), which is killed where it has not ended by itself when the time is over: so this one ends in time, whatever hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json as jsons
import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from peer.cli import running
from peer.cli.findings import (
    BAD,
    GRACE_SECONDS,
    HERE,
    OUT_OF_TIME,
    THERE,
    UNKNOWN,
    WITHIN_SECONDS,
    Find,
    Finding,
    Options,
    Time,
    not_looked_at,
)
from peer.cli.options import Devices, Host
from peer.net import processes
from peer.node.open_run import here, parse_run
from protocol.errors import UsageError

KILLED_SECONDS = 1.0
"""That the system may take to end what was killed. Nobody waits longer: what hangs within the system itself cannot be killed."""


def doctor(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="The run that this machine is to join, as for potluck join (default: the one in which the peer in --dir has been, if any).",
            show_default=False,
        ),
    ] = None,
    dir: Annotated[Path, typer.Option("--dir", help="Folder for this node's key and state.")] = Path("potluck-peer"),
    host: Host = "0.0.0.0",
    port: Annotated[int, typer.Option(min=0, max=65535, help="TCP port to listen on; 0 takes a free one.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
    devices: Devices = None,
    memory: Annotated[str, typer.Option(help='Memory to offer, such as "8GB"; auto: most of what is free.')] = "auto",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads for training.")] = max(1, (os.cpu_count() or 2) // 2),
    within: Annotated[
        float, typer.Option(min=1, help="Seconds that it may take; what was not looked at by then is said.")
    ] = WITHIN_SECONDS,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object: findings, and whether joining would work.")
    ] = False,
) -> None:
    """`potluck doctor`.

    Long because typer reads a command's options from its function's parameters.
    """
    time = Time.of(within)
    if run is None:
        with contextlib.suppress(UsageError):
            run = here(dir)
    options = Options(
        run=run,
        folder=str(dir),
        host=host,
        port=port,
        device=device,
        devices=devices,
        memory=memory,
        threads=threads,
        within=within,
        json=json,
    )
    running.run(_doctor(options, time), interrupted=1)


async def _doctor(options: Options, time: Time) -> None:
    """Prints the findings as they come. Raises SystemExit: 0 where it is known that joining would work, else 1."""
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
    else:
        print(
            "potluck join would work here"
            if options.run is not None
            else "this machine can join a run; name one to know more"
        )
    raise SystemExit(1 if bad or unknown else 0)


async def _examined(options: Options, time: Time, find: Find) -> None:
    """Has another process look, and tells what that finds, and what it has not looked at when the time is over."""
    steps = HERE if options.run is None else HERE + THERE
    under_way, code = steps[0], OUT_OF_TIME
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "peer.cli.examination", jsons.dumps(dataclasses.asdict(options)), str(time.until)),
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
                    under_way = said["step"]
                else:
                    find(Finding(**said))
            code = await child.wait()
    except TimeoutError:
        pass
    finally:
        await _end(child, GRACE_SECONDS if time.left() else 0.0)
    if code == OUT_OF_TIME:
        for finding in not_looked_at(steps[steps.index(under_way) :], options.within):
            find(finding)
    elif code:
        text = f"whoever looked at it ended with exit code {code}"
        find(
            Finding(
                under_way, BAD, text, "close other programs, and try again; install Potluck again if that does not help"
            )
        )


async def _end(child: asyncio.subprocess.Process, seconds: float) -> None:
    """Ends what looks, and all that it has started; it has so many seconds to do that itself."""
    try:
        if child.returncode is None and seconds:
            processes.send_signal(child, signal.SIGTERM)
            await _wait(child, seconds)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        await _wait(child, KILLED_SECONDS)


async def _wait(child: asyncio.subprocess.Process, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await child.wait()
