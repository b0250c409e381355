"""What a screen shows: the state of a run, as its events tell it. Nothing is drawn or looked up here. Others' texts are cleaned (text.py)."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from peer import events
from peer.events import Event
from peer.ui.held_out import HeldOut
from peer.ui.lines import Note, describe
from peer.ui.names import Names
from peer.ui.text import blocks, called, clean, mean_loss, readable
from peer.ui.utilization import Activity, Bottleneck, activity, bottleneck
from protocol.ledger.witnesses import Witnesses
from protocol.planning import memory
from protocol.round import attestations
from protocol.run import layout
from protocol.run.manifest import Manifest
from protocol.wire.announcement import NODE_DEVICE
from protocol.wire.plan import Plan, ReplicaSpec

SILENT_SECONDS = 5.0
"""Without an answer of any node after which a watcher is told so."""
MESSAGES = 200
"""Notes that are kept for the reader."""
_MOST_POINTS = _MOST_PEERS = 20_000
"""Steps whose loss is kept for the curve, of more every second one is forgotten; peers, of more those who are gone."""


@dataclass(slots=True)
class PeerView:
    """One peer, as far as the screen knows it."""

    peer: str
    """Its peer id."""
    name: str
    """How it is called on the screen."""
    device: str = ""
    """`cpu`, `cuda` or `mps`; `2 x cuda` where two of them are one peer."""
    memory_bytes: int = 0
    """What Potluck may use there."""
    up_bps: int = 0
    """Bits per second that it can send."""
    here: bool = True
    """Whether it is not gone."""
    role: str = "waiting"
    """`full`, `stage`, `joining`, `spare` or `waiting`."""
    replica: int | None = None
    """The number of its replica in the plan, if it has one."""
    first: int = 0
    """The first block of its stage."""
    last: int = 0
    """The block after the end of its stage."""
    position: int = 0
    """Its stage."""
    stages: int = 1
    """How many stages its replica has."""
    rank: int = 0
    """Values per token at the chain's boundaries; 0: all of them."""
    phase: str = "joining"
    """What it does now."""
    round: int = 0
    """Its round."""
    step: int = 0
    """Its newest inner step in that round."""
    steps: int = 1
    """The most inner steps that its replica may do in a round."""
    loss: float | None = None
    """Nats per token of that step."""
    sent_bytes: int | None = None
    """All that it sent in its last whole round; before there is one, its payload. Of several rounds between two looks at it, their mean."""
    dense_bytes: int | None = None
    """What its pseudo-gradient and its boundary vectors of that round take in fp32."""
    written_bytes: int | None = None  # to disk, likewise
    totals: tuple[int, int] = (0, 0)
    """Bytes that it has sent, and written to disk, since it was started, as of its last round."""
    counted: int | None = None
    """The round at whose end that was, None where it is not known yet."""
    measured: tuple[tuple[int, ...], Activity] | None = None
    """Its newest inner step in a chain, and the place that it had there."""

    @property
    def place(self) -> tuple[int, ...]:
        """What its measurements are worth nothing without: its blocks, its position, the chain's length and rank."""
        return self.first, self.last, self.position, self.stages, self.rank

    @property
    def activity(self) -> Activity | None:
        """Of its newest inner step in its present place in a chain."""
        known = self.here and self.role == "stage" and self.measured is not None and self.measured[0] == self.place
        return self.measured[1] if known and self.measured is not None else None


@dataclass(slots=True)
class Comparison:
    """The digests after `round`: how many peers compared theirs, and who differs in what."""

    round: int
    peers: int | None
    wrong: list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class ChainView:
    """A chain of which at least one member has said how busy it is."""

    name: str
    members: tuple[PeerView, ...]
    bottleneck: Bottleneck

    @property
    def slowest(self) -> str:
        """What it waits for, for a reader."""
        return self.bottleneck.text([p.name for p in self.members])


@dataclass(slots=True)
class View:
    """A run, as far as its events have told it. Times are in Unix seconds, losses in nats per token."""

    manifest: Manifest
    names: Names = field(default_factory=Names)
    """How peers are called, by their ids."""
    peers: dict[str, PeerView] = field(default_factory=dict)
    """Everybody who was ever there, by peer id."""
    replicas: tuple[ReplicaSpec, ...] = ()
    """Those of the newest plan."""
    round: int = 0
    """The open round; 0 before the first plan."""
    finished: bool = False
    state_digest: str | None = None
    """Of the final state, if a majority attested all of it."""
    committed: dict[int, float] = field(default_factory=dict)
    """The loss of each committed round."""
    held_out: HeldOut = field(default_factory=HeldOut)
    left_out: list[tuple[str, str]] = field(default_factory=list)
    """(replica, reason) of whom the last commit left out."""
    left_out_total: int = 0
    """How many replicas all commits left out."""
    compared: Comparison | None = None
    notes: deque[Note] = field(default_factory=lambda: deque(maxlen=MESSAGES))
    began: float | None = None
    """When the first event happened."""
    now: float = 0.0
    """When the newest event happened."""
    news_age: float | None = None
    """Seconds since a node of the run last answered its watcher; None in a recording, of a run that is over, and where the run's own processes tell."""
    _steps: dict[tuple[int, int], tuple[float, int]] = field(default_factory=dict)
    _attests: dict[int, dict[str, dict[str, str]]] = field(default_factory=dict)
    _commit_times: dict[int, float] = field(default_factory=dict)
    _witnesses: Witnesses = field(default_factory=Witnesses)
    _tokens: dict[int, int] = field(default_factory=dict)
    _decreed: int | None = None
    _idle: int = 0

    # --- what is shown

    def name(self, peer: str) -> str:
        """How a peer is called: by its given name, or the end of its id."""
        return called(peer, self.names)

    @property
    def rounds(self) -> int:
        """How many the run has, those without work among them."""
        return (self.manifest.rounds if self._decreed is None else self._decreed) + self._idle

    @property
    def rounds_done(self) -> int:
        """Committed rounds."""
        return self.rounds if self.finished else max(0, self.round - 1)

    @property
    def progress(self) -> float:
        """0..1 of the run, inner steps of the open round included."""
        if self.finished:
            return 1.0
        steps = [
            p.step / p.steps for p in self.peers.values() if p.here and p.round == self.round and p.replica is not None
        ]
        part = min(1.0, sum(steps) / len(steps)) if steps else 0.0
        return min(1.0, (self.rounds_done + part) / self.rounds)

    @property
    def is_silent(self) -> bool:
        """Whether what is now cannot be known: all that is known is as old as the news."""
        return self.news_age is not None and self.news_age > SILENT_SECONDS

    @property
    def eta(self) -> float | None:
        """Seconds to the last commit at the pace of the last five rounds; None before there is one, and where nobody answers."""
        if self.is_silent:
            return None
        times = sorted(self._commit_times.items())[-6:]
        if self.finished or len(times) < 2 or times[-1][0] == times[0][0]:
            return None
        seconds_per_round = (times[-1][1] - times[0][1]) / (times[-1][0] - times[0][0])
        return max(0.0, seconds_per_round * (self.rounds - times[-1][0]) - (self.now - times[-1][1]))

    @property
    def curve(self) -> list[tuple[float, float]]:
        """(rounds done, mean loss in nats per token) of the inner steps at each place of a round, in order."""
        inner = self.manifest.train.inner_steps
        return [(r - 1 + s / inner, min(self.highest, total / n)) for (r, s), (total, n) in sorted(self._steps.items())]

    @property
    def highest(self) -> float:
        """The most nats per token on a curve, four times those of a guess: what one replica says beyond would hide all others."""
        return 4 * math.log(max(self.manifest.model.vocab_size, 2))

    @property
    def traffic(self) -> tuple[int, int, int] | None:
        """Bytes of all peers in their last whole round: sent, in fp32, and written to disk."""
        all_of = [(p.sent_bytes, p.dense_bytes, p.written_bytes or 0) for p in self.peers.values()]
        found = [(sent, dense, written) for sent, dense, written in all_of if sent and dense]
        return (sum(f[0] for f in found), sum(f[1] for f in found), sum(f[2] for f in found)) if found else None

    @property
    def chains(self) -> list[ChainView]:
        """The planned chains, as far as they are known, in plan order."""
        out, number = [], -1
        for replica in self.replicas:
            number += replica.is_chain
            members = tuple(self.peers.get(peer) or PeerView(peer, self.name(peer)) for peer in replica.peers)
            if (found := bottleneck([p.activity for p in members])) is not None:
                out.append(ChainView(f"chain {number}", members, found))
        return out

    def listed(self) -> list[PeerView]:
        """The peers, replicas first in plan order, then spares and others, then those who are gone."""
        places: dict[int | None, int] = {replica.number: place for place, replica in enumerate(self.replicas)}
        return sorted(
            self.peers.values(), key=lambda p: (not p.here, places.get(p.replica, len(places)), p.position, p.name)
        )

    def place(self, p: PeerView, words: int = 3) -> str:
        """What a peer does: `full`, or its stage of a chain; chains are counted from 0 in plan order. `words`: with all of it, 2: without the
        word stage, 1: without its blocks, too."""
        if p.role != "stage" or p.replica is None:
            return "bootstrap node" if p.device == NODE_DEVICE else p.role
        stage = f"{self.replica_name(p.replica)} · {'stage ' if words > 2 else ''}{p.position + 1}/{p.stages}"
        return f"{stage} · {blocks(p.first, p.last)}" if words > 1 else stage

    def replica_name(self, number: int) -> str:
        """A replica for a reader: its peer's name, or `chain N`, counted in plan order."""
        for place, replica in enumerate(self.replicas):
            if replica.number == number:
                chains = sum(r.is_chain for r in self.replicas[:place])
                return f"chain {chains}" if replica.is_chain else self.name(replica.peers[0])
        return f"replica {number}"

    # --- what comes in

    def feed(self, event: Event) -> None:
        """Takes one event into account."""
        self.now = max(self.now, event.time)
        self.began = event.time if self.began is None else self.began
        source = event.source
        match event.body:
            case events.Ready() as ready:
                self.names.learn(ready.peer, ready.name)
                self._present(ready.peer, ready.device, ready.memory_bytes).up_bps = ready.up_bps
            case events.Started() as started:
                self._present(started.peer, started.device, started.memory_bytes)
            case events.Gone(peer=peer):
                gone = self._peer(peer)
                gone.here, gone.phase = False, "gone"
            case events.Role() as role:
                self._begins(source, role)
            case events.Step() as step:
                self._steps_on(source, step.round, step.step, step.loss)
            case events.Chain() as chain:
                self._measured(source, chain)
            case events.Announced() as news:
                self._announced(source, news)
            case events.Offered(bytes=payload):
                p = self._peer(source)
                p.phase = "offered"
                if p.counted is None:
                    p.sent_bytes, p.dense_bytes = payload, self._dense(p, 0)
            case events.Withdrew() | events.Leaving() | events.Restored() | events.Finished():
                self._peer(source).phase = event.kind
            case events.Round() as done:
                self._applied(source, done.round, (done.bytes_sent, done.bytes_written), done.boundary_tokens)
            case events.Commit() as commit:
                self._committed(event.time, commit)
            case events.Evaluated() as told:
                self.held_out.add(told)
            case events.Attest() as attest:
                self._attested(attest)
            case events.RunFinished(state_digest=digest):
                self.finished, self.state_digest = True, digest
        if self.finished:  # whatever was announced last, nobody does anything any more
            for p in self.peers.values():
                if p.here and p.device != NODE_DEVICE:
                    p.phase, p.measured = "finished", None
        self.notes.extend(Note(event.time, *said) for said in describe(event, self.names))

    def _peer(self, peer: str) -> PeerView:
        if peer not in self.peers:
            if len(self.peers) >= _MOST_PEERS:
                self.peers = {p: view for p, view in self.peers.items() if view.here}
            self.peers[peer] = PeerView(peer, self.name(peer))
        return self.peers[peer]

    def _present(self, peer: str, device: str, memory_bytes: int) -> PeerView:
        p = self._peer(peer)
        p.name, p.device, p.memory_bytes = self.name(peer), clean(device, 12), memory_bytes
        p.phase = "ready" if not p.here or p.phase == "joining" else p.phase
        p.here = True
        return p

    def _begins(self, peer: str, role: events.Role) -> None:
        p = self._peer(peer)
        p.role, p.round, p.step = clean(role.role, 10), role.round, 0
        p.phase = "training" if p.here else p.phase  # who left after the plan was made
        p.replica, p.first, p.last, p.rank = role.replica, role.first, role.last, role.rank
        p.position, p.stages, p.steps = role.position, role.stages, max(role.steps, 1)

    def _steps_on(self, peer: str, round: int, step: int, loss: float | None) -> None:
        p = self._peer(peer)
        p.round, p.step, p.phase = round, step, "training"
        p.loss = p.loss if loss is None else loss
        if loss is not None and p.replica is not None and 1 <= round <= self.rounds:
            place = round, max(1, step * self.manifest.train.inner_steps // p.steps)
            total, n = self._steps.get(place, (0.0, 0))
            self._steps[place] = (total + loss, n + 1)
            if len(self._steps) > _MOST_POINTS:
                for key in sorted(self._steps)[::2]:
                    del self._steps[key]

    def _measured(self, peer: str, load: events.StageLoad) -> None:
        p = self._peer(peer)
        p.measured = p.place, activity(load)

    def _announced(self, peer: str, news: events.Announced) -> None:
        p = self._peer(peer)
        if news.phase == "waiting" and news.bytes_sent and news.bytes_sent != p.totals[0]:
            replica = -1 if p.replica is None else p.replica
            self._applied(peer, news.round, (news.bytes_sent, news.bytes_written), self._tokens.get(replica, 0))
        if news.phase == "training" and (news.round, news.step) != (p.round, p.step):
            self._steps_on(peer, news.round, news.step, news.loss)
        p.round, p.step, p.phase = news.round, news.step, clean(news.phase, 10)
        if news.load is not None:
            self._measured(peer, news.load)

    def _applied(self, peer: str, round: int, totals: tuple[int, int], boundary_tokens: int) -> None:
        """`totals`: bytes sent, and written to disk, since it was started; `boundary_tokens`: of its chain's round, if it is in one. Announcements come every few
        seconds, so several rounds may have ended since the last one."""
        p = self._peer(peer)
        ended = round - (p.counted or 0)
        if ended > 0:
            if p.counted is not None or round == 1:
                before = p.totals if totals >= p.totals else (0, 0)  # of a process before
                p.sent_bytes, p.written_bytes = (totals[0] - before[0]) // ended, (totals[1] - before[1]) // ended
                p.dense_bytes = self._dense(p, ((p.position > 0) + (p.position < p.stages - 1)) * boundary_tokens)
            p.totals, p.counted = totals, round
        p.phase = "waiting"

    def _dense(self, p: PeerView, vectors: int) -> int | None:
        """fp32 bytes of the peer's whole pseudo-gradient, and of so many boundary vectors."""
        if p.replica is None:
            return None
        shards = memory.stage_shards(self.manifest, p.first, p.last)
        values = sum(layout.parameters(self.manifest.model, s) for s in shards)
        return 4 * (values + vectors * self.manifest.model.d_model)

    def _committed(self, when: float, commit: events.Commit) -> None:
        number, loss = commit.round, mean_loss(commit.contributions)
        if number in self._commit_times:
            return
        self._commit_times[number], self._decreed, self._idle = when, commit.rounds, commit.idle
        self._tokens = {c.replica: c.tokens for c in commit.contributions}
        self._witnesses.count({peer: c.tokens for c in commit.contributions for peer in c.peers}, commit.plan)
        if loss is not None:
            self.committed[number] = loss
        self.left_out = [(self.replica_name(x.replica), readable(x.reason, self.names)) for x in commit.left_out]
        self.left_out_total += len(self.left_out)
        wrong = [(d.peer, clean(d.shard)) for d in commit.diverged]
        if wrong or self.compared is None or self.compared.round < number - 1:
            self.compared = Comparison(number - 1, None, wrong)
        self.round = max(self.round, number + 1)
        if commit.plan is not None:
            self._plan(commit.plan)

    def _plan(self, plan: Plan) -> None:
        self.replicas = plan.replicas
        for p in self.peers.values():
            p.role, p.replica = "waiting", None
        for spare in plan.spares:
            self._peer(spare).role = "spare"
        for peer in (peer for replica in plan.forming for peer in replica.peers):
            self._peer(peer).role = "joining"
        for replica in plan.replicas:
            for position, stage in enumerate(replica.stages):
                p = self._peer(stage.peer)
                p.role = "stage" if replica.is_chain else "full"
                p.replica, p.rank, p.position, p.stages = replica.number, replica.rank, position, len(replica.stages)
                p.first, p.last, p.steps = stage.first, stage.last, replica.work.steps

    def _attested(self, attest: events.Attest) -> None:
        self._attests.setdefault(attest.round, {})[attest.peer] = attest.digests
        for old in [r for r in self._attests if r < attest.round - 2]:
            del self._attests[old]
        latest = max((r for r, by in self._attests.items() if len(by) > 1), default=None)
        if latest is None:
            return
        found = self._attests[latest]
        shards, right = layout.shard_names(self.manifest.model), attestations.majority(found, self._witnesses.weights())
        wrong = [(d.peer, d.shard) for d in attestations.diverged(found, right, ties=True) if d.shard in shards]
        self.compared = Comparison(latest, len(found), wrong)
