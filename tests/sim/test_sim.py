"""Five hundred lives of a swarm, each decided by its seed. A seed that fails is replayed with a trace by

python -m tests.sim.run --seed N
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.sim import ballots
from tests.sim.ballots import Council
from tests.sim.bugs import BUGS
from tests.sim.ledger import Violation
from tests.sim.run import Life, live, meet
from tests.sim.swarm import Swarm
from tests.sim.world import BOUNDARIES

SEEDS, LEAST, BATCH, PATIENCE = 500, 200, 50, 300.0
BUG_SEEDS = 200
COUNCILS = 500
FORK_SEEDS = 3000


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("forkserver")) as pool:
        yield pool


@pytest.fixture(scope="module")
def lives(pool: ProcessPoolExecutor) -> list[Life]:
    """All seeds, or as many as a slow machine does in PATIENCE seconds, but never fewer than LEAST."""
    found: list[Life] = []
    end = time.monotonic() + PATIENCE
    for first in range(0, SEEDS, BATCH):
        if first >= LEAST and time.monotonic() > end:
            break
        found += pool.map(live, range(first, first + BATCH), chunksize=5)
    return found


def test_every_promise_is_kept(lives: list[Life]) -> None:
    failure = [f"seed {s}: {text}; replay: python -m tests.sim.run --seed {s}" for s, _, text in lives if text]
    assert failure == []


def test_the_faults_do_happen_and_the_work_is_done_nevertheless(lives: list[Life]) -> None:
    stats = sum((found for _, found, _ in lives), Counter[str]())
    unvisited = [where for where in BOUNDARIES if not stats[f"at {where}"]]
    never_fatal = [where for where in BOUNDARIES if not stats[f"crash {where}"]]
    assert (unvisited, never_fatal) == ([], [])
    rare = (
        "dropped",
        "doubled",
        "cut off",
        "partitions",
        "cuts",
        "stalls",
        "higher ballots",
        "rebuilt",
        "ahead in vain",
        "chains ended",
        "spares' shares",
        "moved",
        "absent",
    )
    assert {name: stats[name] for name in rare if stats[name] < 20} == {}
    often = (
        "deaths PeerNode",
        "deaths BootstrapNode",
        "give-backs",
        "folds",
        "left out",
        "leads",
        "ahead",
        "chains reconfigured",
        "chains finished",
    )
    assert {name: stats[name] for name in often if stats[name] < 200} == {}
    assert stats["contributions"] > stats["commits"] > 3 * len(lives)


def test_a_seed_decides_everything() -> None:
    def history(seed: int) -> tuple[list[list[str]], Counter[str]]:
        swarm = Swarm(seed)
        swarm.run()
        return [[commit.digest for commit in node.commits] for node in swarm.nodes.values()], swarm.world.stats

    assert history(3) == history(3)


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found_by_the_promise_that_it_breaks(name: str) -> None:
    found: dict[str, int] = {}
    for seed in range(BUG_SEEDS):
        try:
            Swarm(seed, **BUGS[name].classes).run()
        except Violation as violation:
            found.setdefault(violation.promise, seed)
        if BUGS[name].promise in found:
            return
    pytest.fail(f"{name}: {BUGS[name].promise} not seen failure in {BUG_SEEDS} seeds, only {found}")


def test_a_quorum_in_a_storm_forks_never_and_decides_when_it_is_over(pool: ProcessPoolExecutor) -> None:
    assert [(s, text) for s, _, text in pool.map(meet, range(COUNCILS), chunksize=10) if text] == []


@pytest.mark.parametrize("name", ballots.BUGS)
def test_a_careless_quorum_forks(name: str) -> None:
    for seed in range(FORK_SEEDS):
        try:
            Council(seed, ballots.BUGS[name]).run()
        except Violation as violation:
            if violation.promise == "P2":
                return
    pytest.fail(f"{name}: no fork in {FORK_SEEDS} seeds")
