"""How long a round waits for replicas of which the log has no work yet. Pure, and each node's own sight.

A plan is a promise, and who breaks it again and again rests (protocol/round/promises.py). But identities cost nothing: somebody with a new one
for each round would break each promise once, and everybody would wait for him each time. So all newcomers together have one account: a round
that waited for some in vain gives them a *strike*, and one in which any of them brought its work takes one away. With two strikes and
more, rounds do not wait for newcomers at all for 1, 3, 7, … rounds, at most promises.MOST_ROUNDS. They are planned as before, and what is there when the others'
work is there counts; who comes too late for that gets no strike of its own then, and keeps its work.

A replica is a newcomer's where none of its peers has served a round, or where its work has no weight yet (protocol/ledger/standing.py). Where
that is true of all replicas of a plan it is of none: somebody has to begin.
"""

from __future__ import annotations

from collections.abc import Collection

from protocol.ledger.standing import Standing
from protocol.round import promises
from protocol.wire.plan import Plan, ReplicaSpec


def are_new(standing: Standing, plan: Plan | None) -> frozenset[int]:
    """The numbers of the newcomers' replicas in the plan of the open round. `standing`: after the commit that has the plan."""
    replicas = plan.replicas if plan is not None else ()
    new = frozenset(replica.number for replica in replicas if _is_new(standing, replica))
    return new if len(new) < len(replicas) else frozenset()


def _is_new(standing: Standing, replica: ReplicaSpec) -> bool:
    if standing.is_on_probation(replica.number, replica.peers):
        return True
    return not any(standing.of(peer).served for peer in replica.peers)


class Newcomers:
    """`numbers`: their replicas in the open round."""

    def __init__(self) -> None:
        self.numbers: frozenset[int] = frozenset()
        self._strikes = 0.0
        self._until = -1
        self._round = 0

    def begin(self, standing: Standing, plan: Plan | None) -> None:
        """A round is open."""
        self._round = standing.round + 1
        self.numbers = are_new(standing, plan)

    @property
    def are_waited_for(self) -> bool:
        """Whether the open round waits for them."""
        return self._round > self._until

    def settle(self, brought: Collection[int]) -> None:
        """The round is decided. `brought`: the replicas all of whose work was offered."""
        if not self.numbers or not self.are_waited_for:
            return
        if self.numbers.isdisjoint(brought):
            self._strikes = min(promises.MOST_STRIKES, self._strikes + 1)
            self._until = self._round + promises.pause(self._strikes)
        else:
            self._strikes = max(0.0, self._strikes - 1)
