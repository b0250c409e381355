"""`potluck join --dry-run`: what a machine would do in a run, without doing it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

from peer.cli.plan import Known, known_by, next_plan
from peer.net.base import Transport
from peer.ui.monitor import Monitor
from peer.ui.text import blocks, clean, count, duration, rate, size
from protocol.ledger import schedule
from protocol.planning import memory
from protocol.planning.partition import candidate
from protocol.run import corpus, layout
from protocol.wire.announcement import Announcement
from protocol.wire.commit import Commit

if TYPE_CHECKING:
    from peer.node.peer import Peer

REACHED = {
    "": "not asked",
    "direct": "others reach it directly",
    "mapped": "others reach it through a port of its router",
    "private": "its router lets nobody in: others reach it through relays or through holes in the router",
}


async def dry_run(peer: Peer, transport: Transport) -> Iterator[str]:
    """What it would do, in lines for people. Raises PotluckError, as joining would."""
    own = await peer.rehearse()
    monitor = Monitor(peer.manifest, transport, bootstrap=peer.bootstrap)
    known = await known_by(monitor)
    return _lines(known, own, None if monitor.head is None else monitor.head.commit)


def _lines(known: Known, own: Announcement, head: Commit | None) -> Iterator[str]:
    manifest = known.manifest
    others = [c for c in known.candidates if c.peer != own.peer and c.memory_bytes]
    rounds = schedule.last_round(manifest, head)
    begun = f"round {head.round} of {rounds} is decided" if head is not None and head.round else "it has not begun"
    yield f"run {manifest.run_id[:12]} {clean(manifest.name)}: {begun}, {count(others, 'other peer')} there"
    beside = f" and {size(own.host_bytes)} of the host's" if own.host_bytes else ""
    yield f"this machine: {clean(own.device)}, {size(own.memory_bytes)}{beside} offered; {REACHED[own.reachable]}"
    yield f"its line: {rate(own.up_bps)} up, {rate(own.down_bps)} down"
    yield from part_lines(known, own)
    yield "nothing was trained; the same command without --dry-run joins"


def part_lines(known: Known, announced: Announcement) -> Iterator[str]:
    """What the next plan would give to whoever announces this to do, and to fetch. Nothing is promised that follows from a speed which is not known."""
    manifest, own = known.manifest, candidate(announced)
    others = [c for c in known.candidates if c.peer != own.peer and c.memory_bytes]
    replicas, _ = next_plan(dataclasses.replace(known, candidates=(*others, own)))
    replica = next((r for r in replicas if own.peer in r.members), None)
    if replica is None:
        from protocol.planning.explain import why_spare

        yield f"it would wait as a spare: {why_spare(manifest, own)}"
        return
    first, last = replica.ranges[replica.members.index(own.peer)]
    whole = len(replica.members) == 1
    part = "a full replica" if whole else f"{blocks(first, last)} of a chain of {len(replica.members)}"
    state = sum(layout.shard_bytes(manifest.model, shard) for shard in memory.held_shards(manifest, first, last))
    fetches = f"it would fetch {size(state)} of state first ({duration(8 * state / max(own.down_bps, 1))} by its line)"
    if not own.speed_flops:
        yield f"it would be {part}; how much it would train a day is not known, since its speed is not"
        yield fetches
        return
    a_day = replica.rate * 86400 / 1e6
    yield f"it would be {part}: {replica.rate:,.0f} tokens per second by its measured speed, {a_day:,.0f} million a day"
    text = replica.rate * manifest.timing.training_seconds * corpus.id_bytes(manifest.model.vocab_size)
    yield f"{fetches}, and then about {size(text)} of text a round"
