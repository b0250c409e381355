"""A chain of two real processes; the first becomes three times slower, as its machine does when somebody else uses it. The next
plans move blocks away from it, the chain goes on, and all bits agree."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from peer.demo import recipe
from peer.events import Event
from protocol.run.manifest import TimingSpec
from tests import tiny
from tests.e2e import swarms
from tests.faults.processes import Swarm, Thief

PEERS = ("weak-0", "weak-1")


def test_blocks_move_away_from_a_stage_that_became_slow(tmp_path: Path) -> None:
    made = recipe.make_manifest(swarms.options(Path("unused"), full=0, chains=1, rounds=10**6, inner_steps=8))
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
        ids = {swarm.wait(name, lambda e: e.kind == "started", "its start").fields["peer"]: name for name in PEERS}
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
