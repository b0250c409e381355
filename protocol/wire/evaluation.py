"""What a peer has measured of the model: how well it foretells text that nobody trains on, and how it goes on with a piece of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from protocol.wire import framing
from protocol.wire.bounds import BitsPerByte, Count, Loss, PeerId, Round, Signature
from protocol.wire.schema import AtMost

LONGEST_SAMPLE = 300
"""Characters."""


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
    sample: Annotated[str, AtMost(LONGEST_SAMPLE)] = ""
    """The beginning of the held-out text, `⇒`, and how the model goes on, always with the likeliest token; empty where that is not told."""


def evaluation_body(domain: bytes, of: str, said: Evaluation) -> bytes:
    """What the signature is over. `of`: the digest of the commit of that round, from which the state and the run follow."""
    figures = [said.round, said.sequences, said.loss, said.bits_per_byte]
    return domain + framing.pack_message(["evaluation", of, *figures, said.sample])
