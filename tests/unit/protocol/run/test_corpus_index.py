"""The index of a corpus, and which sequences are read when: pure functions."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.codec import blob_hash
from protocol.errors import UsageError
from protocol.run import corpus
from protocol.run.corpus import CorpusIndex
from protocol.wire import framing

L, VOCAB = 1024, 32_000


def index(sequences: int, sequence: int = L, vocab: int = VOCAB, held_out: int = 10) -> CorpusIndex:
    n_chunks = -(-sequences // corpus.sequences_per_chunk(sequence, vocab))
    return CorpusIndex(
        tokenizer="ab" * 32,
        vocab_size=vocab,
        seed=1,
        sequence=sequence,
        sequences=sequences,
        chunks=b"".join(i.to_bytes(32, "big") for i in range(n_chunks)),
        held_out="cd" * 32,
        held_out_sequences=held_out,
        documents=5,
        tokens=sequences * sequence,
        text_bytes=4 * sequences * sequence,
        held_out_tokens=100,
        held_out_bytes=425,
    )


def test_the_digest_names_the_index_as_it_is_written() -> None:
    made = index(20_000)
    raw = made.to_bytes()
    assert corpus.from_bytes(raw, "here") == made
    assert blob_hash.name_of(raw) == made.digest
    assert made.bytes_per_token == 4.25
    assert dataclasses.replace(made, seed=2).digest != made.digest


def test_a_million_million_tokens_have_an_index_that_travels() -> None:
    made = index(10**12 // L)
    assert len(made.to_bytes()) < framing.MAX_MESSAGE
    assert corpus.from_bytes(made.to_bytes(), "here").n_chunks == made.n_chunks == 119_326


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("format", 2, "format 2 is not known"),
        ("sequence", 0, "sequence: must be in"),
        ("sequence", corpus.MAX_SEQUENCE + 1, "sequence: must be in"),
        ("vocab_size", corpus.MAX_VOCABULARY + 1, "vocab_size: must be in"),
        ("sequences", 0, "sequences: must be in 1"),
        ("sequences", 10**9, "number of chunks"),
        ("chunks", b"", "number of chunks"),
        ("held_out_sequences", 0, "held_out_sequences: must be in 1"),
        ("held_out_sequences", 10**6, "held-out part must have one chunk"),
        ("held_out_tokens", 0, "held_out_tokens: must be in 1"),
        ("tokens", -1, "tokens: must be in 0"),
        ("tokenizer", "no digest", "must be a digest"),
        ("seed", "1", "must be int"),
    ],
)
def test_an_index_that_cannot_be_is_refused(field: str, value: object, told: str) -> None:
    data = framing.unpack_message(index(20_000).to_bytes()) | {field: value}
    with pytest.raises(UsageError, match=told):
        corpus.from_bytes(framing.pack_message(data), "here")


def test_what_is_no_index_is_refused() -> None:
    for raw in (b"", b"\xc1", b"\x93\x01\x02\x03", index(9).to_bytes()[:-1]):
        with pytest.raises(UsageError, match=r"corpus here: its index: .*; build it again"):
            corpus.from_bytes(raw, "here")


@given(st.integers(1, 50_000), st.integers(0, 49_999), st.integers(0, 20_000), st.sampled_from([VOCAB, 1 << 17]))
def test_extents_are_the_bytes_of_the_sequences_and_nothing_else(n: int, first: int, count: int, vocab: int) -> None:
    made = index(n, vocab=vocab)
    at = range(first % n, min(n, first % n + count))
    found = list(made.extents(at))
    assert sum(e.end - e.start for e in found) == len(at) * made.stride
    chunks = [made.chunk(i) for i in range(made.n_chunks)]
    assert sum(c.size for c in chunks) == n * made.stride
    assert max(c.size for c in chunks) <= corpus.CHUNK_BYTES
    place = at.start * made.stride
    for extent in found:
        number = next(i for i, c in enumerate(chunks) if c.name == extent.name)
        assert sum(c.size for c in chunks[:number]) + extent.start == place
        assert 0 <= extent.start < extent.end <= extent.size == chunks[number].size
        place += extent.end - extent.start


@pytest.mark.parametrize("at", [range(-1, 1), range(5, 101), range(100, 101)])
def test_a_sequence_that_is_not_there_is_an_error(at: range) -> None:
    with pytest.raises(IndexError, match=r"outside 0\.\.99"):
        list(index(100).extents(at))


@given(st.integers(1, 300), st.integers(0, 5), st.binary(max_size=8))
def test_every_epoch_reads_every_sequence_once(n: int, epoch: int, seed: bytes) -> None:
    found = corpus.sequences(seed, n, range(epoch * n, (epoch + 1) * n))
    assert sorted(i for part in found for i in part) == list(range(n))
    assert len(found) <= 2


@given(st.integers(1, 300), st.integers(0, 2000), st.integers(0, 700), st.integers(0, 700))
def test_the_order_is_the_same_in_one_go_and_in_pieces(n: int, first: int, middle: int, rest: int) -> None:
    def read(at: range) -> list[int]:
        return [i for part in corpus.sequences(b"s", n, at) for i in part]

    cut = first + middle
    assert read(range(first, cut + rest)) == read(range(first, cut)) + read(range(cut, cut + rest))


FROZEN = [range(434, 437)]


def test_the_order_does_not_change_between_versions() -> None:
    assert corpus.sequences(b"potluck/1", 1000, range(0, 3)) == FROZEN


def test_a_corpus_without_sequences_has_no_order() -> None:
    with pytest.raises(ValueError, match="no sequence"):
        corpus.sequences(b"", 0, range(1))


def test_micro_batches_are_the_steps_slots_one_after_the_other() -> None:
    first, steps, micro_batches, rows = 777, 3, 4, 2
    whole = [list(corpus.slots(first, s, micro_batches * rows)) for s in range(steps)]
    for s in range(steps):
        parts = [corpus.slots(first, s * micro_batches + m, rows) for m in range(micro_batches)]
        assert [slot for part in parts for slot in part] == whole[s]


@given(st.integers(0, 10**7), st.integers(40, 400))
def test_little_more_is_fetched_than_is_read(slot: int, steps: int) -> None:
    """A replica's round: steps of 16 sequences of 1,024 tokens; whole ranges and all digests of a chunk are fetched."""
    made = index(290_000)
    at = corpus.slots(slot, 0, steps * 16)
    extents = [e for part in corpus.sequences(b"run", made.sequences, at) for e in made.extents(part)]
    read = sum(e.end - e.start for e in extents)
    fetched = sum(
        min(e.size, e.ranges.stop * blob_hash.RANGE_BYTES) - e.ranges.start * blob_hash.RANGE_BYTES for e in extents
    )
    fetched += sum(blob_hash.LEAF_BYTES * blob_hash.count(e.size) for e in extents)
    assert read == len(at) * made.stride
    assert read <= fetched <= 1.2 * read
