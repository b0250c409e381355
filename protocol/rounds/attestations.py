"""Who attested which state: every peer that holds shards says their digests after each round, and they are compared.

All who hold a shard after a round must hold the same bits of it. What most of them have is taken for right. A peer
that has something else has *diverged*, and its work of the next round does not count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from protocol.wire.commit import Diverged
from protocol.wire.session import Attest


def majority(attested: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """The digest that most peers have of each shard, none where there is a tie. `attested`: their {shard: digest}."""
    counts: dict[str, Counter[str]] = {}
    for digests in attested:
        for shard, digest in digests.items():
            counts.setdefault(shard, Counter())[digest] += 1
    found = {}
    for shard, counted in counts.items():
        ranked = counted.most_common(2)
        if len(ranked) == 1 or ranked[0][1] > ranked[1][1]:
            found[shard] = ranked[0][0]
    return found


def diverged(attested: Mapping[str, Mapping[str, str]], right: Mapping[str, str], ties: bool = False) -> list[Diverged]:
    """Who of `attested`, {peer: {shard: digest}}, has other bits than the majority, which is `right`.

    With `ties`, nobody is right about a shard that has no majority.
    """
    return [
        Diverged(peer=peer, shard=shard)
        for peer, digests in sorted(attested.items())
        for shard, digest in digests.items()
        if (right[shard] != digest if shard in right else ties)
    ]


class Attestations:
    """What was attested of the last rounds."""

    def __init__(self) -> None:
        self._rounds: dict[int, dict[str, dict[str, str]]] = {}
        self._newest: dict[str, int] = {}
        self._majorities: dict[int, dict[str, str]] = {}
        self._reported: set[tuple[int, str, str]] = set()

    @property
    def rounds(self) -> tuple[int, ...]:
        """The rounds of which anything is known."""
        return tuple(self._rounds)

    def of(self, round: int) -> Mapping[str, Mapping[str, str]]:
        """{peer: {shard: digest}} after `round`."""
        return self._rounds.get(round, {})

    def newest(self, peer: str) -> int:
        """The newest round whose state `peer` attested, -1 for none."""
        return self._newest.get(peer, -1)

    def add(self, peer: str, attest: Attest) -> list[Diverged]:
        """Takes what `peer` attested; returns who has diverged, as far as known, and was not named for it before."""
        round, known = attest.round, self._rounds.setdefault(attest.round, {})
        if known.get(peer) == attest.digests:
            return []
        self._newest[peer] = max(self.newest(peer), round)
        known[peer] = dict(attest.digests)
        self._majorities.pop(round, None)
        fresh = [d for d in self.diverged(round) if (round, d.peer, d.shard) not in self._reported]
        self._reported.update((round, d.peer, d.shard) for d in fresh)
        return fresh

    def forget(self, before: int) -> None:
        """Forgets what was attested of the rounds before `before`."""
        for round in [r for r in self._rounds if r < before]:
            del self._rounds[round]
            self._majorities.pop(round, None)

    def majority(self, round: int) -> dict[str, str]:
        """The digest of each shard after `round` that most attesting peers have; shards with a tie are left out."""
        if round not in self._majorities:
            self._majorities[round] = majority(self.of(round).values())
        return self._majorities[round]

    def diverged(self, round: int, ties: bool = False) -> list[Diverged]:
        """Who has other bits after `round` than the majority; `ties` as above."""
        return diverged(self.of(round), self.majority(round), ties)

    def holds(self, peer: str, round: int, shards: Iterable[str]) -> bool:
        """Whether `peer` attested all of `shards` after `round`, and nothing speaks against its bits."""
        known, right = self.of(round).get(peer, {}), self.majority(round)
        return all(shard in known and known[shard] == right.get(shard, known[shard]) for shard in shards)
