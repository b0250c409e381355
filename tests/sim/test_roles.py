"""Newcomers, movers and peers that come back never hold a round: one seed of each kind of tests/sim/roles.py."""

from __future__ import annotations

import pytest

from tests.sim import roles


@pytest.mark.parametrize("seed", range(len(roles.KINDS)))
def test_the_others_rounds_are_not_a_second_longer(seed: int) -> None:
    life = roles.live(seed)
    assert not life.broken, life
    assert life.took > 0
