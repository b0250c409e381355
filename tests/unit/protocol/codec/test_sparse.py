"""The sparse codec: round trips, hostile payloads, size, error of the value formats, the aggregate, golden payloads."""

from __future__ import annotations

import contextlib
import hashlib
import math
import re
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.codec import sparse, topk
from protocol.codec.formats import Codec
from protocol.codec.sparse import PayloadError, apply, decode, encode, max_payload_size
from tests.support.plain_codec import entropy_size

ks = st.one_of(st.integers(1, 4096), st.sampled_from([1, 32, 64, 128, 2048, 4095, 4096]))
sparse_codecs = st.builds(Codec, topk=ks)
four_bits = st.builds(Codec, topk=ks, values=st.just("int4"))
DENSE = [Codec(4096, "int8"), Codec(4096, "fp32")]
codecs = st.one_of(sparse_codecs, four_bits, st.sampled_from(DENSE))
side = st.one_of(st.integers(1, 40), st.sampled_from([48, 64, 67, 96, 128]))
shape = st.one_of(st.tuples(side), st.tuples(side, side), st.sampled_from([(5000,), (4096,), (12288,), (192, 352)]))
shape_lists = st.lists(shape, min_size=1, max_size=3)


def arrays_of(shapes: list[tuple[int, ...]], seed: int, zeros: float = 0.2) -> list[npt.NDArray[np.float32]]:
    """Values on very uneven scales, with ties, zeros and negative zeros."""
    rng = np.random.default_rng(seed)
    result = []
    for s in shapes:
        x = rng.standard_normal(s) * np.exp(3 * rng.standard_normal(s))
        x = np.where(rng.random(s) < 0.3, np.sign(x), x)
        x = np.where(rng.random(s) < zeros, np.copysign(0.0, x), x)
        result.append(x.astype(np.float32))
    return result


def tiles_of(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Every tile of `x` as one row; written here independently of the codec."""
    if x.ndim == 1:
        c = max(s for s in range(1, min(4096, x.size) + 1) if x.size % s == 0)
        return x.reshape(-1, c)
    tr, tc = (max(s for s in range(1, min(64, n) + 1) if n % s == 0) for n in x.shape)
    blocks = [np.hsplit(band, x.shape[1] // tc) for band in np.vsplit(x, x.shape[0] // tr)]
    return np.stack([tile.reshape(-1) for band in blocks for tile in band])


def check_round_trip(codec: Codec, shapes: list[tuple[int, ...]], seed: int) -> None:
    """The largest of every tile are kept."""
    arrays = arrays_of(shapes, seed)
    payload = encode(codec, arrays)
    assert len(payload) <= max_payload_size(codec, shapes)
    assert encode(codec, arrays) == payload
    for x, got in zip(arrays, decode(codec, shapes, memoryview(payload)), strict=True):
        assert got.values.dtype == np.float32
        assert got.index.dtype == np.int64
        assert len(np.unique(got.index)) == len(got.index) == len(got.values)
        kept = np.zeros(x.size, dtype=bool)
        kept[got.index] = True
        in_tiles, of_tiles = tiles_of(kept.reshape(x.shape)), np.abs(tiles_of(x))
        n = of_tiles.shape[1]
        assert (in_tiles.sum(axis=1) == max(1, math.floor(n * codec.topk / 4096 + 0.5))).all()
        least = np.where(in_tiles, of_tiles, np.inf).min(axis=1, keepdims=True)
        left_out = np.where(in_tiles, -1, of_tiles)
        assert (left_out <= least).all()
        equal = of_tiles == least
        behind_one_left_out = np.maximum.accumulate(equal & ~in_tiles, axis=1)
        assert not (behind_one_left_out & equal & in_tiles).any(), "of equal magnitudes, the first are kept"
        exact = x.reshape(-1)[got.index]
        assert (got.values[exact > 0] >= 0).all()
        assert (got.values[exact < 0] <= 0).all()
        if codec.values == "sym2":
            assert len(np.unique(np.abs(got.values))) <= 2
        else:
            of_tile = exact.reshape(in_tiles.shape[0], -1)
            step = np.abs(of_tile).max(axis=1, keepdims=True) / 7
            assert (np.abs(got.values.reshape(of_tile.shape) - of_tile) <= 0.5001 * step).all()


@given(codec=st.one_of(sparse_codecs, four_bits), shapes=shape_lists, seed=st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_round_trip_keeps_the_largest_of_every_tile(codec: Codec, shapes: list[tuple[int, ...]], seed: int) -> None:
    check_round_trip(codec, shapes, seed)


@given(codec=codecs, shapes=shape_lists, seed=st.integers(0, 2**32), torn=st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_tiles_are_what_is_decoded(codec: Codec, shapes: list[tuple[int, ...]], seed: int, torn: int) -> None:
    payload = bytearray(encode(codec, arrays_of(shapes, seed)))
    for change in (0, 1 << torn % 8):
        payload[torn % len(payload)] ^= change
        try:
            expected = decode(codec, shapes, payload)
        except PayloadError as error:
            with pytest.raises(PayloadError, match=f"^{re.escape(str(error))}$"):
                sparse.decode_tiles(codec, shapes, payload)
            continue
        for shape, found, sent in zip(shapes, sparse.decode_tiles(codec, shapes, payload), expected, strict=True):
            tiling = topk.tiling(tuple(shape), codec.topk)
            inner = (found.marked & 4095).reshape(tiling.tiles, tiling.keep)
            assert np.array_equal((tiling.offsets[inner] + tiling.corners[:, None]).ravel(), sent.index)
            assert found.sent.tobytes() == sent.values.tobytes()


@given(shapes=shape_lists, seed=st.integers(0, 2**32))
@settings(max_examples=50, deadline=None)
def test_dense_payloads_have_every_element(shapes: list[tuple[int, ...]], seed: int) -> None:
    """fp32 as it is, int8 within half a step of its tile; in both, equal updates have equal bytes."""
    arrays = arrays_of(shapes, seed)
    for codec in DENSE:
        payload = encode(codec, arrays)
        assert len(payload) == max_payload_size(codec, shapes)
        decoded = decode(codec, shapes, payload)
        for x, got in zip(arrays, decoded, strict=True):
            found = np.empty(x.size, dtype=np.float32)
            found[got.index] = got.values
            of_tiles, of_found = tiles_of(x), tiles_of(found.reshape(x.shape))
            step = np.abs(of_tiles).max(axis=1, keepdims=True) / 127
            assert (np.abs(of_found - of_tiles) <= (0 if codec.values == "fp32" else 0.5001 * step)).all()
        again = [np.zeros(x.size, dtype=np.float32) for x in arrays]
        for x, got in zip(again, decoded, strict=True):
            x[got.index] = got.values
        same = decode(codec, shapes, encode(codec, [x.reshape(s) for x, s in zip(again, shapes, strict=True)]))
        for a, b in zip(decoded, same, strict=True):
            np.testing.assert_allclose(a.values, b.values, rtol=1e-6)


def test_dense_values_that_no_writer_makes_are_refused() -> None:
    shapes, tiny_value = [(2, 3)], np.float32(1e-40)
    x = np.array([[1, -2, 3], [4, -5, 127]], dtype=np.float32)
    good = encode(DENSE[0], [x])
    assert good[8:12] == np.float32(1).tobytes()
    assert np.frombuffer(good[12:], np.int8).tolist() == [1, -2, 3, 4, -5, 127]
    for at, raw in [
        (8, np.float32(0)), (8, np.float32(-0.0)), (8, np.float32(-1)), (8, np.float32(np.nan)), (8, tiny_value),
        (8, np.float32(3e38)), (17, np.int8(126)), (17, np.int8(-128)), (5, np.uint8(1)), (4, np.uint8(3)),
    ]:  # fmt: skip
        bad = good[:at] + raw.tobytes() + good[at + raw.nbytes :]
        with pytest.raises(PayloadError, match="scales" if at >= 8 else "header"):
            decode(DENSE[0], shapes, bad)
    assert decode(DENSE[0], shapes, good[:17] + np.int8(-127).tobytes())[0].values[-1] == -127
    (nothing,) = decode(DENSE[0], shapes, encode(DENSE[0], [np.full((2, 3), tiny_value)]))
    assert not nothing.values.any(), "a step that is too small for fp32 stays in the feedback"
    for value in (np.float32(np.inf), np.float32(np.nan), np.float32(-0.0)):
        exact = encode(DENSE[1], [x])
        with pytest.raises(PayloadError, match="not finite, or a zero has a sign"):
            decode(DENSE[1], shapes, exact[:8] + value.tobytes() + exact[12:])


@pytest.mark.parametrize("fill", [0.0, -0.0, 1.5, -3.25])
def test_constant_tensors_survive_exactly(fill: float) -> None:
    x = [np.full((64, 128), fill, dtype=np.float32), np.full(7, fill, dtype=np.float32)]
    codec = Codec(32)
    for got in decode(codec, [a.shape for a in x], encode(codec, x)):
        assert (got.values == np.float32(fill)).all()
    first = decode(codec, [(64, 128), (7,)], encode(codec, x))[0].index
    assert (first[:32] == np.arange(32)).all(), "of equal magnitudes, the first in the tile are kept"


@pytest.mark.parametrize("k", [1, 32, 300])
def test_hot_rows_and_columns_hide_nothing(k: int) -> None:
    """The bound from the columns' groups is weakest where the large magnitudes are in few columns."""
    rng = np.random.default_rng(k)
    for hot in (np.s_[:, 5], np.s_[7, :], np.s_[:, 60:], np.s_[10:20, 3:9]):
        x = rng.standard_normal((128, 192)).astype(np.float32)
        x[hot] *= 100
        got = decode(Codec(k), [x.shape], encode(Codec(k), [x]))[0]
        kept = np.zeros(x.size, dtype=bool)
        kept[got.index] = True
        of_tiles = np.sort(np.abs(tiles_of(x)), axis=1)[:, -k:]
        assert (np.sort(np.abs(tiles_of(x))[tiles_of(kept.reshape(x.shape))].reshape(-1, k), axis=1) == of_tiles).all()


def check_aggregate(codec: Codec, shapes: list[tuple[int, ...]], seed: int, members: int) -> None:
    """The mean of payloads is added as stated."""
    old, eta = arrays_of(shapes, seed), np.float32(0.7)
    before = [x.copy() for x in old]
    contributions = [(0.1 + 0.2 * m, encode(codec, arrays_of(shapes, seed + 1 + m))) for m in range(members)]
    new = apply(codec, old, contributions, eta)
    for number, x in enumerate(old):
        total = np.zeros(x.size, dtype=np.float32)
        for weight, payload in contributions:
            sent = decode(codec, shapes, payload)[number]
            total[sent.index] = total[sent.index] + np.float32(weight) * sent.values
        assert new[number].tobytes() == (x - eta * total.reshape(x.shape)).tobytes()
        assert x.tobytes() == before[number].tobytes(), "what goes in stays as it is"


SPECIAL = [0.0, -0.0, 1.0, -1e-45, 3e38, -3e38, math.inf, -math.inf, math.nan]


@pytest.mark.parametrize("eta", [1.0, 0.7, 3e38, math.inf, 0.0, -0.5])
@pytest.mark.parametrize("weights", [(), (0.5,), (0.0, -0.0), (0.3, 0.0, 0.7, -0.2), (1e30, 1.0, -1e30)])
def test_every_bit_of_the_aggregate_is_that_of_dense_arithmetic(eta: float, weights: tuple[float, ...]) -> None:
    """Signs of zeros, what is not finite, and entries that none, one or several have."""
    shapes, codec = [(130, 96), (7, 67), (5000,), (13,), (1,), (1, 1)], Codec(300)
    rng = np.random.default_rng(3)
    old = [
        np.where(rng.random(s) < 0.5, rng.choice(SPECIAL, s), rng.standard_normal(s)).astype(np.float32) for s in shapes
    ]
    same = encode(codec, arrays_of(shapes, 20))
    contributions = [(w, same if m % 2 else encode(codec, arrays_of(shapes, m))) for m, w in enumerate(weights)]
    with np.errstate(all="ignore"):
        new = apply(codec, old, contributions, np.float32(eta))
        totals = [np.zeros(s, dtype=np.float32) for s in shapes]
        for weight, payload in contributions:
            for total, sent in zip(totals, decode(codec, shapes, payload), strict=True):
                for i, value in zip(sent.index, sent.values, strict=True):
                    total.reshape(-1)[i] += np.float32(weight) * value
        expected = [x - np.float32(eta) * total for x, total in zip(old, totals, strict=True)]
    for a, b in zip(new, expected, strict=True):
        assert a.tobytes() == b.tobytes()


LARGE = (1536, 1024)
"""More elements than are worked through at a time, or by one thread."""


def test_threads_change_nothing() -> None:
    shapes = [LARGE, (192, 352), (12288,), (3,)]
    codec, arrays = Codec(64), arrays_of(shapes, 5)
    whole = encode(codec, arrays)
    after = apply(codec, arrays, [(0.5, whole), (0.25, whole)], np.float32(1))
    with ThreadPoolExecutor(4) as pool:
        assert encode(codec, arrays, pool.map) == whole
        again = apply(codec, arrays, [(0.5, whole), (0.25, whole)], np.float32(1), pool.map)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(after, again, strict=True))


def test_a_large_tensor_keeps_what_its_bands_keep() -> None:
    """A band of tiles is small enough to be worked through at once."""
    codec, (x,) = Codec(64), arrays_of([LARGE], 5)
    (whole,) = decode(codec, [LARGE], encode(codec, [x]))
    bands = np.split(x, LARGE[0] // 64)
    parts = [decode(codec, [band.shape], encode(codec, [band]))[0] for band in bands]
    index = np.concatenate([part.index + number * bands[0].size for number, part in enumerate(parts)])
    assert (np.sort(whole.index) == np.sort(index)).all()


def test_tensors_of_several_segments() -> None:
    """At 2048 of 4096 a segment has 2^17 elements: five of them here, and one smaller tensor."""
    shapes = [(640, 1024), (352, 192)]
    codec = Codec(2048)
    check_round_trip(codec, shapes, 6)
    check_aggregate(codec, shapes, 7, 2)
    for other in (Codec(2048, "int4"), *DENSE):
        check_aggregate(other, shapes, 7, 3)
    payload = encode(codec, arrays_of(shapes, 6))
    rng = np.random.default_rng(8)
    for _ in range(20):
        bad = bytearray(payload)
        bad[rng.integers(len(bad))] ^= 1 << rng.integers(8)
        check_refused_or_sound(codec, shapes, bytes(bad))


def test_strides_and_other_floats_are_taken_as_fp32() -> None:
    x = arrays_of([(128, 64)], 3)[0]
    for same in (x.astype(np.float64), np.asfortranarray(x), np.repeat(x, 2, axis=1)[:, ::2]):
        assert encode(Codec(32), [same]) == encode(Codec(32), [x])


# --- payloads of others


@given(
    codec=codecs,
    shapes=shape_lists,
    seed=st.integers(0, 2**32),
    cut=st.floats(0, 1),
    longer=st.binary(max_size=9),
)
@settings(max_examples=50, deadline=None)
def test_any_other_length_is_refused(
    codec: Codec, shapes: list[tuple[int, ...]], seed: int, cut: float, longer: bytes
) -> None:
    payload = encode(codec, arrays_of(shapes, seed))
    with pytest.raises(PayloadError, match="bytes"):
        decode(codec, shapes, payload[: int(cut * (len(payload) - 1))])
    if longer:
        with pytest.raises(PayloadError, match="bytes"):
            decode(codec, shapes, payload + longer)


@given(
    codec=codecs,
    shapes=shape_lists,
    seed=st.integers(0, 2**32),
    changes=st.lists(st.tuples(st.floats(0, 1), st.integers(1, 255)), min_size=1, max_size=4),
)
@settings(max_examples=200, deadline=None)
def test_a_changed_payload_is_refused_or_sound(
    codec: Codec, shapes: list[tuple[int, ...]], seed: int, changes: list[tuple[float, int]]
) -> None:
    payload = bytearray(encode(codec, arrays_of(shapes, seed)))
    for where, flip in changes:
        payload[int(where * (len(payload) - 1))] ^= flip
    check_refused_or_sound(codec, shapes, bytes(payload))


@given(
    codec=st.one_of(sparse_codecs, four_bits),
    shapes=shape_lists,
    seed=st.integers(0, 2**32),
    at=st.integers(0, 2),
    step=st.integers(-9, 9),
)
@settings(max_examples=60, deadline=None)
def test_wrong_lengths_of_quotients_are_refused(
    codec: Codec, shapes: list[tuple[int, ...]], seed: int, at: int, step: int
) -> None:
    """Also where the bytes move from one tensor to its neighbour, so that their sum is right."""
    payload = encode(codec, arrays_of(shapes, seed))
    lengths = np.frombuffer(payload, "<u4", len(shapes), 8).astype(np.int64)
    lengths[at % len(shapes)] += step
    lengths[-1] -= step
    changed = payload[:8] + (lengths % 2**32).astype("<u4").tobytes() + payload[8 + 4 * len(shapes) :]
    if changed != payload:
        check_refused_or_sound(codec, shapes, changed)


def check_refused_or_sound(codec: Codec, shapes: list[tuple[int, ...]], payload: bytes) -> None:
    """Sound: what `encode` can have made."""
    try:
        decoded = decode(codec, shapes, payload)
    except PayloadError:
        return
    for s, got in zip(shapes, decoded, strict=True):
        assert np.isfinite(got.values).all()
        assert len(np.unique(got.index)) == len(got.index) == len(got.values)
        assert got.index.min() >= 0
        assert got.index.max() < math.prod(s)


def test_every_field_is_checked() -> None:
    codec = Codec(3)
    shapes = [(10, 50)]  # one tile of 500 that keeps 1 entry: 8 low bits and a quotient up to 1
    good = encode(codec, arrays_of(shapes, 1))
    at = 12  # where the tensor begins
    assert max_payload_size(codec, shapes) == at + 8 + 1 + 1 + 1
    cases = [
        (0, 0, "header"), (3, 1, "header"), (4, 0, "header"), (5, 2, "header"), (6, 4, "header"),
        (at + 3, 0xFF, "ordered"), (at + 7, 0xFF, "ordered"), (at + 7, 0x7F, "finite"), (-2, 0x04, "padding"),
    ]  # fmt: skip
    cases += [(8, 2, "quotients"), (8, 0, "quotients"), (11, 255, "quotients")]
    cases += [(-1, 0, "one for each"), (-1, 3, "one for each"), (-1, 4, "range")]
    for where, value, reason in cases:
        bad = bytearray(good)
        bad[where] = value
        if (where, value) == (at + 7, 0x7F):
            bad[at + 4 : at + 8] = np.float32(np.inf).tobytes()
        with pytest.raises(PayloadError, match=reason):
            decode(codec, shapes, bytes(bad))


def test_four_bits_that_no_writer_makes_are_refused() -> None:
    codec, shapes = Codec(3, "int4"), [(10, 50)]
    good = encode(codec, arrays_of(shapes, 1))
    at = 12 + 1  # the scale, behind the tensor's length and one byte of low bits
    assert max_payload_size(codec, shapes) == at + 4 + 1 + 1
    assert good[at + 4] in (1, 15), "the code of the largest"
    for where, raw, reason in [
        (at, np.float32(0), "scales"), (at, np.float32(np.nan), "scales"), (at, np.float32(-1), "scales"),
        (at + 4, np.uint8(0), "scales"), (at + 4, np.uint8(14), "scales"), (at + 4, np.uint8(0x1F), "padding"),
        (4, np.uint8(1), "header"),
    ]:  # fmt: skip
        with pytest.raises(PayloadError, match=reason):
            decode(codec, shapes, good[:where] + raw.tobytes() + good[where + raw.nbytes :])


def test_gaps_are_checked() -> None:
    """A tile of 500 with two entries: 7 low bits, quotients up to 3 in sum."""
    shapes, codec = [(10, 50)], Codec(17)
    header = encode(codec, arrays_of(shapes, 2))[:8]

    def indices(low: list[int], quotients: bytes) -> list[int]:
        planes = sparse.pack_planes(np.array(low, dtype=np.uint8), 7)
        centroids = np.ones(2, dtype="<f4").tobytes()
        payload = header + len(quotients).to_bytes(4, "little") + centroids + planes + bytes(1) + quotients
        return decode(codec, shapes, payload)[0].index.tolist()

    assert indices([3, 5], b"\x03") == [3, 9]
    assert indices([127, 115], b"\x0a") == [255, 499]
    for low, quotients, reason in [
        ([127, 116], b"\x0a", "out of range"),
        ([0, 0], b"\x21", "out of range"),
        ([3, 5], b"\x01", "one for each"),
        ([3, 5], b"\x07", "one for each"),
        ([3, 5], b"", "bytes of quotients"),
        ([3, 5], b"\x03\x00", "bytes of quotients"),
    ]:
        with pytest.raises(PayloadError, match=reason):
            indices(low, quotients)


def test_memory_stays_within_what_is_stated() -> None:
    """Of decode: 12 bytes per entry of the result, 20 per entry of a segment, and tables; for any payload."""
    shapes = [(1024, 2048), (512, 512)]
    codec = Codec(128)
    payload = encode(codec, arrays_of(shapes, 1))
    head = max_payload_size(Codec(1), []) + 4 * 3
    noise = payload[:head] + np.random.default_rng(1).bytes(len(payload) - head)
    limit = 12 * sparse.entries(codec, shapes) + 20 * sparse.SEGMENT + (1 << 18)
    for data in (payload, noise):
        tracemalloc.start()
        with contextlib.suppress(PayloadError):
            decode(codec, shapes, data)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < limit


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("shape", [(64, 64), (13,), (4096,)])
def test_values_that_are_not_finite_are_not_sent(bad: float, shape: tuple[int, ...]) -> None:
    x = np.zeros(shape, dtype=np.float32)
    x[-1] = bad
    for codec in (Codec(32), *DENSE):
        with pytest.raises(PayloadError):
            encode(codec, [x])


@pytest.mark.parametrize("bad", [(), (2, 2, 2), (0,), (3, 0)])
def test_shapes_that_cannot_be_tiled(bad: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="shape"):
        max_payload_size(Codec(32), [bad])


@pytest.mark.parametrize(("k", "values"), [(0, "sym2"), (4097, "sym2"), (32, "int3"), (32, "int8"), (4095, "fp32")])
def test_bad_codecs(k: int, values: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        Codec(k, values)


# --- sizes


@pytest.mark.parametrize(("k", "bits_per_index"), [(32, 8.32), (64, 7.36), (128, 6.38)])
def test_the_entropy_is_that_of_subsets(k: int, bits_per_index: float) -> None:
    codec = Codec(k)
    assert 8 * entropy_size(codec, [(64, 64)]) / k == pytest.approx(bits_per_index + 2, abs=0.01)
    exact = math.log2(math.comb(4096, k))
    assert 8 * entropy_size(codec, [(128, 64)]) == pytest.approx(2 * (exact + 2 * k))


@pytest.mark.parametrize("k", [32, 64, 128])
def test_rice_is_near_the_entropy_of_sets_without_structure(k: int) -> None:
    x = np.random.default_rng(k).standard_normal((1024, 512)).astype(np.float32)
    codec = Codec(k)
    payload = encode(codec, [x])
    assert len(payload) <= 1.03 * entropy_size(codec, [x.shape])
    assert max_payload_size(codec, [x.shape]) <= 1.08 * entropy_size(codec, [x.shape])
    if k == 32:
        assert 4 * x.size / len(payload) >= 375


def test_the_longest_payload_has_the_stated_size() -> None:
    """One entry at the end of the tile and the others so that no quotient is rounded down."""
    for k in (1, 32, 64, 128, 2000, 4096):
        r = sparse.rice_parameter(4096, k)
        steps = (4096 - k) >> r  # all quotients of a tile add up to this
        gaps = np.zeros(k, dtype=np.int64)
        gaps[0] = steps << r
        x = np.zeros(4096, dtype=np.float32)
        x[np.cumsum(gaps + 1) - 1] = 1
        x = np.tile(x, 8)
        assert len(encode(Codec(k), [x])) == max_payload_size(Codec(k), [x.shape])


# --- values


@given(shapes=shape_lists, seed=st.integers(0, 2**32), k=ks)
@settings(max_examples=50, deadline=None)
def test_two_means_are_those_of_the_formula(shapes: list[tuple[int, ...]], seed: int, k: int) -> None:
    """The docstring's iteration as it is written, on the kept values themselves."""
    arrays = arrays_of(shapes, seed)
    for x, g in zip(arrays, decode(Codec(k), shapes, encode(Codec(k), arrays)), strict=True):
        e = x.reshape(-1)[g.index]
        m = np.abs(e.astype(np.float64))
        t = m.mean()
        for _ in range(8):
            low, high = m[m <= t], m[m > t]
            lo = low.mean() if low.size else high.mean()
            hi = high.mean() if high.size else lo
            t = (lo + hi) / 2
        expected = np.where(np.signbit(e) & (m > 0), -1, 1) * np.where(m > t, hi, lo)
        np.testing.assert_allclose(g.values, expected, rtol=1e-6)


def test_the_golden_payload() -> None:
    """A change of these bytes changes the wire format: raise the version."""
    x = ((np.arange(96 * 128) * 2_654_435_761 % 1_000_003) - 500_000).reshape(96, 128).astype(np.float32)
    assert hashlib.sha256(encode(Codec(32), [x, x[0]])).hexdigest()[:16] == "f5be5c27d4a7a133"
    assert sparse.entries(Codec(32), [(96, 128), (128,)]) == 4 * 24 + 1
    found = [hashlib.sha256(encode(codec, [x, x[0]])).hexdigest()[:16] for codec in (Codec(32, "int4"), *DENSE)]
    assert found == ["5662325088b1519b", "49f5d5be6c9e2a0b", "c69adc1d52d508c4"]
