"""Access to a run: computed from the manifest, the decrees and the invitations in the log. Pure.

An open run admits every peer that is not banned; a closed one only peers that the manifest, a decree or an invitation
admits. The newest decree about a peer counts. A ban of an invitation's key, or of the operator that signed it, ends the
invitation.

*Invitations.* An operator makes a fresh key pair, signs a certificate of the public key (run, count, expiry), and hands
both over in one line (`Ticket`). The holder signs its own peer id with the secret key (`Joined`) and shows that in its
Hello; the next commit records it.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from protocol import identity
from protocol.errors import UsageError
from protocol.identity import Identity, short_peer
from protocol.ledger import board, schedule
from protocol.ledger.board import members_after
from protocol.run.manifest import Manifest
from protocol.wire import encoding, framing
from protocol.wire.commit import DOMAIN, Commit, votes_needed
from protocol.wire.decree import ADMIT, BAN, CLOSE, MAX_JOINED, OPEN, SET, Decree, Enacted, Invitation, Joined
from protocol.wire.schema import SchemaError, build

LONGEST_TICKET = 1024


def certificate_body(invitation: Invitation) -> bytes:
    """Returns the bytes that the operator signs."""
    known = [invitation.run, invitation.key, invitation.expires, invitation.count, invitation.reason]
    return DOMAIN + framing.pack_message(["invitation", *known])


def proof_body(invitation: Invitation, peer: str) -> bytes:
    """Returns the bytes that the invitation's key signs to admit `peer`."""
    return DOMAIN + framing.pack_message(["join", invitation.run, invitation.key, peer])


def why_invalid(manifest: Manifest, joined: Joined, time: float, operators: Collection[str]) -> str | None:
    """Why the invitation is invalid at `time` (Unix seconds), without the log; None if it may be valid."""
    invitation = joined.invitation
    if invitation.run != manifest.run_id:
        return "its invitation is of another run"
    if joined.operator not in operators:
        return "its invitation is of nobody who operates the run"
    if time > invitation.expires:
        return "its invitation has expired"
    if not identity.verify(joined.operator, certificate_body(invitation), joined.signature):
        return "its invitation is not what the operator signed"
    if not identity.verify(invitation.key, proof_body(invitation, joined.peer), joined.proof):
        return "it does not hold the key of its invitation"
    return None


@dataclass(frozen=True, slots=True)
class Ticket:
    """An invitation that `operator` has signed, with the secret `seed` of its key; operators give it to friends."""

    invitation: Invitation
    operator: str
    signature: bytes
    seed: bytes = field(repr=False)

    def joined(self, peer: str) -> Joined:
        proof = Identity(self.seed).sign(proof_body(self.invitation, peer))
        return Joined(
            invitation=self.invitation, operator=self.operator, signature=self.signature, peer=peer, proof=proof
        )

    def text(self) -> str:
        """As it stands in a line after the run's id, which it does not repeat."""
        made = self.invitation
        raw = framing.pack_message([self.seed, self.operator, self.signature, made.expires, made.count, made.reason])
        return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def issue(operator: Identity, seed: bytes, run: str, *, expires: int, count: int, reason: str = "") -> Ticket:
    """Returns a new invitation; `seed`: 32 secret random bytes."""
    key = Identity(seed).peer_id
    invitation = Invitation(run=run, key=key, expires=expires, count=count, reason=reason)
    return Ticket(invitation, operator.peer_id, operator.sign(certificate_body(invitation)), seed)


def read_ticket(text: str, run: str) -> Ticket:
    """The ticket in a line of `run`, whose signature is not checked. Raises UsageError."""
    wrong = UsageError("RUN: the invitation after the run id is cut off or changed; copy the whole line")
    if len(text) > LONGEST_TICKET:
        raise wrong
    try:
        raw = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        seed, operator, signature, expires, count, reason = framing.unpack_message(raw)
        key = Identity(seed).peer_id
        joined = build(
            Joined, {"invitation": [run, key, expires, count, reason], "operator": operator, "signature": signature,
                     "peer": "", "proof": b""},
        )  # fmt: skip
    except (binascii.Error, framing.FrameError, SchemaError, ValueError, TypeError):
        raise wrong from None
    return Ticket(joined.invitation, joined.operator, joined.signature, seed)


MAX_WAITING = 256
"""Who ask to be let in; others ask again later."""
ASKED_SECONDS = 60.0
"""So long somebody is waiting after asking; a peer asks every few seconds."""


@dataclass(frozen=True)
class Access:
    """Access at one time.

    decided: the newest decree about each peer; newest: of all
    invited: the key of the invitation that admitted each peer; uses: number of peers by key
    """

    is_open: bool
    listed: frozenset[str]
    decided: Mapping[str, Decree]
    newest: Decree | None = None
    invited: Mapping[str, str] = field(default_factory=dict)
    uses: Mapping[str, int] = field(default_factory=dict)

    def after(self, enacted: Enacted | None, joined: Sequence[Joined] = ()) -> Access:
        """Returns the access rules after this decree, if any, and then these admissions."""
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
        """Returns the reason to refuse `joined`, whose signatures are valid (`why_invalid`); None if it is admitted."""
        if (ban := self._ban_of(joined.peer)) is not None:
            return f"it is banned{ban}"
        if self.why_not(joined.peer) is None:
            return "it may take part already"
        for ended in (joined.invitation.key, joined.operator):
            if (ban := self._ban_of(ended)) is not None:
                return f"its invitation was ended{ban}"
        count, used = joined.invitation.count, self.uses.get(joined.invitation.key, 0)
        return f"its invitation is used up, by {used} of {count}" if used >= count else None

    def is_banned(self, peer: str) -> bool:
        return self._ban_of(peer) is not None

    def _ban_of(self, peer: str) -> str | None:
        """The reason of its ban, as it goes on a sentence; None where there is none."""
        known = self.decided.get(peer)
        if known is None or known.action != BAN:
            return None
        return f": {known.reason}" if known.reason else ""


def of(manifest: Manifest, commits: Iterable[Commit] = ()) -> Access:
    found = Access(manifest.admission.is_open, frozenset(manifest.admission.keys), {})
    for commit in commits:
        found = found.after(commit.decree, commit.joined)
    return found


def why_kept_out(
    manifest: Manifest, now: Access, head: Commit | None, peer: str, joining: Joined | None, time: float
) -> str | None:
    """Why `peer` with this invitation, if any, is not admitted after `head` at `time` (Unix seconds); None if it is."""
    why = now.why_not(peer)
    if why is None or joining is None:
        return why
    if joining.peer != peer:
        return "its invitation was shown by another peer"
    refused = now.why_not_join(joining)
    return refused or why_invalid(manifest, joining, time, board.operators(manifest, head))


def decrees_after(head: Commit | None) -> int:
    return 0 if head is None else head.decrees


def is_signed(operator: str, decree: Decree, signature: bytes) -> bool:
    """Returns whether this is the operator's signature of the decree, in the one form that a decree has in a commit."""
    return identity.verify(operator, DOMAIN + encoding.encode(decree), signature)


def why_unlawful(manifest: Manifest, head: Commit | None, commit: Commit) -> str | None:
    """Why the decree or an invitation of `commit` is invalid, signatures included; None if all are valid."""
    operators = board.operators(manifest, head)
    for joined in commit.joined:
        if (invalid := why_invalid(manifest, joined, commit.time, operators)) is not None:
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
    wanted = enacted.decree.schedule
    if wanted is not None and (refused := schedule.why_not(manifest, head, wanted)) is not None:
        return f"has a decree that comes too late, or is none: {refused}"
    if board.is_change(enacted) and (refused := board.why_not(manifest, head, enacted.decree)) is not None:
        return f"has a decree that cannot be: {refused}"
    members = set(members_after(manifest, head))
    if not set(enacted.signatures) <= members or len(enacted.signatures) < votes_needed(len(members)):
        return "has a decree that too few of its members signed"
    if not all(is_signed(who, enacted.decree, signature) for who, signature in enacted.signatures.items()):
        return "has a decree with a wrong signature"
    return None


def dated(commit: Commit, time: float) -> Commit:
    """`commit` as proposed at `time` (Unix seconds), without invitations that have expired."""
    there = tuple(joined for joined in commit.joined if time <= joined.invitation.expires)
    return dataclasses.replace(commit, time=time, joined=there)


class SignedDecrees:
    """Operators' signatures for the next decree, at most one an operator: part of a node's state machine."""

    def __init__(self) -> None:
        self._signed: dict[str, tuple[Decree, bytes]] = {}

    def add(self, operator: str, decree: Decree, signature: bytes) -> None:
        """An operator's newest wish, which it has signed (`is_signed`)."""
        self._signed[operator] = decree, signature

    def signers(self, decree: Decree) -> tuple[str, ...]:
        return tuple(sorted(who for who, (known, _) in self._signed.items() if known == decree))

    def enacted(self, manifest: Manifest, head: Commit | None, living: Collection[str] | None = None) -> Enacted | None:
        """The decree that enough members signed, for the commit after `head`. living: operators alive, None: all."""
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


class PendingInvitations:
    """Peers that asked a node to be let in, first come first. Uses and bans are checked for each commit."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[Joined, float]] = {}

    def has_place(self, joined: Joined, now: float) -> bool:
        """Returns whether one more may wait: not more of one invitation than it lets in, and not too many of all."""
        self._waiting = {p: known for p, known in self._waiting.items() if now - known[1] <= ASKED_SECONDS}
        if joined.peer in self._waiting:
            return True
        same = sum(other.invitation.key == joined.invitation.key for other, _ in self._waiting.values())
        return len(self._waiting) < MAX_WAITING and same < joined.invitation.count

    def add(self, joined: Joined, now: float) -> None:
        """This peer asks, at `now` in steady seconds; it keeps its turn if it has asked before."""
        if self.has_place(joined, now):
            self._waiting[joined.peer] = joined, now

    def next(self, access: Access, now: float) -> tuple[Joined, ...]:
        """Returns the admissions of the next commit. `access`: after the commit's decree."""
        found: list[Joined] = []
        for joined, asked in self._waiting.values():
            if len(found) < MAX_JOINED and now - asked <= ASKED_SECONDS and access.why_not_join(joined) is None:
                found.append(joined)
                access = access.after(None, (joined,))
        return tuple(found)
