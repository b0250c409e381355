"""The matchmaker: who becomes a replica, a chain, a spare."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from protocol.planning import budget, memory, partition
from protocol.planning.allotment import NEW
from protocol.planning.budget import Budget
from protocol.planning.memory import stage_memory
from protocol.planning.partition import Candidate
from protocol.planning.planner import FORMING_ROUNDS, make_plan
from protocol.run import layout
from protocol.run.layout import ModelSpec
from protocol.run.manifest import ChainSpec, Manifest, TimingSpec, TrainSpec
from protocol.wire.plan import Plan, ReplicaSpec, StageSpec
from tests.support import tiny

M = tiny.manifest()
NARROW = tiny.manifest(
    model=dataclasses.replace(M.model, residual_width=2), chains=ChainSpec(forward="bf16", backward="int8")
)
FULL, THIRD, LEAST = tiny.full_memory(M), tiny.third_memory(M), budget.smallest_stage(M)[0]
LAYERS = tiny.LAYERS
MBPS = 10**6


def _candidates(*memory: int, up: int = 10**7) -> list[Candidate]:
    return [Candidate(peer=f"p{i}", memory_bytes=m, up_bps=up) for i, m in enumerate(memory)]


def _plan(candidates: list[Candidate], previous: Plan | None = None) -> Plan | None:
    return make_plan(M, candidates, round=1, previous=previous)


def _ranges(plan: Plan | None) -> list[list[tuple[str, int, int]]]:
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
    assert plan.spares == ("p5",)
    _check(candidates, plan)


@pytest.mark.parametrize("memory", [(), (THIRD,), (THIRD, THIRD), (FULL - 1,), (LEAST - 1,) * 6])
def test_no_replica_no_plan(memory: tuple[int, ...]) -> None:
    assert _plan(_candidates(*memory)) is None


def test_neighbours_by_uplink_make_a_chain() -> None:
    links = (1, 9, 2, 8, 3, 7)
    candidates = [Candidate(peer=f"p{i}", memory_bytes=THIRD, up_bps=up * MBPS) for i, up in enumerate(links)]
    plan = _plan(candidates)
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
    assert second.spares == ("p1",)


def test_a_peer_too_small_for_any_stage_does_not_stand_between_others() -> None:
    links = (5, 4, 3, 2, 1)
    memory = (THIRD, LEAST - 1, THIRD, LEAST - 1, THIRD)
    candidates = [
        Candidate(peer=f"p{i}", memory_bytes=m, up_bps=u * MBPS)
        for i, (m, u) in enumerate(zip(memory, links, strict=True))
    ]
    plan = _plan(candidates)
    assert set(plan.replicas[0].peers) == {"p0", "p2", "p4"}
    assert plan.spares == ("p1", "p3")


memories = st.lists(st.integers(int(LEAST * 0.8), int(FULL * 1.1)), max_size=9)


@given(memory=memories, links=st.lists(st.integers(1, 5), min_size=9, max_size=9))
def test_every_plan_is_sound_and_independent_of_the_order_of_the_announcements(
    memory: list[int], links: list[int]
) -> None:
    candidates = [
        Candidate(peer=f"p{i}", memory_bytes=m, up_bps=u * MBPS)
        for i, (m, u) in enumerate(zip(memory, links, strict=False))
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
    possible = any(partition.split(M, tiny.rooms(order)) is not None for order in orders)
    assert (_plan(_candidates(*memory)) is not None) == possible


@given(memory=st.lists(st.integers(LEAST, FULL), min_size=1, max_size=5))
def test_split_is_the_best_for_its_order(memory: list[int]) -> None:
    cuts = itertools.combinations(range(1, LAYERS), len(memory) - 1)
    all_ranges = [tuple(itertools.pairwise((0, *cut, LAYERS))) for cut in cuts]

    def worst(ranges: tuple[tuple[int, int], ...]) -> float:
        return max(stage_memory(M, a, b) / m for (a, b), m in zip(ranges, memory, strict=True))

    best = min((worst(r) for r in all_ranges), default=2.0)
    found = partition.split(M, tiny.rooms(memory))
    assert (found is None) == (best > 1)
    assert found is None or worst(found) == best


def test_stages_cover_every_shard_once() -> None:
    names = layout.shard_names(M.model)
    for cut in range(1, LAYERS):
        assert memory.stage_shards(M, 0, cut) + memory.stage_shards(M, cut, LAYERS) == names
    assert memory.stage_shards(M, 0, LAYERS) == names


def test_every_stage_has_the_rows_of_tokens_where_blocks_do_not_write_all() -> None:
    names = layout.shard_names(NARROW.model)
    assert names == (*layout.shard_names(M.model), "anchor")
    for cut in range(1, LAYERS):
        first, last = memory.stage_shards(NARROW, 0, cut), memory.stage_shards(NARROW, cut, LAYERS)
        assert first[-1] == last[-1] == "anchor"
        assert (*first[:-1], *last) == names
    assert memory.stage_shards(NARROW, 1, 3) == ("block.1", "block.2", "anchor")
    assert memory.stage_shards(NARROW, 0, LAYERS) == names


GRADIENTS = 8 * 8 * (10 * 8 + 4 * 16) + 4 * 8 * 16
"""Within a block of M that goes backward: 8 tokens of width 8, and a matrix 8 x 16."""


def test_memory_of_a_full_replica_by_hand() -> None:
    params, embed = layout.total_parameters(M.model), 16 * 8
    block, window = 17 * 8 + 4 * 16, memory.window(M)
    work = 4 * 1 * 8 * 4 * block + GRADIENTS + 8 * 8 * 16 + 4 * embed
    assert 16 * params + work == FULL
    scratch = 4 * (embed + layout.parameters(M.model, "block.0"))
    assert memory.memory_at(M, 0, LAYERS, 1, window, in_files=False) == 24 * params + scratch + work


def test_memory_of_a_chains_stages_by_hand() -> None:
    """Blocks write 2 of 8 columns: a stage has 16 rows of 6 values, the first one 2 more of each; frames have 2."""
    m, most = NARROW, memory.window(NARROW)
    embed, anchor, head = 16 * 2, 16 * 6, 8 + 16 * 8
    one = 2 * 8 + 3 * 8 * 8 + 2 * 8 + 2 * 16 * 8 + 2 * 16
    assert one == layout.parameters(m.model, "block.0")
    block = 17 * 8 + 4 * 16
    forward, backward = 2 * 8 * (4 * 2 + 2 * 2), 2 * 8 * (4 * 2 + 2 + 2)
    work = 4 * 8 * 4 * block + GRADIENTS
    first, middle, last = 2 * one + embed + anchor, 2 * one + anchor, 2 * one + head + anchor
    assert stage_memory(m, 0, 2) == 16 * first + work + 4 * (embed + anchor) + backward
    assert stage_memory(m, 1, 3) == 16 * middle + work + 4 * anchor + forward + backward
    loss = 8 * 8 * 16 + 4 * 16 * 8
    assert stage_memory(m, 2, 4) == 16 * last + 4 * 8 * 2 * block + GRADIENTS + loss + forward
    scratch = 4 * (16 * 8 + one)
    for (a, b), params in (((0, 2), first), ((1, 3), middle)):
        held = memory.memory_at(m, a, b, 2, most, in_files=False)
        assert held == stage_memory(m, a, b) + 8 * params + scratch
    alone = 16 * (one + anchor) + 4 * 8 * block + GRADIENTS + 4 * anchor + forward + backward
    assert stage_memory(m, 1, 2) == alone, "one block computes again what it has no room for"
    assert memory.later_bytes(m, 1, 2) == 4 * (3 * one + embed + head), "it has anchor already"


SEVEN_B = tiny.manifest(
    model=ModelSpec(
        vocab_size=32_000, d_model=4096, n_layers=32, n_heads=32, d_ff=11_008, context=1024, residual_width=1344
    ),
    train=TrainSpec(inner_steps=50, micro_batches=8, rows=1, sequence=1024, lr=1e-3, warmup_steps=0, total_steps=100),
)


def test_what_of_a_7b_model_fits_into_8_12_and_24_gb() -> None:
    """A machine's memory less a quarter, as `potluck join` takes it where nothing else is said."""
    layers, room = SEVEN_B.model.n_layers, {gb: int(0.75 * gb * 1e9) for gb in (8, 12, 24)}
    fits = {
        gb: [size for size in (1, 2, 3) if stage_memory(SEVEN_B, 1, 1 + size) <= usable] for gb, usable in room.items()
    }
    assert fits == {8: [1], 12: [1], 24: [1, 2, 3]}
    assert 0.9 * room[8] < stage_memory(SEVEN_B, 1, 2), "without margin"
    assert room[8] < stage_memory(SEVEN_B, 0, 1) < 0.8 * room[12], "the first stage"
    assert 0.8 * room[12] < stage_memory(SEVEN_B, layers - 1, layers) <= room[12], "the last stage"
    assert not budget.in_files(SEVEN_B, Budget(10**12))
    assert budget.in_files(SEVEN_B, Budget(room[24]))


def test_rows_of_tokens_take_twenty_bytes_for_each_value() -> None:
    """Their parameters, gradient and moments, and a micro-batch's gradient."""
    without = dataclasses.replace(SEVEN_B, model=dataclasses.replace(SEVEN_B.model, vocab_size=16))
    rows = (32_000 - 16) * (4096 - 1344)
    assert stage_memory(SEVEN_B, 1, 2) - stage_memory(without, 1, 2) == 20 * rows
    assert stage_memory(SEVEN_B, 0, 1) - stage_memory(without, 0, 1) == 20 * (32_000 - 16) * 4096


def test_a_chain_of_8_gb_machines_with_larger_ends_carries_a_7b_model() -> None:
    room = {gb: int(0.75 * gb * 1e9) for gb in (8, 12, 24)}
    members = [room[12], *[room[8]] * 30, room[12]]
    ranges = partition.split(SEVEN_B, tiny.rooms(members))
    assert ranges is not None
    assert len(ranges) == 32
    assert partition.split(SEVEN_B, tiny.rooms([room[8]] * 32)) is None


def test_what_memory_is_left_over_makes_the_chain_deeper() -> None:
    for first, last in ((0, 2), (1, 3), (2, 4)):
        least, one = stage_memory(M, first, last), memory.activation_bytes(M, first, last)
        depths = budget.depths(M, first, last, Budget(least))
        assert depths.held >= memory.under_way(M)
        inputs = memory.frame_bytes(M, first, last)
        deeper = budget.depths(M, first, last, Budget(least + 10 * (one + memory.WAITING * inputs)))
        assert deeper.most > depths.most
        if last == LAYERS:
            assert deeper.plain == deeper.held == deeper.most, "it keeps the activations of one"
            continue
        assert depths.plain == memory.window(M)
        assert depths.plain + 10 - 4 <= deeper.plain <= depths.plain + 10
        assert deeper.plain < deeper.held < deeper.most, "inputs are smaller than activations"


@settings(deadline=None)
@given(first=st.integers(0, LAYERS - 1), size=st.integers(1, LAYERS), extra=st.integers(0, 10**6))
def test_no_depth_takes_more_memory_than_there_is(first: int, size: int, extra: int) -> None:
    m = dataclasses.replace(M, train=dataclasses.replace(M.train, micro_batches=32))
    last = min(first + size, LAYERS)
    there = stage_memory(m, first, last) + extra
    depths, kept = budget.depths(m, first, last, Budget(there)), 1 if last == LAYERS else None
    files = budget.in_files(m, Budget(there))
    for depth in (depths.plain, depths.held, depths.most):
        activations = kept or (1 if depth > depths.held else depths.window(depth, again=False))
        assert memory.memory_at(m, first, last, activations, depth, in_files=files) <= there


def _places(replicas: tuple[ReplicaSpec, ...]) -> list[tuple[int, tuple[str, ...]]]:
    return [(r.number, r.peers) for r in replicas]


def test_a_new_replica_begins_when_all_its_members_hold_their_shards() -> None:
    full, *weak = _candidates(FULL, *[tiny.third_memory(M)] * 3)
    first = _plan([full])
    assert first is not None
    members = tuple(c.peer for c in weak)

    def after(previous: Plan, *holding: str) -> Plan:
        plan = make_plan(M, [full, *weak], round=2, previous=previous, holds=lambda stage: stage.peer in holding)
        assert plan is not None
        return plan

    second = after(first, *members[:2])
    assert _places(second.replicas) == [(0, (full.peer,))]
    (forming,) = second.forming
    assert (forming.number, set(forming.peers)) == (NEW, set(members))
    assert (second.spares, second.next_number) == ((), 1), "nobody else may have them meanwhile"
    assert after(second, *members[:2]).forming == second.forming, "it stays as it is, for they fetch just that"
    third = after(second, *members)
    assert _places(third.replicas) == [(0, (full.peer,)), (1, forming.peers)]
    assert (third.forming, third.replica(1).stages) == ((), forming.stages)


def test_who_keeps_a_replica_from_beginning_is_left_out_after_some_rounds() -> None:
    """The others are spares then, and may be planned with others."""
    full, *weak = _candidates(FULL, *[tiny.third_memory(M)] * 3)
    stuck, *others = (c.peer for c in weak)

    def after(previous: Plan | None, round: int) -> Plan:
        plan = make_plan(
            M, [full, *weak], round=round, previous=previous, holds=lambda stage: stage.peer not in (stuck, full.peer)
        )
        assert plan is not None
        return plan

    plan = after(_plan([full]), 2)
    for round in range(3, 2 + FORMING_ROUNDS):
        plan = after(plan, round)
        assert (len(plan.forming), plan.forming_since) == (1, (2,))
    plan = after(plan, 2 + FORMING_ROUNDS)
    assert (plan.forming, plan.forming_since, plan.spares) == ((), (), tuple(sorted(others)))
    plan = after(plan, 3 + FORMING_ROUNDS)
    assert plan.forming_since == (3 + FORMING_ROUNDS,), "it may try again"


def test_who_is_kept_need_not_hold_anything_anew() -> None:
    plan = _plan(_candidates(FULL, FULL))
    again = make_plan(M, _candidates(FULL, FULL), round=2, previous=plan, holds=lambda stage: False)
    assert _places(again.replicas) == _places(plan.replicas)


def test_where_nobody_could_train_a_new_replica_begins_with_what_it_has_to_fetch() -> None:
    plan = make_plan(M, _candidates(FULL, FULL), round=2, previous=None, holds=lambda stage: False)
    assert (len(plan.replicas), plan.forming) == (2, ())


def test_as_many_chains_as_their_ends_allow() -> None:
    """The head's stage needs the most memory, whatever the order of the uplinks."""
    last, rest = stage_memory(M, 2, 4), max(stage_memory(M, 0, 1), stage_memory(M, 1, 2))
    assert last > rest
    assert partition.split(M, tiny.rooms([last, rest, rest])) is None
    memories = [last, rest, rest] * 3
    candidates = [Candidate(peer=f"p{i}", memory_bytes=x, up_bps=(100 - i // 3) * MBPS) for i, x in enumerate(memories)]
    plan = _plan(candidates)
    assert sorted(len(r.peers) for r in plan.replicas) == [3, 3, 3]
    assert {int(r.peers[-1][1:]) % 3 for r in plan.replicas} == {0}
    assert plan.spares == ()


# --- speed

UP = 10**9
"""Over which moving a block of the tiny model takes no time worth mentioning."""
DEEP = tiny.manifest(
    model=ModelSpec(vocab_size=16, d_model=8, n_layers=12, n_heads=2, d_ff=16, context=8),
    train=TrainSpec(inner_steps=50, micro_batches=32, rows=1, sequence=1, lr=1e-3, warmup_steps=0, total_steps=100),
    timing=TimingSpec(round_deadline=1e6, heartbeat=1.0, gone_after=2.0),
)
ROOM = stage_memory(DEEP, 0, 12) - 1
"""Memory for any stage but the whole model."""


def _swift(*speeds: int, memory: int = ROOM, up: int = UP) -> list[Candidate]:
    return [
        Candidate(peer=f"p{i:02}", memory_bytes=memory, up_bps=up - i, down_bps=up, speed_flops=s)
        for i, s in enumerate(speeds)
    ]


def _kept(manifest: Manifest, blocks: tuple[int, ...]) -> Plan:
    """A plan with one chain, of p00, p01, ... with these numbers of blocks."""
    edges = itertools.pairwise(itertools.accumulate(blocks, initial=0))
    stages = tuple(StageSpec(peer=f"p{i:02}", first=a, last=b) for i, (a, b) in enumerate(edges))
    return Plan(round=1, replicas=(ReplicaSpec(stages=stages),))


def _next(candidates: list[Candidate], previous: Plan, manifest: Manifest = DEEP) -> tuple[int, ...]:
    """How many blocks the members of the one chain have in the plan after `previous`."""
    plan = make_plan(manifest, candidates, round=2, previous=previous)
    (replica,) = plan.replicas
    assert replica.peers == previous.replicas[0].peers
    return replica.blocks


def _slowest(manifest: Manifest, ranges: partition.Ranges, speeds: Sequence[int]) -> float:
    return max(partition.stage_operations(manifest)[r] / s for r, s in zip(ranges, speeds, strict=True))


members = st.integers(1, 6).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(LEAST, FULL), min_size=n, max_size=n),
        st.lists(st.integers(1, 1000).map(lambda s: 2000 * s), min_size=n, max_size=n),
    )
)


@given(chain=members)
def test_split_makes_the_slowest_stage_as_quick_as_memory_allows_and_then_uses_the_least_share_of_it(
    chain: tuple[list[int], list[int]],
) -> None:
    memory, speeds = chain
    cuts = itertools.combinations(range(1, LAYERS), len(memory) - 1)
    all_ranges = [tuple(itertools.pairwise((0, *cut, LAYERS))) for cut in cuts]

    def share(ranges: partition.Ranges) -> float:
        return max(stage_memory(M, a, b) / m for (a, b), m in zip(ranges, memory, strict=True))

    fitting = [r for r in all_ranges if share(r) <= 1]
    found = partition.split(M, tiny.rooms(memory), speeds)
    assert (found is None) == (not fitting)
    if found is not None:
        best = min((_slowest(M, r, speeds), share(r)) for r in fitting)
        assert (_slowest(M, found, speeds), share(found)) == best


@given(chain=members, slower=st.integers(0, 5))
def test_who_becomes_slower_never_gets_more_to_do(chain: tuple[list[int], list[int]], slower: int) -> None:
    memory, speeds = chain
    slower %= len(speeds)
    before = partition.split(M, tiny.rooms(memory), speeds)
    after = partition.split(M, tiny.rooms(memory), [s // 2 if i == slower else s for i, s in enumerate(speeds)])
    assert (before is None) == (after is None)
    if before is not None and after is not None:
        assert partition.stage_operations(M)[after[slower]] <= partition.stage_operations(M)[before[slower]]


@pytest.mark.parametrize("stages", range(1, 17))
def test_stages_are_contiguous_and_follow_the_speeds_for_every_length(stages: int) -> None:
    layers = 40
    deep = tiny.manifest(model=ModelSpec(vocab_size=16, d_model=8, n_layers=layers, n_heads=2, d_ff=16, context=8))
    speeds = [10**9 * (1 + i % 2) for i in range(stages)]
    ranges = partition.split(deep, tiny.rooms([stage_memory(deep, 0, layers)] * stages), speeds)
    assert [a for a, _ in ranges] == [0, *(b for _, b in ranges[:-1])]
    assert ranges[-1][1] == layers
    assert all(a < b for a, b in ranges)
    even = partition.stage_operations(deep)[0, layers] / sum(speeds)
    block = partition.stage_operations(deep)[1, 2]
    assert _slowest(deep, ranges, speeds) <= even + 2 * block / min(speeds)


def test_the_head_counts_as_the_blocks_that_it_is_worth() -> None:
    """V = 8 blocks' worth of operations: with equal machines the last stage has fewer blocks."""
    block = (partition.stage_operations(DEEP)[1, 2]) // (DEEP.train.rows * DEEP.train.sequence)
    wide = tiny.manifest(
        model=ModelSpec(vocab_size=4 * block // (6 * 8), d_model=8, n_layers=12, n_heads=2, d_ff=16, context=8)
    )
    ranges = partition.split(wide, tiny.rooms([stage_memory(wide, 0, 12)] * 2), [10**6] * 2)
    assert ranges == ((0, 8), (8, 12))


def test_an_unknown_speed_counts_as_the_median_of_the_known_ones() -> None:
    for speeds, same in (((4, 0, 1, 2), (4, 2, 1, 2)), ((0, 3), (3, 3))):
        assert partition.split(DEEP, tiny.rooms([ROOM] * len(speeds)), speeds) == partition.split(
            DEEP, tiny.rooms([ROOM] * len(same)), same
        )
    assert partition.split(DEEP, tiny.rooms([ROOM] * 3), (0, 0, 0)) == partition.split(DEEP, tiny.rooms([ROOM] * 3))


def test_a_new_chain_is_split_by_speed_and_the_order_of_announcements_does_not_matter() -> None:
    candidates = _swift(3 * 10**6, 10**6)
    plan = make_plan(DEEP, candidates, round=1, previous=None)
    assert make_plan(DEEP, candidates[::-1], round=1, previous=None) == plan
    assert [dict(zip(r.peers, r.blocks, strict=True)) for r in plan.replicas] == [{"p00": 9, "p01": 3}]


def test_blocks_move_away_from_a_stage_at_half_speed_and_only_then() -> None:
    plan = _kept(DEEP, (4, 4, 4))
    assert _next(_swift(10**6, 10**6, 10**6), plan) == (4, 4, 4)
    assert _next(_swift(10**6, 5 * 10**5, 10**6), plan) == (5, 2, 5)
    assert _next(_swift(10**6, 10**6, 10**6), _kept(DEEP, (5, 2, 5))) == (5, 2, 5), "a fifth is not worth it"
    assert _next(_swift(10**6, 2 * 10**6, 10**6), _kept(DEEP, (5, 2, 5))) == (3, 6, 3)


def test_a_guess_moves_nothing() -> None:
    assert _next(_swift(10**6, 1, 0), _kept(DEEP, (4, 4, 4))) == (4, 4, 4)


def test_what_takes_longer_to_move_than_ten_rounds_save_stays() -> None:
    plan = _kept(DEEP, (4, 4, 4))
    train, speeds = DEEP.train, (10**6, 5 * 10**5, 10**6)
    work = partition.stage_operations(DEEP)
    now, then = work[4, 8] / 5e5, max(work[5, 7] / 5e5, work[7, 12] / 1e6)
    saved = 10 * train.inner_steps * train.micro_batches * (now - then)
    moved = 2 * layout.shard_bytes(DEEP.model, "block.0")
    enough = int(8 * moved / saved) + 4
    assert _next(_swift(*speeds, up=enough), plan) == (5, 2, 5)
    assert _next(_swift(*speeds, up=enough - 4), plan) == (4, 4, 4)
    deadline = train.inner_steps * train.micro_batches * now / 2
    timing = TimingSpec(round_deadline=deadline, heartbeat=0.1, gone_after=1.0)
    short = dataclasses.replace(DEEP, timing=timing)
    assert _next(_swift(*speeds, up=enough), plan, short) == (4, 4, 4), "a round never lasts longer than its deadline"
    assert _next(_swift(*speeds, up=100 * enough), plan, short) == (5, 2, 5)


@given(
    speeds=st.lists(st.integers(1, 100).map(lambda s: 10**5 * s), min_size=2, max_size=12),
    wobbles=st.lists(st.lists(st.floats(0.9, 1.1), min_size=12, max_size=12), min_size=1, max_size=5),
)
def test_speeds_that_wobble_by_a_tenth_move_nothing(speeds: list[int], wobbles: list[list[float]]) -> None:
    ranges = partition.split(DEEP, tiny.rooms([ROOM] * len(speeds)), speeds)
    assert ranges is not None
    plan = _kept(DEEP, tuple(b - a for a, b in ranges))
    for wobble in wobbles:
        now = [math.ceil(s * w) for s, w in zip(speeds, wobble, strict=False)]
        assert _next(_swift(*now), plan) == plan.replicas[0].blocks


@given(
    speeds=st.lists(st.integers(1, 100).map(lambda s: 10**5 * s), min_size=2, max_size=12),
    blocks=st.lists(st.integers(1, 11), min_size=1, max_size=11, unique=True),
)
def test_a_plan_settles_at_once(speeds: list[int], blocks: list[int]) -> None:
    """Whatever was kept: the same announcements move blocks once at most, and everybody fits in memory."""
    cuts = sorted(blocks)[: len(speeds) - 1]
    speeds = speeds[: len(cuts) + 1]
    first = _kept(DEEP, tuple(b - a for a, b in itertools.pairwise((0, *cuts, 12))))
    candidates = _swift(*speeds)
    second = make_plan(DEEP, candidates, round=2, previous=first)
    assert _next(candidates, second) == second.replicas[0].blocks
    assert all(stage_memory(DEEP, s.first, s.last) <= ROOM for s in second.replicas[0].stages)


def test_the_bottleneck_is_named() -> None:
    before, there = _kept(DEEP, (4, 4, 4)), {c.peer: c for c in _swift(10**6, 5 * 10**5, 10**6)}
    after = make_plan(DEEP, list(there.values()), round=2, previous=before)
    ((index, old, new),) = partition.moves(before, after)
    assert (index, old.blocks, new.blocks) == (0, (4, 4, 4), (5, 2, 5))
    seconds = partition.stage_seconds(DEEP, old, there)
    text = partition.why_moved(DEEP, old, new, there)
    assert text == (
        f"p01 is the slowest stage ({seconds[1]:.2g} s a micro-batch, the others at most {seconds[2]:.2g} s):"
        " 2 blocks moved away from it"
    )
    assert partition.why_moved(DEEP, old, new, {}) == "its blocks were shared out anew"
    assert partition.moves(before, before) == partition.moves(None, before) == partition.moves(before, None) == []
