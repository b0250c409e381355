"""How much better a contribution fits one text than another, against what others do: in standard deviations, without a scale."""

from __future__ import annotations

import numpy as np
import pytest

from peer.node import examining
from peer.node.examining import PARTS, Comparison, excess
from protocol.codec.sparse import Sparse
from protocol.errors import LocalError
from protocol.wire.bounds import MAX_AGREEMENT

SIZE, SENT, OTHERS = 20_000, 2_000, 5


def compared(seed: int, share: float, scale: float = 1.0) -> float:
    """The agreement of an update with so much of d - d' in it. What is common to all updates, d and d' is ten times as large."""
    draw = np.random.default_rng(seed)
    common, learned, plain = (draw.standard_normal((200, 100)).astype(np.float32) for _ in range(3))
    comparison = Comparison(1 + OTHERS)
    updates = []
    for place in range(1 + OTHERS):
        index = np.sort(draw.choice(SIZE, SENT, replace=False))
        own = draw.standard_normal(SIZE)
        values = 10 * common.reshape(-1) + own + (share if place == 0 else 0.0) * (learned - plain).reshape(-1)
        updates.append([Sparse(index, (scale * values[index]).astype(np.float32))])
    comparison.add(updates, [10 * common + learned], [10 * common + plain])
    return comparison.agreement


def test_who_has_learned_from_the_text_stands_out_and_who_has_not_does_not() -> None:
    without = np.array([compared(seed, 0.0) for seed in range(300)])
    assert abs(without.mean()) < 0.3
    assert 0.7 < without.std() < 1.4, "standard deviations"
    assert min(compared(seed, 1.0) for seed in range(50)) > 2 > max(compared(seed, -1.0) for seed in range(50))
    assert compared(3, 1.0) == pytest.approx(compared(3, 1.0, scale=1e4), rel=1e-4)


def test_a_figure_can_always_be_told() -> None:
    nothing = np.zeros((3, PARTS))
    assert excess(np.ones(PARTS), nothing) == MAX_AGREEMENT
    assert excess(-np.ones(PARTS), nothing) == -MAX_AGREEMENT
    assert excess(np.zeros(PARTS), nothing) == 0.0
    for wrong in (np.nan, np.inf):
        with pytest.raises(LocalError, match="not finite"):
            excess(np.full(PARTS, wrong), nothing)
    silent = Comparison(4)
    empty = [[Sparse(np.zeros(0, np.int64), np.zeros(0, np.float32))]] * 4
    silent.add(empty, [np.ones((2, 2), np.float32)], [np.zeros((2, 2), np.float32)])
    assert silent.agreement == 0.0


def test_the_audited_contribution_comes_first_and_some_others_after_it() -> None:
    payloads = {"embed": [(0.1, bytes([i])) for i in range(6)]}
    assert examining.compared_payloads(payloads, 4, 3) == {"embed": [b"\x04", b"\x05", b"\x00", b"\x01"]}
    assert examining.compared_payloads(payloads, 4, 16) == {
        "embed": [b"\x04", b"\x05", b"\x00", b"\x01", b"\x02", b"\x03"]
    }
