"""Three of four operators make a run shorter while it goes on: real nodes, real commands."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator

import pytest

from tests.faults.processes import DEADLINE, Swarm
from tests.support import potluck
from tests.support.bans import command, together
from tests.support.quorum import KEYS, four_nodes

MORE = 6
"""Rounds that the run goes on for; without a peer it goes no further while the commands are typed."""


def test_a_run_is_not_set_to_nothing() -> None:
    refused = potluck.run("run", "set", "my-run.toml", text=True, timeout=DEADLINE)
    assert refused.returncode == 2
    assert refused.stderr == "potluck: potluck run set: nothing is given; see --help, and give what is to be changed\n"


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    """Four nodes and two peers."""
    manifest = four_nodes(rounds=10**6, start_peers=2)
    with Swarm(tmp_path_factory.mktemp("set") / "run", manifest, KEYS, module="tests.faults.paced") as made:
        made.start_all("one", "two")
        yield made


def test_whoever_waits_for_others_outlives_a_restart_of_his_node(swarm: Swarm) -> None:
    swarm.committed("node-0", 2)
    typed = command(swarm, "node-0", "set", "--rounds", "900000")
    waiting = potluck.Popen(*typed, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert waiting.stdout is not None
    try:
        assert "signed by 1 of 3" in waiting.stdout.readline()
        swarm.kill("node-0")
        assert "your node does not answer; it is asked again" in waiting.stdout.readline()
        before = len(swarm.events("node-0"))
        swarm.start("node-0")
        swarm.wait("node-0", lambda e: e.kind == "listening", "its address", before)
        others = [
            potluck.Popen(*command(swarm, node, "set", "--rounds", "900000"), stdout=subprocess.DEVNULL)
            for node in ("node-1", "node-2")
        ]
        said, errors = waiting.communicate(timeout=DEADLINE)
    finally:
        waiting.kill()
    assert ([other.wait(DEADLINE) for other in others], waiting.returncode, errors) == ([0, 0], 0, "")
    assert "decided; it is in the log" in said
    assert "does not answer" not in said, "it is said once"


def test_a_run_ends_when_its_operators_say_so(swarm: Swarm) -> None:
    """The last test: it ends the run."""
    peers = {name: swarm.started(name) for name in ("one", "two")}
    swarm.committed("node-0", 3)
    for name, peer in peers.items():
        swarm.kill(name)
        swarm.wait("node-0", lambda e, peer=peer: e.kind == "gone" and e.fields["peer"] == peer, "its going")
    before = len(swarm.events("node-2"))
    last = MORE + max(e.fields["round"] for e in swarm.events("node-0") if e.kind == "commit")

    too_short = command(swarm, "node-0", "set", "--rounds", "2")
    refused = potluck.run(*too_short, text=True, timeout=DEADLINE)
    assert refused.returncode == 1
    assert "that decree cannot be: round" in refused.stderr
    assert refused.stderr.count("\n") == 1

    for told in together(
        swarm, "set", "--rounds", str(last), "--total-steps", "500", "--share", "0.9", "--reason", "enough"
    ):
        assert (
            f"set {last:,} rounds, a schedule of 500 inner steps, a probation of 0 rounds, at most 90.0% of a" in told
        )
        assert "strangers of one range: decided" in told
    decreed = swarm.wait("node-2", lambda e: e.kind == "commit" and bool(e.fields["decree"]), "the decree", before)
    decree = decreed.fields["decree"]["decree"]
    assert (decree["action"], decree["reason"]) == ("set", "enough")
    limits = {"probation": 0, "share": 0.9, "range_sessions": 0, "range_share": 1.0}
    assert decree["schedule"] == {"rounds": last, "total_steps": 500, "limits": limits}
    for name in peers:
        swarm.start(name)
    for name in peers:
        assert swarm.ended(name) == 0
    ends = {swarm.wait(n, lambda e: e.kind == "run_finished", "the end").fields["round"] for n in swarm.nodes}
    (end,) = ends
    assert end >= last, "rounds without work come on top"
    shown = ("monitor", swarm.addresses[0], "--once", "--json")
    state = json.loads(potluck.run(*shown, text=True, timeout=DEADLINE, check=True).stdout)
    assert (state["finished"], state["round"], state["rounds"]) == (True, end, end)
    for name in swarm.nodes:
        swarm.kill(name)
    assert swarm.check() == end
