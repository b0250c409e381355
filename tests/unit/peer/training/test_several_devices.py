"""One replica on several devices: two or three real processes over gloo, compared with one device alone."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from peer import events
from peer.node.inner_loop import StageInnerLoop
from peer.node.training import ChainOrders
from peer.training import device
from peer.training import device_group as group
from peer.training.device import Hardware
from peer.training.optimizer import Pace
from peer.training.several_devices import GIVE_UP, Patience, SeveralDevicesTrainer, shares
from peer.training.trainer import StageTrainer
from protocol.errors import LocalError, UsageError
from protocol.planning import memory
from protocol.round.member_events import TrainOrder
from protocol.run import layout
from protocol.run.layout import ModelSpec
from protocol.run.manifest import TrainSpec
from protocol.wire.plan import Plan, ReplicaSpec, StageSpec, Work
from tests.support import machines, replicas, tiny
from tests.support.chains import SPEC, TRAIN, ids_of, random_theta, run_chain
from tests.support.devices import DEADLINE, alone, assert_near, await_gone, begin, bits, inner_step

PATIENT = Patience(start=DEADLINE, stuck=DEADLINE)
QWEN = dataclasses.replace(SPEC, num_key_value_heads=2, use_qk_norm=True, document_end_id=5, tie_word_embeddings=True)

Make = Callable[..., SeveralDevicesTrainer]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Trainers on several CPUs, which end with the test; `said` has what they tell."""
    made: list[SeveralDevicesTrainer] = []

    def one(devices: int = 2, spec: ModelSpec = SPEC, train: TrainSpec = TRAIN, patience: Patience = PATIENT) -> Any:
        said: list[str] = []
        trainer = SeveralDevicesTrainer(spec, train, ["cpu"] * devices, 1, tmp_path, said.append, patience)
        trainer.said = said  # type: ignore[attr-defined]
        made.append(trainer)
        return trainer

    yield one
    for trainer in made:
        trainer.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeveralDevicesTrainer]:
    """A trainer on two CPUs, for tests after which it is as before: none of them is told anything."""
    said: list[str] = []
    folder = tmp_path_factory.mktemp("group")
    trainer = SeveralDevicesTrainer(SPEC, TRAIN, ["cpu", "cpu"], 1, folder, said.append, PATIENT)
    yield trainer
    assert list(folder.iterdir()) == [], "nothing is left on disk"
    trainer.close()
    assert said == []


@pytest.fixture
def pair(shared: SeveralDevicesTrainer) -> SeveralDevicesTrainer:
    shared.load_optimizer({})
    shared.pace = alone().pace
    return shared


# --- the same update


@pytest.mark.parametrize(("micro_batches", "members"), itertools.product(range(1, 9), range(1, 6)))
def test_shares_are_all_micro_batches_in_order_and_as_equal_as_can_be(micro_batches: int, members: int) -> None:
    found = shares(micro_batches, members)
    assert len(found) == members
    assert [micro for share in (*found[1:], found[0]) for micro in share] == list(range(micro_batches))
    assert max(map(len, found)) - min(map(len, found)) <= 1
    assert found[0], "this process always has something to do"


@pytest.mark.parametrize(
    ("spec", "devices"),
    [
        pytest.param(SPEC, 2, id="two"),
        pytest.param(QWEN, 2, id="two, qwen", marks=pytest.mark.slow),
        pytest.param(SPEC, 3, id="three", marks=pytest.mark.slow),
    ],
)
def test_several_devices_give_the_update_of_one(make: Make, spec: ModelSpec, devices: int) -> None:
    """Rounds of one to five micro-batches a step, mostly not divisible. Helpers go on from round to round."""
    one, several = alone(spec), make(devices, spec)
    theta, number = random_theta(spec), 0
    for micro_batches in (3, 1, 2, 5):
        pace = Pace(number, 2, micro_batches)
        for trainer in (one, several):
            trainer.begin_round(theta, pace)
        for sent in (
            signal.SIGINT,
            signal.SIGTERM,
        ):  # Ctrl-C and systemd send them to all; the peer needs its helpers until it has left
            os.kill(several.processes[0], sent)
            number += 1
            (expected, norm), (found, together) = inner_step(one, number), inner_step(several, number)
            assert found == pytest.approx(expected, rel=1e-5)
            assert together == pytest.approx(norm, rel=1e-5)
        assert_near(several, one, 1e-3)
        theta = {shard: [a - d for a, d in zip(theta[shard], one.delta(shard), strict=True)] for shard in theta}
    assert len(several.processes) == devices - 1
    idle = [text for text in several.said if "nothing to do" in text]  # type: ignore[attr-defined]
    assert several.said == idle  # type: ignore[attr-defined]
    assert len(idle) == 1


def test_micro_batches_are_joined_on_all_devices(pair: SeveralDevicesTrainer) -> None:
    """What is computed as one counts as many."""
    one, several = alone(train=dataclasses.replace(TRAIN, micro_batches=6)), pair
    one.begin_round(random_theta(), Pace(0, 2, 6))
    several.begin_round(random_theta(), Pace(0, 2, 6, joined=3))
    (losses, norm), (found, together) = inner_step(one, 1), inner_step(several, 1)
    assert (len(losses), len(found)) == (6, 2)
    assert np.mean(found) == pytest.approx(np.mean(losses), rel=1e-6)
    assert together == pytest.approx(norm, rel=1e-5)
    assert_near(several, one, 1e-3)
    several.begin_round(random_theta(), Pace(2, 2, 6))
    assert (several.train.micro_batches, several.train.rows) == (6, TRAIN.rows), "and the next round's are not"


def test_only_a_full_replica_joins_micro_batches() -> None:
    stage = StageTrainer(SPEC, TRAIN, layout.shard_names(SPEC)[1:3])
    with pytest.raises(LocalError, match="bug"):
        stage.begin_at(Pace(0, 1, 4, joined=2))
    with pytest.raises(LocalError, match="bug"):
        alone().begin_at(Pace(0, 1, 3, joined=2))


@pytest.mark.slow
def test_two_runs_have_the_same_bits(make: Make) -> None:
    found = []
    for _ in range(2):
        several = make(3, train=dataclasses.replace(TRAIN, micro_batches=5))
        several.begin_round(random_theta())
        figures = [inner_step(several, number) for number in (1, 2, 3)]
        found.append((figures, bits(several)))
        several.close()
    assert found[0] == found[1]


def test_helpers_have_the_optimizers_state_of_the_first(pair: SeveralDevicesTrainer) -> None:
    """From a checkpoint, too: the next step is that of one device which has it."""
    before = alone()
    before.begin_round(random_theta())
    for number in (1, 2, 3):
        inner_step(before, number)
    state = before.optimizer_state()
    one, several = alone(), pair
    for trainer in (one, several):
        trainer.load_optimizer(state)
        trainer.begin_round(random_theta())
        inner_step(trainer, 4)
    assert_near(several, one, 1e-4)
    fresh = alone()
    fresh.begin_round(random_theta())
    inner_step(fresh, 4)
    with pytest.raises(AssertionError):
        assert_near(fresh, one, 1e-1)


def test_a_step_that_is_given_up_leaves_nothing_behind(pair: SeveralDevicesTrainer) -> None:
    """As when memory runs out on the first device: the helper forgets its part of it."""
    one, several = alone(), pair
    begin(one, several)
    for micro, part in enumerate(torch.tensor(ids_of(99)).reshape(TRAIN.micro_batches, TRAIN.rows, -1)[:2]):
        several.forward(micro, part)
    several.reset()
    for number in (1, 2):
        inner_step(one, number)
        inner_step(several, number)
    assert_near(several, one, 1e-4)


# --- a device is lost


@pytest.mark.slow
def test_a_helper_that_is_killed_costs_nothing_and_comes_back(make: Make) -> None:
    """The inner step is repeated alone, bit for bit; the next round has two again, until it was lost too often."""
    one, several = alone(), make()
    for lost in range(1, GIVE_UP + 1):
        for trainer in (one, several):
            trainer.load_optimizer({})
            trainer.begin_round(random_theta())
        (pid,) = several.processes

        def kill(micro: int, pid: int = pid) -> None:
            if micro == 1:
                os.kill(pid, signal.SIGKILL)

        expected = [inner_step(one, number) for number in (1, 2)]
        assert [inner_step(several, 1, kill), inner_step(several, 2)] == expected
        assert bits(several) == bits(one), "nothing of the lost helper's is in it"
        assert several.processes == ()
        assert len(several.said) == lost  # type: ignore[attr-defined]
        text = several.said[-1]  # type: ignore[attr-defined]
        assert text.startswith("devices: cpu, number 2 of 2, was ended by signal 9; 1 of 2 go on")
        assert text.endswith("--devices" if lost == GIVE_UP else "it is started again for the next round")
    several.begin_round(random_theta())
    assert several.processes == (), "it was lost too often"


@pytest.mark.slow
def test_of_three_the_two_that_are_left_go_on_together(make: Make) -> None:
    """Also when it is lost unnoticed, between two steps: all had the same state, so they go on as two would."""
    several, two = make(3), make(2)
    for trainer in (several, two):
        trainer.begin_round(random_theta())
        inner_step(trainer, 1)
        if trainer is several:
            os.kill(several.processes[0], signal.SIGKILL)
        inner_step(trainer, 2)
        inner_step(trainer, 3)
        trainer.close() if trainer is two else None
    assert_near(several, two, 1e-3)
    assert len(several.processes) == 1
    assert len(several.said) == 1  # type: ignore[attr-defined]
    assert "number 2 of 3, was ended by signal 9; 2 of 3 go on" in several.said[0]  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_helper_that_does_nothing_is_not_waited_for_for_ever(make: Make) -> None:
    one, several = alone(), make(patience=Patience(start=DEADLINE, stuck=2.0))
    begin(one, several)
    inner_step(several, 1)
    inner_step(one, 1)

    def stop(micro: int) -> None:
        if micro == 0:
            os.kill(several.processes[0], signal.SIGSTOP)

    (pid,) = several.processes
    inner_step(several, 2, stop)
    inner_step(one, 2)
    assert_near(several, one, 1e-3)
    assert several.processes == ()
    assert "did nothing for" in several.said[0]  # type: ignore[attr-defined]
    await_gone([pid])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits another process's memory")
def test_a_helper_whose_memory_runs_out_says_so(make: Make) -> None:
    """It has no room for the gradients of embedding and head with any rows: the first device does its share."""
    spec = dataclasses.replace(SPEC, vocab_size=200_000)
    one, several = alone(spec), make(spec=spec)
    begin(one, several)
    (pid,) = several.processes

    def fill(micro: int) -> None:
        if micro == 0:
            most = psutil.Process(pid).memory_info().vms + 64_000_000  # one of two such gradients
            resource.prlimit(pid, resource.RLIMIT_AS, (most, most))

    assert inner_step(several, 1, fill) == inner_step(one, 1)
    assert bits(several) == bits(one)
    (text,) = several.said  # type: ignore[attr-defined]
    assert "number 2 of 2, failed: " in text
    assert "memory" in text
    await_gone([pid])


# --- who takes part, and for how long

KILLED = """
import os, sys
from pathlib import Path
from peer.training.several_devices import SeveralDevicesTrainer
from tests.support.chains import SPEC, TRAIN, random_theta
trainer = SeveralDevicesTrainer(SPEC, TRAIN, ["cpu"] * 2, 1, Path(sys.argv[1]), print)
if sys.argv[2] == "training":
    trainer.begin_round(random_theta())
print(*trainer.processes, flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.parametrize("when", ["starting", "training"])
def test_no_helper_outlives_a_peer_that_is_killed(tmp_path: Path, when: str) -> None:
    peer = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path), when],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with peer:
        pids = [int(word) for word in peer.stdout.readline().split()]
        assert len(pids) == 1
        peer.kill()
        await_gone(pids)


def test_nothing_listens_but_on_loopback(pair: SeveralDevicesTrainer) -> None:
    pair.begin_round(random_theta())
    inner_step(pair, 1)
    heard = [
        connection
        for pid in (os.getpid(), *pair.processes)
        for connection in psutil.Process(pid).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert len({connection.laddr.port for connection in heard}) >= 2, "each member of the group listens"
    assert {connection.laddr.ip for connection in heard} == {"127.0.0.1"}


STRANGER = """
import sys, torch
from peer.training import device_group as group
from peer.training.device_group import Join
group.join_group(Join(sys.argv[1], 1, 2, (1, int(sys.argv[2])), 60.0), torch.device("cpu"))
group.leave_group()
"""


def test_a_stranger_in_the_group_is_found_before_anything_is_exchanged(tmp_path: Path) -> None:
    """The helper would show the secret 2."""
    other = subprocess.Popen([sys.executable, "-c", STRANGER, str(tmp_path), "3"], stderr=subprocess.DEVNULL)
    with other:
        with pytest.raises(RuntimeError, match="stranger"):
            group.join_group(group.Join(str(tmp_path), 0, 2, (1, 2), 60.0), torch.device("cpu"))
        assert other.wait(DEADLINE) == 0


# --- in a peer


def test_a_pipeline_measures_the_time_for_all_devices(pair: SeveralDevicesTrainer) -> None:
    """Half a second in which a helper is stopped is in what the speed that is announced follows from."""
    one, several = alone(), pair
    begin(one, several)

    async def read(step: int) -> np.ndarray:
        if step == 3:
            (pid,) = several.processes
            os.kill(pid, signal.SIGSTOP)
            asyncio.get_running_loop().call_later(0.5, os.kill, pid, signal.SIGCONT)
        return ids_of(step)

    (expected,) = asyncio.run(run_chain([one], steps=4))
    (reports,) = asyncio.run(run_chain([several], steps=4, read=read))
    assert [r.loss for r in reports] == pytest.approx([r.loss for r in expected], rel=1e-5)
    assert [r.norm for r in reports] == pytest.approx([r.norm for r in expected], rel=1e-5)
    assert_near(several, one, 1e-3)
    waited = [report.seconds_per_microbatch * TRAIN.micro_batches for report in reports]
    assert max(waited) > 0.2


async def test_in_a_chain_one_device_trains_and_a_line_says_so(tmp_path: Path) -> None:
    machine = machines.machine(tmp_path, 10**9, devices=("cpu", "cpu"))
    pipes: Any = replicas.NoPipes()
    told: list[object] = []
    loop = StageInnerLoop(
        replicas.RUN, replicas.NAMES[0], machine, replicas.Text(), pipes, lambda **_: None, {}, told.append
    )
    stages = (StageSpec(peer=replicas.NAMES[0], first=0, last=1), StageSpec(peer=replicas.NAMES[1], first=1, last=2))
    chain = ReplicaSpec(number=0, stages=stages, work=Work(slot=0, steps=6, micro_batches=2))
    order = TrainOrder(plan=Plan(round=1, replicas=(chain,)), replica=0, total_steps=600)
    never = asyncio.Event()
    result = await loop.train(
        order, replicas.theta(), never, never, lambda *_: None, ChainOrders(lambda *_: None, asyncio.Queue())
    )
    assert result.error is not None, "there is no neighbour"
    await asyncio.to_thread(loop.close)
    (said,) = told
    assert said == events.Warning(
        text="devices: a stage of a chain trains on one device, cpu; the others wait for a whole model"
    )


def test_what_devices_are_called(tmp_path: Path) -> None:
    assert device.parse_devices("cpu", None) == ("cpu",)
    assert device.parse_devices("auto", "0, 1") == ("cuda:0", "cuda:1")
    assert device.choose_devices(device.parse_devices("auto", "cpu, cpu")) == ("cpu", "cpu")
    assert device.name_of(("cpu",)) == "cpu"
    assert device.name_of(("cuda:1", "cuda:3")) == "2 x cuda"
    assert device.smallest_budget(("cpu", "cpu")) <= device.memory_budget("cpu")
    for text in ("", "cpu,0", "a", "1,,2", "-1", ",".join(["cpu"] * 65), "9" * 5000):
        with pytest.raises(UsageError, match="devices "):
            device.choose_devices(device.parse_devices("auto", text))
    with pytest.raises(UsageError, match="takes the place of --device"):
        device.parse_devices("cpu", "cpu,cpu")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    with pytest.raises(UsageError, match=f"finds {gpus} GPUs here"):
        device.choose_devices(("cuda:0", f"cuda:{gpus}"))


def test_without_room_for_the_whole_model_one_device_trains_and_a_line_says_so() -> None:
    run = tiny.manifest()
    needed = tiny.full_memory(run)
    told: list[str] = []
    for one in (Hardware(("cpu", "cpu"), needed), Hardware(("cpu",), needed - 1)):
        assert one.useful(run, told.append) is one
    assert told == []
    short = max(memory.sharded_memory(run, 2)) - 1
    assert Hardware(("cpu", "cpu"), short).useful(run, told.append) == Hardware(("cpu",), short)
    assert told[0].startswith("devices: the 2 do not hold the whole model together")
