"""Cost of an inner step of a chain, and the number of micro-batches under way that it needs. Pure.

Simulates the schedule of peer/chain/pipeline.py: a free stage goes forward and backward in turn; the first stage lets
at most `depth` micro-batches in, and a stage goes forward with no more than it has memory for (`Depths.window`); the
last goes backward right after forward. A boundary carries one frame at a time in each direction, first in, first out.

With F, B of the slowest stage, c a frame's transfer and l the latency, a step of M micro-batches through S equal stages
takes M (F + B) + (S - 1) (F + B + 2 c + 2 l) if only the fill is waited for. By Little's law that needs

    depth >= (sum of F + B over stages + sum of 2 c + 2 l over boundaries) / max(F + B, c)
"""

from __future__ import annotations

import functools
import heapq
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

TOLERANCE = 0.01
"""A depth is deep enough if the step takes at most this share longer than at any greater depth that was tried."""
RECOMPUTE_PAYS = 0.95
"""To compute activations anew pays where a step takes at most so much of the time."""
DEPTH_MARGIN = 1.5
"""How much deeper than the simulation wants: it knows mean times, and real ones vary."""
_SLACK = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Depths:
    """Micro-batches under way for which a stage has memory, plain <= held <= most.

    plain: with all activations; held: with those of `plain`, others waiting; most: with recomputation
    """

    plain: int
    held: int
    most: int

    def window(self, depth: int, again: bool) -> int:
        """Micro-batches of `depth` between forward and backward at this stage; all if it recomputes (`again`)."""
        return depth if again else min(depth, self.plain)


_ANY = 2**32 - 1
UNBOUNDED = Depths(plain=_ANY, held=_ANY, most=_ANY)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """Seconds of computing per micro-batch."""

    forward: float
    backward: float
    depths: Depths = UNBOUNDED


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCost:
    """One boundary. `forward`, `backward`: seconds a frame occupies it (bytes / rate); `latency`: one-way seconds."""

    forward: float
    backward: float
    latency: float


Twice = Callable[[Sequence[StageCost], Sequence[LinkCost], int, int], bool]
"""Whether a stage computes activations twice; as `computes_twice`."""


def step_seconds(
    stages: Sequence[StageCost],
    links: Sequence[LinkCost],
    micro_batches: int,
    depth: int,
    *,
    twice: Twice | None = None,
) -> float:
    """Seconds of an inner step by event simulation. twice: who recomputes. Raises ValueError for a bad chain."""
    if not stages or len(links) != len(stages) - 1 or micro_batches < 1 or depth < 1:
        raise ValueError("a chain needs a link between any two stages, a micro-batch and a depth of at least 1")
    last = len(stages) - 1
    rule = twice or computes_twice
    again = [rule(stages[s:], links[s:], micro_batches, depth) for s in range(len(stages))]
    backward = [s.backward + (s.forward if a else 0.0) for s, a in zip(stages, again, strict=True)]
    if last == 0:
        return micro_batches * (stages[0].forward + backward[0])
    came = [[0, 0] for _ in stages]  # forward, backward frames that arrived
    done = [[0, 0] for _ in stages]
    came[0][0] = micro_batches
    busy, latest = [False] * len(stages), [1] * len(stages)  # what a stage does, or did last: 0 forward, 1 backward
    window = [s.depths.window(depth, a) for s, a in zip(stages, again, strict=True)]
    free = [[0.0, 0.0] for _ in links]  # when a boundary can take the next frame forward, backward
    events: list[tuple[float, int, int, int]] = []  # time, stage, direction, 0: computed, 1: arrived
    now = 0.0

    def start(s: int) -> None:
        if busy[s]:
            return
        room = s == last or done[s][0] - done[s][1] < window[s]
        can = (came[s][0] > done[s][0] and room, came[s][1] > done[s][1])
        if any(can):
            busy[s], latest[s] = True, 1 - latest[s] if all(can) else int(can[1])
            there = stages[s].forward + (backward[s] if s == last else 0.0)
            heapq.heappush(events, (now + (backward[s] if latest[s] else there), s, latest[s], 0))

    def send(link: int, direction: int) -> None:
        begin = max(now, free[link][direction])
        end = begin + (links[link].backward if direction else links[link].forward)
        free[link][direction] = end
        heapq.heappush(events, (end + links[link].latency, link + (0 if direction else 1), direction, 1))

    start(0)
    while events:
        now, s, direction, arrived = heapq.heappop(events)
        if arrived:
            came[s][direction] += 1
        else:
            busy[s] = False
            done[s][direction] += 1
            if direction == 0 and s < last:
                send(s, 0)
            elif s > 0:
                send(s - 1, 1)
        start(s)
    return now


def computes_twice(stages: Sequence[StageCost], links: Sequence[LinkCost], micro_batches: int, depth: int) -> bool:
    """Returns whether the first of these stages recomputes: no room to let `depth` wait, or waiting would cost more."""
    first = stages[0]
    window = min(depth, first.depths.plain)
    if len(stages) == 1 or window >= min(depth, micro_batches):
        return False
    trip = sum(s.forward + s.backward for s in stages) + sum(k.forward + k.backward + 2 * k.latency for k in links)
    pace = max(*(s.forward + s.backward for s in stages), *(max(k.forward, k.backward) for k in links))
    twice = max(pace, 2 * first.forward + first.backward)
    kept = _held_up(micro_batches, trip, pace, window)
    anew = first.forward + _held_up(micro_batches, trip + first.forward, twice, min(depth, micro_batches))
    return depth > first.depths.held or anew < RECOMPUTE_PAYS * kept


def _held_up(micro_batches: int, trip: float, pace: float, window: int) -> float:
    """Seconds of a step but for its first trip, where `window` micro-batches at most are on their trip at a time."""
    return max((micro_batches - 1) * pace, (micro_batches - window) * trip / window + (window - 1) * pace)


def least_depth(stages: Sequence[StageCost], links: Sequence[LinkCost]) -> float:
    """Little's law (see above): no smaller depth can keep the slowest part busy."""
    trip = sum(s.forward + s.backward for s in stages) + sum(k.forward + k.backward + 2 * k.latency for k in links)
    slowest = max(*(s.forward + s.backward for s in stages), *(max(k.forward, k.backward) for k in links), 1e-9)
    return trip / slowest


def pick_depth(
    stages: Sequence[StageCost], links: Sequence[LinkCost], micro_batches: int, *, twice: Twice | None = None
) -> int:
    """The smallest depth with hardly a longer step than the best, and a margin that costs no recomputation."""
    most = min([micro_batches, *(s.depths.most for s in stages)])
    least = least_depth(stages, links)
    tried = {most} | {max(1, min(most, math.ceil(least * slack))) for slack in _SLACK}
    tried |= {min(most, depth) for s in stages[:-1] for depth in (s.depths.plain, s.depths.held)}
    took = functools.partial(step_seconds, stages, links, micro_batches, twice=twice)
    seconds = {depth: took(depth) for depth in tried}
    best = min(seconds.values())
    enough = min(depth for depth, s in seconds.items() if s <= best * (1 + TOLERANCE))
    without = [s.depths.held for s in stages[:-1] if s.depths.held >= enough]
    deeper = min([most, math.ceil(enough * DEPTH_MARGIN), *without])
    return deeper if took(deeper) <= seconds[enough] * (1 + TOLERANCE) else enough


SLOW_FACTOR, SLOW_RELATIVE, WASTED_SECONDS, SLOW_KNOWN_STEPS = 4.0, 2.0, 2.0, 4
"""Slow: two steps SLOW_FACTOR times the median, the others SLOW_RELATIVE less, at this cost in seconds."""


def slow_stage(seconds: Sequence[Sequence[float]], micro_batches: int) -> int | None:
    """The stage that has become slow, if any. seconds: for each step the stages' seconds per micro-batch."""
    if len(seconds) < SLOW_KNOWN_STEPS + 2:
        return None
    usual = [statistics.median(times) for times in zip(*seconds[:-2], strict=True)]
    factors = [min(a, b) / max(u, 1e-9) for a, b, u in zip(*seconds[-2:], usual, strict=True)]
    slowest = max(range(len(factors)), key=factors.__getitem__)
    others = [f for i, f in enumerate(factors) if i != slowest]
    wasted = (min(seconds[-2][slowest], seconds[-1][slowest]) - usual[slowest]) * micro_batches
    slow = factors[slowest] >= SLOW_FACTOR and factors[slowest] >= SLOW_RELATIVE * max(others, default=0.0)
    return slowest if slow and wasted >= WASTED_SECONDS else None
