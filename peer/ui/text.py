"""Events in words, and amounts as people read them. Texts of other peers come out printable and short."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from peer.events import Event


def describe(event: Event, names: Mapping[str, str]) -> tuple[str, str] | None:
    """(level, text) for a reader, or None where an event is not worth a line. Raises KeyError and TypeError."""
    f = event.fields
    source = called(event.source, names)
    match event.kind:
        case "listening":
            return "info", f"to join: potluck join {clean(f['address'], 400)}"
        case "ready":
            return (
                "info",
                f"{called(f['peer'], names)} is ready: {clean(f['device'], 12)}, {size(f['memory_bytes'])}",
            )
        case "gone":
            return "warning", f"{called(f['peer'], names)} is gone"
        case "commit":
            return _describe_commit(f, names)
        case "moved":
            return "info", f"chain {int(f['replica'])}: {readable(f['reason'], names)}"
        case "diverged":
            return (
                "error",
                f"{called(f['peer'], names)} has other bits in {clean(f['shard'])} after round {f['round']}",
            )
        case "withdrew":
            return "warning", f"{source} sits out round {f['round']}: {readable(f['reason'], names)}"
        case "restored":
            return "info", f"{source} continues from round {f['round']}"
        case "shard_rebuilt":
            return "info", f"{source} rebuilt {', '.join(map(clean, f['shards']))} from the log"
        case "finished" if "state_digest" in f:
            digest = f["state_digest"]
            return "good", "run finished" + (f"; state {digest[:12]}" if digest else "")
        case "warning" | "error":
            return event.kind, readable(f["text"], names)
    return None


def describe_own(event: Event, names: Mapping[str, str]) -> tuple[str, str] | None:
    """As `describe`, of what a peer tells of itself: its rounds too, which nobody else's screen needs line by line."""
    f = event.fields
    match event.kind:
        case "started":
            return "info", f"{called(f['peer'], names)} is here: {clean(f['device'], 12)}, {size(f['memory_bytes'])}"
        case "role" if f["role"] == "full":
            return "info", f"round {int(f['round'])}: trains as a full replica"
        case "role":
            place = f"stage {f['position'] + 1} of {int(f['stages'])}"
            return (
                "info",
                f"round {int(f['round'])}: trains {blocks(int(f['first']), int(f['last']))}, {place} of a chain",
            )
        case "round" if f["round"]:
            amounts = f"{size(f['bytes_sent'])} sent and {size(f['bytes_received'])} received since the start"
            return "good", f"round {int(f['round'])} is applied; {amounts}"
        case "finished" if "state_digest" not in f:
            return "good", f"the run is over after round {int(f['round'])}"
    return describe(event, names)


def _describe_commit(f: Mapping[str, Any], names: Mapping[str, str]) -> tuple[str, str]:
    if f["round"] == 0:
        return "good", f"first plan: {count(f['plan']['replicas'], 'replica')}" if f["plan"] else "run begins"
    loss = mean_loss(f["contributions"])
    text = f"round {f['round']}: {count(f['contributions'], 'replica')}"
    text += f", loss {loss:.3f}" if loss is not None else ""
    for left in f["left_out"]:
        text += f"; without replica {left['replica']} ({readable(left['reason'], names)})"
    return ("warning" if f["left_out"] else "good"), text


def mean_loss(contributions: Any) -> float | None:
    """Nats per token over all committed tokens."""
    losses = [(c["loss"], c["tokens"]) for c in contributions if c["loss"] is not None]
    return sum(x * n for x, n in losses) / sum(n for _, n in losses) if losses else None


def called(peer: str, names: Mapping[str, str]) -> str:
    """A peer's given name, or the end of its id."""
    return names.get(peer) or clean(peer[-8:])


def readable(text: object, names: Mapping[str, str]) -> str:
    """`clean` text in which the peers have their given names."""
    shown = str(text)
    for peer, name in names.items():
        for form in (f"peer {peer[-8:]}", f"…{peer[-8:]}"):
            shown = shown.replace(form, name)
    return clean(shown)


def clean(text: object, limit: int = 160) -> str:
    """Text of another peer, printable and short."""
    shown = "".join(c if c.isprintable() else " " for c in str(text)[:limit])
    return shown + ("…" if len(str(text)) > limit else "")


def count(items: Any, noun: str) -> str:
    """`1 replica`, `2 replicas`."""
    return f"{len(items)} {noun}{'' if len(items) == 1 else 's'}"


def blocks(first: int, end: int) -> str:
    """Those from `first` up to `end`, which is not one of them: `block 3`, `blocks 3-5`."""
    return f"block {first}" if end - first == 1 else f"blocks {first}-{end - 1}"


def size(n: float) -> str:
    """Bytes for a reader, powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if n < 999.5:
            return f"{n:.0f} {unit}" if unit == "B" or n >= 99.95 else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.1f} TB"


def duration(seconds: float) -> str:
    """`45 s`, `2:05 min`, `3:20 h`, `4.5 days`."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds // 60:.0f}:{seconds % 60:02.0f} min"
    if seconds < 86400:
        return f"{seconds // 3600:.0f}:{seconds % 3600 // 60:02.0f} h"
    return f"{seconds / 86400:.1f} days"


def clock(when: float) -> str:
    """Local time of day."""
    return time.strftime("%H:%M:%S", time.localtime(when))
