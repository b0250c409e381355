"""Saves the error feedback beside the round, where nobody waits for it: in memory after every round, on disk after many.

The whole feedback has 4 bytes a parameter, which would wear a disk out if every round wrote them. So after most rounds it is copied
to memory that outlives a killed process, and only every `retention.SAVED_ROUNDS` rounds, and when the process ends, to disk. What is on
disk is brought up to the newest offer by the payloads of the offers since (docs/adr/0064-feedback-is-seldom-written.md).

The caller that changes the feedback waits for `written` before, and calls `changed` after: what is being saved must not change, and
what is saved must be known. So a copy is at most one change behind, and an offer is on disk before the feedback that belongs to it
(docs/adr/0007-offer-before-feedback.md).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from peer.net.base import Clock
from peer.state.storage import Shards, Storage
from protocol.ledger import retention


@dataclass(frozen=True, slots=True)
class _Change:
    """The feedback is that of `round`; `given_back`: the newest round whose offer went back into it. `since`: steady time."""

    round: int
    given_back: int
    since: float


class FeedbackWriter:
    """One per peer. `feedback`: the arrays themselves, which are written as they are then. `round`, `given_back`: what they are when
    it begins; `on_disk`: the round of the feedback on disk, 0 where there is none."""

    def __init__(
        self, storage: Storage, feedback: Shards, clock: Clock, round: int, *, given_back: int = 0, on_disk: int = 0
    ) -> None:
        self._storage = storage
        self._feedback = feedback
        self._clock = clock
        self._newest = _Change(round, given_back, clock.steady())
        self._unsaved: _Change | None = None
        self._on_disk: int | None = on_disk or None
        self._is_behind = round > on_disk
        self._saving: asyncio.Task[None] | None = None

    @property
    def given_back(self) -> int:
        """The newest round whose offer went back into the feedback."""
        return self._newest.given_back

    def changed(self, round: int, *, restored: bool = False) -> None:
        """The feedback is that of `round` now; `restored`: and the round's offer went back into it."""
        given_back = round if restored else self._newest.given_back
        self._newest = self._unsaved = _Change(round, given_back, self._clock.steady())
        self._is_behind = True

    async def changed_between(self) -> None:
        """The feedback, or what is noted with it, has changed between rounds; returns when that is on disk. Raises UsageError."""
        self._is_behind = True
        await self.on_disk()

    def look(self) -> None:
        """Begins to save, when it is time; to be called now and then. Raises what an earlier saving raised (UsageError)."""
        if self._saving is not None and self._saving.done():
            self._saving.result()
        if retention.feedback_is_due(self._unsaved.since if self._unsaved else None, self._clock.steady()):
            self._begin()

    async def written(self) -> None:
        """Returns when the feedback is saved as it is, in memory or on disk. Raises UsageError."""
        self._begin()
        if self._saving is not None:
            saving, self._saving = self._saving, None
            await saving

    async def on_disk(self) -> None:
        """Returns when the feedback is on disk as it is. Raises UsageError."""
        if self._is_behind:
            self._on_disk, self._unsaved = None, self._newest
        await self.written()

    def _begin(self) -> None:
        if self._unsaved is not None:
            change, self._unsaved = self._unsaved, None
            self._saving = asyncio.create_task(self._save(change))

    async def _save(self, change: _Change) -> None:
        whole = retention.feedback_goes_to_disk(self._on_disk, change.round)
        save = self._storage.save_feedback if whole else self._storage.copy_feedback
        await asyncio.to_thread(save, change.round, self._feedback, change.given_back)
        if whole:
            self._on_disk, self._is_behind = change.round, self._newest is not change
