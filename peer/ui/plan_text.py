"""`potluck plan` as text: who does what, how many tokens per second that brings, what limits it, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from peer.ui.text import blocks, clean, count
from protocol.identity import short_peer
from protocol.planning import figures
from protocol.planning.arrange import Arranged
from protocol.planning.explain import LEAST_ID, Explained, explain, why_spare
from protocol.planning.partition import Candidate
from protocol.run.manifest import Manifest

MOST_SPARES = 20
"""Of which each is named."""


def plan_lines(
    manifest: Manifest, candidates: Sequence[Candidate], replicas: Sequence[Arranged], spares: Sequence[str]
) -> Iterator[str]:
    """A plan, replica by replica."""
    told = explain(manifest, candidates, replicas)
    total = sum(replica.rate for replica in told)
    yield (
        f"run {manifest.run_id[:12]} {clean(manifest.name)}: {count(candidates, 'peer')}, {count(replicas, 'replica')},"
        f" {count(spares, 'spare')}: {total:,.0f} tokens per second"
    )
    for number, replica in enumerate(told):
        yield from _replica_lines(manifest, number, replica)
    there = {c.peer: c for c in candidates}
    for peer in spares[:MOST_SPARES]:
        yield f"  spare  {named(peer)}: {why_spare(manifest, there[peer])}"
    if len(spares) > MOST_SPARES:
        yield f"  and {len(spares) - MOST_SPARES} more spares"


def _replica_lines(manifest: Manifest, number: int, replica: Explained) -> Iterator[str]:
    chain = len(replica.roles) > 1
    kind = f"chain of {len(replica.roles)}, rank {replica.rank}" if chain else "full"
    yield (
        f"  {number} {kind}: {replica.rate:,.0f} tokens per second, {replica.rate / replica.ideal:.0%} of what its computing"
        f" could; limit: {replica.limit}"
    )
    for role in replica.roles:
        part = blocks(role.first, role.last) if chain else "the whole model"
        yield f"      {named(role.peer)}  {part}, {role.seconds:.2g} s a micro-batch: {role.why}"


def named(peer: str) -> str:
    """A name as it is in a file of peers, or the end of a peer id."""
    return clean(peer if len(peer) < LEAST_ID else short_peer(peer))


def change_line(before: float, after: float) -> str:
    """What a `--what-if` changes."""
    share = f" ({after / before - 1:+.1%})" if before > 0 else ""
    return f"what if: {before:,.0f} tokens per second become {after:,.0f}{share}"


def figure_lines() -> Iterator[str]:
    """Figures 2 and 3 of the main paper."""
    yield "Figure 2: share of the time that a chain of 4 stages computes (70 billion parameters, d = 8192, H = 50)"
    yield f"  {'stage':>13}  {'k/d':>4}  " + "  ".join(f"{bps / 1e6:>6.0f} Mb/s" for bps in figures.FIGURE_2_BPS)
    for flops, ratio, shares in figures.figure_2():
        row = "  ".join(f"{100 * share:>9.1f} %" for share in shares)
        yield f"  {flops / 1e12:>6.0f} TFLOP/s  {_ratio(ratio):>4}  {row}"
    yield "Figure 3: hours of one chain of 4 stages of 400 TFLOP/s at 1 Gb/s (512 million parameters, d = 1536)"
    for ratio, tokens, hours in figures.figure_3():
        yield f"  {tokens / 1e9:>3.0f} billion tokens  {_ratio(ratio):>4}  {hours:>6.1f} h"


def _ratio(ratio: float) -> str:
    return "1" if ratio == 1 else f"1/{round(1 / ratio)}"
