"""What each replica is given to do: its own number, its own text, and about what it has time for."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.planning import partition
from protocol.planning.allotment import FEWEST_STEPS, FULL_SPEEDUP, HEADROOM, NEW, allot, share, step_seconds
from protocol.planning.partition import Candidate
from protocol.planning.planner import make_plan
from protocol.run.manifest import OuterSpec, TimingSpec, TrainSpec
from protocol.wire.plan import Plan, ReplicaSpec, StageSpec, Work
from tests.support import tiny

TRAIN = TrainSpec(inner_steps=100, micro_batches=8, rows=3, sequence=8, lr=1e-3, warmup_steps=0, total_steps=1000)
TIMING = TimingSpec(round_deadline=60.0, round_seconds=40.0, heartbeat=3.0, gone_after=12.0)
M = tiny.manifest(train=TRAIN, timing=TIMING, rounds=9)
AHEAD = dataclasses.replace(M, outer=OuterSpec(overlap=1))
FULL = tiny.full_memory(AHEAD)


def full(peer: str, number: int = NEW) -> ReplicaSpec:
    return ReplicaSpec(number=number, stages=(StageSpec(peer=peer, first=0, last=tiny.LAYERS),))


def did(steps: int, micro_batches: int = TRAIN.micro_batches) -> ReplicaSpec:
    """The replica of a, and what it was given in the last round."""
    return dataclasses.replace(full("a", 0), work=Work(steps=steps, micro_batches=micro_batches))


def announced(peer: str, seconds: float | None = None) -> Candidate:
    """A full peer that takes `seconds` for a whole inner step; None: it does not know."""
    work = TRAIN.micro_batches * partition.stage_operations(M)[0, tiny.LAYERS]
    reached = 0 if seconds is None else round(work / seconds)
    return Candidate(peer=peer, memory_bytes=FULL, up_bps=10**7, speed_flops=reached)


def shared(seconds: float | None, before: ReplicaSpec | None = None, done: int | None = None) -> tuple[int, int]:
    return share(M, full("a", 0), {"a": announced("a", seconds)}, before, done)


# --- text and numbers


def text(work: Work) -> range:
    """The slots that it reads."""
    return range(work.slot, work.slot + work.steps * work.micro_batches * TRAIN.rows)


def is_apart(works: Iterable[Work]) -> bool:
    """Whether no two read the same slot."""
    ranges = sorted((text(work) for work in works), key=lambda at: at.start)
    return all(a.stop <= b.start for a, b in itertools.pairwise(ranges))


PEERS = "abcde"
rounds = st.lists(
    st.tuples(
        st.sets(st.sampled_from(PEERS), min_size=1),
        st.dictionaries(st.integers(0, 30), st.integers(1, 100)),
        st.sampled_from((None, *PEERS)),
    ),
    min_size=1,
    max_size=8,
)
"""Of each round: who is there, how many steps each replica of the last one did, and whose place a spare takes."""


@given(lived=rounds, overlap=st.integers(0, 1))
def test_nobody_reads_what_another_one_reads_whoever_comes_and_goes(
    lived: list[tuple[set[str], dict[int, int], str | None]], overlap: int
) -> None:
    manifest = dataclasses.replace(M, outer=OuterSpec(overlap=overlap))
    plan: Plan | None = None
    given_to: dict[tuple[int, int], set[Work]] = {}
    names: dict[int, str] = {}
    for round, (there, done, lost) in enumerate(lived, 1):
        kept = [r for r in plan.replicas if names[r.number] in there] if plan else []
        new = sorted(there - {names[r.number] for r in kept})
        replicas = [full(f"{lost}'s spare", r.number) if names[r.number] == lost else r for r in kept]
        plan = allot(manifest, round, [*replicas, *map(full, new)], (), {}, plan, done)
        assert [r.number for r in plan.replicas[: len(kept)]] == [r.number for r in kept]
        for replica, peer in zip(plan.replicas[len(kept) :], new, strict=True):
            assert replica.number not in names, "no number is used twice"
            names[replica.number] = peer
        for replica in plan.replicas:
            given_to.setdefault((round, replica.number), set()).add(replica.work)
            if replica.following is not None:
                given_to.setdefault((round + 1, replica.number), set()).add(replica.following)
        assert all(text(work).stop <= plan.next_slot for works in given_to.values() for work in works)
    works = [work for found in given_to.values() for work in found]
    assert len(works) == len(set(works)), "of one replica in one round"
    assert is_apart(works)


def test_whoever_comes_or_goes_a_replica_keeps_its_number_and_what_it_was_promised() -> None:
    first = make_plan(AHEAD, [announced(p) for p in "abc"], round=1, previous=None)
    assert [(r.number, r.peers) for r in first.replicas] == [(0, ("a",)), (1, ("b",)), (2, ("c",))]
    second = make_plan(AHEAD, [announced(p) for p in "bcd"], round=2, previous=first, done={0: 3, 1: 4, 2: 5})
    assert [(r.number, r.peers) for r in second.replicas] == [(1, ("b",)), (2, ("c",)), (4, ("d",))]
    assert [second.replica(n).work for n in (1, 2)] == [first.replica(n).following for n in (1, 2)]
    third = make_plan(AHEAD, [announced(p) for p in "acd"], round=3, previous=second, done={1: 4, 2: 5})
    assert [(r.number, r.peers) for r in third.replicas] == [(2, ("c",)), (4, ("d",)), (6, ("a",))]
    assert [third.replica(n).work for n in (2, 4)] == [second.replica(n).following for n in (2, 4)]
    assert [seat.number for p in (first, second, third) for seat in p.seats] == [3, 5, 7], "nobody else gets a seat's"
    works = [w for p in (first, second, third) for r in p.replicas for w in (r.work, r.following) if w is not None]
    works += [seat.work for p in (first, second, third) for seat in p.seats]
    assert is_apart(set(works))


def test_what_was_promised_to_other_members_is_given_to_nobody() -> None:
    first = allot(AHEAD, 1, [full("a"), full("b")], (), {})
    second = allot(AHEAD, 2, [full("spare", 0), first.replica(1)], (), {}, first)
    promised = first.replica(0).following
    assert promised is not None
    assert second.replica(0).number == 0
    assert second.replica(0).work.slot >= first.next_slot
    assert second.replica(1).work == first.replica(1).following


def test_nothing_is_promised_without_overlap() -> None:
    assert allot(M, 1, [full("a")], (), {}).replica(0).following is None
    assert allot(AHEAD, 1, [full("a")], (), {}).replica(0).following is not None


def test_a_plan_says_who_is_spare_and_what_the_next_one_begins_with() -> None:
    plan = allot(M, 4, [full("a"), full("b")], ("s",), {})
    assert (plan.round, plan.spares, plan.next_number) == (4, ("s",), 3)
    assert plan.next_slot == 3 * TRAIN.inner_steps * TRAIN.step_rows, "with the seat's"


# --- inner steps


def test_whose_speed_nobody_knows_is_given_the_most() -> None:
    assert shared(None) == (TRAIN.inner_steps, TRAIN.micro_batches)


@pytest.mark.parametrize(("seconds", "steps"), [(0.1, 100), (1.0, 51), (4.0, 14), (10.0, 6)])
def test_at_first_a_replica_is_given_what_its_speed_lets_expect_and_a_little_more(seconds: float, steps: int) -> None:
    found, micro_batches = shared(seconds)
    assert micro_batches == TRAIN.micro_batches
    assert found == pytest.approx(steps, abs=1)
    assert found <= TRAIN.inner_steps


@pytest.mark.parametrize("done", [1, 7, 40, 79])
def test_then_it_is_given_a_quarter_more_than_it_did_whatever_its_speed(done: int) -> None:
    for seconds in (None, 0.1, 10.0):
        steps, micro_batches = shared(seconds, did(99), done)
        assert HEADROOM * done + 1 <= steps < HEADROOM * done + 2
        assert micro_batches == TRAIN.micro_batches


def test_never_more_than_the_run_has() -> None:
    assert shared(None, did(100), 99)[0] == TRAIN.inner_steps
    assert shared(None, did(50), 50)[0] == TRAIN.inner_steps


@pytest.mark.parametrize("given", [1, 2, 10])
def test_who_did_all_that_it_was_given_may_be_four_times_as_fast(given: int) -> None:
    steps, _ = shared(None, did(given), given)
    assert HEADROOM * FULL_SPEEDUP * given + 1 <= steps < HEADROOM * FULL_SPEEDUP * given + 2
    fewer, _ = shared(None, did(given + 1), given)
    assert fewer < steps


def test_a_wrong_guess_is_put_right_within_a_few_rounds() -> None:
    """A machine that announced a tenth of its speed and less: it can do 90 steps."""
    plan = allot(M, 1, [full("a")], (), {"a": announced("a", 10.0)})
    given = [plan.replica(0).work.steps]
    for round in range(2, 6):
        plan = allot(M, round, plan.replicas, (), {"a": announced("a", 10.0)}, plan, {0: min(90, given[-1])})
        given.append(plan.replica(0).work.steps)
    assert given[:2] == [7, 36]
    assert given[2:] == [TRAIN.inner_steps] * 3


def test_of_whom_nothing_was_committed_is_given_what_it_had() -> None:
    assert shared(None, did(17, 4)) == (17, 4)
    plan = allot(M, 1, [full("a"), full("b")], (), {"a": announced("a", 4.0), "b": announced("b", 4.0)})
    after = allot(M, 2, plan.replicas, (), {}, plan, {1: 3})
    assert after.replica(0).work.steps == plan.replica(0).work.steps
    assert after.replica(1).work.steps < plan.replica(1).work.steps


def test_other_members_or_blocks_are_another_pace() -> None:
    before = dataclasses.replace(did(17), stages=full("b").stages)
    assert shared(4.0, before, 2) == shared(4.0)


# --- micro-batches


@pytest.mark.parametrize(("rounds_a_step", "micro_batches"), [(0.26, 7), (0.5, 4), (1.01, 1), (1000.0, 1)])
def test_a_step_of_which_too_few_fit_into_a_round_is_made_smaller(rounds_a_step: float, micro_batches: int) -> None:
    slow = announced("a", rounds_a_step * TIMING.round_seconds)
    steps, found = share(M, full("a", 0), {"a": slow}, None, None)
    assert found == micro_batches
    seconds = step_seconds(M, full("a"), {"a": slow})
    assert seconds is not None
    if FEWEST_STEPS * rounds_a_step < TRAIN.micro_batches:
        assert FEWEST_STEPS * seconds * found / TRAIN.micro_batches <= TIMING.round_seconds
        assert steps > FEWEST_STEPS


def test_what_was_done_counts_in_micro_batches() -> None:
    slow = 0.6 * TIMING.round_seconds
    whole_steps = shared(slow, did(9, TRAIN.micro_batches), 3)
    assert whole_steps == (11, 3), "24 micro-batches are 8 steps of 3"
    assert shared(1.0, did(9, 4), 6)[0] == 5, "24 micro-batches are 3 steps of 8"


def test_a_chain_takes_the_way_there_and_the_time_of_its_slowest_stage() -> None:
    chain = ReplicaSpec(stages=(StageSpec(peer="a", first=0, last=2), StageSpec(peer="b", first=2, last=4)))
    there = {"a": announced("a", 2.0), "b": announced("b", 20.0)}
    seconds = step_seconds(M, chain, there)
    assert seconds is not None
    assert 10.0 <= seconds < 20.0, "it has half of the blocks, and the head"
    equal = step_seconds(M, chain, {"a": announced("a", 8.0), "b": announced("b", 8.0)})
    assert equal is not None
    assert equal > 4.0 * (TRAIN.micro_batches + 1) / TRAIN.micro_batches, "the first micro-batch passes both"
    assert step_seconds(M, chain, {"a": there["a"], "b": announced("b")}) is None
    assert step_seconds(M, chain, {"a": there["a"]}) is None
