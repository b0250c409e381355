"""Contributions are judged beside the loop, and what cannot be judged yet is tried again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bootstrap.bench import Bench
from protocol.round.judging import Judged
from protocol.round.leader_events import Verdict

VERDICT = (Judged(1.0),)


class Needs:
    """A case that reads one name. `fails`: how often something else goes wrong first."""

    round = 7

    def __init__(self, name: str, fails: int = 0) -> None:
        self.name, self.fails = name, fails

    def answer(self, read: Any, known: Any) -> tuple[Judged, ...]:
        if self.fails:
            self.fails -= 1
            raise ValueError("a bug")
        assert read(self.name) == b"here"
        return VERDICT


@pytest.mark.parametrize(("late", "fails"), [(0, 0), (2, 0), (0, 2)])
def test_a_case_is_answered_as_soon_as_it_can_be(late: int, fails: int) -> None:
    asked: list[str] = []

    def read(name: str) -> bytes | None:
        asked.append(name)
        return b"here" if len(asked) > late else None

    async def work() -> None:
        answers: asyncio.Queue[Verdict] = asyncio.Queue()
        made, case = Bench(answers.put_nowait, read, pause=0.0), Needs("x", fails)
        made.ask(case)  # type: ignore[arg-type]
        running = asyncio.create_task(made.run())
        found = await asyncio.wait_for(answers.get(), 30.0)
        assert (found.case, found.judged) == (case, VERDICT)
        assert asked == ["x"] * (late + 1)
        assert not running.done()
        running.cancel()

    asyncio.run(work())


def test_a_newer_case_takes_the_place_of_one_that_waits() -> None:

    async def work() -> None:
        answers: asyncio.Queue[Verdict] = asyncio.Queue()
        made, new = Bench(answers.put_nowait, lambda name: b"here" if name == "new" else None, pause=0.0), Needs("new")
        made.ask(Needs("old"))  # type: ignore[arg-type]
        made.ask(new)  # type: ignore[arg-type]
        running = asyncio.create_task(made.run())
        assert (await asyncio.wait_for(answers.get(), 30.0)).case is new
        running.cancel()

    asyncio.run(work())
