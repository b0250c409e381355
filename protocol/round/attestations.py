"""State attestations: every peer that holds shards sends their digests after each round, and they are compared. Pure.

All holders of a shard must have the same bits. The majority is by the weight of *witnesses*: peers that contributed to
the last WITNESS_ROUNDS commits, by the tokens of their replicas, none with more than one part in WITNESS_MOST of all;
at first the members of the plan. A node's own *auditor* (peer/node/audit.py) outweighs all others. A peer with other
bits than the majority has *diverged*, and its work of the next round does not count.

Where witnesses dispute a shard's bits, a node that can computes them from the log (peer/log/recompute.py); and once a
round where another peer of the plan says otherwise than all witnesses. What it finds is right, however many attest
otherwise; those who do are *refuted*, and what they attest of other shards has no weight. Nor has what somebody attests
who first attested something else: else a liar could have one shard after the other computed.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from protocol.wire.commit import Commit, Diverged
from protocol.wire.plan import Plan
from protocol.wire.session import Attest

WITNESS_ROUNDS = 8
WITNESS_MOST = 3
"""Nobody has more than this part of the weight: two who agree are more than the greatest one."""
MOST_CHANGES = 4
"""Of what a peer attests of one round; an honest one changes it after a crash at most."""


class Witnesses:
    """By what is in the log so far. `auditors`: peers that this node believes before all others."""

    def __init__(self, commits: Iterable[Commit] = (), auditors: frozenset[str] = frozenset()) -> None:
        self.auditors = auditors
        self._rounds: deque[Mapping[str, int]] = deque(maxlen=WITNESS_ROUNDS)
        self._plan: Plan | None = None
        for commit in commits:
            self.add(commit)

    def counting(self, commits: Iterable[Commit]) -> Iterator[Commit]:
        """The same commits, each added as it is read: a log may be long, and on disk."""
        for commit in commits:
            self.add(commit)
            yield commit

    def add(self, commit: Commit) -> None:
        self.count({share.peer: c.tokens for c in commit.contributions for share in c.shares}, commit.plan)

    def count(self, tokens: Mapping[str, int], plan: Plan | None) -> None:
        """The same: `tokens` of the replica of each peer that contributed, and the next plan."""
        self._plan = plan or self._plan
        if tokens:
            self._rounds.append(tokens)

    def weights(self) -> Mapping[str, int]:
        """Of each witness: its tokens, or less; of each auditor, more than of all others."""
        found = self._earned()
        return found | dict.fromkeys(self.auditors, sum(found.values()) + 1)

    def _earned(self) -> dict[str, int]:
        tokens: Counter[str] = Counter()
        for found in self._rounds:
            tokens.update(found)
        if tokens:
            most = max(1, tokens.total() // WITNESS_MOST)
            return {peer: max(1, min(count, most)) for peer, count in tokens.items()}
        return {peer: 1 for replica in (self._plan.replicas if self._plan else ()) for peer in replica.peers}


Weights = Mapping[str, int]
"""Of the witnesses, above zero; nobody else counts."""


def _holds(known: Mapping[str, str], right: Mapping[str, str], shards: Iterable[str]) -> bool:
    return all(shard in known and known[shard] == right.get(shard, known[shard]) for shard in shards)


@dataclass(frozen=True, slots=True)
class Attested:
    """A snapshot of one round: {peer: {shard: digest}}, and the majority's digests."""

    known: Mapping[str, Mapping[str, str]]
    majority: Mapping[str, str]

    def holds(self, peer: str, shards: Iterable[str]) -> bool:
        return _holds(self.known.get(peer, {}), self.majority, shards)


class _Shard:
    """Attested digests of one shard after one round. digests: peers by digest; _weight: of witnesses by digest;
    proven: what the log gives, None if it was not computed."""

    def __init__(self, proven: str | None = None) -> None:
        self.digests: dict[str, dict[str, None]] = {}
        self.proven = proven
        self._weight: Counter[str] = Counter()

    @property
    def is_disputed(self) -> bool:
        """Whether witnesses attest several digests, and it is not known which one the log gives."""
        return self.proven is None and len(self._weight) > 1

    def is_doubted(self, digest: str) -> bool:
        """Whether no witness attests this digest, and it is not known which one the log gives."""
        return self.proven is None and digest not in self._weight

    def sure(self, total: int) -> str | None:
        """What more than half of the weight of all witnesses has, which is `total`, whatever the others will say."""
        if self.proven is not None:
            return self.proven
        ranked = self._weight.most_common(1)
        return ranked[0][0] if ranked and 2 * ranked[0][1] > total else None

    @property
    def right(self) -> str | None:
        """What the log gives, or most of the weight has; None in a tie."""
        if self.proven is not None:
            return self.proven
        ranked = self._weight.most_common(2)
        return ranked[0][0] if ranked and (len(ranked) == 1 or ranked[0][1] > ranked[1][1]) else None

    def add(self, peer: str, digest: str, weight: int) -> None:
        self.digests.setdefault(digest, {})[peer] = None
        if weight:
            self._weight[digest] += weight

    def remove(self, peer: str, digest: str, weight: int) -> None:
        """`peer` has this no more."""
        have = self.digests[digest]
        del have[peer]
        if not have:
            del self.digests[digest]
        if weight:
            self._weight[digest] -= weight
            if not self._weight[digest]:
                del self._weight[digest]

    def is_wrong(self, digest: str) -> bool:
        """Whether this is another digest than the majority's; in a tie of witnesses any is."""
        right = self.right
        return digest != right if right is not None else bool(self._weight)


class RoundAttestations:
    """Attestations of one round. majority: by shard, without ties; split: shards with several digests."""

    def __init__(self, weights: Weights, attested: Mapping[str, Mapping[str, str]] = MappingProxyType({})) -> None:
        self._weights = weights
        self.known: dict[str, dict[str, str]] = {}
        self.majority: dict[str, str] = {}
        self.split: dict[str, None] = {}
        self.reported: set[Diverged] = set()
        self.proven: dict[str, str] = {}
        self.changes = Counter[str]()
        self._wrong: dict[str, list[tuple[Diverged, bool]]] = {}  # by peer, and whether it is for a tie only
        self._changed: set[str] = set()  # peers of which that is to be found out again
        self._shards: dict[str, _Shard] = {}
        for peer, digests in attested.items():
            self.take(peer, digests)

    def take(self, peer: str, digests: Mapping[str, str]) -> None:
        """`peer` has these, whatever it said before; who says otherwise than before has no weight."""
        before = self.known.get(peer, {})
        was = self._weight(peer, before)
        if any(digests.get(shard, digest) != digest for shard, digest in before.items()):
            self.changes[peer] += 1
        weight = self._weight(peer, digests)
        for name, digest in before.items():
            if digests.get(name) != digest or was != weight:
                self._shards[name].remove(peer, digest, was)
        for name, digest in digests.items():
            if before.get(name) != digest or was != weight:
                self._shards.setdefault(name, _Shard()).add(peer, digest, weight)
        self.known[peer] = dict(digests)
        self._changed.add(peer)
        for name in {**before, **digests}:
            self._judge(name, was or weight)

    def _weight(self, peer: str, digests: Mapping[str, str]) -> int:
        is_refuted = any(digests.get(shard, right) != right for shard, right in self.proven.items())
        return 0 if is_refuted or peer in self.changes else self._weights.get(peer, 0)

    def prove(self, shard: str, digest: str) -> None:
        """The log gives this digest of `shard`."""
        self.proven[shard] = digest
        known, self.known = self.known, {}
        self.majority, self.split = {}, {}
        self._shards = {name: _Shard(right) for name, right in self.proven.items()}
        for name in self._shards:
            self._judge(name, True)
        for peer, digests in known.items():
            self.take(peer, digests)

    @property
    def disputed(self) -> tuple[str, ...]:
        """Shards of which witnesses attest several digests."""
        return tuple(name for name in self.split if self._shards[name].is_disputed)

    def doubted_by(self, peer: str) -> tuple[str, ...]:
        """Shards of which `peer` attests what no witness does."""
        return tuple(s for s, digest in self.known.get(peer, {}).items() if self._shards[s].is_doubted(digest))

    def sure(self) -> dict[str, str]:
        """By shard, what more than half of the weight of all witnesses has."""
        total = sum(self._weights.values())
        found = ((name, shard.sure(total)) for name, shard in self._shards.items())
        return {name: digest for name, digest in found if digest is not None}

    def _judge(self, name: str, weighs: object) -> None:
        """`weighs`: whether what has changed is of a witness, so that others may be wrong now."""
        shard = self._shards[name]
        right = shard.right
        if weighs:
            self._changed.update(*shard.digests.values())
        if right is None:
            self.majority.pop(name, None)
        else:
            self.majority[name] = right
        if len(shard.digests) + (shard.proven is not None and shard.proven not in shard.digests) > 1:
            self.split[name] = None
        else:
            self.split.pop(name, None)

    def diverged(self, ties: bool, among: Collection[str] | None = None) -> list[Diverged]:
        """Who has other bits than the majority, by peer and shard. among: of these peers, None: of all."""
        for peer in self._changed:
            self._wrong[peer] = self._wrong_of(peer)
        self._changed.clear()
        peers = self._wrong if among is None else self._wrong.keys() & among
        return [d for peer in sorted(peers) for d, tied in self._wrong[peer] if ties or not tied]

    def _wrong_of(self, peer: str) -> list[tuple[Diverged, bool]]:
        return [
            (Diverged(peer=peer, shard=shard, refuted=shard in self.proven), shard not in self.majority)
            for shard, digest in sorted(self.known[peer].items())
            if self._shards[shard].is_wrong(digest)
        ]

    def fresh(self) -> list[Diverged]:
        """Who has diverged, ties aside, and was not named for it before."""
        found = [d for d in self.diverged(False, set(self._changed)) if d not in self.reported]
        self.reported.update(found)
        return found


class Attestations:
    """Attestations of the last rounds. weights: of the witnesses, when a round's first attestation comes."""

    def __init__(self, weights: Callable[[], Weights]) -> None:
        self._weights = weights
        self._rounds: dict[int, RoundAttestations] = {}
        self._newest: dict[str, int] = {}

    @property
    def rounds(self) -> tuple[int, ...]:
        return tuple(self._rounds)

    def of(self, round: int) -> Mapping[str, Mapping[str, str]]:
        """{peer: {shard: digest}} after `round`."""
        return self._rounds[round].known if round in self._rounds else {}

    def newest(self, peer: str) -> int:
        """The newest round whose state `peer` attested, -1 for none, or one that was forgotten."""
        return self._newest.get(peer, -1)

    def add(self, peer: str, attest: Attest) -> list[Diverged]:
        """Takes what `peer` attested; returns who has diverged, as far as known, and was not named for it before."""
        round = self._rounds.get(attest.round)
        if round is None:
            round = self._rounds[attest.round] = RoundAttestations(self._weights())
        if round.known.get(peer) == attest.digests or round.changes[peer] >= MOST_CHANGES:
            return []
        self._newest[peer] = max(self.newest(peer), attest.round)
        round.take(peer, attest.digests)
        return round.fresh()

    def prove(self, round: int, shard: str, digest: str) -> list[Diverged]:
        """The log gives this digest of `shard` after `round`; returns the same as `add`."""
        if round not in self._rounds:
            return []
        self._rounds[round].prove(shard, digest)
        return self._rounds[round].fresh()

    def proven(self, round: int) -> Mapping[str, str]:
        """By shard, the digests that the log gives, as far as they were computed."""
        return dict(self._rounds[round].proven) if round in self._rounds else {}

    def disputed(self, round: int) -> tuple[str, ...]:
        """Shards of which witnesses attested several digests after `round`, and none is proven."""
        return self._rounds[round].disputed if round in self._rounds else ()

    def doubted_by(self, round: int, peer: str) -> tuple[str, ...]:
        """Shards of which `peer` attested after `round` what no witness did, and none is proven."""
        return self._rounds[round].doubted_by(peer) if round in self._rounds else ()

    def forget(self, before: int) -> None:
        for round in [r for r in self._rounds if r < before]:
            del self._rounds[round]
        self._newest = {peer: round for peer, round in self._newest.items() if round >= before}

    def majority(self, round: int) -> dict[str, str]:
        """The digest of each shard after `round` that most of the weight has; shards with a tie are left out."""
        return dict(self._rounds[round].majority) if round in self._rounds else {}

    def sure(self, round: int) -> dict[str, str]:
        """Digests that more than half of all weight has, which silent witnesses cannot change."""
        return self._rounds[round].sure() if round in self._rounds else {}

    def diverged(self, round: int, ties: bool = False, among: Collection[str] | None = None) -> list[Diverged]:
        """Who has other bits after `round` than the majority; the others as above."""
        return self._rounds[round].diverged(ties, among) if round in self._rounds else []

    def holds(self, peer: str, round: int, shards: Iterable[str]) -> bool:
        """Whether `peer` attested all of `shards` after `round`, and nothing speaks against its bits."""
        return _holds(
            self.of(round).get(peer, {}), self._rounds[round].majority if round in self._rounds else {}, shards
        )

    def snapshot(self, round: int) -> Attested:
        """The attestations after `round`; later ones do not change it."""
        return Attested(dict(self.of(round)), self.majority(round))
