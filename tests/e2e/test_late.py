"""A volunteer who comes when the run is over is told so, and has nothing to do: real processes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from peer.demo.recipe import identity_of
from tests.e2e import swarms
from tests.faults.processes import Swarm

ROUNDS = 3


def test_a_newcomer_to_a_run_that_is_over_ends_well_and_fetches_nothing(tmp_path: Path) -> None:
    chosen = swarms.options(tmp_path / "unused", full=1, rounds=ROUNDS)
    manifest = dataclasses.replace(swarms.manifest(chosen), start_peers=1)
    with Swarm(tmp_path / "run", manifest, (identity_of(0, "bootstrap"),)) as swarm:
        swarm.start_node("node-0")
        swarm.start("member")
        assert swarm.ended("member") == 0
        swarm.start("late")
        assert swarm.ended("late") == 0
        told = swarm.events("late")
        (finished,) = [e for e in told if e.kind == "finished"]
        assert (finished.fields["round"], finished.fields["digests"]) == (ROUNDS, {})
        assert not [e for e in told if e.kind in ("round", "recovered")], "nothing of old rounds"
        swarm.start("member")
        assert swarm.ended("member") == 0, "who was there attests once more, and ends"
        swarm.kill("node-0")
