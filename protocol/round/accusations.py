"""Accusations between neighbours in a chain: who may stand next to whom. Pure, and each node's own view.

A report that a neighbour sends wrong data (`ChainFailure` with a reason that begins with LIES, from
peer/chain/screening.py) is only a claim, so both sides pay. So is one that a neighbour is lost in a chain that was
repaired in this round already, if that neighbour is heard of afterwards: their connection is bad, or one of them lies.
No plan and no repair puts the two next to each other (`Candidate.apart`), one of them loses its place to a spare
(`loser`: the one with more accusations, else the accused), and each accusation halves the accused peer's presence in
plans (`Candidate.presence`). Where the chain brings nothing, the strike of that round is theirs alone (presence.py).

A liar collects accusations everywhere, an honest peer only from liars. As long as a peer has EXPEL_COUNT or more, the
one with the most is *out* of all chains, and its accusations no longer speak against others. It may be a full replica.

    a liar              ranks last, and is out when a second neighbour has named it
    one false accuser   costs each accused peer one neighbour and some preference, and is out with the second
    k false accusers    keep peers out of chains until they have made more accusations than those have

An accusation ends after FIRST_ROUNDS; each further one of the same pair lasts twice as long, MOST_ROUNDS at most. All
are forgotten where no replica could be planned otherwise. Members repeat their reports to nodes that may have missed
them, so that honest nodes plan by the same accusations; of an earlier round one counts for FIRST_ROUNDS as well.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from protocol.planning.partition import Candidate
from protocol.wire.plan import ReplicaSpec
from protocol.wire.session import ChainFailure

LIES = "lies: "
"""How the reason of such a report begins."""
EXPEL_COUNT = 2
ACCUSED_PRESENCE = 0.5
FIRST_ROUNDS, MOST_ROUNDS = 16, 1024
REMEMBERED_PAIRS = 1024
"""Accusations, and pairs that had some; the oldest is forgotten first."""


@dataclasses.dataclass(frozen=True, slots=True)
class Accusation:
    """Effect: show that `accuser` accuses `accused` of `reason`. `out`: peers in no chain from now on."""

    accuser: str
    accused: str
    reason: str
    out: tuple[str, ...]


Chains = Callable[[int], Iterable[ReplicaSpec | None]]
"""The versions of a replica in one round: as planned and as repaired."""


class Accusations:
    """The accusations of a run. out: peers in no chain; quarrelling: accusers and accused of this round."""

    def __init__(self) -> None:
        self.out: frozenset[str] = frozenset()
        self.quarrelling: set[str] = set()
        self._lost: dict[str, ChainFailure] = {}  # by accuser: who is lost again, as it says in this round
        self._round = self._forgotten = 0
        self._chains: dict[int, Chains] = {}  # of the last FIRST_ROUNDS rounds
        self._until: dict[tuple[str, str], int] = {}  # the last round, by accuser and accused
        self._times: dict[tuple[str, str], int] = {}  # how many there were, by accuser and accused
        self._with: dict[str, set[str]] = {}
        self._named = Counter[str]()

    def report(self, peer: str, failure: ChainFailure) -> list[Accusation]:
        """A member's report about its chain, of this round or an earlier one; an Accusation if it is new."""
        key, chains = (peer, failure.peer), self._chains.get(failure.round)
        if chains is None or not any(c is not None and are_neighbours(c.peers, *key) for c in chains(failure.replica)):
            return []
        if failure.reason.startswith(LIES):
            return self._accuse(peer, failure)
        if failure.round == self._round and failure.generation > 0:
            self._lost[peer] = failure
        return []

    def heard(self, peer: str) -> list[Accusation]:
        """Takes a sign of life of `peer`; returns the accusations by peers that reported it lost, as `report` does."""
        accusers = [accuser for accuser, failure in self._lost.items() if failure.peer == peer]
        return [found for accuser in accusers for found in self._accuse(accuser, self._lost.pop(accuser))]

    def _accuse(self, peer: str, failure: ChainFailure) -> list[Accusation]:
        key = peer, failure.peer
        if failure.round == self._round:
            self.quarrelling.update(key)
        if key in self._until or failure.round <= self._forgotten:
            return []
        before = self.out
        times = self._times.pop(key, 0)
        self._until[key] = failure.round + min(MOST_ROUNDS, FIRST_ROUNDS << times)
        self._times[key] = min(times + 1, MOST_ROUNDS.bit_length())
        for known in (self._until, self._times):
            while len(known) > REMEMBERED_PAIRS:
                del known[next(iter(known))]
        self._look()
        return [Accusation(*key, failure.reason, tuple(sorted(self.out - before)))]

    def begin(self, round: int, chains: Chains) -> None:
        """Begins a round with these chains; ends the accusations that are over."""
        self.quarrelling, self._lost = set(), {}
        self._round, self._chains[round] = round, chains
        self._chains = {known: of for known, of in self._chains.items() if known + FIRST_ROUNDS >= round}
        old = [key for key, until in self._until.items() if until < round]
        for key in old:
            del self._until[key]
        if old:
            self._look()

    def forget(self) -> bool:
        """Forgets all; whether there was any."""
        any_there = bool(self._until)
        if any_there:
            self._forgotten = self._round
        self._until.clear()
        self._look()
        return any_there

    def loser(self, accuser: str, accused: str) -> str:
        """Returns which of the two is replaced by a spare."""
        return accuser if len(self._with.get(accuser, ())) > len(self._with.get(accused, ())) else accused

    def may_take(self, spare: str, place: str, chain: ReplicaSpec) -> bool:
        at = chain.peers.index(place)
        beside = chain.peers[max(at - 1, 0) : at] + chain.peers[at + 1 : at + 2]
        return spare not in self.out and self._with.get(spare, set()).isdisjoint(beside)

    def marked(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        return [self._mark(candidate) if candidate.peer in self._with else candidate for candidate in candidates]

    def _mark(self, candidate: Candidate) -> Candidate:
        apart = self._with[candidate.peer].union(candidate.apart)
        presence = candidate.presence * ACCUSED_PRESENCE ** self._named[candidate.peer]
        alone = candidate.peer in self.out
        return dataclasses.replace(candidate, apart=tuple(sorted(apart)), presence=presence, alone=alone)

    def _look(self) -> None:
        self._with = {}
        for one, other in self._until:
            self._with.setdefault(one, set()).add(other)
            self._with.setdefault(other, set()).add(one)
        self._named = named = Counter(accused for _, accused in self._until)
        left = {peer: set(others) for peer, others in self._with.items()}
        out = set[str]()
        while left:
            worst = max(left, key=lambda peer: (len(left[peer]), named[peer], peer))
            if len(left[worst]) < EXPEL_COUNT:
                break
            out.add(worst)
            for other in left.pop(worst):
                left[other].discard(worst)
        self.out = frozenset(out)


def are_neighbours(peers: Sequence[str], one: str, other: str) -> bool:
    """Returns whether the two are neighbours in a chain of these members."""
    return one in peers and other in peers and abs(peers.index(one) - peers.index(other)) == 1
