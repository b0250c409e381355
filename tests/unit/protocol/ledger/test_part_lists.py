"""The list of a share's parts: one form, one name, sums that follow from it, and a bounded length."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
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
from protocol.planning import memory
from protocol.run import layout
from protocol.run.layout import ModelSpec
from protocol.run.manifest import Manifest
from protocol.wire import bounds
from protocol.wire.commit import Part
from protocol.wire.plan import Plan, StageSpec
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


NARROW = tiny.manifest(model=dataclasses.replace(M.model, residual_width=2))


def made(stage: StageSpec, shards: Sequence[str]) -> part_lists.Parts:
    """A list of a stage's parts, of which no two have the same payload."""
    return tuple(Part(shard=s, digest=tiny.digest(f"{stage.peer} {s}"), size=8, norm=1.0) for s in shards)


def test_each_stage_of_a_chain_lists_its_own_rows_of_tokens() -> None:
    chain = tiny.replica(0, "a", "b")
    lists = {s.peer: made(s, memory.stage_shards(NARROW, s.first, s.last)) for s in chain.stages}
    assert [tuple(part.shard for part in parts) for parts in lists.values()] == [
        ("embed", "block.0", "block.1", "anchor"),
        ("block.2", "block.3", "head", "anchor"),
    ]
    shares = tuple(part_lists.share_of(peer, parts) for peer, parts in lists.items())
    commit = tiny.commit(NARROW, round=1, contributions=(tiny.contribution(0, shares=shares),))
    by_root = {part_lists.root_of(parts): parts for parts in lists.values()}
    plan = Plan(round=1, replicas=(chain,))
    assert part_lists.why_refused(NARROW, plan, commit, by_root) is None
    named = [(part.digest, sender) for part, sender in part_lists.named(commit, by_root, ["anchor"])]
    assert named == [(lists[peer][-1].digest, peer) for peer in "ab"]


@pytest.mark.parametrize("change", ["without", "twice", "first"])
def test_a_stage_that_does_not_list_its_rows_of_tokens_once_and_last_is_refused(change: str) -> None:
    chain = tiny.replica(0, "a", "b")
    shards = {s.peer: memory.stage_shards(NARROW, s.first, s.last) for s in chain.stages}
    shards["a"] = {
        "without": shards["a"][:-1],
        "twice": (*shards["a"], "anchor"),
        "first": ("anchor", *shards["a"][:-1]),
    }[change]
    lists = [made(s, shards[s.peer]) for s in chain.stages]
    shares = tuple(part_lists.share_of(s.peer, parts) for s, parts in zip(chain.stages, lists, strict=True))
    commit = tiny.commit(NARROW, round=1, contributions=(tiny.contribution(0, shares=shares),))
    by_root = {part_lists.root_of(parts): parts for parts in lists}
    refused = part_lists.why_refused(NARROW, Plan(round=1, replicas=(chain,)), commit, by_root)
    assert refused == "replica 0: it does not cover the planned shards"


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
