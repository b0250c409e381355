"""A volunteer types Ctrl-C, or the system stops it: its round does not wait for a lease. Real processes."""

from __future__ import annotations

import dataclasses
import signal
from pathlib import Path

from peer.demo.recipe import identity_of
from peer.events import Event
from protocol.run.manifest import TimingSpec
from tests.e2e import swarms
from tests.faults.processes import DEADLINE, Swarm

LEASE = 0.9 * DEADLINE
"""Seconds: a test that waits for it fails by its deadline, or by far."""


def test_the_round_of_a_peer_that_leaves_goes_on_without_it(tmp_path: Path) -> None:
    chosen = swarms.options(tmp_path / "unused", full=3, rounds=10**6, inner_steps=2)
    timing = TimingSpec(round_deadline=2 * LEASE, heartbeat=1.0, gone_after=LEASE)
    manifest = dataclasses.replace(swarms.manifest(chosen), start_peers=3, timing=timing)
    with Swarm(tmp_path / "run", manifest, (identity_of(0, "bootstrap"),), module="tests.faults.paced") as swarm:
        swarm.start_node("node-0")
        for name in ("a", "b", "leaver"):
            swarm.start(name)
        leaves(swarm, "leaver", signal.SIGINT)
        swarm.start("another")
        leaves(swarm, "another", signal.SIGTERM)
        for name in list(swarm.running):
            swarm.kill(name)
        swarm.check()


def leaves(swarm: Swarm, name: str, sent: signal.Signals) -> None:
    """This signal ends a peer that trains; the round and the next plan do not wait for it."""
    leaver = swarm.started(name)

    def planned(event: Event) -> bool:
        """Whether it is a commit whose plan has the leaver."""
        plan = event.fields["plan"] if event.kind == "commit" else None
        return plan is not None and any(s["peer"] == leaver for r in plan["replicas"] for s in r["stages"])

    first = swarm.wait("node-0", planned, "a plan with it")
    swarm.wait("node-0", lambda e: planned(e) and e.fields["round"] >= first.fields["round"] + 2, "two rounds with it")
    swarm.running[name].send_signal(sent)
    assert swarm.ended(name) == 0
    gone = swarm.wait("node-0", lambda e: e.kind == "gone" and e.fields["peer"] == leaver, "the news")
    after = swarm.wait("node-0", lambda e: e.kind == "commit" and e.time >= gone.time and not planned(e), "a plan")
    next_one = swarm.wait("node-0", lambda e: e.kind == "commit" and e.time > after.time, "the round after it")
    assert next_one.time - gone.time < LEASE / 2
    assert not any(planned(e) for e in swarm.events("node-0") if e.time > after.time)
