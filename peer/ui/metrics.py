"""A run's main figures in Prometheus' text format: `potluck monitor --metrics`. docs/metrics.md lists them, made from METRICS."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from peer.ui.state import State

KIND = "text/plain; version=0.0.4; charset=utf-8"
"""The media type of the format."""
ROLES = ("full", "stage", "joining", "spare", "waiting")


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure, or one for each value of `label`. `of`: by that value (without a label under the empty one), without those that are
    not known."""

    name: str
    kind: str
    about: str
    of: Callable[[State], Mapping[str, float | None]]
    label: str = ""


def _one(name: str, kind: str, about: str, of: Callable[[State], float | None]) -> Metric:
    return Metric(name, kind, about, lambda s: {"": of(s)})


def _roles(s: State) -> Mapping[str, float]:
    if s.silent:
        return {}
    found = Counter(p.role if p.role in ROLES else "waiting" for p in s.peers if p.here)
    return {role: found[role] for role in ROLES}


def _replicas(s: State) -> Mapping[str, float]:
    chains = sum(r.chain for r in s.replicas)
    return {"full": len(s.replicas) - chains, "chain": chains}


def _now(of: Callable[[State], float | None]) -> Callable[[State], float | None]:
    """What is so now, which is not known where no node answers."""
    return lambda s: None if s.silent else of(s)


METRICS = (
    _one(
        "potluck_news_age_seconds",
        "gauge",
        "For how long no bootstrap node has answered this monitor; all other figures are as old. None when the run is over.",
        lambda s: s.news_age_seconds,
    ),
    _one("potluck_round", "gauge", "The open round; 0 before the first plan.", lambda s: s.round),
    _one("potluck_rounds", "gauge", "How many rounds the run has.", lambda s: s.rounds),
    _one("potluck_finished", "gauge", "1 when the last round is decided.", lambda s: s.finished),
    _one("potluck_progress_ratio", "gauge", "Of the run, 0 to 1.", lambda s: s.progress),
    _one("potluck_loss", "gauge", "Nats per token of the newest round.", lambda s: s.loss),
    _one(
        "potluck_held_out_loss",
        "gauge",
        "Nats per token on text that nobody trains on, of the newest state that was measured.",
        lambda s: s.held_out.loss if s.held_out else None,
    ),
    _one(
        "potluck_held_out_bits_per_byte",
        "gauge",
        "Bits per byte of that text, of the same state.",
        lambda s: s.held_out.bits_per_byte if s.held_out else None,
    ),
    _one(
        "potluck_held_out_round",
        "gauge",
        "The round of that state.",
        lambda s: s.held_out.round if s.held_out else None,
    ),
    _one("potluck_tokens_total", "counter", "Tokens that were trained and committed.", lambda s: s.tokens),
    _one("potluck_tokens_per_second", "gauge", "In the newest rounds, while a node answers.", _now(lambda s: s.tokens_per_second)),
    _one(
        "potluck_round_seconds",
        "gauge",
        "What the newest round took.",
        lambda s: s.recent[0].seconds if s.recent else None,
    ),
    _one(
        "potluck_decided_timestamp_seconds",
        "gauge",
        "When the newest round was decided, Unix seconds.",
        lambda s: s.recent[0].time if s.recent else None,
    ),
    _one("potluck_peers_here", "gauge", "Peers that are there, while a node answers.", _now(lambda s: s.peers_here)),
    Metric(
        "potluck_peers", "gauge", "Peers that are there, while a node answers, by role, of the first 600 of the plan's order.", _roles, "role"
    ),
    Metric("potluck_replicas", "gauge", "Replicas of the newest plan, by kind, 600 at most.", _replicas, "kind"),
    Metric(
        "potluck_reachable_peers",
        "gauge",
        "Peers, by how others reach them, while a node answers.",
        lambda s: {} if s.silent else dict(s.health.reachable),
        "how",
    ),
    _one("potluck_contributors", "gauge", "Peers that were ever planned.", lambda s: s.contributors_total),
    _one("potluck_left_out_total", "counter", "Replicas that rounds left out.", lambda s: s.health.left_out_total),
    _one(
        "potluck_round_left_out",
        "gauge",
        "Replicas that the newest round left out.",
        lambda s: s.recent[0].left_out_total if s.recent else None,
    ),
    _one(
        "potluck_refused_total",
        "counter",
        "How often bootstrap nodes have refused somebody who used too much of them, as they announce.",
        lambda s: s.health.refused_total,
    ),
    _one(
        "potluck_operators_here",
        "gauge",
        "Bootstrap nodes that are there, while one answers.",
        _now(lambda s: sum(o.here for o in s.health.operators)),
    ),
    _one("potluck_operators", "gauge", "Bootstrap nodes that the manifest names.", lambda s: len(s.health.operators)),
    _one("potluck_votes_needed", "gauge", "Votes that decide a round.", lambda s: s.health.votes_needed),
    _one("potluck_forks", "gauge", "Rounds with two decided commits; there should be none.", lambda s: len(s.health.forks)),
    _one(
        "potluck_diverged_peers",
        "gauge",
        "Peers whose state differed when digests were last compared, 5 at most.",
        lambda s: len({d.peer for d in s.health.compared.wrong}) if s.health.compared else 0,
    ),
    _one("potluck_sent_bytes", "gauge", "What all peers sent in their last whole round.", lambda s: s.sent_bytes),
    _one(
        "potluck_written_bytes",
        "gauge",
        "What all peers wrote to disk in their last whole round.",
        lambda s: s.written_bytes,
    ),
)  # fmt: skip


def exposition(state: State) -> str:
    """All figures of a run as of now. Every one has the label `run`, the first digits of the run's id."""
    lines = []
    for metric in METRICS:
        lines += [f"# HELP {metric.name} {metric.about}", f"# TYPE {metric.name} {metric.kind}"]
        for value, figure in metric.of(state).items():
            if figure is not None and math.isfinite(figure):
                more = f',{metric.label}="{value}"' if metric.label else ""
                lines.append(f'{metric.name}{{run="{state.run[:12]}"{more}}} {float(figure):.15g}')
    return "\n".join([*lines, ""])
