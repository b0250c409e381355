"""The log as a reader follows it: the next record, many records at once, and old commits in little memory.

`why_not_after` checks votes, run, round and parent before a record is decoded, and `why_not_content` what decides next;
protocol/ledger/rules.py checks the content, peer/log/replay.py the lists of parts and payloads.

*Stretches.* A commit names the digest of its parent, so one record proves all commits before it that the same members
decided (docs/trust.md). A stretch ends at a decree or a change of members.

*Forks.* Two decided commits of one round need more than f dishonest members. A peer then raises `ForkError` and applies
neither.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, overload

from protocol.errors import PotluckError, RemoteError
from protocol.identity import short_peer
from protocol.ledger import access, board
from protocol.run.manifest import Manifest
from protocol.wire import encoding, framing
from protocol.wire.commit import DOMAIN, Commit, Record, is_decided
from protocol.wire.encoding import CommitHead, MessageError, RecordHead
from protocol.wire.plan import Plan, Work
from protocol.wire.schema import build, packed

MAX_SLOT = 2**62
"""No run comes so far."""


class BadCommit(PotluckError):
    """These bytes are not the next commit of the run; the text goes on from "the commit of round N"."""


def why_not_after(manifest: Manifest, head: Commit | None, record: Record | RecordHead) -> str | None:
    """Why `record` cannot come next after `head`, by what its head says; None if it can."""
    commit, round = record.commit, 0 if head is None else head.round + 1
    members = board.members_after(manifest, head)
    if commit.run != manifest.run_id:
        return "is of another run"
    if commit.round != round:
        return f"is not the one of round {round}"
    if commit.parent != (head.digest if head else manifest.run_id):
        return "does not follow the one before it"
    if commit.leader not in members:
        return "was proposed by a node that is not a member"
    return None if is_decided(record, members) else "has too few votes"


def why_not_next(manifest: Manifest, head: Commit | None, record: Record) -> str | None:
    """Why `record`, whose signatures are right, cannot come next after `head` in the log; None if it can."""
    return why_not_after(manifest, head, record) or why_not_content(manifest, head, record.commit)


def why_not_content(manifest: Manifest, head: Commit | None, commit: Commit) -> str | None:
    """Why `commit`, whose head is that of the next one, cannot come next by what else it says; None if it can."""
    if not board.is_complete(board.of(manifest, commit), commit.members):
        return "names other members than operators of the run"
    if (unlawful := access.why_unlawful(manifest, head, commit)) is not None:
        return unlawful
    if commit.plan is not None and not all(_allows(manifest, w) for w in _works(commit.plan)):
        return "plans more work than the manifest allows"
    return None


def _works(plan: Plan) -> Iterator[Work]:
    yield from (seat.work for seat in plan.seats)
    yield from (work for r in plan.replicas for work in (r.work, r.following) if work is not None)


def _allows(manifest: Manifest, work: Work) -> bool:
    steps, micro_batches = manifest.train.inner_steps, manifest.train.micro_batches
    return work.steps <= steps and work.micro_batches <= micro_batches and work.slot <= MAX_SLOT


def follow(manifest: Manifest, before: Commit | None, raw: bytes) -> Record:
    """The record in `raw`, which must come right after `before` (None: it must be the first). Raises BadCommit."""
    try:
        head = encoding.record_head(raw, "the log")
        if (reason := why_not_after(manifest, before, head)) is not None:  # before it is decoded
            raise BadCommit(reason)
        record = head.whole()
    except RemoteError as error:
        raise BadCommit(f"cannot be believed: {str(error).removesuffix('; it was dropped')}") from None
    if (reason := why_not_content(manifest, before, record.commit)) is not None:
        raise BadCommit(reason)
    return record


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
        """The reader's state after this stretch."""
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
        head = encoding.record_head(raws[last], sender)
        if (reason := _why_not(manifest, tip, links, head)) is not None:
            what = f"log of {short_peer(sender)}: the commit of round {head.commit.round} {reason}"
            raise MessageError(sender, f"{what}; ask another bootstrap node")
        stretch = Stretch(tip.members, tuple(link.packed for link in links[:-1]), head.whole())
        yield stretch
        tip, at = stretch.tip, last + 1


def _why_not(manifest: Manifest, tip: Tip, links: Sequence[_Link], record: RecordHead) -> str | None:
    """Returns why the members after `tip` have not decided this record, the last of `links`; None if they have."""
    commit = record.commit
    follows = (commit.run, commit.round, commit.parent) == (manifest.run_id, tip.round + 1, tip.digest)
    if record.digest != links[-1].digest if links else not follows:
        return "does not follow the one before it"
    return None if is_decided(record, tip.members) else "has too few votes"


_CARRIED = ("decrees", "schedule", "board")
"""What a commit without a decree says as the one before it."""


@dataclass(frozen=True, slots=True)
class _Link:
    """A commit that changes no members of the quorum. `carried`: fields that its successor must repeat."""

    packed: Packed
    digest: str
    carried: tuple[Any, ...]


def _link(manifest: Manifest, tip: Tip, raw: bytes, before: _Link | None) -> _Link | None:
    """The commit in a record that follows `before` or `tip` and changes no access; else None. Unverified otherwise."""
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
        size = sum(int(share[_SIZE]) for contribution in body["contributions"] for share in contribution[_SHARES])
        return _Link(Packed(round + 1, parent, framing.repack(body), size), digest, carried)
    except (framing.FrameError, KeyError, IndexError, TypeError, ValueError, OverflowError):
        return None


_SHARES, _SIZE = 4, 2
"""Where a packed Contribution has its shares, and a packed Share its size (protocol/wire/commit.py)."""


NEWEST = 256
"""Items that are kept as they are: whatever looks at each round again and again looks at these."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Packed:
    """A commit as bytes."""

    round: int
    parent: str
    """The digest of the commit before it."""
    body: bytes
    """What `unpacked` makes the commit of."""
    payload_bytes: int
    """Of all payloads that it names."""


class Kept(Sequence[T]):
    """A sequence with its `most` newest items in memory; `older(index)` gives the others."""

    def __init__(self, older: Callable[[int], T], most: int = NEWEST) -> None:
        self._older = older
        self._most = most
        self._newest: dict[int, T] = {}
        self._count = 0

    def append(self, item: T) -> None:
        self._newest[self._count] = item
        self._newest.pop(self._count - self._most, None)
        self._count += 1

    def append_older(self) -> None:
        """The next one, which `older` gives."""
        self._newest.pop(self._count - self._most, None)
        self._count += 1

    @property
    def old(self) -> int:
        """The number of oldest entries that are not in memory."""
        return self._count - len(self._newest)

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> list[T]: ...

    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            return [self._at(each) for each in range(*index.indices(self._count))]
        found = index + self._count if index < 0 else index
        if not 0 <= found < self._count:
            raise IndexError(index)
        return self._at(found)

    def _at(self, index: int) -> T:
        found = self._newest.get(index)
        return self._older(index) if found is None else found


class Commits(Mapping[int, Commit]):
    """Commits by round, from round 0 on; `most` are kept as objects. Not thread-safe."""

    def __init__(self, most: int = NEWEST) -> None:
        self._packed: list[bytes] = []
        self._bytes = [0]
        self._unpacked = functools.lru_cache(most)(lambda round: unpacked(self._packed[round]))
        self._kept = Kept(self._unpacked, most)

    def bytes_of(self, after: int, round: int) -> int:
        """Of all payloads that the commits after `after` name, as far as `round`."""
        return self._bytes[round + 1] - self._bytes[after + 1]

    def __setitem__(self, round: int, commit: Commit) -> None:
        """The next one. Raises KeyError for any other."""
        if round != len(self):
            raise KeyError(round)
        self._kept.append(commit)
        self._packed.append(framing.pack_message(packed(commit)))
        self._bytes.append(self._bytes[-1] + commit.payload_bytes)

    def head_of(self, round: int) -> CommitHead:
        """The first fields of a commit, which is not unpacked. Raises KeyError."""
        return encoding.commit_head(self._body(round))

    def digest_of(self, round: int) -> str:
        """Its digest, as above."""
        return encoding.commit_digest(self._body(round))

    def _body(self, round: int) -> bytes:
        if round not in self:
            raise KeyError(round)
        return self._packed[round]

    def append(self, commit: Packed) -> None:
        """Appends the next commit, which is unpacked at its first read. Raises KeyError for any other round."""
        if commit.round != len(self):
            raise KeyError(commit.round)
        self._kept.append_older()
        self._packed.append(commit.body)
        self._bytes.append(self._bytes[-1] + commit.payload_bytes)

    def __getitem__(self, round: int) -> Commit:
        if not 0 <= round < len(self):
            raise KeyError(round)
        return self._kept[round]

    def __contains__(self, round: object) -> bool:
        return isinstance(round, int) and 0 <= round < len(self)

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))

    def __reversed__(self) -> Iterator[int]:
        return reversed(range(len(self)))

    def __len__(self) -> int:
        return len(self._packed)


def unpacked(raw: bytes) -> Commit:
    return build(Commit, framing.unpack_message(raw))


class ForkError(Exception):
    """Members decided two commits for one round: the run has no one history, and nothing more is applied."""


class History:
    """The history of one peer. `commits`: by round."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.commits = Commits()

    @property
    def head(self) -> int:
        """The newest round whose commit is known, -1 for none."""
        return len(self.commits) - 1

    @property
    def tip(self) -> Tip:
        """The newest commit, for a reader of what comes after it."""
        newest = self.commits.get(self.head)
        members = board.members_after(self.manifest, newest)
        return Tip(self.head, self.manifest.run_id if newest is None else newest.digest, members)

    def learn_stretch(self, stretch: Stretch) -> bool:
        """As `learn`, for a stretch: its commits that are new, and its last record."""
        tip = self.tip
        new = [commit for commit in stretch.before if commit.round > tip.round]
        if new:
            follows = (new[0].round, new[0].parent) == (tip.round + 1, tip.digest)
            if not follows or stretch.members != tip.members or not is_decided(stretch.last, tip.members):
                return True
            unlawful = access.why_unlawful(self.manifest, self.commits.get(tip.round), unpacked(new[0].body))
            if unlawful is not None:
                raise ForkError(f"the commit of round {new[0].round} {unlawful}")
            for commit in new:
                self.commits.append(commit)
        return self.learn(stretch.last)

    def may_learn(self, record: RecordHead) -> bool:
        """Whether a record can be news, if its signatures are right: those who decide its round voted for it, and it is
        not known."""
        round, commits = record.commit.round, self.commits
        if round > self.head + 1 or (round <= self.head and commits.digest_of(round) == record.digest):
            return round > self.head + 1
        members = commits.head_of(round - 1).members if round > 0 else self.manifest.first_members
        return is_decided(record, members)

    def learn(self, record: Record) -> bool:
        """A record whose signatures are right; whether commits before it are missing. Raises ForkError."""
        commit = record.commit
        if commit.round > self.head + 1:
            return True
        before, here = self.commits.get(commit.round - 1), self.commits.get(commit.round)
        if here == commit or not is_decided(record, board.members_after(self.manifest, before)):
            return False
        if here is not None:
            raise ForkError(f"round {commit.round} has two decided commits")
        if (reason := why_not_next(self.manifest, before, record)) is not None:
            raise ForkError(f"the commit of round {commit.round} {reason}")
        self.commits[commit.round] = commit
        return False
