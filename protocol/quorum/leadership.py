"""Leader election among the bootstrap nodes, and their signs of life.

The leader only proposes (protocol/quorum/paxos.py): two nodes that both believe to lead do no harm. Members lead in
*turns*: turn 0 of a round belongs to the leader of the round before, then the others follow in order. A node goes on to
the next turn when the leader lies, lets a round wait that this node would have decided, gave no sign of life for a
lease (`gone_after`), or says that it is in a later turn. It follows f + 1 others and is never more than one turn ahead
of them.

A spare operator's node replaces a member that was silent for REPLACE_LEASES.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from protocol.quorum.paxos_events import Leads, Stalled
from protocol.quorum.table import Position, Row, Table
from protocol.run.manifest import Manifest
from protocol.wire.commit import liars_borne, votes_needed

REPLACE_LEASES = 10


def told_turn(turns: Iterable[int], members: int) -> int:
    """The latest turn that an honest one of so many `members` has reached, by the `turns` that they say they are in."""
    told = sorted(turns, reverse=True)
    return told[liars_borne(members)] if len(told) > liars_borne(members) else 0


def leader_of(members: tuple[str, ...], before: str, turn: int) -> str:
    """The leader of a turn. `before` led the round before."""
    first = members.index(before) if before in members else 0
    return members[(first + turn) % len(members)]


class Role(Enum):
    """The role of a node in the quorum."""

    FOLLOWING = "following"
    """It proposes nothing."""
    LEADING = "leading"
    """It proposes the commits."""


TABLE = Table(
    "role",
    Role,
    (
        Row(Role.FOLLOWING, None, Role.LEADING, (Leads,), "the rule names this node"),
        Row(Role.LEADING, None, Role.FOLLOWING, (Leads,), "the rule names another node"),
    ),
)


class Leadership:
    """The signs of life that node `peer` has of the others; `now` is in seconds on any steady clock."""

    def __init__(self, manifest: Manifest, peer: str, now: float, operators: tuple[str, ...] | None = None) -> None:
        self.manifest = manifest
        self.peer = peer
        self.position = Position(TABLE, Role.FOLLOWING)
        self._operators = manifest.operators if operators is None else operators
        self._heard = dict.fromkeys(self._operators, now)
        self._alive = set(self._operators)
        self._signs = {peer}
        self._now = now
        self._missing: tuple[str, ...] = ()
        self.turn = 0
        """The turn of the round that this node is in."""
        self._turns: dict[str, int] = {}
        self._round = 0

    @property
    def leads(self) -> bool:
        return self.position.phase is Role.LEADING

    def heard(self, peer: str | None, now: float) -> None:
        """It is `now`, and `peer` gave a sign of life."""
        self._now = now
        if peer in self._heard:
            self._heard[peer] = now
            self._signs.add(peer)
        lease = self.manifest.timing.gone_after
        self._alive = {o for o, at in self._heard.items() if o == self.peer or now - at < lease}

    @property
    def present(self) -> frozenset[str]:
        """Operators heard within a lease, and this node; after a start only this node."""
        return frozenset(self._alive & self._signs)

    def follow(self, operators: tuple[str, ...]) -> None:
        """Sets the run's operators. New ones have given no sign of life yet."""
        self._operators = operators
        self._heard = {o: self._heard.get(o, float("-inf")) for o in operators}
        self._alive &= set(operators)
        self._alive |= {self.peer} & set(operators)

    def begin(self, round: int) -> None:
        self._round, self.turn, self._turns = round, 0, {}

    def turned(self, peer: str, round: int, turn: int) -> None:
        if round == self._round and peer in self._heard:
            self._turns[peer] = turn

    def _told(self, members: tuple[str, ...]) -> int:
        return told_turn((self._turns.get(m, 0) for m in members if m != self.peer), len(members))

    def next_turn(self, members: tuple[str, ...]) -> None:
        self.turn = min(self.turn, self._told(members)) + 1

    def leader(self, members: tuple[str, ...], before: str) -> str:
        """The leader of this turn. `before` led the round before."""
        return leader_of(members, before, self.turn)

    def elect(self, members: tuple[str, ...], before: str) -> list[Leads]:
        """Applies the rule to this node's role."""
        self.turn = max(self.turn, self._told(members))
        leader = self.leader(members, before)
        if leader not in self._alive or (leader != self.peer and self._turns.get(leader, 0) > self.turn):
            self.next_turn(members)
        leads = self.leader(members, before) == self.peer
        if leads == self.leads:
            return []
        return self.position.step(None, Role.LEADING if leads else Role.FOLLOWING, [Leads(leads)])

    def stalled(self, members: tuple[str, ...]) -> list[Stalled]:
        """Says it when too few members to decide anything begin or cease to give signs of life."""
        alive = [m for m in members if m in self._alive]
        missing = () if len(alive) >= votes_needed(len(members)) else tuple(m for m in members if m not in alive)
        if missing == self._missing:
            return []
        self._missing = missing
        return [Stalled(missing)]

    @property
    def has_stalled(self) -> bool:
        return bool(self._missing)

    def living(self, members: tuple[str, ...]) -> frozenset[str]:
        return frozenset(m for m in members if m in self._alive)

    def next_members(self, members: tuple[str, ...]) -> tuple[str, ...]:
        """The members of the round after the one that `members` decide."""
        silent = REPLACE_LEASES * self.manifest.timing.gone_after
        spares = [o for o in self._operators if o not in members and o in self._alive]
        return tuple(
            spares.pop(0) if spares and m != self.peer and self._now - self._heard[m] >= silent else m for m in members
        )
