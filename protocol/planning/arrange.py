"""Which peers form which replica: as many committed tokens per second as possible, without moves that do not pay. Pure.

1. Replicas of the last plan whose members are all there are kept.
2. Of the others, peers that can hold the whole model are full replicas; the rest forms chains of neighbours by uplink,
   as short as memory allows.
3. Pools and moves improve that (protocol/planning/search.py) by the rate of protocol/planning/objective.py.
4. A replica that would cost the others more than it brings is left out: its members are spares.

A kept replica is given up only when all of it pays:

    all its members' speeds are known         a guess moves nothing
    the new rates >= the old ones / GAIN      as for blocks (protocol/planning/partition.py)
    tokens lost while states travel <= tokens gained in HORIZON_ROUNDS rounds
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from protocol.planning import search
from protocol.planning.memory import stage_shards
from protocol.planning.objective import OWN, Swarm, padded, with_others
from protocol.planning.partition import HORIZON_ROUNDS, MOVE_GAIN, Candidate, Ranges, split
from protocol.planning.search import SMALL, Allowed, Arrangement, Group
from protocol.planning.shapes import FIRST, LAST, MIDDLE, WHOLE, Floats, Ints
from protocol.run.manifest import Manifest

ROWS = 500_000
"""Replicas that the search rates at most,"""
ROWS_A_PEER = 1_000
"""and for each peer; what bounds the time of a plan."""
NEW_ROWS = 25_000
"""The same where something is kept."""
LENGTHS = (2, 3, 4, 6, 8)
"""Of chains that are tried instead of full replicas."""
SHARES = (0.3, 0.3, 0.2, 0.2)
"""Of them in each turn of the two searches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arranged:
    """One replica. `rate`: predicted tokens per second."""

    members: tuple[str, ...]
    ranges: Ranges
    rate: float


def arrange(
    manifest: Manifest,
    candidates: Sequence[Candidate],
    kept: Sequence[Arranged] = (),
    relay_bps: float = math.inf,
    beside: int = 0,
) -> tuple[tuple[Arranged, ...], tuple[str, ...]]:
    """The replicas, kept ones first, and the spares.

    kept: replicas of the last plan as they would stay; beside: replicas of other peers, whose payloads are fetched too
    """
    everybody = sorted(candidates, key=lambda c: c.peer)
    swarm = Swarm(manifest, everybody, relay_bps)
    as_is = _as_is(swarm, everybody, kept)
    old = dict(zip(as_is, kept, strict=True))
    busy = {i for group in old for i in group}
    free = {i for i in range(len(everybody)) if i not in busy and swarm.caps[:, i].any()}
    now = Arrangement(swarm, as_is, free, bonus=1 / MOVE_GAIN, beside=beside)
    budget = NEW_ROWS if kept else min(ROWS, ROWS_A_PEER * len(everybody))

    def allowed(before: Sequence[Group], after: Sequence[Group]) -> bool:
        gone = [(old[group], as_is[group]) for group in before if group in old]
        guessed = not all(swarm.known[list(group)].all() for group in (*before, *after))
        return not gone or (not guessed and _pays(manifest, swarm, everybody, now, gone, after))

    search.drop_costly(now, allowed)
    now = _found(swarm, now, LENGTHS)
    search.split_chains(swarm, now, allowed)
    if now.free or len(now.groups) > 1:  # a chain that is alone stays; its blocks move (protocol/planning/partition.py)
        _search(swarm, now, budget, allowed)
        now = _found(swarm, now)  # of those whom the search left over
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
    manifest: Manifest, candidates: Sequence[Candidate], replicas: Sequence[Arranged], relay_bps: float = math.inf
) -> list[float]:
    """Predicted tokens per second of a plan's replicas as they are; their members are candidates and can hold them."""
    everybody = sorted(candidates, key=lambda c: c.peer)
    swarm = Swarm(manifest, everybody, relay_bps)
    terms = _as_is(swarm, everybody, replicas)
    beside = swarm.fetched_beside(max(0, len(replicas) - 1))
    rates = with_others(np.array(list(terms.values())).reshape(-1, 4), beside)
    found: list[float] = np.maximum(rates, 0.0).tolist()
    return found


Swap = tuple[Sequence[Arranged], Sequence[Arranged]]
"""Replicas of a plan, and those that come in their place."""


def gains(
    manifest: Manifest,
    candidates: Sequence[Candidate],
    plan: Sequence[Arranged],
    swaps: Sequence[Swap],
    relay_bps: float = math.inf,
) -> list[float]:
    """What a plan as a whole gains by each swap, in parts of what the replaced replicas bring."""
    everybody = sorted(candidates, key=lambda c: c.peer)
    swarm = Swarm(manifest, everybody, relay_bps)
    before = _as_is(swarm, everybody, plan)
    after = _as_is(swarm, everybody, [replica for _, new in swaps for replica in new])
    now, number = Arrangement(swarm, before, set()), {c.peer: i for i, c in enumerate(everybody)}
    found = []
    for swap in swaps:
        old, new = ([tuple(number[peer] for peer in r.members) for r in replicas] for replicas in swap)
        gone = [before[group] for group in old]
        worth = float(with_others(np.array(gone), swarm.others).sum())
        found.append(now.gain(gone, [after[group] for group in new]) / max(abs(worth), 1e-9))
    return found


def _as_is(swarm: Swarm, everybody: Sequence[Candidate], replicas: Sequence[Arranged]) -> dict[Group, Floats]:
    """Replicas as they are, with their terms."""
    number = {c.peer: i for i, c in enumerate(everybody)}
    groups = [tuple(number[peer] for peer in replica.members) for replica in replicas]
    rows = padded(groups)
    blocks = np.zeros_like(rows)
    for row, replica in zip(blocks, replicas, strict=True):
        row[: len(replica.ranges)] = [b - a for a, b in replica.ranges]
    return dict(zip(groups, swarm.terms(rows, blocks)[0], strict=True)) if groups else {}


def _found(swarm: Swarm, now: Arrangement, lengths: Sequence[int] = ()) -> Arrangement:
    """`now` with replicas of the free peers: full ones, and chains, sorted by the measure that gives the best ones.

    lengths: where replicas have a price, chains of so many of all free peers are tried, too: they are fewer
    """
    free = now.spares()
    full = [(i,) for i in free if swarm.caps[WHOLE, i]]
    weak = np.array([i for i in free if not swarm.caps[WHOLE, i]], dtype=np.int64)
    chains = [
        _rows(swarm, _chains(swarm, weak[np.argsort(-key[weak], kind="stable")].tolist()))
        for key in (swarm.speed, swarm.up, swarm.speed * swarm.up)
    ]
    best = now.copy()
    search.add_worthy(best, [*_rows(swarm, full), *max(chains, key=lambda found: sum(t[OWN] for _, t in found))])
    if not best.price:
        return best
    everybody = np.array(free, dtype=np.int64)
    for key, length in itertools.product((swarm.speed, swarm.up), lengths):
        order = everybody[np.argsort(-key[everybody], kind="stable")]
        groups = [tuple(order[i : i + length].tolist()) for i in range(0, len(order) - length + 1, length)]
        other = now.copy()
        search.add_worthy(other, _rows(swarm, groups))
        if other.total > best.total * (1 + search.GAIN):
            best = other
    best.settle()
    return best


def _rows(swarm: Swarm, groups: Sequence[Group]) -> list[tuple[Group, Floats]]:
    """Groups in their best order, with their terms."""
    if not groups:
        return []
    rows, rated = search.best_orders(swarm, padded(groups), thorough=False)
    return [(tuple(int(i) for i in row if i >= 0), terms) for row, terms in zip(rows, rated.terms, strict=True)]


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
    manifest: Manifest,
    swarm: Swarm,
    everybody: Sequence[Candidate],
    now: Arrangement,
    gone: Sequence[tuple[Arranged, Floats]],
    after: Sequence[Group],
) -> bool:
    """Returns whether what moves is worth the state that has to travel; the gain itself is `Arrangement.bonus`'s.

    gone: with their terms
    """
    before = {p: r for replica, _ in gone for p, r in zip(replica.members, replica.ranges, strict=True)}
    rated = swarm.rated(padded(after)) if after else None
    gained = now.gain([terms for _, terms in gone], rated.terms if rated else ())
    slowest = 0.0
    for row, group in enumerate(after):
        edges = itertools.accumulate((int(n) for n in rated.blocks[row][: len(group)]), initial=0) if rated else ()
        for i, (a, b) in zip(group, itertools.pairwise(edges), strict=True):
            held = stage_shards(manifest, *before[everybody[i].peer]) if everybody[i].peer in before else ()
            new = [shard for shard in stage_shards(manifest, a, b) if shard not in held]
            if everybody[i].peer in before:
                bits = 8 * sum(map(manifest.state_bytes, new))
                slowest = max(slowest, bits / float(swarm.down[i]))
    lost = slowest * float(with_others(np.array([terms for _, terms in gone]), swarm.others).sum())
    return lost <= gained * HORIZON_ROUNDS * swarm.shapes.round_seconds


def _result(
    manifest: Manifest, swarm: Swarm, everybody: Sequence[Candidate], now: Arrangement, old: dict[Group, Arranged]
) -> tuple[tuple[Arranged, ...], tuple[str, ...]]:
    staying = {group: rate for group, rate in zip(now.groups, now.rates, strict=True) if group in now.kept}
    new = [(g, r) for g, r in zip(now.groups, now.rates, strict=True) if g not in now.kept]
    replicas = [
        Arranged(members=replica.members, ranges=replica.ranges, rate=max(0.0, staying[group]))
        for group, replica in old.items()
        if group in staying
    ]
    if new:
        rows = padded([group for group, _ in new])
        rows, rates = search.polished(swarm, rows, np.array([rate for _, rate in new]), turns=1 if old else 4)
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
                    rate=max(0.0, float(rated.rate[n])),
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
