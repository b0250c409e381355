"""P5: a chain computes what one process computes; its first step is that of the plain model."""

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

from protocol.planning.pipeline_model import UNBOUNDED, Depths, LinkCost, StageCost
from tests.benchmarks import arms
from tests.support.chains import (
    ANCHOR,
    CUTS,
    DEADLINE_S,
    SPEC,
    TRAIN,
    Oracle,
    Recording,
    gradients,
    make_chain,
    narrow,
    random_theta,
    relative,
    run_chain,
)

D = SPEC.d_model


FP32 = ("fp32", "fp32")


def _oracle(cuts: tuple[int, ...], k: int, wires: tuple[str, str] = FP32) -> Oracle:
    """The whole model with these number formats at the cuts; one step taken."""
    trainer = Oracle(narrow(k), TRAIN, cuts, wires)
    trainer.begin_round(random_theta(narrow(k)))
    asyncio.run(run_chain([trainer]))
    return trainer


def _compare(chain: list[Recording], oracle: Recording, within: float) -> None:
    """Every gradient of the chain's first step against the oracle's."""
    found, expected = gradients(chain), gradients([oracle])
    assert set(found) == set(expected)
    for name, gradient in found.items():
        assert relative(gradient, expected[name]) < within, name


@pytest.mark.parametrize("k", [0, D // 8, D // 32])
@pytest.mark.parametrize("cuts", CUTS)
def test_gradients_equal_the_oracle(cuts: tuple[int, ...], k: int) -> None:
    chain, oracle = make_chain(cuts, k), _oracle(cuts, k)
    reports = asyncio.run(run_chain(chain))
    _compare(chain, oracle, 1e-5)
    square = sum(float(g.double().square().sum()) for t in chain for g in t.gradients[0].values())
    for trainer, report in zip(chain, reports, strict=True):
        assert trainer.norms[0] == report[0].norm == pytest.approx(square**0.5, rel=1e-6)
        assert report[0].loss == reports[0][0].loss
    assert len(chain) == len(cuts) + 1
    plain = make_chain((), k)
    asyncio.run(run_chain(plain))
    _compare(chain, plain[0], 1e-5)


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
    _compare(chain, oracle, 1e-5)
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
    chain, oracle, theta = make_chain(cuts, k), Oracle(narrow(k), TRAIN, cuts), random_theta(narrow(k))
    oracle.begin_round(theta)
    reports, expected = asyncio.run(run_chain(chain, steps=4)), asyncio.run(run_chain([oracle], steps=4))
    assert [r.loss for r in reports[0]] == pytest.approx([r.loss for r in expected[0]], rel=1e-5)
    assert [r.norm for r in reports[0]] == pytest.approx([r.norm for r in expected[0]], rel=1e-5)
    copies = [oracle.stage.model.embed_tokens.anchor, *oracle.copies]
    for trainer, copy in zip(chain, copies, strict=True):
        local = theta["anchor"][0] - trainer.delta("anchor")[0]
        assert relative(local, copy.detach().numpy()) < 1e-5
        for shard in (shard for shard in trainer.shards if shard != "anchor"):
            for a, b, base in zip(trainer.delta(shard), oracle.delta(shard), theta[shard], strict=True):
                assert relative(base - a, base - b) < 1e-5
                assert relative(a, b) < 1e-2, "AdamW magnifies rounding where gradients nearly vanish"


def test_a_cut_loses_nothing() -> None:
    """What blocks add to the residual stream crosses whole, and the rest of it is the token's row of `anchor`."""
    chain, plain = make_chain((2, 4), D // 8), make_chain((), D // 8)[0]
    ids = torch.arange(24).reshape(2, 12) * 7 % SPEC.vocab_size
    with torch.no_grad():
        wire = None
        for trainer in chain[:-1]:
            wire = trainer.stage.outward(trainer.stage(ids, wire))
            assert wire.shape == (2, 12, D // 8)
        assert torch.equal(chain[-1].stage(ids, wire), plain.stage(ids))
    assert [ANCHOR in dict(t.stage.named_parameters()) for t in chain] == [True] * 3


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


def test_experiments_with_learning_train_what_a_chain_trains() -> None:
    """A slice of tests/benchmarks/arms.py, which computes all replicas and seeds at once."""
    arms.check(torch.device("cpu"))
