"""Every field of every message is bounded, and the one decoder checks all bounds."""

from __future__ import annotations

import contextlib
import random

import pytest

from protocol.wire.announcement import REACHABLE
from protocol.wire.bounds import Word
from protocol.wire.schema import SchemaError, build, packed
from tests.fuzz.messages import EVERY, Maker, unbounded

EACH = 60
"""Messages that are made of each type."""


@pytest.mark.parametrize("cls", EVERY, ids=lambda cls: cls.__name__)
def test_nothing_that_travels_is_without_bounds(cls: type) -> None:
    assert list(unbounded(cls)) == []


@pytest.mark.parametrize("cls", EVERY, ids=lambda cls: cls.__name__)
def test_what_is_within_all_bounds_is_read_and_comes_out_as_it_went_in(cls: type) -> None:
    maker, read = Maker(random.Random(cls.__name__), {Word: lambda rng: rng.choice((*REACHABLE, "203.0.113.5"))}), 0
    for _ in range(EACH):
        with contextlib.suppress(SchemaError):  # what fields say together
            message = build(cls, maker.make(cls), ignore_unknown=True)
            assert build(cls, packed(message)) == message
            read += 1
    assert read, "the maker makes nothing that can be read"


@pytest.mark.parametrize("cls", EVERY, ids=lambda cls: cls.__name__)
def test_what_is_beyond_one_bound_is_refused(cls: type) -> None:
    maker = Maker(random.Random(cls.__name__), odd=0.0)
    for name, data in maker.beyond(cls):
        with pytest.raises(SchemaError) as refused:
            build(cls, data, ignore_unknown=True)
        assert len(str(refused.value)) < 300, name
