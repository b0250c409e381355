"""Who does what in a round: replicas, their stages, and spares."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Annotated

from protocol.wire.bounds import Block, Count, Number, PeerId, Round, Slot
from protocol.wire.schema import MAX_ITEMS, AtMost, row


@row
@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    """One peer's part of a replica. The stage with block 0 has `embed` too, the one with the last block has `head`."""

    peer: PeerId
    """Who trains it."""
    first: Block
    """Its first block."""
    last: Block
    """The block after its last one."""


@row
@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The text and the inner steps that a replica is given for one round (protocol/planning/allotment.py)."""

    slot: Slot = 0
    """The first slot of text of its first inner step (protocol/run/corpus.py)."""
    steps: Count = 1
    """The most inner steps that it may do: more than it is expected to have time for."""
    micro_batches: Count = 1
    """Micro-batches of each inner step."""

    def __post_init__(self) -> None:
        if self.slot < 0 or min(self.steps, self.micro_batches) < 1:
            raise ValueError("slot must be at least 0, steps and micro_batches at least 1")


@row
@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSpec:
    """One replica: a full peer (one stage) or a chain."""

    number: Number = 0
    """Its name as long as it is planned, from plan to plan: no other replica of the run ever has it."""
    stages: Annotated[tuple[StageSpec, ...], AtMost(4096)]
    """Its stages, the one with block 0 first."""
    work: Work = Work()
    """What it is given for the plan's round."""
    following: Work | None = None
    """What it is given for the round after, which it may train ahead; None where nobody trains ahead."""

    @property
    def peers(self) -> tuple[str, ...]:
        return tuple(stage.peer for stage in self.stages)

    @property
    def is_chain(self) -> bool:
        """Whether several peers share the replica's blocks, else it is one full peer."""
        return len(self.stages) > 1

    @property
    def blocks(self) -> tuple[int, ...]:
        return tuple(stage.last - stage.first for stage in self.stages)

    def is_like(self, other: ReplicaSpec) -> bool:
        """Returns whether the other one has the same members and blocks, whatever it is given to do."""
        return self.stages == other.stages

    def stage_of(self, peer: str) -> StageSpec:
        """The stage of a member. Raises ValueError for anybody else."""
        return self.stages[self.peers.index(peer)]


@row
@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """A full replica that is not planned for a peer: a late one may take it (protocol/round/stragglers.py)."""

    number: Number
    """The replica's number."""
    work: Work
    """What it is given."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The roles of peers in a round."""

    round: Round
    replicas: Annotated[tuple[ReplicaSpec, ...], AtMost(MAX_ITEMS)]
    """The replicas, in the order in which a commit adds their work."""
    forming: Annotated[tuple[ReplicaSpec, ...], AtMost(MAX_ITEMS)] = ()
    """Replicas of a later round: their members fetch the shards that they will train, and nobody waits for them.
    Whoever trains in another replica meanwhile goes on there (protocol/planning/planner.py)."""
    forming_since: Annotated[tuple[Round, ...], AtMost(MAX_ITEMS)] = ()
    """The round of the first plan that named each of them."""
    seats: Annotated[tuple[Seat, ...], AtMost(MAX_ITEMS)] = ()
    """For peers that come within the round."""
    spares: Annotated[tuple[PeerId, ...], AtMost(MAX_ITEMS)] = ()
    """Peers that wait to take the place of a member of a chain that is lost."""
    next_number: Count = 0
    """The number of the next new replica."""
    next_slot: Slot = 0
    """The first slot of text that nobody was given yet."""

    def __post_init__(self) -> None:
        if len(self.forming_since) != len(self.forming):
            raise ValueError("forming_since must have an entry for each of forming")

    def replica(self, number: int) -> ReplicaSpec:
        """The replica with this number. Raises KeyError where there is none."""
        found = self.find(number)
        if found is None:
            raise KeyError(number)
        return found

    def find(self, number: int) -> ReplicaSpec | None:
        """The replica with this number, None where there is none."""
        return next((r for r in self.replicas if r.number == number), None)

    def taken(self, number: int, peers: tuple[str, ...], layers: int) -> ReplicaSpec | None:
        """The replica with this number, or the seat with it as `peers` have it, who must be one peer that the plan has
        in no replica; None where it is neither. `layers`: blocks of the model."""
        seat = next((seat for seat in self.seats if seat.number == number), None)
        if seat is None or len(peers) != 1 or self.replica_of(peers[0]) is not None:
            return self.find(number)
        whole = (StageSpec(peer=peers[0], first=0, last=layers),)
        return ReplicaSpec(number=number, stages=whole, work=seat.work)

    def seated(self, replica: ReplicaSpec) -> Plan:
        """The plan with a seat that is taken as its last replica, which need not form any more."""
        forming = [x for x in zip(self.forming, self.forming_since, strict=True) if x[0].peers != replica.peers]
        return dataclasses.replace(
            self,
            replicas=(*self.replicas, replica),
            forming=tuple(replica for replica, _ in forming),
            forming_since=tuple(since for _, since in forming),
        )

    def allows(self, spec: ReplicaSpec, peers: tuple[str, ...]) -> bool:
        """Returns whether `peers` may be the members of `spec`: each the planned one or a spare, none twice."""
        return len(set(peers)) == len(peers) == len(spec.stages) and all(
            peer == stage.peer or peer in self.spares for stage, peer in zip(spec.stages, peers, strict=True)
        )

    @property
    def count(self) -> int:
        return len({p for replica in (*self.replicas, *self.forming) for p in replica.peers}) + len(self.spares)

    @functools.cached_property
    def peers(self) -> frozenset[str]:
        return frozenset((*self.spares, *(p for r in (*self.replicas, *self.forming) for p in r.peers)))

    def names(self, peer: str) -> bool:
        return peer in self.peers

    def replica_of(self, peer: str) -> int | None:
        return next((r.number for r in self.replicas if peer in r.peers), None)

    def stage_of(self, peer: str) -> StageSpec | None:
        """Returns the stage of `peer`, if any."""
        return _stage(self.replicas, peer)

    def held_by(self, peer: str) -> tuple[StageSpec, ...]:
        """The stages whose shards `peer` has to hold: what it trains, and what it will train."""
        found = (_stage(replicas, peer) for replicas in (self.replicas, self.forming))
        return tuple(stage for stage in found if stage is not None)

    def replaced(self, replica: ReplicaSpec) -> Plan:
        """The plan with `replica` in the place of the one that has its number."""
        return dataclasses.replace(
            self, replicas=tuple(replica if r.number == replica.number else r for r in self.replicas)
        )


def _stage(replicas: tuple[ReplicaSpec, ...], peer: str) -> StageSpec | None:
    found = next((r for r in replicas if peer in r.peers), None)
    return None if found is None else found.stage_of(peer)
