"""The matchmaker's first version: who is a full replica, who joins which chain, who is a spare. A pure function.

A peer whose announced memory holds the whole model is a full replica. The others are sorted by uplink, so that the members of
a chain have like links, and taken in that order until a chain is complete: contiguous block ranges, at least one block a
member, that minimize the largest share of its memory that any member uses (exact for the given order, dynamic programming;
if they do not fit in order of uplink, other orders are tried).
Where neighbours by uplink make no chain any more, the peers with the most memory are tried.
Who is left is a spare, and takes the place of a chain's member that is lost (protocol/repair.py). Replicas of the previous plan whose members are all still there are kept as they are, so that nobody reloads blocks for
nothing. k is the largest allowed one whose boundary traffic of a whole round takes at most half of the round's deadline on
the chain's slowest uplink.

Memory, in bytes above an idle process (P parameters of the stage, E = V d of the embedding, R k boundary):

    parameters  24 P        theta, local copy, gradient, two AdamW moments, error feedback: fp32 each
    overlap      4 P        where the next round's inner steps begin
    reader      (4 + 4) E   a chain's stage without `embed` keeps the global embedding, and T_perp
    in flight   4 r L (B (17 d + 4 F) + [head] 3 V) x micro-batches in flight
    backward    4 r L (17 d + 4 F)  the gradients within the block that goes backward
    spare        4 M        a peer without a stage that keeps all shards warm (M parameters of the model), if it has that much

with r rows, L tokens, B blocks, d width, F feed-forward width, V vocabulary. tests/benchmarks/memory.py compares it with measured
peaks.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from protocol import assign, boundary, layout
from protocol.manifest import Manifest
from protocol.messages import Plan, ReplicaSpec, StageSpec

MAX_CHAIN = 16
ANY_ORDER = 4
"""Chains of so many members are tried in every order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A peer that is announced, connected and ready."""

    peer: str
    memory_bytes: int
    up_bps: int


def stage_shards(manifest: Manifest, first: int, last: int) -> tuple[str, ...]:
    """The shards that the stage of blocks first <= i < last trains, in canonical order."""
    return (
        *(("embed",) if first == 0 else ()),
        *(f"block.{i}" for i in range(first, last)),
        *(("head",) if last == manifest.model.n_layers else ()),
    )


def held_shards(manifest: Manifest, first: int, last: int) -> tuple[str, ...]:
    """The shards that the stage keeps at the global state: what it trains, and `embed` as a reader."""
    trained = stage_shards(manifest, first, last)
    return trained if "embed" in trained else ("embed", *trained)


def in_flight(manifest: Manifest, first: int, last: int) -> int:
    """For how many micro-batches at once a stage needs memory: the last one goes backward right after forward."""
    return 1 if last == manifest.model.n_layers else window(manifest)


def window(manifest: Manifest) -> int:
    """How many micro-batches a chain can always have under way; more where its members' memory allows (`depths`)."""
    return min(manifest.train.micro_batches, 4)


def activation_bytes(manifest: Manifest, first: int, last: int) -> int:
    """Bytes that one micro-batch keeps between its forward and its backward."""
    train = manifest.train
    head = 3 * manifest.model.vocab_size if last == manifest.model.n_layers else 0
    return (last - first) * _block_bytes(manifest) + 4 * train.rows * train.sequence * head


def _block_bytes(manifest: Manifest) -> int:
    spec, train = manifest.model, manifest.train
    return 4 * train.rows * train.sequence * (17 * spec.d_model + 4 * spec.d_ff)


def stage_memory(manifest: Manifest, first: int, last: int) -> int:
    """Bytes that the stage of blocks first <= i < last needs above an idle process (the formula above)."""
    spec = manifest.model
    params = sum(layout.parameters(spec, s) for s in stage_shards(manifest, first, last))
    reader = 0 if first == 0 else 8 * spec.vocab_size * spec.d_model
    flight = activation_bytes(manifest, first, last) * in_flight(manifest, first, last)
    return (24 + 4 * manifest.outer.overlap) * params + reader + flight + _block_bytes(manifest)


def keeps_warm(manifest: Manifest, memory_bytes: int) -> bool:
    """Whether a spare with this memory keeps all shards, so that it can take any stage that its memory allows."""
    return memory_bytes >= 4 * sum(layout.parameters(manifest.model, s) for s in layout.shard_names(manifest.model))


def can_take(manifest: Manifest, spare: Candidate, stage: StageSpec) -> bool:
    """Whether a spare can take this stage in the middle of a round."""
    enough = spare.memory_bytes >= _needs(manifest)[stage.first, stage.last]
    return enough and keeps_warm(manifest, spare.memory_bytes)


def depths(manifest: Manifest, first: int, last: int, memory_bytes: int) -> tuple[int, int]:
    """For how many micro-batches under way this memory is enough: with all activations, and with only their inputs.

    The second keeps all activations of one micro-batch, and of each its input and its frame (at most 4 d bytes a token).
    """
    one, spec, train = activation_bytes(manifest, first, last), manifest.model, manifest.train
    free = memory_bytes - stage_memory(manifest, first, last) + one * in_flight(manifest, first, last)
    inputs = 8 * train.rows * train.sequence * spec.d_model
    plain = max(free // (one + inputs), window(manifest))
    return plain, max(plain, (free - one) // inputs)


@functools.lru_cache(maxsize=8)
def _needs(manifest: Manifest) -> dict[tuple[int, int], int]:
    """(first, last) -> stage_memory, for every range of blocks."""
    layers = manifest.model.n_layers
    return {(a, b): stage_memory(manifest, a, b) for a in range(layers) for b in range(a + 1, layers + 1)}


def smallest_stage(manifest: Manifest) -> int:
    """Bytes that the least demanding stage of one block needs: a peer with less cannot take part."""
    return min(stage_memory(manifest, i, i + 1) for i in range(manifest.model.n_layers))


def split(manifest: Manifest, memory: Sequence[int]) -> tuple[tuple[int, int], ...] | None:
    """Block ranges for chain members with these memories (bytes) in this order, or None if the model does not fit."""
    layers, members, needs = manifest.model.n_layers, len(memory), _needs(manifest)

    @functools.cache
    def best(member: int, first: int) -> tuple[float, tuple[tuple[int, int], ...]] | None:
        if member == members:
            return (0.0, ()) if first == layers else None
        found = None
        for last in range(first + 1, layers - (members - member - 1) + 1):
            share = needs[first, last] / max(memory[member], 1)
            if share > 1:
                continue
            rest = best(member + 1, last)
            if rest is not None and (found is None or max(share, rest[0]) < found[0]):
                found = (max(share, rest[0]), ((first, last), *rest[1]))
        return found

    result = best(0, 0)
    return None if result is None else result[1]


def boundary_k(manifest: Manifest, up_bps: int) -> int:
    """The k of a chain whose slowest uplink is `up_bps` bits per second; it carries both directions of an inner stage."""
    train = manifest.train
    tokens = train.inner_steps * train.step_tokens

    def bits_per_token(k: int) -> int:
        width = k or manifest.model.d_model
        return 8 * sum(boundary.bytes_per_token(f, width) for f in (manifest.chains.forward, manifest.chains.backward))

    by_width = sorted(manifest.chains.k, key=bits_per_token, reverse=True)
    for k in by_width:
        if tokens * bits_per_token(k) <= up_bps * manifest.timing.round_deadline / 2:
            return k
    return by_width[-1]


def make_plan(
    manifest: Manifest, candidates: Sequence[Candidate], *, round: int, slot: int, previous: Plan | None
) -> Plan | None:
    """The plan of `round`, whose text starts at `slot`; None where the candidates make not even one replica."""
    free = {c.peer: c for c in candidates}
    layers = manifest.model.n_layers
    needs = _needs(manifest)
    whole = needs[0, layers]
    replicas: list[ReplicaSpec] = []
    for replica in previous.replicas if previous else ():
        fits = all(
            stage.peer in free and free[stage.peer].memory_bytes >= needs[stage.first, stage.last]
            for stage in replica.stages
        )
        if fits:
            replicas.append(replica)
            for peer in replica.peers:
                del free[peer]
    for c in sorted(free.values(), key=lambda c: (-c.up_bps, c.peer)):
        if c.memory_bytes >= whole:
            whole_model = StageSpec(peer=c.peer, first=0, last=layers)
            replicas.append(ReplicaSpec(k=0, stages=(whole_model,)))
            del free[c.peer]
    weak = sorted(free.values(), key=lambda c: (-c.up_bps, -c.memory_bytes, c.peer))
    for members, ranges in _chains(manifest, weak):
        stages = (StageSpec(peer=c.peer, first=a, last=b) for c, (a, b) in zip(members, ranges, strict=True))
        k = boundary_k(manifest, min(c.up_bps for c in members))
        replicas.append(ReplicaSpec(k=k, stages=tuple(stages)))
        for c in members:
            del free[c.peer]
    if not replicas:
        return None
    return Plan(round=round, slot=slot, replicas=tuple(replicas), spares=tuple(sorted(free)))


Chain = tuple[Sequence[Candidate], tuple[tuple[int, int], ...]]
"""Members in the order of their stages, and their block ranges."""


def _chains(manifest: Manifest, weak: Sequence[Candidate]) -> list[Chain]:
    """Cuts the sorted weak peers into chains: runs of neighbours, the shortest from each place on, then by memory."""
    layers = manifest.model.n_layers
    least = [min(n for (a, b), n in _needs(manifest).items() if b - a == size) for size in range(1, layers + 1)]
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
        ranges = split(manifest, [c.memory_bytes for c in order])
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


def following(manifest: Manifest, plan: Plan) -> int:
    """The first slot of the round after `plan`'s."""
    train = manifest.train
    return assign.next_slot(plan.slot, len(plan.replicas), train.inner_steps, train.step_rows)
