"""docs/state-machines.md, made from the machines' tables.

`python -m tests.docs.state_machines` writes it.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import textwrap
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

from protocol.quorum import acceptor, leadership, paxos, paxos_events
from protocol.quorum.table import Row, Table
from protocol.round import leader, leader_events, member, member_events

ROOT = Path(__file__).parents[2]
PATH = ROOT / "docs" / "state-machines.md"
HEAD = """# State machines

<!-- made by `python -m tests.docs.state_machines` from the tables of the code; do not edit -->

Small state machines without input and output, clock or randomness make the decisions of a run (`protocol/round`,
`protocol/quorum`). An event and the time go in, and a list of effects comes out. An event loop carries the effects out:
`peer/node/rounds.py` for a volunteer, `bootstrap/node.py` for a bootstrap node. Each machine has a phase and a table. A
row says which event leads from which phase to which, and with which effects. The tables are data, and the machines
check every step against them (`protocol/quorum/table.py`): a step that is not in the table raises an error. The tests
show that each row is taken (`tests/unit/protocol/round/test_state_machines.py`).

How to read a table: *Send(X)* is the effect that sends message X. Where the event is empty, the row is taken as soon as
the condition holds. A row with *any* phase holds in every phase and leaves it as it is; the pictures leave such rows
out. An event without a row changes at most what the machine knows. Messages that may be lost are sent again every few
seconds; the tables do not repeat it.
"""


@dataclass(frozen=True)
class Machine:
    """A table, and the module or class that follows it."""

    title: str
    owner: ModuleType | type
    table: Table[Any]


MACHINES = (
    Machine("The volunteer", member, member_events.TABLE),
    Machine("Training ahead", member.Overlap, member.OVERLAP_TABLE),
    Machine("The round, as a bootstrap node sees it", leader, leader_events.TABLE),
    Machine("Who leads", leadership, leadership.TABLE),
    Machine("The proposer", paxos, paxos_events.TABLE),
    Machine("The acceptor", acceptor, acceptor.TABLE),
)


# --- one row


def cells(row: Row[Any]) -> tuple[str, str, str, str, str]:
    """phase, event, next, effects, condition"""
    return (
        row.phase.name if row.phase else "any",
        row.event.__name__ if row.event else "",
        row.next.name if row.next else "the same",
        ", ".join(effect(kind) for kind in row.effects),
        row.when,
    )


def effect(kind: type) -> str:
    """The name of an effect; what is defined in protocol/wire is a message that is sent."""
    return f"Send({kind.__name__})" if kind.__module__.startswith("protocol.wire.") else kind.__name__


# --- the document


def document() -> str:
    """All of docs/state-machines.md."""
    return "\n".join([HEAD, *(_section(machine) for machine in MACHINES)])


def _section(machine: Machine) -> str:
    module = getattr(machine.owner, "__module__", machine.owner.__name__)
    path = module.replace(".", "/") + ".py"
    about = " ".join((machine.owner.__doc__ or "").split("\n\n")[0].split())
    phases = "".join(f"| {name} | {words} |\n" for name, words in meanings(machine.table.phases).items())
    rows = "".join(f"| {' | '.join(cells(row))} |\n" for row in machine.table.rows)
    return f"""## {machine.title}

{textwrap.fill(f"`{path}`: {about}", 120, break_on_hyphens=False)}

```mermaid
{diagram(machine.table)}
```

| phase | meaning |
|---|---|
{phases}
| phase | event | next | effects | condition |
|---|---|---|---|---|
{rows}"""


def meanings(phases: type[Enum]) -> dict[str, str]:
    """What the docstring under each phase says. Raises KeyError where a phase has none."""
    body = ast.parse(textwrap.dedent(inspect.getsource(phases))).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for above, below in itertools.pairwise(body.body):
        match above, below:
            case ast.Assign(targets=[ast.Name(id=name)]), ast.Expr(value=ast.Constant(value=str(words))):
                found[name] = " ".join(words.split())
    return {phase.name: found[phase.name] for phase in phases}


def diagram(table: Table[Any]) -> str:
    """A picture of the rows that have a phase, in Mermaid's words."""
    moves = [row for row in table.rows if row.phase is not None]
    lines = ["stateDiagram-v2", f"    [*] --> {next(iter(table.phases)).name}"]
    lines += dict.fromkeys(f"    {row.phase.name} --> {row.next.name}: {_label(row)}" for row in moves)
    last = [phase for phase in table.phases if all(row.phase is not phase or row.next is phase for row in moves)]
    return "\n".join([*lines, *(f"    {phase.name} --> [*]" for phase in last)])


def _label(row: Row[Any]) -> str:
    return row.event.__name__ if row.event else re.sub(r"[`;]", "", row.when.split(":")[0])


if __name__ == "__main__":
    PATH.write_text(document(), encoding="utf-8")
