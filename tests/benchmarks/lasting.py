"""Checks that a round costs as much after thousands of rounds as at the beginning.

    python -m tests.benchmarks.lasting [--rounds 4000] [--window 400] [--places]

A bootstrap node and two peers that do not compute run in one process and in memory, with disks in /tmp. For each window
of rounds the benchmark prints the milliseconds of processor time and the growth of memory of a round (RSS, after the
garbage is collected). The test's own list of events is emptied with each window. `--places` prints where the memory
that the last window left was allocated (tracemalloc; the times mean nothing then).

Exits with 1 if a round of the last window takes a quarter more processor time than one of the second.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path

from protocol.run.manifest import TimingSpec
from tests.support import volunteers
from tests.support.volunteers import Swarm

MOST = 1.25
MIB = 1 << 20


def resident() -> int:
    """Returns the resident bytes of this process."""
    gc.collect()
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS")]
    return 1024 * int(line.split()[1])


async def measure(folder: Path, rounds: int, window: int, places: bool) -> list[float]:
    """Returns the milliseconds of processor time of a round, for each window."""
    timing = TimingSpec(round_deadline=30.0, round_seconds=1.0, heartbeat=0.5, gone_after=5.0)
    found = list[float]()
    async with Swarm(folder, volunteers.manifest(rounds=10**6, timing=timing)) as swarm:
        for name in ("a", "b"):
            swarm.start(name)
        await swarm.round(window // 10)
        before = resident()
        while swarm.head < rounds:
            for events in (swarm.events, *(peer.events for peer in swarm.peers.values())):
                events.clear()
            last = places and swarm.head + window >= rounds
            if last:
                tracemalloc.start(8)
                held = tracemalloc.take_snapshot()
            first, began = swarm.head, time.process_time()
            await swarm.round(first + window)
            done = swarm.head - first
            found.append(1000 * (time.process_time() - began) / done)
            if last:
                for events in (swarm.events, *(peer.events for peer in swarm.peers.values())):
                    events.clear()
                gc.collect()
                for place in tracemalloc.take_snapshot().compare_to(held, "traceback")[:12]:
                    print(
                        f"{place.size_diff / done:.0f} bytes a round\n  " + "\n  ".join(place.traceback.format()[-12:])
                    )
                tracemalloc.stop()
            now = resident()
            print(
                f"to round {swarm.head}: {found[-1]:.1f} ms a round, {(now - before) / done / 1024:+.1f} KiB",
                flush=True,
            )
            before = now
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4000)
    parser.add_argument("--window", type=int, default=400)
    parser.add_argument("--places", action="store_true")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="potluck-lasting-") as folder:
        found = asyncio.run(measure(Path(folder), chosen.rounds, chosen.window, chosen.places))
    ratio = found[-1] / found[min(1, len(found) - 1)]
    print(f"the last window's rounds take {ratio:.2f} times the processor time of the second's")
    return 0 if ratio <= MOST else 1


if __name__ == "__main__":
    sys.exit(main())
