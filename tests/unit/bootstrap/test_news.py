"""What is offered is told in batches: messages grow with the sessions and the time, not with payloads times peers."""

from __future__ import annotations

import asyncio
import contextlib
import random

from bootstrap.sessions import MAX_SHARES, OFFER_PAUSE_SECONDS, OfferAnnouncer
from protocol.wire import encoding
from protocol.wire.commit import Share
from protocol.wire.session import Offered
from tests.sim.loop import VirtualLoop


def share(index: int) -> Share:
    return Share(peer=f"p{index % 3}", root=f"{index:064}", size=8, norm=1.0, listed=60)


def told(sessions: int, arrivals: list[tuple[float, int]], until: float) -> list[tuple[float, Offered]]:
    """(when, what) was told; `arrivals`: (seconds, how many shares)."""
    out: list[tuple[float, Offered]] = []
    loop = VirtualLoop(random.Random(0))

    async def work() -> None:
        news = OfferAnnouncer(lambda message: out.append((loop.time(), message)), lambda: sessions)
        task = asyncio.create_task(news.run())
        count = 0
        for when, many in arrivals:
            await asyncio.sleep(when - loop.time())
            for _ in range(many):
                news.add(1 + count % 2, share(count))
                count += 1
        await asyncio.sleep(until - loop.time())
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    loop.run_until_complete(work())
    loop.close()
    return out


def roots(message: Offered) -> list[str]:
    return [share.root for share in message.shares]


def test_the_first_is_told_at_once_and_what_comes_meanwhile_together() -> None:
    out = told(100, [(1.0, 1), (1.1, 5), (1.2, 6)], until=10.0)
    assert [round(when, 6) for when, _ in out] == [1.0, 1.5, 2.0]
    assert len(roots(out[0][1])) == 1
    assert sorted(d for _, m in out for d in roots(m)) == [share(i).root for i in range(12)]
    assert {m.round for _, m in out[1:]} == {1, 2}


def test_telling_takes_the_same_share_of_time_at_any_size() -> None:
    for sessions in (10, 1000):
        arrivals = [(0.01 * i, 20) for i in range(1000)]
        out = told(sessions, arrivals, until=1000.0)
        assert sum(len(roots(m)) for _, m in out) == 20_000
        busy = [when for when, _ in out if when < 10.0]
        assert len(busy) * sessions * OFFER_PAUSE_SECONDS <= 10.0 + 2 * sessions * OFFER_PAUSE_SECONDS


def test_a_message_never_gets_too_long() -> None:
    out = told(1, [(0.0, 3 * MAX_SHARES)], until=10.0)
    assert max(len(roots(m)) for _, m in out) <= MAX_SHARES
    assert sum(len(roots(m)) for _, m in out) == 3 * MAX_SHARES
    assert all(encoding.decode(encoding.encode(m), "node") == m for _, m in out)
