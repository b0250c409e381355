"""Signed promises, and what they allow: why a commit may be accepted in a ballot above 0, where members bear crashes and no lies.

One of two, three or five members that lies (protocol/quorum/paxos.py) could accept a commit in one ballot, promise a
higher one as if it had not, and accept another commit there: each would be decided. So a promise is signed, and a proposer shows the
promises that it stands on, its *grounds*. They say what had been accepted in the highest ballot before, and what that stood on in its
turn. A member that finds them wanting does not vote, and a record without them is not decided. Whoever lied in a promise has then
signed two things of which one is false (protocol/wire/double_vote.py).

Why the grounds are enough: let one commit have a majority's votes in ballot b, and another one grounds in a higher ballot. Of the ballots of these
grounds take the lowest above b. A majority promised it, so somebody did who had voted in b; and what it said had been accepted is older
than b, or is the other commit in b itself. Either is a lie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from protocol.wire import framing
from protocol.wire.bounds import Ballot, PeerId, RunId, Signature
from protocol.wire.schema import row

DOMAIN = b"potluck/1/"
"""What every signed text of the protocol begins with."""
MAX_GROUNDS = 128
"""Signed promises of one record: a commit that was handed on through more ballots is decided in a lower one, or not at all."""


def promise_body(run: str, term: int, round: int, ballot: int, accepted: int, digest: str) -> bytes:
    """What a promise's signature is over."""
    return DOMAIN + framing.pack_message(["promise", run, term, round, ballot, accepted, digest])


@row
@dataclass(frozen=True, slots=True, kw_only=True)
class Sworn:
    """A promise of one member."""

    peer: PeerId
    """The member."""
    ballot: Ballot
    """The ballot that it promised."""
    accepted: Ballot
    """The ballot in which it had accepted a commit before, -1 for none."""
    digest: RunId
    """That commit's digest."""
    signature: Signature
    """Its signature."""


def are_signed(
    grounds: Iterable[Sworn], run: str, term: int, round: int, verify: Callable[[str, bytes, bytes], bool]
) -> bool:
    """Whether all signatures are right. `verify`: (peer, bytes, signature)."""
    return all(
        verify(s.peer, promise_body(run, term, round, s.ballot, s.accepted, s.digest), s.signature) for s in grounds
    )


def chain(
    grounds: Sequence[Sworn], members: Iterable[str], needed: int, ballot: int, digest: str
) -> tuple[Sworn, ...] | None:
    """Those of these promises, whose signatures are right, that allow the commit with this digest in this ballot; None if they do not.
    `needed`: how many members have to promise. Ballot 0 needs no promises, since there is no lower one."""
    named, found = set(members), list[Sworn]()
    while ballot > 0:
        promised = [s for s in grounds if s.ballot == ballot and s.peer in named]
        if len({s.peer for s in promised}) != len(promised) or len(promised) < needed:
            return None
        top = max(s.accepted for s in promised)
        if top >= ballot or any(s.digest != digest for s in promised if s.accepted == top >= 0):
            return None
        found += promised
        ballot = top
    return tuple(found)
