"""Rules for the claims that a commit may carry: held-out losses and scores. Pure.

A peer measures a claim, signs it and sends it to the nodes. The leader puts claims with an open place into its commit.
One pool serves all kinds; KINDS says how they differ.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from protocol.identity import Identity, short_peer
from protocol.ledger.run_state import RunState
from protocol.wire.claims import Claim, Evaluation, Score, evaluation_body, score_body
from protocol.wire.commit import DOMAIN, MAX_EVALUATIONS, MAX_SCORES, Commit

C = TypeVar("C", Evaluation, Score)
Key = tuple[int, int, str]


@dataclass(frozen=True, slots=True)
class Kind(Generic[C]):
    """The rules of one kind of claim."""

    name: str
    """The kind, with its article, as in "has a score that ..."."""
    of: Callable[[Commit], tuple[C, ...]]
    """The claims of this kind in a commit."""
    most: int
    """Claims in one commit."""
    key: Callable[[C], Key]
    """The claim's place: a commit has one claim for each, and lists them in this order."""
    is_due: Callable[[RunState, C], bool]
    """Whether the place is open after a state; signature and content are not looked at."""
    why_not: Callable[[RunState, C], str | None]
    """The reason why the claim cannot be in the commit after a state, None if it can."""
    body: Callable[[bytes, str, C], bytes]
    """The bytes that are signed: (domain, digest of the commit that it is about, claim)."""


EVALUATION: Kind[Evaluation] = Kind(
    name="an evaluation",
    of=lambda commit: commit.evaluations,
    most=MAX_EVALUATIONS,
    key=lambda claim: (claim.round, 0, claim.peer),
    is_due=lambda state, claim: claim.round == state.due.round and claim.peer not in state.due.known,
    why_not=lambda state, claim: state.due.why_not(claim),
    body=evaluation_body,
)
SCORE: Kind[Score] = Kind(
    name="a score",
    of=lambda commit: commit.scores,
    most=MAX_SCORES,
    key=lambda claim: (claim.round, 0, claim.peer),
    is_due=lambda state, claim: state.standing.scoring.is_due(claim),
    why_not=lambda state, claim: state.standing.scoring.why_not(claim),
    body=score_body,
)
KINDS: dict[type, Kind[Any]] = {Evaluation: EVALUATION, Score: SCORE}


def signed(identity: Identity, of: str, claim: C) -> C:
    """`claim` with the peer id and the signature of `identity`. `of`: the digest of the commit that it is about."""
    return dataclasses.replace(
        claim, peer=identity.peer_id, signature=identity.sign(KINDS[type(claim)].body(DOMAIN, of, claim))
    )


def why_not(state: RunState, commit: Commit, kind: Kind[Any]) -> Iterator[str]:
    """Every claim of one kind that cannot be in `commit`, which comes after `state`, as the end of "the commit ..."."""
    heard = set[Key]()
    for claim in kind.of(commit):
        reason = kind.why_not(state, claim)
        if kind.key(claim) in heard:
            reason = f"is told by {short_peer(claim.peer)} for the second time"
        heard.add(kind.key(claim))
        if reason is not None:
            yield f"has {kind.name} that {reason}"


class Claims:
    """The claims that a node has heard and the log does not have yet: at most one for each place that is open."""

    def __init__(self) -> None:
        self._heard: dict[type, dict[Key, Any]] = {kind: {} for kind in KINDS}

    def add(self, state: RunState, claim: Claim) -> None:
        """Keeps a claim that can be in the commit after `state`; the first one for its place stays."""
        kind, heard = KINDS[type(claim)], self._heard[type(claim)]
        key = kind.key(claim)
        if key not in heard and kind.why_not(state, claim) is None:
            heard[key] = claim

    def next(self, state: RunState, kind: type[C]) -> tuple[C, ...]:
        """The claims of one kind for the commit after `state`, the oldest first."""
        rule, heard = KINDS[kind], self._heard[kind]
        due = (heard[key] for key in sorted(heard) if rule.is_due(state, heard[key]))
        return tuple(itertools.islice(due, rule.most))

    def forget(self, state: RunState) -> None:
        """Drops the claims whose place is not open any more."""
        for kind, heard in self._heard.items():
            self._heard[kind] = {key: claim for key, claim in heard.items() if KINDS[kind].is_due(state, claim)}
