"""Contribution screening: which contributions count, and how much, by the content of their payloads. Pure.

    clip        an update longer than the round's limit counts as one of that length: its scale is limit / norm
    agreement   the cosine of an update with the sum of the others', each clipped. Far less than most, or negative in a
                single shard: it works against them, or for nothing. Far more: it is made of their updates.
    copies      of two updates with almost the same entries and values the later one; and repeats of the round before

Honest updates from different text have cosines of 0.05 to 0.3 with the sum of the others', noise has none. The update
that agrees least is left out first, and the others are compared again, until none is far off. Where most agree no more
than by chance, nothing is left out for it.

The limit is a multiple of the median norm, which is taken as at most MEDIAN_SWING times, and at least one part in that,
of the last rounds'. Among fewer than LEAST_COMPARED contributions only norms count. More than PANEL are compared in
panels, which follow from all offers. Contributions on probation (protocol/ledger/standing.py) have no influence.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np

from protocol.ledger import part_lists, run_state
from protocol.round import comparing
from protocol.round.comparing import Examined, Floats, Measured, Update
from protocol.run import layout
from protocol.run.manifest import Manifest
from protocol.wire.bounds import LEAST_COMPARED, LEAST_SCALE
from protocol.wire.commit import Commit, Contribution, Part

MEDIAN_NEEDS = 3
"""Among fewer contributions than this no median is taken."""
NORM_LIMIT = 10.0
"""A contribution whose norm exceeds the median so many times is left out."""
MEDIAN_SWING = 2.0
"""The median counts as at most so many times what it was, and as at least one part in so many of that."""
TOO_MUCH = 2.5
"""Who agrees with the others so many times as much as most is made of their updates."""
SURE_DEVIATIONS, CHANCE_DEVIATIONS = 3.0, 8.0
"""Least agreement of most updates, and of a deviation from it, in standard deviations of unrelated ones."""
PANEL = 32


Lookup = Callable[[str, Part, Callable[[], Examined]], Examined]
"""(sender, part, decode) -> the content of a part, from a cache or by `decode`; raises what that raises."""


def no_lookup(sender: str, part: Part, find: Callable[[], Examined]) -> Examined:
    """The `Lookup` of somebody who knows nothing."""
    return find()


@dataclass(frozen=True, slots=True)
class PreviousRound:
    """Medians of the clipped norms of the rounds before, and the updates that the last one committed."""

    medians: tuple[float, ...] = ()
    updates: tuple[Update, ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on a contribution: its scale, or why it is left out."""

    scale: float
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgingJob:
    """All that verdicts depend on, without payloads. contributions: by arrival; last: the round before's."""

    manifest: Manifest
    round: int
    parent: str
    contributions: tuple[Contribution, ...]
    last: tuple[Contribution, ...]
    medians: tuple[float, ...]
    trial: frozenset[int] = frozenset()

    def answer(self, read: Callable[[str], bytes], known: Lookup = no_lookup) -> tuple[Verdict, ...]:
        """The verdicts. read: lists and payloads by name; known: contents of payloads. Raises BadList, and theirs."""
        enough = len(self.contributions) >= LEAST_COMPARED or self.trial
        last = tuple(held(self.manifest, c, read, known) for c in self.last if enough)
        before = PreviousRound(self.medians, last)
        all_of_them = [(name_of(c), held(self.manifest, c, read, known)) for c in self.contributions]
        there = [x for x, c in zip(all_of_them, self.contributions, strict=True) if c.replica not in self.trial]
        newcomers = [x for x, c in zip(all_of_them, self.contributions, strict=True) if c.replica in self.trial]
        found = judge(self.manifest, self.parent, [name for name, _ in there], [update for _, update in there], before)
        counted = [x for x, verdict in zip(there, found, strict=True) if verdict.reason is None]
        old, new = iter(found), iter(judge_newcomers(self.manifest, self.parent, counted, newcomers, before))
        return tuple(next(new if c.replica in self.trial else old) for c in self.contributions)


def held(
    manifest: Manifest, contribution: Contribution, read: Callable[[str], bytes], known: Lookup = no_lookup
) -> Update:
    """The update of a contribution: its lists by name, and its payloads where their content is not known."""
    lists = [(share.peer, part_lists.unpack(read(share.root))) for share in contribution.shares]
    parts: list[Part] = [part for _, of_share in lists for part in of_share]
    sender = {part.digest: peer for peer, of_share in lists for part in of_share}
    return comparing.update_of(
        manifest, parts, lambda part: read(part.digest), lambda part, find: known(sender[part.digest], part, find)
    )


def name_of(contribution: Contribution) -> str:
    """What a commit calls a contribution that was judged and left out."""
    return hashlib.sha256(" ".join(share.root for share in contribution.shares).encode()).hexdigest()


def typical(norms: Sequence[float], before: Sequence[float]) -> float:
    """The median that limits norms are relative to; 0 if unknown. before: the medians of the rounds before."""
    known = statistics.median(before) if len(before) == run_state.MEDIANS_KEPT else 0.0
    if len(norms) < MEDIAN_NEEDS:
        return MEDIAN_SWING * known
    middle = statistics.median(norms)
    return min(max(middle, known / MEDIAN_SWING), MEDIAN_SWING * known) if known else middle


def judge(
    manifest: Manifest,
    parent: str,
    names: Sequence[str],
    updates: Sequence[Update],
    before: PreviousRound,
    gone: Sequence[str] = (),
) -> list[Verdict]:
    """Verdicts in order of arrival. names: by `name_of`; gone: of others that were left out. Raises as `updates`."""
    total = len(names) + len(gone)
    seed = hashlib.sha256(" ".join(["potluck judging", parent, *sorted([*names, *gone])]).encode()).digest()
    earlier = before.updates if total >= LEAST_COMPARED else ()
    count = -(-total // PANEL)
    of = [_panel(seed, name, count) for name in names] + [i % count for i in range(len(earlier))]
    panels = [[i for i, at in enumerate(of) if at == number] for number in range(count)]
    measured = comparing.measure(manifest.model, seed, [*updates, *earlier], panels)
    now = _Round(manifest, measured, updates, total >= LEAST_COMPARED, before.medians)
    reasons: dict[int, str] = {}
    while found := now.worst():
        reasons.update(found)
        now.left -= set(found)
    return [Verdict(1.0, reasons[i]) if i in reasons else Verdict(now.scale(i)) for i in range(len(names))]


def _panel(seed: bytes, name: str, count: int) -> int:
    return int.from_bytes(hashlib.sha256(seed + name.encode()).digest()[:8], "little") % count


def judge_newcomers(
    manifest: Manifest,
    parent: str,
    counted: Sequence[tuple[str, Update]],
    newcomers: Sequence[tuple[str, Update]],
    before: PreviousRound,
) -> list[Verdict]:
    """Verdicts on contributions on probation, each as if alone with the `counted` ones; copies among all."""
    named = sorted(name for name, _ in (*counted, *newcomers))
    seed = hashlib.sha256(" ".join(["potluck probation", parent, *named]).encode()).digest()
    groups, panels = -(-len(newcomers) // PANEL), max(1, -(-len(counted) // PANEL))
    found: dict[int, Verdict] = {}
    for group in range(groups):
        members = [i for i, (name, _) in enumerate(newcomers) if _panel(seed, name, groups) == group]
        against = [update for name, update in counted if _panel(seed, name, panels) == group % panels]
        shown = [*against, *(newcomers[i][1] for i in members)]
        everybody = [*shown, *before.updates[group % panels :: panels]]
        measured = comparing.measure(manifest.model, seed, everybody, [range(len(everybody))])
        now = _Round(manifest, measured, shown, len(against) + 1 >= LEAST_COMPARED, before.medians)
        sound = set(range(len(against)))
        for at, i in enumerate(members, len(against)):
            reason = now.why_no_work(at, sound) or now.why_odd(at, set(range(len(against))))
            found[i] = Verdict(1.0, reason)
            sound.update([at] if reason is None else [])
    return [found[i] for i in range(len(newcomers))]


def why_unjust(
    manifest: Manifest,
    commit: Commit,
    updates: Mapping[int, Update],
    before: PreviousRound,
    trial: Set[int] = frozenset(),
) -> str | None:
    """Why the commit's verdict is not the rule's, None if it is. updates: by replica; trial: on probation."""
    gone = [x for x in commit.left_out if x.judged is not None and x.replica not in trial]
    known = gone if all(x.replica in updates for x in gone) else []
    names = [*(name_of(c) for c in commit.contributions), *(x.judged or "" for x in known)]
    unknown = [x.judged or "" for x in gone if x not in known]
    shown = [updates[n] for n in (*(c.replica for c in commit.contributions), *(x.replica for x in known))]
    verdicts = judge(manifest, commit.parent, names, shown, before, unknown)
    for contribution, verdict in zip(commit.contributions, verdicts, strict=False):
        name = f"replica {contribution.replica}"
        if verdict.reason is not None:
            return f"{name} counts, although {verdict.reason}"
        if verdict.scale != contribution.scale:
            return f"{name} counts with {contribution.scale:.6g} of its update, by the rule with {verdict.scale:.6g}"
    for x, verdict in zip(known, verdicts[len(commit.contributions) :], strict=True):
        if verdict.reason is None:
            return f'replica {x.replica} was judged ("{x.reason}"), but there is nothing wrong with it'
    tried = [x for x in commit.left_out if x.judged is not None and x.replica in trial]
    if not all(x.replica in updates for x in tried):
        return None
    counted = [(name_of(c), updates[c.replica]) for c in commit.contributions]
    tried.sort(key=lambda x: not x.probation)
    newcomers = [(x.judged or "", updates[x.replica]) for x in tried]
    verdicts = judge_newcomers(manifest, commit.parent, counted, newcomers, before)
    for x, verdict in zip(tried, verdicts, strict=True):
        if x.probation and verdict.reason is not None:
            return f"replica {x.replica} serves its probation, although {verdict.reason}"
        if not x.probation and verdict.reason is None:
            return f'replica {x.replica} was judged ("{x.reason}"), but there is nothing wrong with it'
    return None


@dataclass(eq=False)
class _Round:
    """Contributions of a round that are `left`, and their faults. together: enough of them to compare."""

    manifest: Manifest
    measured: Measured
    updates: Sequence[Update]
    together: bool
    medians: Sequence[float]

    def __post_init__(self) -> None:
        self._spec = self.manifest.judging
        self.left = set(range(len(self.updates)))

    @property
    def typical(self) -> float:
        return typical([self.measured.norms[i] for i in sorted(self.left)], self.medians)

    def scale(self, i: int) -> float:
        """What the clip leaves of an update."""
        norm, longest = self.measured.norms[i], self.typical * self._spec.clip
        return max(LEAST_SCALE, longest / norm) if 0 < longest < norm else 1.0

    def worst(self) -> dict[int, str]:
        """Who is to be left out next, and why."""
        norms, middle, left = self.measured.norms, self.typical, sorted(self.left)
        found = {i: why for i in left for why in [self._untrue(i)] if why is not None}
        if found or not middle:
            return found
        largest = max(left, key=norms.__getitem__, default=None)
        if largest is not None and norms[largest] > self._too_long():
            return {largest: f"its norm {norms[largest]:.3g} is over {NORM_LIMIT:g} times the median"}
        if not self.together or len(left) < MEDIAN_NEEDS:
            return {}
        idle = {i: "it changes nothing" for i in left if norms[i] == 0}
        if idle:
            return idle
        for panel, cosines in self.measured.panels:
            found |= self._copies(panel, cosines)
        if found:
            return found
        for panel, cosines in self.measured.panels:
            found |= self._odd([(at, i) for at, i in enumerate(panel) if i in self.left], cosines)
        return found

    def why_no_work(self, who: int, others: Set[int]) -> str | None:
        """Whether it is nothing, or a copy of one of the `others` or of the round before: of however few."""
        self.left = {*others, who}
        if self.measured.norms[who] == 0:
            return self._untrue(who) or "it changes nothing"
        ((panel, cosines),) = self.measured.panels
        return self._named(who, lambda: self._copies(panel, cosines))

    def why_odd(self, who: int, others: Set[int]) -> str | None:
        """Why this one would be left out among `others` that are not, alone with them."""
        self.left = {*others, who}
        reason = self._named(who, self.worst)
        alone = self.together and len(self.left) < LEAST_COMPARED
        return reason or ("it agrees with too few of the others" if alone else None)

    def _named(self, who: int, look: Callable[[], dict[int, str]]) -> str | None:
        """What is found of this one, when those of whom something is found before are set aside."""
        while found := look():
            if who in found:
                return found[who]
            self.left -= set(found)
        return None

    def _too_long(self) -> float:
        """The limit norm. Where all norms have grown or too few are known, only what a clip cannot bound is over."""
        if len(self.left) < MEDIAN_NEEDS:
            return self.typical * self._spec.clip / LEAST_SCALE
        middle = statistics.median(self.measured.norms[i] for i in self.left)
        return NORM_LIMIT * max([middle, self.typical, *self.medians])

    def _untrue(self, i: int) -> str | None:
        """Payloads can be decoded, and norms are as they are said to be."""
        if i in self.measured.broken:
            return f"it cannot be read: {self.measured.broken[i]}"
        for name, norm in zip(layout.shard_names(self.manifest.model), self.measured.shards[i], strict=True):
            said = self.updates[i].norms.get(name, norm)
            if not comparing.is_true(said, norm):
                return f"the norm of {name} is {norm:.6g}, not {said:.6g}"
        return None

    def _products(self, members: Sequence[tuple[int, int]], cosines: Sequence[Floats]) -> Iterator[Floats]:
        """Of each shard, [P, P]. `members`: their places in the panel, and who they are."""
        places = [at for at, _ in members]
        for number, of_shard in enumerate(cosines):
            norms = np.array([self.measured.shards[i][number] for _, i in members])
            yield np.outer(norms, norms) * of_shard[np.ix_(places, places)]

    def _copies(self, panel: Sequence[int], cosines: Sequence[Floats]) -> dict[int, str]:
        """The first one that is a copy of somebody's before it, or repeats the round before."""
        members = [(at, i) for at, i in enumerate(panel) if i in self.left or i >= len(self.updates)]
        whole = sum(self._products(members, cosines), start=np.zeros((len(members), len(members))))
        for n, (_, i) in enumerate(members):
            for m in range(n):
                earlier = members[m][1]
                square = float(whole[n, n] * whole[m, m])
                alike = float(whole[n, m]) / math.sqrt(square) if square else 0.0
                if alike >= self._spec.copies and earlier < len(self.updates):
                    stale = i >= len(self.updates)
                    return {
                        earlier
                        if stale
                        else i: f"it {'repeats the round before' if stale else 'is a copy'} ({alike:.2f})"
                    }
        return {}

    def _odd(self, members: Sequence[tuple[int, int]], cosines: Sequence[Floats]) -> dict[int, str]:
        """Who of a panel agrees least with the others, if that is far less than most do; else who agrees far more."""
        if len(members) < MEDIAN_NEEDS:
            return {}
        weights = np.array([self.scale(i) for _, i in members])
        clips, whole = np.outer(weights, weights), np.zeros((len(members), len(members)))
        apart: list[tuple[float, int, str]] = []
        for number, products in enumerate(self._products(members, cosines)):
            whole += products * clips
            name, elements = layout.shard_names(self.manifest.model)[number], self.measured.elements[number]
            for ratio, n, shown in _shares(products * clips, elements):
                if ratio < 0 < self._spec.agreement:
                    apart.append((ratio, n, f"in {name} it disagrees with the others {shown}"))
        shares = _shares(whole, sum(self.measured.elements))
        low = [(r, n, f"it disagrees with the others {shown}") for r, n, shown in shares if r < self._spec.agreement]
        low = low if self._spec.agreement else []
        high = [(-r, n, f"it is made of the others' updates {shown}") for r, n, shown in shares if r > TOO_MUCH]
        odd = low or apart or (high if self._spec.agreement else [])
        return {members[n][1]: why for _, n, why in [min(odd)]} if odd else {}


def _shares(products: Floats, elements: int) -> list[tuple[float, int, str]]:
    """(agreement / the median, index, text) of updates that differ by more than chance, where most agree."""
    found, deviation = agreements(products), 1 / math.sqrt(elements)
    middle = statistics.median(found)
    if middle < SURE_DEVIATIONS * deviation:
        return []
    far = [(n, a) for n, a in enumerate(found) if abs(middle - a) > CHANCE_DEVIATIONS * deviation]
    return [(a / middle, n, f"(cosine {a:.2f}, most have {middle:.2f})") for n, a in far]


def agreements(products: Floats) -> list[float]:
    """The cosine of each update with the sum of the others, from their products [P, P]; 0 where either is 0."""
    rows = [math.fsum(row) for row in products.tolist()]
    whole, own = math.fsum(rows), products.diagonal().tolist()
    found = []
    for row, square in zip(rows, own, strict=True):
        others = square * (whole - 2 * row + square)
        found.append((row - square) / math.sqrt(others) if others > 0 else 0.0)
    return found
