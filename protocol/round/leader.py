"""A bootstrap node's view of a round: a state machine without I/O. Every node runs it, and the leading one proposes.

Events come in, effects go out (protocol/round/leader_events.py); bootstrap/node.py carries the effects out. Plans and
verdicts take time, so they are effects too: MakePlan (protocol/round/leader_events.py) and Judge
(protocol/round/judging.py), answered by an event. The quorum may decide the proposed commit or another one
(protocol/quorum/paxos.py).

A planned replica is *complete* when every member has attested the state before the round and has offered its stage, and
all its payloads and lists of parts are held here. It has *failed* when a member withdrew, diverged, is gone or leaves
without an offer, or when its chain ended its round. Else it is *pending*; after the training time it is asked for what
it has, and waited for as protocol/round/stragglers.py says, until the round's deadline at most.

A commit takes the complete replicas that are judged to count, in the order of the plan. A round in which all failed
commits only a new plan, at the earliest `gone_after` seconds after it began, and takes no part of the schedule
(protocol/ledger/schedule.py). Nobody is taken for gone before that: a restarted leader has not heard of anybody yet.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from protocol.codec import blob_hash
from protocol.identity import short_peer
from protocol.ledger import access, aggregation, board, capacity, ranges, run_state, schedule
from protocol.ledger.access import Access
from protocol.ledger.claims import Claims
from protocol.ledger.standing import Standing
from protocol.planning import memory, partition
from protocol.planning.partition import Candidate
from protocol.quorum.table import Position
from protocol.round import judging, offers, presence, stragglers
from protocol.round import leader_events as ev
from protocol.round.accusations import LIES, Accusations
from protocol.round.attestations import Attestations, Witnesses
from protocol.round.chain_repair import SLOW, ChainRoster
from protocol.round.judging import JudgingJob, Verdict
from protocol.round.leader_events import Effect, Event, Phase, Question
from protocol.round.offers import Examined, Offers, ReplicaStates
from protocol.round.presence import Newcomers, Promises
from protocol.run import layout
from protocol.run.manifest import Manifest
from protocol.wire.claims import Evaluation, Score
from protocol.wire.commit import Aggregate, Commit, Contribution, Diverged, LeftOut, faults_of
from protocol.wire.decree import Enacted, Joined
from protocol.wire.plan import Plan, ReplicaSpec, StageSpec
from protocol.wire.session import Aggregated, Attest, ChainFailure, ChainReconfig, Offer, Offered, TimeUp, Withdraw


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a round, as its commit says it."""

    contributions: Sequence[Contribution] = ()
    left_out: Sequence[LeftOut] = ()
    diverged: Sequence[Diverged] = ()

    def judged(self, standing: Standing, job: JudgingJob, verdicts: Sequence[Verdict]) -> Outcome:
        """The outcome after the verdicts on `job`. standing: before the round."""
        found = dict(zip((c.replica for c in job.contributions), verdicts, strict=True))
        sound = [c for c in self.contributions if found[c.replica].reason is None]
        kept = [c for c in sound if c.replica not in job.trial]
        counted = tuple(
            dataclasses.replace(c, scale=found[c.replica].scale, weight=found[c.replica].weight, standing=standing_of)
            for c, standing_of in zip(kept, standing.weigh(kept), strict=True)
        )
        said = ((c, found[c.replica]) for c in self.contributions)
        bad = (_left_out(c, f"judged: {v.reason}", faults=v.faults) for c, v in said if v.reason is not None)
        out = [*self.left_out, *bad]
        out += [_on_probation(standing, c, len(kept)) for c in sound if c.replica in job.trial]
        return Outcome(counted, sorted(out, key=lambda x: x.replica), self.diverged)


def _on_probation(standing: Standing, contribution: Contribution, counted: int) -> LeftOut:
    """`counted`: how many replicas' work counts."""
    left = max(standing.left(peer) for peer in contribution.peers) - standing.compares(counted)
    when = f"after {left} more round{'s' * (left > 1)}" if left else "after this round"
    return _left_out(contribution, f"new here; its work is kept, and counts {when}", probation=True)


def _left_out(
    contribution: Contribution, reason: str, *, probation: bool = False, faults: tuple[str, ...] = ()
) -> LeftOut:
    who = ", ".join(short_peer(peer) for peer in faults or contribution.peers)
    return LeftOut(
        replica=contribution.replica,
        reason=f"peer {who}: {reason}",
        judged=judging.name_of(contribution),
        peers=contribution.peers,
        probation=probation,
        faults=faults_of(contribution.peers, faults),
    )


MOST_RECOMPUTED = 4
"""Times that disputed shards are computed in a round."""
LEAVES_REASON = "leaves the run"
"""Why a peer that says so brings nothing."""


class Leader:
    """A run as a bootstrap node sees it; `handle` is the only entry.

    held: durable payloads and lists; now: seconds on the clock of `handle`; auditors: of this node
    """

    def __init__(
        self,
        manifest: Manifest,
        commits: Sequence[Commit],
        held: Sequence[str],
        now: float,
        auditors: frozenset[str] = frozenset(),
    ) -> None:
        self.manifest = manifest
        self.witnesses = Witnesses(auditors=auditors)
        self.state = run_state.fold(manifest, self.witnesses.counting(commits))
        self.position = Position(ev.TABLE, self._between())
        self.ready: dict[str, Candidate] = {}
        self.attestations = Attestations(self.witnesses.weights)
        self.promises = Promises()
        self.newcomers = Newcomers()
        self.accusations = Accusations()
        self.newcomers.begin(self.standing, self.plan)
        self.petitions = access.SignedDecrees()
        self._claims = Claims()
        self.guests = access.PendingInvitations()
        self.roster = ChainRoster(self.plan)
        self.accusations.begin(self.round, self.roster.versions)
        self.offers = Offers(held)
        self._absent: frozenset[str] = frozenset()
        self._left: set[str] = set()
        self._living: frozenset[str] | None = None
        self._verdicts = ReplicaStates()
        self._asked: tuple[Question, Commit] | None = None
        self._outcome = Outcome()
        self._job: JudgingJob | None = None
        self._answered: tuple[JudgingJob, Sequence[Verdict]] | None = None
        self._revealed: set[str] = set()
        self._recomputed = 0  # in this round
        self._computing: tuple[str, ...] = ()
        self._dear: set[str] = set()  # shards that could not be computed in this round
        self._made: Aggregated | None = None
        self._leads, self._began = False, now
        self._is_sole = False  # whether this node has led since the round began

    @property
    def phase(self) -> Phase:
        return self.position.phase

    @property
    def head(self) -> Commit | None:
        return self.state.head

    @property
    def round(self) -> int:
        """The round that is open, or 0 while the first plan is being made."""
        return self.state.round

    @property
    def plan(self) -> Plan | None:
        return self.state.plan

    @property
    def has_begun(self) -> bool:
        """Whether there was a plan. Before, `start_peers` are waited for."""
        return self.state.latest is not None

    @property
    def standing(self) -> Standing:
        return self.state.standing

    @property
    def access(self) -> Access:
        return self.standing.access

    def _between(self) -> Phase:
        """The phase that the log alone says: nothing is proposed."""
        if self.head is None:
            return Phase.GATHERING
        return Phase.CLOSING if schedule.is_over(self.manifest, self.head) else Phase.OPEN

    def handle(self, event: Event, now: float) -> list[Effect]:
        """One step of the machine; `now` is in seconds on any steady clock."""
        return self._react(event, now) + self._advance(now, event)

    def _react(self, event: Event, now: float) -> list[Effect]:
        match event:
            case ev.Ready(candidate):
                self.ready[candidate.peer] = candidate
                self._left.discard(candidate.peer)
                self._absent -= {candidate.peer}
                self._verdicts.touch([candidate.peer])
            case ev.Gone(peer, leaves):
                return self._gone(peer, leaves)
            case ev.Held(digest):
                peers, whole = self.offers.hold(digest)
                self._verdicts.touch(peers)
                kept = [ev.Send((share.peer,), Offered(round=self.round, shares=(share,)), False) for share in whole]
                return self.position.stay(ev.Held, kept) if kept else []
            case ev.Received():
                return self._received(event, now)
            case ev.Lead(leads):
                self._leads, self._is_sole = leads, False
                self._asked = None
                if self.phase in ev.SETTLED:
                    return self.position.step(ev.Lead, self._between())
            case ev.DecreeSigned(operator, decree, signature):
                self.petitions.add(operator, decree, signature)
            case ev.JoinRequest(joined):
                self.guests.add(joined, now)
            case ev.Planned():
                return self._planned(event)
            case ev.JudgingDone(case, judged):
                if self.phase is Phase.JUDGING and case == self._job:
                    self._answered = case, judged
                    return self._settle(now, ev.JudgingDone)
            case ev.Recomputed():
                return self._recompute_done(event)
            case ev.AggregatesMade(made):
                self._made = made
            case ev.Decided(commit):
                return self._begin(commit, now)
            case ev.Tick(absent, living):
                self._living = living
                return self._tick(absent, now)
        return []

    def _received(self, event: ev.Received, now: float) -> list[Effect]:
        peer = event.peer
        self.roster.away.discard(peer)
        self._absent -= {peer}
        self._verdicts.touch([peer])
        quarrels = self.accusations.heard(peer)
        return (self.position.stay(ev.Received, quarrels) if quarrels else []) + self._said(peer, event.message, now)

    def _said(self, peer: str, message: object, now: float) -> list[Effect]:
        match message:
            case Attest() as attest:
                return [*self._attest(peer, attest), *self._seat(peer, now)]
            case Offer() as offer:
                return self._offer(peer, offer)
            case Withdraw() as withdraw:
                if withdraw.round == self.round and self.plan and self.roster.replica_of(peer) is not None:
                    self.offers.fail(peer, withdraw.reason[:200])
                    return self._reconfigure(Withdraw, self._lost(peer, withdraw.reason, must_go_on=True))
            case ChainFailure() as failure:
                return self._chain_failure(peer, failure)
            case ChainReconfig() as reconfig:
                self.roster.follows(peer, reconfig, self._is_sole)
            case Evaluation() | Score() as claim:
                if claim.peer == peer:
                    self._claims.add(self.state, claim)
        return []

    def _gone(self, peer: str, leaves: bool) -> list[Effect]:
        self.ready.pop(peer, None)
        self._verdicts.touch([peer])
        if not leaves:
            return self._reconfigure(ev.Gone, self._lost(peer, "gone"))
        self._left.add(peer)
        number = self.roster.replica_of(peer)
        if number is None or self.offers.of(number, peer) is not None:
            return []  # what it has offered counts without it
        self.offers.fail(peer, LEAVES_REASON)
        return self._reconfigure(ev.Gone, self._lost(peer, LEAVES_REASON, must_go_on=True))

    # --- chains

    def _reconfigure(self, event: type, reconfig: ChainReconfig | None) -> list[Effect]:
        if reconfig is None:
            return []
        return self.position.stay(event, [ev.Send(self.roster.audience(reconfig.replica), reconfig, True)])

    def _chain_failure(self, peer: str, failure: ChainFailure) -> list[Effect]:
        told = self.accusations.report(peer, failure) if failure.reason != SLOW else []
        effects: list[Effect] = self.position.stay(ChainFailure, told) if told else []
        if failure.round != self.round:
            return effects
        found = self.roster.reported(peer, failure) if self._leads else None
        lost = self.accusations.loser(peer, failure.peer) if failure.reason.startswith(LIES) else failure.peer
        if told and isinstance(found, ChainReconfig):  # a liar may have been quicker to name its neighbour
            news = self._lost(lost, failure.reason, must_go_on=True)
            if news is not None:
                return effects + self._reconfigure(ChainFailure, news)
        if isinstance(found, ChainReconfig):
            return effects + self.position.stay(ChainFailure, [ev.Send((peer,), found, False)])
        if found is None:
            return effects
        if failure.peer in found.peers:
            news = self._lost(lost, failure.reason, must_go_on=failure.reason != SLOW)
        else:
            news = self.roster.renew(found.number, found.peers, "its members knew different chains", 0)
        return effects + self._reconfigure(ChainFailure, news)

    def _lost(self, peer: str, reason: str, must_go_on: bool = False) -> ChainReconfig | None:
        """Returns the new chain of `peer`; None: it waits. must_go_on: it does not wait without a spare."""
        if not self._leads or self.phase in ev.SETTLED:
            return None
        return self.roster.lost(peer, reason, must_go_on, self.offers, self._suits)

    def _suits(self, spare: str, stage: StageSpec) -> bool:
        """Returns whether a spare is ready to take `stage`: it holds the right state of it."""
        wanted, known = memory.stage_shards(self.manifest, stage.first, stage.last), self.ready.get(spare)
        if known is None or spare in self._absent or not self.attestations.holds(spare, self.round - 1, wanted):
            return False
        chain = self.roster.find(self.roster.replica_of(stage.peer) or 0)
        if chain is not None and not self.accusations.may_take(spare, stage.peer, chain):
            return False
        return partition.can_take(self.manifest, known, stage)

    def _tick(self, absent: frozenset[str], now: float) -> list[Effect]:
        self._absent = absent
        effects: list[Effect] = []
        if self._leads and self.roster.reconfigs:
            for peer, reconfig in self.roster.not_following():
                effects += self.position.stay(ev.Tick, [ev.Send((peer,), reconfig, False)])
        for peer in sorted(absent):
            effects += self._reconfigure(ev.Tick, self._lost(peer, "its session ended"))
        if self.phase is Phase.OPEN and self._leads and now - self._began >= self.manifest.timing.training_seconds:
            late = self.offers.missing(self._verdicts.pending.values())
            if late and self._verdicts.since:
                effects += self.position.stay(ev.Tick, [ev.Send(late, TimeUp(round=self.round), False)])
        return effects

    # --- what peers say

    def _attest(self, peer: str, attest: Attest) -> list[Effect]:
        if not max(self.round - 2, 0) <= attest.round < self.round or not offers.is_sound_attestation(
            self.manifest, attest
        ):
            return []
        effects = self._reports(attest.round, self.attestations.add(peer, attest))
        effects += self._recompute()
        return self.position.stay(Attest, effects) if effects else []

    def _recompute(self) -> list[Effect]:
        """Asks what the log gives of shards that witnesses dispute, one after the other, not for ever. First come those
        disputed by somebody whom the log has not refuted, of them those with most weight against most of it. Where none
        is disputed, once one of which a peer of the plan says otherwise than all witnesses; or, while nobody has
        contributed and strangers that were planned first are the only witnesses, one that could be planned."""
        if self._computing or self._recomputed >= MOST_RECOMPUTED:
            return []
        model, round = self.manifest.model, self.round - 1
        disputed = self.attestations.disputed(round)
        known = (self.plan.peers if self.plan is not None else frozenset()) - self.witnesses.refuted
        fresh = {d.shard for d in self.attestations.diverged(round, ties=True, among=known)} if disputed else set()
        shards = sorted(disputed, key=lambda s: (s not in fresh, -disputed[s], layout.shard_bytes(model, s), s))
        if not shards and not self._recomputed:
            heard = known if self.witnesses.are_proven else self.ready.keys() - self.witnesses.refuted
            doubted = self.attestations.doubted(round, heard)
            shards = sorted(doubted, key=lambda shard: blob_hash.name_of(f"{round} {shard}".encode()))[:1]
        self._computing = tuple(shard for shard in shards if shard not in self._dear)
        if not self._computing:
            return []
        self._recomputed += 1
        return [ev.Recompute(round, self._computing)]

    def _recompute_done(self, found: ev.Recomputed) -> list[Effect]:
        effects: list[Effect] = []
        if found.shard:
            effects += self._reports(found.round, self.attestations.prove(found.round, found.shard, found.digest))
        if found.round == self.round - 1:
            self._dear.update(() if found.shard else self._computing)
            self._computing = ()
            effects += self._recompute()
        return self.position.stay(ev.Recomputed, effects) if effects else []

    def _reports(self, round: int, diverged: Sequence[Diverged]) -> list[Effect]:
        return [ev.Report(round, d.peer, d.shard, d.refuted) for d in diverged]

    def _seat(self, peer: str, now: float) -> list[Effect]:
        may = self._leads and self.phase is Phase.OPEN and not self.promises.rests(peer, self.round)
        may = may and not self.standing.rests(peer) and self.access.why_not(peer) is None
        known = self.ready.get(peer) if may and self._has_room(peer) else None
        seat = stragglers.give_seat(self.manifest, self.roster, self.attestations, known, now - self._began)
        return self.position.stay(Attest, [ev.Send((peer,), seat, True)]) if seat is not None else []

    def _has_room(self, peer: str) -> bool:
        """Returns whether its range of addresses has room for a seat."""
        share = self.standing.limits.range_share
        if share >= 1:
            return True
        of = {c.peer: c.range for c in self.standing.marked(self.ready.values())}
        return ranges.has_room(self.manifest, self.roster.plan, of, peer, share)

    def _offer(self, peer: str, offer: Offer) -> list[Effect]:
        spec = self.roster.offered_by(peer, offer.replica)
        if spec is None and not self._leads and offer.round == self.round:
            known = self.ready.get(peer)
            spec = stragglers.claim_seat(self.manifest, self.roster, self.attestations, known, offer.replica)
        if spec is None or offer.round != self.round:
            return []
        if self._revealed and self.offers.of(spec.number, peer) != offer:
            return []  # it could be made of what the others offered
        reason = offers.why_refused(self.manifest, spec, peer, offer)
        if reason:
            self.offers.fail(peer, f"offer refused: {reason}")
            return []
        unlisted, lacking = self.offers.take(peer, offer)
        effects: list[Effect] = [ev.StoreList(offer.parts)] if unlisted else []
        effects += [ev.Fetch(peer, part) for part in lacking]
        if effects:
            self.position.stay(Offer, effects)
        reconfig = self.roster.reconfigs.get(spec.number)
        if self._leads and reconfig is not None and reconfig.peers and not reconfig.steps:
            # it may have left before it heard of the reconfiguration: the others need not wait for it
            found = self.roster.renew(spec.number, reconfig.peers, reconfig.reason, offer.steps)
            effects += self._reconfigure(Offer, found)
        return effects

    # --- deciding

    def _begin(self, commit: Commit, now: float) -> list[Effect]:
        """The round of `commit` is decided, the next one begins."""
        before = self.roster.plan or self.state.latest
        rest = self.promises.settle(commit, self._broken(commit))
        self.newcomers.settle(self._brought(commit))
        self._outcome, self._job, self._answered, self._revealed = Outcome(), None, None, set()
        self.state = self.state.apply(commit)
        self.offers.begin()
        self._verdicts = ReplicaStates()
        self._recomputed, self._computing = 0, ()
        self._dear.clear()
        away, self.roster = self.roster.away, ChainRoster(commit.plan)
        self.roster.away = away
        self._began, self._is_sole = now, self._leads
        self.attestations.forget(commit.round - 1)
        self.accusations.begin(commit.round + 1, self.roster.versions)
        self.newcomers.begin(self.standing, commit.plan)
        rest |= self.standing.fallen()
        self._claims.forget(self.state)
        self.witnesses.add(commit)
        has_ended = self.phase in (Phase.CLOSING, Phase.OVER)
        self.position.step(ev.Decided, self.phase if has_ended else self._between())
        moved = ev.moves(self.manifest, before, commit.plan, self.ready)
        effects: list[Effect] = self.position.stay(ev.Decided, moved) if moved else []
        told = [ev.Resting(peer, until, peer in self.standing.found_bad) for peer, until in sorted(rest.items())]
        return effects + (self.position.stay(ev.Decided, told) if told else [])

    def _broken(self, commit: Commit) -> dict[str, float]:
        quarrelling = self.accusations.quarrelling
        found = presence.broken(self.roster.plan, commit, self.offers.brought, self.roster.away, quarrelling)
        plan = self.roster.plan
        if plan is None or self.newcomers.are_waited_for:
            return found
        new = {peer for replica in plan.replicas if replica.number in self.newcomers.numbers for peer in replica.peers}
        return {peer: strike for peer, strike in found.items() if peer not in new}

    def _brought(self, commit: Commit) -> set[int]:
        """The replicas all of whose work was offered, as far as this node has seen, or counts."""
        replicas = self.roster.plan.replicas if self.roster.plan is not None else ()
        offered = {r.number for r in replicas if set(r.peers) <= self.offers.brought}
        return offered | {c.replica for c in commit.contributions} | {x.replica for x in commit.left_out if x.probation}

    def candidates(self, decree: Enacted | None = None) -> list[Candidate]:
        """Returns the peers that can be planned, as this node sees them; `decree`: after it."""
        then = self.access.after(decree)
        there = presence.candidates(
            self.ready, self.roster.away, self.attestations.newest, self.state.latest, self.round
        )
        return [c for c in self.marked(there) if then.why_not(c.peer) is None]

    def marked(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        """The candidates with this node's accusations and limits, for its own plans and for judging others'."""
        return self.standing.marked(self.accusations.marked(tuple(candidates)))

    def _advance(self, now: float, event: Event) -> list[Effect]:
        if self.phase is Phase.CLOSING:
            return self._close(now)
        if self.phase is Phase.GATHERING and self._leads:
            return self._propose(now, Outcome(), None) if self._may_begin(now) else []
        return self._decide(now, event) if self.phase is Phase.OPEN and self._leads else []

    def _may_begin(self, now: float) -> bool:
        """Returns whether enough peers are there for the first plan, or access changes before it."""
        decree, joined = self._changes(now)
        wanted = self.manifest.start_peers
        enough = len(self.ready) >= wanted and len(self.candidates()) >= wanted
        return decree is not None or bool(joined) or enough

    def _changes(self, now: float) -> tuple[Enacted | None, tuple[Joined, ...]]:
        decree = self.petitions.enacted(self.manifest, self.head, self._living)
        operators = board.operators(self.manifest, self.head)
        joined = self.guests.next(self.access.after(decree), now)
        return decree, tuple(one for one in joined if one.operator in operators)

    @property
    def aggregates(self) -> tuple[Aggregate, ...] | None:
        """Those that the next commit names: none where the round before has none; None while they are being made."""
        if self.head is None or not aggregation.is_aggregated(self.manifest, self.head):
            return ()
        return self._made.aggregates if self._made is not None and self._made.round == self.head.round else None

    def _decide(self, now: float, event: Event) -> list[Effect]:
        """Has the open round's contributions judged, or proposes its commit, once no peer is waited for."""
        if self.aggregates is None:
            return []
        timing, waited = self.manifest.timing, now - self._began
        news, verdicts = self._look(now), self._verdicts
        if verdicts.pending and waited < timing.round_deadline:
            if not news and isinstance(event, ev.Received | ev.Held | ev.Ready):
                return []  # time alone, or the others, ends the waiting: that is looked at with every Tick
            new, patient = self.newcomers.numbers, self.newcomers.are_waited_for
            if stragglers.waits(self.manifest, self.roster, verdicts, new, waited, patient=patient):
                return []
        diverged = self.attestations.diverged(self.round - 1, ties=True)
        self._outcome = Outcome(verdicts.contributions(), verdicts.left_out(waited), diverged)
        self._job = self._judging_job()
        known = self._answered is not None and self._answered[0] == self._job
        if known or not self._job.contributions:
            return self._settle(now, None)
        return self.position.step(None, Phase.JUDGING, [*self._reveal(), ev.Judge(self._job)])

    def _reveal(self) -> list[Effect]:
        """Names the payloads of the contributions to everybody: from now on this node admits no other offer."""
        shares = [share for c in self._outcome.contributions for share in c.shares if share.root not in self._revealed]
        self._revealed.update(share.root for share in shares)
        return [ev.AnnounceShare(self.round, share) for share in shares]

    def _judging_job(self) -> JudgingJob:
        assert self.head is not None
        new = (c.replica for c in self._outcome.contributions if self.standing.is_on_probation(c.replica, c.peers))
        return JudgingJob(
            manifest=self.manifest,
            round=self.round,
            parent=self.head.digest,
            contributions=tuple(self._verdicts.in_turn()),
            last=self.head.contributions,
            medians=self.state.medians,
            trial=frozenset(new),
        )

    def _settle(self, now: float, event: type | None) -> list[Effect]:
        """Proposes what is left of the contributions, now that they are judged."""
        said = self._outcome
        if said.contributions and self._answered is not None:
            said = said.judged(self.standing, *self._answered)
        late = now - self._began >= self.manifest.timing.gone_after
        enough = said.contributions or (late if self.has_begun else self._may_begin(now))
        effects = self._propose(now, said, event) if enough else []
        if not effects and event is not None:
            self.position.step(event, Phase.OPEN)
        return effects

    def seen(self, now: float) -> tuple[ReplicaStates, float]:
        """As this node sees it: what has become of each replica, and the seconds since the round began."""
        self._look(now)
        return self._verdicts, now - self._began

    def _look(self, now: float) -> bool:
        """Judges the replicas to which something happened. Whether any verdict is new."""
        plan, waited = self.roster.plan, now - self._began
        planned = plan.peers if plan is not None else frozenset[str]()
        wrong = {d.peer for d in self.attestations.diverged(self.round - 1, ties=True, among=planned)}
        silent = waited >= self.manifest.timing.gone_after
        based = self.attestations.of(self.round - 1)
        lost = self._absent if stragglers.absent_timed_out(self._verdicts.since.values(), waited) else frozenset[str]()

        def judge(replica: ReplicaSpec) -> Contribution | str | None:
            ended = self.roster.ended(replica.number)
            there = (self.ready.keys() if silent else set(replica.peers)) - lost
            return ended or self.offers.verdict(replica, wrong, based, there)

        return self._verdicts.renew(Examined(plan, wrong, (silent, lost, self.roster.changes)), judge, waited)

    def _propose(self, now: float, said: Outcome, event: type | None) -> list[Effect]:
        """Asks for the next plan, if there is one, and hands the commit to the quorum with it."""
        state, head, (decree, joined) = self.state, self.head, self._changes(now)
        commit = Commit(
            run=self.manifest.run_id,
            round=state.round,
            parent=head.digest if head is not None else self.manifest.run_id,
            time=now,
            contributions=tuple(said.contributions),
            left_out=capacity.shortened(said.left_out),
            diverged=capacity.foremost(said.diverged, self.roster.plan),
            digests=self.attestations.majority(state.round - 1),
            plan=None,
            decree=decree,
            decrees=access.decrees_after(head) + (decree is not None),
            joined=joined,
            evaluations=self._claims.next(state, Evaluation),
            scores=self._claims.next(state, Score),
            schedule=schedule.after(head, decree),
            board=board.after(self.manifest, head, decree),
            idle=schedule.idle_after(self.manifest, head, has_work=bool(said.contributions)),
            aggregates=self.aggregates or (),
        )
        if schedule.is_over(self.manifest, commit):
            return self.position.step(event, Phase.DECIDING, [ev.Propose(commit)])
        return self._ask(commit, event)

    def _ask(self, commit: Commit, event: type | None) -> list[Effect]:
        """Asks for the plan that follows `commit`."""
        candidates = self.candidates(commit.decree)
        if not self.has_begun and len(candidates) < self.manifest.start_peers:
            candidates = []  # the first plan waits, whatever else there is to say
        fallen = tuple(c for c in candidates if self.standing.rests(c.peer))
        able = [c for c in candidates if c not in fallen]
        there, resting = self.promises.apart(able, self.round + 1, self._broken(commit))
        question = Question(
            manifest=self.manifest,
            candidates=there,
            resting=resting,
            fallen=fallen,
            round=commit.round + 1,
            previous=self.roster.plan or self.state.latest,
            contributions=commit.contributions,
            left_out=commit.left_out,
            attested=self.attestations.snapshot(commit.round - 1) if commit.round else None,
            range_share=schedule.limits(self.manifest, commit.schedule).range_share,
        )
        said = self._asked and (self._asked[0], self._asked[1].decree, self._asked[1].joined)
        if said == (question, commit.decree, commit.joined):
            return []  # these candidates make no replica
        self._asked = question, commit
        return self.position.step(event, Phase.PLANNING, [ev.MakePlan(question)])

    def _planned(self, event: ev.Planned) -> list[Effect]:
        """Takes a finished plan; drops it if its round is no longer open."""
        if self.phase is not Phase.PLANNING or self._asked is None or event.question != self._asked[0]:
            return []
        commit = dataclasses.replace(self._asked[1], plan=event.plan)
        if commit.plan is None and self.accusations.forget():
            self._asked = None
            return self._ask(commit, ev.Planned)
        if commit.plan is None and not (commit.contributions or commit.decree or commit.joined):
            return self.position.step(ev.Planned, self._between())
        return self.position.step(ev.Planned, Phase.DECIDING, [ev.Propose(commit)])

    def _close(self, now: float) -> list[Effect]:
        """After the last round: the members get time to attest the final state."""
        assert self.head is not None
        settled = self._left.union(self.attestations.of(self.head.round))
        waited, timing = now - self._began, self.manifest.timing
        if presence.waits_for_final_state(self.state.latest, timing, settled, self.ready, waited):
            return []
        return self.position.step(None, Phase.OVER, [ev.Done(self.head.round)])
