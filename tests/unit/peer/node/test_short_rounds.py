"""Memory that runs out in a round: work is kept, less is claimed or pieces are used, and one line says so."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from peer.chain.connect import PipelineStreams
from peer.events import Emitter, Warning
from peer.net.base import Clock
from peer.net.memory import MemoryNetwork
from peer.node.inner_loop import StageInnerLoop
from peer.node.training import Training
from peer.training.optimizer import learning_rate
from peer.training.trainer import StageTrainer
from protocol.planning import memory
from protocol.round.member_events import Event, Failed, Trained, TrainOrder
from protocol.run import init, layout
from protocol.wire.decree import Schedule
from tests.support import machines, networks, tiny
from tests.support.short_rounds import PLAN, RUN, TRAIN
from tests.support.texts import NoText

OFFERED = 10**9


class Text(NoText):
    """Ids that follow from their place."""

    async def sequences(self, slots: range) -> np.ndarray:
        return np.array([np.arange(slot, slot + TRAIN.sequence + 1) % RUN.model.vocab_size for slot in slots])


class Starved(StageTrainer):
    """From inner step `step` on, torch is refused memory for more than `room` rows of a block."""

    room, step_at = 0, 2

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.stage.model.layers["1"].mlp.up_proj.register_forward_pre_hook(self._look)  # type: ignore[index, operator]

    def _look(self, module: Any, given: tuple[torch.Tensor, ...]) -> None:
        if self.steps >= self.step_at and torch.is_grad_enabled() and len(given[0]) > self.room:
            raise torch.OutOfMemoryError("out of memory")


def a_round(
    folder: Path, at_once: int = 1, schedule: Schedule | None = None, **changes: Any
) -> tuple[Event, list[str], dict[str, Any], dict[str, list[np.ndarray]]]:
    """What the member's machine hears, what people are told, what is announced, and what was learned."""
    lines: list[str] = []
    said: dict[str, Any] = {}

    class Loop(StageInnerLoop):
        trainer_class = type("Starved", (Starved,), changes)
        joined = staticmethod(lambda *_: at_once)

    async def work() -> tuple[Event, dict[str, list[np.ndarray]]]:
        told: asyncio.Queue[Event] = asyncio.Queue()
        emit = Emitter("me", lambda event: lines.append(event.body.text) if isinstance(event.body, Warning) else None)
        machine = machines.machine(folder, OFFERED)
        transport = MemoryNetwork().transport("me")

        pipes = PipelineStreams(networks.network(transport))
        loop = Loop(RUN, "me", machine, Text(), pipes, lambda **news: said.update(news), {}, emit)
        training = Training(RUN, "me", loop, emit, told.put_nowait, Clock())
        theta = {s: init.initial_shard(RUN.model, b"0", s) for s in layout.shard_names(RUN.model)}
        older, head = (
            tiny.commit(run=RUN.run_id, round=n, plan=PLAN, schedule=s) for n, s in ((-1, None), (0, schedule))
        )
        training.begin(TrainOrder(PLAN, 0), theta, ahead=False, commits={-1: older, 0: head})
        heard = await told.get()
        await training.end()
        learned = {shard: [a - b if b is not None else a for a, b in loop.displacement(shard)] for shard in theta}
        loop.close()
        await transport.aclose()
        return heard, learned

    heard, learned = asyncio.run(asyncio.wait_for(work(), 60))
    return heard, lines, said, learned


def test_steps_go_on_in_pieces_and_one_line_says_so(tmp_path: Path) -> None:
    heard, lines, said, learned = a_round(tmp_path, room=1)
    plain, nothing, _, expected = a_round(tmp_path, room=TRAIN.rows)
    assert isinstance(heard, Trained)
    assert isinstance(plain, Trained)
    assert (heard.steps, heard.tokens) == (plain.steps, plain.tokens) == (4, 4 * TRAIN.step_tokens)
    assert heard.loss == plain.loss
    assert len(lines) == 1
    assert lines[0].startswith(
        "memory: it ran out in an inner step, which was done in pieces: until the round is over, 1 of 4"
    )
    assert nothing == []
    assert "memory_bytes" not in said, "there is no need to offer less"
    for shard, arrays in expected.items():
        for a, b in zip(learned[shard], arrays, strict=True):
            assert float(np.abs(a - b).max()) < 1e-2 * float(np.abs(b).max()), "AdamW magnifies rounding"


@pytest.mark.parametrize("steps", [1, 3])
def test_where_not_even_a_row_fits_the_steps_before_count_and_less_is_offered(tmp_path: Path, steps: int) -> None:
    heard, lines, said, learned = a_round(tmp_path, room=0, step_at=steps)
    assert isinstance(heard, Trained)
    assert (heard.steps, heard.tokens) == (steps, steps * TRAIN.step_tokens)
    assert len(lines) == 1
    assert "are offered from now on" in lines[0]
    assert said["memory_bytes"] < memory.stage_memory(RUN, 0, tiny.LAYERS)
    fewer = {shard: [float(np.abs(a).max()) for a in arrays] for shard, arrays in learned.items()}
    assert all(0 < most <= 2 * steps * TRAIN.lr for of_shard in fewer.values() for most in of_shard)


def test_a_bug_ends_the_round_and_is_told(tmp_path: Path) -> None:
    """A peer that kept silent about it would be waited for until the round's deadline."""

    def end_round(self: StageTrainer) -> None:
        raise TypeError("missing an argument\nand more")

    heard, _, _, _ = a_round(tmp_path, room=TRAIN.rows, end_round=end_round)
    assert isinstance(heard, Failed)
    assert heard.reason == "training: TypeError: missing an argument; this is a bug"


def test_without_a_step_the_round_is_sat_out(tmp_path: Path) -> None:
    heard, lines, said, _ = a_round(tmp_path, room=0, step_at=0)
    assert isinstance(heard, Failed)
    assert heard.reason.startswith("memory: it ran out in blocks 0 to 3")
    assert len(lines) == 1
    assert said["memory_bytes"] < OFFERED


def test_a_replica_with_room_learns_the_same_from_joined_micro_batches(tmp_path: Path) -> None:
    """As on a GPU (budget.joined). What is told and announced is of the run's micro-batches."""
    plain, _, alone, expected = a_round(tmp_path, room=TRAIN.rows)
    seen: list[int] = []

    def forward(self: StageTrainer, micro: int, ids: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        seen.append(len(ids))
        return StageTrainer.forward(self, micro, ids, *args, **options)

    heard, lines, said, learned = a_round(tmp_path, at_once=2, room=2 * TRAIN.rows, forward=forward)
    assert seen == 4 * [2 * TRAIN.rows]
    assert isinstance(heard, Trained)
    assert isinstance(plain, Trained)
    assert (heard.steps, heard.tokens) == (plain.steps, plain.tokens)
    assert heard.loss == pytest.approx(plain.loss, rel=1e-6)
    assert lines == []
    assert set(said) == set(alone)
    for shard, arrays in expected.items():
        for a, b in zip(learned[shard], arrays, strict=True):
            assert float(np.abs(a - b).max()) < 1e-2 * float(np.abs(b).max()), "AdamW magnifies rounding"


def test_where_joined_micro_batches_do_not_fit_pieces_do(tmp_path: Path) -> None:
    heard, lines, _, _ = a_round(tmp_path, at_once=2, room=1)
    assert isinstance(heard, Trained)
    assert heard.steps == 4
    assert len(lines) == 1
    assert "1 of 8" in lines[0]


@pytest.mark.parametrize("decreed", [None, Schedule(rounds=90, total_steps=400)])
def test_trainers_follow_the_schedule_of_the_newest_commit(tmp_path: Path, decreed: Schedule | None) -> None:
    rates: list[float] = []

    def step(self: StageTrainer, step: int, total_norm: float) -> None:
        rates.append(self.pace.rate(self.train, step))
        StageTrainer.step(self, step, total_norm)

    heard, *_ = a_round(tmp_path, schedule=decreed, room=TRAIN.rows, step=step)
    assert isinstance(heard, Trained)
    spec = TRAIN if decreed is None else dataclasses.replace(TRAIN, total_steps=decreed.total_steps)
    assert rates == [learning_rate(spec, step) for step in (1, 2, 3, 4)]
