"""Replays one seed with a trace, or lives through many:

    python -m tests.sim.run --seed N
    python -m tests.sim.run --seeds 0:10000
    python -m tests.sim.run --seeds 0:1000 --liars 6       # and so many made-up identities that say what they like
    python -m tests.sim.run --seeds 0:1000 --probation 1   # and newcomers on probation
    python -m tests.sim.run --seeds 0:1000 --lying-nodes   # and as many dishonest operators as a quorum of 3f + 1 bears
    python -m tests.sim.run --seeds 0:1000 --fixed         # the same operators from beginning to end
    python -m tests.sim.run --seeds 0:1000 --quarrels      # and members of chains who accuse each other for no reason
    python -m tests.sim.run --seeds 0:1000 --colluders     # and volunteers who agree on bad work
    python -m tests.sim.run --seeds 0:1000 --long          # and archives that remove what is not needed any more
    python -m tests.sim.run --seeds 0:1000 --family        # runs of other methods: outer momentum, dense updates, ...
    python -m tests.sim.run --seeds 0:1000 --aggregates    # and nodes that add up the updates
    python -m tests.sim.run --seeds 0:1000 --aggregates --lying-nodes
    python -m tests.sim.run --seeds 0:1000 --lying-nodes --calm
    python -m tests.sim.run --seeds 0:1000 --quarrels --calm

With --calm nothing else goes wrong, and no round may take LEASES leases longer than without lies or quarrels. With
--liars that is asked of rounds since somebody has brought work.

A seed gives the same run in every process that has the same PYTHONHASHSEED; this command sets it to 0.
"""

from __future__ import annotations

import argparse
import functools
import gc
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from tests.sim.swarm import KINDS, Swarm, kind_of
from tests.sim.world import POINTS, Violation

SEEDS = 313
"""The number of runs, from seed 0 on, that see everything at least once."""
FEW = (0, 6, 19, 30, 58, 66, 67, 80, 96, 99, 139, 140, 147, 148, 270)
"""These do so, too, today."""
HAPPENS = (
    "dropped", "doubled", "held up", "partitions", "cuts", "jumps of the wall clock", "losses of power",
    "deaths of peers", "deaths of nodes", "higher ballots", "stalls", "left out", "leads", "withdrawals", "recovered",
    "chains reconfigured", "chains finished", "chains ended", "spares' shares", "handed over", "taken back",
    "decreed: appoint", "decreed: quorum", "decreed: dismiss", "dismissed",
)  # fmt: skip
"""What many runs must have seen a few times."""
COLLUDE = ("colluders left out", "less weight", "colluders counted")
"""What must happen among colluders."""
LEASES = 2
"""By so much dishonest operators, or chains that quarrel, may hold up one round, where nothing else goes wrong."""
Life = tuple[int, Counter[str], str]
"""A seed, what happened in its run, and the promise that was broken, if one was."""


def live(seed: int, **chosen: int) -> Life:
    """Lives through one of many seeds. chosen: as `Swarm` has it"""
    gc.disable()  # the collector would cost a tenth, and a run is short
    swarm = Swarm(seed, **chosen)
    try:
        swarm.run()
        most, begun = LEASES * swarm.manifest.timing.gone_after, bool(chosen.get("liars"))
        if chosen.get("calm") and swarm.longest_round(begun) > most:  # else no round can have taken so much longer
            twin = Swarm(seed, **{**chosen, "liars": 0, "honest": True})
            twin.run()
            held_up = swarm.longest_round(begun) - twin.longest_round()
            if held_up > most:
                raise Violation("P4", f"a round took {held_up:.1f} s longer than any without lies and quarrels")
    except Violation as violation:
        return seed, swarm.world.stats, str(violation)
    finally:
        gc.enable()
    return seed, swarm.world.stats, ""


def unseen(stats: Counter[str]) -> list[str]:
    """What did not happen: operations of which none was fatal, and other faults."""
    return [f"crash {where}" for where in POINTS if not stats[f"crash {where}"]] + [x for x in HAPPENS if stats[x] < 3]


def lives(seeds: Iterable[int], **chosen: int) -> Iterator[Life]:
    """All of them, as `live` has what is chosen, on all cores, each in a process that has the hash seed 0: a copy of
    this one, which has imported everything, or else one from the beginning."""
    before = os.environ.get("PYTHONHASHSEED")
    os.environ["PYTHONHASHSEED"] = "0"
    way = "spawn" if sys.flags.hash_randomization else "fork"
    pool = ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context(way))
    try:
        yield from pool.map(functools.partial(live, **chosen), seeds, chunksize=1)
    finally:
        pool.shutdown(cancel_futures=True)
        if before is None:
            del os.environ["PYTHONHASHSEED"]
        else:
            os.environ["PYTHONHASHSEED"] = before


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--seed", type=int)
    which.add_argument("--seeds", help="FIRST:LAST, LAST not included")
    parser.add_argument("--only", choices=sorted(set(KINDS)), help="with --seeds: runs of this kind")
    parser.add_argument("--first", action="store_true", help="with --seeds: stop at the first broken promise")
    parser.add_argument("--liars", type=int, default=0, help="made-up identities in each run")
    parser.add_argument("--lying-nodes", action="store_true", help="as many dishonest operators as a quorum bears")
    parser.add_argument("--probation", type=int, default=0, help="rounds in which a newcomer's work has no weight")
    parser.add_argument("--calm", action="store_true", help="nothing else goes wrong")
    parser.add_argument("--fixed", action="store_true", help="nobody becomes an operator, or ceases to be one")
    parser.add_argument("--quarrels", action="store_true", help="members of chains say of each other that they lie")
    parser.add_argument("--colluders", action="store_true", help="volunteers who agree on bad work")
    parser.add_argument("--long", action="store_true", help="many rounds: archives remove the first payloads")
    parser.add_argument("--family", action="store_true", help="other methods than the usual one")
    parser.add_argument("--aggregates", action="store_true", help="nodes add up the updates of a round")
    arguments = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.execve(
            sys.executable, [sys.executable, "-m", "tests.sim.run", *sys.argv[1:]], os.environ | {"PYTHONHASHSEED": "0"}
        )
    if arguments.seeds:
        first, last = map(int, arguments.seeds.split(":"))
        seeds = [s for s in range(first, last) if arguments.only in (None, kind_of(s))]
        return campaign(seeds, arguments)
    swarm = Swarm(arguments.seed, verbose=True, **chosen_of(arguments))
    try:
        swarm.run()
    except Violation as violation:
        print(f"seed {arguments.seed}: {violation}")
        return 1
    print(f"seed {arguments.seed}: all promises kept; {dict(sorted(swarm.world.stats.items()))}")
    return 0


CHOICES = (
    "liars", "lying_nodes", "calm", "probation", "fixed", "quarrels", "colluders", "long", "family", "aggregates",
)  # fmt: skip


def chosen_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """What was typed of what `live` takes."""
    return {name: getattr(arguments, name) for name in CHOICES}


def campaign(seeds: Sequence[int], chosen: argparse.Namespace) -> int:
    """Every seed; prints what was broken at once, and what happened in the end."""
    began, stats, broken = time.monotonic(), Counter[str](), 0
    for number, (seed, found, text) in enumerate(lives(seeds, **chosen_of(chosen)), 1):
        stats += found
        if text:
            broken += 1
            print(f"seed {seed}: {text}", flush=True)
            if chosen.first:
                return 1
        if number % 500 == 0:
            print(f"{number} runs, {time.monotonic() - began:.0f} s", flush=True)
    happened = {k: v for k, v in sorted(stats.items()) if not k.startswith(("at ", "crash "))}
    print(f"{len(seeds)} runs from {seeds[0]} to {seeds[-1]}, {time.monotonic() - began:.0f} s: {happened}")
    stormy = not chosen.calm and len(seeds) >= SEEDS and len({kind_of(seed) for seed in seeds}) > 1
    missing = unseen(stats) if stormy else []
    missing += ["on probation"] if chosen.probation and not stats["on probation"] else []
    missing += ["quarrels"] if chosen.quarrels and not stats["quarrels"] else []
    missing += [x for x in COLLUDE if chosen.colluders and not stats[x]]
    missing += ["payloads removed"] if chosen.long and not stats["payloads removed"] else []
    missing += ["aggregated shards"] if chosen.aggregates and not stats["aggregated shards"] else []
    missing += ["lies"] if (chosen.liars or chosen.lying_nodes) and not stats["lies"] else []
    if missing:
        print(f"never happened: {', '.join(missing)}")
    print(f"{broken} broken promises")
    return 1 if broken or missing else 0


if __name__ == "__main__":
    sys.exit(main())
