"""Background jobs on a thread of their own, of which only the newest counts: it makes those before it useless.

What takes long in a job is numpy's, and between its steps the interpreter gives way: while a plan for 10,000 peers is made the loop is held
up for some hundredths of a second at most (docs/results/planner.md).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

log = logging.getLogger("potluck.jobs")
Job = TypeVar("Job")
Answer = TypeVar("Answer")


class Lacking(Exception):
    """Something that a job is about is not here yet."""


def wanted(read: Callable[[str], bytes | None]) -> Callable[[str], bytes]:
    """`read`, but raises Lacking for what is not here."""

    def found(name: str) -> bytes:
        data = read(name)
        if data is None:
            raise Lacking(f"{name} is not here")
        return data

    return found


class LatestJob(Generic[Job, Answer]):
    """Runs the newest job. `work` does a job, and `put` takes its answer.

    `pause`: seconds after a job that failed, which is then done again if there is no newer one.
    `failed`: what is answered instead (default: it is done again).
    """

    def __init__(
        self,
        name: str,
        work: Callable[[Job], Answer],
        put: Callable[[Answer], None],
        *,
        pause: float,
        failed: Callable[[Job], Answer] | None = None,
    ) -> None:
        self._name = name
        self._work = work
        self._put = put
        self._pause = pause
        self._failed = failed
        self._jobs: asyncio.Queue[Job] = asyncio.Queue()

    def ask(self, job: Job) -> None:
        """Queues a job in place of those that wait; the one that runs goes on."""
        while not self._jobs.empty():
            self._jobs.get_nowait()
        self._jobs.put_nowait(job)

    async def run(self) -> None:
        """Until it is cancelled; the thread ends after the job that it is at."""
        worker, loop = ThreadPoolExecutor(1, self._name), asyncio.get_running_loop()
        try:
            while True:
                job = await self._jobs.get()
                try:
                    answer = await loop.run_in_executor(worker, self._work, job)
                except Exception as error:  # whatever peers announce or offer ends no node
                    level = logging.INFO if isinstance(error, Lacking) else logging.ERROR
                    log.log(level, "%s: %s", self._name, error, exc_info=level == logging.ERROR)
                    await asyncio.sleep(self._pause)
                    if self._failed is not None:
                        self._put(self._failed(job))
                    elif self._jobs.empty():
                        self._jobs.put_nowait(job)
                else:
                    self._put(answer)
        finally:
            worker.shutdown(wait=False)
