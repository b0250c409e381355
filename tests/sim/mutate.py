"""Takes lines out of the pumps, one at a time, and sees whether the simulation notices:

    python -m tests.sim.mutate --lines 20 --seed 0

The lines are drawn among those of peer/node/rounds.py and bootstrap/node.py without which the file still compiles. A
line counts as noticed when the seeds that `make sim` runs show a broken promise, do not run at all, or never see what
they should.
"""

from __future__ import annotations

import argparse
import ast
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.sim import bugs
from tests.sim.run import SEEDS

PATIENCE = 1800.0
"""Seconds after which a simulation that does not end counts as one that noticed."""


def deletable(source: str) -> list[int]:
    """The numbers of the lines of code, comments and docstrings aside, without which `source` still compiles."""
    lines, tree = source.splitlines(keepends=True), ast.parse(source)
    prose = {
        number
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    found = []
    for number, line in enumerate(lines, 1):
        if number in prose or not line.strip() or line.strip().startswith(("#", "import ", "from ", "@")):
            continue
        try:
            ast.parse("".join(lines[: number - 1] + lines[number:]))
        except SyntaxError:
            continue
        found.append(number)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    places = [
        (name, number) for name in (bugs.ROUNDS, bugs.NODE) for number in deletable((bugs.ROOT / name).read_text())
    ]
    noticed = 0
    for name, number in random.Random(arguments.seed).sample(places, arguments.lines):
        with tempfile.TemporaryDirectory(prefix="potluck-mutant-") as folder:
            bugs.copy_tree(Path(folder))
            path = Path(folder) / name
            lines = path.read_text().splitlines(keepends=True)
            gone = lines.pop(number - 1)
            path.write_text("".join(lines))
            try:
                text = bugs.simulate(Path(folder), f"0:{SEEDS}", timeout=PATIENCE)
            except subprocess.TimeoutExpired:
                text = "it does not end"
            good = "\n0 broken promises" not in text or "never happened" in text
            noticed += good
            first = next((x for x in reversed(text.splitlines()) if x.strip()), "") if good else ""
            print(f"{'noticed' if good else 'MISSED '} {name}:{number}: {gone.strip()[:80]}  {first[:100]}", flush=True)
    print(f"{noticed} of {arguments.lines} noticed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
