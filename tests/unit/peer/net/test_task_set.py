"""One task for each name that is wanted, while the names change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from peer.net.task_set import TaskSet


async def until(wanted: Callable[[], bool]) -> None:
    async with asyncio.timeout(60.0):
        while not wanted():
            await asyncio.sleep(0)


async def test_the_tasks_follow_the_names() -> None:
    names, running, begun = ["a", "b"], set[str](), list[str]()

    async def one(name: str) -> None:
        begun.append(name)
        running.add(name)
        try:
            await asyncio.Event().wait()
        finally:
            running.discard(name)

    tasks = TaskSet(lambda: names, one)
    task = asyncio.create_task(tasks.run())
    await until(lambda: running == {"a", "b"})
    names[:] = ["b", "c"]
    tasks.changed.set()
    await until(lambda: running == {"b", "c"})
    tasks.end("b")
    tasks.end("nobody")
    await until(lambda: begun == ["a", "b", "c", "b"])
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert running == set()


async def test_a_task_that_fails_ends_all() -> None:
    ended = list[str]()

    async def one(name: str) -> None:
        try:
            await asyncio.sleep(0)
            if name == "bad":
                raise ValueError("mine")
            await asyncio.Event().wait()
        finally:
            ended.append(name)

    with pytest.raises(ValueError, match="mine"):
        await asyncio.wait_for(TaskSet(lambda: ("good", "bad"), one).run(), 60.0)
    assert sorted(ended) == ["bad", "good"]
