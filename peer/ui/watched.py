"""What a monitor remembers of a run beyond its screen: the rounds, who contributed what, the operators' nodes, relays and forks.

It is fed with events, as the screen is (peer/ui/run_state.py), and tells all of it as plain data (peer/ui/state.py).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from peer import events
from peer.events import Event
from peer.ui.contributors import contributors
from peer.ui.names import Names
from peer.ui.run_state import PeerView, View
from peer.ui.state import (
    State,
    StateContributor,
    StateDiverged,
    StateEvaluation,
    StateHealth,
    StateHeldOut,
    StateLeftOut,
    StateMessage,
    StateOperator,
    StatePeer,
    StateRelay,
    StateReplica,
    StateRound,
)
from peer.ui.text import clean, mean_loss
from protocol.ledger.credits import Credits
from protocol.run.manifest import Manifest
from protocol.wire.announcement import NODE_DEVICE
from protocol.wire.commit import votes_needed

_MOST_ROUNDS = 4_000
"""Rounds whose figures are kept for the charts; of more, every second one is forgotten."""
_RECENT = 60
"""Rounds that are kept with who was left out."""
_MOST_FORKS = 5
RECORDED = "bootstrap"
"""The source of what a bootstrap node tells of itself."""
MOST_LEFT_OUT = 5
"""Of a round, that are named."""
_PACE = 5
"""Rounds over which the present speed is a mean."""

MOST_POINTS = 300
"""Of a chart."""
MOST_PEERS = 600
MOST_REPLICAS = 600
MOST_CONTRIBUTORS = 200
MOST_ROUNDS = 30
MOST_DIVERGED = 5
MOST_EVALUATIONS = 5
MOST_MESSAGES = 40


@dataclass(frozen=True, slots=True)
class RoundFigures:
    """A decided round. `seconds`: since the one before, None where that is not known; `left_out`: (replica, reason) for a reader, of
    the first few of `left_out_total`."""

    round: int
    time: float
    seconds: float | None
    tokens: int
    loss: float | None
    replicas: int
    bytes: int
    left_out: tuple[tuple[str, str], ...]
    left_out_total: int

    @property
    def tokens_per_second(self) -> float | None:
        """None where the seconds are not known."""
        return self.tokens / self.seconds if self.seconds else None


@dataclass(frozen=True, slots=True)
class RelayFigures:
    """What a bootstrap node passes on between peers, as it last said."""

    circuits: int
    bps: float
    bytes: int
    refused: int


class Watched:
    """A run, as far as its events have told it."""

    def __init__(self, manifest: Manifest, names: Mapping[str, str] | None = None) -> None:
        self.view = View(manifest, Names(names))
        self.credits = Credits(manifest.model.n_layers)
        self.rounds: list[RoundFigures] = []
        """In order, the older ones thinned out."""
        self.recent: deque[RoundFigures] = deque(maxlen=_RECENT)
        """The newest of them."""
        self.reachable: dict[str, str] = {}
        """How others reach a peer, by peer id."""
        self.relays: dict[str, RelayFigures] = {}
        """By the node that relays."""
        self.refused = 0
        """How often the operators' nodes have refused somebody, as they say; a recording of a node's events tells of that one."""
        self._refused: dict[str, int] = {}  # by each since its start
        self.forks: list[str] = []
        """Rounds with two decided commits, for a reader."""
        self.operators = self.view.manifest.operators
        """Who operates the run, by the newest commit."""
        self.quorum = self.view.manifest.quorum
        """How many of them decide."""
        self.leader = ""
        """The node that proposed the newest commit."""
        self.voters: tuple[str, ...] = ()
        """Whose votes it has."""

    def feed(self, event: Event) -> None:
        """Takes one event into account."""
        self.view.feed(event)
        match event.body:
            case events.Commit() as commit:
                self._committed(event.time, commit)
            case events.Ready(peer=peer, reachable=reachable):
                self.reachable[peer] = clean(reachable, 12)
            case events.Gone(peer=peer):
                self.reachable.pop(peer, None)
            case events.Announced(refused=told) if event.source in self.operators:
                before = self._refused.get(event.source, 0)
                self.refused += told - before if told >= before else told
                self._refused[event.source] = told
            case events.Refused() if event.source == RECORDED:
                self.refused += 1
            case events.Relayed(circuits=circuits, bps=bps, bytes=passed, refused=refused):
                if event.source in self.relays or len(self.relays) < len(self.operators):
                    self.relays[event.source] = RelayFigures(circuits, bps, passed, refused)
            case events.Forked(round=round):
                text = f"round {round} has two decided commits"
                if text not in self.forks and len(self.forks) < _MOST_FORKS:
                    self.forks.append(text)

    @property
    def pace(self) -> float | None:
        """Tokens per second in the newest rounds; None while that is not known."""
        known = [f for f in list(self.recent)[-_PACE:] if f.seconds]
        return sum(f.tokens for f in known) / sum(f.seconds or 0.0 for f in known) if known else None

    def _committed(self, when: float, commit: events.Commit) -> None:
        if self.recent and commit.round <= self.recent[-1].round:
            return
        self.leader, self.voters = commit.leader, commit.voters
        if commit.operators is not None and commit.quorum is not None:
            self.operators, self.quorum = commit.operators, min(commit.quorum, max(1, len(commit.operators)))
        self.credits.add(commit)
        before = self.recent[-1] if self.recent else None
        follows = before is not None and commit.round == before.round + 1 and when > before.time
        figures = RoundFigures(
            round=commit.round,
            time=when,
            seconds=when - before.time if before is not None and follows else None,
            tokens=sum(c.tokens for c in commit.contributions),
            loss=mean_loss(commit.contributions),
            replicas=len(commit.contributions),
            bytes=sum(c.bytes for c in commit.contributions),
            left_out=tuple(self.view.left_out[:MOST_LEFT_OUT]),
            left_out_total=len(commit.left_out),
        )
        self.recent.append(figures)
        if commit.round:
            self.rounds.append(figures)
            if len(self.rounds) > _MOST_ROUNDS:
                del self.rounds[-_MOST_ROUNDS:-1:2]


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
        name=clean(manifest.name),
        time=_time(now),
        heard=None if view.news_age is None else _time(now - view.news_age),
        news_age_seconds=None if view.news_age is None else round(view.news_age, 1),
        silent=view.is_silent,
        round=min(view.round, view.rounds),
        rounds=view.rounds,
        start_peers=manifest.start_peers,
        finished=view.finished,
        progress=_number(view.progress) or 0.0,
        seconds_left=_number(view.eta),
        blocks=manifest.model.n_layers,
        tokens=watched.credits.tokens,
        loss=_number(None if newest is None else min(view.highest, view.committed[newest])),
        held_out=_held_out(view),
        tokens_per_second=_number(watched.pace),
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


def _held_out(view: View) -> StateHeldOut | None:
    newest = view.held_out.newest
    if newest is None:
        return None
    return StateHeldOut(
        round=newest.round,
        loss=_number(newest.loss) or 0.0,
        bits_per_byte=_number(newest.bits_per_byte) or 0.0,
        by=tuple(
            StateEvaluation(name=view.name(peer), loss=_number(loss) or 0.0)
            for peer, loss in newest.by[:MOST_EVALUATIONS]
        ),
        sample=newest.sample,
    )


def _round(f: RoundFigures, view: View) -> StateRound:
    measured = view.held_out.found.get(f.round)
    return StateRound(
        round=f.round,
        time=_time(f.time),
        seconds=_number(f.seconds),
        tokens=f.tokens,
        loss=_number(f.loss),
        held_out=None if measured is None else _number(measured.loss),
        replicas=f.replicas,
        bytes=f.bytes,
        left_out=tuple(StateLeftOut(replica=who, reason=why) for who, why in f.left_out),
        left_out_total=f.left_out_total,
    )


def _replicas(view: View) -> tuple[StateReplica, ...]:
    waits = {chain.members[0].replica: chain for chain in view.chains}
    out, chains = [], 0
    for r in view.replicas[:MOST_REPLICAS]:
        name = f"chain {chains}" if r.is_chain else view.name(r.peers[0])
        chains += r.is_chain
        known = waits.get(r.number)
        found = known.bottleneck if known is not None else None
        out.append(
            StateReplica(
                replica=r.number,
                name=name,
                chain=r.is_chain,
                rank=r.rank,
                waits=clean(known.slowest) if known is not None else "",
                slowest=found.position if found is not None else None,
                what=found.what if found is not None else "",
                share=round(found.share, 3) if found is not None else None,
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
        written_bytes=p.written_bytes,
        busy=_number(activity.busy) if activity is not None else None,
    )


def _health(watched: Watched, listed: list[PeerView]) -> StateHealth:
    view = watched.view
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
            for peer in watched.operators
        ),
        quorum=watched.quorum,
        votes_needed=votes_needed(watched.quorum),
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
        refused_total=watched.refused,
    )
