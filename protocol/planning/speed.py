"""Training speed of a peer: operations of its stage, and what its inner steps say about the machine. Pure.

Floating-point operations a token, a multiplication and an addition counted as two; d width, c width of the keys, F
feed-forward width, V vocabulary, L tokens of a sequence:

    block   6 (2 d^2 + 2 d c + 3 d F) + 12 L d     72 d^2 + 12 L d where c = d and F = 8 d / 3
    head    6 V d
    embed   d                              a lookup is none, its gradient is added

Forward takes 2 a matrix parameter, backward twice that (Kaplan et al. 2020, arXiv:2001.08361, section 2.1); attention's
two products take 4 L d forward, counted without the causal mask's half (Chowdhery et al. 2022, arXiv:2204.02311,
appendix B). The rest (norms, softmax, optimizer, projections) is part of a machine's speed.
"""

from __future__ import annotations

import functools
import statistics
from collections import deque

from protocol.run.manifest import Manifest
from protocol.wire.announcement import MAX_SPEED

RECENT_STEPS = 16
LEAST_STEPS = 4
"""A speed is the median of the last inner steps, a round's within these bounds; unknown before LEAST_STEPS."""
STEADY_SHARE = 0.05
"""A speed is said anew when it changed by more than this share."""


@functools.lru_cache(maxsize=8)
def work(manifest: Manifest) -> dict[tuple[int, int], int]:
    """(first, last) -> operations of one micro-batch, forward and backward, for every range of blocks."""
    layers, (embed, block, head) = manifest.model.n_layers, parts(manifest)
    return {
        (a, b): (b - a) * block + (embed if a == 0 else 0) + (head if b == layers else 0)
        for a in range(layers)
        for b in range(a + 1, layers + 1)
    }


def parts(manifest: Manifest) -> tuple[int, int, int]:
    """Operations of one micro-batch, forward and backward, in the embedding, in one block and in the head."""
    spec, tokens = manifest.model, manifest.train.rows * manifest.train.sequence
    d = spec.d_model
    block = 6 * (2 * d * d + 2 * d * spec.key_value_width + 3 * d * spec.d_ff) + 12 * manifest.train.sequence * d
    return tokens * d, tokens * block, tokens * 6 * spec.vocab_size * d


class Speedometer:
    """A peer's speed, in operations a second, whatever stage it has."""

    def __init__(self, manifest: Manifest) -> None:
        self._work = work(manifest)
        self._recent: deque[float] = deque(maxlen=min(max(manifest.train.inner_steps, LEAST_STEPS), RECENT_STEPS))
        self._said = 0

    def add(self, first: int, last: int, seconds: float) -> int:
        """Adds an inner step's seconds per micro-batch; the speed to announce, 0 if unknown. Raises KeyError."""
        work = self._work[first, last]
        if seconds > 0:
            self._recent.append(min(work / seconds, MAX_SPEED))
        if len(self._recent) >= LEAST_STEPS:
            median = statistics.median(self._recent)
            if abs(median - self._said) > STEADY_SHARE * self._said:
                self._said = max(int(median), 1)
        return self._said
