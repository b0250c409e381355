"""Moves error feedback to the peers that train its shards now, from both sides (docs/adr/0019-feedback-moves.md).

Each side changes its feedback's file once for a hand-over: the giver notes up to which serial number payloads are out
of the feedback, the heir the newest serial number that was added, for every giver and shard. All else may be repeated.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import KW_ONLY, dataclass

from peer.net.base import cancel
from peer.state.outer_optimizer import Outer
from peer.state.storage import FeedbackWriter, Storage
from protocol.codec import blob_hash
from protocol.errors import PotluckError, RemoteError
from protocol.round import handover as rules
from protocol.run.manifest import Manifest
from protocol.wire import calls, endpoints
from protocol.wire.calls import Handover, HandoverAnswer, Step
from protocol.wire.commit import Commit
from protocol.wire.plan import Plan

ASK_SECONDS, LEAVING_ASK_SECONDS = 3.0, 0.1
"""Between two calls to an heir: usually, and while this peer leaves."""
ANSWER_BYTES, REQUEST_BYTES = 1024, 2048
OUT, BACK, TAKEN = "handed_over", "taken_back", "taken_from"
"""Notes beside the feedback: the newest serial number that is out of it, the last one that came into it again, and of
hand-overs to us {"giver/shard": the newest serial number that was added}."""
MOST_AT_ONCE, MOST_OF_A_GIVER = 64, 16
"""Hand-overs to us under way, of all givers and of one."""
SILENT_SECONDS = 120.0
"""After which a giver, who speaks every few seconds, is given up."""
MOST_GIVERS = 4096
"""Entries of the note of what was added; beyond them no new giver is accepted."""

Work = Callable[..., Awaitable[object]]


@dataclass(eq=False)
class Giving:
    """The giver's side. `step` and `leave` are for the loop that owns the feedback; `run` calls the heirs beside it,
    and changes nothing.

    ask: (peer, name, request, limit) calls another peer.
    open: unfinished hand-overs, by serial number.
    """

    manifest: Manifest
    peer: str
    storage: Storage
    outer: Outer
    writer: FeedbackWriter
    work: Work
    ask: Callable[[str, str, bytes, int], Awaitable[bytes]]

    def __post_init__(self) -> None:
        self._answers: dict[int, Step] = {}
        self._planned_round = -1
        self._little: set[str] = set()  # shards whose rest stays here
        self._first: dict[str, float] = {}  # the norm of a shard's feedback when its first part went
        self.open: dict[int, Handover] = {}
        out, back = int(self.storage.notes.get(OUT, 0)), int(self.storage.notes.get(BACK, 0))
        for handover in self.storage.load_handovers():
            if handover.serial > out or handover.serial == back:
                self.storage.drop_handover(handover)
            else:
                self.open[handover.serial] = handover

    async def run(self) -> None:
        """Calls the heirs periodically. Never returns."""
        while True:
            await asyncio.sleep(ASK_SECONDS)
            await self.call_heirs()

    async def call_heirs(self) -> None:
        """Offers every heir the oldest hand-over of each shard."""
        oldest: dict[tuple[str, str], Handover] = {}
        for handover in self.open.values():
            oldest.setdefault((handover.heir, handover.shard), handover)

        async def tell(handover: Handover) -> None:
            try:
                raw = await self.ask(handover.heir, endpoints.HANDOVER, calls.write(handover), ANSWER_BYTES)
                answer = calls.read(HandoverAnswer, raw, handover.heir, "hand-over")
                self._answers[handover.serial] = Step(answer.step)
            except (PotluckError, ValueError):
                return  # it is asked again

        await asyncio.gather(*(tell(handover) for handover in oldest.values()))

    async def step(self, log: Mapping[int, Commit], plan: Plan | None) -> None:
        """Handles the heirs' answers and the newest `plan`. Raises UsageError."""
        await self._handle_answers()
        if plan is not None and plan.round != self._planned_round:
            self._planned_round = plan.round
            await self._follow_plan(log, plan)

    async def leave(self, plan: Plan | None, up_bps: int, seconds: float) -> None:
        """Gives the whole feedback to other peers that train its shards, and waits until they have it, at most
        `seconds` in all."""
        if plan is None:
            return
        until = asyncio.get_running_loop().time() + seconds
        heirs: dict[str, str] = {}
        for shard in self.outer.feedback:
            heir = rules.heir(self.manifest, None, plan, self.peer, shard)
            if heir is not None and await asyncio.to_thread(self.outer.held, shard) > 0.0:
                heirs[shard] = heir
        await self._give(heirs, rules.leaving_topk(self.manifest, list(heirs), up_bps, seconds), until)
        try:
            async with asyncio.timeout_at(until):
                while self.open:
                    await self.call_heirs()
                    if not await self._handle_answers():
                        return  # no heir is there
                    await asyncio.sleep(LEAVING_ASK_SECONDS)
        except TimeoutError:
            return  # they are on disk: the next start goes on

    async def _handle_answers(self) -> bool:
        answers, self._answers = self._answers, {}
        for serial, answer in sorted(answers.items()):
            if serial in self.open:
                await self._answered(self.open[serial], answer)
        return bool(answers)

    async def _answered(self, handover: Handover, answer: Step) -> None:
        if answer is Step.TAKEN and handover.given:
            del self.open[handover.serial]
            await self.work(self.storage.drop_handover, handover)
        elif answer is Step.READY and not handover.given:
            self.open[handover.serial] = given = dataclasses.replace(handover, given=True)
            await self.work(self.storage.save_handover, given)
        elif answer in (Step.REFUSED, Step.TAKEN) and not handover.given:
            self._little.add(handover.shard)
            await self._take_back(handover)

    async def _follow_plan(self, log: Mapping[int, Commit], plan: Plan) -> None:
        """Takes back the feedback of shards that are trained here again, and gives that of others to their trainers."""
        manifest, peer = self.manifest, self.peer
        kept = rules.kept_shards(manifest, plan, peer)
        self._little.difference_update(kept)
        before = log[plan.round - 2].plan if plan.round - 2 in log else None
        heirs: dict[str, str] = {}
        for shard in self.outer.feedback:
            found = None if shard in kept else rules.heir(manifest, before, plan, peer, shard)
            if found is not None:
                heirs[shard] = found
        planned = {p for r in (*plan.replicas, *plan.forming) for p in r.peers}
        for handover in list(self.open.values()):
            if handover.given:
                if handover.heir in planned:
                    heirs.pop(handover.shard, None)
            elif handover.shard in kept or handover.shard not in heirs:
                await self._take_back(handover)
            elif handover.heir not in rules.trainers(manifest, (*plan.replicas, *plan.forming), handover.shard):
                self.open[handover.serial] = moved = dataclasses.replace(handover, heir=heirs.pop(handover.shard))
                await self.work(self.storage.save_handover, moved)
            else:
                heirs.pop(handover.shard)
        for shard in list(heirs):
            if shard in self._little or not await self._is_much(shard):
                self._little.add(shard)
                self._first.pop(shard, None)
                del heirs[shard]
        await self._give(heirs, rules.TOPK[0])

    async def _is_much(self, shard: str) -> bool:
        norm = await asyncio.to_thread(self.outer.held, shard)
        return norm > rules.LEFT_SHARE * self._first.setdefault(shard, norm)

    async def _give(self, heirs: Mapping[str, str], topk: int, until: float = math.inf) -> None:
        """Makes the feedback of these shards hand-overs, in one change of its file, as far as there is time `until`
        then."""
        if heirs:
            await self.writer.written()
            for shard, heir in heirs.items():
                if asyncio.get_running_loop().time() < until:
                    await self.work(self._take_out, shard, heir, topk)
            await self.writer.changed_between()
            self.storage.forget_older_feedback()

    def _take_out(self, shard: str, heir: str, topk: int) -> None:
        payload, _ = self.outer.encode(shard, rules.codec(self.manifest, topk))
        serial = max(int(self.storage.notes.get(OUT, 0)), *self.open, 0) + 1
        handover = Handover(
            serial=serial, heir=heir, shard=shard, topk=topk, blob=blob_hash.name_of(payload), size=len(payload)
        )
        self.storage.save_handover(handover, payload)
        self.storage.notes = {**self.storage.notes, OUT: str(serial)}
        self.open[serial] = handover

    async def _take_back(self, handover: Handover) -> None:
        await self.writer.written()
        await self.work(self._put_back, handover)
        await self.writer.changed_between()
        self.storage.forget_older_feedback()
        await self.work(self.storage.drop_handover, handover)

    def _put_back(self, handover: Handover) -> None:
        try:
            payload = self.storage.read_handover(handover)
        except OSError as error:
            raise RemoteError("", f"hand-over {handover.serial}: its payload is gone ({error})") from None
        self.outer.restore_feedback(handover.shard, payload, rules.codec(self.manifest, handover.topk))
        del self.open[handover.serial]
        self.storage.notes = {**self.storage.notes, BACK: str(handover.serial)}


@dataclass(slots=True)
class _Coming:
    """A hand-over to us under way.

    heard: when its giver called last, by the loop's clock.
    sound: its payload is here and acceptable.
    refused: why it is not added.
    """

    handover: Handover
    fetching: asyncio.Task[None]
    heard: float
    sound: bool = False
    refused: str = ""


@dataclass(eq=False)
class Taking:
    """The heir's side.

    why_refused: (giver, handover) -> why it is not acceptable.
    own_norm: of our newest payload of a shard; None: there is none.
    fetch: (blob, size, holder) brings a blob into the store.
    wake: called when `step` has work.
    """

    manifest: Manifest
    storage: Storage
    outer: Outer
    writer: FeedbackWriter
    _: KW_ONLY
    why_refused: Callable[[str, Handover], str | None]
    own_norm: Callable[[str], float | None]
    fetch: Callable[[str, int, str], Awaitable[None]]
    work: Work
    wake: Callable[[], None]

    def __post_init__(self) -> None:
        self._coming: dict[str, _Coming] = {}
        self._taken = _read(self.storage.notes)
        self._refuses = False

    def refuse(self) -> None:
        """Accepts no more: this peer leaves, and givers need not wait for it."""
        self._refuses = True

    async def answer(self, giver: str, request: bytes) -> bytes:
        """The answer to a giver's call. Raises RemoteError."""
        if self._refuses:
            raise RemoteError(giver, "hand-over: this peer leaves, too; ask again when it is back")
        step, reason = self._answer_to(giver, calls.read(Handover, request, giver, "hand-over"))
        return calls.write(HandoverAnswer(step=step.value, reason=reason))

    def _answer_to(self, giver: str, handover: Handover) -> tuple[Step, str]:
        key = f"{giver}/{handover.shard}"
        if self._taken.get(key, 0) >= handover.serial:
            return Step.TAKEN, ""
        reason = self.why_refused(giver, handover)
        if reason is None and key not in self._taken and len(self._taken) >= MOST_GIVERS:
            reason = f"feedback of {MOST_GIVERS} givers was added already"
        if reason is not None:
            return Step.REFUSED, reason
        self._drop_dead()
        coming = self._coming.get(key)
        if coming is None or coming.handover.serial != handover.serial or coming.handover.blob != handover.blob:
            of_giver = sum(other.startswith(f"{giver}/") for other in self._coming)
            if coming is None and (len(self._coming) >= MOST_AT_ONCE or of_giver >= MOST_OF_A_GIVER):
                return Step.WAIT, ""
            if coming is not None:
                coming.fetching.cancel()
            coming = self._coming[key] = _Coming(
                handover, asyncio.create_task(self._bring(giver, handover)), asyncio.get_running_loop().time()
            )
            return Step.WAIT, ""
        if handover.given and coming.sound and not coming.handover.given:
            self.wake()
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
        """Gives up hand-overs of silent givers: they keep the places of others."""
        now = asyncio.get_running_loop().time()
        for key, coming in list(self._coming.items()):
            if now - coming.heard > SILENT_SECONDS:
                coming.fetching.cancel()
                self._forget(key, coming.handover)

    async def _bring(self, giver: str, handover: Handover) -> None:
        await self.fetch(handover.blob, handover.size, giver)
        asyncio.get_running_loop().call_soon(self.wake)

    async def step(self) -> None:
        """Adds the payloads that are here; for the loop that owns the feedback. Raises UsageError."""
        for key, coming in list(self._coming.items()):
            if coming.fetching.done() and not coming.fetching.cancelled() and coming.fetching.exception() is None:
                await self._examine(key, coming)

    async def _examine(self, key: str, coming: _Coming) -> None:
        handover, codec = coming.handover, rules.codec(self.manifest, coming.handover.topk)
        own = self.own_norm(handover.shard)
        if own is None or coming.refused or (coming.sound and not handover.given):
            return
        payload = await asyncio.to_thread(self.storage.blobs.get, handover.blob)
        if payload is None:
            self._coming.pop(key, None)  # it was evicted
            return
        try:
            norm = await asyncio.to_thread(self.outer.norm, handover.shard, payload, codec)
        except PotluckError as error:
            coming.refused = str(error)
            return
        if rules.is_too_large(norm, own):
            coming.refused = f"its norm is {norm:.3g}, our newest payload's {own:.3g}; that is too much"
            return
        coming.sound = True
        if handover.given:
            await self.writer.written()
            await self.work(self.outer.restore_feedback, handover.shard, payload, codec)
            self._taken[key] = handover.serial
            self.storage.notes = {**self.storage.notes, TAKEN: json.dumps(self._taken)}
            await self.writer.changed_between()
            self._forget(key, handover)

    def _forget(self, key: str, handover: Handover) -> None:
        self._coming.pop(key, None)
        self.storage.blobs.release(handover.blob)

    async def aclose(self) -> None:
        await cancel(*(coming.fetching for coming in self._coming.values()))


def _read(notes: Mapping[str, str]) -> dict[str, int]:
    with contextlib.suppress(ValueError):
        found = json.loads(notes.get(TAKEN, "{}"))
        if isinstance(found, dict):
            return {str(key): serial for key, serial in found.items() if isinstance(serial, int)}
    return {}
