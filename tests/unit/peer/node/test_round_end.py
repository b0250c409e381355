"""When a round's training ends: with the last inner step that ends before the moment that was said."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from peer.chain.reading import StopSign
from peer.events import Emitter
from peer.net.base import Clock
from peer.node.training import InnerLoop, Result, RoundEnd, Training
from protocol.round.member import Deadline
from protocol.round.member_events import Event, Trained, TrainOrder
from protocol.round.stragglers import GRACE_SHARE, OVERRUN
from protocol.wire.plan import Plan, ReplicaSpec, StageSpec, Work
from tests.sim import paces
from tests.support import tiny

WORK = Work(slot=0, steps=100, micro_batches=1)
SPEC = ReplicaSpec(number=7, stages=(StageSpec(peer="me", first=0, last=4),), work=WORK)
PLAN = Plan(round=3, replicas=(SPEC,))


class Watch:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.clock = Clock(steady=lambda: self.now)


def steps_until(end: RoundEnd, watch: Watch, seconds: float, most: int = 100) -> int:
    """How many steps of these seconds are done."""
    for step in range(1, most + 1):
        watch.now += seconds
        if end.is_set():
            return step
        end.step_begins()
    return most


@pytest.mark.parametrize(
    ("seconds", "steps"),
    [(0.5, 48), (1.0, 24), (2.5, 9), (10.0, 2), (9.0, 2), (12.0, 2), (12.3, 2), (12.5, 1), (24.0, 1), (1000.0, 1)],
)
def test_the_last_step_ends_before_the_moment_or_hardly_later(seconds: float, steps: int) -> None:
    watch = Watch()
    end = RoundEnd(watch.clock, 24.0)
    end.set_in(24.0)
    assert steps_until(end, watch, seconds) == steps
    assert steps == 1 or steps * seconds <= 24.0 * (1 + OVERRUN)
    assert OVERRUN < GRACE_SHARE, "nobody is left out for it"


def test_without_a_moment_it_does_not_end() -> None:
    watch = Watch()
    assert steps_until(RoundEnd(watch.clock, 24.0), watch, 1e6) == 100


def test_the_earliest_moment_counts() -> None:
    watch = Watch()
    end = RoundEnd(watch.clock, 24.0)
    end.set_in(50.0)
    end.set_in(10.0)
    watch.now += 4.0
    end.set_in(50.0)
    end.step_begins()
    assert steps_until(end, watch, 1.0) == 6


def test_when_the_time_is_over_already_the_step_under_way_is_the_last() -> None:
    watch = Watch()
    end = RoundEnd(watch.clock, 24.0)
    end.set_in(0.0)
    assert end.is_set()


class Stepping(InnerLoop):
    """An inner loop that does steps of a second on the test's clock."""

    def __init__(self, watch: Watch, before_step: Callable[[int], None]) -> None:
        self.watch, self.before_step = watch, before_step

    async def train(
        self, order: TrainOrder, theta: Any, stop: asyncio.Event, end: StopSign, progress: Any, _: Any
    ) -> Result:
        work = order.plan.replica(order.replica).work
        for step in range(1, work.steps + 1):
            self.before_step(step)
            self.watch.now += 1.0
            over = end.is_set()
            progress(step, 2.0)
            if over:
                break
        return Result(step, step * 8, 2.0, "too late" if stop.is_set() else None)


def trained(before_step: Callable[[Training, int], None]) -> list[Event]:
    """What a training tells its machine; `before_step` is called before each step."""
    told: list[Event] = []

    async def work() -> None:
        watch = Watch()
        loop = Stepping(watch, lambda step: before_step(training, step))
        training = Training(tiny.manifest(), "me", loop, Emitter("me", lambda event: None), told.append, watch.clock)
        training.begin(TrainOrder(PLAN, 7), {}, ahead=False, commits={})
        while not told:
            await asyncio.sleep(0)

    asyncio.run(work())
    return told


def test_a_training_ends_in_time_and_what_was_done_is_its_work() -> None:
    def early(training: Training, step: int) -> None:
        if step == 1:
            training.end_in(3, 10.0)

    def asked(training: Training, step: int) -> None:
        if step == 5:
            training.end_in(3, 0.0)

    assert trained(early) == [Trained(3, 10, 80, 2.0)]
    assert trained(asked) == [Trained(3, 5, 40, 2.0)]


def test_the_end_of_another_round_is_not_this_ones() -> None:
    assert trained(lambda training, step: training.end_in(2, 0.0)) == [Trained(3, WORK.steps, 8 * WORK.steps, 2.0)]


def test_what_is_of_no_use_any_more_ends_at_the_next_step() -> None:
    def too_late(training: Training, step: int) -> None:
        if step == 2:
            training.stop()

    (failed,) = trained(too_late)
    assert (failed.round, failed.steps) == (3, 2)  # type: ignore[union-attr]


def test_a_seat_ends_with_a_step_before_the_time_is_over() -> None:
    """It is waited for half a second at most, whatever a step takes; without its own uplink's time, here unknown."""
    watch, manifest = Watch(), paces.manifest(24.0, 2)
    deadline = Deadline(manifest, up_bps=0)
    left = deadline.left_of(watch.now, 20.0, 1000)
    end = RoundEnd(watch.clock, 24.0)
    end.set_in(left)
    seconds = 0.6
    assert seconds * (steps_until(end, watch, seconds) + 1) > left
    assert watch.now <= 1000.0 + 20.0 + 1e-6
