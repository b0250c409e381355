"""Which contributions are trained again, by whom, and what follows from it. Pure.

An *audit*: another full replica, an *examiner*, trains a contribution again. It begins at the state before the round, with moments of its own,
and takes as many steps as the contribution claims; once on the text that this one was assigned, and once on other text. The *agreement* is
how much better the contribution fits the one than the other, in standard deviations of what the round's other contributions do
(peer/node/examining.py). So whoever trained on other text, or not at all, has about 0, whatever else he sends.

Who is audited, and by whom, follows from the digest of the commit that counts the contribution, so nobody knows it while the work is
done. A contribution's chance is such that all full replicas together give the manifest's `judging.audit_share` of their time; and each is
examiner as often as it is fast. Only contributions of full replicas are trained again: what a chain learns went through its boundaries.

One examiner is named first, and EXAMINERS - 1 for the case that it finds too little. As soon as the log has that, these train too. Two
of one opinion decide. It is found against a contribution's maker if both found less than LEAST, and against whoever was alone with the
opposite opinion, whichever that is. What one alone has found has no consequence.

A commit names at most MAX_AUDITS audits (protocol/ledger/claims.py), of those whose turn it is. An audit that comes late has a place for KEPT
rounds, and no commit waits for it.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from protocol import identity
from protocol.identity import short_peer
from protocol.run.manifest import Manifest
from protocol.wire.audit import Audit, audit_body
from protocol.wire.commit import DOMAIN, Commit, Contribution

EXAMINERS = 3
"""Of one contribution, at most."""
TRAININGS = 2
"""Of each audit: on the assigned text, and on other text."""
LEAST = 2.0
"""The agreement of an honest contribution is more than this (docs/results/audits.md)."""
COMPARED = 3
"""Other contributions, at least: they say what chance does."""
KEPT = 16
"""Rounds in which an audit has a place in the log."""


@dataclass(frozen=True, slots=True)
class Turn:
    """The contribution of `replica`, made by `maker`, to `round`, whose commit has the digest `of`, is to be trained again by the first of
    `examiners`, and by the others if that finds too little. `said`: who has said what it found."""

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
        bad = sum(agreement < LEAST for _, agreement in self.said)
        good = len(self.said) - bad
        if bad == 0 and good > 0:
            return True
        return None if max(good, bad) < 2 else good > bad

    def add(self, said: Audit) -> Turn:
        """With what one more examiner has found."""
        return dataclasses.replace(self, said=(*self.said, (said.peer, said.agreement)))


@dataclass(frozen=True, slots=True)
class Found:
    """What the log's audits say against `peer`: that its contribution to `round` is not what it claims to be, or, where `examined`, that what it
    found of another's was wrong."""

    peer: str
    round: int
    examined: bool


@dataclass(frozen=True, slots=True)
class Audits:
    """What is to be trained again, after the commits so far: the oldest first."""

    manifest: Manifest
    turns: tuple[Turn, ...] = ()

    def turn(self, round: int, replica: int) -> Turn | None:
        """Of that contribution, None where it is not to be audited."""
        return next((t for t in self.turns if (t.round, t.replica) == (round, replica)), None)

    def is_due(self, said: Audit) -> bool:
        """Whether this examiner's audit has a place in the next commit."""
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
        """What the audits in the next commit decide."""
        turns = self._told(commit)
        return tuple(found for turn in turns for found in _decided(turn))

    def after(self, commit: Commit) -> Audits:
        """With the next commit of the log."""
        if not (self.turns or commit.contributions):
            return self
        kept = [t for t in self._told(commit) if t.verdict is None and commit.round - t.round < KEPT]
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
        enough = len(commit.contributions) > COMPARED
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
        if (agreement >= LEAST) != turn.verdict:
            yield Found(peer, turn.round, True)
