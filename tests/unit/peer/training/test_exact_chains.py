"""P5: a chain computes what one process with the projector inserted computes; without compression, the plain model."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from peer.training.subspace import Boundary
from peer.training.trainer import COORDINATES
from protocol.planning.pipeline_model import UNBOUNDED, Depths, LinkCost, StageCost
from protocol.run import layout
from tests.support.chains import (
    BASIS,
    CUTS,
    DEADLINE_S,
    SPEC,
    TRAIN,
    Recording,
    make_chain,
    project_at,
    random_theta,
    relative,
    run_chain,
)

EMBED = "model.embed_tokens.weight"
D = SPEC.d_model


FP32 = ("fp32", "fp32")


def _oracle(cuts: tuple[int, ...], k: int, wires: tuple[str, str] = FP32) -> Recording:
    """The plain whole model, TE its parameter, with projector and number formats at the cuts; one step taken."""
    trainer = Recording(SPEC, TRAIN, layout.shard_names(SPEC))
    theta = random_theta()
    trainer.begin_round(theta)
    boundary = None
    if k:
        u_DK = torch.tensor(BASIS[:, :k].copy())
        boundary = Boundary(u_DK, torch.tensor(theta["embed"][0]))
    project_at(trainer, cuts, boundary, wires)
    asyncio.run(run_chain([trainer]))
    return trainer


def _compare(chain: list[Recording], oracle: Recording, k: int, within: float) -> dict[str, torch.Tensor]:
    """Every gradient of the chain's first step against the oracle's; returns the chain's."""
    expected = dict(oracle.gradients[0])
    if k:
        expected[COORDINATES] = expected.pop(EMBED) @ torch.tensor(BASIS[:, :k].copy())
    found = {name: g for trainer in chain for name, g in trainer.gradients[0].items()}
    assert set(found) == set(expected)
    for name, gradient in found.items():
        assert relative(gradient, expected[name]) < within, name
    return found


@pytest.mark.parametrize("k", [0, D // 8, D // 32])
@pytest.mark.parametrize("cuts", CUTS)
def test_gradients_equal_the_oracle(cuts: tuple[int, ...], k: int) -> None:
    chain, oracle = make_chain(cuts, k), _oracle(cuts, k)
    reports = asyncio.run(run_chain(chain))
    found = _compare(chain, oracle, k, 1e-5)
    square = sum(float(g.double().square().sum()) for g in found.values())
    for trainer, report in zip(chain, reports, strict=True):
        assert trainer.norms[0] == report[0].norm == pytest.approx(square**0.5, rel=1e-6)
        assert report[0].loss == reports[0][0].loss
    assert len(chain) == len(cuts) + 1


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(
    "depths",
    [UNBOUNDED, Depths(plain=1, held=1, most=3), Depths(plain=1, held=3, most=3)],
    ids=["kept", "recomputed", "waiting"],
)
def test_neither_depth_nor_recomputation_nor_waiting_changes_a_bit(depth: int, depths: Depths) -> None:
    k, results = D // 8 if depth > 1 else 0, []
    for setup in ({"depth": depth, "depths": depths}, {"depth": 1}):
        chain = make_chain((1, 4), k)
        asyncio.run(run_chain(chain, steps=2, **setup))
        results.append([g for t in chain for step in t.gradients for g in step.values()])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


class Twice(Recording):
    """Remembers which forwards were to keep only what came in."""

    def forward(self, *arguments: Any, recompute: bool = False, **options: Any) -> torch.Tensor:
        self.again = [*getattr(self, "again", []), recompute]
        return super().forward(*arguments, recompute=recompute, **options)


def test_whoever_gains_by_computing_twice_does_so_from_the_second_step_on() -> None:
    """What a step took is known then; there is room for the others to wait, and the bits are the same."""

    def gains(stages: Sequence[StageCost], links: Sequence[LinkCost], micro_batches: int, depth: int) -> bool:
        return (len(stages), len(links), micro_batches) == (2, 1, TRAIN.micro_batches)

    expected, chain = make_chain((1, 4), 0), make_chain((1, 4), 0, kind=Twice)
    asyncio.run(run_chain(expected, steps=2, depth=1))
    setup: dict[str, Any] = {"depth": 3, "depths": Depths(plain=1, held=3, most=3), "computes_twice": gains}
    reports = asyncio.run(run_chain(chain, steps=2, **setup))
    never, then = [False] * TRAIN.micro_batches, [True] * TRAIN.micro_batches
    assert [trainer.again for trainer in chain] == [never + never, never + then, never + never]
    told = [report[-1].took for report in reports]
    assert [took and (len(took[0]), len(took[1])) for took in told] == [(3, 2), (2, 1), (1, 0)]
    another = make_chain((1, 4), 0, kind=Twice)
    asyncio.run(run_chain(another, took=told[1], **setup))
    assert [trainer.again for trainer in another] == [then, then, never], (
        "what the round before took is known in the first step"
    )
    for a, b in zip(chain, expected, strict=True):
        for one, other in zip(a.gradients, b.gradients, strict=True):
            assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    "wires",
    [("int8", "bf16"), ("int4", "int8"), ("bf16", "tah4"), ("tah4", "int4"), ("int4", "sym2")],
)
@pytest.mark.parametrize(("cuts", "k"), [((3,), 0), ((1, 2, 5), D // 8)])
def test_gradients_equal_the_oracle_with_the_same_quantization(
    cuts: tuple[int, ...], k: int, wires: tuple[str, str]
) -> None:
    chain, oracle, plain = make_chain(cuts, k), _oracle(cuts, k, wires), _oracle(cuts, k)
    asyncio.run(run_chain(chain, wires=wires, depth=3, depths=Depths(plain=2, held=2, most=3)))
    _compare(chain, oracle, k, 1e-5)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert relative(plain.gradients[0][name], oracle.gradients[0][name]) > 1e-4, "the quantization is felt"


@pytest.mark.parametrize("cuts", [(3,), (2, 4), (1, 2, 5)])
def test_uncompressed_chain_has_the_bits_of_the_plain_model(cuts: tuple[int, ...]) -> None:
    chain, plain = make_chain(cuts, 0), make_chain((), 0)
    reports, expected = asyncio.run(run_chain(chain, steps=3)), asyncio.run(run_chain(plain, steps=3))
    assert [(r.loss, r.norm) for r in reports[0]] == [(r.loss, r.norm) for r in expected[0]]
    for trainer in chain:
        for shard in trainer.shards:
            for a, b in zip(trainer.delta(shard), plain[0].delta(shard), strict=True):
                np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("cuts", [(3,), (2, 4), (1, 2, 5)])
@pytest.mark.parametrize("k", [D // 8, D // 32])
def test_training_equals_the_oracle(cuts: tuple[int, ...], k: int) -> None:
    chain, oracle = make_chain(cuts, k), make_chain((), k)
    project_at(oracle[0], cuts)
    reports, expected = asyncio.run(run_chain(chain, steps=4)), asyncio.run(run_chain(oracle, steps=4))
    assert [r.loss for r in reports[0]] == pytest.approx([r.loss for r in expected[0]], rel=1e-5)
    assert [r.norm for r in reports[0]] == pytest.approx([r.norm for r in expected[0]], rel=1e-5)
    theta = random_theta()
    for trainer in chain:
        for shard in trainer.shards:
            for a, b, base in zip(trainer.delta(shard), oracle[0].delta(shard), theta[shard], strict=True):
                assert relative(base - a, base - b) < 1e-5
                assert relative(a, b) < 1e-2, "AdamW magnifies rounding where gradients nearly vanish"


def test_a_reader_has_no_copy_of_the_embedding() -> None:
    """And gets the rows of T_perp that a micro-batch asks for, as often as it asks."""
    theta, k = random_theta(), D // 8
    reader = make_chain((2,), k, theta=theta)[1]
    boundary = reader.stage.boundary
    assert np.shares_memory(boundary.te_VD.numpy(), theta["embed"][0])
    assert not any(SPEC.vocab_size in p.shape for n, p in reader.stage.named_parameters() if "embed" in n)
    u_DK, te_VD = BASIS[:, :k].astype(np.float64), theta["embed"][0].astype(np.float64)
    t_perp_VD = te_VD - te_VD @ u_DK @ u_DK.T
    nothing_BLK = torch.zeros(2, 5, k)
    first_BL, second_BL = torch.randint(0, SPEC.vocab_size, (2, 2, 5), generator=torch.Generator().manual_seed(0))
    rows = [boundary.expand(nothing_BLK, ids_BL) for ids_BL in (first_BL, second_BL, first_BL)]
    assert relative(rows[0], torch.tensor(t_perp_VD[first_BL.numpy()])) < 1e-5
    assert relative(rows[1], torch.tensor(t_perp_VD[second_BL.numpy()])) < 1e-5
    assert torch.equal(rows[0], rows[2])
    reader.release()
    assert reader.stage.boundary is None, "the table may change now"


def test_boundary_gradients_are_those_of_autograd() -> None:
    rng = torch.Generator().manual_seed(0)
    u_DK = torch.linalg.qr(torch.randn(12, 3, generator=rng, dtype=torch.float64))[0]
    boundary = Boundary(u_DK, torch.randn(7, 12, generator=rng, dtype=torch.float64))
    ids_BL = torch.randint(0, 7, (2, 5), generator=rng)
    x_BLD = torch.randn(2, 5, 12, generator=rng, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: boundary.project(x, ids_BL), (x_BLD,))
    g_BLD = torch.randn(2, 5, 12, generator=rng, dtype=torch.float64)
    (automatic,) = torch.autograd.grad(boundary.project(x_BLD, ids_BL), x_BLD, g_BLD)
    torch.testing.assert_close(automatic, boundary.expand_grad(boundary.compress_grad(g_BLD)))


def test_static_embedding_stays_in_the_subspace() -> None:
    theta, k = random_theta(), D // 8
    chain = make_chain((3,), k, theta=theta)
    asyncio.run(run_chain(chain, steps=5))
    u_DK = BASIS[:, :k].astype(np.float64)
    te_VD = theta["embed"][0].astype(np.float64)
    t_perp_VD = te_VD - te_VD @ u_DK @ u_DK.T
    moved_VD = te_VD - chain[0].delta("embed")[0]
    t_s_VD = moved_VD - t_perp_VD
    assert np.abs(t_s_VD - t_s_VD @ u_DK @ u_DK.T).max() < 1e-6 * np.abs(te_VD).max()
    assert np.abs(chain[0].delta("embed")[0]).max() > 1e-4, "it did move"


@pytest.mark.parametrize("k", [0, D // 8])
def test_same_bits_whatever_arrives_when(k: int) -> None:
    results = []
    for lag in (None, None, random.Random(1), random.Random(2)):
        chain = make_chain((2, 4), k)
        asyncio.run(run_chain(chain, steps=2, lag=lag, depth=1 if lag is None else 3, wires=("bf16", "bf16")))
        results.append([array for t in chain for shard in t.shards for array in t.delta(shard)])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(a, b)


class _Marked:
    """A place in the work of a device that comes there by itself, after a while."""

    def __init__(self, device: ThreadPoolExecutor) -> None:
        self.there = device.submit(time.perf_counter)

    def synchronize(self) -> None:
        self.there.result(DEADLINE_S)

    def elapsed_time(self, end: _Marked, /) -> float:
        return 1e3 * (end.there.result(DEADLINE_S) - self.there.result(DEADLINE_S))


class _Launching(Recording):
    """On the processor, but told of as on a GPU: what was launched ends later."""

    def mark(self) -> _Marked:
        self.device_thread = getattr(self, "device_thread", None) or ThreadPoolExecutor(1)
        return _Marked(self.device_thread)


def test_a_device_that_is_told_of_later_changes_no_bit() -> None:
    plain, launching = make_chain((2, 4), 8), make_chain((2, 4), 8, kind=_Launching)
    before, after = (asyncio.run(run_chain(chain, steps=3)) for chain in (plain, launching))
    for a, b in zip(plain, launching, strict=True):
        assert a.norms == b.norms
        for name, gradient in a.gradients[-1].items():
            assert torch.equal(gradient, b.gradients[-1][name])
        b.device_thread.shutdown()  # it is there: it was asked
    assert [[r.loss for r in reports] for reports in before] == [[r.loss for r in reports] for reports in after]
    for reports in after:
        assert all(0 < r.seconds_per_microbatch < DEADLINE_S and r.busy_s > 0 for r in reports)
