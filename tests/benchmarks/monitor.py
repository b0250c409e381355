"""What a monitor costs: processor and memory, fed with a made-up run in which everybody announces a step every five seconds.

    python -m tests.benchmarks.monitor --peers 500

Its transport is not there: of hivemind's libraries alone a process has about 240 MiB, and an announcement takes 0.06 ms to be checked.
"""

from __future__ import annotations

import argparse
import itertools
import os
import resource
import threading
import time
import urllib.request

from rich.console import Console

from peer.cli.watch import to_json
from peer.ui import web
from peer.ui.monitor_screen import MonitorScreen
from tests.watched import MadeUp

STEP_SECONDS = 5.0
WARM_ROUNDS = 10


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
        state = web.Fresh("application/json", lambda: to_json(screen.state()))
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--peers", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=30.0)
    typed = parser.parse_args()
    for name, terminal, page in (("fed only", False, False), ("page", False, True), ("terminal", True, False)):
        share = measure(typed.peers, typed.seconds, terminal, page)
        print(f"{typed.peers} peers, {name}: {100 * share:.2f} % of a core")
    print(f"memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB at most")


if __name__ == "__main__":
    main()
