"""How peers are called on screens: by the names that they announce, of which nothing but harmless text is left, or by the ends of their ids.

A name decides nothing. Everybody may take the same one, so it is shown with the end of the peer's id.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping

from protocol.identity import short_peer

LONGEST = 12
"""Characters of a name that are shown."""
END = 4
"""Characters of the id behind it."""
MOST = 1_000
"""Names that a screen keeps; of more peers it shows ids."""
_MARKS = " -_."


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
