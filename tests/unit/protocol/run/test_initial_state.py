"""Seeded numbers, θ(0) and the basis: statistics, nestedness, orthonormality, golden digests."""

from __future__ import annotations

import hashlib
import math
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.codec import philox, subspace
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


@given(d=st.integers(1, 70), data=st.data())
@settings(max_examples=30, deadline=None)
def test_the_basis_is_orthonormal_and_nested(d: int, data: st.DataObject) -> None:
    k_max = data.draw(st.integers(0, d))
    k = data.draw(st.integers(0, k_max))
    u = subspace.basis(b"seed", d, k_max)
    assert u.shape == (d, k_max)
    assert u.dtype == np.float32
    assert u.flags.c_contiguous
    u64 = u.astype(np.float64)
    assert np.abs(u64.T @ u64 - np.eye(k_max)).max(initial=0) < 1e-6
    assert (subspace.basis(b"seed", d, k) == u[:, :k]).all()


def test_a_wide_basis_is_orthonormal() -> None:
    u = subspace.basis(b"seed", 512, 64).astype(np.float64)
    assert np.abs(u.T @ u - np.eye(64)).max() < 1e-6


def test_threads_and_panels_change_no_bit_of_the_basis() -> None:
    d, k = 48, subspace.PANEL * 2 + 9
    with ThreadPoolExecutor(3) as pool:
        u = subspace.basis(b"seed", 4 * d, k, pool.map)
    assert (u == subspace.basis(b"seed", 4 * d, k)).all()
    rows_KD = philox.normal_like(b"seed", "subspace", (k, 4 * d), 1.0).astype(np.float64)
    for _ in range(2):
        for j, row_D in enumerate(rows_KD):  # Gram-Schmidt, row by row
            row_D /= np.sqrt(halves(row_D * row_D))
            for later_D in rows_KD[j + 1 :]:
                later_D -= halves(later_D * row_D) * row_D
    assert (u == rows_KD.T.astype(np.float32)).all()


def halves(x_D: np.ndarray) -> np.float64:
    """The sum, the upper half added to the lower one until one is left."""
    while len(x_D) > 1:
        half = (len(x_D) + 1) // 2
        upper = np.append(x_D[half:], [0.0] * (2 * half - len(x_D)))
        x_D = x_D[:half] + upper
    return np.float64(x_D[0])


@pytest.mark.parametrize("k_max", [-1, 5])
def test_a_basis_must_fit(k_max: int) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        subspace.basis(b"seed", 4, k_max)


def test_golden_digests() -> None:
    """These bits are part of the protocol: every run's θ(0) and U depend on them."""
    assert sha(philox.bits(b"potluck/7", "theta0/lm_head.weight", 1000)) == GOLDEN["bits"]
    assert sha(subspace.basis(b"potluck/7", 192, 24)) == GOLDEN["basis"]
    assert sha(*init.initial_shard(SPEC, b"potluck/7", "embed")) == GOLDEN["embed"]
    assert sha(*init.initial_shard(SPEC, b"potluck/7", "block.1")) == GOLDEN["block.1"]


GOLDEN = {
    "bits": "6784f4a75cfebd42",
    "basis": "bf4704d772aed08d",
    "embed": "7278b8d9647dfc43",
    "block.1": "37a64aa325b9f7c3",
}
