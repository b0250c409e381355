"""What a volunteer types who has Python and nothing else, up to a contribution to a run of two machines, timed.

    python -m tests.benchmarks.first_contribution --torch torch==2.13.0     # writes docs/results/first-contribution.md

Needs root and Linux (iproute2, util-linux). Two homes behind a router, each with a network of its own, are the machines
(tests/faults/homes.py): the operator's has a node and a peer, and a run as `potluck init` makes it. The volunteer's has
an empty home folder, Python alone in its PATH, and no sight of the source tree. The packages are installed with this
machine's network, the rest is typed in the volunteer's. A second run, without probation, shows when tokens are counted.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from peer.net import keyfile
from peer.node.open_run import KEY, read_manifest
from peer.ui.text import duration, size
from protocol.identity import Identity
from protocol.run.manifest import Manifest
from tests.docs.typed import ROOT, Terminal
from tests.e2e.test_wheel import built
from tests.faults.homes import homes
from tests.faults.processes import Swarm
from tests.support import potluck
from tests.support.lab import Place

RESULT = ROOT / "docs" / "results" / "first-contribution.md"
OPERATOR, VOLUNTEER = "operator", "volunteer"
NODE, OWN = "node-0", "own"
LIMIT = 240.0
"""Seconds in which it has to be done."""
ENTER = "mount -t tmpfs none {source} && cd {home} && exec env -i {variables} /bin/sh -c {line}"
"""How a line is typed where the source tree is out of sight."""
KEPT, COUNTED = r"round (\d+): your work is good and is kept.*", r"round (\d+) is applied: [1-9][\d,]* of .*"
"""What a volunteer reads on probation, and without it."""


class Machine:
    """The volunteer's, with its home in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.home, programs = folder / "home", folder / "bin"
        for made in (self.home, programs):
            made.mkdir()
        (programs / "python3").symlink_to(os.path.realpath(sys.executable))
        needed = {name: text for name, text in os.environ.items() if name.startswith(("PIP_", "SSL_"))}
        self._env = needed | {"HOME": str(self.home), "PATH": str(programs), "LANG": "C.UTF-8", "PYTHONUNBUFFERED": "1"}

    def command(self, line: str, before: Sequence[str] = ()) -> list[str]:
        """A command that types the line there. before: what it begins with."""
        variables = " ".join(f"{name}={shlex.quote(text)}" for name, text in self._env.items())
        source, home, typed = (shlex.quote(text) for text in (str(ROOT), str(self.home), f"exec {line}"))
        enter = ENTER.format(source=source, home=home, variables=variables, line=typed)
        return [*before, "unshare", "--mount", "/bin/sh", "-c", enter]

    def ends(self, line: str) -> tuple[float, str]:
        """Seconds that it takes, and what it says. Raises SystemExit where it fails."""
        began = time.monotonic()
        done = subprocess.run(self.command(line), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise SystemExit(f"{line}: ended with exit code {done.returncode}: {done.stdout[-2000:]}")
        return time.monotonic() - began, done.stdout


def taken(folder: Path) -> int:
    """Bytes of disk."""
    return sum(512 * os.lstat(path).st_blocks for path in folder.rglob("*"))


def fetched(said: str, wheel: Path) -> float:
    """Bytes of the packages that pip says it takes, our own not counted."""
    units = {"kB": 1e3, "MB": 1e6, "GB": 1e9}
    found = re.findall(r"Downloading \S+ \(([\d.]+) (kB|MB|GB)\)", said)
    files = {Path(path) for path in re.findall(r"Processing (\S+\.whl)", said)} - {Path(f"./{wheel.name}")}
    return sum(float(n) * units[unit] for n, unit in found) + sum(path.stat().st_size for path in files)


@dataclasses.dataclass
class Made:
    """A run as `potluck init` makes it: its manifest, its text, and its node's key."""

    manifest: Manifest
    corpus: Path
    key: Identity

    @classmethod
    def at(cls, folder: Path) -> Made:
        """Made in `folder`."""
        potluck.run("init", "my-run", cwd=folder, check=True)
        at = folder / "my-run"
        return cls(read_manifest(at / "run.toml"), at / "corpus", keyfile.load_or_create(at / "node" / KEY))


@dataclasses.dataclass
class Joined:
    """What came of the third line. `seconds`: until the volunteer read `sign`, the last of `said`."""

    line: str
    seconds: float
    said: list[str]
    disk: int


def joined(folder: Path, machine: Machine, run: Made, places: dict[str, Place], sign: str) -> Joined:
    """Types the third line while the operator's own peer trains, until the volunteer reads `sign`."""
    there = dict.fromkeys((NODE, OWN), places[OPERATOR])
    with Swarm(folder, run.manifest, (run.key,), places=there, corpus=run.corpus) as swarm:
        swarm.start_all(OWN)
        address = swarm.wait(NODE, lambda e: e.kind == "listening", "its line").fields["line"]
        swarm.committed(NODE, 1)
        line, began = f"potluck/bin/potluck join {address}", time.monotonic()
        out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        process = subprocess.Popen(machine.command(line, places[VOLUNTEER][1]), **out)
        with contextlib.closing(Terminal(process, None)) as terminal:
            terminal.until(sign)
            seconds = time.monotonic() - began
            said = terminal.said.splitlines()
            terminal.interrupt()
            terminal.ended()
        last = next(i for i, text in enumerate(said) if re.search(sign, text))
        own = (machine.home / "potluck-peer").rename(machine.home / folder.name)
        return Joined(line, seconds, said[: last + 1], taken(own))


def page(install: Sequence[str], seconds: Sequence[float], packages: float, disk: int, found: Sequence[Joined]) -> str:
    """The document. install, seconds: the first two lines, and how long each takes."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    kept, counted = found
    rows = [
        f"| `{line}` | {took:.0f} |" for line, took in zip((*install, kept.line), (*seconds, kept.seconds), strict=True)
    ]
    whole = sum(seconds) + kept.seconds
    free = sum(seconds) + counted.seconds
    return f"""# From nothing to a contribution

`python -m tests.benchmarks.first_contribution {shlex.join(sys.argv[1:])}`, commit {commit}, {os.cpu_count()} cores with
a load of {os.getloadavg()[1]:.1f}. The volunteer's machine has an empty home folder, Python alone in its PATH, and no
sight of the source tree; the operator's has a node and a peer. Each is a network namespace behind one router.
PyTorch's wheel, the processor build, lay on the disk already; the other packages came from the package index. Elsewhere
the second line has `--extra-index-url`, as the [README](../../README.md) shows it, and fetches that wheel, too.

The run is one that `potluck init` makes: rounds of 30 s, a probation of 8 rounds.

| typed | seconds |
|---|---|
{chr(10).join(rows)}
| in all, up to a contribution that is checked and kept | **{duration(whole)}** |

Wanted: three lines, less than {duration(LIMIT)}. In the same run without probation, the third line takes
{counted.seconds:.0f} s until tokens of the volunteer are counted, {duration(free)} in all. With it they count eight
rounds of 30 s after the first.

Packages: {size(packages)}, PyTorch's with them. Disk: {size(disk)} for the environment, {size(kept.disk)} for the
peer's folder.

What the volunteer reads:

```
{chr(10).join(kept.said)}
```

and without probation at last:

```
{counted.said[-1]}
```
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--torch", default="torch", help="as pip reads it")
    typed = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="potluck-first-") as name, homes(OPERATOR, VOLUNTEER) as network:
        folder = Path(name)
        machine, wheel, run = Machine(folder), built(folder / "wheel"), Made.at(folder)
        shutil.copy(wheel, machine.home)
        install = "python3 -m venv potluck", f"potluck/bin/pip install ./{wheel.name} {typed.torch}"
        steps = [machine.ends(line) for line in install]
        packages, disk = fetched(steps[1][1], wheel), taken(machine.home / "potluck")
        free = dataclasses.replace(run.manifest.admission, probation=0)
        counting = dataclasses.replace(run, manifest=dataclasses.replace(run.manifest, admission=free))
        found = [
            joined(folder / "kept", machine, run, network.places, KEPT),
            joined(folder / "counted", machine, counting, network.places, COUNTED),
        ]
        RESULT.write_text(page(install, [seconds for seconds, _ in steps], packages, disk, found), encoding="utf-8")
    print(RESULT.read_text(encoding="utf-8"))
    return 0 if all(sum(seconds for seconds, _ in steps) + one.seconds < LIMIT for one in found) else 1


if __name__ == "__main__":
    sys.exit(main())
