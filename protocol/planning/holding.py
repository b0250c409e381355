"""What the members of a swarm have room for, as arrays: blocks of each kind of stage, and micro-batches under way. Pure.

R, K, n of the tables: protocol/planning/shapes.py. Arrays of members are [n], rows of members [N, S].
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from protocol.planning.memory import NEVER, WAITING
from protocol.planning.partition import Candidate
from protocol.planning.shapes import FIRST, LAST, MIDDLE, WHOLE, Floats, Ints, form_of, shapes
from protocol.run.manifest import Manifest

MOST_BYTES = NEVER // 2


class Holding:
    """The members' memory, in the order in which they were given."""

    def __init__(self, manifest: Manifest, candidates: Sequence[Candidate]) -> None:
        self._table = shapes(manifest)
        rooms = [c.budget for c in candidates]
        self._memory = np.array([min(max(room.memory_bytes, 0), MOST_BYTES) for room in rooms], dtype=np.float64)
        beside = [room.host_bytes if room.is_split else None for room in rooms]
        self._host = np.array([math.inf if b is None else min(b, MOST_BYTES) for b in beside], dtype=np.float64)
        self._flight, self._resting = (x.reshape(16, -1) for x in (self._table.flight, self._table.resting))  # [R K, n]
        self._form = np.array([form_of(manifest, room) for room in rooms], dtype=np.int64)

    def caps(self) -> Ints:
        """[K, n]: the most blocks that a member can hold as a stage of each kind."""
        table, caps = self._table, np.zeros((4, len(self._form)), dtype=np.int64)
        for kind in (FIRST, MIDDLE, LAST):
            beside = np.searchsorted(table.host[kind, 1:], self._host, side="right")
            caps[kind] = np.minimum(self._within(table.needs[:, kind, 1:]), beside)
        whole = (self._memory >= table.needs[self._form, WHOLE, -1]) & (self._host >= table.host[WHOLE, -1])
        caps[WHOLE] = np.where(whole, table.layers, 0)
        return caps

    def caps_at(self, caps: Ints, depth: int) -> Ints:
        """[K, n]: the most blocks with which a member has all activations of so many micro-batches in flight, at most `caps`; one block, if it
        can hold that at all, where there are none: it holds the others up as little as it can."""
        table, found = self._table, caps.copy()
        for kind in (FIRST, MIDDLE):
            flight = depth * (table.flight[:, kind] + WAITING * table.frame[kind])
            needs = np.maximum(table.needs[:, kind], table.resting[:, kind] + flight)
            found[kind] = np.minimum(caps[kind], np.maximum(self._within(needs[:, 1:]), 1))
        return found

    def _within(self, needs: Floats) -> Ints:
        """[n]: how many of the `needs` [R, blocks] of what trains, which ascend, are within a member's memory."""
        found = [np.searchsorted(some, self._memory, side="right") for some in needs]
        within: Ints = np.stack(found)[self._form, np.arange(len(self._form))]
        return within

    def room(self, rows: Ints, kind: Ints, blocks: Ints) -> tuple[Floats, Floats, Floats]:
        """[N, S] each: for how many micro-batches under way each stage has memory, with all activations of each, while others wait, and if it
        keeps what came in alone (`depths` of protocol/planning/budget.py); infinite where there is no such limit."""
        table, there, which = self._table, rows >= 0, 4 * self._form[rows] + kind
        one, frame = self._flight[which, blocks], np.maximum(table.frame[kind], 1.0)
        free = self._memory[rows] - self._resting[which, blocks]
        most = np.where(there, np.maximum(np.floor((free - one) / frame), table.under_way), math.inf)
        plain = np.maximum(np.floor(free / np.maximum(one + WAITING * frame, 1.0)), table.least[kind, blocks])
        held = np.where(plain >= table.window, np.maximum(plain, np.floor((free - plain * one) / frame)), plain)
        inner = there & (kind != LAST) & (kind != WHOLE)
        return np.where(inner, plain, math.inf), np.where(inner, held, most), most
