"""A machine's speed: the operations that are counted are those of torch, and the filter is steady."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from peer.training.model import Stage
from peer.training.trainer import StageTrainer
from protocol.planning import memory, partition
from protocol.planning.partition import LEAST_STEPS, RECENT_STEPS, Speedometer
from protocol.run.layout import ModelSpec
from protocol.run.manifest import Manifest, TrainSpec
from protocol.wire import encoding
from protocol.wire.announcement import MAX_SPEED, Announcement
from tests.support import tiny
from tests.support.chains import ids_of, random_theta

SPEC = ModelSpec(vocab_size=64, d_model=32, n_layers=3, n_heads=2, d_ff=48, context=16)
TRAIN = TrainSpec(
    inner_steps=RECENT_STEPS, micro_batches=2, rows=2, sequence=16, lr=1e-3, warmup_steps=0, total_steps=100
)
M = tiny.manifest(model=SPEC, train=TRAIN)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"num_key_value_heads": 1},
    "qwen": {"num_key_value_heads": 1, "use_qk_norm": True, "document_end_id": 3},
}


def _carried_out(manifest: Manifest, first: int, last: int) -> int:
    """The operations of a stage's forward and backward of one micro-batch, as torch counts them."""
    spec = manifest.model
    trainer = StageTrainer(spec, TRAIN, memory.stage_shards(manifest, first, last))
    trainer.begin_round(random_theta(spec))
    ids = torch.tensor(ids_of(1, SPEC, TRAIN))[: TRAIN.rows]
    wire = None if first == 0 else torch.randn(TRAIN.rows, TRAIN.sequence, SPEC.d_model)
    grad = None if last == SPEC.n_layers else torch.randn(TRAIN.rows, TRAIN.sequence, SPEC.d_model)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        trainer.forward(0, ids, wire)
        trainer.backward(0, grad)
    return counter.get_total_flops()


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(("first", "last"), [(0, 1), (0, 3), (1, 2), (1, 3), (2, 3)])
def test_the_operations_that_are_counted_are_those_that_are_carried_out(first: int, last: int, name: str) -> None:
    manifest = tiny.manifest(model=dataclasses.replace(SPEC, **OPTIONS[name]), train=TRAIN)
    lookups = TRAIN.rows * TRAIN.sequence * SPEC.d_model if first == 0 else 0
    assert partition.stage_operations(manifest)[first, last] == _carried_out(manifest, first, last) + lookups


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("blocks", [1, 2])
def test_what_a_micro_batch_keeps_is_what_the_formula_counts(name: str, blocks: int) -> None:
    """8 d + 2 c + 4 F values a token and block, 2 d + 2 c more with normalized queries and keys; one mask."""
    spec = dataclasses.replace(SPEC, d_model=256, n_heads=4, d_ff=640, **OPTIONS[name])
    manifest = tiny.manifest(model=spec, train=TRAIN)
    stage, kept = Stage(spec, 1, 1 + blocks, False, False), {}
    stage.load(random_theta(spec))
    ids = torch.full((TRAIN.rows, TRAIN.sequence), 3)
    x = torch.randn(TRAIN.rows, TRAIN.sequence, spec.d_model, requires_grad=True)

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = (storage.nbytes(), storage)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        stage(ids, x)
    own = [x for x in vars(stage).values() if isinstance(x, torch.Tensor)]
    of_others = {p.untyped_storage().data_ptr() for p in (*stage.parameters(), *own)}
    found = sum(size for at, (size, _) in kept.items() if at not in of_others)
    d, c, tokens = spec.d_model, spec.key_value_width, TRAIN.rows * TRAIN.sequence
    values = 8 * d + 2 * c + 4 * spec.d_ff + (2 * d + 2 * c if spec.use_qk_norm else 0)
    expected = 4 * tokens * (blocks * values + (TRAIN.sequence if spec.document_end_id >= 0 else 0))
    assert found == pytest.approx(expected, rel=0.02)
    assert found < memory.activation_bytes(manifest, 1, 1 + blocks) < 1.7 * found


def _steps(meter: Speedometer, *speeds: float) -> list[int]:
    work = partition.stage_operations(M)[1, 2]
    return [meter.add(1, 2, work / s) for s in speeds]


def test_a_speed_is_unknown_until_a_few_steps_agree() -> None:
    assert _steps(Speedometer(M), *[1e9] * LEAST_STEPS)[:-1] == [0] * (LEAST_STEPS - 1)
    assert _steps(Speedometer(M), *[1e9] * LEAST_STEPS)[-1] == pytest.approx(1e9)


def test_half_the_speed_is_said_before_the_round_is_over() -> None:
    meter = Speedometer(M)
    before = _steps(meter, *[1e9] * RECENT_STEPS)[-1]
    assert _steps(meter, *[5e8] * TRAIN.inner_steps)[-1] == pytest.approx(before / 2, rel=0.01)


def test_a_single_slow_step_and_small_changes_are_not_said() -> None:
    meter = Speedometer(M)
    before = _steps(meter, *[1e9] * RECENT_STEPS)[-1]
    assert set(_steps(meter, 1e6, 1.04e9, 0.97e9, 1e9, 1e12)) == {before}


@example([(0, 5e-324)] * LEAST_STEPS)
@given(st.lists(st.tuples(st.integers(0, 2), st.floats(0, 1e6)), max_size=40))
def test_what_is_said_can_be_announced(steps: list[tuple[int, float]]) -> None:
    meter = Speedometer(M)
    for first, seconds in steps:
        Announcement(run="r", peer="p", speed_flops=meter.add(first, 3, seconds))


@pytest.mark.parametrize("bad", [-1, MAX_SPEED + 1])
def test_an_impossible_speed_is_refused(bad: int) -> None:
    raw = encoding.encode(Announcement(run="r", peer="p", speed_flops=MAX_SPEED))
    good = encoding.decode(raw, "p")
    assert isinstance(good, Announcement)
    with pytest.raises(ValueError, match="speed_flops"):
        Announcement(run="r", peer="p", speed_flops=bad)
    with pytest.raises(encoding.MessageError):
        encoding.decode(raw.replace(MAX_SPEED.to_bytes(8, "big"), (MAX_SPEED + 1).to_bytes(8, "big")), "p")
