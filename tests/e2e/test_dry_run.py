"""`potluck join --dry-run`: what a stranger is told before he joins, by real processes."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.faults.processes import DEADLINE, Swarm
from tests.faults.roles import NODE
from tests.support import potluck, tiny
from tests.support.roles import make_manifest


def rehearse(address: str, folder: Path, *options: object) -> subprocess.CompletedProcess[str]:
    """A peer of its own, with an empty home."""
    here = ("--host", "127.0.0.1", "--device", "cpu", "--dir", folder)
    return potluck.run("join", address, "--dry-run", *here, *options, text=True, timeout=DEADLINE)


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Swarm:
    """A node and one full replica, which have decided rounds."""
    manifest = make_manifest(start_peers=1)
    with Swarm(
        tmp_path_factory.mktemp("dry") / "run", manifest, tiny.OPERATORS[:1], module="tests.faults.paced"
    ) as made:
        made.start_node(NODE)
        made.start("a")
        made.committed(NODE, 2)
        yield made  # type: ignore[misc]


def test_it_says_what_this_machine_would_do_and_leaves(swarm: Swarm, tmp_path: Path) -> None:
    whole = tiny.full_memory(swarm.manifest)
    said = rehearse(swarm.addresses[0], tmp_path / "b", "--memory", whole, "--up", "20Mbps", "--down", "100Mbps")
    assert said.returncode == 0, said.stderr
    found, disk, beside, run, machine, line, role, fetch, end = said.stdout.splitlines()
    assert re.search(r"at most, as a full replica: \S+ [kMG]B of disk .* \S+ [kMG]B of updates sent a day", disk)
    assert "4% of its time at most is for measuring" in beside
    assert beside.endswith("it asks the run's nodes and peers, and no mirrors")
    assert f"run {swarm.manifest.run_id[:12]}… demo: " in found
    assert re.fullmatch(
        rf"run {swarm.manifest.run_id[:12]} demo: round \d+ of 1000000 is decided, 1 other peer there", run
    )
    assert machine.startswith("this machine: cpu, ")
    assert line == "its line: 20 Mb/s up, 100 Mb/s down"
    assert role == "it would be a full replica; how much it would train a day is not known, since its speed is not"
    assert re.fullmatch(r"it would fetch \S+ [kMG]B of state first \(\d+ s by its line\)", fetch)
    assert "nothing was trained" in end
    assert not any(e.kind == "ready" and e.fields["peer"] not in _known(swarm) for e in swarm.events(NODE))


def _known(swarm: Swarm) -> set[str]:
    return {e.fields["peer"] for e in swarm.events("a") if e.kind == "started"}


def test_a_spare_is_told_why(swarm: Swarm, tmp_path: Path) -> None:
    said = rehearse(
        swarm.addresses[0], tmp_path / "c", "--memory", tiny.full_memory(swarm.manifest) - 1, "--up", "1Mbps"
    )
    assert said.returncode == 0, said.stderr
    assert "it would wait as a spare: its memory holds " in said.stdout
    assert "its line: 1 Mb/s up, " in said.stdout, "the downlink was measured"


@pytest.mark.parametrize(
    ("options", "told"),
    [(("--memory", "1kB"), "memory: 0 MB offered, one block of this model needs"), (("--json",), "without --json")],
)
def test_what_would_keep_it_from_joining_is_one_line(
    swarm: Swarm, tmp_path: Path, options: tuple[str, ...], told: str
) -> None:
    said = rehearse(swarm.addresses[0], tmp_path / "d", *options)
    assert said.returncode == 2
    (line,) = said.stderr.strip().splitlines()
    assert told in line
