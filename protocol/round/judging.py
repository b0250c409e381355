"""Contribution screening: which contributions count, and how much, by the content of their payloads. Pure.

    clip        an update longer than the round's limit counts as one of that length: its scale is limit / norm
    opposed     an update whose cosines with others are negative, as a whole or in a single shard, with more of them
                than may be bad (BEARABLE): it works against them, and is left out. If two are opposed beyond chance,
                one of them is bad; which one cannot be said, so both count less, with OPPOSED of their weight
    agreement   the median cosine of an update with the others. Far less than most: it counts less; no more than chance:
                it is for nothing. Far more, with three quarters of them: it is made of their updates
    repeats     of an update of the round before: left out
    alike       n updates with almost the same entries and values count as one: each with 1/n of its weight. They are of
                one text; whose it was is found by scores (protocol/ledger/scoring.py), not by who came first. Of
                newcomers' one that is drawn serves

Honest updates from different text have cosines of 0.02 to 0.3, noise has none. The worst update is left out first, and
the others are compared again, until none is far off. A minority that knows all updates neither hides by lowering the
agreement of the others, nor has one of them left out (docs/results/judging.md).

*Fault.* What is found is laid to the members of a chain whose own payloads show it, compared with the others' payloads
of the same shards; if none does by itself, to the one that comes closest.

The limit is a multiple of the median norm, which is taken as at most MEDIAN_SWING times, and at least one part in that,
of the last rounds'. Among fewer than LEAST_COMPARED contributions only norms count. More than PANEL are compared in
panels, which follow from all offers. Contributions on probation (protocol/ledger/standing.py) have no influence.
"""

from __future__ import annotations

import functools
import hashlib
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

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
BEARABLE = 3 / 8
"""Of the contributions may be bad."""
OPPOSED = 1 / 4
"""Of the weight of an update that counts, that is left by each one that is opposed to it."""
ENOUGH = 1 / 2
"""Of the agreement of most, which less weight follows below."""
TOO_MUCH = 2.5
"""An update whose agreement with three quarters of the others is above this multiple of the median is made of them."""
SURE_DEVIATIONS, OPPOSING_DEVIATIONS, CHANCE_DEVIATIONS = 3.0, 2.0, 8.0
"""In standard deviations of unrelated updates: the least agreement of most, the disagreement of one that works against
others, and the least deviation from most."""
PANEL = 32


Lookup = Callable[[str, Part, Callable[[], Examined]], Examined]
"""(sender, part, decode) -> the content of a part, from a cache or by `decode`; raises what that raises."""


def no_lookup(sender: str, part: Part, find: Callable[[], Examined]) -> Examined:
    """A `Lookup` without a cache."""
    return find()


@dataclass(frozen=True, slots=True)
class PreviousRound:
    """Medians of the clipped norms of the rounds before, and the updates that the last one committed."""

    medians: tuple[float, ...] = ()
    updates: tuple[Update, ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on a contribution: its scale and weight, or why it is left out and whose fault that is."""

    scale: float
    reason: str | None = None
    faults: tuple[str, ...] = ()
    weight: float = 1.0


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
        manifest,
        parts,
        lambda part: read(part.digest),
        lambda part, find: known(sender[part.digest], part, find),
        [peer for peer, of_share in lists for _ in of_share],
    )


def name_of(contribution: Contribution) -> str:
    """Returns the name of a left-out contribution in a commit."""
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
    reasons: dict[int, Verdict] = {}
    while found := now.worst():
        reasons.update({i: fault.verdict(now, i) for i, fault in found.items()})
        now.left -= set(found)
    weights = now.weights()
    return [reasons[i] if i in reasons else Verdict(now.scale(i), weight=weights[i]) for i in range(len(names))]


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
        members.sort(key=lambda i: hashlib.sha256(seed + newcomers[i][0].encode()).digest())
        against = [update for name, update in counted if _panel(seed, name, panels) == group % panels]
        shown = [*against, *(newcomers[i][1] for i in members)]
        everybody = [*shown, *before.updates[group % panels :: panels]]
        measured = comparing.measure(manifest.model, seed, everybody, [range(len(everybody))])
        now = _Round(manifest, measured, shown, len(against) + 1 >= LEAST_COMPARED, before.medians)
        sound = set(range(len(against)))
        for at, i in enumerate(members, len(against)):
            fault = now.why_no_work(at, sound) or now.why_odd(at, set(range(len(against))))
            found[i] = fault.verdict(now, at) if fault is not None else Verdict(1.0)
            sound.update([at] if fault is None else [])
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
        for what, said, by_rule in (
            ("update", contribution.scale, verdict.scale),
            ("weight", contribution.weight, verdict.weight),
        ):
            if said != by_rule:
                return f"{name} counts with {said:.6g} of its {what}, by the rule with {by_rule:.6g}"
    for x, verdict in zip(known, verdicts[len(commit.contributions) :], strict=True):
        if verdict.reason is None:
            return f'replica {x.replica} was judged ("{x.reason}"), but there is nothing wrong with it'
        if set(verdict.faults) != set(x.guilty):
            return f"the fault of replica {x.replica} is laid to others than by the rule"
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
        if not x.probation and set(verdict.faults) != set(x.guilty):
            return f"the fault of replica {x.replica} is laid to others than by the rule"
    return None


@dataclass(frozen=True, slots=True)
class _Part:
    """The part of one peer in an update: its own shards, and payloads of shared shards, by numbers."""

    peer: str
    shards: tuple[int, ...]
    shared: tuple[tuple[int, int], ...]

    @property
    def numbers(self) -> tuple[int, ...]:
        """Of all its shards."""
        return tuple(dict.fromkeys((*self.shards, *(number for number, _ in self.shared))))


class _Share(NamedTuple):
    """Agreement of an update, that of most, and their ratio; 1 where they do not differ beyond chance. least: the lower
    quartile of its cosines."""

    ratio: float
    own: float
    middle: float
    least: float

    def __str__(self) -> str:
        return f"(cosine {self.own:.2f}, most have {self.middle:.2f})"


class _Fault(NamedTuple):
    """The fault of an update.

    score: how much a part shows it; above `limit` it is at fault
    is_known: whether anybody is at fault
    """

    reason: str
    score: Callable[[_Part], float] = lambda part: 1.0
    limit: float = 0.5
    is_known: bool = True

    def verdict(self, of: _Round, i: int) -> Verdict:
        """The verdict on update i, for this fault."""
        parts = of.parts(i) if self.is_known else []
        scores = [self.score(part) for part in parts] if len(parts) > 1 else [math.inf] * len(parts)
        guilty = [part.peer for part, score in zip(parts, scores, strict=True) if score > self.limit]
        worst = [part.peer for part, score in zip(parts, scores, strict=True) if score == max(scores)]
        return Verdict(1.0, self.reason, tuple(guilty or worst))


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
        """Returns the scale of update i after clipping."""
        norm, longest = self.measured.norms[i], self.typical * self._spec.clip
        return max(LEAST_SCALE, longest / norm) if 0 < longest < norm else 1.0

    def weights(self) -> dict[int, float]:
        """Returns the weights of the updates left: below 1 for similar, opposed and isolated ones."""
        found = {i: OPPOSED ** len(self.opposed(i)) / len(self.alike(i)) for i in self.left}
        for panel, cosines in self.measured.panels if self.together and self._spec.agreement else ():
            if sum(i in self.left for i in panel) >= MEDIAN_NEEDS:
                found |= {i: found[i] * min(1.0, x.ratio / ENOUGH) for i, x in self._shares(panel, cosines).items()}
        return {i: max(LEAST_SCALE, weight) for i, weight in found.items()}

    def alike(self, i: int) -> list[int]:
        """This one, and the updates left that are almost the same."""
        if not self.together:
            return [i]
        return [j for j in self._alike[i] if j in self.left or j == i]

    @functools.cached_property
    def _alike(self) -> list[list[int]]:
        found = [[i] for i in range(len(self.updates))]
        for panel, cosines in self.measured.panels:
            members = [(at, i) for at, i in enumerate(panel) if i < len(self.updates)]
            near = self._near(members, cosines)
            for n, (_, i) in enumerate(members):
                found[i] = [j for m, (_, j) in enumerate(members) if near[n, m] or m == n]
        return found

    def _near(self, members: Sequence[tuple[int, int]], cosines: Sequence[Floats]) -> npt.NDArray[np.bool_]:
        """[P, P]: which of them are almost the same."""
        whole = sum(self._products(members, cosines), start=np.zeros((len(members), len(members))))
        squares = np.outer(whole.diagonal(), whole.diagonal())
        return np.divide(whole, np.sqrt(squares), out=np.zeros_like(whole), where=squares > 0) >= self._spec.copies

    def parts(self, i: int) -> list[_Part]:
        """By maker; none where the makers are not known."""
        shards: dict[str, list[int]] = {}
        shared: dict[str, list[tuple[int, int]]] = {}
        for number, name in enumerate(layout.shard_names(self.manifest.model)):
            makers = self.updates[i].makers.get(name, ())
            for place, peer in enumerate(makers):
                shards.setdefault(peer, []), shared.setdefault(peer, [])
                if len(makers) == 1:
                    shards[peer].append(number)
                else:
                    shared[peer].append((number, place))
        return [_Part(peer, tuple(shards[peer]), tuple(shared[peer])) for peer in shards]

    def worst(self) -> dict[int, _Fault]:
        """Returns the updates to leave out next, with their faults."""
        norms, middle, left = self.measured.norms, self.typical, sorted(self.left)
        found = {i: why for i in left for why in [self._untrue(i)] if why is not None}
        if found or not middle:
            return found
        largest = max(left, key=norms.__getitem__, default=None)
        if largest is not None and norms[largest] > self._too_long():
            reason = f"its norm {norms[largest]:.3g} is over {NORM_LIMIT:g} times the median"
            return {largest: _Fault(reason, lambda part: self._length(largest, part), NORM_LIMIT)}
        if not self.together or len(left) < MEDIAN_NEEDS:
            return {}
        idle = {i: _Fault("it changes nothing") for i in left if norms[i] == 0}
        if idle:
            return idle
        for panel, cosines in self.measured.panels:
            found |= self._repeats(panel, cosines)
        if found:
            return found
        for panel, cosines in self.measured.panels:
            found |= self._odd(panel, cosines)
        return found

    def why_no_work(self, who: int, others: Set[int]) -> _Fault | None:
        """Returns whether it is nothing, repeats the round before, or is like one of the `others`: of however few."""
        self.left = {*others, who}
        if self.measured.norms[who] == 0:
            return self._untrue(who) or _Fault("it changes nothing")
        ((panel, cosines),) = self.measured.panels
        if any(j in others for j in self._alike[who] if j != who):
            return _Fault("it is almost the same as another's, which counts", is_known=False)
        return self._named(who, lambda: self._repeats(panel, cosines))

    def why_odd(self, who: int, others: Set[int]) -> _Fault | None:
        """Why this one would be left out among `others` that are not, alone with them."""
        self.left = {*others, who}
        reason = self._named(who, self.worst)
        alone = self.together and len(self.left) < LEAST_COMPARED
        return reason or (_Fault("it agrees with too few of the others") if alone else None)

    def _named(self, who: int, look: Callable[[], dict[int, _Fault]]) -> _Fault | None:
        """Returns the fault of this update once those with an earlier fault are set aside."""
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

    def _untrue(self, i: int) -> _Fault | None:
        """Payloads can be decoded, and norms are as they are said to be."""

        def at(shard: int, place: int) -> Callable[[_Part], float]:
            return lambda part: float(shard in part.shards or (shard, place) in part.shared)

        if i in self.measured.broken:
            broken = self.measured.broken[i]
            return _Fault(f"it cannot be read: {broken.reason}", at(broken.shard, broken.place))
        for number, name in enumerate(layout.shard_names(self.manifest.model)):
            found = self.measured.payloads[i][number]
            for place, (norm, said) in enumerate(zip(found, self.updates[i].norms.get(name, found), strict=True)):
                if not comparing.is_true(said, norm):
                    return _Fault(f"the norm of {name} is {norm:.6g}, not {said:.6g}", at(number, place))
        return None

    def _products(self, members: Sequence[tuple[int, int]], cosines: Sequence[Floats]) -> Iterator[Floats]:
        """Yields the products of each shard, [P, P]. `members`: (place in the panel, number of the update)."""
        places = [at for at, _ in members]
        for number, of_shard in enumerate(cosines):
            norms = np.array([self.measured.shards[i][number] for _, i in members])
            yield np.outer(norms, norms) * of_shard[np.ix_(places, places)]

    def _repeats(self, panel: Sequence[int], cosines: Sequence[Floats]) -> dict[int, _Fault]:
        """Returns faults of updates that almost equal one of the round before."""
        members = [(at, i) for at, i in enumerate(panel) if i in self.left or i >= len(self.updates)]
        near, found = self._near(members, cosines), dict[int, _Fault]()
        for n, (_, i) in enumerate(members):
            before = [other for m, other in enumerate(members) if near[n, m] and other[1] >= len(self.updates)]
            if i < len(self.updates) and before:
                found[i] = _Fault("it repeats the round before", self._like(panel, cosines, i, before[0]), 0.0)
        return found

    def _odd(self, panel: Sequence[int], cosines: Sequence[Floats]) -> dict[int, _Fault]:
        """Which of a panel works most against the others; else which agrees far less with them, or far more, than most
        do."""
        members = [i for i in panel if i in self.left]
        if len(members) < MEDIAN_NEEDS or not self._spec.agreement:
            return {}
        opponents, shares = list(self._opponents(panel, cosines)), self._shares(panel, cosines)
        low, high = min(members, key=lambda i: shares[i].ratio), max(members, key=lambda i: shares[i].least)
        if shares[low].ratio < self._spec.agreement and shares[low].own < _chance(sum(self.measured.elements)):
            agreement = self._agreement(panel, cosines, low)
            reason = f"it disagrees with the others {shares[low]}"
            return {low: _Fault(reason, lambda part: -agreement(part), -self._spec.agreement)}
        if opponents:
            _, i, reason, number = min(opponents, key=lambda x: (x[3] is not None, x[0]))
            return {i: _Fault(reason, self._disagreeing(panel, cosines, i, number), bearable(len(members)))}
        if shares[high].ratio > TOO_MUCH and shares[high].least > TOO_MUCH * shares[high].middle:
            reason = f"it is made of the others' updates {shares[high]}"
            return {high: _Fault(reason, self._agreement(panel, cosines, high), TOO_MUCH)}
        return {}

    def _opponents(
        self, panel: Sequence[int], cosines: Sequence[Floats]
    ) -> Iterator[tuple[float, int, str, int | None]]:
        """(cosine, update, text, shard) of updates that work against the others, as a whole or in a shard."""
        members = [(at, i) for at, i in enumerate(panel) if i in self.left]
        names, bad = layout.shard_names(self.manifest.model), bearable(len(members))
        for number, products, elements in self._layers(members, cosines):
            angles, deviation = _angles_of(products), 1 / math.sqrt(elements)
            rows = self._rows(members, angles).values()
            at_rank = [row[min(bad, len(row) - 1)] for row in rows]
            if statistics.median(at_rank) < SURE_DEVIATIONS * deviation:
                continue
            for (_, i), x in zip(members, at_rank, strict=True):
                if x < -OPPOSING_DEVIATIONS * deviation:
                    where = "" if number is None else f"in {names[number]} "
                    yield x, i, f"{where}it disagrees with the others (cosine {x:.2f})", number

    def _layers(
        self, members: Sequence[tuple[int, int]], cosines: Sequence[Floats]
    ) -> Iterator[tuple[int | None, Floats, int]]:
        """(number, products [P, P], elements) of each shard, and of the whole."""
        whole = np.zeros((len(members), len(members)))
        for number, products in enumerate(self._products(members, cosines)):
            whole += products
            yield number, products, self.measured.elements[number]
        yield None, whole, sum(self.measured.elements)

    def _shares(self, panel: Sequence[int], cosines: Sequence[Floats]) -> dict[int, _Share]:
        """The agreement of each update of a panel that is left, as a share of the median."""
        members = [(at, i) for at, i in enumerate(panel) if i in self.left]
        *_, (_, whole, _) = self._layers(members, cosines)
        rows, elements = self._rows(members, _angles_of(whole)), sum(self.measured.elements)
        found = {i: statistics.median(row) for i, row in rows.items()}
        middle = statistics.median(found.values())
        chance = _chance(elements) if middle >= SURE_DEVIATIONS / math.sqrt(elements) else math.inf
        return {
            i: _Share(x / middle if abs(middle - x) > chance else 1.0, x, middle, rows[i][len(rows[i]) // 4])
            for i, x in found.items()
        }

    def _rows(self, members: Sequence[tuple[int, int]], angles: Floats) -> dict[int, list[float]]:
        """The cosines of each member with the others, in order. angles: of all pairs, [P, P]"""
        numbers = [j for _, j in members]
        return {i: self._others(i, zip(numbers, row, strict=True)) for i, row in zip(numbers, angles, strict=True)}

    def _others(self, i: int, row: Iterable[tuple[int, float]]) -> list[float]:
        """The cosines of update i with the others, in order; 0 alone if there are none. What is like it is no other."""
        alike = self.alike(i)
        return sorted(float(x) for j, x in row if j not in alike) or [0.0]

    def opposed(self, i: int) -> list[int]:
        """The updates left that are opposed to this one."""
        return [j for j in self._opposed[i] if j in self.left] if self.together else []

    @functools.cached_property
    def _opposed(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in self.updates]
        for panel, cosines in self.measured.panels:
            members = [(at, i) for at, i in enumerate(panel) if i < len(self.updates)]
            layers = self._layers(members, cosines)
            against = [_angles_of(products) < -_chance(elements) for _, products, elements in layers]
            for (_, i), row in zip(members, np.any(against, axis=0), strict=True):
                found[i] = [members[m][1] for m in np.flatnonzero(row)]
        return found

    # --- whose fault it is

    def _length(self, i: int, part: _Part) -> float:
        """A part's norm over the median of the others' in the same shards."""
        others = [part_lists.total([self.measured.shards[j][n] for n in part.numbers]) for j in self.left if j != i]
        own = [self.measured.shards[i][n] for n in part.shards]
        own += [self.measured.payloads[i][n][place] for n, place in part.shared]
        middle = statistics.median(others) if others else 0.0
        return part_lists.total(own) / middle if middle else math.inf

    def _products_of(
        self, panel: Sequence[int], cosines: Sequence[Floats], i: int, part: _Part, only: int | None
    ) -> tuple[Floats, float]:
        """The products [P] of a part of update i with all of the panel, in its shards, and the square of its norm."""
        at, norms = panel.index(i), np.array([self.measured.shards[j] for j in panel])
        pieces = self.measured.pieces[[p for p, _ in self.measured.panels].index(tuple(panel))]
        found, square = np.zeros(len(panel)), 0.0
        for n in part.shards:
            if only in (None, n):
                found += norms[at, n] * norms[:, n] * cosines[n][at]
                square += float(norms[at, n] ** 2)
        for n, place in part.shared:
            if only in (None, n):
                found += norms[at, n] * norms[:, n] * pieces[n].get((i, place), np.zeros(len(panel)))
                square += self.measured.payloads[i][n][place] ** 2
        return found, square

    def _like(
        self, panel: Sequence[int], cosines: Sequence[Floats], i: int, other: tuple[int, int]
    ) -> Callable[[_Part], float]:
        """Returns the excess of a part's similarity to another update over the limit for copies."""

        def score(part: _Part) -> float:
            found, square = self._products_of(panel, cosines, i, part, None)
            theirs = math.fsum(self.measured.shards[other[1]][n] ** 2 for n in part.numbers)
            both = math.sqrt(square * theirs)
            return float(found[other[0]]) / both - self._spec.copies if both else -1.0

        return score

    def _angles(
        self, panel: Sequence[int], cosines: Sequence[Floats], i: int, part: _Part, only: int | None = None
    ) -> dict[int, float]:
        """The cosines of a part of update i with the others that are left, in its shards, or in one of them."""
        found, square = self._products_of(panel, cosines, i, part, only)
        numbers = part.numbers if only is None else (only,)
        theirs = [math.fsum(self.measured.shards[j][n] ** 2 for n in numbers) for j in panel]
        angles = _cosines(found, np.sqrt(square * np.array(theirs)))
        return {j: float(x) for j, x in zip(panel, angles, strict=True) if j in self.left and j != i}

    def _disagreeing(
        self, panel: Sequence[int], cosines: Sequence[Floats], i: int, only: int | None
    ) -> Callable[[_Part], float]:
        """With how many others a part of update i disagrees, or what it has in one shard."""

        def score(part: _Part) -> float:
            if only is not None and only not in part.numbers:
                return -1.0
            return float(sum(x < 0 for x in self._angles(panel, cosines, i, part, only).values()))

        return score

    def _agreement(self, panel: Sequence[int], cosines: Sequence[Floats], i: int) -> Callable[[_Part], float]:
        """A part's agreement over the median of the others' in the same shards. Where most agree no more than by
        chance: 1, and less where it disagrees."""
        others = [j for j in panel if j in self.left and j != i]

        def score(part: _Part) -> float:
            own = statistics.median(self._others(i, self._angles(panel, cosines, i, part).items()))
            same = _Part("", part.numbers, ())
            theirs = [self._angles(panel, cosines, j, same) for j in others]
            found = [
                statistics.median(self._others(j, ((k, x) for k, x in row.items() if k != i)))
                for j, row in zip(others, theirs, strict=True)
            ]
            middle = statistics.median(found) if found else 0.0
            deviation = 1 / math.sqrt(sum(self.measured.elements[n] for n in part.numbers))
            return own / middle if middle >= SURE_DEVIATIONS * deviation else 1.0 + min(0.0, own)

        return score


def _cosines(products: Floats, both: Floats) -> Floats:
    """Products over those of the norms; 0 where either is 0."""
    found: Floats = np.divide(products, both, out=np.zeros_like(products), where=both > 0)
    return found


def _angles_of(products: Floats) -> Floats:
    """The cosines [P, P] of updates, from their products."""
    squares = products.diagonal()
    return _cosines(products, np.sqrt(np.outer(squares, squares)))


def bearable(count: int) -> int:
    """Returns the number of bad contributions that the rules bear among `count`."""
    return int(BEARABLE * count)


def _chance(elements: int) -> float:
    """The cosine that unrelated updates have at most."""
    return CHANCE_DEVIATIONS / math.sqrt(elements)
