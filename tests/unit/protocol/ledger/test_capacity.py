"""Every commit that can be proposed can be read: the longest ones, and what is refused beyond."""

from __future__ import annotations

import dataclasses
import functools

import pytest

from protocol.errors import LocalError
from protocol.ledger import capacity, part_lists
from protocol.planning import memory
from protocol.planning.allotment import MOST_SEATS
from protocol.planning.partition import Candidate
from protocol.round.leader import Leader
from protocol.round.leader_events import Lead, Propose, Ready
from protocol.run import layout
from protocol.run.layout import ModelSpec
from protocol.run.manifest import Manifest, OuterSpec
from protocol.wire import encoding, endpoints, framing
from protocol.wire.ballot import Accept, Promise
from protocol.wire.commit import Commit, Contribution, Diverged, LeftOut, Record, Share
from protocol.wire.plan import Plan, ReplicaSpec, Seat, StageSpec, Work
from tests.support import tiny

MOST = 20_000
"""Replicas, more than any commit takes."""


def manifest(layers: int) -> Manifest:
    spec = ModelSpec(vocab_size=16, d_model=8, n_layers=layers, n_heads=2, d_ff=16, context=8)
    return tiny.manifest(model=spec, operators=tuple(o.peer_id for o in tiny.OPERATORS[:4]), quorum=4)


@functools.cache
def peer(index: int) -> str:
    """A name as long as a peer's."""
    return f"{tiny.OPERATOR.peer_id[:44]}{index:08}"


def plan_of(m: Manifest, chains: list[int], replicas: int, ahead: bool = True) -> Plan:
    """So many replicas; `chains`: how many members each has, in turn."""
    layers, found, used = m.model.n_layers, [], 0
    for index in range(replicas):
        size = min(chains[index % len(chains)], layers)
        edges = [layers * i // size for i in range(size + 1)]
        stages = (StageSpec(peer=peer(used + i), first=edges[i], last=edges[i + 1]) for i in range(size))
        work = Work(slot=2**50, steps=2**31, micro_batches=2**31)
        following = work if ahead else None
        found.append(ReplicaSpec(number=2**40 + index, stages=tuple(stages), work=work, following=following))
        used += size
    spares = tuple(peer(used + i) for i in range(5000))
    work = Work(slot=2**50, steps=2**31, micro_batches=2**31)
    seats = tuple(Seat(number=2**40 + replicas + i, work=work) for i in range(MOST_SEATS))
    return Plan(round=10**6, replicas=tuple(found), seats=seats, spares=spares, next_number=2**50, next_slot=2**60)


def longest(m: Manifest, plan: Plan, following: Plan, left_out: int, reason: str, diverged: int) -> Commit:
    """What a leader proposes where everything is as long as it may be: the first replicas are left out for `reason`."""
    contributions = []
    taken = [plan.taken(seat.number, (peer(10**7 + seat.number % 100),), m.model.n_layers) for seat in plan.seats]
    for replica in (*plan.replicas[left_out:], *(seat for seat in taken if seat is not None)):
        shares = []
        for stage in replica.stages:
            shards = memory.stage_shards(m, stage.first, stage.last)
            listed = part_lists.longest(m) * len(shards) // m.model.n_layers
            shares.append(Share(peer=stage.peer, root="f" * 64, size=2**60, norm=1e-9 / 3, listed=listed))
        found = Contribution(replica=replica.number, tokens=2**50, steps=2**31, loss=10 / 3, shares=tuple(shares))
        contributions.append(found)
    shards = layout.shard_names(m.model)
    wrong = [Diverged(peer=peer(i), shard=shards[-2]) for i in range(diverged)]
    return Commit(
        run=m.run_id,
        round=10**6,
        parent="f" * 64,
        time=1e9 + 0.1,
        contributions=tuple(contributions),
        left_out=capacity.shortened([LeftOut(replica=r.number, reason=reason) for r in plan.replicas[:left_out]]),
        diverged=capacity.foremost(wrong, plan),
        digests=dict.fromkeys(shards, "f" * 64),
        plan=following,
        leader=m.operators[0],
        members=m.operators,
    )


def recorded(commit: Commit) -> bytes:
    """Its record, which can be read."""
    raw = encoding.encode_record(tiny.record(commit, *tiny.OPERATORS[:3]))
    assert encoding.decode_record(raw, "p").commit == commit
    return raw


def assert_readable(commit: Commit) -> None:
    """By everybody, wherever a commit travels."""
    raw = recorded(commit)
    assert framing.unpack_message(framing.pack_message([raw])) == [raw], f"an answer of {endpoints.LOG}"
    for message in (Accept(round=1, ballot=2**40, commit=commit), Promise(round=1, ballot=2**40, commit=commit)):
        assert encoding.decode(encoding.encode(message), "p") == message


@pytest.mark.parametrize(("layers", "chains", "left", "after"), [(400, [16, 3], 0.3, [1]), (1, [1], 1.0, [1])])
def test_the_longest_commits_can_be_read(layers: int, chains: list[int], left: float, after: list[int]) -> None:
    """Whatever was planned for the round, and whatever is planned next; a plan says what is trained ahead, too."""
    ahead, reason, diverged = True, "\U0010ffff" * 300, 10_000
    m = manifest(layers)
    replicas = MOST // max(chains)
    plan = capacity.bounded(m, plan_of(m, chains, replicas, ahead))
    assert 0 < len(plan.replicas) <= replicas
    commit = longest(m, plan, plan, int(left * len(plan.replicas)), reason, diverged)
    following = capacity.bounded(m, plan_of(m, after, MOST // max(after), ahead), commit.contributions, commit.left_out)
    assert following.replicas
    assert_readable(dataclasses.replace(commit, plan=following))
    assert capacity.bounded(m, plan, commit.contributions, commit.left_out) is plan, "as it is, it always fits again"


def test_what_a_commit_has_space_for_is_used() -> None:
    """A plan half as long again as the bound could not be read: the bound is no guess."""
    m = manifest(32)
    whole = plan_of(m, [1], MOST)
    kept = capacity.bounded(m, whole)
    assert 10_000 < len(kept.replicas) < MOST * 2 // 3
    assert set(kept.spares) > {r.peers[0] for r in whole.replicas[len(kept.replicas) :][:5]}, "the others wait"
    over = dataclasses.replace(whole, replicas=whole.replicas[: len(kept.replicas) * 3 // 2])
    with pytest.raises(LocalError, match="commit of round 1000000: nobody could read"):
        encoding.encode_record(Record(commit=longest(m, over, kept, 0, "", 0), ballot=0, votes={}))


@pytest.mark.slow
def test_ten_thousand_full_replicas_can_be_planned_and_read() -> None:
    """Of any number of shards, with what they train ahead."""
    m = manifest(32)
    plan = dataclasses.replace(plan_of(m, [1], 10_000), spares=())
    assert capacity.bounded(m, plan) is plan
    recorded(longest(m, plan, plan, 0, "", 10_000))
    deep = plan_of(manifest(400), [1], 10_000)
    assert capacity.bounded(manifest(400), deep).replicas == deep.replicas


def test_a_record_of_a_thousand_replicas_is_small() -> None:
    """300 kB, with overlap and without, whatever the model's shards."""
    for layers in (12, 32):
        m = manifest(layers)
        for ahead in (False, True):
            plan = dataclasses.replace(plan_of(m, [1], 1000, ahead), spares=())
            raw = encoding.encode_record(tiny.record(longest(m, plan, plan, 0, "", 0), *tiny.OPERATORS[:3]))
            assert len(raw) < 300_000


def test_who_is_planned_hears_first_that_it_diverged() -> None:
    plan = plan_of(manifest(4), [1], 3)
    wrong = [Diverged(peer=peer(9 + i), shard="head") for i in range(5000)] + [Diverged(peer=peer(2), shard="head")]
    told = capacity.foremost(wrong, plan)
    assert len(told) == capacity.MAX_DIVERGED
    assert told[0].peer == peer(2)


def test_strangers_that_attest_nonsense_cost_the_log_little() -> None:
    plan = plan_of(manifest(4), [1], 3)
    strangers = [Diverged(peer=f"stranger {i:05}", shard="head") for i in range(5000)]
    spare = Diverged(peer=plan.spares[0], shard="head")
    assert capacity.foremost([*strangers, spare], plan) == (spare, *strangers[: capacity.MAX_STRANGERS_DIVERGED])


@pytest.mark.slow
def test_a_plan_is_cut_for_what_this_commit_says_too() -> None:
    m = manifest(32)
    whole = plan_of(m, [1], MOST, ahead=False)
    said = longest(m, dataclasses.replace(whole, replicas=whole.replicas[:15_000]), whole, 0, "", 0).contributions
    alone, beside = capacity.bounded(m, whole), capacity.bounded(m, whole, said)
    assert 8000 < len(beside.replicas) < len(alone.replicas)
    commit = dataclasses.replace(longest(m, beside, beside, 0, "", 10_000), contributions=said)
    encoding.encode_record(tiny.record(commit, *tiny.OPERATORS[:3]))


@pytest.mark.slow
def test_a_leader_plans_no_more_than_a_commit_can_say() -> None:
    m = dataclasses.replace(manifest(32), start_peers=12_000, outer=OuterSpec(overlap=1))
    leader = Leader(m, (), (), 0.0)
    leader.handle(Lead(True), 0.0)
    full = tiny.full_memory(m)
    effects = [
        effect
        for i in range(12_000)
        for effect in tiny.handle(leader, Ready(Candidate(peer=peer(i), memory_bytes=full, up_bps=10**7)), 0.0)
    ]
    (proposed,) = [e.commit for e in effects if isinstance(e, Propose)]
    assert 10_000 < len(proposed.plan.replicas) < 12_000
    recorded(longest(m, proposed.plan, proposed.plan, 0, "", 10_000))
