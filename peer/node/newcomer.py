"""What a peer does before any plan names it: who can be a full replica fetches the whole state, so that the first plan that names it has
work for it, and says when that plan is made."""

from __future__ import annotations

from collections.abc import Collection

from peer import events
from peer.net.clock import Clock
from protocol.ledger import retention
from protocol.round.member import Member
from protocol.run.manifest import Manifest


class Newcomer:
    """One per peer. `whole`: whether it can be a full replica."""

    def __init__(self, manifest: Manifest, member: Member, whole: bool, emit: events.Emit, clock: Clock) -> None:
        self._manifest = manifest
        self._member = member
        self._whole = whole
        self._emit = emit
        self._clock = clock
        self._told = -1

    def lacks(self, held: Collection[str]) -> bool:
        """Whether the state is to be fetched now; `held`: the shards that are here. If they are, says when the next plan's round begins."""
        if not self._whole or not self._member.is_new(self._clock.steady()):
            return False
        round = self._member.applied
        if held and self._told != round:
            self._told = round
            left = retention.seconds_left(self._manifest, self._member.commits[round], self._clock.wall())
            self._emit(events.Waiting(round=round + 2, seconds=left))
        return not held
