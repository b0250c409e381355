"""Measures the quality of the planner's plans and the time that they take.

    python -m tests.benchmarks.planner --small 2000              # up to 7 peers, against all plans (half an hour)
    python -m tests.benchmarks.planner --swarms 200              # 50 to 500 peers, against others' plans (an hour)
    python -m tests.benchmarks.planner --swarms 20 --climb 100   # and against a local search (hours)
    python -m tests.benchmarks.planner --many 10000              # seconds of a plan, and after 1 % has changed
    python -m tests.benchmarks.planner --loop 300 10000          # gaps of an event loop beside the planner

With `--rows FILE` each swarm's figures are added to FILE as they come, and those in FILE are not computed again. So a
campaign may be interrupted, or shared between processes with a FILE each (`--from`). `--climb` gives the local search
so many times the planner's time.

tests/support/plans.py computes the worth of a plan, and shares no code with the planner's cost model. It also has the
distributions of machines, with their sources, and the other plans. Random: as good as ours in the choice of full
replicas and in cuts, but chains of peers in random order (mean of three). Greedy: the same in the order of uplinks or
of speeds, whichever is better. Blind: nothing is chosen (mean of three). tests/support/bounds.py has upper bounds for
all plans; the first BOUNDED swarms of each model are compared with them.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bootstrap.background_jobs import LatestJob
from protocol.planning.arrange import Arranged, arrange
from protocol.round.leader import Leader
from protocol.round.leader_events import Decided, Lead, MakePlan, Planned, Propose, Question, Ready
from protocol.wire.commit import Commit
from tests.support import bounds, plans

IDLE_SECONDS = 5.0
BOUNDED = 10
"""Swarms of each model that are compared with upper bounds, which take most of the time."""
Row = dict[str, Any]


class Rows:
    """The known figures of each swarm, kept as lines of the file `path` if there is one."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path is not None and path.exists() else []
        self._known = {_key(row): row for row in map(json.loads, lines)}

    def get(self, about: Row, compute: Callable[..., Row], *args: Any) -> Row:
        """Returns the row of `about`, with its CPU seconds. Computes it from `args` if it is not known."""
        if _key(about) not in self._known:
            began = time.process_time()
            found = {**about, **compute(*args)}
            row = {**found, "cpu_seconds": round(time.process_time() - began, 2)}
            self._known[_key(about)] = row
            if self._path is not None:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)
        return self._known[_key(about)]


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in ("kind", "model", "climb", "seed"))


def small(seeds: range, rows: Rows) -> None:
    """Prints the plans' shares of the optimum."""

    def one(seed: int) -> Row:
        rng = random.Random(seed)
        manifest = plans.small_manifest(rng)
        peers = plans.parted(rng, plans.small_swarm(rng, manifest))
        best = plans.optimum(manifest, peers)
        found = plans.total(manifest, peers, arrange(manifest, peers)[0])
        return {"peers": len(peers), "share": found / best if best > 0 else None}

    found = [rows.get({"kind": "small", "seed": seed}, one, seed) for seed in seeds]
    shares = [row["share"] for row in found if row["share"] is not None]
    exact = sum(share > 1 - 1e-9 for share in shares)
    print(
        f"{len(found)} swarms, {len(shares)} of which can train: mean {statistics.mean(shares):.2%} of the optimum,"
        f" worst {min(shares):.2%}; {exact} exact"
    )


def compared(model: str, seed: int, climb: float, bounded: bool) -> Row:
    """Returns one swarm's tokens per second by our plan and by others, and with `bounded` the upper bounds."""
    rng = random.Random(seed)
    manifest, peers = plans.manifest_of(model), plans.volunteers(rng, rng.randint(50, 500))
    began = time.process_time()
    replicas, spares = arrange(manifest, peers)
    took = time.process_time() - began

    def total(found: list[Arranged]) -> float:
        return plans.total(manifest, peers, found)

    ours = plans.total(manifest, peers, replicas)
    by_chance = [rng.sample(peers, len(peers)) for _ in range(3)]
    keys = (lambda c: -c.up_bps, lambda c: -c.speed_flops)
    row = {
        "peers": len(peers),
        "spares": len(spares),
        "plan_seconds": round(took, 2),
        "ours": ours,
        "random": statistics.mean(total(plans.grouped(manifest, order)) for order in by_chance),
        "blind": statistics.mean(total(plans.blind(manifest, order)) for order in by_chance),
        "greedy": max(total(plans.grouped(manifest, sorted(peers, key=key))) for key in keys),
        "paces": bounds.paces(manifest, peers),
    }
    if bounded:
        row["priced"] = bounds.priced(manifest, peers, [(r.members, r.rate) for r in replicas])
    return {**row, "searched": plans.climbed(manifest, peers, replicas, climb * took, rng)} if climb else row


def swarms(seeds: range, climb: float, models: list[str], rows: Rows) -> None:
    """Prints the table of our plans beside others', and beside upper bounds for the first BOUNDED swarms."""
    tables = []
    for model in models:
        about = {"kind": "swarm", "model": model, "climb": climb}
        found = [rows.get({**about, "seed": seed}, compared, model, seed, climb, seed < BOUNDED) for seed in seeds]

        def ratio(one: str, other: str, worst: Callable[..., float] = min, found: list[Row] = found) -> str:
            values = [row[one] / row[other] for row in found if one in row and other in row]
            return f"{statistics.mean(values):.3f} ({worst(values):.3f})" if values else "-"

        cells = [ratio("ours", "random"), ratio("ours", "greedy"), ratio("ours", "blind")]
        cells += [ratio("priced", "random", max), ratio("priced", "greedy", max), ratio("ours", "priced")]
        cells += [ratio("paces", "random", max), ratio("ours", "paces"), ratio("ours", "searched") if climb else "-"]
        seconds = statistics.mean(row["plan_seconds"] for row in found)
        tables.append(f"| {model} | {len(found)} | {' | '.join(cells)} | {seconds:.2f} |")
    print(
        "| model | swarms | over random | over greedy | over blind | bound over random | bound over greedy |"
        " of the bound | all paces over random | of all paces | of a local search | CPU seconds a plan |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    print("\n".join(tables), "\nmean, and in brackets the worst; of bounds, the largest", sep="")


def many(count: int, models: list[str]) -> None:
    """Prints the seconds of CPU of a plan, and of one after a change."""
    for model in models:
        manifest, peers = plans.manifest_of(model), plans.volunteers(random.Random(0), count)
        began = time.process_time()
        replicas, spares = arrange(manifest, peers)
        took = time.process_time() - began
        total = sum(r.rate for r in replicas)
        print(
            f"{model}: {count} peers: {took:.2f} s, {len(replicas)} replicas, {len(spares)} spares,"
            f" {total:.0f} tokens per second"
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


def loop(count: int, model: str) -> None:
    """Prints the gaps of a heartbeat of a millisecond beside a fresh plan, and the leader's own times in the loop."""
    manifest = dataclasses.replace(plans.manifest_of(model), start_peers=count)
    leader = Leader(manifest, (), (), 0.0)
    leader.handle(Lead(True), 0.0)
    took: dict[str, float] = {}

    def timed(what: str, work: Callable[..., Any], *args: Any) -> Any:
        began = time.thread_time()
        found = work(*args)
        took[what] = max(took.get(what, 0.0), time.thread_time() - began)
        return found

    for c in plans.volunteers(random.Random(0), count - 1):
        assert not timed("hearing of a peer", leader.handle, Ready(c), 0.0)
    last = dataclasses.replace(plans.volunteers(random.Random(1), 1)[0], peer="last")
    (asked,) = timed("asking for a plan", leader.handle, Ready(last), 0.0)
    assert isinstance(asked, MakePlan)
    planned, gaps, idle = asyncio.run(beside(asked.question))
    (proposed,) = timed("proposing it", leader.handle, planned, 0.0)
    assert isinstance(proposed, Propose)
    digest = asyncio.run(beside_digest(proposed.commit))
    timed("beginning its round", leader.handle, Decided(proposed.commit), 0.0)
    in_loop = ", ".join(f"{what} {1e3 * s:.1f}" for what, s in took.items())
    print(
        f"{model}: {count} peers: a plan in {sum(gaps):.2f} s; {len(gaps)} beats,"
        f" the longest gap {1e3 * gaps[-1]:.1f} ms (before the plan {1e3 * idle[-1]:.1f}),"
        f" the 99th percentile {1e3 * gaps[len(gaps) * 99 // 100]:.1f} ms,"
        f" the median {1e3 * gaps[len(gaps) // 2]:.1f} ms; the commit's digest in {1e3 * sum(digest):.0f} ms,"
        f" the longest gap {1e3 * max(digest):.1f} ms; in the loop, ms of CPU: {in_loop}",
        flush=True,
    )


async def beside(question: Question) -> tuple[Planned, list[float], list[float]]:
    """Returns the plan, the seconds between beats while it was made, and those of an idle time before."""
    answered: asyncio.Queue[Planned] = asyncio.Queue()
    planning = LatestJob[Question, Planned](
        "planner", lambda asked: Planned(asked, asked.answer()), answered.put_nowait, retry_seconds=0.0
    )
    working = asyncio.create_task(planning.run())
    end = time.perf_counter() + IDLE_SECONDS
    idle = await beats(lambda: time.perf_counter() < end)
    planning.ask(question)
    gaps = await beats(answered.empty)
    working.cancel()
    return answered.get_nowait(), gaps, idle


async def beside_digest(commit: Commit) -> list[float]:
    """Returns the seconds between beats beside the commit's digest, computed as in bootstrap/node.py."""
    working = asyncio.create_task(asyncio.to_thread(lambda: commit.digest))
    gaps = await beats(lambda: not working.done())
    await working
    return gaps


async def beats(goes_on: Callable[[], bool]) -> list[float]:
    """Returns the seconds from each beat to the next, sorted."""
    last, gaps = time.perf_counter(), list[float]()
    while goes_on():
        await asyncio.sleep(0.001)
        now = time.perf_counter()
        gaps.append(now - last)
        last = now
    return sorted(gaps)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", type=int, default=0, help="so many swarms of up to seven peers")
    parser.add_argument("--swarms", type=int, default=0, help="so many swarms of 50 to 500 peers, of each model")
    parser.add_argument("--from", type=int, default=0, dest="begin", help="the first swarm's number")
    parser.add_argument("--rows", type=Path, help="where each swarm's figures are kept")
    parser.add_argument("--climb", type=float, default=0, help="a local search with so many times the planner's time")
    parser.add_argument("--many", type=int, default=0, help="one swarm of so many peers, of each model")
    parser.add_argument("--loop", type=int, nargs="*", default=[], help="a plan of so many peers beside a loop")
    parser.add_argument("--models", nargs="*", default=list(plans.SHAPES), choices=list(plans.SHAPES))
    chosen = parser.parse_args()
    rows = Rows(chosen.rows)
    if chosen.small:
        small(range(chosen.begin, chosen.begin + chosen.small), rows)
    if chosen.swarms:
        swarms(range(chosen.begin, chosen.begin + chosen.swarms), chosen.climb, chosen.models, rows)
    if chosen.many:
        many(chosen.many, chosen.models)
    for count, model in itertools.product(chosen.loop, chosen.models):
        loop(count, model)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
