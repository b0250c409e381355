"""The state of a run for screens, made from its events. Nothing is drawn or looked up here."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import statistics
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from peer import events
from peer.events import Event
from peer.ui.lines import Note, describe
from peer.ui.text import LONGEST_TEXT, Names, blocks, called, cleaned, percent, readable, said_of
from protocol.ledger.credits import Credits
from protocol.planning import memory
from protocol.round.attestations import RoundAttestations, Witnesses
from protocol.run import layout
from protocol.run.manifest import Manifest
from protocol.wire.announcement import NODE_DEVICE, Announcement, ChainReport
from protocol.wire.claims import Evaluation
from protocol.wire.commit import Diverged
from protocol.wire.decree import CLOSE, OPEN
from protocol.wire.plan import Plan, ReplicaSpec
from protocol.wire.schema import extend

SILENT_SECONDS = 5.0
"""Age of the last answer at which a screen says that no node answers."""
MOST_MESSAGES = 200
MOST_POINTS = 20_000
"""Inner steps of the loss curve; beyond, every second one is dropped."""
MOST_PEERS = 20_000
"""Peers; beyond, those that are gone are dropped."""
MOST_ROUNDS = 4_000
"""Rounds, and states with a held-out loss; beyond, every second one is dropped."""
RECENT_ROUNDS = 60
PACE_ROUNDS = 5
"""Rounds of the present speed and of the remaining time."""
MOST_EVALUATIONS = 32
"""Of one state."""
MOST_FORKS = 5
MOST_LEFT_OUT = 5
NODE_SOURCE = "bootstrap"
_REPLICA = re.compile(r"\breplica (\d{1,9})\b(: (?:peer )?([^:]+)(?=: ))?")
"""A replica's number in a message, and whom the message names behind it."""
WAITS = {"computing": "◄", "forward": "→", "backward": "←"}
"""Marks of a chain's bottleneck in tables, in the row of its stage."""
LEGEND = "◄ its chain waits for it; → ← for the link to it"


# --- peers


@dataclass(slots=True)
class PeerView:
    """A peer that is or was present."""

    peer: str
    name: str
    """The name that it announces with the end of its id, or that end alone."""
    here: bool = True
    role: str = "waiting"
    """In the newest plan: `full`, `stage`, `joining` while it fetches its shards, `spare`; else `waiting`."""
    replica: int | None = None
    """The number of its replica in that plan."""
    position: int = 0
    stages: int = 1
    first: int = 0
    last: int = 0
    device: str = ""
    memory_bytes: int = 0
    """Memory offered for training."""
    up_bps: int = 0
    """Announced uplink."""
    reachable: str | None = None
    """How others reach it: `direct`, `mapped`, `private`; empty if unknown, null before its first announcement."""
    phase: str = "joining"
    """Its activity, as announced; `finished` when the run is over."""
    round: int = 0
    step: int = 0
    """Its newest inner step in that round."""
    steps: int = 1
    """Most inner steps of its replica in a round."""
    loss: float | None = None
    """Nats per token of that step."""
    busy: float | None = None
    """Share of its newest inner step in a chain that it computed, 0 to 1; null outside of a chain."""
    sent_bytes: int | None = None
    """Bytes sent in its last complete round, or the mean of several; before the first, the size of its payload."""
    dense_bytes: int | None = None
    """Bytes of its pseudo-gradient and boundary vectors of that round in fp32."""
    written_bytes: int | None = None
    """Bytes written to disk in that round."""
    _totals: tuple[int, int] = (0, 0)
    """Bytes sent, and written to disk, since its start, as of its last round."""
    _counted: int | None = None
    """The round at whose end that was; None before the first."""
    _chain: ChainReport | None = None
    _announced: ChainReport | None = None
    """The one in its newest announcement."""

    @property
    def place(self) -> tuple[object, ...]:
        """The context of its measurements; a change makes them obsolete."""
        return self.role, self.first, self.last, self.position, self.stages

    @property
    def chain(self) -> ChainReport | None:
        """Its newest inner step at its present place in a chain; None if unknown."""
        return self._chain

    def measured(self, step: ChainReport | None) -> None:
        """Sets `chain` and `busy`."""
        self._chain, self.busy = step, None if step is None else step.share(step.busy_s)


# --- chains


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """The slowest part of a chain: the stage, or the direction of a link, with the largest share of an inner step.

    The shares of an inner step are computing, waiting for activations and waiting for gradients. The receiver measures
    both directions of a link (peer/chain/link.py).
    """

    position: int
    """The stage that computes, or that receives over the link."""
    what: str
    """`computing`; or `forward`, `backward`: the link over which the stage receives activations or gradients."""
    share: float
    """Of the time, 0 to 1."""

    def text(self, names: Sequence[str] | Mapping[int, str]) -> str:
        """As a sentence. names: of the chain's members by position."""
        here, share = names[self.position], percent(self.share)
        if self.what == "computing":
            return f"{here} computes {share}"
        return f"link {self._sender(names)} → {here} is busy {share}"

    def brief(self, names: Sequence[str] | Mapping[int, str]) -> str:
        """As text for the stage's own row of a table."""
        if self.what == "computing":
            return f"computes {percent(self.share)}"
        return f"link from {self._sender(names)} {percent(self.share)}"

    def _sender(self, names: Sequence[str] | Mapping[int, str]) -> str:
        return names[self.position + (-1 if self.what == "forward" else 1)]


def bottleneck(stages: Sequence[ChainReport | None]) -> Bottleneck | None:
    """The bottleneck among the known stages; of equal shares, computing before links and the first stage."""
    found = [
        Bottleneck(position, what, a.share(seconds))
        for position, a in enumerate(stages)
        if a is not None
        for what, seconds, exists in (
            ("computing", a.busy_s, True),
            ("forward", a.forward_link_s, position > 0),
            ("backward", a.backward_link_s, position + 1 < len(stages)),
        )
        if exists
    ]
    return max(found, key=lambda b: b.share, default=None)


@dataclass(frozen=True, slots=True)
class ChainView:
    """A chain with a known bottleneck."""

    name: str
    members: tuple[PeerView, ...]
    bottleneck: Bottleneck

    @property
    def slowest(self) -> str:
        """The bottleneck as a sentence."""
        return self.bottleneck.text([p.name for p in self.members])


# --- rounds


@dataclass(frozen=True, slots=True)
class LeftOutView:
    """A replica whose work is not in a round, or is a newcomer's and has no weight yet."""

    replica: str
    """Its name."""
    reason: str
    probation: bool = False
    """Whether its work is good and kept, since its makers are new."""
    peers: tuple[str, ...] = ()
    """Its peers; none if unknown."""


@dataclass(frozen=True, slots=True)
class RoundView:
    """A decided round."""

    round: int
    time: float
    """When it was decided, Unix seconds on its leader's clock."""
    seconds: float | None
    """Since the previous decision; null if unknown."""
    tokens: int
    tokens_total: int
    """Tokens of the run up to it."""
    loss: float | None
    replicas: int
    """Replicas whose work is in it."""
    bytes: int
    left_out: tuple[LeftOutView, ...]
    """Replicas whose work is not in it, five at most; newcomers on probation after the others."""
    left_out_total: int
    """How many were left out; newcomers on probation are not."""
    held_out: float | None = None
    """Median loss of the state after it on text that is not trained on, nats per token; null if not measured."""

    @property
    def tokens_per_second(self) -> float | None:
        """None if the seconds are unknown."""
        return self.tokens / self.seconds if self.seconds else None


@dataclass(frozen=True, slots=True)
class ComparisonView:
    """A comparison of the peers' states after one round."""

    round: int
    peers: int | None
    """How many peers compared theirs; null if only a commit is known."""
    wrong: tuple[Diverged, ...]
    """Shards that differ from the majority's, and their peers."""


@dataclass(frozen=True, slots=True)
class HeldOutView:
    """The held-out loss of one state."""

    round: int
    """The round after which it was measured."""
    loss: float
    """Nats per token: the median of all measurements."""
    bits_per_byte: float
    """Bits per UTF-8 byte of text, likewise."""
    by: tuple[Evaluation, ...]
    """All measurements."""
    sample: str = ""
    """The model's continuation of held-out text by a majority of the measurements; empty without a majority."""


class HeldOutLosses:
    """The held-out losses of a run's states."""

    def __init__(self) -> None:
        self.found: dict[int, HeldOutView] = {}
        """By round, in order."""
        self._evaluations: dict[int, dict[str, Evaluation]] = {}

    @property
    def newest(self) -> HeldOutView | None:
        """None before the first."""
        return next(reversed(self.found.values()), None)

    def add(self, evaluations: Sequence[Evaluation]) -> None:
        """Adds a commit's evaluations, all of one state; a peer's first one counts."""
        if not evaluations:
            return
        at = evaluations[0].round
        known = self._evaluations.setdefault(at, {})
        for one in evaluations:
            if len(known) < MOST_EVALUATIONS:
                known.setdefault(one.peer, one)
        late = at < next(reversed(self.found), -1)
        (sample, votes), *_ = Counter(one.sample for one in known.values()).most_common(1)
        self.found[at] = HeldOutView(
            round=at,
            loss=statistics.median(one.loss for one in known.values()),
            bits_per_byte=statistics.median(one.bits_per_byte for one in known.values()),
            by=tuple(one for _, one in sorted(known.items())),
            sample=sample if 2 * votes > len(known) else "",
        )
        if late:
            self.found = dict(sorted(self.found.items()))
        if len(self.found) > MOST_ROUNDS:
            for round in list(self.found)[:-1:2]:
                del self.found[round], self._evaluations[round]


# --- the run


@dataclass(slots=True)
class RunView:
    """A run as its events tell it. Times are in Unix seconds, losses in nats per token."""

    manifest: Manifest
    names: Names = field(default_factory=Names)
    peers: dict[str, PeerView] = field(default_factory=dict)
    """All present and past peers, by peer id."""
    replicas: tuple[ReplicaSpec, ...] = ()
    """Those of the newest plan."""
    round: int = 0
    finished: bool = False
    state_digest: str | None = None
    """Of the final state, if a majority attested all of it."""
    rounds: list[RoundView] = field(default_factory=list)
    """Decided rounds in order, older ones thinned out."""
    recent: deque[RoundView] = field(default_factory=lambda: deque(maxlen=RECENT_ROUNDS))
    """The newest of them, with round 0."""
    credits: Credits = field(init=False)
    held_out: HeldOutLosses = field(default_factory=HeldOutLosses)
    left_out: tuple[LeftOutView, ...] = ()
    """Those of the last commit."""
    left_out_total: int = 0
    """Replicas that all commits left out; newcomers on probation are not."""
    compared: ComparisonView | None = None
    notes: deque[Note] = field(default_factory=lambda: deque(maxlen=MOST_MESSAGES))
    began: float | None = None
    """Time of the first event."""
    now: float = 0.0
    """Time of the newest event."""
    news_age: float | None = None
    """Seconds since a node last answered the monitor; None in a recording, after the end, and in the demo."""
    operators: tuple[str, ...] = field(init=False)
    """By the newest commit."""
    quorum: int = field(init=False)
    """How many of them decide."""
    leader: str = ""
    """The node that proposed the newest commit."""
    voters: tuple[str, ...] = ()
    """The nodes with a vote in it."""
    relays: dict[str, events.Relayed] = field(default_factory=dict)
    """By relaying node."""
    refused: int = 0
    """Refusals by the operators' nodes; in a recording of a node's events, by that node."""
    forks: list[str] = field(default_factory=list)
    """Rounds with two decided commits, for a reader."""
    _steps: dict[tuple[int, int], tuple[float, int]] = field(default_factory=dict)
    _attests: dict[int, dict[str, dict[str, str]]] = field(default_factory=dict)
    _witnesses: Witnesses = field(default_factory=Witnesses)
    _tokens: dict[int, int] = field(default_factory=dict)
    _refused: dict[str, int] = field(default_factory=dict)  # by node since its start
    is_open: bool = field(init=False)
    """Whether anybody may take part, by the newest decree."""
    join_line: str = ""
    """The address to join, without an invitation; empty if unknown."""
    _decreed: int | None = None
    _idle: int = 0
    _called: dict[int, str] = field(default_factory=dict)  # by replica, of the newest two plans: `chain N`, or its peer

    def __post_init__(self) -> None:
        self.credits = Credits(self.manifest.model.n_layers)
        self.is_open = self.manifest.admission.is_open
        self.operators, self.quorum = self.manifest.operators, self.manifest.quorum

    # --- what is shown

    def name(self, peer: str) -> str:
        """A peer's name, or the end of its id."""
        return called(peer, self.names)

    @property
    def last_round(self) -> int:
        """Rounds of the run, idle ones included."""
        return (self.manifest.rounds if self._decreed is None else self._decreed) + self._idle

    @property
    def rounds_done(self) -> int:
        """Committed rounds."""
        return self.last_round if self.finished else max(0, self.round - 1)

    @property
    def losses(self) -> list[tuple[int, float]]:
        """(round, loss) of the rounds with a loss, at most `highest`."""
        return [(r.round, min(self.highest, r.loss)) for r in self.rounds if r.loss is not None]

    @property
    def progress(self) -> float:
        """0..1 of the run, inner steps of the open round included."""
        if self.finished:
            return 1.0
        steps = [
            p.step / p.steps for p in self.peers.values() if p.here and p.round == self.round and p.replica is not None
        ]
        part = min(1.0, sum(steps) / len(steps)) if steps else 0.0
        return min(1.0, (self.rounds_done + part) / self.last_round)

    @property
    def is_silent(self) -> bool:
        """Whether no node answers: everything is as old as `news_age`."""
        return self.news_age is not None and self.news_age > SILENT_SECONDS

    @property
    def tokens_per_second(self) -> float | None:
        """Mean of the newest rounds; None if unknown."""
        known = [r for r in list(self.recent)[-PACE_ROUNDS:] if r.seconds]
        return sum(r.tokens for r in known) / sum(r.seconds or 0.0 for r in known) if known else None

    @property
    def eta(self) -> float | None:
        """Seconds to the last commit at the pace of the newest rounds with work; None if unknown, or nobody trains."""
        worked = [r.seconds for r in self.recent if r.seconds and r.replicas][-PACE_ROUNDS:]
        trains = any(p.here and p.replica is not None for p in self.peers.values())
        if self.is_silent or self.finished or not worked or not trains:
            return None
        a_round = statistics.median(worked)  # one that waited for peers says nothing of the others
        return a_round * (self.last_round - self.recent[-1].round) - min(a_round, self.now - self.recent[-1].time)

    @property
    def curve(self) -> list[tuple[float, float]]:
        """(rounds done, mean loss) of the inner steps at each place of a round, in order."""
        inner = self.manifest.train.inner_steps
        return [(r - 1 + s / inner, min(self.highest, total / n)) for (r, s), (total, n) in sorted(self._steps.items())]

    @property
    def highest(self) -> float:
        """Upper end of loss charts: four times the loss of a uniform guess."""
        return 4 * math.log(max(self.manifest.model.vocab_size, 2))

    @property
    def traffic(self) -> tuple[int, int, int] | None:
        """Bytes of all peers in their last complete round: sent, in fp32, and written to disk."""
        known = [p for p in self.peers.values() if p.sent_bytes and p.dense_bytes]
        sent, dense = sum(p.sent_bytes or 0 for p in known), sum(p.dense_bytes or 0 for p in known)
        return (sent, dense, sum(p.written_bytes or 0 for p in known)) if known else None

    @property
    def chains(self) -> list[ChainView]:
        """The planned chains with a known bottleneck, in plan order."""
        out = []
        for replica in self.replicas:
            members = tuple(self.peers.get(peer) or PeerView(peer, self.name(peer)) for peer in replica.peers)
            if (found := bottleneck([p.chain for p in members])) is not None:
                out.append(ChainView(self.replica_name(replica.number), members, found))
        return out

    def listed(self) -> list[PeerView]:
        """Replicas' peers in plan order, then spares and others, then those that are gone."""
        places: dict[int | None, int] = {replica.number: place for place, replica in enumerate(self.replicas)}
        return sorted(
            self.peers.values(), key=lambda p: (not p.here, places.get(p.replica, len(places)), p.position, p.name)
        )

    def place(self, p: PeerView, words: int = 3) -> str:
        """A peer's role: `full`, or its stage of a chain; chains are counted from 0 in plan order.

        words: 3: all; 2: without the word stage; 1: without its blocks, too; 0: the chain alone.
        """
        if p.role != "stage" or p.replica is None:
            return ("bootstrap node" if words else "node") if p.device == NODE_DEVICE else p.role
        if not words:
            return self.replica_name(p.replica)
        stage = f"{self.replica_name(p.replica)} · {'stage ' if words > 2 else ''}{p.position + 1}/{p.stages}"
        return f"{stage} · {blocks(p.first, p.last)}" if words > 1 else stage

    def replica_name(self, number: int) -> str:
        """A replica's name: its peer's, or `chain N` in plan order."""
        known = self._called.get(number, f"replica {number}")
        return known if " " in known else self.name(known)

    def named(self, left: LeftOutView) -> LeftOutView:
        """A replica that was left out, by the names that are known now."""
        name = self.name(left.peers[0]) if len(left.peers) == 1 else left.replica
        return dataclasses.replace(left, replica=name, reason=said_of(name, readable(left.reason, self.names)))

    def message(self, text: str) -> str:
        """A message with the names of replicas in place of their numbers, each once."""

        def name(found: re.Match[str]) -> str:
            name = self.replica_name(int(found[1]))
            if found[3] is not None and name == f"replica {found[1]}":  # of no plan, so that peer alone
                return found[3]
            return name if found[3] in (None, name) else name + found[2]

        return _REPLICA.sub(name, text)

    # --- events

    def feed(self, event: Event) -> None:
        """Applies an event."""
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
            case events.Refused() if source == NODE_SOURCE:
                self.refused += 1
            case events.Relayed() as relayed:
                if source in self.relays or len(self.relays) < len(self.operators):
                    self.relays[source] = relayed
            case events.Forked(round=round):
                text = f"round {round} has two decided results"
                if text not in self.forks and len(self.forks) < MOST_FORKS:
                    self.forks.append(text)
            case events.RunFinished(state_digest=digest):
                self.finished, self.state_digest = True, digest
        if self.finished:  # whatever was announced last
            for p in self.peers.values():
                if p.here and p.device != NODE_DEVICE:
                    p.phase = "finished"
                    p.measured(None)
        for level, text in describe(event, self.names):
            self.notes.append(Note(event.time, level, self.message(text)[:LONGEST_TEXT]))

    def _peer(self, peer: str) -> PeerView:
        if peer not in self.peers:
            if len(self.peers) >= MOST_PEERS:
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
        p.phase = "training" if p.here else p.phase  # it may have left after the plan was made
        p.replica, p.first, p.last = role.replica, role.first, role.last
        p.position, p.stages, p.steps = role.position, role.stages, max(role.steps, 1)
        if p.place != before:
            p.measured(None)

    def _steps_on(self, peer: str, round: int, step: int, loss: float | None) -> None:
        p = self._peer(peer)
        p.round, p.step, p.phase = round, step, "training"
        p.loss = p.loss if loss is None else loss
        if loss is not None and p.replica is not None and 1 <= round <= self.last_round:
            place = round, max(1, step * self.manifest.train.inner_steps // p.steps)
            total, n = self._steps.get(place, (0.0, 0))
            self._steps[place] = (total + loss, n + 1)
            if len(self._steps) > MOST_POINTS:
                for key in sorted(self._steps)[::2]:
                    del self._steps[key]

    def _announced(self, peer: str, news: Announcement) -> None:
        if peer in self.operators:
            before = self._refused.get(peer, 0)
            self.refused += news.refused - before if news.refused >= before else news.refused
            self._refused[peer] = news.refused
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
        """A peer has applied a round, or several since its last announcement.

        totals: bytes sent, and written to disk, since its start; boundary_tokens: of its chain's round.
        """
        p = self._peer(peer)
        ended = round - (p._counted or 0)
        if ended > 0:
            if p._counted is not None:  # before its first round it has measured its line
                before = p._totals if totals >= p._totals else (0, 0)  # of a process before
                p.sent_bytes, p.written_bytes = (totals[0] - before[0]) // ended, (totals[1] - before[1]) // ended
                p.dense_bytes = self._dense(p, ((p.position > 0) + (p.position < p.stages - 1)) * boundary_tokens)
            p._totals, p._counted = totals, round
        p.phase = "waiting"

    def _dense(self, p: PeerView, vectors: int) -> int | None:
        """fp32 bytes of the peer's pseudo-gradient and of its boundary vectors."""
        if p.replica is None:
            return None
        shards = memory.stage_shards(self.manifest, p.first, p.last)
        values = sum(layout.parameters(self.manifest.model, s) for s in shards)
        return 4 * (values + vectors * self.manifest.model.d_model)

    def _committed(self, when: float, commit: events.Commit) -> None:
        before = self.recent[-1] if self.recent else None
        if before is not None and commit.round <= before.round:
            return
        self._idle, self._decreed = commit.idle, None if commit.schedule is None else commit.schedule.rounds
        self.leader, self.voters = commit.leader, commit.voters
        if commit.board is not None:
            self.operators = commit.board.names
            self.quorum = min(commit.board.quorum, max(1, len(self.operators)))
        self.credits.add(commit)
        self.held_out.add(commit.evaluations)
        self._tokens = {c.replica: c.tokens for c in commit.contributions}
        self._witnesses.count({peer: c.tokens for c in commit.contributions for peer in c.peers}, commit.plan)
        if commit.decree is not None and commit.decree.decree.action in (OPEN, CLOSE):
            self.is_open = commit.decree.decree.action == OPEN
        later = commit.plan.replicas if commit.plan is not None else ()  # those that took a seat in the round, too
        planned = {replica.number: replica.peers for replica in (*later, *self.replicas)}
        left_out = (
            LeftOutView(self.replica_name(x.replica), x.reason, x.probation, x.peers or planned.get(x.replica, ()))
            for x in commit.left_out
        )
        self.left_out = tuple(sorted(left_out, key=lambda left: left.probation))
        without = sum(not left.probation for left in self.left_out)
        self.left_out_total += without
        follows = before is not None and commit.round == before.round + 1 and when > before.time
        self.recent.append(
            RoundView(
                round=commit.round,
                time=when,
                seconds=when - before.time if before is not None and follows else None,
                tokens=commit.tokens,
                tokens_total=self.credits.tokens,
                loss=commit.loss,
                replicas=len(commit.contributions),
                bytes=sum(c.size for c in commit.contributions),
                left_out=self.left_out[:MOST_LEFT_OUT],
                left_out_total=without,
            )
        )
        if commit.round:
            self.rounds.append(self.recent[-1])
            if len(self.rounds) > MOST_ROUNDS:
                del self.rounds[-MOST_ROUNDS:-1:2]
        if commit.diverged or self.compared is None or self.compared.round < commit.round - 1:
            self.compared = ComparisonView(commit.round - 1, None, commit.diverged)
        self.round = max(self.round, commit.round + 1)
        if commit.plan is not None:
            self._plan(commit.plan)

    def _plan(self, plan: Plan) -> None:
        chains = itertools.count()
        self._called = {replica.number: self._called[replica.number] for replica in self.replicas}
        for replica in plan.replicas:
            self._called[replica.number] = f"chain {next(chains)}" if replica.is_chain else replica.peers[0]
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
                p.replica, p.position, p.stages = replica.number, position, len(replica.stages)
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
        weights = self._witnesses.weights()
        if weights.keys().isdisjoint(found):
            weights = dict.fromkeys(found, 1)
        shards, of_round = layout.shard_names(self.manifest.model), RoundAttestations(weights, found)
        wrong = tuple(d for d in of_round.diverged(ties=True) if d.shard in shards)
        self.compared = ComparisonView(latest, len(found), wrong)
