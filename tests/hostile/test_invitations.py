"""A closed run, an operator's invitation for two, and more strangers than that: real nodes, real commands."""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path
from typing import Any

from peer.events import Event
from protocol.errors import ClosedError
from protocol.ledger import access
from protocol.run.manifest import AdmissionSpec
from tests.faults.processes import DEADLINE, Swarm
from tests.support import potluck
from tests.support.quorum import KEYS, four_nodes


def typed(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """What a person types, and reads."""
    return potluck.run(*arguments, text=True, timeout=DEADLINE)


def test_an_invitation_lets_two_strangers_into_a_closed_run_and_nobody_else(tmp_path: Path) -> None:
    manifest = four_nodes(rounds=10**6, start_peers=1)
    manifest = dataclasses.replace(manifest, admission=AdmissionSpec(mode="listed"))
    with Swarm(tmp_path / "run", manifest, KEYS, module="tests.faults.paced") as swarm:
        swarm.start_all()
        made = typed("invite", swarm.addresses[0], "--count", "2", "--dir", swarm.folder / "node-1")
        assert made.returncode == 0, made.stderr
        (line,) = made.stdout.splitlines()
        assert line.startswith(swarm.addresses[0] + "#")
        assert "for 2 peers until " in made.stderr

        def ended(name: str) -> str:
            assert swarm.ended(name) == ClosedError.exit_code
            return swarm.errors(name).splitlines()[-1]

        def joined(event: Event) -> list[dict[str, Any]]:
            return event.fields["joined"] if event.kind == "commit" else []

        def brought(event: Event, peer: str) -> bool:
            return event.kind == "commit" and any(
                peer in [s["peer"] for s in c["shares"]] for c in event.fields["contributions"]
            )

        swarm.start("stranger")
        assert "the run is closed, and it is not admitted; send this id to an operator" in ended("stranger")
        inside = []
        for name in ("friend-0", "friend-1"):
            swarm.lines[name] = line
            swarm.start(name)
            peer = swarm.started(name)
            swarm.wait("node-2", lambda e, p=peer: p in {x["peer"] for x in joined(e)}, "the commit")
            swarm.wait("node-2", lambda e, p=peer: brought(e, p), "its work in a commit")
            inside.append(peer)
        swarm.lines["late"] = line
        swarm.start("late")
        assert "its invitation is used up, by 2 of 2; send this id to an operator" in ended("late")
        for name in list(swarm.running):
            swarm.kill(name)
        invited = [x for e in swarm.events("node-2") for x in joined(e)]
        assert [said["peer"] for said in invited] == inside
        assert {said["operator"] for said in invited} == {KEYS[1].peer_id}
        swarm.check()
        verified = typed("log", "verify", swarm.folder / "node-2")
        assert verified.returncode == 0, verified.stderr


def test_what_is_wrong_with_an_invitation_is_said_in_one_line(tmp_path: Path) -> None:
    manifest = four_nodes(rounds=10**6, start_peers=1)
    with Swarm(tmp_path / "run", manifest, KEYS, module="tests.faults.paced") as swarm:
        swarm.start_node("node-0")
        place, own = swarm.addresses[0], swarm.folder / "node-0"
        stranger = swarm.folder / "stranger"
        assert typed("key", "--dir", stranger).returncode == 0
        line = typed("invite", place, "--dir", own).stdout.strip()
        ticket = access.read_ticket(line.rpartition("#")[2], manifest.run_id)
        more = dataclasses.replace(ticket, invitation=dataclasses.replace(ticket.invitation, count=9)).text()
        for arguments, reason in (
            (("invite", place, "--dir", stranger), "is no operator of"),
            (("invite", place, "--dir", swarm.folder / "nobody"), "has no key; give the folder of your bootstrap node"),
            (("invite", place, "--dir", own, "--count", "1001"), "--count 1001: must be from 1 to 1000"),
            (
                ("invite", place, "--dir", own, "--expires", "soon"),
                "--expires soon: not a time; write it as 30m, 12h or 7d",
            ),
            (("invite", place, "--dir", own, "--reason", "x" * 65), "--reason: may have 64 printable characters"),
            (("join", line[:-4], "--dir", tmp_path / "a"), "the invitation after the run id is cut off or changed"),
            (
                ("join", f"{place}#{more}", "--dir", tmp_path / "b"),
                "RUN: its invitation is not what the operator signed",
            ),
        ):
            found = typed(*arguments)
            assert (found.returncode, found.stdout) == (2, ""), found
            assert reason in found.stderr
            assert found.stderr.count("\n") == 1
