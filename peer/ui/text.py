"""Amounts and names as people read them, and texts of other peers, cleaned.

A text of another peer is cleaned once, where it comes in: `cleaned` makes all texts of a value printable and short, such as of an event before a
screen takes it (peer/ui/run_state.py, peer/ui/lines.py), or of a commit before it is printed.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
import shlex
import time
import typing
from collections.abc import Iterable, Mapping, Sized
from pathlib import Path
from typing import Any, TypeVar

from protocol.identity import short_peer
from protocol.wire.bounds import MAX_TIME
from protocol.wire.commit import Contribution
from protocol.wire.decree import Schedule
from protocol.wire.schema import Digest

T = TypeVar("T")
LONGEST = 400
"""Characters of another peer's text that are kept."""

_ID = re.compile(r"(?<!\w)(?:peer )?(\w{1,8})(?!\w)")
"""What may be a short form of a peer's id."""

_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./-][A-Za-z0-9_@%+=:,./#-]*")
"""Words that mean themselves to a shell; so does an address with # in it, which `shlex` would quote."""


def mean_loss(contributions: Iterable[Contribution]) -> float | None:
    """Nats per token over all committed tokens whose loss is known."""
    known = [(c.loss, c.tokens) for c in contributions if c.loss is not None]
    return sum(loss * n for loss, n in known) / sum(n for _, n in known) if known else None


def called(peer: str, names: Mapping[str, str]) -> str:
    """A peer's given name, or the end of its id."""
    return names.get(peer) or short_peer(peer)


def readable(text: str, names: Mapping[str, str], limit: int = 160) -> str:
    """Cleaned text, shortened, in which the peers have their given names."""
    shown = text
    if names:
        ends = {short_peer(peer): name for peer, name in names.items()}
        shown = _ID.sub(lambda found: ends.get(found[1], found[0]), shown)  # in one pass: a name may look like an id
    return shown[:limit] + ("…" if len(shown) > limit else "")


def clean(text: object, limit: int = 160) -> str:
    """Text of another peer, printable and short."""
    whole = str(text)
    shown = whole[:limit]
    if not shown.isprintable():
        shown = "".join(c if c.isprintable() else " " for c in shown)
    return shown + ("…" if len(whole) > limit else "")


def cleaned(value: T) -> T:
    """A text, a tuple, a map or a dataclass of another peer, with all texts in it printable and of at most LONGEST characters. A value in which
    nothing has to change is returned itself."""
    return typing.cast(T, _cleaned(value))


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return clean(value, LONGEST)
    if isinstance(value, tuple):
        items = [_cleaned(item) for item in value]
        return tuple(items) if any(a is not b for a, b in zip(items, value, strict=True)) else value
    if isinstance(value, dict):
        return {_cleaned(key): _cleaned(item) for key, item in value.items()}
    changes = {}
    for name in _texts(value.__class__):
        old = getattr(value, name)
        if (new := _cleaned(old)) is not old:
            changes[name] = new
    return dataclasses.replace(value, **changes) if changes else value


@functools.cache
def _texts(hint: Any) -> tuple[str, ...]:
    """The fields of a dataclass that may have texts; none of any other type."""
    if not dataclasses.is_dataclass(hint):
        return ()
    hints = typing.get_type_hints(hint, include_extras=True)
    return tuple(f.name for f in dataclasses.fields(hint) if _has_text(hints[f.name]))


def _has_text(hint: Any) -> bool:
    if hint == Digest:
        return False
    return hint is str or bool(_texts(hint)) or any(map(_has_text, typing.get_args(hint)))


def typed(*words: str | Path) -> str:
    """A command, such that it can be typed: a shell takes each word as it is. A path is no option, whatever it begins with."""
    return " ".join(map(_word, words))


def _word(word: str | Path) -> str:
    text = str(word)
    if isinstance(word, Path) and text.startswith("-"):
        text = f"./{text}"
    if _PLAIN.fullmatch(text):
        return text
    if text.isprintable():
        return shlex.quote(text)
    escaped = (chr(b) if 32 <= b < 127 and chr(b) not in "\\'" else f"\\x{b:02x}" for b in os.fsencode(text))
    return f"$'{''.join(escaped)}'"  # of bash, zsh and ksh: others have no way to write it


def harmless(text: str) -> str:
    """What a model wrote, with its lines and tabs, and spaces for what would steer a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else " " for c in text)


def count(items: Sized, noun: str) -> str:
    """`1 replica`, `2 replicas`."""
    return number(len(items), noun)


def number(n: int, noun: str) -> str:
    """`1 round`, `2,000 rounds`."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def schedule_of(said: Schedule) -> str:
    """`400 rounds, a schedule of 8,000 inner steps`, and the limits, where they were decreed."""
    text = f"{said.rounds:,} rounds, a schedule of {said.total_steps:,} inner steps"
    if (now := said.limits) is None:
        return text
    sessions = f"{now.range_sessions:,} sessions" if now.range_sessions else "any number of sessions"
    return (
        f"{text}, a probation of {now.probation:,} rounds, at most {now.share:.1%} of a round for a peer, {sessions} and"
        f" {now.range_share:.1%} of the plan for strangers of one range"
    )


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


def times(ratio: float) -> str:
    """How many times as much, in two figures at least."""
    return f"{ratio:.0f}×" if ratio >= 9.95 else f"{ratio:.1f}×"


def rate(bps: int) -> str:
    """Bits a second."""
    if bps < 995:
        return f"{bps} b/s"
    if bps < 995_000:
        return f"{bps / 1e3:.0f} kb/s"
    return f"{bps / 1e6:.3g} Mb/s" if bps < 995_000_000 else f"{bps / 1e9:.3g} Gb/s"


def duration(seconds: float) -> str:
    """`45 s`, `2:05 min`, `3:20 h`, `4.5 days`."""
    seconds = (
        float(round(seconds)) if math.isfinite(seconds) else seconds
    )  # before it is taken apart: 119.7 s are two minutes
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds // 60:.0f}:{seconds % 60:02.0f} min"
    if seconds < 86400:
        return f"{seconds // 3600:.0f}:{seconds % 3600 // 60:02.0f} h"
    return f"{seconds / 86400:.1f} days"


def clock(when: float) -> str:
    """Local time of day; of what is no time, midnight of some day."""
    return time.strftime("%H:%M:%S", time.localtime(min(max(0.0, when), MAX_TIME)))
