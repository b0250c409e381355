"""The proof that a member of the quorum broke the rules of voting in a round: two of its signatures, which anybody can check.

Who follows the rules (protocol/quorum/acceptor.py) votes for one commit in a ballot. It may vote for another one in a later ballot, but says before
what it had accepted (protocol/wire/grounds.py). So two votes in one ballot are a proof, and so are a vote and a promise of a later ballot
that denies it. Operators are taken out by such proofs (protocol/ledger/ousting.py), and the rounds that are decided anew after that are of another *term*: how many were taken out before.
So what an honest member voted for in the term before is never a proof against it.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol import identity
from protocol.wire import framing
from protocol.wire.bounds import Ballot, Count, PeerId, Round, RunId, Signature
from protocol.wire.grounds import DOMAIN, promise_body


def vote_body(run: str, term: int, round: int, ballot: int, digest: str) -> bytes:
    """What a vote's signature is over."""
    return DOMAIN + framing.pack_message(["vote", run, term, round, ballot, digest])


@dataclass(frozen=True, slots=True, kw_only=True)
class DoubleVote:
    """`peer` signed a vote for one commit of a round of one term, and either a vote for another one in the same ballot, or a promise of a later
    ballot that denies the vote: it says that nothing, or something older, or another commit had been accepted."""

    peer: PeerId
    """Who."""
    term: Count
    """How many operators had been taken out before."""
    round: Round
    """Of both."""
    ballot: Ballot
    """Of the vote."""
    digest: RunId
    """Of the commit that it is for."""
    signature: Signature
    """The vote."""
    other: RunId
    """The other commit's digest; nothing where a promise says that none had been accepted."""
    signed: Signature
    """The other vote, or the promise."""
    promised: Ballot = -1
    """The ballot of the promise, -1 for a vote."""
    accepted: Ballot = -1
    """The ballot in which the promise says that the other commit had been accepted."""

    def is_true(self, run: str) -> bool:
        """Whether it proves what it says, of this run."""
        said = vote_body(run, self.term, self.round, self.ballot, self.digest)
        if self.promised < 0:
            denies = self.digest != self.other
            against = vote_body(run, self.term, self.round, self.ballot, self.other)
        else:
            denies = self.promised > self.ballot and (
                self.accepted < self.ballot or (self.accepted == self.ballot and self.other != self.digest)
            )
            against = promise_body(run, self.term, self.round, self.promised, self.accepted, self.other)
        return (
            denies
            and identity.verify(self.peer, said, self.signature)
            and identity.verify(self.peer, against, self.signed)
        )
