"""Streams between a chain's neighbours: who waits is heard, and chains of other generations never meet."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from peer.chain.connect import MAX_EARLY_OF_A_PEER, MAX_EARLY_PIPES, PATIENCE, Patience, PipelineStreams
from peer.chain.frames import BEAT, Head, NeighbourLost
from peer.chain.link import Liveness
from peer.net.base import Closed, Stream
from peer.net.memory import MemoryNetwork, MemoryTransport
from peer.net.stream import SLICE, STRIPES, StripedStream
from protocol.wire import endpoints, framing
from protocol.wire.plan import Plan, ReplicaSpec, StageSpec
from tests.support import networks

NAMES = ("a", "b", "c")
PLAN = Plan(
    round=4,
    replicas=(ReplicaSpec(stages=tuple(StageSpec(peer=p, first=i, last=i + 1) for i, p in enumerate(NAMES))),),
)


@contextlib.asynccontextmanager
async def connected(
    limit: int | None = None, patience: Patience = PATIENCE
) -> AsyncIterator[tuple[dict[str, PipelineStreams], MemoryNetwork]]:
    """Everybody's pipes; they have applied round 3. `limit`: of each uplink, bits per second."""
    network = MemoryNetwork()
    made = {}
    for name in NAMES:
        transport = network.transport(name)

        async def reach(peer: str, here: Any = transport) -> None:
            await here.connect([f"/memory/p2p/{peer}"], timeout=1.0)

        ours = networks.network(transport, reach, limit=limit)
        made[name] = mine = PipelineStreams(ours, patience=patience, liveness=Liveness(beat_s=0.02))
        await transport.serve(endpoints.PIPE, lambda stream, mine=mine: mine.serve(stream, 3))
    try:
        yield made, network
    finally:
        for peer in list(network.peers.values()):
            await peer.aclose()


async def test_neighbours_find_each_other_whoever_comes_first() -> None:
    async with connected() as (made, _):
        late = asyncio.create_task(made["c"].neighbours(PLAN, 0, 0, 2))
        first, middle = await asyncio.gather(*(made[p].neighbours(PLAN, 0, 0, i) for i, p in enumerate("ab")))
        last = await late
        assert (first[0], last[1]) == (None, None)
        for here, there in ((first[1], middle[0]), (middle[1], last[0])):
            await here.send(b"frame")
            frame = await there.recv()
            while frame != b"frame":
                assert Head.unpack(frame).kind == BEAT
                frame = await there.recv()


async def test_both_neighbours_share_the_uplink() -> None:
    """In both directions: 200 KB to each of them at 1 MB/s."""
    async with connected(limit=8_000_000) as (made, _):
        first, middle, last = await asyncio.gather(*(made[p].neighbours(PLAN, 0, 0, i) for i, p in enumerate(NAMES)))
        began = asyncio.get_running_loop().time()

        async def take(stream: Any) -> None:
            while len(await stream.recv()) < 200_000:
                pass

        sends = [stream.send(bytes(200_000)) for stream in middle]
        await asyncio.gather(*sends, take(first[1]), take(last[0]))
        assert asyncio.get_running_loop().time() - began > 0.35


async def test_who_is_not_ready_gives_signs_of_life() -> None:
    async def kind(stream: Any) -> int:
        return Head.unpack(await stream.recv()).kind

    async with connected() as (made, network):
        stream = (await made["a"].neighbours(PLAN, 0, 0, 0))[1]  # b has not begun
        for _ in range(3):
            assert await kind(stream) == BEAT
        dialled = dict[int, Any]()

        async def serve(stream: Any) -> None:
            dialled[framing.unpack_message(await stream.recv())["stripe"]] = stream
            await asyncio.Event().wait()

        await network.peers["c"].serve(endpoints.PIPE, serve)
        waits = asyncio.create_task(made["b"].neighbours(PLAN, 0, 1, 1))  # b has, and waits for a
        while len(dialled) < STRIPES:
            await asyncio.sleep(0)
        assert await kind(StripedStream([dialled[i] for i in range(STRIPES)])) == BEAT
        waits.cancel()
        await asyncio.gather(waits, return_exceptions=True)


async def test_an_older_chain_is_refused_and_its_handlers_end() -> None:
    async def drain(stream: Any) -> None:
        while True:
            await stream.recv()

    async with connected() as (made, _):
        old = (await made["a"].neighbours(PLAN, 0, 0, 0))[1]
        made["b"].forget(4, 1)
        for stream in (old, (await made["a"].neighbours(PLAN, 0, 0, 0))[1]):
            with pytest.raises(Closed):
                await drain(stream)
        found = await asyncio.gather(*(made[p].neighbours(PLAN, 0, 1, i) for i, p in enumerate(NAMES)))
        assert [(a is None, b is None) for a, b in found] == [(True, False), (False, False), (False, True)]


async def test_who_cannot_be_reached_is_named_and_nothing_stays_open() -> None:
    two = ReplicaSpec(stages=PLAN.replicas[0].stages[:2])
    async with connected(patience=Patience(dial=0.1, reconfigured=0.2)) as (made, network):
        await network.peers["c"].aclose()
        with pytest.raises(NeighbourLost) as caught:
            await made["b"].neighbours(PLAN, 0, 1, 1)
        assert (caught.value.peer, caught.value.reason) == ("c", "did not answer for 0.1 s")
        with pytest.raises(NeighbourLost) as caught:
            await made["b"].neighbours(Plan(round=4, replicas=(two,)), 0, 2, 1)
        assert (caught.value.peer, caught.value.reason) == ("a", "did not dial for 0.2 s")


@pytest.mark.parametrize(
    "hello",
    [{}, {"round": 4, "replica": 0, "stripe": 0}, {"round": "4", "generation": 0, "replica": 0, "stripe": 0}, [4], None]
    + [{"round": r, "generation": 0, "replica": 0, "stripe": 0} for r in (3, 7, -1)]
    + [{"round": 4, "generation": 0, "replica": 0, "stripe": stripe} for stripe in (-1, STRIPES)],
)
async def test_other_beginnings_are_refused(hello: Any) -> None:
    async with connected() as (_, network):
        stream = await network.peers["a"].open("b", endpoints.PIPE, timeout=1.0)
        await stream.send(framing.pack_message(hello))
        with pytest.raises(Closed):
            await stream.recv()


async def test_a_dial_that_failed_halfway_does_not_stand_in_the_way_of_the_next() -> None:
    async with connected() as (made, network):
        halves = [await network.peers["a"].open("b", endpoints.PIPE, timeout=1.0) for _ in range(STRIPES - 1)]
        for stripe, half in enumerate(halves):
            await half.send(framing.pack_message({"round": 4, "generation": 0, "replica": 0, "stripe": stripe}))
        while made["b"].waiting < STRIPES - 1:
            await asyncio.sleep(0)
        found = await asyncio.gather(*(made[p].neighbours(PLAN, 0, 0, i) for i, p in enumerate(NAMES)))
        for half in halves:
            with pytest.raises(Closed):
                await half.recv()
        await found[0][1].send(bytes(STRIPES * SLICE))
        while len(frame := await found[1][0].recv()) != STRIPES * SLICE:
            assert Head.unpack(frame).kind == BEAT


async def test_waiting_pipes_are_bounded() -> None:
    async with connected() as (made, network):

        async def dial(peer: str, generation: int) -> Stream:
            stream = await network.peers[peer].open("b", endpoints.PIPE, timeout=1.0)
            hello = {"round": 4, "generation": generation, "replica": 7, "stripe": 0}
            await stream.send(framing.pack_message(hello))
            return stream

        kept = [await dial("a", number) for number in range(MAX_EARLY_OF_A_PEER)]
        with pytest.raises(Closed):
            await (await dial("a", MAX_EARLY_OF_A_PEER)).recv()
        for number in range(MAX_EARLY_PIPES - MAX_EARLY_OF_A_PEER):
            network.transport(f"stranger {number}")
            kept.append(await dial(f"stranger {number}", 1))
        network.transport("one too many")
        with pytest.raises(Closed):
            await (await dial("one too many", 1)).recv()
        assert made["b"].waiting == MAX_EARLY_PIPES
        found = await asyncio.gather(*(made[p].neighbours(PLAN, 0, 0, i) for i, p in enumerate(NAMES)))
        assert found[1][0] is not None, "strangers who took all places keep no neighbour out"


async def test_a_silent_neighbour_is_doubted_and_looked_for_anew() -> None:
    """It may have moved: the transport makes sure of its connection, and the next dial asks where it is."""
    lost, doubted = list[str](), list[str]()

    class Doubting(MemoryTransport):
        def doubt(self, peer: str) -> None:
            doubted.append(peer)

    transport = Doubting(MemoryNetwork(), "a", lambda key, subkey, value: True)

    PipelineStreams(networks.network(transport, lost=lost.append)).doubt("b")
    await transport.aclose()
    assert lost == doubted == ["b"]
