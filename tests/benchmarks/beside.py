"""What a round of a small swarm costs with this version and with another one, by turns in one run: seconds, bytes, and seconds of CPU.

    git worktree add OTHER COMMIT
    python -m tests.benchmarks.beside OTHER [--peers 6] [--rounds 12] [--turns 3]

A node and six full replicas, the real ones, in one process and in memory, so that the machine's other work disturbs little; one inner step a
round, and a model of 7 M parameters, whose updates are all compared with each other. A round's seconds are those between two commits; bytes
and CPU are those of all seven for a round, from the start of the process to its end. Medians over all turns; the order of the two
changes with each. Exits with 1 if the seconds or the bytes are over 3 % more.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MOST = 0.03
FIGURES = ("seconds", "bytes", "cpu")
CONTRIBUTIONS = "contributions"


def one(out: Path, peers: int, rounds: int) -> dict[str, Any]:
    """A run of the version that is imported here."""
    import torch

    from bootstrap.archive import Archive
    from protocol.run.manifest import OuterSpec, TrainSpec
    from tests.e2e import swarms

    torch.set_num_threads(1)
    chosen = swarms.options(out, full=peers, rounds=rounds, inner_steps=1)
    base = swarms.manifest(chosen)
    train = TrainSpec(
        inner_steps=1, micro_batches=1, rows=1, sequence=base.train.sequence, lr=1e-3, warmup_steps=0, total_steps=1000
    )  # fmt: skip
    model = dataclasses.replace(swarms.MODEL, d_model=256, n_layers=6, n_heads=4, d_ff=688)
    manifest = dataclasses.replace(base, model=model, train=train, outer=OuterSpec(topk=32))
    began = time.process_time()
    result = swarms.run(chosen, manifest)
    used = time.process_time() - began
    archive = Archive(out / "bootstrap", manifest)
    worked = [commit for commit in archive.commits if commit.contributions]
    archive.close()
    return {
        "seconds": [after.time - before.time for before, after in itertools.pairwise(worked)],
        "bytes": [sum(result["bytes_sent_per_peer_per_round"].values())],
        "cpu": [used / rounds],
        CONTRIBUTIONS: [len(commit.contributions) for commit in worked],
    }


def measure(code: Path, peers: int, rounds: int) -> dict[str, Any]:
    """The same of the version in this folder."""
    with tempfile.TemporaryDirectory(prefix="potluck-beside-") as folder:
        command = [sys.executable, __file__, "--one", f"{folder}/run", "--peers", str(peers), "--rounds", str(rounds)]
        threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        environment = os.environ | threads | {"PYTHONPATH": str(code.resolve())}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    medians = [statistics.median(found[figure]) for figure in FIGURES]
    print(
        f"{code.resolve().name}: {medians[0]:.2f} s a round, {medians[1] / 1e6:.4f} MB, {medians[2]:.2f} s of CPU, "
        f"{statistics.mean(found[CONTRIBUTIONS]):.2f} contributions",
        flush=True,
    )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, nargs="?")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--peers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.one is not None:
        print("\n" + json.dumps(one(arguments.one, arguments.peers, arguments.rounds)))
        return 0
    codes = [arguments.other, Path(__file__).parents[2]]
    costs: list[dict[str, list[float]]] = [{figure: [] for figure in FIGURES} for _ in codes]
    for turn in range(arguments.turns):
        for number in (0, 1) if turn % 2 else (1, 0):
            found = measure(codes[number], arguments.peers, arguments.rounds)
            for figure in FIGURES:
                costs[number][figure] += found[figure]
    theirs, ours = ([statistics.median(of[figure]) for figure in FIGURES] for of in costs)
    print("\n| version | seconds a round | MB a round | seconds of CPU a round |\n|---|---|---|---|")
    for name, found in (("the other", theirs), ("this", ours)):
        print(f"| {name} | {found[0]:.2f} | {found[1] / 1e6:.4f} | {found[2]:.2f} |")
    ratios = [a / b - 1 for a, b in zip(ours, theirs, strict=True)]
    print(f"| difference | {ratios[0]:+.1%} | {ratios[1]:+.1%} | {ratios[2]:+.1%} |")
    return 0 if max(ratios[:2]) <= MOST else 1


if __name__ == "__main__":
    sys.exit(main())
