"""Roles change in a running swarm of real processes: a stage comes back with more memory, a newcomer on a slow line finds a place, a full
replica comes back with less memory and is a stage, a lost stage is replaced, and who runs out of memory gets a smaller role. No round
is held up by who comes, and nobody else's work is lost.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peer.demo import recipe
from protocol.run.manifest import Manifest, TimingSpec
from tests import tiny
from tests.e2e import swarms
from tests.faults import paced
from tests.faults.processes import Swarm

NODE = "node-0"
SECONDS = 3.0
"""Of a round."""
HELD_UP = 1.5
"""A round that lasts so many times longer than another was held up: a transfer would be waited for until the round's deadline."""


class Roles:
    """A swarm whose commits are told by the peers' names."""

    def __init__(self, swarm: Swarm) -> None:
        self.swarm = swarm
        self.ids: dict[str, str] = {}

    def start(self, *names: str) -> None:
        for name in names:
            paced.set_pace(self.swarm.folder / name, 0.05)
            self.swarm.start(name)
        for name in names:
            started = self.swarm.wait(name, lambda e: e.kind == "started", "its start").fields["peer"]
            self.ids[started] = name

    def again(self, name: str, memory: int) -> None:
        """A peer is asked to end, and started with another memory."""
        self.swarm.running[name].terminate()
        self.swarm.ended(name)
        self.swarm.memory[name] = memory
        self.swarm.start(name)

    def commits(self) -> list[tuple[float, dict[str, Any]]]:
        return [(e.time, e.fields) for e in self.swarm.events(NODE) if e.kind == "commit"]

    def trained(self, commit: dict[str, Any]) -> set[frozenset[str]]:
        """Who trained together and was committed."""
        return {frozenset(self.ids[p] for p in c["peers"]) for c in commit["contributions"]}

    def until(self, wanted: Callable[[set[frozenset[str]]], bool], what: str) -> int:
        """Waits for a commit of work that is `wanted`, begun from now on; its round."""
        first = self.commits()[-1][1]["round"] if self.commits() else 0
        found: list[int] = []

        def reached() -> bool:
            found.extend(c["round"] for _, c in self.commits() if c["round"] > first and wanted(self.trained(c)))
            return bool(found)

        self.swarm.wait(NODE, lambda e: e.kind == "commit" and reached(), what)
        return found[0]

    def lengths(self) -> dict[int, float]:
        return {after["round"]: end - start for (start, _), (end, after) in itertools.pairwise(self.commits())}


def make_manifest(start_peers: int) -> Manifest:
    made = recipe.make_manifest(swarms.options(Path("unused"), full=1, rounds=10**6, inner_steps=1000), swarms.MODEL)
    return dataclasses.replace(
        made,
        operators=(tiny.OPERATOR.peer_id,),
        start_peers=start_peers,
        train=dataclasses.replace(made.train, micro_batches=8, rows=1, sequence=16),
        timing=TimingSpec(round_deadline=120.0, round_seconds=SECONDS, heartbeat=0.5, gone_after=10.0),
    )


def names(trained: set[frozenset[str]]) -> set[str]:
    """Everybody whose work counts."""
    return set().union(*trained)


def test_roles_change_in_a_running_swarm(tmp_path: Path) -> None:
    manifest = make_manifest(start_peers=3)
    whole = tiny.full_memory(manifest)
    less = whole - 1
    memory = {"a": less, "b": less, "c": whole, "d": less}
    with Swarm(tmp_path / "run", manifest, tiny.OPERATORS[:1], memory, module="tests.faults.paced") as swarm:
        roles = Roles(swarm)
        swarm.options["d"] = ["--up-limit", "1Mbps"]
        swarm.module = "peer.cli"
        swarm.start_node(NODE)
        swarm.module = "tests.faults.paced"
        roles.start("a", "b", "c")
        roles.until(lambda trained: trained == {frozenset("ab"), frozenset("c")}, "a chain and a full replica")
        roles.again("b", whole)
        begun = roles.until(lambda trained: names(trained) == set("abc"), "b with more memory")
        roles.start("d")
        changed = roles.until(lambda trained: names(trained) == set("abcd"), "work of d")
        commits = {fields["round"]: fields for _, fields in roles.commits()}
        assert all(names(roles.trained(commits[r])) >= set("bc") for r in range(begun, changed + 1)), (
            "their work counts"
        )
        lengths = roles.lengths()
        assert max(lengths[r] for r in range(begun + 1, changed + 1)) <= HELD_UP * SECONDS, lengths
        roles.again("c", less)
        roles.until(lambda trained: names(trained) == set("abd"), "the others' work, without c")
        roles.until(lambda trained: names(trained) == set("abcd") and frozenset("c") not in trained, "c as a stage")
        swarm.kill("d")
        roles.until(lambda trained: names(trained) == set("abc"), "the others' work, without d")
        for name in list(swarm.running):
            swarm.kill(name)
        swarm.check()


def test_who_runs_out_of_memory_says_so_and_comes_back_with_a_smaller_role(tmp_path: Path) -> None:
    """What fails is an allocation that the system refuses."""
    manifest = make_manifest(start_peers=2)
    with Swarm(tmp_path / "run", manifest, tiny.OPERATORS[:1], module="tests.faults.paced") as swarm:
        roles = Roles(swarm)
        swarm.module = "peer.cli"
        swarm.start_node(NODE)
        swarm.module = "tests.faults.paced"
        roles.start("a", "b")
        roles.until(lambda trained: trained == {frozenset("a"), frozenset("b")}, "two full replicas")
        (swarm.folder / "b" / "room").write_text(str(manifest.model.n_layers - 1))
        lost = swarm.wait(NODE, lambda e: e.kind == "commit" and bool(e.fields["left_out"]), "a round without b").fields
        assert "memory: it ran out in blocks 0 to" in lost["left_out"][0]["reason"]
        assert names(roles.trained(lost)) == {"a"}, "nobody else loses anything"
        less = swarm.wait(
            "b", lambda e: e.kind == "warning" and "offered from now on" in e.fields["text"], "its warning"
        )
        assert less.time < roles.commits()[-1][0]
        roles.until(lambda trained: trained == {frozenset("ab")}, "b as a stage")
        for name in list(swarm.running):
            swarm.kill(name)
        swarm.check()
