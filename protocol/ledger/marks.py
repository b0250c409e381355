"""What follows from the scores in the log: whose work is bad, and whose marks are not believed. Pure.

A contribution has two values: the *gain* on the text that its replica was given, and by how much that is more than on other text, the *edge*
(protocol/ledger/scoring.py). Noise, flipped signs and nothing have no gain. Copies, old updates and what was learned from other text have a
gain, but no edge: it is the same wherever one looks. Honest work has both, and how much depends on the model, the text and the time. So
each value is compared with those of the last POOL contributions that were scored, m their median and s their spread (1.4826 times the
median distance from m, and LEAST_SPREAD m at least). Two suppositions are weighed (Page, 1954, "Continuous inspection schemes"; the
logarithm of the ratio of their likelihoods): that the value is around m, and that it is around 0:

    evidence = max(0, evidence + min(STEP, max(-STEP, f m (f m / 2 - value) / s^2)))

    f = tokens / the median tokens of the round's contributions, 1 at most: who was slower is not expected to bring as much

Where honest values differ among each other by as much as they differ from 0, a round counts for little, and more rounds are needed. Who has more evidence
than ENOUGH against its gain or its edge is found bad, which costs it its standing (protocol/ledger/standing.py), and its evidence begins anew. In a chain
each member has its part of the evidence only. The value is the median of three marks. Of two it is the better one: one liar cannot accuse. One mark alone says nothing.

A mark is *far* where it differs from the median of three by more than FAR m, m that of the gains; honest ones differ by rounding.
Whoever is far, or silent, MISSES times more often than half as often as it is not, is not asked for MUTE rounds, and nothing else: two liars may be
the median. docs/results/judging.md has the figures that the constants were chosen by.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from protocol.wire.score import Mark

POOL = 24
"""Contributions that a new one is compared with."""
KNOWN = 8
"""So many have to be there first."""
LEAST_SPREAD = 0.25
STEP = 2.0
ENOUGH = 8.0
FAR = 0.5
MISSES = 4.0
MUTE = 64
"""Rounds."""
REMEMBERED = 20_000
"""Peers; those who were scored longest ago are forgotten."""
SLOWEST = 0.5
"""Who did less than this part of the usual work is not among those that others are compared with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A contribution that was to be scored. `part`: f, as above; `due`: by whom; `told`: the marks that the log has, by scorer."""

    peers: tuple[str, ...]
    part: float
    due: tuple[str, ...]
    told: Mapping[str, Mark]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What the book has of a peer. `newest`: the last round in which its work was scored, with its `gain` and `edge`; `idle`, `edgeless`: the
    evidence against the one and the other; `misses`: against its own marks, and `mute` up to which round it is not asked for any."""

    newest: int = -1
    gain: float = 0.0
    edge: float = 0.0
    idle: float = 0.0
    edgeless: float = 0.0
    misses: float = 0.0
    mute: int = -1


NOTHING = Entry()


@dataclass(frozen=True, slots=True)
class Book:
    """After all rounds up to `round` that can be scored no more. `pool`: (gain, edge) of the last contributions; `of`: by peer."""

    round: int = -1
    pool: tuple[tuple[float, float], ...] = ()
    of: Mapping[str, Entry] = field(default_factory=dict)

    def entry(self, peer: str) -> Entry:
        """What is known of a peer."""
        return self.of.get(peer, NOTHING)

    def newest(self, peers: Sequence[str]) -> int:
        """The last round in which all of them had been scored, -1 where one never was."""
        return min((self.entry(peer).newest for peer in peers), default=-1)

    def is_heard(self, peer: str, round: int) -> bool:
        """Whether it is asked to score the work of `round`."""
        return round > self.entry(peer).mute

    def after(self, round: int, scored: Sequence[Scored], now: int) -> tuple[Book, list[str]]:
        """With what came of the scoring of `round`, which the commit of round `now` ends; and whose work was found bad."""
        values = {x.peers: value for x in scored if (value := valued(x)) is not None}
        fresh = [
            (gain / x.part, edge / x.part)
            for x in scored
            if x.part >= SLOWEST and x.peers in values
            for gain, edge in [values[x.peers]]
        ]
        pool = (*self.pool, *fresh)[-POOL:]
        of = dict(self.of)
        for x in scored:
            if x.peers in values:
                for peer in x.peers:
                    of[peer] = _weighed(of.get(peer, NOTHING), x, values[x.peers], pool, round)
        bad = sorted(peer for peer, entry in of.items() if max(entry.idle, entry.edgeless) > ENOUGH)
        of |= {peer: dataclasses.replace(of[peer], idle=0.0, edgeless=0.0) for peer in bad}
        typical = statistics.median(gain for gain, _ in pool) if len(pool) >= KNOWN else 0.0
        for x in scored:
            for peer in x.due:
                of[peer] = _believed(of.get(peer, NOTHING), x, peer, typical, now)
        if len(of) > REMEMBERED:
            of = dict(sorted(of.items(), key=lambda item: item[1].newest)[-REMEMBERED:])
        return Book(round, pool, of), bad


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
    if len(others) < KNOWN or middle <= 0:
        return 0.0
    spread = max(1.4826 * statistics.median(abs(other - middle) for other in others), LEAST_SPREAD * middle)
    expected = part * middle
    return min(STEP, max(-STEP, expected * (expected / 2 - value) / (spread * spread)))


def _weighed(
    entry: Entry,
    scored: Scored,
    value: tuple[float, float],
    pool: Sequence[tuple[float, float]],
    round: int,
) -> Entry:
    gain, edge = value
    idle, edgeless = (
        max(0.0, before + against(found, scored.part, [x[at] for x in pool]) / len(scored.peers))
        for at, before, found in ((0, entry.idle, gain), (1, entry.edgeless, edge))
    )
    return dataclasses.replace(entry, newest=round, gain=gain, edge=edge, idle=idle, edgeless=edgeless)


def _believed(entry: Entry, scored: Scored, peer: str, typical: float, now: int) -> Entry:
    """What the marks that `peer` gave, or did not, say of itself."""
    mark, others = scored.told.get(peer), scored.told.values()
    missed = mark is None
    if mark is not None:
        if len(others) < 3 or typical <= 0:
            return entry
        apart = (
            mark.assigned - statistics.median(x.assigned for x in others),
            mark.other - statistics.median(x.other for x in others),
        )
        missed = max(map(abs, apart)) > FAR * typical
    misses = max(0.0, entry.misses + (1.0 if missed else -0.5))
    if misses < MISSES:
        return dataclasses.replace(entry, misses=misses)
    return dataclasses.replace(entry, misses=0.0, mute=now + MUTE)
