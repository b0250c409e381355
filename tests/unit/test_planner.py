"""The matchmaker: who becomes a replica, a chain, a spare."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from protocol import layout, planner
from protocol.layout import ModelSpec
from protocol.manifest import ChainSpec, Manifest
from protocol.messages import Plan
from protocol.planner import Candidate, make_plan, stage_memory
from tests import tiny

M = tiny.manifest()
FULL, THIRD, LEAST = tiny.full_memory(M), tiny.third_memory(M), planner.smallest_stage(M)
LAYERS = tiny.LAYERS


def _candidates(*memory: int, up: int = 10**7) -> list[Candidate]:
    return [Candidate(peer=f"p{i}", memory_bytes=m, up_bps=up) for i, m in enumerate(memory)]


def _plan(candidates: list[Candidate], previous: Plan | None = None) -> Plan | None:
    return make_plan(M, candidates, round=1, slot=0, previous=previous)


def _ranges(plan: Plan | None) -> list[list[tuple[str, int, int]]]:
    assert plan is not None
    return [[(s.peer, s.first, s.last) for s in r.stages] for r in plan.replicas]


def _check(candidates: list[Candidate], plan: Plan) -> None:
    """What every plan must keep: whole replicas, memory limits, everybody exactly once."""
    memory = {c.peer: c.memory_bytes for c in candidates}
    for replica in plan.replicas:
        stages = replica.stages
        assert (stages[0].first, stages[-1].last) == (0, LAYERS)
        assert all(a.last == b.first for a, b in itertools.pairwise(stages))
        assert all(s.first < s.last for s in stages)
        assert all(stage_memory(M, s.first, s.last) <= memory[s.peer] for s in stages)
        assert replica.k == 0 or len(stages) > 1
    everybody = [p for r in plan.replicas for p in r.peers] + list(plan.spares)
    assert sorted(everybody) == sorted(memory)


def test_strong_peers_are_full_and_weak_ones_share_a_chain() -> None:
    candidates = _candidates(FULL, THIRD, FULL, THIRD, THIRD, THIRD)
    plan = _plan(candidates)
    assert _ranges(plan) == [
        [("p0", 0, 4)],
        [("p2", 0, 4)],
        [("p1", 0, 1), ("p3", 1, 2), ("p4", 2, 4)],
    ]
    assert plan is not None
    assert plan.spares == ("p5",)
    _check(candidates, plan)


@pytest.mark.parametrize("memory", [(), (THIRD,), (THIRD, THIRD), (FULL - 1,), (LEAST - 1,) * 6])
def test_no_replica_no_plan(memory: tuple[int, ...]) -> None:
    assert _plan(_candidates(*memory)) is None


def test_neighbours_by_uplink_make_a_chain() -> None:
    links = (1, 9, 2, 8, 3, 7)
    candidates = [Candidate(peer=f"p{i}", memory_bytes=THIRD, up_bps=up) for i, up in enumerate(links)]
    plan = _plan(candidates)
    assert plan is not None
    assert [set(r.peers) for r in plan.replicas] == [{"p1", "p3", "p5"}, {"p4", "p2", "p0"}]


def test_a_plan_is_kept_while_its_members_stay() -> None:
    first = _plan(_candidates(THIRD, THIRD, THIRD, FULL))
    more = [*_candidates(THIRD, THIRD, THIRD, FULL), Candidate(peer="q", memory_bytes=FULL, up_bps=10**9)]
    second = _plan(more, first)
    assert _ranges(second)[:2] == _ranges(first)
    assert _ranges(second)[2] == [("q", 0, 4)]


def test_a_chain_that_lost_a_member_takes_the_spare() -> None:
    first = _plan(_candidates(THIRD, THIRD, THIRD, THIRD))
    left = [c for c in _candidates(THIRD, THIRD, THIRD, THIRD) if c.peer != "p1"]
    assert _ranges(_plan(left, first)) == [[("p0", 0, 1), ("p2", 1, 2), ("p3", 2, 4)]]


def test_a_member_whose_memory_shrank_is_planned_anew() -> None:
    first = _plan(_candidates(FULL, FULL))
    second = _plan(_candidates(FULL, THIRD), first)
    assert _ranges(second) == [[("p0", 0, 4)]]
    assert second is not None
    assert second.spares == ("p1",)


def test_a_peer_too_small_for_any_stage_does_not_stand_between_others() -> None:
    links = (5, 4, 3, 2, 1)
    memory = (THIRD, LEAST - 1, THIRD, LEAST - 1, THIRD)
    candidates = [
        Candidate(peer=f"p{i}", memory_bytes=m, up_bps=u) for i, (m, u) in enumerate(zip(memory, links, strict=True))
    ]
    plan = _plan(candidates)
    assert plan is not None
    assert plan.replicas[0].peers == ("p0", "p2", "p4")
    assert plan.spares == ("p1", "p3")


memories = st.lists(st.integers(int(LEAST * 0.8), int(FULL * 1.1)), max_size=9)


@given(memory=memories, links=st.lists(st.integers(1, 5), min_size=9, max_size=9))
def test_every_plan_is_sound_and_independent_of_the_order_of_the_announcements(
    memory: list[int], links: list[int]
) -> None:
    candidates = [
        Candidate(peer=f"p{i}", memory_bytes=m, up_bps=u) for i, (m, u) in enumerate(zip(memory, links, strict=False))
    ]
    plan = _plan(candidates)
    assert _plan(candidates[::-1]) == plan
    if plan is not None:
        _check(candidates, plan)
        assert _ranges(_plan(candidates, plan)) == _ranges(plan)


@settings(max_examples=60)
@given(memory=st.lists(st.integers(int(LEAST * 0.8), FULL - 1), min_size=2, max_size=4))
@example(memory=[29248, 34176, 63232])
def test_whenever_some_chain_exists_there_is_a_plan(memory: list[int]) -> None:
    orders = (order for size in range(2, 5) for order in itertools.permutations(memory, size))
    possible = any(planner.split(M, order) is not None for order in orders)
    assert (_plan(_candidates(*memory)) is not None) == possible


@given(memory=st.lists(st.integers(LEAST, FULL), min_size=1, max_size=5))
def test_split_is_the_best_for_its_order(memory: list[int]) -> None:
    cuts = itertools.combinations(range(1, LAYERS), len(memory) - 1)
    all_ranges = [tuple(itertools.pairwise((0, *cut, LAYERS))) for cut in cuts]

    def worst(ranges: tuple[tuple[int, int], ...]) -> float:
        return max(stage_memory(M, a, b) / m for (a, b), m in zip(ranges, memory, strict=True))

    best = min((worst(r) for r in all_ranges), default=2.0)
    found = planner.split(M, memory)
    assert (found is None) == (best > 1)
    assert found is None or worst(found) == best


def test_stages_cover_every_shard_once_and_readers_hold_the_embedding() -> None:
    names = layout.shard_names(M.model)
    for cut in range(1, LAYERS):
        first, last = planner.stage_shards(M, 0, cut), planner.stage_shards(M, cut, LAYERS)
        assert first + last == names
        assert planner.held_shards(M, 0, cut) == first
        assert planner.held_shards(M, cut, LAYERS) == ("embed", *last)
    assert planner.stage_shards(M, 0, LAYERS) == names


def test_memory_of_a_full_replica_by_hand() -> None:
    params = layout.total_parameters(M.model)
    block = 17 * 8 + 4 * 16
    assert 24 * params + 4 * 1 * 8 * (4 * block + 3 * 16 + block) == FULL


def test_what_memory_is_left_over_makes_the_chain_deeper() -> None:
    for first, last in ((0, 2), (1, 3), (2, 4)):
        least, one = stage_memory(M, first, last), planner.activation_bytes(M, first, last)
        plain, most = planner.depths(M, first, last, least)
        assert plain == planner.window(M)
        assert most >= plain
        inputs = 8 * M.train.rows * M.train.sequence * M.model.d_model
        deeper = planner.depths(M, first, last, least + 10 * (one + inputs))
        assert plain + 10 - 4 <= deeper[0] <= plain + 10
        assert deeper[1] > deeper[0], "inputs are smaller than activations"


def test_k_is_the_largest_that_the_uplink_carries_in_half_a_round() -> None:
    manifest = tiny.manifest(chains=ChainSpec(k=(0, 4, 2), forward="bf16", backward="bf16"))
    tokens, half = manifest.train.inner_steps * manifest.train.step_tokens, manifest.timing.round_deadline / 2

    def needed(k: int) -> float:
        return tokens * 2 * 16 * (k or 8) / half

    for k, smaller in ((0, 4), (4, 2)):
        link = int(needed(k)) + 1
        assert planner.boundary_k(manifest, link) == k
        assert planner.boundary_k(manifest, link - 2) == smaller
    assert planner.boundary_k(manifest, 0) == 2


def test_slots_go_on_after_the_plan() -> None:
    plan = _plan(_candidates(FULL, FULL))
    assert plan is not None
    assert planner.following(M, plan) == 2 * M.train.inner_steps * M.train.step_rows


def test_ten_thousand_announcements_take_seconds() -> None:
    big = ModelSpec(vocab_size=32_768, d_model=1024, n_layers=9, n_heads=8, d_ff=2688, context=2048)
    manifest: Manifest = tiny.manifest(model=big)
    whole = stage_memory(manifest, 0, 9)
    candidates = [
        Candidate(peer=f"p{i}", memory_bytes=whole * (5 + i * 7919 % 120) // 100, up_bps=1 + i * 104_729 % 997)
        for i in range(10_000)
    ]
    began = time.process_time()
    plan = make_plan(manifest, candidates, round=1, slot=0, previous=None)
    assert plan is not None
    assert len(plan.replicas) > 3000
    assert make_plan(manifest, candidates, round=2, slot=0, previous=plan) is not None
    assert time.process_time() - began < 60


def test_as_many_chains_as_their_ends_allow() -> None:
    """The head's stage needs the most memory, whatever the order of the uplinks."""
    last, rest = stage_memory(M, 2, 4), max(stage_memory(M, 0, 1), stage_memory(M, 1, 2))
    assert last > rest
    assert planner.split(M, [last, rest, rest]) is None
    memories = [last, rest, rest] * 3
    candidates = [Candidate(peer=f"p{i}", memory_bytes=x, up_bps=100 - i // 3) for i, x in enumerate(memories)]
    plan = _plan(candidates)
    assert plan is not None
    assert [set(r.peers) for r in plan.replicas] == [{f"p{3 * c + i}" for i in range(3)} for c in range(3)]
