"""A peer measures its line at its start: real processes and daemons behind an emulated home line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from peer.demo import recipe
from tests.e2e import swarms
from tests.faults.processes import Swarm
from tests.support import lab

UP, DOWN, TRIP_MS = 5.0, 20.0, 40.0
"""Mb/s: what any machine can emulate while it does other things."""
NODE, HOME = "node-0", "home"


@pytest.mark.skipif(bool(lab.missing()), reason=lab.missing() or "there is a lab")
def test_a_home_line_is_measured_at_the_start(tmp_path: Path) -> None:
    chosen = swarms.options(Path("unused"), full=1)
    keys = (recipe.identity_of(chosen.seed, "bootstrap"),)
    links = {NODE: "0/0:0", HOME: f"{UP:g}/{DOWN:g}:{TRIP_MS:g}"}
    with (
        lab.lab(Path(os.environ[lab.SCRIPT]), links) as there,
        Swarm(tmp_path / "run", swarms.manifest(chosen), keys, places=there.places) as swarm,
    ):
        swarm.measures.add(HOME)
        swarm.start_node(NODE)
        swarm.start(HOME)
        measured = swarm.wait(HOME, lambda e: e.kind == "measured", "its line").fields
        assert measured["up_bps"] == pytest.approx(UP * 1e6, rel=0.15)
        assert measured["down_bps"] == pytest.approx(DOWN * 1e6, rel=0.15)
        assert measured["bytes_sent"] + measured["bytes_received"] < 16e6
        ready = swarm.wait(NODE, lambda e: e.kind == "ready", "what it announces").fields
        assert (ready["up_bps"], ready["down_bps"]) == (measured["up_bps"], measured["down_bps"])
