"""Events: all that a screen, a log file or a test learns of a running process.

Each kind of event is one class: in node.py what a bootstrap node tells, in volunteer.py what a peer tells. Some extend a
message (protocol/wire) and have its fields. The classes are the schema: the JSON form, docs/events.md and what the screens
may read follow from them. An event travels as one line of JSON:

    {"at": seconds, "source": peer id or name, "event": kind, …fields}

The kind is the class's name in small letters, words joined by underscores: `ChainFailed` is `chain_failed`. Amounts are
in bytes, seconds, bits per second (`_bps`) and nats per token (losses). Rounds count from 1 (round 0 is the first
plan), inner steps from 1 in each round, replicas and stages from 0 in the plan's order. A peer is named by its peer id.
"""

from __future__ import annotations

import json
import re
import sys
import time
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from peer.events.node import (
    Attest,
    ChainReconfigured,
    Commit,
    Diverged,
    Forked,
    Gone,
    Leads,
    Listening,
    Moved,
    Quarrel,
    Ready,
    Refused,
    Relayed,
    RunFinished,
    Unfair,
)
from peer.events.volunteer import (
    Announced,
    Chain,
    ChainFailed,
    Fetching,
    Finished,
    Found,
    Leaving,
    Measured,
    Offered,
    Paused,
    Reachable,
    ReadingLog,
    Recovered,
    Restored,
    Resumed,
    Role,
    Round,
    ShardRebuilt,
    Started,
    Step,
    TextFetched,
    Violation,
    Waiting,
    Warning,
    Withdrew,
)
from protocol.run import manifest as manifests
from protocol.run.manifest import Manifest
from protocol.wire.plan import Plan, StageSpec
from protocol.wire.schema import SchemaError, build, plain
from protocol.wire.session import ChainReconfig

__all__ = [
    "KINDS",
    "Announced",
    "Attest",
    "Body",
    "Chain",
    "ChainFailed",
    "ChainReconfigured",
    "Commit",
    "Diverged",
    "Emit",
    "Emitter",
    "Event",
    "Fetching",
    "Finished",
    "Forked",
    "Found",
    "Gone",
    "Leads",
    "Leaving",
    "Listening",
    "Measured",
    "Moved",
    "Offered",
    "Paused",
    "Quarrel",
    "Reachable",
    "ReadingLog",
    "Ready",
    "Recovered",
    "Refused",
    "Relayed",
    "Restored",
    "Resumed",
    "Role",
    "Round",
    "RunFinished",
    "ShardRebuilt",
    "Sink",
    "Started",
    "Step",
    "TextFetched",
    "Unfair",
    "Violation",
    "Waiting",
    "Warning",
    "Withdrew",
    "chain_reconfigured",
    "found",
    "from_json",
    "json_sink",
    "kind_of",
    "role",
]

Body = (
    Listening | Ready | Gone | Commit | ChainReconfigured | Moved | Attest | Diverged | Leads | Relayed | Refused | Unfair | Forked
    | Quarrel | RunFinished
    | Found | Started | Measured | Reachable | Role | Step | Chain | Announced | Offered | Withdrew | ChainFailed | Round | Restored
    | ReadingLog | Fetching | Waiting | Recovered | ShardRebuilt | TextFetched | Leaving | Paused | Resumed | Finished
    | Violation
    | Warning
)  # fmt: skip
"""What may happen."""


def kind_of(body: type[Body]) -> str:
    """The JSON name of a class of events: `chain_failed` of ChainFailed."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", body.__name__).lower()


KINDS: dict[str, type[Body]] = {kind_of(body): body for body in typing.get_args(Body)}
"""The classes by their JSON names."""


@dataclass(frozen=True, slots=True)
class Event:
    """`body` happened in process `source` (a peer id, or `bootstrap`, `monitor`) at `time` (Unix seconds)."""

    time: float
    source: str
    body: Body

    @property
    def kind(self) -> str:
        """The JSON name of what happened."""
        return kind_of(type(self.body))

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of what happened, as JSON has them."""
        return dict(plain(self.body))

    def to_json(self) -> str:
        """The event as one line, without its end."""
        return json.dumps({"at": self.time, "source": self.source, "event": self.kind, **self.fields})


def from_json(line: str) -> Event | None:
    """The event in a line of text, or None where it is something else. Fields that are not known are passed over."""
    try:
        data = json.loads(line)
        body = build(KINDS[data["event"]], data, ignore_unknown=True)
        return Event(float(data["at"]), str(data["source"]), body)
    except (ValueError, KeyError, TypeError, SchemaError):
        return None


def listening(run: str, addresses: Sequence[str]) -> Listening:
    """The event that tells where a bootstrap node can be joined; `addresses`: the best one first, none while it has no network."""
    return Listening(address=f"{addresses[0]}#{run}" if addresses else "", addresses=tuple(addresses))


def found(manifest: Manifest) -> Found:
    """The event that tells which run was found."""
    return Found(
        run=manifest.run_id,
        name=manifest.name,
        parameters=manifests.parameters(manifest),
        round_seconds=manifest.timing.training_seconds,
        probation=manifest.admission.probation if manifest.admission.is_open else 0,
    )


def role(plan: Plan, replica: int, stage: StageSpec) -> Role:
    """The event that tells what the peer of a stage begins to train."""
    spec = plan.replica(replica)
    return Role(
        round=plan.round,
        role="stage" if spec.is_chain else "full",
        replica=replica,
        first=stage.first,
        last=stage.last,
        rank=spec.rank,
        position=spec.stages.index(stage),
        stages=len(spec.stages),
        steps=spec.work.steps,
    )


def chain_reconfigured(message: ChainReconfig) -> ChainReconfigured:
    """The event that tells the leading node's order to a chain."""
    return ChainReconfigured(
        round=message.round,
        replica=message.replica,
        generation=message.generation,
        peers=message.peers,
        steps=message.steps,
        reason=message.reason,
    )


Emit = Callable[[Body], None]
"""Tells what happened: an Emitter, or what stands before one."""
Sink = Callable[[Event], None]
"""Takes events: a screen, a file."""


class Emitter:
    """Gives a process's events its name and the time, and hands them to `sink`."""

    def __init__(self, source: str, sink: Sink) -> None:
        self.source = source
        self._sink = sink

    def __call__(self, body: Body) -> None:
        self._sink(Event(time.time(), self.source, body))


def json_sink(out: TextIO | None = None) -> Sink:
    """Writes each event as one line (default: standard output)."""

    def write(event: Event) -> None:
        stream = out or sys.stdout
        stream.write(event.to_json() + "\n")
        stream.flush()

    return write
