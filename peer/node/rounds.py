"""The loop that owns a peer's state at the round boundaries, and carries out what the member machine decides.

Events come in through `put`, in any order, from training, session and timers. Effects that change state are carried out
one after the other in this loop. Training runs beside it (peer/node/training.py) and only reads θ. The loop decides
nothing: protocol/ledger/retention.py says what is kept, written and fetched, and the machine all else.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import InitVar, dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from peer import events
from peer.chain.reading import TextAhead
from peer.net.network import Network
from peer.node.background import Attester, digests
from peer.node.evaluating import Evaluator
from peer.node.log_reader import Follower, LogReader
from peer.node.moments import MomentsExchange
from peer.node.sessions import Operators, Sessions
from peer.node.training import InnerLoop, Training, add_to_feedback, encode_update
from peer.state.handover import REQUEST_BYTES, Giving, Taking
from peer.state.outer_optimizer import Outer
from peer.state.payloads import CommitsWait, Exchange, PayloadsGone
from peer.state.recovery import Recovery, WarmUp
from peer.state.storage import Checkpoint, Feedback, FeedbackWriter, Shards, Storage
from protocol.identity import short_peer
from protocol.ledger import aggregation, part_lists, retention, schedule
from protocol.ledger.credits import parts
from protocol.round import handover, member_events
from protocol.round.member import Member
from protocol.run import layout
from protocol.run.manifest import Manifest
from protocol.wire import bounds, endpoints
from protocol.wire.calls import Handover
from protocol.wire.commit import Commit, Part
from protocol.wire.session import Offer, Offered

T = TypeVar("T")
TICK_SECONDS = 1.0
DIGESTS_KEPT = 2 * retention.TURNS
"""Rounds whose digests of our own state are remembered: in each of them another peer may have written a checkpoint."""
CONFIRMED_ROUNDS = 8
"""Rounds in which a shard that the log has confirmed is not computed again."""


@dataclass(eq=False, kw_only=True)
class Rounds:
    """See the module's docstring.

    restored: the newest checkpoint, if there is one.
    threads: for work at a round boundary.
    abreast: shards whose next state is made at a time.
    up_bps: bits a second for payloads.
    warm, whole: as in `retention.held_shards`.
    """

    manifest: Manifest
    peer: str
    restored: InitVar[Checkpoint | None]
    network: Network
    sessions: Sessions
    operators: Operators
    storage: Storage
    exchange: Exchange
    inner_loop: InnerLoop
    evaluator: Evaluator
    emit: events.Emit
    threads: int
    abreast: int
    up_bps: int
    warm: bool
    whole: bool

    def __post_init__(self, restored: Checkpoint | None) -> None:
        manifest, peer, storage = self.manifest, self.peer, self.storage
        self._clock = self.network.clock
        self.outer = Outer.of(manifest, self.threads, storage.empty, self.abreast)
        if restored is not None:
            self.outer.theta = dict(restored.theta)
        found = storage.load_feedback()
        self.outer.feedback = found.feedback
        self.offer = found.offer
        """The newest durable one: after a restart it may have to be given back."""
        self._replay_offers(found)
        self.gives = True
        """Whether it gives away its feedback when it ends: not if the run keeps this peer out."""
        storage.blobs.protected = set(storage.blobs)  # until the log says what is needed
        self._seconds: dict[str, float] = {}
        self._scratch: list[NDArray[np.float32]] = []
        self._worker = ThreadPoolExecutor(1, "rounds")
        self._events: asyncio.Queue[member_events.Event] = asyncio.Queue()
        self._waiting_commits = 0  # events with commits in the queue
        self._again: member_events.Apply | member_events.HoldShards | None = None
        """What was given up until these commits are learned."""
        self._looked_at = float("-inf")
        self._checkpointed = -1 if restored is None else restored.round
        self._replayed_bytes = 0
        self._kept_round = -1  # the newest one whose offer a node has as a whole
        self._own_digests: dict[int, Mapping[str, str]] = dict(storage.states())
        self._named: tuple[int, set[str]] = (-1, set())
        """The round of which offers were named, and whose."""
        self._confirmed: dict[str, int] = {}  # the round in which the log confirmed a shard
        self._waiting_since = -1  # the newest round for which Waiting was emitted
        self._writes = False  # a checkpoint, after the newest attestation
        newest = max(found.round, *(offer.round for offer in found.since), 0)
        self.member = Member(manifest, peer, self._checkpointed, self.offer, newest, self.up_bps)
        self._log_reader = LogReader(manifest, self.network)
        self._follower = Follower(manifest, self.emit)
        self._attester = Attester(self._digested)
        self._text_ahead = TextAhead(manifest, peer, self.inner_loop.expect)
        self._training = Training(manifest, peer, self.inner_loop, self.emit, self.put, self._clock)
        back, saved = found.newest_back, storage.saved_round
        self._feedback = FeedbackWriter(storage, found.feedback, self._clock, newest, given_back=back, on_disk=saved)
        self._giving = Giving(manifest, peer, storage, self.outer, self._feedback, self._work, self.exchange.ask)
        self._taking = Taking(
            manifest,
            storage,
            self.outer,
            self._feedback,
            why_refused=self._why_not_taken,
            own_norm=self._offered_norm,
            fetch=self.exchange.fetch,
            work=self._work,
            wake=self._tick,
        )
        self._moments = MomentsExchange(manifest, peer, self.exchange, self.inner_loop)
        recovery = Recovery(manifest, self.outer, storage, self.exchange, self.member.commits, self.emit)
        self._recovery = dataclasses.replace(recovery, waits=lambda: self._waiting_commits > 0)
        self._warm_up = WarmUp(recovery, lambda: self.member.applied, self._tick)

    def put(self, event: member_events.Event) -> None:
        """Hands an event to the machine."""
        self._waiting_commits += isinstance(event, member_events.Committed | member_events.LogCame)
        self._events.put_nowait(event)

    def _tick(self) -> None:
        self.put(member_events.Tick())

    def _digested(self, event: member_events.Digested) -> None:
        if event.round % retention.checkpoint_grain(self.manifest) == 0:
            self._own_digests[event.round] = event.digests
            for old in sorted(self._own_digests)[:-DIGESTS_KEPT]:
                del self._own_digests[old]
        self.put(event)

    def set_uplink(self, bps: int) -> None:
        """Sets the rate with which offers are expected to leave."""
        self.member.deadline.measured(bps)

    def prefetch(self, node: str, offered: Offered) -> None:
        """Begins to fetch offers to the round under way, for the shards that we hold, or soon will.

        Of what the leading node names, one of each planned peer: others' words would have us fetch anything.
        """
        own = part_lists.root_of(self.offer.parts) if self.offer is not None else ""
        if any(share.root == own for share in offered.shares):
            self._kept_round = max(self._kept_round, offered.round)
        held = tuple(dict.fromkeys((*self.outer.theta, *self._warm_up.shards)))
        before = self.member.commits.get(offered.round - 1)
        plan = before.plan if before is not None else None
        if before is None or plan is None or node != self.member.leader:
            return
        if aggregation.is_aggregated(self.manifest, before):
            return  # so will this round be
        if retention.fetches_ahead(self.member.applied, held, offered.round):
            if self._named[0] != offered.round:
                self._named = offered.round, set()
            for share in offered.shares:
                if share.peer in plan.peers and share.peer not in self._named[1]:
                    self._named[1].add(share.peer)
                    self.exchange.prefetch(offered.round, share, held)

    async def run(self) -> None:
        """Until the run is over. Raises ForkError and LocalError."""
        ticker, giving = asyncio.create_task(self._tick_always()), asyncio.create_task(self._giving.run())
        await self.exchange.answer(endpoints.HANDOVER, self._taking.answer, REQUEST_BYTES)
        await self._moments.serve()
        try:
            while not await self._handle(await self._events.get()):
                self._take_warm()
        except asyncio.CancelledError:
            giving.cancel()
            await self._leave()
            raise
        finally:
            ticker.cancel(), giving.cancel()
            await self._log_reader.aclose()
            await self._training.end()
            await self._follower.aclose()
            await self._warm_up.aclose()
            await self._taking.aclose()
            await self._moments.aclose()
            try:
                await self._attester.done()
                await self._feedback.on_disk()
                await self._work(self._last_checkpoint)
            finally:
                self._worker.shutdown(wait=False)
                self._attester.close()

    async def _handle(self, event: member_events.Event) -> bool:
        """Carries out what the machine makes of an event. Whether the run is over."""
        member = self.member
        self._waiting_commits -= isinstance(event, member_events.Committed | member_events.LogCame)
        self._feedback.look()
        if isinstance(event, member_events.Tick):
            await self._giving.step(member.commits, member.plan)
            await self._taking.step()
            self._moments.follow(member.plan)
            if self._lacks_state():
                with contextlib.suppress(CommitsWait):
                    await self._hold_shards(member.commits[member.applied], whole=True)
                self._moments.prepare(member.plan, tuple(self.outer.theta))
        effects = member.handle(event, self._clock.steady())
        self._follower.follow(member.commits)
        head = member.commits.get(member.head)
        if head is not None:
            self.operators.follow(head)
        if self._events.empty():  # else a newer commit may follow
            self._text_ahead.follow(head)
        for effect in effects:
            if isinstance(effect, member_events.Finish):
                return True
            await self._do(effect)
        if self._again is not None and self._events.empty():
            again, self._again = self._again, None
            await self._do(again)
        return False

    async def _tick_always(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self._tick()

    def _lacks_state(self) -> bool:
        """Whether a peer without a plan, which can be a full replica, has to fetch the state now, so that its first
        plan has work for it. If the state is here, emits when the next plan's round begins."""
        if not self.whole or not self.member.is_new(self._clock.steady()):
            return False
        round, holds = self.member.applied, bool(self.outer.theta)
        if holds and self._waiting_since != round:
            self._waiting_since = round
            left = retention.seconds_left(self.manifest, self.member.commits[round], self._clock.wall())
            self.emit(events.Waiting(round=round + 2, seconds=left))
        return not holds

    # --- leaving

    async def _leave(self) -> None:
        """Announces that this peer leaves, waits until a node has its offer, and gives away its feedback where other
        peers train those shards."""
        if not self.gives:
            return
        until, plan, phase = self._clock.steady() + handover.LEAVE_SECONDS, self.member.plan, self.member.phase
        trained = retention.trained_shards(self.manifest, plan, self.peer)
        heirs = [s for s in trained if plan and handover.heir(self.manifest, None, plan, self.peer, s)]
        if heirs:
            self.emit(events.Leaving(seconds=handover.LEAVE_SECONDS))
        self._taking.refuse()
        if await self.sessions.leave():
            await self._offer_is_kept(until)
        await self._training.end()
        if plan is None or not heirs:
            return
        at_work = phase in (member_events.Phase.TRAINING, member_events.Phase.STOPPING)
        if at_work and self._training.result(plan.round).steps:  # the steps of a round that is not offered any more
            await self._feedback.written()
            await self._work(add_to_feedback, self.outer, self.inner_loop, heirs)
            await self._feedback.changed_between()
        await self._giving.leave(plan, self.member.deadline.up_bps, max(0.0, until - self._clock.steady()))

    async def _offer_is_kept(self, until: float) -> None:
        """Waits until a node has the whole offer to the open round, until that is decided, or until this time."""
        offer = self.offer
        if offer is None or offer.round != self.member.applied + 1:
            return
        while self._kept_round < offer.round and (left := until - self._clock.steady()) > 0:
            try:
                async with asyncio.timeout(min(left, TICK_SECONDS)):
                    event = await self._events.get()
            except TimeoutError:
                continue
            if isinstance(event, member_events.Committed) and event.record.commit.round >= offer.round:
                return

    # --- effects

    async def _do(self, effect: member_events.Effect) -> None:
        match effect:
            case member_events.Send(message):
                self.sessions.tell(message)
            case member_events.Unbelieved(node):
                self.network.warn(
                    f"bootstrap node {short_peer(node)}: it gives orders that only the leading node may give; it is not"
                    " believed, tell the operators of the run"
                )
            case member_events.ReadLog(tip):
                self._log_reader.begin(tip, self.put, lambda: self.member.newest)
            case member_events.TrainOrder(resume=True):
                self._training.resume(effect)
            case member_events.TrainOrder():
                if self._writes:  # a checkpoint; the optimizer must not change meanwhile
                    await self._attester.done()
                self._begin_training(effect)
            case member_events.EndIn(round, seconds):
                self._training.end_in(round, seconds)
            case member_events.Stop():
                self._training.stop()
            case member_events.EncodeUpdate(plan=plan):
                await self._timed("disk", self._feedback.written())
                offer = await self._timed("encode", self._work(self._encode_update, effect))
                self._feedback.changed(plan.round)
                self.emit(events.Offered(round=plan.round, bytes=sum(p.size for p in offer.parts)))
                self.put(member_events.UpdateEncoded(plan.round, offer))
            case member_events.KeepInFeedback(round):
                await self._feedback.written()
                await self._work(self._keep_in_feedback, round)
                await self._feedback.written()
                self.put(member_events.UpdateEncoded(round, None))
            case member_events.RestoreFeedback(offer):
                await self._feedback.written()
                await self._work(self._restore_feedback, offer)
                self._feedback.changed(offer.round, restored=True)
            case member_events.Apply() | member_events.HoldShards():
                try:
                    self.put(await self._follow(effect))
                except CommitsWait:
                    self._again = effect

    async def _follow(self, effect: member_events.Apply | member_events.HoldShards) -> member_events.Event:
        """Carries out what takes payloads. Raises CommitsWait, and then nothing was done."""
        if isinstance(effect, member_events.Apply):
            return member_events.Applied(await self._apply(effect.commit, effect.rebuild))
        await self._timed("hold", self._hold_shards(effect.commit))
        return member_events.ShardsHeld(effect.commit.round)

    async def _work(self, work: Callable[..., T], *args: object) -> T:
        """Runs `work` on the one thread that changes θ and the feedback, which reuses the memory that it frees."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, work, *args)

    async def _timed(self, phase: str, work: Awaitable[T]) -> T:
        began = self._clock.steady()
        try:
            return await work
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + self._clock.steady() - began

    def _begin_training(self, order: member_events.TrainOrder) -> None:
        theta = {s: self.outer.theta[s] for s in retention.trained_shards(self.manifest, order.plan, self.peer)}
        # a spare, or a peer that joins late, did not know its text, and needs its memory for the stage
        if order.plan.round == self.member.applied + 1 and order.plan is not self.member.plan:
            self._text_ahead.expect(order.plan)
            self.outer.theta = dict(theta)
        self._training.begin(order, theta, order.plan.round > self.member.applied + 1, self.member.commits)

    # --- error feedback

    def _encode_update(self, effect: member_events.EncodeUpdate) -> Offer:
        parts, shards = [], retention.trained_shards(self.manifest, effect.plan, self.peer)
        encoded = encode_update(self.outer, self.inner_loop, shards, self.manifest.sample_seed(effect.plan.round))
        for shard, (payload, norm) in zip(shards, encoded, strict=True):
            digest = self.storage.blobs.put(payload, effect.plan.round, protect=True)
            parts.append(Part(shard=shard, digest=digest, size=len(payload), norm=norm))
        self.storage.blobs.put(part_lists.pack(tuple(parts)), effect.plan.round, protect=True)
        self.offer = offer = Offer(
            round=effect.plan.round,
            replica=effect.replica,
            parts=tuple(parts),
            tokens=effect.tokens,
            steps=effect.steps,
            loss=bounds.reportable_loss(effect.loss),
        )
        self.storage.save_offer(offer, self._feedback.given_back)
        return offer

    def _keep_in_feedback(self, round: int) -> None:
        plan = self._training.plan
        if plan is not None and plan.round == round and self._training.result(round).steps:
            shards = retention.trained_shards(self.manifest, plan, self.peer)
            add_to_feedback(self.outer, self.inner_loop, shards)
            self._feedback.changed(round)
            self.offer = None

    def _replay_offers(self, found: Feedback) -> None:
        """Changes the feedback from disk as the offers since then have changed it. Raises LocalError."""
        for offer in found.since:
            for part in offer.parts:
                payload = self.storage.own_payload(offer, part)
                if offer.round > found.round:
                    self.outer.without_delta(part.shard, payload)
                if offer.round in found.given_back:
                    self.outer.restore_feedback(part.shard, payload)

    def _restore_feedback(self, offer: Offer) -> None:
        for part in offer.parts:
            self.outer.restore_feedback(part.shard, self.storage.own_payload(offer, part))

    def _why_not_taken(self, giver: str, offered: Handover) -> str | None:
        return handover.why_refused(self.manifest, self.member.commits, self.member.plan, self.peer, giver, offered)

    def _offered_norm(self, shard: str) -> float | None:
        parts = self.offer.parts if self.offer is not None else ()
        return next((part.norm for part in parts if part.shard == shard), None)

    # --- commits

    async def _apply(self, commit: Commit, rebuild: Sequence[str]) -> int:
        """Applies a commit, or where no shard is held skips to a later one. Returns its round."""
        began = self._clock.steady()
        await self._drop_state_if_longer(commit)
        try:
            payloads = await self._timed("fetch", self._recovery.payloads(commit.round, list(self.outer.theta)))
        except PayloadsGone:
            self._drop_state(commit.round)
            payloads = await self._recovery.payloads(commit.round, ())
        held, log = list(self.outer.theta), self.member.commits
        if (
            not held
        ):  # the newest commit, or the one that decides our offer; those between name no payload that is needed
            head, offer = self.member.head, self.offer
            commit = log[head if offer is None or offer.round < commit.round else min(offer.round, head)]
        scratch = None
        if not self.manifest.outer.overlap:  # no training; only this loop has θ once it is compared
            await self._attester.done()
            self.inner_loop.release()
            scratch = None if self.evaluator.reads else self._scratch
        found = {shard: payloads.by_shard[shard] for shard in held}
        await self._timed("apply", self._work(lambda: self.outer.apply_all(found, scratch, payloads.codec)))
        self._replayed_bytes += aggregation.fetched_bytes(self.manifest, commit)
        await self._rebuild(rebuild, commit.round)
        await self._work(lambda: self.exchange.settle(commit, self._needed(commit.round)))
        self._report_round(commit, self._clock.steady() - began)
        return commit.round

    async def _rebuild(self, shards: Sequence[str], round: int) -> None:
        """Computes shards again of which most peers attest other bits (`Recovery.again`), and replaces ours if the log
        gives other bits; else ours are kept, however many peers attest others."""
        rebuilt = []
        for shard in shards:
            recent = round - self._confirmed.get(shard, -CONFIRMED_ROUNDS) < CONFIRMED_ROUNDS
            if shard not in self.outer.theta or recent:
                continue
            again = await self._recovery.again(shard, round, self._own_digests)
            ours = await asyncio.to_thread(layout.shard_digest, self.outer.theta[shard])
            if again is not None and await asyncio.to_thread(layout.shard_digest, again) != ours:
                self.outer.theta[shard] = again
                rebuilt.append(shard)
                continue
            self._confirmed[shard] = round
            result = "gave ours" if again is not None else "would cost too much"
            text = (
                f"state of {shard} after round {round}: others say that it has other bits; following the log again"
                f" {result}, they are kept. If this goes on, tell the operators of the run"
            )
            self.emit(events.Warning(text=text))
        if rebuilt:
            self.emit(events.ShardRebuilt(round=round, shards=tuple(rebuilt)))

    def _report_round(self, commit: Commit, boundary_seconds: float) -> None:
        result, is_news = self._training.forget(commit.round), commit.round == self.member.head
        self._seconds |= {"boundary": boundary_seconds, "train": result.seconds, "text": result.text_seconds}
        traffic, credits = self.network.transport.traffic, self._follower.credits
        own, rank, contributors = credits.of(self.peer)
        self.emit(
            events.Round(
                round=commit.round,
                seconds={phase: round(seconds, 4) for phase, seconds in self._seconds.items()},
                bytes_sent=traffic.bytes_sent,
                bytes_received=traffic.bytes_received,
                bytes_written=self.storage.disk.written_bytes,
                boundary_forward_bytes=result.forward_bytes,
                boundary_backward_bytes=result.backward_bytes,
                boundary_tokens=result.boundary_tokens,
                holds=bool(self.outer.theta),
                rounds=schedule.last_round(self.manifest, commit),
                peers=len({peer for c in commit.contributions for peer in c.peers}),
                own_tokens=self._own_tokens(commit),
                tokens=commit.tokens,
                own_tokens_so_far=own,
                tokens_so_far=credits.tokens,
                rank=rank,
                contributors=contributors,
                loss=commit.loss,
                probation=commit.tried(self.peer),
                evaluations=commit.evaluations if is_news else (),
                scores=commit.scores if is_news else (),
            )
        )
        self._seconds = {}

    def _own_tokens(self, commit: Commit) -> int:
        before = self.member.commits.get(commit.round - 1)
        plan, layers = before.plan if before is not None else None, self.manifest.model.n_layers
        return sum(n for c in commit.contributions for peer, n in parts(c, plan, layers) if peer == self.peer)

    async def _drop_state_if_longer(self, commit: Commit) -> None:
        """Far behind the log, drops the state if a later one costs fewer bytes; `_hold_shards` builds that."""
        held, before, head = tuple(self.outer.theta), commit.round - 1, self.member.head
        long, now = self._recovery.is_long(held, before, head), self._clock.steady()
        if retention.look_is_due(long, self._looked_at, now):
            self._looked_at = now
            if await self._recovery.is_shorter(held, before, head):
                self.outer.theta.clear()

    def _drop_state(self, round: int) -> None:
        """Drops the state, which nothing that the archives keep leads on from; `_hold_shards` builds a newer one. The
        error feedback stays."""
        self.network.warn(f"payloads of round {round}: no archive keeps them any more; a newer state takes their place")
        self.outer.theta.clear()

    # --- shards

    async def _hold_shards(self, commit: Commit, *, whole: bool = False) -> None:
        await self._attester.done()
        wanted = retention.held_shards(self.manifest, commit.plan, self.peer, warm=self.warm, whole=whole)
        if wanted:
            for shard in [s for s in self.outer.theta if s not in wanted]:
                del self.outer.theta[shard]
        used = retention.trained_shards(self.manifest, commit.plan, self.peer)
        lacking = [s for s in wanted if s not in self.outer.theta]
        later = [s for s in lacking if used and s not in used]  # training does not wait for them
        await self._warm_up.want(later)
        try:
            await self._recovery.build([s for s in lacking if s not in later], commit.round)
        except PayloadsGone:  # the log went on for long meanwhile
            self._drop_state(commit.round)
        self.storage.blobs.protected = self._needed(commit.round)
        due = retention.checkpoint_is_due(
            self.manifest, self.peer, commit.round, self._checkpointed, bool(self.outer.theta), self._replayed_bytes
        )
        self._attester.begin(commit.round, dict(self.outer.theta), self._write_checkpoint if due else None)
        self._writes = due
        scores = self._follower.state.standing.scoring
        self.evaluator.follow(commit, dict(self.outer.theta), self.member.commits, scores)

    def _take_warm(self) -> None:
        """Takes over the shards of a later role, if they are there, and attests them with the others."""
        if self.member.phase in (member_events.Phase.APPLYING, member_events.Phase.HOLDING):
            return  # it is done already, and the machine has not heard of it
        found = self._warm_up.take()
        if found is not None:
            self.outer.theta.update(found)
            self._attester.begin(self.member.applied, dict(self.outer.theta))

    def _needed(self, round: int) -> set[str]:
        """The payloads that are needed here after `round` (peer/state/payloads.py)."""
        log, held, offers = self.member.commits, self.outer.theta, self.storage.offers
        needed = retention.payloads_needed(log, self.exchange.lists, round, self._checkpointed, held, offers)
        return needed | self.storage.blobs.newer(self.member.head)

    async def _write_checkpoint(self, round: int, theta: Shards, digests: Mapping[str, str]) -> None:
        await self._work(self._checkpoint, round, theta, digests)

    def _checkpoint(self, round: int, theta: Shards, digests: Mapping[str, str]) -> None:
        self.storage.save_checkpoint(Checkpoint(round, theta, self.inner_loop.optimizer()), digests)
        self._checkpointed, self._replayed_bytes = round, 0
        if not self._warm_up.shards:
            self.exchange.drop_states()

    def _last_checkpoint(self) -> None:
        round, applying = self.member.applied, self.member.phase is member_events.Phase.APPLYING
        if retention.last_checkpoint_is_due(round, self._checkpointed, bool(self.outer.theta), applying):
            self._checkpoint(round, self.outer.theta, digests(self.outer.theta))
