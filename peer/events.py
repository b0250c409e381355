"""Events: all that a screen, a log file or a test learns of a running process.

Each kind of event is one class below. The classes are the schema: the JSON form, docs/events.md and what the screens may read
all follow from them. An event travels as one line of JSON:

    {"time": seconds, "source": peer id or name, "event": kind, …fields}

The kind is the class's name in small letters, words joined by underscores: `ChainFailed` is `chain_failed`. Amounts are in bytes,
seconds, bits per second (`_bps`) and nats per token (losses). Rounds count from 1 (round 0 is the first plan), inner steps from
1 in each round, replicas and stages from 0 in the plan's order. A peer is named by its peer id.
"""

from __future__ import annotations

import json
import re
import sys
import time
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TextIO

from protocol.wire.announcement import Announcement, ChainReport
from protocol.wire.commit import Commit as WireCommit
from protocol.wire.commit import Diverged as DivergedShard
from protocol.wire.commit import LeftOut
from protocol.wire.plan import Plan
from protocol.wire.schema import SchemaError, build, plain
from protocol.wire.session import ChainReconfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """A bootstrap node listens and can be joined."""

    address: str
    """What a volunteer passes to `potluck join`: a multiaddress, `#`, and the run's id."""
    addresses: tuple[str, ...]
    """All multiaddresses that it listens on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A peer has a session with a bootstrap node, and announced what it offers; once more when that changes."""

    peer: str
    """Who."""
    memory_bytes: int
    """What Potluck may use there above an idle process."""
    up_bps: int
    """Bits per second that it can send."""
    down_bps: int
    """Bits per second that it can receive."""
    speed_flops: int
    """Floating-point operations a second that its training reached; 0 while that is unknown."""
    device: str
    """`cpu`, `cuda` or `mps`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """A peer has been silent for too long (`timing.gone_after`), or announces itself no more."""

    peer: str
    """Who."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """One replica's committed work, summed over its members."""

    replica: int
    """The replica's number in the round's plan."""
    tokens: int
    """Trained tokens; its weight in the mean is its share of all tokens."""
    steps: int
    """Inner steps."""
    loss: float | None
    """Nats per token of its first inner step, before the round changed anything; null if it is unknown."""
    bytes: int
    """Size of its payloads."""
    peers: tuple[str, ...]
    """Its members that contributed, in the order of the stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """A round is decided: whose updates enter the mean, and who trains what in the next round."""

    round: int
    """The decided round; 0 decides the first plan only."""
    contributions: tuple[Contribution, ...]
    """What enters the mean."""
    left_out: tuple[LeftOut, ...]
    """Replicas whose work does not, each with its reason."""
    diverged: tuple[DivergedShard, ...]
    """Peers whose digest of a shard after the round before differs from the majority's."""
    plan: Plan | None
    """The next round's replicas, stages and spares; null after the last round, or while nobody is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainReconfigured:
    """A chain lost a member, and goes on with others. The leading node tells it, and so does each member that follows."""

    round: int
    """The open round."""
    replica: int
    """The chain's number in the plan."""
    generation: int
    """How many times this chain was reconfigured in this round."""
    peers: tuple[str, ...]
    """Its members from now on, in the order of the stages; none: its round is over."""
    steps: int
    """If above 0: so many inner steps are done, and no more are needed."""
    reason: str = ""
    """Why, for a reader; empty where a member tells it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """Blocks of a chain go from one stage to another, from this round on."""

    round: int
    """The first round with the new shape."""
    replica: int
    """The chain's number in the plan."""
    peers: tuple[str, ...]
    """Its members, in the order of the stages."""
    before: tuple[int, ...]
    """How many blocks each stage had."""
    after: tuple[int, ...]
    """How many blocks each stage has now."""
    reason: str
    """Why, for a reader."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attest:
    """A peer told the node the digests of its shards."""

    peer: str
    """Who."""
    round: int
    """The round after which its shards have these digests."""
    digests: dict[str, str]
    """SHA-256 by shard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diverged:
    """A peer's shard has other bits than the majority's."""

    peer: str
    """Who."""
    round: int
    """The round after which it differs."""
    shard: str
    """In what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leads:
    """A bootstrap node begins to lead the quorum, or no longer does."""

    leads: bool
    """Whether it leads now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFinished:
    """The run's last round is committed."""

    round: int
    """The last round."""
    state_digest: str | None
    """Digest of the final state if a majority attested all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A peer's process is ready to take part."""

    peer: str
    """Its peer id."""
    pid: int
    """Its process id."""
    device: str
    """`cpu`, `cuda` or `mps`."""
    memory_bytes: int
    """What it may use above an idle process."""
    rss_bytes: int
    """Resident memory of the process before any training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """A peer begins a round's training."""

    round: int
    """The round."""
    role: str
    """`full`: a whole replica alone; `stage`: a stage of a chain."""
    replica: int
    """The replica's number in the plan."""
    first: int
    """The first block that it trains."""
    last: int
    """The block after the last one that it trains."""
    rank: int
    """Values per token that cross the chain's boundaries; 0: all of them."""
    position: int
    """Its stage."""
    stages: int
    """How many stages the replica has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A peer did an inner step."""

    round: int
    """The round."""
    step: int
    """The inner step."""
    loss: float | None
    """Nats per token of the replica's batch."""
    tokens: int
    """Tokens of the replica's batch."""
    seconds: float
    """Since the peer's step before, or since its round began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """Running means over what a stage received at one boundary (peer/chain/activation_stats.py)."""

    rms: float
    """Root mean square of the values."""
    largest: float
    """Largest magnitude."""
    refused: int
    """Frames that were refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryMeans(Means):
    """As `Means`, with the numbers of frames behind them."""

    sampled: int
    """Frames whose root mean square was computed."""
    frames: int
    """Frames that were accepted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLoad:
    """Where the time of one stage's inner step went, and what it sent."""

    seconds: float
    """The inner step."""
    busy_s: float
    """Seconds of computing."""
    wait_forward_s: float
    """Seconds of waiting for activations."""
    wait_backward_s: float
    """Seconds of waiting for gradients."""
    forward_link_s: float
    """Seconds in which activations from the previous stage came through the link."""
    backward_link_s: float
    """Seconds in which gradients from the next stage came through the link."""
    forward_bytes: int
    """Bytes sent to the next stage, headers included."""
    backward_bytes: int
    """Bytes sent to the previous stage, headers included."""
    depth: int
    """Micro-batches that the chain had in work at once."""
    queued: int
    """The most frames that waited for this stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain(StageLoad):
    """A stage of a chain did an inner step."""

    round: int
    """The round."""
    step: int
    """The inner step, counted from the run's beginning."""
    seconds_per_microbatch: float
    """Seconds of computing that one micro-batch takes, without what was computed a second time."""
    activations: BoundaryMeans | None
    """Of the activations that came from the previous stage; null for the first stage."""
    gradients: BoundaryMeans | None
    """Of the gradients that came from the next stage; null for the last stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnouncedLoad(StageLoad):
    """What an announcement repeats of a `chain` event; times are rounded to milliseconds."""

    activations: Means | None
    """Of the activations that came from the previous stage; null for the first stage."""
    gradients: Means | None
    """Of the gradients that came from the next stage; null for the last stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Announced:
    """What a peer's announcement in the DHT says that the one before did not. Only `potluck monitor` tells it."""

    phase: str
    """What the peer does, in its own word."""
    round: int
    """Its round."""
    step: int
    """Its newest inner step in that round."""
    loss: float | None
    """Nats per token of that step."""
    bytes_sent: int
    """All bytes that it has sent since it was started, as of its last whole round."""
    bytes_received: int
    """All bytes that it has received since it was started, as of its last whole round."""
    load: AnnouncedLoad | None
    """Of its newest inner step in a chain, where that is news."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """A peer offers its update of a round."""

    round: int
    """The round."""
    bytes: int
    """Size of its payloads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdrew:
    """A peer has no update to offer in a round."""

    round: int
    """The round."""
    reason: str
    """Why, for a reader."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainFailed:
    """A member noticed that its chain cannot go on."""

    round: int
    """The round."""
    generation: int
    """How many times this chain had been reconfigured before in this round."""
    peer: str
    """The member that is to blame."""
    reason: str
    """What happened, for a reader."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """A peer applied a committed round."""

    round: int
    """The round."""
    seconds: dict[str, float]
    """Seconds by what the peer did: train, encode, disk, fetch, boundary, apply and others."""
    bytes_sent: int
    """All bytes that it has sent since it was started."""
    bytes_received: int
    """All bytes that it has received since it was started."""
    boundary_forward_bytes: int
    """Bytes of activations that it sent in this round."""
    boundary_backward_bytes: int
    """Bytes of gradients that it sent to the previous stage in this round."""
    boundary_tokens: int
    """Tokens whose activations crossed its boundaries in this round; 0 for a full replica."""
    peak_rss_bytes: int = 0
    """The most memory that its process has had resident so far; 0 where nobody measures it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A peer goes on from a checkpoint on its disk."""

    round: int
    """The last round whose outcome the checkpoint has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """A peer built shards that it lacked."""

    round: int
    """The round whose state they have."""
    bases: dict[str, int]
    """By shard: the round from whose state on it replayed the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRebuilt:
    """A peer's shards differed from the majority's, and it built them from the log again."""

    round: int
    """The round whose state they have."""
    shards: tuple[str, ...]
    """Which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A peer has applied the run's last round."""

    round: int
    """The last round."""
    digests: dict[str, str]
    """SHA-256 of its final shards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Warning:
    """Something went wrong, and the process goes on."""

    text: str
    """One line: thing: reason; remedy."""


Body = (
    Listening | Ready | Gone | Commit | ChainReconfigured | Moved | Attest | Diverged | Leads | RunFinished
    | Started | Role | Step | Chain | Announced | Offered | Withdrew | ChainFailed | Round | Restored | Recovered
    | ShardRebuilt | Finished | Warning
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


def commit_of(commit: WireCommit) -> Commit:
    """The event that tells a commit."""
    made = [
        Contribution(
            replica=c.replica,
            tokens=c.tokens,
            steps=c.steps,
            loss=c.loss,
            bytes=sum(part.size for share in c.shares for part in share.parts),
            peers=tuple(share.peer for share in c.shares),
        )
        for c in commit.contributions
    ]
    return Commit(
        round=commit.round,
        contributions=tuple(made),
        left_out=commit.left_out,
        diverged=commit.diverged,
        plan=commit.plan,
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
