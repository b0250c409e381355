"""What a stage knows of its boundaries: statistics of known tensors, and of a chain's."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
import torch

from peer.chain import frames, quantize
from peer.chain.neighbours import MEAN_FRAMES, MOST_BOUNDARIES, RMS_EVERY, Measure, Running, Statistics, measure
from protocol.codec import formats
from tests.support.chains import SPEC, TRAIN, Recording, make_chain, run_chain

CPU = torch.device("cpu")


@pytest.mark.parametrize("wire", formats.FORMATS)
def test_of_a_known_tensor(wire: str) -> None:
    x = torch.full((2, 3, 16), 2.0)
    x[:, :, ::2] = -4.0
    found, largest = quantize.decode_measured(quantize.encode(x, wire), x.shape, wire, CPU)
    seen = measure(found, largest, 0)
    assert seen.rms is not None
    assert seen.largest == float(found.abs().max())
    assert seen.rms == pytest.approx(math.sqrt(found.double().square().mean()), rel=1e-6)
    if wire != "sym2":
        assert tuple(seen) == pytest.approx((4.0, math.sqrt(10)), rel=0.05)
    assert [n for n in range(20) if measure(found, largest, n).rms is not None] == [0, RMS_EVERY, 2 * RMS_EVERY]


def test_the_mean_is_plain_at_first_and_forgets_later() -> None:
    running = Running()
    for value in range(1, MEAN_FRAMES + 1):
        running.add(Measure(10 * value, value))
        running.add(Measure(10 * value, None))
        assert running.rms == pytest.approx((value + 1) / 2)
        assert running.sampled * 2 == running.frames
    before = running.rms, running.largest
    for _ in range(MEAN_FRAMES):
        running.add(Measure(0.0, 1000.0))
    left = (1 - 1 / MEAN_FRAMES) ** MEAN_FRAMES
    assert running.rms == pytest.approx(1000 - (1000 - before[0]) * left)
    assert running.largest == pytest.approx(before[1] * left)


def test_boundaries_are_told_apart_and_not_more_than_bounded() -> None:
    statistics = Statistics()
    first = statistics.of("P0", frames.FORWARD, 8)
    first.add(Measure(2.0, 1.0))
    assert statistics.of("P0", frames.FORWARD, 8) is first
    others = [("P1", frames.FORWARD, 8), ("P0", frames.BACKWARD, 8), ("P0", frames.FORWARD, 16)]
    assert [statistics.of(*other).frames for other in others] == [0, 0, 0]
    for i in range(MOST_BOUNDARIES):
        statistics.of(f"Q{i}", frames.FORWARD, 8)
    assert statistics.of("P0", frames.FORWARD, 8).frames == 0, "the oldest was forgotten"


def test_a_chain_reports_what_came() -> None:
    reports = asyncio.run(run_chain(make_chain((2, 4), 8), steps=2, wires=("fp32", "fp32")))
    first, middle, last = (stage[1] for stage in reports)
    assert first.activations is None
    assert last.gradients is None
    for running in (first.gradients, middle.activations, middle.gradients, last.activations):
        assert (running.frames, running.refused) == (2 * TRAIN.micro_batches, 0)
        assert 0 < running.rms < running.largest < running.rms * math.sqrt(8 * TRAIN.rows * TRAIN.sequence)
    assert reports[1][0].activations.frames == TRAIN.micro_batches, "a report does not change afterwards"


def test_the_numbers_are_those_of_the_tensors_that_were_sent() -> None:
    sent: list[torch.Tensor] = []

    class Telling(Recording):
        def forward(self, *args: Any, **options: Any) -> Any:
            return self.tell(super().forward(*args, **options))

        def backward(self, *args: Any) -> Any:
            return self.tell(super().backward(*args))

        def tell(self, out: Any) -> Any:
            if isinstance(out, torch.Tensor) and out.dim():  # neither nothing nor a loss
                sent.append(out.clone())
            return out

    chain = make_chain((SPEC.n_layers + 1,), 8, kind=Telling)  # the head alone: gradients are those of its loss
    first, last = asyncio.run(run_chain(chain, wires=("fp32", "fp32")))
    largest = sorted(float(x.abs().max()) for x in sent)
    gradients, activations = largest[: TRAIN.micro_batches], largest[TRAIN.micro_batches :]
    assert first[0].gradients.largest == pytest.approx(sum(gradients) / len(gradients), rel=1e-5)
    assert last[0].activations.largest == pytest.approx(sum(activations) / len(activations), rel=1e-5)
    assert last[0].activations.sampled == 1
    assert any(last[0].activations.rms == pytest.approx(float(x.square().mean().sqrt()), rel=1e-5) for x in sent)
