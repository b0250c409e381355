"""The decoder between plain data and dataclasses."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from protocol.wire.schema import SchemaError, build, plain


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    x: int
    y: float = 0.5

    def __post_init__(self) -> None:
        if self.x < 0:
            raise ValueError("x must be at least 0")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    name: str
    inner: Inner
    many: tuple[Inner, ...] = ()
    table: dict[str, int] = dataclasses.field(default_factory=dict)
    maybe: float | None = None
    flag: bool = False
    raw: bytes = b""


GOOD = {
    "name": "n",
    "inner": {"x": 1},
    "many": [{"x": 2, "y": 1.5}, {"x": 3}],
    "table": {"a": 1},
    "maybe": 2.0,
    "flag": True,
    "raw": b"r",
}


def test_a_round_trip_gives_the_same_value() -> None:
    value = build(Outer, GOOD)
    assert value.many[1] == Inner(x=3)
    assert build(Outer, plain(value)) == value


def test_defaults_and_none() -> None:
    value = build(Outer, {"name": "n", "inner": {"x": 1}, "maybe": None})
    assert value == Outer(name="n", inner=Inner(x=1))


def test_a_whole_number_serves_as_a_float_and_not_the_other_way_round() -> None:
    y = build(Inner, {"x": 1, "y": 2}).y
    assert (y, type(y)) == (2.0, float)
    with pytest.raises(SchemaError, match="x: must be int, not float"):
        build(Inner, {"x": 1.0})


@pytest.mark.parametrize(
    ("change", "field", "reason"),
    [
        ({"name": 1}, "name", "must be str, not int"),
        ({"name": None}, "name", "must be str, not nothing"),
        ({"inner": 3}, "inner", "must be a table, not int"),
        ({"inner": {}}, "inner.x", "missing field"),
        ({"inner": {"x": True}}, "inner.x", "must be int, not bool"),
        ({"inner": {"x": -1}}, "inner", "x must be at least 0"),
        ({"inner": {"x": 2**64}}, "inner.x", "must fit in 64 bits"),
        ({"many": {"x": 1}}, "many", "must be a list, not dict"),
        ({"many": [{"x": 1}, {"x": "1"}]}, "many[1].x", "must be int, not str"),
        ({"table": {"a": "b"}}, "table.a", "must be int, not str"),
        ({"table": {1: 1}}, "table", "must be a table with text keys, not dict"),
        ({"table": [1]}, "table", "must be a table with text keys, not list"),
        ({"maybe": float("nan")}, "maybe", "must be a finite number"),
        ({"maybe": float("inf")}, "maybe", "must be a finite number"),
        ({"maybe": "1"}, "maybe", "must be float, not str"),
        ({"maybe": True}, "maybe", "must be float, not bool"),
        ({"maybe": 10**400}, "maybe", "must fit in 64 bits"),
        ({"flag": 1}, "flag", "must be bool, not int"),
        ({"raw": "r"}, "raw", "must be bytes, not str"),
        ({"table": {str(i): i for i in range(65_537)}}, "table", "has 65537 entries; at most 65536"),
        ({"many": [{"x": 1}] * 65_537}, "many", "has 65537 entries; at most 65536"),
        ({"colour": 1}, "colour", "unknown field; known here: name, inner, many, table, maybe, flag, raw"),
        ({"inner": {"x": 1, "z": 2}}, "inner.z", "unknown field; known here: x, y"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change: dict[str, Any], field: str, reason: str) -> None:
    with pytest.raises(SchemaError) as caught:
        build(Outer, {**GOOD, **change})
    assert (caught.value.field, caught.value.reason) == (field, reason)


@pytest.mark.parametrize("data", [None, [], "x", 3])
def test_the_top_level_must_be_a_table(data: Any) -> None:
    with pytest.raises(SchemaError, match="top level: must be a table"):
        build(Outer, data)


def test_unknown_fields_are_ignored_where_that_is_asked() -> None:
    data = {**GOOD, "colour": 1, "inner": {"x": 1, "z": 2}}
    assert build(Outer, data, ignore_unknown=True) == build(Outer, {**GOOD, "inner": {"x": 1}})
