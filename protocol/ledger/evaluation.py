"""Who measures the held-out loss of which state, and what of it has a place in the log. Pure.

After every `evaluation.every` rounds of the manifest the state is to be measured, by EVALUATORS of the full replicas of the plan that the
commit makes, by turns, and by any operator who likes (whose auditor holds the state too). Each signs what it found and sends it to the nodes. The
next commit has it, or a later one: nobody waits for it, and when the next state is due nobody wants it any more.

A commit names at most MAX_EVALUATIONS of them (protocol/ledger/claims.py), each once, of the peers that were to measure.
What it cannot show is that a figure is true: so readers show the median of all that were told, and who told them (peer/ui/run_view.py).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from protocol import identity
from protocol.identity import short_peer
from protocol.ledger import board
from protocol.run.manifest import Manifest
from protocol.wire.commit import DOMAIN, Commit
from protocol.wire.evaluation import Evaluation, evaluation_body

EVALUATORS = 3
"""Full replicas that measure one state: two honest ones outvote a liar."""


@dataclass(frozen=True, slots=True)
class Due:
    """What is to be measured now: the state after `round`, -1 for none, whose commit has the digest `of`; `by` whom, besides the `operators`;
    and who is in the log with it already."""

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
        """What is due when `commit` is the newest."""
        if is_due(self.manifest, commit):
            by, operators = evaluators(self.manifest, commit), board.operators(self.manifest, commit)
            return Due(self.manifest, commit.round, commit.digest, by, operators=operators)
        if not commit.evaluations:
            return self
        return dataclasses.replace(self, known=self.known.union(x.peer for x in commit.evaluations))


def is_due(manifest: Manifest, commit: Commit) -> bool:
    """Whether the state after `commit` is to be measured: a plan follows, so that a later commit can say what was found."""
    every = manifest.evaluation.every
    return every > 0 and commit.round % every == 0 and commit.plan is not None


def evaluators(manifest: Manifest, commit: Commit) -> tuple[str, ...]:
    """Who of the replicas measures the state after `commit`: the next ones in the order of their numbers, EVALUATORS of them at most."""
    whole = sorted((r for r in commit.plan.replicas if not r.is_chain), key=lambda r: r.number) if commit.plan else []
    if not whole:
        return ()
    first = commit.round // manifest.evaluation.every * EVALUATORS
    count = min(EVALUATORS, len(whole))
    return tuple(whole[(first + place) % len(whole)].peers[0] for place in range(count))
