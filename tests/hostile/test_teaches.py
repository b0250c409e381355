"""Arbitrary updates: a node decodes what is offered, and judges it by what it is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from peer import events
from protocol.identity import short_peer
from protocol.run import layout
from protocol.wire.commit import Part
from tests.hostile.ground import Enemy, Ground, Trainee

HUGE = 3e37


class Teacher(Trainee):
    """It offers updates of HUGE values. `said`: the norm of each payload, as it says; None: as it is."""

    def __init__(self, ground: Ground, enemy: Enemy, said: float | None) -> None:
        super().__init__(ground, enemy)
        self.parts: list[Part] = []
        for number, shard in enumerate(self.shards):
            signs = np.random.default_rng(number)
            arrays = [HUGE * signs.choice((-1.0, 1.0), s) for s in layout.shapes(ground.manifest.model, shard)]
            self.parts.append(self.part(shard, arrays, said))

    def updates(self, round: int) -> Iterator[tuple[Part, ...]]:
        yield tuple(self.parts)


async def test_an_update_of_huge_values_never_enters(tmp_path: Path) -> None:
    """Neither where its norm is said to be small, nor where it is said as it is."""

    async with Ground(tmp_path) as ground, contextlib.AsyncExitStack() as at_work:
        await ground.join("a", "b", "c")
        await ground.goes_on(2)
        small, right = await ground.enemy("says a small one"), await ground.enemy("says the right one")
        why = {small.id: ", not 0.05", right.id: "is over 10 times the median"}

        def is_left_out(enemy: str) -> bool:
            told = [e.body for e in ground.events if isinstance(e.body, events.Commit)]
            reasons = [x.reason for commit in told for x in commit.left_out if short_peer(enemy) in x.reason]
            return any(why[enemy] in reason for reason in reasons)

        def rests(enemy: str) -> bool:
            said = [e.body.text for e in ground.events if isinstance(e.body, events.Warning)]
            return any(short_peer(enemy) in text and "it is in no plan up to round" in text for text in said)

        await at_work.enter_async_context(Teacher(ground, small, 0.05).training())
        await at_work.enter_async_context(Teacher(ground, right, None).training())
        await ground.until(lambda: all(is_left_out(enemy) and rests(enemy) for enemy in why))
        await ground.goes_on(3)
        await at_work.aclose()
        commits = ground.archive.commits
        assert all(not why.keys() & {s.peer for s in c.shares} for c in commits)
        assert max(s.norm for c in commits for s in c.shares) < 1e3
