"""The proof that a member of the quorum voted for two commits of one round in one ballot: both signatures, which anybody can check.

A vote is for a commit's digest; who follows the rules gives one in a ballot (protocol/rounds/acceptor.py). Operators are taken out by such
proofs (protocol/rounds/ousting.py), and the rounds that are decided anew after that are of another *term*: how many were taken out before.
So what an honest member voted for in the term before is never a proof against it.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol import identity
from protocol.wire import framing
from protocol.wire.bounds import Ballot, Count, PeerId, Round, RunId, Signature

DOMAIN = b"potluck/1/"
"""What every signed text of the protocol begins with."""


def vote_body(run: str, term: int, round: int, ballot: int, digest: str) -> bytes:
    """What a vote's signature is over."""
    return DOMAIN + framing.pack_message(["vote", run, term, round, ballot, digest])


@dataclass(frozen=True, slots=True, kw_only=True)
class DoubleVote:
    """`peer` signed votes for the commits with both digests, of one round of one term, in one ballot."""

    peer: PeerId
    """Who."""
    term: Count
    """How many operators had been taken out before."""
    round: Round
    """Of both commits."""
    ballot: Ballot
    """Of both votes."""
    digest: RunId
    """Of the one commit."""
    signature: Signature
    """The vote for it."""
    other: RunId
    """The other commit's digest."""
    signed: Signature
    """The vote for it."""

    def is_true(self, run: str) -> bool:
        """Whether it proves what it says, of this run."""
        return self.digest != self.other and all(
            identity.verify(self.peer, vote_body(run, self.term, self.round, self.ballot, digest), signature)
            for digest, signature in ((self.digest, self.signature), (self.other, self.signed))
        )
