"""Arbitrary updates: a node decodes what is offered, and judges it by what it is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

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


@pytest.mark.parametrize(("said", "why"), [(0.05, ", not 0.05"), (None, "is over 10 times the median")])
async def test_an_update_of_huge_values_never_enters(said: float | None, why: str, tmp_path: Path) -> None:
    """Neither where its norm is said to be small, nor where it is said as it is."""

    async with Ground(tmp_path) as ground:
        await ground.join("a", "b", "c")
        await ground.goes_on(2)
        enemy = await ground.enemy()

        def reasons() -> list[str]:
            told = [e.body for e in ground.events if isinstance(e.body, events.Commit)]
            return [x.reason for commit in told for x in commit.left_out if short_peer(enemy.id) in x.reason]

        def rests() -> bool:
            said = [e.body.text for e in ground.events if isinstance(e.body, events.Warning)]
            return any(short_peer(enemy.id) in text and "it is in no plan up to round" in text for text in said)

        async with Teacher(ground, enemy, said).training():
            await ground.until(lambda: any(why in reason for reason in reasons()) and rests())
            await ground.goes_on(3)
        commits = ground.archive.commits
        assert all(enemy.id not in {s.peer for s in c.shares} for c in commits)
        assert max(s.norm for c in commits for s in c.shares) < 1e3
