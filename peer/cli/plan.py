"""`potluck plan` and `potluck join --dry-run`: the next plan for peers of a file or a run, changed by `--what-if`."""

from __future__ import annotations

import dataclasses
import os
import re
import tomllib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from peer.cli import running
from peer.cli.options import coroutine
from peer.net.base import Transport
from peer.node.open_run import here, parse_run, read_manifest
from peer.ui.monitor import Monitor
from peer.ui.text import blocks, clean, count, duration, meant, rate, size
from protocol.errors import UsageError, shown
from protocol.identity import short_peer
from protocol.ledger import aggregation, part_lists, retention, schedule
from protocol.planning import memory
from protocol.planning.budget import Budget, holds_whole
from protocol.planning.partition import Candidate, candidate
from protocol.run import corpus
from protocol.run.manifest import Manifest
from protocol.wire.announcement import NODE_DEVICE, REACHABLE, Announcement
from protocol.wire.commit import Commit
from protocol.wire.plan import ReplicaSpec

if TYPE_CHECKING:
    from peer.node.peer import Peer
    from protocol.planning.arrange import Arranged
    from protocol.planning.explain import Explained

_SPEED = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgtp]?)(?:flops|flop/s)?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_FIELDS = {
    "name", "memory", "up", "down", "speed", "devices", "count", "coordinates", "presence", "reachable", "device",
    "host",
}  # fmt: skip
MAX_PEERS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """The input of a plan."""

    manifest: Manifest
    candidates: tuple[Candidate, ...]
    replicas: tuple[ReplicaSpec, ...] = ()
    """Of the run's newest plan."""
    said: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Names that the peers of a run announce."""


@coroutine
async def plan(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN|FILE", help="A run, as for monitor; or a TOML file with a list of peers (docs/guides/plan.md)."
        ),
    ] = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CHANGE",
            help="Peers that come, +N:MEMORY,UP,DOWN,SPEED, or one that leaves, -PEER; may be repeated.",
        ),
    ] = None,
    figures: Annotated[
        bool, typer.Option("--figures", help="Print Figures 2 and 3 of the main paper from the same cost model.")
    ] = False,
) -> None:
    async for line in lines(run, what_if or (), figures):
        print(line, flush=True)


async def lines(text: str | None, what_if: Sequence[str], figures: bool) -> AsyncIterator[str]:
    """The output of `potluck plan`. Raises UsageError, RemoteError."""
    from protocol.planning.arrange import arrange

    if figures:
        for line in _figure_lines():
            yield line
    if text is None:
        if figures:
            return
        text = here()
    known = _from_file(Path(text)) if _lists_peers(text) else await _from_run(text)
    replicas, spares = next_plan(known)
    candidates = known.candidates
    if what_if:
        before = sum(replica.rate for replica in replicas)
        candidates = _changed(candidates, what_if, known.said)
        present = {c.peer for c in candidates}
        stay = [replica for replica in replicas if present.issuperset(replica.members)]
        replicas, spares = arrange(known.manifest, candidates, stay)
        after = sum(replica.rate for replica in replicas)
        share = f" ({after / before - 1:+.1%})" if before > 0 else ""
        yield f"what if: {before:,.0f} tokens per second become {after:,.0f}{share}"
    for line in plan_lines(known.manifest, candidates, replicas, spares):
        yield line


def next_plan(known: Known) -> tuple[tuple[Arranged, ...], tuple[str, ...]]:
    """The matchmaker's replicas and spares. It keeps replicas of the newest plan as far as that pays."""
    from protocol.planning.arrange import arrange
    from protocol.planning.planner import arranged, still_fit

    there = {c.peer: c for c in known.candidates}
    kept = [arranged(replica) for replica in still_fit(known.manifest, known.replicas, there)]
    return arrange(known.manifest, known.candidates, kept)


# --- where peers come from


def _lists_peers(text: str) -> bool:
    """Returns whether `text` names a file with a list of peers; else it names a run."""
    path = Path(text)
    return os.path.isfile(path) and re.search(rb"^\[\[peers\]\]", path.read_bytes(), re.MULTILINE) is not None


def _from_file(path: Path) -> Known:
    """A TOML file with `manifest`, a path beside it, and tables `[[peers]]`. Raises UsageError."""
    data = _toml(path)
    name = data.get("manifest")
    if not isinstance(name, str):
        raise UsageError(f'peers {path}: must have manifest = "FILE"; see docs/guides/plan.md')
    manifest = read_manifest(path.parent / name)
    return Known(manifest=manifest, candidates=_peers_in(data, path, manifest))


def read_peers(path: Path) -> tuple[Candidate, ...]:
    """The tables `[[peers]]` of a TOML file. Raises UsageError."""
    return _peers_in(_toml(path), path)


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"peers {path}: {error.strerror}; give a TOML file with tables [[peers]]") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"peers {path}: not TOML: {shown(error)}; correct that line") from None


def _peers_in(data: dict[str, Any], path: Path, manifest: Manifest | None = None) -> tuple[Candidate, ...]:
    peers, found = data.get("peers"), list[Candidate]()
    if not isinstance(peers, list):
        raise UsageError(f"peers {path}: must have tables [[peers]]; see docs/guides/plan.md")
    for i, peer in enumerate(peers):
        if not isinstance(peer, dict) or set(peer) - _FIELDS:
            raise UsageError(
                f"peers {path}: peer {i + 1}: knows only {', '.join(sorted(_FIELDS))}; see docs/guides/plan.md"
            )
        found += _described(peer, f"p{i + 1}", f"peers {path}: peer {i + 1}", manifest)
    _unique(found, f"peers {path}")
    return tuple(found)


def _described(peer: dict[str, Any], name: str, source: str, manifest: Manifest | None = None) -> list[Candidate]:
    """A described peer, `count` times.

    The speeds of several devices add up if they hold the run's whole model, or if the run is not known. Raises
    UsageError.
    """
    from peer.training.device import parse_rate, parse_size

    def require(holds: bool, text: str) -> None:
        if not holds:
            raise UsageError(f"{source}: {text}")

    require("memory" in peer, 'has no memory; give it as memory = "8GB"')
    count, presence, place = peer.get("count", 1), peer.get("presence", 1.0), peer.get("coordinates", [])
    require(isinstance(count, int) and 1 <= count <= MAX_PEERS, f"count must be a whole number in 1..{MAX_PEERS}")
    require(isinstance(presence, int | float) and 0 <= presence <= 1, "presence must be in 0..1")
    are_numbers = isinstance(place, list) and all(isinstance(x, int | float) for x in place)
    require(are_numbers, "coordinates must be a list of milliseconds")
    require(peer.get("reachable", "") in REACHABLE, 'reachable must be "direct", "mapped" or "private"')
    name, memory_bytes, devices = str(peer.get("name", name)), parse_size(str(peer["memory"])), peer.get("devices", 1)
    fits = isinstance(devices, int) and 1 <= devices <= memory.MOST_DEVICES and (devices == 1 or "speed" in peer)
    require(fits, f"devices must be a whole number in 1..{memory.MOST_DEVICES}, beside the speed of one of them")
    device = str(peer.get("device", memory.CPU))
    require(device in (memory.CPU, memory.GPU), f'device must be "{memory.CPU}" or "{memory.GPU}"')
    host = parse_size(str(peer["host"])) if "host" in peer else None
    is_beside = host is None or device == memory.GPU
    require(is_beside, f'host is the memory beside a GPU; give it with device = "{memory.GPU}"')
    if devices > 1 and manifest is not None:
        several = f"{devices} x {device}"
        if holds_whole(manifest, Budget(memory_bytes, several, host)):
            device = several
        else:
            devices = 1
    one = Candidate(
        peer=name,
        memory_bytes=memory_bytes,
        device=device,
        host_bytes=host,
        up_bps=parse_rate(str(peer["up"])) if "up" in peer else 0,
        down_bps=parse_rate(str(peer["down"])) if "down" in peer else 0,
        speed_flops=devices * parse_speed(str(peer["speed"])) if "speed" in peer else 0,
        coordinates=tuple(float(x) for x in place),
        presence=float(presence),
        reachable=peer.get("reachable", ""),
    )
    names = [name] if count == 1 else [f"{name}-{i + 1}" for i in range(count)]
    return [dataclasses.replace(one, peer=name) for name in names]


def parse_speed(text: str) -> int:
    """Operations a second in a speed such as `5TFLOPS` or `800G`. Raises UsageError."""
    match = _SPEED.fullmatch(text.strip())
    speed = int(float(match[1]) * 1000 ** _POWERS[match[2].lower()]) if match else 0
    if speed < 1:
        raise UsageError(f'speed "{clean(text)}": not a number of operations a second; write it like 5TFLOPS')
    return speed


def _unique(candidates: Sequence[Candidate], source: str) -> None:
    names = {c.peer for c in candidates}
    if len(names) < len(candidates) or len(names) > MAX_PEERS:
        raise UsageError(
            f"{source}: two peers have the same name, or there are over {MAX_PEERS}; give each a name of its own"
        )


async def _from_run(text: str) -> Known:
    run = parse_run(text)
    async with running.visiting(run) as (manifest, transport, _):
        return await known_by(Monitor(manifest, transport, bootstrap=run.bootstrap))


async def known_by(monitor: Monitor) -> Known:
    """The candidates by their announcements, and the newest plan. Raises RemoteError."""
    await monitor.poll(lambda event: None)
    newest = None if monitor.head is None else monitor.head.commit.plan
    return Known(
        manifest=monitor.manifest,
        candidates=tuple(candidate(peer) for peer in monitor.peers.values() if peer.device != NODE_DEVICE),
        replicas=newest.replicas if newest is not None else (),
        said={peer: found.name for peer, found in monitor.peers.items()},
    )


# --- --what-if


def _changed(candidates: Sequence[Candidate], what_if: Sequence[str], said: Mapping[str, str]) -> tuple[Candidate, ...]:
    """The peers after `+N:MEMORY,UP,DOWN,SPEED` and `-PEER`. said: announced names. Raises UsageError."""
    found = list(candidates)
    for change in what_if:
        number, colon, text = change[1:].partition(":")
        parts = text.split(",")
        if change.startswith("+") and colon and number.isdecimal() and len(parts) == 4:
            described: dict[str, Any] = dict(zip(("memory", "up", "down", "speed"), parts, strict=True))
            described |= {"count": int(number), "name": f"new{len(found) + 1}"}
            found += _described(described, "", f"--what-if {change}")
        elif change.startswith("-") and len(change) > 1:
            peers = {c.peer: c for c in found}
            gone = change[1:] if change[1:] in peers else meant("--what-if", change[1:], peers, said)
            if gone not in peers:
                raise UsageError(f"--what-if {clean(change)}: is not there; give a peer that the plan has")
            found.remove(peers[gone])
        else:
            raise UsageError(
                f"--what-if {clean(change)}: not understood; write +10:8GB,20Mbps,100Mbps,5TFLOPS to add peers, -PEER"
                " to remove one"
            )
    _unique(found, "--what-if")
    return tuple(found)


# --- join --dry-run

REACHED = {
    "": "not asked",
    "direct": "others reach it directly",
    "mapped": "others reach it through a port of its router",
    "private": "its router refuses connections: others reach it by hole punching or through relays",
}


async def dry_run(peer: Peer, transport: Transport) -> Iterator[str]:
    """The peer's part in the run, as text. Raises PotluckError, as joining would."""
    own = await peer.rehearse()
    monitor = Monitor(peer.manifest, transport, bootstrap=peer.bootstrap)
    known = await known_by(monitor)
    return _dry_run_lines(known, own, None if monitor.head is None else monitor.head.commit)


def _dry_run_lines(known: Known, own: Announcement, head: Commit | None) -> Iterator[str]:
    manifest = known.manifest
    others = [c for c in known.candidates if c.peer != own.peer and c.memory_bytes]
    rounds = schedule.last_round(manifest, head)
    begun = f"round {head.round} of {rounds} is decided" if head is not None and head.round else "it has not begun"
    yield f"run {manifest.run_id[:12]} {clean(manifest.name)}: {begun}, {count(others, 'other peer')} there"
    beside = f" and {size(own.host_bytes)} of the host's" if own.host_bytes else ""
    yield f"this machine: {clean(own.device)}, {size(own.memory_bytes)}{beside} offered; {REACHED[own.reachable]}"
    yield f"its bandwidth: {rate(own.up_bps)} up, {rate(own.down_bps)} down"
    yield from part_lines(known, own)
    yield "nothing was trained; the same command without --dry-run joins"


def part_lines(known: Known, announced: Announcement) -> Iterator[str]:
    """The announced peer's part in the next plan, as text. Without a known speed there are no rates."""
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
    state = sum(map(manifest.state_bytes, memory.stage_shards(manifest, first, last)))
    took = duration(8 * state / max(own.down_bps, 1))
    fetches = f"it would fetch {size(state)} of state first ({took} at its bandwidth)"
    if not own.speed_flops:
        yield f"it would be {part}; how much it would train a day is not known, since its speed is not"
        yield fetches
        return
    a_day = replica.rate * 86400 / 1e6
    without, whole_run = (sum(r.rate for r in found) for found in (_without(known, others), replicas))
    more = f"; with it the run trains {whole_run / without - 1:.0%} more" if without else ""
    yield (
        f"it would be {part}: {replica.rate:,.0f} tokens per second by its measured speed,"
        f" {a_day:,.0f} million a day{more}"
    )
    text = replica.rate * manifest.timing.training_seconds * corpus.id_bytes(manifest.model.vocab_size)
    yield f"{fetches}, and then about {size(text)} of text a round"


def _without(known: Known, others: Sequence[Candidate]) -> tuple[Arranged, ...]:
    return next_plan(dataclasses.replace(known, candidates=tuple(others)))[0] if others else ()


# --- plans as text

MOST_SPARES = 20


def plan_lines(
    manifest: Manifest, candidates: Sequence[Candidate], replicas: Sequence[Arranged], spares: Sequence[str]
) -> Iterator[str]:
    """A plan as text, replica by replica."""
    from protocol.planning.explain import explain, why_spare

    explained = explain(manifest, candidates, replicas)
    total = sum(replica.rate for replica in explained)
    yield (
        f"run {manifest.run_id[:12]} {clean(manifest.name)}: {count(candidates, 'peer')}, {count(replicas, 'replica')},"
        f" {count(spares, 'spare')}: {total:,.0f} tokens per second"
    )
    if len(candidates) > 1:
        yield f"  {_speedup(manifest, candidates, total)}"
    for number, replica in enumerate(explained):
        yield from _replica_lines(manifest, number, replica)
    there = {c.peer: c for c in candidates}
    for peer in spares[:MOST_SPARES]:
        yield f"  spare  {_short_name(peer)}: {why_spare(manifest, there[peer])}"
    if len(spares) > MOST_SPARES:
        yield f"  and {len(spares) - MOST_SPARES} more spares"
    stages = [part for replica in replicas for part in replica.ranges]
    shards = [shard for first, last in stages for shard in memory.stage_shards(manifest, first, last)]
    a_round = sum(part_lists.largest_payload(manifest, shard) for shard in shards)
    yield (
        f"a round brings {size(a_round)} of payloads; each operator's node keeps"
        f" {size(retention.archive_bytes(manifest, a_round))} of states and payloads at most"
    )
    if manifest.outer.aggregate_topk:
        yield (
            f"from {aggregation.least_replicas(manifest)} replicas on the nodes add up the updates, and each peer"
            f" fetches {size(aggregation.largest_aggregate(manifest))} a round at most"
        )


def _speedup(manifest: Manifest, candidates: Sequence[Candidate], total: float) -> str:
    """The ratio of the swarm's rate to that of its fastest machine that holds the whole model, as text."""
    from protocol.planning.arrange import arrange
    from protocol.planning.budget import holds_whole
    from protocol.planning.explain import explain

    whole = [one for one in candidates if holds_whole(manifest, one.budget)]
    fastest = max(whole, key=lambda one: (one.speed_flops, one.peer), default=None)
    replicas = arrange(manifest, (fastest,))[0] if fastest is not None else ()
    if fastest is None or not replicas:
        return "no machine could train the model alone"
    alone = explain(manifest, candidates, replicas)[0].ideal
    worth = "" if total > alone else ": this swarm does not pay"
    return f"{total / alone:.2f} times as many as {_short_name(fastest.peer)} alone would train{worth}"


def _replica_lines(manifest: Manifest, number: int, replica: Explained) -> Iterator[str]:
    chain = len(replica.roles) > 1
    kind = f"chain of {len(replica.roles)}" if chain else "full"
    yield (
        f"  {number} {kind}: {replica.rate:,.0f} tokens per second, {replica.rate / replica.ideal:.0%} of what its"
        f" computing could; limit: {replica.limit}"
    )
    yield (
        f"      a round: {replica.sent:.2g} s sent, {replica.fetched:.2g} s fetched, {replica.applied:.2g} s applied"
        f"{' while it trains' if manifest.outer.overlap else ''}"
    )
    for role in replica.roles:
        part = blocks(role.first, role.last) if chain else "the whole model"
        yield f"      {_short_name(role.peer)}  {part}, {role.seconds:.2g} s a micro-batch: {role.why}"


def _short_name(peer: str) -> str:
    """A name from a file of peers, or the end of a peer id."""
    from protocol.planning.explain import LEAST_ID

    return clean(peer if len(peer) < LEAST_ID else short_peer(peer))


def _figure_lines() -> Iterator[str]:
    from protocol.planning import figures

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
