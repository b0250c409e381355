"""Carries out what the member machine decides: one loop that owns a peer's state at the round boundaries.

Events come in through `put`, in any order, from training, session and timers; effects that change state (EncodeUpdate, KeepInFeedback, RestoreFeedback,
Apply, HoldShards) are done one after the other in this loop, so nothing else ever sees them half done. Training runs beside it
and only reads θ. The way into any state is one: peer/state/recovery.py.

*Overlap.* With `overlap = 1` the inner steps of round r + 1 begin as soon as the payloads of round r are packed, and the commit
of round r is applied while they go on. What the commit will bring is not known yet; a replica takes its own pseudo-gradient
δ(r) for the mean of all, and begins at

    b(r+1) = θ(r-1) - δ(r)            where its own inner steps of round r ended

so that δ(r+1) = b(r+1) - θ_local is again just the displacement of its H inner steps. One round late comes the correction: the
next steps begin at b(r+2) = θ(r) - δ(r+1), that is, at θ_local + (θ(r) - b(r+1)): the commit of round r has taken the place of
the guess. θ and the error feedback know nothing of this (P1 to P3 hold as without it): b is where gradients are taken, never
what is sent, added or compared. A commit that gives the replica other work than expected (protocol/rounds/member.py) drops what was
done ahead. (Eager updates: Kale, Douillard, Donchev 2025.)
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from peer import events
from peer.net.base import Transport
from peer.state.outer_optimizer import Outer, difference
from peer.state.payloads import Exchange
from peer.state.recovery import Recovery
from peer.state.storage import Checkpoint, Shards, Storage
from protocol.codec import sparse
from protocol.errors import LocalError
from protocol.planning import memory
from protocol.rounds import member
from protocol.rounds.member import Member, TrainOrder
from protocol.run import layout
from protocol.run.manifest import Manifest
from protocol.wire.commit import Commit, Part
from protocol.wire.encoding import Message
from protocol.wire.plan import Plan
from protocol.wire.session import Offer, Offered

T = TypeVar("T")
TICK_SECONDS = 1.0
SAVE_SECONDS = 5.0
"""So long the feedback waits before it is written: the round's end, for which everybody waits, goes first."""
LOOK_SECONDS = 60.0
"""How often a peer that is behind asks whether others have a later state."""


@dataclass(frozen=True, slots=True)
class Result:
    """What an inner_loop did of a round; `error` is None if all steps were done. `seconds`: that it took."""

    steps: int
    tokens: int
    loss: float | None
    error: str | None
    seconds: float = 0.0
    forward_bytes: int = 0
    backward_bytes: int = 0
    boundary_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ChainOrders:
    """How a training tells (generation, peer, reason) that its chain lost a member, and is told how it goes on."""

    failed: Callable[[int, str, str], None]
    orders: asyncio.Queue[TrainOrder]


class InnerLoop(Protocol):
    """The part of a peer that computes; see peer/node/inner_loop.py for the real one."""

    async def train(
        self,
        order: TrainOrder,
        theta: Shards,
        stop: asyncio.Event,
        progress: Callable[[int, float | None], None],
        chain_orders: ChainOrders,
    ) -> Result:
        """Inner steps of one round; ends early, with an error, when `stop` is set."""
        ...

    def displacement(self, shard: str) -> list[tuple[NDArray[np.float32], NDArray[np.float32] | None]]:
        """(a, b) for each tensor of a shard that was just trained: θ(r-1) - θ local is a - b, or a where b is None."""
        ...

    def release(self) -> None:
        """Forgets the θ that was trained from: `displacement` is not asked for any more."""
        ...

    def optimizer(self) -> dict[str, NDArray[np.generic]]:
        """The inner optimizer's state, for a checkpoint."""
        ...


class Rounds:
    """See the module's docstring. `tell` sends to the leader, `threads` work at a round boundary; `warm`: whether to hold all shards
    while there is no stage for us, so that we can take any."""

    def __init__(
        self,
        manifest: Manifest,
        peer: str,
        transport: Transport,
        storage: Storage,
        inner_loop: InnerLoop,
        emit: events.Emit,
        *,
        exchange: Exchange,
        tell: Callable[[Message], None],
        restored: Checkpoint | None,
        threads: int,
        warm: bool,
    ) -> None:
        self.manifest = manifest
        self.peer = peer
        self._warm = warm
        self._task: tuple[Plan, asyncio.Queue[TrainOrder]] | None = None
        self.outer = Outer(
            manifest.model,
            manifest.outer.codec,
            manifest.outer.beta,
            manifest.outer.eta,
            threads,
        )
        self.phase_seconds: dict[str, float] = {}
        self._scratch: list[NDArray[np.float32]] = []
        self._worker = ThreadPoolExecutor(1, "rounds")
        self._quiet = ThreadPoolExecutor(1, "quiet", initializer=_be_quiet)
        self._transport = transport
        self._storage = storage
        self._inner_loop = inner_loop
        self._emit = emit
        self._exchange = exchange
        self._tell = tell
        self._events: asyncio.Queue[member.Event] = asyncio.Queue()
        self._stop = asyncio.Event()
        self._training: asyncio.Task[None] | None = None
        self._looked_at = float("-inf")
        self._results: dict[int, Result] = {}
        self._attesting: asyncio.Task[None] | None = None
        self._unsaved: tuple[int, bool, float] | None = None
        self._saving: asyncio.Task[None] | None = None
        applied = -1
        if restored is not None:
            applied = restored.round
            self.outer.theta = dict(restored.theta)
        found = storage.load_feedback()
        self.outer.feedback, offer = found.feedback, found.offer
        if offer is not None and found.behind:
            for part in offer.parts:
                self.outer.without_delta(part.shard, self._own(offer, part))
            storage.save_feedback(offer.round, self.outer.feedback)
        self._offer = offer  # the newest durable one: after a restart it may have to be given back
        storage.blobs.protected = set(storage.blobs)  # until the log says what is needed
        self.member = Member(manifest, peer, applied, offer, found.round)
        self._checkpointed = applied
        self._recovery = Recovery(manifest, self.outer, storage, exchange, self.member.commits, emit)

    def put(self, event: member.Event) -> None:
        """Hands an event to the machine."""
        self._events.put_nowait(event)

    def prefetch(self, offered: Offered) -> None:
        """Begins to fetch what was offered for the round under way, if it is of a shard that we hold."""
        if self.member.applied < offered.round <= self.member.applied + 2 and offered.part.shard in self.outer.theta:
            limit = sparse.max_payload_size(self.outer.codec, layout.shapes(self.manifest.model, offered.part.shard))
            if offered.part.size <= limit:
                self._exchange.prefetch(offered)

    async def run(self) -> None:
        """Until the run is over. Raises ForkError and LocalError."""
        ticker = asyncio.create_task(self._tick())
        try:
            while True:
                event = await self._events.get()
                if self._saving is not None and self._saving.done():
                    self._saving.result()
                if self._unsaved is not None and time.monotonic() - self._unsaved[2] >= SAVE_SECONDS:
                    self._begin_saving()
                for effect in self.member.handle(event, time.monotonic()):
                    if isinstance(effect, member.Finish):
                        return
                    await self._do(effect)
        finally:
            ticker.cancel()
            self._stop.set()
            if self._training is not None:
                await asyncio.gather(self._training, return_exceptions=True)
            try:
                await self._attested()
                await self._saved()
                await self._work(self._last_checkpoint)
            finally:
                self._worker.shutdown(wait=False)
                self._quiet.shutdown(wait=False)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self.put(member.Tick())

    async def _do(self, effect: member.Effect) -> None:
        match effect:
            case member.Send(message):
                self._tell(message)
            case member.TrainOrder(resume=True):
                self._resume(effect)
            case member.TrainOrder():
                self._begin_training(effect)
            case member.Stop():
                self._stop.set()
            case member.EncodeUpdate(plan, replica, steps, tokens, loss):
                await self._timed("disk", self._saved())
                offer = await self._timed("encode", self._work(self._encode_update, plan, replica, steps, tokens, loss))
                self._save(plan.round)
                self._emit(events.Offered(round=plan.round, bytes=sum(p.size for p in offer.parts)))
                self.put(member.UpdateEncoded(plan.round, offer))
            case member.KeepInFeedback(round):
                await self._saved()
                await self._work(self._keep_in_feedback, round)
                self.put(member.UpdateEncoded(round, None))
            case member.RestoreFeedback(offer):
                await self._saved()
                await self._work(self._restore_feedback, offer)
                self._save(offer.round, restored_offer=True)
            case member.Apply(commit, rebuild):
                await self._apply(commit, rebuild)
                self.put(member.Applied(commit.round))
            case member.HoldShards(commit):
                await self._timed("hold", self._hold_shards(commit))
                self.put(member.ShardsHeld(commit.round))
            case member.Finish():
                raise AssertionError("Finish ends the loop")

    async def _work(self, work: Callable[..., T], *args: object) -> T:
        """Runs `work` on the one thread that changes θ and the feedback: the memory that it frees is there for the next time."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, work, *args)

    async def _timed(self, phase: str, work):  # type: ignore[no-untyped-def]
        began = time.monotonic()
        try:
            return await work
        finally:
            self.phase_seconds[phase] = self.phase_seconds.get(phase, 0.0) + time.monotonic() - began

    # --- training

    def _resume(self, order: TrainOrder) -> None:
        assert self._task is not None
        peers = order.plan.replicas[order.replica].peers
        self._emit(
            events.ChainReconfigured(
                round=order.plan.round,
                replica=order.replica,
                generation=order.generation,
                peers=peers,
                steps=order.steps,
            )
        )
        self._task = (order.plan, self._task[1])
        self._task[1].put_nowait(order)

    def _begin_training(self, order: TrainOrder) -> None:
        plan, replica = order.plan, order.replica
        spec = plan.replicas[replica]
        stage = spec.stage_of(self.peer)
        role = "full" if len(spec.stages) == 1 else "stage"
        self._emit(
            events.Role(
                round=plan.round,
                role=role,
                replica=replica,
                first=stage.first,
                last=stage.last,
                rank=spec.rank,
                position=spec.stages.index(stage),
                stages=len(spec.stages),
            )
        )
        self._stop = asyncio.Event()
        theta = {shard: self.outer.theta[shard] for shard in self._held(plan)}
        if order.generation:  # a spare needs its memory for the stage
            self.outer.theta = dict(theta)
        self._task = (plan, asyncio.Queue())
        ahead = plan.round > self.member.applied + 1
        self._training = asyncio.create_task(self._train(order, self._task[1], theta, ahead, self._stop))

    async def _train(
        self, order: TrainOrder, orders: asyncio.Queue[TrainOrder], theta: Shards, ahead: bool, stop: asyncio.Event
    ) -> None:
        began = last = time.monotonic()
        plan, step_tokens = order.plan, self.manifest.train.step_tokens

        def progress(step: int, loss: float | None) -> None:
            nonlocal last
            now = time.monotonic()
            done = events.Step(round=plan.round, step=step, loss=loss, tokens=step_tokens, seconds=now - last)
            self._emit(done)
            last = now

        def failed(generation: int, peer: str, reason: str) -> None:
            self._emit(events.ChainFailed(round=plan.round, generation=generation, peer=peer, reason=reason))
            self.put(member.ChainFailed(plan.round, generation, peer, reason))

        if ahead:
            theta = await asyncio.to_thread(self._ahead, plan, theta)
        result = await self._inner_loop.train(order, theta, stop, progress, ChainOrders(failed, orders))
        self._results[plan.round] = dataclasses.replace(result, seconds=time.monotonic() - began)
        if result.error is None:
            self.put(member.Trained(plan.round, result.steps, result.tokens, result.loss))
        else:
            self._emit(events.Withdrew(round=plan.round, reason=result.error))
            self.put(member.Failed(plan.round, result.steps, result.error))

    def _ahead(self, plan: Plan, theta: Shards) -> Shards:
        """b of a round whose predecessor is not decided (see the module's docstring); `theta`: before that one."""
        trained = self._trained(plan)
        moved = {s: zip(theta[s], difference(self._inner_loop.displacement(s)), strict=True) for s in trained}
        return theta | {s: [t - d for t, d in pairs] for s, pairs in moved.items()}

    def _trained(self, plan: Plan) -> tuple[str, ...]:
        """The shards that `plan`, which names us, has us train."""
        stage = plan.stage_of(self.peer)
        assert stage is not None
        return memory.stage_shards(self.manifest, stage.first, stage.last)

    def _held(self, plan: Plan) -> tuple[str, ...]:
        stage = plan.stage_of(self.peer)
        return () if stage is None else memory.held_shards(self.manifest, stage.first, stage.last)

    # --- what we send

    def _encode_update(self, plan: Plan, replica: int, steps: int, tokens: int, loss: float | None) -> Offer:
        parts = []
        for shard in self._trained(plan):
            self.outer.accumulate(shard, self._inner_loop.displacement(shard))
            payload, norm = self.outer.encode(shard)
            parts.append(
                Part(
                    shard=shard,
                    digest=self._storage.blobs.put(payload, plan.round, protect=True),
                    size=len(payload),
                    norm=norm,
                )
            )
        self._offer = offer = Offer(
            round=plan.round, replica=replica, parts=tuple(parts), tokens=tokens, steps=steps, loss=loss
        )
        self._storage.save_offer(offer)
        return offer

    def _save(self, round: int, restored_offer: bool = False) -> None:
        """Has the feedback written, soon. It is most of what a round writes; nobody waits for it, so what is waited for goes
        first."""
        self._unsaved = (round, restored_offer, time.monotonic())

    def _begin_saving(self) -> None:
        if self._unsaved is not None:
            (round, restored_offer, _), self._unsaved = self._unsaved, None
            work = asyncio.to_thread(
                self._storage.save_feedback, round, self.outer.feedback, restored_offer=restored_offer
            )
            self._saving = asyncio.create_task(work)

    async def _saved(self) -> None:
        """Waits until the feedback is on disk: nothing may change it before. Raises UsageError."""
        self._begin_saving()
        if self._saving is not None:
            saving, self._saving = self._saving, None
            await saving

    def _keep_in_feedback(self, round: int) -> None:
        done = self._results.get(round)
        if self._task is not None and self._task[0].round == round and done and done.steps:
            for shard in self._trained(self._task[0]):
                self.outer.accumulate(shard, self._inner_loop.displacement(shard))
            self._storage.save_feedback(round, self.outer.feedback)
            self._offer = None

    def _restore_feedback(self, offer: Offer) -> None:
        for part in offer.parts:
            self.outer.restore_feedback(part.shard, self._own(offer, part))

    def _own(self, offer: Offer, part: Part) -> bytes:
        payload = self._storage.blobs.get(part.digest)
        if payload is None:
            raise LocalError(
                f"payload {part.digest[:12]} of round {offer.round}: its file in {self._storage.blobs.folder} is gone or"
                f" damaged; that much of this machine's work is lost, remove {self._storage.folder}/offer-* and start again"
            )
        return payload

    # --- what was decided

    async def _apply(self, commit: Commit, rebuild: Sequence[str]) -> None:
        began = time.monotonic()
        await self._leap(commit)
        held = [s for s in self.outer.theta if s not in rebuild]
        payloads = await self._timed("fetch", self._exchange.payloads(commit, held, self.member.commits))
        scratch = None
        if not self.manifest.outer.overlap:  # then nobody trains, and nobody but us has θ when it is compared
            await self._attested()
            self._inner_loop.release()
            scratch = self._scratch

        def work() -> None:
            for shard in held:
                self.outer.apply(shard, [(w, payloads[p.digest]) for w, p, _ in commit.payloads(shard)], scratch)

        await self._timed("apply", self._work(work))
        if rebuild:
            again = [s for s in rebuild if s in self.outer.theta]
            for shard in again:
                del self.outer.theta[shard]
            await self._recovery.build(again, commit.round)
            self._emit(events.ShardRebuilt(round=commit.round, shards=tuple(again)))
        await self._work(self._settle, commit)
        self.phase_seconds["boundary"] = time.monotonic() - began
        result = self._results.pop(commit.round, None) or Result(0, 0, None, None)
        self.phase_seconds["train"] = result.seconds
        self._emit(
            events.Round(
                round=commit.round,
                seconds={k: round(v, 4) for k, v in self.phase_seconds.items()},
                bytes_sent=self._transport.traffic.bytes_sent,
                bytes_received=self._transport.traffic.bytes_received,
                boundary_forward_bytes=result.forward_bytes,
                boundary_backward_bytes=result.backward_bytes,
                boundary_tokens=result.boundary_tokens,
            )
        )
        self.phase_seconds = {}
        self._results = {r: x for r, x in self._results.items() if r > commit.round}

    async def _hold_shards(self, commit: Commit) -> None:
        await self._attested()
        wanted = set(self._held(commit.plan)) if commit.plan else set()
        if self._warm and commit.plan is not None and self.peer in commit.plan.spares:
            wanted = set(layout.shard_names(self.manifest.model))
        if wanted:
            for shard in [s for s in self.outer.theta if s not in wanted]:
                del self.outer.theta[shard]
        missing = [s for s in layout.shard_names(self.manifest.model) if s in wanted - set(self.outer.theta)]
        await self._recovery.build(missing, commit.round)
        self._storage.blobs.protected = self._needed(commit.round)

        due = commit.round % self.manifest.checkpoint_rounds == 0 or self._checkpointed < 0
        due = due and commit.round > 0 and bool(self.outer.theta) and commit.round != self._checkpointed
        self._attesting = asyncio.create_task(self._attest(commit.round, dict(self.outer.theta), due))
        if due:  # the optimizer must not change meanwhile
            await self._attested()

    async def _attest(self, round: int, theta: Shards, checkpoint: bool) -> None:
        """Compares what we hold with the others': training goes on meanwhile, which does not change these arrays."""
        digests = await asyncio.get_running_loop().run_in_executor(self._quiet, _digests, theta)
        self.put(member.Digested(round, digests))
        if checkpoint:
            await self._work(self._checkpoint, round, digests)

    async def _attested(self) -> None:
        if self._attesting is not None:
            attesting, self._attesting = self._attesting, None
            await attesting

    def _settle(self, commit: Commit) -> None:
        """After `commit` is applied: says which payloads are still needed here (see peer/state/payloads.py)."""
        self._exchange.settle(commit, self._needed(commit.round))

    def _needed(self, round: int) -> set[str]:
        """The payloads that a restart would need, as far as the log is known, and until there is a checkpoint those of
        `round`."""
        base = round - 1 if self._checkpointed < 0 else self._checkpointed
        needed = self._storage.blobs.newer(self.member.head)
        needed |= {p.digest for p in self._offer.parts} if self._offer else set()
        for following in (c for r, c in self.member.commits.items() if r > base):
            needed |= {p.digest for shard in self.outer.theta for _, p, _ in following.payloads(shard)}
        return needed

    async def _leap(self, commit: Commit) -> None:
        """Far behind, forgets the state that we have if a later one costs less; `_hold_shards` builds it."""
        held, before, head = tuple(self.outer.theta), commit.round - 1, self.member.head
        if not self._recovery.is_long(held, before, head) or time.monotonic() - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = time.monotonic()
        if await self._recovery.is_shorter(held, before, head):
            self.outer.theta.clear()

    def _checkpoint(self, round: int, digests: Mapping[str, str]) -> None:
        self._storage.save_checkpoint(Checkpoint(round, self.outer.theta, self._inner_loop.optimizer()), digests)
        self._checkpointed = round
        self._exchange.drop_states(self.member.commits)

    def _last_checkpoint(self) -> None:
        round = self.member.applied
        if round >= 1 and round != self._checkpointed and self.member.phase != "applying" and self.outer.theta:
            self._checkpoint(round, _digests(self.outer.theta))


def _be_quiet() -> None:
    """Nobody waits for what this thread does: whoever computes goes first. Elsewhere than on Linux a thread has no priority."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + 10)


def _digests(theta: Shards) -> dict[str, str]:
    return {shard: layout.shard_digest(arrays) for shard, arrays in theta.items()}
