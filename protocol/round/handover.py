"""Hand-over of error feedback to the next trainer of a shard. Pure.

A part x of the feedback e moves from a giver to its heir (docs/adr/0019-feedback-moves.md):

    giver   e -= x            durable: e without x, and x as a blob     offered    may be taken back: e += x
    heir                      has fetched x and checked it              ready
    giver                     durable: x is the heir's                  given      never taken back
    heir    e += x            durable: e with x, and x's number         taken
    giver                     removes x                                 dropped

Each side repeats its step after a crash and sees from its disk whether it was done, so x is in one place at any moment
and is never added twice. x is one payload of the run's codec with more entries.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

from protocol.codec import sparse
from protocol.codec.formats import Codec
from protocol.planning import memory
from protocol.run import layout
from protocol.run.manifest import Manifest
from protocol.wire.calls import Handover
from protocol.wire.commit import Commit
from protocol.wire.plan import Plan, ReplicaSpec

TOPK = (1024, 256, 64)
"""Entries of every 4096 that a hand-over may have; fewer where a line is slow and time is short."""
LEFT_SHARE = 0.25
"""A hand-over is followed by another one while more than this share of the feedback's norm is left."""
MOST_NORM = 64.0
"""An heir adds at most this times its own newest payload's norm; unsent feedback has 1 / (1 - beta) = 20 times."""
MEMORY_ROUNDS = 256
"""Only who trained the shard in one of the last so many rounds has something to hand over."""
LEAVE_SECONDS = 20.0
"""So long at most does a peer that leaves wait for its heirs."""


def codec(manifest: Manifest, topk: int) -> Codec:
    """Of hand-overs with so many entries: the run's, but never with fewer than a round's payload has, and from all
    elements. What a dense payload leaves in the feedback is little, and travels as a sparse one."""
    own = manifest.outer.codec
    return Codec(topk) if own.is_dense else dataclasses.replace(own, topk=max(own.topk, topk), sample=1.0)


def largest(manifest: Manifest, handover: Handover) -> int:
    """The most bytes that the hand-over's payload can have."""
    return sparse.max_payload_size(codec(manifest, handover.topk), layout.shapes(manifest.model, handover.shard))


def trainers(manifest: Manifest, replicas: Sequence[ReplicaSpec], shard: str) -> tuple[str, ...]:
    """Returns the peers that train the shard in these replicas, in their order."""
    return tuple(
        stage.peer
        for replica in replicas
        for stage in replica.stages
        if shard in memory.stage_shards(manifest, stage.first, stage.last)
    )


def kept_shards(manifest: Manifest, plan: Plan, peer: str) -> tuple[str, ...]:
    """The shards whose feedback `peer` keeps: those that it trains or will train."""
    kept = {shard for s in plan.held_by(peer) for shard in memory.stage_shards(manifest, s.first, s.last)}
    return tuple(shard for shard in layout.shard_names(manifest.model) if shard in kept)


def heir(manifest: Manifest, before: Plan | None, plan: Plan, peer: str, shard: str) -> str | None:
    """The peer that gets the feedback of `shard`: a new trainer for each that stopped, else a trainer, else None."""
    training = [p for p in trainers(manifest, plan.replicas, shard) if p != peer]
    if before is not None:
        begun = {p for replica in before.replicas for p in replica.peers}
        forming = [r for r in before.forming if begun.isdisjoint(r.peers)]  # nobody has stopped yet for the others
        former = trainers(manifest, (*before.replicas, *forming), shard)
        now = (*training, *trainers(manifest, plan.forming, shard))
        new, stopped = [p for p in now if p not in former], [p for p in former if p not in now]
        if new and peer in stopped:
            return new[stopped.index(peer) % len(new)]
    return training[sum(f"{peer} {shard}".encode()) % len(training)] if training else None


def why_refused(
    manifest: Manifest, log: Mapping[int, Commit], plan: Plan | None, peer: str, giver: str, handover: Handover
) -> str | None:
    """Why `peer`, whose newest plan is `plan`, does not take this from `giver`; None if it may."""
    if handover.heir != peer:
        return "it is for somebody else"
    if handover.shard not in layout.shard_names(manifest.model):
        return "there is no such shard"
    if handover.topk not in TOPK or not 0 < handover.size <= largest(manifest, handover):
        return "no payload of a hand-over has this size"
    trains = plan is not None and handover.shard in kept_shards(manifest, plan, peer)
    if not trains and not handover.given:
        return "its heir does not train that shard"
    if not _has_trained(manifest, log, giver, handover.shard):
        return f"its giver has not trained that shard in the last {MEMORY_ROUNDS} rounds"
    if (fault := _fault_of(log, giver)) is not None:
        return f"its giver's newest work was left out: {fault}"
    return None


def _fault_of(log: Mapping[int, Commit], peer: str) -> str | None:
    """Why the newest work of `peer` in the last MEMORY_ROUNDS rounds was left out for its fault; None if it was not."""
    for commit in _newest(log):
        if any(share.peer == peer for share in commit.shares):
            return None
        for left in commit.left_out:
            if peer in left.guilty:
                return left.reason
    return None


def _has_trained(manifest: Manifest, log: Mapping[int, Commit], peer: str, shard: str) -> bool:
    plans = (commit.plan for commit in _newest(log))
    return any(shard in kept_shards(manifest, plan, peer) for plan in plans if plan is not None)


def _newest(log: Mapping[int, Commit]) -> Iterator[Commit]:
    """The commits of the last MEMORY_ROUNDS rounds, the newest first."""
    head = max(log, default=-1)
    return (log[r] for r in range(head, max(head - MEMORY_ROUNDS, -1), -1) if r in log)


def is_too_large(norm: float, own: float) -> bool:
    """Returns whether a part with this norm is not added; `own`: of the heir's newest payload of the shard."""
    return not math.isfinite(norm) or norm > MOST_NORM * own


def leaving_topk(manifest: Manifest, shards: Sequence[str], up_bps: int, seconds: float) -> int:
    """The most entries with which these shards' feedback leaves at `up_bps` (0: unknown) in half of `seconds`."""
    for topk in TOPK[:-1]:
        sizes = (sparse.max_payload_size(codec(manifest, topk), layout.shapes(manifest.model, s)) for s in shards)
        if 8 * sum(sizes) <= up_bps * seconds / 2:
            return topk
    return TOPK[-1]
