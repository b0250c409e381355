"""What ends a command ends it once and cleanly, however often and in whichever way it is told."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

DEADLINE = 60.0
WORK = """
import asyncio
from peer.cli import running

async def work():
    print("ready", flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        for _ in range(20):  # as a hand-over, which a second request would break off
            print("leaving", flush=True)
            await asyncio.sleep(0.02)
        print("left", flush=True)

running.run(work())
"""


def begun(before: Callable[[], None] | None = None, **streams: object) -> subprocess.Popen[str]:
    process = subprocess.Popen(  # type: ignore[call-overload]
        [sys.executable, "-c", WORK],
        text=True,
        start_new_session=True,
        preexec_fn=before,
        **{"stdout": subprocess.PIPE, **streams},
    )
    return process  # type: ignore[no-any-return]


def said(process: subprocess.Popen[str]) -> list[str]:
    """What it says until it ends, well."""
    out, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0
    return out.splitlines()


@pytest.mark.parametrize(
    "numbers",
    [
        (signal.SIGHUP,),
        (signal.SIGINT,),
        (signal.SIGTERM, signal.SIGTERM),
        (signal.SIGHUP, signal.SIGTERM, signal.SIGHUP),
        (signal.SIGINT, signal.SIGINT, signal.SIGTERM),
    ],
)
def test_each_of_these_ends_it_cleanly_and_several_are_one(numbers: tuple[int, ...]) -> None:
    """`timeout` signals the process and its group, as do a closed terminal and its shell."""
    process = begun()
    assert process.stdout.readline() == "ready\n"
    process.send_signal(numbers[0])
    for number in numbers[1:]:  # each comes while it leaves
        assert process.stdout.readline() == "leaving\n"
        os.killpg(process.pid, number)
    assert said(process)[-1] == "left"


def test_under_nohup_a_closed_terminal_means_nothing() -> None:
    process = begun(lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN) and None)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    assert said(process)[-1] == "left"


def test_what_is_to_be_done_is_done_though_the_terminal_is_gone() -> None:
    """Every write to it fails then."""
    here, there = pty.openpty()
    process = begun(stdout=there, stderr=there, stdin=there)
    os.close(there)
    with os.fdopen(here, "rb") as terminal:
        assert terminal.readline().strip() == b"ready"
    os.killpg(process.pid, signal.SIGHUP)
    assert process.wait(DEADLINE) == 0
