"""Three of four operators ban a peer while it trains, and let it in again: real nodes, real commands."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from peer.events import Event
from protocol.errors import BannedError, ClosedError
from protocol.run.manifest import AdmissionSpec
from tests.faults.processes import DEADLINE, Swarm
from tests.support import potluck
from tests.support.bans import command, together
from tests.support.quorum import KEYS, four_nodes


def test_operators_ban_a_peer_and_admit_it_again(tmp_path: Path) -> None:
    manifest = four_nodes(rounds=10**6, start_peers=2)
    with Swarm(tmp_path / "run", manifest, KEYS, module="tests.faults.paced") as swarm:
        swarm.start_all("good", "bad")
        bad = swarm.started("bad")

        def plans(event: Event) -> set[str]:
            plan: dict[str, Any] | None = event.fields["plan"]
            return {s["peer"] for r in plan["replicas"] for s in r["stages"]} if plan else set()

        swarm.wait("node-2", lambda e: e.kind == "commit" and bad in plans(e), "a plan with it")
        for told in together(swarm, "ban", f"Ada·{bad[-4:]}", "--reason", "sends noise"):
            assert told.endswith("decided; it is in the log, and holds from the next round on\n")
        said = swarm.wait("node-2", lambda e: e.kind == "commit" and bool(e.fields["decree"]), "the decree").fields
        decree, signatures = said["decree"]["decree"], said["decree"]["signatures"]
        assert (decree["action"], decree["subject"], decree["reason"]) == ("ban", bad, "sends noise")
        assert len(signatures) == 3
        assert swarm.ended("bad") == BannedError.exit_code
        line = swarm.errors("bad").splitlines()[-1]
        assert f"peer {bad}: it is banned: sends noise; ask an operator" in line
        assert line.endswith(f"potluck run admit {swarm.addresses[0]} {bad}")
        swarm.committed("node-2", said["round"] + 3)
        for event in swarm.events("node-2"):
            if event.kind == "commit" and event.fields["round"] >= said["round"]:
                assert bad not in plans(event)
        swarm.start("bad")
        assert swarm.ended("bad") == BannedError.exit_code, "also where it begins"
        together(swarm, *line.split("potluck run ")[1].split(" ")[::2])
        swarm.start("bad")
        swarm.wait(
            "node-2",
            lambda e: e.kind == "commit" and e.fields["round"] > said["round"] and bad in plans(e),
            "its return",
        )
        for name in list(swarm.running):
            swarm.kill(name)
        swarm.check()


def test_somebody_is_admitted_to_a_closed_run_in_which_nobody_is(tmp_path: Path) -> None:
    manifest = four_nodes(rounds=10**6, start_peers=1)
    manifest = dataclasses.replace(manifest, admission=AdmissionSpec(mode="listed"))
    with Swarm(tmp_path / "run", manifest, KEYS, module="tests.faults.paced") as swarm:
        swarm.start_all("peer")
        assert swarm.ended("peer") == ClosedError.exit_code
        (peer,) = [e.fields["peer"] for e in swarm.events("peer") if e.kind == "started"]
        line = swarm.errors("peer").splitlines()[-1]
        assert f"peer {peer}: the run is closed, and it is not admitted; send this id to an operator" in line
        assert f"potluck run admit {swarm.addresses[0]} {peer}, and join again" in line
        assert "invitation" in line
        together(swarm, "admit", peer)
        swarm.start("peer")
        swarm.wait(
            "node-2",
            lambda e: (
                e.kind == "commit" and any(peer in [s["peer"] for s in c["shares"]] for c in e.fields["contributions"])
            ),
            "its work in a commit",
        )
        for name in list(swarm.running):
            swarm.kill(name)
        swarm.check()


def test_only_an_operator_of_the_run_can_decree(tmp_path: Path) -> None:
    manifest = four_nodes(rounds=10**6, start_peers=2)
    with Swarm(tmp_path / "run", manifest, KEYS, module="tests.faults.paced") as swarm:
        swarm.start_node("node-0")
        victim = manifest.operators[1]
        for folder, peer, reason in (
            ("stranger", victim, "is no operator of"),
            ("nobody", victim, "has no key; give the folder of your bootstrap node"),
            ("node-0", "nobody", "none that is known ends so"),
        ):
            if folder == "stranger":
                potluck.run("key", "--dir", swarm.folder / folder, check=True)
            told = potluck.run(*command(swarm, folder, "ban", peer), text=True, timeout=DEADLINE)
            assert (told.returncode, told.stdout) == (2, "")
            assert reason in told.stderr
            assert told.stderr.count("\n") == 1
