"""Helpers of the tests of trainers with several processes."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import psutil
import torch

from peer.training.trainer import StageTrainer
from protocol.run import layout
from protocol.run.layout import ModelSpec
from protocol.run.manifest import TrainSpec
from tests.support.chains import SPEC, TRAIN, ids_of, random_theta, relative

DEADLINE = 120.0


def alone(spec: ModelSpec = SPEC, train: TrainSpec = TRAIN) -> StageTrainer:
    return StageTrainer(spec, train, layout.shard_names(spec))


def begin(*trainers: StageTrainer) -> None:
    for trainer in trainers:
        trainer.begin_round(random_theta(trainer.spec))


def inner_step(
    trainer: StageTrainer, number: int, before: Callable[[int], None] = lambda micro: None, seed: int | None = None
) -> tuple[list[float], float]:
    """As peer/chain/pipeline.py: the losses of its micro-batches, and its norm. `before(micro)`: comes first."""
    train = trainer.train
    ids = torch.tensor(ids_of(number if seed is None else seed, trainer.spec, train))
    losses = []
    for micro, part in enumerate(ids.reshape(train.micro_batches, train.rows, -1)):
        before(micro)
        losses.append(trainer.forward(micro, part))
        trainer.backward(micro)
    norm = sum(value for _, value in trainer.grad_sumsq()) ** 0.5
    trainer.step(number, norm)
    return [loss.item() for loss in losses], norm


def moved(trainer: StageTrainer) -> dict[str, list[np.ndarray]]:
    return {shard: trainer.delta(shard) for shard in trainer.shards}


def bits(trainer: StageTrainer) -> list[str]:
    """Of what was learned, and of the optimizer's state."""
    state = {name: [np.asarray(array)] for name, array in trainer.optimizer_state().items()}
    return [layout.shard_digest(arrays) for arrays in (moved(trainer) | state).values()]


def assert_near(found: StageTrainer, expected: StageTrainer, within: float) -> None:
    """Asserts that both have learned the same, up to this part of each tensor's norm."""
    learned = moved(found)
    for shard, arrays in moved(expected).items():
        for a, b in zip(learned[shard], arrays, strict=True):
            assert relative(torch.tensor(a), torch.tensor(b)) < within, shard


def gone(pid: int) -> bool:
    """Whether a process is over."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def await_gone(pids: list[int]) -> None:
    end = time.monotonic() + DEADLINE
    while not all(map(gone, pids)):
        assert time.monotonic() < end, "helpers have outlived their peer"
        time.sleep(0.02)  # there is no sign of it
