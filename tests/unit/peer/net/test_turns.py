"""A peer that asks a lot waits for itself; one that asks once has the next turn."""

from __future__ import annotations

import asyncio

from peer.net.guests import Turns
from peer.net.rate_limits import Rate

HOME, FARM = "203.0.113.5/32", "198.51.100.7/32"


def test_while_there_is_enough_nobody_waits_and_an_address_has_no_more_than_its_share() -> None:
    turns = Turns(Rate(10.0, 5.0), Rate(100.0, 50.0))
    assert [turns.at_once("a", HOME, 0.0) for _ in range(6)] == [True] * 5 + [False]
    assert not turns.at_once("b", HOME, 0.0), "another name at the same address"
    assert turns.at_once("c", FARM, 0.0)
    assert turns.at_once("a", HOME, 0.2)


def test_all_together_have_no_more_than_there_is() -> None:
    turns = Turns(Rate(10.0, 5.0), Rate(100.0, 7.0))
    assert sum(turns.at_once(f"p{i}", f"address {i}", 0.0) for i in range(20)) == 7


def test_an_amount_may_be_more_than_is_left_and_is_waited_for_afterwards() -> None:
    turns = Turns(Rate(10.0, 5.0), Rate(100.0, 50.0))
    assert turns.at_once("a", HOME, 0.0, 8.0)
    assert not turns.at_once("a", HOME, 0.2)
    assert turns.at_once("a", HOME, 0.4)


async def test_who_asks_once_comes_before_the_hundredth_question_of_another_address_and_of_another_peer() -> None:
    turns, order = Turns(Rate(1000.0, 1.0), Rate(1000.0, 1.0)), list[str]()
    for number in range(100):
        turns.in_line("greedy", HOME, lambda number=number: order.append(f"greedy {number}"))  # type: ignore[misc]
    turns.in_line("neighbour", HOME, lambda: order.append("neighbour"))
    turns.in_line("far", FARM, lambda: order.append("far"))
    assert turns.waiting == 102
    while turns.waiting:
        await asyncio.sleep(0)
    assert len(order) == 102
    assert order.index("far") <= 2
    assert order.index("neighbour") <= 4
    assert [name for name in order if name.startswith("greedy")] == [f"greedy {i}" for i in range(100)]


async def test_whoever_gives_up_waiting_holds_up_nobody() -> None:
    turns = Turns(Rate(20.0, 1.0), Rate(20.0, 1.0))
    assert turns.at_once("a", HOME, asyncio.get_running_loop().time())
    waiting = [asyncio.create_task(turns.take("a", HOME)) for _ in range(5)]
    await asyncio.sleep(0)
    waiting[2].cancel()
    done = await asyncio.gather(*waiting, return_exceptions=True)
    assert [result is None for result in done] == [True, True, False, True, True]
    assert turns.waiting == 0
