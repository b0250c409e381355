"""Which peers form which replica: as many committed tokens per second as possible, without moves that do not pay. Pure.

1. Replicas of the last plan whose members are all there are kept.
2. Of the others, peers that can hold the whole model are full replicas; the rest forms chains of neighbours by uplink,
   as short as memory allows.
3. Pools and moves improve that (protocol/planning/search.py) by the rate of protocol/planning/objective.py.

A kept replica is given up only when all of it pays:

    all its members' speeds are known         a guess moves nothing
    the new rates >= the old ones / GAIN      as for blocks (protocol/planning/partition.py)
    tokens lost while states travel <= tokens gained in HORIZON_ROUNDS rounds
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from protocol.planning import search
from protocol.planning.memory import stage_shards
from protocol.planning.objective import Swarm, padded
from protocol.planning.partition import HORIZON_ROUNDS, MOVE_GAIN, Candidate, Ranges, split
from protocol.planning.search import SMALL, Allowed, Arrangement, Group
from protocol.planning.shapes import FIRST, LAST, MIDDLE, WHOLE, Floats, Ints
from protocol.run import layout
from protocol.run.manifest import Manifest

ROWS = 500_000
"""Replicas that the search rates at most,"""
ROWS_A_PEER = 1_000
"""and for each peer; what bounds the time of a plan."""
NEW_ROWS = 25_000
"""The same where something is kept."""
SHARES = (0.3, 0.3, 0.2, 0.2)
"""Of them in each turn of the two searches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arranged:
    """One replica. `rate`: predicted tokens per second."""

    members: tuple[str, ...]
    ranges: Ranges
    rate: float


def arrange(
    manifest: Manifest, candidates: Sequence[Candidate], kept: Sequence[Arranged] = (), relay_bps: float = math.inf
) -> tuple[tuple[Arranged, ...], tuple[str, ...]]:
    """The replicas, kept ones first, and the spares. kept: replicas of the last plan as they would stay."""
    everybody = sorted(candidates, key=lambda c: c.peer)
    swarm = Swarm(manifest, everybody, relay_bps)
    number = {c.peer: i for i, c in enumerate(everybody)}
    old = _as_they_are(swarm, {tuple(number[p] for p in replica.members): replica for replica in kept})
    busy = {i for group in old for i in group}
    free = {i for i in range(len(everybody)) if i not in busy and swarm.caps[:, i].any()}
    rates = [replica.rate for replica in old.values()]
    now = Arrangement(groups=list(old), rates=rates, free=free, kept=set(old), bonus=1 / MOVE_GAIN)
    search.tidy(now)  # neighbours that found out that they cannot reach each other
    _found(swarm, now)
    budget = NEW_ROWS if kept else min(ROWS, ROWS_A_PEER * len(everybody))

    def allowed(before: Sequence[Group], after: Sequence[Group]) -> bool:
        gone = [old[group] for group in before if group in old]
        guessed = not all(swarm.known[list(group)].all() for group in (*before, *after))
        return not gone or (not guessed and _pays(manifest, swarm, everybody, gone, after))

    search.split_chains(swarm, now, allowed)
    if now.free or len(now.groups) > 1:  # a chain that is alone stays; its blocks move (protocol/planning/partition.py)
        _search(swarm, now, budget, allowed)
        _found(swarm, now)  # of those whom the search left over
    return _result(manifest, swarm, everybody, now, old)


def _search(swarm: Swarm, now: Arrangement, budget: int, allowed: Allowed) -> None:
    """Makes the arrangement better: a small swarm's as a whole, a larger one's by pools and moves in turns."""
    if len(now.free) + sum(map(len, now.groups)) <= SMALL:
        search.solve_all(swarm, now, allowed)
        return
    for share in SHARES:
        before = now.total
        search.improve_moves(swarm, now, rows=int(budget * share / 2), allowed=allowed)
        search.improve_pools(swarm, now, rows=int(budget * share / 2), allowed=allowed)
        if now.total <= before * (1 + search.GAIN):
            break


def rates(
    manifest: Manifest, candidates: Sequence[Candidate], replicas: Sequence[Arranged], relay_bps: float
) -> list[float]:
    """Predicted tokens per second of replicas as they are; their members are candidates and can hold their blocks."""
    everybody = sorted(candidates, key=lambda c: c.peer)
    number = {c.peer: i for i, c in enumerate(everybody)}
    groups = [tuple(number[peer] for peer in replica.members) for replica in replicas]
    found: list[float] = _as_is(Swarm(manifest, everybody, relay_bps), groups, replicas).tolist()
    return found


def _as_is(swarm: Swarm, groups: Sequence[Group], replicas: Sequence[Arranged]) -> Floats:
    """[N]: rates of replicas as they are."""
    rows = padded(groups)
    blocks = np.zeros_like(rows)
    for row, replica in zip(blocks, replicas, strict=True):
        row[: len(replica.ranges)] = [b - a for a, b in replica.ranges]
    return swarm.rates(rows, blocks)[0]


def _as_they_are(swarm: Swarm, old: dict[Group, Arranged]) -> dict[Group, Arranged]:
    """Replicas with their rates."""
    if not old:
        return old
    found = _as_is(swarm, list(old), list(old.values())).tolist()
    return {
        group: dataclasses.replace(replica, rate=rate)
        for (group, replica), rate in zip(old.items(), found, strict=True)
    }


def _found(swarm: Swarm, now: Arrangement) -> None:
    """Makes replicas of the free peers: full ones, and chains, sorted by the measure that gives the best ones."""
    full = [i for i in sorted(now.free) if swarm.caps[WHOLE, i]]
    weak = np.array(sorted(now.free.difference(full)), dtype=np.int64)
    best: list[tuple[Group, float]] = []
    for key in (swarm.speed, swarm.up, swarm.speed * swarm.up):
        groups = _chains(swarm, weak[np.argsort(-key[weak], kind="stable")].tolist())
        rows, rated = search.best_orders(swarm, padded(groups), thorough=False) if groups else (padded([]), None)
        found = [
            (tuple(int(i) for i in row if i >= 0), float(rate))
            for row, rate in zip(rows, rated.rate if rated else (), strict=True)
        ]
        best = max(best, found, key=lambda chains: sum(rate for _, rate in chains))
    alone = swarm.rated(padded([(i,) for i in full])).rate.tolist() if full else []
    for group, rate in [*(((i,), rate) for i, rate in zip(full, alone, strict=True)), *best]:
        if rate > 0:
            now.groups.append(group)
            now.rates.append(rate)
            now.free.difference_update(group)


def _chains(swarm: Swarm, weak: Sequence[int]) -> list[Group]:
    """Runs of the weak peers in this order, each as short as their memory allows."""
    inner, layers = swarm.caps[MIDDLE], swarm.shapes.layers
    first, last = (np.where(swarm.caps[kind] > 0, swarm.caps[kind] - inner, -layers) for kind in (FIRST, LAST))
    chains: list[Group] = []
    run: list[int] = []
    blocks, best_first, best_last = 0, -layers, -layers
    for i in weak:
        run.append(i)
        blocks += int(inner[i])
        best_first, best_last = max(best_first, int(first[i])), max(best_last, int(last[i]))
        if len(run) < 2:
            continue
        if blocks + best_first + best_last >= layers and _holds(layers, blocks, first[run], last[run]):
            chains.append(tuple(run))
            run, blocks, best_first, best_last = [], 0, -layers, -layers
        elif len(run) >= layers:  # more members than blocks help nobody: one with the least memory goes
            least = min(range(len(run)), key=lambda k: max(swarm.caps[:3, run[k]].tolist()))
            blocks -= int(inner[run.pop(least)])
    return chains


def _holds(layers: int, blocks: int, first: Ints, last: Ints) -> bool:
    """Whether the model fits: `blocks` in inner stages, `first` and `last` [members] more or fewer at an end."""
    starts, ends = np.argsort(-first, kind="stable")[:2], np.argsort(-last, kind="stable")[:2]
    return any(a != b and blocks + int(first[a] + last[b]) >= layers for a in starts for b in ends)


def _pays(
    manifest: Manifest, swarm: Swarm, everybody: Sequence[Candidate], gone: Sequence[Arranged], after: Sequence[Group]
) -> bool:
    """Returns whether what moves is worth the state that has to travel; the gain itself is `Arrangement.bonus`'s."""
    before = {p: r for replica in gone for p, r in zip(replica.members, replica.ranges, strict=True)}
    rated = swarm.rated(padded(after)) if after else None
    gained = (float(rated.rate.sum()) if rated else 0.0) - sum(replica.rate for replica in gone)
    slowest = 0.0
    for row, group in enumerate(after):
        edges = itertools.accumulate((int(n) for n in rated.blocks[row][: len(group)]), initial=0) if rated else ()
        for i, (a, b) in zip(group, itertools.pairwise(edges), strict=True):
            held = stage_shards(manifest, *before[everybody[i].peer]) if everybody[i].peer in before else ()
            new = [shard for shard in stage_shards(manifest, a, b) if shard not in held]
            if everybody[i].peer in before:
                bits = 8 * sum(layout.shard_bytes(manifest.model, shard) for shard in new)
                slowest = max(slowest, bits / float(swarm.down[i]))
    lost = slowest * sum(replica.rate for replica in gone)
    return lost <= gained * HORIZON_ROUNDS * swarm.shapes.round_seconds


def _result(
    manifest: Manifest, swarm: Swarm, everybody: Sequence[Candidate], now: Arrangement, old: dict[Group, Arranged]
) -> tuple[tuple[Arranged, ...], tuple[str, ...]]:
    staying = {group: rate for group, rate in zip(now.groups, now.rates, strict=True) if group in now.kept}
    new = [(g, r) for g, r in zip(now.groups, now.rates, strict=True) if g not in now.kept]
    replicas = [
        Arranged(members=replica.members, ranges=replica.ranges, rate=staying[group])
        for group, replica in old.items()
        if group in staying
    ]
    if new:
        rows = padded([group for group, _ in new])
        rows, rates = search.polished(swarm, rows, np.array([rate for _, rate in new]), turns=4)
        sorted_rows = padded([sorted(int(i) for i in row if i >= 0) for row in rows])
        same = swarm.rated(sorted_rows).rate >= rates * (1 - 1e-9)  # the order of names, where it is as good as any
        rows = np.where(same[:, None], sorted_rows, rows)
        rated = swarm.refined(rows, swarm.rated(rows))
        for n in sorted(range(len(rows)), key=lambda n: (int((rows[n] >= 0).sum() > 1), -rated.rate[n], rows[n][0])):
            members = [int(i) for i in rows[n] if i >= 0]
            replicas.append(
                Arranged(
                    members=tuple(everybody[i].peer for i in members),
                    ranges=_ranges(manifest, swarm, everybody, members, rated.blocks[n]),
                    rate=float(rated.rate[n]),
                )
            )
    busy = {peer for replica in replicas for peer in replica.members}
    return tuple(replicas), tuple(c.peer for c in everybody if c.peer not in busy)


def _ranges(
    manifest: Manifest, swarm: Swarm, everybody: Sequence[Candidate], members: Sequence[int], blocks: Ints
) -> Ranges:
    """The members' block ranges; where no speed is known, memory alone decides."""
    if len(members) > 1 and not swarm.known[members].any():
        found = split(manifest, [everybody[i].budget for i in members])
        if found is not None:
            return found
    edges = itertools.accumulate((int(n) for n in blocks[: len(members)]), initial=0)
    return tuple(itertools.pairwise(edges))
