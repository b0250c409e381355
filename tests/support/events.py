"""Parts that unit tests of events share with others."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from typing import Any


def public(value: Any) -> list[dataclasses.Field[Any]]:
    return [f for f in dataclasses.fields(value) if not f.name.startswith("_")]


def values(value: Any) -> Iterator[tuple[str, Any]]:
    """(class.field, value) of a dataclass and all that it is made of."""
    if dataclasses.is_dataclass(value):
        for f in public(value):
            yield f"{type(value).__name__}.{f.name}", getattr(value, f.name)
            yield from values(getattr(value, f.name))
    elif isinstance(value, tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from values(item)


def reached(hint: Any) -> set[type]:
    """The dataclasses that a type is made of."""
    found = set[type]().union(*(reached(inner) for inner in typing.get_args(hint)))
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        hints = typing.get_type_hints(hint)
        found |= {hint}.union(*(reached(hints[f.name]) for f in public(hint)))
    return found


def every_field_has_a_value(cls: type, told: object, but: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    found: dict[str, list[Any]] = {}
    for name, value in values(told):
        found.setdefault(name, []).append(value)
    assert {name for name, seen in found.items() if not any(seen)} == but
    assert set(found) == {f"{part.__name__}.{f.name}" for part in reached(cls) for f in public(part)}
