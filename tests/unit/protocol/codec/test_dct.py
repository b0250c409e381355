"""The cosine transform of tiles: its definition, its inverse, and that no sum is rounded."""

from __future__ import annotations

import hashlib
import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import pytest

from protocol.codec import dct, sparse, topk
from protocol.codec.formats import TILE_SIDE, Codec

CODEC = Codec(64, transform="dct")


def waves(n: int) -> npt.NDArray[np.float64]:
    """The definition."""
    found = [[math.cos(math.pi * (i + 0.5) * k / n) for i in range(n)] for k in range(n)]
    return np.array(found) * np.where(np.arange(n)[:, None] == 0, math.sqrt(1 / n), math.sqrt(2 / n))


def tiles(*shape: int, seed: int = 0) -> npt.NDArray[np.float32]:
    """Values on uneven scales."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * np.exp(6 * rng.standard_normal((shape[0], 1, 1)))).astype(np.float32)


@pytest.mark.parametrize("shape", [(5, 64, 64), (7, 48, 64), (3, 1, 13), (2, 37, 1), (4, 1, 1)])
def test_it_is_the_orthonormal_transform_and_has_an_inverse(shape: tuple[int, ...]) -> None:
    x = tiles(*shape)
    norm = np.sqrt(np.square(x.astype(np.float64)).sum(axis=(1, 2), keepdims=True))
    found = dct.turned(x)
    expected = waves(shape[1]) @ x.astype(np.float64) @ waves(shape[2]).T
    assert (np.abs(found - expected) <= 2e-7 * norm).all()
    assert (np.abs(dct.turned(found, inverse=True) - x) <= 4e-7 * norm).all()
    assert not dct.turned(np.zeros(shape, np.float32)).any()


def test_whole_numbers_of_any_size_give_the_same_bits() -> None:
    """Integers without bounds, in place of float64: so no order of adding matters."""
    x = np.concatenate([tiles(20, 64, 64), np.full((1, 64, 64), 1e36, np.float32), np.full((1, 64, 64), 1e-45)])
    x = x.astype(np.float32)
    rows = np.array([[int(v) for v in row] for row in dct.matrix(64)], dtype=object)
    for inverse in (False, True):
        found, a = dct.turned(x, inverse), rows.T if inverse else rows
        for tile, turned in zip(x, found, strict=True):
            exponent = math.frexp(float(np.abs(tile).max()))[1]
            whole = np.array([[round(math.ldexp(float(v), 24 - exponent)) for v in row] for row in tile], dtype=object)
            first = a @ whole
            half = np.array([[_rounded(int(v), 22) for v in row] for row in first], dtype=object)
            for sums in (np.abs(a) @ np.abs(whole), np.abs(half) @ np.abs(a.T)):
                assert max(sums.ravel()) < 1 << 53
            second = half @ a.T
            expected = [[np.float32(math.ldexp(int(v), exponent - 46)) for v in row] for row in second]
            assert np.array(expected, dtype=np.float32).tobytes() == turned.tobytes()


def _rounded(value: int, bits: int) -> int:
    """value / 2^bits as a whole number, halves to even."""
    down, rest = value >> bits, value & ((1 << bits) - 1)
    half = 1 << (bits - 1)
    return down + (rest > half or (rest == half and down % 2 == 1))


def test_no_library_of_cosines_gives_another_matrix() -> None:
    """No entry is so near to a half that the last bits of a cosine decide."""
    for n in range(1, TILE_SIDE + 1):
        exact = waves(n) * 2.0**22
        assert np.abs(exact - np.floor(exact) - 0.5).min() > 1e-8
        assert np.array_equal(dct.matrix(n), np.rint(exact))


def test_tensors_are_transformed_tile_by_tile_on_any_number_of_threads() -> None:
    x = tiles(1, 640, 1024)[0]
    tiling = topk.tiling(x.shape, 64)
    found = dct.transformed(x, tiling)
    assert np.array_equal(found[64:128, 128:192], dct.turned(x[None, 64:128, 128:192].copy())[0])
    with ThreadPoolExecutor(3) as pool:
        assert np.array_equal(dct.transformed(x, tiling, pool.map), found)
    vector = x[0]
    assert np.array_equal(dct.transformed(vector, topk.tiling(vector.shape, 64)), vector), "a vector stays"
    assert hashlib.sha256(found.tobytes()).hexdigest()[:16] == "2db8fcfa26f84082"


def test_the_aggregate_is_transformed_back() -> None:
    """Where one update is applied, by what it moves; where several are, by their sum."""
    shapes = [(130, 96), (7, 67), (300,), (1, 1)]
    rng = np.random.default_rng(1)
    old = [rng.standard_normal(s, dtype=np.float32) for s in shapes]
    sent = [[rng.standard_normal(s, dtype=np.float32) for s in shapes] for _ in range(3)]
    payloads = [(0.2 + 0.1 * m, sparse.encode(CODEC, arrays)) for m, arrays in enumerate(sent)]
    new = sparse.apply(CODEC, old, payloads, np.float32(0.7))
    alone = sparse.apply(CODEC, old, [(1.0, payloads[0][1])], np.float32(1))
    for number, (x, y, one) in enumerate(zip(old, new, alone, strict=True)):
        total = np.zeros(x.size)
        for weight, payload in payloads:
            moved = sparse.moves(CODEC, shapes, payload)[number]
            total[moved.index] += weight * moved.values
        np.testing.assert_allclose(y, x - 0.7 * total.reshape(x.shape), atol=2e-5)
        first = sparse.moves(CODEC, shapes, payloads[0][1])[number]
        moved = np.zeros(x.size, np.float32)
        moved[first.index] = first.values
        assert one.tobytes() == (x - moved.reshape(x.shape)).tobytes()
