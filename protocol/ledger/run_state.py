"""The state of a run after a commit: a fold of the log, as in any replicated state machine. Pure.

    state(0) = begin(manifest)        state(r) = state(r - 1).apply(commit r)

The leader, the voters and `potluck log verify` hold the same value after the same commits, whoever they are. What may come next is
checked against it by protocol/ledger/rules.py.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from protocol.ledger import part_lists, standing
from protocol.ledger.evaluation import Due
from protocol.ledger.standing import Known, Standing
from protocol.run.manifest import Manifest
from protocol.wire.commit import Commit, Contribution
from protocol.wire.plan import Plan

MEDIANS_KEPT = 8
"""Rounds with contributions whose median update norms the state has."""


@dataclass(frozen=True)
class RunState:
    """The state after a commit, or before the first one."""

    manifest: Manifest
    """The manifest of the run."""
    standing: Standing
    """Access, probation, reputation, scores and audits, and the plan of the open round."""
    due: Due
    """The held-out evaluation that is due."""
    head: Commit | None = None
    """The newest commit, None before the first one."""
    latest: Plan | None = None
    """The newest plan of the log; the open round's, where it has one."""
    medians: tuple[float, ...] = ()
    """Median update norms of the last rounds (protocol/round/judging.py)."""

    @property
    def round(self) -> int:
        """The open round; 0 before the first commit."""
        return 0 if self.head is None else self.head.round + 1

    @property
    def plan(self) -> Plan | None:
        """The plan of the open round, None where it has none."""
        return self.standing.plan

    @property
    def last(self) -> tuple[Contribution, ...]:
        """The contributions of the newest commit."""
        return () if self.head is None else self.head.contributions

    def apply(self, commit: Commit) -> RunState:
        """The state after the next commit."""
        return self._apply(commit, None)

    def _apply(self, commit: Commit, known: dict[str, Known] | None) -> RunState:
        """The same; `known` as in `Standing.after`."""
        return dataclasses.replace(
            self,
            standing=self.standing.after(commit, known),
            due=self.due.after(commit),
            head=commit,
            latest=commit.plan or self.latest,
            medians=(*self.medians, *medians([commit]))[-MEDIANS_KEPT:],
        )


def begin(manifest: Manifest) -> RunState:
    """The state before the first commit."""
    return RunState(manifest, standing.of(manifest), Due(manifest))


def fold(manifest: Manifest, commits: Iterable[Commit]) -> RunState:
    """The state after the first commits of a log. It is linear in their number, and reads each commit once."""
    found, known = begin(manifest), dict[str, Known]()
    for commit in commits:
        found = found._apply(commit, known)
    return found


def medians(commits: Sequence[Commit]) -> tuple[float, ...]:
    """Of the last MEDIANS_KEPT of `commits` that have contributions: the median of their clipped norms."""
    found: list[float] = []
    for commit in reversed(commits):
        if commit.contributions:
            found.append(statistics.median(norm_of(c) * c.scale for c in commit.contributions))
        if len(found) == MEDIANS_KEPT:
            break
    return tuple(reversed(found))


def norm_of(contribution: Contribution) -> float:
    """The L2 norm of all that a contribution adds, as its lists of parts have it."""
    return part_lists.total(share.norm for share in contribution.shares)
