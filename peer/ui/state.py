"""The run as a monitor shows it, as plain data of bounded size: `/state.json`, the lines of `potluck monitor --json`, and what the
monitor's views and metrics are drawn from.

The classes are the schema, and docs/events.md lists them. It has no addresses of volunteers, and no more of a long run or of many peers than a
reader can look at.
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
from peer.ui.run_state import Comparison, Found, PeerView, View
from peer.ui.text import cleaned
from peer.ui.utilization import Bottleneck
from peer.ui.watched import RoundView, Watched
from protocol.wire.announcement import NODE_DEVICE
from protocol.wire.commit import votes_needed
from protocol.wire.schema import plain

MOST_POINTS = 300
"""Of a chart."""
MOST_PEERS = 600
MOST_REPLICAS = 600
MOST_CONTRIBUTORS = 200
MOST_ROUNDS = 30
MOST_DIVERGED = 5
MOST_MESSAGES = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaView:
    """A replica of the newest plan; its members are the peers that name it."""

    replica: int
    """Its number."""
    name: str
    """Its peer's name, or its chain's."""
    chain: bool
    """Whether several peers share its blocks."""
    rank: int
    """Values per token that cross a chain's boundaries; 0: all of them."""
    waits: str
    """What a chain waits for, for a reader; empty where it is not known."""
    bottleneck: Bottleneck | None
    """The same as data; null where it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorView:
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
class Health:
    """Whether all is well."""

    operators: tuple[OperatorView, ...]
    """The run's bootstrap nodes, of which a quorum decides."""
    quorum: int
    """How many of them vote on a round."""
    votes_needed: int
    """How many votes decide it."""
    forks: tuple[str, ...]
    """Rounds with two decided commits, for a reader. There should be none."""
    compared: Comparison | None
    """The last comparison of the peers' states, with five differences at most; null before the first."""
    reachable: dict[str, int]
    """How many peers are reached how: `direct`, `mapped` by their routers, `private` through relays or holes, `unknown`."""
    relays: dict[str, events.Relayed]
    """What nodes relay, by node, as far as they have told."""
    left_out_total: int
    """Replicas that all rounds left out."""
    refused_total: int
    """How often the operators' nodes have refused somebody who used too much of them, as they say."""


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
    held_out: Found | None
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
    recent: tuple[RoundView, ...]
    """The newest rounds, the newest first, 30 at most."""
    replicas: tuple[ReplicaView, ...]
    """Those of the newest plan, 600 at most."""
    replicas_total: int
    """How many there are."""
    peers: tuple[PeerView, ...]
    """Replicas first in the plan's order, then spares and others, then those who are gone; 600 at most."""
    peers_total: int
    """How many there are."""
    contributors: tuple[Contributor, ...]
    """Those with the most tokens first, 200 at most."""
    contributors_total: int
    """How many there are."""
    health: Health
    """Whether all is well."""
    messages: tuple[Note, ...]
    """What happened, the newest first, 40 at most."""


Point = tuple[float, float]


def thinned(points: Sequence[Point], most: int) -> tuple[Point, ...]:
    """At most `most` of the points (x, y), which are in order of x: neighbours become one with their mean y, at the last one's x."""
    if len(points) <= most:
        return tuple(points)
    out = []
    for i in range(most):
        part = points[i * len(points) // most : (i + 1) * len(points) // most]
        out.append((part[-1][0], sum(y for _, y in part) / len(part)))
    return tuple(out)


def state(watched: Watched, now: float) -> State:
    """As of `now`, in Unix seconds."""
    view, manifest = watched.view, watched.view.manifest
    listed = [p for p in view.listed() if p.device != NODE_DEVICE]
    found = contributors(watched.credits, view.names)
    traffic = view.traffic or (None, None, None)
    inner = [(round(x, 3), y) for x, y in view.curve]
    newest = max(view.committed, default=None)
    rounds = watched.rounds
    return State(
        run=manifest.run_id,
        name=cleaned(manifest.name),
        time=now,
        heard=None if view.news_age is None else now - view.news_age,
        news_age_seconds=view.news_age,
        silent=view.is_silent,
        round=min(view.round, view.rounds),
        rounds=view.rounds,
        start_peers=manifest.start_peers,
        finished=view.finished,
        progress=view.progress,
        seconds_left=view.eta,
        blocks=manifest.model.n_layers,
        tokens=watched.credits.tokens,
        loss=None if newest is None else min(view.highest, view.committed[newest]),
        held_out=view.held_out.newest,
        tokens_per_second=watched.pace,
        peers_here=sum(p.here for p in listed),
        sent_bytes=traffic[0],
        dense_bytes=traffic[1],
        written_bytes=traffic[2],
        loss_by_step=_chart(inner),
        loss_by_round=_chart((r, min(view.highest, x)) for r, x in sorted(view.committed.items())),
        held_out_by_round=_chart((r, min(view.highest, x.loss)) for r, x in view.held_out.found.items()),
        speed_by_round=_chart((f.round, f.tokens_per_second) for f in rounds),
        seconds_by_round=_chart((f.round, f.seconds) for f in rounds),
        left_out_by_round=_chart((f.round, f.left_out_total) for f in rounds),
        recent=tuple(_round(f, view) for f in list(watched.recent)[: -MOST_ROUNDS - 1 : -1] if f.round),
        replicas=tuple(_replicas(view)),
        replicas_total=len(view.replicas),
        peers=tuple(copy.copy(p) for p in listed[:MOST_PEERS]),
        peers_total=len(listed),
        contributors=tuple(found[:MOST_CONTRIBUTORS]),
        contributors_total=len(found),
        health=_health(watched, listed),
        messages=tuple(list(view.notes)[: -MOST_MESSAGES - 1 : -1]),
    )


def to_json(state: State) -> str:
    """A state on one line."""
    return json.dumps(_rounded(plain(state)), separators=(",", ":"), allow_nan=False)


def _rounded(value: Any) -> Any:
    """Plain data with numbers of at most six decimals, and null where JSON has no such number."""
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return {key: _rounded(item) for key, item in value.items()} if isinstance(value, dict) else value


def _chart(points: Iterable[tuple[float, float | None]]) -> tuple[Point, ...]:
    known = [(x, y) for x, y in points if y is not None and math.isfinite(y)]
    return thinned(known, MOST_POINTS)


def _round(f: RoundView, view: View) -> RoundView:
    measured = view.held_out.found.get(f.round)
    return f if measured is None else dataclasses.replace(f, held_out=measured.loss)


def _replicas(view: View) -> Iterator[ReplicaView]:
    waits, chains = {chain.members[0].replica: chain for chain in view.chains}, 0
    for r in view.replicas[:MOST_REPLICAS]:
        known = waits.get(r.number)
        yield ReplicaView(
            replica=r.number,
            name=f"chain {chains}" if r.is_chain else view.name(r.peers[0]),
            chain=r.is_chain,
            rank=r.rank,
            waits=known.slowest if known is not None else "",
            bottleneck=known.bottleneck if known is not None else None,
        )
        chains += r.is_chain


def _health(watched: Watched, listed: list[PeerView]) -> Health:
    view = watched.view
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
                leads=peer == watched.leader,
                voted=peer in watched.voters,
            )
            for peer in watched.operators
        ),
        quorum=watched.quorum,
        votes_needed=votes_needed(watched.quorum),
        forks=tuple(watched.forks),
        compared=None if compared is None else dataclasses.replace(compared, wrong=compared.wrong[:MOST_DIVERGED]),
        reachable=reachable,
        relays=dict(watched.relays),
        left_out_total=view.left_out_total,
        refused_total=watched.refused,
    )
