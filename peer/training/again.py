"""A contribution compared with what another replica learned from the same text (protocol/rounds/audits.py).

The examiner learns d from the text that the contribution's maker was assigned, and d' from other text, both from the same state and the same
moments of AdamW, its own. For each contribution s of the round, at the places that it sends,

    x(s) = cos(s, d - d')

says how much more it fits the one text than the other. What all contributions have in common, they have here too, and so the
others show what x is without the text: for whoever trained on neither,

    agreement = (x(audited) - mean of x(others)) / (their standard deviation sqrt(1 + 1 / N))

of N others follows Student's distribution with N - 1 degrees of freedom, about, whatever the model and the round are like. It needs
nothing of the maker's but what the log names: neither its moments nor its error feedback.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from protocol.codec import sparse
from protocol.codec.sparse import Codec
from protocol.run import layout
from protocol.run.layout import ModelSpec
from protocol.wire.bounds import MAX_AGREEMENT

Array = NDArray[np.float32]


class Comparison:
    """Takes the shards one after the other: a whole update is never held. `count`: contributions, of which the first is audited."""

    def __init__(self, codec: Codec, spec: ModelSpec, count: int) -> None:
        self._codec = codec
        self._spec = spec
        self._sums = np.zeros((count, 3))  # of s², m² and s m, for each; m = d - d'

    def add(self, shard: str, payloads: Sequence[bytes], learned: Sequence[Array], plain: Sequence[Array]) -> None:
        """One shard's payload of each contribution, and d and d' of its tensors. Raises PayloadError."""
        more = [(a - b).reshape(-1) for a, b in zip(learned, plain, strict=True)]
        shapes = layout.shapes(self._spec, shard)
        for sums, payload in zip(self._sums, payloads, strict=True):
            for x, m in zip(sparse.decode(self._codec, shapes, payload), more, strict=True):
                s, there = x.values.astype(np.float64), m[x.index].astype(np.float64)
                sums += np.dot(s, s), np.dot(there, there), np.dot(s, there)

    @property
    def agreement(self) -> float:
        """See the module's docstring; within MAX_AGREEMENT of 0."""
        own, *others = (cosine(*sums) for sums in self._sums.tolist())
        return excess(own, others)


def cosine(ss: float, mm: float, sm: float) -> float:
    """Of two vectors by the sums of their squares and products; 0 where one is nothing."""
    length = math.sqrt(ss) * math.sqrt(mm)
    found = sm / length if length > 0 else 0.0
    return found if math.isfinite(found) else 0.0


def excess(own: float, others: Sequence[float]) -> float:
    """By how many standard deviations `own` is more than the two or more others are."""
    spread = statistics.stdev(others) * math.sqrt(1 + 1 / len(others))
    more = own - statistics.fmean(others)
    found = more / spread if spread > 0 else math.copysign(MAX_AGREEMENT, more) if more else 0.0
    return max(-MAX_AGREEMENT, min(MAX_AGREEMENT, found))


def chosen(payloads: Mapping[str, Sequence[tuple[float, bytes]]], place: int, most: int) -> dict[str, list[bytes]]:
    """The payloads of the contribution at `place`, by shard, and those of the next `most` contributions, at most."""
    return {
        shard: [items[(place + step) % len(items)][1] for step in range(min(most + 1, len(items)))]
        for shard, items in payloads.items()
    }
