"""Takes error feedback from peers that do not train a shard any more: the heir's side of docs/adr/0019-feedback-moves.md.

What is added is noted beside the feedback, in the same change of its file: for every giver and shard the number of the newest hand-over.
So a hand-over that comes again is answered, and not added again. Nobody waits for it: a part of a feedback may be added at any time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from peer.state.feedback_writer import FeedbackWriter
from peer.state.outer_optimizer import Outer
from peer.state.storage import Storage
from protocol.errors import PotluckError, RemoteError
from protocol.round import handover as rules
from protocol.run.manifest import Manifest
from protocol.wire import framing
from protocol.wire.calls import Handover, HandoverAnswer, Step
from protocol.wire.schema import SchemaError, build, plain

MOST, OF_A_GIVER = 64, 16
"""Hand-overs that are under way at once, of all and of one giver."""
SILENT_SECONDS = 120.0
"""A giver speaks every few seconds; of whom nothing was heard for so long, nothing is expected."""
GIVERS = 4096
"""Entries of the note of what was added; beyond them nothing new is taken."""
REQUEST_BYTES = 2048
TAKEN = "taken_from"
"""Note beside the feedback: {"giver/shard": the newest serial number that was added}."""


@dataclass(slots=True)
class _Coming:
    """A hand-over that is under way. `heard`: when its giver spoke of it last, by the loop's clock; `sound`: its payload is here, and nothing is wrong with it; `refused`: why it is not added."""

    handover: Handover
    fetching: asyncio.Task[None]
    heard: float
    sound: bool = False
    refused: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """What the loop that owns the feedback does for it. `why_refused(giver, handover)` and `own_norm(shard)`, of our newest payload (None:
    there is none), say what is acceptable; `fetch(blob, size, holder)` brings a blob into the store; `work` runs what changes the
    feedback; `wake` is called when `step` has something to do."""

    why_refused: Callable[[str, Handover], str | None]
    own_norm: Callable[[str], float | None]
    fetch: Callable[[str, int, str], Awaitable[None]]
    work: Callable[..., Awaitable[object]]
    wake: Callable[[], None]


class Taking:
    """One per peer."""

    def __init__(
        self, manifest: Manifest, storage: Storage, outer: Outer, writer: FeedbackWriter, owner: Owner
    ) -> None:
        self.manifest = manifest
        self._storage = storage
        self._outer = outer
        self._writer = writer
        self._owner = owner
        self._coming: dict[str, _Coming] = {}
        self._taken = _read(storage.notes)
        self._refuses = False

    def refuse(self) -> None:
        """From now on givers hear that nobody is here, and do not wait for us: who leaves takes nothing any more."""
        self._refuses = True

    async def answer(self, giver: str, request: bytes) -> bytes:
        """What we say to a giver's call. Raises RemoteError."""
        if self._refuses:
            raise RemoteError(giver, "hand-over: this peer leaves, too; ask again when it is back")
        try:
            handover = build(Handover, framing.unpack_message(request), ignore_unknown=True)
        except (framing.FrameError, SchemaError) as error:
            raise RemoteError(giver, f"hand-over: {error}") from None
        step, reason = self._look_at(giver, handover)
        return framing.pack_message(plain(HandoverAnswer(step=step.value, reason=reason)))

    def _look_at(self, giver: str, handover: Handover) -> tuple[Step, str]:
        key = f"{giver}/{handover.shard}"
        if self._taken.get(key, 0) >= handover.serial:
            return Step.TAKEN, ""
        reason = self._owner.why_refused(giver, handover)
        if reason is None and key not in self._taken and len(self._taken) >= GIVERS:
            reason = f"feedback of {GIVERS} givers was added already"
        if reason is not None:
            return Step.REFUSED, reason
        self._drop_dead()
        coming = self._coming.get(key)
        if coming is None or coming.handover.serial != handover.serial or coming.handover.blob != handover.blob:
            of_giver = sum(other.startswith(f"{giver}/") for other in self._coming)
            if coming is None and (len(self._coming) >= MOST or of_giver >= OF_A_GIVER):
                return Step.WAIT, ""
            if coming is not None:
                coming.fetching.cancel()
            coming = self._coming[key] = _Coming(
                handover, asyncio.create_task(self._bring(giver, handover)), asyncio.get_running_loop().time()
            )
            return Step.WAIT, ""
        if handover.given and coming.sound and not coming.handover.given:
            self._owner.wake()
        coming.handover, coming.heard = handover, asyncio.get_running_loop().time()
        if not coming.fetching.done():
            return Step.WAIT, ""
        if coming.fetching.cancelled() or coming.fetching.exception() is not None:
            del self._coming[key]  # it is begun again with the next call
            return Step.WAIT, ""
        if coming.refused:
            del self._coming[key]
            return Step.REFUSED, coming.refused
        return (Step.READY if coming.sound and not handover.given else Step.WAIT), ""

    def _drop_dead(self) -> None:
        """Those of which the giver has not spoken for long are over: they keep the places of others, who speak every few seconds."""
        now = asyncio.get_running_loop().time()
        for key, coming in list(self._coming.items()):
            if now - coming.heard > SILENT_SECONDS:
                coming.fetching.cancel()
                self._forget(key, coming.handover)

    async def _bring(self, giver: str, handover: Handover) -> None:
        await self._owner.fetch(handover.blob, handover.size, giver)
        asyncio.get_running_loop().call_soon(self._owner.wake)

    async def step(self) -> None:
        """Adds what is here and ours; for the loop that owns the feedback. Raises UsageError."""
        for key, coming in list(self._coming.items()):
            if coming.fetching.done() and not coming.fetching.cancelled() and coming.fetching.exception() is None:
                await self._examine(key, coming)

    async def _examine(self, key: str, coming: _Coming) -> None:
        handover, codec = coming.handover, rules.codec(self.manifest, coming.handover.topk)
        own = self._owner.own_norm(handover.shard)
        if own is None or coming.refused or (coming.sound and not handover.given):
            return
        payload = await asyncio.to_thread(self._storage.blobs.get, handover.blob)
        if payload is None:
            self._coming.pop(key, None)  # it was evicted
            return
        try:
            norm = await asyncio.to_thread(self._outer.norm, handover.shard, payload, codec)
        except PotluckError as error:
            coming.refused = str(error)
            return
        if rules.is_too_large(norm, own):
            coming.refused = f"its norm is {norm:.3g}, our newest payload's {own:.3g}; that is too much"
            return
        coming.sound = True
        if handover.given:
            await self._writer.written()
            await self._owner.work(self._outer.restore_feedback, handover.shard, payload, codec)
            self._taken[key] = handover.serial
            self._storage.notes = {**self._storage.notes, TAKEN: json.dumps(self._taken)}
            await self._writer.changed_between()
            self._forget(key, handover)

    def _forget(self, key: str, handover: Handover) -> None:
        self._coming.pop(key, None)
        if handover.blob not in self._storage.blobs.protected:
            self._storage.blobs.remove(handover.blob)

    async def aclose(self) -> None:
        """Ends what is under way."""
        for coming in self._coming.values():
            coming.fetching.cancel()
        await asyncio.gather(*(c.fetching for c in self._coming.values()), return_exceptions=True)


def _read(notes: Mapping[str, str]) -> dict[str, int]:
    with contextlib.suppress(ValueError):
        found = json.loads(notes.get(TAKEN, "{}"))
        if isinstance(found, dict):
            return {str(key): serial for key, serial in found.items() if isinstance(serial, int)}
    return {}
