"""A peer that asks a lot waits for itself; one that asks once has the next turn."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from peer.net.base import Timeout, Traffic
from peer.net.guests import CALL_BYTES, CALLS, PASSED_TURN_BYTES, TURN_BYTES, Guests, StreamTurns, Turns
from peer.net.rate_limits import Rate
from peer.net.stream import Flow, FrameStream
from protocol.wire import framing

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


class Home:
    """One peer's turns, and a stream that takes them. `say` puts a frame on it."""

    def __init__(self, turns: Turns, name: str = "x") -> None:
        loop = asyncio.get_running_loop()
        self.reader = asyncio.StreamReader(loop=loop)
        unused: Any = None
        self.stream = FrameStream("a", name, self.reader, unused, lambda: None, Traffic(), Flow())
        self.stream.turns = StreamTurns(turns, "a", HOME)

    def say(self, size: int) -> None:
        self.reader.feed_data(framing.pack(bytes(size)))


async def test_a_long_message_takes_turns_by_its_bytes_before_it_is_read() -> None:
    """What two short ones wait for, or one long one, is the same."""
    turns = Turns(Rate(1.0, 10.0), Rate(1000.0, 1000.0))
    here, then = Home(turns), asyncio.get_running_loop().time()
    here.say(20 * TURN_BYTES)
    assert len(await here.stream.recv(timeout=1.0)) == 20 * TURN_BYTES, "as long as one is left it begins"
    assert not turns.at_once("b", HOME, then + 9.0), "another name at the same address"
    assert turns.at_once("b", FARM, then)
    here.say(1)
    with pytest.raises(Timeout):
        await here.stream.recv(timeout=0.01)


async def test_a_message_whose_turn_is_not_waited_for_comes_the_next_time() -> None:
    turns = Turns(Rate(50.0, 1.0), Rate(1000.0, 1000.0))
    here = Home(turns)
    for size in (5 * TURN_BYTES, 3 * TURN_BYTES, 2):
        here.say(size)
    came = list[int]()
    async with asyncio.timeout(20.0):
        while len(came) < 3:
            with contextlib.suppress(Timeout):
                came.append(len(await here.stream.recv(timeout=0.005)))
    assert came == [5 * TURN_BYTES, 3 * TURN_BYTES, 2]


async def test_a_long_answer_takes_turns_of_the_next_request() -> None:
    turns = Turns(Rate(1.0, 10.0), Rate(1000.0, 1000.0))
    mine, now = StreamTurns(turns, "a", HOME), asyncio.get_running_loop().time()
    mine.answered(PASSED_TURN_BYTES - 1)
    assert turns.at_once("a", HOME, now), "short ones cost nothing"
    mine.answered(20 * PASSED_TURN_BYTES)
    assert not turns.at_once("a", HOME, now + 5.0)
    assert turns.at_once("a", HOME, now + 15.0)


def test_a_long_request_of_the_dht_counts_as_many() -> None:
    guests = Guests()
    assert sum(guests.may_call("a", 0.0, 10 * CALL_BYTES) for _ in range(100)) == CALLS.burst // 10
    assert sum(guests.may_call("b", 0.0, 100) for _ in range(500)) == CALLS.burst
    assert not guests.may_call("c", 0.0, int(2 * CALLS.burst * CALL_BYTES))
