"""Running statistics of what a stage receives at its boundaries: activations from the previous stage, gradients from the next.

Over the values x of an accepted frame, as they were decoded (Z, or whole activations where the rank is 0):

    largest = max |x|           of every frame: the check finds it anyway
    rms = sqrt(mean of x²)      of every 8th frame: of all, it would take a quarter of the time that decoding bf16 does

and of each, in order of arrival, n = 1, 2, ...

    m += (value - m) / min(n, MEMORY)

the plain mean of the first MEMORY, then one that forgets exponentially. A frame that is refused is counted and does not
enter the means. They belong to one neighbour, direction and width, and go on from round to round.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

EVERY = 8
MEMORY = 64
"""Values, about, that a mean remembers."""
MOST = 16
"""Boundaries that are remembered; the one that began first is forgotten first."""


class Measure(NamedTuple):
    """Of one frame's values. `rms` is None where it was not computed."""

    largest: float
    rms: float | None


def measure(x: Tensor, largest: float, nth: int) -> Measure:
    """Of the `nth` frame, from 0; `x` is not empty and its largest magnitude known (quantize.decode_measured)."""
    if nth % EVERY:
        return Measure(largest, None)
    flat = x.flatten().float()
    return Measure(largest, math.sqrt(torch.dot(flat, flat).item() / flat.numel()))


@dataclass(slots=True)
class Running:
    """Means of `rms`, over `sampled` frames, and of `largest`, over `frames`: all that were accepted; how many were `refused`."""

    rms: float = 0.0
    largest: float = 0.0
    sampled: int = 0
    frames: int = 0
    refused: int = 0

    def add(self, seen: Measure) -> None:
        """Takes an accepted frame into account."""
        self.frames += 1
        self.largest += (seen.largest - self.largest) / min(self.frames, MEMORY)
        if seen.rms is not None:
            self.sampled += 1
            self.rms += (seen.rms - self.rms) / min(self.sampled, MEMORY)


class Statistics:
    """Of all boundaries of a peer."""

    def __init__(self) -> None:
        self._running: dict[tuple[str, int, int], Running] = {}

    def of(self, neighbour: str, kind: int, width: int) -> Running:
        """What came from `neighbour` in frames of this kind (peer/chain/frames.py) with `width` values per token."""
        key = (neighbour, kind, width)
        if key not in self._running and len(self._running) >= MOST:
            del self._running[next(iter(self._running))]
        return self._running.setdefault(key, Running())
