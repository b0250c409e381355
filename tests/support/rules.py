"""Reasons that groups of rules (protocol/ledger/rules.py) give, where a test makes a part of the state only."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from protocol.ledger import rules, run_state
from protocol.ledger.access import Access
from protocol.ledger.rules import Rule
from protocol.ledger.run_state import Due
from protocol.ledger.scoring import Scoring
from protocol.ledger.standing import Standing
from protocol.run.manifest import Manifest
from protocol.wire.commit import Commit
from protocol.wire.plan import Plan

WORK: tuple[Rule, ...] = (
    rules.is_within_run,
    rules.decides_every_replica,
    rules.counts_planned_peers,
    rules.weighs_by_tokens,
    rules.counts_no_diverged_peer,
    rules.has_readable_lists,
    rules.counts_peers_once,
    rules.plans_next_round,
    rules.plans_whole_models,
    rules.numbers_are_new,
)
STANDING: tuple[Rule, ...] = (
    rules.counts_no_probation,
    rules.seats_no_resting_peer,
    rules.weighs_by_reputation,
    rules.leaves_out_its_makers,
    rules.names_makers_once,
    rules.ends_no_probation_late,
    rules.plans_no_resting_peer,
    rules.has_due_scores,
)


def of_work(manifest: Manifest, plan: Plan | None, commit: Commit) -> list[str]:
    """What is wrong with the work of `commit`, whose round has `plan`."""
    begun = run_state.begin(manifest)
    state = dataclasses.replace(begun, standing=dataclasses.replace(begun.standing, plan=plan), latest=plan)
    return _reasons(state, commit, WORK)


def of_standing(standing: Standing, commit: Commit) -> list[str]:
    """What is wrong with what `commit` says of peers, after `standing`."""
    return _reasons(_with(standing), commit, STANDING)


def of_access(manifest: Manifest, access: Access, commit: Commit) -> list[str]:
    """Intruders of `commit`, after `access`."""
    begun = run_state.begin(manifest)
    state = _with(dataclasses.replace(begun.standing, access=access))
    return _reasons(state, commit, (rules.plans_admitted_peers, rules.admits_invited_peers))


def of_claims(before: Due | Scoring, commit: Commit) -> list[str]:
    """What is wrong with the claims of one kind in `commit`."""
    rule = {Due: rules.has_due_evaluations, Scoring: rules.has_due_scores}[type(before)]
    return _reasons(due(before), commit, (rule,))


def due(before: Due | Scoring) -> run_state.RunState:
    """The state in which these claims are due, and no others."""
    begun = run_state.begin(before.manifest)
    match before:
        case Due():
            return dataclasses.replace(begun, due=before)
        case Scoring():
            return _with(dataclasses.replace(begun.standing, scoring=before))


def _with(standing: Standing) -> run_state.RunState:
    begun = run_state.begin(standing.manifest)
    return dataclasses.replace(begun, standing=standing, latest=standing.plan)


def _reasons(state: run_state.RunState, commit: Commit, group: Sequence[Rule]) -> list[str]:
    return [violation.reason for violation in rules.check(state, commit, group)]
