"""Finds plans beside the loop: answers the questions of the leader's machine on a thread of its own, one after the other.

The planner's long steps are numpy's, and between them the interpreter gives way: while it plans for 10,000 peers the loop is held up
for some hundredths of a second at most (docs/results/planner.md).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from protocol.round.leader_events import Planned
from protocol.round.questions import Question
from protocol.wire.plan import Plan

log = logging.getLogger("potluck.planning")
PAUSE_SECONDS = 5.0
"""After a plan that could not be made, before the next one is tried."""


class Planning:
    """`answer` finds an answer, `put` takes it; `pause`: seconds after one that could not be found."""

    def __init__(
        self, put: Callable[[Planned], None], answer: Callable[[Question], Plan | None], *, pause: float = PAUSE_SECONDS
    ) -> None:
        self._pause = pause
        self._put = put
        self._answer = answer
        self._questions: asyncio.Queue[Question] = asyncio.Queue()

    def ask(self, question: Question) -> None:
        """Nobody waits any more for the answers to the questions before."""
        while not self._questions.empty():
            self._questions.get_nowait()
        self._questions.put_nowait(question)

    async def run(self) -> None:
        """Until it is cancelled; the thread ends after the plan that it is at."""
        worker, loop = ThreadPoolExecutor(1, "planner"), asyncio.get_running_loop()
        try:
            while True:
                question = await self._questions.get()
                try:
                    plan = await loop.run_in_executor(worker, self._answer, question)
                except (
                    Exception
                ):  # whoever announces what a planner cannot bear ends no node; others may leave, or say something else
                    log.exception("a plan could not be made")
                    plan = None
                    await asyncio.sleep(self._pause)
                self._put(Planned(question, plan))
        finally:
            worker.shutdown(wait=False)
