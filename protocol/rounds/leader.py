"""A bootstrap node's view of a round: a state machine without I/O. Every node runs it; only the one that leads proposes.

    state      event                                     next       effects
    gathering  start_peers are ready                     deciding   Propose(commit 0: the first plan)
    open       Offered, valid                            open       Fetch(parts that are not held yet)
    open       ChainFailure: a chain lost a member; or a       open       Send(ChainReconfig), again until all follow (protocol/rounds/chain_repair.py)
               member is absent and a spare is ready
    open       no replica pending, or the deadline       deciding   Propose(commit r)
    deciding   Decided(commit r)                         open       (round r+1 begins)
    deciding   Decided(the last round)                   closing
    closing    all members attested, or it is too late   done       Done

`Lead(True)` makes this node propose, `Lead(False)` stops it: what it proposed before may or may not be decided.

A planned replica is *complete* when every stage has offered and every payload is held here, *failed* when a member
withdrew, diverged, or is gone without an offer, or its chain ended its round, else *pending*. Its members are those of the
newest reconfig. The next plan keeps a reconfigured chain as it is; who was lost is planned again when it was heard again. A commit takes
the complete ones, in plan order. A round in which all failed commits nothing but a new plan, at the earliest `gone_after` seconds after it began. Nobody is taken for
gone before that either: a leader that has just restarted has heard of nobody yet. It is too late to attest the final state
after `gone_after` for a member that is gone, after `round_deadline` for one that is still applying. Over 400 lines: the table and
everything that carries it out.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from protocol.codec import sparse
from protocol.planning import memory, partition, planner
from protocol.planning.partition import Candidate
from protocol.rounds.chain_repair import SLOW, ChainRoster
from protocol.run import layout
from protocol.run.manifest import Manifest
from protocol.wire.commit import Commit, Contribution, Diverged, LeftOut, Part, Share
from protocol.wire.plan import Plan, ReplicaSpec, StageSpec
from protocol.wire.session import Attest, ChainFailure, ChainReconfig, Offer, Withdraw

ABSENT_BEATS = 2
"""After so many heartbeats without a session a chain's member is replaced, if a spare is ready."""
NORM_LIMIT = 10.0
"""A contribution whose norm exceeds the round's median so many times is left out."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A peer is announced and has a session. Repeated when its announcement changes."""

    candidate: Candidate


@dataclass(frozen=True, slots=True)
class Gone:
    """A peer gave no sign of life for `gone_after`."""

    peer: str


@dataclass(frozen=True, slots=True)
class Received:
    """A peer sent an offer, an attestation, a withdrawal, or about its chain: that it broke, or which reconfig it follows."""

    peer: str
    message: Offer | Attest | Withdraw | ChainFailure | ChainReconfig


@dataclass(frozen=True, slots=True)
class Held:
    """A payload is durable here."""

    digest: str


@dataclass(frozen=True, slots=True)
class Lead:
    """Whether this node leads from now on."""

    leads: bool


@dataclass(frozen=True, slots=True)
class Decided:
    """The quorum has decided this commit."""

    commit: Commit


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed. `absent`: ready peers whose session ended and was not opened again for ABSENT_BEATS heartbeats."""

    absent: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Fetch:
    """Effect: get this payload from `peer`, then send `Held`."""

    peer: str
    part: Part


@dataclass(frozen=True, slots=True)
class Propose:
    """Effect: hand this commit to the quorum."""

    commit: Commit


@dataclass(frozen=True, slots=True)
class Send:
    """Effect: send this to those of `peers` who have a session; `first`: it is not a repetition."""

    peers: tuple[str, ...]
    message: ChainReconfig
    first: bool


@dataclass(frozen=True, slots=True)
class Report:
    """Effect: tell whoever watches: `peer`'s bits of `shard` after `round` differ from the majority's."""

    round: int
    peer: str
    shard: str


@dataclass(frozen=True, slots=True)
class Moved:
    """Effect: tell whoever watches: from `round` on, replica `replica` has other numbers of blocks in its stages, and why."""

    round: int
    replica: int
    before: ReplicaSpec
    after: ReplicaSpec
    reason: str


@dataclass(frozen=True, slots=True)
class Done:
    """Effect: the run is over and its final state was compared."""

    round: int


Event = Ready | Gone | Received | Held | Lead | Decided | Tick
Effect = Fetch | Propose | Send | Report | Moved | Done


class Leader:
    """See the table above. `handle` is the only entry; `now` is in seconds on any steady clock."""

    def __init__(self, manifest: Manifest, commits: Sequence[Commit], held: Sequence[str], now: float) -> None:
        self.manifest = manifest
        self.head: Commit | None = commits[-1] if commits else None
        self.ready: dict[str, Candidate] = {}
        self.attests: dict[int, dict[str, dict[str, str]]] = {}
        self._newest: dict[str, int] = {}
        self._majorities: dict[int, dict[str, str]] = {}
        self._last_plan = next((c.plan for c in reversed(commits) if c.plan), None)
        self._held = set(held)
        self.roster = ChainRoster(self.plan)
        self._offers: dict[str, Offer] = {}
        self._failures: dict[str, str] = {}
        self._absent: frozenset[str] = frozenset()
        self._leads = False
        self._proposed = False
        self._done = False
        self._began = now
        self._reported: set[tuple[int, str, str]] = set()

    @property
    def round(self) -> int:
        """The round that is open, or 0 while the first plan is being made."""
        return 0 if self.head is None else self.head.round + 1

    @property
    def plan(self) -> Plan | None:
        """The open round's plan."""
        return None if self.head is None else self.head.plan

    def handle(self, event: Event, now: float) -> list[Effect]:
        """One step of the machine."""
        effects: list[Effect] = []
        if isinstance(event, Received):
            self.roster.away.discard(event.peer)
        match event:
            case Ready(candidate):
                self.ready[candidate.peer] = candidate
            case Gone(peer):
                self.ready.pop(peer, None)
                effects += self._lost(peer, "gone")
            case Held(digest):
                self._held.add(digest)
            case Received(peer, Attest() as attest):
                effects += self._attest(peer, attest)
            case Received(peer, Withdraw() as withdraw):
                if withdraw.round == self.round and self.plan and self._replica_of(peer) is not None:
                    self._failures.setdefault(peer, withdraw.reason[:200])
                    effects += self._lost(peer, withdraw.reason, must_go_on=True)
            case Received(peer, ChainFailure() as failure):
                effects += self._chain_failure(peer, failure)
            case Received(peer, ChainReconfig() as reconfig):
                self.roster.heard(peer, reconfig)
            case Received(peer, Offer() as offer):
                effects += self._offer(peer, offer)
            case Lead(leads):
                self._leads, self._proposed = leads, False
            case Decided(commit):
                effects += self._begin(commit, now)
            case Tick(absent):
                self._absent = absent
                if self._leads and self.roster.reconfigs:
                    effects += [Send((peer,), reconfig, False) for peer, reconfig in self.roster.unheard()]
                for peer in sorted(absent):
                    effects += self._lost(peer, "its session ended")
        return effects + self._advance(now)

    # --- what comes in

    def _replica_of(self, peer: str) -> int | None:
        """The replica that has `peer` as a member now."""
        return self.roster.plan.replica_of(peer) if self.roster.plan else None

    def _chain_failure(self, peer: str, failure: ChainFailure) -> list[Effect]:
        roster, replica = self.roster, failure.replica
        if not self._leads or failure.round != self.round or roster.plan is None:
            return []
        if not 0 <= replica < len(roster.plan.replicas) or failure.generation > roster.generation(replica):
            return []
        spec = roster.plan.replicas[replica]
        known = roster.reconfigs.get(replica)
        if known is not None and (failure.generation < known.generation or not known.peers or peer not in spec.peers):
            return [Send((peer,), known, False)]
        if peer not in spec.peers or len(spec.stages) < 2:
            return []
        if failure.peer in spec.peers:
            return self._lost(failure.peer, failure.reason, must_go_on=failure.reason != SLOW)
        return self._tell(roster.again(replica, spec.peers, "its members knew different chains", 0))

    def _lost(self, peer: str, reason: str, must_go_on: bool = False) -> list[Effect]:
        """A chain goes on with a spare in the place of `peer`; `must_go_on`: without one, it is not waited upon."""
        replica, roster = self._replica_of(peer), self.roster
        if replica is None or roster.plan is None or not self._leads or self._proposed or roster.ended(replica):
            return []
        spec = roster.plan.replicas[replica]
        if len(spec.stages) < 2:
            return []
        offers = {p: o for p in spec.peers if (o := self._offer_of(replica, p)) is not None}
        steps = max((o.steps for o in offers.values()), default=0)
        text = f"peer {peer[-8:]}: {reason}"
        if peer in offers:
            return self._tell(roster.again(replica, spec.peers, text, steps)) if must_go_on else []
        reconfig = roster.replace(replica, peer, text, steps, self._suits)
        if reconfig is None and must_go_on:
            reconfig = roster.without_spare(replica, peer, text, steps, may_return=peer not in self._failures)
        return [] if reconfig is None else self._tell(reconfig)

    def _suits(self, spare: str, stage: StageSpec) -> bool:
        """Whether a spare is ready to take `stage`: it holds the right state of it."""
        known, majority = self.attests.get(self.round - 1, {}).get(spare, {}), self.majority(self.round - 1)
        wanted = memory.held_shards(self.manifest, stage.first, stage.last)
        right = all(shard in known and known[shard] == majority.get(shard, known[shard]) for shard in wanted)
        there = spare in self.ready and spare not in self._absent
        return right and there and partition.can_take(self.manifest, self.ready[spare], stage)

    def _tell(self, reconfig: ChainReconfig) -> list[Effect]:
        return [Send(self.roster.audience(reconfig.replica), reconfig, True)]

    def _attest(self, peer: str, attest: Attest) -> list[Effect]:
        if not max(self.round - 2, 0) <= attest.round < self.round:
            return []
        known = self.attests.setdefault(attest.round, {})
        if known.get(peer) == attest.digests:
            return []
        self._newest[peer] = max(self._newest.get(peer, -1), attest.round)
        known[peer] = dict(attest.digests)
        self._majorities.pop(attest.round, None)
        fresh = [d for d in self._diverged(attest.round) if (attest.round, d.peer, d.shard) not in self._reported]
        self._reported.update((attest.round, d.peer, d.shard) for d in fresh)
        return [Report(attest.round, d.peer, d.shard) for d in fresh]

    def _offer(self, peer: str, offer: Offer) -> list[Effect]:
        replica, plan = self._replica_of(peer), self.roster.plan
        if plan is not None and 0 <= offer.replica < len(plan.replicas) and peer in plan.replicas[offer.replica].peers:
            replica = offer.replica  # a spare may have been named twice, by two leaders
        if replica is None or offer.round != self.round or plan is None:
            return []
        problem = self._problem(plan.replicas[replica], peer, offer, replica)
        if problem:
            self._failures.setdefault(peer, f"offer refused: {problem}")
            return []
        self._offers[peer] = offer
        effects: list[Effect] = [Fetch(peer, part) for part in offer.parts if part.digest not in self._held]
        reconfig = self.roster.reconfigs.get(replica)
        if (
            self._leads and reconfig is not None and reconfig.peers and not reconfig.steps
        ):  # it may have left before the reconfig
            effects += self._tell(self.roster.again(replica, reconfig.peers, reconfig.reason, offer.steps))
        return effects

    def _problem(self, spec: ReplicaSpec, peer: str, offer: Offer, replica: int) -> str | None:
        stage = spec.stage_of(peer)
        wanted = memory.stage_shards(self.manifest, stage.first, stage.last)
        train = self.manifest.train
        if offer.replica != replica or tuple(p.shard for p in offer.parts) != wanted:
            return "it does not cover the planned shards"
        if not 1 <= offer.steps <= train.inner_steps or offer.tokens != offer.steps * train.step_tokens:
            return "steps and tokens do not agree with the manifest"
        if not all(math.isfinite(p.norm) and p.norm >= 0 and 0 < p.size <= self._largest(p.shard) for p in offer.parts):
            return "a norm or size is not a number in range"
        return None

    def _largest(self, shard: str) -> int:
        """The most bytes that a payload of `shard` can have."""
        return sparse.max_payload_size(self.manifest.outer.codec, layout.shapes(self.manifest.model, shard))

    # --- comparing states

    def majority(self, round: int) -> dict[str, str]:
        """The digest of each shard after `round` that most attesting peers have; shards with a tie are left out."""
        if round not in self._majorities:
            found = {}
            for shard, counts in self._counts(round).items():
                ranked = counts.most_common(2)
                if len(ranked) == 1 or ranked[0][1] > ranked[1][1]:
                    found[shard] = ranked[0][0]
            self._majorities[round] = found
        return self._majorities[round]

    def _counts(self, round: int) -> dict[str, Counter[str]]:
        counts: dict[str, Counter[str]] = {}
        for digests in self.attests.get(round, {}).values():
            for shard, digest in digests.items():
                counts.setdefault(shard, Counter())[digest] += 1
        return counts

    def _diverged(self, round: int, ties: bool = False) -> list[Diverged]:
        majority = self.majority(round)
        return [
            Diverged(peer=peer, shard=shard)
            for peer, digests in sorted(self.attests.get(round, {}).items())
            for shard, digest in digests.items()
            if (majority[shard] != digest if shard in majority else ties)
        ]

    # --- deciding

    def _begin(self, commit: Commit, now: float) -> list[Effect]:
        before = self.roster.plan or self._last_plan
        self.head = commit
        self._last_plan = commit.plan or self._last_plan
        self._offers, self._failures = {}, {}
        away, self.roster = self.roster.away, ChainRoster(commit.plan)
        self.roster.away = away
        self._proposed, self._began = False, now
        for round in [r for r in self.attests if r < commit.round - 1]:
            del self.attests[round]
            self._majorities.pop(round, None)
        return [
            Moved(commit.round + 1, replica, old, new, partition.why_moved(self.manifest, old, new, self.ready))
            for replica, old, new in partition.moves(before, commit.plan)
        ]

    def _candidates(self) -> list[Candidate]:
        """Ready peers that attested the state before the open round (round 0: all, there is no state yet)."""
        there = [c for p, c in sorted(self.ready.items()) if p not in self.roster.away]
        return [c for c in there if self._newest.get(c.peer, -1) >= self.round - 1]

    def _advance(self, now: float) -> list[Effect]:
        if self.head is not None and self.head.round >= self.manifest.rounds:
            return [] if self._done else self._close(now)
        if self._proposed or not self._leads:
            return []
        if self.head is None:
            candidates = self._candidates()
            if len(candidates) < self.manifest.start_peers:
                return []
            return self._propose(now, (), (), ())
        return self._round(now)

    def _round(self, now: float) -> list[Effect]:
        waited = now - self._began
        late = waited >= self.manifest.timing.round_deadline
        replicas = self.roster.plan.replicas if self.roster.plan else ()
        diverged = self._diverged(self.round - 1, ties=True)
        wrong = {d.peer for d in diverged}
        complete: list[Contribution] = []
        left_out: list[LeftOut] = []
        for index, replica in enumerate(replicas):
            reason = self.roster.ended(index) or self._failure(replica, wrong, waited)
            if reason is None and self._is_complete(index, replica):
                complete.append(self._contribution(index, replica))
            elif reason is None and not late:
                return []
            else:
                left_out.append(LeftOut(replica=index, reason=reason or "no offer before the deadline"))
        complete, outliers = _without_outliers(complete)
        left_out += outliers
        if not complete and waited < self.manifest.timing.gone_after:
            return []
        return self._propose(now, tuple(complete), tuple(sorted(left_out, key=lambda x: x.replica)), tuple(diverged))

    def _failure(self, replica: ReplicaSpec, wrong: set[str], waited: float) -> str | None:
        for peer in replica.peers:
            if peer in self._failures:
                return f"peer {peer[-8:]}: {self._failures[peer]}"
            if peer in wrong:
                return f"peer {peer[-8:]}: its state differs from the majority's"
        if waited < self.manifest.timing.gone_after:
            return None
        for peer in replica.peers:
            offer = self._offers.get(peer)
            offered = offer is not None and all(p.digest in self._held for p in offer.parts)
            if peer not in self.ready and not offered:
                return f"peer {peer[-8:]}: gone"
        return None

    def _offer_of(self, index: int, peer: str) -> Offer | None:
        """What `peer` offered as a member of replica `index`."""
        offer = self._offers.get(peer)
        return offer if offer is not None and offer.replica == index else None

    def _is_complete(self, index: int, replica: ReplicaSpec) -> bool:
        based = self.attests.get(self.round - 1, {})
        return all(
            (offer := self._offer_of(index, peer)) is not None
            and peer in based
            and all(part.digest in self._held for part in offer.parts)
            for peer in replica.peers
        )

    def _contribution(self, index: int, replica: ReplicaSpec) -> Contribution:
        offers = [self._offers[peer] for peer in replica.peers]
        losses = [o.loss for o in offers if o.loss is not None]
        return Contribution(
            replica=index,
            tokens=min(o.tokens for o in offers),
            steps=min(o.steps for o in offers),
            loss=losses[-1] if losses else None,
            shares=tuple(Share(peer=p, parts=o.parts) for p, o in zip(replica.peers, offers, strict=True)),
        )

    def _propose(
        self,
        now: float,
        contributions: tuple[Contribution, ...],
        left_out: tuple[LeftOut, ...],
        diverged: tuple[Diverged, ...],
    ) -> list[Effect]:
        manifest, round = self.manifest, self.round
        plan = None
        if round < manifest.rounds:
            slot = planner.following(manifest, self.plan) if self.plan else 0
            if self.plan is None and self._last_plan is not None:
                slot = planner.following(manifest, self._last_plan)
            previous = self.roster.plan or self._last_plan
            plan = planner.make_plan(manifest, self._candidates(), round=round + 1, slot=slot, previous=previous)
            if plan is None and not contributions:
                return []
        self._proposed = True
        commit = Commit(
            run=manifest.run_id,
            round=round,
            parent=self.head.digest if self.head else manifest.run_id,
            time=now,
            contributions=contributions,
            left_out=left_out,
            diverged=diverged,
            digests=self.majority(round - 1),
            plan=plan,
        )
        return [Propose(commit)]

    def _close(self, now: float) -> list[Effect]:
        """After the last round: the members get time to attest the final state."""
        assert self.head is not None
        timing, waited = self.manifest.timing, now - self._began
        members = {p for r in (self._last_plan.replicas if self._last_plan else ()) for p in r.peers}
        waiting = members - set(self.attests.get(self.head.round, {}))
        if waited >= timing.gone_after:
            waiting &= set(self.ready)
        if waiting and waited < timing.round_deadline:
            return []
        self._done = True
        return [Done(self.head.round)]


def _without_outliers(complete: list[Contribution]) -> tuple[list[Contribution], list[LeftOut]]:
    """Leaves out contributions whose norm is more than NORM_LIMIT times the median (three or more of them)."""
    if len(complete) < 3:
        return complete, []

    def norm(c: Contribution) -> float:
        return math.sqrt(sum(p.norm**2 for s in c.shares for p in s.parts))

    limit = NORM_LIMIT * statistics.median(norm(c) for c in complete)
    kept = [c for c in complete if norm(c) <= limit]
    return kept, [
        LeftOut(replica=c.replica, reason=f"norm {norm(c):.3g} is over {NORM_LIMIT:g} times the median")
        for c in complete
        if norm(c) > limit
    ]
