"""Much of the log at once: one record proves the commits that it follows, as far as the same members decided them.

A commit names the digest of the one before it. So where a record is decided by members whom the reader knows, each commit on which it stands
is decided, too: its members vote for nothing else (docs/trust.md). Of those the reader computes the digests alone, and looks at the votes of
the last one only. A stretch ends where a decree comes, or other members: the record that brings them is looked at by itself, since
whoever votes from then on follows from it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from protocol.identity import short_peer
from protocol.ledger.kept import Packed
from protocol.run.manifest import Manifest
from protocol.wire import encoding, framing
from protocol.wire.commit import DOMAIN, Record, is_decided
from protocol.wire.encoding import MessageError


@dataclass(frozen=True, slots=True)
class Tip:
    """The newest commit that a reader knows."""

    round: int
    """Its round, -1 before the first."""
    digest: str
    """Its digest; before the first the run's id."""
    members: tuple[str, ...]
    """Who decides the next round."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Commits, one after the other, decided by the same members."""

    members: tuple[str, ...]
    """Who decided them."""
    before: tuple[Packed, ...]
    """All but the last one: each is the parent of the next."""
    last: Record
    """The record of the last one, whose signatures are right, and which proves the others."""

    @property
    def tip(self) -> Tip:
        """What a reader knows who has read it."""
        commit = self.last.commit
        return Tip(commit.round, commit.digest, commit.members)


def read(manifest: Manifest, tip: Tip, raws: Sequence[bytes], sender: str) -> Iterator[Stretch]:
    """The stretches of these records, which follow `tip`, as `sender` sent them. Raises MessageError."""
    at = 0
    while at < len(raws):
        links = list[_Link]()
        for raw in raws[at:]:
            link = _link(manifest, tip, raw, links[-1] if links else None)
            if link is None:
                break
            links.append(link)
        last = at + max(0, len(links) - 1)
        record = encoding.decode_record(raws[last], sender)
        reason = _why_not(manifest, tip, links, record)
        if reason is not None:
            what = f"log of {short_peer(sender)}: the commit of round {record.commit.round} {reason}"
            raise MessageError(sender, f"{what}; ask another bootstrap node")
        stretch = Stretch(tip.members, tuple(link.packed for link in links[:-1]), record)
        yield stretch
        tip, at = stretch.tip, last + 1


def _why_not(manifest: Manifest, tip: Tip, links: Sequence[_Link], record: Record) -> str | None:
    """Why this record, the last of `links`, if there are any, is not decided by those who decide after `tip`."""
    commit = record.commit
    follows = (commit.run, commit.round, commit.parent) == (manifest.run_id, tip.round + 1, tip.digest)
    if commit.digest != links[-1].digest if links else not follows:
        return "does not follow the one before it"
    return None if is_decided(record, tip.members) else "has too few votes"


_CARRIED = ("decrees", "schedule", "board")
"""What a commit without a decree says as the one before it."""


@dataclass(frozen=True, slots=True)
class _Link:
    """A commit that changes nothing of who decides. `carried`: what it says as its successor has to."""

    packed: Packed
    digest: str
    carried: tuple[Any, ...]


def _link(manifest: Manifest, tip: Tip, raw: bytes, before: _Link | None) -> _Link | None:
    """The commit in a record, if it comes right after `before`, or `tip`, decides no decree and lets nobody in. Only what its successor
    proves is looked at here. None for any other, and for what is no record."""
    round, parent = (tip.round, tip.digest) if before is None else (before.packed.round, before.digest)
    try:
        body = framing.unpack_message(raw)["c"]
        plain = (body["run"], body["round"], body["parent"], tuple(body["members"]), body["decree"], body["joined"])
        carried = tuple(body[name] for name in _CARRIED)
        if plain != (manifest.run_id, round + 1, parent, tip.members, None, []):
            return None
        if before is not None and carried != before.carried:
            return None
        digest = hashlib.sha256(DOMAIN + framing.repack({"t": "commit", **body})).hexdigest()
        return _Link(Packed(round + 1, parent, framing.repack(body), _payload_bytes(body)), digest, carried)
    except (framing.FrameError, KeyError, IndexError, TypeError, ValueError, OverflowError):
        return None


_SHARES, _SIZE = 4, 2
"""Where a packed Contribution has its shares, and a packed Share its size (protocol/wire/commit.py)."""


def _payload_bytes(body: dict[str, Any]) -> int:
    return sum(int(share[_SIZE]) for contribution in body["contributions"] for share in contribution[_SHARES])
