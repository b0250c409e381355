"""Changes of role: who moves trains on until everybody who moves with it holds what it will train."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from protocol.planning.allotment import NEW
from protocol.planning.memory import stage_memory, stage_shards
from protocol.planning.partition import Candidate
from protocol.planning.planner import FORMING_ROUNDS, linked, make_plan
from protocol.run.layout import ModelSpec
from protocol.run.manifest import Manifest, TimingSpec, TrainSpec
from protocol.wire.plan import Plan, ReplicaSpec, StageSpec
from tests.support import tiny

DEEP = tiny.manifest(
    model=ModelSpec(vocab_size=16, d_model=8, n_layers=12, n_heads=2, d_ff=16, context=8),
    train=TrainSpec(inner_steps=50, micro_batches=32, rows=1, sequence=1, lr=1e-3, warmup_steps=0, total_steps=100),
    timing=TimingSpec(round_deadline=1e6, heartbeat=1.0, gone_after=2.0),
)
FULL = stage_memory(DEEP, 0, 12)
FAST, SLOW = 10**6, 5 * 10**5


def peers(*speeds: int, memory: int = FULL - 1) -> list[Candidate]:
    return [
        Candidate(peer=f"p{i}", memory_bytes=memory, up_bps=10**9 - i, down_bps=10**9, speed_flops=s)
        for i, s in enumerate(speeds)
    ]


def chain(*blocks: int, number: int = 7) -> ReplicaSpec:
    """A chain of p0, p1, ... with so many blocks each."""
    edges = itertools.pairwise(itertools.accumulate(blocks, initial=0))
    stages = tuple(StageSpec(peer=f"p{i}", first=a, last=b) for i, (a, b) in enumerate(edges))
    return ReplicaSpec(number=number, stages=stages)


def trains(*replicas: ReplicaSpec) -> Plan:
    return Plan(round=1, replicas=replicas, next_number=8)


def following(
    previous: Plan, candidates: list[Candidate], holds: Callable[[StageSpec], bool], manifest: Manifest = DEEP
) -> Plan:
    plan = make_plan(manifest, candidates, round=previous.round + 1, previous=previous, holds=holds)
    assert plan is not None
    return plan


def holders(*replicas: ReplicaSpec) -> Callable[[StageSpec], bool]:
    """Everybody holds what it needs in these, and nothing else."""
    held: dict[str, set[str]] = {}
    for stage in (stage for replica in replicas for stage in replica.stages):
        held.setdefault(stage.peer, set()).update(stage_shards(DEEP, stage.first, stage.last))
    return lambda s: set(stage_shards(DEEP, s.first, s.last)) <= held.get(s.peer, set())


def test_blocks_move_when_all_members_hold_theirs_and_until_then_the_chain_trains_as_it_is() -> None:
    old, new = chain(4, 4, 4), chain(5, 2, 5, number=NEW)
    slow = peers(FAST, SLOW, FAST)
    plan = following(trains(old), slow, holders(old))
    assert [r.blocks for r in plan.replicas] == [old.blocks]
    assert [(r.number, r.stages) for r in plan.forming] == [(NEW, new.stages)]
    assert (plan.spares, plan.count) == ((), 3)
    assert [(s.first, s.last) for s in plan.held_by("p1")] == [(4, 8), (5, 7)]
    half = dataclasses.replace(new, stages=new.stages[:2])
    again = following(plan, slow, holders(old, half))
    assert ([r.blocks for r in again.replicas], again.forming, again.forming_since) == (
        [old.blocks],
        plan.forming,
        (2,),
    )
    moved = following(again, slow, holders(old, new))
    assert [(r.number, r.stages) for r in moved.replicas] == [(7, new.stages)], "under the number that it had"
    assert (moved.forming, moved.spares) == ((), ())


def test_what_brings_less_by_now_is_given_up() -> None:
    old, new = chain(4, 4, 4), chain(5, 2, 5, number=NEW)
    plan = following(trains(old), peers(FAST, SLOW, FAST), holders(old))
    assert plan.forming
    recovered = following(plan, peers(FAST, FAST, FAST), holders(old, new))
    assert ([r.stages for r in recovered.replicas], recovered.forming) == ([old.stages], ())


def test_with_a_member_the_change_is_given_up_too() -> None:
    old = chain(4, 4, 4)
    plan = following(trains(old), peers(FAST, SLOW, FAST), holders(old))
    left = following(plan, peers(FAST, SLOW, FAST)[:2], lambda stage: True)
    assert [set(r.peers) for r in left.replicas] == [{"p0", "p1"}]
    assert left.forming == ()


def test_stages_become_full_replicas_together() -> None:
    """As soon as both hold everything: before that one alone would leave the other one without a chain. Of two micro-batches a chain
    of two loses a third of its time to filling and draining."""
    shallow = dataclasses.replace(DEEP, train=dataclasses.replace(DEEP.train, micro_batches=2))
    old = chain(6, 6)
    strong = peers(FAST, FAST, memory=2 * FULL)
    alone = [ReplicaSpec(number=NEW, stages=(StageSpec(peer=c.peer, first=0, last=12),)) for c in strong]
    plan = following(trains(old), strong, holders(old), shallow)
    assert [r.stages for r in plan.replicas] == [old.stages]
    assert {r.stages for r in plan.forming} == {r.stages for r in alone}
    one = following(plan, strong, holders(old, alone[0]), shallow)
    assert [r.stages for r in one.replicas] == [old.stages]
    both = following(one, strong, holders(*alone), shallow)
    assert {r.stages for r in both.replicas} == {r.stages for r in alone}
    assert (sorted(r.number for r in both.replicas), both.forming) == ([8, 9], ())


def test_a_newcomer_who_lacks_everything_costs_a_working_chain_nothing() -> None:
    """A chain whose members do better with it goes on as it is."""
    old = chain(6, 6)
    three = peers(FAST, FAST, 4 * FAST)
    plan = following(trains(old), three, holders(old))
    assert [r.stages for r in plan.replicas] == [old.stages]
    assert [set(r.peers) for r in plan.forming] == [{"p0", "p1", "p2"}]
    assert plan.spares == ()
    gone = following(plan, three[:2], holders(old))
    assert ([r.stages for r in gone.replicas], gone.forming) == ([old.stages], ())


def test_a_mover_that_cannot_get_its_blocks_goes_on_as_it_is() -> None:
    old = chain(4, 4, 4)
    slow = peers(FAST, SLOW, FAST)
    plan = following(trains(old), slow, holders(old))
    for _ in range(FORMING_ROUNDS - 1):
        plan = following(plan, slow, holders(old))
        assert plan.forming_since == (2,)
    plan = following(plan, slow, holders(old))
    assert ([r.stages for r in plan.replicas], plan.forming, plan.spares) == ([old.stages], (), ())
    plan = following(plan, slow, holders(old))
    assert plan.forming_since == (3 + FORMING_ROUNDS,), "it may try again"


def test_whose_memory_shrinks_has_a_smaller_role() -> None:
    """The others do not wait for it, and it waits for nobody where it holds what it needs."""
    full = ReplicaSpec(number=7, stages=(StageSpec(peer="p0", first=0, last=12),))
    first, second = peers(FAST, FAST)
    plan = following(trains(full), [first, second], lambda stage: stage.peer == "p0")
    assert (plan.forming, plan.spares) == ((), ()) or [set(r.peers) for r in plan.replicas] == [{"p0", "p1"}]
    both = following(trains(full), [first, second], lambda stage: True)
    assert [(r.number, set(r.peers)) for r in both.replicas] == [(8, {"p0", "p1"})]


groups = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True), max_size=5)


@given(before=groups, after=groups)
def test_a_change_has_all_that_common_members_link(before: list[list[int]], after: list[list[int]]) -> None:
    def replica(members: list[int]) -> ReplicaSpec:
        return ReplicaSpec(stages=tuple(StageSpec(peer=f"p{i}", first=0, last=1) for i in members))

    old, new = [replica(m) for m in before], [replica(m) for m in after]
    found = linked(old, new, range(len(new)))
    assert sorted(map(repr, old)) == sorted(repr(r) for c in found for r in c.before)
    assert sorted(map(repr, new)) == sorted(repr(r) for c in found for r in c.after)
    for one, other in itertools.combinations(found, 2):
        assert not one.peers & other.peers
    for change in found:
        replicas, reached = [*change.before, *change.after], set()
        reached.update(replicas[0].peers)
        for _ in replicas:
            for r in replicas:
                reached |= set(r.peers) if reached & set(r.peers) else set()
        assert reached == change.peers, "nothing is in it that is not linked"
