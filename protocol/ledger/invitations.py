"""Invitations into a closed run: pure.

An operator makes a fresh key pair, signs a certificate of its public half (run, how many, until when), and gives both to friends
in a line (`Ticket`). Whoever has the secret half signs its own peer id with it (`Joined`) and shows that to a node in its Hello. Who overhears
that has no use for it: it names the peer. The next commit says it (Commit.joined), and from then on the peer may take part
(protocol/ledger/access.py).

One operator's signature is enough, so an invitation is as good as that operator. What anybody can check of it without the log is here:
run, signatures, and that the commit is not of a later time than it holds. How often it was used, and who is banned, follows from the log.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Collection
from dataclasses import dataclass, field

from protocol import identity
from protocol.errors import UsageError
from protocol.identity import Identity
from protocol.run.manifest import Manifest
from protocol.wire import framing
from protocol.wire.commit import DOMAIN
from protocol.wire.invitation import Invitation, Joined
from protocol.wire.schema import SchemaError, build

LONGEST_TICKET = 1024
"""Characters of one in a line."""


def certificate_body(invitation: Invitation) -> bytes:
    """What the operator's signature is over."""
    known = [invitation.run, invitation.key, invitation.expires, invitation.count, invitation.reason]
    return DOMAIN + framing.pack_message(["invitation", *known])


def proof_body(invitation: Invitation, peer: str) -> bytes:
    """What the signature of the invitation's key is over, with which `peer` comes in."""
    return DOMAIN + framing.pack_message(["join", invitation.run, invitation.key, peer])


def why_invalid(manifest: Manifest, joined: Joined, time: float, operators: Collection[str]) -> str | None:
    """Why this lets nobody into the run, which these operate, at this time (Unix seconds), whatever else the log says; None if it may."""
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
    """What friends are given: an invitation that `operator` has signed, and the secret `seed` of its key."""

    invitation: Invitation
    operator: str
    signature: bytes
    seed: bytes = field(repr=False)

    def joined(self, peer: str) -> Joined:
        """What `peer` shows."""
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
    """A new invitation; `seed`: 32 random bytes that nobody else has."""
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
