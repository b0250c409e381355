"""What a monitor costs: processor and memory, fed with a made-up run in which everybody announces a step every five seconds.

    python -m tests.benchmarks.monitor --peers 500          # fed in this process, without a network
    python -m tests.benchmarks.monitor --peers 500 --live   # a process of its own that reads a node over its network daemon

Live it has a screen on a terminal of 120 x 40 and a page that is asked for once a second; every announcement is signed, and a round is
decided every minute. What its network daemon takes is counted beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import resource
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

from rich.console import Console

from peer.ui import web
from peer.ui.monitor_screen import MonitorScreen
from peer.ui.state import to_json
from tests.support import crowd
from tests.support.watched import ROUND_SECONDS, MadeUp
from tests.support.watching import Taken, watching

STEP_SECONDS = 5.0
WARM_ROUNDS = 10
WARM_SECONDS = 10.0


def measure(peers: int, seconds: float, terminal: bool, page: bool) -> float:
    """The share of a core that the monitor takes, with a screen on a terminal of 120 x 40, with a page that is asked for all the time."""
    made = MadeUp(peers)
    told = made.all(WARM_ROUNDS + int(seconds / STEP_SECONDS))
    with (
        open(os.devnull, "w", encoding="utf-8") as out,
        MonitorScreen(made.manifest, Console(file=out, force_terminal=terminal, width=120, height=40)) as screen,
    ):
        for event in itertools.islice(told, WARM_ROUNDS * 5 * peers):
            screen.take(event)
        news = list(itertools.islice(told, int(peers * seconds / STEP_SECONDS)))
        state = web.CachedAnswer("application/json", lambda: to_json(screen.state()), lambda: screen.changes)
        with web.Server(("127.0.0.1", 0), {"/state.json": state}) as server:
            over = threading.Event()
            asking = threading.Thread(target=_ask, args=(server.url, over))
            if page:
                asking.start()
            began, used = time.monotonic(), time.process_time()
            for number, event in enumerate(news):
                screen.take(event)
                time.sleep(max(0.0, began + seconds * number / len(news) - time.monotonic()))
            found = (time.process_time() - used) / (time.monotonic() - began)
            over.set()
            if page:
                asking.join()
    return found


def _ask(url: str, over: threading.Event) -> None:
    while not over.wait(0.25):
        request = urllib.request.Request(f"{url}state.json", headers={"Accept-Encoding": "gzip"})
        with urllib.request.urlopen(request, timeout=10) as reply:
            reply.read()


async def live(peers: int, seconds: float) -> tuple[Taken, Taken]:
    """What a monitor has taken once it has read thirty rounds and knows everybody, and `seconds` later."""
    with tempfile.TemporaryDirectory(prefix="potluck-benchmark-") as name:
        async with crowd.node(crowd.Signing(peers), Path(name)) as node:
            node.decide(30)
            node.hear(1)
            over = asyncio.Event()

            async def go_on() -> None:
                began, step = time.monotonic(), 1
                while not over.is_set():
                    await asyncio.sleep(STEP_SECONDS)
                    step += 1
                    if time.monotonic() - began > ROUND_SECONDS:
                        began, step = time.monotonic(), 1
                        node.decide()
                    node.hear(1 + step % 4)

            def watch() -> tuple[Taken, Taken]:
                with watching(node.line) as watched:
                    time.sleep(WARM_SECONDS)
                    before, end = watched.taken(), time.monotonic() + seconds
                    while time.monotonic() < end:
                        watched.get("state.json")
                        time.sleep(1.0)
                    return before, watched.taken()

            events = asyncio.create_task(go_on())
            try:
                return await asyncio.to_thread(watch)
            finally:
                over.set()
                await events


def print_live(peers: int, seconds: float) -> None:
    """What `live` found."""
    before, after = asyncio.run(live(peers, seconds))
    own, daemon = after.own_seconds - before.own_seconds, after.daemon_seconds - before.daemon_seconds
    print(
        f"{peers} peers, live: {100 * own / seconds:.2f} % of a core, its network daemon {100 * daemon / seconds:.2f} %"
    )
    print(
        f"memory: {after.own_bytes / 1e6:.0f} MB, its network daemon {after.daemon_bytes / 1e6:.0f} MB;"
        f" both without what other processes read from the same files {after.alone_bytes / 1e6:.0f} MB"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--peers", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--live", action="store_true")
    typed = parser.parse_args()
    if typed.live:
        print_live(typed.peers, typed.seconds)
        return
    for name, terminal, page in (("fed only", False, False), ("page", False, True), ("terminal", True, False)):
        share = measure(typed.peers, typed.seconds, terminal, page)
        print(f"{typed.peers} peers, {name}: {100 * share:.2f} % of a core")
    print(f"memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB at most")


if __name__ == "__main__":
    main()
