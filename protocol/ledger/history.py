"""A peer's copy of the run's history: pure, from the records that bootstrap nodes send it.

A commit counts once enough members have decided it. Two decided commits of one round have more than f liars among the members: then the peer
stops (`ForkError`) and applies neither.
"""

from __future__ import annotations

from protocol.ledger import access, board
from protocol.ledger.kept import Commits, unpacked
from protocol.ledger.stretches import Stretch, Tip
from protocol.ledger.validation import why_not_next
from protocol.run.manifest import Manifest
from protocol.wire.commit import Record, is_decided


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
        """As `learn`, of a stretch of the log: what is new here of the commits that its last record proves, and that record."""
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
        reason = why_not_next(self.manifest, before, record)
        if reason is not None:
            raise ForkError(f"the commit of round {commit.round} {reason}")
        self.commits[commit.round] = commit
        return False
