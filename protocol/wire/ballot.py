"""What the members of the quorum tell each other (single-decree Paxos for each round; protocol/rounds/paxos.py)."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.wire.commit import Commit


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepare:
    """Paxos, phase 1: please promise `ballot` for `round`."""

    round: int
    ballot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """The answer, and a member's durable vote: the highest ballot that was promised, and the commit that was accepted last
    (in ballot `accepted`), if any."""

    round: int
    ballot: int = -1
    accepted: int = -1
    commit: Commit | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Accept:
    """Paxos, phase 2: please accept `commit`."""

    round: int
    ballot: int
    commit: Commit


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """The answer: the commit with this digest is accepted; the signature is over `vote_body`."""

    round: int
    ballot: int
    digest: str
    signature: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Reject:
    """The answer to a ballot that is too low."""

    round: int
    ballot: int
    promised: int
