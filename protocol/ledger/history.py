"""What a peer takes for the run's history: pure, from the records and certificates that bootstrap nodes send it.

A commit counts once enough members have decided it and, where it has to be (protocol/ledger/confirming.py), a certificate of it or of a later
one has come. Until then it is only known. A round may have *rivals*: other decided commits, of which one may be confirmed yet. A commit
that takes an operator out (protocol/ledger/ousting.py) counts instead of what counted for its round before; what came after that is undone.
"""

from __future__ import annotations

from protocol.ledger import access, confirming, ousting
from protocol.ledger.kept import Commits, Packed, unpacked
from protocol.ledger.stretches import Stretch, Tip
from protocol.ledger.validation import why_not_next
from protocol.run.manifest import Manifest
from protocol.wire.ballot import Confirmed
from protocol.wire.commit import Commit, Record, is_decided

MAX_RIVALS = 8
"""Decided commits that do not count: each takes a vote of a majority."""


class ForkError(Exception):
    """A majority decided two commits for one round: the run has no one history, and nothing more is applied."""


class History:
    """One peer's. `commits`: those that count, by round. `undone`: the last round that stays, where others were undone since it was looked at."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.commits = Commits()
        self.undone: int | None = None
        self._known: dict[int, Commit | Packed] = {}
        self.rivals: dict[str, Commit] = {}
        self._waiting: Confirmed | None = None

    @property
    def head(self) -> int:
        """The newest round up to which every commit counts, -1 for none."""
        return len(self.commits) - 1

    @property
    def known(self) -> int:
        """The newest round up to which every commit is known."""
        return next(reversed(self._known), self.head)

    @property
    def is_split(self) -> bool:
        """Whether the round after the last that counts has two decided commits."""
        return any(c.round == self.head + 1 for c in self.rivals.values()) and self.known > self.head

    @property
    def tip(self) -> Tip:
        """The newest commit that is known, for whoever reads what comes after it."""
        newest = self._at(self.known)
        members = ousting.members_after(self.manifest, newest)
        return Tip(self.known, self.manifest.run_id if newest is None else newest.digest, members)

    def _at(self, round: int) -> Commit | None:
        return self.commits.get(round) or self._known_at(round)

    def _known_at(self, round: int) -> Commit | None:
        found = self._known.get(round)
        return unpacked(found.body) if isinstance(found, Packed) else found

    def learn_stretch(self, stretch: Stretch) -> int | None:
        """As `learn`, of a stretch of the log: what is new here of the commits that its last record proves, and that record."""
        tip, last = self.tip, stretch.last.commit
        new = [commit for commit in stretch.before if commit.round > tip.round]
        if new:
            follows = (new[0].round, new[0].parent) == (tip.round + 1, tip.digest)
            if not follows or stretch.members != tip.members or not is_decided(stretch.last, tip.members):
                return self.head
            unlawful = access.why_unlawful(self.manifest, self._at(tip.round), unpacked(new[0].body))
            if unlawful is not None:
                raise ForkError(f"the commit of round {new[0].round} {unlawful}")
            is_needed = confirming.is_needed(len(tip.members), last)
            for commit in new:
                if is_needed or self._known:
                    self._known[commit.round] = commit
                else:
                    self.commits.append(commit)
        return self.learn(stretch.last)

    def learn(self, record: Record) -> int | None:
        """A record whose signatures are right. The round after which the log is to be asked for, if something is missing. Raises ForkError."""
        commit = record.commit
        if commit.round > self.known + 1:
            return self.known
        before, here = self._at(commit.round - 1), self._at(commit.round)
        members = ousting.deciders(self.manifest, before, commit.decree)
        if here == commit or not is_decided(record, members):
            return None
        reason = why_not_next(self.manifest, before, record)
        supersedes = here is not None and len(commit.out) > len(here.out)
        if not confirming.is_needed(len(members), commit):
            return self._decided(commit, here, reason, supersedes)
        if before is not None and commit.parent != before.digest:
            return self.head if commit.round > self.head + 1 else None  # a rival's successor
        if here is not None:
            if reason is None:
                self.rivals[commit.digest] = commit
                self.rivals = dict(list(self.rivals.items())[-MAX_RIVALS:])
        elif reason is not None:
            raise ForkError(f"the commit of round {commit.round} {reason}")
        else:
            self._known[commit.round] = commit
        self._look()
        return None

    def _decided(self, commit: Commit, here: Commit | None, reason: str | None, supersedes: bool) -> int | None:
        """A commit that needs no certificate."""
        if supersedes and reason is None:
            self._take(commit)
        elif here is not None and ousting.is_ousting(commit.decree):
            pass  # its forerunner is not the one that counts here, or it comes too late
        elif here is not None and commit.round > self.head:
            return None  # it follows a rival
        elif here is not None:
            if len(here.out) > len(commit.out):
                return None  # it was undone
            raise ForkError(f"round {commit.round} has two decided commits")
        elif reason is not None and self.known > self.head:
            return self.head  # it follows a rival
        elif reason is not None:
            raise ForkError(f"the commit of round {commit.round} {reason}")
        else:
            self._take(commit)
        return None

    def confirm(self, told: Confirmed) -> int | None:
        """A certificate whose signatures are right. The round after which the log is to be asked for, if its commit is not known. Raises
        ForkError."""
        self._waiting = told
        self._look()
        return self.known if self._waiting is not None and told.round > self.known else None

    def _look(self) -> None:
        """Whether the commit is known whose certificate waits."""
        told = self._waiting
        here = None if told is None else self._at(told.round)
        found = here if here is not None and told is not None and here.digest == told.digest else None
        found = found or (self.rivals.get(told.digest) if told is not None else None)
        if told is None or found is None or found.round != told.round:
            return
        self._waiting = None
        members = ousting.deciders(self.manifest, self._at(found.round - 1), found.decree)
        if not confirming.is_enough(told, members) or found == self.commits.get(found.round):
            return
        if here is not None and found.round <= self.head:
            if len(found.out) < len(here.out):
                return
            raise ForkError(f"round {found.round} has two confirmed commits")
        self._take(found)

    def _take(self, commit: Commit) -> None:
        """This one counts, and what it follows; what is there of its round and later ones does not, where it is another one."""
        if self._known_at(commit.round) != commit:
            self._known = {r: c for r, c in self._known.items() if r < commit.round}
        if commit.round <= self.head:
            for round in range(self.head, commit.round - 1, -1):
                del self.commits[round]
            self.undone = commit.round - 1 if self.undone is None else min(self.undone, commit.round - 1)
        for round in sorted(r for r in self._known if r < commit.round):
            known = self._known.pop(round)
            if isinstance(known, Packed):
                self.commits.append(known)
            else:
                self.commits[round] = known
        self._known.pop(commit.round, None)
        self.commits[commit.round] = commit
        self.rivals = {d: c for d, c in self.rivals.items() if c.round > commit.round}
