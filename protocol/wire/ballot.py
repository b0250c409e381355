"""What the members of the quorum tell each other (single-decree Paxos for each round; protocol/quorum/paxos.py)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from protocol.wire.bounds import Ballot, PeerId, Round, RunId, Signature
from protocol.wire.commit import Commit
from protocol.wire.schema import AtMost


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepare:
    """Paxos, phase 1: please promise `ballot` for `round`."""

    round: Round
    ballot: Ballot


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """The answer, and a member's durable vote: the highest promised ballot, and the last accepted commit."""

    round: Round
    ballot: Ballot = -1
    accepted: Ballot = -1
    commit: Commit | None = None
    pledged: RunId = ""
    """The digest of the commit that the member pledged in `ballot`."""
    pledges: Annotated[dict[PeerId, Signature], AtMost(16)] = field(default_factory=dict)
    """The certificate of `commit`: enough members pledged it in ballot `accepted`, and no other commit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accept:
    """Paxos, phase 2: please pledge `commit`, and once enough members have, please accept it."""

    round: Round
    ballot: Ballot
    commit: Commit
    certified: Ballot = -1
    """The ballot of the certificate: an earlier one, or this one, in which the commit is to be accepted then."""
    pledges: Annotated[dict[PeerId, Signature], AtMost(16)] = field(default_factory=dict)
    """The certificate: the signatures of enough members that pledged the commit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pledge:
    """The answer to the first: the commit is fair, and the only one pledged in this ballot (`pledge_body`)."""

    round: Round
    ballot: Ballot
    digest: RunId
    signature: Signature


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """The answer to the second: the commit with this digest is accepted. The signature is over `body_of`."""

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


QuorumMessage = Prepare | Promise | Accept | Pledge | Vote | Reject
