"""The update on the trainer's device, here the CPU by torch: the same bytes as the host's, the same feedback; and what
crosses to the host, counted at a device that stands in for one (tests/support/stand_in_device.py)."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from peer.training import update
from peer.training.update import DeviceUpdate, Moved
from protocol.codec import sparse, topk
from protocol.codec.formats import Codec
from protocol.codec.sparse import PayloadError
from protocol.errors import LocalError
from tests.support.stand_in_device import NAME, StandIn

Array = npt.NDArray[np.float32]
BETA = np.float32(0.95)
side = st.one_of(st.integers(1, 20), st.sampled_from([48, 64, 67, 96, 128]))
shapes = st.one_of(st.tuples(side), st.tuples(side, side), st.sampled_from([(5000,), (4096,), (12288,), (192, 352)]))
SMALLEST = float(np.finfo(np.float32).smallest_subnormal)
SPECIAL = [0.0, -0.0, 1.0, -1.0, SMALLEST, -SMALLEST, 3 * SMALLEST, 1e-38, 3e38, -3e38]
INFINITE = [float("inf"), float("-inf"), float("nan")]


def values_of(shape: tuple[int, ...], seed: int, special: list[float], share: float) -> Array:
    """Values on very uneven scales; this `share` of them is special."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp(3 * rng.standard_normal(shape))
    return np.where(rng.random(shape) < share, rng.choice(special, shape), x).astype(np.float32)


def on_host(tensors: list[Array], k: int) -> list[topk.Kept]:
    tilings = [topk.tiling(x.shape, k) for x in tensors]
    return [topk.select(x.reshape(t.rows, t.cols), t, map) for x, t in zip(tensors, tilings, strict=True)]


def check_same_bytes(codec: Codec, feedback: list[Array], moved: list[Moved]) -> None:
    """Against numpy's arithmetic and the codec's own selection."""
    expected = []
    with np.errstate(all="ignore"):
        for e, (theta, local) in zip(feedback, moved, strict=True):
            delta = local.numpy() if theta is None else theta - local.numpy()
            expected.append(e * BETA + delta)
    found = [e.copy() for e in feedback]
    with StandIn() as device:
        there: list[Moved] = [(theta, local.to(f"{NAME}:0", copy=True)) for theta, local in moved]
        kept = DeviceUpdate(f"{NAME}:0", 2).accumulate(there, found, BETA, codec.topk, map)
    for e, of_host in zip(found, expected, strict=True):
        assert np.array_equal(e.view(np.uint32), of_host.view(np.uint32)) or np.isnan(of_host).any()
    if all(np.isfinite(e).all() for e in expected):
        payload = sparse.encode(codec, expected)
        assert sparse.pack(codec, kept) == payload
        at_home = sum(e.nbytes for e in feedback)
        assert sum(device.to_host) - at_home <= 2 * len(payload)
    else:
        with pytest.raises(PayloadError):
            sparse.encode(codec, expected)
        with pytest.raises(PayloadError):
            sparse.pack(codec, kept)


@given(
    shape=st.lists(shapes, min_size=1, max_size=3),
    k=st.one_of(st.integers(1, 4096), st.sampled_from([32, 64, 128, 4096])),
    seed=st.integers(0, 2**32),
    special=st.sampled_from([SPECIAL, [0.0, -0.0], [1.0, -1.0], SPECIAL + INFINITE]),
    share=st.sampled_from([0.0, 0.001, 0.5, 0.99, 1.0]),
)
@settings(max_examples=40)
def test_the_device_makes_the_hosts_bytes(
    shape: list[tuple[int, ...]],
    k: int,
    seed: int,
    special: list[float],
    share: float,
) -> None:
    """And in addition to the feedback no more comes to the host than twice the payload."""
    feedback = [values_of(s, seed + i, special, share) for i, s in enumerate(shape)]
    theta = [values_of(s, seed + 10 + i, SPECIAL, share) for i, s in enumerate(shape)]
    local = [torch.from_numpy(values_of(s, seed + 20 + i, SPECIAL, share)) for i, s in enumerate(shape)]
    check_same_bytes(Codec(k), feedback, list(zip(theta, local, strict=True)))


@pytest.mark.parametrize(
    "shape", [(4096,), (2048,), (32, 3), (17,), (16,), (12,), (9, 7), (8,), (5,), (3,), (2,), (1,)]
)
def test_no_density_brings_more_to_the_host_than_twice_the_payload(shape: tuple[int, ...]) -> None:
    """The least payload of every density, of a tile of each size: what is packed depends on nothing else."""
    done = set()
    for k in range(1, 4097, 1 if math.prod(shape) < 100 else 37):
        tiling = topk.tiling(shape, k)
        if tiling.keep in done:
            continue
        done.add(tiling.keep)
        index_TK = torch.arange(tiling.keep, dtype=torch.int16).repeat(tiling.tiles, 1)
        packed = update.pack(index_TK, tiling.n)
        assert np.array_equal(update.unpack(packed.numpy(), tiling), index_TK.numpy())
        # of equal ones the first are kept: no quotient but 0
        kept = topk.Kept(tiling, index_TK.numpy().view(np.uint16), np.zeros(index_TK.numel(), np.float32))
        assert packed.numel() <= 2 * len(sparse.pack(Codec(k), [kept])) - 1


@given(
    x=arrays.arrays(np.uint32, arrays.array_shapes(min_dims=1, max_dims=2, max_side=12)),
    k=st.sampled_from([1, 300, 1024, 2048, 4096]),
)
@example(x=np.full((4, 4), 0x7F800001, dtype=np.uint32), k=2048)
@example(x=np.array([[0x80000000, 0, 0x80000001, 1]], dtype=np.uint32), k=1024)
def test_any_bits_are_selected_alike(x: npt.NDArray[np.uint32], k: int) -> None:
    values = x.view(np.float32)
    tiling = topk.tiling(values.shape, k)
    expected = topk.select(values.reshape(tiling.rows, tiling.cols), tiling, map)
    found = update.select(update.tiles(torch.from_numpy(values), tiling), tiling.keep)
    assert np.array_equal(found.numpy().view(np.uint16), expected.index_TK)


@pytest.mark.parametrize("rows", [64, 64 * 1100])
def test_parts_and_lanes_change_nothing(rows: int) -> None:
    """A tensor of several parts, on more threads than there are lanes."""
    e, theta = (np.random.default_rng(i).standard_normal((rows, 128), dtype=np.float32) for i in range(2))
    local = torch.from_numpy(theta) * 0.9
    assert len(topk.tiling(e.shape, 32).cut(update.PART)) == (2 if rows > 64 else 1)
    host = e * BETA + (theta - local.numpy())
    with ThreadPoolExecutor(4) as pool:
        kept = DeviceUpdate("cpu", 2).accumulate([(theta, local)] * 2, [e, e.copy()], BETA, 32, pool.map)
    assert e.tobytes() == host.tobytes()
    expected = on_host([host], 32)[0]
    for of_device in kept:
        assert np.array_equal(of_device.index_TK, expected.index_TK)
        assert of_device.values.tobytes() == expected.values.tobytes()


@pytest.mark.parametrize("bad", INFINITE)
def test_what_is_not_finite_is_dropped_before_anything_changes(bad: float) -> None:
    e = [np.ones((64, 64), dtype=np.float32), np.ones(8, dtype=np.float32)]
    local = [torch.ones(64, 64), torch.tensor([bad, *[1.0] * 7])]
    moved: list[Moved] = [(np.zeros(b.shape, dtype=np.float32), b) for b in local]
    with pytest.raises(LocalError, match="not finite"):
        DeviceUpdate("cpu").accumulate(moved, e, BETA, 32, map)
    assert all((x == 1).all() for x in e)
    with pytest.raises(ValueError, match="shapes"):
        DeviceUpdate("cpu").accumulate(moved[:1], e, BETA, 32, map)
