"""The run as a monitor shows it, as plain data of bounded size: `/state.json`, the lines of `potluck monitor --json`, and what the
monitor's views and metrics are drawn from.

The classes are the schema, and docs/events.md lists them. Unlike the snapshot it has no addresses, and no more of a long run or of
many peers than a reader can look at. Texts of others are cleaned (peer/ui/text.py).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePeer:
    """A peer that is there or was."""

    peer: str
    """Its peer id."""
    name: str
    """How it is called: the end of its id."""
    here: bool
    """Whether it is not gone."""
    role: str
    """In the newest plan: `full`, `stage`, `joining`, `spare`, or `waiting` where it is not named."""
    replica: int | None
    """The number of its replica in that plan."""
    position: int
    """Its stage there."""
    first: int
    """The first block that it trains."""
    last: int
    """The block after the last one that it trains."""
    device: str
    """`cpu`, `cuda` or `mps`; `2 x cuda` where two of them are one peer."""
    memory_bytes: int
    """What Potluck may use there."""
    up_bps: int
    """Bits per second that it can send."""
    reachable: str
    """How others reach it: `direct`, `mapped`, `private`; empty while it is not known."""
    phase: str
    """What it does now, in its own word; `finished` when the run is over."""
    round: int
    """Its round."""
    step: int
    """Its newest inner step in that round."""
    steps: int
    """The most inner steps that its replica may do in a round."""
    loss: float | None
    """Nats per token of that step."""
    sent_bytes: int | None
    """What it sent in its last whole round."""
    written_bytes: int | None
    """What it wrote to disk in that round."""
    busy: float | None
    """The share of its newest inner step in a chain that it computed, 0 to 1; null outside of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateReplica:
    """A replica of the newest plan; its members are the peers that name it."""

    replica: int
    """Its number."""
    name: str
    """What it is called: its peer, or its chain."""
    chain: bool
    """Whether several peers share its blocks."""
    rank: int
    """Values per token that cross a chain's boundaries; 0: all of them."""
    waits: str
    """What a chain waits for, for a reader; empty where it is not known."""
    slowest: int | None
    """The stage that it waits for, or for the link to it; null where that is not known."""
    what: str
    """`computing`; or `forward`, `backward`: the link over which that stage receives activations or gradients; empty where it is not known."""
    share: float | None
    """Of the time of an inner step, 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLeftOut:
    """A replica whose work is not in a round."""

    replica: str
    """Which."""
    reason: str
    """Why, for a reader."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRound:
    """A decided round."""

    round: int
    """Its number."""
    time: float
    """When it was decided, Unix seconds on its leader's clock."""
    seconds: float | None
    """Since the round before was decided; null where that is not known."""
    tokens: int
    """Trained tokens."""
    loss: float | None
    """Nats per token."""
    held_out: float | None
    """Of the state after it, on text that nobody trains on: the median of who measured it; null where nobody did."""
    replicas: int
    """Whose work is in it."""
    bytes: int
    """Of their payloads."""
    left_out: tuple[StateLeftOut, ...]
    """Whose work is not, five at most."""
    left_out_total: int
    """How many that are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateEvaluation:
    """What one peer says that it measured."""

    name: str
    """How it is called."""
    loss: float
    """Nats per token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateHeldOut:
    """How well the model foretells text that nobody trains on."""

    round: int
    """After this round."""
    loss: float
    """Nats per token: the median of who measured it."""
    bits_per_byte: float
    """Bits per UTF-8 byte of text, likewise."""
    by: tuple[StateEvaluation, ...]
    """Who measured it, five at most."""
    sample: str
    """The beginning of the held-out text, `⇒`, and how the model goes on; empty where most say nothing of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateContributor:
    """What one peer has brought to the run."""

    rank: int
    """From 1: whoever has the most tokens."""
    peer: str
    """Its peer id."""
    name: str
    """How it is called."""
    tokens: int
    """Tokens that it trained and that were committed."""
    share: float
    """Of all tokens of the run, 0 to 1."""
    rounds: int
    """In the commits of so many rounds."""
    streak: int
    """In so many of the newest rounds without a gap."""
    left_out: int
    """Rounds in which its replica's work was not taken."""
    reason: str
    """Why, in the newest of these, for a reader."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateOperator:
    """A bootstrap node that the manifest names."""

    peer: str
    """Its peer id."""
    name: str
    """How it is called."""
    here: bool
    """Whether it announces itself."""
    leads: bool
    """Whether it proposed the newest commit."""
    voted: bool
    """Whether its vote is in the newest commit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDiverged:
    """A peer whose state has other bits than the majority's."""

    peer: str
    """How it is called."""
    shard: str
    """In what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRelay:
    """What a bootstrap node passes on between peers that cannot reach each other, as it last said."""

    node: str
    """How it is called."""
    circuits: int
    """Streams that go through it."""
    bps: float
    """Bits per second in the last minute."""
    bytes: int
    """Since its start."""
    refused: int
    """How often it has said no."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateHealth:
    """Whether all is well."""

    operators: tuple[StateOperator, ...]
    """The run's bootstrap nodes, of which a quorum decides."""
    quorum: int
    """How many of them vote on a round."""
    votes_needed: int
    """How many votes decide it."""
    forks: tuple[str, ...]
    """Rounds with two decided commits, for a reader. There should be none."""
    compared_round: int | None
    """The round after which digests of states were last compared; null before the first."""
    diverged: tuple[StateDiverged, ...]
    """Who differed then, five at most."""
    reachable: dict[str, int]
    """How many peers are reached how: `direct`, `mapped` by their routers, `private` through relays or holes, `unknown`."""
    relays: tuple[StateRelay, ...]
    """Nodes that relay, as far as they have told."""
    left_out_total: int
    """Replicas that all rounds left out."""
    refused_total: int
    """How often the operators' nodes have refused somebody who used too much of them, as they say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateMessage:
    """What happened, for a reader."""

    time: float
    """Unix seconds."""
    level: str
    """`info`, `good`, `warning` or `error`."""
    text: str
    """What."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The run as a monitor shows it. Charts are lists of points, 300 at most: the first number is the round, as a fraction within one."""

    run: str
    """The run's id."""
    name: str
    """The run's name in the manifest."""
    time: float
    """Now, Unix seconds on the watcher's clock."""
    heard: float | None
    """When a node of the run last answered, on the same clock: all that follows is of then; null in a recording, and when the run is over."""
    news_age_seconds: float | None
    """For so long no node has answered; null in a recording, and when the run is over."""
    silent: bool
    """Whether that is longer than five seconds: what follows may not be so any more."""
    round: int
    """The open round; 0 before the first plan."""
    rounds: int
    """How many rounds the run has."""
    start_peers: int
    """With how many peers the run begins."""
    finished: bool
    """Whether the last round is committed."""
    progress: float
    """Of the run, 0 to 1."""
    seconds_left: float | None
    """At the pace of the last rounds; null while that is not known, as where no node answers."""
    blocks: int
    """Of the model."""
    tokens: int
    """Trained and committed."""
    loss: float | None
    """Nats per token of the newest round."""
    held_out: StateHeldOut | None
    """The newest state that was measured on text that nobody trains on; null before the first."""
    tokens_per_second: float | None
    """In the newest rounds."""
    peers_here: int
    """How many peers are there."""
    sent_bytes: int | None
    """What all peers sent in their last whole round."""
    dense_bytes: int | None
    """What that would take in fp32."""
    written_bytes: int | None
    """What all peers wrote to disk in their last whole round."""
    loss_by_step: tuple[tuple[float, ...], ...]
    """Chart: the mean loss of inner steps."""
    loss_by_round: tuple[tuple[float, ...], ...]
    """Chart: the loss of decided rounds."""
    held_out_by_round: tuple[tuple[float, ...], ...]
    """Chart: the loss on text that nobody trains on, of the states that were measured."""
    speed_by_round: tuple[tuple[float, ...], ...]
    """Chart: tokens per second."""
    seconds_by_round: tuple[tuple[float, ...], ...]
    """Chart: seconds from decision to decision."""
    left_out_by_round: tuple[tuple[float, ...], ...]
    """Chart: how many replicas were left out."""
    recent: tuple[StateRound, ...]
    """The newest rounds, the newest first, 30 at most."""
    replicas: tuple[StateReplica, ...]
    """Those of the newest plan, 600 at most."""
    replicas_total: int
    """How many there are."""
    peers: tuple[StatePeer, ...]
    """Replicas first in the plan's order, then spares and others, then those who are gone; 600 at most."""
    peers_total: int
    """How many there are."""
    contributors: tuple[StateContributor, ...]
    """Those with the most tokens first, 200 at most."""
    contributors_total: int
    """How many there are."""
    health: StateHealth
    """Whether all is well."""
    messages: tuple[StateMessage, ...]
    """What happened, the newest first, 40 at most."""
