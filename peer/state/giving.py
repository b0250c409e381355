"""Gives error feedback to the peers that train its shards now: the giver's side of docs/adr/0019-feedback-moves.md.

One change of the feedback's file makes a part of it a hand-over, or takes it back, since that file notes up to which serial number the
hand-overs' payloads are out of the feedback, and which of them are in it again. A crash before that change leaves a record without
effect, which is removed at the next start. All else may be repeated: the heir finds by the number what it has added already.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Awaitable, Callable, Mapping

from peer.state.feedback_writer import FeedbackWriter
from peer.state.outer_optimizer import Outer
from peer.state.storage import Storage
from protocol.codec import blob_hash
from protocol.errors import PotluckError, RemoteError
from protocol.round import handover as rules
from protocol.run.manifest import Manifest
from protocol.wire import endpoints, framing
from protocol.wire.calls import Handover, HandoverAnswer, Step
from protocol.wire.commit import Commit
from protocol.wire.plan import Plan
from protocol.wire.schema import build, plain

ASK_SECONDS = 3.0
"""Between two calls to an heir."""
LEAVING_ASK_SECONDS = 0.1
"""The same, while this peer leaves."""
ANSWER_BYTES = 1024
OUT, BACK = "handed_over", "taken_back"
"""Notes beside the feedback: the newest serial number that is out of it, and the one that came into it again last."""

Work = Callable[..., Awaitable[object]]
"""Runs something on the thread that changes the feedback."""


class Giving:
    """One per peer. `work` runs what changes the feedback; `ask(peer, name, request, limit)` is a call to another peer.

    `step` and `leave` are for the loop that owns the feedback; `run` calls the heirs beside it, and changes nothing."""

    def __init__(
        self,
        manifest: Manifest,
        peer: str,
        storage: Storage,
        outer: Outer,
        writer: FeedbackWriter,
        work: Work,
        ask: Callable[[str, str, bytes, int], Awaitable[bytes]],
    ) -> None:
        self.manifest = manifest
        self.peer = peer
        self._storage = storage
        self._outer = outer
        self._writer = writer
        self._work = work
        self._ask = ask
        self._answers: dict[int, Step] = {}
        self._looked = -1
        self._little: set[str] = set()  # shards of which only so little is left that it stays
        self._first: dict[str, float] = {}  # the norm of a shard's feedback when its first part went
        self.open: dict[int, Handover] = {}
        """The hand-overs that are not done, by serial number."""
        out, back = int(storage.notes.get(OUT, 0)), int(storage.notes.get(BACK, 0))
        for handover in storage.load_handovers():
            if handover.serial > out or handover.serial == back:
                storage.drop_handover(handover)
            else:
                self.open[handover.serial] = handover

    # --- beside the loop

    async def run(self) -> None:
        """Calls the heirs again and again. Never returns."""
        while True:
            await asyncio.sleep(ASK_SECONDS)
            await self.call_heirs()

    async def call_heirs(self) -> None:
        """Tells every heir of the oldest hand-over of each shard that it has not added yet."""
        oldest: dict[tuple[str, str], Handover] = {}
        for handover in self.open.values():
            oldest.setdefault((handover.heir, handover.shard), handover)

        async def tell(handover: Handover) -> None:
            try:
                request = framing.pack_message(plain(handover))
                raw = await self._ask(handover.heir, endpoints.HANDOVER, request, ANSWER_BYTES)
                said = build(HandoverAnswer, framing.unpack_message(raw), ignore_unknown=True)
                self._answers[handover.serial] = Step(said.step)
            except (PotluckError, ValueError):
                return  # it is asked again

        await asyncio.gather(*(tell(handover) for handover in oldest.values()))

    # --- in the loop

    async def step(self, log: Mapping[int, Commit], plan: Plan | None) -> None:
        """Does what the heirs' answers and the newest `plan` ask for. Raises UsageError."""
        answers, self._answers = self._answers, {}
        for serial, answer in sorted(answers.items()):
            await self._answered(self.open.get(serial), answer)
        if plan is not None and plan.round != self._looked:
            self._looked = plan.round
            await self._look(log, plan)

    async def leave(self, plan: Plan | None, up_bps: int, seconds: float) -> None:
        """Gives all that the feedback holds to others who train its shards, and waits until they have it: so many seconds in all, at most."""
        if plan is None:
            return
        until = asyncio.get_running_loop().time() + seconds
        heirs: dict[str, str] = {}
        for shard in self._outer.feedback:
            heir = rules.heir(self.manifest, None, plan, self.peer, shard)
            if heir is not None and await asyncio.to_thread(self._outer.held, shard) > 0.0:
                heirs[shard] = heir
        await self._give(heirs, rules.leaving_topk(self.manifest, list(heirs), up_bps, seconds), until)
        try:
            async with asyncio.timeout_at(until):
                while self.open:
                    await self.call_heirs()
                    answers, self._answers = self._answers, {}
                    if not answers:
                        return  # nobody is there
                    for serial, answer in sorted(answers.items()):
                        await self._answered(self.open.get(serial), answer)
                    await asyncio.sleep(LEAVING_ASK_SECONDS)
        except TimeoutError:
            return  # they are on disk: after the next start it goes on

    async def _answered(self, handover: Handover | None, answer: Step) -> None:
        if handover is None:
            return
        if answer is Step.TAKEN and handover.given:
            del self.open[handover.serial]
            await self._work(self._storage.drop_handover, handover)
        elif answer is Step.READY and not handover.given:
            self.open[handover.serial] = given = dataclasses.replace(handover, given=True)
            await self._work(self._storage.save_handover, given)
        elif answer in (Step.REFUSED, Step.TAKEN) and not handover.given:
            self._little.add(handover.shard)
            await self._take_back(handover)

    async def _look(self, log: Mapping[int, Commit], plan: Plan) -> None:
        """Once for every plan: what is trained here again comes back, and what is not goes where it is trained."""
        manifest, peer = self.manifest, self.peer
        kept = rules.kept_shards(manifest, plan, peer)
        self._little.difference_update(kept)
        before = log[plan.round - 2].plan if plan.round - 2 in log else None
        heirs: dict[str, str] = {}
        for shard in self._outer.feedback:
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
                await self._work(self._storage.save_handover, moved)
            else:
                heirs.pop(handover.shard)
        for shard in list(heirs):
            if shard in self._little or not await self._is_much(shard):
                self._little.add(shard)
                self._first.pop(shard, None)
                del heirs[shard]
        await self._give(heirs, rules.TOPK[0])

    async def _is_much(self, shard: str) -> bool:
        norm = await asyncio.to_thread(self._outer.held, shard)
        return norm > rules.LEFT_SHARE * self._first.setdefault(shard, norm)

    async def _give(self, heirs: Mapping[str, str], topk: int, until: float = math.inf) -> None:
        """Makes the feedback of these shards hand-overs, in one change of its file; those for which there is no time `until` then keep theirs."""
        if heirs:
            await self._writer.written()
            for shard, heir in heirs.items():
                if asyncio.get_running_loop().time() < until:
                    await self._work(self._take_out, shard, heir, topk)
            await self._writer.changed_between()
            self._storage.forget_older_feedback()

    def _take_out(self, shard: str, heir: str, topk: int) -> None:
        payload, _ = self._outer.encode(shard, rules.codec(self.manifest, topk))
        serial = max(int(self._storage.notes.get(OUT, 0)), *self.open, 0) + 1
        handover = Handover(
            serial=serial, heir=heir, shard=shard, topk=topk, blob=blob_hash.name_of(payload), size=len(payload)
        )
        self._storage.save_handover(handover, payload)
        self._storage.notes = {**self._storage.notes, OUT: str(serial)}
        self.open[serial] = handover

    async def _take_back(self, handover: Handover) -> None:
        await self._writer.written()
        await self._work(self._put_back, handover)
        await self._writer.changed_between()
        self._storage.forget_older_feedback()
        await self._work(self._storage.drop_handover, handover)

    def _put_back(self, handover: Handover) -> None:
        try:
            payload = self._storage.read_handover(handover)
        except OSError as error:
            raise RemoteError("", f"hand-over {handover.serial}: its payload is gone ({error})") from None
        self._outer.restore_feedback(handover.shard, payload, rules.codec(self.manifest, handover.topk))
        del self.open[handover.serial]
        self._storage.notes = {**self._storage.notes, BACK: str(handover.serial)}
