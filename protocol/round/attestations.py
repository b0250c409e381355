"""State attestations: every peer that holds shards sends their digests after each round, and they are compared. Pure.

All holders of a shard must have the same bits. The majority is by the weight of *witnesses*: peers that contributed to
the last WITNESS_ROUNDS commits, by the tokens of their replicas, none with more than one part in WITNESS_MOST of all;
at first the members of the plan. A node's own *auditor* (peer/node/audit.py) outweighs all others. A peer with other
bits than the majority has *diverged*, and its work of the next round does not count.

Where witnesses dispute a shard's bits, a node that can computes them from the log (peer/log/recompute.py); and once a
round where another peer of the plan says otherwise than all witnesses, or one that could be planned, while nobody has
contributed. What it finds is right, however many attest otherwise; those who do are *refuted*, what they attest of
other shards has no weight, and what they dispute in later rounds is computed after what others do. Nor has what
somebody attests who first attested something else any weight. So each computation, of which a round has a few, ends
what one liar at least can have computed in it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
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
    """By what is in the log so far. auditors: peers that this node believes before all others; refuted: planned peers
    that the log has refuted"""

    def __init__(self, commits: Iterable[Commit] = (), auditors: frozenset[str] = frozenset()) -> None:
        self.auditors = auditors
        self.refuted: set[str] = set()
        self._rounds: deque[Mapping[str, int]] = deque(maxlen=WITNESS_ROUNDS)
        self._plan: Plan | None = None
        for commit in commits:
            self.add(commit)

    def counting(self, commits: Iterable[Commit]) -> Iterator[Commit]:
        """Yields the commits and counts each as it is read: a log may be long, and on disk."""
        for commit in commits:
            self.add(commit)
            yield commit

    def add(self, commit: Commit) -> None:
        if self._plan is not None:
            self.refuted.update(d.peer for d in commit.diverged if d.refuted and self._plan.names(d.peer))
        self.count({share.peer: c.tokens for c in commit.contributions for share in c.shares}, commit.plan)

    def count(self, tokens: Mapping[str, int], plan: Plan | None) -> None:
        """Counts a commit. tokens: of each contributor's replica; plan: the next one."""
        self._plan = plan or self._plan
        if tokens:
            self._rounds.append(tokens)

    @property
    def are_proven(self) -> bool:
        """Whether they are witnesses by work in the log, not by a plan alone."""
        return bool(self._rounds)

    def weights(self) -> Mapping[str, int]:
        """Of each witness: its tokens, or less; of each auditor, more than of all others."""
        found = self._earned()
        return found | dict.fromkeys(self.auditors, sum(found.values()) + 1)

    def _earned(self) -> dict[str, int]:
        tokens: Counter[str] = Counter()
        for found in self._rounds:
            tokens.update(found)
        if not tokens:
            tokens.update(peer for replica in (self._plan.replicas if self._plan else ()) for peer in replica.peers)
        most = max(1, tokens.total() // WITNESS_MOST)
        return {peer: max(1, min(count, most)) for peer, count in tokens.items()}


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
    """Attested digests of one shard after one round. digests: peers by digest; proven: what the log gives, None if it
    was not computed; right: what the log gives, or most of the weight has, None in a tie; weight: of witnesses by
    digest."""

    def __init__(self) -> None:
        self.digests: dict[str, dict[str, None]] = {}
        self.proven: str | None = None
        self.right: str | None = None
        self.weight: Counter[str] = Counter()
        self._known = False

    @property
    def contested(self) -> int:
        """Weight of witnesses that attest other digests than most do; 0 where it is known which one the log gives."""
        is_disputed = self.proven is None and len(self.weight) > 1
        return sum(self.weight.values()) - max(self.weight.values()) if is_disputed else 0

    def is_doubted(self, digest: str) -> bool:
        """Returns whether all witnesses attest other digests, and it is not known which one the log gives."""
        return self.proven is None and bool(self.weight) and digest not in self.weight

    def sure(self, total: int) -> str | None:
        """Returns the digest of more than half of the witnesses' weight `total`; None if there is none yet."""
        if self.proven is not None:
            return self.proven
        ranked = self.weight.most_common(1)
        return ranked[0][0] if ranked and 2 * ranked[0][1] > total else None

    def add(self, peer: str, digest: str, weight: int) -> None:
        self.digests.setdefault(digest, {})[peer] = None
        if weight:
            self.weight[digest] += weight

    def remove(self, peer: str, digest: str, weight: int) -> None:
        """`peer` has this no more."""
        have = self.digests[digest]
        del have[peer]
        if not have:
            del self.digests[digest]
        if weight:
            self.weight[digest] -= weight
            if not self.weight[digest]:
                del self.weight[digest]

    def decide(self) -> bool:
        """Finds out what is right; whether something else was before, so that others may be wrong now."""
        before, ranked = (self.right, self._known), self.weight.most_common(2)
        has_most = bool(ranked) and (len(ranked) == 1 or ranked[0][1] > ranked[1][1])
        self.right = self.proven if self.proven is not None else ranked[0][0] if has_most else None
        self._known = self.proven is not None or bool(ranked)
        return before != (self.right, self._known)

    def is_wrong(self, digest: str) -> bool:
        """Returns whether this is another digest than the majority's; in a tie of witnesses any is."""
        return self._known and digest != self.right


class RoundAttestations:
    """Attestations of one round, counted as they come: what one costs grows with its shards, not with the peers.

    majority: by shard, without ties; disputed: of shards of which witnesses attest several digests and none is proven,
    the weight of all but the greatest part of them
    """

    def __init__(self, weights: Weights, attested: Mapping[str, Mapping[str, str]] = MappingProxyType({})) -> None:
        self._weights = weights
        self.known: dict[str, dict[str, str]] = {}
        self.majority: dict[str, str] = {}
        self.disputed: dict[str, int] = {}
        self.reported: set[Diverged] = set()
        self.proven: dict[str, str] = {}
        self.changes = Counter[str]()
        self._counted: dict[str, int] = {}  # weight by peer
        self._wrong: dict[str, dict[str, None]] = {}  # shards by peer, with ties
        self._changed: set[str] = set()  # peers that are wrong about something since it was asked last
        self._shards: dict[str, _Shard] = {}
        for peer, digests in attested.items():
            self.take(peer, digests)

    def take(self, peer: str, digests: Mapping[str, str]) -> None:
        """Sets the digests of `peer`. A peer that contradicts itself loses its weight."""
        before = self.known.get(peer, {})
        if any(digests.get(shard, digest) != digest for shard, digest in before.items()):
            self.changes[peer] += 1
        self._count(peer, dict(digests))

    def prove(self, shard: str, digest: str) -> None:
        """The log gives this digest of `shard`."""
        self.proven[shard] = digest
        found = self._shards.setdefault(shard, _Shard())
        found.proven = digest
        self._judge(shard)
        refuted = [peer for other, have in found.digests.items() if other != digest for peer in have]
        self._changed.update(refuted)
        for peer in refuted:
            self._count(peer, self.known[peer])

    def _count(self, peer: str, digests: dict[str, str]) -> None:
        before, was = self.known.get(peer, {}), self._counted.get(peer, 0)
        weight = self._weight(peer, digests)
        self.known[peer], self._counted[peer] = digests, weight
        for name in {**before, **digests}:
            old, new = before.get(name), digests.get(name)
            if (old, was) == (new, weight):
                continue
            shard = self._shards.setdefault(name, _Shard())
            if old is not None:
                shard.remove(peer, old, was)
            if new is not None:
                shard.add(peer, new, weight)
            self._judge(name, peer)

    def _weight(self, peer: str, digests: Mapping[str, str]) -> int:
        is_refuted = any(digests.get(shard, right) != right for shard, right in self.proven.items())
        return 0 if is_refuted or peer in self.changes else self._weights.get(peer, 0)

    def _judge(self, name: str, *peers: str) -> None:
        """Finds the majority of a shard of which `peers` attest another digest than before."""
        shard = self._shards[name]
        if shard.decide():
            peers = (*peers, *(peer for have in shard.digests.values() for peer in have))
        if shard.right is None:
            self.majority.pop(name, None)
        else:
            self.majority[name] = shard.right
        if contested := shard.contested:
            self.disputed[name] = contested
        else:
            self.disputed.pop(name, None)
        for peer in peers:
            digest = self.known[peer].get(name)
            if digest is not None and shard.is_wrong(digest):
                self._wrong.setdefault(peer, {})[name] = None
                self._changed.add(peer)
            elif name in (wrong := self._wrong.get(peer, {})):
                del wrong[name]
                if not wrong:
                    del self._wrong[peer]

    def doubted(self, among: Set[str]) -> list[str]:
        """Shards of which one of these peers attests what no witness does, and none is proven."""
        return [
            shard
            for peer in self._wrong.keys() & among
            for shard in self._wrong[peer]
            if self._shards[shard].is_doubted(self.known[peer][shard])
        ]

    def sure(self) -> dict[str, str]:
        """By shard, what more than half of the weight of all witnesses has."""
        total = sum(self._weights.values())
        found = ((name, shard.sure(total)) for name, shard in self._shards.items())
        return {name: digest for name, digest in found if digest is not None}

    def diverged(self, ties: bool, among: Set[str] | None = None) -> list[Diverged]:
        """Returns the peers and shards that differ from the majority. among: of these peers, None: of all."""
        return [
            Diverged(peer=peer, shard=shard, refuted=shard in self.proven)
            for peer in sorted(self._wrong if among is None else self._wrong.keys() & among)
            for shard in sorted(self._wrong[peer])
            if ties or shard in self.majority
        ]

    def fresh(self) -> list[Diverged]:
        """Returns diverged peers that were not named before, ties aside."""
        found = [d for d in self.diverged(False, self._changed) if d not in self.reported]
        self._changed.clear()
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
        """Takes the attestation of `peer`; returns diverged peers that were not named before."""
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

    def disputed(self, round: int) -> Mapping[str, int]:
        """Shards of which witnesses attested several digests after `round`, and none is proven, with the weight of all
        but the greatest part of them."""
        return self._rounds[round].disputed if round in self._rounds else {}

    def doubted(self, round: int, among: Set[str]) -> list[str]:
        """Shards of which one of these peers attested after `round` what no witness did, and none is proven."""
        return self._rounds[round].doubted(among) if round in self._rounds else []

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

    def diverged(self, round: int, ties: bool = False, among: Set[str] | None = None) -> list[Diverged]:
        """Returns the peers and shards that differ from the majority after `round`; other arguments as above."""
        return self._rounds[round].diverged(ties, among) if round in self._rounds else []

    def holds(self, peer: str, round: int, shards: Iterable[str]) -> bool:
        """Returns whether `peer` attested all of `shards` after `round`, and nothing speaks against its bits."""
        return _holds(
            self.of(round).get(peer, {}), self._rounds[round].majority if round in self._rounds else {}, shards
        )

    def snapshot(self, round: int) -> Attested:
        """The attestations after `round`; later ones do not change it."""
        return Attested(dict(self.of(round)), self.majority(round))
