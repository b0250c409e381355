"""A volunteer's side of a round: a state machine without I/O.

What happens comes in as events, what is to be done goes out as effects (protocol/round/member_events.py). The loop
that carries the effects out is peer/node/rounds.py; it answers most of them with an event.

Four rules carry the promises of docs/failure-model.md.

- Commits are applied one after the other, each once, in the order of their rounds (P1, P2). Where no shard is held there
  is nothing to apply, and Applied names a later round.
- Nothing is applied and no state is fetched before the log is read as far as the nodes have it, so that a newcomer fetches
  the newest state there is. Commits that are decided meanwhile do not begin the reading again.
- An offer leaves only after it and its payloads are durable; the error feedback without them follows soon after.
  What was not committed goes back into the feedback before anything else is added to it (P3).
- After a crash the machine starts with `applied` of the newest durable state and with the newest durable offer.
  Both are compared with the log once more, so every step may be repeated.

What may be lost on the way is sent again with every new session and every RESEND_SECONDS: the request for newer
commits, unless the log is being read, the newest attestation, and of the open round the offer, the withdrawal, the failure and the reconfiguration
of our chain.

A chain that loses a member is reconfigured within the round (protocol/round/chain_repair.py): the phase stays
TRAINING, and the work is kept. With `overlap = 1` the next round is trained while this one is decided
(protocol/round/overlap.py).

Long because all events of a volunteer meet here; what of it is a rule has a module of its own.
"""

from __future__ import annotations

import dataclasses

from protocol.ledger import schedule
from protocol.ledger.history import History
from protocol.ledger.part_lists import root_of
from protocol.quorum.table import Position
from protocol.round.chain_repair import SLOW, reconfigured
from protocol.round.deadline import Deadline
from protocol.round.member_events import (
    TABLE,
    Applied,
    Apply,
    ChainFailed,
    Committed,
    Connected,
    Digested,
    Effect,
    EncodeUpdate,
    EndIn,
    Event,
    Failed,
    Finish,
    HoldShards,
    KeepInFeedback,
    LogCame,
    LogRead,
    Phase,
    ReadLog,
    Reconfigured,
    RestoreFeedback,
    RunOver,
    Seated,
    Send,
    ShardsHeld,
    Stop,
    Tick,
    TimeUp,
    Trained,
    TrainOrder,
    UpdateEncoded,
)
from protocol.round.overlap import Ahead, Overlap, is_same_work
from protocol.run.manifest import Manifest
from protocol.wire.plan import Plan
from protocol.wire.session import Attest, ChainFailure, ChainReconfig, LogRequest, Offer, Withdraw

RESEND_SECONDS = 5.0
LEARN_SECONDS = 30.0
"""That a newcomer whom a node tells that the run is over only reads the log, before it goes on as if nobody had said so."""
SETTLED_SECONDS = 1.0
"""Without a commit, after which a newcomer takes the newest that it knows for the run's."""


class Member:
    """A volunteer in a run; `handle` is the only entry. `commits`: those that count, by round.

    `applied`: the round of the durable state, -1 for none. `offer`: the newest durable offer, unless the durable
    feedback says that it is resolved. `feedback_round`: the newest round whose feedback is durable; it is not trained
    again, even where the state is older. `up_bps`: bits a second that offers leave with, 0 where that is unknown.
    """

    def __init__(
        self,
        manifest: Manifest,
        peer: str,
        applied: int = -1,
        offer: Offer | None = None,
        feedback_round: int = 0,
        up_bps: int = 0,
    ) -> None:
        self.manifest = manifest
        self.peer = peer
        self.applied = applied
        self.position = Position(TABLE, Phase.WAITING)
        self.overlap = Overlap(manifest)
        self.history = History(manifest)
        self.commits = self.history.commits
        self._pending = offer
        self._attempted = max(feedback_round, offer.round if offer else 0)
        self._held_round = self._seen = self._heard = -1
        self._reads = False
        self._attest: Attest | None = None
        self._withdraw: Withdraw | None = None
        self._run_over, self._sent_at = False, float("-inf")
        self._learns_until: float | None = None
        self._order: TrainOrder | None = None
        self._reconfig: ChainReconfig | None = None
        self._chain_failure: ChainFailure | None = None
        self.deadline = Deadline(manifest, up_bps)

    @property
    def phase(self) -> Phase:
        """What this volunteer is doing."""
        return self.position.phase

    @property
    def head(self) -> int:
        """The newest round up to which every commit counts, -1 for none."""
        return self.history.head

    @property
    def plan(self) -> Plan | None:
        """The plan of the round after `applied`."""
        commit = self.commits.get(self.applied)
        return commit.plan if commit else None

    @property
    def is_late(self) -> bool:
        """Whether the run was over before we had any part in it: a node said so at once, and its log says the same."""
        came_late = self._learns_until is not None and self._order is None
        return came_late and self.applied < self.head and schedule.is_over(self.manifest, self.commits.get(self.head))

    @property
    def newest(self) -> int:
        """The newest round of which anything was heard, -1 for none: a node's word, as long as the log is not read so far."""
        return max(self._heard, self.head)

    def is_new(self, now: float) -> bool:
        """Whether the newest plan, of which all is applied, does not name us: we came after it was made."""
        plan, settled = self.plan, now - self.deadline.began >= SETTLED_SECONDS
        return (
            self.phase is Phase.WAITING
            and settled
            and not self._reads
            and self.applied == self.head
            and not (plan is None or plan.names(self.peer))
        )

    def handle(self, event: Event, now: float) -> list[Effect]:
        """One step of the machine; `now` is in seconds on any steady clock. Raises ForkError."""
        return self._react(event, now) + self._advance(now)

    def _react(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Connected():
                return self._read_log(Connected) + self._resend(now)
            case Committed(record):
                self._heard = max(self._heard, record.commit.round)
                return self._learned(Committed, self.history.learn(record), now)
            case LogCame(stretches):
                lacking = [self.history.learn_stretch(stretch) for stretch in stretches]
                return self._learned(LogCame, any(lacking), now)
            case LogRead():
                self._reads = False
                return self.position.stay(LogRead, [Send(LogRequest(after=self.head))])
            case Trained() | Failed():
                return self._finished(event, now)
            case TimeUp(round):
                if self.phase is Phase.TRAINING and self._order is not None and self._order.plan.round == round:
                    self.deadline.asked(now)
                    return self.position.stay(TimeUp, [EndIn(round, 0.0)])
            case Seated():
                return self._seated(event, now)
            case ChainFailed():
                return self._chain_failed(event)
            case Reconfigured(reconfig):
                return self._reconfigured(reconfig, now)
            case UpdateEncoded(_, offer):
                return self._encoded(offer, now)
            case Applied(round):
                self.applied = round
                return self.position.step(Applied, Phase.WAITING)
            case ShardsHeld(round):
                self._held_round = round
                return self.position.step(ShardsHeld, Phase.WAITING)
            case Digested(round, digests) if round <= self.applied:
                if self._attest is None or self._attest.round <= round:
                    self._attest = Attest(round=round, digests=digests)
                    return self.position.stay(Digested, [Send(self._attest)])
            case RunOver():
                if not self._run_over and self.head < 0 and self.applied < 0:
                    self._learns_until = now + LEARN_SECONDS
                self._run_over = True
            case Tick():
                if now - self._sent_at >= RESEND_SECONDS:
                    return self._resend(now)
                if self._chain_failure is not None:
                    return self.position.stay(Tick, [Send(self._chain_failure)])
        return []

    def _learned(self, event: type, lacking: bool, now: float) -> list[Effect]:
        """`lacking`: whether commits are missing, which the log has."""
        if self.head != self._seen:
            self._seen, self.deadline.began = self.head, now
        if not lacking:
            return []
        if event is LogCame:
            return self.position.stay(event, [Send(LogRequest(after=self.head))])
        return self._read_log(event)

    def _read_log(self, event: type) -> list[Effect]:
        """What is asked for by the reading that is under way is not asked for again."""
        if self._reads:
            return []
        self._reads = True
        return self.position.stay(event, [ReadLog(self.history.tip)])

    # --- training and its end

    def _finished(self, event: Trained | Failed, now: float) -> list[Effect]:
        """The inner steps of a round have ended, those of the round that is due or those that were done ahead."""
        if self._chain_failure is not None and self._chain_failure.round == event.round:
            self._chain_failure = None
        if self.overlap.order is not None and event.round == self.overlap.order.plan.round:
            self.overlap.finished(event)
            return []
        if self._order is None or self._order.plan.round != event.round:
            return []
        if self.phase is Phase.STOPPING:
            return self.position.step(type(event), Phase.ENCODING, [KeepInFeedback(event.round)])
        if isinstance(event, Trained):
            self.deadline.trained(now)
            return self.position.step(Trained, Phase.ENCODING, [_encode(self._order, event)])
        self._withdraw = Withdraw(round=event.round, reason=event.reason)
        return self.position.step(Failed, Phase.ENCODING, [Send(self._withdraw), KeepInFeedback(event.round)])

    def _encoded(self, offer: Offer | None, now: float) -> list[Effect]:
        if offer is None:
            return self.position.step(UpdateEncoded, Phase.WAITING)
        self.deadline.encoded(now, offer)
        self._pending = offer
        assert self._order is not None
        decided, last = self.commits.get(offer.round), schedule.last_round(self.manifest, self.commits.get(self.head))
        sent = self.position.step(UpdateEncoded, Phase.WAITING, [Send(offer)])
        return [*sent, *self.overlap.begin(offer, self._order, decided, last)]

    def _seated(self, seat: Seated, now: float) -> list[Effect]:
        """The plan names us nowhere, and the leader has given us one of its seats."""
        plan, idle = self.plan, self.phase is Phase.WAITING and self.overlap.state is Ahead.NONE
        ready = idle and self._held_round == self.applied and self._attempted <= self.applied == self.head
        replica = plan.taken(seat.replica, (self.peer,), self.manifest.model.n_layers) if plan is not None else None
        if plan is None or replica is None or replica.peers != (self.peer,) or not ready or plan.round != seat.round:
            return []  # if there is a seat for us, we are told again
        self._order, self._attempted = self._order_of(plan.seated(replica), replica.number), plan.round
        sizes = [sum(share.size for share in c.shares) for c in self.commits[self.applied].contributions]
        left = self.deadline.left_of(now, seat.seconds, max(sizes, default=0))
        return self.position.step(Seated, Phase.TRAINING, [self._order, EndIn(plan.round, left)])

    # --- a chain that lost a member

    def _generation(self, round: int) -> int:
        return self._reconfig.generation if self._reconfig is not None and self._reconfig.round == round else 0

    def _chain_failed(self, event: ChainFailed) -> list[Effect]:
        round, ahead = event.round, self.overlap.running
        order = ahead or (self._order if self.phase is Phase.TRAINING else None)
        if order is None or order.plan.round != round or event.generation != self._generation(round):
            return []
        failure = ChainFailure(
            round=round, replica=order.replica, generation=event.generation, peer=event.peer, reason=event.reason[:200]
        )
        if event.reason != SLOW:  # a slow chain goes on: it is told of once
            self._chain_failure = failure
        if ahead is not None:
            return [*self.overlap.chain_failed(failure)]
        return self.position.stay(ChainFailed, [Send(failure)])

    def _reconfigured(self, reconfig: ChainReconfig, now: float) -> list[Effect]:
        plan, named = self.plan, self.peer in reconfig.peers
        if plan is None or reconfig.round != plan.round or reconfig.round in self.commits:
            return []
        new = reconfigured(plan, reconfig)
        if reconfig.generation <= self._generation(reconfig.round) or (reconfig.peers and new is None):
            return self._follow(reconfig) if reconfig == self._reconfig else []
        if self.phase is Phase.TRAINING and self._order is not None and self._order.replica == reconfig.replica:
            return self._go_on(reconfig, new if named else None)
        if not named:
            return []
        if self._attempted >= reconfig.round:  # our part of it is done
            return self._follow(reconfig)
        ready = self.phase is Phase.WAITING and self.overlap.state is Ahead.NONE
        if not ready or self._held_round != self.applied:
            return []  # it is told again
        assert new is not None
        self._reconfig, self._attempted = reconfig, reconfig.round
        self._order = self._order_of(new, reconfig.replica, reconfig.generation, reconfig.steps)
        return self.position.step(Reconfigured, Phase.TRAINING, [Send(reconfig), self._order, self._end(now)])

    def _follow(self, reconfig: ChainReconfig) -> list[Effect]:
        self._reconfig = reconfig
        return self.position.stay(Reconfigured, [Send(reconfig)])

    def _go_on(self, reconfig: ChainReconfig, new: Plan | None) -> list[Effect]:
        """The chain that we train in has other members; `new`: the plan with us among them, None where we are not."""
        self._reconfig, self._chain_failure = reconfig, None
        if new is not None:
            order = self._order_of(new, reconfig.replica, reconfig.generation, reconfig.steps)
            self._order = dataclasses.replace(order, resume=True)
            return self.position.step(Reconfigured, Phase.TRAINING, [Send(reconfig), self._order])
        if reconfig.peers:
            return self.position.step(Reconfigured, Phase.STOPPING, [Stop(reconfig.round)])
        self._withdraw = Withdraw(round=reconfig.round, reason=reconfig.reason)
        told: list[Effect] = [Send(reconfig), Send(self._withdraw)]
        return self.position.step(Reconfigured, Phase.STOPPING, [*told, Stop(reconfig.round)])

    # --- what follows without an event

    def _resend(self, now: float) -> list[Effect]:
        self._sent_at = now
        out: list[Effect] = [] if self._reads else [Send(LogRequest(after=self.head))]
        if self._attest is not None:
            out.append(Send(self._attest))
        told = (self._reconfig, self._chain_failure, self._pending, self._withdraw)
        out += [Send(m) for m in told if m is not None and m.round == self.applied + 1]
        return out

    def _end(self, now: float) -> EndIn:
        return EndIn(self.head + 1, self.deadline.left(now))

    def _advance(self, now: float) -> list[Effect]:
        following = self.commits.get(self.applied + 1)
        if self.phase is Phase.TRAINING and following is not None:
            return self.position.step(None, Phase.STOPPING, [Stop(self.applied + 1)])
        if self.phase is not Phase.WAITING:
            return []
        if self.is_late:
            return self.position.step(None, Phase.DONE, [Finish()])
        if self._learns_until is not None and now < self._learns_until and self._order is None:
            return []  # the log will say whether it is true
        effects: list[Effect] = []
        if self._pending is not None and self._pending.round <= self.applied:
            commit = self.commits.get(self._pending.round)
            if commit is None:
                return []
            if not commit.includes(self.peer, root_of(self._pending.parts)):
                effects += self.position.stay(None, [RestoreFeedback(self._pending)])
            self._pending = None
        commit = self.commits.get(self.applied)
        must_hold = commit is not None and self._held_round < self.applied
        if self._reads and (following is not None or must_hold):
            return effects
        if following is not None:
            rebuild = tuple(d.shard for d in following.diverged if d.peer == self.peer)
            return effects + self.position.step(None, Phase.APPLYING, [Apply(following, rebuild)])
        if commit is not None and must_hold:
            return effects + self.position.step(None, Phase.HOLDING, [HoldShards(commit)])
        return effects + (self._begin(now) if not schedule.is_over(self.manifest, commit) else self._leave(now))

    def _begin(self, now: float) -> list[Effect]:
        """At the head of the log, with the right shards: trains, or waits."""
        plan, ahead = self.plan, self.overlap.order
        if ahead is not None and ahead.plan.round <= self.applied + 1:
            if plan is not None and is_same_work(ahead, self.commits[self.applied]):
                return self._begin_with(self.overlap.take(), self._order_of(plan, ahead.replica), now)
            stop = self.overlap.drop()
            if self.overlap.state is not Ahead.NONE:
                return [*stop]
        replica = plan.replica_of(self.peer) if plan else None
        if plan is None or replica is None or self._attempted >= plan.round:
            return []
        self._order, self._attempted = self._order_of(plan, replica), plan.round
        return self.position.step(None, Phase.TRAINING, [self._order, self._end(now)])

    def _order_of(self, plan: Plan, replica: int, generation: int = 0, steps: int = 0) -> TrainOrder:
        """To train the round after `applied`."""
        return TrainOrder(plan, replica, generation, steps, idle=self.commits[self.applied].idle)

    def _begin_with(self, result: Trained | None, order: TrainOrder, now: float) -> list[Effect]:
        """What was trained ahead is the work of `order`: it is done, or goes on as if it had begun now."""
        self._order, self._attempted = order, order.plan.round
        if result is None:
            return self.position.step(None, Phase.TRAINING, [self._end(now)])
        self.deadline.trained(now)
        return self.position.step(None, Phase.ENCODING, [_encode(order, result)])

    def _leave(self, now: float) -> list[Effect]:
        """After the last round: when the others' states are compared, or no node has said so for as long as one waits for anybody."""
        attested = self._attest is not None and self._attest.round == self.applied
        late = now - self.deadline.began >= self.manifest.timing.round_deadline
        is_done = attested and (self._run_over or late)
        return self.position.step(None, Phase.DONE, [Finish()]) if is_done else []


def _encode(order: TrainOrder, result: Trained) -> EncodeUpdate:
    return EncodeUpdate(order.plan, order.replica, result.steps, result.tokens, result.loss)
