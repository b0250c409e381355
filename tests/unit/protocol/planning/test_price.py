"""What a replica costs the others: everybody fetches and adds its payloads."""

from __future__ import annotations

import dataclasses
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.ledger import aggregation, part_lists
from protocol.planning.arrange import Arranged, arrange, gains
from protocol.planning.objective import LOST, OWN, SPARE, Swarm, padded, with_others
from protocol.planning.partition import Candidate
from protocol.planning.search import Arrangement
from protocol.run.manifest import Manifest, OuterSpec, TimingSpec
from tests.support import plans

WHOLE = ((0, 12),)


def run(overlap: int = 0, seconds: float = 120.0) -> Manifest:
    """Of half a billion parameters."""
    made = plans.manifest_of("0.5B")
    timing = TimingSpec(round_seconds=seconds, round_deadline=2 * seconds)
    return dataclasses.replace(made, outer=OuterSpec(overlap=overlap), timing=timing)


def homes(count: int, up: float = 20e6, speed: float = 12e12) -> list[Candidate]:
    """Machines that hold the whole model, behind lines of 20 and 100 Mb/s."""
    return [
        Candidate(
            peer=f"home-{i:05}",
            memory_bytes=24 * 10**9,
            up_bps=int(up),
            down_bps=int(5 * up),
            speed_flops=int(speed * (1 + i % 7 / 100)),
            coordinates=(0.0,),
        )
        for i in range(count)
    ]


def full(peers: list[Candidate]) -> list[Arranged]:
    return [Arranged(members=(c.peer,), ranges=WHOLE, rate=0.0) for c in peers]


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_replica_that_is_alone_has_no_price(overlap: int) -> None:
    manifest, one = run(overlap), homes(1)
    (only,), spares = arrange(manifest, one)
    assert only.rate == pytest.approx(plans.worth(manifest, one, WHOLE))
    assert not spares


@pytest.mark.parametrize("overlap", [0, 1])
def test_each_further_replica_costs_the_others_more(overlap: int) -> None:
    manifest, peers = run(overlap), homes(80)
    swarm = Swarm(manifest, peers)
    terms, _ = swarm.terms(padded([(0,)]), np.array([[12]]))
    rates = [float(with_others(terms, others)[0]) for others in range(80)]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > rates[-1]
    free = round(float(terms[0, SPARE]))
    assert rates[: free + 1] == [rates[0]] * (free + 1), "with overlap the first ones are fetched while it trains"
    assert free == (0 if not overlap else pytest.approx(120 / 2.2, rel=0.1))
    travels = swarm.exchange(padded([(0,)]), np.array([[12]]))
    assert terms[0, LOST] / terms[0, OWN] == pytest.approx((travels.fetched[0] + travels.applied[0]) / 120, rel=0.03)


def test_six_homes_all_train() -> None:
    manifest, peers = run(), homes(6)
    replicas, spares = arrange(manifest, peers)
    assert (len(replicas), spares) == (6, ())
    assert sum(r.rate for r in replicas) == pytest.approx(plans.total(manifest, peers, full(peers)))


@pytest.mark.parametrize("count", [30, 50, 90])
def test_of_many_homes_as_many_train_as_bring_most(count: int) -> None:
    manifest, peers = run(), homes(count)
    replicas, _ = arrange(manifest, peers)
    ours = plans.total(manifest, peers, replicas)
    assert ours == pytest.approx(sum(r.rate for r in replicas), rel=1e-4)
    quickest = sorted(peers, key=lambda c: -c.speed_flops)
    by_number = [plans.total(manifest, peers, full(quickest[:number])) for number in range(1, count + 1)]
    assert ours >= max(by_number) * (1 - 1e-6)
    assert len(replicas) < count, "one more would cost the others more than it brings"
    assert ours > 1.05 * by_number[-1]


def test_with_overlap_fifty_homes_all_train() -> None:
    replicas, spares = arrange(run(overlap=1), homes(50))
    assert (len(replicas), spares) == (50, ())


def test_with_aggregates_all_homes_train_and_each_loses_the_same() -> None:
    manifest, peers = run(), homes(90)
    added = dataclasses.replace(manifest, outer=OuterSpec(aggregate_topk=256))
    least = aggregation.least_replicas(added)
    assert 8 < least < 16
    replicas, spares = arrange(added, peers)
    assert (len(replicas), spares) == (90, ())
    assert sum(r.rate for r in replicas) > 2 * sum(r.rate for r in arrange(manifest, peers)[0])
    swarm = Swarm(added, peers)
    fetched = [swarm.fetched_beside(number - 1) for number in (1, least - 1, least, 90, 10_000)]
    size = aggregation.largest_aggregate(added) / part_lists.largest_update(added)
    assert fetched == [0, least - 2, *[pytest.approx(size)] * 3]


def test_where_replicas_are_dear_machines_join() -> None:
    """Lines that carry a chain's boundaries with ease, and rounds so short that eight payloads fill one."""
    manifest, peers = run(seconds=10.0), homes(40, up=300e6)
    replicas, _ = arrange(manifest, peers)
    assert any(len(r.members) > 1 for r in replicas)
    apart = [plans.total(manifest, peers, full(peers[:number])) for number in range(1, 41)]
    assert sum(r.rate for r in replicas) > 1.2 * max(apart)


def test_a_plan_that_is_best_stays_while_speeds_vary_by_a_tenth() -> None:
    manifest, peers = run(), homes(50)
    replicas, spares = arrange(manifest, peers)
    rng = random.Random(1)
    now = [dataclasses.replace(c, speed_flops=int(c.speed_flops * rng.uniform(0.9, 1.1))) for c in peers]
    again, left = arrange(manifest, now, replicas)
    assert ({r.members for r in again}, set(left)) == ({r.members for r in replicas}, set(spares))


def test_kept_replicas_that_cost_the_others_much_more_than_they_bring_are_given_up() -> None:
    """Lines so slow that a chain of two brings no more than one of them."""
    manifest, peers = run(seconds=600.0), homes(200, up=8e6)
    replicas, spares = arrange(manifest, peers, full(peers))
    assert 0 < len(spares) < 200
    assert sum(r.rate for r in replicas) > 2 * plans.total(manifest, peers, full(peers))
    assert arrange(manifest, peers, replicas)[1] == spares, "and then all is as it is"


def test_a_swap_gains_for_the_plan_as_a_whole() -> None:
    manifest, peers = run(), homes(50)
    plan = full(peers[:40])
    total = plans.total(manifest, peers, plan)
    fewer, more = gains(manifest, peers, plan, [(plan[:2], plan[:1]), (plan[:1], full([peers[0], peers[40]]))])
    alone = plans.alone(manifest, [peers[0]], WHOLE, plans.mean_uplink(peers)).beside(39)
    other = plans.alone(manifest, [peers[1]], WHOLE, plans.mean_uplink(peers)).beside(39)
    assert fewer * (alone + other) == pytest.approx(plans.total(manifest, peers, [plan[0], *plan[2:]]) - total)
    assert more * alone == pytest.approx(plans.total(manifest, peers, [*plan, *full([peers[40]])]) - total)
    assert fewer > 0 > more


terms = st.tuples(st.floats(0.1, 1e4), st.floats(0, 100), st.floats(0, 10)).map(
    lambda t: np.array([*t, t[1]], dtype=np.float64)
)


@settings(max_examples=100, deadline=None)
@given(before=st.lists(terms, min_size=1, max_size=12), after=st.lists(terms, max_size=5), gone=st.integers(0, 12))
def test_what_a_change_gains_is_the_difference_of_the_totals(
    before: list[np.ndarray], after: list[np.ndarray], gone: int
) -> None:
    swarm = Swarm(run(), homes(20))
    now = Arrangement(swarm, {(i,): one for i, one in enumerate(before)}, set())
    assert now.total == pytest.approx(sum(now.rates), abs=1e-6)
    total, some = now.total, list(range(min(gone, len(before))))
    gain = now.gain([now.terms[number] for number in some], after)
    for number in some:
        now.dissolve(number)
    for i, one in enumerate(after):
        now.add((12 + i,), one)
    assert now.total - total == pytest.approx(gain, abs=1e-6)
    now.settle()
    assert now.total - total == pytest.approx(gain, abs=1e-6)
    assert math.isclose(now.total, sum(now.rates), abs_tol=1e-6)
