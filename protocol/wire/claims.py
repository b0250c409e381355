"""Claims of peers that a commit may carry: held-out losses and scores, each with the bytes that are signed.

A claim is signed by its peer and proves nothing by itself (docs/trust.md). protocol/ledger/claims.py says when a commit
may carry one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from protocol.wire import framing
from protocol.wire.bounds import BitsPerByte, Count, Gain, Loss, PeerId, Round, Signature
from protocol.wire.schema import AtMost, packed, row

LONGEST_SAMPLE = 300
"""Characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The held-out loss of the state after `round`, as `peer` says that it measured it. It is a claim, not a proof
    (docs/trust.md)."""

    peer: PeerId
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
    """The beginning of the held-out text, `⇒`, and how the model goes on, always with the likeliest token; empty where
    that is not told."""


def evaluation_body(domain: bytes, of: str, said: Evaluation) -> bytes:
    """The signed bytes. of: the digest of that round's commit, from which state and run follow."""
    figures = [said.round, said.sequences, said.loss, said.bits_per_byte]
    return domain + framing.pack_message(["evaluation", of, *figures, said.sample])


MAX_MARKS = 8


@row
@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """The worth of one contribution, as a scorer measured it (protocol/ledger/scoring.py)."""

    replica: Count
    """Whose it is: the number of the replica in the round's plan."""
    assigned: Gain
    """By so much its update makes the loss less, in nats per token, on text that the replica was given to train on."""
    other: Gain
    """The same on held-out text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The marks that `peer` gives to contributions of the commit of `round`. They are a claim, not a proof
    (docs/trust.md)."""

    peer: PeerId
    round: Round
    """The round whose contributions they are."""
    marks: Annotated[tuple[Mark, ...], AtMost(MAX_MARKS)]
    """One for each that it was to score and could."""
    signature: Signature
    """Of `score_body`."""


def score_body(domain: bytes, of: str, said: Score) -> bytes:
    """The signed bytes. of: the digest of that round's commit, from which run, state and updates follow."""
    return domain + framing.pack_message(["score", of, said.round, packed(said.marks)])


Claim = Evaluation | Score
