"""One strict decoder from plain data (TOML tables, msgpack maps) to frozen dataclasses.

Used at both edges: manifests refuse unknown fields, network messages ignore them (design, section 4).
Supported field types: bool, int, float, str, bytes, nested dataclasses, `tuple[T, ...]`, `dict[str, T]` and `T | None`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from typing import Any, TypeVar

from protocol.errors import PotluckError

T = TypeVar("T")

MAX_ITEMS = 65_536
"""Most entries that one list or map of a message may have."""


class SchemaError(PotluckError):
    """The data does not fit; `field` is the dotted path of what is wrong, `reason` says why."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def build(cls: type[T], data: Any, *, where: str = "", ignore_unknown: bool = False) -> T:
    """An instance of dataclass `cls` from the map `data`.

    Raises SchemaError naming the dotted field. ValueErrors of a `__post_init__` become SchemaErrors of `where`.
    """
    if not isinstance(data, dict):
        raise SchemaError(where or "top level", f"must be a table, not {_name(data)}")
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    prefix = f"{where}." if where else ""
    if not ignore_unknown:
        for key in data:
            if key not in fields:
                raise SchemaError(f"{prefix}{key}", f"unknown field; known here: {', '.join(fields)}")
    hints = _hints(cls)  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for name, field in fields.items():
        path = prefix + name
        if name in data:
            values[name] = _convert(hints[name], data[name], path, ignore_unknown)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise SchemaError(path, "missing field")
    try:
        return cls(**values)
    except ValueError as error:
        raise SchemaError(where or "top level", str(error)) from None


def _convert(hint: Any, value: Any, path: str, ignore_unknown: bool) -> Any:
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        inner = [a for a in typing.get_args(hint) if a is not type(None)]
        return None if value is None else _convert(inner[0], value, path, ignore_unknown)
    if dataclasses.is_dataclass(hint):
        return build(hint, value, where=path, ignore_unknown=ignore_unknown)  # type: ignore[arg-type]
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise SchemaError(path, f"must be a list, not {_name(value)}")
        _limit(value, path)
        item = typing.get_args(hint)[0]
        return tuple(_convert(item, v, f"{path}[{i}]", ignore_unknown) for i, v in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict) or not all(isinstance(k, str) for k in value):
            raise SchemaError(path, f"must be a table with text keys, not {_name(value)}")
        _limit(value, path)
        item = typing.get_args(hint)[1]
        return {k: _convert(item, v, f"{path}.{k}", ignore_unknown) for k, v in value.items()}
    if type(value) is not hint and not (hint is float and type(value) is int):
        raise SchemaError(path, f"must be {hint.__name__}, not {_name(value)}")
    if type(value) is int and not -(2**63) <= value < 2**64:
        raise SchemaError(path, "must fit in 64 bits")
    if hint is float and not math.isfinite(value):
        raise SchemaError(path, "must be a finite number")
    return float(value) if hint is float else value


def _limit(value: Any, path: str) -> None:
    if len(value) > MAX_ITEMS:
        raise SchemaError(path, f"has {len(value)} entries; at most {MAX_ITEMS}")


def _name(value: Any) -> str:
    return "nothing" if value is None else type(value).__name__


def plain(value: Any) -> Any:
    """The inverse of `build`: dataclasses become maps, tuples become lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        return [plain(v) for v in value]
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    return value
