"""Training ahead: a small machine beside the volunteer's (protocol/round/member.py), used with `overlap = 1`.

A round is decided and applied for some seconds in which a volunteer's processors would rest. With overlap they do
not: as soon as its offer of round r has left, the volunteer trains what round r's plan promised its replica for round
r + 1 (protocol/planning/allotment.py). When the real plan is known and its replica is as it was, what was done ahead is
the round's work, whoever else came or went. Else it is dropped.

"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import Enum

from protocol.quorum.table import Position, Table, Transition
from protocol.round.member_events import ChainFailed, Failed, Send, Stop, Trained, TrainOrder, UpdateEncoded
from protocol.run.manifest import Manifest
from protocol.wire.commit import Commit
from protocol.wire.plan import Plan
from protocol.wire.session import ChainFailure, Offer


class Ahead(Enum):
    """What there is of the round after the one that is being decided."""

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


TABLE = Table(
    "overlap",
    Ahead,
    (
        Transition(Ahead.NONE, UpdateEncoded, Ahead.RUNNING, (TrainOrder,), "our offer is durable, the run goes on"),
        Transition(Ahead.RUNNING, Trained, Ahead.READY),
        Transition(Ahead.RUNNING, Failed, Ahead.NONE, (), "it is trained again once the plan is known"),
        Transition(Ahead.RUNNING, ChainFailed, Ahead.RUNNING, (ChainFailure,)),
        Transition(Ahead.RUNNING, PlanAgrees, Ahead.NONE, (), "the member goes on with it as the round's training"),
        Transition(Ahead.READY, PlanAgrees, Ahead.NONE, (), "the member encodes it as the round's work"),
        Transition(Ahead.RUNNING, PlanDiffers, Ahead.DROPPED, (Stop,)),
        Transition(Ahead.READY, PlanDiffers, Ahead.NONE, (), "what was done is forgotten"),
        Transition(Ahead.DROPPED, Trained, Ahead.NONE),
        Transition(Ahead.DROPPED, Failed, Ahead.NONE),
    ),
)


class Overlap:
    """See the module's docstring. `order` is what is trained ahead, None where nothing is."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.position = Position(TABLE, Ahead.NONE)
        self.order: TrainOrder | None = None
        self._result: Trained | None = None

    @property
    def state(self) -> Ahead:
        return self.position.phase

    @property
    def running(self) -> TrainOrder | None:
        """The order that is being carried out, as far as it is still wanted."""
        return self.order if self.state is Ahead.RUNNING else None

    def begin(self, offer: Offer, trained: TrainOrder, decided: Commit | None, rounds: int) -> list[TrainOrder]:
        """After `offer` is durable: begins with the round after it, unless that is known to be planned otherwise.

        `trained` is what was trained in the end, with what was reconfigured. `decided` is the commit of the offer's round,
        where it is known already; else it is taken to bring work. `rounds`: how many the run has.
        """
        if not self.manifest.outer.overlap or not offer.round < rounds:
            return []
        replica = trained.plan.replica(offer.replica)
        if replica.following is None:
            return []
        expected = dataclasses.replace(replica, work=replica.following, following=None)
        order = TrainOrder(Plan(round=offer.round + 1, replicas=(expected,)), offer.replica, idle=trained.idle)
        if decided is not None and not is_same_work(order, decided):
            return []
        self.order = order
        return self.position.step(UpdateEncoded, Ahead.RUNNING, [order])

    def finished(self, event: Trained | Failed) -> None:
        """The training of what was ordered ahead came to its end."""
        if self.state is Ahead.RUNNING and isinstance(event, Trained):
            self._result = event
            self.position.step(Trained, Ahead.READY)
        else:
            self._forget(type(event))

    def chain_failed(self, failure: ChainFailure) -> list[Send]:
        """The chain that trains ahead lost a member: the leader is told."""
        return self.position.stay(ChainFailed, [Send(failure)])

    def take(self) -> Trained | None:
        """What was begun ahead is the round's work: the result, or None while it is being trained."""
        result = self._result
        self._forget(PlanAgrees)
        return result

    def drop(self) -> list[Stop]:
        """What was begun ahead is not wanted. If it still runs, the state is DROPPED until it has ended."""
        if self.state is Ahead.READY:
            self._forget(PlanDiffers)
        elif self.state is Ahead.RUNNING:
            assert self.order is not None
            return self.position.step(PlanDiffers, Ahead.DROPPED, [Stop(self.order.plan.round)])
        return []

    def _forget(self, event: type) -> None:
        self.position.step(event, Ahead.NONE)
        self.order, self._result = None, None


def is_same_work(order: TrainOrder, before: Commit) -> bool:
    """Whether the plan of `before` gives the replica of `order` just the work that `order` gives it, at the same place of the schedule."""
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
