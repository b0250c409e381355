"""The planner's objective: tokens per second that a replica brings into commits. Pure.

Every replica trains for the same time and weighs by its tokens, so a swarm's rate is the sum of its replicas'. Of R:

    rate = M n / step x (own - others) x presence                M micro-batches of n tokens
    own    = round / (round + send + between)                    with overlap: round / max(round, send)
    others = max(0, (R - 1) (fetch + apply) - spare) / round     spare: 0; with overlap: what `send` leaves of a round
    send   = payload / uplink        fetch = payload / min(downlink, mean uplink)        apply = entries x APPLY_SECONDS
    step   = trip + max over stages of (M - W) trip / W + (W - 1) tau, with trip and W from this stage on
    trip   = sum of t + sum of (f + b + 2 l)       one micro-batch through the chain and back
    tau    = largest t, f or b                     what sets the pace

With aggregates (protocol/ledger/aggregation.py) R - 1 becomes a constant from some R on: `Swarm.fetched`.

Each member fetches the payloads of its shards of every other replica, and peers serve each other, so that the mean
uplink of the swarm's machines is busy with (R - 1) payloads, too. `others` has no bound: what is less than nothing is
what an arrangement gains without the replica.

t: seconds of a stage per micro-batch; f, b: seconds of a frame at a boundary, forward and backward; l: its latency; W:
the window, how many micro-batches can be between their forward and backward at this stage (by the depth, which the
least memory of any member allows, or by its own memory). A stage that keeps only its input computes its forward twice
(t x 4 / 3) and has no window; that is done where it pays. `step` is the closed form of the simulation in
protocol/planning/pipeline_model.py. A full replica is a chain of one stage.

An inner stage's links carry two boundaries in turns, at USED_LINK_SHARE of their rate (docs/results/chain.md). Two
neighbours behind routers talk through a bootstrap node: the way is RELAY_DETOUR times as long, and all such pairs share
what the relays carry. Unknown values are taken as usual: the median of the known ones, USUAL_FLOPS, USUAL_BPS,
USUAL_LATENCY.

Arrays: N replicas, S places of members in the order of stages, -1 where a replica has fewer. `compute` [N, S]: seconds
of each stage per micro-batch; `links`: each boundary there and back [N, S - 1], and the slowest in one direction [N];
`windows` [N, S].
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from protocol.planning.partition import Candidate, pairs_apart
from protocol.planning.pipeline_model import RECOMPUTE_PAYS
from protocol.planning.shapes import FIRST, LAST, MIDDLE, WHOLE, Flags, Floats, Holding, Ints, shapes
from protocol.run.manifest import Manifest

Links = tuple[Floats, Floats]
WINDOW_WAITS = 1.02
"""A step this many times as long as its slowest part's pace gains from more micro-batches under way."""


def step(micro_batches: int, compute: Floats, links: Links, windows: Floats) -> tuple[Floats, Flags]:
    """[N] each: seconds of an inner step, and whether it waits for windows, which are at most `micro_batches`."""
    trips = _trips(compute, links)
    pace = np.maximum(compute.max(axis=1), links[1])
    held_up = _held_up(micro_batches, trips, pace[:, None], windows).max(axis=1)
    steady = (micro_batches - 1) * pace
    return trips[:, 0] + np.maximum(steady, held_up), held_up > WINDOW_WAITS * steady


def gains(micro_batches: int, compute: Floats, links: Links, windows: Floats, depth: Floats) -> Flags:
    """[N, S]: whether recomputing with `depth` [N, 1] beats the window; the rule of `computes_twice`."""
    if not (windows < depth).any():
        return np.zeros(windows.shape, dtype=bool)
    trips, more = _trips(compute, links), compute / 3
    pace = np.maximum(np.maximum.accumulate(compute[:, ::-1], axis=1)[:, ::-1], links[1][:, None])
    slower = np.maximum(pace, compute + more)
    steady, slowly = (micro_batches - 1) * pace, (micro_batches - 1) * slower
    kept = np.maximum(steady, _held_up(micro_batches, trips, pace, windows))
    anew = more + np.maximum(slowly, _held_up(micro_batches, trips + more, slower, depth))
    found: Flags = anew < RECOMPUTE_PAYS * kept
    return found


def _trips(compute: Floats, links: Links) -> Floats:
    """[N, S]: seconds of a micro-batch from each stage to the end of the chain and back."""
    trips = compute.copy()
    trips[:, :-1] += links[0]
    for stage in range(trips.shape[1] - 2, -1, -1):
        trips[:, stage] += trips[:, stage + 1]
    return trips


def _held_up(micro_batches: int, trips: Floats, pace: Floats, windows: Floats) -> Floats:
    """[N, S]: seconds of a step but for its first trip, if the others wait for this stage's window."""
    found: Floats = (micro_batches - windows) * trips / windows + (windows - 1) * pace
    return found


USED_LINK_SHARE = 0.9
"""Of a link's rate: the rest is headers, acknowledgements and room for a chain's turns."""
PUNCH_SUCCESS = 0.7
"""How often a hole can be punched between two home routers: 4.4 million attempts (arXiv:2510.27500)."""
RELAY_DETOUR = 2.0
"""Assumed length of a relayed way, in direct ways; the relay is not known when a plan is made."""
ROUND_TRIPS_BETWEEN = 20
"""Ways between neighbours from the last inner step of a round to the first of the next (docs/results/reach.md)."""
APPLY_SECONDS = 40e-9
"""Of a processor, for each entry of each payload (27 to 51 ns were measured)."""
MOST_BELIEVED = 8.0
"""Medians that a machine's uplink and speed count for at most where others are judged by them: they are announced."""
USUAL_FLOPS = 1e12
USUAL_BPS = 20e6
"""A home's uplink."""
USUAL_LATENCY = 0.025
DEEPER = (2, 4)
"""How many times as many micro-batches as memory always has room for (`window`) are tried to have room for."""
SHIFTS = 4
"""Passes in which blocks are shared out with more care (`refined`)."""
_HALVINGS = 10


OWN, LOST, SPARE, PRICED = range(4)
"""Columns of terms [N, 4]: tokens per second without others, tokens per second that each other replica costs, how many
cost nothing, and what of the second is believed where it speaks against others."""


def with_others(terms: Floats, others: float) -> Floats:
    """[N]: tokens per second beside so many other replicas."""
    found: Floats = terms[:, OWN] - terms[:, LOST] * np.maximum(0.0, others - terms[:, SPARE])
    return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rated:
    """Replicas as they do best, row by row; all terms 0 where the members cannot hold the model."""

    blocks: Ints
    """[N, S]: of each member."""
    terms: Floats
    """[N, 4]: see OWN."""
    rate: Floats
    """[N]: tokens per second beside `Swarm.others`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Exchange:
    """Seconds [N] of a round in which payloads travel, of the slowest member."""

    sent: Floats
    fetched: Floats
    """Of each other replica."""
    applied: Floats
    """Of each other replica."""


class Swarm:
    """The candidates as arrays [n], in their order. relay_bps: bits a second of all relays together, 0: no relays."""

    def __init__(self, manifest: Manifest, candidates: Sequence[Candidate], relay_bps: float = math.inf) -> None:
        self.shapes = table = shapes(manifest)
        self.known = np.array([c.speed_flops > 0 for c in candidates], dtype=bool)
        self.speed = _filled([c.speed_flops for c in candidates], USUAL_FLOPS)
        work = table.layers * table.block_ops + table.extra_ops[WHOLE]
        self.most_rate = MOST_BELIEVED * table.tokens * float(np.median(self.speed)) / work if len(candidates) else 0.0
        """Tokens per second that are believed of a member."""
        self.up = USED_LINK_SHARE * _filled([c.up_bps for c in candidates], USUAL_BPS)
        down = np.array([min(max(c.down_bps, 0), 10**13) for c in candidates], dtype=np.float64) * USED_LINK_SHARE
        self.down = np.where(down > 0, down, self.up)
        uplink = np.minimum(self.up, MOST_BELIEVED * np.median(self.up)).mean() if len(candidates) else 0.0
        self.fetches = np.minimum(self.down, uplink)
        """Bits a second at which payloads come: other homes send them."""
        self._most_fetched, self._replicas = table.most_fetched
        self.others: float = 0
        """What the replica that is rated fetches, in multiples of an update."""
        self.presence = np.array([min(max(c.presence, 0.0), 1.0) for c in candidates])
        self.private = np.array([c.reachable == "private" for c in candidates], dtype=bool)
        self.relayed_bps = relay_bps / max(1, int(self.private.sum()) // 2)
        """Bits a second of one relayed boundary, both ways together."""
        self.apart = pairs_apart(candidates)
        """Of pairs that cannot be neighbours: the one's number times n, plus the other's; ascending."""
        self.place = _places(candidates)
        self._holding = Holding(manifest, candidates)
        alone = np.array([c.alone for c in candidates], dtype=bool)
        self.caps = caps = self._holding.caps()
        """[K, n]: the most blocks that a member can hold in each kind of stage; 0 in chains for a peer that is out."""
        caps[:WHOLE, alone] = 0
        self._kinds: tuple[Ints, Ints] | None = None  # of the rows that were asked for last
        depths = [table.window * times for times in DEEPER if table.window * times <= table.micro_batches]
        self.deeper_caps = [self._holding.caps_at(caps, depth) for depth in depths]

    def fetched(self, others: Floats) -> Floats:
        """[K]: what a replica fetches in a plan with `others` [K] other replicas, in multiples of an update."""
        return np.where(others + 1 >= self._replicas, np.minimum(others, self._most_fetched), others)

    def fetched_beside(self, others: int) -> float:
        """As `fetched`, of one number."""
        return float(self.fetched(np.array([others], dtype=np.float64))[0])

    # --- members to stages

    def kinds(self, rows: Ints) -> Ints:
        """[N, S]: which kind of stage each place is."""
        if self._kinds is not None and self._kinds[0] is rows:
            return self._kinds[1]
        size = (rows >= 0).sum(axis=1, keepdims=True)
        place = np.arange(rows.shape[1])[None, :]
        kind = np.where(place == 0, FIRST, np.where(place == size - 1, LAST, MIDDLE))
        found: Ints = np.where(size == 1, WHOLE, kind)
        self._kinds = rows, found
        return found

    def fits(self, rows: Ints) -> Flags:
        """[N]: whether the members can hold the model in this order."""
        return self._fits(rows, self.kinds(rows), self.caps)

    def _fits(self, rows: Ints, kind: Ints, caps: Ints) -> Flags:
        cap = caps[kind, rows]
        there = rows >= 0
        enough = np.where(there, cap, 0).sum(axis=1) >= self.shapes.layers
        few = there.sum(axis=1) <= self.shapes.layers
        return enough & few & (np.where(there, cap, 1) >= 1).all(axis=1)

    def share_out(self, rows: Ints, caps: Ints) -> Ints:
        """[N, S]: blocks of each member, at most `caps` [K, n]: the slowest stage is as quick as possible."""
        table, there, kind = self.shapes, rows >= 0, self.kinds(rows)
        cap = np.where(there, caps[kind, rows], 0)
        extra = np.where(there, table.extra_ops[kind], 0.0)
        seconds = np.where(there, 1.0 / self.speed[rows], 0.0)
        speed = np.where(there, self.speed[rows], 0.0)
        one = there.astype(np.int64)
        low = np.maximum(
            (table.layers * table.block_ops + extra.sum(axis=1)) / speed.sum(axis=1),
            ((table.block_ops + extra) * one * seconds).max(axis=1),
        )
        high = np.maximum(((cap * table.block_ops + extra) * seconds).max(axis=1), low)

        def within(limit: Floats) -> Ints:
            n = np.floor((limit[:, None] * speed * (1 + 1e-9) - extra) / table.block_ops)
            return np.minimum(np.maximum(n, one), cap).astype(np.int64)

        for _ in range(_HALVINGS):
            middle = np.sqrt(low * high)
            enough = within(middle).sum(axis=1) >= table.layers
            low, high = np.where(enough, low, middle), np.where(enough, middle, high)
        blocks = within(high)
        surplus = blocks.sum(axis=1) - table.layers
        some = np.flatnonzero(surplus > 0)
        while len(some):
            key = np.where(blocks[some] > 1, speed[some] * (1 - 1e-9 * blocks[some]), math.inf)
            blocks[some, key.argmin(axis=1)] -= 1
            surplus[some] -= 1
            some = some[surplus[some] > 0]
        return blocks

    # --- stages to seconds

    def boundaries(self, rows: Ints, kind: Ints, bits: Floats) -> tuple[Floats, Floats]:
        """[N, S - 1] each: seconds of a frame of `bits` [2] forward and backward at each boundary, 0 for none."""
        forward, backward = bits
        sends = np.array([forward, forward + backward, backward, 0.0])[kind] / self.up[rows]
        gets = np.array([backward, forward + backward, forward, 0.0])[kind] / self.down[rows]
        pair = rows[:, 1:] >= 0
        there = np.where(pair, np.maximum(sends[:, :-1], gets[:, 1:]), 0.0)
        back = np.where(pair, np.maximum(sends[:, 1:], gets[:, :-1]), 0.0)
        if self.private.any() and self.relayed_bps:
            through = np.where(self.both_private(rows), bits.sum() / self.relayed_bps, 0.0)
            there, back = np.maximum(there, through), np.maximum(back, through)
        return there, back

    def both_private(self, rows: Ints) -> Flags:
        """[N, S - 1]: whether the boundary after each place is between two peers whose routers let nobody in."""
        private = np.where(rows >= 0, self.private[rows], False)
        found: Flags = private[:, 1:] & private[:, :-1]
        return found

    def latencies(self, rows: Ints) -> Floats:
        """[N, S - 1]: one-way seconds of the boundary after each place; 0 where there is none."""
        squares = np.zeros(rows[:, 1:].shape, order="F")
        for axis in self.place.T:
            at = axis[rows]
            squares += (at[:, 1:] - at[:, :-1]) ** 2
        seconds = np.sqrt(squares) / 1e3
        found: Floats = np.where(rows[:, 1:] >= 0, np.where(np.isnan(seconds), USUAL_LATENCY, seconds), 0.0)
        if self.private.any() and self.relayed_bps:
            found = np.where(self.both_private(rows), RELAY_DETOUR * found, found)
        return found

    def compute(self, rows: Ints, blocks: Ints) -> Floats:
        """[N, S]: seconds of each stage per micro-batch, forward and backward."""
        table = self.shapes
        seconds = (blocks * table.block_ops + table.extra_ops[self.kinds(rows)]) / self.speed[rows]
        return np.where(rows >= 0, seconds, 0.0)

    def room(self, rows: Ints, blocks: Ints) -> tuple[Floats, Floats, Floats]:
        """[N, S] each: for how many micro-batches under way each stage has memory (protocol/planning/shapes.py)."""
        return self._holding.room(rows, self.kinds(rows), blocks)

    def links(self, rows: Ints) -> Links:
        """Of the boundaries, as `step` takes them."""
        forward, backward = self.boundaries(rows, self.kinds(rows), self.shapes.boundary_bits)
        return forward + backward + 2 * self.latencies(rows), np.maximum(forward, backward).max(axis=1, initial=0.0)

    def manners(
        self, compute: Floats, room: tuple[Floats, Floats, Floats], links: Links
    ) -> list[tuple[Floats, Floats]]:
        """(compute, windows) [N, S] of two ways: without recomputation, and with the most micro-batches under way."""
        (plain, held, most), count, found = room, self.shapes.micro_batches, []
        for most_of in (held, most):
            depth = np.minimum(most_of.min(axis=1, keepdims=True), count)
            windows = np.minimum(plain, depth)
            twice = (windows < depth) & ((depth > held) | gains(count, compute, links, windows, depth))
            found.append((np.where(twice, compute * 4 / 3, compute), np.where(twice, depth, windows)))
        return found

    def step_seconds(self, rows: Ints, blocks: Ints) -> tuple[Floats, Flags]:
        """[N]: seconds of an inner step, and whether it waits for windows or recomputes."""
        compute, room, links = self.compute(rows, blocks), self.room(rows, blocks), self.links(rows)
        first, other = self.manners(compute, room, links)
        seconds, held_up = step(self.shapes.micro_batches, first[0], links, first[1])
        waits = held_up | (first[0] > compute).any(axis=1)
        return np.minimum(seconds, step(self.shapes.micro_batches, other[0], links, other[1])[0]), waits

    def exchange(self, rows: Ints, blocks: Ints) -> Exchange:
        """Seconds of a round for payloads."""
        bits = np.where(rows >= 0, self.shapes.payload_bits[self.kinds(rows), blocks], 0.0)
        return Exchange(
            sent=(bits / self.up[rows]).max(axis=1),
            fetched=(bits / self.fetches[rows]).max(axis=1),
            applied=bits.max(axis=1) * (APPLY_SECONDS / self.shapes.entry_bits),
        )

    def terms(self, rows: Ints, blocks: Ints) -> tuple[Floats, Flags]:
        """Terms [N, 4], and whether an inner step waits for windows [N]."""
        table, length = self.shapes, self.shapes.round_seconds
        seconds, waits = self.step_seconds(rows, blocks)
        travels = self.exchange(rows, blocks)
        each = travels.fetched + travels.applied
        if table.overlap:
            trains = length / np.maximum(travels.sent, length)
            spare = np.maximum(0.0, length - travels.sent) / each
        else:
            between = ROUND_TRIPS_BETWEEN * self.latencies(rows).max(axis=1, initial=0.0)
            trains = length / (length + travels.sent + between)
            spare = np.zeros(len(rows))
        rate = table.tokens * table.micro_batches / seconds * self._reached(rows)
        rate *= np.where(rows >= 0, self.presence[rows], 1.0).prod(axis=1)
        there = rows >= 0
        believed = np.where((self.known[rows] | ~there).all(axis=1), self.most_rate * there.sum(axis=1), 0.0)
        believed = np.minimum(rate, believed)
        return np.stack([rate * trains, rate * each / length, spare, believed * each / length], axis=1), waits

    def at_least(self, rows: Ints) -> Floats:
        """[N]: lower bound of an inner step's seconds, to compare orders; infinite where the model does not fit."""
        table, kind = self.shapes, self.kinds(rows)
        speed = np.where(rows >= 0, self.speed[rows], 0.0).sum(axis=1)
        pace = (table.layers * table.block_ops + table.extra_ops[WHOLE]) / speed
        latency = 2 * self.latencies(rows).sum(axis=1)
        forward, backward = self.boundaries(rows, kind, table.boundary_bits)
        trip, slowest = (
            forward.sum(axis=1) + backward.sum(axis=1),
            np.maximum(forward, backward).max(axis=1, initial=0.0),
        )
        seconds = trip + latency + (table.micro_batches - 1) * np.maximum(slowest, pace)
        if self.private.any() or len(self.apart):
            with np.errstate(divide="ignore"):
                seconds = seconds / self._reached(rows)
        found: Floats = np.where(self._fits(rows, kind, self.caps), seconds, math.inf)
        return found

    def _reached(self, rows: Ints) -> Floats:
        """[N]: how likely all neighbours can talk."""
        found = np.ones(len(rows))
        if self.private.any() and not self.relayed_bps:
            found = PUNCH_SUCCESS ** self.both_private(rows).sum(axis=1)
        if len(self.apart):
            one, other = rows[:, :-1], rows[:, 1:]
            keys = np.where(other >= 0, one * len(self.private) + other, -1)
            at = np.minimum(np.searchsorted(self.apart, keys), len(self.apart) - 1)
            found = np.where((self.apart[at] == keys).any(axis=1), 0.0, found)
        return found

    def rated(self, rows: Ints) -> Rated:
        """Any rows, each as it does best in this order of members."""
        blocks, terms = np.zeros_like(rows), np.zeros((len(rows), 4))
        good = np.flatnonzero(self.fits(rows))
        if len(good):
            some = np.asfortranarray(rows[good])
            blocks[good] = shared = np.asfortranarray(self.share_out(some, self.caps))
            terms[good], waits = self.terms(some, shared)
            self._deepen(rows, good[waits], (blocks, terms))
        return self.as_rated(blocks, terms)

    def as_rated(self, blocks: Ints, terms: Floats) -> Rated:
        """These blocks with their rates."""
        return Rated(blocks=blocks, terms=terms, rate=with_others(terms, self.others))

    def refined(self, rows: Ints, rated: Rated) -> Rated:
        """`rated`, with blocks shifted between members where that makes a waiting replica quicker. Slow."""
        found = rated.blocks.copy(), rated.terms.copy()
        some = np.flatnonzero(rated.rate > 0)
        if len(some):
            as_is, blocks = np.asfortranarray(rows[some]), np.asfortranarray(rated.blocks[some])
            _, waits = self.terms(as_is, blocks)
            self._shift(rows, some[waits], found)
        return self.as_rated(*found)

    def _deepen(self, rows: Ints, which: Ints, found: tuple[Ints, Floats]) -> None:
        """Shares blocks out so that members can have more micro-batches in flight, where that is better."""
        for caps in self.deeper_caps:
            which = which[self._fits(rows[which], self.kinds(rows[which]), caps)]
            if not len(which):
                return
            self._keep_better(rows, which, self.share_out(np.asfortranarray(rows[which]), caps), found)

    def _shift(self, rows: Ints, which: Ints, found: tuple[Ints, Floats]) -> None:
        """Lets members of some rows give a block to another where that makes the row quicker."""
        blocks, terms = found
        cap = np.where(rows >= 0, self.caps[self.kinds(rows), rows], 0)
        passes = SHIFTS
        while len(which) and passes:
            before, passes = with_others(terms[which], self.others), passes - 1
            for giver, taker in itertools.permutations(range(rows.shape[1]), 2):
                some = which[(blocks[which, giver] > 1) & (blocks[which, taker] < cap[which, taker])]
                shared = blocks[some]
                shared[:, giver] -= 1
                shared[:, taker] += 1
                self._keep_better(rows, some, shared, found)
            which = which[with_others(terms[which], self.others) > before]

    def _keep_better(self, rows: Ints, some: Ints, shared: Ints, found: tuple[Ints, Floats]) -> None:
        """Of some rows these shares, where they are quicker."""
        blocks, terms = found
        then, _ = self.terms(np.asfortranarray(rows[some]), np.asfortranarray(shared))
        rate = with_others(terms[some], self.others)
        better = with_others(then, self.others) > rate + 1e-9 * np.abs(rate)
        at = some[better]
        blocks[at], terms[at] = shared[better], then[better]


def _filled(values: Sequence[int], usual: float) -> Floats:
    """Amounts, the unknown ones as the median of the known, or as usual."""
    known = [v for v in values if v > 0]
    middle = float(min(statistics.median_low(known), 10**18)) if known else usual
    return np.array([min(v, 10**18) if v > 0 else middle for v in values], dtype=np.float64)


def _places(candidates: Sequence[Candidate]) -> Floats:
    """[n, axes] milliseconds; not a number where a peer has no usable coordinates."""
    lengths = [len(c.coordinates) for c in candidates if c.coordinates]
    axes = statistics.mode(lengths) if lengths else 1
    place = np.full((len(candidates), axes), math.nan)
    for i, c in enumerate(candidates):
        if len(c.coordinates) == axes and all(abs(x) < 1e5 for x in c.coordinates):
            place[i] = c.coordinates
    return place


def padded(groups: Sequence[Sequence[int]]) -> Ints:
    rows = np.full((len(groups), max(map(len, groups), default=1)), -1, dtype=np.int64)
    for row, group in zip(rows, groups, strict=True):
        row[: len(group)] = group
    return rows
