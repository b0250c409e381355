"""Who does what in a round: replicas, their stages, and spares."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    """One peer's blocks `first <= i < last`. The stage with block 0 has `embed` too, the one with the last has `head`."""

    peer: str
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSpec:
    """One replica: a full peer (one stage) or a chain; `rank`: values per token at its boundaries, 0 = uncompressed."""

    rank: int
    stages: tuple[StageSpec, ...]

    @property
    def peers(self) -> tuple[str, ...]:
        return tuple(stage.peer for stage in self.stages)

    @property
    def is_chain(self) -> bool:
        """Whether several peers share the replica's blocks, else it is one full peer."""
        return len(self.stages) > 1

    @property
    def blocks(self) -> tuple[int, ...]:
        """How many blocks each stage has."""
        return tuple(stage.last - stage.first for stage in self.stages)

    def stage_of(self, peer: str) -> StageSpec:
        """The stage of a member. Raises ValueError for anybody else."""
        return self.stages[self.peers.index(peer)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Who does what in `round`. `slot`: the first window of training text of the round (see protocol/run/data_order.py)."""

    round: int
    slot: int
    replicas: tuple[ReplicaSpec, ...]
    spares: tuple[str, ...] = ()

    def replica_of(self, peer: str) -> int | None:
        """The index of the replica that `peer` is a member of."""
        for index, replica in enumerate(self.replicas):
            if peer in replica.peers:
                return index
        return None

    def stage_of(self, peer: str) -> StageSpec | None:
        """What `peer` trains, if anything."""
        replica = self.replica_of(peer)
        return None if replica is None else self.replicas[replica].stage_of(peer)
