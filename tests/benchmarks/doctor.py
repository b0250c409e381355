"""Compares the speed of a run with the promise of `potluck doctor`.

    python -m tests.benchmarks.doctor [--rounds N] [--runs K] [--threads T] [--memory SIZE]

Real processes on this machine run `init`, `bootstrap`, `doctor` on the run's line, and then `join` with the same
options, alone. The table has doctor's role and tokens per second, the role of the plans, and the tokens per second of
the commits, waits between rounds included. The first round is not counted, since some of its work is done once. The
machine must be idle otherwise. Exits with 1 unless the roles agree and the speeds differ by 20 % at most.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WITHIN = 0.2
DEADLINE = 300.0


def potluck(*words: object, at: Path) -> str:
    """Runs a command and returns its output. Raises CalledProcessError."""
    command = [sys.executable, "-m", "peer.cli", *map(str, words)]
    return subprocess.run(command, cwd=at, capture_output=True, text=True, timeout=DEADLINE, check=True).stdout


def started(*words: object, at: Path) -> subprocess.Popen[str]:
    """Starts a process that prints events."""
    command = [sys.executable, "-m", "peer.cli", *map(str, words), "--json"]
    return subprocess.Popen(command, cwd=at, stdout=subprocess.PIPE, text=True)


def told(process: subprocess.Popen[str], kind: str) -> dict[str, Any]:
    """Returns the process's next event of this kind."""
    assert process.stdout is not None
    return next(event for event in map(json.loads, process.stdout) if event["event"] == kind)


def measure(folder: Path, rounds: int, options: Sequence[str]) -> tuple[str, float, str, float]:
    """Returns the promised role and tokens per second, and the actual ones."""
    potluck("init", "ours", "--rounds", rounds, at=folder)
    words = ("ours/run.toml", "--dir", "ours/node", "--corpus", "ours/corpus", "--host", "127.0.0.1", "--port", 0)
    node = started("bootstrap", *words, at=folder)
    try:
        line = told(node, "listening")["address"]
        same = ("--host", "127.0.0.1", *options)
        found = json.loads(potluck("doctor", line, "--dir", "asked", "--json", *same, at=folder))
        said = " ".join(f["text"] for f in found["findings"])
        promise = re.search(
            r"it would be (?:a |one of )?([a-z ]+?):? ([\d,]+) tokens per second by its measured speed", said
        )
        if promise is None:
            raise SystemExit(f"doctor promises nothing: {said}")
        peer = started("join", line, "--dir", "peer", *same, at=folder)
        try:
            commits = []
            while len(commits) < rounds + 1:
                commits.append(told(node, "commit"))
            role = told(peer, "role")["role"]
        finally:
            peer.terminate()
            peer.communicate()
    finally:
        node.terminate()
        node.communicate()
    tokens = sum(c["tokens"] for commit in commits[2:] for c in commit["contributions"])
    return (
        promise[1].strip(),
        float(promise[2].replace(",", "")),
        role,
        tokens / (commits[-1]["time"] - commits[1]["time"]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--memory", default="1GB")
    chosen = parser.parse_args()
    print("| promised | tokens/s | role in the run | tokens/s | of the promise |\n|---|---|---|---|---|")
    kept = True
    for _ in range(chosen.runs):
        with tempfile.TemporaryDirectory() as folder:
            options = ("--device", "cpu", "--threads", str(chosen.threads), "--memory", chosen.memory)
            promised, speed, role, real = measure(Path(folder), chosen.rounds, options)
        kept = kept and role in promised and abs(real / speed - 1) <= WITHIN
        print(f"| {promised} | {speed:,.0f} | {role} | {real:,.0f} | {real / speed:.2f} |", flush=True)
    print(f"{'kept' if kept else 'NOT KEPT'}: the same role, and within {WITHIN:.0%}")
    raise SystemExit(0 if kept else 1)


if __name__ == "__main__":
    main()
