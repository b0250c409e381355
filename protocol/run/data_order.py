"""Which sequences of the corpus each inner step reads: deterministic in (run, round, replica, step).

A run walks through the sequences of its corpus (protocol/run/corpus.py), epoch after epoch; a *slot* is a position on that walk. A
plan gives each replica a range of slots (protocol/planning/allotment.py), and an inner step takes

    slot + step rows + row,      0 <= step < steps, 0 <= row < rows,

so no two replicas, steps or rounds share a slot, however many replicas there are and whatever their paces. What a replica has no time
for is skipped.
"""

from __future__ import annotations

import hashlib


def slots(first: int, step: int, rows: int) -> range:
    """The slots of one inner step (`step` counts from 0) of a replica whose first slot is `first`."""
    start = first + step * rows
    return range(start, start + rows)


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
