"""Offers to the open round: admission, completeness, and the outcome of each replica. Part of the leader's machine.

A replica is looked at again only when something happened to one of its members.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Set
from dataclasses import dataclass

from protocol.identity import short_peer
from protocol.ledger import part_lists
from protocol.ledger.part_lists import share_of
from protocol.planning import memory
from protocol.run import layout
from protocol.run.manifest import Manifest
from protocol.wire.commit import Contribution, LeftOut, Part, Share
from protocol.wire.plan import Plan, ReplicaSpec
from protocol.wire.session import Attest, Offer

MAX_OFFERS_PER_PEER = 16
"""Different offers of one peer to one round; an honest one has a second one at most after a crash."""


class Offers:
    """Newest offers and failures in one round. held: names of durable payloads and lists."""

    def __init__(self, held: Iterable[str]) -> None:
        self.held = set(held)
        self._offers: dict[str, Offer] = {}
        self._shares: dict[str, Share] = {}
        self._changed: Counter[str] = Counter()
        self._failures: dict[str, str] = {}
        self._lacking: dict[str, set[str]] = {}
        self._waiting: dict[str, set[str]] = {}

    def begin(self) -> None:
        self._offers, self._shares, self._failures = {}, {}, {}
        self._lacking, self._waiting, self._changed = {}, {}, Counter()

    def take(self, peer: str, offer: Offer) -> tuple[bool, list[Part]]:
        """Takes an admitted offer, unless changed too often: whether its list is missing, and missing parts."""
        if self._offers.get(peer) != offer:
            self._changed[peer] += 1
            if self._changed[peer] > MAX_OFFERS_PER_PEER:
                return False, []
            self._offers[peer], self._shares[peer] = offer, share_of(peer, offer.parts)
        for digest in self._lacking.pop(peer, ()):
            self._waiting[digest].discard(peer)
        root = self._shares[peer].root
        lacking = [part for part in offer.parts if part.digest not in self.held]
        self._lacking[peer] = {part.digest for part in lacking} | ({root} - self.held)
        for digest in self._lacking[peer]:
            self._waiting.setdefault(digest, set()).add(peer)
        return root not in self.held, lacking

    def hold(self, name: str) -> tuple[set[str], list[Share]]:
        """A payload or list is durable: the peers whose offers have it, and the shares that are whole now."""
        self.held.add(name)
        peers = self._waiting.pop(name, set())
        for peer in peers:
            self._lacking[peer].discard(name)
        return peers, [self._shares[peer] for peer in sorted(peers) if not self._lacking[peer]]

    @property
    def brought(self) -> set[str]:
        """The peers of whose offers all is durable here."""
        return {peer for peer in self._offers if not self._lacking[peer]}

    def fail(self, peer: str, reason: str) -> None:
        """`peer` gave up or was refused; the first reason counts."""
        self._failures.setdefault(peer, reason)

    def has_failed(self, peer: str) -> bool:
        return peer in self._failures

    def of(self, number: int, peer: str) -> Offer | None:
        """Returns the offer of `peer` as a member of the replica with this number."""
        offer = self._offers.get(peer)
        return offer if offer is not None and offer.replica == number else None

    def missing(self, replicas: Iterable[ReplicaSpec]) -> tuple[str, ...]:
        return tuple(p for r in replicas for p in r.peers if self.of(r.number, p) is None)

    def steps(self, replica: ReplicaSpec) -> int:
        """The most inner steps that a member of the replica has offered, 0 where none has."""
        offers = [self.of(replica.number, peer) for peer in replica.peers]
        return max((offer.steps for offer in offers if offer is not None), default=0)

    def verdict(
        self, replica: ReplicaSpec, diverged: Collection[str], based: Collection[str], there: Collection[str]
    ) -> Contribution | str | None:
        """Returns a replica's contribution, why it failed, or None while pending. based: attesters of the state."""
        for peer in replica.peers:
            if peer in self._failures:
                return f"peer {short_peer(peer)}: {self._failures[peer]}"
            if peer in diverged:
                return f"peer {short_peer(peer)}: its state differs from the majority's"
        for peer in replica.peers:
            if peer not in there and (peer not in self._offers or self._lacking[peer]):
                return f"peer {short_peer(peer)}: gone"
        offers = [self.of(replica.number, peer) for peer in replica.peers if peer in based]
        made = [offer for offer in offers if offer is not None]
        if len(made) < len(replica.peers) or any(self._lacking[peer] for peer in replica.peers):
            return None
        losses = [offer.loss for offer in made if offer.loss is not None]
        return Contribution(
            replica=replica.number,
            tokens=min(offer.tokens for offer in made),
            steps=min(offer.steps for offer in made),
            loss=losses[-1] if losses else None,
            shares=tuple(self._shares[peer] for peer in replica.peers),
        )


Judge = Callable[[ReplicaSpec], Contribution | str | None]
"""A replica -> what it contributes, why it has failed, or None while it is pending."""


@dataclass(frozen=True, slots=True)
class Examined:
    """Inputs of verdicts besides single peers. wrong: diverged peers; all_anew: another value resets all."""

    plan: Plan | None
    wrong: Set[str] = frozenset()
    all_anew: object = None


class ReplicaStates:
    """By number: what `complete` replicas contribute and `since` when, why others `failed`, `pending` ones."""

    def __init__(self) -> None:
        self.complete: dict[int, Contribution] = {}
        self.failed: dict[int, str] = {}
        self.pending: dict[int, ReplicaSpec] = {}
        self.since: dict[int, float] = {}
        self._seen = Examined(None)
        self._of: dict[str, list[ReplicaSpec]] = {}
        self._touched: set[str] = set()

    def touch(self, peers: Iterable[str]) -> None:
        self._touched.update(peers)

    def renew(self, seen: Examined, judge: Judge, waited: float) -> bool:
        """Examines touched replicas, or all of a new plan, `waited` seconds into the round; whether any changed."""
        plan, before, self._seen = seen.plan, self._seen, seen
        todo: Iterable[ReplicaSpec]
        if plan is not before.plan or seen.all_anew != before.all_anew:
            self._of = {}
            self.complete, self.failed, self.pending = {}, {}, {}
            todo = plan.replicas if plan is not None else ()
            for replica in todo:
                for peer in replica.peers:
                    self._of.setdefault(peer, []).append(replica)
        else:
            touched = self._touched | (seen.wrong ^ before.wrong)
            todo = [replica for peer in touched for replica in self._of.get(peer, ())]
        self._touched.clear()
        return sum([self._enter(replica, judge(replica), waited) for replica in todo]) > 0

    def _enter(self, replica: ReplicaSpec, found: Contribution | str | None, waited: float) -> bool:
        number = replica.number
        before = self.complete.get(number) or self.failed.get(number)
        if before == found and (before is not None or number in self.pending):
            return False
        for verdicts in (self.complete, self.failed, self.pending):
            verdicts.pop(replica.number, None)
        if found is None:
            self.pending[replica.number] = replica
        elif isinstance(found, str):
            self.failed[replica.number] = found
        else:
            self.complete[replica.number] = found
            self.since.setdefault(number, waited)
        return True

    def contributions(self) -> list[Contribution]:
        """Returns the contributions of complete replicas, in the order of the plan."""
        replicas = self._seen.plan.replicas if self._seen.plan is not None else ()
        return [self.complete[r.number] for r in replicas if r.number in self.complete]

    def in_turn(self) -> list[Contribution]:
        """Returns the contributions in the order in which they were first complete."""
        return sorted(self.contributions(), key=lambda c: self.since[c.replica])

    def left_out(self, waited: float) -> list[LeftOut]:
        """The others, after so many seconds."""
        late = f"no offer after {waited:.0f} s"
        return [LeftOut(replica=number, reason=reason) for number, reason in self.failed.items()] + [
            LeftOut(replica=number, reason=late) for number in self.pending
        ]


MAX_DIGEST = 64
"""Characters of a shard's digest: what is attested gets into commits."""


def is_sound_attestation(manifest: Manifest, attest: Attest) -> bool:
    """Returns whether what is attested can be compared: digests of shards that the model has."""
    known = _shards(manifest.model)
    return all(shard in known and len(digest) <= MAX_DIGEST for shard, digest in attest.digests.items())


@functools.lru_cache(maxsize=8)
def _shards(model: layout.ModelSpec) -> frozenset[str]:
    return frozenset(layout.shard_names(model))


def why_refused(manifest: Manifest, spec: ReplicaSpec, peer: str, offer: Offer) -> str | None:
    """Why `offer` is not admitted as `peer`'s share of `spec`, None if it is. Raises ValueError for no member."""
    stage, train = spec.stage_of(peer), manifest.train
    wanted = memory.stage_shards(manifest, stage.first, stage.last)
    if offer.replica != spec.number:
        return "it does not cover the planned shards"
    if not 1 <= offer.steps <= spec.work.steps or offer.tokens != train.tokens(offer.steps, spec.work.micro_batches):
        return "steps and tokens do not agree with the plan"
    return part_lists.why_not_parts(manifest, wanted, offer.parts)
