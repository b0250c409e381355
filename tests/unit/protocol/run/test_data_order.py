"""Slots of text: nobody reads what another one reads. What they read: tests/unit/protocol/run/test_corpus_index.py."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from protocol.run import corpus

small = st.integers(1, 5)


@given(steps=small, rows=small, first=st.integers(0, 100))
def test_the_slots_of_a_replicas_steps_are_disjoint_and_leave_no_gap(steps: int, rows: int, first: int) -> None:
    seen = [slot for step in range(steps) for slot in corpus.slots(first, step, rows)]
    assert seen == list(range(first, first + steps * rows))
