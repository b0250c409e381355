"""A volunteer's side of a round: a state machine without I/O.

    phase      event                                   next       effects
    waiting    commit applied+1 is known               applying   Apply
    waiting    the plan of applied+1 names us          training   Train
    training   Trained                                 packing    EncodeUpdate  (e = beta e + delta, encode, make durable)
    training   Failed                                  packing    Send(Withdraw), KeepInFeedback  (e = beta e + delta, durable, nothing sent)
    training   commit applied+1 is known (too late)    stopping   Stop
    stopping   Trained or Failed                       packing    KeepInFeedback
    packing    UpdateEncoded(offer)                           waiting    Send(Offer)
    packing    UpdateEncoded(None)                            waiting
    applying   Applied                                 waiting
    waiting    our offer's round is applied and known  waiting    RestoreFeedback if the commit does not include it
    waiting    nothing newer is known                  arranging  HoldShards  (hold the shards that the plan wants held)
    arranging  ShardsHeld                                waiting
    any        Digested                                the same   Send(Attest)
    waiting    RunOver, the last round is attested     done       Finish

A chain that loses a member is repaired within the round (protocol/rounds/chain_repair.py): the phase stays *training*, and the work is kept.

    phase      event                                   next       effects
    training   ChainFailed: our chain lost a neighbour       training   Send(ChainFailure), again with every Tick until there is a ChainReconfig
    training   Reconfigured, with us                         training   Send(ChainReconfig), Resume
    training   Reconfigured, without us, or nobody           stopping   Stop  (and Send(Withdraw) where the chain has ended)
    waiting    Reconfigured, with us, a spare                training   Send(ChainReconfig), Train

With `overlap = 1` a peer trains the round after its offer's while that offer is decided and applied; it follows the plan that
it expects, the present one again. `ahead` is that training's state beside the phase:

    ahead      event                                   next       effects
    none       UpdateEncoded(offer)                           running    Train  (the expected plan of the round after the offer's)
    running    Trained                                 ready
    running    Failed                                  none       (the round is trained again when its plan is known)
    running    waiting, the plan is what we expected   none       phase training, as if it had begun now
    ready      waiting, the plan is what we expected   none       EncodeUpdate
    running    waiting, the plan is another            dropped    Stop  (what was done is forgotten)
    dropped    Trained or Failed                       none
    ready      waiting, the plan is another            none

Rules that carry the promises: commits are applied one after the other, each once, in the order of their rounds (P1, P2); an
offer leaves only after it and its payloads are durable (the error feedback without them soon after), and what was not committed
goes back into the feedback before anything else is added (P3). After a crash the machine starts with `applied` of the newest durable state and
with the newest durable offer; both are resolved against the log again, so every step may be repeated (design, section 5). Over 400 lines: the tables and
everything that carries them out.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.planning import planner
from protocol.rounds.chain_repair import SLOW, reconfigured
from protocol.rounds.paxos import problem
from protocol.run.manifest import Manifest
from protocol.wire.commit import Commit, Record, is_decided
from protocol.wire.encoding import Message
from protocol.wire.plan import Plan
from protocol.wire.session import Attest, ChainFailure, ChainReconfig, LogRequest, Offer, Withdraw

RESEND_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Connected:
    """A session with a bootstrap node is open."""


@dataclass(frozen=True, slots=True)
class Committed:
    """A record arrived whose signatures are right."""

    record: Record


@dataclass(frozen=True, slots=True)
class Trained:
    """All inner steps of `round` are done."""

    round: int
    steps: int
    tokens: int
    loss: float | None


@dataclass(frozen=True, slots=True)
class Failed:
    """Training of `round` ended early, after `steps` complete steps."""

    round: int
    steps: int
    reason: str


@dataclass(frozen=True, slots=True)
class ChainFailed:
    """The chain that trains `round`, the `generation`-th of its replica, lost `peer`, or `peer` is SLOW; our work is kept."""

    round: int
    generation: int
    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class Reconfigured:
    """The leader says who the members of a chain are."""

    reconfig: ChainReconfig


@dataclass(frozen=True, slots=True)
class UpdateEncoded:
    """`offer` and its payloads are durable; without one, the error feedback is."""

    round: int
    offer: Offer | None


@dataclass(frozen=True, slots=True)
class Applied:
    """`round` is applied to every shard that is held."""

    round: int


@dataclass(frozen=True, slots=True)
class ShardsHeld:
    """The shards of the plan after `round` are held."""

    round: int


@dataclass(frozen=True, slots=True)
class Digested:
    """`digests`: of the shards that were held when `round` was arranged."""

    round: int
    digests: dict[str, str]


@dataclass(frozen=True, slots=True)
class RunOver:
    """The leader says that the run is over."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


@dataclass(frozen=True, slots=True)
class TrainOrder:
    """Effect: do the inner steps of `plan.round` as a member of replica `replica`; answer with Trained or Failed.

    `generation` is the number of chains that the replica had in this round before. `steps` > 0: the others have done this
    many inner steps and no more are needed. `resume`: the training is under way and goes on with the members that `plan`
    names now.
    """

    plan: Plan
    replica: int
    generation: int = 0
    steps: int = 0
    resume: bool = False


@dataclass(frozen=True, slots=True)
class Stop:
    """Effect: end the training of `round` at the next step; it answers as usual."""

    round: int


@dataclass(frozen=True, slots=True)
class EncodeUpdate:
    """Effect: e = beta e + delta, payloads, e -= sent; the offer and its payloads durable; answer with UpdateEncoded(offer)."""

    plan: Plan
    replica: int
    steps: int
    tokens: int
    loss: float | None


@dataclass(frozen=True, slots=True)
class KeepInFeedback:
    """Effect: e = beta e + delta of a round that sends nothing, durable; answer with UpdateEncoded(None)."""

    round: int


@dataclass(frozen=True, slots=True)
class RestoreFeedback:
    """Effect, done at once and in order: e += what `offer` would have sent."""

    offer: Offer


@dataclass(frozen=True, slots=True)
class Apply:
    """Effect: add the commit's payloads to the shards that are held, rebuild those in `rebuild` from the log instead;
    answer with Applied."""

    commit: Commit
    rebuild: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HoldShards:
    """Effect: hold what the commit's plan wants held, at the state after the commit; answer with ShardsHeld, and sooner or later
    with Digested."""

    commit: Commit


@dataclass(frozen=True, slots=True)
class Send:
    """Effect: send to every bootstrap node with a session; what matters is sent again later."""

    message: Message


@dataclass(frozen=True, slots=True)
class Finish:
    """Effect: the run is over; make the state durable and leave."""


Event = (
    Connected
    | Committed
    | Trained
    | Failed
    | ChainFailed
    | Reconfigured
    | UpdateEncoded
    | Applied
    | ShardsHeld
    | Digested
    | RunOver
    | Tick
)
Effect = TrainOrder | Stop | EncodeUpdate | KeepInFeedback | RestoreFeedback | Apply | HoldShards | Send | Finish


class ForkError(Exception):
    """A majority decided two different commits for one round: the run's history is failure and nothing more is applied."""


class Member:
    """See the table above. `applied`: the round of the durable state, -1 for none. `offer`: the newest durable offer, unless
    the feedback says that it is resolved. `feedback_round`: the newest round whose feedback is durable; it is not trained again, even
    where the state is older."""

    def __init__(
        self, manifest: Manifest, peer: str, applied: int = -1, offer: Offer | None = None, feedback_round: int = 0
    ) -> None:
        self.manifest = manifest
        self.peer = peer
        self.applied = applied
        self.phase = "waiting"
        self.commits: dict[int, Commit] = {}
        self._pending = offer
        self._attempted = max(feedback_round, offer.round if offer else 0)
        self._held_round = -1
        self._attest: Attest | None = None
        self._withdraw: Withdraw | None = None
        self._finished = False
        self._run_over = False
        self._sent_at = float("-inf")
        self._task: tuple[Plan, int] | None = None
        self._reconfig: ChainReconfig | None = None
        self._chain_failure: ChainFailure | None = None
        self.ahead = "none"
        self._expected: tuple[Plan, int] | None = None
        self._ready: Trained | None = None

    @property
    def head(self) -> int:
        """The newest round up to which every commit is known, -1 for none."""
        return max(self.commits, default=-1)

    @property
    def plan(self) -> Plan | None:
        """The plan of the round after `applied`."""
        commit = self.commits.get(self.applied)
        return commit.plan if commit else None

    def handle(self, event: Event, now: float) -> list[Effect]:
        """One step of the machine. Raises ForkError."""
        effects: list[Effect] = []
        if (
            isinstance(event, Trained | Failed)
            and self._chain_failure is not None
            and self._chain_failure.round == event.round
        ):
            self._chain_failure = None
        match event:
            case Connected():
                effects += self._resend(now)
            case Committed(record):
                effects += self._learn(record)
            case Trained() | Failed() if self._expected is not None and event.round == self._expected[0].round:
                self._ran_ahead(event)
            case Trained(round, steps, tokens, loss):
                effects += self._trained(round, steps, tokens, loss)
            case Failed(round, steps, reason):
                effects += self._failed(round, reason)
            case ChainFailed(round, generation, peer, reason):
                effects += self._chain_failed(round, generation, peer, reason)
            case Reconfigured(reconfig):
                effects += self._reconfigured(reconfig)
            case UpdateEncoded(round, offer):
                self.phase = "waiting"
                if offer is not None:
                    self._pending = offer
                    effects += [Send(offer), *self._run_ahead(offer)]
            case Applied(round):
                self.applied, self.phase = round, "waiting"
            case ShardsHeld(round):
                self._held_round, self.phase = round, "waiting"
            case Digested(round, digests):
                if self._attest is None or self._attest.round <= round:
                    self._attest = Attest(round=round, digests=digests)
                    effects.append(Send(self._attest))
            case RunOver():
                self._run_over = True
            case Tick():
                if now - self._sent_at >= RESEND_SECONDS:
                    effects += self._resend(now)
                elif self._chain_failure is not None:
                    effects.append(Send(self._chain_failure))
        return effects + self._advance()

    def _learn(self, record: Record) -> list[Effect]:
        """Only what a majority of the members voted for counts; the members are those that the commit before names."""
        commit = record.commit
        if commit.round > self.head + 1:
            return [Send(LogRequest(after=self.head))]
        before = self.commits[commit.round - 1] if commit.round else None
        if not is_decided(record, before.members if before else self.manifest.first_members):
            return []
        known = self.commits.get(commit.round)
        if known is not None and known != commit:
            raise ForkError(f"round {commit.round} has two decided commits")
        if known is None:
            reason = problem(self.manifest, before, record)
            if reason is not None:
                raise ForkError(f"the commit of round {commit.round} {reason}")
            self.commits[commit.round] = commit
        return []

    def _trained(self, round: int, steps: int, tokens: int, loss: float | None) -> list[Effect]:
        late = self.phase == "stopping"
        if self._task is None or self._task[0].round != round:
            return []
        self.phase = "packing"
        if late:
            return [KeepInFeedback(round)]
        plan, replica = self._task
        return [EncodeUpdate(plan, replica, steps, tokens, loss)]

    def _failed(self, round: int, reason: str) -> list[Effect]:
        if self._task is None or self._task[0].round != round:
            return []
        if self.phase == "stopping":
            self.phase = "packing"
            return [KeepInFeedback(round)]
        self.phase = "packing"
        self._withdraw = Withdraw(round=round, reason=reason)
        return [Send(self._withdraw), KeepInFeedback(round)]

    # --- a chain that lost a member

    def _generation(self, round: int) -> int:
        return self._reconfig.generation if self._reconfig is not None and self._reconfig.round == round else 0

    def _chain_failed(self, round: int, generation: int, peer: str, reason: str) -> list[Effect]:
        ahead = self._expected if self.ahead == "running" else None
        task = ahead or (self._task if self.phase == "training" else None)
        if task is None or task[0].round != round or generation != self._generation(round):
            return []
        failure = ChainFailure(round=round, replica=task[1], generation=generation, peer=peer, reason=reason[:200])
        if reason != SLOW:  # that chain still trains
            self._chain_failure = failure
        return [Send(failure)]

    def _reconfigured(self, reconfig: ChainReconfig) -> list[Effect]:
        plan, joins = self.plan, self.peer in reconfig.peers
        if plan is None or reconfig.round != plan.round or reconfig.round in self.commits:
            return []
        new = reconfigured(plan, reconfig)
        if reconfig.generation <= self._generation(reconfig.round) or (reconfig.peers and new is None):
            return [Send(reconfig)] if reconfig == self._reconfig else []
        trains = self.phase == "training" and self._task is not None and self._task[1] == reconfig.replica
        if trains and joins:
            assert new is not None
            self._reconfig, self._chain_failure, self._task = reconfig, None, (new, reconfig.replica)
            return [Send(reconfig), TrainOrder(new, reconfig.replica, reconfig.generation, reconfig.steps, resume=True)]
        if trains:
            self._reconfig, self._chain_failure, self.phase = reconfig, None, "stopping"
            if reconfig.peers:
                return [Stop(reconfig.round)]
            self._withdraw = Withdraw(round=reconfig.round, reason=reconfig.reason)
            return [Send(reconfig), Send(self._withdraw), Stop(reconfig.round)]
        if not joins:
            return []
        if self._attempted >= reconfig.round:  # our part of it is done
            self._reconfig = reconfig
            return [Send(reconfig)]
        ready = self.phase == "waiting" and self.ahead == "none"
        if not ready or self._held_round != self.applied:
            return []  # it is told again
        assert new is not None
        self._reconfig, self._task = reconfig, (new, reconfig.replica)
        self.phase, self._attempted = "training", reconfig.round
        return [Send(reconfig), TrainOrder(new, reconfig.replica, reconfig.generation, reconfig.steps)]

    # --- the round after the one that is being decided

    def _run_ahead(self, offer: Offer) -> list[Effect]:
        if not self.manifest.outer.overlap or self.plan is None or not offer.round < self.manifest.rounds:
            return []
        assert self._task is not None
        replicas = self._task[0].replicas  # a reconfigured chain stays as it is
        expected = Plan(round=offer.round + 1, slot=planner.following(self.manifest, self.plan), replicas=replicas)
        decided = self.commits.get(offer.round)
        if decided is not None and not _same_work(expected, decided.plan, offer.replica):
            return []
        self.ahead, self._expected = "running", (expected, offer.replica)
        return [TrainOrder(expected, offer.replica)]

    def _ran_ahead(self, event: Trained | Failed) -> None:
        if self.ahead == "running" and isinstance(event, Trained):
            self.ahead, self._ready = "ready", event
        else:
            self._forget_ahead()

    def _forget_ahead(self) -> None:
        self.ahead, self._expected, self._ready = "none", None, None

    def _catch_up(self, plan: Plan | None, expected: Plan, replica: int) -> list[Effect] | None:
        """What was done ahead becomes the work of `plan`, which is known now, or is dropped; None where nothing is left of it."""
        ready = self._ready
        if _same_work(expected, plan, replica):
            assert plan is not None
            self._forget_ahead()
            self.phase, self._attempted, self._task = "training", plan.round, (plan, replica)
            return [] if ready is None else self._trained(ready.round, ready.steps, ready.tokens, ready.loss)
        if ready is not None:
            self._forget_ahead()
            return None
        stop: list[Effect] = [Stop(expected.round)] if self.ahead == "running" else []
        self.ahead = "dropped"
        return stop

    def _resend(self, now: float) -> list[Effect]:
        self._sent_at = now
        out: list[Effect] = [Send(LogRequest(after=self.head))]
        if self._attest is not None:
            out.append(Send(self._attest))
        told = (self._reconfig, self._chain_failure, self._pending, self._withdraw)
        out += [Send(m) for m in told if m is not None and m.round == self.applied + 1]
        return out

    def _advance(self) -> list[Effect]:
        following = self.commits.get(self.applied + 1)
        if self.phase == "training" and following is not None:
            self.phase = "stopping"
            return [Stop(following.round)]
        if self.phase != "waiting":
            return []
        effects: list[Effect] = []
        if self._pending is not None and self._pending.round <= self.applied:
            commit = self.commits.get(self._pending.round)
            if commit is None:
                return []
            if not commit.includes(self.peer, self._pending.parts):
                effects.append(RestoreFeedback(self._pending))
            self._pending = None
        if following is not None:
            self.phase = "applying"
            rebuild = tuple(d.shard for d in following.diverged if d.peer == self.peer)
            return [*effects, Apply(following, rebuild)]
        commit = self.commits.get(self.applied)
        if commit is not None and self._held_round < self.applied:
            self.phase = "arranging"
            return [*effects, HoldShards(commit)]
        return effects + self._begin()

    def _begin(self) -> list[Effect]:
        """At the head of the log, with the right shards: train, or wait."""
        if self.applied >= self.manifest.rounds:
            attested = self._attest is not None and self._attest.round == self.applied
            if self._run_over and attested and not self._finished:
                self._finished = True
                self.phase = "done"
                return [Finish()]
            return []
        plan = self.plan
        if self._expected is not None and self._expected[0].round <= self.applied + 1:
            caught_up = self._catch_up(plan, *self._expected)
            if caught_up is not None:
                return caught_up
        replica = plan.replica_of(self.peer) if plan else None
        if plan is None or replica is None or self._attempted >= plan.round:
            return []
        self.phase, self._attempted, self._task = "training", plan.round, (plan, replica)
        return [TrainOrder(plan, replica)]


def _same_work(expected: Plan, plan: Plan | None, replica: int) -> bool:
    """Whether `plan` gives replica `replica` just the work that `expected` gives it."""
    return (
        plan is not None
        and (plan.round, plan.slot) == (expected.round, expected.slot)
        and len(plan.replicas) > replica
        and plan.replicas[replica] == expected.replicas[replica]
    )
