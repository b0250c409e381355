"""What a plan is worth, written again in the plainest way, and the best plan by trying all: what the planner is held against.

Shares no code with the planner's cost model (protocol/planning/objective.py). Only facts are shared: what a stage needs in memory
(checked by hand and by measurement elsewhere), how many bytes a token has in a number format, and how many a payload has.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

from protocol.codec import boundary_formats, sparse
from protocol.planning import memory
from protocol.planning.partition import Candidate
from protocol.run import layout
from protocol.run.layout import ModelSpec
from protocol.run.manifest import ChainSpec, Manifest, OuterSpec, TimingSpec, TrainSpec
from tests import tiny

Ranges = tuple[tuple[int, int], ...]


def worth(manifest: Manifest, members: Sequence[Candidate], ranges: Ranges, rank: int) -> float:
    """Tokens per second that this replica brings into commits; all its members' speeds and links are known."""
    train, model = manifest.train, manifest.model
    if any(memory.stage_memory(manifest, a, b) > c.memory_bytes for c, (a, b) in zip(members, ranges, strict=True)):
        return 0.0
    tokens, last = train.rows * train.sequence, len(members) - 1
    stages = [_seconds(manifest, c, a, b) for c, (a, b) in zip(members, ranges, strict=True)]
    width = rank or model.d_model
    there = 8 * tokens * boundary_formats.bytes_per_token(manifest.chains.forward, width)
    back = 8 * tokens * boundary_formats.bytes_per_token(manifest.chains.backward, width)

    def busy(i: int, own: int, other: int) -> int:
        """Bits a micro-batch over a link of member i that carries `own`, if it is an end, and `other` too, if it is not."""
        return own if i in (0, last) else own + other

    wires, round_trip = [], sum(stages)
    for i, (x, y) in enumerate(itertools.pairwise(members)):
        forward = max(busy(i, there, back) / x.up_bps, busy(i + 1, there, back) / y.down_bps) / 0.9
        backward = max(busy(i + 1, back, there) / y.up_bps, busy(i, back, there) / x.down_bps) / 0.9
        wires += [forward, backward]
        round_trip += forward + backward + 2 * math.dist(x.coordinates, y.coordinates) / 1000
    step = min(
        _step(train.micro_batches, times, wires, round_trip - sum(stages), depth)
        for times, depth in _ways(manifest, members, ranges, stages)
    )
    codec = manifest.outer.codec
    offer = max(
        8
        * sum(
            sparse.max_payload_size(codec, layout.shapes(model, shard))
            for shard in memory.stage_shards(manifest, a, b)
        )
        / (0.9 * c.up_bps)
        for c, (a, b) in zip(members, ranges, strict=True)
    )
    length = manifest.timing.training_seconds
    share = min(1.0, length / offer) if manifest.outer.overlap else length / (length + offer)
    there_at_all = math.prod(c.presence for c in members)
    for x, y in itertools.pairwise(members):
        there_at_all *= 0.7 if x.reachable == y.reachable == "private" else 1.0
    return train.micro_batches * tokens / step * share * there_at_all


def _seconds(manifest: Manifest, c: Candidate, a: int, b: int) -> float:
    """Of a stage per micro-batch: 6 operations a matrix parameter and token, and attention's."""
    spec, train = manifest.model, manifest.train
    blocks = (b - a) * (6 * (4 * spec.d_model**2 + 3 * spec.d_model * spec.d_ff) + 12 * train.sequence * spec.d_model)
    head = 6 * spec.vocab_size * spec.d_model if b == spec.n_layers else 0
    lookup = spec.d_model if a == 0 else 0
    return train.rows * train.sequence * (blocks + head + lookup) / c.speed_flops


def _ways(
    manifest: Manifest, members: Sequence[Candidate], ranges: Ranges, stages: list[float]
) -> list[tuple[list[float], float]]:
    """Seconds of the stages and the depth, without and with computing activations twice."""
    depths = [memory.depths(manifest, a, b, c.memory_bytes) for c, (a, b) in zip(members, ranges, strict=True)]
    most = min(manifest.train.micro_batches, *(deep for _, deep in depths), math.inf)
    plain = min([most, *(shallow for shallow, _ in depths[:-1])])
    return [(stages, plain), ([t * 4 / 3 for t in stages[:-1]] + stages[-1:], most)]


def _step(micro_batches: int, stages: list[float], wires: list[float], on_the_way: float, depth: float) -> float:
    """One micro-batch goes all the way, the others follow at the pace of the slowest part, or as places become free."""
    trip = sum(stages) + on_the_way
    return trip + (micro_batches - 1) * max(*stages, *wires, trip / depth, 0.0)


def total(manifest: Manifest, candidates: Sequence[Candidate], replicas: Sequence[object]) -> float:
    """What arranged replicas (members, ranges, rank) are worth together."""
    by_name = {c.peer: c for c in candidates}
    return sum(worth(manifest, [by_name[p] for p in r.members], r.ranges, r.rank) for r in replicas)  # type: ignore[attr-defined]


def optimum(manifest: Manifest, candidates: Sequence[Candidate]) -> float:
    """The most tokens per second that any arrangement of at most a few peers brings: every set, order, cut and rank is tried."""
    layers, count = manifest.model.n_layers, len(candidates)
    best_of = [0.0] * (1 << count)
    for bits in range(1, 1 << count):
        members = [c for i, c in enumerate(candidates) if bits >> i & 1]
        if len(members) > layers:
            continue
        cuts = [
            tuple(itertools.pairwise((0, *cut, layers)))
            for cut in itertools.combinations(range(1, layers), len(members) - 1)
        ]
        ranks = manifest.chains.rank if len(members) > 1 else (0,)
        best_of[bits] = max(
            worth(manifest, order, ranges, rank)
            for order in itertools.permutations(members)
            for ranges in cuts
            for rank in ranks
        )
    best = [0.0] * (1 << count)
    for bits in range(1, 1 << count):
        part = bits
        while part:
            best[bits] = max(best[bits], best_of[part] + best[bits ^ part])
            part = (part - 1) & bits
    return best[-1]


# --- swarms


def small_manifest(rng: random.Random) -> Manifest:
    """A model of five blocks, with sizes like those of a larger one's blocks, and a run in one of several shapes."""
    width = rng.choice((512, 1024))
    model = ModelSpec(
        vocab_size=rng.choice((8192, 32768)), d_model=width, n_layers=5, n_heads=8, d_ff=width * 8 // 3 // 64 * 64, context=1024
    )
    train = TrainSpec(
        inner_steps=50, micro_batches=rng.choice((4, 8, 32)), rows=1, sequence=rng.choice((256, 1024)),
        lr=1e-3, warmup_steps=0, total_steps=1000,
    )  # fmt: skip
    return tiny.manifest(
        model=model,
        train=train,
        chains=ChainSpec(rank=rng.choice(((0, width // 8), (width // 8,), (0, width // 8, width // 32)))),
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
