"""Documents cut into records, each with its place in the corpus's order.

A document of n ids becomes records of L + 1 ids that overlap by one, each a whole sequence, and a shorter one with what is left.
So a document of up to L tokens stays whole, and no batch is filled by one long document. A record's *key* is a pseudo-random
bijection of (document, part) that follows from the seed: the corpus is the records sorted by it, and no two have the same.

A document's *rank* is pseudo-random too. Those of the lowest ranks are held out: at most one in HELD_OUT, and about
HELD_OUT_TOKENS at most. A rank is in 0..RANKS - 1 for the documents that can be, and RANKS for the others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from peer.corpus.tokenizing import Tokenized
from protocol.errors import UsageError

HELD_OUT = 20
"""At most one in so many documents is held out."""
HELD_OUT_TOKENS = 1 << 21
RANKS = 1024
_PART_BITS = 24

Ids = NDArray[np.unsignedinteger]


@dataclass(frozen=True, slots=True)
class Records:
    """Record i: key `keys[i]` (uint64), its document's rank `ranks[i]` (uint16), and `lengths[i]` ids from `ids[starts[i]]` on."""

    keys: NDArray[np.uint64]
    ranks: NDArray[np.uint16]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    ids: Ids

    def sorted(self) -> Records:
        """The same in the order of the keys."""
        order = np.argsort(self.keys)
        return Records(self.keys[order], self.ranks[order], self.starts[order], self.lengths[order], self.ids)


def join(parts: Sequence[Records]) -> Records:
    """All records of `parts`, at least one."""
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
    """What was read of one file."""

    documents: int = 0
    """That have text."""
    without_text: int = 0
    """Rows that have none, and empty files."""
    left_out: int = 0
    """Rows that could not be read."""
    text_bytes: int = 0
    tokens: int = 0
    first_left_out: str = ""
    """Why the first of them could not."""

    def add(self, other: FileCounts) -> None:
        """Counts the others too."""
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

    def add(self, other: Counts) -> None:
        """Counts the others too."""
        self.documents += other.documents
        self.tokens += other.tokens
        self.text_bytes += other.text_bytes
        for name, counts in other.files.items():
            self.files.setdefault(name, FileCounts()).add(counts)


class Cutter:
    """Cuts a stream of tokenized units. `document`, `part` and `carry` say where it is: the number of the document that comes next,
    or goes on, and, if it goes on, how many records were made of it and the ids that are in none."""

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
