"""When a decided commit is told to peers as the round's: once the members that give signs of life know the same one.

Where a majority decides (three and five members), one member that votes twice gives two commits of a round a majority each. So each node
tells the others at once what it has in its log (`Holds`). A node *confirms* its last commit with a signature, when every member that gives
signs of life holds it too, or when a grace is over; a member that let the grace pass is not waited for again until it holds what this node
holds, so a dead member costs nobody a grace in each round. As many confirmations as decide a commit are its *certificate* (`Confirmed`):
peers apply nothing without. Two honest members that hear each other within the grace never confirm two commits of one round.

Where all members vote for each commit (one, two), and where they bear liars (four, seven), what is decided needs no confirmation. Nor does a
commit that takes a member out: enough of those who are left have signed it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from protocol.ledger.ousting import is_ousting
from protocol.wire.ballot import Confirmed
from protocol.wire.commit import Commit, confirmation_body, is_majority, votes_needed

GRACE_HEARTBEATS = 2.0
"""So long a member is waited for that gives signs of life, and does not say that it holds what this node holds."""


def is_needed(members: int, commit: Commit) -> bool:
    """Whether a commit that so many members decide has to be confirmed before peers apply it."""
    return is_majority(members) and not is_ousting(commit.decree)


def is_enough(certificate: Confirmed, members: Iterable[str]) -> bool:
    """Whether enough of these, who decided the commit, have confirmed it; their signatures are right."""
    named = set(members)
    return len(named & certificate.by.keys()) >= votes_needed(len(named))


class Confirming:
    """Part of a node's machine: what is confirmed of its last commit. `now`: seconds of a steady clock."""

    def __init__(self, peer: str, grace: float, now: float) -> None:
        self._peer = peer
        self._grace = grace
        self._since = now
        self._said: dict[str, tuple[int, str]] = {}
        self._late: set[str] = set()
        self._signed: dict[str, tuple[int, str, bytes]] = {}
        self.is_done = False
        """Whether this node has confirmed it."""
        self.certificate: Confirmed | None = None
        """The newest one."""

    def begin(self, now: float) -> None:
        """Another commit is the last one."""
        self._since, self.is_done = now, False

    def holds(self, member: str, round: int, digest: str) -> None:
        """A member says what its last commit is."""
        self._said[member] = (round, digest)

    def hear(
        self, told: Confirmed, members: Iterable[str], verify: Callable[[str, bytes, bytes], bool], run: str
    ) -> None:
        """Confirmations by `members`; those whose signature is right are kept, the newest of each. What many said together may be old: it
        takes the place of older ones only."""
        body = confirmation_body(run, told.round, told.digest)
        for member, signature in told.by.items():
            known = self._signed.get(member)
            if member not in members or (known is not None and known[:2] == (told.round, told.digest)):
                continue
            if known is not None and len(told.by) > 1 and known[0] >= told.round:
                continue
            if verify(member, body, signature):
                self._signed[member] = (told.round, told.digest, signature)

    def is_due(self, commit: Commit, waited: Iterable[str], now: float) -> bool:
        """Whether this node confirms `commit`, its last one, now. `waited`: the other members that give signs of life."""
        here = (commit.round, commit.digest)
        agree = {m for m in waited if self._said.get(m) == here}
        self._late -= agree
        missing = set(waited) - agree - self._late
        if self.is_done or (missing and now - self._since < self._grace):
            return False
        self._late |= missing
        return True

    def confirm(self, commit: Commit, sign: Callable[[bytes], bytes]) -> Confirmed:
        """This node's own."""
        self.is_done = True
        signature = sign(confirmation_body(commit.run, commit.round, commit.digest))
        self._signed[self._peer] = (commit.round, commit.digest, signature)
        return Confirmed(round=commit.round, digest=commit.digest, by={self._peer: signature})

    def own(self, commit: Commit | None) -> Confirmed | None:
        """This node's own of `commit`, its last one, to be sent again; None before it has confirmed that."""
        known = self._signed.get(self._peer)
        if commit is None or known is None or known[:2] != (commit.round, commit.digest):
            return None
        return Confirmed(round=commit.round, digest=commit.digest, by={self._peer: known[2]})

    def newest(self, members: Iterable[str]) -> tuple[int, str] | None:
        """The newest commit that enough of these have confirmed: its round and digest."""
        named = set(members)
        counts = Counter(said[:2] for member, said in self._signed.items() if member in named)
        return max((said for said, count in counts.items() if count >= votes_needed(len(named))), default=None)

    def certified(self, commit: Commit, members: Iterable[str]) -> Confirmed | None:
        """The certificate of `commit`, once: when this node has confirmed it and enough others have."""
        known = self.certificate
        if not self.is_done or (known is not None and (known.round, known.digest) == (commit.round, commit.digest)):
            return None
        by = {m: s[2] for m, s in sorted(self._signed.items()) if s[:2] == (commit.round, commit.digest)}
        found = Confirmed(round=commit.round, digest=commit.digest, by=by)
        if not is_enough(found, members):
            return None
        self.certificate = found
        return found
