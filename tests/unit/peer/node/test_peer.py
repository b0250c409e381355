"""A peer as a whole: what its parts tell is what it announces."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from peer import events
from peer.node.training import Result
from protocol.wire import encoding
from protocol.wire.announcement import Announcement, ChainReport, Lookup, Means, Roster
from protocol.wire.schema import extend
from tests.support.volunteers import Noise, Swarm, manifest

STEP = events.Chain(
    round=1,
    step=3,
    seconds=2.5,
    busy_s=1.5,
    wait_forward_s=0.25,
    wait_backward_s=0.5,
    forward_link_s=0.06,
    backward_link_s=0.125,
    forward_bytes=1000,
    backward_bytes=2000,
    depth=4,
    queued=1,
    seconds_per_microbatch=0.5,
    gradients=Means(rms=0.5, largest=3.0, sampled=2, frames=8, refused=1),
)


class Telling(Noise):
    """Tells of an inner step in a chain in round 1, and from then on of none."""

    def __init__(self, emit: events.Emit, *rest: Any) -> None:
        super().__init__(*rest)
        self.emit = emit

    async def train(self, order: Any, *rest: Any) -> Result:
        if order.plan.round == 1:
            self.emit(STEP)
        return await super().train(order, *rest)


@pytest.mark.slow
async def test_a_member_of_a_chain_announces_what_it_measured(tmp_path: Path) -> None:
    """As long as it is in one: a full replica has nothing to tell."""
    async with Swarm(tmp_path, manifest(start_peers=1, rounds=4)) as swarm:
        let, never = asyncio.Event(), asyncio.Event()

        async def hold(peer: str, round: int) -> None:
            if round == 1:
                await let.wait()
            if round == 3:  # the run goes on until the announcement has been read
                await never.wait()

        def announced() -> Announcement | None:
            answer = encoding.decode(swarm.machine.roster.answer(Lookup(peers=(peer.id,))), "node")
            assert isinstance(answer, Roster)
            sealed_ones = answer.announcements
            return encoding.unseal_announcement(sealed_ones[0], peer.id, swarm.manifest.run_id) if sealed_ones else None

        def telling(manifest: Any, peer: str, *rest: Any) -> Noise:
            return Telling(rest[-1], hold, manifest, peer)

        swarm.inner_loop = telling
        peer = swarm.start("a")
        await swarm.until(lambda: (said := announced()) is not None and said.chain is not None)
        said = announced()
        assert said.chain == extend(ChainReport, STEP)
        let.set()
        await swarm.until(lambda: (said := announced()) is not None and said.chain is None and said.round > 1)
