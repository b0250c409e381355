"""Presence and reliability of peers as one node sees them. Pure: `now` is in seconds on a steady clock.

A peer is *ready* while it is announced and gives signs of life, *absent* when its session ended and was not reopened
for some heartbeats (a spare may take its place in a chain), and *gone* after a lease (`gone_after`) without a sign of
life. Its *presence* is the share of its rounds in which it stayed to the end.

*Promises.* A plan is a promise: others wait for a replica that brings nothing. A planned peer that has not offered, or
has withdrawn, gets a strike; each round in which it delivers takes half a strike away. With two strikes and more it
rests for 1, 3, 7, … rounds, at most MOST_PAUSE_ROUNDS. In a failed chain the lost members get the strike; where none
are known, those that quarrel (protocol/round/accusations.py) get half of one each; where none do, every member does.

*Newcomers.* Identities cost nothing, so all newcomers share one account: a round that waited for some in vain is a
strike, and a round in which one of them delivers takes one away. With two strikes and more, rounds do not wait for
newcomers for a pause as above. A replica is a newcomer's where none of its peers has served a round, or where its work
has no weight yet; if all replicas are, none is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping

from protocol.ledger.standing import Standing
from protocol.planning.partition import Candidate
from protocol.run.manifest import TimingSpec
from protocol.wire.commit import Commit
from protocol.wire.plan import Plan, ReplicaSpec

ABSENT_HEARTBEATS = 2
"""After so many heartbeats without a session a peer is absent."""
TRUSTED_ROUNDS = 20.0
"""A peer that nobody knows yet is taken to have stayed for so many rounds."""
REMEMBERED_ROUNDS = 200.0
"""What was about so many rounds ago counts a third of what is now."""
REMEMBERED_PEERS = 20_000


def absent(
    ready: Iterable[str], sessions: Collection[str], heard: Mapping[str, float], timing: TimingSpec, now: float
) -> frozenset[str]:
    """The `ready` peers without one of the open `sessions` that were `heard` too long ago to be back at once."""
    patience = ABSENT_HEARTBEATS * timing.heartbeat
    return frozenset(p for p in ready if p not in sessions and now - heard.get(p, now) > patience)


def gone(ready: Iterable[str], heard: Mapping[str, float], timing: TimingSpec, now: float) -> list[str]:
    """The `ready` peers that gave no sign of life for a lease."""
    return [p for p in ready if now - heard.get(p, now) > timing.gone_after]


def waits_for_final_state(
    plan: Plan | None, timing: TimingSpec, attested: Collection[str], ready: Collection[str], waited: float
) -> bool:
    """Returns whether members of the last plan are waited for: gone ones for a lease, others until the deadline."""
    late = {p for r in (plan.replicas if plan else ()) for p in r.peers}.difference(attested)
    if waited >= timing.gone_after:
        late &= set(ready)
    return bool(late) and waited < timing.round_deadline


class PresenceRecord:
    """In which share of its rounds each peer stayed to the end, those of long ago counting less."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._there: set[str] = set()

    def begin(self, there: Iterable[str]) -> None:
        for peer in self._there:
            self._count(peer, 1.0)
        self._there = set(there)

    def lost(self, peer: str) -> None:
        """A peer is gone, or its session is, and the round goes on."""
        if peer in self._there:
            self._there.remove(peer)
            self._count(peer, 0.0)

    def of(self, peer: str) -> float:
        stayed, rounds = self._known.get(peer, (0.0, 0.0))
        return (stayed + TRUSTED_ROUNDS) / (rounds + TRUSTED_ROUNDS)

    def _count(self, peer: str, stayed: float) -> None:
        before, rounds = self._known.pop(peer, (0.0, 0.0))
        kept = 1 - 1 / REMEMBERED_ROUNDS
        self._known[peer] = (kept * before + stayed, kept * rounds + 1)
        if len(self._known) > REMEMBERED_PEERS:
            self._known.popitem(last=False)


MOST_STRIKES = 7.0
MOST_PAUSE_ROUNDS = 63


class Promises:
    """`strikes` of each peer that has any, and until which round it rests."""

    def __init__(self) -> None:
        self._strikes: OrderedDict[str, float] = OrderedDict()
        self._until: dict[str, int] = {}

    def settle(self, commit: Commit, broken: Mapping[str, float]) -> dict[str, int]:
        """Counts the strikes of a decided round; the peers that rest from now on, and until which round."""
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
        """Returns the candidates for `round`, and those that rest then."""
        known = [(peer, self.rests(peer.peer, round, broken.get(peer.peer, 0.0))) for peer in there]
        return tuple(peer for peer, rests in known if not rests), tuple(peer for peer, rests in known if rests)

    def _forget(self, peer: str) -> None:
        del self._strikes[peer]
        self._until.pop(peer, None)


def pause(strikes: float) -> int:
    """Returns the number of rounds of rest for this number of strikes."""
    return min(MOST_PAUSE_ROUNDS, 2 ** (int(strikes) - 1) - 1) if strikes >= 1 else 0


def broken(
    plan: Plan | None,
    commit: Commit,
    offered: Collection[str],
    lost: Collection[str],
    quarrelling: Collection[str] = (),
) -> dict[str, float]:
    """Strikes of a round. offered: peers that have offered all of their work; lost: peers known to be lost."""
    brought = {share.peer for share in commit.shares}.union(offered)
    judged = {x.replica: x.guilty for x in commit.left_out if x.judged is not None and not x.probation}
    found: dict[str, float] = {}
    for replica in plan.replicas if plan is not None else ():
        idle = [peer for peer in replica.peers if peer not in brought or peer in judged.get(replica.number, ())]
        guilty = [peer for peer in idle if peer in lost]
        blamed = guilty or [peer for peer in idle if peer in quarrelling] or idle
        found.update(dict.fromkeys(blamed, 1.0 if guilty or not replica.is_chain else 0.5))
    return found


def candidates(
    ready: Mapping[str, Candidate], away: Collection[str], newest: Callable[[str], int], plan: Plan | None, round: int
) -> list[Candidate]:
    """Ready peers that attested the state before the open `round` (newest: per peer), or that form a replica."""
    forming = {p for r in (plan.forming if plan else ()) for p in r.peers}
    there = (peer for peer in sorted(ready) if peer not in away)
    return [ready[peer] for peer in there if peer in forming or newest(peer) >= round - 1]


def are_new(standing: Standing, plan: Plan | None) -> frozenset[int]:
    """Numbers of the newcomers' replicas in the open round's plan. standing: after the commit with the plan."""
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
        self._round = standing.round + 1
        self.numbers = are_new(standing, plan)

    @property
    def are_waited_for(self) -> bool:
        return self._round > self._until

    def settle(self, brought: Collection[int]) -> None:
        """The round is decided. `brought`: the replicas all of whose work was offered."""
        if not self.numbers or not self.are_waited_for:
            return
        if self.numbers.isdisjoint(brought):
            self._strikes = min(MOST_STRIKES, self._strikes + 1)
            self._until = self._round + pause(self._strikes)
        else:
            self._strikes = max(0.0, self._strikes - 1)
