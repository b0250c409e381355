"""An operator's node that never leads gives orders to volunteers, and says much to the others: the rounds of real nodes
and volunteers, in one process, go on as without it. Network in memory."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest

from bootstrap.node import BootstrapNode
from peer import events
from peer.net import directory
from peer.net.base import Transport
from peer.net.memory import MemoryNetwork
from peer.node.training import Result
from protocol.identity import Identity
from protocol.planning.memory import stage_memory
from protocol.run.manifest import Manifest, TimingSpec
from protocol.wire import encoding, framing
from protocol.wire.ballot import Accept
from protocol.wire.commit import Record, Share, body_of
from protocol.wire.encoding import Message
from protocol.wire.session import ChainReconfig, Finished, Heartbeat, Offered, TakeSeat, TimeUp
from tests.hostile.ground import identity, manifest
from tests.hostile.operators import Operators
from tests.support import tiny
from tests.support.volunteers import Noise

LIAR = 3
STEP_SECONDS = 0.01
STEPS, SPEED = 8, 10**12
"""The most inner steps of a round, and FLOP/s with which all of them are planned."""
ROUNDS = 4


class Attacker(BootstrapNode):
    """`says(self)` gives what it says to every volunteer, while `attacks`."""

    def __init__(
        self,
        identity: Identity,
        *parts: Any,
        says: Callable[[Attacker], Iterator[Message | Record]],
    ) -> None:
        super().__init__(identity, *parts)
        self.identity = identity
        self._says = says
        self.attacks = False
        self.said = 0

    async def run(self) -> None:
        attacking = asyncio.create_task(self._attack())
        try:
            await super().run()
        finally:
            attacking.cancel()

    async def _attack(self) -> None:
        while True:
            await asyncio.sleep(0.1)
            if not self.attacks or self.quorum.head is None:
                continue
            for message in self._says(self):
                raw = encoding.encode_record(message) if isinstance(message, Record) else encoding.encode(message)
                self._sessions.post_all(raw)
                self.said += 1


class Stepping(Noise):
    """Does inner steps until the round's training is to end."""

    async def train(self, order: Any, theta: Any, stop: Any, end: Any, progress: Any, chain_orders: Any) -> Result:
        work, done = order.plan.replica(order.replica).work, 0
        while done < work.steps and not (done and end.is_set()):
            await asyncio.sleep(STEP_SECONDS)
            if stop.is_set():
                return Result(0, 0, None, "the round was decided before all steps were done")
            done += 1
            progress(done, 1.0)
        self.round = order.plan.round
        return Result(done, self.manifest.train.tokens(done, work.micro_batches), 1.0, None)


class Run(Operators):
    """Four nodes, of which the last one is the attacker, and never leads."""

    def __init__(self, folder: Path, **attack: Any) -> None:
        timing = TimingSpec(round_deadline=60.0, round_seconds=2.0, heartbeat=0.2, gone_after=10.0)
        train = dataclasses.replace(manifest().train, inner_steps=STEPS)
        super().__init__(folder, 4, LIAR, lambda *parts: Attacker(*parts, **attack), timing=timing, train=train)
        self._memory = MemoryNetwork()
        self.inner_loop = self._stepping

    async def start_chain(self) -> None:
        """Starts the two stages of a chain, peers a and b."""
        manifest, layers = self.manifest, self.manifest.model.n_layers
        half = max(stage_memory(manifest, 0, layers // 2), stage_memory(manifest, layers // 2, layers))
        for name in ("a", "b"):
            await self.listen(identity(name))
            self.start(name, memory=half)

    async def listen(self, who: Identity) -> Transport:  # type: ignore[override]
        made = self._memory.transport(who.peer_id, directory.valid_record(self.manifest.run_id))
        self.daemons.started[who.peer_id] = made  # type: ignore[assignment]
        return made

    def _stepping(self, manifest: Manifest, peer: str, *parts: Any) -> Stepping:
        announce = parts[3]
        announce(speed_flops=SPEED)
        return Stepping(self._at_once, manifest, peer)

    @property
    def attacker(self) -> Attacker:
        return self.machines[self.liar]  # type: ignore[return-value]

    async def rounds(self, count: int) -> list[Any]:
        """The next commits, from the one after the next on."""
        first = self.head + 2
        await self.until(lambda: self.head >= first + count - 1)
        return list(self.archive.commits[first : first + count])


def everything(node: Attacker) -> Iterator[Message | Record]:
    """All that a node can say that moves a volunteer."""
    head, round = node.quorum.head, node.quorum.round
    turn = next(t for t in range(4) if (node.quorum.members.index(head.leader) + t) % 4 == LIAR)
    yield Heartbeat(phase="leading", round=round, turn=turn)
    yield TimeUp(round=round)
    yield Finished(round=round)
    for seat in head.plan.seats if head.plan is not None else ():
        yield TakeSeat(round=round, replica=seat.number, seconds=0.1)
    for replica in head.plan.replicas if head.plan is not None else ():
        for generation in (1, 31):
            named = {"round": round, "replica": replica.number, "generation": generation, "steps": 1, "reason": "?"}
            yield ChainReconfig(peers=(), **named)
            yield ChainReconfig(peers=replica.peers, **named)
    for later in (1, 1000):
        commit = dataclasses.replace(head, round=head.round + later, leader=node.quorum.peer)
        signed = node.identity.sign(body_of(commit, 0))
        yield Record(commit=commit, ballot=0, votes={node.quorum.peer: signed})
    share = Share(peer=node.quorum.peer, root=tiny.digest("nothing"), size=100, norm=1.0, listed=100)
    yield Offered(round=round, shares=(share,))


def time_up(node: Attacker) -> Iterator[Message]:
    yield TimeUp(round=node.quorum.round)


def no_chain(node: Attacker) -> Iterator[Message]:
    for replica in node.quorum.head.plan.replicas:
        yield ChainReconfig(
            round=node.quorum.round, replica=replica.number, generation=1, peers=(), steps=0, reason="over"
        )


async def test_a_node_that_says_dear_commits_to_the_others_holds_up_no_round(tmp_path: Path) -> None:
    """They have 180,000 values, and cannot be the next one: their heads are read, and no more."""
    async with Run(tmp_path, says=lambda node: iter(())) as ground:
        await ground.join("a", "b")
        await ground.until(lambda: ground.head >= 2)
        said, links = 0, ground.attacker.operators.links

        async def flood() -> None:
            nonlocal said
            dear, before = [["", ""]] * 60_000, None
            while True:
                round, head = ground.attacker.quorum.round, ground.attacker.quorum.head
                if head is not before:
                    plain = framing.unpack_message(encoding.encode(Accept(round=round, ballot=LIAR, commit=head)))
                    plain["commit"] |= {"parent": head.digest, "diverged": dear}
                    raw, before = msgpack.packb(plain), head
                for link in links.values():
                    if not link.outbox.qsize():
                        link.post(raw)
                        said += 1
                await asyncio.sleep(0.05)

        flooding = asyncio.create_task(flood())
        commits = await ground.rounds(ROUNDS)
        flooding.cancel()
        assert said > 3 * ROUNDS
        assert [[c.steps for c in commit.contributions] for commit in commits] == [[STEPS, STEPS]] * ROUNDS


@pytest.mark.parametrize("says", [time_up, everything])
async def test_a_node_that_does_not_lead_ends_no_training(says: Any, tmp_path: Path) -> None:
    async with Run(tmp_path, says=says) as ground:
        a, b = await ground.join("a", "b")
        await ground.until(lambda: ground.head >= 2)
        ground.attacker.attacks = True
        commits = await ground.rounds(ROUNDS)
        assert ground.attacker.said > ROUNDS
        assert [[c.steps for c in commit.contributions] for commit in commits] == [[STEPS, STEPS]] * ROUNDS
        assert {commit.leader for commit in ground.archive.commits}.isdisjoint({ground.liar})
        for volunteer in (a, b):
            named = [text for text in volunteer.texts() if "gives orders" in text]
            assert len(named) == 1
            assert ground.liar[-6:] in named[0]


@pytest.mark.parametrize("says", [no_chain, everything])
async def test_a_node_that_does_not_lead_ends_no_chain(says: Any, tmp_path: Path) -> None:
    async with Run(tmp_path, says=says) as ground:
        await ground.start_chain()
        await ground.until(lambda: ground.head >= 2)
        assert all(r.is_chain for r in ground.archive.commits[-1].plan.replicas)
        ground.attacker.attacks = True
        commits = await ground.rounds(ROUNDS)
        counted = [commit for commit in commits if commit.contributions]
        assert counted == commits, [commit.left_out for commit in commits]
        for volunteer in ground.peers.values():
            assert not [e for e in volunteer.events if isinstance(e.body, events.Withdrew)]
        assert not [w for w in ground.of_kind(events.Warning) if "brings nothing" in w.text]
