"""What a trained model writes, and what is found of given text: against plain computations by hand."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from peer.training import inference
from peer.training.inference import Dice, continuation
from peer.training.model import Stage
from protocol.errors import LocalError, UsageError
from protocol.run import layout
from tests.support.chains import SPEC, ids_of, random_theta

WINDOW = SPEC.context


@pytest.fixture(scope="module")
def stage() -> Stage:
    return inference.load(SPEC, random_theta(std=0.3))


@torch.no_grad()
def logits(stage: Stage, ids: list[int]) -> torch.Tensor:
    """[L, V], all at once."""
    return stage.logits(stage(torch.tensor([ids])))[0]


def written(stage: Stage, prompt: list[int], count: int, dice: Dice, window: int = WINDOW) -> list[int]:
    return list(itertools.islice(continuation(stage, prompt, window, dice), count))


@pytest.mark.parametrize("window", [WINDOW, 7, 1])
def test_beyond_the_window_it_goes_on_from_the_second_half(stage: Stage, window: int) -> None:
    prompt = ids_of(4)[0, :10].tolist()
    seen, expected = prompt[-window:], []
    for _ in range(3 * WINDOW):
        if len(seen) > window:
            seen = seen[-max(1, window // 2) :]
        expected.append(int(logits(stage, seen)[-1].argmax()))
        seen = [*seen, expected[-1]]
    assert written(stage, prompt, 3 * WINDOW, Dice(0, temperature=0), window) == expected


def test_the_same_seed_gives_the_same_text(stage: Stage) -> None:
    first, again, other = (written(stage, [1, 2], 30, Dice(seed, temperature=1.0)) for seed in (5, 5, 6))
    assert first == again != other


def test_only_the_likeliest_are_drawn_by_their_chances() -> None:
    chances = np.array([0.05, 0.4, 0.1, 0.3, 0.15])
    x = torch.tensor(np.log(chances), dtype=torch.float32)

    def shares(top_k: int, temperature: float = 1.0) -> np.ndarray:
        dice = Dice(1, temperature=temperature, top_k=top_k)
        return np.bincount([dice.draw(x) for _ in range(4000)], minlength=5) / 4000

    np.testing.assert_allclose(shares(0), chances, atol=0.03)
    np.testing.assert_allclose(shares(9), chances, atol=0.03)
    np.testing.assert_allclose(shares(2), [0, 4 / 7, 0, 3 / 7, 0], atol=0.03)
    np.testing.assert_allclose(shares(0, 0.5), chances**2 / (chances**2).sum(), atol=0.03)
    for nearly_greedy in (Dice(1, temperature=0), Dice(1, temperature=1e-300), Dice(1, temperature=1.0, top_k=1)):
        assert {nearly_greedy.draw(x) for _ in range(20)} == {1}


def test_a_model_that_diverged_is_named() -> None:
    with pytest.raises(LocalError, match="diverged"):
        Dice(0, temperature=1.0).draw(torch.tensor([0.0, math.nan]))


def test_the_loss_is_that_of_each_prediction(stage: Stage) -> None:
    windows = np.concatenate([ids_of(s) for s in (1, 2)])[:3]
    expected = 0.0
    for row in windows.tolist():
        x = logits(stage, row[:-1]).double().numpy()
        for position, right in enumerate(row[1:]):
            expected += math.log(np.exp(x[position]).sum()) - float(x[position, right])
    assert inference.nats(stage, windows) == pytest.approx(expected, rel=1e-5)


def test_a_model_is_loaded_where_there_is_room() -> None:
    parameters = 4 * layout.total_parameters(SPEC)
    assert inference.place(SPEC, {"cuda": 2 * parameters, "cpu": 2 * parameters}) == "cuda"
    assert inference.place(SPEC, {"cuda": parameters, "cpu": 2 * parameters}) == "cpu"
    with pytest.raises(UsageError, match="memory: the model takes"):
        inference.place(SPEC, {"cpu": parameters})
