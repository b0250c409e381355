"""Parts that unit tests of recovery share with others."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from peer.log import replay
from protocol.run import layout
from tests.support.volunteers import MODEL, Swarm, Volunteer

SHARDS = layout.shard_names(MODEL)


class Rounds:
    """Lets rounds end one by one: round r is held until `upto` is r or more."""

    def __init__(self, swarm: Swarm) -> None:
        self.upto = 0
        self._moved = asyncio.Event()
        swarm.hold = self.hold

    async def hold(self, peer: str, round: int) -> None:
        while round > self.upto:
            await self._moved.wait()

    def go(self, upto: int) -> None:
        self.upto = upto
        self._moved.set()
        self._moved = asyncio.Event()


async def to(swarm: Swarm, rounds: Rounds, number: int) -> None:
    rounds.go(number)
    await swarm.round(number)


async def is_right(swarm: Swarm, peer: Volunteer, shards: Iterable[str] = SHARDS) -> None:
    """The peer applies the whole log, and holds these shards, and no others, as the log has them."""
    await swarm.until(lambda: peer.rounds.member.applied == swarm.head)
    states = replay.replay(swarm.manifest, swarm.archive.commits, swarm.archive.blobs.get)
    final = list(states)[-1]
    assert peer.rounds.member.applied == final.round
    assert {s: peer.rounds.outer.digest(s) for s in peer.rounds.outer.theta} == {s: final.digests[s] for s in shards}


async def planned(swarm: Swarm, rounds: Rounds, *peers: Volunteer) -> None:
    """One more round, so that the plan has places for `peers`; waits until they hold their states."""
    head, machine = swarm.head, swarm.leader
    await swarm.until(lambda: all(p.id in machine.attestations.of(head) and p.id in machine.ready for p in peers))
    rounds.go(head + 1)
    await swarm.until(lambda: all(machine.attestations.of(head + 1).get(p.id) for p in peers))
