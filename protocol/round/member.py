"""A volunteer's side of a round: a state machine without I/O.

Events come in, effects go out (protocol/round/member_events.py); peer/node/rounds.py carries the effects out and
answers most of them with an event. Four rules carry the promises of docs/failure-model.md.

- Commits are applied one after the other, each once, in the order of their rounds (P1, P2). A peer that holds no shard
  has nothing to apply, and its Applied names a later round.
- Nothing is applied and no state is fetched before the log is read as far as the nodes have it, so that a newcomer
  fetches the newest state. Commits that are decided meanwhile do not begin the reading again.
- An offer leaves only after it and its payloads are durable; the error feedback without them follows soon after. What
  was not committed goes back into the feedback before anything else is added to it (P3).
- After a crash the machine starts with the newest durable state and offer. Both are compared with the log once more, so
  every step may be repeated.

What moves a round (TimeUp, TakeSeat, ChainReconfig) is believed from the node that leads it. The log names that node;
of later turns of a round (protocol/quorum/leadership.py) the nodes' heartbeats do, f + 1 of 3f + 1 members. Nor does
the leader end training before the time is over by this peer's clock, or a chain whose links work. That the run is
over, f + 1 members say.

Messages that may be lost are sent again with every session and every RESEND_SECONDS: the request for newer commits
(unless the log is being read), the newest attestation, and the open round's offer, withdrawal, failure report and
reconfiguration. A chain that loses a member is reconfigured within the round (protocol/round/chain_repair.py).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import Enum

from protocol.ledger import board, schedule
from protocol.ledger.history import History
from protocol.ledger.part_lists import root_of
from protocol.quorum.leadership import leader_of, told_turn
from protocol.quorum.table import Position, Row, Table
from protocol.round import member_events as ev
from protocol.round import stragglers
from protocol.round.accusations import FIRST_ROUNDS, LIES
from protocol.round.chain_repair import SLOW, reconfigured
from protocol.round.member_events import Effect, Event, Phase
from protocol.run.manifest import Manifest
from protocol.wire.commit import Commit, Record, liars_borne
from protocol.wire.encoding import RecordHead
from protocol.wire.plan import Plan
from protocol.wire.session import (
    Attest,
    ChainFailure,
    ChainReconfig,
    Finished,
    Heartbeat,
    LogRequest,
    Offer,
    TakeSeat,
    TimeUp,
    Withdraw,
)


class Ahead(Enum):
    """Work on the round after the open one, with `overlap`."""

    NONE = "none"
    """Nothing."""
    RUNNING = "running"
    """Its inner steps are being done."""
    READY = "ready"
    """Its inner steps are done."""
    DROPPED = "dropped"
    """It was planned otherwise; the training was told to stop and has not answered yet."""


@dataclass(frozen=True, slots=True)
class PlanAgrees:
    """Event: the round's plan is known, and it gives us just the work that we expected."""


@dataclass(frozen=True, slots=True)
class PlanDiffers:
    """Event: the round's plan is known, and it gives us other work, or none."""


OVERLAP_TABLE = Table(
    "overlap",
    Ahead,
    (
        Row(Ahead.NONE, ev.UpdateEncoded, Ahead.RUNNING, (ev.TrainOrder,), "our offer is durable, the run goes on"),
        Row(Ahead.RUNNING, ev.Trained, Ahead.READY),
        Row(Ahead.RUNNING, ev.Failed, Ahead.NONE, (), "it is trained again once the plan is known"),
        Row(Ahead.RUNNING, ev.ChainFailed, Ahead.RUNNING, (ChainFailure,)),
        Row(Ahead.RUNNING, PlanAgrees, Ahead.NONE, (), "the member goes on with it as the round's training"),
        Row(Ahead.READY, PlanAgrees, Ahead.NONE, (), "the member encodes it as the round's work"),
        Row(Ahead.RUNNING, PlanDiffers, Ahead.DROPPED, (ev.Stop,)),
        Row(Ahead.READY, PlanDiffers, Ahead.NONE, (), "what was done is forgotten"),
        Row(Ahead.DROPPED, ev.Trained, Ahead.NONE),
        Row(Ahead.DROPPED, ev.Failed, Ahead.NONE),
    ),
)


class Overlap:
    """See the module's docstring. `order` is what is trained ahead, None where nothing is."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.position = Position(OVERLAP_TABLE, Ahead.NONE)
        self.order: ev.TrainOrder | None = None
        self._result: ev.Trained | None = None

    @property
    def state(self) -> Ahead:
        return self.position.phase

    @property
    def running(self) -> ev.TrainOrder | None:
        """The order that is being carried out, as far as it is still wanted."""
        return self.order if self.state is Ahead.RUNNING else None

    def begin(self, offer: Offer, trained: ev.TrainOrder, decided: Commit | None, rounds: int) -> list[ev.TrainOrder]:
        """Begins the next round after `offer` is durable, unless it is planned otherwise or the run is over."""
        if not self.manifest.outer.overlap or not offer.round < rounds:
            return []
        replica = trained.plan.replica(offer.replica)
        if replica.following is None:
            return []
        expected = dataclasses.replace(replica, work=replica.following, following=None)
        order = ev.TrainOrder(Plan(round=offer.round + 1, replicas=(expected,)), offer.replica, idle=trained.idle)
        if decided is not None and not is_same_work(order, decided):
            return []
        self.order = order
        return self.position.step(ev.UpdateEncoded, Ahead.RUNNING, [order])

    def finished(self, event: ev.Trained | ev.Failed) -> None:
        """The training of what was ordered ahead came to its end."""
        if self.state is Ahead.RUNNING and isinstance(event, ev.Trained):
            self._result = event
            self.position.step(ev.Trained, Ahead.READY)
        else:
            self._forget(type(event))

    def chain_failed(self, failure: ChainFailure) -> list[ev.Send]:
        return self.position.stay(ev.ChainFailed, [ev.Send(failure)])

    def take(self) -> ev.Trained | None:
        """Takes the work ahead as the open round's: returns the result, or None while it is being trained."""
        result = self._result
        self._forget(PlanAgrees)
        return result

    def drop(self) -> list[ev.Stop]:
        """Drops the work ahead. While it still runs, the state is DROPPED."""
        if self.state is Ahead.READY:
            self._forget(PlanDiffers)
        elif self.state is Ahead.RUNNING:
            assert self.order is not None
            return self.position.step(PlanDiffers, Ahead.DROPPED, [ev.Stop(self.order.plan.round)])
        return []

    def _forget(self, event: type) -> None:
        self.position.step(event, Ahead.NONE)
        self.order, self._result = None, None


def is_same_work(order: ev.TrainOrder, before: Commit) -> bool:
    """Whether the plan of `before` gives the replica the same work as `order`, at the same place of the schedule."""
    plan = before.plan
    expected, found = order.plan.replica(order.replica), plan.find(order.replica) if plan is not None else None
    return (
        plan is not None
        and before.idle == order.idle
        and found is not None
        and plan.round == order.plan.round
        and expected.is_like(found)
        and expected.work == found.work
    )


FORGIVEN = 0.75
"""Share of the seconds by which a peer was asked to finish early that the next round ends earlier."""
COPIES = 2
"""A payload leaves its sender so many times (docs/protocol.md, Blobs)."""


class Deadline:
    """End of a volunteer's training, early enough for its offer, in seconds. up_bps: bits a second, 0 if unknown."""

    def __init__(self, manifest: Manifest, up_bps: int) -> None:
        self.up_bps = up_bps
        self.began = 0.0
        """When the newest commit was heard of, and so the round after it."""
        self._exact = False
        self._seconds = manifest.timing.training_seconds
        self._trained_at = self._lead = 0.0
        self._ends = self._late = 0.0

    def begin(self, now: float, exact: bool) -> None:
        """A commit was heard of. exact: as soon as it was decided, as far as is known here."""
        self.began, self._exact = now, exact

    def measured(self, up_bps: int) -> None:
        self.up_bps = up_bps

    def left(self, now: float) -> float:
        """Seconds left to train. On a slow line commits come late, which shows when we are asked to finish."""
        self._late *= FORGIVEN
        self._ends = max(now, self.began + self._seconds - min(self._lead + self._late, self._seconds / 2))
        return self._ends - now

    def left_of(self, now: float, seconds: float, size: int) -> float:
        """As `left`, for a seat with `seconds` of the round's time; others' offers have `size` bytes."""
        self.begin(now - max(0.0, self._seconds - seconds), exact=False)
        self._lead = max(self._lead, self._upload_seconds(size))
        return max(0.0, self.left(now) - stragglers.OVERRUN * self._seconds)

    def asked(self, now: float) -> float:
        """Seconds left when the leader says that the time is over, which it is not long before it is by our clock."""
        soonest = self.began + (1 - stragglers.GRACE_SHARE) * self._seconds if self._exact else now
        ends = min(self._ends, max(now, soonest))
        self._late += self._ends - ends
        self._ends = ends
        return max(0.0, ends - now)

    def trained(self, now: float) -> None:
        self._trained_at = now

    def encoded(self, now: float, offer: Offer) -> None:
        self._lead = now - self._trained_at + self._upload_seconds(sum(part.size for part in offer.parts))

    def _upload_seconds(self, size: int) -> float:
        """Until an archive has so many bytes: an uplink sends each COPIES times."""
        return COPIES * 8 * size / self.up_bps if self.up_bps else 0.0


RESEND_SECONDS = 5.0
REFUTED_ROUNDS = 3
"""Rounds in which a node gives orders without leading before the user is told; in one it may be about to lead."""
LEARN_SECONDS = 30.0
"""A newcomer that is told that the run is over only reads the log for this long, then goes on."""
SETTLED_SECONDS = 1.0
"""Without a commit, after which a newcomer takes the newest that it knows for the run's."""


class Member:
    """A volunteer in a run; `handle` is the only entry.

    applied: round of the durable state, -1 for none; offer: the newest durable one, unless resolved
    feedback_round: newest round with durable feedback, which is not trained again; up_bps: 0 if unknown
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
        self.position = Position(ev.TABLE, Phase.WAITING)
        self.overlap = Overlap(manifest)
        self.history = History(manifest)
        self.commits = self.history.commits
        self._pending = offer
        self._attempted = max(feedback_round, offer.round if offer else 0)
        self._held_round = self._seen = self._heard = -1
        self._reads = False
        self._attest: Attest | None = None
        self._withdraw: Withdraw | None = None
        self._sent_at = float("-inf")
        self._turns: dict[str, tuple[int, int]] = {}  # by node: a round, and the turn that it is in
        self._over: set[str] = set()  # nodes that say that the run is over
        self._refuted: dict[str, set[int]] = {}  # by node: the first rounds in which it gave orders and did not lead
        self._learns_until: float | None = None
        self._order: ev.TrainOrder | None = None
        self._reconfig: ChainReconfig | None = None
        self._chain_failure: ChainFailure | None = None
        self._accusations: dict[str, ChainFailure] = {}  # the newest about each peer
        self.deadline = Deadline(manifest, up_bps)

    @property
    def phase(self) -> Phase:
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
        """The newest round heard of, -1 for none; a node's word until the log is read that far."""
        return max(self._heard, self.head)

    def is_new(self, now: float) -> bool:
        """Returns whether the newest plan, of which all is applied, does not name us: we came after it was made."""
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
            case ev.Connected():
                return self._read_log(ev.Connected) + self._resend(now, FIRST_ROUNDS)
            case ev.Committed(record):
                if not self._may_be_news(record):
                    return []
                self._heard = max(self._heard, record.commit.round)
                return self._learned(ev.Committed, self.history.learn(record), now)
            case ev.LogCame(stretches):
                lacking = [self.history.learn_stretch(stretch) for stretch in stretches]
                return self._learned(ev.LogCame, any(lacking), now)
            case ev.LogRead():
                self._reads = False
                if self.head >= 0 and not schedule.is_over(self.manifest, self.commits[self.head]):
                    self._learns_until = None  # the run goes on
                return self.position.stay(ev.LogRead, [ev.Send(LogRequest(after=self.head))])
            case ev.Trained() | ev.Failed():
                return self._finished(event, now)
            case ev.Told():
                return self._told(event, now)
            case ev.ChainFailed():
                return self._chain_failed(event)
            case ev.UpdateEncoded(_, offer):
                return self._encoded(offer, now)
            case ev.Applied(round):
                self.applied = round
                return self.position.step(ev.Applied, Phase.WAITING)
            case ev.ShardsHeld(round):
                self._held_round = round
                return self.position.step(ev.ShardsHeld, Phase.WAITING)
            case ev.Digested(round, digests) if round <= self.applied:
                if self._attest is None or self._attest.round <= round:
                    self._attest = Attest(round=round, digests=digests)
                    return self.position.stay(ev.Digested, [ev.Send(self._attest)])
            case ev.Tick():
                if now - self._sent_at >= RESEND_SECONDS:
                    return self._resend(now)
                if self._chain_failure is not None:
                    return self.position.stay(ev.Tick, [ev.Send(self._chain_failure)])
        return []

    def _learned(self, event: type, lacking: bool, now: float) -> list[Effect]:
        """`lacking`: whether commits are missing, which the log has."""
        if self.head != self._seen:
            self._seen = self.head
            self.deadline.begin(now, exact=event is ev.Committed and not self._reads)
        if not lacking:
            return []
        if event is ev.LogCame:
            return self.position.stay(event, [ev.Send(LogRequest(after=self.head))])
        return self._read_log(event)

    def is_news(self, head: RecordHead) -> bool:
        """Returns whether a record with this head is to be decoded, for Committed."""
        return self._may_be_news(head) and self.history.may_learn(head)

    def _may_be_news(self, record: Record | RecordHead) -> bool:
        """Whether an honest member has signed a record that is not the next one: else a node could have us read the
        log again and again."""
        members = self.members
        if record.commit.round <= self.head + 1 or self.head < 0:
            return True
        return len(set(record.votes) & set(members)) > liars_borne(len(members))

    def _read_log(self, event: type) -> list[Effect]:
        """Begins to read the log, unless a reading is under way."""
        if self._reads:
            return []
        self._reads = True
        return self.position.stay(event, [ev.ReadLog(self.history.tip)])

    # --- what nodes say

    @property
    def members(self) -> tuple[str, ...]:
        """The nodes that decide the round after `head`."""
        return board.members_after(self.manifest, self.commits.get(self.head))

    @property
    def leader(self) -> str:
        """The node that leads the round after `head`: by the log, or in a later turn that an honest node is in."""
        members, head = self.members, self.commits.get(self.head)
        said = (self._turns.get(member, (0, 0)) for member in members)
        turn = told_turn((turn if round == self.head + 1 else 0 for round, turn in said), len(members))
        return leader_of(members, members[0] if head is None else head.leader, turn)

    @property
    def _run_over(self) -> bool:
        """Whether an honest member says that the run is over."""
        return len(self._over.intersection(self.members)) > liars_borne(len(self.members))

    def _told(self, event: ev.Told, now: float) -> list[Effect]:
        node, message = event.node, event.message
        match message:
            case Heartbeat(round=round, turn=turn):
                self._turns[node] = (round, turn)
            case Finished():
                if not self._over and self.head < 0 and self.applied < 0:
                    self._learns_until = now + LEARN_SECONDS
                self._over.add(node)
            case _ if message.round != self.head + 1:
                pass  # it is over, or its plan has not come yet: then it is told again
            case _ if node != self.leader:
                return self._unbelieved(node)
            case TimeUp(round=round):
                if self.phase is Phase.TRAINING and self._order is not None and self._order.plan.round == round:
                    return self.position.stay(TimeUp, [ev.EndIn(round, self.deadline.asked(now))])
            case TakeSeat():
                return self._seated(message, now)
            case ChainReconfig():
                return self._reconfigured(message, now)
        return []

    def _unbelieved(self, node: str) -> list[Effect]:
        """Forgets an order of a node that does not lead, or not yet, by what the others say."""
        rounds = self._refuted.setdefault(node, set())
        if len(rounds) >= REFUTED_ROUNDS or self.head + 1 in rounds:
            return []
        rounds.add(self.head + 1)
        return self.position.stay(ev.Told, [ev.Unbelieved(node)]) if len(rounds) == REFUTED_ROUNDS else []

    # --- training and its end

    def _finished(self, event: ev.Trained | ev.Failed, now: float) -> list[Effect]:
        """The inner steps of a round have ended, those of the round that is due or those that were done ahead."""
        if self._chain_failure is not None and self._chain_failure.round == event.round:
            self._chain_failure = None
        if self.overlap.order is not None and event.round == self.overlap.order.plan.round:
            self.overlap.finished(event)
            return []
        if self._order is None or self._order.plan.round != event.round:
            return []
        if self.phase is Phase.STOPPING:
            return self.position.step(type(event), Phase.ENCODING, [ev.KeepInFeedback(event.round)])
        if isinstance(event, ev.Trained):
            self.deadline.trained(now)
            return self.position.step(ev.Trained, Phase.ENCODING, [_encode(self._order, event)])
        self._withdraw = Withdraw(round=event.round, reason=event.reason)
        return self.position.step(ev.Failed, Phase.ENCODING, [ev.Send(self._withdraw), ev.KeepInFeedback(event.round)])

    def _encoded(self, offer: Offer | None, now: float) -> list[Effect]:
        if offer is None:
            return self.position.step(ev.UpdateEncoded, Phase.WAITING)
        self.deadline.encoded(now, offer)
        self._pending = offer
        assert self._order is not None
        decided, last = self.commits.get(offer.round), schedule.last_round(self.manifest, self.commits.get(self.head))
        sent = self.position.step(ev.UpdateEncoded, Phase.WAITING, [ev.Send(offer)])
        return [*sent, *self.overlap.begin(offer, self._order, decided, last)]

    def _seated(self, seat: TakeSeat, now: float) -> list[Effect]:
        """The plan names us nowhere, and the leader has given us one of its seats."""
        plan, idle = self.plan, self.phase is Phase.WAITING and self.overlap.state is Ahead.NONE
        ready = idle and self._held_round == self.applied and self._attempted <= self.applied == self.head
        replica = plan.taken(seat.replica, (self.peer,), self.manifest.model.n_layers) if plan is not None else None
        if plan is None or replica is None or replica.peers != (self.peer,) or not ready or plan.round != seat.round:
            return []  # if there is a seat for us, we are told again
        self._order, self._attempted = self._order_of(plan.seated(replica), replica.number), plan.round
        sizes = [c.size for c in self.commits[self.applied].contributions]
        left = self.deadline.left_of(now, seat.seconds, max(sizes, default=0))
        return self.position.step(TakeSeat, Phase.TRAINING, [self._order, ev.EndIn(plan.round, left)])

    # --- a chain that lost a member

    def _generation(self, round: int) -> int:
        return self._reconfig.generation if self._reconfig is not None and self._reconfig.round == round else 0

    def _chain_failed(self, event: ev.ChainFailed) -> list[Effect]:
        round, ahead = event.round, self.overlap.running
        order = ahead or (self._order if self.phase is Phase.TRAINING else None)
        if order is None or order.plan.round != round or event.generation != self._generation(round):
            return []
        failure = ChainFailure(
            round=round, replica=order.replica, generation=event.generation, peer=event.peer, reason=event.reason[:200]
        )
        if event.reason != SLOW:  # a slow chain goes on: it is told of once
            self._chain_failure = failure
        if event.reason.startswith(LIES):
            recent = {p: told for p, told in self._accusations.items() if told.round + FIRST_ROUNDS >= round}
            self._accusations = recent | {event.peer: failure}
        if ahead is not None:
            return [*self.overlap.chain_failed(failure)]
        return self.position.stay(ev.ChainFailed, [ev.Send(failure)])

    def _reconfigured(self, reconfig: ChainReconfig, now: float) -> list[Effect]:
        plan, named = self.plan, self.peer in reconfig.peers
        if plan is None or reconfig.round != plan.round:
            return []
        broken = self._chain_failure is not None and self._chain_failure.round == reconfig.round
        if not reconfig.peers and not broken and reconfig != self._reconfig:
            return []  # our chain works, or its round ends with the commit
        new = reconfigured(plan, reconfig)
        if reconfig.generation <= self._generation(reconfig.round) or (reconfig.peers and new is None):
            return self._follow(reconfig) if reconfig == self._reconfig else []
        if self.phase is Phase.TRAINING and self._order is not None and self._order.replica == reconfig.replica:
            return self._go_on(reconfig, new if named else None)
        if not named:
            return []
        if self._attempted >= reconfig.round:  # our part of it is done
            offers = self._pending is not None and self._pending.round >= reconfig.round
            if self.phase is Phase.WAITING and not offers:
                return self._cannot_follow(reconfig)
            return self._follow(reconfig)
        ready = self.phase is Phase.WAITING and self.overlap.state is Ahead.NONE
        if not ready or self._held_round != self.applied:
            return []  # it is told again
        assert new is not None
        self._reconfig, self._attempted = reconfig, reconfig.round
        self._order = self._order_of(new, reconfig.replica, reconfig.generation, reconfig.steps)
        return self.position.step(ChainReconfig, Phase.TRAINING, [ev.Send(reconfig), self._order, self._end(now)])

    def _follow(self, reconfig: ChainReconfig) -> list[Effect]:
        self._reconfig = reconfig
        return self.position.stay(ChainReconfig, [ev.Send(reconfig)])

    def _cannot_follow(self, reconfig: ChainReconfig) -> list[Effect]:
        """Withdraws a peer that trained in this round already and offers nothing."""
        self._reconfig = reconfig
        self._withdraw = Withdraw(round=reconfig.round, reason="it has trained in this round already")
        told = [ev.Send(reconfig), ev.Send(self._withdraw)]
        return self.position.step(ChainReconfig, Phase.WAITING, told)

    def _go_on(self, reconfig: ChainReconfig, new: Plan | None) -> list[Effect]:
        """The chain that we train in has other members; `new`: the plan with us among them, None where we are not."""
        self._reconfig, self._chain_failure = reconfig, None
        if new is not None:
            order = self._order_of(new, reconfig.replica, reconfig.generation, reconfig.steps)
            self._order = dataclasses.replace(order, resume=True)
            return self.position.step(ChainReconfig, Phase.TRAINING, [ev.Send(reconfig), self._order])
        if reconfig.peers:
            return self.position.step(ChainReconfig, Phase.STOPPING, [ev.Stop(reconfig.round)])
        self._withdraw = Withdraw(round=reconfig.round, reason=reconfig.reason)
        told: list[Effect] = [ev.Send(reconfig), ev.Send(self._withdraw)]
        return self.position.step(ChainReconfig, Phase.STOPPING, [*told, ev.Stop(reconfig.round)])

    # --- what follows without an event

    def _resend(self, now: float, rounds: int = 1) -> list[Effect]:
        """Messages that nodes may have missed. rounds: before the present one, of accusations."""
        self._sent_at = now
        out: list[Effect] = [] if self._reads else [ev.Send(LogRequest(after=self.head))]
        if self._attest is not None:
            out.append(ev.Send(self._attest))
        told = (self._reconfig, self._chain_failure, self._pending, self._withdraw)
        out += [ev.Send(m) for m in told if m is not None and m.round == self.applied + 1]
        accused = [
            m for m in self._accusations.values() if m.round + rounds > self.applied and m != self._chain_failure
        ]
        return [*out, *map(ev.Send, accused)]

    def _end(self, now: float) -> ev.EndIn:
        return ev.EndIn(self.head + 1, self.deadline.left(now))

    def _advance(self, now: float) -> list[Effect]:
        following = self.commits.get(self.applied + 1)
        if self.phase is Phase.TRAINING and following is not None:
            return self.position.step(None, Phase.STOPPING, [ev.Stop(self.applied + 1)])
        if self.phase is not Phase.WAITING:
            return []
        if self.is_late:
            return self.position.step(None, Phase.DONE, [ev.Finish()])
        if self._learns_until is not None and now < self._learns_until and self._order is None:
            return []  # the log will say whether it is true
        effects: list[Effect] = []
        if self._pending is not None and self._pending.round <= self.applied:
            commit = self.commits.get(self._pending.round)
            if commit is None:
                return []
            if not commit.includes(self.peer, root_of(self._pending.parts)):
                effects += self.position.stay(None, [ev.RestoreFeedback(self._pending)])
            self._pending = None
        commit = self.commits.get(self.applied)
        must_hold = commit is not None and self._held_round < self.applied
        if self._reads and (following is not None or must_hold):
            return effects
        if following is not None:
            rebuild = tuple(d.shard for d in following.diverged if d.peer == self.peer)
            return effects + self.position.step(None, Phase.APPLYING, [ev.Apply(following, rebuild)])
        if commit is not None and must_hold:
            return effects + self.position.step(None, Phase.HOLDING, [ev.HoldShards(commit)])
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

    def _order_of(self, plan: Plan, replica: int, generation: int = 0, steps: int = 0) -> ev.TrainOrder:
        return ev.TrainOrder(plan, replica, generation, steps, idle=self.commits[self.applied].idle)

    def _begin_with(self, result: ev.Trained | None, order: ev.TrainOrder, now: float) -> list[Effect]:
        """Begins `order` with the work trained ahead, finished (`result`) or going on from `now`."""
        self._order, self._attempted = order, order.plan.round
        if result is None:
            return self.position.step(None, Phase.TRAINING, [self._end(now)])
        self.deadline.trained(now)
        return self.position.step(None, Phase.ENCODING, [_encode(order, result)])

    def _leave(self, now: float) -> list[Effect]:
        """After the last round: ends when states were compared, or after the round's deadline."""
        attested = self._attest is not None and self._attest.round == self.applied
        late = now - self.deadline.began >= self.manifest.timing.round_deadline
        is_done = attested and (self._run_over or late)
        return self.position.step(None, Phase.DONE, [ev.Finish()]) if is_done else []


def _encode(order: ev.TrainOrder, result: ev.Trained) -> ev.EncodeUpdate:
    return ev.EncodeUpdate(order.plan, order.replica, result.steps, result.tokens, result.loss)
