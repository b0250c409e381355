"""What was offered to the open round: whose work is complete, who has failed, and what a commit would say of it.

Part of the leader's machine (protocol/round/leader.py), pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from protocol.identity import short_peer
from protocol.ledger.part_lists import share_of
from protocol.wire.commit import Contribution, Part, Share
from protocol.wire.plan import ReplicaSpec
from protocol.wire.session import Offer

MOST = 16
"""Different offers of one peer to one round; an honest one has a second one at most after a crash."""


class Offers:
    """The newest offer of each peer, and who failed, in one round. `held`: names of the payloads and lists of parts that are durable."""

    def __init__(self, held: Iterable[str]) -> None:
        self.held = set(held)
        self._offers: dict[str, Offer] = {}
        self._shares: dict[str, Share] = {}
        self._changed: Counter[str] = Counter()
        self._failures: dict[str, str] = {}
        self._lacking: dict[str, set[str]] = {}
        self._waiting: dict[str, set[str]] = {}

    def begin(self) -> None:
        """The next round begins: nothing is offered yet."""
        self._offers, self._shares, self._failures = {}, {}, {}
        self._lacking, self._waiting, self._changed = {}, {}, Counter()

    def take(self, peer: str, offer: Offer) -> tuple[bool, list[Part]]:
        """Takes an offer that was admitted, unless its sender changed it too often. Whether its list of parts is not held yet, and the
        parts that are not."""
        if self._offers.get(peer) != offer:
            self._changed[peer] += 1
            if self._changed[peer] > MOST:
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
        """A payload or a list is durable now: the peers whose offers have it, and the shares of which nothing is lacking any more."""
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
        """What `peer` offered as a member of the replica with this number."""
        offer = self._offers.get(peer)
        return offer if offer is not None and offer.replica == number else None

    def missing(self, replicas: Iterable[ReplicaSpec]) -> tuple[str, ...]:
        """The members of these replicas that have not offered."""
        return tuple(p for r in replicas for p in r.peers if self.of(r.number, p) is None)

    def steps(self, replica: ReplicaSpec) -> int:
        """The most inner steps that a member of the replica has offered, 0 where none has."""
        offers = [self.of(replica.number, peer) for peer in replica.peers]
        return max((offer.steps for offer in offers if offer is not None), default=0)

    def failure(self, replica: ReplicaSpec, diverged: Collection[str]) -> str | None:
        """Why the replica's work cannot count any more: a member failed, or its state is one of the `diverged`."""
        for peer in replica.peers:
            if peer in self._failures:
                return f"peer {short_peer(peer)}: {self._failures[peer]}"
            if peer in diverged:
                return f"peer {short_peer(peer)}: its state differs from the majority's"
        return None

    def gone(self, replica: ReplicaSpec, ready: Collection[str]) -> str | None:
        """Which member is not among the `ready` ones and has left no offer of which all is here, in words."""
        for peer in replica.peers:
            offer = self._offers.get(peer)
            if peer not in ready and (offer is None or self._lacking[peer]):
                return f"peer {short_peer(peer)}: gone"
        return None

    def is_complete(self, replica: ReplicaSpec, based: Collection[str]) -> bool:
        """Whether every member has offered, all of it is held, and every member is among `based`.

        `based` are the peers that attested the state before the round.
        """
        return all(
            self.of(replica.number, peer) is not None and peer in based and not self._lacking[peer]
            for peer in replica.peers
        )

    def verdict(
        self,
        replica: ReplicaSpec,
        diverged: Collection[str],
        based: Collection[str],
        there: Collection[str],
    ) -> Contribution | str | None:
        """What a replica contributes, why it has failed, or None while it is pending. `there`: the peers that are not taken for gone."""
        reason = self.failure(replica, diverged) or self.gone(replica, there)
        if reason is not None or not self.is_complete(replica, based):
            return reason
        return self.contribution(replica)

    def contribution(self, replica: ReplicaSpec) -> Contribution:
        """What a commit says of a complete replica: the steps of its slowest member, the loss of its last stage."""
        offers = [self._offers[peer] for peer in replica.peers]
        losses = [offer.loss for offer in offers if offer.loss is not None]
        return Contribution(
            replica=replica.number,
            tokens=min(offer.tokens for offer in offers),
            steps=min(offer.steps for offer in offers),
            loss=losses[-1] if losses else None,
            shares=tuple(self._shares[peer] for peer in replica.peers),
        )
