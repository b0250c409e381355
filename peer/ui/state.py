"""A snapshot of a run as plain data of bounded size, for `/state.json`, `potluck monitor --json`, views and metrics.

The classes are the schema; docs/events.md lists them. They have no addresses of volunteers.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from peer import events
from peer.ui.contributors import Contributor, contributors
from peer.ui.lines import Note
from peer.ui.run_view import Bottleneck, ComparisonView, HeldOutView, PeerView, RoundView, RunView
from peer.ui.text import cleaned
from protocol.run import layout
from protocol.wire.announcement import NODE_DEVICE
from protocol.wire.commit import votes_needed
from protocol.wire.schema import plain

MOST_POINTS = 300
MOST_PEERS = 600
MOST_REPLICAS = 600
MOST_CONTRIBUTORS = 200
MOST_ROUNDS = 30
MOST_DIVERGED = 5
MOST_MESSAGES = 40
MOST_SAMPLES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaView:
    """A replica of the newest plan; its members are the peers with its number."""

    replica: int
    name: str
    """Its peer's name, or its chain's."""
    chain: bool
    """Whether several peers share its blocks."""
    waits: str
    """A chain's bottleneck, for a reader; empty if unknown."""
    bottleneck: Bottleneck | None
    """The same as data; null if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What a run trains and how to take part, for somebody who sees it for the first time."""

    parameters: int
    """Of the model."""
    context: int
    """Tokens that the model reads at once."""
    license: str
    """The model's, as its manifest names it; empty if it does not."""
    mirrors: tuple[str, ...]
    """Where the text comes from; none if the peers have it from the operators."""
    is_open: bool
    """Whether anybody may take part; else an operator invites."""
    join_line: str
    """What follows `potluck join`; empty if unknown, or by invitation only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleView:
    """What the model wrote after a round."""

    round: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorView:
    """A bootstrap node of an operator."""

    peer: str
    name: str
    here: bool
    """Whether it announces itself."""
    leads: bool
    """Whether it proposed the newest commit."""
    voted: bool
    """Whether its vote is in the newest commit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """The health of a run."""

    operators: tuple[OperatorView, ...]
    """The operators' bootstrap nodes."""
    quorum: int
    """Nodes that vote on a round."""
    votes_needed: int
    """Votes that decide a round."""
    forks: tuple[str, ...]
    """Rounds with two decided commits, for a reader. There should be none."""
    compared: ComparisonView | None
    """The last comparison of the peers' states, with five differences at most; null before the first."""
    reachable: dict[str, int]
    """Peers by how others reach them: `direct`, `mapped` by their routers, `private` by relays or holes, `unknown`."""
    relays: dict[str, events.Relayed]
    """Relay statistics by node."""
    left_out_total: int
    """Replicas that all rounds left out."""
    refused_total: int
    """Refusals of peers that exceeded a limit of an operators' node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A snapshot of a run. Charts are lists of at most 300 points; the first number is the round, with fractions."""

    run: str
    name: str
    about: About
    """What it trains and how to take part."""
    time: float
    """Now, Unix seconds on the monitor's clock."""
    heard: float | None
    """When a node last answered, on the same clock; null in a recording, and when the run is over."""
    news_age_seconds: float | None
    """Seconds since then; null in a recording, and when the run is over."""
    silent: bool
    """Whether that is longer than five seconds; then all other fields may be out of date."""
    round: int
    rounds: int
    """Rounds of the run."""
    start_peers: int
    """Peers with which the run begins."""
    finished: bool
    """Whether the last round is committed."""
    progress: float
    """Of the run, 0 to 1."""
    seconds_left: float | None
    """At the pace of the newest rounds; null if unknown."""
    blocks: int
    """Blocks of the model."""
    tokens: int
    """Trained and committed tokens."""
    loss: float | None
    """Nats per token of the newest round."""
    held_out: HeldOutView | None
    """The newest state that was measured on held-out text; null before the first."""
    samples: tuple[SampleView, ...]
    """What the model wrote in the course of the run, the newest first, 8 at most."""
    tokens_per_second: float | None
    """In the newest rounds."""
    peers_here: int
    """Peers that are present."""
    sent_bytes: int | None
    """Bytes that all peers sent in their last complete round."""
    dense_bytes: int | None
    """The same in fp32."""
    written_bytes: int | None
    """Bytes that all peers wrote to disk in their last complete round."""
    loss_by_step: tuple[tuple[float, ...], ...]
    """Chart: the mean loss of inner steps."""
    loss_by_round: tuple[tuple[float, ...], ...]
    """Chart: the loss of decided rounds."""
    held_out_by_round: tuple[tuple[float, ...], ...]
    """Chart: the held-out loss of the measured states."""
    speed_by_round: tuple[tuple[float, ...], ...]
    """Chart: tokens per second."""
    seconds_by_round: tuple[tuple[float, ...], ...]
    """Chart: seconds from decision to decision."""
    left_out_by_round: tuple[tuple[float, ...], ...]
    """Chart: left-out replicas."""
    recent: tuple[RoundView, ...]
    """The newest rounds, the newest first, 30 at most."""
    replicas: tuple[ReplicaView, ...]
    """Those of the newest plan, 600 at most."""
    replicas_total: int
    """All replicas of that plan."""
    peers: tuple[PeerView, ...]
    """Replicas' peers in plan order, then spares and others, then those that are gone; 600 at most."""
    peers_total: int
    """All peers."""
    contributors: tuple[Contributor, ...]
    """Those with the most tokens first, 200 at most."""
    contributors_total: int
    """All contributors."""
    health: Health
    """Operators, comparisons, relays."""
    messages: tuple[Note, ...]
    """Messages, the newest first, 40 at most."""


Point = tuple[float, float]


def thinned(points: Sequence[Point], most: int) -> tuple[Point, ...]:
    """At most `most` points (x, y), in order of x: means of neighbours, at the last one's x."""
    if len(points) <= most:
        return tuple(points)
    out = []
    for i in range(most):
        part = points[i * len(points) // most : (i + 1) * len(points) // most]
        out.append((part[-1][0], sum(y for _, y in part) / len(part)))
    return tuple(out)


def state(view: RunView, now: float) -> State:
    """The snapshot at `now`, in Unix seconds."""
    manifest, rounds, losses = view.manifest, view.rounds, view.losses
    listed = [p for p in view.listed() if p.device != NODE_DEVICE]
    found = contributors(view.credits, view.names)
    traffic = view.traffic or (None, None, None)
    return State(
        run=manifest.run_id,
        name=cleaned(manifest.name),
        about=About(
            parameters=layout.total_parameters(manifest.model),
            context=manifest.model.context,
            license=manifest.license,
            mirrors=manifest.data.mirrors,
            is_open=view.is_open,
            join_line=view.join_line if view.is_open else "",
        ),
        time=now,
        heard=None if view.news_age is None else now - view.news_age,
        news_age_seconds=view.news_age,
        silent=view.is_silent,
        round=min(view.round, view.last_round),
        rounds=view.last_round,
        start_peers=manifest.start_peers,
        finished=view.finished,
        progress=view.progress,
        seconds_left=view.eta,
        blocks=manifest.model.n_layers,
        tokens=view.credits.tokens,
        loss=losses[-1][1] if losses else None,
        held_out=view.held_out.newest,
        samples=tuple(_samples(view)),
        tokens_per_second=view.tokens_per_second,
        peers_here=sum(p.here for p in listed),
        sent_bytes=traffic[0],
        dense_bytes=traffic[1],
        written_bytes=traffic[2],
        loss_by_step=_chart((round(x, 3), y) for x, y in view.curve),
        loss_by_round=_chart(losses),
        held_out_by_round=_chart((r, min(view.highest, x.loss)) for r, x in view.held_out.found.items()),
        speed_by_round=_chart((r.round, r.tokens_per_second) for r in rounds),
        seconds_by_round=_chart((r.round, r.seconds) for r in rounds),
        left_out_by_round=_chart((r.round, r.left_out_total) for r in rounds),
        recent=tuple(_round(r, view) for r in list(view.recent)[: -MOST_ROUNDS - 1 : -1] if r.round),
        replicas=tuple(_replicas(view)),
        replicas_total=len(view.replicas),
        peers=tuple(copy.copy(p) for p in listed[:MOST_PEERS]),
        peers_total=len(listed),
        contributors=tuple(found[:MOST_CONTRIBUTORS]),
        contributors_total=len(found),
        health=_health(view, listed),
        messages=tuple(list(view.notes)[: -MOST_MESSAGES - 1 : -1]),
    )


def to_json(state: State) -> str:
    """A snapshot on one line."""
    return json.dumps(_rounded(plain(state)), separators=(",", ":"), allow_nan=False)


def _rounded(value: Any) -> Any:
    """Rounds numbers to six decimals; null for infinities and NaN, which JSON lacks."""
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return {key: _rounded(item) for key, item in value.items()} if isinstance(value, dict) else value


def _chart(points: Iterable[tuple[float, float | None]]) -> tuple[Point, ...]:
    known = [(x, y) for x, y in points if y is not None and math.isfinite(y)]
    return thinned(known, MOST_POINTS)


def _round(decided: RoundView, view: RunView) -> RoundView:
    measured, left_out = view.held_out.found.get(decided.round), tuple(map(view.named, decided.left_out))
    return dataclasses.replace(decided, left_out=left_out, held_out=None if measured is None else measured.loss)


def _samples(view: RunView) -> Iterator[SampleView]:
    """The newest sample, and others evenly from the whole run."""
    found = [x for x in view.held_out.found.values() if x.sample]
    for back in range(most := min(MOST_SAMPLES, len(found))):
        x = found[-1 - back * (len(found) - 1) // max(1, most - 1)]
        yield SampleView(round=x.round, text=x.sample)


def _replicas(view: RunView) -> Iterator[ReplicaView]:
    waits = {chain.members[0].replica: chain for chain in view.chains}
    for r in view.replicas[:MOST_REPLICAS]:
        known = waits.get(r.number)
        yield ReplicaView(
            replica=r.number,
            name=view.replica_name(r.number),
            chain=r.is_chain,
            waits=known.slowest if known is not None else "",
            bottleneck=known.bottleneck if known is not None else None,
        )


def _health(view: RunView, listed: list[PeerView]) -> Health:
    reachable = {"direct": 0, "mapped": 0, "private": 0, "unknown": 0}
    for p in listed:
        if p.reachable is not None:
            reachable[p.reachable or "unknown"] += 1
    compared = view.compared if view.compared is not None and view.compared.round > 0 else None
    return Health(
        operators=tuple(
            OperatorView(
                peer=peer,
                name=view.name(peer),
                here=peer in view.peers and view.peers[peer].here,
                leads=peer == view.leader,
                voted=peer in view.voters,
            )
            for peer in view.operators
        ),
        quorum=view.quorum,
        votes_needed=votes_needed(view.quorum),
        forks=tuple(view.forks),
        compared=None if compared is None else dataclasses.replace(compared, wrong=compared.wrong[:MOST_DIVERGED]),
        reachable=reachable,
        relays=dict(view.relays),
        left_out_total=view.left_out_total,
        refused_total=view.refused,
    )
