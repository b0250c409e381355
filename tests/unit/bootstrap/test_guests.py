"""Limits of incoming streams: a greedy peer waits, then is refused, and keeps no other out."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bootstrap.node import EventQueue
from peer.events import Refused
from peer.net.guests import OPENED, Guests, Limits, network_of
from peer.net.rate_limits import Rate
from protocol.wire import endpoints

HOME, FARM = "/ip4/203.0.113.5/tcp/1", "/ip4/198.51.100.7/tcp/1"


class Line:
    """A stream, as far as guests know one."""

    def __init__(self) -> None:
        self.ended = False

    def abort(self) -> None:
        self.ended = True


class House:
    """Guests, and what is told of them."""

    def __init__(self, **limits: Any) -> None:
        self.guests = Guests(Limits(**{"of_a_peer": 4, "of_an_address": 8, "together": 10, **limits}))
        self.told: list[Refused] = []
        self.expelled: list[str] = []
        self.guests.follow(self.told.append)
        self.guests.expel = self.expelled.append

    def enter(self, peer: str, where: str = "", name: str = "x", now: float = 0.0) -> Line | None:
        line = Line()
        return line if self.guests.enter(peer, where, name, line, now) else None


def test_a_peer_has_so_many_streams_and_no_more() -> None:
    house = House()
    lines = [house.enter("a") for _ in range(5)]
    assert [line is not None for line in lines] == [True] * 4 + [False]
    assert (house.guests.of("a"), house.guests.streams) == (4, 4)
    assert lines[0] is not None
    house.guests.leave("a", lines[0])
    assert house.enter("a") is not None
    assert house.told == [], "one too many is no offence yet"


def test_so_has_an_address_whatever_names_its_peers_have() -> None:
    house = House()
    assert sum(house.enter(f"p{i}", FARM) is not None for i in range(12)) == 8
    assert house.enter("b", HOME) is not None


def test_whoever_goes_on_is_refused_and_the_operator_hears_why() -> None:
    house = House(offences=Rate(1.0, 10.0), seconds=60.0)
    lines = [house.enter("a", HOME) for _ in range(4)]
    for _ in range(11):
        assert house.enter("a", HOME) is None
    assert house.told == [
        Refused(peer="a", address="203.0.113.5/32", reason="has 4 streams open and opens more", seconds=60.0)
    ]
    assert all(line is not None and line.ended for line in lines)
    assert "a" in house.expelled
    for line in lines:
        assert line is not None
        house.guests.leave("a", line)
    assert house.enter("a", now=59.0) is None
    assert house.enter("a", now=61.0) is not None
    assert len(house.told) == 1


def test_whoever_opens_far_more_than_its_rate_is_refused_before_it_has_all_streams() -> None:
    house = House(of_a_peer=256, of_an_address=1000, together=1000)
    rate, patience = OPENED[endpoints.SESSION], house.guests.limits.patience
    opened = 0
    while not house.told:
        assert house.enter("a", HOME, endpoints.SESSION) is not None
        house.guests.wait("a", endpoints.SESSION, 0.0)
        opened += 1
    assert house.told[0].reason == f"opens {endpoints.SESSION} again and again"
    assert opened == rate.burst + patience * rate.per_second + house.guests.limits.offences.burst + 1
    assert opened < 64
    assert house.enter("b", HOME, endpoints.SESSION) is not None, "whoever shares its address is not"


def test_whoever_says_nothing_has_fewer_streams() -> None:
    house = House(of_a_peer=256, of_an_address=1000, together=1000, silent=8, offences=Rate(1.0, 4.0))
    lines = []
    for _ in range(8):
        lines.append(house.enter("a", HOME))
        assert house.guests.may_be_silent("a", "x", lines[-1], 0.0)
    house.guests.speaks("a", lines[0])
    house.guests.leave("a", lines[1])
    for _ in range(2):
        lines.append(house.enter("a", HOME))
        assert house.guests.may_be_silent("a", "x", lines[-1], 0.0), "one has said something, and one is over"
    while not house.told:
        late = house.enter("a", HOME)
        assert not house.guests.may_be_silent("a", "x", late, 0.0)
        house.guests.leave("a", late)
    assert house.told[0].reason == "has 8 streams open and says nothing"
    assert len(lines) == 10


def test_whoever_shares_an_address_with_many_waits_and_is_not_refused() -> None:
    house = House(of_a_peer=256, of_an_address=10_000, together=10_000, rates_of_an_address=1.0)
    for number in range(100):
        assert house.enter(f"p{number}", HOME, endpoints.SESSION) is not None
        wait = house.guests.wait(f"p{number}", endpoints.SESSION, 0.0)
    assert wait > house.guests.limits.patience
    assert house.told == []


def test_when_all_is_taken_the_greediest_gives_one_up() -> None:
    house = House(of_an_address=100)
    greedy = [house.enter(name) for name in ("a", "b") for _ in range(4)]
    others = [house.enter(name) for name in ("c", "d")]
    assert all(others)
    late = house.enter("e")
    assert late is not None
    assert [line is not None and line.ended for line in greedy].count(True) == 1
    assert not any(line is not None and line.ended for line in others)


def test_when_all_have_one_nobody_gives_it_up() -> None:
    house = House(together=3)
    assert all(house.enter(name) for name in ("a", "b", "c"))
    assert house.enter("d") is None


def test_streams_that_a_relay_brings_are_not_the_relays() -> None:
    house = House(offences=Rate(1.0, 2.0))
    house.guests.relays = lambda: {"relay"}
    assert all(house.enter("relay", name=endpoints.RELAYED) for _ in range(8))
    assert house.told == []
    for _ in range(8):
        house.enter("stranger", name=endpoints.RELAYED)
    assert [refused.peer for refused in house.told] == ["stranger"], "from whom is no relay they are as any others"


def test_who_comes_back_is_refused_for_longer_each_time_and_forgiven_slowly() -> None:
    house = House(seconds=60.0, longest_seconds=200.0, forgiven_seconds=1000.0)
    now = 0.0
    for seconds in (60.0, 120.0, 200.0, 200.0):
        house.guests.refuse("a", "x", now)
        assert house.told[-1].seconds == seconds
        assert house.enter("a", now=now + seconds - 1) is None
        now += seconds
        line = house.enter("a", now=now)
        assert line is not None
        house.guests.leave("a", line)
    house.guests.refuse("a", "x", now + 2500.0)
    assert house.told[-1].seconds == 200.0, "two of four are forgiven, and two are 240 s"
    house.guests.refuse("a", "x", now + 10_000.0)
    assert house.told[-1].seconds == 60.0


def test_whoever_opens_quickly_waits_each_stream_longer() -> None:
    house = House(of_a_peer=10_000, together=10_000)
    rate = OPENED[endpoints.PIPE]
    waits = []
    for _ in range(int(rate.burst) + 20):
        house.enter("a", name=endpoints.PIPE)
        waits.append(house.guests.wait("a", endpoints.PIPE, 0.0))
    assert waits[: int(rate.burst)] == [0.0] * int(rate.burst)
    assert waits[-1] == pytest.approx(20 / rate.per_second)
    house.enter("b")
    assert house.guests.wait("b", endpoints.PIPE, 0.0) == 0.0


def test_peers_of_one_address_wait_together() -> None:
    house = House(of_a_peer=10_000, of_an_address=10**6, together=10**6, rates_of_an_address=2.0)
    burst = int(OPENED[endpoints.SESSION].burst)
    waits = []
    for i in range(3 * burst):
        house.enter(f"p{i}", FARM)
        waits.append(house.guests.wait(f"p{i}", endpoints.SESSION, 0.0))
    assert waits[: 2 * burst] == [0.0] * 2 * burst
    assert waits[-1] > 0


def test_what_is_remembered_is_bounded() -> None:
    house = House(together=10**6, of_an_address=10**6, remembered=16)
    for i in range(1000):
        line = house.enter(f"p{i}", HOME)
        assert line is not None
        house.guests.wait(f"p{i}", "x", 0.0)
        house.guests.offend(f"p{i}", "x", 0.0)
        house.guests.may_call(f"p{i}", 0.0)
        house.guests.refuse(f"p{i}", "x", 0.0)
        house.guests.leave(f"p{i}", line)
    assert house.guests.remembered <= 7 * 16


@pytest.mark.parametrize(
    ("where", "network"),
    [
        (HOME, "203.0.113.5/32"),
        ("/ip6/2001:db8:1:2:3:4:5:6/tcp/1", "2001:db8:1:2::/64"),
        ("/memory/x", ""),
        ("", ""),
        ("/dns4/example.org/tcp/1", ""),
    ],
)
def test_a_home_is_one_address(where: str, network: str) -> None:
    assert network_of(where) == network


# --- what waits for a node's loop


async def test_whoever_hands_in_waits_until_it_was_dealt_with_and_hears_what_it_raised() -> None:
    queue = EventQueue[str](patience=60.0)
    handing = asyncio.create_task(queue.submit("good"))
    entry = await queue.get()
    assert (entry.event, handing.done()) == ("good", False)
    entry.finish()
    await handing
    handing = asyncio.create_task(queue.submit("bad"))
    (await queue.get()).finish(KeyError("bad"))
    with pytest.raises(KeyError, match="bad"):
        await handing


async def test_nobody_waits_for_ever_for_a_loop_that_is_busy() -> None:
    queue = EventQueue[str](patience=0.01)
    await queue.submit("late")
    queue.put("own")
    entries = [await queue.get(), await queue.get()]
    assert [entry.event for entry in entries] == ["late", "own"]
    for entry in entries:
        entry.finish(KeyError("nobody hears of it"))
