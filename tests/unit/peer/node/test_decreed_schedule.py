"""What operators decree of the learning rate's schedule reaches the optimizer."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import numpy as np
import pytest

from peer.chain.connect import PipelineStreams
from peer.events import Emitter
from peer.net.base import Clock
from peer.net.memory import MemoryNetwork
from peer.node.inner_loop import StageInnerLoop
from peer.node.training import Training
from peer.training.optimizer import learning_rate
from peer.training.trainer import StageTrainer
from protocol.round.member_events import Event, Trained, TrainOrder
from protocol.run import init, layout
from protocol.run.manifest import TrainSpec
from protocol.wire.commit import Commit
from protocol.wire.decree import Schedule
from protocol.wire.plan import Plan, ReplicaSpec, StageSpec, Work
from tests.support import machines, networks, tiny
from tests.support.texts import NoText

TRAIN = TrainSpec(inner_steps=2, micro_batches=1, rows=2, sequence=8, lr=1e-2, warmup_steps=0, total_steps=20)
RUN = tiny.manifest(train=TRAIN)
PLAN = Plan(
    round=4,
    replicas=(
        ReplicaSpec(stages=(StageSpec(peer="me", first=0, last=tiny.LAYERS),), work=Work(steps=2, micro_batches=1)),
    ),
)


class Text(NoText):
    """Ids that do not matter."""

    async def sequences(self, slots: range) -> np.ndarray:
        return np.ones((len(slots), TRAIN.sequence + 1), np.int64)


@pytest.mark.parametrize("decreed", [None, Schedule(rounds=90, total_steps=400)])
def test_trainers_follow_the_newest_commit(decreed: Schedule | None, tmp_path: Path) -> None:
    rates: list[float] = []

    class Recording(StageTrainer):
        def step(self, step: int, total_norm: float) -> None:
            rates.append(self.pace.rate(self.train, step))
            super().step(step, total_norm)

    class Loop(StageInnerLoop):
        trainer_class = Recording

    told: asyncio.Queue[Event] = asyncio.Queue()

    async def work() -> Event:
        emit = Emitter("me", lambda event: None)
        machine = machines.machine(tmp_path, 10**9)
        transport = MemoryNetwork().transport("me")

        pipes = PipelineStreams(networks.network(transport))
        loop = Loop(RUN, "me", machine, Text(), pipes, lambda **news: None, {}, emit)
        training = Training(RUN, "me", loop, emit, told.put_nowait, Clock())
        theta = {s: init.initial_shard(RUN.model, b"0", s) for s in layout.shard_names(RUN.model)}
        head = Commit(
            run=RUN.run_id, round=3, parent="p", time=0.0, contributions=(), left_out=(), diverged=(), digests={}, plan=PLAN,
            schedule=decreed,
        )  # fmt: skip
        older = dataclasses.replace(head, round=2, schedule=None)
        training.begin(TrainOrder(PLAN, 0), theta, ahead=False, commits={2: older, 3: head})
        heard = await told.get()
        await training.end()
        loop.close()
        await transport.aclose()
        return heard

    heard = asyncio.run(asyncio.wait_for(work(), 60))
    assert isinstance(heard, Trained), heard
    total = TRAIN.total_steps if decreed is None else decreed.total_steps
    spec = dataclasses.replace(TRAIN, total_steps=total)
    assert rates == [learning_rate(spec, step) for step in (7, 8)]
