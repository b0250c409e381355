"""A peer that is asked to end gives its error feedback to one that trains the same shards; whole peers."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from peer.net.base import Clock, Stream
from peer.node.training import END_SECONDS, InnerLoop, Training
from peer.state.storage import Shards
from protocol.round.handover import LEAVE_SECONDS
from protocol.round.member_events import Phase, TrainOrder
from protocol.wire import endpoints
from tests.support.short_rounds import PLAN, RUN
from tests.support.volunteers import Swarm, Volunteer, manifest

pytestmark = pytest.mark.slow


def feedback(peer: Volunteer) -> Shards:
    return {shard: [e.copy() for e in arrays] for shard, arrays in peer.rounds.outer.feedback.items()}


def norm(shards: Shards) -> float:
    return float(
        np.sqrt(sum(float(np.sum(np.square(e, dtype=np.float64))) for arrays in shards.values() for e in arrays))
    )


def total(*held: Shards) -> Shards:
    return {shard: [np.sum(x, axis=0) for x in zip(*(h[shard] for h in held), strict=True)] for shard in held[0]}


async def test_whoever_leaves_politely_takes_little_along_and_what_all_hold_stays_the_same(tmp_path: Path) -> None:
    async with Swarm(tmp_path, manifest(rounds=9, start_peers=3)) as swarm:
        upto, moved = 2, asyncio.Event()

        async def hold(peer: str, round: int) -> None:
            while round > upto:
                await moved.wait()

        swarm.hold = hold
        peers = [swarm.start(name) for name in ("a", "b", "c")]
        await swarm.until(
            lambda: all(
                p.rounds and p.rounds.member.phase is Phase.TRAINING and p.rounds.member.applied == 2 for p in peers
            )
        )
        *stay, leaver = peers
        before, all_before = feedback(leaver), total(*map(feedback, peers))
        await swarm.stop("c")
        after, all_after = feedback(leaver), total(*map(feedback, peers))
        assert norm(after) < 0.7 * norm(before)
        for shard, arrays in all_before.items():
            for x, y in zip(arrays, all_after[shard], strict=True):
                np.testing.assert_allclose(x, y, atol=1e-6 * float(np.abs(x).max()))
        assert all(norm(feedback(p)) > 0 for p in stay)


async def test_to_ask_again_ends_the_waiting_for_heirs_that_do_not_answer(tmp_path: Path) -> None:
    async with Swarm(tmp_path, manifest(rounds=9, start_peers=2)) as swarm:
        asked = asyncio.Event()

        async def hold(peer: str, round: int) -> None:
            if round > 2:
                await asyncio.Event().wait()

        async def keep_waiting(stream: Stream) -> None:
            await stream.recv()
            asked.set()
            await asyncio.Event().wait()

        swarm.hold = hold
        leaver, heir = swarm.start("a"), swarm.start("b")
        await swarm.until(
            lambda: (
                all(p.rounds and p.rounds.member.phase is Phase.TRAINING for p in (leaver, heir))
                and leaver.rounds.member.applied == 2
            )
        )
        await heir.transport.serve(endpoints.HANDOVER, keep_waiting)
        before = feedback(leaver)
        leaver.task.cancel()
        await asked.wait()
        assert not leaver.task.done()
        assert [e.fields["seconds"] for e in leaver.events if e.kind == "leaving"] == [LEAVE_SECONDS]
        heir.task.cancel()  # it leaves, too, and its own heir takes nothing any more
        await asyncio.gather(heir.task, return_exceptions=True)
        assert not leaver.task.done(), "two who leave do not wait for each other"
        began = time.monotonic()
        await swarm.stop("a")
        assert time.monotonic() - began < LEAVE_SECONDS
        there = leaver.storage.load_handovers()
        assert there, "what nobody took is on disk"
        assert norm(before) > 0


class Stuck(InnerLoop):
    """Does three inner steps, and waits in the fourth for a member of its chain that never answers."""

    def __init__(self) -> None:
        self.waits = asyncio.Event()

    async def train(self, order: Any, theta: Any, stop: Any, end: Any, progress: Any, chain_orders: Any) -> Any:
        for step in (1, 2, 3):
            progress(step, 1.0)
        self.waits.set()
        await asyncio.Event().wait()


@pytest.mark.virtual
async def test_an_inner_step_that_does_not_end_is_given_up_and_those_before_it_are_kept() -> None:
    loop = asyncio.get_running_loop()
    inner_loop = Stuck()
    training = Training(RUN, "me", inner_loop, lambda body: None, lambda event: None, Clock(steady=loop.time))
    training.begin(TrainOrder(PLAN, 0), {}, ahead=False, commits={})
    await inner_loop.waits.wait()
    await training.end()
    assert loop.time() == END_SECONDS
    assert training.result(PLAN.round).steps == 3
