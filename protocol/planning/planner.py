"""The matchmaker's first version: who is a full replica, who joins which chain, who is a spare. A pure function.

A peer whose announced memory holds the whole model is a full replica. The others are sorted by uplink, so that the members of
a chain have like links, and taken in that order until a chain is complete: contiguous block ranges, at least one block a
member, within their memories, that minimize the slowest stage's seconds per micro-batch and, where several do, the largest share of
its memory that any member uses (exact for the given order, dynamic programming; if they do not fit in order of uplink,
other orders are tried). A stage's seconds are its operations, the embedding's and the head's too, over its member's measured
speed (protocol/planning/speed.py); an unknown speed counts as the median of the chain's known ones, and where all are unknown memory alone decides.
Where neighbours by uplink make no chain any more, the peers with the most memory are tried.
Who is left is a spare, and takes the place of a chain's member that is lost (protocol/rounds/chain_repair.py).

Replicas of the previous plan whose members are all still there are kept, so that nobody reloads blocks for nothing. Only a
chain's blocks move between its members, whose order stays, when it pays. With t, t' the slowest stage's seconds before and after,

    all speeds are known                a guess moves nothing
    t' <= 0.8 t                         speeds that wobble by 10 % either way differ by 1.1 / 0.9 < 1 / 0.8: nothing moves for them
    8 bytes moved / slowest link <= 10 rounds x min(inner steps x micro-batches x t, round's deadline) x (1 - t' / t)

that is, the moved shards' fp32 state, over the slowest uplink or downlink that a member announced, takes no longer than what is saved
in 10 rounds: so long we trust members to stay as they are, and it is the default distance of checkpoints. A round never lasts longer than its
deadline. That a chain may have to wait for its links is left out.

k is the largest allowed one whose boundary traffic of a whole round takes at most half of the round's deadline on
the chain's slowest uplink.

Memory, in bytes above an idle process (P parameters of the stage, E = V d of the embedding, k the widest allowed boundary):

    parameters  24 P        theta, local copy, gradient, two AdamW moments, error feedback: fp32 each
    first stage 16 E + 20 V k  of a compressed chain, instead of 24 E: theta, T_perp, error feedback, what moved; A, A0, and of A
                            the gradient and two moments
    overlap      4 P        where the next round's inner steps begin
    room         4 (E + D)  what the next state of the embedding and of a block (D parameters) is written into
    reader      (4 + 4) E   a chain's stage without `embed` keeps the global embedding, and T_perp of a compressed chain
    in flight   4 r L (B (17 d + 4 F) + [head] 4 V) x micro-batches in flight
    frames      r L (4 k + f) x micro-batches in flight  what came in: a frame with f bytes a token, and its tensor
    backward    8 r L (17 d + 4 F) + [table] 4 E  the gradients within the block that goes backward, and of a head or embedding
                            that is trained as a whole, before they are added
    or, if more  8 T        than the last three: AdamW on the largest tensor (T parameters), when nothing is in flight
    spare        4 M + room  a peer without a stage that keeps all shards warm (M parameters of the model), if it has that much

with r rows, L tokens, B blocks, d width, F feed-forward width, V vocabulary. tests/benchmarks/memory.py compares it with measured
peaks. Of the 17 d, tensors are 10 d: the rest, one V of the head's and half of "backward" is what glibc's heap cannot use again.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from protocol.codec import boundary_formats
from protocol.planning import speed
from protocol.run import data_order, layout
from protocol.run.manifest import Manifest
from protocol.wire.plan import Plan, ReplicaSpec, StageSpec

MAX_CHAIN = 16
GAIN = 0.8
HORIZON_ROUNDS = 10
"""When a chain's blocks move; see the module's docstring."""
ANY_ORDER = 4
"""Chains of so many members are tried in every order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A peer that is announced, connected and ready; the fields are those of its announcement, 0 where it does not know."""

    peer: str
    memory_bytes: int
    up_bps: int
    down_bps: int = 0
    speed_flops: int = 0


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
    """The activations of how many micro-batches a stage keeps at once: the last one goes backward right after forward."""
    return 1 if last == manifest.model.n_layers else window(manifest)


def window(manifest: Manifest) -> int:
    """How many micro-batches a chain can always have under way; more where its members' memory allows (`depths`)."""
    return min(manifest.train.micro_batches, 4)


def activation_bytes(manifest: Manifest, first: int, last: int) -> int:
    """Bytes that one micro-batch keeps between its forward and its backward."""
    train = manifest.train
    head = 4 * manifest.model.vocab_size if last == manifest.model.n_layers else 0
    return (last - first) * _block_bytes(manifest) + 4 * train.rows * train.sequence * head


def _block_bytes(manifest: Manifest) -> int:
    spec, train = manifest.model, manifest.train
    return 4 * train.rows * train.sequence * (17 * spec.d_model + 4 * spec.d_ff)


def frame_bytes(manifest: Manifest, first: int, last: int) -> int:
    """Bytes of a micro-batch that came in: its frame and its tensor. None for a full replica."""
    if last - first == manifest.model.n_layers:
        return 0
    chains, width = manifest.chains, max(k or manifest.model.d_model for k in manifest.chains.k)
    most = max(boundary_formats.bytes_per_token(f, width) for f in (chains.forward, chains.backward))
    return manifest.train.rows * manifest.train.sequence * (4 * width + most)


def stage_memory(manifest: Manifest, first: int, last: int) -> int:
    """Bytes that the stage of blocks first <= i < last needs above an idle process (the formula above)."""
    plain = in_flight(manifest, first, last)
    return memory_at(manifest, first, last, plain, window(manifest))


def memory_at(manifest: Manifest, first: int, last: int, plain: int, most: int) -> int:
    """The same with all activations of `plain` micro-batches and `most` of them in flight."""
    flight = activation_bytes(manifest, first, last) * plain + frame_bytes(manifest, first, last) * most
    step = 8 * max(_table(manifest, first, last), manifest.model.d_ff * manifest.model.d_model)
    return _kept(manifest, first, last) + max(flight + _backward(manifest, first, last), step)


def _kept(manifest: Manifest, first: int, last: int) -> int:
    """What stays from step to step."""
    spec, widths = manifest.model, manifest.chains.k
    params = sum(layout.parameters(spec, s) for s in stage_shards(manifest, first, last))
    embed = spec.vocab_size * spec.d_model
    if first > 0:
        table = 8 * embed if max(widths) else 4 * embed
    elif last == spec.n_layers:
        table = 0
    else:  # it is among the parameters
        table = max(20 * spec.vocab_size * k - 8 * embed if k else 0 for k in widths)
    return (24 + 4 * manifest.outer.overlap) * params + table + _room(manifest)


def _backward(manifest: Manifest, first: int, last: int) -> int:
    return 2 * _block_bytes(manifest) + 4 * _table(manifest, first, last)


def _table(manifest: Manifest, first: int, last: int) -> int:
    """Parameters of the embedding or the head where the stage may train one as a whole, else 0."""
    spec = manifest.model
    trained = last == spec.n_layers or (first == 0 and 0 in manifest.chains.k)
    return spec.vocab_size * spec.d_model if trained else 0


def _room(manifest: Manifest) -> int:
    spec = manifest.model
    return 4 * (spec.vocab_size * spec.d_model + layout.parameters(spec, "block.0"))


def keeps_warm(manifest: Manifest, memory_bytes: int) -> bool:
    """Whether a spare with this memory keeps all shards, so that it can take any stage that its memory allows."""
    return memory_bytes >= 4 * layout.total_parameters(manifest.model) + _room(manifest)


def can_take(manifest: Manifest, spare: Candidate, stage: StageSpec) -> bool:
    """Whether a spare can take this stage in the middle of a round."""
    enough = spare.memory_bytes >= _needs(manifest)[stage.first, stage.last]
    return enough and keeps_warm(manifest, spare.memory_bytes)


def depths(manifest: Manifest, first: int, last: int, memory_bytes: int) -> tuple[int, int]:
    """For how many micro-batches under way this memory is enough: with all activations, and with only their inputs.

    The second keeps all activations of one micro-batch, and of each what came in.
    """
    one, frame = activation_bytes(manifest, first, last), frame_bytes(manifest, first, last)
    free = memory_bytes - _kept(manifest, first, last) - _backward(manifest, first, last)
    plain = max(free // (one + frame), window(manifest))
    return plain, max(plain, (free - one) // max(frame, 1))


@functools.lru_cache(maxsize=8)
def _needs(manifest: Manifest) -> dict[tuple[int, int], int]:
    """(first, last) -> stage_memory, for every range of blocks."""
    layers = manifest.model.n_layers
    return {(a, b): stage_memory(manifest, a, b) for a in range(layers) for b in range(a + 1, layers + 1)}


def smallest_stage(manifest: Manifest) -> int:
    """Bytes that the least demanding stage of one block needs: a peer with less cannot take part."""
    return min(stage_memory(manifest, i, i + 1) for i in range(manifest.model.n_layers))


Ranges = tuple[tuple[int, int], ...]
"""Of each stage in order: its blocks `first <= i < last`."""


def split(manifest: Manifest, memory: Sequence[int], speeds: Sequence[int] = ()) -> Ranges | None:
    """Block ranges for chain members with these memories (bytes) in this order, or None if the model does not fit. `speeds`:
    theirs, in operations a second, 0 where it is unknown."""
    layers, needs, work = manifest.model.n_layers, _needs(manifest), speed.work(manifest)
    known = [s for s in speeds if s]
    usual = statistics.median_low(known) if known else 0

    def share(member: int, first: int, last: int) -> float:
        used = needs[first, last] / max(memory[member], 1)
        return used if used <= 1 else math.inf

    def seconds(member: int, first: int, last: int) -> float:
        return work[first, last] / (speeds[member] or usual)

    if not known:
        return _least(layers, len(memory), share)
    quickest = _least(layers, len(memory), lambda i, a, b: seconds(i, a, b) if needs[a, b] <= memory[i] else math.inf)
    if quickest is None:
        return None
    slowest = max(seconds(i, a, b) for i, (a, b) in enumerate(quickest))
    return _least(layers, len(memory), lambda i, a, b: share(i, a, b) if seconds(i, a, b) <= slowest else math.inf)


def _least(layers: int, members: int, cost: Callable[[int, int, int], float]) -> Ranges | None:
    """The cuts with the smallest of the largest costs (member, first, last); None where all are infinite. Among equals, the
    first members have the fewest blocks."""
    rest = [math.inf] * layers + [0.0]  # of the members that follow, from this block on
    cuts: list[list[int]] = []
    for member in reversed(range(members)):
        here, cut = [math.inf] * (layers + 1), [layers] * (layers + 1)
        end = layers - (members - member - 1)
        for first in range(member, end):
            for last in range(first + 1, end + 1):
                if rest[last] < here[first] and (worst := max(rest[last], cost(member, first, last))) < here[first]:
                    here[first], cut[first] = worst, last
        rest = here
        cuts.insert(0, cut)
    if math.isinf(rest[0]):
        return None
    edges = [0]
    for cut in cuts:
        edges.append(cut[edges[-1]])
    return tuple(itertools.pairwise(edges))


def stage_seconds(manifest: Manifest, replica: ReplicaSpec, there: Mapping[str, Candidate]) -> list[float] | None:
    """Seconds that each stage computes per micro-batch, by its member's speed; None where one is unknown."""
    speeds = [there[p].speed_flops if p in there else 0 for p in replica.peers]
    work = speed.work(manifest)
    if not all(speeds):
        return None
    return [work[s.first, s.last] / v for s, v in zip(replica.stages, speeds, strict=True)]


def _balanced(manifest: Manifest, replica: ReplicaSpec, there: Mapping[str, Candidate]) -> ReplicaSpec:
    """A kept replica, its blocks moved where that pays (see the module's docstring)."""
    seconds = stage_seconds(manifest, replica, there)
    if len(replica.stages) < 2 or seconds is None:
        return replica
    members = [there[p] for p in replica.peers]
    speeds, slowest = [c.speed_flops for c in members], max(seconds)
    if speed.work(manifest)[0, manifest.model.n_layers] / sum(speeds) > GAIN * slowest:
        return replica
    ranges = split(manifest, [c.memory_bytes for c in members], speeds)
    assert ranges is not None, "its members can hold it as it is"
    stages = tuple(StageSpec(peer=c.peer, first=a, last=b) for c, (a, b) in zip(members, ranges, strict=True))
    moved = dataclasses.replace(replica, stages=stages)
    then = max(stage_seconds(manifest, moved, there) or [])
    train, links = manifest.train, [bps for c in members for bps in (c.up_bps, c.down_bps) if bps > 0]
    round_seconds = min(train.inner_steps * train.micro_batches * slowest, manifest.timing.round_deadline)
    saved = HORIZON_ROUNDS * round_seconds * (1 - then / slowest)
    pays = 8 * _moved_bytes(manifest, replica, moved) <= saved * min(links, default=0)
    return moved if then <= GAIN * slowest and pays else replica


def _moved_bytes(manifest: Manifest, before: ReplicaSpec, after: ReplicaSpec) -> int:
    """What the members of a chain must fetch: the state of the shards that they did not hold."""
    total = 0
    for old, new in zip(before.stages, after.stages, strict=True):
        held = held_shards(manifest, old.first, old.last)
        wanted = held_shards(manifest, new.first, new.last)
        total += sum(layout.shard_bytes(manifest.model, shard) for shard in wanted if shard not in held)
    return total


def moves(before: Plan | None, after: Plan | None) -> list[tuple[int, ReplicaSpec, ReplicaSpec]]:
    """The chains whose blocks moved between their members from one plan to the next: index there, before, after."""
    old = {replica.peers: replica for replica in before.replicas} if before else {}
    return [
        (index, old[replica.peers], replica)
        for index, replica in enumerate(after.replicas if after else ())
        if replica.peers in old and old[replica.peers].stages != replica.stages
    ]


def why_moved(manifest: Manifest, before: ReplicaSpec, after: ReplicaSpec, there: Mapping[str, Candidate]) -> str:
    """In words: which stage is the bottleneck, and what was done about it."""
    seconds = stage_seconds(manifest, before, there)
    if seconds is None:
        return "its blocks were shared out anew"
    slowest = max(range(len(seconds)), key=seconds.__getitem__)
    others = max(s for i, s in enumerate(seconds) if i != slowest)
    away = before.blocks[slowest] - after.blocks[slowest]
    return (
        f"…{before.peers[slowest][-8:]} is the slowest stage ({seconds[slowest]:.2g} s a micro-batch, the others at most"
        f" {others:.2g} s): {away} block{'' if away == 1 else 's'} moved away from it"
    )


def boundary_k(manifest: Manifest, up_bps: int) -> int:
    """The k of a chain whose slowest uplink is `up_bps` bits per second; it carries both directions of an inner stage."""
    train = manifest.train
    tokens = train.inner_steps * train.step_tokens

    def bits_per_token(k: int) -> int:
        width = k or manifest.model.d_model
        return 8 * sum(
            boundary_formats.bytes_per_token(f, width) for f in (manifest.chains.forward, manifest.chains.backward)
        )

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
            replicas.append(_balanced(manifest, replica, free))
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


Chain = tuple[Sequence[Candidate], Ranges]
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


def following(manifest: Manifest, plan: Plan) -> int:
    """The first slot of the round after `plan`'s."""
    train = manifest.train
    return data_order.next_slot(plan.slot, len(plan.replicas), train.inner_steps, train.step_rows)
