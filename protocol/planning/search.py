"""Local search over the members of replicas: orders within a chain, small pools, and single moves. Pure.

*Orders.* The ends of a chain need more memory (embedding, head), the last stage computes the head, and an end's link
carries one boundary where inner links carry two. So orders differ by their two ends: `few_orders` tries promising ends,
`all_orders` all of them. Inner members stand as their coordinates lie on the way from one end to the other.

*Pools.* A pool has a few replicas and free peers that are near each other by some measure, cut into at most UNITS
units: single members, or runs of members of long chains. Every subset of the units is rated as one replica
(protocol/planning/objective.py). Dynamic programming over subsets finds the best partition into replicas and spares:

    best(A) = max over B of A that has A's first unit of rate(B) + best(A - B),  or best(A without its first unit).

All pools of a pass are computed at once. Passes differ in the measure and in the cuts; the search ends when passes gain
nothing, or after a bounded number of rated rows.

*Moves.* Between two replicas a member moves or two are exchanged; between a replica and the free peers a member is
added, dropped or replaced. The best moves that touch different replicas are made.

*Price.* Every replica costs the others tokens (`others` in protocol/planning/objective.py). Rates are those beside as
many others as there are when a pass begins. In pools a replica counts less by the price of one more of them; what a
pool really gains, with all others, is looked at before it is arranged anew (`Arrangement.gain`).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from protocol.planning.objective import OWN, PRICED, SPARE, Rated, Swarm, padded, with_others
from protocol.planning.shapes import FIRST, LAST, MIDDLE, WHOLE, Flags, Floats, Ints

ALL = 5
"""Members of a chain of which all orders are tried, where orders are tried thoroughly."""


def few_orders(swarm: Swarm, rows: Ints) -> Iterator[Ints]:
    """Some orders of the rows that are likely to be good."""
    there = rows >= 0
    caps = swarm.caps
    first_loss, last_loss = (
        np.where(there & (caps[kind, rows] > 0), caps[MIDDLE, rows] - caps[kind, rows], 10**9).astype(np.float64)
        for kind in (FIRST, LAST)
    )
    link = np.where(there, np.minimum(swarm.up[rows], swarm.down[rows]), math.inf)
    speed = np.where(there, swarm.speed[rows], 0.0)
    quick = speed / (1 + speed.max(axis=1, keepdims=True))
    slow_link = link / (1 + np.where(there, link, 0.0).max(axis=1, keepdims=True))
    for last_key, first_key in (
        (last_loss - quick, first_loss + slow_link),
        (slow_link + last_loss, slow_link + first_loss),
    ):
        last, first = _two(there, last_key, first_key)
        yield between(swarm, rows, first, last)
    first, last = _two(there, first_loss + slow_link, last_loss - quick)
    yield between(swarm, rows, first, last)
    if not np.isnan(swarm.place).all():
        axis = swarm.place[rows]
        spread = np.where(there[:, :, None] & ~np.isnan(axis), axis, np.nan)
        low, high = np.where(np.isnan(spread), math.inf, spread), np.where(np.isnan(spread), -math.inf, spread)
        widest = np.argmax(high.max(axis=1) - low.min(axis=1), axis=1)
        along = np.arange(len(rows)), slice(None), widest
        first, last = np.argmin(low[along], axis=1), np.argmax(high[along], axis=1)
        last = np.where(first == last, (first + 1) % np.maximum(there.sum(axis=1), 1), last)
        yield between(swarm, rows, first, last)
        yield between(swarm, rows, last, first)


def all_orders(swarm: Swarm, rows: Ints) -> tuple[Ints, Ints]:
    """The rows in all orders, or with all pairs at the ends above ALL members; and the row of each."""
    size = (rows >= 0).sum(axis=1)
    found: list[Ints] = []
    which: list[Ints] = []
    for members in range(1, rows.shape[1] + 1):
        some = np.flatnonzero(size == members)
        if members > ALL:
            for first, last in itertools.permutations(range(members), 2):
                found.append(between(swarm, rows[some], np.full(len(some), first), np.full(len(some), last)))
                which.append(some)
            continue
        for order in itertools.permutations(range(members)):
            ordered = rows[some]
            ordered[:, :members] = ordered[:, order]
            found.append(ordered)
            which.append(some)
    return np.asfortranarray(np.concatenate(found)), np.concatenate(which)


def between(swarm: Swarm, rows: Ints, first: Ints, last: Ints) -> Ints:
    """[N, S]: the rows with the members at these places [N] at their ends."""
    number = np.arange(len(rows))
    key = np.zeros(rows.shape, order="F")
    for axis in swarm.place.T:
        start, end = axis[rows[number, first]], axis[rows[number, last]]
        key += np.nan_to_num((axis[rows] - start[:, None]) * (end - start)[:, None])
    key[number, first] = -math.inf
    key[number, last] = 1e300
    key[rows < 0] = math.inf
    return np.asfortranarray(np.take_along_axis(rows, np.argsort(key, axis=1, kind="stable"), axis=1))


def _two(there: Flags, key: Floats, other_key: Floats) -> tuple[Ints, Ints]:
    """[N] each: the place with the smallest key, and of the other places the one with the smallest other key."""
    one = np.argmin(np.where(there, key, math.inf), axis=1)
    others = there.copy()
    others[np.arange(len(one)), one] = False
    return one, np.argmin(np.where(others, other_key, math.inf), axis=1)


def best_orders(swarm: Swarm, rows: Ints, thorough: bool) -> tuple[Ints, Rated]:
    """The rows in the best of the orders tried, a few, or with `thorough` many, each of them rated in full."""
    rows = np.asfortranarray(rows)
    if rows.shape[1] < 2:
        return rows, swarm.rated(rows)
    found = rows.copy()
    if not thorough:
        least = np.full(len(rows), math.inf)
        for order in few_orders(swarm, rows):
            seconds = swarm.at_least(order)
            better = seconds < least * (1 - 1e-9)
            found[better], least[better] = order[better], seconds[better]
        return found, swarm.rated(found)
    tried, which = all_orders(swarm, rows)
    fits = swarm.fits(tried)
    tried, which = tried[fits], which[fits]
    all_rated = swarm.rated(tried)
    order = np.argsort(-all_rated.rate, kind="stable")
    top, first_at = np.unique(which[order], return_index=True)
    blocks, terms = np.zeros_like(rows), np.zeros((len(rows), 4))
    at = order[first_at]
    found[top], blocks[top], terms[top] = tried[at], all_rated.blocks[at], all_rated.terms[at]
    return found, swarm.as_rated(blocks, terms)


def polished(swarm: Swarm, rows: Ints, rate: Floats, turns: int) -> tuple[Ints, Floats]:
    """The rows after at most `turns` exchanges of two members, each the one that gains most."""
    rows, rate = rows.copy(), rate.copy()
    todo = np.flatnonzero((rows >= 0).sum(axis=1) > 1)
    for _ in range(turns):
        if not len(todo):
            break
        size = (rows[todo] >= 0).sum(axis=1)
        top, order = rate[todo].copy(), rows[todo].copy()
        for i, j in _exchanges(int(size.max())):
            exchanged = rows[todo]
            some = np.flatnonzero(size > max(i, j))
            places = np.stack([np.full(len(some), i), np.full(len(some), j) if j >= 0 else size[some] - 1], axis=1)
            exchanged[some[:, None], places] = exchanged[some[:, None], places[:, ::-1]]
            found = swarm.rated(exchanged[some]).rate
            better = found > top[some] * (1 + 1e-6)
            order[some[better]], top[some[better]] = exchanged[some[better]], found[better]
        gained = top > rate[todo]
        rows[todo], rate[todo] = order, top
        todo = todo[gained]
    return rows, rate


def _exchanges(longest: int) -> list[tuple[int, int]]:
    """Pairs of places; -1: the last."""
    ends = [pair for j in range(1, longest) for pair in ((0, j), (j, -1))]
    return [*ends, *((j, j + 1) for j in range(1, longest - 1))]


UNITS, SMALL = 7, 10
"""Of a pool; and peers of a swarm that is one pool, at most."""
GAIN = 1e-6
"""A pool is arranged anew where its rate grows by more than this share."""
KEYS = 5
"""By so many measures peers are near each other (`near`)."""
CUTS = (4, 7, 3, 2)
"""Into how many units a replica is cut at most, pass by pass."""
BATCH = 60_000
LEAST_SPARES, SPARES_A_MEMBER, WITH_KEPT = 100, 4, 1
"""How many of the free peers are tried where not all are needed: for each peer with a part; and where some are kept."""

Group = tuple[int, ...]
"""Members of a replica in the order of their stages, by their numbers in the swarm."""


class Arrangement:
    """Replicas with their terms and rates. kept: those of the last plan, which count `bonus` times: a move must pay.

    groups: () for a replica that was dissolved; rates: beside as many others as there were when `settle` was called
    beside: replicas that are planned elsewhere
    """

    def __init__(
        self, swarm: Swarm, kept: Mapping[Group, Floats], free: set[int], bonus: float = 1.0, beside: int = 0
    ) -> None:
        self._swarm, self.free, self.kept, self.bonus, self._beside = swarm, free, set(kept), bonus, beside
        self.groups: list[Group] = list(kept)
        self.terms: list[Floats] = list(kept.values())
        self.rates: list[float] = []
        self._fetched = swarm.fetched(np.arange(beside + len(swarm.speed) + 1, dtype=np.float64))
        """By the number of other replicas."""
        self.settle()

    def copy(self) -> Arrangement:
        """Another one with the same replicas."""
        same = dict(zip(self.groups, self.terms, strict=True))
        found = Arrangement(self._swarm, same, set(self.free), self.bonus, self._beside)
        found.kept = set(self.kept)
        return found

    def settle(self) -> None:
        """Removes the replicas that were dissolved or train nothing, and rates the others beside each other."""
        self.free.update(i for group, t in zip(self.groups, self.terms, strict=True) if t[OWN] <= 0 for i in group)
        alive = [i for i, group in enumerate(self.groups) if group and self.terms[i][OWN] > 0]
        self.groups, self.terms = [self.groups[i] for i in alive], [self.terms[i] for i in alive]
        terms, self._count = np.array(self.terms).reshape(-1, 4), self._beside + len(alive)
        self._swarm.others = float(self._fetched[max(0, self._count - 1)])
        self.rates = with_others(terms, self._swarm.others).tolist()
        self._own, self._lost = float(terms[:, OWN].sum()), lost_beside(terms, self._fetched)

    def spares(self) -> list[int]:
        """The free peers that are tried: where replicas have a price, only the best, about as many as have a part."""
        free = np.array(sorted(self.free), dtype=np.int64)
        most = max(LEAST_SPARES, (WITH_KEPT if self.kept else SPARES_A_MEMBER) * sum(map(len, self.groups)))
        if not self.price or len(free) <= most:
            return [int(i) for i in free]
        speed, up = (x / np.median(x) for x in (self._swarm.speed, self._swarm.up))
        useful = np.where(self._swarm.caps[WHOLE] > 0, speed, np.minimum(speed, up))
        return sorted(int(i) for i in free[np.argsort(-useful[free], kind="stable")[:most]])

    @property
    def total(self) -> float:
        """Tokens per second of all replicas."""
        return self._own - float(self._lost[max(0, self._count - 1)])

    @property
    def price(self) -> float:
        """Tokens per second that one more replica costs the others."""
        return float(self._lost[self._count] - self._lost[self._count - 1]) if self._count else 0.0

    def value(self, number: int) -> float:
        """What a replica counts for."""
        return self.rates[number] * (self.bonus if self.groups[number] in self.kept else 1.0)

    def gain(self, gone: Iterable[Floats], after: Iterable[Floats]) -> float:
        """Tokens per second that all replicas gain where those with the terms `gone` become those of `after`."""
        changed = [*((1, terms) for terms in after), *((-1, terms) for terms in gone)]
        others = max(0, self._count + sum(sign for sign, _ in changed) - 1)
        own = sum(sign * float(t[OWN]) for sign, t in changed)
        fetched = float(self._fetched[others])
        lost = sum(sign * float(t[PRICED]) * max(0.0, fetched - float(t[SPARE])) for sign, t in changed)
        return self._own + own - float(self._lost[others]) - lost - self.total

    def pays(self, gone: Collection[int], after: Sequence[Floats], worth: float) -> bool:
        """Whether it gains enough of `worth` if the replicas `gone` become others; the bonus of kept ones is lost."""
        bonus = sum(self.value(number) - self.rates[number] for number in gone)
        return self.gain([self.terms[number] for number in gone], after) - bonus > GAIN * worth

    def dissolve(self, number: int) -> None:
        """Removes a replica, whose members are not free yet."""
        self.kept.discard(self.groups[number])
        self._change(self.terms[number], -1)
        self.groups[number], self.rates[number] = (), 0.0

    def add(self, group: Group, terms: Floats) -> None:
        """Adds a replica, whose members are free no more."""
        self.groups.append(group)
        self.terms.append(terms)
        self.rates.append(float(with_others(terms[None], self._swarm.others)[0]))
        self._change(terms, 1)
        self.free.difference_update(group)

    def _change(self, terms: Floats, sign: int) -> None:
        self._count += sign
        self._own += sign * float(terms[OWN])
        self._lost += sign * terms[PRICED] * np.maximum(0.0, self._fetched - terms[SPARE])


def lost_beside(terms: Floats, numbers: Floats) -> Floats:
    """[K]: tokens per second that replicas with these terms lose, each of them beside so many others [K]."""
    order = np.argsort(terms[:, SPARE], kind="stable")
    lost, spare = terms[order, PRICED], terms[order, SPARE]
    slopes, offsets = (np.concatenate([[0.0], x.cumsum()]) for x in (lost, lost * spare))
    until = np.searchsorted(spare, numbers, side="left")
    found: Floats = numbers * slopes[until] - offsets[until]
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Units to arrange. replicas: the units of each replica, as bits, by its number in the arrangement."""

    units: tuple[Group, ...]
    replicas: dict[int, int]


Allowed = Callable[[Sequence[Group], Sequence[Group]], bool]
"""Whether groups may be replaced by others."""


def add_worthy(now: Arrangement, found: Iterable[tuple[Group, Floats]]) -> None:
    """Adds replicas of free peers, best first, as long as they bring more than they cost the others."""
    for group, terms in sorted(found, key=lambda one: -one[1][OWN]):
        if terms[OWN] <= now.price:
            break
        if now.pays((), [terms], terms[OWN]):
            now.add(group, terms)
    now.settle()


def drop_costly(now: Arrangement, allowed: Allowed | None = None) -> None:
    """Dissolves replicas that bring less than they cost the others, one after the other."""
    while True:
        worth = [n for n, rate in enumerate(now.rates) if rate < now.price and now.pays((n,), (), abs(rate))]
        worth.sort(key=lambda n: (now.value(n), n))
        number = next((n for n in worth if not allowed or allowed([now.groups[n]], [])), None)
        if number is None:
            return
        now.free.update(now.groups[number])
        now.dissolve(number)
        now.settle()


def improve_pools(swarm: Swarm, now: Arrangement, *, rows: int, allowed: Allowed | None = None) -> int:
    """Improves the arrangement until nothing helps or about `rows` rows are rated; the number of rows."""
    used, quiet, turn = 0, 0, 0
    patience = 2 * KEYS
    solved: set[tuple[Group, ...]] = set()
    while quiet < patience and used < rows:
        pools = [pool for pool in make_pools(swarm, now, turn) if pool.units not in solved]
        solved.update(pool.units for pool in pools)
        before = now.total
        for start in range(0, len(pools), max(1, BATCH >> UNITS)):
            batch = pools[start : start + max(1, BATCH >> UNITS)]
            used += _solve(swarm, now, batch, False, allowed)
        now.settle()
        quiet = quiet + 1 if now.total <= before * (1 + GAIN) else 0
        turn += 1
    return used


def solve_all(swarm: Swarm, now: Arrangement, allowed: Allowed | None = None) -> None:
    """Arranges a swarm of at most SMALL peers at once; every pair of ends of every chain is tried."""
    before = -math.inf
    while now.total > before:
        before = now.total
        units: list[Group] = []
        replicas: dict[int, int] = {}
        for number, group in enumerate([*now.groups, *((peer,) for peer in sorted(now.free))]):
            if number < len(now.groups):
                replicas[number] = ((1 << len(group)) - 1) << len(units)
            units += [(peer,) for peer in group]
        _solve(swarm, now, [Pool(units=tuple(units), replicas=replicas)], True, allowed)
        now.settle()
        if not now.price:
            return


def split_chains(swarm: Swarm, now: Arrangement, allowed: Allowed | None = None) -> None:
    """Arranges each chain anew that has a member able to hold the whole model: its memory may have grown."""
    some = [n for n, g in enumerate(now.groups) if 1 < len(g) <= UNITS and swarm.caps[WHOLE, list(g)].any()]
    units = {n: tuple((peer,) for peer in now.groups[n]) for n in some}
    _solve(swarm, now, [Pool(units=units[n], replicas={n: (1 << len(units[n])) - 1}) for n in some], True, allowed)
    now.settle()


# --- pools


def near(swarm: Swarm, now: Arrangement, turn: int) -> tuple[list[Group], list[int]]:
    """All items, and an order in which neighbours are near: by uplink, an axis, speed, or pseudo-random."""
    axes = [np.nan_to_num(axis) for axis in swarm.place.T if not np.isnan(axis).all()] or [swarm.down]
    axis = axes[turn // KEYS % len(axes)]
    key = (swarm.up, axis, _mixed(np.arange(len(axis)), turn), swarm.speed, _mixed(np.arange(len(axis)), -turn))[
        turn % KEYS
    ]
    items = [*now.groups, *((peer,) for peer in now.spares())]
    rows = padded(items)
    there = rows >= 0
    at = np.where(there, key[rows], 0.0).sum(axis=1) / np.maximum(there.sum(axis=1), 1)
    return items, np.argsort(at, kind="stable").tolist()


def _mixed(numbers: Ints, turn: int) -> Floats:
    """Numbers without any order, the same every time (Knuth's multiplicative hash)."""
    mixed: Floats = ((numbers + 1) * 2_654_435_761 + (turn + 1) * 40_503 * (numbers + 7)) % 2**31 / 2**31
    return mixed


def make_pools(swarm: Swarm, now: Arrangement, turn: int) -> list[Pool]:
    """All items, in pools of neighbours by this turn's key."""
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
            if _worth(now, pool):
                pools.append(pool)
            units, replicas, room = [], {}, UNITS
        if 0 <= number < len(now.groups):
            replicas[number] = ((1 << len(parts)) - 1) << len(units)
        units += parts
    return pools


def _worth(now: Arrangement, pool: Pool) -> bool:
    chains = any(len(now.groups[number]) > 1 or now.rates[number] < now.price for number in pool.replicas)
    free = len(pool.units) > sum(mask.bit_count() for mask in pool.replicas.values())
    return len(pool.units) > 1 and (chains or free)


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
    """For every set A of units, smaller ones first: A, and its subsets B with A's first unit, the largest first."""
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
            values[p, mask] = max(values[p, mask], now.value(number))
    values -= now.price
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


def _rate(swarm: Swarm, pools: Sequence[Pool], count: int, thorough: bool) -> tuple[Floats, Ints, Ints, Rated]:
    """[pools, 2^units] the rate of every subset, and the row of each; the rows in their best order, rated."""
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
    rows, rated = best_orders(swarm, rows[:, :longest], thorough)
    if thorough:
        rated = swarm.refined(rows, rated)
    values = np.zeros((len(pools), 1 << count))
    values[where, mask] = rated.rate
    owner = np.zeros(values.shape, dtype=np.int64)
    owner[where, mask] = np.arange(len(where))
    return values, owner, rows, rated


def _adopt(
    now: Arrangement, pool: Pool, choice: Ints, found: tuple[Ints, Ints, Rated], allowed: Allowed | None
) -> None:
    """Takes over the best partition of a pool, if it gains and may be."""
    owner, rows, rated = found
    old = {mask: number for number, mask in pool.replicas.items()}
    after: list[tuple[Group, Floats]] = []
    spare: list[int] = []
    gone, left = set(pool.replicas), (1 << len(pool.units)) - 1
    while left:
        part = int(choice[left])
        number, row = old.get(part, -1), owner[part]
        if not part:
            spare += pool.units[(left & -left).bit_length() - 1]
            part = left & -left
        elif number >= 0 and now.value(number) >= rated.rate[row]:
            gone.discard(number)
        else:
            after.append((tuple(int(peer) for peer in rows[row] if peer >= 0), rated.terms[row]))
        left ^= part
    if not now.pays(gone, [terms for _, terms in after], sum(now.value(number) for number in pool.replicas)):
        return
    if allowed and not allowed([now.groups[number] for number in sorted(gone)], [group for group, _ in after]):
        return
    for number in sorted(gone):
        now.dissolve(number)
    now.free.difference_update(peer for unit in pool.units for peer in unit)
    now.free.update(spare)
    for group, terms in after:
        now.add(group, terms)


FREE_TRIED = 8
"""Free peers that are tried with a replica at a time,"""
NEIGHBOURS = 4
"""and other replicas."""
QUIET = 2
"""Passes without any gain before the search ends; each has other neighbours."""
MOVE_BATCH = 30_000


@dataclass(frozen=True, slots=True)
class Move:
    """New members of the replicas `numbers`, and free peers that join or leave them."""

    numbers: tuple[int, ...]
    groups: tuple[Group, ...]
    joins: Group = ()
    leaves: Group = ()


def improve_moves(swarm: Swarm, now: Arrangement, *, rows: int, allowed: Allowed | None = None) -> int:
    """Makes moves until none gains or about `rows` rows are rated; the number of rows that were."""
    used, turn, quiet = 0, 0, 0
    while used < rows and quiet < QUIET:
        longest = 1 + max(map(len, now.groups), default=0)
        most = max(1, min(MOVE_BATCH, (rows - used) // 2) * UNITS // max(UNITS, longest))
        batch = list(itertools.islice(_moves(swarm, now, turn), most))
        gained = bool(batch) and _make(swarm, now, batch, allowed)
        used += 2 * len(batch) * longest // UNITS + 1
        now.settle()
        quiet = 0 if gained else quiet + 1
        turn += 1
    return used


def _moves(swarm: Swarm, now: Arrangement, turn: int) -> Iterator[Move]:
    """All moves of replicas with their neighbours by this turn's key; none between two kept replicas."""
    items, order = near(swarm, now, turn)
    replicas = [n for n in order if n < len(now.groups)]
    free = [(at, items[n][0]) for at, n in enumerate(order) if n >= len(now.groups)]
    places = np.array([at for at, _ in free])
    at_of = {n: at for at, n in enumerate(order)}
    for position, a in enumerate(replicas):
        group = now.groups[a]
        start = int(np.searchsorted(places, at_of[a])) - FREE_TRIED // 2 if free else 0
        for _, peer in free[max(0, start) : max(0, start) + FREE_TRIED]:
            yield Move((a,), ((*group, peer),), (peer,))
            for i, member in enumerate(group):
                yield Move((a,), ((*group[:i], peer, *group[i + 1 :]),), (peer,), (member,))
        for b in replicas[position + 1 : position + 1 + NEIGHBOURS]:
            other = now.groups[b]
            if (len(group) > 1 or len(other) > 1) and not (group in now.kept and other in now.kept):
                yield from _between((a, b), group, other)
        if len(group) > 2 and group not in now.kept:
            for i, member in enumerate(group):
                yield Move((a,), ((*group[:i], *group[i + 1 :]),), (), (member,))


def _between(numbers: tuple[int, int], one: Group, other: Group) -> Iterator[Move]:
    for i, x in enumerate(one):
        without = (*one[:i], *one[i + 1 :])
        if without:
            yield Move(numbers, (without, (*other, x)))
        for j, y in enumerate(other):
            yield Move(numbers, ((*one[:i], y, *one[i + 1 :]), (*other[:j], x, *other[j + 1 :])))
    for j, y in enumerate(other):
        rest = (*other[:j], *other[j + 1 :])
        if rest:
            yield Move(numbers, ((*one, y), rest))


def _make(swarm: Swarm, now: Arrangement, moves: Sequence[Move], allowed: Allowed | None) -> bool:
    """Makes those of the moves that gain most; whether there was one."""
    groups = [group for move in moves for group in move.groups]
    rows = padded(groups)
    found, rated = best_orders(swarm, rows, thorough=False)
    edges = np.cumsum([0, *(len(move.groups) for move in moves)])
    total = np.add.reduceat(rated.rate, edges[:-1])
    before = np.array([sum(now.value(n) for n in move.numbers) for move in moves])
    gain = np.where(total > before * (1 + GAIN), total - before, 0.0)
    touched: set[int] = set()
    taken: set[int] = set()
    made = False
    for m in np.argsort(-gain, kind="stable").tolist():
        move = moves[m]
        if gain[m] <= 0:
            break
        if touched.intersection(move.numbers) or taken.intersection(move.joins):
            continue
        after = [tuple(int(i) for i in row if i >= 0) for row in found[edges[m] : edges[m + 1]]]
        if allowed and not allowed([now.groups[n] for n in move.numbers], after):
            continue
        touched.update(move.numbers)
        taken.update(move.joins)
        for number, group, terms in zip(move.numbers, after, rated.terms[edges[m] : edges[m + 1]], strict=True):
            now.kept.discard(now.groups[number])
            now.groups[number], now.terms[number] = group, terms  # as many as before, so that rates stay as they are
        now.free.difference_update(move.joins)
        now.free.update(move.leaves)
        made = True
    return made
