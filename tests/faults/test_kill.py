"""SIGKILL to real processes in the middle of a round; the survivors finish, the killed come back and catch up."""

from __future__ import annotations

import os
import select
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from peer.events import Event
from tests.e2e import swarms
from tests.support import potluck

ROUNDS = 12


@pytest.mark.parametrize(("name", "overlap"), [("full-1", 1), ("chain-0-1", 0)])
def test_a_killed_peer_costs_a_round_and_catches_up(tmp_path: Path, name: str, overlap: int) -> None:
    """Its replica is left out once, which says why, and the peer comes back to the same bits."""
    chain = name.startswith("chain")
    with Swarm(tmp_path / "run", name, overlap) as swarm:
        swarm.kill()
        lost = swarm.event(
            "bootstrap", lambda e: e.kind == "commit" and bool(e.fields["left_out"]), "a left-out replica"
        )
        first = lost.fields["round"]
        assert first in range(2, 4 + overlap), "one kill costs at most the round in which it struck"
        assert not chain or lost.fields["left_out"][0]["reason"].endswith(("no spare is ready", "gone"))
        swarm.restart()
        swarm.ends_well()
        assert swarm.last_attestation().fields["digests"], "it holds its shards again, with the bits that were compared"


def test_a_peer_that_is_back_at_once_loses_nothing(tmp_path: Path) -> None:
    """From its checkpoint it trains the same round again."""
    # to start takes a slow machine longer than two short heartbeats, and longer than 20 s
    with Swarm(tmp_path / "run", "full-1", gone_after=200.0, heartbeat=60.0) as swarm:
        swarm.kill()
        swarm.restart()
        assert swarm.ends_well()["left_out"] == []
        assert swarm.last_attestation().fields["digests"]


class Swarm:
    """A demo with one peer to kill in round 2, and the same command again to restart it."""

    def __init__(
        self, out: Path, name: str, overlap: int = 0, gone_after: float = 20.0, heartbeat: float = 1.0
    ) -> None:
        self.name = name
        full = name.startswith("full")
        self.rounds, steps = (ROUNDS, 8) if full else (3 * ROUNDS, 4)  # the chain is tried again for a while
        chosen = swarms.options(
            out, full=2, chains=1, residual_width=8, rounds=self.rounds, inner_steps=steps, in_memory=False
        )
        self.folder = chosen.out / name
        self.demo = swarms.Background(
            chosen,
            swarms.manifest(
                chosen, outer={"overlap": overlap}, timing={"gone_after": gone_after, "heartbeat": heartbeat}
            ),
        )
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
        ended = os.pidfd_open(started["pid"])
        os.kill(started["pid"], signal.SIGKILL)
        gone, _, _ = select.select([ended], [], [], swarms.DEADLINE)
        os.close(ended)
        assert gone, "killed, and still there"
        self.victim = started["peer"]

    def restart(self) -> None:
        address = self.event("bootstrap", lambda e: e.kind == "listening", "its start").fields["address"]
        ready = self.event("bootstrap", lambda e: e.kind == "ready" and e.fields["peer"] == self.victim, "readiness")
        self.again = potluck.Popen(
            "join", address, "--dir", self.folder, "--host", "127.0.0.1", "--device", "cpu",
            "--memory", ready.fields["memory_bytes"], "--up", f"{ready.fields['up_bps']}bps",
            "--down", f"{ready.fields['down_bps']}bps", "--threads", 1, "--json",
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
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
