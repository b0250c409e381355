"""A simulated run never has more dishonest operators than its quorum bears, whatever is decreed."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.ledger import board
from protocol.wire.commit import liars_borne
from protocol.wire.decree import Board, Decree
from tests.sim import run
from tests.sim.swarm import Swarm
from tests.sim.world import BOUND, Violation
from tests.support import tiny

SEEDS = range(200)
SMALLER = 80
"""A seed in which two of seven operators are dishonest, and soon four decide."""


def boards(swarm: Swarm) -> list[Board]:
    """The boards of a run whose decrees are in the log at once."""
    manifest, changes, found = swarm.manifest, swarm.changes, [board.of(swarm.manifest, None)]

    async def enacted(action: str, **said: Any) -> None:
        decree = Decree(run=manifest.run_id, number=len(found) - 1, action=action, **said)
        before = swarm.ledger.log[-1] if swarm.ledger.log else None
        found.append(board.changed(manifest, before, decree))
        swarm.ledger.log.append(tiny.commit(manifest, before, board=found[-1]))

    changes.decree = enacted  # type: ignore[method-assign]
    swarm.world.loop.run_until_complete(changes.run())
    swarm.world.loop.close()
    return found


def test_no_decree_leaves_more_dishonest_operators_than_the_quorum_bears() -> None:
    sizes = set()
    for seed in SEEDS:
        swarm = Swarm(seed, lying_nodes=True)
        for number, now in enumerate(boards(swarm)):
            assert len(swarm.lying & set(now.names)) <= liars_borne(now.quorum), f"seed {seed}, after {number} decrees"
            sizes.add((swarm.manifest.quorum, now.quorum))
    assert sizes == {(4, 4), (4, 7), (7, 7), (7, 4)}


def test_a_run_in_which_fewer_decide_than_before_keeps_every_promise() -> None:
    _, stats, broken = run.live(SMALLER, lying_nodes=True)
    assert broken == ""
    assert stats["decreed: quorum"] == 1
    assert stats["decreed: dismiss"] == 2, "a dishonest one, and later another"


def test_more_dishonest_members_than_the_quorum_bears_are_a_fault_of_the_simulation() -> None:
    swarm = Swarm(SMALLER, lying_nodes=True)
    swarm.world.loop.close()
    honest = [name for name in swarm.manifest.operators if name not in swarm.lying]
    one, *_ = two = sorted(swarm.lying)
    first = tiny.commit(swarm.manifest, members=(one, *honest[:3]))
    swarm.ledger.log.append(first)
    swarm.check_bound(0)
    swarm.ledger.log.append(tiny.commit(swarm.manifest, first, members=(*two, *honest[:2])))
    with pytest.raises(Violation, match=f"{BOUND}: 2 of the 4 members after round 1 are dishonest"):
        swarm.check_bound(1)
