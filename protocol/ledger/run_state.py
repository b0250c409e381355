"""The state of a run after a commit: a fold of the log, as in any replicated state machine. Pure.

    state(0) = begin(manifest)        state(r) = state(r - 1).apply(commit r)

*Evaluation.* After every `evaluation.every` rounds, EVALUATORS of the plan's full replicas, in turn, and the operators'
auditors measure the held-out loss of the state. The next commits carry their signed results.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from protocol import identity
from protocol.identity import short_peer
from protocol.ledger import board, part_lists, standing
from protocol.ledger.standing import Reputation, Standing
from protocol.run.manifest import Manifest
from protocol.wire.claims import Evaluation, evaluation_body
from protocol.wire.commit import DOMAIN, Commit, Contribution
from protocol.wire.plan import Plan

EVALUATORS = 3
"""Full replicas that measure one state: two honest ones outvote a liar."""


@dataclass(frozen=True, slots=True)
class Due:
    """The evaluation that is due: of the state after `round` (-1: none), whose commit has the digest `of`.

    by: evaluators besides the operators; known: peers whose result is in the log
    """

    manifest: Manifest
    round: int = -1
    of: str = ""
    by: tuple[str, ...] = ()
    known: frozenset[str] = frozenset()
    operators: tuple[str, ...] = ()

    def why_not(self, said: Evaluation) -> str | None:
        """Why this has no place in the next commit; None if it has one. Checks its signature."""
        if self.round < 0 or said.round != self.round:
            return f"measures the state of round {said.round}, which is not due"
        if said.peer not in self.by and said.peer not in self.operators:
            return f"is of {short_peer(said.peer)}, whose turn it is not"
        if said.peer in self.known:
            return f"is told by {short_peer(said.peer)} for the second time"
        if not 1 <= said.sequences <= self.manifest.evaluated_sequences:
            return f"measures on {said.sequences} sequences"
        if not identity.verify(said.peer, evaluation_body(DOMAIN, self.of, said), said.signature):
            return f"is not signed by {short_peer(said.peer)}"
        return None

    def after(self, commit: Commit) -> Due:
        """Returns the due measurements after `commit`."""
        if evaluation_is_due(self.manifest, commit):
            by, operators = evaluators(self.manifest, commit), board.operators(self.manifest, commit)
            return Due(self.manifest, commit.round, commit.digest, by, operators=operators)
        if not commit.evaluations:
            return self
        return dataclasses.replace(self, known=self.known.union(x.peer for x in commit.evaluations))


def evaluation_is_due(manifest: Manifest, commit: Commit) -> bool:
    """Returns whether the state after `commit` is to be measured; a later commit must be able to carry the result."""
    every = manifest.evaluation.every
    return every > 0 and commit.round % every == 0 and commit.plan is not None


def evaluators(manifest: Manifest, commit: Commit) -> tuple[str, ...]:
    """The replicas that measure the state after `commit`: EVALUATORS at most, in turn by their numbers."""
    whole = sorted((r for r in commit.plan.replicas if not r.is_chain), key=lambda r: r.number) if commit.plan else []
    if not whole:
        return ()
    first = commit.round // manifest.evaluation.every * EVALUATORS
    count = min(EVALUATORS, len(whole))
    return tuple(whole[(first + place) % len(whole)].peers[0] for place in range(count))


MEDIANS_KEPT = 8


@dataclass(frozen=True)
class RunState:
    """The state after a commit, or before the first one."""

    manifest: Manifest
    """The manifest of the run."""
    standing: Standing
    """Access, probation, reputation and scores, and the plan of the open round."""
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
        return self.standing.plan

    @property
    def last(self) -> tuple[Contribution, ...]:
        return () if self.head is None else self.head.contributions

    def apply(self, commit: Commit) -> RunState:
        return self._apply(commit, None)

    def _apply(self, commit: Commit, known: dict[str, Reputation] | None) -> RunState:
        """Returns the state after `commit`; `known` as in `Standing.after`."""
        return dataclasses.replace(
            self,
            standing=self.standing.after(commit, known),
            due=self.due.after(commit),
            head=commit,
            latest=commit.plan or self.latest,
            medians=(*self.medians, *medians([commit]))[-MEDIANS_KEPT:],
        )


def begin(manifest: Manifest) -> RunState:
    return RunState(manifest, standing.of(manifest), Due(manifest))


def fold(manifest: Manifest, commits: Iterable[Commit]) -> RunState:
    """The state after the first commits of a log. It is linear in their number, and reads each commit once."""
    found, known = begin(manifest), dict[str, Reputation]()
    for commit in commits:
        found = found._apply(commit, known)
    return found


def medians(commits: Sequence[Commit]) -> tuple[float, ...]:
    """Of the last MEDIANS_KEPT of `commits` that have contributions: the median of their clipped norms."""
    found: list[float] = []
    for commit in reversed(commits):
        if commit.contributions:
            norms = [part_lists.total(share.norm for share in c.shares) * c.scale for c in commit.contributions]
            found.append(statistics.median(norms))
        if len(found) == MEDIANS_KEPT:
            break
    return tuple(reversed(found))
