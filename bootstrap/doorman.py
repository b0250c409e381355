"""Whom a bootstrap node gives a session: who may take part, and not too many strangers of one range of addresses. Who shows an invitation
waits for the commit that lets it in.

Nothing of a stranger is kept but what an operator has signed, and no more of one invitation than it lets in (protocol/ledger/access.py:
Guests). Every operator's node hears every peer, so the one that leads hears of it, too.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

from peer.net.clock import Clock
from protocol.ledger import access
from protocol.round.leader import Leader
from protocol.round.leader_events import JoinRequest
from protocol.wire.decree import Joined
from protocol.wire.session import NotAdmitted

WAITS = "it is invited, and comes in with the next commit"
TOO_MANY = "it is invited, but too many wait to come in; it asks again"


class Doorman:
    """Looks into the `leader`'s machine; `hand_in(event)` gives it an event, and is awaited."""

    def __init__(self, leader: Leader, hand_in: Callable[[JoinRequest], Awaitable[None]], clock: Clock) -> None:
        self._leader = leader
        self._hand_in = hand_in
        self._clock = clock

    def why_not(self, peer: str) -> str | None:
        """Why it may not take part now. The auditor beside this node always may: it belongs to its operator, and trains nothing."""
        return None if peer in self._leader.witnesses.auditors else self._leader.access.why_not(peer)

    def crowded(self, peer: str, others: Iterable[str]) -> NotAdmitted | None:
        """What `peer` is told where as many strangers as may be have a session, of the `others` from its range of addresses; None: it has
        one, too."""
        standing = self._leader.standing
        most = standing.limits.range_sessions
        if not most or standing.is_exempt(peer):
            return None
        if sum(not standing.is_exempt(other) for other in others) < most:
            return None
        reason = f"{most} others from its range of addresses take part, which is all that may; it asks again, or an operator admits it"
        return NotAdmitted(reason=reason, waits=True)

    async def welcome(self, peer: str, joining: Joined | None) -> NotAdmitted | None:
        """What `peer` is told that wants a session and shows this; None: it has one."""
        if self.why_not(peer) is None:
            return None
        leader, time = self._leader, self._clock.wall()
        refused = access.why_kept_out(leader.manifest, leader.access, leader.head, peer, joining, time)
        if refused is not None:
            return NotAdmitted(reason=refused)
        assert joining is not None, "it lets in whom nothing else does"
        if not self._leader.guests.has_place(joining, self._clock.steady()):
            return NotAdmitted(reason=TOO_MANY, waits=True)
        await self._hand_in(JoinRequest(joining))
        return NotAdmitted(reason=WAITS, waits=True)
