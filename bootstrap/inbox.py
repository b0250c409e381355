"""What happens to a bootstrap node, in the order in which it came, until its one loop has dealt with it.

Whoever hands in what a peer says waits until that is dealt with, at most for a while: so each peer has at most one thing waiting here, and
none says more than the node can hear. What a peer's message makes a machine raise is raised where that message came in, and ends that
stream and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Generic, TypeVar

log = logging.getLogger("potluck.node")
T = TypeVar("T")


@dataclass(slots=True)
class Entry(Generic[T]):
    """One event; `done` is set when it was dealt with, where somebody waits for that."""

    event: T
    done: asyncio.Future[None] | None = None

    def finish(self, error: Exception | None = None) -> None:
        """It was dealt with, or that failed."""
        waits = self.done is not None and not self.done.done()
        if error is not None and not waits:
            log.error("a message could not be dealt with, and its sender is gone", exc_info=error)
        elif self.done is not None and waits:
            self.done.set_result(None) if error is None else self.done.set_exception(error)


class Inbox(Generic[T]):
    """`patience`: seconds that somebody waits for what he handed in, at most."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._entries: asyncio.Queue[Entry[T]] = asyncio.Queue()

    def put(self, event: T) -> None:
        """For what happens here, and for what was asked for."""
        self._entries.put_nowait(Entry(event))

    async def hand_in(self, event: T) -> None:
        """For what others say. Raises what dealing with it raised."""
        entry = Entry(event, asyncio.get_running_loop().create_future())
        self._entries.put_nowait(entry)
        assert entry.done is not None
        done, _ = await asyncio.wait({entry.done}, timeout=self._patience)
        if done:
            entry.done.result()
        else:
            entry.done.cancel()

    async def get(self) -> Entry[T]:
        """The next one."""
        return await self._entries.get()
