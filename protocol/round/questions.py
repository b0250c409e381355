"""The question which plan comes next, with all that the answer depends on. Pure, and immutable.

A plan of 300 peers takes seconds, one of 10,000 takes ten (docs/results/planner.md). So the leader's machine asks
(MakePlan), another thread answers (bootstrap/latest_job.py), and the answer returns as an event (Planned), with the
question to recognize a late one by.
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
    """All that the next plan depends on.

    resting: planned only without a replica of candidates; fallen: only without one of those
    previous: the last plan with repaired chains; attested: before the round, None: all have the shards
    """

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
        """The plan, within a commit's bounds; None if there is no replica. relay_bps: bits a second of all relays."""
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
        wanted = memory.held_shards(self.manifest, stage.first, stage.last)
        return self.attested is not None and self.attested.holds(stage.peer, wanted)
