"""Strict decoder and encoder between plain data (TOML tables, msgpack maps) and frozen dataclasses.

Manifests refuse unknown fields, network messages ignore them. Field types: bool, int, float, str, bytes, Digest, nested
dataclasses, `tuple[T, ...]`, `dict[str, T]`, `T | None`, and each with bounds, `Annotated[int, Within(0, 9)]`, which
are checked here and nowhere else (protocol/wire/bounds.py).

`plain` makes maps for files and screens, with bytes as hexadecimal digits. `packed` makes what travels: a dataclass
marked as a `row` is the list of its fields without defaults at the end, and a digest is 32 bytes. `build` reads both.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from protocol.errors import PotluckError
from protocol.wire.framing import LARGEST, Cost

T = TypeVar("T")
C = TypeVar("C", bound=type)

_HEX = object()
Digest = Annotated[str, _HEX]
"""64 hexadecimal digits; 32 bytes where it travels. No other text is read in its place."""
_rows: set[type] = set()
LATER = {"later": True}
"""Metadata of a later field: `brief` and messages omit it at its default, so that old digests stay."""


@dataclasses.dataclass(frozen=True, slots=True)
class Within:
    """Bounds of a number."""

    least: float
    most: float


@dataclasses.dataclass(frozen=True, slots=True)
class AtMost:
    """The maximum number of characters, bytes or entries of a text, bytes, a list or a map."""

    count: int


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    """The number of characters after which a text for readers is cut, without an error."""

    count: int


MAX_ITEMS = 65_536


class SchemaError(PotluckError):
    """The data does not fit; `field` is the dotted path of what is wrong, `reason` says why."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


def row(cls: C) -> C:
    """Marks a dataclass that is encoded without its fields' names. New fields come last, with defaults."""
    _rows.add(cls)
    return cls


Convert = Callable[[Any, str, bool], Any]
"""(value, path, whether unknown fields are ignored) -> the value as a field wants it. Raises SchemaError."""


@functools.cache
def _fields(cls: type) -> dict[str, tuple[Convert, bool]]:
    """The fields of a dataclass: how each is converted, and whether it may be left out."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {
        f.name: (
            _converter(hints[f.name]),
            f.default is not dataclasses.MISSING or f.default_factory is not dataclasses.MISSING,
        )
        for f in dataclasses.fields(cls)
    }


def build(cls: type[T], data: Any, *, where: str = "", ignore_unknown: bool = False) -> T:
    """A `cls` from the map `data`. Raises SchemaError with the dotted field; `__post_init__` errors name `where`."""
    fields = _fields(cls)  # type: ignore[arg-type]
    if cls in _rows and isinstance(data, list | tuple):
        if len(data) > len(fields) and not ignore_unknown:
            raise SchemaError(where or "top level", f"has {len(data)} entries; known here: {', '.join(fields)}")
        data = dict(zip(fields, data, strict=False))
    if not isinstance(data, dict):
        raise SchemaError(where or "top level", f"must be a table, not {_name(data)}")
    prefix = f"{where}." if where else ""
    if not ignore_unknown:
        for key in data:
            if key not in fields:
                raise SchemaError(f"{prefix}{key}", f"unknown field; known here: {', '.join(fields)}")
    values: dict[str, Any] = {}
    for name, (convert, optional) in fields.items():
        if name in data:
            values[name] = convert(data[name], prefix + name, ignore_unknown)
        elif not optional:
            raise SchemaError(prefix + name, "missing field")
    try:
        return cls(**values)
    except ValueError as error:
        raise SchemaError(where or "top level", str(error)) from None


@functools.cache
def _converter(hint: Any) -> Convert:
    """The converter of a field type: dataclass, tuple, table, optional, digest or plain type."""
    origin = typing.get_origin(hint)
    if origin is Annotated:
        base, *marks = typing.get_args(hint)
        if _HEX in marks:
            return _convert_digest
        if base in (int, float) and len(marks) == 1:  # most fields: in one step
            return functools.partial(_convert_number, base, marks[0].least, marks[0].most)
        if base is bytes:
            return functools.partial(_convert_bytes, marks[0].count)
        return functools.reduce(_bounded, marks, _converter(base))
    if origin in (types.UnionType, typing.Union):
        inner = _converter(next(a for a in typing.get_args(hint) if a is not type(None)))
        return lambda value, path, ignore: None if value is None else inner(value, path, ignore)
    if dataclasses.is_dataclass(hint):
        cls = typing.cast(type[Any], hint)
        return lambda value, path, ignore: build(cls, value, where=path, ignore_unknown=ignore)
    if origin is tuple:
        return functools.partial(_convert_list, _converter(typing.get_args(hint)[0]))
    if origin is dict:
        key, value = map(_converter, typing.get_args(hint))
        return functools.partial(_convert_table, key, value)
    return functools.partial(_convert_bytes, math.inf) if hint is bytes else functools.partial(_convert_plain, hint)


_HEAD, _NUMBER, _DIGEST = Cost(5, 1), Cost(9, 1), Cost(66, 1)
"""The most that the head of a text, list or map, a number, and a digest in either form take."""
_CHARACTER, _CUT_CHARACTER = 4, 16
"""Bytes of a character; and for each one that is kept of a text that is cut."""


@functools.cache
def most(hint: Any) -> Cost:
    """The most that a value of this type takes in a message, by the bounds of its fields; no more than LARGEST."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        base, *marks = args
        if _HEX in marks:
            return _DIGEST
        inner = [most(arg) for arg in typing.get_args(base) if arg is not Ellipsis]
        for mark in marks:
            if isinstance(mark, AtMost | Cut):
                each = functools.reduce(Cost.__add__, inner) if inner else Cost(_bytes_of(base, mark), 0)
                return (_HEAD + each.times(mark.count)).capped(LARGEST)
        return _NUMBER
    if origin in (types.UnionType, typing.Union):
        return max((most(arg) for arg in args), key=lambda cost: cost.values)
    if dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint, include_extras=True)
        named = 0 if hint in _rows else 1
        keys = [Cost(1 + len(f.name), 1).times(named) for f in dataclasses.fields(hint)]
        whole = functools.reduce(Cost.__add__, [*keys, *(most(each) for each in hints.values())], _HEAD)
        return whole.capped(LARGEST)
    return _NUMBER if hint in (bool, int, float, type(None)) else LARGEST


def _bytes_of(base: type, mark: AtMost | Cut) -> int:
    return 1 if base is bytes else _CUT_CHARACTER if isinstance(mark, Cut) else _CHARACTER


_SIZED = (str, bytes, list, tuple, dict)


def _bounded(convert: Convert, mark: Any) -> Convert:
    """`convert`, with what `mark` says. How much there is of something is looked at before it is converted."""

    def at_most(value: Any, path: str, ignore: bool) -> Any:
        if isinstance(value, _SIZED) and len(value) > mark.count:
            raise SchemaError(path, f"has {len(value)} entries; at most {mark.count}")
        return convert(value, path, ignore)

    def cut(value: Any, path: str, ignore: bool) -> Any:
        return convert(value, path, ignore)[: mark.count]

    return at_most if isinstance(mark, AtMost) else cut


def _convert_list(item: Convert, value: Any, path: str, ignore: bool) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise SchemaError(path, f"must be a list, not {_name(value)}")
    _limit(value, path)
    return tuple([item(v, f"{path}[{i}]", ignore) for i, v in enumerate(value)])


def _convert_table(key: Convert, item: Convert, value: Any, path: str, ignore: bool) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(k, str) for k in value):
        raise SchemaError(path, f"must be a table with text keys, not {_name(value)}")
    _limit(value, path)
    return {key(k, path, ignore): item(v, f"{path}.{k}", ignore) for k, v in value.items()}


def _convert_number(hint: Any, least: float, most: float, value: Any, path: str, ignore: bool) -> Any:
    if type(value) is not hint and not (hint is float and type(value) is int):
        raise SchemaError(path, f"must be {hint.__name__}, not {_name(value)}")
    if not least <= value <= most:  # nor is what is no number
        raise SchemaError(path, f"must be in {least}..{most}")
    return float(value) if hint is float else value


def _convert_plain(hint: Any, value: Any, path: str, ignore: bool) -> Any:
    if type(value) is not hint and not (hint is float and type(value) is int):
        raise SchemaError(path, f"must be {hint.__name__}, not {_name(value)}")
    if type(value) is int and not -(2**63) <= value < 2**64:
        raise SchemaError(path, "must fit in 64 bits")
    if hint is float and not math.isfinite(value):
        raise SchemaError(path, "must be a finite number")
    return float(value) if hint is float else value


def _convert_bytes(most: float, value: Any, path: str, ignore: bool) -> bytes:
    if isinstance(value, str) and len(value) > 2 * most:
        raise SchemaError(path, f"has {len(value)} digits; at most {2 * most}")
    raw = _unhex(value) if isinstance(value, str) else value
    if not isinstance(raw, bytes):
        raise SchemaError(path, f"must be bytes, not {_name(value)}")
    if len(raw) > most:
        raise SchemaError(path, f"has {len(raw)} entries; at most {most}")
    return raw


def _convert_digest(value: Any, path: str, ignore: bool) -> str:
    raw = value if isinstance(value, bytes) else _unhex(value)
    if not isinstance(raw, bytes) or len(raw) != 32:
        raise SchemaError(path, "must be a digest of 32 bytes")
    return raw.hex()


def _unhex(text: str) -> bytes | str:
    """The bytes of hexadecimal digits in small letters; any other text as it is, for a reader to refuse."""
    with contextlib.suppress(ValueError, TypeError):
        raw = bytes.fromhex(text)
        if raw.hex() == text:
            return raw
    return text


def _digest(text: str) -> bytes | str:
    """The bytes of a digest; any other text as it is, for a reader to refuse."""
    raw = _unhex(text)
    return raw if len(raw) == 32 else text


def _limit(value: Any, path: str) -> None:
    if len(value) > MAX_ITEMS:
        raise SchemaError(path, f"has {len(value)} entries; at most {MAX_ITEMS}")


def _name(value: Any) -> str:
    return "nothing" if value is None else type(value).__name__


@functools.cache
def _names(cls: Any) -> tuple[str, ...] | None:
    """The names of a dataclass's public fields; None for any other type."""
    if not dataclasses.is_dataclass(cls):
        return None
    return tuple(f.name for f in dataclasses.fields(cls) if not f.name.startswith("_"))


def plain(value: Any) -> Any:
    """The inverse of `build`: maps of public fields, lists, and hexadecimal digits for bytes."""
    if isinstance(value, tuple | list):
        return [plain(v) for v in value]
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, bytes):
        return value.hex()
    names = _names(value.__class__)
    return value if names is None else {name: plain(getattr(value, name)) for name in names}


def extend(cls: type[T], value: Any, **more: Any) -> T:
    """A `cls` from the fields that `value` has too, and `more`; one class extends the other."""
    names = _fields(cls)  # type: ignore[arg-type]
    return cls(**{name: getattr(value, name) for name in names if hasattr(value, name)} | more)


def brief(value: Any) -> Any:
    """`plain`, without the fields that were added later (LATER) and have their defaults."""
    if isinstance(value, tuple | list):
        return [brief(v) for v in value]
    if isinstance(value, dict):
        return {k: brief(v) for k, v in value.items()}
    if not dataclasses.is_dataclass(value):
        return value
    found = {f.name: (getattr(value, f.name), f) for f in dataclasses.fields(value)}
    return {name: brief(v) for name, (v, f) in found.items() if not (f.metadata == LATER and v == f.default)}


def packed(value: Any) -> Any:
    """Returns the wire form of a dataclass, or a tuple of them (see the module's docstring); `build` is its inverse."""
    if isinstance(value, tuple | list):
        return [packed(v) for v in value]
    return _pack_instance(value)


def _pack_instance(value: Any) -> Any:
    return _instance_packer(value.__class__)(value)


@functools.cache
def _instance_packer(cls: Any) -> Callable[[Any], Any]:
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = [(f.name, _packer(hints[f.name])) for f in dataclasses.fields(cls)]
    if cls not in _rows:
        later = {f.name: f.default for f in dataclasses.fields(cls) if f.metadata == LATER}

        def pack_map(value: Any) -> dict[str, Any]:
            found = [(name, pack, getattr(value, name)) for name, pack in fields]
            return {name: pack(item) for name, pack, item in found if name not in later or item != later[name]}

        return pack_map
    defaults = [f.default for f in dataclasses.fields(cls)]

    def pack_row(value: Any) -> list[Any]:
        found = [getattr(value, name) for name, _ in fields]
        while found and found[-1] == defaults[len(found) - 1]:
            found.pop()
        return [pack(item) for (_, pack), item in zip(fields, found, strict=False)]

    return pack_row


@functools.cache
def _packer(hint: Any) -> Callable[[Any], Any]:
    """For fields of this type, as `_converter`."""
    origin = typing.get_origin(hint)
    if origin is Annotated:
        base, *marks = typing.get_args(hint)
        return _digest if _HEX in marks else _packer(base)
    if origin in (types.UnionType, typing.Union):
        inner = _packer(next(a for a in typing.get_args(hint) if a is not type(None)))
        return lambda value: None if value is None else inner(value)
    if dataclasses.is_dataclass(hint):
        return _pack_instance
    if origin in (tuple, dict):
        item = _packer(typing.get_args(hint)[0 if origin is tuple else 1])
        if origin is dict:
            return lambda value: {k: item(v) for k, v in value.items()}
        return lambda value: [item(v) for v in value]
    return _same


def _same(value: Any) -> Any:
    return value
