"""A role changes in a running swarm of real processes: who runs out of memory says so, and comes back by itself with a smaller one."""

from __future__ import annotations

import dataclasses
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
        (peer,) = (peer for peer, name in roles.ids.items() if name == "b")

        def smaller(plan: dict[str, Any]) -> bool:
            stages = [len(r["stages"]) for r in plan["replicas"] for s in r["stages"] if s["peer"] == peer]
            return peer in plan["spares"] if not stages else stages[0] > 1

        swarm.wait(NODE, lambda e: e.kind == "commit" and smaller(e.fields["plan"]), "b as a spare or a stage")
        for name in list(swarm.running):
            swarm.kill(name)
        swarm.check()
