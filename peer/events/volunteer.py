"""What a peer tells, and what `potluck monitor` tells of a peer. Units and numbering: peer/events."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A peer's process is ready to take part."""

    peer: str
    """Its peer id."""
    pid: int
    """Its process id."""
    device: str
    """`cpu`, `cuda` or `mps`; `2 x cuda` where two of them are one peer."""
    memory_bytes: int
    """What it may use above an idle process."""
    rss_bytes: int
    """Resident memory of the process before any training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A peer has found the run that it was to join."""

    run: str
    """The run's id."""
    name: str
    """What the run is called."""
    parameters: int
    """Of the model."""
    round_seconds: float
    """For which replicas train in a round."""
    probation: int = 0
    """Rounds in which the work of a newcomer has no weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A peer has measured its internet line, or seen that it carries more or less than it had measured."""

    up_bps: int
    """What it sends, and announces."""
    down_bps: int
    """What it receives, and announces."""
    by: str
    """The bootstrap nodes, peer ids with spaces between, with which it was measured; `earlier`: when it was started before; or `transfers`: of payloads, states, chains."""
    round_trip_ms: float | None = None
    """Milliseconds to such a node and back; null for `earlier` and `transfers`."""
    bytes_sent: int = 0
    """That measuring took, without headers."""
    bytes_received: int = 0
    """That measuring took, without headers."""
    seconds: float = 0.0
    """That measuring took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFetched:
    """A peer has fetched, for the first time since its start, all text that it will read soon; from then on it fetches ahead of reading."""

    bytes: int
    """Bytes that came."""
    seconds: float
    """How long that took."""
    tokens: int
    """Tokens of the whole text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reachable:
    """A peer has found out how others can reach it, or that it changed."""

    how: str
    """`direct`: at an address of its own; `mapped`: at one of its router; `private`: its router lets nobody in."""
    addresses: tuple[str, ...]
    """Multiaddresses at which others got through."""
    asked: tuple[str, ...]
    """Peer ids of those who tried; none: it was so when it was started before."""


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
    steps: int = 1
    """The most inner steps that the replica may do in the round."""


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
    """What a peer's announcement says that the one before did not. Only `potluck monitor` tells it."""

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
    refused: int = 0
    """How often it has refused somebody who used too much of it, since it was started."""
    bytes_written: int = 0
    """All bytes that it has written to disk since it was started, as of its last whole round, but for state that it keeps in mapped files."""


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
class Leaving:
    """A peer that was asked to end gives what it has learned, and not sent, to others that train its shards."""

    seconds: float
    """For so long at most; to ask it once more ends that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paused:
    """A peer leaves the run for a while, or does not begin, since this is not the time for it."""

    reason: str
    """Outside of its hours, or who uses the machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """A peer that had paused goes on."""


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
    """Seconds by what the peer did: train, encode, disk, fetch, boundary, apply and others; `text` is the part of train that it waited for text."""
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
    holds: bool = True
    """Whether it holds any shard: a newcomer reads the log before it has one."""
    own_tokens: int = 0
    """Tokens of the replica in which its own work was committed; 0: none of it was."""
    probation: str = ""
    """Why its own work of the round has no weight, where it is on probation, for a reader; else empty."""
    peak_rss_bytes: int = 0
    """The most memory that its process has had resident so far; 0 where nobody measures it."""
    bytes_written: int = 0
    """All bytes that it has written to disk since it was started, but for state that it keeps in mapped files: the system writes that when it likes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A peer goes on from a checkpoint on its disk."""

    round: int
    """The last round whose outcome the checkpoint has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetching:
    """A peer fetches shards that it lacks; told every few seconds, and at the end."""

    round: int
    """The round whose state they will have."""
    came: int
    """Bytes that are here."""
    bytes: int
    """Bytes in all: states, and the payloads of later rounds."""
    seconds: float
    """Since it began."""
    done: bool
    """Whether the state is here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingLog:
    """A peer reads the log of the run, since it lacks many rounds; told every few seconds, and at the end."""

    round: int
    """The newest round that it has read."""
    newest: int
    """The newest round of which it has heard; equal to `round` at the end."""
    after: int
    """The round that it had when it began, -1 for none."""
    seconds: float
    """Since it began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A peer has the state, and the next plan can give it something to do."""

    round: int
    """The plan's round."""
    seconds: float
    """Until it begins, by the clock of the node that decided the round before, as far as it is known: who is slow is waited for."""


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
class Violation:
    """The operators have decided a commit that breaks a rule, which no honest operator votes for."""

    round: int
    """The round of the commit."""
    rule: str
    """The name of the rule in protocol/ledger/rules.py."""
    reason: str
    """What is wrong, as the end of "the commit ...": foreign text, as the log has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Warning:
    """Something went wrong, and the process goes on."""

    text: str
    """One line: thing: reason; remedy."""
