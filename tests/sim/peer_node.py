"""The simulated volunteer: the production Member around a disk, a memory and a slow, unreliable trainer.

Disk: `checkpoint` (round and theta, written at arbitrary moments), `offer` (the newest), `record` (the error feedback after a
round was packed, or after its offer was given back; written some time after the offer), `payloads`. Memory: theta, the feedback, the pseudo-gradient of the training that just ended.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from protocol.planning import memory
from protocol.planning.partition import Candidate
from protocol.rounds.member import ForkError, Member
from protocol.rounds.member_events import (
    Applied,
    Apply,
    ChainFailed,
    Committed,
    Connected,
    Digested,
    Effect,
    EncodeUpdate,
    Event,
    Failed,
    Finish,
    HoldShards,
    KeepInFeedback,
    Reconfigured,
    RestoreFeedback,
    RunOver,
    Send,
    ShardsHeld,
    Stop,
    Tick,
    Trained,
    TrainOrder,
    UpdateEncoded,
)
from protocol.rounds.overlap import Ahead
from protocol.run import layout
from protocol.wire.commit import Commit, Part, Record
from protocol.wire.encoding import Message
from protocol.wire.plan import Plan
from protocol.wire.session import Attest, ChainReconfig, Finished, Heartbeat, LogRequest, Offer
from tests.sim import ledger
from tests.sim.ledger import SIZE, ZERO, Entry, Vector, Violation
from tests.sim.world import Node

if TYPE_CHECKING:
    from tests.sim.bootstrap_node import BootstrapNode
    from tests.sim.swarm import Swarm

SPEEDS = (0, 10**5, 2 * 10**5, 10**6)
"""Operations a second that a peer announces; so slow that moving blocks pays."""
TICK_SECONDS = 2.0
"""Also the time between two signs of life."""


@dataclass(frozen=True, slots=True)
class Written:
    """The error feedback after `round`."""

    round: int
    feedback: dict[str, Vector]
    restored_offer: bool = False


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A state: `theta` after `round`."""

    round: int
    theta: dict[str, Vector]


class PeerNode(Node):
    """See the module's text."""

    member_class: type[Member] = Member

    def __init__(self, swarm: Swarm, candidate: Candidate, speed: float) -> None:
        super().__init__(swarm.world, candidate.peer)
        self.swarm = swarm
        self.candidate = candidate
        self.speed = speed
        self.checkpoint: Checkpoint | None = None
        self.record = Written(0, {})
        self.offer: Offer | None = None
        self.payloads: dict[str, Vector] = {}
        self.corrupted: set[str] = set()
        self.finished = False
        self.lost()

    def lost(self) -> None:
        for name, session in getattr(self, "sessions", {}).items():
            node = self.swarm.nodes[name]
            node.post(self.world.rng.uniform(0.0, 2.0), node.closed, self.name, session)
        self.sessions: dict[str, int] = {}
        self.turn = 0
        self.round = -1
        self.theta: dict[str, Vector] = {}
        self.feedback: dict[str, Vector] = {}
        self.delta: dict[str, Vector] = {}
        self.volatile: dict[str, Vector] = {}
        self.writing: Callable[[], None] | None = None
        self.job: tuple[Plan, int, int] | None = None  # plan, replica, generation
        self.swarm.left(self.name)

    def started(self) -> None:
        if self.checkpoint:
            self.round, self.theta = self.checkpoint.round, dict(self.checkpoint.theta)
        self.feedback = dict(self.record.feedback)
        offer = self.offer
        if offer and (
            offer.round < self.record.round or (offer.round == self.record.round and self.record.restored_offer)
        ):
            offer = None
        if offer and offer.round > self.record.round:
            self.world.stats["without delta"] += 1
            for part in offer.parts:
                e = ledger.scale(self.feedback.get(part.shard, ZERO), self.swarm.ledger.beta)
                self.feedback[part.shard] = ledger.add(e, self.payloads[part.digest], -1)
            self.record = Written(offer.round, dict(self.feedback))
        self.member = self.member_class(self.swarm.manifest, self.name, self.round, offer, self.record.round)
        for name in self.swarm.nodes:
            self.later(self.world.rng.uniform(0.1, 2.0), self.connect, name)
        self.later(self.world.rng.uniform(0.0, TICK_SECONDS), self.tick)

    # --- the sessions

    def connect(self, name: str) -> None:
        node = self.swarm.nodes[name]
        if name in self.sessions:
            return
        if not node.alive or self.world.parted(self.name, name):
            self.later(self.world.rng.uniform(0.5, 3.0), self.connect, name)
            return
        self.sessions[name] = self.swarm.new_session()
        node.guarded(node.opened, self.name, self.sessions[name])
        self.feed(Connected())

    def closed(self, name: str, session: int) -> None:
        if self.sessions.get(name) == session:
            del self.sessions[name]
            self.later(self.world.rng.expovariate(1 / 5.0), self.connect, name)

    def tick(self) -> None:
        weather = self.world.weather
        if self.world.chance(weather.kill):
            self.trace("KILLED")
            self.die()
            return
        for name, session in list(self.sessions.items()):
            if self.world.chance(weather.disconnect):
                self.trace(f"disconnects from {name}")
                node = self.swarm.nodes[name]
                node.post(self.world.rng.uniform(0.0, 5.0), node.closed, self.name, session)
                self.closed(name, session)
        if self.swarm.speeds.random() < 0.02:
            self.candidate = dataclasses.replace(self.candidate, speed_flops=self.swarm.speeds.choice(SPEEDS))
            for name in self.sessions:
                node = self.swarm.nodes[name]
                node.post(self.swarm.speeds.uniform(0.0, 5.0), node.announced, self.name)
        early = self.round < self.swarm.manifest.rounds
        if early and self.theta and not self.corrupted and self.world.chance(weather.corrupt):
            shard = self.world.rng.choice(sorted(self.theta))
            self.trace(f"memory error in {shard}")
            self.theta[shard] = ledger.add(
                self.theta[shard], (Fraction(self.world.rng.randint(1, 10**9)), Fraction(0), Fraction(0))
            )
            self.corrupted.add(shard)
        self.tell(Heartbeat(phase=self.member.phase.value, round=self.round))
        self.feed(Tick())
        self.later(TICK_SECONDS, self.tick)

    def tell(self, message: Message) -> None:
        names = list(self.sessions)
        if isinstance(message, LogRequest) and names:
            self.turn += 1
            names = [names[self.turn % len(names)]]
        for name in names:
            self.tell_node(self.swarm.nodes[name], message)

    def tell_node(self, node: BootstrapNode, message: Message) -> None:
        self.world.send(self.name, node.name, message, lambda m: node.post(0.0, node.receive, self.name, m))

    def receive(self, message: Message | Record) -> None:
        match message:
            case Record():
                self.swarm.ledger.saw(message.commit, self.name)
                self.feed(Committed(message))
            case Finished():
                self.feed(RunOver())
            case ChainReconfig():
                self.feed(Reconfigured(message))
            case _:
                pass

    # --- the machine

    def feed(self, event: Event) -> None:
        try:
            effects = self.member.handle(event, self.world.now)
        except ForkError as error:
            raise Violation("P2", f"{self.name}: {error}") from None
        for effect in effects:
            self.carry_out(effect)

    def carry_out(self, effect: Effect) -> None:
        rng = self.world.rng
        match effect:
            case TrainOrder(plan, replica, generation, steps, resume=True):
                self.boundary("before Resume")
                if self.job is not None:  # else its answer is under way
                    self.train(plan, replica, generation, steps)
            case TrainOrder(plan, replica, generation, steps):
                self.boundary("before Train")
                self.train(plan, replica, generation, steps)
                self.boundary("after Train")
            case Stop():
                self.world.stats["ahead in vain"] += self.member.overlap.state is Ahead.DROPPED
                self.later(rng.uniform(0.0, 1.0), self.answer, rng.choice((0, 1, 2)), "stopped")
            case EncodeUpdate(plan, replica, steps, tokens, loss):
                self.boundary("before EncodeUpdate")
                self.later(rng.uniform(0.0, 1.0), self.pack, plan, replica, steps, tokens, loss)
            case KeepInFeedback(round):
                self.boundary("before KeepInFeedback")
                self.later(rng.uniform(0.0, 1.0), self.fold, round)
            case RestoreFeedback(offer):
                self.boundary("before RestoreFeedback")
                self.restore_feedback(offer)
                self.boundary("after RestoreFeedback")
            case Apply(commit, rebuild):
                self.boundary("before Apply")
                self.apply(commit, rebuild)
            case HoldShards(commit):
                self.boundary("before HoldShards")
                self.arrange(commit)
            case Send(LogRequest() as message):
                self.tell(message)
            case Send(message):
                self.boundary("before Send")
                self.tell(message)
                self.boundary("after Send")
                if isinstance(message, Attest):
                    self.attested(message)
            case Finish():
                self.boundary("before Finish")
                self.written()
                self.write_checkpoint()
                self.trace("finishes")
                self.finished, self.alive = True, False

    # --- training

    def train(self, plan: Plan, replica: int, generation: int, steps: int) -> None:
        self.trace(f"trains round {plan.round} in replica {replica}, generation {generation}")
        self.job = (plan, replica, generation)
        self.world.stats["ahead"] += plan.round > self.member.applied + 1
        if steps:
            self.later(self.world.rng.uniform(0.0, 1.0), self.finish, generation, steps)
        else:
            self.swarm.joins(self, plan, replica, generation)

    def finish(self, generation: int, steps: int) -> None:
        """The inner steps are done, as far as this chain is still the one of `generation`."""
        if self.job is not None and self.job[2] == generation:
            self.answer(steps, "")

    def broke(self, round: int, replica: int, generation: int, who: str) -> None:
        """The chain lost a member; the work is kept until somebody says how it goes on."""
        if self.job is not None and (self.job[0].round, *self.job[1:]) == (round, replica, generation):
            self.trace(f"lost {who} in round {round}, generation {generation}")
            self.feed(ChainFailed(round, generation, who, "lost"))

    def answer(self, steps: int, reason: str) -> None:
        """Training is over after `steps` steps; with a `reason` it was cut short."""
        if self.job is None:
            return
        (plan, replica, _), self.job = self.job, None
        rng = self.world.rng
        loud = 1000 if rng.random() < 0.02 else 1
        self.delta = {
            shard: tuple(Fraction(rng.randint(-9, 9) * loud) for _ in range(SIZE)) if steps else ZERO
            for shard in self.trained_shards(plan, replica)
        }
        if reason and not (reason == "stopped" and steps):
            self.feed(Failed(plan.round, steps, reason))
        else:
            tokens = steps * self.swarm.manifest.train.step_tokens
            self.feed(Trained(plan.round, steps, tokens, rng.random()))

    def trained_shards(self, plan: Plan, replica: int) -> tuple[str, ...]:
        stage = plan.replicas[replica].stage_of(self.name)
        return memory.stage_shards(self.swarm.manifest, stage.first, stage.last)

    # --- the feedback: pack, fold, give back

    def accumulate(self) -> dict[str, Vector]:
        """The feedback with this round's work: e = beta e + delta."""
        out = dict(self.feedback)
        for shard, delta in self.delta.items():
            before = self.feedback.get(shard, ZERO)
            self.swarm.ledger.check_feedback(self.name, shard, before)
            out[shard] = ledger.add(ledger.scale(before, self.swarm.ledger.beta), delta)
        return out

    def take(self, feedback: dict[str, Vector], shard: str) -> tuple[Part, Vector]:
        """Takes a payload out of the feedback: any part of it, rounded in any way."""
        e = feedback[shard]
        rounded = [Fraction(round(x)) for x in e]
        sent = tuple(self.world.rng.choice((Fraction(0), r, x)) for r, x in zip(rounded, e, strict=True))
        feedback[shard] = ledger.add(e, sent, -1)
        digest = ledger.digest(shard, sent)
        self.swarm.ledger.payloads[digest] = sent
        norm = math.sqrt(sum(float(x) ** 2 for x in sent))
        return Part(shard=shard, digest=digest, size=SIZE, norm=norm), sent

    def pack(self, plan: Plan, replica: int, steps: int, tokens: int, loss: float | None) -> None:
        self.written()
        feedback = self.accumulate()
        taken = [self.take(feedback, shard) for shard in self.delta]
        parts = tuple(part for part, _ in taken)
        offer = Offer(round=plan.round, replica=replica, parts=parts, tokens=tokens, steps=steps, loss=loss)
        self.persist(feedback, offer, {part.digest: sent for part, sent in taken})
        self.later(self.world.rng.uniform(0.0, 1.0), self.packed, plan.round, offer)

    def fold(self, round: int) -> None:
        self.world.stats["folds"] += 1
        self.written()
        self.feedback = self.accumulate()
        self.write(round)
        self.written()
        self.later(self.world.rng.uniform(0.0, 1.0), self.packed, round, None)

    def persist(self, feedback: dict[str, Vector], offer: Offer, payloads: dict[str, Vector]) -> None:
        """Payloads, then the offer, then the feedback; until that is written, the round's work counts as zero."""
        self.payloads.update(payloads)
        self.boundary("payload durable")
        self.offer = offer
        for part in offer.parts:
            self.swarm.ledger.durable(self.name, part.shard, Entry(offer.round, ZERO, part))
        self.feedback = feedback
        self.boundary("offer durable")
        self.write(offer.round, {part.shard: part for part in offer.parts})

    def write(self, round: int, parts: dict[str, Part] | None = None) -> None:
        """Begins to write the feedback after the work of `round`."""
        feedback, work = dict(self.feedback), dict(self.delta)

        def write() -> None:
            self.record = Written(round, feedback)
            for shard, delta in work.items():
                part = (parts or {}).get(shard)
                self.swarm.ledger.durable(self.name, shard, Entry(round, delta, part), again=part is not None)
            self.boundary("record durable")

        self.begin(write)

    def begin(self, write: Callable[[], None]) -> None:
        self.writing = write
        self.later(self.world.rng.uniform(0.0, 3.0), self.written, write)

    def written(self, this: Callable[[], None] | None = None) -> None:
        """What is being written is on the disk now (of `this`, if it is not already)."""
        writing = self.writing
        if writing is not None and this in (None, writing):
            self.writing = None
            writing()

    def packed(self, round: int, offer: Offer | None) -> None:
        self.boundary("before UpdateEncoded")
        self.feed(UpdateEncoded(round, offer))

    def restore_feedback(self, offer: Offer) -> None:
        self.world.stats["give-backs"] += 1
        self.written()
        for part in offer.parts:
            if part.digest not in self.payloads:
                raise Violation("P3", f"{self.name}: {part.shard} of round {offer.round} was offered and is lost")
            self.feedback[part.shard] = ledger.add(self.feedback[part.shard], self.payloads[part.digest])
        feedback = dict(self.feedback)

        def write() -> None:
            self.record = Written(offer.round, feedback, restored_offer=True)
            self.boundary("give-back durable")

        self.begin(write)

    # --- the state: apply, arrange, attest, checkpoint

    def apply(self, commit: Commit, rebuild: tuple[str, ...]) -> None:
        kept = [shard for shard in self.theta if shard not in rebuild]
        digests = {part.digest for shard in kept for _, part in ledger.weighted(commit, shard)}
        for shard in set(rebuild) & set(self.theta):
            digests |= self.history(shard, commit)
        self.gather(digests, lambda: self.applied(commit, rebuild))

    def applied(self, commit: Commit, rebuild: tuple[str, ...]) -> None:
        if commit.round != self.round + 1:
            raise Violation("P2", f"{self.name} applies round {commit.round} to the state after round {self.round}")
        eta = self.swarm.ledger.eta
        for shard, old in self.theta.items():
            if shard in rebuild:
                self.world.stats["rebuilt"] += 1
                self.theta[shard] = self.rebuilt(shard, commit)
            else:
                self.theta[shard] = ledger.outer_step(old, commit, shard, self.payloads, eta)
        self.round = commit.round
        self.trace(f"applied round {commit.round}")
        self.boundary("theta changed")
        self.later(self.world.rng.uniform(0.0, 0.5), self.feed, Applied(commit.round))
        if self.world.rng.random() < 0.7:
            self.later(self.world.rng.expovariate(1 / 5.0), self.write_checkpoint)
        self.boundary("after Apply")

    def arrange(self, commit: Commit) -> None:
        wanted = tuple(self.theta)
        stage = commit.plan.stage_of(self.name) if commit.plan else None
        if stage is not None:
            wanted = memory.held_shards(self.swarm.manifest, stage.first, stage.last)
        elif commit.plan and self.name in commit.plan.spares:
            wanted = layout.shard_names(self.swarm.manifest.model)
        missing = [shard for shard in wanted if shard not in self.theta]
        digests: set[str] = set().union(*(self.history(shard, commit) for shard in missing))
        self.gather(digests, lambda: self.arranged(commit, wanted))

    def arranged(self, commit: Commit, wanted: tuple[str, ...]) -> None:
        self.theta = {s: self.theta[s] if s in self.theta else self.rebuilt(s, commit) for s in wanted}
        self.boundary("after HoldShards")
        digests = {shard: ledger.digest(shard, x) for shard, x in self.theta.items()}
        self.later(self.world.rng.uniform(0.0, 0.5), self.feed, ShardsHeld(commit.round))
        self.later(self.world.rng.uniform(0.5, 3.0), self.feed, Digested(commit.round, digests))

    def attested(self, attest: Attest) -> None:
        for shard, digest in attest.digests.items():
            if shard not in self.corrupted:
                if digest != self.swarm.ledger.theta_digest(shard, attest.round):
                    raise Violation("P1", f"{self.name}: {shard} after round {attest.round} is not what the log gives")
                self.world.stats["states compared"] += 1

    def history(self, shard: str, commit: Commit) -> set[str]:
        """The payloads that lead from theta(0) of a shard to the state after `commit`."""
        commits = (self.member.commits[r] for r in range(1, commit.round + 1))
        return {part.digest for c in commits for _, part in ledger.weighted(c, shard)}

    def rebuilt(self, shard: str, commit: Commit) -> Vector:
        theta = ledger.initial(shard)
        for round in range(1, commit.round + 1):
            theta = ledger.outer_step(theta, self.member.commits[round], shard, self.payloads, self.swarm.ledger.eta)
        return theta

    def gather(self, digests: Iterable[str], then: Callable[[], None]) -> None:
        """Fetches payloads from whoever has them, again and again until all are here."""
        missing = sorted(d for d in digests if d not in self.payloads)
        for digest in missing:
            payload = self.swarm.serve(digest, self.swarm.holder(digest, self.name), self.name)
            if payload is not None:
                self.payloads[digest] = payload
        again = any(d not in self.payloads for d in missing)
        delay = self.world.rng.uniform(0.1, 2.0) if missing else 0.0
        if again:
            self.later(delay, self.gather, missing, then)
        else:
            self.later(delay, then)

    def write_checkpoint(self) -> None:
        self.checkpoint = Checkpoint(self.round, dict(self.theta))
        self.boundary("checkpoint written")
