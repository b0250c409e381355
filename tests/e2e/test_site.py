"""`potluck join --site`: two machines hold a model together and are one peer of a real run."""

from __future__ import annotations

import re
import shlex
import signal
from pathlib import Path

from peer.demo import recipe
from tests.e2e import swarms
from tests.faults.processes import DEADLINE, Swarm
from tests.support import potluck

ROUNDS = 2
PEER, OTHER = "rank-0", "rank-1"


def test_two_machines_are_one_peer_of_a_run(tmp_path: Path) -> None:
    """The line that the peer prints starts the other one. The log replays to what they train."""
    chosen = swarms.options(tmp_path / "unused", full=1, chains=0, rounds=ROUNDS, inner_steps=2)
    with Swarm(tmp_path / "run", swarms.manifest(chosen), (recipe.identity_of(0, "bootstrap"),)) as swarm:
        swarm.options[PEER] = ["--site", f"127.0.0.1:{potluck.free_port()}", "--rank", "0/2"]
        swarm.start_node("node-0")
        swarm.start(PEER)
        said = swarm.wait(PEER, lambda e: e.kind == "warning", "the line for the other machine").fields["text"]
        typed = re.fullmatch(r"site: waiting for rank 1/2; type there, with its K: potluck (.*)", said)
        assert typed is not None, said
        arguments = [*shlex.split(typed[1].replace("K/2", "1/2")), "--device", "cpu", "--memory", "1GB"]
        folder = tmp_path / "run" / OTHER
        folder.mkdir()
        with open(folder / "stdout.txt", "wb") as out, open(folder / "stderr.txt", "wb") as errors:
            swarm.running[OTHER] = potluck.Popen(*arguments, "--dir", folder, stdout=out, stderr=errors)
        started = swarm.wait(PEER, lambda e: e.kind == "started", "its start")
        assert started.fields["device"] == "2 x cpu"
        swarm.wait("node-0", lambda e: e.kind == "run_finished", "the end of the run")
        assert swarm.ended(PEER) == 0
        assert started.fields["peer"] in str(swarm.committed("node-0", 1).fields["contributions"])
        other = swarm.running.pop(OTHER)
        other.send_signal(signal.SIGINT)
        other.wait(DEADLINE)
        assert (folder / "stdout.txt").read_text().startswith("site: rank 1/2 of the peer at 127.0.0.1:")
        swarm.kill("node-0")
        assert swarm.check() == ROUNDS
