"""What a peer has measured of the model: how well it foretells text that nobody trains on."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.wire import framing
from protocol.wire.bounds import BitsPerByte, Count, Loss, PeerId, Round, Signature


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The held-out loss of the state after `round`, as `peer` says that it measured it. It is a claim, not a proof (docs/trust.md)."""

    peer: PeerId
    """Who says so."""
    round: Round
    """After which round."""
    sequences: Count
    """On so many sequences of the corpus's held-out part, the first ones."""
    loss: Loss
    """The mean, in nats per token."""
    bits_per_byte: BitsPerByte
    """The same per UTF-8 byte of text."""
    signature: Signature
    """Of `evaluation_body`."""


def evaluation_body(domain: bytes, of: str, said: Evaluation) -> bytes:
    """What the signature is over. `of`: the digest of the commit of that round, from which the state and the run follow."""
    return domain + framing.pack_message(["evaluation", of, said.round, said.sequences, said.loss, said.bits_per_byte])
