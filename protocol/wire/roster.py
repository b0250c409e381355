"""Who is there: what a bootstrap node is asked for the announcements that it heard in its sessions, and what it answers.

Every announcement is sealed by its peer, so a node can keep one back, but change none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from protocol.wire.bounds import Count, PeerId, Sealed, Since
from protocol.wire.schema import MAX_ITEMS, AtMost

MOST_LOOKED_UP = 64
"""Announcements of one answer to a Lookup."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """Please send the announcements of `peers`, and of `sample` others by chance, as far as you know them."""

    peers: Annotated[tuple[PeerId, ...], AtMost(MAX_ITEMS)] = ()
    sample: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RosterRequest:
    """Please send what is new after `position`, which an earlier answer gave; -1: everything."""

    position: Since


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """The answer to both. To a RosterRequest: `announcements`, and peers that are `gone`, since then, up to `position`; `more`: there
    is more, ask again from there; `anew`: what was known before does not count any more."""

    announcements: Annotated[tuple[Sealed, ...], AtMost(MAX_ITEMS)]
    gone: Annotated[tuple[PeerId, ...], AtMost(MAX_ITEMS)] = ()
    position: Since = -1
    more: bool = False
    anew: bool = False
