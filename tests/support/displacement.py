"""The displacement of an inner loop that trained nothing."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]


def of(deltas: Iterable[Array]) -> list[tuple[Array, Array]]:
    """Pairs (a, b) whose difference a - b is each of these arrays, to the bit."""
    return [(np.zeros_like(delta), -delta) for delta in deltas]
