"""Transition tables: the steps of a state machine as data, against which its code is checked at every step.

A row says which event leads from which phase to which, with which effects. The machine's code finds the next row;
`Position.step` refuses a step without a row. docs/state-machines.md is made from the tables.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, TypeVar

P = TypeVar("P", bound=Enum)
E = TypeVar("E")


class TableError(AssertionError):
    """A machine would take a step that its table does not have, or a table has a row twice: a bug, never an input."""


@dataclass(frozen=True, slots=True)
class Row(Generic[P]):
    """In `phase`, upon `event`, if `when` holds: to `next`, with `effects`.

    event None: no event is needed. phase and next None: every phase, unchanged. effects: kinds, in order;
    a repeated kind once, a sent message by its own kind.
    """

    phase: P | None
    event: type | None
    next: P | None
    effects: tuple[type, ...] = ()
    when: str = ""


def anywhere(event: type | None, effects: tuple[type, ...], when: str) -> Row[Any]:
    """A row of every phase, which stays as it is."""
    return Row(None, event, None, effects, when)


class Table(Generic[P]):
    """The rows of the machine `name`, whose phases are `phases`; the first one is where it starts."""

    def __init__(self, name: str, phases: type[P], rows: Iterable[Row[P]]) -> None:
        self.name = name
        self.phases = phases
        self.rows = tuple(rows)
        self._allowed: dict[tuple[Any, ...], Row[P]] = {}
        for row in self.rows:
            for phase in phases if row.phase is None else (row.phase,):
                key = (phase, row.event, row.next or phase, row.effects)
                if key in self._allowed:
                    raise TableError(f"{name}: two rows say {_words(*key)}")
                self._allowed[key] = row

    def row(self, phase: P, event: type | None, next: P, effects: Sequence[object]) -> Row[P]:
        """The row that allows this step. Raises TableError."""
        kinds = (type(getattr(effect, "message", effect)) for effect in effects)
        key = (phase, event, next, tuple(kind for kind, _ in itertools.groupby(kinds)))
        if key not in self._allowed:
            raise TableError(f"{self.name}: no row says {_words(*key)}")
        return self._allowed[key]


class Position(Generic[P]):
    """The position of a machine in its table. `phase` changes only by `step`; `taken`: rows taken so far."""

    def __init__(self, table: Table[P], phase: P) -> None:
        self.table = table
        self.phase = phase
        self.taken: set[Row[P]] = set()

    def step(self, event: type | None, next: P, effects: Sequence[E] = ()) -> list[E]:
        """Goes on to `next` and gives the effects back. Raises TableError where the table has no such row."""
        self.taken.add(self.table.row(self.phase, event, next, effects))
        self.phase = next
        return list(effects)

    def stay(self, event: type | None, effects: Sequence[E] = ()) -> list[E]:
        """A step that leaves the phase as it is."""
        return self.step(event, self.phase, effects)


def _words(phase: Enum, event: type | None, next: Enum, kinds: tuple[type, ...]) -> str:
    what = ", ".join(kind.__name__ for kind in kinds) or "no effect"
    return f"{phase.name} → {next.name} upon {event.__name__ if event else 'a condition'} with {what}"
