"""Watchers of a run of real processes while its nodes die, stop, move or lose their line: the terminal, the page and
the metrics.

Before a node is back all three say for how long there is no news; when it is back all three show the newest round. How
many seconds that takes is printed (`pytest -s`), and no bound is set here: this machine may be busy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from peer import events
from protocol.run.manifest import Manifest, TimingSpec
from tests.e2e import swarms
from tests.faults.homes import Homes, homes
from tests.faults.processes import DEADLINE, Swarm
from tests.support import tiny
from tests.support.lab import Place
from tests.support.watching import Watching, watching

NODE, PEER, WATCHER = "node-0", "peer-0", "watcher"
NEWEST_SECONDS = 3.0
"""Seconds for which a round counts as the newest: a monitor asks once a second, and rounds may be as short."""


def make_manifest(nodes: int) -> Manifest:
    chosen = swarms.options(Path("unused"), full=1, rounds=10**4, inner_steps=2)
    return dataclasses.replace(
        swarms.manifest(chosen, train={"rows": 1, "sequence": 16}),
        data=swarms.text(16),
        start_peers=1,
        operators=tuple(key.peer_id for key in tiny.OPERATORS[:nodes]),
        quorum=nodes,
        timing=TimingSpec(round_deadline=60.0, round_seconds=2.0, heartbeat=0.5, gone_after=10.0),
    )


@dataclass(frozen=True)
class Watched:
    """A run and its three watchers, which are one process: it has a terminal, a page and metrics."""

    swarm: Swarm
    monitor: Watching

    def state(self) -> dict[str, Any]:
        return dict(json.loads(self.monitor.get("state.json")))

    def metric(self, name: str) -> float | None:
        found = re.search(rf"^{name}{{.*?}} (\S+)$", self.monitor.get("metrics").decode(), re.MULTILINE)
        return None if found is None else float(found[1])

    def screen(self) -> tuple[int, int, bool]:
        """The round on the terminal; the positions in the output of it and of the last warning; whether it is later."""
        drawn = bytes(self.monitor.drawn).decode(errors="replace")
        rounds = list(re.finditer(r"round ([\d,]+) of", drawn))
        newest = rounds[-1] if rounds else None
        silence = drawn.rfind("no news for")
        at = newest.start() if newest is not None else 0
        return (0 if newest is None else int(newest[1].replace(",", "")), silence, silence > at)

    def until(self, wanted: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + DEADLINE
        while not wanted():
            assert time.monotonic() < end, what
            assert self.monitor.process.poll() is None, self.monitor.drawn[-2000:]
            time.sleep(0.5)  # neither a terminal nor a page has another sign of news

    def decided(self) -> int:
        """The newest round that any node has decided, as their events say."""
        told = (e.body for name in self.swarm.nodes for e in self.swarm.events(name))
        return max(body.round for body in told if isinstance(body, events.Commit))

    def silent(self, seconds: float = 6.0) -> None:
        """Waits until all three say that there has been no news for so long, and nothing of what is only known now."""
        self.until(lambda: (self.state()["news_age_seconds"] or 0.0) >= seconds, "the silence on the page")
        state = self.state()
        assert state["silent"]
        assert state["seconds_left"] is None
        assert state["heard"] < state["time"] - seconds + 1.0
        self.until(lambda: (self.metric("potluck_news_age_seconds") or 0.0) >= seconds, "the silence in the metrics")
        assert self.metric("potluck_peers_here") is None
        assert self.metric("potluck_operators_here") is None
        self.until(lambda: self.screen()[2], "the silence on the terminal")

    def shows(self, what: str, since: float, beyond: int) -> None:
        """Waits until all three show the newest round, and a round after `beyond`."""
        took: dict[str, float] = {}
        decided: list[tuple[float, int]] = []

        def passed() -> float:
            return time.monotonic() - since

        def is_newest(round: float) -> bool:
            return round > beyond and round >= max(
                r for at, r in decided if at <= max(decided[0][0], passed() - NEWEST_SECONDS)
            )

        def all_do() -> bool:
            decided.append((passed(), self.decided()))
            if decided[-1][1] > beyond:
                took.setdefault("decided", passed())
            state = self.state()
            if not state["silent"] and is_newest(state["round"]):
                took.setdefault("page", passed())
            age, shown = self.metric("potluck_news_age_seconds"), self.metric("potluck_round")
            if (age or 0.0) < 5.0 and is_newest(shown or 0):
                took.setdefault("metrics", passed())
            round, _, is_silent = self.screen()
            if not is_silent and is_newest(round):
                took.setdefault("terminal", passed())
            return len(took) == 4

        self.until(all_do, f"{what}: the newest round everywhere, {took}")
        print(f"\n{what}: " + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in sorted(took.items())))


@contextlib.contextmanager
def watched(
    folder: Path, nodes: int = 1, places: dict[str, Place] | None = None, prefix: Sequence[object] = ()
) -> Iterator[Watched]:
    manifest = make_manifest(nodes)
    with Swarm(folder, manifest, tiny.OPERATORS[:nodes], places=places, module="tests.faults.paced") as swarm:
        swarm.start_all(PEER)
        swarm.committed(NODE, 1)
        with watching(swarm.addresses[0], "--metrics", "0", prefix=prefix) as monitor:
            found = Watched(swarm, monitor)
            found.until(lambda: found.state()["round"] > 1, "the first round on the page")
            yield found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """On one machine."""
    with watched(tmp_path_factory.mktemp("watched") / "run") as found:
        yield found


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Homes, Watched]]:
    """Each in a home of its own."""
    folder = tmp_path_factory.mktemp("apart") / "run"
    with (
        homes(NODE, PEER, WATCHER) as there,
        watched(folder, places=there.places, prefix=there.places[WATCHER][1]) as found,
    ):
        yield there, found


def test_a_node_is_killed_and_started_again(run: Watched) -> None:
    run.swarm.kill(NODE)
    run.silent()
    before, began = run.decided(), time.monotonic()
    told = len(run.swarm.events(NODE))
    run.swarm.start(NODE)
    run.swarm.wait(NODE, lambda e: e.kind == "listening", "its start", told)
    print(f"\nthe node took {time.monotonic() - began:.1f} s to start")
    since = time.monotonic()
    run.shows("killed and started again, what it had decided", since, before - 1)
    run.shows("killed and started again, another round", since, before)


@pytest.mark.slow
def test_a_node_is_stopped(run: Watched) -> None:
    process = psutil.Process(run.swarm.running[NODE].pid)
    all_of = [process, *process.children(recursive=True)]
    for each in all_of:
        each.send_signal(signal.SIGSTOP)
    run.silent(30.0)
    before = run.decided()
    for each in all_of:
        each.send_signal(signal.SIGCONT)
    since = time.monotonic()
    run.shows("stopped", since, before - 1)
    run.shows("stopped, another round", since, before)


@pytest.mark.slow
@pytest.mark.parametrize("home", [NODE, WATCHER])
@pytest.mark.parametrize("what", ["cut", "moved"])
def test_a_node_or_its_watcher_loses_the_line_or_the_address(
    apart: tuple[Homes, Watched], what: str, home: str
) -> None:
    there, run = apart
    if what == "cut":
        there.unplug(home)
        run.silent(60.0)
        there.plug_in(home)
    else:
        there.move(home)
    before, since = run.decided(), time.monotonic()
    run.shows(f"{home} {what}, two rounds more", since, before + 1)


@pytest.mark.slow
def test_one_of_four_nodes_is_gone_for_good(tmp_path: Path) -> None:
    """It is the one by whose address the watcher came."""
    with watched(tmp_path / "run", nodes=4) as run:
        run.swarm.kill(NODE)
        before, since = run.decided(), time.monotonic()
        run.shows("one of four gone for good, two rounds more", since, before + 2)
