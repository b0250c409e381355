"""Four bootstrap nodes decide: the leader is killed, then a second node, and nothing is lost."""

from __future__ import annotations

from pathlib import Path

from tests.faults.processes import Swarm
from tests.support.quorum import KEYS, four_nodes


def test_the_leading_node_is_killed_then_a_second_and_the_run_goes_on(tmp_path: Path) -> None:
    manifest = four_nodes(rounds=14, start_peers=2)
    peers = ["peer-0", "peer-1"]
    with Swarm(tmp_path / "run", manifest, KEYS, module="tests.faults.paced") as swarm:
        swarm.start_all(*peers)
        first = swarm.leader()
        others = [n for n in swarm.nodes if n != first]
        swarm.committed(first, 2)
        swarm.kill(first)
        for name in others:
            swarm.committed(name, 5)
        second = swarm.leader()
        assert second in others
        survivors = [n for n in others if n != second]
        survivor = survivors[0]
        swarm.kill(second)
        stall = swarm.wait(
            survivor, lambda e: e.kind == "warning" and "2 of 4 bootstrap nodes" in e.fields["text"], "the stall"
        )
        assert swarm.ids[second][-8:] in stall.fields["text"]
        for name in peers:
            swarm.wait(name, lambda e: e.kind == "warning" and "the run waits" in e.fields["text"], "the stall")
        stalled_at = max(e.fields["round"] for e in swarm.events(survivor) if e.kind == "commit")
        assert stalled_at < manifest.rounds
        swarm.start(second)
        for name in (second, *survivors):
            swarm.committed(name, stalled_at + 2)
        swarm.start(first)
        for name in peers:
            assert swarm.ended(name) == 0
        for name in swarm.nodes:
            swarm.committed(name, manifest.rounds)
        for name in swarm.nodes:
            swarm.kill(name)
        assert swarm.check() == manifest.rounds
