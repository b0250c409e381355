"""What a screen shows: the state of a run, reduced from events. Nothing is drawn here, and nothing is looked up.

Texts that come from other peers are cleaned before they are kept (peer/ui/text.py): no control characters reach a
terminal.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from peer.events import Event
from peer.ui.text import blocks, called, clean, describe, mean_loss, readable, size
from peer.ui.utilization import Activity, Bottleneck, activity, bottleneck, percent
from protocol.planning import memory
from protocol.run import layout
from protocol.run.manifest import Manifest

MESSAGES = 200
_MOST_POINTS = 20_000


@dataclass(slots=True)
class PeerView:
    """One peer. `sent_bytes`: all that it sent in its last whole round (its payload, before there is one);
    `dense_bytes`: its whole pseudo-gradient and its boundary vectors in fp32."""

    peer: str
    name: str
    device: str = ""
    memory_bytes: int = 0
    up_bps: int = 0
    here: bool = True
    role: str = "waiting"
    replica: int | None = None
    first: int = 0
    last: int = 0
    position: int = 0
    stages: int = 1
    rank: int = 0
    phase: str = "joining"
    round: int = 0
    step: int = 0
    loss: float | None = None
    sent_bytes: int | None = None
    dense_bytes: int | None = None
    total_sent: int = 0
    counted: bool = False
    measured: tuple[tuple[int, ...], Activity] | None = None

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
class Note:
    """A line for the reader; `level`: info, good, warning, error."""

    time: float
    level: str
    text: str


@dataclass(slots=True)
class Replica:
    """A planned replica: its members in order."""

    rank: int
    peers: tuple[str, ...]


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

    @property
    def text(self) -> str:
        """A line about all members."""
        return f"{self.name}: {'; '.join(_busy(p) for p in self.members if p.activity)}; slowest: {self.slowest}"


def _busy(p: PeerView) -> str:
    a = p.activity
    assert a is not None
    return (
        f"{p.name} computes {percent(a.busy)}, waits {percent(a.wait_forward)} forward {percent(a.wait_backward)} backward,"
        f" sends {size(a.forward_bytes)} forward {size(a.backward_bytes)} backward a step, queue {a.queued} of {a.depth}"
    )


@dataclass(slots=True)
class View:
    """`round` is the open round (0 before the first plan); `curve` holds mean step losses at (rounds done, nats per
    token), `committed` the loss of each committed round, `left_out` who the last commit left out, and why."""

    manifest: Manifest
    names: Mapping[str, str] = field(default_factory=dict)
    peers: dict[str, PeerView] = field(default_factory=dict)
    replicas: list[Replica] = field(default_factory=list)
    round: int = 0
    finished: bool = False
    state_digest: str | None = None
    committed: dict[int, float] = field(default_factory=dict)
    left_out: list[tuple[str, str]] = field(default_factory=list)
    left_out_total: int = 0
    compared: Comparison | None = None
    notes: deque[Note] = field(default_factory=lambda: deque(maxlen=MESSAGES))
    began: float | None = None
    now: float = 0.0
    _alias: dict[str, str] = field(default_factory=dict)
    _steps: dict[tuple[int, int], tuple[float, int]] = field(default_factory=dict)
    _attests: dict[int, dict[str, dict[str, str]]] = field(default_factory=dict)
    _commit_times: dict[int, float] = field(default_factory=dict)
    _tokens: dict[int, int] = field(default_factory=dict)

    # --- what is shown

    def name(self, peer: str) -> str:
        """How a peer is called: by its given name, or the end of its id."""
        return called(peer, self.names)

    @property
    def rounds_done(self) -> int:
        """Committed rounds."""
        return self.manifest.rounds if self.finished else max(0, self.round - 1)

    @property
    def progress(self) -> float:
        """0..1 of the run, inner steps of the open round included."""
        if self.finished:
            return 1.0
        steps = [p.step for p in self.peers.values() if p.here and p.round == self.round and p.replica is not None]
        part = min(1.0, sum(steps) / len(steps) / self.manifest.train.inner_steps) if steps else 0.0
        return min(1.0, (self.rounds_done + part) / self.manifest.rounds)

    @property
    def eta(self) -> float | None:
        """Seconds to the last commit at the pace of the last five rounds; None before there is one."""
        times = sorted(self._commit_times.items())[-6:]
        if self.finished or len(times) < 2 or times[-1][0] == times[0][0]:
            return None
        seconds_per_round = (times[-1][1] - times[0][1]) / (times[-1][0] - times[0][0])
        return max(0.0, seconds_per_round * (self.manifest.rounds - times[-1][0]) - (self.now - times[-1][1]))

    @property
    def curve(self) -> list[tuple[float, float]]:
        """(rounds done, mean loss in nats per token) of every inner step, in order."""
        inner = self.manifest.train.inner_steps
        return [(r - 1 + s / inner, total / n) for (r, s), (total, n) in sorted(self._steps.items())]

    @property
    def traffic(self) -> tuple[int, int] | None:
        """(sent, dense) bytes of all peers in their last whole round."""
        counted = [(p.sent_bytes, p.dense_bytes) for p in self.peers.values() if p.sent_bytes and p.dense_bytes]
        return (sum(s for s, _ in counted), sum(d for _, d in counted)) if counted else None

    @property
    def chains(self) -> list[ChainView]:
        """The planned chains, as far as they are known, in plan order."""
        out = []
        for index, replica in enumerate(self.replicas):
            members = tuple(self.peers.get(peer) or PeerView(peer, self.name(peer)) for peer in replica.peers)
            found = bottleneck([p.activity for p in members])
            if found is not None:
                out.append(ChainView(self.replica_name(index), members, found))
        return out

    def listed(self) -> list[PeerView]:
        """The peers, replicas first in plan order, then spares and others, then those who are gone."""
        many = len(self.replicas)
        return sorted(
            self.peers.values(),
            key=lambda p: (not p.here, many if p.replica is None else p.replica, p.position, p.name),
        )

    def place(self, p: PeerView, short: bool = False) -> str:
        """What a peer does: `full`, or its stage of a chain; chains are counted from 0 in plan order."""
        if p.role != "stage" or p.replica is None:
            return p.role
        word = "" if short else "stage "
        return f"{self.replica_name(p.replica)} · {word}{p.position + 1}/{p.stages} · {blocks(p.first, p.last)}"

    def replica_name(self, index: int) -> str:
        """A replica for a reader: its peer's name, or `chain N`."""
        if index >= len(self.replicas):
            return f"replica {index}"
        peers = self.replicas[index].peers
        if len(peers) == 1:
            return self.name(peers[0])
        return f"chain {sum(len(r.peers) > 1 for r in self.replicas[:index])}"

    # --- what comes in

    def feed(self, event: Event) -> None:
        """Takes one event into account; what is not known or not well-formed is passed over."""
        self.now = max(self.now, event.time)
        self.began = event.time if self.began is None else self.began
        handler = getattr(self, f"_on_{event.kind}", None)
        try:
            if handler is not None:
                handler(event, event.fields)
            text = describe(event, self.names)
        except (KeyError, TypeError, ValueError, AttributeError):
            return
        if text is not None:
            self.notes.append(Note(event.time, *text))

    def _peer(self, peer: str) -> PeerView:
        peer = self._alias.get(peer, peer)
        if peer not in self.peers:
            self.peers[peer] = PeerView(peer, self.name(peer))
        return self.peers[peer]

    def _on_started(self, event: Event, f: dict[str, Any]) -> None:
        self._alias[event.source] = f["peer"]
        self._on_ready(event, f)

    def _on_ready(self, event: Event, f: dict[str, Any]) -> None:
        p = self._peer(f["peer"])
        p.device, p.memory_bytes = clean(f["device"], 12), int(f["memory_bytes"])
        p.up_bps = int(f.get("up_bps", p.up_bps))
        if not p.here or p.phase == "joining":
            p.phase = "ready"
        p.here = True

    def _on_gone(self, event: Event, f: dict[str, Any]) -> None:
        p = self._peer(f["peer"])
        p.here, p.phase = False, "gone"

    def _on_role(self, event: Event, f: dict[str, Any]) -> None:
        p = self._peer(event.source)
        p.role, p.round, p.step, p.phase = str(f["role"]), int(f["round"]), 0, "training"
        if p.role in ("full", "stage"):
            p.replica, p.first, p.last = int(f["replica"]), int(f["first"]), int(f["last"])
            p.rank = int(f["rank"])
            p.position, p.stages = int(f.get("position", p.position)), int(f.get("stages", p.stages))
        else:
            p.replica, p.phase = None, "waiting"

    def _on_step(self, event: Event, f: dict[str, Any]) -> None:
        p = self._peer(event.source)
        p.round, p.step, p.phase = int(f["round"]), int(f["step"]), clean(f.get("phase", "training"), 10)
        if f.get("loss") is not None:
            p.loss = float(f["loss"])
            total, n = self._steps.get((p.round, p.step), (0.0, 0))
            self._steps[p.round, p.step] = (total + p.loss, n + 1)
            if len(self._steps) > _MOST_POINTS:
                for key in sorted(self._steps)[::2]:
                    del self._steps[key]

    def _on_chain(self, event: Event, f: dict[str, Any]) -> None:
        p = self._peer(event.source)
        p.measured = p.place, activity(f)

    def _on_offered(self, event: Event, f: dict[str, Any]) -> None:
        p = self._peer(event.source)
        p.phase = "offered"
        if not p.counted:
            p.sent_bytes, p.dense_bytes = int(f["bytes"]), self._dense(p, 0)

    def _on_withdrew(self, event: Event, f: dict[str, Any]) -> None:
        self._peer(event.source).phase = "withdrew"

    def _on_round(self, event: Event, f: dict[str, Any]) -> None:
        p = self._peer(event.source)
        total, before = int(f["bytes_sent"]), p.total_sent
        if p.counted or int(f["round"]) == 1:
            p.sent_bytes = total - (before if total >= before else 0)
            neighbours = (p.position > 0) + (p.position < p.stages - 1)
            tokens = f.get("boundary_tokens", self._tokens.get(-1 if p.replica is None else p.replica, 0))
            p.dense_bytes = self._dense(p, neighbours * int(tokens))
        p.total_sent, p.counted, p.phase = total, True, "waiting"

    def _dense(self, p: PeerView, vectors: int) -> int | None:
        """fp32 bytes of the peer's whole pseudo-gradient, and of so many boundary vectors."""
        if p.replica is None:
            return None
        shards = memory.stage_shards(self.manifest, p.first, p.last)
        values = sum(layout.parameters(self.manifest.model, s) for s in shards)
        return 4 * (values + vectors * self.manifest.model.d_model)

    def _on_commit(self, event: Event, f: dict[str, Any]) -> None:
        number, loss = int(f["round"]), mean_loss(f["contributions"])
        if number in self._commit_times:
            return
        self._commit_times[number] = event.time
        self._tokens = {int(c["replica"]): int(c["tokens"]) for c in f["contributions"]}
        if loss is not None:
            self.committed[number] = loss
        self.left_out = [
            (self.replica_name(int(x["replica"])), readable(x["reason"], self.names)) for x in f["left_out"]
        ]
        self.left_out_total += len(self.left_out)
        wrong = [(d["peer"], clean(d["shard"])) for d in f["diverged"]]
        if wrong or self.compared is None or self.compared.round < number - 1:
            self.compared = Comparison(number - 1, None, wrong)
        self.round = max(self.round, number + 1)
        if f.get("plan"):
            self._plan(f["plan"])

    def _plan(self, plan: dict[str, Any]) -> None:
        self.replicas = [Replica(int(r["rank"]), tuple(s["peer"] for s in r["stages"])) for r in plan["replicas"]]
        for p in self.peers.values():
            p.role, p.replica = "waiting", None
        for spare in plan["spares"]:
            self._peer(spare).role = "spare"
        for index, replica in enumerate(plan["replicas"]):
            for position, stage in enumerate(replica["stages"]):
                p = self._peer(stage["peer"])
                p.role = "full" if len(replica["stages"]) == 1 else "stage"
                p.replica, p.rank, p.position, p.stages = (
                    index,
                    int(replica["rank"]),
                    position,
                    len(replica["stages"]),
                )
                p.first, p.last = int(stage["first"]), int(stage["last"])

    def _on_attest(self, event: Event, f: dict[str, Any]) -> None:
        number = int(f["round"])
        self._attests.setdefault(number, {})[f["peer"]] = dict(f["digests"])
        for old in [r for r in self._attests if r < number - 2]:
            del self._attests[old]
        latest = max((r for r, by in self._attests.items() if len(by) > 1), default=None)
        if latest is None:
            return
        found = self._attests[latest]
        wrong = []
        for shard in layout.shard_names(self.manifest.model):
            counts = Counter(digests[shard] for digests in found.values() if shard in digests)
            if len(counts) > 1:
                common = counts.most_common(1)[0][0]
                wrong += [(peer, shard) for peer, d in sorted(found.items()) if d.get(shard, common) != common]
        self.compared = Comparison(latest, len(found), wrong)

    def _on_finished(self, event: Event, f: dict[str, Any]) -> None:
        if "state_digest" in f:
            self.finished, self.state_digest = True, f["state_digest"]
        else:
            self._peer(event.source).phase = "finished"

    def _on_restored(self, event: Event, f: dict[str, Any]) -> None:
        self._peer(event.source).phase = "restored"
