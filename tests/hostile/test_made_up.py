"""Identities of one liar, each with a daemon of its own, who agree on a state that the log does not give."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from protocol.identity import Identity
from tests.hostile.ground import Ground, manifest
from tests.support.false_states import LARGE, MADE_UP, made_up, never_doubted
from tests.support.made_up import is_right, said
from tests.support.volunteers import MODEL

pytestmark = pytest.mark.slow
AT_ONCE = 6
"""Daemons that are started at once."""


async def listen(ground: Ground, everybody: list[Identity]) -> None:
    for first in range(0, len(everybody), AT_ONCE):
        await asyncio.gather(*(ground.listen(who) for who in everybody[first : first + AT_ONCE]))


@pytest.mark.parametrize("many", [6, pytest.param(len(MADE_UP), marks=pytest.mark.campaign)])
async def test_made_up_identities_with_daemons_have_nobody_take_over_their_state(many: int, tmp_path: Path) -> None:
    """Peers join before them, with them and when they are gone."""

    # rounds take a third of a second: a state is kept for fifty of them, so that it is there for as long as a
    # newcomer takes on a busy machine
    async with Ground(tmp_path, manifest(model=MODEL, checkpoint_rounds=25, outer=LARGE)) as ground:
        await asyncio.gather(ground.join("a", "b"), listen(ground, MADE_UP[:many]))
        await ground.goes_on(26)
        async with made_up(ground, tmp_path, many) as liars:
            names = {liar.identity.peer_id for liar in liars}
            await ground.until(lambda: names <= ground.leader.ready.keys())
            await ground.until(lambda: names <= {attest.peer for attest in said(ground)})
            (beside,) = await ground.join("beside")
            await ground.goes_on(3)
            assert min(beside.bases.values()) > 0, "it took a state, and not the whole log"
        (after,) = await ground.join("after")
        await ground.goes_on(3)
        assert min(after.bases.values()) > 0
        for peer in ground.peers.values():
            never_doubted(peer)
        is_right(ground)
        told = {d.peer for commit in ground.archive.commits for d in commit.diverged}
        assert told
        assert told <= names, "liars alone are named"
        assert not {s.peer for commit in ground.archive.commits for s in commit.shares} & names
