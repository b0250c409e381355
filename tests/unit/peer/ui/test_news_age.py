"""How old what a watcher sees is, and that it is connected again: without processes."""

from __future__ import annotations

import asyncio
import dataclasses
import io

import pytest
from rich.console import Console

from peer.net import compression
from peer.net.base import Clock, Transport, serve_calls
from peer.net.memory import MemoryNetwork
from peer.ui import metrics, views
from peer.ui.monitor import Monitor
from peer.ui.monitor_screen import Browsing, MonitorScreen, draw
from peer.ui.run_view import SILENT_SECONDS, RunView
from peer.ui.state import state
from peer.ui.text import clock as time_of_day
from protocol.errors import RemoteError
from protocol.identity import Identity
from protocol.wire import encoding, endpoints, framing
from protocol.wire.announcement import Announcement
from protocol.wire.session import LogRequest
from tests.support import tiny
from tests.support.monitor import MANIFEST, WATCHER, commits, records
from tests.support.watched import BEGAN, MadeUp

NOW = BEGAN + 1000.0
OLD = 43.0


class Time:
    """Clocks that are set."""

    def __init__(self) -> None:
        self.steady, self.wall = 0.0, 1_700_000_000.0

    @property
    def clock(self) -> Clock:
        return Clock(lambda: self.steady, lambda: self.wall)


def run_of(age: float | None) -> RunView:
    watched = RunView(MadeUp(5).manifest)
    for event in MadeUp(5).all(20):
        watched.feed(event)
    watched.news_age = age
    return watched


def figures(watched: RunView) -> dict[str, float]:
    lines = metrics.exposition(state(watched, NOW)).splitlines()
    return {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def frame(watched: RunView, view: str, width: int = 120, height: int = 40) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, height=height, legacy_windows=False)
    console.print(draw(watched, Browsing(view=view), width, height, me=MadeUp(5).ids[0]))
    return out.getvalue()


# --- what is shown


def test_the_metrics_say_how_old_they_are_and_nothing_of_what_is_now() -> None:
    known, old = figures(run_of(0.5)), figures(run_of(OLD))
    assert (known["potluck_news_age_seconds"], old["potluck_news_age_seconds"]) == (0.5, OLD)
    of_now = {
        f"potluck_{name}" for name in ("peers_here", "peers", "reachable_peers", "operators_here", "tokens_per_second")
    }
    assert set(known) - set(old) == of_now
    assert old["potluck_round"] == known["potluck_round"]


@pytest.mark.parametrize("view", ["run", "chains", "rounds", "credits", "health", "me"])
@pytest.mark.parametrize("width", [80, 120])
def test_every_view_says_that_there_is_no_news(view: str, width: int) -> None:
    assert "no news" not in frame(run_of(SILENT_SECONDS), view, width)
    assert "no news for 43 s" in frame(run_of(OLD), view, width)


def test_nothing_old_is_shown_as_if_it_were_so_now() -> None:
    at = time_of_day(NOW - OLD)
    old = state(run_of(OLD), NOW)
    assert (old.heard, old.news_age_seconds, old.silent, old.seconds_left) == (NOW - OLD, OLD, True, None)
    assert state(run_of(1.0), NOW).seconds_left is not None
    first = frame(run_of(OLD), "run")
    assert " left" not in first.splitlines()[0]
    assert "5 there 43 s ago" in first
    health = "\n".join(str(row[1]) for row in views.sheet("health", old).rows)
    assert f"no bootstrap node has answered for 43 s; what follows is of {at}" in health
    assert f"1 of 1 bootstrap node there at {at}; a round" in health
    assert "✓" not in str(views.sheet("health", old).rows[1][0])
    mine = str(views.mine(old, run_of(OLD).credits, MadeUp(5).ids[0]).rows[0][0])
    assert mine.startswith(f"your peer was a full replica at {at}: ")


def test_a_recording_and_a_run_that_is_over_have_no_age() -> None:
    found = state(run_of(None), NOW)
    assert (found.heard, found.news_age_seconds, found.silent) == (None, None, False)
    assert "potluck_news_age_seconds" not in figures(run_of(None))


def test_the_terminal_counts_the_seconds_of_silence_though_nothing_happens() -> None:
    age = [0.0]
    screen = MonitorScreen(
        MadeUp(5).manifest, Console(file=io.StringIO(), width=80, height=24), news_age=lambda: age[0]
    )
    assert screen.has_news()
    assert not screen.has_news()
    before = screen.version()
    age[0] = OLD
    assert screen.version() != before, "a page is made anew"
    assert screen.has_news()
    assert screen.has_news()
    age[0] = 0.1
    assert screen.has_news(), "that it is over is shown too"
    assert not screen.has_news()
    assert screen.version() == before


# --- what is heard


class Node:
    """An operator's node that serves a log, and may be away. `asked`: how often."""

    def __init__(self, network: MemoryNetwork, key: Identity) -> None:
        self.transport = network.transport(key.peer_id)
        self.key = key
        self.log = records(commits())[:1]
        self.away = False
        self.asked = 0

    async def start(self) -> None:
        async def answer(remote: str, request: bytes) -> bytes:
            self.asked += 1
            if self.away:
                await asyncio.Event().wait()
            ask = encoding.expect(LogRequest, encoding.decode(request, remote), remote)
            return compression.pack(framing.pack_message(self.log[ask.after + 1 :]), compression.PLAIN)

        await serve_calls(self.transport, endpoints.LOG, answer)


async def test_the_news_are_as_old_as_the_last_answer_also_after_a_sleep_of_the_machine() -> None:
    network, time = MemoryNetwork(), Time()
    node = Node(network, tiny.OPERATOR)
    await node.start()
    monitor = Monitor(MANIFEST, network.transport(WATCHER), bootstrap=node.transport.addresses, clock=time.clock)
    time.steady, time.wall = 7.0, time.wall + 7.0
    assert monitor.news_age == 7.0
    await monitor.poll(lambda event: None)
    assert monitor.news_age == 0.0
    time.wall += 3600.0  # the steady clock of a machine that sleeps stands still
    assert monitor.news_age == 3600.0
    time.wall -= 9999.0  # it was set
    time.steady += 2.0
    assert monitor.news_age == 2.0
    node.log = records(commits())
    await monitor.poll(lambda event: None)
    assert monitor.finished
    assert monitor.news_age is None


@pytest.mark.slow
async def test_a_node_that_answers_nothing_does_not_keep_the_others_from_being_heard() -> None:
    keys = tiny.OPERATORS[:4]
    manifest = dataclasses.replace(tiny.manifest(), operators=tuple(key.peer_id for key in keys), quorum=4)

    network = MemoryNetwork()
    nodes = [Node(network, key) for key in keys]
    for node in nodes:
        node.log = []
        await node.start()
    places = tuple(address for node in nodes for address in node.transport.addresses)
    monitor = Monitor(manifest, network.transport(WATCHER), bootstrap=places)
    nodes[0].away = True
    for _ in range(9):
        await monitor.poll(lambda event: None)
    assert nodes[0].asked == 1, "it is not waited for again"
    assert all(node.asked > 1 for node in nodes[1:]), "each is heard in turn"


async def test_a_node_that_came_back_elsewhere_is_found_by_what_it_announces() -> None:
    """By those who began with its old address, too: peers and watchers."""
    network = MemoryNetwork()
    node = Node(network, tiny.OPERATOR)
    await node.start()
    other = network.transport("other")
    old = f"/ip4/192.0.2.1/tcp/1/p2p/{tiny.OPERATOR.peer_id}"
    moved = Moved(network.transport(WATCHER), old)
    said = Announcement(run=MANIFEST.run_id, peer=tiny.OPERATOR.peer_id, addresses=node.transport.addresses, serial=1)
    raw = encoding.seal(tiny.OPERATOR, said)
    key = endpoints.announcements_key(MANIFEST.run_id)
    assert await other.store(key, tiny.OPERATOR.peer_id, raw, ttl=60.0)
    monitor = Monitor(MANIFEST, moved, bootstrap=(old,))
    await monitor.poll(lambda event: None)
    assert monitor.head is not None


class Moved:
    """A transport that reaches no peer at the address `old`."""

    def __init__(self, transport: Transport, old: str) -> None:
        self._transport, self._old = transport, old

    def __getattr__(self, name: str) -> object:
        return getattr(self._transport, name)

    async def connect(self, addresses: list[str], *, timeout: float) -> None:
        if not set(addresses) - {self._old}:
            raise RemoteError("", "nobody is there")
        await self._transport.connect(addresses, timeout=timeout)
