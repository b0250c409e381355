"""Formats amounts and names for people, and cleans texts of other peers.

A text of another peer is cleaned once, where it enters (`cleaned`). A peer's name is not unique and decides nothing. It
is shown with the end of the peer's id.
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
import unicodedata
from collections.abc import Iterable, Mapping, Sized
from pathlib import Path
from typing import Any, TypeVar

from protocol import identity
from protocol.errors import UsageError
from protocol.identity import short_peer
from protocol.wire.bounds import MAX_TIME
from protocol.wire.decree import Schedule
from protocol.wire.schema import Digest

T = TypeVar("T")
LONGEST_NAME = 12
ID_END = 4
"""Characters of the peer id behind a name."""
MOST_NAMES = 1_000
"""Names that a screen keeps; of more peers it shows ids."""
MOST_LISTED = 6
_NAME_MARKS = " -_."
_AROUND_NAME = " \t\"'`()[]{}<>:;,"
"""Characters around a peer's name in sentences and tables."""
_CUT = ("…", "...", "~")
"""Signs of truncation on screens; `~` in ASCII."""
_BASE58_END = re.compile(r"[1-9A-HJ-NP-Za-km-z]*$")
"""Characters of peer ids at the end of a text."""
LONGEST_TEXT = 400

_ID = re.compile(r"(?<!\w)(?:peer )?(\w{1,8})(?!\w)")
"""What may be the short form of a peer id."""
_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./-][A-Za-z0-9_@%+=:,./#-]*")
"""Words that a shell takes literally, addresses with # among them, which `shlex` would quote."""


def called(peer: str, names: Mapping[str, str]) -> str:
    """A peer's name, or the end of its id."""
    return names.get(peer) or short_peer(peer)


def readable(text: str, names: Mapping[str, str], limit: int = 160) -> str:
    """Shortens cleaned text and replaces peer ids in it by names."""
    shown = text
    if names:
        ends = {short_peer(peer): name for peer, name in names.items()}
        shown = _ID.sub(lambda found: ends.get(found[1], found[0]), shown)  # in one pass: a name may look like an id
    return shown[:limit] + ("…" if len(shown) > limit else "")


def said_of(name: str, text: str) -> str:
    """A sentence about `name`, without that name in front, which stands before it already."""
    return re.sub(rf"^(?:peer )?{re.escape(name)}: ", "", text)


def clean(text: object, limit: int = 160) -> str:
    """Makes another peer's text printable and short."""
    whole = str(text)
    shown = whole[:limit]
    if not shown.isprintable():
        shown = "".join(c if c.isprintable() else " " for c in shown)
    return shown + ("…" if len(whole) > limit else "")


def cleaned(value: T) -> T:
    """Makes all texts in another peer's value printable, each of at most LONGEST_TEXT characters.

    value: a text, tuple, map or dataclass; returned itself if nothing has to change.
    """
    return typing.cast(T, _cleaned(value))


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return clean(value, LONGEST_TEXT)
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
    """The fields of a dataclass that may have texts; none for other types."""
    if not dataclasses.is_dataclass(hint):
        return ()
    hints = typing.get_type_hints(hint, include_extras=True)
    return tuple(f.name for f in dataclasses.fields(hint) if _has_text(hints[f.name]))


def _has_text(hint: Any) -> bool:
    if hint == Digest:
        return False
    return hint is str or bool(_texts(hint)) or any(map(_has_text, typing.get_args(hint)))


def typed(*words: str | Path) -> str:
    """Quotes a command for a shell. A path that begins with - is no option."""
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
    return f"$'{''.join(escaped)}'"  # for bash, zsh and ksh; others cannot write it


def harmless(text: str) -> str:
    """A model's output without terminal control characters, but with its lines and tabs."""
    return "".join(c if c.isprintable() or c in "\n\t" else " " for c in text)


def count(items: Sized, noun: str) -> str:
    """`1 replica`, `2 replicas`."""
    return number(len(items), noun)


def number(n: int, noun: str) -> str:
    """`1 round`, `2,000 rounds`."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def schedule_of(said: Schedule) -> str:
    """`400 rounds, a schedule of 8,000 inner steps`, and decreed limits."""
    text = f"{said.rounds:,} rounds, a schedule of {said.total_steps:,} inner steps"
    if (now := said.limits) is None:
        return text
    sessions = f"{now.range_sessions:,} sessions" if now.range_sessions else "any number of sessions"
    return (
        f"{text}, a probation of {now.probation:,} rounds, at most {now.share:.1%} of a round for a peer, {sessions}"
        f" and {now.range_share:.1%} of the plan for strangers of one range"
    )


def blocks(first: int, end: int) -> str:
    """The blocks first <= i < end: `block 3`, `blocks 3-5`."""
    return f"block {first}" if end - first == 1 else f"blocks {first}-{end - 1}"


def size(n: float) -> str:
    """Bytes in powers of 1000: `1.5 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if n < 999.5:
            return f"{n:.0f} {unit}" if unit == "B" or n >= 99.95 else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.1f} TB"


def times(ratio: float) -> str:
    """`12×`, `1.5×`."""
    return f"{ratio:.0f}×" if ratio >= 9.95 else f"{ratio:.1f}×"


def percent(share: float) -> str:
    """`93 %`."""
    return f"{100 * share:.0f} %"


def rate(bps: int) -> str:
    """Bits per second: `20 Mb/s`."""
    if bps < 995:
        return f"{bps} b/s"
    if bps < 995_000:
        return f"{bps / 1e3:.0f} kb/s"
    return f"{bps / 1e6:.3g} Mb/s" if bps < 995_000_000 else f"{bps / 1e9:.3g} Gb/s"


def duration(seconds: float) -> str:
    """`45 s`, `2:05 min`, `3:20 h`, `4.5 days`."""
    seconds = float(round(seconds)) if math.isfinite(seconds) else seconds  # 119.7 s are two minutes
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds // 60:.0f}:{seconds % 60:02.0f} min"
    if seconds < 86400:
        return f"{seconds // 3600:.0f}:{seconds % 3600 // 60:02.0f} h"
    return f"{seconds / 86400:.1f} days"


def clock(when: float) -> str:
    """Local time of day."""
    return time.strftime("%H:%M:%S", time.localtime(min(max(0.0, when), MAX_TIME)))


# --- names


def harmless_name(text: str) -> str:
    """The part of an announced name that is shown; may be empty.

    Keeps letters with one combining mark each, digits, spaces, `-`, `_` and `.`; LONGEST_NAME characters.
    """
    kept = ""
    for c in unicodedata.normalize("NFC", text[: 8 * LONGEST_NAME]):
        mark = unicodedata.category(c).startswith("M")
        if c.isalnum() or c in _NAME_MARKS or (mark and kept[-1:].isalpha()):
            kept += c
        elif not mark:
            kept += " "
    return " ".join(kept.split())[:LONGEST_NAME].strip()


class Names(dict[str, str]):
    """Names on screens, by peer id. `given` names stay; others are learned from announcements."""

    def __init__(self, given: Mapping[str, str] | None = None) -> None:
        super().__init__(given or {})
        self._given = frozenset(self)

    def learn(self, peer: str, said: str) -> None:
        """Takes the name that a peer announces."""
        if peer in self._given:
            return
        name = harmless_name(said)
        if not name:
            self.pop(peer, None)
        elif peer in self or len(self) < MOST_NAMES:
            self[peer] = f"{name}·{harmless_name(short_peer(peer)[-ID_END:])}"


def meant(what: str, text: str, known: Iterable[str], said: Mapping[str, str] | None = None) -> str:
    """Resolves a peer that a person typed: an id, the end of one, or a form from screens (`Ada·p8kZ`, `12D3Koo…q3Rt`).

    what: the argument's name, for errors.
    known: ids that may be abbreviated.
    said: announced names. Others choose them, so the end of the id decides.

    Raises UsageError with the candidates.
    """
    found = text.strip(_AROUND_NAME)
    begin, mark, end = next((found.rpartition(mark) for mark in _CUT if mark in found), ("", "", found))
    end = _BASE58_END.findall(end)[0]
    try:
        identity.public_key(end)
    except identity.IdentityError:
        pass
    else:
        return end
    begin = begin if mark and begin.startswith("12D3") else ""
    fit = {peer for peer in known if len(end) >= ID_END and peer.endswith(end) and peer.startswith(begin)}
    called = unicodedata.normalize("NFC", found).casefold()
    named = {peer for peer, name in (said or {}).items() if harmless_name(name).casefold() == called}
    if len(fit | named) == 1 and fit:
        return fit.pop()
    why = f"several end so or are called so: {_listed(fit | named)}" if fit else "none that is known ends so"
    if named and not fit:
        why = f"a name alone means nobody, since anybody may take it; called so: {_listed(named)}"
    raise UsageError(
        f"{what} {clean(text, 64)}: {why}; give the whole id, or the last {ID_END} characters or more of it"
    )


def _listed(peers: Iterable[str]) -> str:
    *first, rest = *sorted(peers)[:MOST_LISTED], max(0, len(set(peers)) - MOST_LISTED)
    return ", ".join(map(clean, map(str, first))) + (f" and {rest} more" if rest else "")
