"""Reasons for a plan: what limits each replica, and why each peer has its role. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from protocol.identity import short_peer
from protocol.planning.arrange import Arranged
from protocol.planning.budget import Budget, holds_whole, is_sharded, most_blocks, smallest_stage
from protocol.planning.memory import device_count
from protocol.planning.objective import Swarm, padded, step
from protocol.planning.partition import Candidate
from protocol.planning.shapes import WHOLE, Ints
from protocol.run.manifest import Manifest

LEAST_ID = 40
"""Characters of a peer id, at the least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """A peer's part. `first`, `last`: its blocks, none for a spare; `why`: in words."""

    peer: str
    first: int
    last: int
    seconds: float
    """That its stage computes for a micro-batch."""
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """A replica. rate: predicted tokens per second; ideal: of its computing alone; limit: what sets its pace.

    sent, fetched, applied: seconds of a round for its own payloads, and for those of all others
    """

    rate: float
    ideal: float
    limit: str
    sent: float
    fetched: float
    applied: float
    roles: tuple[Role, ...]


def explain(manifest: Manifest, candidates: Sequence[Candidate], replicas: Sequence[Arranged]) -> list[Explained]:
    """Of each replica of a plan."""
    everybody = sorted(candidates, key=lambda c: c.peer)
    swarm = Swarm(manifest, everybody)
    number = {c.peer: i for i, c in enumerate(everybody)}
    found = []
    for replica in replicas:
        members = [number[p] for p in replica.members]
        whys = [_why(manifest, everybody[i], len(members)) for i in members]
        found.append(_explain(swarm, replica, members, whys, len(replicas) - 1))
    return found


def _explain(swarm: Swarm, replica: Arranged, members: list[int], whys: Sequence[str], others: int) -> Explained:
    table, rows = swarm.shapes, padded([members])
    blocks = np.array([[b - a for a, b in replica.ranges]], dtype=np.int64)
    compute = swarm.compute(rows, blocks)[0]
    work = table.layers * table.block_ops + table.extra_ops[WHOLE]
    roles = tuple(
        Role(peer=peer, first=a, last=b, seconds=float(seconds), why=why)
        for peer, why, (a, b), seconds in zip(replica.members, whys, replica.ranges, compute, strict=True)
    )
    exchange = swarm.exchange(rows, blocks)
    return Explained(
        rate=replica.rate,
        ideal=float(table.tokens * swarm.speed[members].sum() / work),
        limit=_limit(swarm, replica.members, rows, blocks),
        sent=float(exchange.sent[0]),
        fetched=swarm.fetched_beside(others) * float(exchange.fetched[0]),
        applied=swarm.fetched_beside(others) * float(exchange.applied[0]),
        roles=roles,
    )


def _limit(swarm: Swarm, names: Sequence[str], rows: Ints, blocks: Ints) -> str:
    """The part of a micro-batch's way that takes longest."""
    links = swarm.links(rows)
    manners = swarm.manners(swarm.compute(rows, blocks), swarm.room(rows, blocks), links)
    seconds = [float(step(swarm.shapes.micro_batches, times, links, windows)[0][0]) for times, windows in manners]
    compute, windows = (x[0] for x in manners[int(np.argmin(seconds))])
    slowest = int(np.argmax(compute))
    if len(names) == 1:
        return "its computing"
    forward, backward = (x[0] for x in swarm.boundaries(rows, swarm.kinds(rows), swarm.shapes.boundary_bits))
    latency = swarm.latencies(rows)[0]
    ways = [*(forward + backward + 2 * latency), 0.0]
    trips = (compute + ways)[::-1].cumsum()[::-1]  # from each stage to the end of the chain and back
    trip, tightest = float(trips[0]), int(np.argmax(trips / windows))
    link = int(np.argmax(np.maximum(forward, backward)))
    wire = float(max(forward[link], backward[link]))
    pace = max(float(compute[slowest]), wire)
    room = float(windows[tightest])
    if room < swarm.shapes.micro_batches and trips[tightest] / room > pace:
        whose, took = _named(names[tightest]), trips[tightest]
        return f"memory of {whose}: only {int(room)} micro-batches fit, and one takes {took:.2g} s from there and back"
    fill = (trip - pace) / (trip + (swarm.shapes.micro_batches - 1) * pace)
    waits = f"; {fill:.0%} of a step is the way there and back" if fill >= 0.1 else ""
    if wire > float(compute[slowest]):
        ends = " to ".join(_named(p) for p in names[link : link + 2])
        return f"the link of {ends}, {wire:.2g} s a micro-batch{waits}"
    return f"the computing of {_named(names[slowest])}, {compute[slowest]:.2g} s a micro-batch{waits}"


def _named(peer: str) -> str:
    """A peer's name in a list of peers, which is shorter than a peer id, or the end of its id."""
    return peer if len(peer) < LEAST_ID else short_peer(peer)


def _why(manifest: Manifest, one: Candidate, members: int) -> str:
    """Of a member of a replica with so many members."""
    guess = "" if one.speed_flops > 0 else "; its speed is a guess"
    if members == 1:
        if is_sharded(manifest, one.budget):
            return f"its {device_count(one.device)} devices hold the whole model together{guess}"
        return "its memory holds the whole model" + guess
    if holds_whole(manifest, one.budget):
        return "could hold the whole model, but brings more as a stage" + guess
    most = most_blocks(manifest, one.budget)
    return f"{_limiting(manifest, one.budget)} holds at most {most} of {manifest.model.n_layers} blocks{guess}"


def _limiting(manifest: Manifest, room: Budget) -> str:
    """Which memory is what a peer can hold less with: its GPU's, the host's beside it, or the only one."""
    if not room.is_split:
        return "its memory"
    alone = dataclasses.replace(room, host_bytes=None)
    return "its GPU" if most_blocks(manifest, alone) == most_blocks(manifest, room) else "the memory beside its GPU"


def _amount(n: int) -> str:
    return f"{n / 1e9:.2f} GB" if n >= 1e9 else f"{n / 1e6:.1f} MB"


def why_spare(manifest: Manifest, spare: Candidate) -> str:
    """Why a peer has no part in a plan."""
    room, layers = spare.budget, manifest.model.n_layers
    most = most_blocks(manifest, room)
    if most:
        limit = _limiting(manifest, room)
        if holds_whole(manifest, room):
            return (
                f"{limit} holds {most} of {layers} blocks, but its payloads would cost the others more than it brings"
            )
        return f"{limit} holds {most} of {layers} blocks; no chain would be quicker with it, and those left make none"
    own, host = smallest_stage(manifest, spare.device)
    short = room.is_split and own <= room.memory_bytes
    least, what = (host, "the memory beside its GPU") if short else (own, "its GPU" if room.is_split else "its memory")
    least += 0 if room.is_split else host
    if manifest.model.tie_word_embeddings:
        return f"a model with tied embeddings has no chains, and the whole needs {_amount(least)} of {what}"
    return f"{what} holds no stage: the smallest needs {_amount(least)}"
