"""Records on disk until all are there: the first half of an external merge sort.

A spill holds some million ids of records, sorted by key. It is written whole or not at all, and says how far the source was read
when it was written: so a build that was killed goes on behind its last spill. Spills are read by ranges of keys.

    size of the head: u64 | head: JSON | keys: u64 | ends of the records in the ids: i64 | ranks: u16 | ids
"""

from __future__ import annotations

import base64
import dataclasses
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from peer.corpus.records import RANKS, Counts, FileCounts, Ids, Records, join
from peer.net.disk import Disk

_NAME = "spill-{:06d}"
_HEAD = 8


@dataclass(frozen=True, slots=True)
class Position:
    """How far the source was read: the number of sources that are done, the state of the next one, and the cutter's."""

    source: int = 0
    state: Any = None
    document: int = 0
    part: int = 0
    carry: bytes = b""
    done: bool = False


@dataclass(frozen=True, slots=True)
class Spill:
    """A file of `records` records and `tokens` ids. `position`: where to go on behind it; None where that cannot be said. `counts`: of
    what was read since the spill before."""

    path: Path
    records: int
    tokens: int
    start: int
    position: Position | None
    counts: Counts


def write(disk: Disk, folder: Path, number: int, records: Records, counts: Counts, position: Position | None) -> Spill:
    """Makes spill `number` durable. Raises UsageError."""
    ordered = records.sorted()
    ends = np.cumsum(ordered.lengths)
    ids = gather(ordered)
    head = json.dumps(
        {
            "records": len(ends),
            "tokens": len(ids),
            "documents": counts.documents,
            "files": {name: dataclasses.asdict(found) for name, found in counts.files.items()},
            "counts": [_text(counts.tokens), _text(counts.text_bytes)],
            "position": None
            if position is None
            else [
                position.source,
                position.state,
                position.document,
                position.part,
                base64.b64encode(position.carry).decode(),
                position.done,
            ],
        }
    ).encode()
    head += b" " * (-len(head) % 8)
    path = folder / _NAME.format(number)
    arrays: tuple[NDArray[Any], ...] = (
        ordered.keys.astype("<u8"),
        ends.astype("<i8"),
        ordered.ranks.astype("<u2"),
        ids,
    )
    sized = len(head).to_bytes(_HEAD, "little")
    disk.write(path, sized, head, *(array.data.cast("B") for array in arrays if len(array)))
    return Spill(path, len(ends), len(ids), _HEAD + len(head), position, counts)


def find(disk: Disk, folder: Path) -> list[Spill]:
    """The spills that a build can go on behind, in order; those after the last one with a position are removed."""
    names = set(disk.names(folder))
    count = next(i for i in itertools.count() if _NAME.format(i) not in names)
    spills = [_read_head(disk, folder / _NAME.format(i)) for i in range(count)]
    while spills and spills[-1].position is None:
        disk.remove(spills.pop().path)
    return spills


def _read_head(disk: Disk, path: Path) -> Spill:
    size = int.from_bytes(disk.read(path, 0, _HEAD), "little")
    head = json.loads(disk.read(path, _HEAD, size))
    tokens, text_bytes = (np.frombuffer(base64.b64decode(text), "<i8").copy() for text in head["counts"])
    position = None
    if head["position"] is not None:
        source, state, document, part, carry, done = head["position"]
        position = Position(source, state, document, part, base64.b64decode(carry), done)
    files = {name: FileCounts(**found) for name, found in head.get("files", {}).items()}
    counts = Counts(head["documents"], tokens, text_bytes, files)
    return Spill(path, head["records"], head["tokens"], _HEAD + size, position, counts)


def _text(counts: NDArray[np.int64]) -> str:
    assert len(counts) == RANKS + 1
    return base64.b64encode(counts.astype("<i8").tobytes()).decode()


def merged(spills: Sequence[Spill], tokens: int, dtype: np.dtype[np.unsignedinteger]) -> Iterator[Records]:
    """All records in the order of their keys, about `tokens` ids at a time."""
    total = sum(spill.tokens for spill in spills)
    buckets = max(1, -(-total // tokens))
    for bucket in range(buckets):
        low, high = bucket * 2**64 // buckets, (bucket + 1) * 2**64 // buckets
        yield join([_slice(spill, low, high, dtype) for spill in spills]).sorted()


def _slice(spill: Spill, low: int, high: int, dtype: np.dtype[np.unsignedinteger]) -> Records:
    """The records with low <= key < high."""
    keys, ends, ranks, ids = _open(spill, dtype)
    first = int(np.searchsorted(keys, np.uint64(low)))
    last = len(keys) if high > 2**64 - 1 else int(np.searchsorted(keys, np.uint64(high)))
    begin = int(ends[first - 1]) if first else 0
    own_ends = np.array(ends[first:last]) - begin
    starts = np.concatenate([[0], own_ends[:-1]]).astype(np.int64) if len(own_ends) else own_ends
    own_ids = np.array(ids[begin : begin + int(own_ends[-1])]) if len(own_ends) else np.zeros(0, dtype)
    return Records(np.array(keys[first:last]), np.array(ranks[first:last]), starts, own_ends - starts, own_ids)


def _open(
    spill: Spill, dtype: np.dtype[np.unsignedinteger]
) -> tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.uint16], Ids]:
    start = spill.start
    found: list[NDArray[Any]] = []
    for kind, count in (("<u8", spill.records), ("<i8", spill.records), ("<u2", spill.records), (dtype, spill.tokens)):
        if count:
            found.append(np.memmap(spill.path, kind, "r", start, (count,)))
        else:
            found.append(np.zeros(0, kind))
        start += count * np.dtype(kind).itemsize
    keys, ends, ranks, ids = found
    return keys, ends, ranks, ids


def gather(records: Records) -> Ids:
    """The ids of all records, one after the other."""
    ends = (records.starts + records.lengths).tolist()
    pieces = [records.ids[start:end] for start, end in zip(records.starts.tolist(), ends, strict=True)]
    found: Ids = np.concatenate([records.ids[:0], *pieces])
    return found
