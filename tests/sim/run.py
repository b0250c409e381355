"""Replays one seed with a trace, or lives through many:

python -m tests.sim.run --seed N [--bug NAME | --council [--bug NAME]]
python -m tests.sim.run --seeds 0:10000
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from tests.sim import ballots
from tests.sim.ballots import Council, Voter
from tests.sim.bugs import BUGS
from tests.sim.ledger import Violation
from tests.sim.swarm import Swarm

Life = tuple[int, Counter[str], str]


def live(seed: int) -> Life:
    """Runs a swarm: what happened in it, and the promise that was broken, if one was."""
    return _life(seed, Swarm(seed))


def meet(seed: int) -> Life:
    """Runs a quorum alone."""
    return _life(seed, Council(seed))


def _life(seed: int, one: Swarm | Council) -> Life:
    try:
        one.run()
    except Violation as violation:
        return seed, one.world.stats, str(violation)
    return seed, one.world.stats, ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--seed", type=int)
    which.add_argument("--seeds", help="FIRST:LAST, LAST not included: swarms, and as many councils")
    parser.add_argument("--council", action="store_true", help="the quorum alone")
    parser.add_argument("--bug", choices=sorted({**BUGS, **ballots.BUGS}))
    arguments = parser.parse_args()
    if arguments.seeds:
        return campaign(*map(int, arguments.seeds.split(":")))
    world: Swarm | Council
    if arguments.council:
        world = Council(arguments.seed, ballots.BUGS.get(arguments.bug, Voter), verbose=True)
    else:
        world = Swarm(arguments.seed, verbose=True, **(BUGS[arguments.bug].classes if arguments.bug else {}))
    try:
        world.run()
    except Violation as violation:
        print(f"seed {arguments.seed}: {violation}")
        return 1
    print(f"seed {arguments.seed}: all promises kept; {dict(sorted(world.world.stats.items()))}")
    return 0


def campaign(first: int, last: int) -> int:
    """Every seed, on all cores; prints what was broken at once, and what happened in the end."""
    began = time.monotonic()
    stats: dict[str, Counter[str]] = {"swarms": Counter(), "councils": Counter()}
    broken = 0
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("forkserver")) as pool:
        for name, life in (("swarms", live), ("councils", meet)):
            for seed, found, text in pool.map(life, range(first, last), chunksize=20):
                stats[name] += found
                if text:
                    broken += 1
                    print(f"{name} seed {seed}: {text}", flush=True)
            happened = {k: v for k, v in sorted(stats[name].items()) if not k.startswith(("at ", "crash "))}
            print(f"{name} {first} to {last - 1}, {time.monotonic() - began:.0f} s: {happened}", flush=True)
    print(f"{broken} broken promises")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
