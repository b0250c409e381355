"""Who may be beside whom in a chain, after somebody said that what its neighbour sends are lies. Pure, and each node's own sight.

Such a report (`ChainFailure` with a reason that begins with LIES; what makes it: peer/chain/screening.py) is only a claim: the accused may
lie, or the accuser. So both pay. From then on they have a *quarrel*, and no plan and no repair puts them beside each other (`Candidate.apart`).
At once one of the two loses its place to a spare: who has more quarrels, the accused if both have as many (`loser`). And a plan takes others
in the place of the accused where it can: with each accuser it counts as half as likely to be there (`Candidate.presence`).

Who lies has quarrels wherever it is put, an honest peer only with liars. So all that have quarrels are looked at together: as long as anybody
has OUT quarrels or more, the one with the most of them (then: who was accused most often) is *out*, and its quarrels no longer speak against
others. Who is out is in no chain; it may still be a full replica.

    a liar              comes after all others, and is out when a second neighbour has named it
    one false accuser   costs each peer that it accuses one neighbour and some preference, and is out with the second
    k false accusers    cost some peers their places in chains until they have made more quarrels than those have; then all these are back

A quarrel ends after FIRST_ROUNDS rounds, and each further one of the same two lasts twice as long, MOST_ROUNDS at most: an honest neighbour that was
accused by mistake is one again soon, and a liar is found again within a round. All of them are forgotten where no replica can be planned without forgetting them: a run of two must not
stand still for one false alarm, and where a lie was true, it is found again before anything of that round counts. All nodes hear the reports, so that whoever leads knows them; one that was started anew does not.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence

from protocol.planning.partition import Candidate
from protocol.wire.plan import ReplicaSpec
from protocol.wire.session import ChainFailure

LIES = "lies: "
"""How the reason of such a report begins."""
OUT = 2
TRUST = 0.5
FIRST_ROUNDS, MOST_ROUNDS = 16, 1024
REMEMBERED = 1024
"""Quarrels, and pairs that had some; the oldest is forgotten first."""


@dataclasses.dataclass(frozen=True, slots=True)
class Quarrel:
    """Effect: show that `accuser` said of `accused` what `reason` says. `out`: who is in no chain from now on."""

    accuser: str
    accused: str
    reason: str
    out: tuple[str, ...]


class Quarrels:
    """Those of a run. `out`: who is in no chain."""

    def __init__(self) -> None:
        self.out: frozenset[str] = frozenset()
        self._until: dict[tuple[str, str], int] = {}  # the last round, by accuser and accused
        self._times: dict[tuple[str, str], int] = {}  # how many there were, by accuser and accused
        self._with: dict[str, set[str]] = {}
        self._named = Counter[str]()

    def hear(self, peer: str, failure: ChainFailure, chains: Iterable[ReplicaSpec | None]) -> list[Quarrel]:
        """A member's report about its chain; `chains`: that chain as it was planned and as it is now. A Quarrel if it is news."""
        key = peer, failure.peer
        if not failure.reason.startswith(LIES) or key in self._until:
            return []
        if not any(chain is not None and are_neighbours(chain.peers, *key) for chain in chains):
            return []
        before = self.out
        times = self._times.pop(key, 0)
        self._until[key] = failure.round + min(MOST_ROUNDS, FIRST_ROUNDS << times)
        self._times[key] = min(times + 1, MOST_ROUNDS.bit_length())
        for known in (self._until, self._times):
            while len(known) > REMEMBERED:
                del known[next(iter(known))]
        self._look()
        return [Quarrel(*key, failure.reason, tuple(sorted(self.out - before)))]

    def begin(self, round: int) -> None:
        """This round begins: what has lasted long enough is over."""
        old = [key for key, until in self._until.items() if until < round]
        for key in old:
            del self._until[key]
        if old:
            self._look()

    def forget(self) -> bool:
        """Forgets all; whether there was any."""
        any_there = bool(self._until)
        self._until.clear()
        self._look()
        return any_there

    def loser(self, accuser: str, accused: str) -> str:
        """Who of the two gives its place to a spare."""
        return accuser if len(self._with.get(accuser, ())) > len(self._with.get(accused, ())) else accused

    def may_take(self, spare: str, place: str, chain: ReplicaSpec) -> bool:
        """Whether a spare may take the place of this member of a chain."""
        at = chain.peers.index(place)
        beside = chain.peers[max(at - 1, 0) : at] + chain.peers[at + 1 : at + 2]
        return spare not in self.out and self._with.get(spare, set()).isdisjoint(beside)

    def marked(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """The candidates, as the planner is to see them."""
        return [self._mark(candidate) if candidate.peer in self._with else candidate for candidate in candidates]

    def _mark(self, candidate: Candidate) -> Candidate:
        apart = self._with[candidate.peer].union(candidate.apart)
        presence = candidate.presence * TRUST ** self._named[candidate.peer]
        alone = candidate.peer in self.out
        return dataclasses.replace(candidate, apart=tuple(sorted(apart)), presence=presence, alone=alone)

    def _look(self) -> None:
        """Who quarrels with whom, and who is out."""
        self._with = {}
        for one, other in self._until:
            self._with.setdefault(one, set()).add(other)
            self._with.setdefault(other, set()).add(one)
        self._named = named = Counter(accused for _, accused in self._until)
        left = {peer: set(others) for peer, others in self._with.items()}
        out = set[str]()
        while left:
            worst = max(left, key=lambda peer: (len(left[peer]), named[peer], peer))
            if len(left[worst]) < OUT:
                break
            out.add(worst)
            for other in left.pop(worst):
                left[other].discard(worst)
        self.out = frozenset(out)


def are_neighbours(peers: Sequence[str], one: str, other: str) -> bool:
    """Whether the two are beside each other in a chain of these members."""
    return one in peers and other in peers and abs(peers.index(one) - peers.index(other)) == 1
