"""Windows of text: nobody reads what another one reads, and an epoch reads everything once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.run import data_order

small = st.integers(1, 5)


@given(steps=small, rows=small, first=st.integers(0, 100))
def test_the_slots_of_a_replicas_steps_are_disjoint_and_leave_no_gap(steps: int, rows: int, first: int) -> None:
    seen = [slot for step in range(steps) for slot in data_order.slots(first, step, rows)]
    assert seen == list(range(first, first + steps * rows))


@given(n=st.integers(1, 3000), seed=st.binary(max_size=8), epoch=st.integers(0, 10**6))
def test_an_epoch_is_a_permutation(n: int, seed: bytes, epoch: int) -> None:
    out = data_order.windows(seed, n, range(epoch * n, (epoch + 1) * n))
    assert sorted(out.tolist()) == list(range(n))


@given(n=st.integers(1, 500), start=st.integers(0, 5000), size=st.integers(0, 700))
def test_a_range_is_its_slots_one_by_one(n: int, start: int, size: int) -> None:
    at = range(start, start + size)
    one_by_one = [int(data_order.windows(b"s", n, range(i, i + 1))[0]) for i in at[:20]]
    assert data_order.windows(b"s", n, at)[:20].tolist() == one_by_one


def test_epochs_and_seeds_differ() -> None:
    first, second = data_order.windows(b"a", 1000, range(1000)), data_order.windows(b"a", 1000, range(1000, 2000))
    other = data_order.windows(b"b", 1000, range(1000))
    assert np.mean(first == second) < 0.02
    assert np.mean(first == other) < 0.02
    assert np.mean(first == np.arange(1000)) < 0.02


def test_the_order_is_the_same_everywhere() -> None:
    """Frozen: a change of these numbers is a change of the protocol."""
    assert data_order.windows(b"potluck/1", 1000, range(998, 1006)).tolist() == FROZEN


def test_no_text_is_refused() -> None:
    with pytest.raises(ValueError, match="no window"):
        data_order.windows(b"", 0, range(1))


FROZEN = [678, 981, 640, 760, 936, 902, 590, 472]
