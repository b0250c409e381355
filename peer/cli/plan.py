"""What `potluck plan` does: peers from a file or from a run, changed by `--what-if`, and the plan that the matchmaker would make."""

from __future__ import annotations

import dataclasses
import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from peer.cli import running
from peer.node.open_run import Door, here, manifest_of, parse_run, read_manifest, start_transport
from peer.ui.monitor import Monitor
from peer.ui.names import meant
from peer.ui.text import clean
from protocol.errors import UsageError, shown
from protocol.planning import memory
from protocol.planning.budget import Budget, holds_whole
from protocol.planning.partition import Candidate, candidate
from protocol.run.manifest import Manifest
from protocol.wire.announcement import NODE_DEVICE, REACHABLE
from protocol.wire.plan import ReplicaSpec

if TYPE_CHECKING:
    from protocol.planning.arrange import Arranged

_SPEED = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgtp]?)(?:flops|flop/s)?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_FIELDS = {
    "name",
    "memory",
    "up",
    "down",
    "speed",
    "devices",
    "count",
    "coordinates",
    "presence",
    "reachable",
    "device",
    "host",
}
MAX_PEERS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What a plan is made of."""

    manifest: Manifest
    candidates: tuple[Candidate, ...]
    replicas: tuple[ReplicaSpec, ...] = ()
    """Of the run's newest plan."""
    said: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """What the peers of a run call themselves."""


def plan(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN|FILE",
            help="A run, as for monitor; or a TOML file with a list of peers (docs/guides/plan.md).",
            show_default=False,
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
    """Print the plan that the matchmaker would make, its tokens per second, and why it is so. Changes nothing."""

    running.run(print_plan(run, what_if or (), figures, lambda line: print(line, flush=True)))


async def print_plan(text: str | None, what_if: Sequence[str], figures: bool, say: Callable[[str], None]) -> None:
    """`potluck plan`. Raises UsageError, RemoteError."""
    from peer.ui import plan_text
    from protocol.planning.arrange import arrange

    if figures:
        for line in plan_text.figure_lines():
            say(line)
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
        say(plan_text.change_line(before, sum(replica.rate for replica in replicas)))
    for line in plan_text.plan_lines(known.manifest, candidates, replicas, spares):
        say(line)


def next_plan(known: Known) -> tuple[tuple[Arranged, ...], tuple[str, ...]]:
    """The replicas that the matchmaker would make, those of the newest plan kept as far as that pays, and the spares."""
    from protocol.planning.arrange import arrange
    from protocol.planning.planner import arranged, still_fit

    there = {c.peer: c for c in known.candidates}
    kept = [arranged(replica) for replica in still_fit(known.manifest, known.replicas, there)]
    return arrange(known.manifest, known.candidates, kept)


# --- where peers come from


def _lists_peers(text: str) -> bool:
    """Whether this names a file with a list of peers, and not a run."""
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
    """The tables `[[peers]]` of a TOML file, whatever run they are for. Raises UsageError."""
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
    """One peer as a person describes it, as often as `count` says. Several devices add up where each holds the whole model of the run; so they do where the
    run is not known. Raises UsageError."""
    from peer.training.device import MOST_DEVICES, parse_rate, parse_size

    if "memory" not in peer:
        raise UsageError(f'{source}: has no memory; give it as memory = "8GB"')
    count, presence, place = peer.get("count", 1), peer.get("presence", 1.0), peer.get("coordinates", [])
    if not isinstance(count, int) or not 1 <= count <= MAX_PEERS:
        raise UsageError(f"{source}: count must be a whole number in 1..{MAX_PEERS}")
    if not isinstance(presence, int | float) or not 0 <= presence <= 1:
        raise UsageError(f"{source}: presence must be in 0..1")
    if not isinstance(place, list) or not all(isinstance(x, int | float) for x in place):
        raise UsageError(f"{source}: coordinates must be a list of milliseconds")
    if peer.get("reachable", "") not in REACHABLE:
        raise UsageError(f'{source}: reachable must be "direct", "mapped" or "private"')
    name, memory_bytes, devices = str(peer.get("name", name)), parse_size(str(peer["memory"])), peer.get("devices", 1)
    if not isinstance(devices, int) or not 1 <= devices <= MOST_DEVICES or (devices > 1 and "speed" not in peer):
        raise UsageError(
            f"{source}: devices must be a whole number in 1..{MOST_DEVICES}, beside the speed of one of them"
        )
    device = str(peer.get("device", memory.CPU))
    if device not in (memory.CPU, memory.GPU):
        raise UsageError(f'{source}: device must be "{memory.CPU}" or "{memory.GPU}"')
    host = parse_size(str(peer["host"])) if "host" in peer else None
    if host is not None and device != memory.GPU:
        raise UsageError(f'{source}: host is the memory beside a GPU; give it with device = "{memory.GPU}"')
    if manifest is not None and not holds_whole(manifest, Budget(memory_bytes, device, host)):
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
    """What the run's peers announce, and its newest plan."""
    import tempfile

    run = parse_run(text)
    with tempfile.TemporaryDirectory(prefix="potluck-plan-") as name:
        transport = await start_transport(Path(name), Door(host="127.0.0.1"), run.run_id)
        try:
            manifest = await manifest_of(run, transport)
            return await known_by(Monitor(manifest, transport, bootstrap=run.bootstrap))
        finally:
            await transport.aclose()


async def known_by(monitor: Monitor) -> Known:
    """What the announcements and the log say. Raises RemoteError."""
    await monitor.poll(lambda event: None)
    newest = None if monitor.head is None else monitor.head.commit.plan
    return Known(
        manifest=monitor.manifest,
        candidates=tuple(candidate(peer) for peer in monitor.peers.values() if peer.device != NODE_DEVICE),
        replicas=newest.replicas if newest is not None else (),
        said={peer: found.name for peer, found in monitor.peers.items()},
    )


# --- what becomes of them


def _changed(candidates: Sequence[Candidate], what_if: Sequence[str], said: Mapping[str, str]) -> tuple[Candidate, ...]:
    """The peers after `+N:MEMORY,UP,DOWN,SPEED` and `-PEER`; `said`: what they call themselves. Raises UsageError."""
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
                f"--what-if {clean(change)}: not understood; write +10:8GB,20Mbps,100Mbps,5TFLOPS to add peers, -PEER to remove one"
            )
    _unique(found, "--what-if")
    return tuple(found)
