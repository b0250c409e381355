"""The planner: full replicas, chains and spares of the next round. A pure function.

Replicas of the previous plan that can go on are kept, and blocks move between their members where that pays
(protocol/planning/partition.py). protocol/planning/arrange.py finds the rest. Peers that are left are spares.

*Changes.* A new replica whose members lack shards is *forming*: they fetch them while the old replicas train. A
*change* is the set of old and new replicas that common members link. When all members of its new replicas have attested
their shards, one plan replaces the old by the new. A change is given up when a new member has left or lacks memory,
when it would bring fewer tokens per second, or after FORMING_ROUNDS; members that kept it from beginning rest for one
plan.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from protocol.planning import arrange
from protocol.planning.allotment import NEW, allot
from protocol.planning.arrange import Arranged
from protocol.planning.budget import fits
from protocol.planning.partition import Candidate, balanced
from protocol.run.manifest import Manifest
from protocol.wire.plan import Plan, ReplicaSpec, StageSpec

FORMING_ROUNDS = 16

Holds = Callable[[StageSpec], bool]
"""Whether a stage's peer has attested all shards that the stage needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """`after` comes in the place of `before`; either may be empty. `since`: the round of the first plan that had it."""

    before: tuple[ReplicaSpec, ...]
    after: tuple[ReplicaSpec, ...]
    since: int

    @property
    def peers(self) -> frozenset[str]:
        return frozenset(peer for replica in (*self.before, *self.after) for peer in replica.peers)

    def lacking(self, holds: Holds | None) -> set[str]:
        """The members of the new replicas that lack shards. `holds` None: nobody does."""
        return {s.peer for r in self.after for s in r.stages if holds is not None and not holds(s)}

    def begun(self) -> tuple[ReplicaSpec, ...]:
        """The new replicas; one with the members of an old one, in their order, has its number."""
        numbers = {replica.peers: replica.number for replica in self.before}
        return tuple(dataclasses.replace(r, number=numbers.get(r.peers, r.number)) for r in self.after)


def linked(before: Iterable[ReplicaSpec], after: Sequence[ReplicaSpec], since: Sequence[int]) -> list[Change]:
    """The changes from `before` to `after`, split where no member is common. since: first plan of each new one."""
    old = tuple(before)
    replicas = (*old, *after)
    root = list(range(len(replicas)))

    def find(i: int) -> int:
        while root[i] != i:
            root[i] = i = root[root[i]]
        return i

    first: dict[str, int] = {}
    for i, replica in enumerate(replicas):
        for peer in replica.peers:
            root[find(i)] = find(first.setdefault(peer, i))
    together: dict[int, list[int]] = {}
    for i in range(len(replicas)):
        together.setdefault(find(i), []).append(i)
    return [
        Change(
            before=tuple(old[i] for i in group if i < len(old)),
            after=tuple(after[i - len(old)] for i in group if i >= len(old)),
            since=min((since[i - len(old)] for i in group if i >= len(old)), default=0),
        )
        for group in together.values()
    ]


LEAST_GAIN = -1e-9
"""Of a change, in parts of the tokens per second of what is there."""


def make_plan(
    manifest: Manifest,
    candidates: Sequence[Candidate],
    *,
    round: int,
    previous: Plan | None,
    done: Mapping[int, int] | None = None,
    holds: Holds | None = None,
    relay_bps: float = math.inf,
) -> Plan | None:
    """The plan of `round`, None if there is no replica.

    holds: whether a stage's peer has its shards (None: all have); relay_bps: bits a second of all relays
    """
    candidates = sorted(candidates, key=lambda c: c.peer)
    there = {c.peer: c for c in candidates}
    kept = still_fit(manifest, previous.replicas if previous else (), there)
    known, _ = _worth(manifest, candidates, kept, _pending(manifest, previous, kept, there), relay_bps)
    pending = [change for change in known if round - change.since < FORMING_ROUNDS or not change.lacking(holds)]
    late = [change for change in known if round - change.since >= FORMING_ROUNDS and change.lacking(holds)]
    resting = [replica for change in late for replica in change.before]
    stuck = {p for change in late for p in change.lacking(holds)}.difference(*(replica.peers for replica in kept))
    taken = stuck.union(*(change.peers for change in pending), *(replica.peers for replica in resting))
    settled = [replica for replica in kept if taken.isdisjoint(replica.peers)]
    others = [c for c in candidates if c.peer not in taken]
    beside = len(resting) + sum(len(change.after) for change in pending)
    staying, new = _arranged(manifest, others, settled, round, relay_bps, beside)
    worth, worse = _worth(manifest, candidates, kept, new, relay_bps)
    begin = [*resting, *staying, *(replica for change in worse for replica in change.before)]
    waiting: list[Change] = []
    for change in (*pending, *worth):
        if change.lacking(holds):
            waiting.append(change)
        begin += change.before if change.lacking(holds) else change.begun()
    if not begin:
        begin, waiting = [replica for change in waiting for replica in change.after], []
    if not begin:
        return None
    begin.sort(key=lambda replica: (replica.number == NEW, replica.number))
    forming = [(replica, change.since) for change in waiting for replica in change.after]
    busy = stuck.union(*(replica.peers for replica in begin), *(replica.peers for replica, _ in forming))
    plan = allot(manifest, round, begin, [c.peer for c in candidates if c.peer not in busy], there, previous, done)
    return dataclasses.replace(
        plan, forming=tuple(replica for replica, _ in forming), forming_since=tuple(since for _, since in forming)
    )


def _pending(
    manifest: Manifest, previous: Plan | None, kept: Sequence[ReplicaSpec], there: Mapping[str, Candidate]
) -> list[Change]:
    """The changes of the previous plan that can go on; of what they replace, what is still there."""
    if previous is None:
        return []
    found = [c for c in linked(previous.replicas, previous.forming, previous.forming_since) if c.after]
    alive = set(kept)
    return [
        dataclasses.replace(change, before=tuple(replica for replica in change.before if replica in alive))
        for change in found
        if len(still_fit(manifest, change.after, there)) == len(change.after)
    ]


def _arranged(
    manifest: Manifest,
    candidates: Sequence[Candidate],
    kept: Sequence[ReplicaSpec],
    round: int,
    relay_bps: float,
    beside: int,
) -> tuple[list[ReplicaSpec], list[Change]]:
    """Who of the `kept` stays as it is, and what else is best."""
    there = {c.peer: c for c in candidates}
    as_they_are = [arranged(balanced(manifest, r, there)) for r in kept]
    found, _ = arrange.arrange(manifest, candidates, as_they_are, relay_bps, beside)
    before = {replica.peers: replica for replica in kept}
    staying: list[ReplicaSpec] = []
    new: list[ReplicaSpec] = []
    for one in found:
        stages = tuple(StageSpec(peer=p, first=a, last=b) for p, (a, b) in zip(one.members, one.ranges, strict=True))
        old = before.get(one.members)
        if old is not None and old.stages == stages:
            staying.append(old)
        else:
            new.append(ReplicaSpec(number=NEW, stages=stages))
    stay = {replica.peers for replica in staying}
    return staying, linked((r for r in kept if r.peers not in stay), new, [round] * len(new))


def _worth(
    manifest: Manifest,
    candidates: Sequence[Candidate],
    kept: Sequence[ReplicaSpec],
    changes: Sequence[Change],
    relay_bps: float,
) -> tuple[list[Change], list[Change]]:
    """The changes to a plan that bring at least what they replace, and the others."""
    swaps = [(list(map(arranged, c.before)), list(map(arranged, c.after))) for c in changes if c.before and c.after]
    plan = list(map(arranged, kept))
    gains = iter(arrange.gains(manifest, candidates, plan, swaps, relay_bps) if swaps else ())
    worth: list[Change] = []
    worse: list[Change] = []
    for change in changes:
        better = not (change.before and change.after) or next(gains) >= LEAST_GAIN
        (worth if better else worse).append(change)
    return worth, worse


def still_fit(manifest: Manifest, replicas: Sequence[ReplicaSpec], there: Mapping[str, Candidate]) -> list[ReplicaSpec]:
    """The replicas whose members are all there, can hold their blocks, and may be in them."""
    return [
        replica
        for replica in replicas
        if all(s.peer in there and fits(manifest, there[s.peer].budget, s.first, s.last) for s in replica.stages)
        and not (replica.is_chain and any(there[s.peer].alone for s in replica.stages))
    ]


def arranged(replica: ReplicaSpec) -> Arranged:
    """A planned replica, for the search: its rate is found there."""
    ranges = tuple((stage.first, stage.last) for stage in replica.stages)
    return Arranged(members=replica.peers, ranges=ranges, rate=0.0)
