"""The name of a blob."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.codec import blob_hash
from protocol.codec.blob_hash import LEAF_BYTES, RANGE_BYTES


def leaves(data: bytes) -> bytes:
    return b"".join(
        hashlib.sha256(data[i : i + RANGE_BYTES]).digest() for i in range(0, max(len(data), 1), RANGE_BYTES)
    )


@pytest.mark.parametrize(
    "size", [0, 1, RANGE_BYTES - 1, RANGE_BYTES, RANGE_BYTES + 1, 2 * RANGE_BYTES, 3 * RANGE_BYTES + 5]
)
def test_a_name_is_as_specified(size: int) -> None:
    data = bytes(i * 7 % 256 for i in range(size))
    expected = hashlib.sha256(data).hexdigest()
    if size > RANGE_BYTES:
        state = hashlib.blake2b(size.to_bytes(8, "little") + leaves(data), digest_size=32, person=b"potluck/ranges/1")
        expected = state.hexdigest()
    assert blob_hash.name_of(data) == expected
    assert blob_hash.count(size) == len(leaves(data)) // LEAF_BYTES
    assert [blob_hash.span(size, i) for i in range(blob_hash.count(size))][-1][1] == size


@given(st.lists(st.integers(0, 3 * RANGE_BYTES // 2), max_size=6))
def test_pieces_do_not_matter(sizes: list[int]) -> None:
    pieces = [bytes([i + 1]) * size for i, size in enumerate(sizes)]
    whole = b"".join(pieces)
    assert blob_hash.leaves_of(pieces) == (len(whole), leaves(whole))
    assert blob_hash.name_of(*pieces) == blob_hash.name_of(whole)


def test_no_bytes_are_a_blob_of_both_kinds() -> None:
    """The list that a large blob's name is made of is not a small blob of that name, and sizes are part of the name."""
    data = bytes(2 * RANGE_BYTES)
    listed = len(data).to_bytes(8, "little") + leaves(data)
    assert blob_hash.name_of(listed) != blob_hash.name_of(data)
    assert blob_hash.root(len(data), leaves(data)) != blob_hash.root(len(data) - 1, leaves(data))


def test_a_range_is_checked_by_itself() -> None:
    data = bytes(range(256)) * (RANGE_BYTES // 128)
    _, digests = blob_hash.leaves_of([data])
    assert blob_hash.is_leaf(digests, 1, data[RANGE_BYTES:])
    assert not blob_hash.is_leaf(digests, 1, data[RANGE_BYTES:-1])
    assert not blob_hash.is_leaf(digests, 2, b"")


@pytest.mark.parametrize("text", ["", "a" * 63, "a" * 65, "A" * 64, "g" * 64, "../" + "a" * 61, None, 5])
def test_what_is_no_name(text: object) -> None:
    assert not blob_hash.is_name(text)
    assert blob_hash.is_name("0123456789abcdef" * 4)
