"""Training on the devices of this machine, compared with the CPU, as far as number formats allow."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from torch.nn import functional

from peer.chain import quantize
from peer.training import model
from peer.training.trainer import StageTrainer
from peer.training.update import DeviceUpdate, pinned
from protocol.codec.formats import TILE
from protocol.run import layout
from tests.support.chains import CUTS, SPEC, TRAIN, make_chain, random_theta, relative, run_chain

OTHERS = ["cuda"] if torch.cuda.is_available() else []
DEVICES = ["cpu", *OTHERS]
WITHIN = {"cpu": 1e-6, "cuda": 3e-2}
"""What gradients may differ by: bf16 has 8 bits."""
ROUNDED = 5e-3
"""What values may differ by that were rounded to bf16 a few times."""
SUMS = {"cpu": 1e-4, "cuda": 5e-3}
"""What a loss may by itself: products of fp32 are made in TF32, 11 bits, on CUDA."""


@pytest.mark.parametrize("device", OTHERS)
@pytest.mark.parametrize("cuts", CUTS[:5])
@pytest.mark.parametrize("k", [0, SPEC.d_model // 8])
def test_a_chain_has_the_gradients_that_it_has_on_the_cpu(device: str, cuts: tuple[int, ...], k: int) -> None:
    k = k if cuts else 0
    within = WITHIN[device] * (2 if k else 1)  # on CUDA a compressed chain rounds between blocks, too
    here, there = make_chain(cuts, k), make_chain(cuts, k, device=device)
    for chain in (here, there):
        asyncio.run(run_chain(chain, steps=2))
    for a, b in zip(here, there, strict=True):
        assert a.norms == pytest.approx(b.norms, rel=WITHIN[device])
        assert set(a.gradients[0]) == set(b.gradients[0])
        for name, gradient in a.gradients[0].items():
            assert relative(b.gradients[0][name].cpu(), gradient) < within, name


@pytest.mark.parametrize("device", DEVICES)
def test_two_runs_have_the_same_bits_and_recomputing_changes_none(device: str) -> None:
    found = []
    for again in (False, False, True):
        trainer = make_chain((2, 4), SPEC.d_model // 8, device=device)[1]
        ids = torch.arange(2 * (TRAIN.sequence + 1)).reshape(2, -1) % SPEC.vocab_size
        wire = torch.linspace(-1, 1, 2 * TRAIN.sequence * trainer.width).reshape(2, TRAIN.sequence, -1).to(device)
        out = trainer.forward(0, ids, wire, recompute=again)
        back = trainer.backward(0, wire)
        assert back is not None
        found.append([x.cpu() for x in (out, back, *(p.grad for p in trainer.stage.parameters()))])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("device", OTHERS)
def test_the_optimizer_goes_on_where_it_was(device: str) -> None:
    first, second = (make_chain((), 0, device=device)[0] for _ in range(2))
    asyncio.run(run_chain([first], steps=2))
    second.load_optimizer(first.optimizer_state())
    theta = {
        shard: [a - d for a, d in zip(random_theta()[shard], first.delta(shard), strict=True)]
        for shard in layout.shard_names(SPEC)
    }
    second.begin_round(theta)
    ids = torch.arange(2 * (TRAIN.sequence + 1)).reshape(2, -1) % SPEC.vocab_size
    for trainer in (first, second):
        trainer.forward(0, ids)
        trainer.backward(0)
        trainer.step(3, 1.0)
    for a, b in zip(first.stage.parameters(), second.stage.parameters(), strict=True):
        assert relative(b.detach().cpu(), a.detach().cpu()) < WITHIN[device] / 10


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("tokens", "vocabulary"), [(1, 1), (7, 5), (200, 1 << 16)])
def test_slices_of_the_loss(device: str, tokens: int, vocabulary: int) -> None:
    """On the CPU the last has two slices."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, 8, generator=generator).to(device).requires_grad_()
    weight = torch.randn(vocabulary, 8, generator=generator).to(device).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator).to(device)
    loss = model.cross_entropy(x, weight, targets)
    (loss / 3).backward()
    found = [loss.item(), x.grad, weight.grad]
    x64, weight64 = (v.detach().double().requires_grad_() for v in (x, weight))
    expected = functional.cross_entropy(x64 @ weight64.T, targets)
    (expected / 3).backward()
    assert found[0] == pytest.approx(expected.item(), rel=SUMS[device], abs=1e-6)
    for a, b in ((x, x64), (weight, weight64)):
        assert a.grad is not None
        assert (a.grad - b.grad).norm() <= SUMS[device] * b.grad.norm() + 1e-9  # as torch's own
    with torch.no_grad():
        assert model.cross_entropy(x, weight, targets).item() == pytest.approx(found[0])


@pytest.mark.parametrize("device", OTHERS)
def test_the_update_has_the_bits_of_the_cpus(device: str) -> None:
    rng = np.random.default_rng(0)
    theta = rng.standard_normal((256, 192)).astype(np.float32)
    local = np.round(theta - 1e-2 * rng.standard_normal(theta.shape).astype(np.float32), 2)
    found = []
    for where in ("cpu", device):
        e = np.round(rng.standard_normal(theta.shape), 1).astype(np.float32) if not found else found[0][2].copy()
        before = e.copy()
        moved = [(theta, torch.tensor(local, device=where))]
        (kept,) = DeviceUpdate(where).accumulate(moved, [e], np.float32(0.95), TILE // 64, map)
        found.append((kept.index_TK.tobytes(), kept.values.tobytes(), before, e.tobytes()))
    assert found[0][:2] == found[1][:2]
    assert found[0][3] == found[1][3]


@pytest.mark.parametrize("device", DEVICES)
def test_what_comes_again_every_round_is_pinned_and_changes_no_bits(device: str) -> None:
    rng, shape = np.random.default_rng(0), (1024, 384)
    updates, states = {where: DeviceUpdate(where) for where in ("cpu", device)}, {}
    for where in updates:
        states[where] = [np.zeros(shape, np.float32), np.zeros(shape, np.float32)]  # feedback, and θ
    for _ in range(5):
        learned, found = 1e-2 * rng.standard_normal(shape).astype(np.float32), []
        for where, (e, theta) in states.items():
            local = torch.empty(shape, device=where)
            updates[where].load([(local, theta)])
            assert np.array_equal(local.cpu().numpy(), theta)
            local -= torch.tensor(learned).to(where)
            (kept,) = updates[where].accumulate([(theta, local)], [e], np.float32(0.95), TILE // 64, map)
            found.append((kept.index_TK.tobytes(), kept.values.tobytes(), e.tobytes()))
            theta -= learned
        assert found[0] == found[-1]
    assert all(pinned(array, torch.device(device)) == (device == "cuda") for array in states[device])
    states.clear()
    del e, theta
    for array in (np.ones(shape, np.float32), np.ones((2, *shape), np.float32)):
        assert not pinned(array, torch.device(device))


@pytest.mark.parametrize("device", OTHERS)
def test_evaluating_agrees(device: str) -> None:
    windows = np.arange(40 * (TRAIN.sequence + 1)).reshape(40, -1) % SPEC.vocab_size
    names = layout.shard_names(SPEC)
    losses = []
    for where in ("cpu", device):
        trainer = StageTrainer(SPEC, TRAIN, names, device=where)
        trainer.begin_round(random_theta())
        losses.append(trainer.evaluate(windows))
    assert losses[1] == pytest.approx(losses[0], rel=WITHIN[device])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8", "int4", "sym2", "tah4"])
def test_what_a_device_sends_means_the_same_everywhere(device: str, wire: str) -> None:
    x = torch.randn(2, 24, 64, generator=torch.Generator().manual_seed(0)).to(device)
    raw = quantize.encode(x, wire)
    assert len(raw) == quantize.size(x.shape, wire)
    there, here = (quantize.decode(raw, x.shape, wire, torch.device(d)) for d in (device, "cpu"))
    assert there.device.type == device
    torch.testing.assert_close(there.cpu(), here, rtol=1e-6, atol=1e-6)
    assert relative(here, x.cpu()) < 0.7
    if wire in (
        "int8",
        "int4",
    ):  # a compiler that leaves out a rounding would change most scales; that of a division, hardly any
        ours, theirs = (np.frombuffer(r, "<u2", count=48) for r in (quantize.encode(x.cpu(), wire), raw))
        assert (ours != theirs).mean() < 0.05
    x[1, 3, 5] = torch.nan
    with pytest.raises(quantize.BadTensor, match="not finite"):
        quantize.encode(x, wire)
