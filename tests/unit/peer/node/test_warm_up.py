"""The shards of a later role: they come in addition to those of today, and are handed over at the state that it has."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest

from peer.events import Emitter, Event
from peer.net import directory
from peer.state.outer_optimizer import Outer
from peer.state.payloads import Exchange
from peer.state.recovery import Recovery, WarmUp
from peer.state.storage import Shards, Storage
from protocol.errors import UsageError
from protocol.identity import Identity
from protocol.ledger.history import Commits
from protocol.run import layout
from protocol.wire import endpoints
from tests.support import networks
from tests.support.volunteers import QuickDisk, Swarm, manifest

ROUNDS = 6
"""That are decided; all who train stand there."""
SHARDS = ("block.1", "head")


class FullDisk(QuickDisk):
    """Refuses everything as soon as it is `full`."""

    full = False

    def write(self, *arguments: Any, **options: Any) -> None:
        if self.full:
            raise UsageError("disk: full; make room")
        super().write(*arguments, **options)


class Mover:
    """A peer that stands at round `applied` and does not train. `let`: whether others can be reached."""

    def __init__(self, swarm: Swarm, applied: int) -> None:
        run, who = swarm.manifest, Identity(bytes([9] * 32))
        self.commits, self.applied, self.disk = swarm.archive.commits, applied, FullDisk()
        self.events: list[Event] = []
        self.let, self.news = asyncio.Event(), asyncio.Event()
        self.let.set()
        self.transport = swarm.network.transport(who.peer_id, directory.valid_record(run.run_id))
        self.storage = Storage(swarm.folder / "mover", None, self.disk)
        emit = Emitter(who.peer_id, self.events.append)

        async def reach(peer: str) -> None:
            await self.let.wait()

        async def peers() -> list[str]:
            return [peer.id for peer in swarm.peers.values()]

        ours = networks.network(self.transport, reach, emit=emit, peers=peers, nodes=run.operators)
        self.exchange = Exchange(run, self.storage, ours)
        self.outer = Outer(run.model, run.outer.codec, run.outer.beta, run.outer.eta)
        log = Commits()
        for commit in self.commits:
            log[commit.round] = commit
        recovery = Recovery(run, self.outer, self.storage, self.exchange, log, emit)
        self.warm_up = WarmUp(recovery, lambda: self.applied, self.news.set)

    async def told(self) -> None:
        """Waits until there may be something to take."""
        await self.news.wait()
        self.news.clear()

    async def taken(self) -> Shards:
        while (found := self.warm_up.take()) is None:
            await self.told()
        return found

    def is_right(self, found: Shards, shards: Iterable[str]) -> bool:
        """Whether these shards, and no others, were found, as most peers have them after `applied`."""
        right = self.commits[self.applied + 1].digests
        return {s: layout.shard_digest(arrays) for s, arrays in found.items()} == {s: right[s] for s in shards}

    @property
    def received(self) -> int:
        """Bytes of blobs."""
        return self.transport.traffic.received[endpoints.BLOB]

    @property
    def builds(self) -> list[dict[str, int]]:
        """What was begun, and from which states."""
        return [e.fields["bases"] for e in self.events if e.kind == "recovered"]


@contextlib.asynccontextmanager
async def mover(folder: Path, applied: int) -> AsyncIterator[Mover]:
    """In a run of two peers that train as far as ROUNDS and no further."""
    async with Swarm(folder, manifest(rounds=100, checkpoint_rounds=2)) as swarm:

        async def hold(peer: str, round: int) -> None:
            if round > ROUNDS:
                await asyncio.Event().wait()

        swarm.hold = hold
        swarm.start("a"), swarm.start("b")
        await swarm.round(ROUNDS)
        one = Mover(swarm, applied)
        try:
            yield one
        finally:
            await one.warm_up.aclose()
            await one.exchange.aclose()
            await one.transport.aclose()
            one.storage.close()


async def test_the_shards_are_handed_over_once_at_the_state_that_the_peer_has(tmp_path: Path) -> None:
    async with mover(tmp_path, applied=4) as one:
        assert one.warm_up.take() is None
        await one.warm_up.want(SHARDS)
        assert one.warm_up.shards == SHARDS
        assert one.is_right(await one.taken(), SHARDS)
        assert one.warm_up.take() is None
        assert not one.warm_up.shards
        assert one.outer.theta == {}, "its own state is for the round boundary"


async def test_commits_that_come_before_all_is_there_are_applied_too(tmp_path: Path) -> None:
    async with mover(tmp_path, applied=2) as one:
        one.let.clear()
        await one.warm_up.want(SHARDS)
        for one.applied in (3, 4):
            assert one.warm_up.take() is None
        one.let.set()
        assert one.is_right(await one.taken(), SHARDS)


async def test_what_is_there_follows_until_it_is_taken(tmp_path: Path) -> None:
    """No role gets a state of another round than the peer has."""
    async with mover(tmp_path, applied=2) as one:
        await one.warm_up.want(SHARDS)
        for later in (3, 5):
            await one.told()
            one.applied = later
            assert one.warm_up.take() is None, "it stands at an earlier round"
        assert one.is_right(await one.taken(), SHARDS)
        assert len(one.builds) == 1


async def test_only_what_is_wanted_last_is_built(tmp_path: Path) -> None:
    """And the same again, in whatever order, goes on as it was."""
    async with mover(tmp_path, applied=4) as one:
        one.let.clear()
        await one.warm_up.want(SHARDS)
        await one.warm_up.want(("block.2", "block.0"))
        await one.warm_up.want(("block.0", "block.2"))
        one.let.set()
        assert one.is_right(await one.taken(), ("block.0", "block.2"))
        assert [set(bases) for bases in one.builds[-1:]] == [{"block.0", "block.2"}]


async def test_what_came_for_a_role_that_was_given_up_is_not_fetched_again(tmp_path: Path) -> None:
    async with mover(tmp_path, applied=4) as one:
        await one.warm_up.want(SHARDS)
        await one.told()
        assert one.received > 0
        await one.warm_up.want(())
        assert not one.warm_up.shards
        assert one.warm_up.take() is None
        one.let.clear()
        await one.warm_up.want(SHARDS)
        assert one.is_right(await one.taken(), SHARDS)


async def test_what_ended_the_work_is_raised_to_who_takes(tmp_path: Path) -> None:
    async with mover(tmp_path, applied=4) as one:
        one.disk.full = True
        await one.warm_up.want(SHARDS)
        with pytest.raises(UsageError, match="disk: full"):
            await one.taken()
