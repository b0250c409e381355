"""What no plan can exceed, in committed tokens per second: two bounds for swarms whose best plan cannot be found.
Shares no code with the planner; what a replica is worth at most follows from tests/support/plans.py's `worth`.

`paces`: every machine trains by its own pace, as if it held the whole model and did not wait.

`priced`: as many tokens as a price for every machine, where no replica brings more than its members cost:

    rate(g) <= sum of price(i) over i in g for all replicas g    =>    rate of any plan <= sum of all prices

A replica of one costs what it is worth. Of a chain only what cannot be avoided is counted: with t the seconds of a
stage per micro-batch, w those in which its machine sends its frames, T the sum of t + w, and tau the largest t,

    rate <= M n / (T + (M - 1) tau)

Latencies, downlinks, memory for micro-batches under way and the time to offer cost nothing, and a machine may be in a
chain twice. The chain that is worth most for its price is found by dynamic programming over stages, blocks and T, for
each tau of a grid, always rounded to the chain's favour. The prices are those of a linear program that is given such
chains until they hardly gain (column generation, Gilmore and Gomory 1961); at any time all prices times the largest
rate over price of a chain are a bound (Farley 1990).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, sparse

from protocol.codec import formats
from protocol.planning import memory
from protocol.planning.partition import Candidate
from protocol.run.manifest import Manifest
from tests.support import plans

GRID = 1.015
"""The ratio of each tau to the one before."""
BINS, LONGEST, SENT = 10, 10, 2
"""Parts of tau in which T is counted, the most tau of T, and the most of what one machine sends."""
ENOUGH, TURNS = 1.003, 60
"""The ratio of bound and linear program that is good enough, and the most programs."""
STEADY = 0.6
"""The weight of the best bound's prices in new ones; the linear program's alone swing to and fro."""
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
FIRST, MIDDLE, LAST = range(3)
Column = tuple[tuple[int, ...], float]
"""Members of a replica, by their numbers, and the most that it is worth."""


def paces(manifest: Manifest, candidates: Sequence[Candidate]) -> float:
    """Tokens per second if every machine trained by its own pace."""
    return sum(_pace(manifest, c) for c in candidates)


def _pace(manifest: Manifest, c: Candidate) -> float:
    tokens = manifest.train.rows * manifest.train.sequence
    return c.presence * tokens / plans.seconds(manifest, c, 0, manifest.model.n_layers)


def priced(manifest: Manifest, candidates: Sequence[Candidate], known: Sequence[tuple[Sequence[str], float]]) -> float:
    """The smaller bound. `known`: members and rates of good replicas, to begin with."""
    chains, number = _Chains(manifest, candidates), {c.peer: i for i, c in enumerate(candidates)}
    whole = ((0, manifest.model.n_layers),)
    alone = np.array([plans.worth(manifest, [c], whole) for c in candidates])
    least = np.array([1e-6 * _pace(manifest, c) for c in candidates])
    columns: list[Column] = [((i,), float(rate)) for i, rate in enumerate(alone) if rate > 0]
    columns += [(tuple(number[p] for p in members), rate) for members, rate in known if len(members) > 1]
    center = np.array([_pace(manifest, c) for c in candidates])
    most, fresh = chains.found(center)
    center, columns = np.maximum(center * most, alone), columns + fresh
    for _ in range(TURNS):
        prices = _prices(columns, len(candidates))
        if center.sum() <= ENOUGH * prices.sum():
            break
        tried = np.maximum(STEADY * center + (1 - STEADY) * prices, np.maximum(alone, least))
        most, fresh = chains.found(tried)
        columns += fresh
        held = np.maximum(tried * most, alone)  # no replica brings more than it costs
        center = held if held.sum() < center.sum() else center
    return float(center.sum())


def _prices(columns: Sequence[Column], count: int) -> Floats:
    """[n]: the dual solution of the most tokens of these replicas, each machine in one, parts of replicas allowed."""
    where = np.array([(i, j) for j, (members, _) in enumerate(columns) for i in members])
    uses = sparse.csr_matrix((np.ones(len(where)), (where[:, 0], where[:, 1])), shape=(count, len(columns)))
    rates = np.array([rate for _, rate in columns])
    solved = optimize.linprog(-rates, A_ub=uses, b_ub=np.ones(count), method="highs")
    prices: Floats = -solved.ineqlin.marginals
    return prices


class _Chains:
    """Finds the most valuable chain for its price. K taus, n machines, L blocks, T and W bins of time."""

    def __init__(self, manifest: Manifest, candidates: Sequence[Candidate]) -> None:
        train, layers = manifest.train, manifest.model.n_layers
        self.layers, tokens = layers, train.rows * train.sequence
        width = manifest.model.residual_width or manifest.model.d_model
        there, back = (
            8 * tokens * formats.bytes_per_token(f, width) for f in (manifest.chains.forward, manifest.chains.backward)
        )
        sent = {FIRST: there, MIDDLE: 2 * (there + back), LAST: back}
        up = np.array([plans.CARRIED * c.up_bps for c in candidates])
        memories = np.array([c.memory_bytes for c in candidates])
        stages: dict[tuple[int, int], tuple[Floats, Floats]] = {}
        for n in range(1, layers):
            for kind, (a, b) in enumerate(((0, n), (1, 1 + n), (layers - n, layers))):
                if kind != MIDDLE or b < layers:
                    took = np.array([plans.seconds(manifest, c, a, b) for c in candidates])
                    fits = memories >= memory.stage_memory(manifest, a, b)
                    stages[kind, n] = np.where(fits, took, math.inf), sent[kind] / up
        possible = np.concatenate([took[np.isfinite(took)] for took, _ in stages.values()])
        steps = math.ceil(math.log(possible.max() / possible.min()) / math.log(GRID)) + 1
        self.taus = possible.min() / GRID * GRID ** np.arange(steps + 1)
        part = self.taus[:, None] / BINS
        worth = train.micro_batches * tokens
        self.worth = worth / (np.arange(LONGEST * BINS) * part + (train.micro_batches - 1) * self.taus[:, None])
        self.bins = {
            key: np.where(
                took <= self.taus[:, None] * GRID,
                np.minimum((np.where(np.isfinite(took), took, 0) + wire) / part, (1 + SENT) * BINS),
                -1,
            ).astype(np.int32)
            for key, (took, wire) in stages.items()
        }
        """[K, n]: the time of each machine's stage of this kind and size; -1 where it is not possible."""

    def found(self, prices: Floats) -> tuple[float, list[Column]]:
        """The largest rate over price of any chain, and the best chain of each tau that brings more than it costs."""
        first, middle, last = (
            {n: self._cheapest((kind, n), prices) for k, n in self.bins if k == kind} for kind in (FIRST, MIDDLE, LAST)
        )
        size, states = LONGEST * BINS, dict[int, Floats]()
        for blocks in range(1, self.layers):
            states[blocks] = state = np.full((len(self.taus), size), math.inf)
            state[:, : first[blocks][0].shape[1]] = first[blocks][0]
            for n in range(1, blocks):
                if n in middle:
                    _add(state, states[blocks - n], middle[n][0])
        whole = np.full((len(self.taus), size), math.inf)
        for n in last:
            _add(whole, states[self.layers - n], last[n][0])
        ratio = self.worth / whole
        best = np.argmax(ratio, axis=1)
        fresh = []
        for k in np.flatnonzero(ratio[np.arange(len(best)), best] > 1 + 1e-6):
            members = self._members(int(k), int(best[k]), (first, middle, last), states, whole)
            fresh.append((members, float(self.worth[k, best[k]])))
        return float(ratio.max()), fresh

    def _cheapest(self, key: tuple[int, int], prices: Floats) -> tuple[Floats, Ints]:
        """[K, W] each: the lowest price of a stage of this kind and size that takes so long, and whose it is."""
        order = np.argsort(-prices, kind="stable")  # of several the cheapest is entered last, and stays
        bins = self.bins[key][:, order]
        k, i = np.nonzero(bins >= 0)
        shape = (len(self.taus), (1 + SENT) * BINS + 1)
        price, who = np.full(shape, math.inf), np.full(shape, -1, dtype=np.int64)
        price[k, bins[k, i]] = prices[order[i]]
        who[k, bins[k, i]] = order[i]
        return price, who

    def _members(
        self,
        k: int,
        time: int,
        stages: tuple[dict[int, tuple[Floats, Ints]], ...],
        states: dict[int, Floats],
        whole: Floats,
    ) -> tuple[int, ...]:
        """Of the chain with this tau and T, from its end to its start."""
        first, middle, last = stages
        members: list[int] = []
        blocks, value, options = self.layers, whole[k, time], last
        while True:
            n, used, time = next(
                (n, used, t)
                for n, (price, _) in options.items()
                if n < blocks
                for used in range(min(time + 1, price.shape[1]))
                for t in range(time - used, time + 1 if time == whole.shape[1] - 1 else time - used + 1)
                if states[blocks - n][k, t] + price[k, used] == value
            )
            members.append(int(options[n][1][k, used]))
            blocks, options = blocks - n, middle
            value = states[blocks][k, time]
            start, who = first[blocks]
            if time < start.shape[1] and start[k, time] == value:
                return (*members, int(who[k, time]))


def _add(state: Floats, before: Floats, stage: Floats) -> None:
    """[K, T]: another stage [K, W] after `before` where that is cheaper than `state`; the last bin is open."""
    for used in np.flatnonzero(np.isfinite(stage).any(axis=0)):
        price = stage[:, used, None]
        np.minimum(state[:, used:], before[:, : before.shape[1] - used] + price, out=state[:, used:])
        late = before[:, before.shape[1] - used :].min(axis=1, initial=math.inf) + price[:, 0]
        np.minimum(state[:, -1], late, out=state[:, -1])
