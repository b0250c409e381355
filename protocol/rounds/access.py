"""Who may take part in a run: pure, from the manifest and the decrees in the log.

An open run takes everybody who is not banned; a closed one only whom the manifest or a decree admits. The newest decree about a peer
counts. Bootstrap nodes open no session with anybody else, and plan nobody else; voters refuse a plan that does, and `log verify` tells it.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from protocol import identity
from protocol.identity import short_peer
from protocol.run.manifest import Manifest
from protocol.wire import encoding
from protocol.wire.commit import DOMAIN, Commit, votes_needed
from protocol.wire.decree import ADMIT, BAN, CLOSE, OPEN, Decree, Enacted


@dataclass(frozen=True)
class Access:
    """Of a run at one time. `decided`: the newest decree about each peer; `newest`: of all."""

    is_open: bool
    listed: frozenset[str]
    decided: Mapping[str, Decree]
    newest: Decree | None = None

    def after(self, enacted: Enacted | None) -> Access:
        """With this decree, if there is one."""
        if enacted is None:
            return self
        decree = enacted.decree
        if decree.action in (OPEN, CLOSE):
            return dataclasses.replace(self, is_open=decree.action == OPEN, newest=decree)
        return dataclasses.replace(self, decided={**self.decided, decree.subject: decree}, newest=decree)

    def why_not(self, peer: str) -> str | None:
        """Why `peer` may not take part, None if it may."""
        known = self.decided.get(peer)
        if known is not None and known.action == BAN:
            return f"it is banned: {known.reason}" if known.reason else "it is banned"
        if self.is_open or peer in self.listed or (known is not None and known.action == ADMIT):
            return None
        return "the run is closed, and it is not admitted"


def of(manifest: Manifest, commits: Iterable[Commit] = ()) -> Access:
    """After these commits, which are the log's first."""
    found = Access(manifest.admission.is_open, frozenset(manifest.admission.keys), {})
    for commit in commits:
        found = found.after(commit.decree)
    return found


def members_after(manifest: Manifest, head: Commit | None) -> tuple[str, ...]:
    """Who decides what comes next after `head`."""
    return manifest.first_members if head is None else head.members


def decrees_after(head: Commit | None) -> int:
    """How many there were."""
    return 0 if head is None else head.decrees


def is_signed(operator: str, decree: Decree, signature: bytes) -> bool:
    """Whether this is the operator's signature of the decree, in the one form that a decree has in a commit."""
    return identity.verify(operator, DOMAIN + encoding.encode(decree), signature)


def why_unlawful(manifest: Manifest, head: Commit | None, commit: Commit) -> str | None:
    """Why what `commit` decrees after `head` is not decreed; None if it is, or if it decrees nothing. Checks its signatures."""
    enacted, number = commit.decree, decrees_after(head)
    if commit.decrees != number + (enacted is not None):
        return f"counts {commit.decrees} decrees after {number}"
    if enacted is None:
        return None
    if (enacted.decree.run, enacted.decree.number) != (manifest.run_id, number):
        return "has a decree of another time"
    if not enacted.decree.is_sound:
        return "has a decree that says nothing"
    members = set(members_after(manifest, head))
    if not set(enacted.signatures) <= members or len(enacted.signatures) < votes_needed(len(members)):
        return "has a decree that too few of its members signed"
    if not all(is_signed(who, enacted.decree, signature) for who, signature in enacted.signatures.items()):
        return "has a decree with a wrong signature"
    return None


def intruders(access: Access, commit: Commit) -> Sequence[str]:
    """What a plan of somebody who may not take part is called, as in protocol/rounds/validation.py. `access`: before the commit."""
    if commit.plan is None:
        return []
    now = access.after(commit.decree)
    return [f"plans {short_peer(p)}, and {why}" for p in sorted(commit.plan.peers) if (why := now.why_not(p))]


class Petitions:
    """What operators have signed for the next decree, at most one thing each: part of a node's machine."""

    def __init__(self) -> None:
        self._signed: dict[str, tuple[Decree, bytes]] = {}

    def hear(self, operator: str, decree: Decree, signature: bytes) -> None:
        """An operator's newest wish, which it has signed (`is_signed`)."""
        self._signed[operator] = decree, signature

    def signers(self, decree: Decree) -> tuple[str, ...]:
        """Who has signed this."""
        return tuple(sorted(who for who, (known, _) in self._signed.items() if known == decree))

    def enacted(self, manifest: Manifest, head: Commit | None) -> Enacted | None:
        """What enough of the members have signed, for the commit after `head`."""
        members, number = members_after(manifest, head), decrees_after(head)
        there = {who: signed for who, signed in self._signed.items() if who in members and signed[0].number == number}
        for decree, count in Counter(decree for decree, _ in there.values()).most_common(1):
            if count >= votes_needed(len(members)):
                return Enacted(decree=decree, signatures={w: s for w, (d, s) in sorted(there.items()) if d == decree})
        return None
