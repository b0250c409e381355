"""Blocks of each member of a chain, and when they move.

The members keep their order, and blocks move only when it pays. With t, t' the slowest stage's seconds before and
after:

    all speeds are known                a guess moves nothing
    t' <= 0.8 t                         speeds that vary by 10 % either way differ by 1.1 / 0.9 < 1 / 0.8
    8 bytes moved / slowest link <= 10 rounds x min(inner steps x micro-batches x t, round's deadline) x (1 - t' / t)

The members are trusted to stay for those 10 rounds. Waiting for links is left out.

*Speed.* Floating-point operations a token, a multiplication and an addition counted as two; d width, c width of the
keys, F feed-forward width, V vocabulary, L tokens of a sequence:

    block   6 (2 d^2 + 2 d c + 3 d F) + 12 L d     72 d^2 + 12 L d where c = d and F = 8 d / 3
    head    6 V d
    embed   d                              a lookup is none, its gradient is added

Forward takes 2 a matrix parameter, backward twice that (Kaplan et al. 2020, arXiv:2001.08361, section 2.1). Norms,
softmax, optimizer and projections are part of a machine's speed.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from protocol.identity import short_peer
from protocol.planning import budget
from protocol.planning.budget import Budget
from protocol.planning.memory import CPU, GPU, on_gpu, stage_shards
from protocol.run.manifest import Manifest
from protocol.wire.announcement import MAX_SPEED, Announcement
from protocol.wire.plan import Plan, ReplicaSpec, StageSpec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

RECENT_STEPS = 16
LEAST_STEPS = 4
"""A speed is the median of the last inner steps, a round's within these bounds; unknown before LEAST_STEPS."""
STEADY_SHARE = 0.05
"""A speed is said anew when it changed by more than this share."""


@functools.lru_cache(maxsize=8)
def stage_operations(manifest: Manifest) -> dict[tuple[int, int], int]:
    """(first, last) -> operations of one micro-batch, forward and backward, for every range of blocks."""
    layers, (embed, block, head) = manifest.model.n_layers, part_operations(manifest)
    return {
        (a, b): (b - a) * block + (embed if a == 0 else 0) + (head if b == layers else 0)
        for a in range(layers)
        for b in range(a + 1, layers + 1)
    }


def part_operations(manifest: Manifest) -> tuple[int, int, int]:
    """Operations of one micro-batch, forward and backward, in the embedding, in one block and in the head."""
    spec, tokens = manifest.model, manifest.train.rows * manifest.train.sequence
    d = spec.d_model
    block = 6 * (2 * d * d + 2 * d * spec.key_value_width + 3 * d * spec.d_ff) + 12 * manifest.train.sequence * d
    return tokens * d, tokens * block, tokens * 6 * spec.vocab_size * d


class Speedometer:
    """A peer's speed, in operations a second, whatever stage it has."""

    def __init__(self, manifest: Manifest) -> None:
        self._work = stage_operations(manifest)
        self._recent: deque[float] = deque(maxlen=min(max(manifest.train.inner_steps, LEAST_STEPS), RECENT_STEPS))
        self._said = 0

    def add(self, first: int, last: int, seconds: float) -> int:
        """Adds an inner step's seconds per micro-batch; the speed to announce, 0 if unknown. Raises KeyError."""
        stage_operations = self._work[first, last]
        if seconds > 0:
            self._recent.append(min(stage_operations / seconds, MAX_SPEED))
        if len(self._recent) >= LEAST_STEPS:
            median = statistics.median(self._recent)
            if abs(median - self._said) > STEADY_SHARE * self._said:
                self._said = max(int(median), 1)
        return self._said


MOVE_GAIN = 0.8
HORIZON_ROUNDS = 10
"""When a chain's blocks move; see the module's docstring."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A peer that is announced, connected and ready; 0 for what its announcement does not say.

    coordinates: in ms (protocol/planning/coordinates.py); presence: share of recent rounds that it stayed in
    apart: peers that cannot be its neighbours; alone: full replica only (protocol/round/accusations.py)
    range: of addresses, empty if it limits nothing (protocol/ledger/ranges.py); device, host_bytes: as Budget
    """

    peer: str
    memory_bytes: int
    up_bps: int
    down_bps: int = 0
    speed_flops: int = 0
    coordinates: tuple[float, ...] = ()
    presence: float = 1.0
    reachable: str = ""
    apart: tuple[str, ...] = ()
    alone: bool = False
    range: str = ""
    device: str = CPU
    host_bytes: int | None = None

    @property
    def budget(self) -> Budget:
        return Budget(self.memory_bytes, self.device, self.host_bytes)


def candidate(announcement: Announcement) -> Candidate:
    said = {name: getattr(announcement, name) for name in Candidate.__slots__ if hasattr(announcement, name)}
    return Candidate(**said)


def pairs_apart(candidates: Sequence[Candidate]) -> NDArray[np.int64]:
    """Pairs of n candidates that cannot be neighbours, as i * n + j both ways, ascending."""
    import numpy as np

    number = {c.peer: i for i, c in enumerate(candidates)}
    told = {(i, number[peer]) for i, c in enumerate(candidates) for peer in c.apart if peer in number}
    n = len(candidates)
    return np.array(sorted({i * n + j for a, b in told for i, j in ((a, b), (b, a))}), dtype=np.int64)


def can_take(manifest: Manifest, spare: Candidate, stage: StageSpec) -> bool:
    """Returns whether a spare can take this stage in the middle of a round."""
    room = spare.budget
    return budget.fits(manifest, room, stage.first, stage.last) and budget.keeps_warm(manifest, room)


Ranges = tuple[tuple[int, int], ...]
"""Of each stage in order: its blocks `first <= i < last`."""


def split(manifest: Manifest, rooms: Sequence[Budget], speeds: Sequence[int] = ()) -> Ranges | None:
    """Block ranges for members with this memory, None if the model does not fit. speeds: operations a second, or 0."""
    layers, work = manifest.model.n_layers, stage_operations(manifest)
    needs = [budget.needs_by_range(manifest, room.device) for room in rooms]
    known = [s for s in speeds if s]
    usual = statistics.median_low(known) if known else 0

    def share(member: int, first: int, last: int) -> float:
        need = needs[member][first, last]
        return rooms[member].share(need) if rooms[member].holds(need) else math.inf

    def seconds(member: int, first: int, last: int) -> float:
        return work[first, last] / (speeds[member] or usual)

    def pace(member: int, first: int, last: int) -> float:
        return seconds(member, first, last) if rooms[member].holds(needs[member][first, last]) else math.inf

    if not known:
        return _least(layers, len(rooms), share)
    quickest = _least(layers, len(rooms), pace)
    if quickest is None:
        return None
    slowest = max(seconds(i, a, b) for i, (a, b) in enumerate(quickest))
    return _least(layers, len(rooms), lambda i, a, b: share(i, a, b) if seconds(i, a, b) <= slowest else math.inf)


def strongest(manifest: Manifest, candidates: Iterable[Candidate]) -> list[Budget]:
    """The largest memories of the candidates, by the share that the smallest stage takes; at most one a block."""
    smallest = {device: budget.smallest_stage(manifest, device) for device in (CPU, GPU)}
    rooms = [c.budget for c in candidates]
    order = [(room.share(smallest[GPU if on_gpu(room.device) else CPU]), i) for i, room in enumerate(rooms)]
    return [rooms[i] for _, i in sorted(order)[: manifest.model.n_layers]]


def _least(layers: int, members: int, cost: Callable[[int, int, int], float]) -> Ranges | None:
    """The cuts with the smallest maximal cost (member, first, last), None if infinite; ties: few blocks first."""
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
    work = stage_operations(manifest)
    if not all(speeds):
        return None
    return [work[s.first, s.last] / v for s, v in zip(replica.stages, speeds, strict=True)]


def balanced(manifest: Manifest, replica: ReplicaSpec, there: Mapping[str, Candidate]) -> ReplicaSpec:
    """A kept replica, its blocks moved where that pays (see the module's docstring)."""
    seconds = stage_seconds(manifest, replica, there)
    if not replica.is_chain or seconds is None:
        return replica
    members = [there[p] for p in replica.peers]
    speeds, slowest = [c.speed_flops for c in members], max(seconds)
    if stage_operations(manifest)[0, manifest.model.n_layers] / sum(speeds) > MOVE_GAIN * slowest:
        return replica
    ranges = split(manifest, [c.budget for c in members], speeds)
    assert ranges is not None, "its members can hold it as it is"
    stages = tuple(StageSpec(peer=c.peer, first=a, last=b) for c, (a, b) in zip(members, ranges, strict=True))
    moved = dataclasses.replace(replica, stages=stages)
    then = max(stage_seconds(manifest, moved, there) or [])
    train, links = manifest.train, [bps for c in members for bps in (c.up_bps, c.down_bps) if bps > 0]
    round_seconds = min(train.inner_steps * train.micro_batches * slowest, manifest.timing.round_deadline)
    saved = HORIZON_ROUNDS * round_seconds * (1 - then / slowest)
    pays = 8 * _moved_bytes(manifest, replica, moved) <= saved * min(links, default=0)
    return moved if then <= MOVE_GAIN * slowest and pays else replica


def _moved_bytes(manifest: Manifest, before: ReplicaSpec, after: ReplicaSpec) -> int:
    """Returns the bytes that a chain's members must fetch: the state of shards that they did not hold."""
    total = 0
    for old, new in zip(before.stages, after.stages, strict=True):
        held = stage_shards(manifest, old.first, old.last)
        wanted = stage_shards(manifest, new.first, new.last)
        total += sum(manifest.state_bytes(shard) for shard in wanted if shard not in held)
    return total


def moves(before: Plan | None, after: Plan | None) -> list[tuple[int, ReplicaSpec, ReplicaSpec]]:
    """The chains whose blocks moved between their members from one plan to the next: number, before, after."""
    old = {replica.peers: replica for replica in before.replicas} if before else {}
    return [
        (replica.number, old[replica.peers], replica)
        for replica in (after.replicas if after else ())
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
        f"{short_peer(before.peers[slowest])} is the slowest stage ({seconds[slowest]:.2g} s a micro-batch, the"
        f" others at most {others:.2g} s): {away} block{'' if away == 1 else 's'} moved away from it"
    )
