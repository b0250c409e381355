"""How good the planner's plans are, and how long they take.

    python -m tests.benchmarks.planner --small 2000          # against every possible plan of up to seven peers (half an hour)
    python -m tests.benchmarks.planner --swarms 200          # 50 to 500 home machines: against random and greedy grouping (half an hour)
    python -m tests.benchmarks.planner --swarms 20 --climb 100   # and against a local search with a hundred times the time (hours)
    python -m tests.benchmarks.planner --many 10000          # seconds of CPU for so many peers, and after 1 % of them changed

What a plan is worth is computed by tests/plans.py, which shares no code with the planner's cost model. There the distributions of
machines are described, with their sources. Greedy: the order of uplinks or that of speeds, whichever is better.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
import time

from protocol.planning.arrange import arrange
from tests import plans


def small(count: int) -> None:
    """Shares of the optimum."""
    shares = []
    for seed in range(count):
        rng = random.Random(seed)
        manifest = plans.small_manifest(rng)
        peers = plans.small_swarm(rng, manifest)
        best = plans.optimum(manifest, peers)
        found = plans.total(manifest, peers, arrange(manifest, peers)[0])
        if best > 0:
            shares.append(found / best)
        if (seed + 1) % 100 == 0:
            print(f"{seed + 1} swarms: mean {statistics.mean(shares):.2%}, worst {min(shares):.2%}", flush=True)
    exact = sum(share > 1 - 1e-9 for share in shares)
    print(
        f"{count} swarms, {len(shares)} of which can train: mean {statistics.mean(shares):.2%} of the optimum, worst {min(shares):.2%}; {exact} exact"
    )


def swarms(count: int, climb: float, models: list[str]) -> None:
    """Against others' plans."""
    print(
        "| model | swarms | over random | worst | over greedy | worst | of a local search | worst | CPU seconds a plan |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for model in models:
        rows = []
        for seed in range(count):
            rng = random.Random(seed)
            manifest, peers = plans.manifest_of(model), plans.volunteers(rng, rng.randint(50, 500))
            began = time.process_time()
            replicas, _ = arrange(manifest, peers)
            took = time.process_time() - began
            ours = plans.total(manifest, peers, replicas)
            by_chance = [
                plans.total(manifest, peers, plans.grouped(manifest, rng.sample(peers, len(peers)))) for _ in range(3)
            ]
            keys = (lambda c: -c.up_bps, lambda c: -c.speed_flops)
            greedy = max(plans.total(manifest, peers, plans.grouped(manifest, sorted(peers, key=key))) for key in keys)
            searched = plans.climbed(manifest, peers, replicas, climb * took, rng) if climb else ours
            rows.append((ours / statistics.mean(by_chance), ours / greedy, ours / searched, took))
        random_, greedy_, search_, seconds = zip(*rows, strict=True)
        compared = f"{statistics.mean(search_):.2%} | {min(search_):.2%}" if climb else "- | -"
        print(
            f"| {model} | {count} | {statistics.mean(random_):.2f} | {min(random_):.2f} | {statistics.mean(greedy_):.2f} |"
            f" {min(greedy_):.2f} | {compared} | {statistics.mean(seconds):.2f} |",
            flush=True,
        )


def many(count: int, models: list[str]) -> None:
    """Seconds of CPU."""
    for model in models:
        manifest, peers = plans.manifest_of(model), plans.volunteers(random.Random(0), count)
        began = time.process_time()
        replicas, spares = arrange(manifest, peers)
        took = time.process_time() - began
        total = sum(r.rate for r in replicas)
        print(
            f"{model}: {count} peers: {took:.2f} s, {len(replicas)} replicas, {len(spares)} spares, {total:.0f} tokens per second"
        )
        gone = {c.peer for c in peers[7::100]}
        new = [dataclasses.replace(c, peer="new-" + c.peer) for c in plans.volunteers(random.Random(1), len(gone))]
        kept = [r for r in replicas if not gone.intersection(r.members)]
        began = time.process_time()
        replicas, spares = arrange(manifest, [*(c for c in peers if c.peer not in gone), *new], kept)
        took = time.process_time() - began
        same = len({r.members for r in kept} & {r.members for r in replicas})
        print(
            f"  1 % others: {took:.2f} s, {same} of {len(kept)} complete replicas stay, {len(spares)} spares,"
            f" {sum(r.rate for r in replicas) / total:.1%} of the tokens per second",
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", type=int, default=0, help="so many swarms of up to seven peers")
    parser.add_argument("--swarms", type=int, default=0, help="so many swarms of 50 to 500 peers, of each model")
    parser.add_argument("--climb", type=float, default=0, help="a local search with so many times the planner's time")
    parser.add_argument("--many", type=int, default=0, help="one swarm of so many peers, of each model")
    parser.add_argument("--models", nargs="*", default=list(plans.SHAPES), choices=list(plans.SHAPES))
    chosen = parser.parse_args()
    if chosen.small:
        small(chosen.small)
    if chosen.swarms:
        swarms(chosen.swarms, chosen.climb, chosen.models)
    if chosen.many:
        many(chosen.many, chosen.models)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
