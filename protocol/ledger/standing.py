"""Standing of peers in the log: probation, reputation, and the limit of one peer's weight. Pure.

    probation     The work of a newcomer has weight 0 for the run's `probation` rounds (schedule.limits). It is judged
                  as all work is (protocol/round/judging.py), named in the commit (LeftOut.probation), and goes back
                  into its maker's error feedback.
    reputation    A factor of a peer's weight, 0 to 1. A finding against the peer takes LOSS of it, a round of work that
                  counts gives GAIN back. Bad scores in round after round (protocol/ledger/scoring.py) take all of it.
                  Below FLOOR the peer *rests* for REST_ROUNDS, and returns on probation with the reputation RETURNING.
    share         No peer has more than the run's `share` of a round's weight, or an equal share where that is more.

A round of probation is *served* by faultless work in a round in which faults could be seen: enough established replicas
counted to compare it with (LEAST_COMPARED), or the plan had too few of them. A finding restarts the probation. Exempt
are members of the first plan, and peers that the manifest lists, an invitation let in, or the operators admitted.
Without any established replica no replica is on probation. A replica is a newcomer's where peers on probation train
most of its blocks. A chain's weight and reputation are shared by its members' blocks; what is found against it is a
finding against those whose fault it is (LeftOut.faults), and the others lose the round only.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from protocol.ledger import access, schedule
from protocol.ledger.access import Access
from protocol.ledger.scoring import Scoring
from protocol.planning.partition import Candidate
from protocol.run.manifest import Manifest
from protocol.wire.bounds import LEAST_COMPARED
from protocol.wire.commit import Commit, Contribution
from protocol.wire.decree import ADMIT, Limits
from protocol.wire.plan import Plan, ReplicaSpec

REMEMBERED_PEERS = 20_000
"""Most peers with a record; those without news for the longest time become newcomers again."""
LOSS = 1 / 2
"""Of a reputation, that a finding against the peer takes."""
GAIN = 1 / 16
"""Of a reputation, that a round of work gives back."""
FLOOR = 1 / 8
REST_ROUNDS = 64
RETURNING = 1 / 2


class Finding(NamedTuple):
    """A finding for or against `peer`. grave: it takes the whole reputation."""

    peer: str
    good: bool
    grave: bool = False


@dataclass(frozen=True, slots=True)
class Reputation:
    """The record of a peer. served: faultless rounds since its (re)start; until: last round of its rest, or -1."""

    served: int = 0
    reputation: float = 1.0
    until: int = -1
    fell: bool = False

    def found(self, finding: Finding, round: int) -> Reputation:
        """After a finding in the commit of `round`."""
        if finding.good:
            return dataclasses.replace(self, reputation=min(1.0, self.reputation + GAIN))
        left = 0.0 if finding.grave else self.reputation * (1 - LOSS)
        if left >= FLOOR:
            return dataclasses.replace(self, reputation=left)
        return Reputation(reputation=RETURNING, until=round + REST_ROUNDS, fell=True)


UNKNOWN_PEER = Reputation()


@dataclass(frozen=True)
class Standing:
    """Standing of all peers after a commit.

    plan: of the open round; founders: members of the first plan; known: records, the oldest news first
    """

    manifest: Manifest
    limits: Limits
    access: Access
    scoring: Scoring
    round: int = -1
    plan: Plan | None = None
    founders: frozenset[str] = frozenset()
    known: Mapping[str, Reputation] = field(default_factory=dict)

    # --- what is known of a peer

    def of(self, peer: str) -> Reputation:
        return self.known.get(peer, UNKNOWN_PEER)

    def is_exempt(self, peer: str) -> bool:
        """Returns whether `peer` is exempt from probation: a member has vouched for it."""
        if self.of(peer).fell:
            return False
        decree = self.access.decided.get(peer)
        admitted = decree is not None and decree.action == ADMIT
        return admitted or peer in self.founders or peer in self.access.listed or peer in self.access.invited

    def left(self, peer: str) -> int:
        return 0 if self.is_exempt(peer) else max(0, self.limits.probation - self.of(peer).served)

    def rests(self, peer: str) -> bool:
        """Returns whether `peer` has no place in the next plan, for what was found against it."""
        return self.round + 1 <= self.of(peer).until

    def fallen(self) -> dict[str, int]:
        """Peers that lost their reputation in the newest round, and the last round of each one's rest."""
        until = self.round + REST_ROUNDS
        return {peer: until for peer, known in self.known.items() if known.until == until}

    def marked(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        """Returns the candidates, with no address range where a member vouches for them."""
        return [dataclasses.replace(c, range="") if c.range and self.is_exempt(c.peer) else c for c in candidates]

    # --- what is known of the open round

    def is_new(self, replica: ReplicaSpec) -> bool:
        """Returns whether most of its blocks are trained by peers on probation."""
        if not self.limits.probation:
            return False
        blocks = zip(replica.peers, replica.blocks, strict=True)
        return 2 * sum(count for peer, count in blocks if self.left(peer)) > sum(replica.blocks)

    @functools.cached_property
    def established(self) -> int:
        """The number of replicas in the plan that are not newcomers'."""
        return sum(not self.is_new(replica) for replica in self.plan.replicas) if self.plan is not None else 0

    @functools.cached_property
    def _replicas(self) -> Mapping[int, ReplicaSpec]:
        return {replica.number: replica for replica in self.plan.replicas} if self.plan is not None else {}

    @functools.cached_property
    def _busy(self) -> frozenset[str]:
        return frozenset(peer for replica in self._replicas.values() for peer in replica.peers)

    def spec_of(self, number: int, peers: tuple[str, ...]) -> ReplicaSpec | None:
        """The replica of the open round's plan, or its seat, as `peers` made its work; None where they cannot have."""
        spec = self._replicas.get(number)
        if self.plan is None or (spec is not None and spec.peers == peers):
            return spec
        if spec is None:
            free = self.is_seat(number) and self._busy.isdisjoint(peers)
            return self.plan.taken(number, peers, self.manifest.model.n_layers) if free else None
        if not self.plan.allows(spec, peers):
            return None
        stages = tuple(dataclasses.replace(s, peer=p) for s, p in zip(spec.stages, peers, strict=True))
        return dataclasses.replace(spec, stages=stages)

    @property
    def found_bad(self) -> tuple[str, ...]:
        """Whose work the newest commit ended the scoring of, and found bad in so many rounds that they rest."""
        return self.scoring.found

    def is_seat(self, number: int) -> bool:
        """Returns whether this is a seat of the open round: a replica without planned members."""
        return self.plan is not None and any(seat.number == number for seat in self.plan.seats)

    def is_on_probation(self, number: int, peers: tuple[str, ...]) -> bool:
        """Whether the work that `peers` made as this replica of the open round has no weight, whatever it is like."""
        if not self.limits.probation or not self.established:
            return False
        spec = self.spec_of(number, peers)
        return spec is not None and self.is_new(spec)

    def compares(self, counted: int) -> bool:
        """Whether a round of probation is served in the open round, where the work of so many replicas counts."""
        return counted >= LEAST_COMPARED - 1 or self.established < LEAST_COMPARED - 1

    def tried(self, commit: Commit) -> frozenset[int]:
        """Of the replicas whose work `commit` leaves out as judged, those whose makers are on probation."""
        there = (x for x in commit.left_out if x.judged is not None and x.peers)
        return frozenset(x.replica for x in there if self.is_on_probation(x.replica, x.peers))

    def weigh(self, contributions: Sequence[Contribution]) -> tuple[float, ...]:
        """Returns the weight factor of each counted contribution by reputation and address shares."""
        total = sum(c.tokens for c in contributions)
        most = max(self.limits.share, 1 / len(contributions)) if contributions else 1.0
        return tuple(self._weight(c, most, c.tokens / total) for c in contributions)

    def _weight(self, contribution: Contribution, most: float, part: float) -> float:
        parts = self._parts(contribution.replica, contribution.peers)
        trust = sum(of * self.of(peer).reputation for peer, of in parts) / (sum(of for _, of in parts) or 1)
        largest = part * max((of for _, of in parts), default=1) / (sum(of for _, of in parts) or 1)
        return min(trust, most / largest) if largest > most else trust

    def _parts(self, number: int, peers: tuple[str, ...]) -> list[tuple[str, int]]:
        """The members of a replica of the open round, each with its number of blocks."""
        spec = self.spec_of(number, peers)
        blocks = spec.blocks if spec is not None and min(spec.blocks, default=0) > 0 else (1,) * len(peers)
        return list(zip(peers, blocks, strict=True))

    # --- what comes next

    def after(self, commit: Commit, known: dict[str, Reputation] | None = None) -> Standing:
        """The standing after the next commit. known: equal to `self.known`, changed in place; None: a copy of it."""
        known = dict(self.known) if known is None else known

        def put(peer: str, now: Reputation) -> None:
            known.pop(peer, None)
            known[peer] = now
            if len(known) > REMEMBERED_PEERS:
                del known[next(iter(known))]

        for peer in self._served(commit):
            before = known.get(peer, UNKNOWN_PEER)
            put(peer, dataclasses.replace(before, served=before.served + 1))
        scored = self.scoring.after(commit, lambda peer: not self.left(peer))
        bad = (Finding(peer, False, grave=True) for peer in scored.found)
        for finding in (*self._findings(commit), *bad):
            before = known.get(finding.peer, UNKNOWN_PEER)
            if not finding.good and self.left(finding.peer):
                before = dataclasses.replace(before, served=0)
            put(finding.peer, before.found(finding, commit.round))
        if commit.decree is not None and commit.decree.decree.action == ADMIT:
            known.pop(commit.decree.decree.subject, None)
        founders = self.founders
        if commit.plan is not None and not founders:
            working = (*commit.plan.replicas, *commit.plan.forming)
            founders = frozenset(peer for replica in working for peer in replica.peers)
        return Standing(
            manifest=self.manifest,
            limits=schedule.limits(self.manifest, commit.schedule),
            access=self.access.after(commit.decree, commit.joined),
            scoring=scored,
            round=commit.round,
            plan=commit.plan,
            founders=founders,
            known=known,
        )

    def after_all(self, commits: Iterable[Commit]) -> Standing:
        found, known = self, dict(self.known)
        for commit in commits:
            found = found.after(commit, known)
        return found

    def _served(self, commit: Commit) -> Iterator[str]:
        yield from (share.peer for share in commit.shares)
        if self.compares(len(commit.contributions)):
            yield from (peer for x in commit.left_out if x.probation for peer in x.peers)

    def _findings(self, commit: Commit) -> Iterator[Finding]:
        """Findings of a commit for and against peers. Further kinds go here."""
        yield from (Finding(share.peer, True) for share in commit.shares)
        for left in commit.left_out:
            yield from (Finding(peer, False) for peer in left.guilty)
        refuted = dict.fromkeys(d.peer for d in commit.diverged if d.refuted)
        yield from (Finding(peer, False) for peer in refuted if self.plan is not None and self.plan.names(peer))


def of(manifest: Manifest, commits: Iterable[Commit] = ()) -> Standing:
    found = Standing(manifest, schedule.limits(manifest, None), access.of(manifest), Scoring(manifest))
    return found.after_all(commits)
