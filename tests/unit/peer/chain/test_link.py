"""A boundary's queues hold senders back, and its clocks tell latency and transfer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from peer.chain import frames, link
from peer.chain.frames import Head
from peer.chain.link import LIVENESS, Link, LinkClock, Liveness
from tests.support.chains import DEADLINE_S, Wired


def _with_link(work: Callable[[Link, Any], Any], queue: int = 4, liveness: Liveness = LIVENESS) -> Any:
    """Runs `work` with P1's link to P0 and P0's end of the stream."""

    async def main() -> Any:
        async with asyncio.timeout(DEADLINE_S), Wired(2) as wired, asyncio.TaskGroup() as group:

            def decode(kind: int, body: memoryview) -> Any:
                return asyncio.get_running_loop().create_future()

            here = Link(
                wired.previous[1], group, asyncio.Event(), decode,
                queue=queue, limit=1 << 20, timeout=DEADLINE_S, liveness=liveness,
            )  # fmt: skip
            result = await work(here, wired.following[0])
            await here.stop()
            return result

    return asyncio.run(main())


def test_a_flood_is_held_back() -> None:
    async def flood(here: Link, other: Any) -> tuple[int, int]:
        sent = 0

        async def send() -> None:
            nonlocal sent
            while True:
                await other.send(Head(frames.FORWARD).pack(), bytes(1 << 18))
                sent += 1

        sending = asyncio.create_task(send())
        before = -1
        while sent != before:
            before = sent
            for _ in range(500):
                await asyncio.sleep(0)
        sending.cancel()
        return sent, here.most_waiting

    sent, waiting = _with_link(flood, queue=3)
    assert waiting == 3
    assert 3 <= sent <= 12, "what the stream itself buffers, and the queue"


def test_latency_and_transfer_are_told_from_waiting_whatever_the_clocks_say() -> None:
    latency, transfer = 0.025, 0.3

    for offset in (-1e5, 0.0, 1e5):
        clock = LinkClock(most_trip=10.0)
        for late in (0.004, 0.0):
            clock.small(0.0, offset + latency + late)
        arrivals = (0.3, 0.6, 0.9, 2.3)  # three were handed over at once, the last when the link had been idle
        for sent, arrival in zip((0, 0, 0.1, 2), arrivals, strict=True):
            clock.frame(sent, offset + latency + arrival)
        delay, seconds = clock.measured()
        assert clock.measured() == (0.0, 0.0), "the next step begins"
        assert delay == pytest.approx(offset + latency, abs=1e-6)
        assert seconds == pytest.approx(transfer, abs=1e-6)


def test_a_ping_that_waited_for_its_reader_does_not_make_the_way_longer() -> None:
    clock = LinkClock(most_trip=10.0)
    clock.small(0.0, 1.5)
    for sent in (2.0, 3.0):
        clock.frame(sent, sent + 0.06)
    assert clock.measured() == (pytest.approx(0.06), pytest.approx(0.0, abs=1e-9))


def test_a_ping_is_echoed_and_both_sides_learn_the_way() -> None:
    async def ping(here: Link, other: Any) -> Head:
        await other.send(Head(frames.PING, stamp=1.0).pack())
        head = Head(frames.BEAT)
        while head.kind == frames.BEAT:  # on a busy machine
            head, body = frames.parse("P1", memoryview(await other.recv()))
        assert not body
        assert not here.ready, "it is no frame to wait for"
        here.clock.frame(1.0, 2.0)
        assert here.clock.measured()[0] != 0.0, "the way is known"
        return head

    head = _with_link(ping)
    assert head.kind == frames.ECHO
    assert head.stamp > 0


@pytest.mark.parametrize("pings", [True, False])
def test_a_neighbour_far_away_may_be_silent_for_longer(pings: bool) -> None:
    """A TCP time-out is several round trips, and nothing comes meanwhile."""

    async def silence(here: Link, other: Any) -> str:
        if pings:  # it is told
            await other.send(Head(frames.PING, check=500_000).pack())
        else:  # it finds out
            here.ping()
            while Head.unpack(await other.recv()).kind != frames.PING:
                pass
            here.clock.pinged(time.perf_counter() - 0.5)
            await other.send(Head(frames.ECHO).pack())
        while here.failed is None:
            await asyncio.sleep(0.01)
        return here.failed.reason

    told = _with_link(silence, liveness=Liveness(beat_s=0.05, silent_s=0.1))
    assert 0.5 * link.TRIPS < float(told.split()[-2]) < LIVENESS.longest_s


def test_the_neighbour_learns_the_round_trip_with_the_next_ping() -> None:
    async def pings(here: Link, other: Any) -> list[int]:
        found = []
        for _ in range(2):
            here.ping()
            while (head := Head.unpack(await other.recv())).kind != frames.PING:
                pass
            found.append(head.check)
            await other.send(Head(frames.ECHO).pack())
            while here.clock.trip == 0.0:
                await asyncio.sleep(0)
        return found

    first, second = _with_link(pings)
    assert first == 0
    assert 0 < second < DEADLINE_S * 1e6
