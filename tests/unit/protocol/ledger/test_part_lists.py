"""The list of a share's parts: one form, one name, sums that follow from it, and a bounded length."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.net.blobs import BlobStore
from peer.state.payloads import PartLists
from protocol.codec import blob_hash
from protocol.ledger import part_lists
from protocol.ledger.part_lists import BadList
from protocol.run import layout
from protocol.run.layout import ModelSpec
from protocol.run.manifest import Manifest
from protocol.wire import bounds
from protocol.wire.commit import Part
from protocol.wire.schema import build, packed, plain
from tests.support import tiny

M = tiny.manifest()
SHARDS = layout.shard_names(M.model)
PARTS = tuple(Part(shard=s, digest=tiny.digest(s), size=8 + i, norm=float(i)) for i, s in enumerate(SHARDS))


@given(
    st.lists(
        st.builds(
            Part,
            shard=st.sampled_from(SHARDS),
            digest=st.binary(min_size=32, max_size=32).map(bytes.hex),
            size=st.integers(0, 2**63),
            norm=st.floats(0, bounds.MAX_NORM),
        ),
        max_size=20,
    )
)
def test_a_list_is_read_as_it_was_written_and_its_root_is_its_name(parts: list[Part]) -> None:
    raw = part_lists.pack(tuple(parts))
    assert part_lists.unpack(raw) == tuple(parts)
    share = part_lists.share_of("p", tuple(parts))
    assert (share.root, share.listed, share.size) == (blob_hash.name_of(raw), len(raw), sum(p.size for p in parts))
    assert share.norm == pytest.approx(math.sqrt(sum(p.norm**2 for p in parts)))
    assert part_lists.why_not_of(share, tuple(parts)) is None


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\x80",
        msgpack.packb([["embed", b"d" * 31, 8, 1.0]]),
        msgpack.packb([["embed", "d" * 64, 8, 1.0]]),
        msgpack.packb([["embed", b"d" * 32, 8]]),
        msgpack.packb([["embed", b"d" * 32, 8, 1]]),
        msgpack.packb([["embed", b"d" * 32, 8, 1.0, "more"]]),
        msgpack.packb([["embed", b"d" * 32, 8, math.inf]]),
        msgpack.packb([{"a name\x00of\nits own": 1}]),
        part_lists.pack(PARTS)[:-1],
        part_lists.pack(PARTS) + b"\x00",
    ],
)
def test_there_is_one_form_of_a_list(raw: bytes) -> None:
    with pytest.raises(BadList, match="list of parts") as refused:
        part_lists.unpack(raw)
    assert str(refused.value).isprintable()


def test_a_list_of_all_shards_may_be_fetched_and_none_that_is_longer() -> None:
    def deep(layers: int) -> Manifest:
        spec = ModelSpec(vocab_size=16, d_model=8, n_layers=layers, n_heads=2, d_ff=16, context=8)
        return tiny.manifest(model=spec)

    for m in (M, deep(400)):
        share = part_lists.share_of("p", PARTS)
        longest = part_lists.longest(m)
        fits = [
            n
            for n in (-1, 0, 1, longest, longest + 1)
            if part_lists.may_be_fetched(m, dataclasses.replace(share, listed=n))
        ]
        assert fits == [1, longest]
    whole = tuple(Part(shard=s, digest="f" * 64, size=2**32, norm=1 / 3) for s in SHARDS)
    assert part_lists.may_be_fetched(M, part_lists.share_of("p", whole))


def test_the_norm_of_all_is_infinite_where_no_number_holds_it() -> None:
    assert part_lists.total([3.0, 4.0]) == 5.0
    assert part_lists.total([1e200]) == math.inf
    assert part_lists.total([]) == 0.0


def test_parts_are_named_for_people_and_rows_where_they_travel() -> None:
    (part, *_) = PARTS
    assert plain(part) == {"shard": "embed", "digest": part.digest, "size": 8, "norm": 0.0}
    assert packed(part) == ["embed", bytes.fromhex(part.digest), 8, 0.0]
    assert build(Part, plain(part)) == build(Part, packed(part)) == part


def test_a_peer_knows_the_lists_that_its_store_has(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    lists, root = PartLists(store), part_lists.root_of(PARTS)
    assert root not in lists
    store.put(part_lists.pack(PARTS), 1)
    assert lists[root] == PARTS
    payload = store.put(b"a payload", 1)
    assert lists.get(payload) is None, "what is no list is none"
    store.remove(root)
    assert lists.get(root) is None, "what was evicted is not here either"
    store.put(part_lists.pack(PARTS), 1)
    (tmp_path / root).write_bytes(b"damaged")
    assert PartLists(store).get(root) is None
