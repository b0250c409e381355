"""What lets somebody into a closed run: an operator's invitation, and what a peer shows who has it (protocol/ledger/invitations.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from protocol.wire.bounds import Count, PeerId, RunId, Signature
from protocol.wire.schema import AtMost, Within, row

MOST_GUESTS = 1000
"""Of one invitation."""
LONGEST_NOTE = 64
MAX_JOINED = 16
"""Of one commit; the others come with the next."""


@row
@dataclass(frozen=True, slots=True, kw_only=True)
class Invitation:
    """What an operator signs: the first `count` peers who show that they hold its key may take part."""

    run: RunId
    """The run's id."""
    key: PeerId
    """Its public key, which is what it is called by, too."""
    expires: Count
    """Unix seconds; it holds up to then."""
    count: Annotated[int, Within(1, MOST_GUESTS)]
    """How many peers it lets in."""
    reason: Annotated[str, AtMost(LONGEST_NOTE)] = ""
    """For whom or what, for a reader."""


@row
@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """One peer that it lets in, with all that shows it to anybody."""

    invitation: Invitation
    """The invitation."""
    operator: PeerId
    """Who has signed the invitation."""
    signature: Signature
    """The operator's."""
    peer: PeerId
    """Who comes in."""
    proof: Signature
    """The invitation's key's, for this peer and nobody else."""
