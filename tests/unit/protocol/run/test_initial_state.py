"""Seeded numbers and θ(0): statistics, golden digests."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.codec import philox
from protocol.run import init, layout
from protocol.run.layout import ModelSpec

SPEC = ModelSpec(vocab_size=96, d_model=32, n_layers=2, n_heads=2, d_ff=48, context=16)


def sha(*arrays: np.ndarray) -> str:
    digest = hashlib.sha256()
    for a in arrays:
        digest.update(a.astype(a.dtype.newbyteorder("<")).tobytes())
    return digest.hexdigest()[:16]


@given(seed=st.binary(max_size=40), name=st.text(max_size=20), n=st.integers(0, 50), more=st.integers(0, 50))
@settings(max_examples=50, deadline=None)
def test_bits_are_a_stream(seed: bytes, name: str, n: int, more: int) -> None:
    long = philox.bits(seed, name, n + more)
    assert long.dtype == np.uint64
    assert len(long) == n + more
    assert (philox.bits(seed, name, n) == long[:n]).all()


def test_seed_and_name_do_not_run_together() -> None:
    streams = {philox.bits(s, n, 1)[0] for s, n in [(b"a", "b"), (b"ab", ""), (b"", "ab"), (b"a", "c")]}
    assert len(streams) == 4


def test_normal_like_is_the_stated_sum_of_lanes() -> None:
    words = philox.bits(b"s", "n", 3)
    got = philox.normal_like(b"s", "n", (3,), 0.5)
    for word, value in zip(words.tolist(), got.tolist(), strict=True):
        total = sum((word >> shift) & 0xFFFF for shift in (0, 16, 32, 48)) - 2 * 65_535
        assert Fraction(value) == Fraction(float(np.float32(total) * np.float32(0.5 / math.sqrt(4 * (2**32 - 1) / 12))))


def test_normal_like_in_parts_and_on_threads() -> None:
    whole = philox.normal_like(b"s", "n", (130, 301), 2.0)
    out = np.full_like(whole, np.nan)
    with ThreadPoolExecutor(3) as pool:
        assert philox.normal_like(b"s", "n", (130, 301), 2.0, out=out, run=pool.map, part=1 << 10) is out
    assert (out == whole).all()


def test_normal_like_looks_normal() -> None:
    x = philox.normal_like(b"s", "n", (400, 500), 2.0)
    assert x.dtype == np.float32
    assert abs(x.mean()) < 0.02
    assert x.std() == pytest.approx(2.0, rel=0.01)
    assert np.mean(np.abs(x) < 2.0) == pytest.approx(0.68, abs=0.02)


def test_the_initial_state() -> None:
    for shard in layout.shard_names(SPEC):
        arrays = init.initial_shard(SPEC, b"s", shard)
        assert tuple(a.shape for a in arrays) == layout.shapes(SPEC, shard)
        for (name, shape), a in zip(layout.tensors(SPEC, shard), arrays, strict=True):
            assert a.dtype == np.float32
            assert a.flags.c_contiguous
            assert a.flags.writeable
            if len(shape) == 1:
                assert (a == 1).all()
            else:
                ends = name.endswith(("o_proj.weight", "down_proj.weight"))
                assert a.std() == pytest.approx(0.01 if ends else 0.02, rel=0.1), name


def test_the_rows_of_tokens_of_a_narrow_residual_stream_are_drawn_as_the_embedding_is() -> None:
    narrow = dataclasses.replace(SPEC, residual_width=12)
    (rows,), (anchor,) = (init.initial_shard(narrow, b"s", shard) for shard in ("embed", "anchor"))
    assert (rows.shape, anchor.shape) == ((96, 12), (96, 20))
    assert [a.std() for a in (rows, anchor)] == pytest.approx([0.02] * 2, rel=0.1)
    assert abs(np.corrcoef(rows[:, 0], anchor[:, 0])[0, 1]) < 0.3
    block = dict(
        zip([n for n, _ in layout.tensors(narrow, "block.0")], init.initial_shard(narrow, b"s", "block.0"), strict=True)
    )
    ends = [a for name, a in block.items() if name.endswith(("o_proj.weight", "down_proj.weight"))]
    assert [a.shape for a in ends] == [(12, 32), (12, 48)]
    assert [a.std() for a in ends] == pytest.approx([0.01] * 2, rel=0.1)


def test_golden_digests() -> None:
    """These bits are part of the protocol: every run's θ(0) depends on them."""
    assert sha(philox.bits(b"potluck/7", "theta0/lm_head.weight", 1000)) == GOLDEN["bits"]
    assert sha(*init.initial_shard(SPEC, b"potluck/7", "embed")) == GOLDEN["embed"]
    assert sha(*init.initial_shard(SPEC, b"potluck/7", "block.1")) == GOLDEN["block.1"]


GOLDEN = {
    "bits": "6784f4a75cfebd42",
    "embed": "7278b8d9647dfc43",
    "block.1": "37a64aa325b9f7c3",
}
