"""The stage, its trainer's arithmetic, and bytes <-> tensors."""

from __future__ import annotations

import asyncio
import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peer.chain import quantize
from peer.training.model import Stage
from peer.training.optimizer import Pace, learning_rate
from peer.training.trainer import COORDINATES, StageTrainer, mean_loss
from protocol.codec import formats
from protocol.errors import LocalError
from protocol.run import layout
from tests.support.chains import BASIS, SPEC, TRAIN, ids_of, make_chain, random_theta, relative, run_chain

CPU = torch.device("cpu")
IDS = torch.tensor(ids_of(7))


def _whole() -> StageTrainer:
    return make_chain((), 0)[0]


def test_stages_make_the_whole() -> None:
    whole, theta = _whole().stage, random_theta()
    x = None
    for first, last, embed, head in ((0, 0, True, False), (0, 1, False, False), (1, 4, False, True)):
        stage = Stage(SPEC, first, last, embed, head)
        stage.load(theta)
        x = stage(IDS, x)
    assert torch.equal(stage.logits(x), whole.logits(whole(IDS)))
    assert stage.shards == ("block.1", "block.2", "block.3", "head")


def test_the_schedule_that_was_decreed_is_followed() -> None:
    decreed = Pace(10, 5, 1, total_steps=2 * TRAIN.total_steps)
    longer = dataclasses.replace(TRAIN, total_steps=2 * TRAIN.total_steps)
    for step in range(11, 16):
        place = decreed.place(TRAIN, step)
        assert decreed.rate(TRAIN, step) == learning_rate(longer, place) > learning_rate(TRAIN, place)


def test_learning_rate_warms_up_and_decays_to_a_tenth() -> None:
    rates = [learning_rate(TRAIN, step) for step in range(1, 30)]
    assert rates[:2] == [TRAIN.lr / 2, TRAIN.lr]
    assert rates[10] == pytest.approx(TRAIN.lr * 0.55)
    assert rates[19:] == pytest.approx([TRAIN.lr / 10] * 10)
    assert rates[1:] == sorted(rates[1:], reverse=True)


@given(round=st.integers(0, 10**4), inner_steps=st.integers(1, 500), data=st.data())
def test_who_does_every_step_is_at_the_place_of_its_step(round: int, inner_steps: int, data: st.DataObject) -> None:
    train = dataclasses.replace(TRAIN, inner_steps=inner_steps)
    pace = Pace(round * inner_steps, inner_steps, train.micro_batches)
    step = pace.before + data.draw(st.integers(1, inner_steps))
    assert pace.place(train, step) == step


@given(steps=st.integers(1, 10), round=st.integers(0, 100))
def test_who_does_fewer_steps_goes_through_the_same_part_of_the_schedule(steps: int, round: int) -> None:
    train = dataclasses.replace(TRAIN, inner_steps=10)
    pace = Pace(10 * round, steps, 2)
    places = [pace.place(train, pace.before + i) for i in range(1, steps + 1)]
    assert places[-1] == 10 * (round + 1)
    assert np.diff([10 * round, *places]) == pytest.approx(10 / steps)


def test_the_rate_of_a_step_is_that_of_its_place() -> None:
    """The second of two steps of a round is where the eighth of eight is."""
    slow, whole = _whole(), _whole()
    for trainer, pace, step in ((slow, Pace(16, 2, 4), 18), (whole, Pace(16, 8, 4), 24)):
        trainer.train = dataclasses.replace(TRAIN, inner_steps=8)
        trainer.begin_round(random_theta(), pace)
        trainer.stage.lm_head.weight.grad = torch.ones_like(trainer.stage.lm_head.weight)
        trainer.step(step, 0.1)
    np.testing.assert_array_equal(slow.delta("head")[1], whole.delta("head")[1])
    assert slow.delta("head")[1].any()


def test_fewer_micro_batches_are_a_manifests_with_so_many() -> None:
    other = StageTrainer(SPEC, dataclasses.replace(TRAIN, micro_batches=2), layout.shard_names(SPEC))
    ours = _whole()
    assert TRAIN.micro_batches != 2
    ours.begin_round(random_theta(), Pace(0, TRAIN.inner_steps, 2))
    other.begin_round(random_theta())
    for trainer in (ours, other):
        for micro in range(2):
            trainer.forward(micro, IDS)
            trainer.backward(micro)
    assert ours.grad_sumsq() == other.grad_sumsq()
    assert all(value for _, value in ours.grad_sumsq())
    plain = _whole()
    plain.forward(0, IDS)
    plain.backward(0)
    mean = TRAIN.micro_batches**2 * dict(plain.grad_sumsq())["head"]
    assert dict(ours.grad_sumsq())["head"] == pytest.approx(mean), "two equal ones have the mean of each"


def test_a_round_without_a_pace_keeps_the_one_before() -> None:
    trainer, pace = _whole(), Pace(8, 3, 2)
    trainer.begin_round(random_theta(), pace)
    trainer.begin_round(random_theta())
    assert (trainer.pace, trainer.train.micro_batches) == (pace, 2)


@pytest.mark.parametrize("k", [0, 8])
def test_delta_is_zero_at_first_and_theta_minus_local_later(k: int) -> None:
    trainer, theta = make_chain((), k)[0], random_theta()
    for shard in trainer.shards:
        arrays = trainer.delta(shard)
        assert [a.shape for a in arrays] == list(layout.shapes(SPEC, shard))
        assert all(a.dtype == np.float32 and a.flags.c_contiguous and not a.any() for a in arrays)
    asyncio.run(run_chain([trainer], steps=2))
    local = dict(trainer.stage.named_parameters())["lm_head.weight"].detach().numpy()
    np.testing.assert_array_equal(trainer.delta("head")[1], theta["head"][1] - local)
    assert all(a.any() for shard in trainer.shards for a in trainer.delta(shard))
    assert trainer.steps == 2
    trainer.begin_round(theta)
    assert trainer.steps == 0
    assert not trainer.delta("embed")[0].any()


def test_step_is_adamw_with_clip() -> None:
    trainer = _whole()
    parameter = trainer.stage.lm_head.weight
    before = parameter.detach().double().clone()
    mean, square = torch.zeros_like(before), torch.zeros_like(before)
    for step, norm in ((1, 2.0), (2, 0.1), (3, 7.0)):
        gradient = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step))
        parameter.grad = gradient.clone()
        trainer.step(step, norm)
        clipped = gradient.double() * min(1.0, TRAIN.clip / norm)
        mean = TRAIN.beta1 * mean + (1 - TRAIN.beta1) * clipped
        square = TRAIN.beta2 * square + (1 - TRAIN.beta2) * clipped**2
        rate = learning_rate(TRAIN, step)
        before *= 1 - rate * TRAIN.weight_decay
        root = (square / (1 - TRAIN.beta2**step)).sqrt() + 1e-8
        before -= rate * mean / (1 - TRAIN.beta1**step) / root
    assert relative(parameter.detach(), before) < 1e-6
    assert parameter.grad is None


@pytest.mark.parametrize("k", [8, 2])
def test_a_scaled_embedding_moves_as_far_as_a_whole_one_and_decays_as_before(k: int) -> None:
    """A token's coordinates move by sqrt(d / k) times as much; the decay is that of the rate; all else is the same."""
    trainers = []
    for scaled in (False, True):
        train = dataclasses.replace(TRAIN, scale_embedding_lr=scaled)
        trainer = make_chain((3,), k, train=train)[0]
        before = trainer.stage.model.embed_tokens.coordinates.detach().clone()
        asyncio.run(run_chain(made := [trainer, make_chain((3,), k, train=train)[1]]))
        trainers.append((made[0], before))
    rate = learning_rate(TRAIN, 1)
    moved = [t.stage.model.embed_tokens.coordinates.detach() - b * (1 - rate * TRAIN.weight_decay) for t, b in trainers]
    felt = moved[0].abs() > 1e-7
    assert felt.any()
    assert relative(moved[1][felt], moved[0][felt] * math.sqrt(SPEC.d_model / k)) < 1e-4
    plain, scaled = (dict(t.stage.named_parameters()) for t, _ in trainers)
    assert all(torch.equal(plain[name], scaled[name]) for name in plain if name != COORDINATES)


def test_optimizer_state_survives_a_restart_bit_by_bit() -> None:
    steady, theta = _whole(), random_theta()
    asyncio.run(run_chain([steady], steps=2))
    state = steady.optimizer_state()
    steady.begin_round(theta)
    asyncio.run(run_chain([steady], steps=2, first_step=3))
    restarted = _whole()
    restarted.load_optimizer(state)
    asyncio.run(run_chain([restarted], steps=2, first_step=3))
    for shard in steady.shards:
        for a, b in zip(steady.delta(shard), restarted.delta(shard), strict=True):
            np.testing.assert_array_equal(a, b)


def test_optimizer_state_is_kept_for_what_is_still_held() -> None:
    chain = make_chain((3,), 8)
    asyncio.run(run_chain(chain))
    state = chain[0].optimizer_state() | chain[1].optimizer_state()
    same = StageTrainer(SPEC, TRAIN, ("embed", "block.0"), rank=8, basis=BASIS)
    same.load_optimizer(state)
    assert {key: state[key].tolist() for key in same.optimizer_state()} == {
        key: value.tolist() for key, value in same.optimizer_state().items()
    }
    assert f"{COORDINATES}/exp_avg" in same.optimizer_state()
    assert not any("layers.1." in key for key in same.optimizer_state())
    narrower = StageTrainer(SPEC, TRAIN, ("embed", "block.0"), rank=4, basis=BASIS)
    narrower.load_optimizer(state)
    assert {key.split("/")[0] for key in narrower.optimizer_state()} == {
        name for name, _ in layout.tensors(SPEC, "block.0")
    }
    with pytest.raises(LocalError, match="another shape"):
        same.load_optimizer({**state, "model.layers.0.mlp.up_proj.weight/exp_avg": np.zeros(3, np.float32)})


def test_evaluate() -> None:
    trainer = _whole()
    windows = np.concatenate([ids_of(s) for s in (1, 2, 3, 4)])
    ids = torch.tensor(windows)
    with torch.no_grad():
        logits = trainer.stage.logits(trainer.stage(ids[:, :-1]))
    expected = -torch.log_softmax(logits.double(), -1).gather(-1, ids[:, 1:, None]).mean()
    assert trainer.evaluate(windows) == pytest.approx(float(expected), rel=1e-5)
    with pytest.raises(LocalError, match="only a part"):
        make_chain((3,), 0)[0].evaluate(windows)


def test_a_loss_that_is_not_finite_is_named() -> None:
    theta = random_theta()
    theta["head"][0][:] = np.inf
    trainer = make_chain((), 0, theta=theta)[0]
    with pytest.raises(LocalError, match="not finite"):
        mean_loss([trainer.forward(0, IDS[:2])])


def test_a_stage_must_be_contiguous() -> None:
    for shards in ((), ("embed", "block.1"), ("block.1", "block.0"), ("block.9",)):
        with pytest.raises(LocalError, match="contiguous"):
            StageTrainer(SPEC, TRAIN, shards)
    with pytest.raises(LocalError, match="no basis"):
        StageTrainer(SPEC, TRAIN, ("embed",), rank=BASIS.shape[1] + 1, basis=BASIS)


@pytest.mark.parametrize("wire", formats.FORMATS)
def test_tensors_round_trip_at_any_alignment(wire: str) -> None:
    x = torch.randn(2, 3, 80, generator=torch.Generator().manual_seed(0)) * 1e3
    raw = quantize.encode(x, wire)
    assert len(raw) == quantize.size(x.shape, wire) == 6 * formats.bytes_per_token(wire, 80)
    expected = quantize.decode(raw, x.shape, wire, CPU)
    for offset in range(5):
        view = memoryview(bytes(offset) + raw)[offset:]
        found = quantize.decode(view, x.shape, wire, CPU)
        assert torch.equal(found, expected)
        assert found.dtype == torch.float32
        assert found.data_ptr() % 64 == 0
    if wire in ("bf16", "fp32"):
        assert torch.equal(expected, x.bfloat16().float() if wire == "bf16" else x)


def _error(x: torch.Tensor, wire: str) -> torch.Tensor:
    return (quantize.decode(quantize.encode(x, wire), x.shape, wire, CPU) - x).abs()


@pytest.mark.parametrize("scale", [1e-12, 1.0, 2.0**17])
def test_no_value_is_off_by_more_than_half_a_step(scale: float) -> None:
    x = torch.randn(50, 128, generator=torch.Generator().manual_seed(1)).clamp(-2, 2) * scale
    rounding = 1 + 2**-7  # of bf16 scales
    for wire, steps in (("int8", 127), ("int4", 7)):
        assert bool((_error(x, wire) <= x.abs().amax(1, keepdim=True) / steps / 2 * rounding).all())
    tiles = x.reshape(50, 2, 64)
    span = (tiles.amax(2) - tiles.amin(2) + tiles.amin(2).abs() * 2**-7).repeat_interleave(64, dim=1)
    assert bool((_error(x, "tah4") <= span / 30 * rounding).all())


@pytest.mark.parametrize("width", [5, 64, 1000])
def test_two_bits_lose_of_normal_values_what_max_says(width: int) -> None:
    x = torch.randn(6400 // width, width, generator=torch.Generator().manual_seed(4)) * 1e-6
    found = quantize.decode(quantize.encode(x, "sym2"), x.shape, "sym2", CPU)
    assert bool((found.sign() == torch.where(x < 0, -1, 1)).all())
    scale = x.square().mean(1, keepdim=True).sqrt()
    near, far = (found.abs() / scale)[x.abs() < 0.97 * scale], (found.abs() / scale)[x.abs() > 0.99 * scale]
    assert near.tolist() == pytest.approx([0.4528] * near.numel(), rel=5e-3)
    assert far.tolist() == pytest.approx([1.5104] * far.numel(), rel=5e-3)
    if width > 5:
        assert float((found - x).square().mean() / x.square().mean()) == pytest.approx(0.1175, rel=0.1)


@pytest.mark.parametrize("wire", formats.FORMATS)
def test_zeros_stay_zeros(wire: str) -> None:
    assert float(_error(torch.zeros(3, 64), wire).max()) < 1e-30


def test_the_rotation_saves_what_an_outlier_would_drown() -> None:
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(2))
    x[torch.arange(200), torch.arange(200) % 64] = 100.0
    calm = torch.ones_like(x, dtype=torch.bool)
    calm[torch.arange(200), torch.arange(200) % 64] = False
    assert _error(x, "tah4")[calm].mean() < 0.3 < 0.7 < _error(x, "int4")[calm].mean()


def test_an_impossible_place_of_an_outlier_is_refused() -> None:
    raw = bytearray(quantize.encode(torch.randn(1, 64), "tah4"))
    raw[0] = 64
    with pytest.raises(quantize.BadTensor, match="impossible place"):
        quantize.decode(bytes(raw), (1, 64), "tah4", CPU)


def test_bad_tensors_are_named() -> None:
    raw = quantize.encode(torch.ones(2, 3), "fp32")
    with pytest.raises(quantize.BadTensor, match="has 24 bytes of values, not 32"):
        quantize.decode(raw, (2, 4), "fp32", CPU)
    for bad in (math.nan, math.inf):
        with pytest.raises(quantize.BadTensor, match="not finite"):
            quantize.encode(torch.tensor([bad]), "bf16")
        with pytest.raises(quantize.BadTensor, match="not finite"):
            quantize.decode(np.float32(bad).tobytes(), (1,), "fp32", CPU)
    assert isinstance(quantize.BadTensor("x"), ValueError)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("wire", formats.FORMATS)
def test_what_could_overflow_is_neither_sent_nor_taken(wire: str, sign: int) -> None:
    most, over, far = (torch.full((1, 16), sign * quantize.LIMIT * share) for share in (0.5, 0.51, 1.02))
    assert float(quantize.decode(quantize.encode(most, wire), (1, 16), wire, CPU).abs().max()) < quantize.LIMIT
    with pytest.raises(quantize.BadTensor, match=r"a value has magnitude 5.3\de\+05, at most 524288"):
        quantize.encode(over, wire)
    raw = quantize.encode(far, wire, limit=math.inf)
    with pytest.raises(quantize.BadTensor, match=r"a value has magnitude 1.\d+e\+06, at most 1048576"):
        quantize.decode(raw, (1, 16), wire, CPU)


def test_ids_are_checked() -> None:
    assert torch.equal(quantize.ids_from(np.array([[0, 96]]), (1, 2), 97), torch.tensor([[0, 96]]))
    with pytest.raises(quantize.BadTensor, match="not integers"):
        quantize.ids_from(np.zeros((1, 3)), (1, 3), 97)
    for bad in (-1, 97):
        with pytest.raises(quantize.BadTensor, match="outside the vocabulary"):
            quantize.ids_from(np.array([[bad]]), (1, 1), 97)
