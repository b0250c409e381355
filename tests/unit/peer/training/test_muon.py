"""Muon for the matrices inside blocks, AdamW for all else: step, state and memory, also in chains."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from peer.training.optimizer import learning_rate
from peer.training.trainer import StageTrainer
from protocol.planning import memory
from protocol.run import layout
from protocol.run.manifest import ChainSpec
from tests.support import tiny
from tests.support.chains import (
    SPEC,
    TRAIN,
    Oracle,
    Recording,
    make_chain,
    narrow,
    random_theta,
    relative,
    run_chain,
)

MUON = dataclasses.replace(TRAIN, optimizer="muon")
D = SPEC.d_model
MATRICES = {
    name
    for i in range(SPEC.n_layers)
    for name, shape in layout.tensors(SPEC, f"block.{i}")
    if len(shape) == 2
}  # fmt: skip


def whole() -> Recording:
    return make_chain((), 0, train=MUON)[0]


def orthogonal(x: torch.Tensor) -> torch.Tensor:
    """What the five steps make of it, by its singular values, in fp64."""
    u, s, vt = torch.linalg.svd(x, full_matrices=False)
    s = s / s.norm()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u * s @ vt


@pytest.mark.parametrize("name", ["self_attn.q_proj", "mlp.up_proj", "mlp.down_proj"])
def test_step_is_muon_with_clip(name: str) -> None:
    """For square, tall and wide matrices; fp64 singular values say what is right, and torch's optimizer agrees."""
    trainer = whole()
    parameter = dict(trainer.stage.named_parameters())[f"model.layers.1.{name}.weight"]
    start = parameter.detach().double().clone()
    before, momentum = start.clone(), torch.zeros_like(start)
    theirs = torch.nn.Parameter(parameter.detach().clone())
    other = torch.optim.Muon(
        [theirs], weight_decay=MUON.weight_decay, momentum=MUON.momentum, adjust_lr_fn="match_rms_adamw"
    )
    for step, norm in ((1, 2.0), (2, 0.1), (3, 7.0)):
        gradient = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step))
        parameter.grad = gradient.clone()
        trainer.step(step, norm)
        clipped = gradient.double() * min(1.0, TRAIN.clip / norm)
        momentum = MUON.momentum * momentum + (1 - MUON.momentum) * clipped
        ahead = MUON.momentum * momentum + (1 - MUON.momentum) * clipped
        rate = learning_rate(MUON, step)
        before *= 1 - rate * MUON.weight_decay
        before -= 0.2 * math.sqrt(max(parameter.shape)) * rate * orthogonal(ahead)
        theirs.grad = clipped.float()
        other.param_groups[0]["lr"] = rate
        other.step()
    moved = parameter.detach() - start
    assert relative(moved, before - start) < 1e-4
    assert relative(moved, theirs.detach() - start) < 0.02
    state = trainer.optimizer_state()
    assert relative(torch.tensor(state[f"model.layers.1.{name}.weight/momentum_buffer"]), momentum) < 1e-6
    assert parameter.grad is None


def test_an_update_is_as_long_as_adamw_s_usually_is() -> None:
    """Root mean square 0.2 of the rate, whatever the shape: one rate serves both optimizers."""
    trainer = whole()
    asyncio.run(run_chain([trainer]))
    rate, theta = learning_rate(MUON, 1), random_theta()
    for shard in [f"block.{i}" for i in range(SPEC.n_layers)]:
        for (name, _), delta, base in zip(layout.tensors(SPEC, shard), trainer.delta(shard), theta[shard], strict=True):
            if name in MATRICES:
                update = delta - rate * MUON.weight_decay * base
                assert 0.1 < float(np.sqrt(np.mean(update**2))) / rate < 0.25, name


def test_what_is_adamw_s_moves_as_without_muon() -> None:
    """In the first step, when nothing else differs yet."""
    moved = []
    for train in (TRAIN, MUON):
        trainer = make_chain((), 0, train=train)[0]
        asyncio.run(run_chain([trainer]))
        moved.append({shard: trainer.delta(shard) for shard in trainer.shards})
    for shard in moved[0]:
        for (name, _), a, b in zip(layout.tensors(SPEC, shard), moved[0][shard], moved[1][shard], strict=True):
            assert np.array_equal(a, b) == (name not in MATRICES), name


def test_the_same_bits_on_every_run_and_after_a_restart() -> None:
    def trained(trainer: StageTrainer, first: int) -> list[np.ndarray]:
        trainer.begin_round(random_theta())
        asyncio.run(run_chain([trainer], steps=2, first_step=first))
        return [array for shard in trainer.shards for array in trainer.delta(shard)]

    one, other = whole(), whole()
    assert all(np.array_equal(a, b) for a, b in zip(trained(one, 1), trained(other, 1), strict=True))
    state = one.optimizer_state()
    restarted = whole()
    restarted.load_optimizer(state)
    assert all(np.array_equal(a, b) for a, b in zip(trained(one, 3), trained(restarted, 3), strict=True))
    fresh = whole()
    assert not all(np.array_equal(a, b) for a, b in zip(trained(other, 3), trained(fresh, 3), strict=True))


@pytest.mark.parametrize("k", [D // 8, D // 32])
def test_a_chain_trains_as_one_process(k: int) -> None:
    cuts = (1, 3)
    chain, oracle = make_chain(cuts, k, train=MUON), Oracle(narrow(k), MUON, cuts)
    oracle.begin_round(random_theta(narrow(k)))
    reports, expected = asyncio.run(run_chain(chain, steps=4)), asyncio.run(run_chain([oracle], steps=4))
    assert [r.loss for r in reports[0]] == pytest.approx([r.loss for r in expected[0]], rel=1e-4)
    assert [r.norm for r in reports[0]] == pytest.approx([r.norm for r in expected[0]], rel=1e-3)


@pytest.mark.parametrize(("first", "last"), [(0, 4), (0, 1), (1, 3), (3, 4)])
def test_the_planner_knows_that_there_is_one_moment(first: int, last: int) -> None:
    """A trainer's parameters, gradients and moments are what the formula counts for them; the rest of it is as with
    AdamW."""
    chains, spec = ChainSpec(forward="fp32", backward="fp32"), narrow(8)
    by_muon, by_adamw = (tiny.manifest(model=spec, train=train, chains=chains) for train in (MUON, TRAIN))
    shards = memory.stage_shards(by_muon, first, last)
    saved = memory.stage_memory(by_adamw, first, last) - memory.stage_memory(by_muon, first, last)
    sizes = []
    for train in (TRAIN, MUON):
        trainer = StageTrainer(spec, train, shards)
        trainer.begin_round(random_theta(spec))
        for parameter in trainer.stage.parameters():
            parameter.grad = torch.ones_like(parameter)
        held = 2 * sum(parameter.nbytes for parameter in trainer.stage.parameters())
        trainer.step(1, 1.0)
        sizes.append(held + sum(array.nbytes for array in trainer.optimizer_state().values() if array.ndim))
    matrices = [s for x in shards for s in layout.shapes(spec, x) if len(s) == 2 and "block" in x]
    assert saved == sizes[0] - sizes[1] == 4 * sum(math.prod(s) for s in matrices)


def test_a_foreign_momentum_makes_no_larger_step_and_is_forgotten() -> None:
    """However long it is, an update is as long as usual; against tenfold shorter gradients it lasts dozens of steps."""
    name = "model.layers.0.mlp.up_proj.weight"
    gradient = torch.randn(SPEC.d_ff, D, generator=torch.Generator().manual_seed(0))
    gradient *= 0.1 * MUON.clip / gradient.norm()
    misled, honest = whole(), whole()
    misled.add_moments({f"{name}/momentum_buffer": (-10 * gradient).numpy()})
    lengths, agreement = [], []
    for step in range(1, 61):
        moved = []
        for trainer in (misled, honest):
            parameter = dict(trainer.stage.named_parameters())[name]
            before = parameter.detach().clone()
            parameter.grad = gradient.clone()
            trainer.step(min(step, MUON.warmup_steps), 0.1 * MUON.clip)
            moved.append(before - parameter.detach())
        lengths.append(float(moved[0].norm() / moved[1].norm()))
        agreement.append(float((moved[0] * moved[1]).sum()))
    assert max(lengths) < 1.1
    assert agreement[0] < 0
    assert min(agreement[50:]) > 0


class Short(TorchDispatchMode):
    """Refuses memory for more than a few numbers, the `refused`-th time. `asked`: the number of requests."""

    def __init__(self, refused: int) -> None:
        super().__init__()
        self.refused, self.asked = refused, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        known = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        result = func(*args, **kwargs)
        made = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor) and x.numel() > D]
        if any(x.untyped_storage().data_ptr() not in known for x in made):
            self.asked += 1
            if self.asked == self.refused:
                raise torch.OutOfMemoryError("Tried to allocate more than there is; out of memory")
        return result


@pytest.mark.parametrize("step", [1, 2], ids=["first", "later"])
@pytest.mark.parametrize("chain", [False, True])
def test_a_step_for_which_there_is_no_memory_changes_nothing(step: int, chain: bool) -> None:
    """Wherever memory is refused: a step is taken whole or not at all, so that what is offered, and what an auditor
    computes, has whole steps only."""

    def before() -> StageTrainer:
        trainer = make_chain((2,), 8, train=MUON)[0] if chain else make_chain((), 0, train=MUON)[0]
        for number in range(1, step + 1):
            generator = torch.Generator().manual_seed(number)
            for parameter in trainer.stage.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            if number < step:
                trainer.step(number, 7.0)
        return trainer

    def values(trainer: StageTrainer) -> list[bytes]:
        state = {key: x for key, x in trainer.optimizer_state().items() if x.any()}
        held = [p.detach().numpy().tobytes() for p in trainer.stage.parameters()]
        return [*held, *(key.encode() + x.tobytes() for key, x in sorted(state.items()))]

    undisturbed = before()
    at_rest = values(undisturbed)
    with Short(0) as counted:
        undisturbed.step(step, 7.0)
    assert counted.asked >= 3, "two squares and what is multiplied with them"
    for refused in range(1, counted.asked + 1):
        trainer = before()
        with pytest.raises(torch.OutOfMemoryError), Short(refused):
            trainer.step(step, 7.0)
        assert values(trainer) == at_rest
        assert trainer.steps == step - 1
