"""Writes the error feedback beside the round: it is most of what a round writes, and nobody waits for it.

Whoever changes the feedback waits for `written` before, and calls `changed` after: what is being written must not change, and
what is on disk must be known. So the feedback on disk is at most one change behind, and an offer is on disk before the feedback
that belongs to it (docs/adr/0007-offer-before-feedback.md).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from peer.net.clock import Clock
from peer.state.storage import Shards, Storage
from protocol.rounds import retention


@dataclass(frozen=True, slots=True)
class _Change:
    """The feedback is that of `round`; `restored`: and its offer was given back. `since`: steady time."""

    round: int
    restored: bool
    since: float


class FeedbackWriter:
    """One per peer. `feedback`: the arrays themselves, which are written as they are then. `round`, `restored`: what is on disk."""

    def __init__(self, storage: Storage, feedback: Shards, clock: Clock, round: int, restored: bool) -> None:
        self._storage = storage
        self._feedback = feedback
        self._clock = clock
        self._newest = _Change(round, restored, clock.steady())
        self._unsaved: _Change | None = None
        self._saving: asyncio.Task[None] | None = None

    def changed(self, round: int, *, restored: bool = False) -> None:
        """The feedback is that of `round` now; `restored`: and the round's offer went back into it."""
        self._newest = self._unsaved = _Change(round, restored, self._clock.steady())

    def saved(self, round: int) -> None:
        """Somebody else has written it, with the work of `round`."""
        self._newest = _Change(round, False, self._clock.steady())

    async def changed_between(self) -> None:
        """The feedback, or what is noted with it, has changed between rounds; returns when that is on disk. Raises UsageError."""
        self._unsaved = self._newest
        await self.written()

    def look(self) -> None:
        """Begins to write, when it is time; to be called now and then. Raises what an earlier writing raised (UsageError)."""
        if self._saving is not None and self._saving.done():
            self._saving.result()
        if retention.feedback_is_due(self._unsaved.since if self._unsaved else None, self._clock.steady()):
            self._begin()

    async def written(self) -> None:
        """Returns when the feedback is on disk as it is. Raises UsageError."""
        self._begin()
        if self._saving is not None:
            saving, self._saving = self._saving, None
            await saving

    def _begin(self) -> None:
        if self._unsaved is not None:
            change, self._unsaved = self._unsaved, None
            work = asyncio.to_thread(
                self._storage.save_feedback, change.round, self._feedback, restored_offer=change.restored
            )
            self._saving = asyncio.create_task(work)
