"""What the members of the quorum tell each other (single-decree Paxos for each round; protocol/quorum/paxos.py)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from protocol.wire.bounds import Ballot, Count, PeerId, Round, RunId, Signature
from protocol.wire.commit import Commit
from protocol.wire.grounds import MAX_GROUNDS, Sworn
from protocol.wire.schema import AtMost


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepare:
    """Paxos, phase 1: please promise `ballot` for `round`."""

    round: Round
    ballot: Ballot


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """The answer, and a member's durable vote: the highest ballot that was promised, and the commit that was accepted last
    (in ballot `accepted`), if any. Where members may lie: `pledges` of enough members prove that this commit was the only one of
    that ballot; `pledged` is the digest of the commit that the member pledged in `ballot`. `term`: how many operators were taken out
    before (protocol/ledger/ousting.py). `grounds`: the promises by which the commit was accepted. `signature`: over `promise_body`
    (protocol/wire/grounds.py), of an answer."""

    round: Round
    ballot: Ballot = -1
    accepted: Ballot = -1
    commit: Commit | None = None
    pledged: RunId = ""
    pledges: Annotated[dict[PeerId, Signature], AtMost(16)] = field(default_factory=dict)
    term: Count = 0
    grounds: Annotated[tuple[Sworn, ...], AtMost(MAX_GROUNDS)] = ()
    signature: Signature = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accept:
    """Paxos, phase 2: please accept `commit`. Where members may lie, first: please pledge it. `pledges` prove that enough members
    pledged it in ballot `certified`: an earlier one, or this one, in which it is to be accepted then. `grounds`: the promises that allow it
    where no member may lie (protocol/wire/grounds.py)."""

    round: Round
    ballot: Ballot
    commit: Commit
    certified: Ballot = -1
    pledges: Annotated[dict[PeerId, Signature], AtMost(16)] = field(default_factory=dict)
    grounds: Annotated[tuple[Sworn, ...], AtMost(MAX_GROUNDS)] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pledge:
    """The answer where members may lie: the commit with this digest is fair, and the only one that its sender pledges in this ballot;
    the signature is over `pledge_body`."""

    round: Round
    ballot: Ballot
    digest: RunId
    signature: Signature


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Holds:
    """The commit of `round` with this digest is in the sender's log."""

    round: Round
    digest: RunId


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmed:
    """The commit of `round` with this digest is the only one that these members know (protocol/ledger/confirming.py); each signature
    is over `confirmation_body`."""

    round: Round
    digest: RunId
    by: Annotated[dict[PeerId, Signature], AtMost(16)]
