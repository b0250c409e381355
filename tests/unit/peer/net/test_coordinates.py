"""Places of peers: what measurements make of them, what a liar can do, and what a plan gets of them."""

from __future__ import annotations

import asyncio
import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.net.base import Clock, Stream
from peer.net.latency import PINGS, PROBE_SECONDS, TOLD_MS, Latency
from peer.net.memory import MemoryNetwork, Pipe
from protocol.errors import RemoteError
from protocol.planning import coordinates, partition
from protocol.planning.coordinates import MOST_STEP, Place
from protocol.wire import endpoints, framing
from protocol.wire.announcement import AXES, FARTHEST, Announcement
from tests.support import tiny

CITIES = {"a": (0.0, 0.0), "b": (12.0, 0.0), "c": (10.0, 8.0), "d": (80.0, 5.0), "e": (85.0, 20.0), "f": (150.0, 60.0)}
"""One-way milliseconds."""


def off(places: dict[str, tuple[float, ...]]) -> float:
    """The median share by which distances between CITIES are off."""
    pairs = [(a, b) for a in CITIES for b in CITIES if a < b]
    return statistics.median(
        abs(coordinates.distance(places[a], places[b]) / math.dist(CITIES[a], CITIES[b]) - 1) for a, b in pairs
    )


def test_places_come_to_be_as_far_apart_as_the_latencies_say() -> None:
    draw = random.Random(1)
    places = {name: Place(at=tuple(draw.gauss(0, 1) for _ in range(AXES))) for name in CITIES}
    for _ in range(60):
        for name in CITIES:
            other = draw.choice([c for c in CITIES if c != name])
            measured = math.dist(CITIES[name], CITIES[other]) * draw.uniform(1.0, 1.1)
            places[name] = coordinates.moved(places[name], places[other], measured)
    assert off({name: place.at for name, place in places.items()}) < 0.15
    assert all(place.error < 0.3 for place in places.values())


@given(
    st.lists(st.floats(-FARTHEST, FARTHEST), min_size=AXES, max_size=AXES),
    st.floats(0, 1),
    st.floats(0, 1e12),
    st.floats(0, 1),
)
def test_whatever_somebody_says_moves_us_by_one_step_at_most(
    at: list[float], error: float, latency: float, own: float
) -> None:
    before = Place(at=(3.0, 2.0, 1.0), error=own)
    after = coordinates.moved(before, Place(at=tuple(at), error=error), latency)
    assert coordinates.distance(before.at, after.at) <= MOST_STEP * (1 + 1e-9)
    assert coordinates.moved(before, before, latency).at == before.at


@pytest.mark.parametrize("at", [(), (1.0, 2.0), (0.0, 0.0, math.nan), (0.0, 0.0, 2 * FARTHEST)])
def test_a_place_that_nobody_can_have_is_refused(at: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="entries"):
        Place(at=at)
    if at:
        with pytest.raises(ValueError, match="coordinates"):
            Announcement(run="r", peer="p", coordinates=at)


def test_a_plan_knows_the_place_that_a_peer_announces() -> None:
    said = Announcement(run="r", peer="p", memory_bytes=1, coordinates=(1.0, 2.0, 3.0))
    assert partition.candidate(said).coordinates == (1.0, 2.0, 3.0)


# --- over a network


class FarPipe(Pipe):
    """What is written arrives `seconds` later."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        super().__init__(loop)
        self._loop, self._seconds = loop, seconds

    def carry(self, data: bytes) -> None:
        self._loop.call_later(self._seconds, self.reader.feed_data, data)

    def end(self) -> None:
        self._loop.call_later(self._seconds + 1e-6, self.reader.feed_eof)  # behind what was written


class FarNetwork(MemoryNetwork):
    """As far as CITIES are."""

    def pipe(self, loop: asyncio.AbstractEventLoop, sender: str, receiver: str, name: str) -> Pipe:
        return FarPipe(loop, math.dist(CITIES[sender], CITIES[receiver]) / 1000)


@pytest.mark.virtual
async def test_peers_find_their_places_and_tell_them_when_they_have_moved() -> None:
    network, told = FarNetwork(), dict[str, list[tuple[float, ...]]]()
    found = {}
    for name in CITIES:
        seen = told.setdefault(name, [])
        transport = network.transport(name)
        found[name] = Latency(
            transport, Clock(steady=asyncio.get_running_loop().time), seen.append, random.Random(name)
        )
        await found[name].serve()
    runs = [
        asyncio.create_task(found[name].run(lambda name=name: [c for c in CITIES if c != name]))  # type: ignore[misc]
        for name in CITIES
    ]
    await asyncio.sleep(80 * PROBE_SECONDS)
    for run in runs:
        run.cancel()
    await asyncio.gather(*runs, return_exceptions=True)
    assert off({name: told[name][-1] for name in CITIES}) < 0.15
    for name in CITIES:
        assert len(told[name]) < 40, "what hardly changes is not told again"
        assert coordinates.distance(told[name][-1], found[name].place.at) <= TOLD_MS + 0.2


@pytest.mark.parametrize(
    "answer",
    [b"", b"\xc1", framing.pack_message([0.0, 0.0, 0.0]), framing.pack_message([float("inf"), 0.0, 0.0, 0.5]),
     framing.pack_message([1e9, 0.0, 0.0, 0.5]), framing.pack_message([0.0, 0.0, 0.0, -1.0]), framing.pack_message({})],
)  # fmt: skip
async def test_who_answers_nonsense_moves_nobody(answer: bytes) -> None:
    network = MemoryNetwork()
    liar, honest = network.transport("liar"), network.transport("honest")

    async def lie(stream: Stream) -> None:
        for _ in range(PINGS):
            await stream.recv()
            await stream.send(answer)

    await liar.serve(endpoints.PING, lie)
    latency = Latency(honest, Clock(), lambda at: None, random.Random(0))
    before = latency.place
    with pytest.raises(RemoteError, match="nowhere"):
        await latency.probe("liar")
    assert latency.place == before
    for transport in (liar, honest):
        await transport.aclose()


async def test_who_asks_again_and_again_on_one_stream_is_not_answered_for_ever() -> None:
    network = MemoryNetwork()
    one, other = network.transport(tiny.OPERATOR.peer_id), network.transport("asks")
    await Latency(one, Clock(), lambda at: None, random.Random(0)).serve()
    stream = await other.open(one.peer_id, endpoints.PING, timeout=1.0)
    for _ in range(PINGS):
        await stream.send(b"")
        await stream.recv(timeout=60.0)
    await stream.finish()
    with pytest.raises(RemoteError):
        await stream.recv(timeout=60.0)
    for transport in (one, other):
        await transport.aclose()
