"""`potluck join --devices cpu,cpu`: a real peer that trains in two processes, among others."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil

from peer.demo import recipe
from peer.events import Event
from tests.e2e import swarms
from tests.faults.processes import DEADLINE, Swarm

ROUNDS = 10
TWO, ONE = "two-devices", "one-device"


def helpers_of(pid: int) -> list[int]:
    """The process ids of a peer's helpers."""
    return [
        child.pid for child in psutil.Process(pid).children(recursive=True) if "peer.training.helper" in child.cmdline()
    ]


def await_helper(pid: int, other_than: int = 0) -> int:
    end = time.monotonic() + DEADLINE
    while time.monotonic() < end:
        found = [helper for helper in helpers_of(pid) if helper != other_than]
        if found:
            return found[0]
        time.sleep(0.02)  # there is no sign of it
    raise AssertionError("there is no helper")


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_two_devices_are_one_peer_whatever_becomes_of_its_processes(tmp_path: Path) -> None:
    """A helper is killed in the middle of a round: its work is in the commit all the same. Then the peer is killed, and
    no helper is left; it comes back. All have the same bits, and the log replays to them."""
    chosen = swarms.options(tmp_path / "unused", full=2, chains=0, rounds=ROUNDS, inner_steps=12)
    manifest = swarms.manifest(chosen)

    def two(kind: str, after: int = 0, **fields: object) -> Event:
        def wanted(event: Event) -> bool:
            return event.kind == kind and fields.items() <= event.fields.items()

        return swarm.wait(TWO, wanted, f"{kind} {fields}", after)

    with Swarm(tmp_path / "run", manifest, (recipe.identity_of(0, "bootstrap"),)) as swarm:
        swarm.options[TWO] = ["--devices", "cpu,cpu"]
        swarm.start_node("node-0")
        for name in (TWO, ONE):
            swarm.start(name)
        assert two("started").fields["device"] == "2 x cpu"
        peer = two("started").fields["peer"]
        ready = swarm.wait("node-0", lambda e: e.kind == "ready" and e.fields["peer"] == peer, "what it announces")
        assert ready.fields["device"] == "2 x cpu"

        two("step", round=2)
        pid = swarm.running[TWO].pid
        helper = await_helper(pid)
        os.kill(helper, signal.SIGKILL)
        warning = two("warning")
        text = warning.fields["text"]
        assert text.startswith("devices: cpu, number 2 of 2, was ended by signal 9; 1 of 2 go on"), text
        lost_in = two("step", after=swarm.events(TWO).index(warning)).fields["round"]
        committed = swarm.committed("node-0", lost_in)
        assert peer in str(committed.fields["contributions"]), "the round's work is kept"

        second = await_helper(pid, other_than=helper)
        two("step", round=lost_in + 1)
        seen = len(swarm.events(TWO))
        swarm.kill(TWO)
        end = time.monotonic() + DEADLINE
        while not (is_gone(helper) and is_gone(second)):
            assert time.monotonic() < end, "a helper has outlived its peer"
            time.sleep(0.02)

        swarm.start(TWO)
        two("step", after=seen)
        third = await_helper(swarm.running[TWO].pid)
        swarm.wait("node-0", lambda e: e.kind == "run_finished", "the end of the run")
        for name in (TWO, ONE):
            assert swarm.ended(name) == 0
        assert is_gone(third)
        swarm.kill("node-0")
        assert swarm.check() == ROUNDS
