"""The cost model of a chain, against what can be worked out by hand, and the depth that it picks."""

from __future__ import annotations

import itertools
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.planning import pipeline_model
from protocol.planning.pipeline_model import Depths, LinkCost, StageCost, pick_depth, step_seconds

PACE = 0.5376
"""6 P / (S F) of 2,048 tokens: P = 70e9, S = 4, F = 400 TFLOP/s."""
TRANSFER = PACE * 0.624
"""Of their d/8 values (d = 8192) in bf16 at 100 Mb/s."""


def _chain(
    seconds_per_microbatch: float, transfer: float, latency: float, stages: int = 4
) -> tuple[list[StageCost], list[LinkCost]]:
    link = LinkCost(forward=transfer, backward=transfer, latency=latency)
    return [StageCost(forward=seconds_per_microbatch / 3, backward=2 * seconds_per_microbatch / 3)] * stages, [link] * (
        stages - 1
    )


@pytest.mark.parametrize("micro_batches", [1, 7, 32, 128])
def test_a_deep_chain_waits_for_the_fill_only(micro_batches: int) -> None:
    chain = _chain(PACE, TRANSFER, 0.025)
    expected = micro_batches * PACE + 3 * (PACE + 2 * TRANSFER + 2 * 0.025)
    assert step_seconds(*chain, micro_batches, micro_batches) == pytest.approx(expected)


def test_one_at_a_time_takes_a_whole_trip_for_each() -> None:
    chain = _chain(PACE, TRANSFER, 0.025)
    trip = 4 * PACE + 6 * TRANSFER + 6 * 0.025
    assert step_seconds(*chain, 5, 1) == pytest.approx(5 * trip)
    assert step_seconds(*_chain(PACE, 0, 0, stages=1), 5, 1) == pytest.approx(5 * PACE)


def test_a_slow_link_sets_the_pace() -> None:
    took = step_seconds(*_chain(PACE, 5 * PACE, 0.025), 100, 100)
    assert took == pytest.approx(100 * 5 * PACE, rel=0.2)


@pytest.mark.parametrize(("micro_batches", "textbook", "deep"), [(32, 0.49, 0.897), (128, 0.47, 0.970)])
def test_home_links_want_more_than_textbook_1f1b(micro_batches: int, textbook: float, deep: float) -> None:
    chain = _chain(PACE, TRANSFER, 0.025)
    ideal = (micro_batches + 3) * PACE
    assert ideal / step_seconds(*chain, micro_batches, 4) == pytest.approx(textbook, abs=0.01)
    depth = pick_depth(*chain, micro_batches)
    assert ideal / step_seconds(*chain, micro_batches, depth) == pytest.approx(deep, abs=0.01)
    assert 12 <= depth <= 20


def test_memory_bounds_the_depth_and_recomputation_is_used_where_it_pays() -> None:
    stages, links = _chain(PACE, TRANSFER, 0.025)
    small = StageCost(forward=PACE / 3, backward=2 * PACE / 3, depths=Depths(plain=2, held=2, most=5))
    bounded = [stages[0], small, *stages[2:]]
    assert pick_depth(bounded, links, 32) == 5, "five at a third more work beat two"
    fast = [LinkCost(forward=0, backward=0, latency=0)] * 3
    enough = StageCost(forward=PACE / 3, backward=2 * PACE / 3, depths=Depths(plain=6, held=6, most=50))
    assert pick_depth([enough] * 4, fast, 32) <= 6, "nothing is computed twice for nothing"


SECONDS = st.floats(0.001, 1.0)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(SECONDS, SECONDS), min_size=2, max_size=6),
    st.lists(st.tuples(SECONDS, SECONDS, SECONDS), min_size=5, max_size=5),
    st.integers(1, 24),
)
def test_no_step_is_faster_than_its_slowest_part_and_the_picked_depth_is_good(stages, links, micro_batches) -> None:
    chain = [StageCost(forward=f, backward=b) for f, b in stages]
    between = [LinkCost(forward=f, backward=b, latency=x) for f, b, x in links[: len(chain) - 1]]
    slowest = max(*(s.forward + s.backward for s in chain), *(max(k.forward, k.backward) for k in between))
    took = [step_seconds(chain, between, micro_batches, depth) for depth in range(1, micro_batches + 1)]
    assert min(took) >= slowest * micro_batches * (1 - 1e-12)  # sums are rounded
    assert took[0] == pytest.approx(micro_batches * pipeline_model.least_depth(chain, between) * slowest)
    picked = took[pick_depth(chain, between, micro_batches) - 1]
    assert picked <= min(took) * 1.1  # of 80,000 random chains the worst had 1.051


def test_what_is_no_chain_is_refused() -> None:
    stages, links = _chain(1, 1, 1)
    for wrong in ((stages, links[1:], 1, 1), ([], [], 1, 1), (stages, links, 0, 1), (stages, links, 1, 0)):
        with pytest.raises(ValueError, match="a chain needs"):
            step_seconds(*wrong)


USUAL = [(0.5, 0.6, 0.4)] * 4


@pytest.mark.parametrize(
    ("last", "slow"),
    [
        ([(0.5, 3.0, 0.4)] * 2, 1),
        ([(0.5, 3.0, 0.4), (0.5, 0.6, 0.4)], None),  # once
        ([(0.5, 2.0, 0.4)] * 2, None),  # not that much
        ([(3.0, 4.0, 3.0)] * 2, None),  # as the others
        ([(3.0, 6.0, 0.4)] * 2, None),
        ([(3.0, 0.6, 0.4)] * 2, 0),
    ],
)
def test_a_stage_that_becomes_slow_is_found(last: list[tuple[float, ...]], slow: int | None) -> None:
    assert pipeline_model.slow_stage(USUAL + last, micro_batches=4) == slow
    assert pipeline_model.slow_stage(USUAL[1:] + last, micro_batches=4) is None, "too little is known"
    tiny = [tuple(t / 1000 for t in step) for step in USUAL + last]
    assert pipeline_model.slow_stage(tiny, micro_batches=4) is None, "it does not matter"


def test_activations_are_computed_twice_where_that_is_quicker() -> None:
    """Beside the best of all choices of stages that do, and of depths. With those computing twice that had no room for
    the others to wait, the worst of these chains took 4.0 times as long as the best, and a chain 6 % longer in the
    mean."""
    rng, slower = random.Random(1), []
    for _ in range(100):
        stages = [_random_stage(rng) for _ in range(rng.randint(1, 3))]
        chain = [*stages, StageCost(forward=rng.random() / 3, backward=2 * rng.random() / 3)]
        links = [
            LinkCost(forward=rng.uniform(0, 0.1), backward=rng.uniform(0, 0.1), latency=rng.random()) for _ in stages
        ]
        picked = step_seconds(chain, links, 32, pick_depth(chain, links, 32))
        slower.append(picked / _best(chain, links, 32))
    assert max(slower) < 1.35
    assert statistics.mean(slower) < 1.02


def _random_stage(rng: random.Random) -> StageCost:
    seconds, plain = rng.uniform(0.001, 1), rng.randint(1, 8)
    depths = Depths(plain=plain, held=int(plain * rng.uniform(1, 12)), most=64)
    return StageCost(forward=seconds / 3, backward=2 * seconds / 3, depths=depths)


def _best(chain: list[StageCost], links: list[LinkCost], micro_batches: int) -> float:
    """Seconds of the quickest step, of several depths and of all choices of stages that compute twice."""
    found = []
    for depth, *twice in itertools.product((1, 2, 4, 6, 8, 12, 16, 24, 32), *[(False, True)] * (len(chain) - 1)):
        if any(depth > s.depths.held and not t for s, t in zip(chain, twice, strict=False)):
            continue
        chosen = [_twice(s) if t else s for s, t in zip(chain, [*twice, False], strict=True)]
        found.append(step_seconds(chosen, links, micro_batches, depth, twice=lambda *_: False))
    return min(found)


def _twice(stage: StageCost) -> StageCost:
    return StageCost(forward=stage.forward, backward=stage.backward + stage.forward)
