"""Memory that runs out within a step: pieces of the micro-batch give the gradients of an undisturbed step."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import torch

from peer.training.trainer import StageTrainer
from protocol.planning.pipeline_model import Depths
from tests.support.chains import SPEC, TRAIN, Recording, ids_of, make_chain, random_theta, relative, run_chain

ROWS = 5
WIDE = dataclasses.replace(TRAIN, rows=ROWS, micro_batches=2)
QWEN = dataclasses.replace(SPEC, num_key_value_heads=2, use_qk_norm=True, document_end_id=5)
TIED = dataclasses.replace(QWEN, tie_word_embeddings=True)


class Short(Recording):
    """Has memory for `room` rows of a block's feed-forward layer: torch is refused more, forward or on the way back, as
    an allocator refuses.
    `first`: how many passes go well before; `last`: from which pass on there is room again."""

    room, first, last, phase, layer = ROWS, 0, 1 << 30, "forward", 2

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.passes, self.refused, self.most = itertools.count(), 0, 0
        for name, module in self.stage.named_modules():
            if name == f"model.layers.{self.layer}.mlp.down_proj":
                module.register_forward_pre_hook(self._forward)
                module.register_full_backward_hook(self._backward)

    def _look(self, rows: int) -> None:
        if self.first <= next(self.passes) < self.last and rows > self.room:
            self.refused += 1
            raise torch.OutOfMemoryError("Tried to allocate more than there is; out of memory")
        self.most = max(self.most, rows)

    def _forward(self, module: Any, given: tuple[torch.Tensor, ...]) -> None:
        if self.phase == "forward" and torch.is_grad_enabled():
            self._look(len(given[0]))

    def _backward(self, module: Any, inward: Any, outward: tuple[torch.Tensor, ...]) -> None:
        if self.phase == "backward":
            self._look(len(outward[0]))


def short(**changes: Any) -> type[Short]:
    return type("Short", (Short,), changes)


async def read(step: int) -> np.ndarray:
    return ids_of(step, SPEC, WIDE)


def trained(cuts: tuple[int, ...], k: int, kind: type[Any], spec: Any = SPEC, **options: Any) -> tuple[list[Any], Any]:
    chain = make_chain(cuts, k, WIDE, kind=kind, spec=spec)
    return chain, asyncio.run(run_chain(chain, steps=2, read=read, **options))


def same(found: tuple[list[Any], Any], expected: tuple[list[Any], Any], within: float = 2e-6) -> None:
    for (a, reports), (b, undisturbed) in [(found, expected)]:
        assert [r.loss for r in reports[0]] == pytest.approx([r.loss for r in undisturbed[0]], rel=1e-6)
        assert [r.norm for r in reports[0]] == pytest.approx([r.norm for r in undisturbed[0]], rel=1e-5)
        first = [{n: g for t in chain for n, g in t.gradients[0].items()} for chain in (a, b)]
        assert set(first[0]) == set(first[1])
        for name, gradient in first[0].items():
            assert relative(gradient, first[1][name]) < within, name


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("spec", [SPEC, TIED], ids=["llama", "tied"])
@pytest.mark.parametrize(("room", "first"), [(1, 0), (2, 1), (4, 0)])
def test_a_full_replica_takes_the_undisturbed_step(phase: str, spec: Any, room: int, first: int) -> None:
    kind = short(phase=phase, room=room, first=first)
    found = trained((), 0, kind, spec)
    trainer = found[0][0]
    assert trainer.refused >= 1, "memory ran out"
    assert 0 < trainer.piece_rows <= room, "and what was computed afterwards had room"
    same(found, trained((), 0, Recording, spec))
    trainer.begin_round(random_theta(spec))
    assert trainer.piece_rows == 0, "the next round begins with whole micro-batches"


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize(("cuts", "k"), [((2, 4), 8), ((3,), 0), ((4,), 8)])
def test_no_stage_of_a_chain_sends_anything_else(phase: str, k: int, cuts: tuple[int, ...]) -> None:
    """The stage that is short is the first, one in the middle, or the last."""
    found = trained(cuts, k, short(phase=phase, room=1), QWEN, depth=2)
    assert sum(t.refused for t in found[0]) >= 1
    assert len([t for t in found[0] if t.piece_rows]) == 1, "the others go on as before"
    same(found, trained(cuts, k, Recording, QWEN, depth=2))


def test_memory_that_runs_out_while_activations_are_computed_anew() -> None:
    """The forward that a stage does a second time, before its backward."""
    anew = {"depth": 2, "depths": Depths(plain=1, held=1, most=2)}
    found = trained((2, 4), 8, short(phase="forward", room=1), QWEN, **anew)
    assert found[0][1].refused >= 1
    same(found, trained((2, 4), 8, Recording, QWEN, **anew))


@pytest.mark.parametrize("layer", range(SPEC.n_layers))
def test_wherever_in_its_backward_it_runs_out(layer: int) -> None:
    """Some parameters have the micro-batch's gradient then, and get it no second time."""
    found = trained((), 0, short(phase="backward", room=2, layer=layer), TIED)
    assert found[0][0].refused >= 2, "at once, and in a piece again"
    same(found, trained((), 0, Recording, TIED))


def test_pieces_stay_until_the_round_is_over() -> None:
    """There is room again later; it is not tried before the next round."""
    found = trained((), 0, short(phase="forward", room=2, last=2))
    assert found[0][0].most <= ROWS
    assert found[0][0].piece_rows in (1, 2)
    same(found, trained((), 0, Recording))


def test_where_not_even_a_row_fits_it_is_said_as_torch_says_it() -> None:
    trainer: StageTrainer = make_chain((), 0, WIDE, kind=short(room=0))[0]
    ids = torch.tensor(ids_of(1, SPEC, WIDE))[:ROWS]
    trainer.forward(0, ids)
    with pytest.raises(torch.OutOfMemoryError):
        trainer.backward(0)


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), ValueError("other")])
def test_other_errors_are_not_tried_again(error: Exception) -> None:
    class Broken(Recording):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.calls = 0
            self.stage.model.norm.register_forward_pre_hook(self._break)

        def _break(self, *_: Any) -> None:
            self.calls += 1
            raise error

    trainer = make_chain((), 0, WIDE, kind=Broken)[0]
    with pytest.raises(type(error)):
        trainer.forward(0, torch.tensor(ids_of(1, SPEC, WIDE))[:ROWS])
    assert (trainer.calls, trainer.piece_rows) == (1, 0)


@pytest.mark.parametrize(("split", "spec"), [((12, 1), SPEC), ((4, 3), QWEN), ((2, 6), TIED)])
def test_a_step_is_the_same_however_its_rows_are_split(split: tuple[int, int], spec: Any) -> None:
    """Into other numbers of micro-batches and rows; only sums of fp32 are in another order."""

    def gradients(micro_batches: int, rows: int) -> dict[str, torch.Tensor]:
        train = dataclasses.replace(TRAIN, micro_batches=micro_batches, rows=rows)
        trainer = make_chain((), 0, train, spec=spec)[0]
        asyncio.run(run_chain([trainer], read=lambda step: read_twelve()))
        found: dict[str, torch.Tensor] = trainer.gradients[0]
        return found

    async def read_twelve() -> np.ndarray:
        return np.random.default_rng(0).integers(0, spec.vocab_size, (12, TRAIN.sequence + 1))

    whole, parts = gradients(1, 12), gradients(*split)
    for name, gradient in whole.items():
        assert relative(parts[name], gradient) < 2e-6, name
