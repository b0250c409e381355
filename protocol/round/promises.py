"""Who may be planned: who is there, holds the newest state, and brings what it is planned for. Pure, and each node's own sight.

A plan is a promise: everybody waits some time for a replica that brings nothing (protocol/round/grace.py), and its blocks and text
were given to nobody else. So a peer that was planned and has not offered, or has withdrawn, gets a *strike*, and each round in which it
brought what it had to takes half a one away. With two strikes and more it *rests*: it is in no plan for 1, 3, 7, … rounds, at most MOST_ROUNDS.
Once may happen to anybody. Whoever fails in a third of its rounds never rests for long, and who never delivers is hardly ever waited for.

In a chain that has failed, those rest who were lost; where nobody knows who it was, each member gets half a strike. What was judged and
left out (protocol/round/judging.py) is as if it had not been brought, but for work on probation (protocol/ledger/standing.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping

from protocol.planning.partition import Candidate
from protocol.wire.commit import Commit
from protocol.wire.plan import Plan

MOST_STRIKES = 7.0
MOST_ROUNDS = 63
REMEMBERED_PEERS = 20_000


class Promises:
    """`strikes` of each peer that has any, and until which round it rests."""

    def __init__(self) -> None:
        self._strikes: OrderedDict[str, float] = OrderedDict()
        self._until: dict[str, int] = {}

    def settle(self, commit: Commit, broken: Mapping[str, float]) -> dict[str, int]:
        """A round is decided, and who broke its promise gets so many strikes. Who rests from now on, until which round."""
        round = commit.round
        tried = (peer for x in commit.left_out if x.probation for peer in x.peers)
        for peer in (*(share.peer for share in commit.shares), *tried):
            if peer in self._strikes:
                self._strikes[peer] -= 0.5
                if self._strikes[peer] <= 0:
                    self._forget(peer)
        for peer, strike in broken.items():
            self._strikes[peer] = min(MOST_STRIKES, self._strikes.pop(peer, 0.0) + strike)
            if len(self._strikes) > REMEMBERED_PEERS:
                self._forget(next(iter(self._strikes)))
        fresh = {p: until for p in broken if (until := round + pause(self._strikes.get(p, 0.0))) > round}
        self._until.update(fresh)
        return fresh

    def rests(self, peer: str, round: int, broken: float = 0.0) -> bool:
        """Whether `peer` is in no plan of `round`; `broken`: strikes of the round before, which is not settled yet."""
        return round <= self._until.get(peer, -1) or (broken > 0 and pause(self._strikes.get(peer, 0.0) + broken) > 0)

    def apart(
        self, there: Iterable[Candidate], round: int, broken: Mapping[str, float]
    ) -> tuple[tuple[Candidate, ...], tuple[Candidate, ...]]:
        """Who may be planned for `round`, and who rests then."""
        known = [(peer, self.rests(peer.peer, round, broken.get(peer.peer, 0.0))) for peer in there]
        return tuple(peer for peer, rests in known if not rests), tuple(peer for peer, rests in known if rests)

    def _forget(self, peer: str) -> None:
        del self._strikes[peer]
        self._until.pop(peer, None)


def pause(strikes: float) -> int:
    """For how many rounds who has so many strikes rests."""
    return min(MOST_ROUNDS, 2 ** (int(strikes) - 1) - 1) if strikes >= 1 else 0


def broken(plan: Plan | None, commit: Commit, offered: Collection[str], lost: Collection[str]) -> dict[str, float]:
    """The strikes that a round with this plan and commit brings. `offered`: who has offered all of its work; `lost`: known to be."""
    brought = {share.peer for share in commit.shares}.union(offered)
    judged = {x.replica for x in commit.left_out if x.judged is not None and not x.probation}
    found: dict[str, float] = {}
    for replica in plan.replicas if plan is not None else ():
        idle = [peer for peer in replica.peers if peer not in brought or replica.number in judged]
        guilty = [peer for peer in idle if peer in lost]
        found.update(dict.fromkeys(guilty or idle, 1.0 if guilty or not replica.is_chain else 0.5))
    return found


def candidates(
    ready: Mapping[str, Candidate], away: Collection[str], newest: Callable[[str], int], plan: Plan | None, round: int
) -> list[Candidate]:
    """Ready peers that attested the state before `round`, which is open, and those of replicas that are forming. `newest`: the newest
    round that each attested."""
    forming = {p for r in (plan.forming if plan else ()) for p in r.peers}
    there = (peer for peer in sorted(ready) if peer not in away)
    return [ready[peer] for peer in there if peer in forming or newest(peer) >= round - 1]
