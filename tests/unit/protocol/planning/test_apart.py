"""Peers that cannot be neighbours in a chain: how that is found out, told, forgotten, and planned around."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import random
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from peer.chain.connect import APART_SECONDS, REMEMBERED, Patience, PipelineStreams, UnreachablePeers
from peer.chain.frames import NeighbourLost
from peer.net.memory import MemoryNetwork
from protocol.errors import RemoteError
from protocol.planning import memory
from protocol.planning.arrange import arrange
from protocol.planning.objective import OWN, PUNCH_SUCCESS, RELAY_DETOUR, Swarm, padded
from protocol.planning.partition import Candidate, candidate
from protocol.wire.announcement import MOST_APART, Announcement
from protocol.wire.plan import Plan, ReplicaSpec, StageSpec
from protocol.wire.schema import SchemaError, build, plain
from tests.support import networks, plans

PLAN = Plan(
    round=4,
    replicas=(ReplicaSpec(stages=tuple(StageSpec(peer=p, first=i, last=i + 1) for i, p in enumerate("ab"))),),
)


class Told:
    """What an `UnreachablePeers` announced and warned of; its loop's clock can be turned."""

    def __init__(self) -> None:
        self.announced: list[tuple[str, ...]] = []
        self.warnings: list[str] = []
        self.apart = UnreachablePeers(lambda apart: self.announced.append(apart), self.warnings.append)


def run(story: Callable[[Told, Callable[[float], Awaitable[None]]], Awaitable[Any]]) -> Told:
    """`story(told, later)`: `later(seconds)` lets the loop's clock go on."""
    told = Told()

    async def main() -> None:
        loop, real = asyncio.get_running_loop(), asyncio.get_running_loop().time
        passed = [0.0]
        loop.time = lambda: real() + passed[0]  # type: ignore[method-assign]

        async def later(seconds: float) -> None:
            passed[0] += seconds
            for _ in range(3):
                await asyncio.sleep(0)

        await story(told, later)

    asyncio.run(main())
    return told


def test_the_second_failure_in_a_row_is_believed_and_told_once() -> None:
    async def story(told: Told, later: Any) -> None:
        told.apart.failed("b", "nobody is there")
        assert told.announced == []
        told.apart.reached("b")
        told.apart.failed("b", "nobody is there")
        assert told.announced == [], "it was reached in between"
        told.apart.failed("b", "no relay leads to it")
        told.apart.failed("b", "no relay leads to it")

    told = run(story)
    assert told.announced == [("b",)]
    (warning,) = told.warnings
    assert "no relay leads to it" in warning


def test_it_is_tried_again_later_and_left_alone_for_longer_each_time() -> None:
    async def story(told: Told, later: Any) -> None:
        for _ in range(2):
            told.apart.failed("b", "x")
        await later(APART_SECONDS + 1)
        assert told.announced[-1] == ()
        told.apart.failed("b", "x")
        assert told.announced[-1] == ("b",), "one failure is enough now"
        await later(APART_SECONDS + 1)
        assert told.announced[-1] == ("b",)
        await later(APART_SECONDS + 1)
        assert told.announced[-1] == ()
        told.apart.reached("b")
        told.apart.failed("b", "x")
        assert told.announced[-1] == (), "it is as new"

    assert len(run(story).warnings) == 1


def test_what_is_remembered_and_announced_is_bounded() -> None:
    async def story(told: Told, later: Any) -> None:
        for number, _ in itertools.product(range(2 * REMEMBERED), range(2)):
            told.apart.failed(f"peer-{number}", "x")
        assert len(told.apart.peers) == MOST_APART
        assert told.apart.peers[-1] == f"peer-{2 * REMEMBERED - 1}", "the newest are known"
        told.apart.close()
        assert told.apart.peers == ()

    told = run(story)
    assert max(map(len, told.announced)) == MOST_APART
    with pytest.raises(SchemaError, match="at most 16"):
        build(Announcement, plain(Announcement(run="r", peer="p", apart=("x",) * (MOST_APART + 1))))


def test_a_neighbour_that_cannot_be_dialled_is_announced() -> None:
    async def main() -> list[tuple[str, ...]]:
        told, network = Told(), MemoryNetwork()
        transport = network.transport("a")

        async def reach(peer: str) -> None:
            raise RemoteError(peer, "no relay leads to it")

        patience = Patience(dial=0.01)
        pipes = PipelineStreams(networks.network(transport, reach), patience=patience, unreachable=told.apart)
        for round in (4, 5):
            with pytest.raises(NeighbourLost):
                await pipes.neighbours(dataclasses.replace(PLAN, round=round), 0, 0, 0)
        told.apart.close()
        await transport.aclose()
        return told.announced

    assert asyncio.run(main()) == [("b",)]


# --- the plan


def _pool(rng: random.Random, **fields: Any) -> tuple[Any, list[Candidate]]:
    """A model of five blocks, and peers each of which holds two or three of them."""
    manifest = plans.small_manifest(rng)
    size = int(0.7 * memory.stage_memory(manifest, 0, manifest.model.n_layers))
    some = Candidate(
        peer="", memory_bytes=size, up_bps=10**8, down_bps=10**8, speed_flops=10**12, coordinates=(0.0,), **fields
    )
    return manifest, [dataclasses.replace(some, peer=p) for p in "abcdef"]


@pytest.mark.parametrize("seed", range(5))
def test_peers_that_are_apart_are_never_neighbours(seed: int) -> None:
    rng = random.Random(seed)
    manifest, peers = _pool(rng)
    pairs = [tuple(pair) for pair in rng.sample(list(itertools.combinations("abcdef", 2)), 5)]
    told = [dataclasses.replace(c, apart=tuple(y for x, y in pairs if x == c.peer)) for c in peers]
    replicas, _ = arrange(manifest, told)
    assert replicas, "five pairs leave enough others"
    for replica in replicas:
        for x, y in itertools.pairwise(replica.members):
            assert (x, y) not in pairs
            assert (y, x) not in pairs


def test_a_chain_whose_neighbours_found_out_that_they_are_apart_is_given_up() -> None:
    manifest, peers = _pool(random.Random(0))
    before, _ = arrange(manifest, peers)
    a, b = before[0].members[:2]
    told = [dataclasses.replace(c, apart=(b,)) if c.peer == a else c for c in peers]
    after, _ = arrange(manifest, told, before)
    assert after
    assert all({a, b} not in map(set, itertools.pairwise(r.members)) for r in after)
    nobody = [dataclasses.replace(c, apart=tuple("abcdef")) for c in peers]
    assert arrange(manifest, nobody, before) == ((), tuple("abcdef"))


def test_private_neighbours_cost_a_detour_and_share_what_relays_pass_on() -> None:
    manifest, peers = _pool(random.Random(0), reachable="private")
    open_peers = [dataclasses.replace(c, reachable="direct") for c in peers]
    peers, open_peers = (
        [dataclasses.replace(c, coordinates=(20.0 * i,)) for i, c in enumerate(some)] for some in (peers, open_peers)
    )
    row = padded([range(3)])
    straight, around = Swarm(manifest, open_peers), Swarm(manifest, peers)
    assert around.latencies(row) == pytest.approx(RELAY_DETOUR * straight.latencies(row))
    bits, kinds = np.array([1e6, 2e6]), straight.kinds(row)
    assert np.array_equal(straight.boundaries(row, kinds, bits), around.boundaries(row, kinds, bits)), "no limit"
    limited = Swarm(manifest, peers, relay_bps=3e6)
    there, back = limited.boundaries(row, kinds, bits)
    assert there == pytest.approx(np.full((1, 2), 3.0)), "six private peers: three pairs share 3 Mb/s"
    assert back == pytest.approx(there)
    blocks = np.array([[2, 2, 1]])
    rate = {relay: Swarm(manifest, peers, relay).terms(row, blocks)[0][0, OWN] for relay in (0.0, 1e4, 1e12)}
    assert rate[1e4] < rate[1e12]
    direct = Swarm(manifest, open_peers).terms(row, blocks)[0][0, OWN]
    assert rate[0.0] == pytest.approx(PUNCH_SUCCESS**2 * direct), "without relays a hole has to be punched"


def test_private_peers_stand_beside_others_where_there_are_any() -> None:
    manifest, peers = _pool(random.Random(0))
    some = [dataclasses.replace(c, reachable="private", coordinates=(30.0,)) if c.peer in "abc" else c for c in peers]
    some = [dataclasses.replace(c, coordinates=(30.0,)) for c in some]
    replicas, _ = arrange(manifest, some, relay_bps=1e6)
    assert replicas
    private = [{x, y} <= set("abc") for r in replicas for x, y in itertools.pairwise(r.members)]
    assert not any(private)


def test_what_a_peer_says_reaches_the_plan() -> None:
    said = Announcement(run="r", peer="a", apart=("b", "nobody"))
    assert candidate(said).apart == ("b", "nobody")
