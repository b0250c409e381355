"""Random SIGKILLs for as long as you like: `python -m tests.faults.soak [--minutes 30] [--seed 0] [--dir FOLDER]`.

Four bootstrap nodes, three full replicas and a chain of three. First the leading node is killed, then a second one (the
run stalls), which is started again, and then the first. After that a random peer is killed every few seconds and
started again a little later. At the end everybody attests one more round; then all logs must tell one history, and
replaying it from θ(0) must give the bits that every peer attested after every round.
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path

from protocol.planning import memory
from tests.faults.processes import Swarm
from tests.support.quorum import KEYS, four_nodes

FULL = ["full-0", "full-1", "full-2"]
CHAIN = ["weak-0", "weak-1", "weak-2"]
PAUSE = (2.0, 12.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, help="keep everything there; must not exist yet")
    chosen = parser.parse_args()
    folder = chosen.dir or Path(tempfile.mkdtemp(prefix="potluck-soak-")) / "run"
    manifest = four_nodes(rounds=1_000_000, start_peers=6)
    stages = [memory.stage_memory(manifest, a, b) for a, b in ((0, 1), (1, 2), (2, 4))]
    with Swarm(folder, manifest, KEYS, dict(zip(CHAIN, stages, strict=True))) as swarm:
        live(swarm, chosen.minutes, random.Random(chosen.seed))
        rounds = swarm.check()
        left = Counter(
            reason["reason"].rpartition(": ")[2]
            for archive_name, archive in swarm.logs()
            if archive_name == swarm.nodes[0]
            for commit in archive.commits
            for reason in ({"reason": x.reason} for x in commit.left_out)
        )
    print(
        f"{rounds} rounds; left out: {dict(left)}; one history on four nodes, all attested bits are those of the replay"
    )
    if chosen.dir is None:
        shutil.rmtree(folder.parent)
    return 0


def live(swarm: Swarm, minutes: float, rng: random.Random) -> None:
    for name in swarm.nodes:
        swarm.start_node(name)
    for name in (*FULL, *CHAIN):
        swarm.start(name)
    first = swarm.leader()
    head = wait_for_round(swarm, swarm.nodes, 2)
    swarm.kill(first)
    others = [n for n in swarm.nodes if n in swarm.running]
    head = wait_for_round(swarm, others, head + 3)
    second = swarm.leader()
    swarm.kill(second)
    survivor = next(n for n in others if n != second)
    stall = swarm.wait(survivor, lambda e: e.kind == "warning" and "2 of 4" in e.fields["text"], "the stall")
    print(stall.fields["text"], flush=True)
    swarm.start(second)
    swarm.start(first)
    head = wait_for_round(swarm, swarm.nodes, head + 3)
    print(f"round {head}: goes on with all four; now peers are killed for {minutes:g} minutes", flush=True)
    kills: Counter[str] = Counter()
    end = time.monotonic() + 60 * minutes
    while time.monotonic() < end:
        name = rng.choice([*FULL, *CHAIN])
        time.sleep(rng.uniform(*PAUSE))  # the moment is the point
        swarm.kill(name)
        kills[name] += 1
        time.sleep(rng.uniform(0.0, 8.0))
        swarm.start(name)
        if sum(kills.values()) % 20 == 0:
            print(f"{sum(kills.values())} kills, round {newest(swarm, swarm.nodes[0])}", flush=True)
    head = newest(swarm, swarm.nodes[0])
    for name in (*FULL, *CHAIN):
        swarm.wait(name, lambda e: e.kind == "round" and e.fields["round"] > head, "one more round")
    wait_for_round(swarm, swarm.nodes, head + 3)
    print(f"{sum(kills.values())} kills: {dict(kills)}", flush=True)
    for name in list(swarm.running):
        swarm.kill(name)


def newest(swarm: Swarm, node: str) -> int:
    return max((e.fields["round"] for e in swarm.events(node) if e.kind == "commit"), default=-1)


def wait_for_round(swarm: Swarm, nodes: list[str], round: int) -> int:
    for name in nodes:
        swarm.wait(name, lambda e: e.kind == "commit" and e.fields["round"] >= round, f"round {round}")
    return round


if __name__ == "__main__":
    raise SystemExit(main())
