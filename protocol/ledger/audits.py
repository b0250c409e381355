"""Audits of contributions: which are trained again, by whom, and what follows. Pure.

An *examiner*, another full replica, trains a contribution again: from the state before the round, with its own moments,
and as many steps as the contribution claims, once on the assigned text and once on other text. The *agreement* is how
much better the contribution fits the former, in standard deviations of the round's other contributions
(peer/node/examining.py). A peer that trained on other text, or not at all, has about 0.

Audits and examiners follow from the digest of the commit that counts the contribution, so they are unknown while the
work is done. The chance is such that all full replicas together give `judging.audit_share` of their time; faster ones
examine more often. Only contributions of full replicas are audited.

One examiner is named first, and EXAMINERS - 1 more for an agreement below LEAST_AGREEMENT. Two of one opinion decide:
against the maker if both found less than LEAST_AGREEMENT, and against an examiner that was alone with the opposite
opinion. A single result has no consequence. A commit carries at most MAX_AUDITS audits, an audit at most KEPT_ROUNDS
late.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from protocol import identity
from protocol.identity import short_peer
from protocol.run.manifest import Manifest
from protocol.wire.claims import Audit, audit_body
from protocol.wire.commit import DOMAIN, Commit, Contribution

EXAMINERS = 3
"""Of one contribution, at most."""
TRAININGS = 2
"""Of each audit: on the assigned text, and on other text."""
LEAST_AGREEMENT = 2.0
"""The agreement of an honest contribution is more than this (docs/results/judging.md)."""
LEAST_COMPARED_WITH = 3
"""Other contributions, at least: they say what chance does."""
KEPT_ROUNDS = 16
"""Rounds in which an audit has a place in the log."""


@dataclass(frozen=True, slots=True)
class Turn:
    """An audit of the contribution of `replica`, made by `maker`, to `round`.

    of: digest of the round's commit
    examiners: the first one trains it again, the others if that finds too little
    said: (examiner, agreement) so far
    """

    round: int
    of: str
    replica: int
    maker: str
    examiners: tuple[str, ...]
    said: tuple[tuple[str, float], ...] = ()

    @property
    def wanted(self) -> tuple[str, ...]:
        """Whose audit has a place in the next commit."""
        if not self.said:
            return self.examiners[:1]
        heard = {peer for peer, _ in self.said}
        return tuple(peer for peer in self.examiners if peer not in heard) if self.verdict is None else ()

    @property
    def verdict(self) -> bool | None:
        """Whether the contribution is what it claims to be; None as long as it is not decided."""
        bad = sum(agreement < LEAST_AGREEMENT for _, agreement in self.said)
        good = len(self.said) - bad
        if bad == 0 and good > 0:
            return True
        return None if max(good, bad) < 2 else good > bad

    def add(self, said: Audit) -> Turn:
        return dataclasses.replace(self, said=(*self.said, (said.peer, said.agreement)))


@dataclass(frozen=True, slots=True)
class Found:
    """A finding of audits against `peer`: its work in `round` is not what it claims, or it `examined` wrongly."""

    peer: str
    round: int
    examined: bool


@dataclass(frozen=True, slots=True)
class Audits:
    """What is to be trained again, after the commits so far: the oldest first."""

    manifest: Manifest
    turns: tuple[Turn, ...] = ()

    def turn(self, round: int, replica: int) -> Turn | None:
        return next((t for t in self.turns if (t.round, t.replica) == (round, replica)), None)

    def is_due(self, said: Audit) -> bool:
        turn = self.turn(said.round, said.replica)
        return turn is not None and said.peer in turn.wanted

    def why_not(self, said: Audit) -> str | None:
        """Why this has no place in the next commit; None if it has one. Checks its signature."""
        turn = self.turn(said.round, said.replica)
        if turn is None:
            return f"is of replica {said.replica} in round {said.round}, which is not to be trained again"
        if said.peer not in turn.wanted:
            return f"is of {short_peer(said.peer)}, whose turn it is not"
        if not identity.verify(said.peer, audit_body(DOMAIN, turn.of, said), said.signature):
            return f"is not signed by {short_peer(said.peer)}"
        return None

    def found(self, commit: Commit) -> tuple[Found, ...]:
        turns = self._told(commit)
        return tuple(found for turn in turns for found in _decided(turn))

    def after(self, commit: Commit) -> Audits:
        if not (self.turns or commit.contributions):
            return self
        kept = [t for t in self._told(commit) if t.verdict is None and commit.round - t.round < KEPT_ROUNDS]
        return Audits(self.manifest, (*kept, *turns(self.manifest, commit)))

    def _told(self, commit: Commit) -> list[Turn]:
        """The turns with what `commit` says."""
        found = list(self.turns)
        for said in commit.audits:
            for place, turn in enumerate(found):
                if (turn.round, turn.replica) == (said.round, said.replica) and said.peer in turn.examiners:
                    found[place] = turn.add(said)
        return found


def turns(manifest: Manifest, commit: Commit) -> Iterator[Turn]:
    """Which contributions of `commit` are to be trained again, in its order."""
    if not manifest.judging.audit_share:
        return
    planned = {r.peers[0] for r in commit.plan.replicas if len(r.peers) == 1} if commit.plan is not None else set()
    whole = [c for c in commit.contributions if len(c.shares) == 1]
    able = [c for c in whole if c.peers[0] in planned]
    chance = int(manifest.judging.audit_share / TRAININGS * (1 << 64))
    for contribution in whole:
        maker, key = contribution.peers[0], f"{commit.digest} {contribution.replica}"
        others = [c for c in able if c.peers[0] != maker]
        enough = len(commit.contributions) > LEAST_COMPARED_WITH
        if enough and others and _draw(key, "audited") < chance:
            yield Turn(commit.round, commit.digest, contribution.replica, maker, _examiners(key, others))


def _examiners(key: str, others: Sequence[Contribution]) -> tuple[str, ...]:
    """EXAMINERS of those who made these, at most; each with a chance that is its part of the tokens."""
    left, found = sorted(others, key=lambda c: c.replica), list[str]()
    while left and len(found) < EXAMINERS:
        at = _draw(key, f"examiner {len(found)}") * sum(c.tokens for c in left) >> 64
        for place, contribution in enumerate(left):
            at -= contribution.tokens
            if at < 0:
                found.append(left.pop(place).peers[0])
                break
    return tuple(found)


def _draw(key: str, what: str) -> int:
    """A number of 64 bits that nobody can choose."""
    return int.from_bytes(hashlib.sha256(DOMAIN + f"audit {key} {what}".encode()).digest()[:8], "big")


def _decided(turn: Turn) -> Iterator[Found]:
    """What a turn with enough audits says against whom."""
    if turn.verdict is None:
        return
    if not turn.verdict:
        yield Found(turn.maker, turn.round, False)
    for peer, agreement in turn.said:
        if (agreement >= LEAST_AGREEMENT) != turn.verdict:
            yield Found(peer, turn.round, True)
