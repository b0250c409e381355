"""Who may take part in a run: pure, from the manifest, and from the decrees and the invitations in the log.

An open run takes everybody who is not banned; a closed one only whom the manifest or a decree admits, or who has come in by an invitation
(protocol/ledger/invitations.py). The newest decree about a peer counts. A ban of an invitation's key, or of the operator who signed it,
ends the invitation; who has come in by it stays. Nobody who is banned comes in by one. Bootstrap nodes open no session with anybody else, and plan nobody else; voters refuse a plan that does, and `log verify` tells it.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from protocol import identity
from protocol.identity import short_peer
from protocol.ledger import board, invitations, schedule
from protocol.ledger.board import members_after
from protocol.run.manifest import Manifest
from protocol.wire import encoding
from protocol.wire.commit import DOMAIN, Commit, votes_needed
from protocol.wire.decree import ADMIT, BAN, CLOSE, OPEN, SET, Decree, Enacted
from protocol.wire.invitation import MAX_JOINED, Joined

MAX_WAITING = 256
"""Who ask to be let in; others ask again later."""
ASKED_SECONDS = 60.0
"""So long somebody is waiting after asking; a peer asks every few seconds."""


@dataclass(frozen=True)
class Access:
    """Of a run at one time. `decided`: the newest decree about each peer; `newest`: of all. `invited`: the key of the invitation by which each
    peer has come in; `uses`: how many by each."""

    is_open: bool
    listed: frozenset[str]
    decided: Mapping[str, Decree]
    newest: Decree | None = None
    invited: Mapping[str, str] = field(default_factory=dict)
    uses: Mapping[str, int] = field(default_factory=dict)

    def after(self, enacted: Enacted | None, joined: Sequence[Joined] = ()) -> Access:
        """With this decree, if there is one, and then with those who come in."""
        if joined:
            invited, uses = dict(self.invited), Counter(self.uses)
            for one in joined:
                invited[one.peer] = one.invitation.key
                uses[one.invitation.key] += 1
            return dataclasses.replace(self.after(enacted), invited=invited, uses=uses)
        if enacted is None:
            return self
        decree = enacted.decree
        if decree.action == SET or decree.action in board.CHANGES:
            return dataclasses.replace(self, newest=decree)
        if decree.action in (OPEN, CLOSE):
            return dataclasses.replace(self, is_open=decree.action == OPEN, newest=decree)
        return dataclasses.replace(self, decided={**self.decided, decree.subject: decree}, newest=decree)

    def why_not(self, peer: str) -> str | None:
        """Why `peer` may not take part, None if it may."""
        ban, known = self._ban_of(peer), self.decided.get(peer)
        if ban is not None:
            return f"it is banned{ban}"
        if self.is_open or peer in self.listed or peer in self.invited:
            return None
        if known is not None and known.action == ADMIT:
            return None
        return "the run is closed, and it is not admitted"

    def why_not_join(self, joined: Joined) -> str | None:
        """Why a peer may not come in by an invitation, which is valid in itself (`invitations.why_invalid`); None if it may."""
        ban = self._ban_of(joined.peer)
        if ban is not None:
            return f"it is banned{ban}"
        if self.why_not(joined.peer) is None:
            return "it may take part already"
        for ended in (joined.invitation.key, joined.operator):
            ban = self._ban_of(ended)
            if ban is not None:
                return f"its invitation was ended{ban}"
        count, used = joined.invitation.count, self.uses.get(joined.invitation.key, 0)
        return f"its invitation is used up, by {used} of {count}" if used >= count else None

    def is_banned(self, peer: str) -> bool:
        """Whether the newest decree about `peer` keeps it out."""
        return self._ban_of(peer) is not None

    def _ban_of(self, peer: str) -> str | None:
        """The reason of its ban, as it goes on a sentence; None where there is none."""
        known = self.decided.get(peer)
        if known is None or known.action != BAN:
            return None
        return f": {known.reason}" if known.reason else ""


def of(manifest: Manifest, commits: Iterable[Commit] = ()) -> Access:
    """After these commits, which are the log's first."""
    found = Access(manifest.admission.is_open, frozenset(manifest.admission.keys), {})
    for commit in commits:
        found = found.after(commit.decree, commit.joined)
    return found


def why_kept_out(
    manifest: Manifest, now: Access, head: Commit | None, peer: str, joining: Joined | None, time: float
) -> str | None:
    """Why `peer`, which shows this invitation, if any, may not take part after `head` and does not come in by it; None if it may or does.
    `time`: in Unix seconds."""
    why = now.why_not(peer)
    if why is None or joining is None:
        return why
    if joining.peer != peer:
        return "its invitation was shown by another peer"
    refused = now.why_not_join(joining)
    return refused or invitations.why_invalid(manifest, joining, time, board.operators(manifest, head))


def decrees_after(head: Commit | None) -> int:
    """How many there were."""
    return 0 if head is None else head.decrees


def is_signed(operator: str, decree: Decree, signature: bytes) -> bool:
    """Whether this is the operator's signature of the decree, in the one form that a decree has in a commit."""
    return identity.verify(operator, DOMAIN + encoding.encode(decree), signature)


def why_unlawful(manifest: Manifest, head: Commit | None, commit: Commit) -> str | None:
    """Why what `commit` decrees after `head` is not decreed, or lets in who shows no invitation; None where nothing is wrong with either.
    Checks their signatures. How often an invitation was used is for `intruders`."""
    operators = board.operators(manifest, head)
    for joined in commit.joined:
        invalid = invitations.why_invalid(manifest, joined, commit.time, operators)
        if invalid is not None:
            return f"lets in {short_peer(joined.peer)}, and {invalid}"
    enacted, number = commit.decree, decrees_after(head)
    if commit.schedule != schedule.after(head, enacted):
        return "says otherwise how long the run is than was decreed"
    if commit.decrees != number + (enacted is not None):
        return f"counts {commit.decrees} decrees after {number}"
    if commit.board != board.after(manifest, head, enacted):
        return "says otherwise who operates the run than was decreed"
    return None if enacted is None else why_not_decreed(manifest, head, enacted)


def why_not_decreed(manifest: Manifest, head: Commit | None, enacted: Enacted) -> str | None:
    """Why the commit after `head` cannot bring this decree; None if it can. Checks its signatures."""
    number = decrees_after(head)
    if (enacted.decree.run, enacted.decree.number) != (manifest.run_id, number):
        return "has a decree of another time"
    if not enacted.decree.is_sound:
        return "has a decree that says nothing"
    if enacted.decree.schedule is not None:
        refused = schedule.why_not(manifest, head, enacted.decree.schedule)
        if refused is not None:
            return f"has a decree that comes too late, or is none: {refused}"
    if board.is_change(enacted):
        refused = board.why_not(manifest, head, enacted.decree)
        if refused is not None:
            return f"has a decree that cannot be: {refused}"
    members = set(members_after(manifest, head))
    if not set(enacted.signatures) <= members or len(enacted.signatures) < votes_needed(len(members)):
        return "has a decree that too few of its members signed"
    if not all(is_signed(who, enacted.decree, signature) for who, signature in enacted.signatures.items()):
        return "has a decree with a wrong signature"
    return None


def dated(commit: Commit, time: float) -> Commit:
    """`commit` as it is proposed at this time, in Unix seconds: without those whose invitation has expired while they waited."""
    there = tuple(joined for joined in commit.joined if time <= joined.invitation.expires)
    return dataclasses.replace(commit, time=time, joined=there)


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

    def enacted(self, manifest: Manifest, head: Commit | None, living: Collection[str] | None = None) -> Enacted | None:
        """What enough of the members have signed, for the commit after `head`. `living`: the operators that give signs of life; None: it is
        not looked at."""
        members, number = members_after(manifest, head), decrees_after(head)
        there = {who: signed for who, signed in self._signed.items() if who in members and signed[0].number == number}
        for decree, count in Counter(decree for decree, _ in there.values()).most_common(1):
            late = decree.schedule is not None and schedule.why_not(manifest, head, decree.schedule) is not None
            if decree.action in board.CHANGES:
                late = board.why_not(manifest, head, decree) is not None or (
                    living is not None and board.why_too_few(manifest, head, decree, living) is not None
                )
            if count >= votes_needed(len(members)) and not late:
                return Enacted(decree=decree, signatures={w: s for w, (d, s) in sorted(there.items()) if d == decree})
        return None


class Guests:
    """Who has asked a node lately to be let in by an invitation, first come first: part of its machine. They may show anything that is
    valid in itself; whether it lets them in is looked at when they ask (bootstrap/sessions.py), and for the commit."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[Joined, float]] = {}

    def has_place(self, joined: Joined, now: float) -> bool:
        """Whether one more may wait: not more of one invitation than it lets in, and not too many of all."""
        self._waiting = {p: known for p, known in self._waiting.items() if now - known[1] <= ASKED_SECONDS}
        if joined.peer in self._waiting:
            return True
        same = sum(other.invitation.key == joined.invitation.key for other, _ in self._waiting.values())
        return len(self._waiting) < MAX_WAITING and same < joined.invitation.count

    def hear(self, joined: Joined, now: float) -> None:
        """This peer asks, at `now` in steady seconds; it keeps its turn if it has asked before."""
        if self.has_place(joined, now):
            self._waiting[joined.peer] = joined, now

    def next(self, access: Access, now: float) -> tuple[Joined, ...]:
        """Whom the next commit lets in. `access`: with what else it says."""
        found: list[Joined] = []
        for joined, asked in self._waiting.values():
            if len(found) < MAX_JOINED and now - asked <= ASKED_SECONDS and access.why_not_join(joined) is None:
                found.append(joined)
                access = access.after(None, (joined,))
        return tuple(found)
