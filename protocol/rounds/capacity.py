"""How much a commit may say, so that everybody can read it: a record that was appended and cannot be read loses the run.

A reader bounds a message (protocol/wire/framing.py: bytes and values; protocol/wire/schema.py: entries of one list). What a leader
proposes stays below that by construction, whatever the peers do:

    envelope + fixed fields + digests + MAX_DIVERGED + MAX_SPARES + REASONS + contributions + next plan  <=  what a reader takes

A plan is cut (`bounded`) so that the contributions of all its replicas take at most the share CONTRIBUTIONS of what the others
leave, and itself at most the rest; every figure is that of the longest entry there can be, found by encoding one. Divergences and reasons
beyond their bounds are not told (`foremost`, `shortened`); who was not told of its divergence is told in a later round.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from protocol.planning import memory
from protocol.run import layout
from protocol.run.manifest import Manifest
from protocol.wire import encoding, framing
from protocol.wire.commit import Commit, Contribution, Diverged, LeftOut, Part, Share
from protocol.wire.plan import Plan, ReplicaSpec, StageSpec, Work
from protocol.wire.schema import plain

MAX_DIVERGED = 4096
"""Entries of one commit."""
MAX_SPARES = 4096
"""Of one plan; who is neither in a replica nor a spare waits for a later plan."""
REASONS = 256 * 1024
"""Bytes that the reasons of all left-out replicas of a commit take together."""
SHORTEST = 24
"""Bytes that a reason may always have."""
CONTRIBUTIONS = 0.75
"""Of what is left, the share of the contributions."""
_PEER, _DIGEST, _INTEGER, _NUMBER = "P" * 64, "d" * 64, 2**63, 0.1
"""The longest that there are of each kind, as they are encoded (protocol/identity.py takes no longer peer id)."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a reader counts: bytes, and values (every number, text, list, map and key)."""

    size: int
    values: int

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.size + other.size, self.values + other.values)

    def __sub__(self, other: Cost) -> Cost:
        return Cost(self.size - other.size, self.values - other.values)

    def times(self, factor: float) -> Cost:
        """So many times this, rounded down."""
        return Cost(int(self.size * factor), int(self.values * factor))

    def is_within(self, budget: Cost) -> bool:
        """Whether the budget allows this."""
        return self.size <= budget.size and self.values <= budget.values


def cost(value: Any) -> Cost:
    """What a dataclass, or a list or map of them, takes in a message."""
    data = plain(value)
    return Cost(len(framing.pack_message(data)), _values(data))


def _values(data: Any) -> int:
    if isinstance(data, dict):
        return 1 + len(data) + sum(_values(value) for value in data.values())
    if isinstance(data, list):
        return 1 + sum(_values(value) for value in data)
    return 1


@functools.lru_cache(maxsize=64)
def budget(manifest: Manifest) -> Cost:
    """What the contributions and the next plan of one commit may take together."""
    names = layout.shard_names(manifest.model)
    longest = max(names, key=len)
    empty = Commit(
        run=_DIGEST,
        round=_INTEGER,
        parent=_DIGEST,
        time=_NUMBER,
        contributions=(),
        left_out=(),
        diverged=(),
        digests=dict.fromkeys(names, _DIGEST),
        plan=Plan(round=_INTEGER, replicas=(), next_number=_INTEGER, next_slot=_INTEGER),
        leader=_PEER,
        members=(_PEER,) * len(manifest.operators),
    )
    votes = {f"{_PEER[4:]}{index:04}": bytes(64) for index in range(encoding.MAX_VOTES)}
    envelope = cost({"t": "longest name", "round": _INTEGER, "c": None, "n": _INTEGER, "l": [b""], "v": votes})
    reserved = [
        envelope,
        cost(empty),
        cost(Diverged(peer=_PEER, shard=longest)).times(MAX_DIVERGED),
        cost(_PEER).times(MAX_SPARES),
        Cost(REASONS + 64, 0),  # and what the heads of six long lists and maps take
    ]
    return functools.reduce(Cost.__sub__, reserved, Cost(framing.MAX_MESSAGE, framing.MAX_VALUES))


def _of_contribution(manifest: Manifest, replica: ReplicaSpec) -> Cost:
    """What a commit says of a replica, at most: its contribution, or why it is left out."""
    return _longest_contribution(tuple(len(memory.stage_shards(manifest, s.first, s.last)) for s in replica.stages))


@functools.lru_cache(maxsize=1024)
def _longest_contribution(parts: tuple[int, ...]) -> Cost:
    """`parts`: how many each stage has."""
    part = Part(shard="block.0000", digest=_DIGEST, size=_INTEGER, norm=_NUMBER)
    found = Contribution(
        replica=_INTEGER,
        tokens=_INTEGER,
        steps=_INTEGER,
        loss=_NUMBER,
        shares=tuple(Share(peer=_PEER, parts=(part,) * count) for count in parts),
    )
    left_out = cost(LeftOut(replica=_INTEGER, reason="r" * SHORTEST))
    counted = cost(found)
    return Cost(max(counted.size, left_out.size), max(counted.values, left_out.values))


@functools.lru_cache(maxsize=64)
def _of_plan(stages: int) -> Cost:
    """What a plan says of a replica of so many stages, at most."""
    stage = StageSpec(peer=_PEER, first=_INTEGER, last=_INTEGER)
    work = Work(slot=_INTEGER, steps=_INTEGER, micro_batches=_INTEGER)
    since = cost(_INTEGER)
    return since + cost(
        ReplicaSpec(number=_INTEGER, rank=_INTEGER, stages=(stage,) * stages, work=work, following=work)
    )


def bounded(manifest: Manifest, plan: Plan) -> Plan:
    """`plan` with as many of its replicas, the first ones, as commits can speak of; the members of the others are spares."""
    whole = budget(manifest)
    deciding = whole.times(CONTRIBUTIONS)
    planning = whole - deciding
    decided = planned = Cost(0, 0)
    kept: list[ReplicaSpec] = []
    for replica in (*plan.replicas, *plan.forming):
        decided += _of_contribution(manifest, replica)
        planned += _of_plan(len(replica.stages))
        if not (decided.is_within(deciding) and planned.is_within(planning)):
            break
        kept.append(replica)
    replicas, forming = plan.replicas[: len(kept)], tuple(kept[len(plan.replicas) :])
    if (replicas, forming) == (plan.replicas, plan.forming) and len(plan.spares) <= MAX_SPARES:
        return plan
    members = {peer for replica in kept for peer in replica.peers}
    cut = (*plan.replicas, *plan.forming)[len(kept) :]
    over = {peer for replica in cut for peer in replica.peers if peer not in members}
    spares = tuple(sorted([*plan.spares, *over])[:MAX_SPARES])
    since = plan.forming_since[: len(forming)]
    return dataclasses.replace(plan, replicas=replicas, forming=forming, forming_since=since, spares=spares)


def foremost(diverged: Sequence[Diverged], plan: Plan | None) -> tuple[Diverged, ...]:
    """At most MAX_DIVERGED of `diverged`; those of the members of `plan`, whose work waits for it, before all others."""
    if len(diverged) <= MAX_DIVERGED:
        return tuple(diverged)
    planned = {peer for replica in (plan.replicas if plan else ()) for peer in replica.peers}
    first = [d for d in diverged if d.peer in planned][:MAX_DIVERGED]
    others = (d for d in diverged if d.peer not in planned)
    return (*first, *(d for d, _ in zip(others, range(MAX_DIVERGED - len(first)), strict=False)))


def shortened(left_out: Sequence[LeftOut]) -> tuple[LeftOut, ...]:
    """The same, with reasons that take at most REASONS bytes together."""
    most = max(SHORTEST, REASONS // max(len(left_out), 1))
    return tuple(
        x if len(x.reason.encode()) <= most else dataclasses.replace(x, reason=_cut(x.reason, most)) for x in left_out
    )


def _cut(text: str, most: int) -> str:
    return text.encode()[:most].decode(errors="ignore")
