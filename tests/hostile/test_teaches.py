"""Arbitrary updates: a node decodes what is offered, and judges it by what it is."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from peer import events
from peer.net.base import Stream
from peer.net.blobs import BlobServer, BlobStore
from protocol.codec import blob_hash, sparse
from protocol.identity import short_peer
from protocol.planning import memory
from protocol.run import layout
from protocol.wire.commit import Part
from protocol.wire.session import Attest, Offer
from tests.hostile.ground import Enemy, Ground
from tests.support.plain_codec import norm_of

HUGE = 3e37


class Teacher:
    """An enemy who is planned as a full replica, attests what the others do, and offers updates of HUGE values that
    everybody can fetch.
    `said`: the norm of each payload, as it says; None: as it is."""

    def __init__(self, ground: Ground, enemy: Enemy, said: float | None) -> None:
        self.ground, self.enemy = ground, enemy
        self.store = BlobStore(ground.folder / "enemy" / "blobs")
        model, codec = ground.manifest.model, ground.manifest.outer.codec
        self.parts: list[Part] = []
        for number, shard in enumerate(memory.stage_shards(ground.manifest, 0, model.n_layers)):
            signs = np.random.default_rng(number)
            shapes = layout.shapes(model, shard)
            payload = sparse.encode(codec, [HUGE * signs.choice((-1.0, 1.0), shape) for shape in shapes])
            norm = norm_of(sparse.decode(codec, shapes, payload))
            self.store.put(payload, 0)
            name = blob_hash.name_of(payload)
            self.parts.append(Part(shard=shard, digest=name, size=len(payload), norm=norm if said is None else said))
        self.offered: set[int] = set()

    async def go_on(self, session: Stream) -> None:
        """Attests and offers whenever it is planned."""
        train = self.ground.manifest.train
        while True:
            await asyncio.sleep(0.05)
            head = self.ground.head
            known = self.ground.leader.attestations.majority(head)
            await self.enemy.say(session, Attest(round=head, digests=known))
            plan = self.ground.archive.commits[-1].plan
            replica = plan.replica_of(self.enemy.id) if plan is not None else None
            if plan is not None and replica is not None and known and plan.round not in self.offered:
                work = plan.replica(replica).work
                tokens = train.tokens(work.steps, work.micro_batches)
                parts = tuple(self.parts)
                await self.enemy.say(
                    session,
                    Offer(round=plan.round, replica=replica, parts=parts, tokens=tokens, steps=work.steps, loss=1.0),
                )
                self.offered.add(plan.round)


@pytest.mark.parametrize(("said", "why"), [(0.05, ", not 0.05"), (None, "is over 10 times the median")])
async def test_an_update_of_huge_values_never_enters(said: float | None, why: str, tmp_path: Path) -> None:
    """Neither where its norm is said to be small, nor where it is said as it is."""

    async with Ground(tmp_path) as ground:
        await ground.join("a", "b", "c")
        await ground.goes_on(2)
        enemy = await ground.enemy()
        teacher = Teacher(ground, enemy, said)
        await BlobServer(teacher.store).serve(enemy.transport)
        session = await enemy.session(memory_bytes=enemy.whole, reachable="direct")
        teaching = asyncio.create_task(teacher.go_on(session))

        def reasons() -> list[str]:
            told = [e.body for e in ground.events if isinstance(e.body, events.Commit)]
            return [x.reason for commit in told for x in commit.left_out if short_peer(enemy.id) in x.reason]

        def rests() -> bool:
            said = [e.body.text for e in ground.events if isinstance(e.body, events.Warning)]
            return any(short_peer(enemy.id) in text and "it is in no plan up to round" in text for text in said)

        await ground.until(lambda: any(why in reason for reason in reasons()) and rests())
        await ground.goes_on(3)
        assert not teaching.done()
        teaching.cancel()
        commits = ground.archive.commits
        assert all(enemy.id not in {s.peer for s in c.shares} for c in commits)
        assert max(s.norm for c in commits for s in c.shares) < 1e3
