"""A run's figures: of now in Prometheus' text format, and of each round for trackers (peer/ui/trackers.py).

docs/metrics.md is made from METRICS.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from peer.ui.run_view import HeldOutView, RoundView
from peer.ui.state import State

PREFIX = "potluck_"
KIND = "text/plain; version=0.0.4; charset=utf-8"
ROLES = ("full", "stage", "joining", "spare", "waiting")
OfRound = Callable[[RoundView, HeldOutView | None], float | None]
"""Takes a decided round, and the newest held-out loss."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure, or one for each value of a label."""

    name: str
    kind: str
    about: str
    of: Callable[[State], Mapping[str, float | None]]
    """By value of the label, or under the empty one; without unknown values."""
    label: str = ""
    of_round: OfRound | None = None
    """The figure of any decided round, if the log has it; `of` is that of the newest."""

    @property
    def column(self) -> str:
        """The name in a table of rounds."""
        return self.name.removeprefix(PREFIX)


def _gauge(name: str, about: str, of: Callable[[State], float | None]) -> Metric:
    return Metric(name, "gauge", about, lambda s: {"": of(s)})


def _counter(name: str, about: str, of: Callable[[State], float | None]) -> Metric:
    return Metric(name, "counter", about, lambda s: {"": of(s)})


def _of_round(name: str, about: str, of: OfRound, kind: str = "gauge") -> Metric:
    return Metric(name, kind, about, lambda s: {"": of(s.recent[0], s.held_out) if s.recent else None}, of_round=of)


def _roles(s: State) -> Mapping[str, float]:
    if s.silent:
        return {}
    found = Counter(p.role if p.role in ROLES else "waiting" for p in s.peers if p.here)
    return {role: found[role] for role in ROLES}


def _replicas(s: State) -> Mapping[str, float]:
    chains = sum(r.chain for r in s.replicas)
    return {"full": len(s.replicas) - chains, "chain": chains}


def _now(of: Callable[[State], float | None]) -> Callable[[State], float | None]:
    return lambda s: None if s.silent else of(s)


METRICS = (
    _gauge(
        "potluck_news_age_seconds",
        "For how long no bootstrap node has answered this monitor; all other figures are as old. None when the run is"
        " over.",
        lambda s: s.news_age_seconds,
    ),
    _gauge("potluck_round", "The open round; 0 before the first plan.", lambda s: s.round),
    _gauge("potluck_rounds", "How many rounds the run has.", lambda s: s.rounds),
    _gauge("potluck_finished", "1 when the last round is decided.", lambda s: s.finished),
    _gauge("potluck_progress_ratio", "Of the run, 0 to 1.", lambda s: s.progress),
    _of_round("potluck_loss", "Nats per token of the newest round.", lambda r, _: r.loss),
    _of_round(
        "potluck_held_out_loss",
        "Nats per token on text that nobody trains on, of the newest state that was measured.",
        lambda _, held_out: held_out.loss if held_out else None,
    ),
    _of_round(
        "potluck_held_out_bits_per_byte",
        "Bits per byte of that text, of the same state.",
        lambda _, held_out: held_out.bits_per_byte if held_out else None,
    ),
    _of_round(
        "potluck_held_out_round",
        "The round of that state.",
        lambda _, held_out: held_out.round if held_out else None,
    ),
    _of_round(
        "potluck_tokens_total", "Tokens that were trained and committed.", lambda r, _: r.tokens_total, "counter"
    ),
    _gauge(
        "potluck_tokens_per_second", "In the newest rounds, while a node answers.", _now(lambda s: s.tokens_per_second)
    ),
    _of_round("potluck_round_tokens", "Tokens of the newest round.", lambda r, _: r.tokens),
    _of_round("potluck_round_seconds", "What the newest round took.", lambda r, _: r.seconds),
    _of_round(
        "potluck_round_tokens_per_second",
        "Tokens of the newest round by its seconds.",
        lambda r, _: r.tokens_per_second,
    ),
    _of_round("potluck_round_replicas", "Replicas whose work is in the newest round.", lambda r, _: r.replicas),
    _of_round("potluck_round_payload_bytes", "Size of the newest round's payloads.", lambda r, _: r.bytes),
    _of_round("potluck_round_left_out", "Replicas that the newest round left out.", lambda r, _: r.left_out_total),
    _gauge(
        "potluck_decided_timestamp_seconds",
        "When the newest round was decided, Unix seconds.",
        lambda s: s.recent[0].time if s.recent else None,
    ),
    _gauge("potluck_peers_here", "Peers that are there, while a node answers.", _now(lambda s: s.peers_here)),
    Metric(
        "potluck_peers",
        "gauge",
        "Peers that are there, while a node answers, by role, of the first 600 of the plan's order.",
        _roles,
        "role",
    ),
    Metric("potluck_replicas", "gauge", "Replicas of the newest plan, by kind, 600 at most.", _replicas, "kind"),
    Metric(
        "potluck_reachable_peers",
        "gauge",
        "Peers, by how others reach them, while a node answers.",
        lambda s: {} if s.silent else dict(s.health.reachable),
        "how",
    ),
    _gauge("potluck_contributors", "Peers that were ever planned.", lambda s: s.contributors_total),
    _counter(
        "potluck_left_out_total",
        "Replicas that rounds left out, without newcomers on probation.",
        lambda s: s.health.left_out_total,
    ),
    _counter(
        "potluck_refused_total",
        "How often bootstrap nodes have refused somebody who used too much of them, as they announce.",
        lambda s: s.health.refused_total,
    ),
    _gauge(
        "potluck_operators_here",
        "Bootstrap nodes that are there, while one answers.",
        _now(lambda s: sum(o.here for o in s.health.operators)),
    ),
    _gauge("potluck_operators", "Bootstrap nodes that the manifest names.", lambda s: len(s.health.operators)),
    _gauge("potluck_votes_needed", "Votes that decide a round.", lambda s: s.health.votes_needed),
    _gauge("potluck_forks", "Rounds with two decided commits; there should be none.", lambda s: len(s.health.forks)),
    _gauge(
        "potluck_diverged_peers",
        "Peers whose state differed when digests were last compared, 5 at most.",
        lambda s: len({d.peer for d in s.health.compared.wrong}) if s.health.compared else 0,
    ),
    _gauge("potluck_sent_bytes", "What all peers sent in their last whole round.", lambda s: s.sent_bytes),
    _gauge(
        "potluck_written_bytes", "What all peers wrote to disk in their last whole round.", lambda s: s.written_bytes
    ),
)

COLUMNS = tuple(metric.column for metric in METRICS if metric.of_round is not None)
"""The figures of a round."""


def of_round(decided: RoundView, held_out: HeldOutView | None) -> dict[str, float]:
    """The figures of a decided round by column, without unknown ones. held_out: what its commit told of a state."""
    found = {m.column: m.of_round(decided, held_out) for m in METRICS if m.of_round is not None}
    return {column: figure for column, figure in found.items() if figure is not None and math.isfinite(figure)}


def exposition(state: State) -> str:
    """All figures. Every one has the label `run`, the first digits of the run's id."""
    lines = []
    for metric in METRICS:
        lines += [f"# HELP {metric.name} {metric.about}", f"# TYPE {metric.name} {metric.kind}"]
        for value, figure in metric.of(state).items():
            if figure is not None and math.isfinite(figure):
                more = f',{metric.label}="{value}"' if metric.label else ""
                lines.append(f'{metric.name}{{run="{state.run[:12]}"{more}}} {float(figure):.15g}')
    return "\n".join([*lines, ""])
