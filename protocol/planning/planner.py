"""The matchmaker's first version: who is a full replica, who joins which chain, who is a spare. A pure function.

A peer whose announced memory holds the whole model is a full replica. The others are sorted by uplink, so that the members of
a chain have like links, and taken in that order until a chain is complete: contiguous block ranges, at least one block a
member, within their memories, that minimize the slowest stage's seconds per micro-batch and, where several do, the largest share of
its memory that any member uses (exact for the given order, dynamic programming; if they do not fit in order of uplink,
other orders are tried). A stage's seconds are its operations, the embedding's and the head's too, over its member's measured
speed (protocol/planning/speed.py); an unknown speed counts as the median of the chain's known ones, and where all are unknown memory alone decides.
Where neighbours by uplink make no chain any more, the peers with the most memory are tried.
Who is left is a spare, and takes the place of a chain's member that is lost (protocol/rounds/chain_repair.py).

A new replica whose members do not hold their shards yet is *forming*: they fetch them while the others train, and it begins in the
first plan after all of them have attested that state.

Replicas of the previous plan whose members are all still there are kept, so that nobody reloads blocks for nothing. A chain's blocks move
where that pays (protocol/planning/partition.py).

The rank is the largest allowed one whose boundary traffic of a whole round takes at most half of the round's deadline on
the chain's slowest uplink. What a stage needs: protocol/planning/memory.py.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence

from protocol.codec import boundary_formats
from protocol.planning.allotment import NEW, allot
from protocol.planning.memory import needs_by_range
from protocol.planning.partition import Candidate, Ranges, balanced, split
from protocol.run.manifest import Manifest
from protocol.wire.plan import Plan, ReplicaSpec, StageSpec

MAX_CHAIN = 16
ANY_ORDER = 4
"""Chains of so many members are tried in every order."""


def boundary_rank(manifest: Manifest, up_bps: int) -> int:
    """The rank of a chain whose slowest uplink is `up_bps` bits per second; it carries both directions of an inner stage."""
    train = manifest.train
    tokens = train.inner_steps * train.step_tokens

    def bits_per_token(rank: int) -> int:
        width = rank or manifest.model.d_model
        return 8 * sum(
            boundary_formats.bytes_per_token(f, width) for f in (manifest.chains.forward, manifest.chains.backward)
        )

    by_width = sorted(manifest.chains.rank, key=bits_per_token, reverse=True)
    for rank in by_width:
        if tokens * bits_per_token(rank) <= up_bps * manifest.timing.round_deadline / 2:
            return rank
    return by_width[-1]


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
    there = {c.peer: c for c in candidates}
    free = dict(there)
    layers = manifest.model.n_layers
    needs = needs_by_range(manifest)
    whole = needs[0, layers]
    replicas: list[ReplicaSpec] = []
    for replica in previous.replicas if previous else ():
        fits = all(
            stage.peer in free and free[stage.peer].memory_bytes >= needs[stage.first, stage.last]
            for stage in replica.stages
        )
        if fits:
            replicas.append(balanced(manifest, replica, free))
            for peer in replica.peers:
                del free[peer]
    for replica in previous.forming if previous else ():
        if all(stage.peer in free for stage in replica.stages):
            replicas.append(replica)
            for peer in replica.peers:
                del free[peer]
    for c in sorted(free.values(), key=lambda c: (-c.up_bps, c.peer)):
        if c.memory_bytes >= whole:
            whole_model = StageSpec(peer=c.peer, first=0, last=layers)
            replicas.append(ReplicaSpec(number=NEW, rank=0, stages=(whole_model,)))
            del free[c.peer]
    weak = sorted(free.values(), key=lambda c: (-c.up_bps, -c.memory_bytes, c.peer))
    for members, ranges in _chains(manifest, weak):
        stages = (StageSpec(peer=c.peer, first=a, last=b) for c, (a, b) in zip(members, ranges, strict=True))
        rank = boundary_rank(manifest, min(c.up_bps for c in members))
        replicas.append(ReplicaSpec(number=NEW, rank=rank, stages=tuple(stages)))
        for c in members:
            del free[c.peer]
    if not replicas:
        return None
    begin = [r for r in replicas if r.number != NEW or holds is None or all(map(holds, r.stages))] or replicas
    begun = set(map(id, begin))
    plan = allot(manifest, round, begin, sorted(free), there, previous, done)
    return dataclasses.replace(plan, forming=tuple(r for r in replicas if id(r) not in begun))


Chain = tuple[Sequence[Candidate], Ranges]
"""Members in the order of their stages, and their block ranges."""


def _chains(manifest: Manifest, weak: Sequence[Candidate]) -> list[Chain]:
    """Cuts the sorted weak peers into chains: runs of neighbours, the shortest from each place on, then by memory."""
    layers = manifest.model.n_layers
    least = [min(n for (a, b), n in needs_by_range(manifest).items() if b - a == size) for size in range(1, layers + 1)]
    usable = [c for c in weak if c.memory_bytes >= least[0]]
    blocks = {c.peer: bisect.bisect_right(least, c.memory_bytes) for c in usable}
    longest = min(MAX_CHAIN, layers)
    chains: list[Chain] = []
    start = 0
    while start < len(usable) - 1:
        for size in range(2, min(longest, len(usable) - start) + 1):
            members = usable[start : start + size]
            if sum(blocks[c.peer] for c in members) < layers:
                continue
            chain = _fit(manifest, members)
            if chain is not None:
                chains.append(chain)
                del usable[start : start + size]
                start = max(0, start - longest)
                break
        else:
            start += 1
    while (chain := _largest_chain(manifest, usable)) is not None:
        chains.append(chain)
        usable = [c for c in usable if c not in chain[0]]
    return chains


def _fit(manifest: Manifest, members: Sequence[Candidate]) -> Chain | None:
    """The members in an order in which the model fits: as they are; else, for a few members, in any order; for more, the two
    with the most memory at the ends, where the embedding and the head are."""
    a, b, *middle = sorted(members, key=lambda c: (-c.memory_bytes, c.peer))
    ends = ([a, *middle, b], [b, *middle, a])
    for order in (members, *(itertools.permutations(members) if len(members) <= ANY_ORDER else ends)):
        ranges = split(manifest, [c.memory_bytes for c in order], [c.speed_flops for c in order])
        if ranges is not None:
            return list(order), ranges
    return None


def _largest_chain(manifest: Manifest, usable: Sequence[Candidate]) -> Chain | None:
    """The shortest chain of the peers with the most memory."""
    largest = sorted(usable, key=lambda c: (-c.memory_bytes, c.peer))[: min(MAX_CHAIN, manifest.model.n_layers)]
    for size in range(2, len(largest) + 1):
        chain = _fit(manifest, largest[:size])
        if chain is not None:
            return chain
    return None
