"""The demo's swarm as processes, with a command that plays all of them: who ends when."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from peer import events
from peer.demo.recipe import PeerSpec
from peer.demo.swarm import LAST_NEWS_SECONDS, run_processes
from peer.events import Event
from protocol.identity import Identity
from tests.e2e import swarms

THERE = "bootstrap/there"
"""A file that the node touches for as long as it lives."""


def play(arguments: Sequence[str]) -> None:
    """`bootstrap` says that it listens, then, without its peer's process, that the run is over, and stays."""
    out = Path(arguments[arguments.index("--dir") + 1]).parent
    if arguments[0] == "join":
        (out / "peer").write_text(f"{os.getpid()}\n")
        return
    tell(events.Listening(address="/ip4/127.0.0.1/tcp/1#run", addresses=()))
    while not (out / "peer").exists() or not (pid := (out / "peer").read_text()).endswith("\n"):
        time.sleep(0.01)
    while psutil.pid_exists(int(pid)):
        time.sleep(0.01)
    tell(events.RunFinished(round=1, state_digest=None))
    while True:
        (out / THERE).touch()
        time.sleep(0.01)


def tell(body: events.Body) -> None:
    print(Event(time.time(), "bootstrap", body).to_json(), flush=True)


async def test_the_node_stays_after_the_end_so_long_that_a_monitor_elsewhere_hears_of_it(tmp_path: Path) -> None:
    options = swarms.options(tmp_path, in_memory=False)
    peer = PeerSpec("full-0", Identity(bytes(32)), 1 << 30, 10**7)
    for name in ("bootstrap", peer.name):
        (tmp_path / name).mkdir()
    told: list[Event] = []

    swarm = run_processes(options, play, [peer], tmp_path, told.append)
    async with contextlib.aclosing(swarm) as steps:
        async for _ in steps:
            if isinstance(told[-1].body, events.RunFinished):
                break
        heard = time.time()
        assert heard - told[-1].time >= LAST_NEWS_SECONDS
        while (tmp_path / THERE).stat().st_mtime <= heard:
            await asyncio.sleep(0.01)
