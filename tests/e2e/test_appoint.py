"""A run changes its operators until none of the first ones is left: real nodes, real commands, SIGKILL."""

from __future__ import annotations

import dataclasses
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from peer.events import Event
from protocol.run.manifest import Manifest
from protocol.wire import encoding
from tests.faults.processes import Swarm
from tests.support import potluck
from tests.support.quorum import KEYS, four_nodes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]
DEADLINE = 400.0
"""Seconds for anything to happen: a peer that asks for payloads tries dead nodes first, for some seconds each."""


def alone(rounds: int) -> Manifest:
    """A run of one operator."""
    return dataclasses.replace(four_nodes(rounds, start_peers=2), operators=(KEYS[0].peer_id,), quorum=1)


def decree_of(event: Event) -> dict[str, Any]:
    """The decree in a commit, empty where there is none."""
    enacted = event.fields["decree"] if event.kind == "commit" else None
    return enacted["decree"] if enacted else {}


class Operators(Swarm):
    """A swarm to which operators come; `at` is where each node's line leads."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, alone(rounds=10**6), KEYS[:1], module="tests.faults.paced")
        self.at: dict[str, str] = {}

    def begin(self, *names: str) -> None:
        """Starts nodes, of keys that they make for themselves where they are new."""
        for name in names:
            if name not in self.nodes:
                self.nodes.append(name)
            self.start_node(name)
            self.at[name] = self.addresses[-1]
            self.ids[name] = self.at[name].partition("#")[0].rpartition("/p2p/")[2]

    def typed(self, by: str, action: str, *more: str) -> subprocess.Popen[str]:
        """`potluck run`, as this node's operator types it, with the line of its own node."""
        line = ("run", action, self.at[by], *more, "--dir", self.folder / by)
        return potluck.Popen(*line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def refused(self, by: str, *typed: str) -> str:
        """The one line that it answers instead."""
        process = self.typed(by, *typed)
        _, errors = process.communicate(timeout=DEADLINE)
        assert process.returncode in (1, 2)
        assert errors.count("\n") == 1
        return errors

    def decree(self, by: tuple[str, ...], *typed: str) -> None:
        """All of these type it, again while too few give signs of life, until it is decided."""
        end = time.monotonic() + DEADLINE
        while True:
            processes = [self.typed(who, *typed) for who in by]
            try:
                told = [process.communicate(timeout=DEADLINE) for process in processes]
            finally:
                for process in processes:
                    process.kill()
                    process.wait()
            if all(process.returncode == 0 for process in processes):
                assert all("decided; it is in the log" in out for out, _ in told)
                return
            early = any("give signs of life" in errors for _, errors in told)
            assert early, told
            assert time.monotonic() < end, told

    def round(self, name: str) -> int:
        """The newest in a node's log."""
        return max((e.fields["round"] for e in self.events(name) if e.kind == "commit"), default=-1)

    def goes_on(self, name: str, rounds: int) -> None:
        last = self.round(name) + rounds
        self.wait(name, lambda e: e.kind == "commit" and e.fields["round"] >= last, f"round {last}")

    def works(self, name: str, peer: str) -> None:
        """A node's log gets work of this peer."""
        known = len(self.events(name))

        def brings(event: Event) -> bool:
            return event.kind == "commit" and any(
                peer in [s["peer"] for s in c["shares"]] for c in event.fields["contributions"]
            )

        self.wait(name, brings, f"work of {peer}", known)


def test_a_run_outlives_everybody_who_began_to_operate_it(tmp_path: Path) -> None:
    with Operators(tmp_path / "run") as swarm:
        swarm.begin("node-0")
        for name in ("one", "two"):
            swarm.start(name)
        swarm.wait("node-0", lambda e: e.kind == "commit" and e.fields["round"] == 2, "round 2")

        # three more, and all four decide
        swarm.begin("node-1", "node-2", "node-3")
        for name in ("node-1", "node-2", "node-3"):
            swarm.wait(
                name,
                lambda e: e.kind == "warning" and "waits until the operators appoint it" in e.fields["text"],
                "why",
            )
        assert "appoint others first" in swarm.refused("node-0", "quorum", "4")
        assert "3 nodes bear no dishonest one" in swarm.refused("node-0", "quorum", "3")
        assert "is no operator of" in swarm.refused("node-1", "appoint", swarm.at["node-1"])
        swarm.decree(("node-0",), "appoint", swarm.at["node-1"])
        swarm.decree(("node-0",), "appoint", swarm.at["node-2"], swarm.at["node-3"], "--reason", "friends")
        told = decree_of(swarm.wait("node-3", lambda e: bool(decree_of(e).get("reason")), "the decree"))
        assert (told["action"], told["reason"]) == ("appoint", "friends")
        assert [operator["peer"] for operator in told["operators"]] == [swarm.ids["node-2"], swarm.ids["node-3"]]
        swarm.decree(("node-0",), "quorum", "4")
        swarm.goes_on("node-1", 2)

        # the one that began it is gone for good
        swarm.kill("node-0")
        swarm.goes_on("node-2", 3)
        swarm.lines["three"] = swarm.at["node-2"]
        swarm.start("three")
        three = swarm.wait("three", lambda e: e.kind == "started", "its start").fields["peer"]
        swarm.works("node-1", three)

        # another one takes its place, and another one goes
        left = ("node-1", "node-2", "node-3")
        swarm.begin("node-4")
        swarm.decree(left, "appoint", swarm.at["node-4"])
        swarm.wait("node-4", lambda e: decree_of(e).get("action") == "appoint", "the decree")
        swarm.decree(left, "dismiss", swarm.ids["node-0"][-8:])
        swarm.goes_on("node-4", 2)
        swarm.kill("node-1")
        swarm.goes_on("node-4", 3)

        left = ("node-2", "node-3", "node-4")
        last = swarm.round("node-4") + 8
        swarm.decree(left, "set", "--rounds", str(last))
        for name in ("one", "two", "three"):
            assert swarm.ended(name) == 0
        for name in left:
            swarm.wait(name, lambda e: e.kind == "run_finished" and e.fields["round"] == last, "the end")
            swarm.kill(name)
        found = potluck.run("log", "verify", swarm.folder / "node-4", text=True, timeout=DEADLINE)
        assert found.returncode == 0, found.stdout + found.stderr
        logs = {name: [r.digest for r in archive.commits] for name, archive in swarm.logs()}
        assert len(logs["node-4"]) == last + 1
        for name, log in logs.items():
            assert log == logs["node-4"][: len(log)], f"{name} has another history"
        with swarm.log_of("node-4") as archive:
            newest = encoding.decode_record(archive.records[-1], "the log")
            assert set(newest.votes) == {swarm.ids[name] for name in left}
            assert newest.commit.board.names == tuple(swarm.ids[f"node-{number}"] for number in range(1, 5))


def test_who_is_dismissed_ends_when_the_others_know(tmp_path: Path) -> None:
    with Operators(tmp_path / "run") as swarm:
        swarm.begin("node-0")
        for name in ("one", "two"):
            swarm.start(name)
        swarm.wait("node-0", lambda e: e.kind == "commit" and e.fields["round"] == 1, "round 1")
        swarm.begin("node-1")
        swarm.decree(("node-0",), "appoint", swarm.at["node-1"])
        swarm.wait("node-1", lambda e: decree_of(e).get("action") == "appoint", "the decree")
        swarm.decree(("node-0",), "dismiss", swarm.ids["node-0"])
        assert swarm.ended("node-0") == 0
        said = [e.fields["text"] for e in swarm.events("node-0") if e.kind == "warning"]
        assert any("the operators dismissed this one" in text for text in said)
        swarm.goes_on("node-1", 3)
        swarm.kill("node-1")
        swarm.begin("node-1")
        swarm.goes_on("node-1", 2)
