"""An address changes in a running swarm of real processes, as when a laptop goes to another Wi-Fi: connections die without a word.

A full replica, a member of a chain, and the bootstrap node. Everybody comes back without a restart, at the new address, with the same bits.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from peer.events import Event
from protocol.run.manifest import TimingSpec
from tests import tiny
from tests.faults.homes import Homes, homes
from tests.faults.processes import DEADLINE, Swarm
from tests.faults.test_roles import NODE, SECONDS, Roles, make_manifest

FULL, CHAIN = "a", frozenset("bc")
ROUNDS = 8
"""In which a peer is back at the latest: half as many as fit in the 40 s that libp2p takes to notice a dead connection."""
GONE_AFTER = 25.0


class Moving:
    """A full replica and a chain of two, each in a home of its own, and all of them have trained."""

    def __init__(self, folder: Path, there: Homes) -> None:
        made = make_manifest(start_peers=3)
        timing = TimingSpec(round_deadline=120.0, round_seconds=SECONDS, heartbeat=0.5, gone_after=GONE_AFTER)
        manifest = dataclasses.replace(made, timing=timing)
        memory = dict.fromkeys(CHAIN, tiny.full_memory(manifest) - 1)
        self.homes = there
        self.swarm = Swarm(folder, manifest, tiny.OPERATORS[:1], memory, there.places)
        self.roles = Roles(self.swarm)

    def __enter__(self) -> Moving:
        self.swarm.start_node(NODE)
        self.swarm.module = "tests.faults.paced"
        self.roles.start(FULL, *CHAIN)
        self.roles.until(self.all_trained, "a round of all")
        return self

    def __exit__(self, *error: object) -> None:
        self.swarm.__exit__(*error)

    @staticmethod
    def all_trained(trained: set[frozenset[str]]) -> bool:
        return trained == {frozenset(FULL), CHAIN}

    def round(self) -> int:
        """The round under way."""
        return int(self.roles.commits()[-1][1]["round"]) + 1

    def announced(self, name: str) -> list[str]:
        """Where `name` is, by what a monitor sees that looks from its home."""
        (peer,) = (peer for peer, known in self.roles.ids.items() if known == name)
        command = [*self.homes.places[name][1], sys.executable, "-m", "peer.cli"]
        command += ["monitor", self.swarm.addresses[0], "--json"]
        said = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=True).stdout
        (found,) = (p for p in json.loads(said)["peers"] if p["peer"] == peer)
        return [address.split("/")[2] for address in found["addresses"]]

    def check(self) -> None:
        for name in list(self.swarm.running):
            self.swarm.kill(name)
        self.swarm.check()


@pytest.mark.parametrize("name", [FULL, "b"])
def test_a_peer_whose_address_changed_is_back_with_its_work(tmp_path: Path, name: str) -> None:
    with homes(NODE, FULL, *CHAIN) as there, Moving(tmp_path / "run", there) as moving:
        old, first = there.address(name), moving.round()
        new = there.move(name)

        back = moving.roles.until(moving.all_trained, "a round of all after the move")
        assert back <= first + ROUNDS

        def says(event: Event) -> bool:
            return (
                event.kind == "warning" and "addresses changed" in event.fields["text"] and new in event.fields["text"]
            )

        moving.swarm.wait(name, says, "its new address")
        hosts = moving.announced(name)
        assert new in hosts
        assert old not in hosts
        moving.check()


def test_when_the_bootstrap_node_moves_its_peers_find_it_and_nothing_is_lost(tmp_path: Path) -> None:
    with homes(NODE, FULL, *CHAIN) as there, Moving(tmp_path / "run", there) as moving:
        first, new = moving.round(), there.move(NODE)

        moving.roles.until(moving.all_trained, "a round of all after the move")
        during: list[dict[str, Any]] = [c for _, c in moving.roles.commits() if c["round"] >= first]
        assert [c["left_out"] for c in during] == [[] for _ in during]

        def listens(event: Event) -> bool:
            return event.kind == "listening" and f"/ip4/{new}/" in event.fields["address"]

        moving.swarm.wait(NODE, listens, "its new address")
        moving.check()
