"""What a peer has found when it trained another one's contribution again."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.wire import framing
from protocol.wire.bounds import Agreement, Number, PeerId, Round, Signature


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """How far the contribution of `replica` to `round` agrees with what `peer` learned from the same text. It is a claim (docs/trust.md)."""

    peer: PeerId
    """Who says so."""
    round: Round
    """Of the contribution."""
    replica: Number
    """Whose it is."""
    agreement: Agreement
    """What was found (protocol/ledger/audits.py)."""
    signature: Signature
    """Of `audit_body`."""


def audit_body(domain: bytes, of: str, said: Audit) -> bytes:
    """What the signature is over. `of`: the digest of the commit of that round, which names the contribution and the run."""
    return domain + framing.pack_message(["audit", of, said.round, said.replica, said.agreement])
