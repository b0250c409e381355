"""A stage's need of a GPU's own memory: counted where that works without one, and compared with a card's peaks."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from peer.training import model
from peer.training.model import Block
from protocol.planning import budget, memory
from protocol.planning.arrange import arrange
from protocol.planning.budget import Budget
from protocol.planning.partition import Candidate
from protocol.run.layout import ModelSpec
from protocol.run.manifest import TrainSpec
from tests.support import tiny
from tests.support.gpu_memory import GB, RUNS


def test_the_promise_is_that_of_two_peaks_on_a_card() -> None:
    """Full replicas on an H100, `torch.cuda.max_memory_allocated` (docs/results/gpu.md)."""
    shapes = {(1024, 9, 8, 2688, 16): 14.8, (1536, 12, 12, 5440, 8): 22.4}
    for (d, layers, heads, d_ff, rows), peak in shapes.items():
        model = ModelSpec(vocab_size=32_000, d_model=d, n_layers=layers, n_heads=heads, d_ff=d_ff, context=2048)
        train = TrainSpec(
            inner_steps=30, micro_batches=4, rows=rows // 4, sequence=2048, lr=1e-4, warmup_steps=10, total_steps=10_000
        )
        manifest = tiny.manifest(model=model, train=train)  # a frame holds no micro-batch of that many rows
        assert abs(memory.stage_memory(manifest, 0, layers, "cuda", joined=4) / (peak * GB) - 1) < 0.05


def kept(spec: ModelSpec, tokens: int, form: torch.dtype) -> int:
    """Bytes that a block, between which and its neighbours values have this format, keeps for its backward as the
    compiler divides it, in bf16: by what is saved, counted once."""
    block = Block(spec)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    angles = model.rope(spec, torch.device("cpu"))
    theirs = {x.untyped_storage().data_ptr() for x in (*block.parameters(), *angles)}
    found: dict[int, int] = {}

    def seen(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in theirs:
            found[storage.data_ptr()] = storage.nbytes()
        return x

    x_BLD = torch.randn(1, tokens, spec.d_model).to(form).requires_grad_()
    torch.compiler.reset()
    compiled = torch.compile(Block.forward, dynamic=False, backend="aot_eager_decomp_partition")
    with torch.autocast("cpu", torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(seen, lambda x: x):
        compiled(block, x_BLD, *(angle[:tokens] for angle in angles))
    torch.compiler.reset()
    return sum(found.values())


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_a_compiled_block_keeps_what_is_promised() -> None:
    tokens = 512
    narrow = {"residual_width": 84}
    for change in ({}, narrow, {"num_key_value_heads": 2}, {"use_qk_norm": True}, {"d_ff": 1024, **narrow}):
        shape = {"vocab_size": 512, "d_model": 256, "n_layers": 3, "n_heads": 4, "d_ff": 688, "context": tokens}
        spec = ModelSpec(**shape | change)  # type: ignore[arg-type]
        train = TrainSpec(
            inner_steps=1, micro_batches=1, rows=1, sequence=tokens, lr=1e-3, warmup_steps=1, total_steps=10
        )
        recorded = 6 * tokens * spec.d_model
        manifest = tiny.manifest(model=spec, train=train)
        promised = memory.activation_bytes(manifest, 1, 2, "cuda") - recorded
        for form in (torch.bfloat16,) if change not in ({}, narrow) else (torch.float32, torch.bfloat16):
            # for every head and token the softmax has a sum, and normalization a root: the promise does not count them
            assert -0.001 < kept(spec, tokens, form) / promised - 1 < 0.02, (change, form)


def test_the_promise_is_what_recordings_of_a_stage_took_on_a_card() -> None:
    """Of the second of four stages, by what the allocator took from an H100 for one more (docs/results/gpu.md).

    Not measured since blocks may write a part of the residual stream only: the peaks are of blocks that write all of
    it. The promise counts the same for both, for a recording has the whole stream before and after its blocks. Nor is
    the memory of all of a stage measured since every stage trains its rows of tokens."""
    shapes = {(1024, 9, 8, 2688, 16): 2.51, (1536, 12, 12, 5440, 8): 3.28}
    for (d, layers, heads, d_ff, rows), took in shapes.items():
        whole = ModelSpec(vocab_size=32_000, d_model=d, n_layers=layers, n_heads=heads, d_ff=d_ff, context=2048)
        train = TrainSpec(
            inner_steps=30, micro_batches=4, rows=rows // 4, sequence=2048, lr=1e-4, warmup_steps=10, total_steps=10_000
        )
        blocks = layers // 4
        for width in (0, d // 8):
            manifest = tiny.manifest(model=dataclasses.replace(whole, residual_width=width), train=train)
            promised = memory.activation_bytes(manifest, blocks, 2 * blocks, "cuda", joined=4)
            assert abs(promised / (took * GB) - 1) < 0.05, (d, rows, width)


@pytest.mark.parametrize(
    ("name", "gigabytes", "joined"), [("512m", 8, 1), ("512m", 24, 4), ("512m", 80, 8), ("178m", 80, 4)]
)
def test_a_replica_with_room_computes_micro_batches_together(name: str, gigabytes: int, joined: int) -> None:
    manifest = RUNS[name]
    count = manifest.train.micro_batches
    found = budget.joined(manifest, count, Budget(gigabytes * GB, "cuda"))
    assert found == joined
    assert budget.joined(manifest, count, Budget(gigabytes * GB)) == 1
    assert count // budget.joined(manifest, count, Budget(1000 * GB, "cuda"), devices=count // 2) >= count // 2


@given(st.sampled_from(sorted(RUNS)), st.integers(10**8, 10**12), st.integers(1, 300), st.integers(1, 8))
def test_what_is_joined_fits_and_divides(name: str, offered: int, count: int, devices: int) -> None:
    manifest = RUNS[name]
    found = budget.joined(manifest, count, Budget(offered, "cuda"), devices)
    assert found >= 1
    assert count % found == 0
    if found > 1:
        assert memory.stage_memory(manifest, 0, manifest.model.n_layers, "cuda", found) <= offered
        assert found * manifest.train.rows * manifest.train.sequence <= budget.JOINED
        assert count // found >= devices


def test_only_the_name_of_a_card_makes_it_one() -> None:
    assert all(memory.on_gpu(name) for name in ("cuda", "cuda:1", "2 x cuda"))
    assert not any(memory.on_gpu(name) for name in ("cpu", "3 x cpu", "mps", "", "x", "cudax"))


def test_a_card_of_eight_gigabytes_is_a_full_replica_where_a_processor_with_as_much_is_not() -> None:
    manifest = RUNS["178m"]

    def sizes(device: str) -> list[int]:
        machines = [
            Candidate(peer=str(i), memory_bytes=int(7.2 * GB), up_bps=10**8, speed_flops=10**13, device=device)
            for i in range(3)
        ]
        return sorted(len(replica.members) for replica in arrange(manifest, machines)[0])

    assert sizes("cuda") == [1, 1, 1]
    assert 1 not in sizes("cpu")


def test_whoever_has_room_for_more_micro_batches_lets_more_of_them_go_ahead() -> None:
    manifest = RUNS["512m"]
    room = 6 * GB
    on_card, on_host = (budget.depths(manifest, 1, 3, Budget(room, device)) for device in ("cuda", "cpu"))
    assert on_card.plain > on_host.plain
    one = memory.activation_bytes(manifest, 1, 3, "cuda")
    resting = memory.resting_bytes(manifest, 1, 3, in_files=True, device="cuda")
    assert resting + on_card.plain * one <= room < resting + (on_card.plain + 2) * one
