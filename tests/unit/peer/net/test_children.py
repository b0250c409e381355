"""A child that has just ended keeps its exit code, also where it was to be ended."""

from __future__ import annotations

import asyncio
import signal
import time

import pytest

from peer.net import processes


def test_a_signal_to_a_child_that_has_just_ended_takes_nothing_away(caplog: pytest.LogCaptureFixture) -> None:
    """At a hundred moments about its end: `child.kill()` takes the exit code away in a quarter of them."""

    async def work(wait: float) -> int:
        child = await asyncio.create_subprocess_exec("false", stdin=asyncio.subprocess.DEVNULL)
        until = time.perf_counter() + wait
        while time.perf_counter() < until:
            pass  # the loop does not run, so it cannot know of the end
        processes.send_signal(child)
        return await child.wait()

    ends = {asyncio.run(work(moment * 3e-5)) for moment in range(100)}
    assert ends <= {1, -signal.SIGKILL}
    assert not [record.message for record in caplog.records]


def test_a_child_gets_the_signal() -> None:
    async def work(number: int) -> int:
        child = await asyncio.create_subprocess_exec("sleep", "600", stdin=asyncio.subprocess.DEVNULL)
        processes.send_signal(child, number)
        return await child.wait()

    assert [asyncio.run(work(number)) for number in (signal.SIGKILL, signal.SIGTERM)] == [-9, -15]
