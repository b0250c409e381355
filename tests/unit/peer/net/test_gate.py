"""Places for fetches: no owner keeps one by promising. In virtual time."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from peer.net.blobs.fetching import STALLED_SECONDS, TURN_SECONDS, Gate

pytestmark = pytest.mark.virtual


def now() -> float:
    return asyncio.get_running_loop().time()


class Fetches:
    """Fetches through a gate; `begun` counts the turns of each."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.begun: dict[str, int] = {}
        self.ended: dict[str, float] = {}
        self.came = 0

    def start(self, owner: str, name: str, seconds: float, moves: bool = True) -> asyncio.Task[None]:
        """One that takes so long in all; bytes come all the time, or never."""
        done = 0.0

        async def work() -> None:
            nonlocal done
            self.begun[name] = self.begun.get(name, 0) + 1
            while done < seconds:
                await asyncio.sleep(0.5)
                done += 0.5

        async def whole() -> None:
            await self.gate.run(owner, work, lambda: int(2 * done) if moves else 0)
            self.ended[name] = now()

        return asyncio.create_task(whole())


async def test_promises_give_way_to_whoever_waits() -> None:
    fetches = Fetches(Gate(places=4, of_an_owner=4))
    liars = [fetches.start("liar", f"promise {i}", 1e9, moves=False) for i in range(8)]
    await asyncio.sleep(1.0)
    began = now()
    await fetches.start("honest", "payload", 1.0)
    assert fetches.ended["payload"] - began <= STALLED_SECONDS + 4.0
    for liar in liars:
        liar.cancel()
    await asyncio.gather(*liars, return_exceptions=True)
    assert fetches.gate.waiting == 0
    await fetches.start("honest", "another", 1.0)


async def test_who_waits_for_its_turn_on_a_busy_line_is_not_begun_again() -> None:
    """Forty small blobs of ten owners, one after the other, each in half a second: none shows anything until it is
    there."""
    gate, line, begun = Gate(places=8, of_an_owner=4), asyncio.Lock(), Counter[int]()
    most = 0

    async def fetch(number: int) -> None:
        async def work() -> None:
            nonlocal most
            begun[number] += 1
            most = max(most, sum(begun.values()) - done)
            async with line:
                await asyncio.sleep(0.5)

        nonlocal done
        await gate.run(f"owner {number % 10}", work, lambda: 0)
        done += 1

    done, began = 0, now()
    await asyncio.gather(*map(fetch, range(40)))
    assert set(begun.values()) == {1}
    assert now() - began == pytest.approx(20.0)
    assert 8 < most <= 40, "others begin beside them"


async def test_one_owner_never_has_all_places() -> None:
    fetches = Fetches(Gate(places=8, of_an_owner=2))
    slow = [fetches.start("slow", f"slow {i}", 100.0) for i in range(20)]
    await asyncio.sleep(1.0)
    began = now()
    await fetches.start("honest", "payload", 1.0)
    assert fetches.ended["payload"] - began <= 1.5, "at once"
    assert len(fetches.begun) == 3
    for one in slow:
        one.cancel()
    await asyncio.gather(*slow, return_exceptions=True)


async def test_who_is_slow_gives_way_now_and_then_and_goes_on_where_it_was() -> None:
    fetches = Fetches(Gate(places=2, of_an_owner=2))
    slow = [fetches.start("slow", f"slow {i}", 3 * TURN_SECONDS) for i in range(2)]
    await asyncio.sleep(1.0)
    began = now()
    await fetches.start("honest", "payload", 1.0)
    assert fetches.ended["payload"] - began <= TURN_SECONDS + 3.0
    await asyncio.gather(*slow)
    assert max(fetches.begun[f"slow {i}"] for i in range(2)) == 2
    assert max(fetches.ended.values()) - began < 4 * TURN_SECONDS, "nothing is done twice"


async def test_without_anybody_waiting_nobody_gives_way() -> None:
    fetches = Fetches(Gate(places=2, of_an_owner=2))
    await asyncio.gather(*(fetches.start("a", f"{i}", 10 * TURN_SECONDS) for i in range(2)))
    assert set(fetches.begun.values()) == {1}


async def test_owners_take_turns() -> None:
    fetches = Fetches(Gate(places=2, of_an_owner=2))
    many = [fetches.start("many", f"many {i}", 5.0) for i in range(10)]
    await asyncio.sleep(0.1)
    few = [fetches.start(f"few {i}", f"few {i}", 5.0) for i in range(2)]
    await asyncio.gather(*few)
    assert sum(name.startswith("many") for name in fetches.ended) <= 4
    await asyncio.gather(*many)


async def test_what_fails_and_what_is_cancelled_leave_their_places() -> None:
    gate = Gate(places=1, of_an_owner=1)

    async def fails() -> None:
        raise KeyError("x")

    async def hangs() -> None:
        await asyncio.Event().wait()

    failed = await asyncio.gather(gate.run("a", fails, lambda: 0), return_exceptions=True)
    assert isinstance(failed[0], KeyError)
    first, second = (asyncio.create_task(gate.run("a", hangs, lambda: 0)) for _ in range(2))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    second.cancel()
    first.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    done = asyncio.Event()

    async def ends() -> None:
        done.set()

    await gate.run("b", ends, lambda: 0)
    assert done.is_set()
