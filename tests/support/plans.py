"""What a plan is worth, written again in the plainest way, and the best plan by trying all: what the planner is held
against.

Shares no code with the planner's cost model (protocol/planning/objective.py). Only facts are shared: what a stage needs
in memory (checked by hand and by measurement elsewhere), how many bytes a token has in a number format, and how many a
payload has.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from protocol.codec import formats, sparse
from protocol.planning import budget, memory, partition
from protocol.planning.arrange import Arranged
from protocol.planning.partition import Candidate
from protocol.run import layout
from protocol.run.layout import ModelSpec
from protocol.run.manifest import Manifest, OuterSpec, TimingSpec, TrainSpec
from tests.support import tiny

Ranges = tuple[tuple[int, int], ...]
CARRIED = 0.9
"""Of a link's rate."""
APPLY = 40e-9
"""Seconds for each entry of a payload."""


@dataclass(frozen=True, slots=True)
class Alone:
    """A replica. rate: tokens per second while it trains; share: of a round in which it would without others; each:
    share of a round that another replica's payload takes; free: what may be taken without loss."""

    rate: float
    share: float = 0.0
    each: float = 0.0
    free: float = 0.0

    def beside(self, others: int) -> float:
        """Tokens per second that it brings into commits beside so many other replicas."""
        return self.rate * (self.share - max(0.0, others * self.each - self.free))


def worth(manifest: Manifest, members: Sequence[Candidate], ranges: Ranges) -> float:
    """Tokens per second that this replica brings into commits if there is no other; all its members' speeds and links
    are known."""
    return alone(manifest, members, ranges, math.inf).beside(0)


def mean_uplink(candidates: Sequence[Candidate]) -> float:
    """Bits a second, none counted for more than eight medians."""
    most = 8 * statistics.median(c.up_bps for c in candidates)
    return statistics.mean(min(c.up_bps, most) for c in candidates)


def alone(manifest: Manifest, members: Sequence[Candidate], ranges: Ranges, uplink: float) -> Alone:
    """A replica whose members fetch others' payloads from homes of so many bits a second."""
    train, model = manifest.train, manifest.model
    if not all(has_room(manifest, c, a, b) for c, (a, b) in zip(members, ranges, strict=True)):
        return Alone(0.0)
    tokens, last = train.rows * train.sequence, len(members) - 1
    stages = [seconds(manifest, c, a, b) for c, (a, b) in zip(members, ranges, strict=True)]
    width = model.residual_width or model.d_model
    there = 8 * tokens * formats.bytes_per_token(manifest.chains.forward, width)
    back = 8 * tokens * formats.bytes_per_token(manifest.chains.backward, width)

    def busy(i: int, own: int, other: int) -> int:
        """Bits a micro-batch over a link of member i: `own` of an end, and `other` too of a member that is none."""
        return own if i in (0, last) else own + other

    wires, ways, longest = [], list[float](), 0.0
    for i, (x, y) in enumerate(itertools.pairwise(members)):
        forward = max(busy(i, there, back) / x.up_bps, busy(i + 1, there, back) / y.down_bps) / CARRIED
        backward = max(busy(i + 1, back, there) / y.up_bps, busy(i, back, there) / x.down_bps) / CARRIED
        wires += [forward, backward]
        longer = 2 if x.reachable == y.reachable == "private" else 1  # through a relay
        latency = longer * math.dist(x.coordinates, y.coordinates) / 1000
        ways.append(forward + backward + 2 * latency)
        longest = max(longest, latency)
    step = min(
        _step(train.micro_batches, times, wires, ways, windows)
        for times, windows in _manners(manifest, members, ranges, stages, wires, ways)
    )
    codec, length = manifest.outer.codec, manifest.timing.training_seconds
    offer = fetch = apply = 0.0
    for c, (a, b) in zip(members, ranges, strict=True):
        shards = [layout.shapes(model, shard) for shard in memory.stage_shards(manifest, a, b)]
        bits = 8 * sum(sparse.max_payload_size(codec, shapes) for shapes in shards)
        offer = max(offer, bits / (CARRIED * c.up_bps))
        fetch = max(fetch, bits / (CARRIED * min(c.down_bps, uplink)))
        apply = max(apply, APPLY * sum(sparse.entries(codec, shapes) for shapes in shards))
    if any(x.peer in y.apart or y.peer in x.apart for x, y in itertools.pairwise(members)):
        return Alone(0.0)
    there_at_all = math.prod(c.presence for c in members)
    return Alone(
        rate=train.micro_batches * tokens / step * there_at_all,
        share=min(1.0, length / offer) if manifest.outer.overlap else length / (length + offer + 20 * longest),
        each=(fetch + apply) / length,
        free=max(0.0, 1 - offer / length) if manifest.outer.overlap else 0.0,
    )


def has_room(manifest: Manifest, c: Candidate, a: int, b: int) -> bool:
    """For a stage: on a card and on its host, or for both where they are one; several cards hold a model together."""
    own, host = memory.stage_memory(manifest, a, b, c.device), memory.host_memory(manifest, a, b, c.device)
    if (cards := memory.device_count(c.device)) > 1 and b - a == manifest.model.n_layers:
        own = min(own, max(memory.sharded_memory(manifest, cards, c.device)))
    if c.device == "cpu" or c.host_bytes == 0:
        return own + host <= c.memory_bytes
    return own <= c.memory_bytes and (c.host_bytes is None or host <= c.host_bytes)


def seconds(manifest: Manifest, c: Candidate, a: int, b: int) -> float:
    """Of a stage per micro-batch: 6 operations a matrix parameter and token, and attention's."""
    spec, train = manifest.model, manifest.train
    blocks = (b - a) * (
        6 * (2 * spec.d_model**2 + 2 * spec.d_model * spec.key_value_width + 3 * spec.d_model * spec.d_ff)
        + 12 * train.sequence * spec.d_model
    )
    head = 6 * spec.vocab_size * spec.d_model if b == spec.n_layers else 0
    lookup = spec.d_model if a == 0 else 0
    return train.rows * train.sequence * (blocks + head + lookup) / c.speed_flops


def _manners(
    manifest: Manifest,
    members: Sequence[Candidate],
    ranges: Ranges,
    stages: list[float],
    wires: list[float],
    ways: list[float],
) -> list[tuple[list[float], list[int]]]:
    """Seconds of the stages and how many micro-batches each lets past, with as many under way as memory holds and no
    stage has to compute twice for. A stage that computes activations twice, a third more work, lets all past: one that
    has to, and one that holds those behind it up much less then."""
    room = [budget.depths(manifest, a, b, c.budget) for c, (a, b) in zip(members, ranges, strict=True)]
    count, last = manifest.train.micro_batches, len(members) - 1
    found = []
    for depth in (min([count, *some]) for some in ([r.held for r in room], [r.most for r in room])):
        times, windows = [], []
        for i, t in enumerate(stages):
            window = min(room[i].plain, depth)
            kept = _rest(count, [t, *stages[i + 1 :]], wires, ways[i:], window)
            anew = t / 3 + _rest(count, [t * 4 / 3, *stages[i + 1 :]], wires, ways[i:], depth)
            twice = i < last and window < depth and (depth > room[i].held or anew < 0.95 * kept)
            times.append(t * 4 / 3 if twice else t)
            windows.append(depth if twice else window)
        found.append((times, windows))
    return found


def _rest(count: int, stages: list[float], wires: list[float], ways: list[float], window: int) -> float:
    """Of an inner step, all but the first micro-batch's way; `depth`: micro-batches between its two passes."""
    pace = max([*stages, *wires])
    away = sum(stages) + sum(ways)
    return max((count - 1) * pace, (window - 1) * pace + (count - window) * away / window)


def _step(micro_batches: int, stages: list[float], wires: list[float], ways: list[float], windows: list[int]) -> float:
    """One micro-batch goes all the way. The others follow at the pace of the slowest part; those that find no place in
    a stage at first are let past one by one as others come back, which as many as it has room for do in the time that
    one is away."""
    pace = max([*stages, *wires])
    took = (micro_batches - 1) * pace
    for i, window in enumerate(windows):
        away = sum(stages[i:]) + sum(ways[i:])
        took = max(took, (window - 1) * pace + (micro_batches - window) * away / window)
    return sum(stages) + sum(ways) + took


def total(manifest: Manifest, candidates: Sequence[Candidate], replicas: Sequence[Arranged]) -> float:
    """What arranged replicas (members, ranges) are worth together."""
    by_name, uplink = {c.peer: c for c in candidates}, mean_uplink(candidates)
    found = [alone(manifest, [by_name[p] for p in r.members], r.ranges, uplink) for r in replicas]
    return sum(one.beside(len(found) - 1) for one in found)


def optimum(manifest: Manifest, candidates: Sequence[Candidate]) -> float:
    """The most tokens per second that any arrangement of at most a few peers brings: every set, order, cut and number
    of replicas is tried."""
    layers, count, uplink = manifest.model.n_layers, len(candidates), mean_uplink(candidates)
    best_of = [[0.0] * (1 << count) for _ in range(count)]  # beside so many others
    for bits in range(1, 1 << count):
        members = [c for i, c in enumerate(candidates) if bits >> i & 1]
        if len(members) > layers:
            continue
        cuts = [
            tuple(itertools.pairwise((0, *cut, layers)))
            for cut in itertools.combinations(range(1, layers), len(members) - 1)
        ]
        found = [alone(manifest, order, ranges, uplink) for order in itertools.permutations(members) for ranges in cuts]
        for others in range(count):
            best_of[others][bits] = max(one.beside(others) for one in found)
    return max(_best_of_so_many(best_of[number - 1], number) for number in range(1, count + 1))


def _best_of_so_many(best_of: Sequence[float], number: int) -> float:
    """The best of so many replicas, where each set of members brings so much."""
    best = [0.0] * len(best_of)
    for _ in range(number):
        more = [0.0] * len(best_of)
        for bits in range(1, len(best_of)):
            part = bits
            while part:
                if best_of[part] > 0:
                    more[bits] = max(more[bits], best_of[part] + best[bits ^ part])
                part = (part - 1) & bits
        best = more
    return best[-1]


# --- swarms


def small_manifest(rng: random.Random) -> Manifest:
    """A model of five blocks, with sizes like those of a larger one's blocks, and a run in one of several shapes."""
    width = rng.choice((512, 1024))
    model = ModelSpec(
        vocab_size=rng.choice((8192, 32768)),
        d_model=width,
        n_layers=5,
        n_heads=8,
        d_ff=width * 8 // 3 // 64 * 64,
        context=1024,
    )
    train = TrainSpec(
        inner_steps=50, micro_batches=rng.choice((4, 8, 32)), rows=1, sequence=rng.choice((256, 1024)),
        lr=1e-3, warmup_steps=0, total_steps=1000,
    )  # fmt: skip
    return tiny.manifest(
        model=dataclasses.replace(model, residual_width=rng.choice((0, width // 8, width * 21 // 64))),
        train=train,
        outer=OuterSpec(overlap=rng.choice((0, 1))),
        timing=TimingSpec(round_deadline=1200.0),
    )


def small_swarm(rng: random.Random, manifest: Manifest) -> list[Candidate]:
    """Two to seven peers, some of which hold the whole model and some hardly a block of it."""
    whole = memory.stage_memory(manifest, 0, manifest.model.n_layers)
    regions = [(rng.uniform(0, 100), rng.uniform(0, 50)) for _ in range(3)]
    return [
        Candidate(
            peer=f"p{i}",
            memory_bytes=int(whole * rng.choice((0.25, 0.4, 0.4, 0.6, 0.8, 1.1)) * rng.uniform(0.9, 1.1)),
            up_bps=int(rng.lognormvariate(math.log(20e6), 1)),
            down_bps=int(rng.lognormvariate(math.log(100e6), 1)),
            speed_flops=int(rng.lognormvariate(math.log(5e12), 1)),
            coordinates=tuple(x + rng.gauss(0, 5) for x in rng.choice(regions)),
            presence=rng.choice((1.0, 1.0, 1.0, 0.8)),
            reachable=rng.choice(("direct", "private", "")),
        )
        for i in range(rng.randint(2, 7))
    ]


def parted(rng: random.Random, peers: Sequence[Candidate]) -> list[Candidate]:
    """The same peers, of which up to two cannot reach another."""
    told = {c.peer: (rng.choice(peers).peer, "nobody") for c in rng.sample(peers, rng.choice((0, 0, 1, 2)))}
    return [dataclasses.replace(c, apart=told.get(c.peer, ())) for c in peers]


SHAPES = {
    "0.5B": ModelSpec(
        vocab_size=32_768, d_model=1536, n_layers=12, n_heads=12, d_ff=5440, context=2048, residual_width=504
    ),
    "1B": ModelSpec(
        vocab_size=32_768, d_model=2048, n_layers=16, n_heads=16, d_ff=8192, context=2048, residual_width=672
    ),
    "7B": ModelSpec(
        vocab_size=32_768, d_model=4096, n_layers=32, n_heads=32, d_ff=11_008, context=2048, residual_width=1344
    ),
}
"""Models of the swarms below, with the residual width of protocol/run/presets.py. The first two are the main paper's
(Table 6, as docs read it), the last is LLaMA's (Touvron et al. 2023)."""

CARDS = ((4, 8, 4), (6, 10, 6), (8, 32, 12), (12, 19, 22), (16, 8, 30), (24, 4, 60))
"""GB of a graphics card, the share of machines that have so much (percent, rounded, of those with 4 GB or more: Steam
Hardware Survey of August 2025), and, assumed, the TFLOP/s that training reaches on such a card in the middle: about a
third of what dense bf16 or fp16 promises."""


def manifest_of(model: str) -> Manifest:
    """A run of one of SHAPES, with rounds of ten minutes."""
    spec = SHAPES[model]
    train = TrainSpec(
        inner_steps=500, micro_batches=16, rows=1, sequence=1024, lr=1e-3, warmup_steps=0, total_steps=9999
    )
    return tiny.manifest(
        model=spec,
        train=train,
        timing=TimingSpec(round_deadline=900.0, round_seconds=600.0),
    )


def volunteers(rng: random.Random, count: int) -> list[Candidate]:
    """Home machines. Cards: see CARDS, nine tenths of the memory free, speeds off by a factor of 1.5 either way
    (assumed). Links: log-normal about 45.7 Mb/s up and 85.7 down (the means of fixed broadband, Speedtest Global Index
    of September 2020), with a factor of 2.5 either way (assumed). Places: five regions up to 110 ms apart, one way, and
    10.5 ms to one's own (half of the index's 21 ms)."""
    regions = ((0, 0), (40, 10), (75, 0), (110, 20), (60, 50))
    sizes, shares, _ = zip(*CARDS, strict=True)
    reached = {size: flops for size, _, flops in CARDS}
    found = []
    for i in range(count):
        size = rng.choices(sizes, shares)[0]
        x, y = rng.choices(regions, (30, 30, 20, 10, 10))[0]
        found.append(
            Candidate(
                peer=f"p{i:05}",
                memory_bytes=int(0.9 * size * 1e9),
                up_bps=int(rng.lognormvariate(math.log(45.7e6), math.log(2.5))),
                down_bps=int(rng.lognormvariate(math.log(85.7e6), math.log(2.5))),
                speed_flops=int(reached[size] * 1e12 * rng.lognormvariate(0, math.log(1.5))),
                coordinates=(x + rng.gauss(0, 7.4), y + rng.gauss(0, 7.4)),
            )
        )
    return found


# --- other planners


def grouped(manifest: Manifest, order: Sequence[Candidate]) -> list[Arranged]:
    """Who can hold the whole model does; the others form chains in this order, each as short as its members' memory
    allows, cut so that the slowest stage is as quick as can be."""
    layers, whole = manifest.model.n_layers, memory.stage_memory(manifest, 0, manifest.model.n_layers)
    replicas, run = [], []
    for c in order:
        if c.memory_bytes >= whole:
            replicas.append(_as_is(manifest, [c], ((0, layers),)))
            continue
        run.append(c)
        if len(run) < 2 or sum(_blocks(manifest, x.memory_bytes) for x in run) < layers:
            continue
        best = max(run, key=lambda x: x.memory_bytes)  # the head needs most
        members = [*(x for x in run if x is not best), best]
        ranges = partition.split(manifest, [x.budget for x in members], [x.speed_flops for x in members])
        if ranges is not None:
            replicas.append(_as_is(manifest, members, ranges))
            run = []
        elif len(run) == layers:
            run.remove(min(run, key=lambda x: x.memory_bytes))
    return replicas


def blind(manifest: Manifest, order: Sequence[Candidate]) -> list[Arranged]:
    """Whoever comes joins the replica that is being formed, which is complete as soon as its members' memory holds the
    model in the order in which they came; blocks go by memory alone."""
    layers, whole = manifest.model.n_layers, memory.stage_memory(manifest, 0, manifest.model.n_layers)
    replicas: list[Arranged] = []
    run: list[Candidate] = []
    for c in order:
        run.append(c)
        enough = sum(layers if x.memory_bytes >= whole else _blocks(manifest, x.memory_bytes) for x in run) >= layers
        ranges = partition.split(manifest, [x.budget for x in run]) if enough else None
        if ranges is not None:
            replicas.append(_as_is(manifest, run, ranges))
            run = []
        elif len(run) == layers:
            run.remove(min(run, key=lambda x: x.memory_bytes))
    return replicas


def _blocks(manifest: Manifest, memory_bytes: int) -> int:
    """How many blocks of the middle this memory holds."""
    return sum(memory.stage_memory(manifest, 1, 1 + n) <= memory_bytes for n in range(1, manifest.model.n_layers - 1))


def _as_is(manifest: Manifest, members: Sequence[Candidate], ranges: Ranges) -> Arranged:
    return Arranged(members=tuple(c.peer for c in members), ranges=ranges, rate=worth(manifest, members, ranges))


def climbed(
    manifest: Manifest, candidates: Sequence[Candidate], start: Sequence[Arranged], seconds: float, rng: random.Random
) -> float:
    """Tokens per second after `seconds` of CPU of a local search: random moves, exchanges, additions and removals
    of members, new orders and cuts, and what is not worse stays."""
    by_name, uplink = {c.peer: c for c in candidates}, mean_uplink(candidates)
    groups = [
        ([by_name[p] for p in r.members], alone(manifest, [by_name[p] for p in r.members], r.ranges, uplink))
        for r in start
    ]
    free = [c for c in candidates if not any(c.peer in r.members for r in start)]
    groups.append((free, Alone(0.0)))

    def together() -> float:
        return sum(one.beside(sum(bool(g) for g, _ in groups[:-1]) - 1) for _, one in groups)

    end, best = time.process_time() + seconds, together()
    while time.process_time() < end:
        a, b = rng.sample(range(len(groups)), 2)
        one, other = list(groups[a][0]), list(groups[b][0])
        kind = rng.random()
        if not one or (kind >= 0.5 and not other):
            continue
        x = one.pop(rng.randrange(len(one)))
        if kind >= 0.5:
            one.insert(rng.randint(0, len(one)), other.pop(rng.randrange(len(other))))
        other.insert(rng.randint(0, len(other)), x)
        before = groups[a], groups[b]
        for i, g in ((a, one), (b, other)):
            groups[i] = g, Alone(0.0) if i == len(groups) - 1 else _rate(manifest, g, uplink)
        if (found := together()) < best:
            groups[a], groups[b] = before
            continue
        best = found
        if groups[-1][0] and rng.random() < 0.05:
            groups.insert(0, ([], Alone(0.0)))  # room for another replica
        groups = [g for g in groups[:-1] if g[0] or g is groups[0]] + groups[-1:]
    return best


def _rate(manifest: Manifest, members: list[Candidate], uplink: float) -> Alone:
    """Of members in this order, cut so that the slowest stage is as quick as can be."""
    if not members or len(members) > manifest.model.n_layers:
        return Alone(0.0)
    ranges = partition.split(manifest, [c.budget for c in members], [c.speed_flops for c in members])
    return Alone(0.0) if ranges is None else alone(manifest, members, ranges, uplink)
