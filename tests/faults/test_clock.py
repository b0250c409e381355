"""The time of day jumps an hour forth and back under a real swarm: no peer is gone, no lease breaks, rounds go on."""

from __future__ import annotations

from pathlib import Path

from peer import events
from peer.events import Event
from tests.faults.processes import Swarm
from tests.support.quorum import KEYS, four_nodes

PEERS = ("full-0", "full-1")
HOUR = 3600.0
ROUNDS_BETWEEN = 4


def test_the_wall_clock_jumps_and_nobody_is_gone(tmp_path: Path) -> None:
    manifest = four_nodes(rounds=10**6, start_peers=len(PEERS))
    with Swarm(tmp_path / "run", manifest, KEYS, module="tests.faults.wall_clock") as swarm:
        swarm.start_all(*PEERS)

        def committed(round: int) -> None:
            def is_later(event: Event) -> bool:
                return isinstance(event.body, events.Commit) and event.body.round >= round

            for name in swarm.nodes:
                swarm.wait(name, is_later, f"round {round}")

        def head() -> int:
            told = [e.body.round for e in swarm.events(swarm.nodes[0]) if isinstance(e.body, events.Commit)]
            return max(told)

        committed(2)
        leader, first = swarm.leader(), head()
        said = {name: len(swarm.events(name)) for name in swarm.nodes}
        for offsets in ({leader: HOUR, PEERS[0]: -HOUR}, {leader: -HOUR, PEERS[0]: HOUR}, {leader: 0.0, PEERS[0]: 0.0}):
            for name, seconds in offsets.items():
                (swarm.folder / name / "wall").write_text(str(seconds))
            committed(head() + ROUNDS_BETWEEN)
        last = head()
        for name in swarm.nodes:
            told = [event.body for event in swarm.events(name)[said[name] :]]
            assert not any(isinstance(body, events.Gone) for body in told), f"{name} took somebody for gone"
            assert not any(isinstance(body, events.Warning) and "quorum:" in body.text for body in told)
        assert swarm.leader() == leader, "the lease held"
        for name in list(swarm.running):
            swarm.kill(name)
        assert swarm.check() >= last
        times = next(archive for _, archive in swarm.logs()).commits
        jumps = [round(b.time - a.time) for a, b in zip(times[first:last], times[first + 1 : last + 1], strict=True)]
        assert max(jumps) >= HOUR - 60 > -HOUR + 60 >= min(jumps), "a commit records the leader's time of day"
        assert not any(c.left_out for c in times[first : last + 1]), "and nobody's work was left out for it"
