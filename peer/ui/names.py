"""How peers are called on screens: by the names that they announce, of which nothing but harmless text is left, or by the ends of their ids.

A name decides nothing. Everybody may take the same one, so it is shown with the end of the peer's id.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping

from peer.ui.text import clean
from protocol import identity
from protocol.errors import UsageError
from protocol.identity import short_peer

LONGEST = 12
"""Characters of a name that are shown."""
END = 4
"""Characters of the id behind it."""
MOST = 1_000
"""Names that a screen keeps; of more peers it shows ids."""
_MARKS = " -_."
_WRAPPED = " \t\"'`()[]{}<>:;,"
"""What stands around a peer's name in sentences and tables, and in no id."""
_CUT = ("…", "...", "~")
"""What a screen shows where it has cut something off; `~` on a terminal with ASCII alone."""
_END = re.compile(r"[1-9A-HJ-NP-Za-km-z]*$")
"""Characters of ids (base58) at the end of a text."""
_LISTED = 6
"""Candidates that an error names, at most."""


def harmless_name(text: str) -> str:
    """What is shown of an announced name: letters, digits, spaces, `-`, `_` and `.`, one combining mark a letter, LONGEST characters; empty
    where there is none of it."""
    kept = ""
    for c in unicodedata.normalize("NFC", text[: 8 * LONGEST]):
        mark = unicodedata.category(c).startswith("M")
        if c.isalnum() or c in _MARKS or (mark and kept[-1:].isalpha()):
            kept += c
        elif not mark:
            kept += " "
    return " ".join(kept.split())[:LONGEST].strip()


class Names(dict[str, str]):
    """How peers are called, by their ids. Those that are `given` stay; others are learned from what peers announce."""

    def __init__(self, given: Mapping[str, str] | None = None) -> None:
        super().__init__(given or {})
        self._given = frozenset(self)

    def learn(self, peer: str, said: str) -> None:
        """`peer` announces that it is called `said`."""
        if peer in self._given:
            return
        name = harmless_name(said)
        if not name:
            self.pop(peer, None)
        elif peer in self or len(self) < MOST:
            self[peer] = f"{name}·{harmless_name(short_peer(peer)[-END:])}"


def meant(what: str, text: str, known: Iterable[str], said: Mapping[str, str] | None = None) -> str:
    """The peer id that a person means who types it, the end of it, or what screens show: `Ada·p8kZ`, `peer p8kZq3Rt`, `12D3Koo…q3Rt`. `what`
    is typed there, for errors; `known`: ids that may be meant by their end; `said`: what peers call themselves. Strangers choose their names, so
    the end of the id decides. Raises UsageError, which names those that may be meant."""
    found = text.strip(_WRAPPED)
    begin, mark, end = next((found.rpartition(mark) for mark in _CUT if mark in found), ("", "", found))
    end = _END.findall(end)[0]
    try:
        identity.public_key(end)
    except identity.IdentityError:
        pass
    else:
        return end
    begin = begin if mark and begin.startswith("12D3") else ""
    fit = {peer for peer in known if len(end) >= END and peer.endswith(end) and peer.startswith(begin)}
    called = unicodedata.normalize("NFC", found).casefold()
    named = {peer for peer, name in (said or {}).items() if harmless_name(name).casefold() == called}
    if len(fit | named) == 1 and fit:
        return fit.pop()
    why = f"several end so or are called so: {_listed(fit | named)}" if fit else "none that is known ends so"
    if named and not fit:
        why = f"a name alone means nobody, since anybody may take it; called so: {_listed(named)}"
    raise UsageError(f"{what} {clean(text, 64)}: {why}; give the whole id, or the last {END} characters or more of it")


def _listed(peers: Iterable[str]) -> str:
    *first, rest = *sorted(peers)[:_LISTED], max(0, len(set(peers)) - _LISTED)
    return ", ".join(map(clean, map(str, first))) + (f" and {rest} more" if rest else "")
