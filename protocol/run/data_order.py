"""Which window of the training text each inner step reads: deterministic in (run, round, replica, step).

The text is cut into `n_windows` windows. A run walks through a pseudo-random permutation of them, epoch after epoch; a
*slot* is a position on that walk. A plan gives each replica a range of slots (protocol/planning/allotment.py), and an
inner step takes

    slot + step rows + row,      0 <= step < steps, 0 <= row < rows,

so no two replicas, steps or rounds share a slot, however many replicas there are and whatever their paces. What a
replica has no time for is skipped. The permutation is a four-round Feistel network on the next even number of bits, cycle-walked into range (Black and Rogaway, 2002): O(1) memory.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 4


def slots(first: int, step: int, rows: int) -> range:
    """The slots of one inner step (`step` counts from 0) of a replica whose first slot is `first`."""
    start = first + step * rows
    return range(start, start + rows)


def windows(seed: bytes, n_windows: int, at: range) -> NDArray[np.int64]:
    """The window numbers, in [0, n_windows), of the slots `at`."""
    if n_windows < 1:
        raise ValueError("the text has no window")
    slot = np.arange(at.start, at.stop, dtype=np.uint64)
    epoch, position = slot // np.uint64(n_windows), slot % np.uint64(n_windows)
    out = np.empty(len(slot), dtype=np.int64)
    for number in np.unique(epoch):
        here = epoch == number
        out[here] = _permute(seed + b"/epoch/" + str(int(number)).encode(), n_windows, position[here])
    return out


def sequences(seed: bytes, count: int, at: range) -> list[range]:
    """The sequences of a corpus of `count` sequences (protocol/run/corpus.py) that the slots `at` read, in order, as ranges of
    numbers in [0, count).

    They were put in a pseudo-random order when the corpus was built. So every epoch walks through them as they lie, from a
    place that follows from (seed, epoch): what one replica reads in a round lies together, and little more than that has to be
    fetched (docs/adr/0021-a-corpus-is-shuffled-sequences.md). Micro-batch m of step s of a replica reads
    `slots(first, s * micro_batches + m, rows)`.
    """
    if count < 1:
        raise ValueError("the corpus has no sequence")
    found: list[range] = []
    slot = at.start
    while slot < at.stop:
        epoch, position = divmod(slot, count)
        key = hashlib.sha256(seed + b"/sequences/" + str(epoch).encode()).digest()
        first = (position + int.from_bytes(key[:8], "little")) % count
        end = min(count, first + min(at.stop - slot, count - position))
        if found and found[-1].stop == first:
            found[-1] = range(found[-1].start, end)
        else:
            found.append(range(first, end))
        slot += end - first
    return found


def _permute(key: bytes, n: int, x: NDArray[np.uint64]) -> NDArray[np.int64]:
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    shift = np.uint64(half)
    keys = [np.uint64(int.from_bytes(hashlib.sha256(key + bytes([r])).digest()[:8], "little")) for r in range(_ROUNDS)]
    out = x.copy()
    todo = np.ones(len(x), dtype=bool)
    while todo.any():
        left, right = out[todo] >> shift, out[todo] & mask
        for k in keys:
            left, right = right, left ^ (_mix(right ^ k) & mask)
        out[todo] = (left << shift) | right
        todo = out >= n
    return out.astype(np.int64)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014), modulo 2^64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
