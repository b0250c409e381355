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
from protocol.rounds.kept import Packed
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
        chain, digests = list[Packed](), list[str]()
        for raw in raws[at:]:
            link = _link(
                manifest, tip, raw, chain[-1].round if chain else tip.round, digests[-1] if chain else tip.digest
            )
            if link is None:
                break
            chain.append(link[0])
            digests.append(link[1])
        last = at + max(0, len(chain) - 1)
        record = encoding.decode_record(raws[last], sender)
        if len(chain) > 1 and (record.commit.digest != digests[-1] or not is_decided(record, tip.members)):
            reason = f"the commit of round {record.commit.round} lacks the votes of a majority"
            raise MessageError(sender, f"log of {short_peer(sender)}: {reason}; ask another bootstrap node")
        stretch = Stretch(tip.members, tuple(chain[:-1]), record)
        yield stretch
        tip, at = stretch.tip, last + 1


def _link(manifest: Manifest, tip: Tip, raw: bytes, round: int, parent: str) -> tuple[Packed, str] | None:
    """The commit in a record and its digest, if it comes right after the one of `round` whose digest is `parent`, and changes nothing
    of who decides. Only what its successor proves is looked at here. None for any other, and for what is no record."""
    try:
        found = framing.unpack_message(raw)
        body = found["c"]
        plain = (body["run"], body["round"], body["parent"], tuple(body["members"]), body["decree"])
        if plain != (manifest.run_id, round + 1, parent, tip.members, None):
            return None
        digest = hashlib.sha256(DOMAIN + framing.repack({"t": "commit", **body})).hexdigest()
        return Packed(round + 1, parent, framing.repack(body), _payload_bytes(body)), digest
    except (framing.FrameError, KeyError, IndexError, TypeError):
        return None


_SHARES, _SIZE = 4, 2
"""Where a packed Contribution has its shares, and a packed Share its size (protocol/wire/commit.py)."""


def _payload_bytes(body: dict[str, Any]) -> int:
    return sum(int(share[_SIZE]) for contribution in body["contributions"] for share in contribution[_SHARES])
