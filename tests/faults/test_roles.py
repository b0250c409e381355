"""Roles change in a running swarm of real processes; no process is started again for it, and all bits agree."""

from __future__ import annotations

import contextlib
from pathlib import Path

from peer.events import Event
from protocol.run import layout
from protocol.run.manifest import Manifest
from tests.faults import roles
from tests.faults.processes import Swarm
from tests.faults.roles import NODE, Roles
from tests.support import tiny
from tests.support.roles import make_manifest


def test_nobody_waits_for_a_newcomer_a_mover_or_who_comes_back(tmp_path: Path) -> None:
    """And the one chain becomes a full replica and a spare within one round plus the transfer. Here a round counts as
    longer if it takes twice its time: the machine may have other work to do."""
    found: dict[str, roles.Meanwhile] = {}
    for pace in roles.PACES:
        with contextlib.suppress(roles.TooBusy), roles.running(tmp_path / f"run-{pace}", pace=pace) as swarm:
            found = roles.live(swarm)
            break
    assert found, "the chain was given up at every pace"
    assert not roles.held_up(found, longer=roles.SECONDS)


def test_who_runs_out_of_memory_says_so_and_comes_back_with_a_smaller_role(tmp_path: Path) -> None:
    """What fails is an allocation that the system refuses. The full replica becomes a stage of a chain with the one who
    was a spare: neither of the two could train alone."""
    manifest = make_manifest(start_peers=2)
    memory = {"weak": tiny.full_memory(manifest) - 1}
    with Swarm(tmp_path / "run", manifest, tiny.OPERATORS[:1], memory) as swarm:
        roles = Roles(swarm)
        roles.start("a", "b")
        roles.until(lambda trained: trained == {frozenset("a"), frozenset("b")}, "two full replicas")
        roles.start("weak")
        spare = next(peer for peer, name in roles.ids.items() if name == "weak")
        roles.wait(lambda commit: spare in commit.fields["plan"]["spares"], "a plan with a spare")
        swarm.wait(NODE, lambda e: attests(e, spare, manifest), "a spare that holds the state")
        (swarm.folder / "b" / "room").write_text(str(manifest.model.n_layers - 1))
        less = swarm.wait(
            "b", lambda e: e.kind == "warning" and "offered from now on" in e.fields["text"], "its warning"
        )
        assert "memory: it ran out in blocks 0 to" in less.fields["text"]
        commit = roles.commits[roles.wait(lambda commit: commit.time > less.time, "the round in which it ran out")]
        assert frozenset("a") in roles.trained(commit), "nobody else loses anything"
        # the steps that b had done count; without any it is left out, and says why
        if frozenset("b") not in roles.trained(commit):
            assert "memory: it ran out in blocks 0 to" in commit.fields["left_out"][0]["reason"]
        chain = roles.until(lambda trained: frozenset({"b", "weak"}) in trained, "a chain of the two")
        assert frozenset("a") in roles.trained(roles.commits[chain])
        roles.end()
        plans = plans_after_less_memory(roles, "b", tiny.full_memory(manifest))
    chains = [next((set(replica) for replica in plan if len(replica) > 1), None) for plan in plans]
    assert {"b", "weak"} in chains[:2], (
        "the first plan, but for one that was being decided when the leading node heard of it"
    )


def attests(event: Event, peer: str, manifest: Manifest) -> bool:
    """Whether it says that `peer` holds the whole state."""
    whole = len(layout.shard_names(manifest.model))
    return event.kind == "attest" and event.fields["peer"] == peer and len(event.fields["digests"]) == whole


def plans_after_less_memory(roles: Roles, name: str, full: int) -> list[list[tuple[str, ...]]]:
    """The plans since the leading node has known that a peer has less memory than a full replica needs."""
    events = roles.swarm.events(NODE)
    knows = next(
        i
        for i, e in enumerate(events)
        if e.kind == "ready" and roles.ids[e.fields["peer"]] == name and e.fields["memory_bytes"] < full
    )
    return [roles.planned(e) for e in events[knows:] if e.kind == "commit"]
