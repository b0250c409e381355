"""SIGKILL to real processes in the middle of a round; the survivors go on, the killed come back and catch up, and then
the operator ends the run."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from peer.events import Event
from tests.e2e import swarms
from tests.faults import paced
from tests.faults.processes import Tail
from tests.support import potluck

STEPS = 4
"""Of a round; each takes as long as a pace says, so that what is computed is little (tests/faults/paced.py)."""


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
    """A demo of two replicas with one peer to kill in round 2, and the same command again to restart it."""

    def __init__(
        self, out: Path, name: str, overlap: int = 0, gone_after: float = 20.0, heartbeat: float = 1.0
    ) -> None:
        self.name = name
        chains = int(name.startswith("chain"))  # the fewest peers: each costs time in each round
        chosen = swarms.options(
            out,
            full=2 - chains,
            chains=chains,
            residual_width=8,
            rounds=10**6,
            inner_steps=STEPS,
            in_memory=False,
        )
        self.folder, self.node = chosen.out / name, chosen.out / "bootstrap"
        of = swarms.manifest(
            chosen,
            train={"rows": 1},
            outer={"overlap": overlap},
            timing={"gone_after": gone_after, "heartbeat": heartbeat},
        )
        self.demo = swarms.Background(chosen, of, command=paced.main)
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

    @property
    def address(self) -> str:
        return str(self.event("bootstrap", lambda e: e.kind == "listening", "its start").fields["address"])

    def restart(self) -> None:
        self.restarted = time.time()
        ready = self.event("bootstrap", lambda e: e.kind == "ready" and e.fields["peer"] == self.victim, "readiness")
        self.again = potluck.Popen(
            "join", self.address, "--dir", self.folder, "--host", "127.0.0.1", "--device", "cpu",
            "--memory", ready.fields["memory_bytes"], "--up", f"{ready.fields['up_bps']}bps",
            "--down", f"{ready.fields['down_bps']}bps", "--threads", 1, "--json", module=paced.__name__,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def ends_well(self) -> dict[str, Any]:
        """The demo's result, once the restarted peer trains again and everybody is done, that peer too."""

        def has_its_work(event: Event) -> bool:
            return event.kind == "commit" and any(
                self.victim in [share["peer"] for share in c["shares"]] for c in event.fields["contributions"]
            )

        self.event("bootstrap", lambda e: e.time > self.restarted and has_its_work(e), "its work")
        self.end()
        result = self.demo.result()
        _, errors = self.again.communicate(timeout=swarms.DEADLINE)
        assert self.again.returncode == 0, errors
        assert result["same_bits"] is True
        assert result["rounds"] == self.rounds
        return result

    def end(self) -> None:
        """The operator ends the run a few rounds from now, more where so many are decided while he types."""
        for more in (4, 16, 64, 256):
            told = Tail(self.node / "events.jsonl").read()
            self.rounds = more + max(e.fields["round"] for e in told if e.kind == "commit")
            line = ("run", "set", self.address, "--rounds", self.rounds, "--dir", self.node)
            typed = potluck.run(*line, text=True, timeout=swarms.DEADLINE)
            if "cannot be" not in typed.stderr:
                assert typed.returncode == 0, typed.stderr
                return
        raise AssertionError(typed.stderr)

    def last_attestation(self) -> Event:
        return self.event(
            "bootstrap",
            lambda e: e.kind == "attest" and e.fields["peer"] == self.victim and e.fields["round"] == self.rounds,
            "the killed peer's last attestation",
        )
