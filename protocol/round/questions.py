"""The question which plan comes next, with all that the answer depends on, as it was when it was asked. Pure.

A fresh plan of 300 peers takes seconds, one of 10,000 takes ten (docs/results/planner.md), and a bootstrap node has to answer its
peers meanwhile. So the leader's machine does not make plans: it asks (leader_events.py: MakePlan), somebody finds the answer in
his own time (bootstrap/background_jobs.py), and the answer comes back as an event (Planned). Nothing of a question ever changes. So it can be
answered on another thread, and an answer that comes too late is known by its question.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from protocol.ledger import capacity, ranges
from protocol.planning import memory, planner
from protocol.planning.partition import Candidate
from protocol.round.attestations import Attested
from protocol.run.manifest import Manifest
from protocol.wire.commit import Contribution, LeftOut
from protocol.wire.plan import Plan, StageSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """`round`: the plan's. `resting`: who is planned only where the `candidates` make not even one replica (protocol/round/promises.py), and `fallen`
    who only where those do not either (protocol/ledger/standing.py). `previous`: the last plan, with its chains as they were repaired. `contributions`, `left_out`: what the commit
    that brings the plan says of the round before. `attested`: of the state
    before that round; None: everybody has what the first plan needs. `range_share`: what strangers of one range of addresses may have of it."""

    manifest: Manifest
    candidates: tuple[Candidate, ...]
    resting: tuple[Candidate, ...] = ()
    fallen: tuple[Candidate, ...] = ()
    round: int
    previous: Plan | None
    contributions: tuple[Contribution, ...]
    left_out: tuple[LeftOut, ...]
    attested: Attested | None
    range_share: float = 1.0

    def answer(self, relay_bps: float = math.inf) -> Plan | None:
        """The plan, no longer than a commit can say; None where the candidates make not even one replica. `relay_bps`: what all relays
        together pass on, in bits a second."""
        plan = self._plan(self.candidates, relay_bps)
        if plan is None and self.resting:
            plan = self._plan((*self.candidates, *self.resting), relay_bps)
        if plan is None and self.fallen:
            plan = self._plan((*self.candidates, *self.resting, *self.fallen), relay_bps)
        of = {c.peer: c.range for c in (*self.candidates, *self.resting, *self.fallen)}
        plan = plan and ranges.limited(self.manifest, plan, of, self.range_share)
        return plan and capacity.bounded(self.manifest, plan, self.contributions, self.left_out)

    def _plan(self, candidates: tuple[Candidate, ...], relay_bps: float) -> Plan | None:
        return planner.make_plan(
            self.manifest,
            candidates,
            round=self.round,
            previous=self.previous,
            done={c.replica: c.steps for c in self.contributions},
            holds=self._holds if self.attested is not None else None,
            relay_bps=relay_bps,
        )

    def _holds(self, stage: StageSpec) -> bool:
        """Whether a peer attested all shards that a stage needs."""
        wanted = memory.held_shards(self.manifest, stage.first, stage.last)
        return self.attested is not None and self.attested.holds(stage.peer, wanted)
