"""The planner's local search: small pools of peers are arranged anew as well as can be, again and again. Pure.

A pool has a few replicas and free peers that are near each other by some measure, cut into at most UNITS units: single members,
or runs of members of long chains. Every subset of the units is rated as one replica (protocol/planning/objective.py), and the best
partition into subsets and spares is found by dynamic programming over subsets,

    best(A) = max over B of A that has A's first unit of rate(B) + best(A - B),  or best(A without its first unit).

So one step can move, exchange, add or drop members, split a chain or join two, and turn a full replica into a stage. All pools of
a pass are computed at once, as arrays. Passes differ in what counts as near and in where chains are cut; the search ends when
passes bring nothing any more, or after a bounded number of rated rows. Nothing depends on chance or on the clock.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from protocol.planning import orders
from protocol.planning.objective import Swarm, padded
from protocol.planning.shapes import WHOLE, Floats, Ints

UNITS, SMALL = 7, 10
"""Of a pool; and peers of a swarm that is one pool, at most."""
GAIN = 1e-6
"""A pool is arranged anew where its rate grows by more than this share."""
KEYS = 5
"""By so many measures peers are near each other (`near`)."""
CUTS = (4, 7, 3, 2)
"""Into how many units a replica is cut at most, pass by pass."""
BATCH = 60_000
"""Rows that are rated at once, for the sake of memory."""

Group = tuple[int, ...]
"""Members of a replica in the order of their stages, by their numbers in the swarm."""


@dataclass(slots=True)
class Arrangement:
    """Replicas and their rates; `kept` are those of the last plan, `value` is what a replica counts in the search (a kept one more than its
    rate: what moves must pay)."""

    groups: list[Group]
    rates: list[float]
    free: set[int]
    kept: set[Group] = field(default_factory=set)
    bonus: float = 1.0

    @property
    def total(self) -> float:
        """Tokens per second."""
        return sum(self.rates)

    def value(self, group: Group, rate: float) -> float:
        """What a replica counts."""
        return rate * self.bonus if group in self.kept else rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """What is arranged anew together. `units`: runs of members and free peers; `replicas`: which units each of the replicas has, by
    its number in the arrangement, as bits."""

    units: tuple[Group, ...]
    replicas: dict[int, int]


Allowed = Callable[[Sequence[Group], Sequence[Group]], bool]
"""Whether groups may be replaced by others."""


def improve(swarm: Swarm, now: Arrangement, *, rows: int, allowed: Allowed | None = None) -> int:
    """Changes the arrangement for the better until nothing helps or about `rows` rows of UNITS places are rated; how many were."""
    used, quiet, turn = 0, 0, 0
    patience = 2 * KEYS
    only_new = bool(now.kept)
    solved: set[tuple[Group, ...]] = set()
    while quiet < patience and used < rows:
        pools = [pool for pool in make_pools(swarm, now, turn, only_new) if pool.units not in solved]
        solved.update(pool.units for pool in pools)
        before = now.total
        for start in range(0, len(pools), max(1, BATCH >> UNITS)):
            batch = pools[start : start + max(1, BATCH >> UNITS)]
            used += _solve(swarm, now, batch, False, allowed)
        tidy(now)
        quiet = quiet + 1 if now.total <= before * (1 + GAIN) else 0
        turn += 1
    return used


def solve_all(swarm: Swarm, now: Arrangement, allowed: Allowed | None = None) -> None:
    """Arranges a swarm of at most SMALL peers as well as can be, at once; every pair of ends of every chain is tried."""
    units: list[Group] = []
    replicas: dict[int, int] = {}
    for number, group in enumerate([*now.groups, *((peer,) for peer in sorted(now.free))]):
        if number < len(now.groups):
            replicas[number] = ((1 << len(group)) - 1) << len(units)
        units += [(peer,) for peer in group]
    _solve(swarm, now, [Pool(units=tuple(units), replicas=replicas)], True, allowed)
    tidy(now)


def split_chains(swarm: Swarm, now: Arrangement, allowed: Allowed | None = None) -> None:
    """Arranges anew each chain by itself that has a member who could hold the whole model: its memory may have grown since."""
    some = [n for n, g in enumerate(now.groups) if 1 < len(g) <= UNITS and swarm.caps[WHOLE, list(g)].any()]
    units = {n: tuple((peer,) for peer in now.groups[n]) for n in some}
    _solve(swarm, now, [Pool(units=units[n], replicas={n: (1 << len(units[n])) - 1}) for n in some], True, allowed)
    tidy(now)


def tidy(now: Arrangement) -> None:
    """Removes the replicas that were dissolved, or train nothing."""
    now.free.update(i for group, rate in zip(now.groups, now.rates, strict=True) if rate <= 0 for i in group)
    alive = [i for i, rate in enumerate(now.rates) if rate > 0]
    now.groups, now.rates = [now.groups[i] for i in alive], [now.rates[i] for i in alive]


# --- pools


def near(swarm: Swarm, now: Arrangement, turn: int) -> tuple[list[Group], list[int]]:
    """All items, replicas first and then free peers one by one, and their numbers in an order in which neighbours are near each other: by
    uplinks, by an axis of their coordinates, by speed, or in no order."""
    axes = [np.nan_to_num(axis) for axis in swarm.place.T if not np.isnan(axis).all()] or [swarm.down]
    axis = axes[turn // KEYS % len(axes)]
    key = (swarm.up, axis, _mixed(np.arange(len(axis)), turn), swarm.speed, _mixed(np.arange(len(axis)), -turn))[
        turn % KEYS
    ]
    items = [*now.groups, *((peer,) for peer in sorted(now.free))]
    rows = padded(items)
    there = rows >= 0
    at = np.where(there, key[rows], 0.0).sum(axis=1) / np.maximum(there.sum(axis=1), 1)
    return items, np.argsort(at, kind="stable").tolist()


def _mixed(numbers: Ints, turn: int) -> Floats:
    """Numbers without any order, the same every time (Knuth's multiplicative hash)."""
    mixed: Floats = ((numbers + 1) * 2_654_435_761 + (turn + 1) * 40_503 * (numbers + 7)) % 2**31 / 2**31
    return mixed


def make_pools(swarm: Swarm, now: Arrangement, turn: int, only_new: bool) -> list[Pool]:
    """Everybody, in pools of neighbours by the key of this turn; with `only_new` those pools in which something is not kept."""
    most = CUTS[turn // KEYS % len(CUTS)]
    items, order = near(swarm, now, turn)
    room = UNITS - turn % 3
    pools: list[Pool] = []
    units: list[Group] = []
    replicas: dict[int, int] = {}
    for number in [*order, -1]:
        parts = _cut(items[number], most, turn) if number >= 0 else []
        if units and (number < 0 or len(units) + len(parts) > room):
            pool = Pool(units=tuple(units), replicas=replicas)
            if _worth(now, pool, only_new):
                pools.append(pool)
            units, replicas, room = [], {}, UNITS
        if 0 <= number < len(now.groups):
            replicas[number] = ((1 << len(parts)) - 1) << len(units)
        units += parts
    return pools


def _worth(now: Arrangement, pool: Pool, only_new: bool) -> bool:
    """Whether something in it may change."""
    chains = any(len(now.groups[number]) > 1 for number in pool.replicas)
    free = len(pool.units) > sum(mask.bit_count() for mask in pool.replicas.values())
    new = free or any(now.groups[number] not in now.kept for number in pool.replicas)
    return len(pool.units) > 1 and (chains or free) and (new or not only_new)


def _cut(group: Group, most: int, turn: int) -> list[Group]:
    """A replica in at most `most` units: each member one, or some members alone and the others in runs."""
    if len(group) <= most:
        return [(peer,) for peer in group]
    if most == 2 or turn % 2:  # runs of about the same length
        edges = [len(group) * i // most for i in range(most + 1)]
        return [group[a:b] for a, b in itertools.pairwise(edges)]
    shift = turn * 3 % len(group)
    alone = [(shift + i * (len(group) // most + 1)) % len(group) for i in range(most - 1)]
    rest = tuple(peer for i, peer in enumerate(group) if i not in alone)
    return [*((group[i],) for i in sorted(set(alone))), rest]


# --- solving them


@functools.lru_cache(maxsize=16)
def _subsets(count: int) -> tuple[tuple[int, Ints], ...]:
    """For every set A of units, smaller A first: A, and all its subsets B that have A's first unit, the largest first."""
    found = []
    for whole in range(1, 1 << count):
        rest, parts = whole & (whole - 1), list[int]()
        part = rest
        while True:
            parts.append(part | (whole ^ rest))
            if not part:
                break
            part = (part - 1) & rest
        found.append((whole, np.array(parts)))
    return tuple(found)


def _solve(swarm: Swarm, now: Arrangement, pools: Sequence[Pool], thorough: bool, allowed: Allowed | None) -> int:
    """Arranges the pools anew where that is better; how many rows of UNITS places were rated."""
    if not pools:
        return 0
    count = max(len(pool.units) for pool in pools)
    values, owner, members, rated = _rate(swarm, pools, count, thorough)
    for p, pool in enumerate(pools):
        for number, mask in pool.replicas.items():
            own = now.value(now.groups[number], now.rates[number])
            values[p, mask] = max(values[p, mask], own)
    best = np.zeros((len(pools), 1 << count))
    choice = np.zeros((len(pools), 1 << count), dtype=np.int64)
    every = np.arange(len(pools))
    for whole, parts in _subsets(count):
        found = values[:, parts] + best[:, whole ^ parts]
        top = found.argmax(axis=1)
        without = best[:, whole & (whole - 1)]  # its first unit may be left out
        better = found[every, top] > without
        best[:, whole] = np.where(better, found[every, top], without)
        choice[:, whole] = np.where(better, parts[top], 0)
    for p, pool in enumerate(pools):
        _adopt(now, pool, choice[p], (owner[p], members, rated), allowed)
    return members.size // UNITS


def _rate(swarm: Swarm, pools: Sequence[Pool], count: int, thorough: bool) -> tuple[Floats, Ints, Ints, Floats]:
    """[pools, 2^units] the rate of every subset and the row in which it stands; the rows, in their best order; and their rates."""
    width = max(len(unit) for pool in pools for unit in pool.units)
    units = np.full((len(pools), count, width), -1, dtype=np.int64)
    for p, pool in enumerate(pools):
        for u, unit in enumerate(pool.units):
            units[p, u, : len(unit)] = unit
    chosen = (np.arange(1 << count)[:, None] >> np.arange(count)) & 1 == 1  # [2^units, units]
    empty = units[:, :, 0] < 0
    real = ~(chosen[None] & empty[:, None, :]).any(axis=2)
    real[:, 0] = False
    sizes = (units >= 0).sum(axis=2)
    real &= (chosen[None] * sizes[:, None, :]).sum(axis=2) <= swarm.shapes.layers
    most = np.maximum(swarm.caps[:3].max(axis=0), swarm.caps[3])
    room = np.where(units >= 0, most[units], 0).sum(axis=2)
    real &= (chosen[None] * room[:, None, :]).sum(axis=2) >= swarm.shapes.layers
    where, mask = np.nonzero(real)
    rows = np.where(chosen[mask][:, :, None], units[where], -1).reshape(len(where), count * width)
    rows = np.take_along_axis(rows, np.argsort(rows < 0, axis=1, kind="stable"), axis=1)
    longest = int((rows >= 0).sum(axis=1).max(initial=1))
    rows, rated = orders.best(swarm, rows[:, :longest], thorough)
    if thorough:
        rated = swarm.refined(rows, rated)
    values = np.zeros((len(pools), 1 << count))
    values[where, mask] = rated.rate
    owner = np.zeros(values.shape, dtype=np.int64)
    owner[where, mask] = np.arange(len(where))
    return values, owner, rows, rated.rate


def _adopt(
    now: Arrangement, pool: Pool, choice: Ints, found: tuple[Ints, Ints, Floats], allowed: Allowed | None
) -> None:
    """Takes over the best partition of a pool, if it gains and may be."""
    owner, rows, rates = found
    old = {mask: number for number, mask in pool.replicas.items()}
    value = {number: now.value(now.groups[number], now.rates[number]) for number in pool.replicas}
    after: list[tuple[Group, float]] = []
    spare: list[int] = []
    gone, total, left = set(value), 0.0, (1 << len(pool.units)) - 1
    while left:
        part = int(choice[left])
        number, row = old.get(part, -1), owner[part]
        if not part:
            spare += pool.units[(left & -left).bit_length() - 1]
            part = left & -left
        elif number >= 0 and value[number] >= rates[row]:
            gone.discard(number)
            total += value[number]
        else:
            after.append((tuple(int(peer) for peer in rows[row] if peer >= 0), float(rates[row])))
            total += float(rates[row])
        left ^= part
    dissolved = [now.groups[number] for number in sorted(gone)]
    if total <= sum(value.values()) * (1 + GAIN) or (allowed and not allowed(dissolved, [g for g, _ in after])):
        return
    now.free.difference_update(peer for unit in pool.units for peer in unit)
    now.free.update(spare)
    for number in gone:
        now.kept.discard(now.groups[number])
        now.groups[number], now.rates[number] = (), 0.0
    for group, rate in after:
        now.groups.append(group)
        now.rates.append(rate)
