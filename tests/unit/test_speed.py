"""How fast a machine trains: the operations that are counted are those that torch carries out, and the filter is steady."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from peer.training.trainer import StageTrainer
from protocol.planning import memory, speed
from protocol.planning.speed import LEAST, RECENT, Speedometer
from protocol.run.layout import ModelSpec
from protocol.run.manifest import TrainSpec
from protocol.wire import encoding
from protocol.wire.announcement import MAX_SPEED, Announcement
from tests import tiny
from tests.chains import ids_of, random_theta

SPEC = ModelSpec(vocab_size=64, d_model=32, n_layers=3, n_heads=2, d_ff=48, context=16)
TRAIN = TrainSpec(inner_steps=RECENT, micro_batches=2, rows=2, sequence=16, lr=1e-3, warmup_steps=0, total_steps=100)
M = tiny.manifest(model=SPEC, train=TRAIN)


def _carried_out(first: int, last: int) -> int:
    """The operations of a stage's forward and backward of one micro-batch, as torch counts them."""
    trainer = StageTrainer(SPEC, TRAIN, memory.stage_shards(M, first, last))
    trainer.begin_round(random_theta(SPEC))
    ids = torch.tensor(ids_of(1, SPEC, TRAIN))[: TRAIN.rows]
    wire = None if first == 0 else torch.randn(TRAIN.rows, TRAIN.sequence, SPEC.d_model)
    grad = None if last == SPEC.n_layers else torch.randn(TRAIN.rows, TRAIN.sequence, SPEC.d_model)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        trainer.forward(0, ids, wire)
        trainer.backward(0, grad)
    return counter.get_total_flops()


@pytest.mark.parametrize(("first", "last"), [(0, 1), (0, 3), (1, 2), (1, 3), (2, 3)])
def test_the_operations_that_are_counted_are_those_that_are_carried_out(first: int, last: int) -> None:
    lookups = TRAIN.rows * TRAIN.sequence * SPEC.d_model if first == 0 else 0
    assert speed.work(M)[first, last] == _carried_out(first, last) + lookups


def _steps(meter: Speedometer, *speeds: float) -> list[int]:
    work = speed.work(M)[1, 2]
    return [meter.add(1, 2, work / s) for s in speeds]


def test_a_speed_is_unknown_until_a_few_steps_agree() -> None:
    assert _steps(Speedometer(M), *[1e9] * LEAST)[:-1] == [0] * (LEAST - 1)
    assert _steps(Speedometer(M), *[1e9] * LEAST)[-1] == pytest.approx(1e9)


def test_half_the_speed_is_said_before_the_round_is_over() -> None:
    meter = Speedometer(M)
    before = _steps(meter, *[1e9] * RECENT)[-1]
    assert _steps(meter, *[5e8] * TRAIN.inner_steps)[-1] == pytest.approx(before / 2, rel=0.01)


def test_a_single_slow_step_and_small_changes_are_not_said() -> None:
    meter = Speedometer(M)
    before = _steps(meter, *[1e9] * RECENT)[-1]
    assert set(_steps(meter, 1e6, 1.04e9, 0.97e9, 1e9, 1e12)) == {before}


@example([(0, 5e-324)] * LEAST)
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
