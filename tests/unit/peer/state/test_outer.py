"""The outer step: its arithmetic bit for bit, all-or-nothing application, and the promise that nothing is lost."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peer.state.outer_optimizer import Outer
from protocol.codec import dct, sparse, topk
from protocol.codec.formats import Codec
from protocol.codec.sparse import PayloadError
from protocol.errors import LocalError
from protocol.run import init, layout
from protocol.run.layout import ModelSpec
from tests.support import displacement

SPEC = ModelSpec(vocab_size=96, d_model=16, n_layers=1, n_heads=2, d_ff=24, context=8)
SHARD = "head"  # a vector [16] and a matrix [96, 16]
SHAPES = layout.shapes(SPEC, SHARD)
ULP = 2.0**-24  # relative error of one fp32 operation
Shard = list[npt.NDArray[np.float32]]


def outer(codec: Codec = Codec(32), beta: float = 0.95, eta: float = 1.0) -> Outer:  # noqa: B008
    o = Outer(SPEC, codec, beta, eta)
    o.theta[SHARD] = init.initial_shard(SPEC, b"seed", SHARD)
    return o


def pseudo_gradient(seed: int) -> Shard:
    """Uneven scales, as after some inner steps."""
    rng = np.random.default_rng(seed)
    return [(1e-3 * rng.standard_normal(s) * np.exp(rng.standard_normal(s))).astype(np.float32) for s in SHAPES]


def flat(arrays: Shard) -> npt.NDArray[np.float64]:
    return np.concatenate([a.reshape(-1) for a in arrays]).astype(np.float64)


def dense(o: Outer, payload: bytes) -> npt.NDArray[np.float64]:
    """What a payload says, as one long vector."""
    out = [np.zeros(s, dtype=np.float32) for s in SHAPES]
    for x, sent in zip(out, sparse.decode(o.codec, SHAPES, payload), strict=True):
        x.reshape(-1)[sent.index] = sent.values
    return flat(out)


rounds_of_play = st.lists(
    st.lists(
        st.tuples(
            st.integers(0, 2**32),  # the pseudo-gradient's seed
            st.sampled_from(["committed", "returned", "returned later", "idle"]),
        ),
        min_size=3,
        max_size=3,
    ),
    min_size=1,
    max_size=8,
)


@given(
    plays=rounds_of_play,
    beta=st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    eta=st.sampled_from([0.8, 1.0]),
    codec=st.sampled_from([Codec(32), Codec(512), Codec(4096, "int8"), Codec(4096, "fp32")]),
)
@settings(max_examples=40, deadline=None)
def test_nothing_is_lost(plays: list[list[tuple[int, str]]], beta: float, eta: float, codec: Codec) -> None:
    """Three replicas; each round each one works or idles, and what it offers is committed or left out and
    given back.

    Let a_m(r) be what left replica m's buffer for good in round r: payloads committed, less what an earlier
    round had sent and round r gave back. e is multiplied by β once per `accumulate`; so with L_m = β L_m +
    δ_m and C_m = β C_m + a_m at each of the replica's working rounds (what is given back between rounds
    enters C_m as it is),

        e_m + C_m = L_m                     for every replica, and
        θ(0) - θ(R) = η Σ_r Σ_m w_m sent_m  over what was committed.

    Both are checked against a ledger in float64. Tolerance: at most 5 roundings of a number no larger than B
    a round for the first (2^-24 B each), M + 4 for the second, where B is the largest number seen; errors of
    earlier rounds only decay.
    """
    shared = outer(codec, beta, eta)
    start = flat(shared.theta[SHARD])
    peers = [outer(codec, beta, eta) for _ in range(3)]
    beta64, eta64 = float(np.float32(beta)), float(np.float32(eta))
    earned = [np.zeros_like(start) for _ in peers]  # L_m
    gone = [np.zeros_like(start) for _ in peers]  # C_m
    pending: list[list[bytes]] = [[] for _ in peers]
    applied, largest = np.zeros_like(start), float(np.abs(start).max())
    for play in plays:
        commit: list[tuple[float, bytes]] = []
        for m, (seed, fate) in enumerate(play):
            if fate == "idle":
                continue
            for payload in pending[m]:  # the news that it was left out came late, before this round's work ended
                peers[m].restore_feedback(SHARD, payload)
                gone[m] -= dense(peers[m], payload)
            pending[m] = []
            delta = pseudo_gradient(seed)
            peers[m].accumulate(SHARD, displacement.of(delta))
            earned[m] = beta64 * earned[m] + flat(delta)
            gone[m] = beta64 * gone[m]
            largest = max(largest, float(np.abs(flat(peers[m].feedback[SHARD])).max()))
            payload = peers[m].encode(SHARD)[0]
            gone[m] += dense(peers[m], payload)
            if fate == "returned":
                peers[m].restore_feedback(SHARD, payload)
                gone[m] -= dense(peers[m], payload)
            elif fate == "returned later":
                pending[m].append(payload)
            else:
                commit.append((0.2 + 0.1 * m, payload))
        shared.apply(SHARD, commit)
        for weight, payload in commit:
            applied += eta64 * float(np.float32(weight)) * dense(shared, payload)
        largest = max(largest, float(np.abs(flat(shared.theta[SHARD])).max()))
    unit = ULP * largest * len(plays)
    for m, peer in enumerate(peers):
        left = flat(peer.feedback[SHARD]) if SHARD in peer.feedback else np.zeros_like(start)
        np.testing.assert_allclose(left + gone[m], earned[m], rtol=0, atol=5 * unit)
    np.testing.assert_allclose(start - flat(shared.theta[SHARD]), applied, rtol=0, atol=7 * unit)


def test_the_arithmetic_is_the_stated_one() -> None:
    """With two magnitudes a tensor, so that the payload has the values exactly."""
    o = outer(Codec(4096), beta=0.95, eta=0.8)
    rng = np.random.default_rng(1)
    shape_of = [rng.choice([-0.5, 0.5, -1.0, 1.0], s).astype(np.float32) for s in SHAPES]
    first, second = ([np.float32(scale) * x for x in shape_of] for scale in (3e-3, 7e-3))
    before = [t.copy() for t in o.theta[SHARD]]
    held = o.theta[SHARD]
    o.accumulate(SHARD, displacement.of(first))
    assert all((e == d).all() for e, d in zip(o.feedback[SHARD], first, strict=True))
    a = o.encode(SHARD)[0]
    assert all((e == 0).all() for e in o.feedback[SHARD])
    o.restore_feedback(SHARD, a)
    o.accumulate(SHARD, displacement.of(second))
    expected = [np.float32(0.95) * d1 + d2 for d1, d2 in zip(first, second, strict=True)]
    assert all((e == x).all() for e, x in zip(o.feedback[SHARD], expected, strict=True))
    b = o.encode(SHARD)[0]
    o.apply(SHARD, [(0.3, a), (0.7, b)])
    for now, was, x, y in zip(o.theta[SHARD], before, first, expected, strict=True):
        total = np.float32(0.3) * x + np.float32(0.7) * y
        assert (now == was - np.float32(0.8) * total).all()
    assert all((t == was).all() for t, was in zip(held, before, strict=True)), "the old list is a whole state"
    o.apply(SHARD, [])
    assert o.digest(SHARD) == hashlib.sha256(b"".join(t.tobytes() for t in o.theta[SHARD])).hexdigest()


@pytest.mark.parametrize("values", ["int8", "fp32"])
def test_nesterov_is_that_of_pytorch(values: str) -> None:
    """θ by torch.optim.SGD on the weighted means, and v = μ m; the old list stays a whole state."""
    peers = [Outer(SPEC, Codec(4096, values), 0.95, 0.7, momentum=0.9) for _ in range(2)]
    shared = peers[0]
    theta = init.initial_shard(SPEC, b"seed", SHARD)
    shared.theta[SHARD] = [*theta, *(np.zeros_like(t) for t in theta)]
    parameters = [torch.tensor(t) for t in theta]
    sgd = torch.optim.SGD(parameters, 0.7, 0.9, nesterov=True)
    scratch: list[np.ndarray] = []
    for round in range(6):
        commit = []
        for m, peer in enumerate(peers):
            peer.accumulate(SHARD, displacement.of(pseudo_gradient(10 * round + m)))
            commit.append((0.25 + 0.5 * m, peer.encode(SHARD)[0]))
            if values == "fp32":
                assert not any(e.any() for e in peer.feedback[SHARD]), "everything is sent"
        before, kept = shared.theta[SHARD], [a.copy() for a in shared.theta[SHARD]]
        shared.apply(SHARD, commit, scratch if round > 3 else None)
        assert all((a == b).all() for a, b in zip(before, kept, strict=True))
        mean = sum(np.float32(weight) * dense(shared, payload) for weight, payload in commit)
        for parameter, g in zip(parameters, np.split(mean, [16]), strict=True):
            parameter.grad = torch.tensor(g, dtype=torch.float32).view(parameter.shape)
        sgd.step()
    found = shared.theta[SHARD]
    for a, v, parameter in zip(found[:2], found[2:], parameters, strict=True):
        np.testing.assert_allclose(a, parameter.numpy(), rtol=0, atol=1e-6)
        np.testing.assert_allclose(v, 0.9 * sgd.state[parameter]["momentum_buffer"].numpy(), rtol=1e-4, atol=1e-9)


def test_a_sample_is_another_one_in_each_round_and_the_rest_stays() -> None:
    spec = ModelSpec(vocab_size=256, d_model=64, n_layers=1, n_heads=2, d_ff=24, context=8)
    o, shapes = Outer(spec, Codec(82, "int4", sample=0.1), 1.0, 1.0), layout.shapes(spec, SHARD)
    o.accumulate(SHARD, displacement.of([np.ones(shape, np.float32) for shape in shapes]))
    payloads, sent = [], []
    for seed in (b"1", b"2", b"1"):
        payloads.append(o.encode(SHARD, seed=seed)[0])
        moved = sparse.decode(o.codec, shapes, payloads[-1])[1]
        assert len(moved.index) == np.count_nonzero(moved.values) == 4 * 82
        sent.append(set(moved.index.tolist()))
        left = [set(np.flatnonzero(e < 0.5).tolist()) for e in o.feedback[SHARD]]
        assert left[1] == sent[-1], "only what was sent is gone"
        o.restore_feedback(SHARD, payloads[-1])
    assert payloads[0] == payloads[2]
    assert len(sent[0] & sent[1]) < 0.3 * len(sent[0]), "about a tenth is in both"


def test_a_transformed_update_loses_nothing() -> None:
    """What was committed, and the transform of what is left in the feedback, are the sum of the work."""
    codec = Codec(256, transform="dct")
    o = outer(codec, beta=1.0, eta=0.5)
    start, earned = flat(o.theta[SHARD]), np.zeros(flat(o.theta[SHARD]).size)
    for round in range(5):
        delta = pseudo_gradient(round)
        earned += flat(delta)
        o.accumulate(SHARD, displacement.of(delta))
        o.apply(SHARD, [(1.0, o.encode(SHARD)[0])])
    left = [dct.transformed(e, topk.tiling(e.shape, 256), inverse=True) for e in o.feedback[SHARD]]
    assert np.abs(flat(left)).max() > 1e-4, "something is left"
    np.testing.assert_allclose((start - flat(o.theta[SHARD])) / 0.5 + flat(left), earned, rtol=0, atol=1e-6)


def test_a_bad_contribution_changes_nothing() -> None:
    o = outer()
    o.accumulate(SHARD, displacement.of(pseudo_gradient(1)))
    good = o.encode(SHARD)[0]
    before = o.digest(SHARD)
    buffers = flat(o.feedback[SHARD])
    with pytest.raises(PayloadError):
        o.apply(SHARD, [(0.5, good), (0.5, good[:-1])])
    with pytest.raises(ValueError, match="weight"):
        o.apply(SHARD, [(float("nan"), good)])
    with pytest.raises(PayloadError):
        o.restore_feedback(SHARD, good + b"x")
    with pytest.raises(KeyError):
        o.apply("embed", [])
    assert o.digest(SHARD) == before
    assert (flat(o.feedback[SHARD]) == buffers).all()


def test_a_bad_pseudo_gradient_leaves_the_buffer() -> None:
    o = outer()
    o.accumulate(SHARD, displacement.of(pseudo_gradient(1)))
    before = flat(o.feedback[SHARD])
    bad = pseudo_gradient(2)
    bad[1][3, 3] = np.nan
    with pytest.raises(LocalError, match="not finite"):
        o.accumulate(SHARD, displacement.of(bad))
    with pytest.raises(ValueError, match="shapes"):
        o.accumulate(SHARD, displacement.of(bad[:1]))
    assert (flat(o.feedback[SHARD]) == before).all()


def test_a_displacement_is_subtracted_bit_by_bit() -> None:
    o, other = outer(), outer()
    before, after = pseudo_gradient(1), pseudo_gradient(2)
    for _ in range(2):
        o.accumulate(SHARD, list(zip(before, after, strict=True)))
        other.accumulate(SHARD, displacement.of([a - b for a, b in zip(before, after, strict=True)]))
    for a, b in zip(o.feedback[SHARD], other.feedback[SHARD], strict=True):
        np.testing.assert_array_equal(a, b)
    kept = [e.copy() for e in o.feedback[SHARD]]
    after[1][-1, -1] = np.nan
    with pytest.raises(LocalError, match="not finite"):
        o.accumulate(SHARD, list(zip(before, after, strict=True)))
    for a, b in zip(o.feedback[SHARD], kept, strict=True):
        np.testing.assert_array_equal(a, b)


def test_several_shards_at_a_time_have_the_bits_of_one_after_the_other() -> None:
    spec = ModelSpec(vocab_size=96, d_model=16, n_layers=3, n_heads=2, d_ff=24, context=8)
    shards = layout.shard_names(spec)
    by_shard = {}
    found = []
    for abreast in (1, 3):
        o = Outer(spec, Codec(32), 0.5, 0.7, threads=2, abreast=abreast)
        rng, scratch = np.random.default_rng(0), list[np.ndarray]()
        for shard in shards:
            o.theta[shard] = [rng.standard_normal(shape, dtype=np.float32) for shape in layout.shapes(spec, shard)]
        for _ in range(4):
            for shard in shards:
                o.accumulate(shard, [(x, 0.9 * x) for x in o.theta[shard]])
                by_shard[shard] = [(0.25, o.encode(shard)[0]), (0.75, o.encode(shard)[0])]
            o.apply_all(by_shard, scratch)
        with pytest.raises(PayloadError):
            o.apply_all({**by_shard, shards[-1]: [(1.0, b"no payload")]}, scratch)
        held = {id(array) for arrays in o.theta.values() for array in arrays}
        assert len(held) == sum(map(len, o.theta.values())), "no array is there twice"
        assert not held & {id(array) for array in scratch}
        found.append({shard: o.digest(shard) for shard in shards})
    assert found[0] == found[1]


def test_memory_that_is_taken_again_changes_no_bits() -> None:
    o, other, scratch = outer(), outer(), []
    for seed in range(3):
        o.accumulate(SHARD, displacement.of(pseudo_gradient(seed)))
        payload = o.encode(SHARD)[0]
        former = o.theta[SHARD]
        o.apply(SHARD, [(0.5, payload)], scratch)
        other.apply(SHARD, [(0.5, payload)])
        assert all(any(a is kept for kept in scratch) for a in former)
        for a, b in zip(o.theta[SHARD], other.theta[SHARD], strict=True):
            np.testing.assert_array_equal(a, b)
    assert len(scratch) == len(SHAPES), "the same memory, again and again"


def test_feedback_needs_no_holding() -> None:
    """A stage that has moved on still takes back what an earlier round left out."""
    o = outer()
    o.accumulate(SHARD, displacement.of(pseudo_gradient(1)))
    payload = o.encode(SHARD)[0]
    del o.theta[SHARD], o.feedback[SHARD]
    o.restore_feedback(SHARD, payload)
    assert (flat(o.feedback[SHARD]) == dense(o, payload)).all()


def test_a_lost_delta_counts_as_what_was_sent_of_it() -> None:
    """A crash between offers and feedback: e(1) is on disk, later payloads are out, and are not taken back."""
    o = outer()
    o.accumulate(SHARD, displacement.of(pseudo_gradient(1)))
    o.encode(SHARD)[0]
    owed = flat(o.feedback[SHARD])
    on_disk = [e.copy() for e in o.feedback[SHARD]]
    payloads = []
    for round in (2, 3):
        o.accumulate(SHARD, displacement.of(pseudo_gradient(round)))
        payloads.append(o.encode(SHARD)[0])
    o.feedback[SHARD] = on_disk
    for payload in payloads:
        before, sent = flat(o.feedback[SHARD]), dense(o, payload)
        o.without_delta(SHARD, payload)
        assert (flat(o.feedback[SHARD]) == np.where(sent != 0, 0, o.beta * before.astype(np.float32))).all()
        delta = np.where(sent != 0, sent - float(o.beta) * before, 0)
        owed = float(o.beta) * owed + delta - sent
        np.testing.assert_allclose(flat(o.feedback[SHARD]), owed, rtol=0, atol=4 * ULP * np.abs(before).max())
