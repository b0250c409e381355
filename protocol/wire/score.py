"""What a peer has found of others' work: how much better the model foretells text with an update than without it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from protocol.wire import framing
from protocol.wire.bounds import Count, Gain, PeerId, Round, Signature
from protocol.wire.schema import AtMost, packed, row

MAX_MARKS = 8
"""That one peer gives in one round."""


@row
@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """What one contribution is worth, as somebody measured it (protocol/ledger/scoring.py)."""

    replica: Count
    """Whose it is: the number of the replica in the round's plan."""
    assigned: Gain
    """By so much its update makes the loss less, in nats per token, on text that the replica was given to train on."""
    other: Gain
    """The same on held-out text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The marks that `peer` gives to contributions of the commit of `round`. They are a claim, not a proof (docs/trust.md)."""

    peer: PeerId
    """Who says so."""
    round: Round
    """The round whose contributions they are."""
    marks: Annotated[tuple[Mark, ...], AtMost(MAX_MARKS)]
    """One for each that it was to score and could."""
    signature: Signature
    """Of `score_body`."""


def score_body(domain: bytes, of: str, said: Score) -> bytes:
    """What the signature is over. `of`: the digest of the commit of that round, from which the run, the state and the updates follow."""
    return domain + framing.pack_message(["score", of, said.round, packed(said.marks)])
