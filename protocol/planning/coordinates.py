"""Network coordinates: distances approximate the one-way latency between peers. Pure.

Vivaldi (Dabek et al., SIGCOMM 2004, section 2.5). After a latency d, in ms, to a peer at x_j with relative error e_j:

    w    = e / (e + e_j)                      the less certain peer moves more
    e   += FACTOR w (| |x - x_j| - d | / d - e)
    x   += FACTOR w (d - |x - x_j|) u         u: the unit vector from x_j to x

A lie moves us by MOST_STEP at most, and honest peers pull us back.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from protocol.wire.announcement import AXES, FARTHEST, is_place

FACTOR = 0.25
MOST_STEP = 50.0
"""Milliseconds that one measurement may move us by."""
LEAST_ERROR = 0.02
LEAST_LATENCY = 0.1
"""Milliseconds: less is the machine, not the way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A peer's estimate. at: AXES coordinates in ms; error: relative error of distances, 1 if nothing is known."""

    at: tuple[float, ...] = (0.0,) * AXES
    error: float = 1.0

    def __post_init__(self) -> None:
        if not is_place(self.at):
            raise ValueError(f"at must have {AXES} entries of at most {FARTHEST:g} ms")
        if not 0 <= self.error <= 1:
            raise ValueError("error must be in 0..1")


def distance(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    """In ms, one way."""
    return math.dist(one, other)


def moved(place: Place, other: Place, latency: float) -> Place:
    """Our place after a one-way latency in ms to `other`. Equal places do not repel: peers begin at random ones."""
    latency = min(max(latency, LEAST_LATENCY), FARTHEST)
    away = distance(place.at, other.at)
    error, theirs = max(place.error, LEAST_ERROR), max(other.error, LEAST_ERROR)
    weight = error / (error + theirs)
    off = min(abs(away - latency) / latency, 1.0)
    step = min(max(FACTOR * weight * (latency - away), -MOST_STEP), MOST_STEP)
    part = step / away if away > 0 else 0.0
    at = tuple(min(max(x + part * (x - y), -FARTHEST), FARTHEST) for x, y in zip(place.at, other.at, strict=True))
    return dataclasses.replace(place, at=at, error=min(error + FACTOR * weight * (off - error), 1.0))
