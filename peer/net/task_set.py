"""A set of endless tasks, one for each name of a set that changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine

from peer.net.base import cancel


class TaskSet:
    """Runs `work(name)` for each of the names that `wanted()` returns; set `changed` when they are others."""

    def __init__(
        self, wanted: Callable[[], Collection[str]], work: Callable[[str], Coroutine[None, None, None]]
    ) -> None:
        self.changed = asyncio.Event()
        self._wanted = wanted
        self._work = work
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def end(self, name: str) -> None:
        """Ends the task of a name; it starts again if the name is still wanted."""
        if name in self._tasks:
            self._tasks[name].cancel()

    async def run(self) -> None:
        """Never returns. Raises what a task raised; then all are ended."""
        tasks = self._tasks
        try:
            while True:
                self.changed.clear()
                wanted = self._wanted()
                for name in [n for n in wanted if n not in tasks]:
                    tasks[name] = asyncio.create_task(self._work(name))
                for name in [n for n in tasks if n not in wanted]:
                    tasks[name].cancel()
                changed = asyncio.create_task(self.changed.wait())
                try:
                    await asyncio.wait({changed, *tasks.values()}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    changed.cancel()
                for name in [n for n, task in tasks.items() if task.done()]:
                    task = tasks.pop(name)
                    if not task.cancelled():
                        task.result()
        finally:
            await cancel(*tasks.values())
