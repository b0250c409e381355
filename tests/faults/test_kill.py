"""SIGKILL to real processes in the middle of a round; the survivors finish, the killed come back and catch up."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from peer.events import Event
from tests.e2e import swarms

ROUNDS = 20
pytestmark = pytest.mark.usefixtures("small_model")
small_model = swarms.small_model


def plans(event: Event, peer: str) -> bool:
    """Whether this is a commit whose plan gives `peer` something to train."""
    plan = event.kind == "commit" and event.fields["plan"]
    return bool(plan) and any(s["peer"] == peer for r in plan["replicas"] for s in r["stages"])


@pytest.mark.parametrize(("name", "overlap"), [("full-1", 1), ("chain-0-1", 0)])
def test_a_killed_peer_costs_a_round_and_catches_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, overlap: int
) -> None:
    """Its replica is left out once, a spare takes the chain member's place, and the peer comes back to the same bits."""
    swarms.change_manifest(monkeypatch, "outer", overlap=overlap)
    spares = int(name.startswith("chain"))
    with Swarm(tmp_path / "run", name, spares) as swarm:
        swarm.kill()
        lost = swarm.event(
            "bootstrap", lambda e: e.kind == "commit" and bool(e.fields["left_out"]), "a left-out replica"
        )
        first = lost.fields["round"]
        assert first in range(2, 4 + overlap), "one kill costs at most the round in which it struck"
        if spares:  # as soon as the dead member counts as gone
            spare = swarm.event("spare-0", lambda e: e.kind == "started", "its start").fields["peer"]
            swarm.event("bootstrap", lambda e: plans(e, spare), "the spare in the dead member's place")
        swarm.restart()
        swarm.ends_well()
        last = swarm.last_attestation()
        assert spares or last.fields["digests"], "it holds the whole model again, with the bits that the audit compared"


def test_a_peer_that_is_back_at_once_loses_nothing(tmp_path: Path) -> None:
    """From its checkpoint it trains the same round again."""
    with Swarm(tmp_path / "run", "full-1", 0) as swarm:
        swarm.kill()
        swarm.restart()
        assert swarm.ends_well()["left_out"] == []
        assert swarm.last_attestation().fields["digests"]


class Swarm:
    """A demo with one peer to kill in round 2, and the same command again to restart it."""

    def __init__(self, out: Path, name: str, spares: int) -> None:
        self.name = name
        self.rounds = 3 * ROUNDS if spares else ROUNDS  # a dead member counts as gone after twenty seconds
        chosen = swarms.options(
            out, full=2, chains=1, k=(8,), spares=spares, rounds=self.rounds, inner_steps=8, in_memory=False
        )
        self.folder = chosen.out / name
        self.demo = swarms.Background(chosen)
        self.event = self.demo.event
        self.again: subprocess.Popen[str] | None = None

    def __enter__(self) -> Swarm:
        return self

    def __exit__(self, *error: object) -> None:
        if self.again is not None:
            self.again.kill()
            self.again.communicate()
        self.demo.__exit__()

    def kill(self) -> None:
        started = self.event(self.name, lambda e: e.kind == "started", "its start").fields
        self.event("bootstrap", lambda e: e.kind == "commit" and e.fields["round"] == 1, "round 1")
        self.event(self.name, lambda e: e.kind == "step" and e.fields["round"] == 2, "a step of round 2")
        os.kill(started["pid"], signal.SIGKILL)
        self.victim = started["peer"]

    def restart(self) -> None:
        address = self.event("bootstrap", lambda e: e.kind == "listening", "its start").fields["address"]
        ready = self.event("bootstrap", lambda e: e.kind == "ready" and e.fields["peer"] == self.victim, "readiness")
        self.again = swarms.potluck(
            "join", address, "--dir", self.folder, "--host", "127.0.0.1", "--device", "cpu",
            "--memory", ready.fields["memory_bytes"], "--up", f"{ready.fields['up_bps']}bps", "--threads", 1, "--json",
        )  # fmt: skip

    def ends_well(self) -> dict[str, Any]:
        """The demo's result, once everybody is done, the restarted peer too."""
        assert self.again is not None
        result = self.demo.result()
        _, errors = self.again.communicate(timeout=swarms.DEADLINE)
        assert self.again.returncode == 0, errors
        assert result["same_bits"] is True
        assert result["rounds"] == self.rounds
        return result

    def last_attestation(self) -> Event:
        return self.event(
            "bootstrap",
            lambda e: e.kind == "attest" and e.fields["peer"] == self.victim and e.fields["round"] == self.rounds,
            "the killed peer's last attestation",
        )
