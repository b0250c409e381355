"""Mistakes on purpose: each must be found by the simulation, by the promise that it breaks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from protocol.rounds.chain_repair import ChainRoster
from protocol.rounds.leader import Leader
from protocol.rounds.member import Member
from protocol.rounds.member_events import Effect, Event, Phase, RestoreFeedback, TrainOrder
from protocol.rounds.offers import Offers
from protocol.rounds.paxos_events import Appended
from protocol.wire.commit import Commit, Part, Record
from protocol.wire.session import ChainReconfig, Offer
from tests.sim.bootstrap_node import BootstrapNode
from tests.sim.ledger import Vector
from tests.sim.peer_node import Checkpoint, PeerNode, Written


class TornCheckpoint(PeerNode):
    """Writes theta and its round in two steps: killed in between, it applies a commit twice."""

    def write_checkpoint(self) -> None:
        old = self.checkpoint.round if self.checkpoint else -1
        self.checkpoint = Checkpoint(old, dict(self.theta))
        self.boundary("checkpoint written")
        self.checkpoint = Checkpoint(self.round, dict(self.theta))


class RepeatingMember(Member):
    """Applies a commit again when it hears of it again."""

    def _learn(self, record: Record) -> list[Effect]:
        commit = record.commit
        again = commit.round in self.commits and commit.round == self.applied and self.phase is Phase.WAITING
        effects = super()._learn(record)
        if again:
            self.applied -= 1
        return effects


class RepeatingPeer(PeerNode):
    member_class = RepeatingMember


class HastyPeer(PeerNode):
    """Tells its offer, and serves the payloads, before the record is durable."""

    def persist(self, feedback: dict[str, Vector], offer: Offer, payloads: dict[str, Vector]) -> None:
        self.volatile.update(payloads)
        self.feedback = feedback
        delta = self.delta
        write = super().persist

        def later() -> None:
            self.delta = delta
            write(feedback, offer, payloads)

        self.later(self.world.rng.uniform(1.0, 4.0), later)


class LateFeedback(PeerNode):
    """Comes back with the feedback of the round before its offer's, as if it were the offer's."""

    def started(self) -> None:
        if self.offer and self.offer.round > self.record.round:
            self.record = Written(self.offer.round, self.record.feedback)
        super().started()


class ForgetfulMember(Member):
    """Does not give back what was not committed."""

    def handle(self, event: Event, now: float) -> list[Effect]:
        return [e for e in super().handle(event, now) if not isinstance(e, RestoreFeedback)]


class ForgetfulPeer(PeerNode):
    member_class = ForgetfulMember


class HastyBootstrap(BootstrapNode):
    """Tells its decision before the log record is durable."""

    def append(self, record: Record) -> None:
        self.soon.append(Appended(record))
        self.later(self.world.rng.uniform(0.0, 1.0), self.write, record)


class GenerousRepairs(ChainRoster):
    """Gives a spare to several chains."""

    def _is_free(self, spare: str) -> bool:
        return True


class OffersOfAnybody(Offers):
    """Takes what a peer offered as a member of one replica for its offer as a member of another one."""

    def __init__(self, held: Iterable[str]) -> None:
        super().__init__(held)
        self.newest: dict[str, Offer] = {}

    def begin(self) -> None:
        super().begin()
        self.newest = {}

    def take(self, peer: str, offer: Offer) -> list[Part]:
        self.newest[peer] = offer
        return super().take(peer, offer)

    def of(self, index: int, peer: str) -> Offer | None:
        return self.newest.get(peer)


class DoublingLeader(Leader):
    """Counts the share of a spare in every chain that it was given to."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.roster = GenerousRepairs(self.plan)
        self.offers = OffersOfAnybody(self.offers.held)

    def _begin(self, commit: Commit, now: float) -> list[Any]:
        effects = super()._begin(commit, now)
        self.roster = GenerousRepairs(commit.plan)
        return effects


class DoublingBootstrap(BootstrapNode):
    leader_class = DoublingLeader


class TwiceMember(Member):
    """A spare that does not remember that it took part in the round: replaced itself, it begins again."""

    def _reconfigured(self, reconfig: ChainReconfig) -> list[Effect]:
        before = self._attempted
        effects = super()._reconfigured(reconfig)
        if any(isinstance(effect, TrainOrder) for effect in effects):
            self._attempted = before
        return effects


class TwicePeer(PeerNode):
    member_class = TwiceMember


@dataclass(frozen=True)
class Bug:
    """What replaces the right classes, and the promise by which it is found."""

    classes: dict[str, Any]
    promise: str


BUGS = {
    "a commit is applied twice after a torn checkpoint": Bug({"peer_class": TornCheckpoint}, "P1"),
    "a commit is applied twice when it is heard twice": Bug({"peer_class": RepeatingPeer}, "P2"),
    "an offer is told before it is durable": Bug({"peer_class": HastyPeer}, "P3"),
    "feedback older than the offer": Bug({"peer_class": LateFeedback}, "P3"),
    "what was not committed is not given back": Bug({"peer_class": ForgetfulPeer}, "P3"),
    "a spare counts in two chains": Bug({"bootstrap_class": DoublingBootstrap}, "P2"),
    "a spare takes part twice": Bug({"peer_class": TwicePeer}, "P3"),
    "a decision is told before the log is durable": Bug({"bootstrap_class": HastyBootstrap}, "P2"),
}
