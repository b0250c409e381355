"""What the members of the quorum tell each other (single-decree Paxos for each round; protocol/rounds/paxos.py)."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.wire.bounds import Ballot, Round, RunId, Signature
from protocol.wire.commit import Commit


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepare:
    """Paxos, phase 1: please promise `ballot` for `round`."""

    round: Round
    ballot: Ballot


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """The answer, and a member's durable vote: the highest ballot that was promised, and the commit that was accepted last
    (in ballot `accepted`), if any."""

    round: Round
    ballot: Ballot = -1
    accepted: Ballot = -1
    commit: Commit | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Accept:
    """Paxos, phase 2: please accept `commit`."""

    round: Round
    ballot: Ballot
    commit: Commit


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """The answer: the commit with this digest is accepted; the signature is over `vote_body`."""

    round: Round
    ballot: Ballot
    digest: RunId
    signature: Signature


@dataclass(frozen=True, slots=True, kw_only=True)
class Reject:
    """The answer to a ballot that is too low."""

    round: Round
    ballot: Ballot
    promised: Ballot
