"""Work with torch beside a round's training."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from peer.node.attesting import be_quiet

T = TypeVar("T")


class Aside:
    """A thread that lets whoever computes go first; `make` gives one. There is none before it is needed, and none after `end`.

    torch keeps helpers for every thread that has computed on several cores, for as long as that thread lives. OpenMP counts them all: where
    they are more than there are cores, nobody's wait actively for the next operation any more, and training is a tenth slower
    (docs/results/doctor.md).
    """

    def __init__(self, make: Callable[[], ThreadPoolExecutor]) -> None:
        self._make = make
        self._worker: ThreadPoolExecutor | None = None

    @property
    def worker(self) -> ThreadPoolExecutor:
        """The thread."""
        if self._worker is None:
            self._worker = self._make()
            self._worker.submit(be_quiet)
        return self._worker

    async def __call__(self, work: Callable[..., T], *args: object) -> T:
        """What `work` returns or raises there."""
        return await asyncio.get_running_loop().run_in_executor(self.worker, work, *args)

    def end(self) -> None:
        """After what has been begun; what has not is dropped."""
        if self._worker is not None:
            self._worker.shutdown(wait=False, cancel_futures=True)
            self._worker = None
