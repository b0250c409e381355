"""Records in order become sequences, and sequences chunks: the second half of the sort."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from peer.corpus.records import Ids, Records
from peer.corpus.spills import gather
from peer.net.disk import Disk
from protocol.codec import blob_hash
from protocol.run.corpus import LEAVES


class Packer:
    """Makes sequences of L + 1 ids. A record that has as many is one. Shorter ones are put one after the other, and cut; a cut sequence
    stands where the record stands that completes it, so that the order does not depend on how many records come at once. What is
    left at the end fills no sequence and is dropped."""

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
        some = Records(
            records.keys[short], records.ranks[short], records.starts[short], records.lengths[short], records.ids
        )
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
    """Writes sequences [n, L + 1] into chunks of `each` sequences in `folder`, each under its name, and beside it its range digests. One that is there already, from a
    build that was killed, stays. `names` are those of the chunks that are whole; `count` all sequences that came; `wrote` hears of
    every chunk. `diverted`: another writer that gets the first sequences instead, so many of them."""

    disk: Disk
    folder: Path
    each: int
    wrote: Callable[[int], None]
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
    """Packs all records, and writes those of documents with a smaller rank than `rank` to `out[1]`, the others to `out[0]`."""
    packers = Packer(sequence, dtype), Packer(sequence, dtype)
    for some in records:
        held_out = some.ranks < rank
        for packer, writer, chosen in zip(packers, out, (~held_out, held_out), strict=True):
            writer.add(
                packer.pack(
                    Records(some.keys[chosen], some.ranks[chosen], some.starts[chosen], some.lengths[chosen], some.ids)
                )
            )
    for writer in out:
        writer.finish()
