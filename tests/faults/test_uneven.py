"""Real processes on machines of different speed.

A chain of two, of which the first becomes three times slower, as its machine does when another program uses it: the
next plans move blocks away from it. And full replicas of which one is twelve times slower: no peer waits for it, and
what it does counts. All bits agree.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from peer.demo import recipe
from peer.demo.recipe import demo_corpus
from peer.events import Event
from protocol.run.manifest import TimingSpec
from tests.e2e import swarms
from tests.faults import paced
from tests.faults.processes import Swarm, Thief
from tests.support import tiny

PEERS = ("weak-0", "weak-1")


def test_blocks_move_away_from_a_stage_that_became_slow(tmp_path: Path) -> None:
    made = recipe.make_manifest(
        swarms.options(Path("unused"), full=0, chains=1, rounds=10**6, inner_steps=8), demo_corpus().digest
    )
    manifest = dataclasses.replace(
        made,
        model=dataclasses.replace(swarms.MODEL, n_layers=8, d_ff=96),
        operators=(tiny.OPERATOR.peer_id,),
        start_peers=2,
        timing=TimingSpec(round_deadline=120.0, heartbeat=0.5, gone_after=10.0),
    )
    memory = dict.fromkeys(PEERS, tiny.full_memory(manifest) - 1)
    with Swarm(tmp_path / "run", manifest, tiny.OPERATORS[:1], memory) as swarm:
        swarm.start_node("node-0")
        for name in PEERS:
            swarm.start(name)
        ids = {swarm.started(name): name for name in PEERS}
        plan = swarm.wait("node-0", lambda e: e.kind == "commit", "the first plan").fields["plan"]
        first = plan["replicas"][0]["stages"][0]["peer"]

        def away(event: Event) -> bool:
            named = f"{first[-8:]} is the slowest stage" in event.fields.get("reason", "")
            return event.kind == "moved" and named and event.fields["after"][0] < event.fields["before"][0]

        with Thief(swarm.running[ids[first]], share=1 / 3, period=0.15):
            moved = swarm.wait("node-0", away, "the move of blocks away from the slow stage").fields
            assert moved["peers"][0] == first

            def trained(event: Event) -> bool:
                return event.kind == "commit" and event.fields["round"] == moved["round"] + 1

            commit = swarm.wait("node-0", trained, "the round after the move").fields
            assert commit["contributions"], commit["left_out"]
        for name in list(swarm.running):
            swarm.kill(name)
        swarm.check()


def test_a_slow_machine_does_fewer_steps_and_all_of_them_count(tmp_path: Path) -> None:
    made = swarms.manifest(swarms.options(Path("unused"), full=3, rounds=10**6, inner_steps=1000))
    manifest = dataclasses.replace(
        made,
        operators=(tiny.OPERATOR.peer_id,),
        start_peers=3,
        train=dataclasses.replace(made.train, micro_batches=2, rows=1, sequence=16),
        data=swarms.text(16),
        timing=TimingSpec(round_deadline=120.0, round_seconds=6.0, heartbeat=0.5, gone_after=10.0),
    )
    names = ("quick-0", "quick-1", "slow")
    with Swarm(tmp_path / "run", manifest, tiny.OPERATORS[:1], module="tests.faults.paced") as swarm:
        swarm.start_node("node-0")
        for name in names:
            paced.set_pace(swarm.folder / name, 0.6 if name == "slow" else 0.05)
            swarm.start(name)
        ids = {swarm.started(name): name for name in names}

        def of_all() -> list[dict[str, Any]]:
            commits = [e.fields for e in swarm.events("node-0") if e.kind == "commit"]
            return [commit for commit in commits if len(commit["contributions"]) == 3]

        swarm.wait("node-0", lambda e: e.kind == "commit" and len(of_all()) >= 3, "three rounds of all")
        commits = of_all()
        for name in list(swarm.running):
            swarm.kill(name)
        swarm.check()
    for commit in commits:
        steps = {ids[c["shares"][0]["peer"]]: c["steps"] for c in commit["contributions"]}
        assert steps["slow"] < min(steps["quick-0"], steps["quick-1"]), steps
        for c in commit["contributions"]:
            assert c["tokens"] == manifest.train.tokens(c["steps"], 2)
