"""Who does what in a round: replicas, their stages, and spares."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    """One peer's part of a replica. The stage with block 0 has `embed` too, the one with the last block has `head`."""

    peer: str
    """Who trains it."""
    first: int
    """Its first block."""
    last: int
    """The block after its last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSpec:
    """One replica: a full peer (one stage) or a chain."""

    rank: int
    """Values per token that cross a chain's boundaries; 0: all of them."""
    stages: tuple[StageSpec, ...]
    """Its stages, the one with block 0 first."""

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
    """Who does what in a round."""

    round: int
    """The round."""
    slot: int
    """The first window of training text of the round (protocol/run/data_order.py)."""
    replicas: tuple[ReplicaSpec, ...]
    """The replicas; their numbers are their places here."""
    spares: tuple[str, ...] = ()
    """Peers that wait to take the place of a member of a chain that is lost."""

    @property
    def count(self) -> int:
        """How many peers it names."""
        return sum(len(replica.stages) for replica in self.replicas) + len(self.spares)

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
