"""Scores of contributions: who scores which on what text, and what follows from the scores in the log. Pure.

A contribution is worth the loss that its update removes. Full replicas of the same round measure it on text that the
replica was given (*assigned*) and on held-out text (*other*), with the update and without it on the same sequences, so
that the difficulty of a text cancels (Gauntlet: Lidin et al., 2025, arXiv:2505.21684). Each signs its marks, and one of
the next LATE_ROUNDS commits carries them.

    scorers     SCORERS full replicas of the same commit that were not much slower than others; never the maker
    scored      contributions that were never scored, then those scored longest ago
    sequences   `sequences` of each kind of text, the same for all scorers of a contribution

All of it follows from the commit's digest, so it cannot be known while the work is done. A mark costs PASSES forward
passes of `sequences`, a trained sequence TRAINED. A scorer that trained on T sequences gives on average

    x = score_share TRAINED T / (PASSES sequences)

marks a round, T being the slowest scorer's: floor((r + 1) x) - floor(r x) in round r. With three full replicas or fewer
there are two scorers at most; without another full replica there is none.

*Evidence.* A contribution has a *gain* (on assigned text) and an *edge* (gain less that on other text). Noise, flipped
signs and empty updates have no gain; copies, old updates and updates from other text have no edge. Each value is
compared with those of its round, or with the last COMPARED_POOL: m is their median, s their spread (1.4826 times the
median distance of those above m, which are not the bad ones; LEAST_SPREAD m at least). Evidence accumulates by the
likelihood ratio of "around 0" to "around m" (Page, 1954):

    evidence = max(0, evidence + min(MOST_EVIDENCE_STEP, max(-LEAST_EVIDENCE_STEP, f m (f m / 2 - value) / s^2)))
    f = tokens / the median tokens of the round's contributions, 1 at most

so good work between takes back half of the evidence that bad work gives, and taking turns does not help.

More evidence than ENOUGH_EVIDENCE against gain or edge costs the maker its standing (protocol/ledger/standing.py) and
starts again at 0. In a chain each member has its part. The value is the median of three marks, or the better one of
two, so a single liar cannot accuse; one mark alone says nothing.

*Scorers.* A mark is *far* where it differs from the median of three by more than FAR_MARK m. A scorer whose far or
missing marks outweigh the others by MISSES is not asked for MUTE_ROUNDS rounds. docs/results/judging.md has the figures
behind the constants.
"""

from __future__ import annotations

import dataclasses
import hashlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from protocol import identity
from protocol.identity import short_peer
from protocol.run.manifest import Manifest
from protocol.wire.claims import MAX_MARKS, Mark, Score, score_body
from protocol.wire.commit import DOMAIN, MAX_SCORES, Commit, Contribution
from protocol.wire.plan import Work

COMPARED_POOL = 8
"""Contributions that a new one is compared with, at least. Gains change from round to round, so not many more."""
LEAST_SPREAD = 0.25
MOST_EVIDENCE_STEP, LEAST_EVIDENCE_STEP = 2.0, 1.0
ENOUGH_EVIDENCE = 8.0
FAR_MARK = 0.5
MISSES = 4.0
MUTE_ROUNDS = 64
REMEMBERED_PEERS = 20_000
"""Peers; those who were scored longest ago are forgotten."""
SLOWEST_COMPARED = 0.5
"""Who did less than this part of the usual work is not among those that others are compared with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A contribution with its marks. part: f, as above; due: its scorers; told: marks in the log, by scorer."""

    peers: tuple[str, ...]
    part: float
    due: tuple[str, ...]
    told: Mapping[str, Mark]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerScores:
    """Scores of a peer.

    newest: last round in which its work was scored, with gain and edge; idle, edgeless: evidence against them
    misses: evidence against its own marks; mute: last round in which it is not asked
    """

    newest: int = -1
    gain: float = 0.0
    edge: float = 0.0
    idle: float = 0.0
    edgeless: float = 0.0
    misses: float = 0.0
    mute: int = -1


NOTHING = PeerScores()


@dataclass(frozen=True, slots=True)
class ScoreBook:
    """Scores of all closed rounds up to `round`. pool: (gain, edge) of the last contributions; of: by peer."""

    round: int = -1
    pool: tuple[tuple[float, float], ...] = ()
    of: Mapping[str, PeerScores] = field(default_factory=dict)

    def entry(self, peer: str) -> PeerScores:
        return self.of.get(peer, NOTHING)

    def newest(self, peers: Sequence[str]) -> int:
        """The last round in which all of them had been scored, -1 where one never was."""
        return min((self.entry(peer).newest for peer in peers), default=-1)

    def is_heard(self, peer: str, round: int) -> bool:
        return round > self.entry(peer).mute

    def after(self, round: int, scored: Sequence[Scored], now: int) -> tuple[ScoreBook, list[str]]:
        """The book with the scoring of `round`, which the commit of round `now` closes, and the peers found bad."""
        values = {x.peers: value for x in scored if (value := valued(x)) is not None}
        fresh = [
            (gain / x.part, edge / x.part)
            for x in scored
            if x.part >= SLOWEST_COMPARED and x.peers in values
            for gain, edge in [values[x.peers]]
        ]
        pool = (*self.pool, *fresh)[-max(COMPARED_POOL, len(fresh)) :]
        of = dict(self.of)
        for x in scored:
            if x.peers in values:
                for peer in x.peers:
                    of[peer] = _weighed(of.get(peer, NOTHING), x, values[x.peers], pool, round)
        bad = sorted(peer for peer, entry in of.items() if max(entry.idle, entry.edgeless) > ENOUGH_EVIDENCE)
        of |= {peer: dataclasses.replace(of[peer], idle=0.0, edgeless=0.0) for peer in bad}
        typical = statistics.median(gain for gain, _ in pool) if len(pool) >= COMPARED_POOL else 0.0
        for x in scored:
            for peer in x.due:
                of[peer] = _believed(of.get(peer, NOTHING), x, peer, typical, now)
        if len(of) > REMEMBERED_PEERS:
            of = dict(sorted(of.items(), key=lambda item: item[1].newest)[-REMEMBERED_PEERS:])
        return ScoreBook(round, pool, of), bad


def valued(scored: Scored) -> tuple[float, float] | None:
    """Gain and edge of a contribution; None where fewer than two have marked it."""
    found = list(scored.told.values())
    if len(found) < 2:
        return None
    middle = statistics.median if len(found) > 2 else max
    return middle([x.assigned for x in found]), middle([x.assigned - x.other for x in found])


def against(value: float, part: float, others: Sequence[float]) -> float:
    """The evidence that one value brings; negative where it speaks for a contribution."""
    middle = statistics.median(others)
    if len(others) < COMPARED_POOL or middle <= 0:
        return 0.0
    spread = max(1.4826 * statistics.median(x - middle for x in others if x >= middle), LEAST_SPREAD * middle)
    expected = part * middle
    return min(MOST_EVIDENCE_STEP, max(-LEAST_EVIDENCE_STEP, expected * (expected / 2 - value) / (spread * spread)))


def _weighed(
    entry: PeerScores,
    scored: Scored,
    value: tuple[float, float],
    pool: Sequence[tuple[float, float]],
    round: int,
) -> PeerScores:
    gain, edge = value
    idle, edgeless = (
        max(0.0, before + against(found, scored.part, [x[at] for x in pool]) / len(scored.peers))
        for at, before, found in ((0, entry.idle, gain), (1, entry.edgeless, edge))
    )
    return dataclasses.replace(entry, newest=round, gain=gain, edge=edge, idle=idle, edgeless=edgeless)


def _believed(entry: PeerScores, scored: Scored, peer: str, typical: float, now: int) -> PeerScores:
    """Returns `entry` judged by the marks that `peer` gave and those that it owes."""
    mark, others = scored.told.get(peer), scored.told.values()
    missed = mark is None
    if mark is not None:
        if len(others) < 3 or typical <= 0:
            return entry
        apart = (
            mark.assigned - statistics.median(x.assigned for x in others),
            mark.other - statistics.median(x.other for x in others),
        )
        missed = max(map(abs, apart)) > FAR_MARK * typical
    misses = max(0.0, entry.misses + (1.0 if missed else -0.5))
    if misses < MISSES:
        return dataclasses.replace(entry, misses=misses)
    return dataclasses.replace(entry, misses=0.0, mute=now + MUTE_ROUNDS)


SCORERS = 3
"""Of one contribution: two honest ones outvote a liar."""
LEAST_SEQUENCES, MOST_SEQUENCES = 4, 32
"""Sequences of each kind of text that a contribution is scored on."""
PASSES, TRAINED = 4, 3
"""Forward passes of a mark's sequences (two texts, with and without the update), and of a trained sequence."""
SLOWEST_SCORER = 0.5
"""Who has trained on less than this part of what the fastest full replica did does not score."""
LATE_ROUNDS = 3
"""Rounds after which a score has no place any more."""
HELD_OUT_POOL = 256
"""Held-out sequences, the first ones, from which those are taken that a round is scored on."""


def sequences(manifest: Manifest) -> int:
    """Sequences of each kind of text, so that a replica with all its steps can mark SCORERS contributions a round."""
    affordable = manifest.judging.score_share * TRAINED * manifest.train.inner_steps * manifest.train.step_rows
    return max(LEAST_SEQUENCES, min(MOST_SEQUENCES, int(affordable / (PASSES * SCORERS))))


def able(manifest: Manifest, commit: Commit, book: ScoreBook) -> dict[str, int]:
    """Returns the possible scorers of `commit` and the number of sequences that each trained for it."""
    full = {c.shares[0].peer: c.tokens // manifest.train.sequence for c in commit.contributions if len(c.shares) == 1}
    fastest = max(full.values(), default=0)
    return {peer: n for peer, n in full.items() if n >= SLOWEST_SCORER * fastest and book.is_heard(peer, commit.round)}


def quota(manifest: Manifest, commit: Commit, trained: Mapping[str, int]) -> int:
    """Returns the number of contributions of `commit` that each scorer marks; `trained`: as `able`."""
    each = manifest.judging.score_share * TRAINED * min(trained.values(), default=0) / (PASSES * sequences(manifest))
    return min(MAX_MARKS, int((commit.round + 1) * each) - int(commit.round * each))


def _drawn(commit: Commit, *what: object) -> int:
    text = " ".join(["potluck scoring", commit.digest, *map(str, what)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def assigned(
    manifest: Manifest,
    commit: Commit,
    book: ScoreBook,
    lately: Mapping[str, int] = MappingProxyType({}),
    may: Callable[[str], bool] = lambda peer: True,
) -> dict[str, tuple[int, ...]]:
    """scorer -> replicas whose contributions to `commit` it marks.

    lately: last round with scoring of a peer that is not in the book yet; may: whether a peer may score
    """

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
    """The slots of assigned text for scoring, consecutive ones of those trained. work: its replica's in the plan."""
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
    """The scoring of one round, whose commit has the digest `of`.

    by: as `assigned`; members, parts: peers and f of the replicas; told: marks in the log, by scorer
    """

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
        """Returns whether nothing of it is waited for any more after the commit of round `now`."""
        return self.round + LATE_ROUNDS <= now or self.told.keys() == self.by.keys()

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
    """Open scorings (`turns`, of the last LATE_ROUNDS), the book of closed ones, and peers just `found` bad."""

    manifest: Manifest
    turns: tuple[Turn, ...] = ()
    book: ScoreBook = field(default_factory=ScoreBook)
    found: tuple[str, ...] = ()

    def turn(self, round: int) -> Turn | None:
        """The scoring of the contributions to `round`, if there is one now."""
        return next((turn for turn in self.turns if turn.round == round), None)

    def is_due(self, said: Score) -> bool:
        """Returns whether this scorer is waited for, and the log has none of its scores of that round."""
        turn = self.turn(said.round)
        return turn is not None and said.peer in turn.by and said.peer not in turn.told

    def why_not(self, said: Score) -> str | None:
        """Why this has no place in the next commit; None if it has one. Checks its signature."""
        turn = self.turn(said.round)
        return f"scores round {said.round}, which is not due" if turn is None else turn.why_not(said)

    def after(self, commit: Commit, may: Callable[[str], bool] = lambda peer: True) -> Scoring:
        """The scoring after `commit`. may: whether a peer has served its probation, so that its marks count."""
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
