"""Who scores whose contributions, on which text, and what of it has a place in the log. Pure.

A contribution to a round is worth what its update makes of the loss. Full replicas that were in the round measure it, on text that
the replica was given (*assigned*) and on held-out text (*other*): with the update and without it, on the same sequences, so that what is hard
about a text cancels. (Gauntlet's idea: Lidin et al., 2025, arXiv:2505.21684.) Each signs what it found, and a commit of one of the next LATE
rounds has it. What follows from it is for protocol/ledger/marks.py.

    who         SCORERS of the full replicas whose work is in the same commit, and which were not much slower than others; never oneself
    whose       whoever was never scored first, then who was scored longest ago, as far as the scorers' time goes
    which text  `sequences` of each kind, the same for all scorers of a contribution: so honest ones find the same but for rounding

All of it follows from the commit, and its order from the commit's digest: nobody knew it when the work was done. A mark costs PASSES forward
passes of `sequences`, and a sequence that is trained on costs TRAINED. So a scorer that has trained on T sequences gives

    x = score_share TRAINED T / (PASSES sequences)

marks a round on average, T that of the slowest scorer: floor((r + 1) x) - floor(r x) in round r. Where x is small there are rounds without any.

With three full replicas and fewer each has two scorers at most, with two one (marks.py says what that is worth); where no other full
replica is in the commit, nobody scores: the members of chains have not the whole model. What was judged and left out
is not scored: its payloads are not in the log.
"""

from __future__ import annotations

import dataclasses
import hashlib
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from protocol import identity
from protocol.identity import short_peer
from protocol.ledger.marks import Book, Scored
from protocol.run.manifest import Manifest
from protocol.wire.commit import DOMAIN, MAX_SCORES, Commit, Contribution
from protocol.wire.plan import Work
from protocol.wire.score import MAX_MARKS, Mark, Score, score_body

SCORERS = 3
"""Of one contribution: two honest ones outvote a liar."""
LEAST, MOST = 4, 32
"""Sequences of each kind of text that a contribution is scored on."""
PASSES, TRAINED = 4, 3
"""Forward passes of the sequences of a mark: two kinds of text, with and without the update; what a trained sequence costs in such passes."""
SLOW = 0.5
"""Who has trained on less than this part of what the fastest full replica did does not score."""
LATE = 3
"""Rounds after which a score has no place any more."""
POOL = 256
"""Held-out sequences, the first ones, from which those are taken that a round is scored on."""


def sequences(manifest: Manifest) -> int:
    """Of each kind of text: as many as let a replica that does all its steps mark SCORERS contributions in each round, within bounds."""
    affordable = manifest.judging.score_share * TRAINED * manifest.train.inner_steps * manifest.train.step_rows
    return max(LEAST, min(MOST, int(affordable / (PASSES * SCORERS))))


def able(manifest: Manifest, commit: Commit, book: Book) -> dict[str, int]:
    """Who can score the contributions of `commit`, and on how many sequences each has trained for it."""
    full = {c.shares[0].peer: c.tokens // manifest.train.sequence for c in commit.contributions if len(c.shares) == 1}
    fastest = max(full.values(), default=0)
    return {peer: n for peer, n in full.items() if n >= SLOW * fastest and book.is_heard(peer, commit.round)}


def quota(manifest: Manifest, commit: Commit, trained: Mapping[str, int]) -> int:
    """How many contributions of `commit` each scorer marks; `trained`: as `able`."""
    each = manifest.judging.score_share * TRAINED * min(trained.values(), default=0) / (PASSES * sequences(manifest))
    return min(MAX_MARKS, int((commit.round + 1) * each) - int(commit.round * each))


def _drawn(commit: Commit, *what: object) -> int:
    text = " ".join(["potluck scoring", commit.digest, *map(str, what)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def assigned(
    manifest: Manifest,
    commit: Commit,
    book: Book,
    lately: Mapping[str, int] = MappingProxyType({}),
    may: Callable[[str], bool] = lambda peer: True,
) -> dict[str, tuple[int, ...]]:
    """scorer -> the numbers of the replicas whose contributions to `commit` it marks. `book`: of the log before; `lately`: the last round in
    which a peer's work was to be scored, of those that are not in the book yet; `may`: whether a peer may score."""

    def since(contribution: Contribution) -> int:
        return max(book.newest(contribution.peers), min(lately.get(peer, -1) for peer in contribution.peers))

    trained = {peer: count for peer, count in able(manifest, commit, book).items() if may(peer)}
    each = quota(manifest, commit, trained)
    if not each or commit.plan is None:  # no commit follows in which marks could have a place
        return {}
    room = dict.fromkeys(sorted(trained), each)
    found: dict[str, list[int]] = {peer: [] for peer in room}
    longest = sorted(commit.contributions, key=lambda c: (since(c), _drawn(commit, c.replica)))
    count = each * len(room) // max(1, min(SCORERS, len(room) - 1))
    order = sorted(longest[:count], key=lambda c: _drawn(commit, c.replica))
    own = {
        peer: place for place, c in enumerate(order) for peer in c.peers
    }  # who comes late scores early: nobody scores its own
    for contribution in order:
        others = [peer for peer in room if peer not in contribution.peers]
        free = sorted((p for p in others if room[p]), key=lambda p: (-room[p], -own.get(p, -1)))
        if not free or len(free) < min(SCORERS, len(others)):
            continue
        for peer in free[:SCORERS]:
            room[peer] -= 1
            found[peer].append(contribution.replica)
    most = sorted(found, key=lambda p: _drawn(commit, p))[:MAX_SCORES]
    return {peer: tuple(found[peer]) for peer in sorted(most) if found[peer]}


def slots(manifest: Manifest, commit: Commit, contribution: Contribution, work: Work) -> range:
    """The slots of assigned text that the contribution is scored on: some that it trained on, one after the other. `work`: what the plan of
    its round gave its replica."""
    count = contribution.steps * work.micro_batches * manifest.train.rows
    wanted = min(sequences(manifest), count)
    first = work.slot + _drawn(commit, "slots", contribution.replica) % (count - wanted + 1)
    return range(first, first + wanted)


def held_out(manifest: Manifest, commit: Commit, there: int) -> list[int]:
    """Which of the first `there` held-out sequences all contributions to `commit` are scored on."""
    wanted = min(sequences(manifest), there)
    first = _drawn(commit, "held out")
    return sorted((first + place * there // wanted) % there for place in range(wanted)) if wanted else []


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The scoring of the contributions to one round, whose commit has the digest `of`. `by`: as `assigned`; `members`: of the replicas, and
    `parts`: f of each (protocol/ledger/marks.py); `told`: the marks that the log has, by scorer."""

    round: int
    of: str
    by: Mapping[str, tuple[int, ...]]
    members: Mapping[int, tuple[str, ...]]
    parts: Mapping[int, float]
    told: Mapping[str, tuple[Mark, ...]] = field(default_factory=dict)

    def why_not(self, said: Score) -> str | None:
        """Why this has no place among the marks; None if it has one. Checks its signature."""
        if said.peer not in self.by:
            return f"is of {short_peer(said.peer)}, whose turn it is not"
        if said.peer in self.told:
            return f"is told by {short_peer(said.peer)} for the second time"
        numbers = [mark.replica for mark in said.marks]
        if not numbers or len(set(numbers)) < len(numbers) or not set(numbers) <= set(self.by[said.peer]):
            return f"marks the replicas {numbers}, {short_peer(said.peer)} was to mark {list(self.by[said.peer])}"
        if not identity.verify(said.peer, score_body(DOMAIN, self.of, said), said.signature):
            return f"is not signed by {short_peer(said.peer)}"
        return None

    def is_over(self, now: int) -> bool:
        """Whether nothing of it is waited for any more after the commit of round `now`."""
        return self.round + LATE <= now or self.told.keys() == self.by.keys()

    def scored(self) -> list[Scored]:
        """All contributions that were to be scored, with what was told."""
        return [
            Scored(
                peers=peers,
                part=self.parts[number],
                due=tuple(peer for peer, given in self.by.items() if number in given),
                told={peer: mark for peer, given in self.told.items() for mark in given if mark.replica == number},
            )
            for number, peers in self.members.items()
        ]


@dataclass(frozen=True, slots=True)
class Scoring:
    """What may be told now, and what the log says so far. `turns`: of the last LATE rounds that were to be scored; `book`: of those before;
    `found`: whose work the newest commit shows to be bad."""

    manifest: Manifest
    turns: tuple[Turn, ...] = ()
    book: Book = field(default_factory=Book)
    found: tuple[str, ...] = ()

    def turn(self, round: int) -> Turn | None:
        """The scoring of the contributions to `round`, if there is one now."""
        return next((turn for turn in self.turns if turn.round == round), None)

    def is_due(self, said: Score) -> bool:
        """Whether this scorer is waited for, and the log has none of its scores of that round."""
        turn = self.turn(said.round)
        return turn is not None and said.peer in turn.by and said.peer not in turn.told

    def why_not(self, said: Score) -> str | None:
        """Why this has no place in the next commit; None if it has one. Checks its signature."""
        turn = self.turn(said.round)
        return f"scores round {said.round}, which is not due" if turn is None else turn.why_not(said)

    def after(self, commit: Commit, may: Callable[[str], bool] = lambda peer: True) -> Scoring:
        """The same when `commit` is the newest. `may`: whether a peer is no newcomer any more, whose marks would count for nothing."""
        if not self.manifest.judging.score_share:
            return self
        turns = tuple(_with(turn, commit) for turn in self.turns)
        book, bad = self.book, list[str]()
        for turn in turns:
            if turn.is_over(commit.round):
                book, found = book.after(turn.round, turn.scored(), commit.round)
                bad += found
        turns = tuple(turn for turn in turns if not turn.is_over(commit.round))
        lately = {peer: turn.round for turn in turns for peers in turn.members.values() for peer in peers}
        by = assigned(self.manifest, commit, book, lately, may)
        if by:
            turns = (*turns, _begun(commit, by))
        return dataclasses.replace(self, turns=turns, book=book, found=tuple(bad))


def _begun(commit: Commit, by: Mapping[str, tuple[int, ...]]) -> Turn:
    usual = statistics.median(c.tokens for c in commit.contributions)
    numbers = {n for given in by.values() for n in given}
    chosen = [c for c in commit.contributions if c.replica in numbers]
    return Turn(
        round=commit.round,
        of=commit.digest,
        by=by,
        members={c.replica: c.peers for c in chosen},
        parts={c.replica: min(1.0, c.tokens / usual) for c in chosen},
    )


def _with(turn: Turn, commit: Commit) -> Turn:
    told = {said.peer: said.marks for said in commit.scores if said.round == turn.round}
    return dataclasses.replace(turn, told={**turn.told, **told}) if told else turn
