"""The planner's other local search: single members change places. Pure.

Between two replicas a member moves or two members are exchanged; between a replica and the free peers a member is added,
dropped or replaced. The moves of many pairs are rated at once, and those that gain most are made, as far as they touch
different replicas. protocol/planning/pools.py finds what takes several moves at once, this what a pool is too small to see: members of
long chains that should change places.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from protocol.planning import orders
from protocol.planning.objective import Swarm, padded
from protocol.planning.pools import GAIN, UNITS, Allowed, Arrangement, Group, near, tidy

FREE_TRIED = 8
"""Free peers that are tried with a replica at a time,"""
NEIGHBOURS = 4
"""and other replicas."""
QUIET = 2
"""Passes without any gain before the search ends; each has other neighbours."""
BATCH = 30_000


@dataclass(frozen=True, slots=True)
class Move:
    """What becomes of the replicas of these numbers: their new members, in no order; and the free peers then, as those that join
    them and that leave them."""

    numbers: tuple[int, ...]
    groups: tuple[Group, ...]
    joins: Group = ()
    leaves: Group = ()


def improve(swarm: Swarm, now: Arrangement, *, rows: int, allowed: Allowed | None = None) -> int:
    """Makes moves until none gains or about `rows` rows are rated; the number of rows that were."""
    used, turn, quiet = 0, 0, 0
    while used < rows and quiet < QUIET:
        longest = 1 + max(map(len, now.groups), default=0)
        most = max(1, min(BATCH, (rows - used) // 2) * UNITS // max(UNITS, longest))
        batch = list(itertools.islice(_moves(swarm, now, turn), most))
        gained = bool(batch) and _make(swarm, now, batch, allowed)
        used += 2 * len(batch) * longest // UNITS + 1
        tidy(now)
        quiet = 0 if gained else quiet + 1
        turn += 1
    return used


def _moves(swarm: Swarm, now: Arrangement, turn: int) -> Iterator[Move]:
    """All moves of every replica with its neighbours by the key of this turn; kept replicas do not move among themselves."""
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
    found, rated = orders.best(swarm, rows, thorough=False)
    edges = np.cumsum([0, *(len(move.groups) for move in moves)])
    total = np.add.reduceat(rated.rate, edges[:-1])
    before = np.array([sum(now.value(now.groups[n], now.rates[n]) for n in move.numbers) for move in moves])
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
        for number, group, rate in zip(move.numbers, after, rated.rate[edges[m] : edges[m + 1]], strict=True):
            now.kept.discard(now.groups[number])
            now.groups[number], now.rates[number] = group, float(rate)
        now.free.difference_update(move.joins)
        now.free.update(move.leaves)
        made = True
    return made
