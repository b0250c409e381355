"""Events: everything that a screen, a log file or a test learns of a running process.

Each kind of event is one class. Some extend a message (protocol/wire) and have its fields. The classes are the schema:
the JSON form, docs/events.md and what the screens may read follow from them. An event travels as one line of JSON:

    {"at": seconds, "source": peer id or name, "event": kind, ...fields}

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

from protocol.run import manifest as manifests
from protocol.run.manifest import EVALUATED_TIME, Manifest
from protocol.run.short_line import join_line
from protocol.wire import commit as wire
from protocol.wire.announcement import Announcement, ChainReport
from protocol.wire.claims import Evaluation, Score
from protocol.wire.plan import Plan, StageSpec
from protocol.wire.schema import SchemaError, build, plain

# --- what a bootstrap node reports


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """A bootstrap node listens and can be joined."""

    address: str
    """The argument of `potluck join`: a multiaddress, `#`, and the run's id; empty while the machine has no address."""
    line: str = ""
    """The same for people, short (protocol/run/short_line.py); empty like `address`."""
    addresses: tuple[str, ...]
    """All multiaddresses that it listens on, the best one first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready(Announcement):
    """A peer has opened a session with a bootstrap node and announced its resources; repeated when they change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """A peer has left, stopped announcing itself, or been silent for longer than `timing.gone_after`."""

    peer: str


@dataclass(frozen=True, kw_only=True)
class Commit(wire.Commit):
    """A round is decided: the updates that enter the mean, and the plan of the next round."""

    voters: tuple[str, ...] = ()
    """The bootstrap nodes whose votes are in the log; only in events of `potluck monitor`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainReconfigured:
    """A chain has lost a member and goes on with others. Reported by the leading node, then by each member."""

    round: int
    replica: int
    generation: int
    """How many times this chain was reconfigured in this round."""
    peers: tuple[str, ...]
    """Its members from now on, in the order of the stages; none: its round is over."""
    steps: int
    """Inner steps that are done, if no more are needed; else 0."""
    reason: str = ""
    """Why, for a reader; empty in a member's report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """Blocks of a chain move from one stage to another, from this round on."""

    round: int
    """The first round with the new shape."""
    replica: int
    peers: tuple[str, ...]
    """Its members, in the order of the stages."""
    before: tuple[int, ...]
    """How many blocks each stage had."""
    after: tuple[int, ...]
    """How many blocks each stage has now."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Attest:
    """A peer has attested the digests of its shards to a bootstrap node."""

    peer: str
    round: int
    """The round after which its shards have these digests."""
    digests: dict[str, str]
    """SHA-256 by shard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diverged:
    """A peer's shard has other bits than the majority's."""

    peer: str
    round: int
    """The round after which it differs."""
    shard: str
    refuted: bool = False
    """Whether the log gives other bits, as a bootstrap node computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Relayed:
    """A bootstrap node's relay statistics, once a minute: it relays between peers that cannot connect directly."""

    circuits: int
    """Streams that go through it now."""
    bytes: int
    """Bytes relayed since its start."""
    bps: float
    """Bits per second in the last minute."""
    refused: int
    """Requests refused since its start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarrel:
    """A member of a chain accuses a neighbour of sending false values. Later plans keep the two apart."""

    accuser: str
    accused: str
    reason: str
    out: tuple[str, ...]
    """Peers that are in no chain from now on, after quarrels with several others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A process refuses a peer for a while, because the peer has exceeded a limit."""

    peer: str
    address: str
    """The network that it comes from; empty if unknown."""
    reason: str
    seconds: float
    """How long it is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfair:
    """Another operator's node proposes a commit that breaks a rule. It gets no vote here, and another node leads."""

    peer: str
    round: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Forked:
    """Two commits of one round have enough votes: more nodes lie than the quorum tolerates. No peer applies either
    (docs/failure-model.md)."""

    round: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Leads:
    """A bootstrap node begins or ceases to lead the quorum."""

    leads: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFinished:
    """The run's last round is committed."""

    round: int
    state_digest: str | None
    """Digest of the final state; null unless a majority attested all of it."""


# --- what a peer reports, and what `potluck monitor` reports of a peer


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A peer's process is ready to take part."""

    peer: str
    pid: int
    device: str
    memory_bytes: int
    """Memory that it may use above an idle process."""
    rss_bytes: int
    """Resident memory of the process before any training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A peer has found the run that it joins."""

    run: str
    name: str
    parameters: int
    round_seconds: float
    """Seconds of training in a round."""
    probation: int = 0
    """Rounds in which a newcomer's work has no weight."""
    state_bytes: int = 0
    """Disk of a state of the whole model; a full replica keeps two."""
    state_seconds: float = 0.0
    """Seconds of training between two that are written."""
    sent_a_day: int = 0
    """Most bytes of updates that a full replica sends; it fetches as many of each other replica."""
    measuring: float = 0.0
    """Most of a full replica's time for measuring the model and others' updates, as a part."""
    mirrors: tuple[str, ...] = ()
    """Web addresses that may be asked for the text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A peer has measured the bandwidth of its internet line, or corrected an earlier measurement."""

    up_bps: int
    """The uplink that it announces."""
    down_bps: int
    """The downlink that it announces."""
    by: str
    """Source of the measurement: peer ids of bootstrap nodes, separated by spaces; `earlier`: a previous start of the
    peer; `transfers`: of payloads, states and chains."""
    round_trip_ms: float | None = None
    """Round-trip time to such a node; null for `earlier` and `transfers`."""
    bytes_sent: int = 0
    """Bytes sent to measure, without headers."""
    bytes_received: int = 0
    """Bytes received to measure, without headers."""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFetched:
    """A peer has fetched its first training text since its start. From then on it fetches ahead of reading."""

    bytes: int
    seconds: float
    tokens: int
    """Tokens of the whole text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reachable:
    """A peer has found out how other peers can reach it, or noticed a change."""

    how: str
    """`direct`: at its own address; `mapped`: at a port of its router; `private`: its router refuses connections."""
    addresses: tuple[str, ...]
    """Multiaddresses that other peers could dial."""
    asked: tuple[str, ...]
    """Peer ids of those that tried; none: the result of an earlier start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """A peer begins a round's training."""

    round: int
    role: str
    """`full`: a whole replica alone; `stage`: a stage of a chain."""
    replica: int
    first: int
    last: int
    position: int
    stages: int
    steps: int = 1
    """Most inner steps of the replica in the round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A peer did an inner step."""

    round: int
    step: int
    loss: float | None
    """Nats per token of the replica's batch."""
    tokens: int
    """Tokens of the replica's batch."""
    seconds: float
    """Since the peer's step before, or since its round began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain(ChainReport):
    """A stage of a chain did an inner step."""

    round: int
    step: int
    """The inner step, counted from the run's beginning."""
    seconds_per_microbatch: float
    """Seconds of computing that one micro-batch takes, without what was computed a second time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Announced(Announcement):
    """A peer's newest announcement, if it differs from the previous one. Only in events of `potluck monitor`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """A peer offers its update of a round."""

    round: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdrew:
    """A peer has no update to offer in a round."""

    round: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """A peer that was asked to stop hands over its error feedback to other peers that train its shards."""

    seconds: float
    """Time limit; a second signal ends it at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """The sum of what a peer did since its process began, when that ends."""

    folder: str
    """The peer's."""
    seconds: float
    rounds: int
    """Rounds that it applied."""
    own_tokens: int
    """Committed tokens of its own in these."""
    tokens: int
    """Committed tokens of all in these."""
    first_loss: float | None
    """Mean loss of the first of these that has one, in nats per token; null if none has."""
    last_loss: float | None
    """Mean loss of the last of these that has one; null if none has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paused:
    """A peer pauses: it leaves the run for a while, or does not begin yet."""

    reason: str
    """Outside of its hours, the battery, a metered connection, or the use of the machine by other programs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """A paused peer goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainFailed:
    """A member of a chain has noticed that the chain cannot go on."""

    round: int
    generation: int
    """How many times this chain had been reconfigured before in this round."""
    peer: str
    """The failed member."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """A peer applied a committed round."""

    round: int
    seconds: dict[str, float]
    """Seconds by activity: train, encode, disk, fetch, boundary, apply and others. `text` is the part of train that
    waited for text."""
    bytes_sent: int
    """Bytes sent since its start."""
    bytes_received: int
    """Bytes received since its start."""
    boundary_forward_bytes: int
    """Bytes of activations that it sent in this round."""
    boundary_backward_bytes: int
    """Bytes of gradients that it sent to the previous stage in this round."""
    boundary_tokens: int
    """Tokens whose activations crossed its boundaries in this round; 0 for a full replica."""
    holds: bool = True
    """Whether it holds any shard: a newcomer reads the log before it has one."""
    rounds: int = 0
    """The run's last round."""
    peers: int = 0
    """Peers whose work it has."""
    own_tokens: int = 0
    """Committed tokens of its own: of a chain's, the share of its blocks (protocol/ledger/credits.py)."""
    tokens: int = 0
    """Committed tokens of all."""
    own_tokens_so_far: int = 0
    """Its own in the whole run."""
    tokens_so_far: int = 0
    """Of all in the whole run."""
    rank: int = 0
    """Its place by these, from 1; 0 while it has none."""
    contributors: int = 0
    """Peers that have some."""
    loss: float | None = None
    """Mean loss of the round's contributions, in nats per token; null if it is unknown."""
    probation: str = ""
    """Why its work of the round has no weight, for a reader; empty unless it is on probation."""
    peak_rss_bytes: int = 0
    """Peak resident memory of its process; 0 if it is not measured."""
    bytes_written: int = 0
    """Bytes written to disk since its start, except by the system for state in mapped files."""
    evaluations: tuple[Evaluation, ...] = ()
    """Held-out losses of an earlier state in the commit; none if a later round is decided."""
    scores: tuple[Score, ...] = ()
    """Scores of earlier contributions in the commit; likewise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A peer goes on from a checkpoint on its disk."""

    round: int
    """The last round whose outcome the checkpoint has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetching:
    """A peer's progress in fetching missing shards, every few seconds and at the end."""

    round: int
    """The round of the state that it fetches."""
    came: int
    """Bytes fetched so far."""
    bytes: int
    """Bytes in all: states, and the payloads of later rounds."""
    seconds: float
    done: bool
    """Whether the state is complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingLog:
    """A peer's progress in reading many rounds of the log, every few seconds and at the end."""

    round: int
    """The newest round that it has read."""
    newest: int
    """The newest round that it knows of; equal to `round` at the end."""
    after: int
    """The round that it had at the beginning, -1 for none."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A peer has the state and can be part of the next plan."""

    round: int
    """The plan's round."""
    seconds: float
    """Estimated seconds until that round begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """A peer has built its missing shards."""

    round: int
    """The round whose state they have."""
    bases: dict[str, int]
    """By shard: the round of the state from which it replayed the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRebuilt:
    """A peer has rebuilt shards from the log, because they differed from the majority's."""

    round: int
    """The round whose state they have."""
    shards: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A peer has applied the run's last round."""

    round: int
    digests: dict[str, str]
    """SHA-256 of its final shards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """The operators have decided a commit that breaks a rule."""

    round: int
    rule: str
    """The name of the rule in protocol/ledger/rules.py."""
    reason: str
    """What is wrong, as the end of "the commit ...": foreign text, as the log has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Warning:
    """Something went wrong, and the process goes on."""

    text: str


# --- all of them

OfNode = (
    Listening | Ready | Gone | Commit | ChainReconfigured | Moved | Attest | Diverged | Leads | Relayed | Refused
    | Unfair | Forked | Quarrel | RunFinished
)  # fmt: skip
OfPeer = (
    Found | Started | Measured | Reachable | Role | Step | Chain | Announced | Offered | Withdrew | ChainFailed | Round
    | Restored | ReadingLog | Fetching | Waiting | Recovered | ShardRebuilt | TextFetched | Leaving | Left | Paused
    | Resumed | Finished | Violation | Warning
)  # fmt: skip
Body = OfNode | OfPeer


def kind_of(body: type[Body]) -> str:
    """The JSON name of a class of events: `chain_failed` of ChainFailed."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", body.__name__).lower()


KINDS: dict[str, type[Body]] = {kind_of(body): body for body in typing.get_args(Body)}
_NAMES = {body: kind for kind, body in KINDS.items()}


@dataclass(frozen=True, slots=True)
class Event:
    """`body` happened in process `source` (a peer id, or `bootstrap`, `monitor`) at `time` (Unix seconds)."""

    time: float
    source: str
    body: Body

    @property
    def kind(self) -> str:
        """The JSON name of what happened."""
        return _NAMES[type(self.body)]

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of what happened, as JSON has them."""
        return dict(plain(self.body))

    def to_json(self) -> str:
        """The event as one line, without its end."""
        return json.dumps({"at": self.time, "source": self.source, "event": self.kind, **self.fields})


def from_json(line: str) -> Event | None:
    """Parses a line; None if it is no event. Ignores unknown fields."""
    try:
        data = json.loads(line)
        body = build(KINDS[data["event"]], data, ignore_unknown=True)
        return Event(float(data["at"]), str(data["source"]), body)
    except (ValueError, KeyError, TypeError, SchemaError):
        return None


def listening(manifest: Manifest, addresses: Sequence[str]) -> Listening:
    """Makes the event of a node that listens at `addresses`, the best one first; none while it has no network."""
    if not addresses:
        return Listening(address="", addresses=())
    return Listening(
        address=f"{addresses[0]}#{manifest.run_id}",
        line=join_line(manifest.name, addresses[0], manifest.run_id),
        addresses=tuple(addresses),
    )


def found(manifest: Manifest) -> Found:
    """Makes the event of a run that was found, with what it may cost this machine."""
    from protocol.ledger import part_lists

    seconds = manifest.timing.training_seconds
    evaluating = EVALUATED_TIME if manifest.evaluation.every else 0.0
    return Found(
        run=manifest.run_id,
        name=manifest.name,
        parameters=manifests.parameters(manifest),
        round_seconds=seconds,
        probation=manifest.admission.probation if manifest.admission.is_open else 0,
        state_bytes=(16 if manifest.outer.has_momentum else 12) * manifests.parameters(manifest),
        state_seconds=manifest.checkpoint_rounds * seconds,
        sent_a_day=int(part_lists.largest_update(manifest) * 86400 / seconds),
        measuring=evaluating + manifest.judging.score_share,
        mirrors=manifest.data.mirrors,
    )


def role(plan: Plan, replica: int, stage: StageSpec) -> Role:
    """Makes the event of a stage's peer that begins to train."""
    spec = plan.replica(replica)
    return Role(
        round=plan.round,
        role="stage" if spec.is_chain else "full",
        replica=replica,
        first=stage.first,
        last=stage.last,
        position=spec.stages.index(stage),
        stages=len(spec.stages),
        steps=spec.work.steps,
    )


Emit = Callable[[Body], None]
"""Reports what happened, usually to an Emitter."""
Sink = Callable[[Event], None]
"""Consumes events: a screen, a file."""


class Emitter:
    """Adds source and time to what a process reports, and passes the event to `sink`."""

    def __init__(self, source: str, sink: Sink) -> None:
        self.source = source
        self._sink = sink

    def __call__(self, body: Body) -> None:
        self._sink(Event(time.time(), self.source, body))


def json_sink(out: TextIO | None = None) -> Sink:
    """Returns a sink that writes each event as one line (default: to standard output)."""

    def write(event: Event) -> None:
        stream = out or sys.stdout
        stream.write(event.to_json() + "\n")
        stream.flush()

    return write
