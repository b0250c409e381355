"""A GPU's memory and its host's are two budgets: in what a machine holds, in plans, and in announcements."""

from __future__ import annotations

import dataclasses
import random
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peer.cli import plan as plan_command
from peer.training import device, update
from protocol.errors import UsageError
from protocol.ledger import retention
from protocol.planning import arrange as arranging
from protocol.planning import budget, explain, memory, partition
from protocol.planning.arrange import arrange
from protocol.planning.budget import Budget
from protocol.planning.partition import Candidate
from protocol.planning.planner import still_fit
from protocol.run import layout
from protocol.run.manifest import OuterSpec
from protocol.wire.announcement import Announcement
from protocol.wire.plan import ReplicaSpec, StageSpec
from protocol.wire.schema import build, plain
from tests.support import plans, tiny
from tests.support.family import FAMILY
from tests.support.gpu_memory import GB, RUNS

FREE = 0.9
"""Of a card's memory that is offered."""


def middle_blocks(name: str, gigabytes: int) -> int:
    """The most blocks in the middle of a chain that the planner's table gives a card."""
    layers = RUNS[name].model.n_layers
    room = Budget(int(FREE * gigabytes * GB), "cuda")
    return max(n for n in range(1, layers - 1) if budget.fits(RUNS[name], room, 1, 1 + n))


def cards(count: int, gigabytes: float, **changes: Any) -> list[Candidate]:
    return [
        Candidate(
            peer=f"p{i}",
            memory_bytes=int(FREE * gigabytes * GB),
            device="cuda",
            up_bps=20 * 10**6,
            down_bps=10**8,
            speed_flops=10**13,
            **changes,
        )
        for i in range(count)
    ]


@pytest.mark.parametrize(("name", "gigabytes", "blocks"), [("512m", 12, 5), ("512m", 8, 3), ("1b", 24, 10)])
def test_plans_give_a_card_as_many_blocks_as_it_holds(name: str, gigabytes: int, blocks: int) -> None:
    assert middle_blocks(name, gigabytes) == blocks
    swarm = arranging.Swarm(RUNS[name], cards(1, gigabytes))
    assert swarm.caps[1, 0] == blocks
    assert f"its GPU holds {budget.most_blocks(RUNS[name], cards(1, gigabytes)[0].budget)} of" in explain.why_spare(
        RUNS[name], cards(1, gigabytes)[0]
    )


def test_eight_cards_of_six_gigabytes_train_a_model_of_half_a_billion_parameters() -> None:
    """All of them were spares."""
    replicas, _ = arrange(RUNS["512m"], cards(8, 6))
    assert replicas
    assert replicas[0].rate > 1000
    assert len(arrange(RUNS["512m"], cards(8, 8))[0]) == 2, "two chains, where there was one of five and three spares"


def test_four_cards_of_24_gigabytes_hold_seven_billion_parameters_together() -> None:
    """With Muon; AdamW's second moments of the matrices take a fifth card."""
    by_adamw = RUNS["7b"]
    by_muon = dataclasses.replace(by_adamw, train=dataclasses.replace(by_adamw.train, optimizer="muon"))
    usable = int(FREE * 24 * GB)
    for manifest, cards in ((by_muon, 4), (by_adamw, 5)):
        one, fewer, enough = (Budget(usable, f"{n} x cuda") for n in (1, cards - 1, cards))
        assert not budget.holds_whole(manifest, one)
        assert not budget.holds_whole(manifest, fewer)
        assert budget.is_sharded(manifest, enough)
        joined = budget.joined(manifest, manifest.train.micro_batches, enough, cards)
        assert max(memory.sharded_memory(manifest, cards, "cuda", joined)) <= usable
    peers = [
        Candidate(peer=name, memory_bytes=usable, up_bps=10**8, speed_flops=10**14, device=device)
        for name, device in (("a", "4 x cuda"), ("b", "4 x cuda"), ("c", "3 x cuda"))
    ]
    replicas, _ = arrange(by_muon, peers)
    assert sorted(replica.members for replica in replicas) == [("a",), ("b",)]


def test_the_host_beside_a_card_limits_it_too() -> None:
    manifest = RUNS["512m"]
    layers = manifest.model.n_layers
    own, host = budget.needs_of(manifest, 0, layers, "cuda")
    assert budget.needs_of(manifest, 0, layers) == (memory.stage_memory(manifest, 0, layers), 0)
    assert host > 8 * layout.total_parameters(manifest.model), "the moments are written from the host"
    enough, short = Budget(own, "cuda", host), Budget(own, "cuda", host - 1)
    assert budget.holds_whole(manifest, enough)
    assert not budget.holds_whole(manifest, short)
    assert budget.holds_whole(manifest, Budget(own, "cuda")), "what is not known is taken to be enough"
    assert not budget.holds_whole(manifest, Budget(own, "cuda", 0)), "an integrated GPU has one memory for both"
    assert budget.holds_whole(manifest, Budget(own + host, "cuda", 0))
    assert Budget(own, "cpu", 1).holds((own, 0)), "a processor has none beside it"
    there = {c.peer: c for c in cards(1, 80, host_bytes=host - 1)}
    replica = ReplicaSpec(stages=(StageSpec(peer="p0", first=0, last=layers),))
    assert still_fit(manifest, [replica], there) == []
    assert arrange(manifest, list(there.values()))[0] == ()
    said = explain.why_spare(manifest, there["p0"])
    assert said.startswith("the memory beside its GPU holds"), said
    little = explain.why_spare(manifest, cards(1, 80, host_bytes=10**6)[0])
    assert little.startswith("the memory beside its GPU holds no stage"), little


def test_a_spare_keeps_all_shards_where_the_host_has_room() -> None:
    manifest, stage = RUNS["512m"], StageSpec(peer="p0", first=1, last=2)
    needed = memory.warm_bytes(manifest)
    for host, takes in ((needed, True), (needed - 1, False)):
        (spare,) = cards(1, 8, host_bytes=host)
        assert budget.fits(manifest, spare.budget, 1, 2)
        assert partition.can_take(manifest, spare, stage) == takes


def test_state_lies_in_files_where_the_host_beside_a_card_is_small() -> None:
    manifest = RUNS["178m"]
    layers = manifest.model.n_layers
    parts = [(0, layers), (0, layers - 1), (1, layers)]
    enough = max(
        memory.host_memory(manifest, a, b, "cuda", in_files=False) + memory.later_bytes(manifest, a, b)
        for a, b in parts
    )
    assert enough > 8 * layout.total_parameters(manifest.model) + memory.host_memory(manifest, 0, layers, "cuda")
    assert budget.in_files(manifest, Budget(10**12, "cuda", enough - 1))
    assert not budget.in_files(manifest, Budget(10**6, "cuda", enough)), "the card has no part in it"
    assert budget.in_files(manifest, Budget(enough, "cuda", 0)), "unless it is one memory"
    assert budget.in_files(manifest, Budget(enough))


def test_with_overlap_where_the_next_round_begins_lies_on_the_host() -> None:
    now = RUNS["512m"]
    ahead = dataclasses.replace(now, outer=dataclasses.replace(now.outer, overlap=1))
    params = sum(layout.parameters(now.model, s) for s in memory.stage_shards(now, 1, 3))
    (own, host), (before, beside) = (budget.needs_of(m, 1, 3, "cuda") for m in (ahead, now))
    assert (own - before, host - beside) == (0, 4 * params)
    assert memory.stage_memory(ahead, 1, 3) - memory.stage_memory(now, 1, 3) == 4 * params


def test_an_outer_momentum_is_as_much_state_as_the_parameters() -> None:
    now = RUNS["512m"]
    then = dataclasses.replace(now, outer=OuterSpec(**FAMILY["diloco"]))
    params, block = layout.total_parameters(now.model), layout.parameters(now.model, "block.0")
    scratch = 4 * (now.model.vocab_size * now.model.d_model + block)
    for in_files, more in ((True, 0), (False, 4 * params + scratch)):
        first, last = 0, now.model.n_layers
        found = [memory.memory_at(m, first, last, 1, 1, in_files=in_files) for m in (then, now)]
        assert found[0] - found[1] == more
    for of in (memory.warm_bytes, retention.state_bytes, lambda m: memory.later_bytes(m, 0, 1)):
        assert of(then) == 2 * of(now)
    assert now.state_bytes("head") == layout.shard_bytes(now.model, "head")


def test_a_cards_copies_take_no_more_of_the_host_than_is_promised() -> None:
    """By the buffers that the update of a large tensor leaves; the device is a processor with the same arrays."""
    import numpy as np
    import torch

    lanes = update.DeviceUpdate("cpu")
    rows = 4 * update.PART // 4096
    theta, feedback = np.zeros((rows, 4096), np.float32), np.zeros((rows, 4096), np.float32)
    lanes.accumulate([(theta, torch.ones(rows, 4096))], [feedback], np.float32(0.9), 64, map)
    assert 0 < lanes.buffer_bytes <= 8 * memory.LANES * memory.PART * 1.05


def machines(rng: random.Random, whole: tuple[int, int], count: int) -> list[Candidate]:
    """Processors, cards with hosts of all sizes, and integrated GPUs."""
    found = []
    for i in range(count):
        kind = rng.choice(("cpu", "cuda", "2 x cuda", "integrated"))
        share = rng.choice((0.2, 0.4, 0.7, 1.1)) * rng.uniform(0.8, 1.2)
        host = {"cpu": None, "integrated": 0}.get(kind, rng.choice((None, int(whole[1] * rng.uniform(0.1, 1.2)))))
        found.append(
            Candidate(
                peer=f"p{i}",
                memory_bytes=int(share * sum(whole)),
                device="cuda" if kind == "integrated" else kind,
                host_bytes=host,
                up_bps=rng.randint(10**6, 10**8),
                down_bps=10**8,
                speed_flops=rng.randint(10**12, 3 * 10**13),
                coordinates=(rng.uniform(0, 50), 0.0),
            )
        )
    return found


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10**6))
def test_no_planned_range_exceeds_either_budget(seed: int) -> None:
    rng = random.Random(seed)
    manifest = plans.small_manifest(rng)
    whole = budget.needs_of(manifest, 0, manifest.model.n_layers, "cuda")
    peers = machines(rng, whole, rng.randint(2, 9))
    there = {c.peer: c for c in peers}
    replicas, _ = arrange(manifest, peers)
    for replica in replicas:
        for peer, (a, b) in zip(replica.members, replica.ranges, strict=True):
            assert plans.has_room(manifest, there[peer], a, b), (peer, a, b)
            most = budget.depths(manifest, a, b, there[peer].budget)
            assert most.plain >= 1
    assert plans.total(manifest, peers, replicas) == pytest.approx(sum(r.rate for r in replicas))


@pytest.mark.parametrize("seed", range(6))
def test_plans_of_mixed_machines_are_about_the_best_there_are(seed: int) -> None:
    rng = random.Random(seed)
    manifest = plans.small_manifest(rng)
    peers = machines(rng, budget.needs_of(manifest, 0, manifest.model.n_layers, "cuda"), 5)
    best = plans.optimum(manifest, peers)
    assert plans.total(manifest, peers, arrange(manifest, peers)[0]) >= 0.95 * best


@given(st.integers(10**6, 10**11), st.integers(0, 10**11), st.integers(0, 10**10), st.integers(0, 10**10))
def test_more_of_either_budget_never_holds_less(own: int, host: int, more: int, beside: int) -> None:
    manifest = RUNS["512m"]
    small, large = Budget(own, "cuda", host + 1), Budget(own + more, "cuda", host + 1 + beside)
    assert budget.most_blocks(manifest, small) <= budget.most_blocks(manifest, large)
    for need in budget.needs_by_range(manifest, "cuda").values():
        assert small.holds(need) == (small.share(need) <= 1)


def test_the_strongest_are_found_among_processors_and_cards() -> None:
    manifest = RUNS["512m"]
    weak, card = cards(1, 6)[0], cards(1, 24)[0]
    processor = dataclasses.replace(weak, memory_bytes=int(6 * GB), device="cpu")
    rooms = partition.strongest(manifest, [processor, weak, card])
    assert rooms == [card.budget, weak.budget, processor.budget]


def test_an_announcement_tells_both_and_a_candidate_has_them() -> None:
    said = Announcement(run="r", peer="p", memory_bytes=8, device="cuda", host_bytes=5)
    heard = build(Announcement, plain(said))
    assert partition.candidate(heard).budget == Budget(8, "cuda", 5)
    old = Announcement(run="r", peer="p", memory_bytes=8)
    assert partition.candidate(old).budget == Budget(8)


def test_a_shortage_of_the_host_is_told_from_one_of_a_card() -> None:
    card = RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB")
    host = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")
    for error, of_host in ((card, False), (host, True), (MemoryError(), True), (ExceptionGroup("a", [host]), True)):
        assert device.is_shortage(error)
        assert device.is_host_shortage(error) == of_host
    assert device.host_budget("cpu") is None
    assert device.host_budget("mps") is None


def test_a_file_of_machines_may_say_what_is_beside_a_card(tmp_path: Path) -> None:
    path = tmp_path / "peers.toml"
    path.write_text('[[peers]]\nmemory = "12GB"\ndevice = "cuda"\nhost = "16GB"\n')
    assert plan_command.read_peers(path)[0].budget == Budget(12 * GB, "cuda", 16 * GB)
    path.write_text('[[peers]]\nmemory = "12GB"\nhost = "16GB"\n')
    with pytest.raises(UsageError, match="host is the memory beside a GPU"):
        plan_command.read_peers(path)


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_needs_of_all_ranges_are_those_of_each(name: str, device: str) -> None:
    layers = RUNS[name].model.n_layers
    expected = {
        (a, b): budget.needs_of(RUNS[name], a, b, device) for a in range(layers) for b in range(a + 1, layers + 1)
    }
    assert budget.needs_by_range(RUNS[name], device) == expected


def test_the_deepest_model_costs_few_looks_at_stages() -> None:
    """It has 131,328 ranges of blocks, most of which are alike."""
    run = tiny.manifest(model=dataclasses.replace(tiny.manifest().model, n_layers=layout.MAX_LAYERS))
    begun = time.process_time()
    for _ in range(20):
        budget.needs_of(run, 0, layout.MAX_LAYERS)
    one = (time.process_time() - begun) / 20
    begun = time.process_time()
    assert len(budget.needs_by_range(run)) == 131_328
    assert time.process_time() - begun < 8 * layout.MAX_LAYERS * one
