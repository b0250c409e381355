"""docs/events.md, made from the types of events: `python -m tests.docs.events` writes it."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import sys
import textwrap
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peer import events
from peer.ui.contributors import Contributor
from peer.ui.state import State
from protocol.wire.commit import Record

PATH = Path(__file__).parents[2] / "docs" / "events.md"
HEAD = """# Events

<!-- made by `python -m tests.docs.events` from the types in peer/events; do not edit -->

With `--json` every process of Potluck prints what happens as lines of JSON, one event a line:

```json
{example}
```

`at` is the time, in Unix seconds. `source` says which process it is: a peer by its peer id, `bootstrap`, or `monitor`.
`event` is the kind; the other fields are the kind's own, in the tables below. Amounts are in bytes, seconds, bits per
second (`_bps`) and nats per token (losses). Rounds count from 1 (round 0 is the first plan), and inner steps from 1 in
each round; replicas, stages and blocks count from 0. Peers are named by their peer ids. A reader must pass over fields
and kinds that it does not know.

`potluck monitor --json` prints the run as of now instead, an object a line whenever something has changed: [the
state](#the-state), which its web page asks for as `/state.json`, too. It is bounded, and has no addresses of
volunteers. With `--once` it prints one. `potluck log show --json` prints an object a line for each decided round: [the
record](#the-record) with the field `digest`, the SHA-256 of its commit. `potluck log credits --json` prints one for
each contributor: [the contributor](#the-contributor).
"""
EXAMPLE = events.Event(1763820000.5, "bootstrap", events.Gone(peer="12D3KooW…"))
OBJECTS = {State: "The state", Record: "The record", Contributor: "The contributor"}
"""What commands print besides events."""
_WORDS = {
    int: "whole number",
    float: "number",
    str: "text",
    bool: "true or false",
    bytes: "hexadecimal text",
    type(None): "null",
}


USUAL = {
    "round": "Number of the round.",
    "peer": "Peer id.",
    "reason": "Why, for a reader.",
    "run": "The run's id.",
    "name": "The name, for a reader.",
    "replica": "The replica's number in the plan.",
    "shard": "Name of the shard.",
    "shards": "Names of the shards.",
    "first": "The first block that it trains.",
    "last": "The block after the last one that it trains.",
    "position": "Its stage in the replica.",
    "stages": "Stages of its replica.",
    "device": "`cpu`, `cuda` or `mps`; `2 x cuda` where two of them are one peer.",
    "seconds": "Duration.",
    "step": "The inner step.",
    "tokens": "Trained tokens.",
    "loss": "Nats per token.",
    "bytes": "Size.",
    "text": "One line.",
    "time": "Unix seconds.",
    "here": "Whether it is present.",
    "pid": "Process id.",
    "parameters": "Parameters of the model.",
    "accuser": "Peer id of the accuser.",
    "accused": "Peer id of the accused.",
    "leads": "Whether it leads now.",
}
"""Meanings of fields without a docstring, by name."""


def documentation() -> str:
    """The whole document."""
    kinds = list(events.KINDS.values())
    parts: list[str] = [HEAD.format(example=EXAMPLE.to_json().encode().decode("unicode_escape"))]
    for title, union in (("What a bootstrap node tells", events.OfNode), ("What a peer tells", events.OfPeer)):
        parts.append(f"## {title}\n")
        parts += [_section(f"`{events.kind_of(kind)}`", kind) for kind in typing.get_args(union)]
    parts.append("## What `potluck monitor --json` prints\n")
    parts.append(_section(OBJECTS[State], State))
    parts.append("## What `potluck log show --json` prints\n")
    parts.append(_section(OBJECTS[Record], Record))
    parts.append("## What `potluck log credits --json` prints\n")
    parts.append(_section(OBJECTS[Contributor], Contributor))
    parts.append("## The parts of these\n")
    named: list[type] = []
    for owner in (*kinds, *OBJECTS):
        _collect(owner, named)
    made = sorted(set(named) - set(kinds), key=lambda part: part.__name__)
    parts += [_section(f"Object `{part.__name__}`", part) for part in made]
    return "\n".join(parts).rstrip() + "\n"


def _section(title: str, cls: type) -> str:
    hints, base = typing.get_type_hints(cls), extended(cls)
    own = [field for field in public(cls) if base is None or field not in public(base)]
    rows = "".join(f"| `{field.name}` | {_type(hints[field.name])} | {meaning(cls, field.name)} |\n" for field in own)
    about = inspect.getdoc(cls) or ""
    if base is not None:
        about += f" It has the fields of {_type(base)}" + (", and:" if own else ".")
    table = f"\n| field | type | meaning |\n|---|---|---|\n{rows}" if own or base is None else ""
    return f"### {title}\n\n{textwrap.fill(' '.join(about.split()), 120)}\n{table}"


def extended(cls: type) -> type | None:
    """The message whose fields an event has."""
    return next((base for base in cls.__bases__ if dataclasses.is_dataclass(base)), None)


def public(cls: type) -> list[dataclasses.Field[Any]]:
    """The fields that JSON has."""
    return [field for field in dataclasses.fields(cls) if not field.name.startswith("_")]


def _type(hint: Any) -> str:
    """A field's type as JSON has it."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_type(one) for one in inner)
    if origin is tuple:
        return f"list of {_types(inner[0])}"
    if origin is dict:
        return f"{_types(inner[1])} by name"
    if dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        anchor = OBJECTS.get(hint, f"Object {hint.__name__}").lower().replace(" ", "-")
        return f"[{hint.__name__}](#{events.kind_of(hint) if hint in events.KINDS.values() else anchor})"
    return _WORDS[hint]


def _types(hint: Any) -> str:
    """Several of a type."""
    return _type(hint) + ("s" if hint in _WORDS else "")


def _collect(hint: Any, into: list[type]) -> None:
    """The dataclasses that a dataclass is made of."""
    for inner in typing.get_args(hint):
        _collect(inner, into)
    if dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        for field in public(hint):
            _collect(hints[field.name], into)
        assert isinstance(hint, type)
        if (base := extended(hint)) is not None:
            _collect(base, into)
        if hint not in OBJECTS:
            into.append(hint)


def meaning(cls: type, field: str) -> str:
    """The docstring under a field, in the class or one that it extends; else its usual meaning. Raises LookupError."""
    for owner in cls.__mro__:
        found = _docstrings(sys.modules[owner.__module__]).get((owner.__name__, field))
        if found is not None:
            return " ".join(found.split()).replace("|", "\\|")
    if field in USUAL:
        return USUAL[field]
    raise LookupError(f"{cls.__name__}.{field} has no docstring")


@functools.cache
def _docstrings(module: types.ModuleType) -> dict[tuple[str, str], str]:
    """The docstrings of all fields of a module's classes, by class and field."""
    if module.__name__ == "builtins":
        return {}
    return {
        (owner.name, name): text
        for owner in ast.parse(inspect.getsource(module)).body
        if isinstance(owner, ast.ClassDef)
        for name, text in _under_fields(owner)
    }


def _under_fields(owner: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for above, below in zip(owner.body, owner.body[1:], strict=False):
        match above, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                yield name, text


if __name__ == "__main__":
    PATH.write_text(documentation(), encoding="utf-8")
