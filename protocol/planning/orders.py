"""In which order the members of a chain stand: who has the embedding, who has the head, and who talks to whom. Pure.

The ends of a chain need more memory than its middle (embedding, head), the head is computed as well, and an end's link carries one
boundary where others carry two. So what decides are the two ends. `few` tries those that look best, `many` all of them. Between
them members stand as their places lie on the way from one end to the other, which is short where peers lie in a few regions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np

from protocol.planning.objective import Rated, Swarm
from protocol.planning.shapes import FIRST, LAST, MIDDLE, Flags, Floats, Ints

ALL = 5
"""Members of a chain of which all orders are tried, where orders are tried thoroughly."""


def few(swarm: Swarm, rows: Ints) -> Iterator[Ints]:
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


def many(swarm: Swarm, rows: Ints) -> tuple[Ints, Ints]:
    """The rows in all orders, those of more than ALL members with every pair of them at the ends; one row each, and the numbers
    of the rows that they are."""
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


def best(swarm: Swarm, rows: Ints, thorough: bool) -> tuple[Ints, Rated]:
    """The rows in the best of the orders tried, a few, or with `thorough` many, each of them rated in full."""
    rows = np.asfortranarray(rows)
    if rows.shape[1] < 2:
        return rows, swarm.rated(rows)
    found = rows.copy()
    if not thorough:
        least = np.full(len(rows), math.inf)
        for order in few(swarm, rows):
            seconds = swarm.at_least(order)
            better = seconds < least * (1 - 1e-9)
            found[better], least[better] = order[better], seconds[better]
        return found, swarm.rated(found)
    tried, which = many(swarm, rows)
    fits = swarm.fits(tried)
    tried, which = tried[fits], which[fits]
    all_rated = swarm.rated(tried)
    order = np.argsort(-all_rated.rate, kind="stable")
    top, first_at = np.unique(which[order], return_index=True)
    blocks, rate, rank = np.zeros_like(rows), np.zeros(len(rows)), np.zeros(len(rows), dtype=np.int64)
    at = order[first_at]
    found[top], blocks[top], rate[top], rank[top] = (
        tried[at],
        all_rated.blocks[at],
        all_rated.rate[at],
        all_rated.rank[at],
    )
    return found, Rated(blocks=blocks, rate=rate, rank=rank)


def polished(swarm: Swarm, rows: Ints, rate: Floats, turns: int) -> tuple[Ints, Floats]:
    """The rows after at most so many turns of the exchange of two members, neighbours or an end and another, that gains most."""
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
