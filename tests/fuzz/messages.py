"""Makes messages: everything that the decoder knows, of valid form, with the least, the most and odd values in every
field.

The types themselves say what a field may hold (protocol/wire/bounds.py), so that a new message or field is known here
by itself.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import string
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from protocol.wire import calls, encoding
from protocol.wire.calls import Handover, HandoverAnswer
from protocol.wire.commit import Record
from protocol.wire.schema import AtMost, Cut, Digest, Within

EVERY: tuple[type, ...] = (*encoding.TYPES.values(), Record, Handover, HandoverAnswer, *calls.CALLS)
"""What travels."""
MANY = 3
"""Entries of a list that is not to be at its bound."""

FEW = 6
"""A bounded list mostly has the most items or none."""

Known = Mapping[Any, Callable[[random.Random], Any]]
"""Type of a field -> a value that means something in a run."""


@functools.cache
def fields(cls: Any) -> dict[str, Any]:
    """The fields of a message by name, with their types and bounds."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


def parts(hint: Any) -> tuple[Any, list[Any]]:
    """A type without its bounds, and these."""
    if typing.get_origin(hint) is Annotated and hint != Digest:
        base, *marks = typing.get_args(hint)
        return base, marks
    return hint, []


def unbounded(cls: type) -> Iterator[str]:
    """The fields of a message, and of all that is in it, that nothing bounds."""

    def look(hint: Any, path: str) -> Iterator[str]:
        base, marks = parts(hint)
        origin = typing.get_origin(base)
        if origin in (types.UnionType, typing.Union):
            for inner in typing.get_args(base):
                if inner is not type(None):
                    yield from look(inner, path)
        elif origin in (tuple, dict):
            if not marks:
                yield path
            for inner in typing.get_args(base):
                if inner is not Ellipsis:
                    yield from look(inner, f"{path}[]")
        elif dataclasses.is_dataclass(base):
            for name, inner in fields(base).items():
                yield from look(inner, f"{path}.{name}")
        elif base not in (bool, Digest) and not marks:
            yield path

    yield from look(cls, cls.__name__)


TEXTS = tuple(
    "".join(random.Random(letters).choices(letters, k=2**17))
    for letters in (string.ascii_letters, "\0\n\x1b[2Jé\u202e", "0123456789abcdef", " /.#")
)
"""Of which texts are cut."""


@dataclass
class Maker:
    """Draws from `rng`. `known`: values of the run; `odd`: the probability of a field at its bound, or strange."""

    rng: random.Random
    known: Known = field(default_factory=dict)
    odd: float = 0.2
    _ways: dict[Any, Callable[[], Any]] = field(default_factory=dict, init=False, repr=False)

    def make(self, hint: Any) -> Any:
        """A value of a type, as plain data, within all bounds."""
        return self._way(hint)()

    def _way(self, hint: Any) -> Callable[[], Any]:
        """What makes values of a type. A type is looked at once: there are ten million messages to be made."""
        if hint not in self._ways:
            self._ways[hint] = self._find_way(hint)
        return self._ways[hint]

    def _find_way(self, hint: Any) -> Callable[[], Any]:
        rng, odd = self.rng, self.odd
        strange = self._strange_way(hint)
        if hint not in self.known:
            return strange
        known = self.known[hint]
        return lambda: known(rng) if rng.random() > odd else strange()

    def _strange_way(self, hint: Any) -> Callable[[], Any]:
        """The same without what is known of the run."""
        rng, odd = self.rng, self.odd
        base, marks = parts(hint)
        origin = typing.get_origin(base)
        if base == Digest:
            return lambda: rng.randbytes(32)
        if origin in (types.UnionType, typing.Union):
            there = self._way(next(a for a in typing.get_args(base) if a is not type(None)))
            return lambda: None if rng.random() < odd else there()
        most = next((mark.count for mark in marks if isinstance(mark, AtMost | Cut)), MANY)
        if origin is tuple:
            entry = self._way(typing.get_args(base)[0])
            return lambda: [entry() for _ in range(self._count(most))]
        if origin is dict:
            key, value = (self._way(arg) for arg in typing.get_args(base))
            return lambda: {key(): value() for _ in range(self._count(most))}
        if dataclasses.is_dataclass(base):
            ways = [(name, self._way(inner)) for name, inner in fields(base).items()]
            return lambda: {name: way() for name, way in ways}
        return self._plain_way(base, marks, most)

    def _count(self, most: int) -> int:
        if most <= FEW and self.rng.random() < 0.7:
            return self.rng.choice((0, most, most))
        return self.rng.choice((0, 1, 1, 2, min(most, MANY), min(most, 40) if self.rng.random() < self.odd else 1))

    def _plain_way(self, base: type, marks: list[Any], most: int) -> Callable[[], Any]:
        rng = self.rng
        if base is bool:
            return lambda: rng.random() < 0.5
        if base in (int, float):
            (bound,) = (mark for mark in marks if isinstance(mark, Within))

            def number() -> Any:
                drawn = rng.choice(
                    (bound.least, bound.most, bound.least + 1, rng.randrange(40), rng.uniform(bound.least, bound.most))
                )
                return base(min(max(drawn, bound.least), bound.most))

            return number

        def long() -> int:
            return rng.choice((0, 1, rng.randrange(most + 1), most))

        if base is bytes:
            return lambda: rng.randbytes(long())

        def text() -> str:
            length, letters = long(), rng.choice(TEXTS)
            first = rng.randrange(len(letters) - length)
            return letters[first : first + length]

        return text

    def another(self, cls: type, made: Mapping[str, Any]) -> dict[str, Any]:
        """A message like one that was made, with other values in a few of its fields."""
        every = fields(cls)
        return {**made, **{name: self.make(every[name]) for name in self.rng.choices(list(every), k=3)}}

    def beyond(self, cls: type) -> Iterator[tuple[str, Any]]:
        """(field, plain data) of messages of which one field is beyond its bounds, and nothing else is wrong."""
        for name, hint in fields(cls).items():
            for value in self._beyond(hint):
                made = {other: self.make(inner) for other, inner in fields(cls).items()}
                yield name, {**made, name: value}

    def _beyond(self, hint: Any) -> list[Any]:
        base, marks = parts(hint)
        origin = typing.get_origin(base)
        if base == Digest:
            return [b"short", "0" * 63, 7]
        if origin in (types.UnionType, typing.Union):
            return self._beyond(next(a for a in typing.get_args(base) if a is not type(None)))
        out: list[Any] = []
        for mark in marks:
            if isinstance(mark, Within) and base is int:
                out += [int(mark.least) - 1, int(mark.most) + 1, 2**64 - 1, -(2**63)]
            elif isinstance(mark, Within):
                out += [mark.least - 1, 2 * mark.most, 1e308, -1e308, float("inf"), float("nan")]
            elif isinstance(mark, AtMost) and origin is tuple:
                out.append([self.make(typing.get_args(base)[0])] * (mark.count + 1))
            elif isinstance(mark, AtMost) and origin is dict:
                value = self.make(typing.get_args(base)[1])
                out.append({f"k{i}": value for i in range(mark.count + 1)})
            elif isinstance(mark, AtMost):
                out.append(("x" if base is str else b"x") * (mark.count + 1))
        if origin is tuple:
            out += [[value] for value in self._beyond(typing.get_args(base)[0])]
        elif origin is dict:
            key, value = typing.get_args(base)
            out += [{wrong: self.make(value)} for wrong in self._beyond(key)]
            out += [{self.make(key): wrong} for wrong in self._beyond(value)]
        elif dataclasses.is_dataclass(base):
            out += [data for _, data in self.beyond(typing.cast(type, base))]
        return [value for value in out if not (isinstance(value, int) and not -(2**63) <= value < 2**64)]
