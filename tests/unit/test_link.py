"""A boundary's queues hold senders back, and its clocks tell latency and transfer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from peer.chain import link
from peer.chain.link import Head, Link
from tests.chains import DEADLINE_S, Wired


def _with_link(work: Callable[[Link, Any], Any], queue: int = 4) -> Any:
    """Runs `work` with P1's link to P0 and P0's end of the stream."""

    async def main() -> Any:
        async with asyncio.timeout(DEADLINE_S), Wired(2) as wired, asyncio.TaskGroup() as group:

            def decode(kind: int, body: memoryview) -> Any:
                return asyncio.get_running_loop().create_future()

            here = Link(
                wired.previous[1], group, asyncio.Event(), decode, queue=queue, limit=1 << 20, timeout=DEADLINE_S
            )
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
                await other.send(Head(link.FORWARD).pack(), bytes(1 << 18))
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

    async def measure(here: Link, other: Any) -> tuple[float, float]:
        here._delays.extend((offset + latency + 0.004, offset + latency))
        arrivals = (0.3, 0.6, 0.9, 2.3)  # three were handed over at once, the last when the link had been idle
        here._times = [
            (sent, offset + latency + arrival) for sent, arrival in zip((0, 0, 0.1, 2), arrivals, strict=True)
        ]
        return here.measured()

    for offset in (-1e5, 0.0, 1e5):
        delay, seconds = _with_link(measure)
        assert delay == pytest.approx(offset + latency, abs=1e-6)
        assert seconds == pytest.approx(transfer, abs=1e-6)


def test_a_ping_is_echoed_and_both_sides_learn_the_way() -> None:
    async def ping(here: Link, other: Any) -> Head:
        await other.send(Head(link.PING, stamp=1.0).pack())
        head = Head(link.BEAT)
        while head.kind == link.BEAT:  # on a busy machine
            head, body = link.parse("P1", memoryview(await other.recv()))
        assert not body
        assert len(here._delays) == 1
        assert not here.ready, "it is no frame to wait for"
        return head

    head = _with_link(ping)
    assert head.kind == link.ECHO
    assert head.stamp > 0


@pytest.mark.parametrize("pings", [True, False])
def test_a_neighbour_far_away_may_be_silent_for_longer(pings: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A TCP time-out is several round trips, and nothing comes meanwhile."""
    monkeypatch.setattr(link, "BEAT_S", 0.05)
    monkeypatch.setattr(link, "SILENT_S", 0.1)

    async def silence(here: Link, other: Any) -> str:
        if pings:  # it is told
            await other.send(Head(link.PING, check=500_000).pack())
        else:  # it finds out
            here.ping()
            while Head(*link._HEAD.unpack_from(await other.recv())).kind != link.PING:
                pass
            here._pinged -= 0.5
            await other.send(Head(link.ECHO).pack())
        while here.failed is None:
            here._arrived.clear()
            await here._arrived.wait()
        return here.failed.reason

    told = _with_link(silence)
    assert 0.5 * link.TRIPS < float(told.split()[-2]) < link.LONGEST_SILENT_S


def test_the_neighbour_learns_the_round_trip_with_the_next_ping() -> None:
    async def pings(here: Link, other: Any) -> list[int]:
        found = []
        for _ in range(2):
            here.ping()
            while (head := Head(*link._HEAD.unpack_from(await other.recv()))).kind != link.PING:
                pass
            found.append(head.check)
            await other.send(Head(link.ECHO).pack())
            while here._trip == 0.0:
                await asyncio.sleep(0)
        return found

    first, second = _with_link(pings)
    assert first == 0
    assert 0 < second < DEADLINE_S * 1e6
