"""Structured events: all that a screen, a log file or a test learns of a running process.

An event is one JSON object per line: `{"time": seconds, "source": peer id or name, "event": kind, …fields}`. Kinds:

bootstrap  listening {address}; ready {peer, memory_bytes, up_bps, down_bps, speed_flops, device}; gone {peer};
           commit {round, contributions: [{replica, tokens, steps, loss, bytes, peers}], left_out: [{replica, reason}],
                   diverged: [{peer, shard}], plan: null or {replicas: [{k, stages: [{peer, first, last}]}], spares}};
           reconfigured {round, replica, generation, peers, steps, reason} (a chain's members from now on; none: its round is over);
           moved {round, replica, peers, before, after, reason} (numbers of blocks in a chain's stages, from this round on);
           attest {peer, round, digests: {shard: digest}}; diverged {peer, round, shard}; finished {round, state_digest}
peer       started {peer, pid, device, memory_bytes, rss_bytes}; role {round, role: full|stage|spare|waiting, replica, first, last, k, position, stages};
           step {round, step, loss, tokens, seconds}; chain {round, step, seconds, busy_s, wait_forward_s, wait_backward_s,
           forward_link_s, backward_link_s, forward_bytes, backward_bytes, depth, queued, seconds_per_microbatch, activations, gradients: null or {rms,
           largest, sampled, frames, refused}} (of measured.StepReport and stats.Running); offered {round, bytes}; withdrew {round, reason};
           broke {round, generation, peer, reason}; reconfigured {round, replica, generation, peers} (our chain lost a member, goes on with these);
           round {round, seconds: {train, pack, fetch, apply}, bytes_sent, bytes_received, boundary_forward_bytes,
           boundary_backward_bytes, boundary_tokens, peak_rss_bytes};
           restored {round}; recovered {round, bases: {shard: round}}; repaired {round, shards}; finished {round}
both       warning {text}; error {text}
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TextIO

from protocol.wire.commit import Commit
from protocol.wire.schema import plain


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened in process `source` at `time` (Unix seconds)."""

    time: float
    source: str
    kind: str
    fields: dict[str, Any]

    def to_json(self) -> str:
        return json.dumps({"time": self.time, "source": self.source, "event": self.kind, **self.fields})


def from_json(line: str) -> Event | None:
    """The event in a line of text, or None where it is something else."""
    try:
        data = json.loads(line)
        return Event(float(data.pop("time")), str(data.pop("source")), str(data.pop("event")), dict(data))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def commit_fields(commit: Commit) -> dict[str, Any]:
    """A commit as the fields of a `commit` event."""
    return {
        "round": commit.round,
        "contributions": [
            {
                "replica": c.replica,
                "tokens": c.tokens,
                "steps": c.steps,
                "loss": c.loss,
                "bytes": sum(part.size for share in c.shares for part in share.parts),
                "peers": [share.peer for share in c.shares],
            }
            for c in commit.contributions
        ],
        "left_out": plain(commit.left_out),
        "diverged": plain(commit.diverged),
        "plan": plain(commit.plan),
    }


Sink = Callable[[Event], None]


class Emitter:
    """Gives a process's events its name and the time, and hands them to `sink`."""

    def __init__(self, source: str, sink: Sink) -> None:
        self.source = source
        self._sink = sink

    def __call__(self, kind: str, **fields: Any) -> None:
        self._sink(Event(time.time(), self.source, kind, fields))


def json_sink(out: TextIO | None = None) -> Sink:
    """Writes each event as one line (default: standard output)."""

    def write(event: Event) -> None:
        stream = out or sys.stdout
        stream.write(event.to_json() + "\n")
        stream.flush()

    return write
