"""An address changes in a running swarm of real processes, as when a laptop goes to another Wi-Fi: connections die
without a word.

A full replica, a member of a chain, and the bootstrap node. Everybody comes back without a restart, at the new address,
with the same bits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from peer.events import Event
from protocol.run.manifest import TimingSpec
from tests.faults.homes import Homes, homes
from tests.faults.processes import DEADLINE, Swarm
from tests.faults.roles import NODE, Roles
from tests.support import potluck, tiny
from tests.support.roles import SECONDS, make_manifest

FULL, CHAIN = "a", frozenset("bc")
ROUNDS = 8
"""Rounds in which a peer is back: half as many as fit in the 40 s until libp2p notices a dead connection."""
GONE_AFTER = 25.0


@dataclass(frozen=True)
class Moving:
    """A full replica and a chain of two, each in a home of its own, and all of them have trained."""

    homes: Homes
    roles: Roles

    @staticmethod
    def all_trained(trained: set[frozenset[str]]) -> bool:
        return trained == {frozenset(FULL), CHAIN}

    def round(self) -> int:
        """The round under way."""
        return self.roles.rounds(0) + 1

    def all_again(self, after: int) -> int:
        """The first round after `after` that has everybody's work."""

        def is_whole(commit: Event) -> bool:
            return commit.fields["round"] > after and self.all_trained(self.roles.trained(commit))

        return self.roles.wait(is_whole, "a round of all after the move")

    def announced(self, name: str) -> list[str]:
        """Where `name` is, by what a monitor sees that looks from its home."""
        (peer,) = (peer for peer, known in self.roles.ids.items() if known == name)
        command = (self.roles.swarm.addresses[0], peer)
        there = self.homes.places[name][1]
        said = potluck.run(
            *command, module="tests.faults.addresses", before=there, text=True, timeout=DEADLINE, check=True
        ).stdout
        return [address.split("/")[2] for address in json.loads(said)]

    def check(self) -> None:
        for name in list(self.roles.swarm.running):
            self.roles.swarm.kill(name)
        self.roles.swarm.check()


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Moving]:
    made = make_manifest(start_peers=3)
    timing = TimingSpec(round_deadline=120.0, round_seconds=SECONDS, heartbeat=0.5, gone_after=GONE_AFTER)
    manifest = dataclasses.replace(made, timing=timing)
    memory = dict.fromkeys(CHAIN, tiny.full_memory(manifest) - 1)
    with (
        homes(NODE, FULL, *CHAIN) as there,
        Swarm(folder, manifest, tiny.OPERATORS[:1], memory, there.places) as swarm,
    ):
        roles = Roles(swarm)
        roles.start(FULL, *CHAIN)
        roles.until(Moving.all_trained, "a round of all")
        yield Moving(there, roles)


@pytest.mark.parametrize("name", [FULL, "b"])
def test_a_peer_whose_address_changed_is_back_with_its_work(tmp_path: Path, name: str) -> None:
    with running(tmp_path / "run") as moving:
        old, first = moving.homes.address(name), moving.round()
        new = moving.homes.move(name)

        back = moving.all_again(first)
        assert back <= first + ROUNDS

        def says(event: Event) -> bool:
            return (
                event.kind == "warning" and "addresses changed" in event.fields["text"] and new in event.fields["text"]
            )

        moving.roles.swarm.wait(name, says, "its new address")
        end = time.monotonic() + DEADLINE
        while not (new in (hosts := moving.announced(name)) and old not in hosts):
            assert time.monotonic() < end, f"it is announced at {hosts}, moved from {old} to {new}"
        moving.check()


def test_when_the_bootstrap_node_moves_its_peers_find_it_and_nothing_is_lost(tmp_path: Path) -> None:
    with running(tmp_path / "run") as moving:
        first, new = moving.round(), moving.homes.move(NODE)

        back = moving.all_again(first)
        during = [moving.roles.commits[round].fields for round in range(first, back + 1)]
        assert [c["left_out"] for c in during] == [[] for _ in during]

        def listens(event: Event) -> bool:
            return event.kind == "listening" and f"/ip4/{new}/" in event.fields["address"]

        moving.roles.swarm.wait(NODE, listens, "its new address")
        moving.check()
