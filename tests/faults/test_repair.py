"""A slice of repair.py: one member is killed, one is stopped, and the chain's work of both rounds is kept."""

from __future__ import annotations

from pathlib import Path

from tests.faults.repair import Fault, campaign

LIMIT_S = 20.0
"""Seconds to the next inner step on a busy machine; the campaign measures them (docs/results/faults.md)."""


def test_the_chain_goes_on_without_its_first_and_its_third_member(tmp_path: Path) -> None:
    with campaign(tmp_path / "run") as swarm:
        for fault in (Fault("kill", "forward", 0), Fault("stop", "backward", 2)):
            outcome = swarm.strike(fault)
            assert outcome.kept, fault
            assert outcome.seconds is not None
            assert outcome.seconds < LIMIT_S, fault
