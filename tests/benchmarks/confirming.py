"""What confirming decided commits costs a run of several operators, beside a version that does without, in virtual time.

    git worktree add OTHER COMMIT
    python -m tests.benchmarks.confirming OTHER [--operators 1 3 5] [--seeds 6] [--rounds 12]

The real nodes and six full replicas in a simulated network (tests/sim/paces.py): messages take 5 to 20 ms, and 20 ms more on average;
home lines take the time of the bytes. Told are the seconds of a round, from commit to commit, and the bytes that all
processes send in it; medians over the rounds of all seeds. Nothing depends on the machine's speed, so each version is run once with the
same seeds. Exits with 1 if the seconds or the bytes are over 3 % more. OTHER has to have the same simulation; b9ef7bb has.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

MOST = 0.03
PEERS = 6
WARM = 3
"""Rounds until everybody's pace is known."""
SECONDS = 30.0


def one(operators: int, seed: int, rounds: int) -> dict[str, list[float]]:
    """A run of the version that is imported here: seconds and bytes of each round."""
    from tests import tiny
    from tests.sim import paces

    known = tuple(operator.peer_id for operator in tiny.OPERATORS[:operators])
    manifest = paces.manifest(SECONDS, PEERS, operators=known, overlap=1)
    swarm = paces.PacedSwarm([paces.Machine(pace) for pace in (0.5, 0.5, 1.0, 1.0, 2.0, 4.0)], manifest, seed=seed)
    sizes: list[float] = []
    network = swarm.world.network
    known_sent = network.sent

    def sent(sender: str, receiver: str, size: int) -> float:
        sizes[-1] += size
        return known_sent(sender, receiver, size)

    network.sent = sent  # type: ignore[method-assign]

    async def script(swarm: paces.PacedSwarm) -> None:
        for number in range(WARM + rounds + 1):
            await swarm.round(number)
            sizes.append(0.0)

    sizes.append(0.0)
    swarm.run(script)
    durations = swarm.durations()
    return {
        "seconds": [durations[r] for r in range(WARM + 1, WARM + rounds + 1)],
        "bytes": sizes[WARM + 1 : WARM + 1 + rounds],
    }


def measure(code: Path, operators: int, seeds: int, rounds: int) -> dict[str, list[float]]:
    """The same of the version in this folder, of all seeds."""
    found: dict[str, list[float]] = {"seconds": [], "bytes": []}
    for seed in range(seeds):
        command = [sys.executable, __file__, "--one", str(seed), "--operators", str(operators), "--rounds", str(rounds)]
        environment = os.environ | {"PYTHONPATH": str(code.resolve())}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        for figure, values in found.items():
            values += told[figure]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, nargs="?")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--operators", type=int, nargs="+", default=[1, 3, 5])
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=12)
    chosen = parser.parse_args()
    if chosen.one is not None:
        print("\n" + json.dumps(one(chosen.operators[0], chosen.one, chosen.rounds)))
        return 0
    print(
        "| operators | seconds a round, the other | this | | MB a round, the other | this | |\n|---|---|---|---|---|---|---|"
    )
    most = 0.0
    for operators in chosen.operators:
        theirs, ours = (
            {figure: statistics.median(values) for figure, values in found.items()}
            for found in (
                measure(code, operators, chosen.seeds, chosen.rounds)
                for code in (chosen.other, Path(__file__).parents[2])
            )
        )
        ratios = {figure: ours[figure] / theirs[figure] - 1 for figure in ours}
        most = max(most, *ratios.values())
        print(
            f"| {operators} | {theirs['seconds']:.3f} | {ours['seconds']:.3f} | {ratios['seconds']:+.1%} | {theirs['bytes'] / 1e6:.4f} "
            f"| {ours['bytes'] / 1e6:.4f} | {ratios['bytes']:+.1%} |",
            flush=True,
        )
    return 0 if most <= MOST else 1


if __name__ == "__main__":
    sys.exit(main())
