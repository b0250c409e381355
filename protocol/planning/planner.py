"""The matchmaker: who is a full replica, who joins which chain, who is a spare. A pure function.

Replicas of the previous plan whose members are all still there, and can hold their blocks, are kept, their blocks moved between them where that
pays (protocol/planning/partition.py). protocol/planning/arrange.py finds the rest: what brings most committed tokens per
second, and what has to move for it. Who is left is a spare, and takes the place of a chain's member that is lost
(protocol/rounds/chain_repair.py). What a stage needs: protocol/planning/memory.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from protocol.planning import arrange
from protocol.planning.arrange import Arranged
from protocol.planning.memory import needs_by_range
from protocol.planning.partition import Candidate, balanced
from protocol.run import data_order
from protocol.run.manifest import Manifest
from protocol.wire.plan import Plan, ReplicaSpec, StageSpec


def make_plan(
    manifest: Manifest, candidates: Sequence[Candidate], *, round: int, slot: int, previous: Plan | None
) -> Plan | None:
    """The plan of `round`, whose text starts at `slot`; None where the candidates make not even one replica."""
    there, needs = {c.peer: c for c in candidates}, needs_by_range(manifest)
    kept = [
        balanced(manifest, replica, there)
        for replica in (previous.replicas if previous else ())
        if all(s.peer in there and there[s.peer].memory_bytes >= needs[s.first, s.last] for s in replica.stages)
    ]
    replicas, spares = arrange.arrange(manifest, candidates, [_arranged(replica) for replica in kept])
    if not replicas:
        return None
    return Plan(round=round, slot=slot, replicas=tuple(_spec(replica) for replica in replicas), spares=spares)


def _arranged(replica: ReplicaSpec) -> Arranged:
    ranges = tuple((stage.first, stage.last) for stage in replica.stages)
    return Arranged(members=replica.peers, ranges=ranges, rank=replica.rank, rate=0.0)


def _spec(replica: Arranged) -> ReplicaSpec:
    stages = (StageSpec(peer=p, first=a, last=b) for p, (a, b) in zip(replica.members, replica.ranges, strict=True))
    return ReplicaSpec(rank=replica.rank, stages=tuple(stages))


def following(manifest: Manifest, plan: Plan) -> int:
    """The first slot of the round after `plan`'s."""
    train = manifest.train
    return data_order.next_slot(plan.slot, len(plan.replicas), train.inner_steps, train.step_rows)
