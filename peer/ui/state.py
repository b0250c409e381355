"""The run as a monitor shows it, as plain data of bounded size: `/state.json`, the lines of `potluck monitor --json`, and what the
monitor's views and metrics are drawn from.

The classes are the schema, and docs/events.md lists them. Unlike the snapshot it has no addresses, and no more of a long run or of
many peers than a reader can look at. Texts of others are cleaned (peer/ui/text.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from peer.ui.contributors import contributors
from peer.ui.run_state import PeerView, View
from peer.ui.text import clean
from peer.ui.watched import Point, RoundFigures, Watched, thinned
from protocol.wire.commit import votes_needed

MOST_POINTS = 300
"""Of a chart."""
MOST_PEERS = 600
MOST_REPLICAS = 600
MOST_CONTRIBUTORS = 200
MOST_ROUNDS = 30
MOST_DIVERGED = 5
MOST_MESSAGES = 40
_OF_NODE = "bootstrap"
"""The device that a bootstrap node announces."""


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
    """`cpu`, `cuda` or `mps`."""
    memory_bytes: int
    """What Potluck may use there."""
    up_bps: int
    """Bits per second that it can send."""
    reachable: str
    """How others reach it: `direct`, `mapped`, `private`; empty while it is not known."""
    phase: str
    """What it does now, in its own word."""
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
    replicas: int
    """Whose work is in it."""
    bytes: int
    """Of their payloads."""
    left_out: tuple[StateLeftOut, ...]
    """Whose work is not, five at most."""
    left_out_total: int
    """How many that are."""


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
    """Now, Unix seconds."""
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
    """At the pace of the last rounds; null while that is not known."""
    blocks: int
    """Of the model."""
    tokens: int
    """Trained and committed."""
    loss: float | None
    """Nats per token of the newest round."""
    tokens_per_second: float | None
    """In the newest rounds."""
    peers_here: int
    """How many peers are there."""
    sent_bytes: int | None
    """What all peers sent in their last whole round."""
    dense_bytes: int | None
    """What that would take in fp32."""
    loss_by_step: tuple[tuple[float, ...], ...]
    """Chart: the mean loss of inner steps."""
    loss_by_round: tuple[tuple[float, ...], ...]
    """Chart: the loss of decided rounds."""
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


def state(watched: Watched, now: float) -> State:
    """As of `now`, in Unix seconds."""
    view, manifest = watched.view, watched.view.manifest
    listed = [p for p in view.listed() if p.device != _OF_NODE]
    found = contributors(watched.credits)
    traffic = view.traffic or (None, None)
    inner = [(round(x, 3), y) for x, y in view.curve]
    newest = max(view.committed, default=None)
    rounds = watched.rounds
    return State(
        run=manifest.run_id,
        name=clean(manifest.name),
        time=_time(now),
        round=min(view.round, manifest.rounds),
        rounds=manifest.rounds,
        start_peers=manifest.start_peers,
        finished=view.finished,
        progress=_number(view.progress) or 0.0,
        seconds_left=_number(view.eta),
        blocks=manifest.model.n_layers,
        tokens=watched.credits.tokens,
        loss=_number(None if newest is None else min(view.highest, view.committed[newest])),
        tokens_per_second=_number(watched.pace),
        peers_here=sum(p.here for p in listed),
        sent_bytes=traffic[0],
        dense_bytes=traffic[1],
        loss_by_step=_chart(inner),
        loss_by_round=_chart((r, min(view.highest, x)) for r, x in sorted(view.committed.items())),
        speed_by_round=_chart((f.round, f.tokens_per_second) for f in rounds),
        seconds_by_round=_chart((f.round, f.seconds) for f in rounds),
        left_out_by_round=_chart((f.round, f.left_out_total) for f in rounds),
        recent=tuple(_round(f) for f in list(watched.recent)[: -MOST_ROUNDS - 1 : -1] if f.round),
        replicas=_replicas(view),
        replicas_total=len(view.replicas),
        peers=tuple(_peer(p, watched.reachable.get(p.peer, "")) for p in listed[:MOST_PEERS]),
        peers_total=len(listed),
        contributors=tuple(
            StateContributor(
                rank=c.rank,
                peer=clean(c.peer, 64),
                name=view.name(c.peer),
                tokens=c.tokens,
                share=round(c.share, 6),
                rounds=c.rounds,
                streak=c.streak,
                left_out=c.left_out,
                reason=clean(c.reason),
            )
            for c in found[:MOST_CONTRIBUTORS]
        ),
        contributors_total=len(found),
        health=_health(watched, listed),
        messages=tuple(
            StateMessage(time=_time(note.time), level=note.level, text=clean(note.text, 400))
            for note in list(view.notes)[: -MOST_MESSAGES - 1 : -1]
        ),
    )


def _number(value: float | None) -> float | None:
    """`value` in six digits, and None where JSON has no such number."""
    return float(f"{value:.6g}") if value is not None and math.isfinite(value) else None


def _time(when: float) -> float:
    return round(when, 3) if math.isfinite(when) else 0.0


def _chart(points: Iterable[tuple[float, float | None]]) -> tuple[Point, ...]:
    known = [(x, y) for x, y in points if y is not None and math.isfinite(y)]
    return tuple((x, _number(y) or 0.0) for x, y in thinned(known, MOST_POINTS))


def _round(f: RoundFigures) -> StateRound:
    return StateRound(
        round=f.round,
        time=_time(f.time),
        seconds=_number(f.seconds),
        tokens=f.tokens,
        loss=_number(f.loss),
        replicas=f.replicas,
        bytes=f.bytes,
        left_out=tuple(StateLeftOut(replica=who, reason=why) for who, why in f.left_out),
        left_out_total=f.left_out_total,
    )


def _replicas(view: View) -> tuple[StateReplica, ...]:
    waits = {chain.members[0].replica: chain.slowest for chain in view.chains}
    out, chains = [], 0
    for r in view.replicas[:MOST_REPLICAS]:
        name = f"chain {chains}" if r.is_chain else view.name(r.peers[0])
        chains += r.is_chain
        out.append(
            StateReplica(
                replica=r.number, name=name, chain=r.is_chain, rank=r.rank, waits=clean(waits.get(r.number, ""))
            )
        )
    return tuple(out)


def _peer(p: PeerView, reachable: str) -> StatePeer:
    activity = p.activity
    return StatePeer(
        peer=clean(p.peer, 64),
        name=p.name,
        here=p.here,
        role=p.role,
        replica=p.replica,
        position=p.position,
        first=p.first,
        last=p.last,
        device=p.device,
        memory_bytes=p.memory_bytes,
        up_bps=p.up_bps,
        reachable=reachable,
        phase=p.phase,
        round=p.round,
        step=p.step,
        steps=p.steps,
        loss=_number(p.loss),
        sent_bytes=p.sent_bytes,
        busy=_number(activity.busy) if activity is not None else None,
    )


def _health(watched: Watched, listed: list[PeerView]) -> StateHealth:
    view, manifest = watched.view, watched.view.manifest
    here = {p.peer for p in view.peers.values() if p.here}
    reachable = {"direct": 0, "mapped": 0, "private": 0, "unknown": 0}
    for p in listed:
        how = watched.reachable.get(p.peer)
        if how is not None:
            reachable[how if how in reachable else "unknown"] += 1
    wrong = view.compared.wrong if view.compared is not None else []
    return StateHealth(
        operators=tuple(
            StateOperator(
                peer=peer,
                name=view.name(peer),
                here=peer in here,
                leads=peer == watched.leader,
                voted=peer in watched.voters,
            )
            for peer in manifest.operators
        ),
        quorum=manifest.quorum,
        votes_needed=votes_needed(manifest.quorum),
        forks=tuple(watched.forks),
        compared_round=view.compared.round if view.compared is not None and view.compared.round > 0 else None,
        diverged=tuple(StateDiverged(peer=view.name(peer), shard=shard) for peer, shard in wrong[:MOST_DIVERGED]),
        reachable=reachable,
        relays=tuple(
            StateRelay(
                node=view.name(node), circuits=r.circuits, bps=_number(r.bps) or 0.0, bytes=r.bytes, refused=r.refused
            )
            for node, r in watched.relays.items()
        ),
        left_out_total=view.left_out_total,
    )
