"""The newest job is done outside the loop, and what cannot be done yet is tried again."""

from __future__ import annotations

import asyncio

import pytest

from bootstrap.background_jobs import LatestJob, require


@pytest.mark.parametrize(("late", "fails"), [(0, 0), (2, 0), (0, 2)])
async def test_a_job_is_done_as_soon_as_it_can_be(late: int, fails: int) -> None:
    asked: list[str] = []

    def read(name: str) -> bytes | None:
        asked.append(name)
        if fails >= len(asked):
            raise ValueError("a bug")
        return b"here" if len(asked) > late else None

    answers: asyncio.Queue[bytes] = asyncio.Queue()
    made = LatestJob("judge", require(read), answers.put_nowait, retry_seconds=0.0)
    made.ask("x")
    running = asyncio.create_task(made.run())
    assert await asyncio.wait_for(answers.get(), 30.0) == b"here"
    assert asked == ["x"] * (late + fails + 1)
    assert not running.done()
    running.cancel()
