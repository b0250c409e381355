"""A corpus: sequences of token ids in chunks that are named by their digests, and the order in which a run reads them.

A sequence of L tokens is L + 1 ids: its inputs are all but the last, its targets all but the first. Ids are
little-endian, 2 bytes each for a vocabulary of at most 65,536 tokens, else 4. A *chunk* has as many sequences as fit
into CHUNK_BYTES; it is a blob (protocol/codec/blob_hash.py). The *index* names the chunks in order, and the held-out
part's one chunk; it is a canonical msgpack value, and its blob name is the corpus's digest. Sequences are in
pseudo-random order when a corpus is built (peer/corpus/), so neighbours can be read together.

*Order.* A run walks through the sequences epoch after epoch; a *slot* is a position on that walk. A plan gives each
replica a range of slots (protocol/planning/allotment.py), and an inner step takes

    slot + step rows + row,      0 <= step < steps, 0 <= row < rows,

so no two replicas, steps or rounds share a slot. What a replica has no time for is skipped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from protocol.codec import blob_hash
from protocol.errors import UsageError, shown
from protocol.wire import framing
from protocol.wire.schema import Digest, SchemaError, Within, build, packed

FORMAT = 1
INDEX = "index"
CHUNKS = "chunks"
LEAVES = ".leaves"
"""Contents of a corpus's folder and mirrors: index, chunks by name, and the range digests of each chunk."""
TOKENIZER = "tokenizer.json"
"""Beside them in the folder in which a corpus was built."""
MAX_INDEX = 64 << 20
CHUNK_BYTES = 16 << 20
"""A chunk: large, so that the index of 10^12 tokens fits a message; its range digests have 16 KiB."""
MAX_SEQUENCE = 1 << 20
MAX_VOCABULARY = 1 << 31
MAX_SIZE = 2**64 - 1
Size = Annotated[int, Within(0, MAX_SIZE)]


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes `start` to `end` of the chunk `name`, which has `size` bytes."""

    name: str
    size: int
    start: int
    end: int

    @property
    def ranges(self) -> range:
        """The blob's ranges in which these bytes lie: what has to be fetched to read them."""
        return range(self.start // blob_hash.RANGE_BYTES, -(-self.end // blob_hash.RANGE_BYTES))


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusIndex:
    """Contents of a corpus.

    tokenizer: sha256 of its JSON file; seed: of the order; sequence: L; chunks: names, 32 bytes each
    documents, tokens, text_bytes: of the whole source; held_out_tokens, held_out_bytes: of its held-out documents
    """

    tokenizer: Digest
    vocab_size: Annotated[int, Within(1, MAX_VOCABULARY)]
    seed: Size
    sequence: Annotated[int, Within(1, MAX_SEQUENCE)]
    sequences: Annotated[int, Within(1, MAX_SIZE)]
    chunks: bytes
    held_out: Digest
    held_out_sequences: Annotated[int, Within(1, MAX_SIZE)]
    documents: Size
    tokens: Size
    text_bytes: Size
    held_out_tokens: Annotated[int, Within(1, MAX_SIZE)]
    held_out_bytes: Annotated[int, Within(1, MAX_SIZE)]
    format: int = FORMAT

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ValueError(f"format {self.format} is not known to this version (knows {FORMAT})")
        if self.held_out_sequences > self.sequences_per_chunk:
            raise ValueError("the held-out part must have one chunk")
        if len(self.chunks) != blob_hash.LEAF_BYTES * -(-self.sequences // self.sequences_per_chunk):
            raise ValueError("the number of chunks must be that of the sequences")

    @property
    def id_bytes(self) -> int:
        return id_bytes(self.vocab_size)

    @property
    def stride(self) -> int:
        return (self.sequence + 1) * self.id_bytes

    @property
    def sequences_per_chunk(self) -> int:
        """In every chunk but the last."""
        return sequences_per_chunk(self.sequence, self.vocab_size)

    @property
    def n_chunks(self) -> int:
        """Without the held-out part's."""
        return len(self.chunks) // blob_hash.LEAF_BYTES

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes of a held-out token; bits per byte = nats per token / ln 2 / bytes_per_token."""
        return self.held_out_bytes / self.held_out_tokens

    @property
    def digest(self) -> str:
        return blob_hash.name_of(self.to_bytes())

    def to_bytes(self) -> bytes:
        """The form that has the digest; `from_bytes` reads it."""
        return framing.pack_message(packed(self))

    def chunk(self, number: int) -> Extent:
        """The whole chunk `number`, from 0."""
        count = min(self.sequences_per_chunk, self.sequences - number * self.sequences_per_chunk)
        name = self.chunks[number * blob_hash.LEAF_BYTES : (number + 1) * blob_hash.LEAF_BYTES].hex()
        return Extent(name, count * self.stride, 0, count * self.stride)

    def held_out_chunk(self) -> Extent:
        size = self.held_out_sequences * self.stride
        return Extent(self.held_out, size, 0, size)

    def extents(self, at: range) -> Iterator[Extent]:
        """Extents of the sequences `at`, in order, one for each chunk. Raises IndexError for one outside."""
        if at and not 0 <= at.start < at.stop <= self.sequences:
            raise IndexError(f"sequence outside 0..{self.sequences - 1}")
        each, first = self.sequences_per_chunk, at.start
        while first < at.stop:
            number = first // each
            end = min(at.stop, (number + 1) * each)
            chunk, skipped = self.chunk(number), number * each
            yield Extent(chunk.name, chunk.size, (first - skipped) * self.stride, (end - skipped) * self.stride)
            first = end


def id_bytes(vocab_size: int) -> int:
    return 2 if vocab_size <= 1 << 16 else 4


def sequences_per_chunk(sequence: int, vocab_size: int) -> int:
    """Returns the number of sequences of `sequence` tokens in a chunk."""
    return CHUNK_BYTES // ((sequence + 1) * id_bytes(vocab_size))


def from_bytes(raw: bytes, source: str) -> CorpusIndex:
    """Reads an index; `source` names it in errors. Raises UsageError."""
    try:
        return build(CorpusIndex, framing.unpack_message(raw))
    except (framing.FrameError, SchemaError) as error:
        raise UsageError(f"corpus {source}: its index: {shown(error)}; build it again, or get it again") from None


def slots(first: int, step: int, rows: int) -> range:
    """The slots of one inner step (`step` counts from 0) of a replica whose first slot is `first`."""
    start = first + step * rows
    return range(start, start + rows)


def sequences(seed: bytes, count: int, at: range) -> list[range]:
    """The corpus's sequences at these slots, as ranges in [0, count).

    An epoch walks through them in order from a start that follows from (seed, epoch), so that a replica reads
    neighbours (docs/adr/0021-a-corpus-is-shuffled-sequences.md).
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
