"""`potluck bootstrap --audit`: a second process follows the log, is restarted when it dies, ends with its node."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from pathlib import Path

import pytest

from peer.cli.auditing import auditor
from peer.demo import recipe
from protocol.identity import short_peer
from tests.e2e import swarms
from tests.faults.processes import DEADLINE, Swarm

pytestmark = pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="the auditor is looked for in /proc")

NODE = "node-0"


def auditors(folder: Path) -> list[int]:
    """The processes that follow a log into this folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = entry.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"peer.cli.auditing" in command and str(folder).encode() in command:
            found.append(int(entry.parent.name))
    return found


def until_none(folder: Path) -> bool:
    """Whether they end within the deadline."""
    end = time.monotonic() + DEADLINE
    while auditors(folder):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def test_an_auditor_follows_the_log_through_a_kill_and_ends_with_its_node(tmp_path: Path) -> None:
    chosen = swarms.options(tmp_path / "unused", full=2, rounds=10**6, inner_steps=10)
    made = swarms.manifest(chosen, timing={"round_deadline": 60.0, "round_seconds": 3.0})
    manifest = dataclasses.replace(made, checkpoint_rounds=2)
    names = [peer.name for peer in recipe.make_peers(manifest, chosen)]
    with Swarm(tmp_path / "run", manifest, (recipe.identity_of(0, "bootstrap"),)) as swarm:
        swarm.options[NODE] = ["--audit"]
        swarm.start_node(NODE)
        folder, follower = tmp_path / "run" / NODE / "audit", auditor(tmp_path / "run" / NODE)

        def attests(after: int) -> int:
            """Waits until it has attested a later round; which."""
            said = swarm.wait(
                NODE,
                lambda e: e.kind == "attest" and e.fields["peer"] == follower and e.fields["round"] > after,
                f"its state after round {after}",
            )
            return int(said.fields["round"])

        for name in names:
            swarm.start(name)
        round = attests(0)
        (first,) = auditors(folder)
        os.kill(first, signal.SIGKILL)
        told = swarm.wait(NODE, lambda e: e.kind == "warning" and "it is started again" in e.fields["text"], "that")
        assert "exit code -9" in told.fields["text"]
        attests(round + 2)
        assert auditors(folder) not in ([], [first])
        commits = [e for e in swarm.events(NODE) if e.kind == "commit"]
        planned = {s["peer"] for c in commits for r in c.fields["plan"]["replicas"] for s in r["stages"]}
        assert follower not in planned
        follows = f"audit: peer {short_peer(follower)} follows the log beside this node"
        assert [e.fields["text"] for e in swarm.events(NODE) if e.kind == "warning"].count(follows) == 2
        swarm.kill(NODE)
        assert until_none(folder), "who was started by a node that is gone ends"
