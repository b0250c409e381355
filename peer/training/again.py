"""A contribution compared with what another replica learned from the same text (protocol/ledger/audits.py).

The examiner learns d from the text that the contribution's maker was assigned, and d' from other text, both from the same state and the same
moments, its own. For each contribution s of the round, at the places that it sends,

    x(s) = cos(s, d - d')

says how much more it fits the one text than the other. What all contributions have in common, they have here too, and so the N
others show what x is without the text. x is a sum over PARTS of each tensor, x_g(s). So

    agreement = (x(audited) - mean of x(others)) / sqrt((1 + 1 / N) sum over g of the variance of x_g(others))

is about 0, give or take 1, for whoever trained on neither text, whatever the model and the round are like. It needs nothing of the
maker's but what the log names: neither its moments nor its error feedback.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from protocol.codec.sparse import Sparse
from protocol.errors import LocalError
from protocol.wire.bounds import MAX_AGREEMENT

Array = NDArray[np.float32]
PARTS = 4
"""Of each tensor, one after the other."""


class Comparison:
    """Takes the shards one after the other: a whole update is never held. `count`: contributions, of which the first is audited."""

    def __init__(self, count: int) -> None:
        self._squares = np.zeros((count, 2))  # of s and of m = d - d', where s sends something
        self._products: list[list[float]] = [[] for _ in range(count)]  # of s and m, of each part

    def add(self, updates: Sequence[Sequence[Sparse]], learned: Sequence[Array], plain: Sequence[Array]) -> None:
        """What each contribution sends of the tensors of one shard, and d and d' of these."""
        more = [(a - b).reshape(-1) for a, b in zip(learned, plain, strict=True)]
        for squares, products, update in zip(self._squares, self._products, updates, strict=True):
            for x, m in zip(update, more, strict=True):
                s, there = x.values.astype(np.float64), m[x.index].astype(np.float64)
                squares += np.dot(s, s), np.dot(there, there)
                part = x.index * PARTS // m.size
                products += np.bincount(part, weights=s * there, minlength=PARTS).tolist()

    @property
    def agreement(self) -> float:
        """See the module's docstring; within MAX_AGREEMENT of 0. Raises LocalError where something is not finite."""
        lengths = np.sqrt(self._squares[:, :1] * self._squares[:, 1:])
        x = np.array(self._products) / np.where(lengths > 0, lengths, np.inf)
        return excess(x[0], x[1:])


def excess(own: NDArray[np.float64], others: NDArray[np.float64]) -> float:
    """By how many standard deviations the sum of x_g [g] is more than those of the two or more others [n, g] are. Raises LocalError for what
    is not finite."""
    count = len(others)
    more = float(np.sum(own - np.mean(others, axis=0)))
    spread = math.sqrt((1 + 1 / count) * float(np.sum(np.var(others, axis=0, ddof=1))))
    if not (math.isfinite(more) and math.isfinite(spread)):
        raise LocalError("what was learned is not finite")
    found = more / spread if spread > 0 else math.copysign(MAX_AGREEMENT, more) if more else 0.0
    return max(-MAX_AGREEMENT, min(MAX_AGREEMENT, found))


def chosen(payloads: Mapping[str, Sequence[tuple[float, bytes]]], place: int, most: int) -> dict[str, list[bytes]]:
    """The payloads of the contribution at `place`, by shard, and those of the next `most` contributions, at most."""
    return {
        shard: [items[(place + step) % len(items)][1] for step in range(min(most + 1, len(items)))]
        for shard, items in payloads.items()
    }
