"""Events: all that a screen, a log file or a test learns of a running process.

Each kind of event is one class: in node.py what a bootstrap node tells, in volunteer.py what a peer tells. The classes
are the schema: the JSON form, docs/events.md and what the screens may read follow from them. An event travels as one
line of JSON:

    {"time": seconds, "source": peer id or name, "event": kind, …fields}

The kind is the class's name in small letters, words joined by underscores: `ChainFailed` is `chain_failed`. Amounts are
in bytes, seconds, bits per second (`_bps`) and nats per token (losses). Rounds count from 1 (round 0 is the first
plan), inner steps from 1 in each round, replicas and stages from 0 in the plan's order. A peer is named by its peer id.

Long because every event is named here, and made from what is decided.
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
    Contribution,
    Decreed,
    Diverged,
    Evaluated,
    Evaluation,
    Forked,
    Gone,
    Invited,
    Leads,
    Listening,
    Mark,
    Moved,
    Quarrel,
    Ready,
    Refused,
    Relayed,
    RunFinished,
    Score,
    Scored,
    Unfair,
)
from peer.events.volunteer import (
    Announced,
    AnnouncedLoad,
    BoundaryMeans,
    Chain,
    ChainFailed,
    Fetching,
    Finished,
    Found,
    Leaving,
    Means,
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
    StageLoad,
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
from protocol.wire.announcement import Announcement, ChainReport
from protocol.wire.commit import Commit as WireCommit
from protocol.wire.decree import Enacted
from protocol.wire.invitation import Joined
from protocol.wire.plan import Plan, StageSpec
from protocol.wire.schema import SchemaError, build, plain
from protocol.wire.score import Score as WireScore
from protocol.wire.session import ChainReconfig

__all__ = [
    "KINDS",
    "Announced",
    "AnnouncedLoad",
    "Attest",
    "Body",
    "BoundaryMeans",
    "Chain",
    "ChainFailed",
    "ChainReconfigured",
    "Commit",
    "Contribution",
    "Decreed",
    "Diverged",
    "Emit",
    "Emitter",
    "Evaluated",
    "Evaluation",
    "Event",
    "Fetching",
    "Finished",
    "Forked",
    "Found",
    "Gone",
    "Invited",
    "Leads",
    "Leaving",
    "Listening",
    "Mark",
    "Means",
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
    "Score",
    "Scored",
    "ShardRebuilt",
    "Sink",
    "StageLoad",
    "Started",
    "Step",
    "TextFetched",
    "Unfair",
    "Violation",
    "Waiting",
    "Warning",
    "Withdrew",
    "announced_load",
    "chain_reconfigured",
    "chain_report",
    "commit_of",
    "decreed",
    "evaluated",
    "found",
    "from_json",
    "invited",
    "json_sink",
    "kind_of",
    "measured",
    "ready",
    "role",
    "score",
    "scored",
]

Body = (
    Listening | Ready | Gone | Commit | ChainReconfigured | Moved | Attest | Diverged | Leads | Relayed | Refused | Unfair | Forked
    | Quarrel | Decreed | Evaluated | Scored | Invited | RunFinished
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
        return json.dumps({"time": self.time, "source": self.source, "event": self.kind, **self.fields})


def from_json(line: str) -> Event | None:
    """The event in a line of text, or None where it is something else. Fields that are not known are passed over."""
    try:
        data = json.loads(line)
        body = build(KINDS[data["event"]], data, ignore_unknown=True)
        return Event(float(data["time"]), str(data["source"]), body)
    except (ValueError, KeyError, TypeError, SchemaError):
        return None


def commit_of(commit: WireCommit, voters: Sequence[str] = ()) -> Commit:
    """The event that tells a commit."""
    made = [
        Contribution(
            replica=c.replica,
            tokens=c.tokens,
            steps=c.steps,
            loss=c.loss,
            bytes=sum(share.size for share in c.shares),
            peers=c.peers,
            scale=c.scale,
            standing=c.standing,
        )
        for c in commit.contributions
    ]
    return Commit(
        round=commit.round,
        contributions=tuple(made),
        left_out=commit.left_out,
        diverged=commit.diverged,
        plan=commit.plan,
        leader=commit.leader,
        voters=tuple(voters),
        rounds=None if commit.schedule is None else commit.schedule.rounds,
        operators=None if commit.board is None else board_names(commit),
        quorum=None if commit.board is None else commit.board.quorum,
        idle=commit.idle,
    )


def board_names(commit: WireCommit) -> tuple[str, ...]:
    """Who operates the run after a commit that has a board."""
    return () if commit.board is None else commit.board.names


def invited(round: int, joined: Joined) -> Invited:
    """The event that tells who has come in by an invitation."""
    invitation = joined.invitation
    return Invited(
        round=round,
        peer=joined.peer,
        operator=joined.operator,
        invitation=invitation.key,
        reason=invitation.reason,
    )


def decreed(round: int, enacted: Enacted) -> Decreed:
    """The event that tells what the operators have decided."""
    decree = enacted.decree
    return Decreed(
        round=round,
        action=decree.action,
        peer=decree.subject or None,
        reason=decree.reason,
        operators=tuple(sorted(enacted.signatures)),
        rounds=None if decree.schedule is None else decree.schedule.rounds,
        total_steps=None if decree.schedule is None else decree.schedule.total_steps,
        limits=None if decree.schedule is None else decree.schedule.limits,
        appointed=tuple(operator.peer for operator in decree.operators),
        quorum=decree.quorum,
    )


def evaluated(commit: WireCommit) -> Evaluated:
    """The event that tells the evaluations of a commit that has some: all are of one state."""
    told = [
        Evaluation(peer=x.peer, sequences=x.sequences, loss=x.loss, bits_per_byte=x.bits_per_byte, sample=x.sample)
        for x in commit.evaluations
    ]
    return Evaluated(round=commit.evaluations[0].round, evaluations=tuple(told))


def measured(commit: WireCommit) -> list[Evaluated | Scored]:
    """The events that tell what peers have measured, as a commit says."""
    found: list[Evaluated | Scored] = [evaluated(commit)] if commit.evaluations else []
    return [*found, scored(commit)] if commit.scores else found


def scored(commit: WireCommit) -> Scored:
    """The event that tells the scores in a commit."""
    return Scored(round=commit.round, scores=tuple(score(x) for x in commit.scores))


def score(said: WireScore) -> Score:
    """One of them."""
    marks = [Mark(replica=x.replica, assigned=x.assigned, other=x.other) for x in said.marks]
    return Score(peer=said.peer, round=said.round, marks=tuple(marks))


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


def ready(announcement: Announcement) -> Ready:
    """The event that tells what a peer offers."""
    return Ready(
        peer=announcement.peer,
        memory_bytes=announcement.memory_bytes,
        up_bps=announcement.up_bps,
        down_bps=announcement.down_bps,
        speed_flops=announcement.speed_flops,
        device=announcement.device,
        reachable=announcement.reachable,
        name=announcement.name,
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


_MEANS = ("rms", "largest", "refused")


def chain_report(step: Chain) -> ChainReport:
    """What an announcement repeats of it."""
    times = (step.seconds, step.busy_s, step.wait_forward_s, step.wait_backward_s)
    links = (step.forward_link_s, step.backward_link_s)
    seen = [
        () if means is None else tuple(float(getattr(means, name)) for name in _MEANS)
        for means in (step.activations, step.gradients)
    ]
    return ChainReport(
        times_ms=tuple(round(1000 * seconds) for seconds in (*times, *links)),
        counts=(step.forward_bytes, step.backward_bytes, step.depth, step.queued),
        activations=seen[0],
        gradients=seen[1],
    )


def announced_load(report: ChainReport) -> AnnouncedLoad:
    """The inverse of `chain_report`, as far as an announcement goes."""
    seconds, busy, wait_forward, wait_backward, forward_link, backward_link = (ms / 1000 for ms in report.times_ms)
    forward_bytes, backward_bytes, depth, queued = report.counts
    seen = [
        Means(rms=means[0], largest=means[1], refused=round(means[2])) if means else None
        for means in (report.activations, report.gradients)
    ]
    return AnnouncedLoad(
        seconds=seconds,
        busy_s=busy,
        wait_forward_s=wait_forward,
        wait_backward_s=wait_backward,
        forward_link_s=forward_link,
        backward_link_s=backward_link,
        forward_bytes=forward_bytes,
        backward_bytes=backward_bytes,
        depth=depth,
        queued=queued,
        activations=seen[0],
        gradients=seen[1],
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
