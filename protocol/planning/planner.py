"""The matchmaker: who is a full replica, who joins which chain, who is a spare. A pure function.

Replicas of the previous plan whose members are all still there, and can hold their blocks, are kept, and their blocks move between them
where that pays (protocol/planning/partition.py). protocol/planning/arrange.py finds the rest: what brings most
committed tokens per second, and which kept replicas are worth giving up for it. Who is left is a spare, and takes the place of
a chain's member that is lost (protocol/rounds/chain_repair.py).

A new replica whose members do not hold their shards yet is *forming*: they fetch them while the others train, and it begins in the
first plan after all of them have attested that state. After FORMING_ROUNDS without that it is given up. What a stage needs: protocol/planning/memory.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence

from protocol.planning import arrange
from protocol.planning.allotment import NEW, allot
from protocol.planning.arrange import Arranged
from protocol.planning.memory import needs_by_range
from protocol.planning.partition import Candidate, balanced
from protocol.run.manifest import Manifest
from protocol.wire.plan import Plan, ReplicaSpec, StageSpec

FORMING_ROUNDS = 16
"""A replica that has not begun after so many rounds is given up."""


def make_plan(
    manifest: Manifest,
    candidates: Sequence[Candidate],
    *,
    round: int,
    previous: Plan | None,
    done: Mapping[int, int] | None = None,
    holds: Callable[[StageSpec], bool] | None = None,
) -> Plan | None:
    """The plan of `round`; None where the candidates make not even one replica. `previous` and `done` are those of
    protocol/planning/allotment.py. `holds` says whether a stage's peer has its shards already (None: everybody has): a new replica
    one of whose members has not is forming, and nobody waits for it, unless there is no other."""
    candidates = sorted(candidates, key=lambda c: c.peer)
    there = {c.peer: c for c in candidates}
    kept = [balanced(manifest, r, there) for r in still_fit(manifest, previous.replicas if previous else (), there)]
    busy = {peer for replica in kept for peer in replica.peers}
    forming, late = _still_forming(previous, there, busy, round, holds)
    waiting = {peer for replica, _ in forming for peer in replica.peers} | late
    others = [c for c in candidates if c.peer not in waiting]
    found, spares = arrange.arrange(manifest, others, [arranged(replica) for replica in kept])
    before = {replica.peers: replica for replica in kept}
    replicas = [_spec(replica, before.get(replica.members)) for replica in found]
    replicas += [replica for replica, _ in forming]
    if not replicas:
        return None
    begin = [r for r in replicas if r.number != NEW or holds is None or all(map(holds, r.stages))] or replicas
    begun, since = set(map(id, begin)), {id(replica): first for replica, first in forming}
    plan = allot(manifest, round, begin, spares, there, previous, done)
    later = tuple(r for r in replicas if id(r) not in begun)
    return dataclasses.replace(plan, forming=later, forming_since=tuple(since.get(id(r), round) for r in later))


def _still_forming(
    previous: Plan | None,
    there: Mapping[str, Candidate],
    busy: Collection[str],
    round: int,
    holds: Callable[[StageSpec], bool] | None,
) -> tuple[list[tuple[ReplicaSpec, int]], set[str]]:
    """The replicas that go on forming, with the rounds since which they do; and the peers of the others who kept them from beginning
    for too long. They are not planned this time: the others may find together without them."""
    found: list[tuple[ReplicaSpec, int]] = []
    late: set[str] = set()
    for replica, since in zip(previous.forming, previous.forming_since, strict=True) if previous else ():
        missing = {s.peer for s in replica.stages if holds is not None and not holds(s)}
        if not all(peer in there and peer not in busy for peer in replica.peers):
            continue
        if missing and round - since >= FORMING_ROUNDS:
            late |= missing
        else:
            found.append((replica, since))
    return found, late


def still_fit(manifest: Manifest, replicas: Sequence[ReplicaSpec], there: Mapping[str, Candidate]) -> list[ReplicaSpec]:
    """The replicas whose members are all there, and can hold their blocks."""
    needs = needs_by_range(manifest)
    return [
        replica
        for replica in replicas
        if all(s.peer in there and there[s.peer].memory_bytes >= needs[s.first, s.last] for s in replica.stages)
    ]


def arranged(replica: ReplicaSpec) -> Arranged:
    """A planned replica, for the search: its rate is found there."""
    ranges = tuple((stage.first, stage.last) for stage in replica.stages)
    return Arranged(members=replica.peers, ranges=ranges, rank=replica.rank, rate=0.0)


def _spec(replica: Arranged, before: ReplicaSpec | None) -> ReplicaSpec:
    """The replica in a plan; `before`: the kept one with the same members."""
    stages = tuple(
        StageSpec(peer=p, first=a, last=b) for p, (a, b) in zip(replica.members, replica.ranges, strict=True)
    )
    if before is not None and before.stages == stages:
        return dataclasses.replace(before, rank=replica.rank)
    return ReplicaSpec(number=NEW, rank=replica.rank, stages=stages)
