"""One replica on devices that hold it together: two or three real processes over gloo, compared with one device."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from peer.node.inner_loop import StageInnerLoop
from peer.node.training import ChainOrders, Result
from peer.training.device import Hardware
from peer.training.optimizer import Pace
from peer.training.several_devices import Patience
from peer.training.sharded import RankLost, ShardedTrainer
from protocol.errors import LocalError
from protocol.planning import budget, memory
from protocol.planning.budget import Budget
from protocol.round.member_events import TrainOrder
from protocol.run import layout
from protocol.run.layout import ModelSpec
from protocol.run.manifest import TrainSpec
from protocol.wire.plan import Plan, ReplicaSpec, StageSpec, Work
from tests.support import machines, replicas, sharded_memory, tiny
from tests.support.chains import SPEC, TRAIN, narrow, random_theta
from tests.support.devices import DEADLINE, alone, assert_near, await_gone, inner_step

PATIENT = Patience(start=DEADLINE, stuck=DEADLINE)
MUON = dataclasses.replace(TRAIN, optimizer="muon")
QWEN = dataclasses.replace(SPEC, num_key_value_heads=2, use_qk_norm=True, document_end_id=5, tie_word_embeddings=True)

Make = Callable[..., ShardedTrainer]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Trainers on several CPUs, which end with the test."""
    made: list[ShardedTrainer] = []

    def one(
        ranks: int = 2, spec: ModelSpec = SPEC, train: TrainSpec = TRAIN, patience: Patience = PATIENT
    ) -> ShardedTrainer:
        made.append(ShardedTrainer(spec, train, ["cpu"] * ranks, 1, tmp_path, patience))
        return made[-1]

    yield one
    for trainer in made:
        trainer.close()
    assert list(tmp_path.iterdir()) == [], "nothing is left on disk"


# --- the same update


@pytest.mark.parametrize(
    ("spec", "train", "ranks"),
    [
        pytest.param(narrow(24), TRAIN, 2, id="adamw"),
        pytest.param(SPEC, MUON, 2, id="muon"),
        pytest.param(QWEN, TRAIN, 2, id="qwen", marks=pytest.mark.slow),
        pytest.param(narrow(24), MUON, 3, id="three", marks=pytest.mark.slow),
    ],
)
def test_ranks_that_hold_parts_give_the_update_of_one(
    make: Make, spec: ModelSpec, train: TrainSpec, ranks: int
) -> None:
    """Rounds of one to five micro-batches a step, mostly not divisible; moments stay from round to round. Then another
    trainer goes on with the moments of both."""
    one, sharded = alone(spec, train), make(ranks, spec, train)
    theta, number = random_theta(spec), 0
    for micro_batches in (3, 1, 2, 5):
        pace = Pace(number, 2, micro_batches)
        for trainer in (one, sharded):
            trainer.begin_round(theta, pace)
        for _ in range(2):
            number += 1
            (expected, norm), (found, together) = inner_step(one, number), inner_step(sharded, number)
            assert found == pytest.approx(expected, rel=1e-5)
            assert together == pytest.approx(norm, rel=1e-5)
        assert_near(sharded, one, 2e-3)
        theta = {shard: [a - d for a, d in zip(theta[shard], one.delta(shard), strict=True)] for shard in theta}

    state, expected_state = sharded.optimizer_state(), one.optimizer_state()
    assert state.keys() == expected_state.keys()
    for key, array in expected_state.items():
        assert np.allclose(state[key], array, rtol=1e-2, atol=1e-6), key
    shard = "block.1"
    assert len(sharded.moments(shard) or b"") == pytest.approx(len(one.moments(shard) or b""), rel=0.05)
    for trainer in (one, sharded):
        trainer.load_optimizer({})
        assert not trainer.has_moments(shard)
        trainer.add_moments(expected_state)
        assert trainer.has_moments(shard)
        trainer.begin_round(theta)
        inner_step(trainer, number + 1)
    assert_near(sharded, one, 1e-3)
    fresh = alone(spec, train)
    fresh.begin_round(theta, sharded.pace)
    inner_step(fresh, number + 1)
    with pytest.raises(AssertionError):
        assert_near(fresh, one, 1e-1)
    with pytest.raises(LocalError, match="another shape"):
        sharded.load_optimizer({key: array.reshape(1, *array.shape) for key, array in expected_state.items()})


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("train", [TRAIN, MUON], ids=["adamw", "muon"])
def test_every_tensor_has_one_rank_and_ranks_have_equal_parts(train: TrainSpec, ranks: int) -> None:
    spec = dataclasses.replace(SPEC, n_layers=12)
    owners = memory.owners(spec, train, ranks)
    named = [tensor for shard in layout.shard_names(spec) for tensor in layout.tensors(spec, shard)]
    assert list(owners) == [name for name, _ in named]
    run = tiny.manifest(model=spec, train=train)
    held = memory.sharded_memory(run, ranks)
    largest = 16 * max(int(np.prod(shape)) for _, shape in named)
    assert max(held) - min(held) <= largest


# --- memory

WITHIN = 0.1


def anonymous(pid: int) -> int:
    """The bytes of a process that are in no file."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


@pytest.mark.skipif(sys.platform != "linux", reason="reads another process's memory")
def test_each_rank_takes_the_memory_of_the_formula(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.sharded_memory", str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(pids) == 2
        idle = [anonymous(pid) for pid in pids]
        most = list(idle)
        process.stdin.write("\n")
        process.stdin.flush()
        while not select.select([process.stdout], [], [], 0.001)[0]:
            most = [max(a, anonymous(pid)) for a, pid in zip(most, pids, strict=True)]
        assert process.stdout.readline() == "done\n"
    took = [peak - before for peak, before in zip(most, idle, strict=True)]
    formula = memory.sharded_memory(sharded_memory.RUN, 2)
    assert took == [pytest.approx(expected, rel=WITHIN) for expected in formula]
    alone_bytes = memory.stage_memory(sharded_memory.RUN, 0, sharded_memory.RUN.model.n_layers)
    assert max(formula) < 0.7 * alone_bytes


# --- a rank is lost


def lost(sharded: ShardedTrainer, before: Callable[[int], None]) -> str:
    """The line with which an inner step ends in which a rank is lost."""
    pids = list(sharded.processes)
    with pytest.raises(RankLost) as ended:
        inner_step(sharded, 2, before)
    await_gone(pids)
    for work in (lambda: sharded.begin_round(random_theta()), lambda: sharded.delta("embed"), sharded.optimizer_state):
        with pytest.raises(RankLost):
            work()
    return str(ended.value)


def test_a_rank_that_is_killed_ends_the_rounds_work_with_one_line(make: Make) -> None:
    sharded = make()
    sharded.begin_round(random_theta())
    inner_step(sharded, 1)
    (pid,) = sharded.processes
    text = lost(sharded, lambda micro: os.kill(pid, signal.SIGKILL) if micro == 1 else None)
    assert text.startswith("devices: cpu, number 2 of 2 that hold the model together, was ended by signal 9; ")
    assert "--devices" in text


@pytest.mark.slow
def test_the_line_names_the_rank_that_was_lost_and_all_end(make: Make) -> None:
    sharded = make(3)
    sharded.begin_round(random_theta())
    inner_step(sharded, 1)
    _, second = sharded.processes
    text = lost(sharded, lambda micro: os.kill(second, signal.SIGKILL) if micro == 1 else None)
    assert text.startswith("devices: cpu, number 3 of 3 that hold the model together, was ended by signal 9; ")


@pytest.mark.slow
def test_a_rank_that_does_nothing_is_not_waited_for_for_ever(make: Make) -> None:
    sharded = make(patience=Patience(start=DEADLINE, stuck=2.0))
    sharded.begin_round(random_theta())
    inner_step(sharded, 1)
    (pid,) = sharded.processes
    began = time.monotonic()
    text = lost(sharded, lambda micro: os.kill(pid, signal.SIGSTOP) if micro == 0 else None)
    assert "number 2 of 2 that hold the model together, did nothing for 2 s" in text
    assert time.monotonic() - began < DEADLINE


# --- in a peer


def helpers() -> list[int]:
    """The process ids of this process's helpers."""
    children = psutil.Process().children()
    return [child.pid for child in children if "peer.training.helper" in child.cmdline()]


async def test_a_peer_whose_devices_hold_the_model_together_trains_again_after_a_loss(tmp_path: Path) -> None:
    needed = max(memory.sharded_memory(replicas.RUN, 2))
    assert needed < memory.stage_memory(replicas.RUN, 0, replicas.MODEL.n_layers)
    machine = machines.machine(tmp_path, needed, devices=("cpu", "cpu"))
    pipes: Any = replicas.NoPipes()
    loop = StageInnerLoop(
        replicas.RUN, replicas.NAMES[0], machine, replicas.Text(), pipes, lambda **_: None, {}, lambda _: None
    )
    stage = StageSpec(peer=replicas.NAMES[0], first=0, last=replicas.MODEL.n_layers)

    async def train(round: int, progress: Callable[[int, float | None], None] = lambda *_: None) -> Result:
        work = Work(slot=0, steps=3, micro_batches=2)
        order = TrainOrder(
            plan=Plan(round=round, replicas=(ReplicaSpec(number=0, stages=(stage,), work=work),)), replica=0,
            total_steps=600,
        )  # fmt: skip
        never = asyncio.Event()
        return await loop.train(
            order, replicas.theta(), never, never, progress, ChainOrders(lambda *_: None, asyncio.Queue())
        )

    def kill(step: int, loss: float | None) -> None:
        if step == 2:
            (pid,) = helpers()
            os.kill(pid, signal.SIGKILL)

    first = await train(1)
    assert (first.error, first.steps) == (None, 3)
    assert len(helpers()) == 1
    assert not loop.lacks_moments("block.0")
    second = await train(2, kill)
    assert second.error is not None
    assert second.error.startswith("devices: cpu, number 2 of 2 that hold the model together, was ended by signal 9; ")
    assert second.steps == 0, "what the others have learned is no update"
    assert loop.lacks_moments("block.0"), "another peer may have them"
    third = await train(3)
    assert (third.error, third.steps) == (None, 3)
    await asyncio.to_thread(loop.close)
    assert helpers() == []


def test_devices_hold_the_model_together_where_none_holds_it_alone() -> None:
    run = tiny.manifest()
    alone_bytes, together = tiny.full_memory(run), max(memory.sharded_memory(run, 2))
    assert together < alone_bytes
    told: list[str] = []
    for offered, sharded in ((alone_bytes, False), (alone_bytes - 1, True), (together, True)):
        found = Hardware(("cpu", "cpu"), offered)
        assert found.useful(run, told.append) is found
        assert budget.is_sharded(run, found.budget) == sharded
    assert told == []
    assert not budget.is_sharded(run, Budget(10**12)), "one device is no several"
