"""Documents become records, sorted on disk by a pseudo-random key, and packed into sequences and chunks.

A document of n ids becomes records of L + 1 ids that overlap by one, each a whole sequence, and a shorter one with the
rest. A record's *key* is a pseudo-random bijection of (document, part) by the seed; the corpus is the records sorted by
it. A document's *rank* is pseudo-random too. Those of the lowest ranks are held out: one in HELD_OUT at most, and about
HELD_OUT_TOKENS. Documents that cannot be held out have the rank RANKS.

A spill holds some million ids of records, sorted by key, with the position of the source behind it:

    size of the head: u64 | head: JSON | keys: u64 | ends of the records in the ids: i64 | ranks: u16 | ids
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from peer.corpus.tokenizing import Tokenized
from peer.net.disk import Disk
from protocol.codec import blob_hash
from protocol.errors import UsageError
from protocol.run.corpus import LEAVES

HELD_OUT = 20
"""At most one in so many documents is held out."""
HELD_OUT_TOKENS = 1 << 21
RANKS = 1024
_PART_BITS = 24

Ids = NDArray[np.unsignedinteger]


@dataclass(frozen=True, slots=True)
class Records:
    """Record i has key `keys[i]` (uint64), rank `ranks[i]` (uint16), and `lengths[i]` ids from `ids[starts[i]]` on."""

    keys: NDArray[np.uint64]
    ranks: NDArray[np.uint16]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    ids: Ids

    def take(self, at: NDArray[Any]) -> Records:
        """Returns the records at these indices, or where a mask is true."""
        return Records(self.keys[at], self.ranks[at], self.starts[at], self.lengths[at], self.ids)

    def sorted(self) -> Records:
        """Returns the records in the order of their keys."""
        return self.take(np.argsort(self.keys))


def none(dtype: np.dtype[np.unsignedinteger]) -> Records:
    """Returns no records, of ids of this type."""
    empty = np.zeros(0, np.int64)
    return Records(empty.astype(np.uint64), empty.astype(np.uint16), empty, empty, empty.astype(dtype))


def join(parts: Sequence[Records]) -> Records:
    """Returns all records of `parts`, of which there is one at least."""
    offsets = np.cumsum([0, *(len(part.ids) for part in parts)])
    starts = [part.starts + offset for part, offset in zip(parts, offsets, strict=False)]
    return Records(
        np.concatenate([part.keys for part in parts]),
        np.concatenate([part.ranks for part in parts]),
        np.concatenate(starts),
        np.concatenate([part.lengths for part in parts]),
        np.concatenate([part.ids for part in parts]),
    )


@dataclass(slots=True)
class FileCounts:
    """The counts of one file."""

    documents: int = 0  # that have text
    without_text: int = 0  # rows that have none, and empty files
    left_out: int = 0  # rows that could not be read
    text_bytes: int = 0
    tokens: int = 0
    first_left_out: str = ""  # why the first of them could not

    def add(self, other: FileCounts) -> None:
        for name in ("documents", "without_text", "left_out", "text_bytes", "tokens"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.first_left_out = self.first_left_out or other.first_left_out


@dataclass(slots=True)
class Counts:
    """Of documents that have text; for each rank (RANKS + 1), of ids and UTF-8 bytes; and of each file."""

    documents: int = 0
    tokens: NDArray[np.int64] = field(default_factory=lambda: np.zeros(RANKS + 1, np.int64))
    text_bytes: NDArray[np.int64] = field(default_factory=lambda: np.zeros(RANKS + 1, np.int64))
    files: dict[str, FileCounts] = field(default_factory=dict)

    @property
    def n_tokens(self) -> int:
        return int(self.tokens.sum())

    @property
    def n_bytes(self) -> int:
        return int(self.text_bytes.sum())

    def add(self, other: Counts) -> None:
        self.documents += other.documents
        self.tokens += other.tokens
        self.text_bytes += other.text_bytes
        for name, counts in other.files.items():
            self.files.setdefault(name, FileCounts()).add(counts)


class Cutter:
    """Cuts a stream of tokenized units.

    document: number of the current document
    part: records that were made of it
    carry: its ids that are in no record yet
    """

    def __init__(self, seed: int, sequence: int, dtype: np.dtype[np.unsignedinteger]) -> None:
        self.document, self.part, self.carry = 0, 0, np.zeros(0, dtype)
        digest = hashlib.sha512(b"potluck/corpus/" + str(seed).encode()).digest()
        self._keys = [np.uint64(int.from_bytes(digest[i : i + 8], "little")) for i in range(0, 32, 8)]
        self._sequence = sequence

    def cut(self, tokenized: Tokenized) -> tuple[Records, Counts]:
        """The records that a unit completes, and what it counts. Raises UsageError for a document that is too long."""
        length = self._sequence
        last_pieces = np.flatnonzero(np.array(tokenized.unit.ends, bool)) + 1
        closed, goes_on = len(last_pieces), len(tokenized.lengths) > (last_pieces[-1] if len(last_pieces) else 0)
        bounds = np.concatenate([[0], last_pieces, [len(tokenized.lengths)] if goes_on else []]).astype(np.int64)
        pieces = np.concatenate([[0], np.cumsum(tokenized.lengths)])[bounds]
        added = np.diff(pieces)
        sizes, parts = added.copy(), np.zeros(len(added), np.int64)
        documents = self.document + np.arange(len(added))
        ids = np.concatenate([self.carry, tokenized.ids])
        if len(sizes):
            sizes[0] += len(self.carry)
            parts[0] = self.part
        starts = np.cumsum(sizes) - sizes
        ranks = self._ranks(documents)
        counts = self._count(tokenized, bounds, added, ranks, closed)

        whole = np.maximum(0, (sizes - 1) // length)
        left = sizes - whole * length
        is_closed = np.arange(len(sizes)) < closed
        tails = np.flatnonzero(is_closed & (left > ((whole + parts) > 0)))  # one id alone was a target already
        of = np.repeat(np.arange(len(sizes)), whole)
        within = np.arange(len(of)) - np.repeat(np.cumsum(whole) - whole, whole)
        owner = np.concatenate([of, tails])
        part = np.concatenate([parts[of] + within, (parts + whole)[tails]])
        if len(part) and int(part.max()) >> _PART_BITS:
            raise UsageError(
                f"document {int(documents[owner[part.argmax()]])}: is too long; cut it into several documents"
            )
        found = Records(
            self._order(documents[owner], part),
            ranks[owner],
            np.concatenate([starts[of] + within * length, (starts + whole * length)[tails]]),
            np.concatenate([np.full(len(of), length + 1), left[tails]]),
            ids,
        )
        self.document += closed
        if goes_on:
            self.part = int(parts[-1] + whole[-1])
            self.carry = ids[starts[-1] + whole[-1] * length :].copy()
        elif len(sizes):
            self.part, self.carry = 0, ids[:0].copy()
        return found, counts

    def _count(
        self,
        tokenized: Tokenized,
        bounds: NDArray[np.int64],
        tokens: NDArray[np.int64],
        ranks: NDArray[np.uint16],
        closed: int,
    ) -> Counts:
        size = np.concatenate([[0], np.cumsum([len(piece) for piece in tokenized.unit.pieces])]).astype(np.int64)
        text_bytes = np.diff(size[bounds])
        have_text = text_bytes[:closed] > 0
        return Counts(
            int(np.count_nonzero(have_text)),
            np.bincount(ranks, tokens, RANKS + 1).astype(np.int64),
            np.bincount(ranks, text_bytes, RANKS + 1).astype(np.int64),
            {tokenized.unit.file: _of_file(tokenized, int(np.count_nonzero(have_text)), closed)},
        )

    def _order(self, documents: NDArray[np.int64], parts: NDArray[np.int64]) -> NDArray[np.uint64]:
        packed = (documents.astype(np.uint64) << np.uint64(_PART_BITS)) | parts.astype(np.uint64)
        return _mix(_mix(packed ^ self._keys[0]) ^ self._keys[1])

    def _ranks(self, documents: NDArray[np.int64]) -> NDArray[np.uint16]:
        drawn = _mix(_mix(documents.astype(np.uint64) ^ self._keys[2]) ^ self._keys[3])
        return np.minimum(drawn // np.uint64(2**64 // (HELD_OUT * RANKS)), np.uint64(RANKS)).astype(np.uint16)


def _of_file(tokenized: Tokenized, documents: int, closed: int) -> FileCounts:
    unit = tokenized.unit
    return FileCounts(
        documents=documents,
        without_text=closed - documents - unit.left_out,
        left_out=unit.left_out,
        text_bytes=sum(map(len, unit.pieces)),
        tokens=len(tokenized.ids),
        first_left_out=unit.first_left_out,
    )


def held_out_rank(counts: Counts) -> int:
    """Documents of smaller ranks are held out: as many as HELD_OUT and HELD_OUT_TOKENS allow."""
    return int(np.searchsorted(np.cumsum(counts.tokens[:RANKS]), HELD_OUT_TOKENS, side="right"))


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014), a bijection of 64 bits."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


_SPILL_NAME = "spill-{:06d}"
_HEAD_BYTES = 8


@dataclass(frozen=True, slots=True)
class Position:
    """The position in the sources: the number of finished ones, the state of the next one, and the cutter's."""

    source: int = 0
    state: Any = None
    document: int = 0
    part: int = 0
    carry: bytes = b""
    done: bool = False


@dataclass(frozen=True, slots=True)
class Spill:
    """A file of sorted records.

    records, tokens: their number, and that of their ids
    """

    path: Path
    records: int
    tokens: int
    start: int  # position of the arrays
    position: Position | None  # where to resume behind it; None in the middle of rows
    counts: Counts  # of what was read since the spill before


def write_spill(
    disk: Disk, folder: Path, number: int, records: Records, counts: Counts, position: Position | None
) -> Spill:
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
            "counts": [_packed(counts.tokens), _packed(counts.text_bytes)],
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
    path = folder / _SPILL_NAME.format(number)
    arrays: tuple[NDArray[Any], ...] = (
        ordered.keys.astype("<u8"),
        ends.astype("<i8"),
        ordered.ranks.astype("<u2"),
        ids,
    )
    sized = len(head).to_bytes(_HEAD_BYTES, "little")
    disk.write(path, sized, head, *(array.data.cast("B") for array in arrays if len(array)))
    return Spill(path, len(ends), len(ids), _HEAD_BYTES + len(head), position, counts)


def find_spills(disk: Disk, folder: Path) -> list[Spill]:
    """The spills that a build can go on behind, in order; those after the last one with a position are removed."""
    names = set(disk.names(folder))
    count = next(i for i in itertools.count() if _SPILL_NAME.format(i) not in names)
    spills = [_read_head(disk, folder / _SPILL_NAME.format(i)) for i in range(count)]
    while spills and spills[-1].position is None:
        disk.remove(spills.pop().path)
    return spills


def _read_head(disk: Disk, path: Path) -> Spill:
    size = int.from_bytes(disk.read(path, 0, _HEAD_BYTES), "little")
    head = json.loads(disk.read(path, _HEAD_BYTES, size))
    tokens, text_bytes = (np.frombuffer(base64.b64decode(text), "<i8").copy() for text in head["counts"])
    position = None
    if head["position"] is not None:
        source, state, document, part, carry, done = head["position"]
        position = Position(source, state, document, part, base64.b64decode(carry), done)
    files = {name: FileCounts(**found) for name, found in head.get("files", {}).items()}
    counts = Counts(head["documents"], tokens, text_bytes, files)
    return Spill(path, head["records"], head["tokens"], _HEAD_BYTES + size, position, counts)


def _packed(counts: NDArray[np.int64]) -> str:
    assert len(counts) == RANKS + 1
    return base64.b64encode(counts.astype("<i8").tobytes()).decode()


def merge_spills(spills: Sequence[Spill], tokens: int, dtype: np.dtype[np.unsignedinteger]) -> Iterator[Records]:
    """All records in the order of their keys, about `tokens` ids at a time."""
    total = sum(spill.tokens for spill in spills)
    buckets = max(1, -(-total // tokens))
    for bucket in range(buckets):
        low, high = bucket * 2**64 // buckets, (bucket + 1) * 2**64 // buckets
        yield join([_slice(spill, low, high, dtype) for spill in spills]).sorted()


def _slice(spill: Spill, low: int, high: int, dtype: np.dtype[np.unsignedinteger]) -> Records:
    """The records with low <= key < high."""
    keys, ends, ranks, ids = _map(spill, dtype)
    first = int(np.searchsorted(keys, np.uint64(low)))
    last = len(keys) if high > 2**64 - 1 else int(np.searchsorted(keys, np.uint64(high)))
    begin = int(ends[first - 1]) if first else 0
    own_ends = np.array(ends[first:last]) - begin
    starts = np.concatenate([[0], own_ends[:-1]]).astype(np.int64) if len(own_ends) else own_ends
    own_ids = np.array(ids[begin : begin + int(own_ends[-1])]) if len(own_ends) else np.zeros(0, dtype)
    return Records(np.array(keys[first:last]), np.array(ranks[first:last]), starts, own_ends - starts, own_ids)


def _map(
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


class Packer:
    """Makes sequences of L + 1 ids from records.

    Shorter records are concatenated and cut; such a sequence has the place of the record that completes it.
    """

    def __init__(self, sequence: int, dtype: np.dtype[np.unsignedinteger]) -> None:
        self._length = sequence
        self._carry: Ids = np.zeros(0, dtype)

    def pack(self, records: Records) -> Ids:
        """The sequences [n, L + 1] that these records, in their order, complete."""
        length = self._length
        whole = np.flatnonzero(records.lengths == length + 1)
        short = np.flatnonzero(records.lengths <= length)
        places, rows = whole, np.zeros((0, length + 1), self._carry.dtype)
        if len(whole):
            rows = np.lib.stride_tricks.sliding_window_view(records.ids, length + 1)[records.starts[whole]]
        some = records.take(short)
        stream = np.concatenate([self._carry, gather(some)])
        count = max(0, (len(stream) - 1) // length)
        if count:
            ends = np.cumsum(some.lengths) + len(self._carry)
            last = np.arange(1, count + 1) * length  # where the last id of each sequence is
            places = np.concatenate([whole, short[np.searchsorted(ends, last, side="right")]])
            packed = np.lib.stride_tricks.sliding_window_view(stream, length + 1)[::length][:count]
            rows = np.concatenate([rows, packed])[np.argsort(places)]
        self._carry = stream[count * length :].copy()
        return rows


@dataclass
class ChunkWriter:
    """Writes sequences [n, L + 1] into chunks of `each` sequences, each under its name, and its range digests besides.

    A chunk that a killed build has left stays.
    diverted: another writer, and how many of the first sequences it gets instead
    names: of the whole chunks
    count: all sequences that came
    """

    disk: Disk
    folder: Path
    each: int
    wrote: Callable[[int], None]  # called with the number of chunks after each
    diverted: tuple[ChunkWriter, int] | None = None

    def __post_init__(self) -> None:
        self.names: list[str] = []
        self.count = 0
        self._rows: list[Ids] = []
        self._held = 0

    def add(self, rows: Ids) -> None:
        """Raises UsageError where the disk refuses."""
        if self.diverted is not None:
            other, count = self.diverted
            first = rows[: count - other.count]
            other.add(first)
            rows = rows[len(first) :]
        self.count += len(rows)
        while len(rows):
            some = rows[: self.each - self._held]
            self._rows.append(some.copy())
            self._held += len(some)
            rows = rows[len(some) :]
            if self._held == self.each:
                self._write()

    def finish(self) -> None:
        """Writes the last chunk. Raises UsageError."""
        if self._held:
            self._write()

    def _write(self) -> None:
        data = np.concatenate(self._rows).tobytes()
        self._rows, self._held = [], 0
        size, leaves = blob_hash.leaves_of([data])
        name = blob_hash.root(size, leaves)
        for path, content in ((self.folder / name, data), (self.folder / (name + LEAVES), leaves)):
            if not self._is_there(path, len(content)):
                self.disk.write(path, content)
        self.names.append(name)
        self.wrote(len(self.names))

    def _is_there(self, path: Path, size: int) -> bool:
        try:
            return self.disk.stat(path)[0] == size
        except FileNotFoundError:
            return False


def write_all(
    records: Iterable[Records],
    rank: int,
    sequence: int,
    dtype: np.dtype[np.unsignedinteger],
    out: tuple[ChunkWriter, ChunkWriter],
) -> None:
    """Packs all records into `out[0]`, those of documents with a smaller rank than `rank` into `out[1]`."""
    packers = Packer(sequence, dtype), Packer(sequence, dtype)
    for some in records:
        held_out = some.ranks < rank
        for packer, writer, chosen in zip(packers, out, (~held_out, held_out), strict=True):
            writer.add(packer.pack(some.take(chosen)))
    for writer in out:
        writer.finish()
