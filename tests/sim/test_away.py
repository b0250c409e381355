"""Four bootstrap nodes, of which one after the other is cut off without a word while it is fetching payloads, as when
its address changes.

The three others decide: their rounds go on. What they may lose is the time until they ask another peer for what they
asked the lost one for; each of them finds out for itself that it is silent.
"""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from peer.net.blobs.fetching import OVERDUE_SECONDS
from protocol.wire import endpoints
from tests.sim import paces
from tests.sim.paces import Machine, PacedSwarm
from tests.sim.world import Process
from tests.support import tiny

SECONDS = 10.0
"""Of a round."""
WARM, AWAY = 2, 2
"""Rounds before anything happens, and those in which a node is away."""
SLACK = 1.0
"""Seconds that messages and disks may take besides."""


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.campaign) for seed in range(2, 6))])
def test_three_of_four_nodes_do_not_wait_for_the_fourth(seed: int) -> None:
    made = paces.manifest(SECONDS, 2)
    operators = tuple(operator.peer_id for operator in tiny.OPERATORS[:4])
    manifest = dataclasses.replace(made, operators=operators, quorum=4)
    swarm = PacedSwarm([Machine(0.5), Machine(0.5)], manifest, seed)
    away: dict[int, Process] = {}

    async def asks(node: Process) -> None:
        """Until it asks for a payload."""
        sent = node.transport.traffic.sent
        before = sent[endpoints.BLOB]
        while sent[endpoints.BLOB] == before:
            await asyncio.sleep(0.001)

    async def script(swarm: PacedSwarm) -> None:
        for node in swarm.nodes[1:]:
            last = (await swarm.round(swarm.commits[-1].round + WARM if swarm.commits else WARM)).round
            await asks(node)
            swarm.world.isolate(node.name)
            for round in range(last + 1, last + 1 + AWAY):
                away[round] = node
                await swarm.round(round)
            assert len(node.running.archive.commits) <= last + 1, "it hears of none of these rounds"
            swarm.world.isolate()

    swarm.run(script)
    durations = swarm.durations()
    usual = max(
        durations[round] for round in range(WARM, max(away), WARM + AWAY)
    )  # all are there, and have been for a round
    assert len(away) == 3 * AWAY
    most = usual + OVERDUE_SECONDS + SLACK
    assert not {r: durations[r] for r in away if durations[r] > most}
    assert not [c for c in swarm.commits if c.round in away and c.left_out]
