"""How long an inner step of many chains takes, as arrays: the closed form of the simulation in protocol/planning/pipeline_model.py. Pure.

`compute` [N, S]: seconds of each stage per micro-batch; `links`: those of each boundary there and back [N, S - 1], and of the slowest one in one
direction [N]; `windows` [N, S]: how many micro-batches each stage has between their forward and their backward.
"""

from __future__ import annotations

import numpy as np

from protocol.planning.pipeline_model import PAYS
from protocol.planning.shapes import Flags, Floats

Links = tuple[Floats, Floats]
WAITS = 1.02
"""A chain that takes so many times as long as at the pace of its slowest part gains from more micro-batches under way."""


def step(micro_batches: int, compute: Floats, links: Links, windows: Floats) -> tuple[Floats, Flags]:
    """[N] each: seconds of an inner step, and whether it waits for windows, which are at most `micro_batches`."""
    trips = _trips(compute, links)
    pace = np.maximum(compute.max(axis=1), links[1])
    held_up = _held_up(micro_batches, trips, pace[:, None], windows).max(axis=1)
    steady = (micro_batches - 1) * pace
    return trips[:, 0] + np.maximum(steady, held_up), held_up > WAITS * steady


def gains(micro_batches: int, compute: Floats, links: Links, windows: Floats, depth: Floats) -> Flags:
    """[N, S]: who holds the chain up less if it computes activations twice and lets all that are under way past, `depth` [N, 1], than with its window:
    the rule of `computes_twice` in protocol/planning/pipeline_model.py."""
    if not (windows < depth).any():
        return np.zeros(windows.shape, dtype=bool)
    trips, more = _trips(compute, links), compute / 3
    pace = np.maximum(np.maximum.accumulate(compute[:, ::-1], axis=1)[:, ::-1], links[1][:, None])
    slower = np.maximum(pace, compute + more)
    steady, slowly = (micro_batches - 1) * pace, (micro_batches - 1) * slower
    kept = np.maximum(steady, _held_up(micro_batches, trips, pace, windows))
    anew = more + np.maximum(slowly, _held_up(micro_batches, trips + more, slower, depth))
    found: Flags = anew < PAYS * kept
    return found


def _trips(compute: Floats, links: Links) -> Floats:
    """[N, S]: seconds of a micro-batch from each stage to the end of the chain and back."""
    trips = compute.copy()
    trips[:, :-1] += links[0]
    for stage in range(trips.shape[1] - 2, -1, -1):
        trips[:, stage] += trips[:, stage + 1]
    return trips


def _held_up(micro_batches: int, trips: Floats, pace: Floats, windows: Floats) -> Floats:
    """[N, S]: seconds of a step but for its first trip, if the others wait for this stage's window."""
    found: Floats = (micro_batches - windows) * trips / windows + (windows - 1) * pace
    return found
