"""Machines of different paces and lines train in one run and wait for none: calm weather, virtual time."""

from __future__ import annotations

import asyncio
import random
import statistics

import pytest

from protocol.round.stragglers import GRACE_SHARE
from protocol.run.layout import ModelSpec
from tests.sim import paces
from tests.sim.paces import Machine, PacedSwarm

SECONDS = 30.0
"""Of a round."""
ALONE = (0.5, 1.0, 2.0, 4.0, 1.0, 2.0)
CHAINS = ((1.0, 1.0, 1.0), (4.0, 4.0, 4.0))
WARM = 2
"""Rounds until everybody's pace is known."""


def machines() -> list[Machine]:
    return [Machine(pace) for pace in ALONE] + [Machine(pace, whole=False) for chain in CHAINS for pace in chain]


@pytest.mark.parametrize(("overlap", "least"), [(0, 0.9), (1, 0.96)])
def test_nine_tenths_of_what_machines_of_paces_1_to_8_can_train_reach_commits(overlap: int, least: float) -> None:
    manifest = paces.manifest(SECONDS, len(machines()), overlap=overlap)
    # A first plan knows no paces, so that chains mix fast and slow machines; once they are measured they are parted.
    swarm = PacedSwarm(machines(), manifest, seed=0)

    async def script(swarm: PacedSwarm) -> None:
        await swarm.round(WARM + 4)

    swarm.run(script)
    possible = paces.possible(manifest, [[pace] for pace in ALONE] + [list(chain) for chain in CHAINS])
    assert swarm.rate(WARM, WARM + 4) >= least * possible
    assert not any(commit.left_out for commit in swarm.commits)
    tokens = swarm.commits[-1].tokens
    assert max(tokens.values()) >= 7 * min(tokens.values()), "each does what it can"


def test_peers_that_change_their_pace_threefold_cost_little() -> None:
    """Three tenths of them, one after the other, each in the middle of a round."""
    manifest = paces.manifest(SECONDS, len(ALONE))
    swarm, draw = PacedSwarm([Machine(pace) for pace in ALONE], manifest), random.Random(0)
    could: list[float] = []

    async def script(swarm: PacedSwarm) -> None:
        await swarm.round(WARM)
        for number, machine in enumerate(draw.sample(swarm.machines, 2)):
            for round in range(3):
                could.append(paces.possible(manifest, [[m.pace] for m in swarm.machines]))
                if round == 1:
                    await asyncio.sleep(SECONDS / 2)
                    machine.pace *= (3.0, 1 / 3)[number]
                await swarm.round(swarm.commits[-1].round + 1)

    swarm.run(script)
    assert swarm.rate(WARM, WARM + len(could)) >= 0.8 * statistics.mean(could)


def test_a_newcomer_with_a_slow_line_costs_the_others_no_second() -> None:
    """It fetches the payloads since the beginning for some rounds; then it trains, and that is committed."""
    model = ModelSpec(vocab_size=512, d_model=64, n_layers=4, n_heads=2, d_ff=128, context=8)
    manifest = paces.manifest(SECONDS, len(ALONE), checkpoint_rounds=1, model=model)
    slow = Machine(1.0, down=8 * paces.state_bytes(manifest) / (90 * SECONDS))
    swarm = PacedSwarm([*map(Machine, ALONE), slow], manifest, seed=6)
    joined: list[int] = []

    async def script(swarm: PacedSwarm) -> None:
        await swarm.round(WARM)
        swarm.peers[-1].start()
        while len(swarm.commits[-1].tokens) == len(ALONE):
            await swarm.round(swarm.commits[-1].round + 1)
        joined.append(swarm.commits[-1].round)
        await swarm.round(joined[0] + 2)

    swarm.run(script, begin=len(ALONE))
    durations = swarm.durations()
    usual = statistics.median(durations[r] for r in range(1, WARM + 1))
    assert joined[0] > WARM + 1, "it took its time"
    assert max(durations[r] for r in range(WARM + 1, joined[0])) <= usual + 1.0, durations
    grace = (1 + GRACE_SHARE) * SECONDS + 5.0
    assert max(durations.values()) <= grace, "on its line payloads take seconds: it is waited for, but not long"
    others = set(range(len(ALONE)))
    assert all(others <= c.tokens.keys() for c in swarm.commits if c.round), "nobody else is left out, ever"
    assert sum(c.tokens.keys() > others for c in swarm.commits) >= 2, "its own work counts in most rounds"


def test_who_leaves_is_not_waited_for_and_what_others_trained_ahead_counts() -> None:
    manifest = paces.manifest(SECONDS, len(ALONE), overlap=1)
    swarm = PacedSwarm([Machine(pace) for pace in ALONE], manifest)

    async def script(swarm: PacedSwarm) -> None:
        await swarm.round(WARM)
        await asyncio.sleep(SECONDS / 2)
        gone = swarm.peers[0]
        gone.die("killed")
        await swarm.round(WARM + 4)

    swarm.run(script)
    left = [c for c in swarm.commits if c.left_out]
    assert len(left) == 1
    for commit in swarm.commits[WARM + 1 :]:
        assert len(commit.tokens) >= len(ALONE) - 1


def test_the_matchmaker_learns_where_peers_are_and_who_stays() -> None:
    manifest = paces.manifest(SECONDS, len(ALONE))
    swarm = PacedSwarm([Machine(pace) for pace in ALONE], manifest)

    async def script(swarm: PacedSwarm) -> None:
        await swarm.round(WARM)
        await asyncio.sleep(SECONDS / 2)
        swarm.peers[0].die("killed")
        await swarm.round(WARM + 2)
        swarm.peers[0].start()
        await swarm.round(WARM + 12)

    swarm.run(script)
    known = swarm.leading.leader.ready
    assert len(known) == len(ALONE)
    assert all(candidate.coordinates for candidate in known.values()), "their latencies were measured"
    left, *stayed = [known[peer.name].presence for peer in swarm.peers]
    assert left < 1.0
    assert stayed == [1.0] * len(stayed)
