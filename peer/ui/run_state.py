"""The state of a run, as its events tell it, for a screen. Nothing is drawn or looked up here."""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from peer import events
from peer.events import Event
from peer.ui.lines import Note, describe
from peer.ui.names import Names
from peer.ui.text import LONGEST, blocks, called, cleaned, mean_loss, readable
from peer.ui.utilization import Bottleneck, bottleneck
from protocol.planning import memory
from protocol.round.attestations import RoundAttestations, Witnesses
from protocol.run import layout
from protocol.run.manifest import Manifest
from protocol.wire.announcement import NODE_DEVICE, Announcement, ChainReport
from protocol.wire.claims import Evaluation
from protocol.wire.commit import Diverged
from protocol.wire.plan import Plan, ReplicaSpec
from protocol.wire.schema import extend

SILENT_SECONDS = 5.0
"""Without an answer of any node after which a watcher is told so."""
MESSAGES = 200
"""Notes that are kept for the reader."""
_MOST_POINTS = _MOST_PEERS = 20_000
"""Steps whose loss is kept for the curve, of more every second one is forgotten; peers, of more those who are gone."""
_MOST_STATES = 4_000
"""Whose held-out loss is kept; of more, every second one is forgotten."""
_MOST_EVALUATIONS = 32
"""Of one state."""


@dataclass(slots=True)
class PeerView:
    """A peer that is there or was."""

    peer: str
    """Its peer id."""
    name: str
    """Its name on screens: the one that it announces, with the end of its id, or that end alone."""
    here: bool = True
    """Whether it is not gone."""
    role: str = "waiting"
    """In the newest plan: `full`, `stage`, `joining` while it fetches what it will train, `spare`, or `waiting` where it is not named."""
    replica: int | None = None
    """The number of its replica in that plan."""
    position: int = 0
    """Its stage there."""
    stages: int = 1
    """How many stages its replica has."""
    first: int = 0
    """The first block that it trains."""
    last: int = 0
    """The block after the last one that it trains."""
    rank: int = 0
    """Values per token that cross the chain's boundaries; 0: all of them."""
    device: str = ""
    """`cpu`, `cuda` or `mps`; `2 x cuda` where two of them are one peer."""
    memory_bytes: int = 0
    """Memory for training that Potluck may use there."""
    up_bps: int = 0
    """Bits per second that it can send."""
    reachable: str | None = None
    """How others reach it: `direct`, `mapped`, `private`; empty while it is not known, null while it has not said anything."""
    phase: str = "joining"
    """Its present activity, in its own word; `finished` when the run is over."""
    round: int = 0
    """Its round."""
    step: int = 0
    """Its newest inner step in that round."""
    steps: int = 1
    """The most inner steps that its replica may do in a round."""
    loss: float | None = None
    """Nats per token of that step."""
    busy: float | None = None
    """The share of its newest inner step in a chain that it computed, 0 to 1; null outside of one."""
    sent_bytes: int | None = None
    """Bytes sent in its last whole round; before there is one, its payload. Of several rounds between two looks at it, their mean."""
    dense_bytes: int | None = None
    """Bytes of its pseudo-gradient and its boundary vectors of that round in fp32."""
    written_bytes: int | None = None
    """Bytes written to disk in that round."""
    _totals: tuple[int, int] = (0, 0)
    """Bytes that it has sent, and written to disk, since it was started, as of its last round."""
    _counted: int | None = None
    """The round at whose end that was, None where it is not known yet."""
    _chain: ChainReport | None = None
    """Its newest inner step in its present place in a chain, None where that is not known."""
    _announced: ChainReport | None = None
    """The one in its newest announcement."""

    @property
    def place(self) -> tuple[object, ...]:
        """Without which its measurements are worth nothing: its role, its blocks, its position, the chain's length and rank."""
        return self.role, self.first, self.last, self.position, self.stages, self.rank

    @property
    def chain(self) -> ChainReport | None:
        """Its newest inner step in its present place in a chain, None where that is not known."""
        return self._chain

    def measured(self, step: ChainReport | None) -> None:
        """It did this inner step in its present place, or none is known."""
        self._chain, self.busy = step, None if step is None else step.share(step.busy_s)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The digests of the peers' states after one round."""

    round: int
    """After this round."""
    peers: int | None
    """How many peers compared theirs; null where only a commit tells of it."""
    wrong: tuple[Diverged, ...]
    """Shards that differ from the majority's, and whose."""


@dataclass(frozen=True, slots=True)
class Without:
    """A replica whose work is not in a round."""

    replica: str
    """Its name."""
    reason: str
    """Why, for a reader."""


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


@dataclass(frozen=True, slots=True)
class Found:
    """The held-out loss of one state."""

    round: int
    """The round after which it was measured."""
    loss: float
    """Nats per token: the median of all who measured it."""
    bits_per_byte: float
    """Bits per UTF-8 byte of text, likewise."""
    by: tuple[Evaluation, ...]
    """All measurements."""
    sample: str = ""
    """How the model goes on with the held-out text, as most say who measured it; empty where no text is what most say."""


class HeldOut:
    """Belongs to one reader."""

    def __init__(self) -> None:
        self.found: dict[int, Found] = {}
        """By round, in order."""
        self._told: dict[int, dict[str, Evaluation]] = {}

    @property
    def newest(self) -> Found | None:
        """None before the first."""
        return next(reversed(self.found.values()), None)

    def add(self, evaluations: Sequence[Evaluation]) -> None:
        """The evaluations of another commit, all of one state; of one peer the first counts."""
        if not evaluations:
            return
        at = evaluations[0].round
        told = self._told.setdefault(at, {})
        for said in evaluations:
            if len(told) < _MOST_EVALUATIONS:
                told.setdefault(said.peer, said)
        late = at < next(reversed(self.found), -1)
        self.found[at] = Found(
            round=at,
            loss=statistics.median(said.loss for said in told.values()),
            bits_per_byte=statistics.median(said.bits_per_byte for said in told.values()),
            by=tuple(said for _, said in sorted(told.items())),
            sample=_most([said.sample for said in told.values()]),
        )
        if late:
            self.found = dict(sorted(self.found.items()))
        if len(self.found) > _MOST_STATES:
            for round in list(self.found)[:-1:2]:
                del self.found[round], self._told[round]


def _most(samples: list[str]) -> str:
    """What more than half of them are: one alone of several can put nothing on a screen."""
    (sample, count), *_ = Counter(samples).most_common(1)
    return sample if 2 * count > len(samples) else ""


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
    left_out: tuple[Without, ...] = ()
    """Those of the last commit."""
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
            if (found := bottleneck([p.chain for p in members])) is not None:
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

    def feed(self, event: Event) -> Event:
        """Takes one event into account; returns it with cleaned texts."""
        event = cleaned(event)
        self.now = max(self.now, event.time)
        self.began = event.time if self.began is None else self.began
        source = event.source
        match event.body:
            case events.Ready() as ready:
                self.names.learn(ready.peer, ready.name)
                p = self._present(ready.peer, ready.device, ready.memory_bytes)
                p.up_bps, p.reachable = ready.up_bps, ready.reachable
            case events.Started() as started:
                self._present(started.peer, started.device, started.memory_bytes)
            case events.Gone(peer=peer):
                gone = self._peer(peer)
                gone.here, gone.phase, gone.reachable = False, "gone", None
                gone.measured(None)
            case events.Role() as role:
                self._begins(source, role)
            case events.Step() as step:
                self._steps_on(source, step.round, step.step, step.loss)
            case events.Chain() as step:
                self._peer(source).measured(extend(ChainReport, step))
            case events.Announced() as news:
                self._announced(source, news)
            case events.Offered(bytes=payload):
                p = self._peer(source)
                p.phase = "offered"
                if p._counted is None:
                    p.sent_bytes, p.dense_bytes = payload, self._dense(p, 0)
            case events.Withdrew() | events.Leaving() | events.Restored() | events.Finished():
                self._peer(source).phase = event.kind
            case events.Round() as done:
                self._applied(source, done.round, (done.bytes_sent, done.bytes_written), done.boundary_tokens)
            case events.Commit() as commit:
                self._committed(event.time, commit)
            case events.Attest() as attest:
                self._attested(attest)
            case events.RunFinished(state_digest=digest):
                self.finished, self.state_digest = True, digest
        if self.finished:  # whatever was announced last, nobody does anything any more
            for p in self.peers.values():
                if p.here and p.device != NODE_DEVICE:
                    p.phase = "finished"
                    p.measured(None)
        self.notes.extend(Note(event.time, level, text[:LONGEST]) for level, text in describe(event, self.names))
        return event

    def _peer(self, peer: str) -> PeerView:
        if peer not in self.peers:
            if len(self.peers) >= _MOST_PEERS:
                self.peers = {p: view for p, view in self.peers.items() if view.here}
            self.peers[peer] = PeerView(peer, self.name(peer))
        return self.peers[peer]

    def _present(self, peer: str, device: str, memory_bytes: int) -> PeerView:
        p = self._peer(peer)
        p.name, p.device, p.memory_bytes = self.name(peer), device[:12], memory_bytes
        p.phase = "ready" if not p.here or p.phase == "joining" else p.phase
        p.here = True
        return p

    def _begins(self, peer: str, role: events.Role) -> None:
        p = self._peer(peer)
        before = p.place
        p.role, p.round, p.step = role.role[:10], role.round, 0
        p.phase = "training" if p.here else p.phase  # who left after the plan was made
        p.replica, p.first, p.last, p.rank = role.replica, role.first, role.last, role.rank
        p.position, p.stages, p.steps = role.position, role.stages, max(role.steps, 1)
        if p.place != before:
            p.measured(None)

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

    def _announced(self, peer: str, news: Announcement) -> None:
        p = self._peer(peer)
        if news.phase == "waiting" and news.bytes_sent and news.bytes_sent != p._totals[0]:
            replica = -1 if p.replica is None else p.replica
            self._applied(peer, news.round, (news.bytes_sent, news.bytes_written), self._tokens.get(replica, 0))
        if news.phase == "training" and (news.round, news.step) != (p.round, p.step):
            self._steps_on(peer, news.round, news.step, news.loss)
        p.round, p.step, p.phase = news.round, news.step, news.phase[:10]
        if news.chain != p._announced:
            p._announced = news.chain
            p.measured(news.chain)

    def _applied(self, peer: str, round: int, totals: tuple[int, int], boundary_tokens: int) -> None:
        """`totals`: bytes sent, and written to disk, since it was started; `boundary_tokens`: of its chain's round, if it is in one. Announcements come every few
        seconds, so several rounds may have ended since the last one."""
        p = self._peer(peer)
        ended = round - (p._counted or 0)
        if ended > 0:
            if p._counted is not None or round == 1:
                before = p._totals if totals >= p._totals else (0, 0)  # of a process before
                p.sent_bytes, p.written_bytes = (totals[0] - before[0]) // ended, (totals[1] - before[1]) // ended
                p.dense_bytes = self._dense(p, ((p.position > 0) + (p.position < p.stages - 1)) * boundary_tokens)
            p._totals, p._counted = totals, round
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
        self._commit_times[number], self._idle = when, commit.idle
        self._decreed = None if commit.schedule is None else commit.schedule.rounds
        self.held_out.add(commit.evaluations)
        self._tokens = {c.replica: c.tokens for c in commit.contributions}
        self._witnesses.count({peer: c.tokens for c in commit.contributions for peer in c.peers}, commit.plan)
        if loss is not None:
            self.committed[number] = loss
        self.left_out = tuple(
            Without(self.replica_name(x.replica), readable(x.reason, self.names)) for x in commit.left_out
        )
        self.left_out_total += len(self.left_out)
        wrong = commit.diverged
        if wrong or self.compared is None or self.compared.round < number - 1:
            self.compared = Comparison(number - 1, None, wrong)
        self.round = max(self.round, number + 1)
        if commit.plan is not None:
            self._plan(commit.plan)

    def _plan(self, plan: Plan) -> None:
        self.replicas = plan.replicas
        before = {peer: p.place for peer, p in self.peers.items()}
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
        for peer, p in self.peers.items():
            if p.place != before.get(peer):
                p.measured(None)

    def _attested(self, attest: events.Attest) -> None:
        self._attests.setdefault(attest.round, {})[attest.peer] = attest.digests
        for old in [r for r in self._attests if r < attest.round - 2]:
            del self._attests[old]
        latest = max((r for r, by in self._attests.items() if len(by) > 1), default=None)
        if latest is None:
            return
        found = self._attests[latest]
        shards, of_round = layout.shard_names(self.manifest.model), RoundAttestations(self._witnesses.weights(), found)
        wrong = tuple(d for d in of_round.diverged(ties=True) if d.shard in shards)
        self.compared = Comparison(latest, len(found), wrong)
