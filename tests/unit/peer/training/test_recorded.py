"""A stage whose blocks are recorded computes what it computes without. On a card recordings are CUDA's graphs; a
processor records work as that work itself, so that everything but the graphs is the same."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from peer.training import compiled
from peer.training.recorded import Graphs, Recorded
from protocol.planning.pipeline_model import Depths
from tests.support.chains import CUTS, SPEC, TRAIN, Recording, ids_of, make_chain, random_theta, relative, run_chain

LONG = dataclasses.replace(TRAIN, micro_batches=4)
DOCUMENTS = dataclasses.replace(SPEC, document_end_id=5, num_key_value_heads=2, use_qk_norm=True)
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


MADE: list[Any] = []
"""By the trainers of this test, in their order."""


class Again:
    """Counts recordings and replays; has memory for `most` of them. `called_first`: comes before each."""

    most = 1 << 30

    @staticmethod
    def called_first() -> None: ...

    def __init__(self, device: torch.device) -> None:
        self.recorded, self.replayed = 0, 0
        MADE.append(self)

    def rehearse(self, ahead: Callable[[], Tensor], back: Callable[[], Tensor]) -> None:
        self.called_first()
        ahead()
        back()

    def record(
        self, ahead: Callable[[], Tensor], back: Callable[[], Tensor], several: bool
    ) -> tuple[Recorded, Recorded]:
        if self.recorded >= self.most:
            raise torch.OutOfMemoryError("no memory for a recording")
        self.recorded += 1
        return self._one(ahead), self._one(back)

    def _one(self, work: Callable[[], Tensor]) -> Recorded:
        result = work().clone()

        def replay() -> None:
            self.replayed += 1
            result.copy_(work())

        return result, replay


class Counted(Graphs):
    """CUDA's graphs. Counts recordings."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.recorded = 0
        MADE.append(self)

    def record(self, *work: Any) -> tuple[Recorded, Recorded]:
        self.recorded += 1
        return super().record(*work)


class Records(Recording):
    """A trainer that records wherever it is."""

    recording: ClassVar = {"cpu": Again, "cuda": Counted}


def records(**changes: Any) -> type[Records]:
    """The same with other members of `Again`."""
    return type("Records", (Records,), {"recording": {"cpu": type("Again", (Again,), changes)}})


class Unrecorded(Recording):
    """One that never does."""

    recording: ClassVar = {}


@pytest.fixture(autouse=True)
def _fresh() -> None:
    MADE.clear()
    if torch.cuda.is_available():
        torch.compiler.reset()  # it compiles a function for a limited number of shapes


def steps(kind: type[Any], cuts: tuple[int, ...], k: int, spec: Any, device: str, **options: Any) -> tuple[Any, Any]:
    chain = make_chain(cuts, k, LONG, kind=kind, device=device, spec=spec)

    async def read(step: int) -> np.ndarray:
        return ids_of(step, spec, LONG)

    reports = asyncio.run(run_chain(chain, steps=3, read=read, **options))
    return chain, reports


def both(cuts: tuple[int, ...], k: int, spec: Any, device: str, **options: Any) -> tuple[Any, Any]:
    """What a chain finds that records, which is what one finds that does not. That goes first: it compiles everything,
    and on a card nothing can be compiled while another stage of the same process records."""
    expected = steps(Unrecorded, cuts, k, spec, device, **options)
    found = steps(Records, cuts, k, spec, device, **options)
    same(found, expected)
    return found


def same(found: tuple[Any, Any], expected: tuple[Any, Any]) -> None:
    assert [r.loss for r in found[1][0]] == [r.loss for r in expected[1][0]]
    assert [r.norm for r in found[1][0]] == [r.norm for r in expected[1][0]]
    for a, b in zip(found[0], expected[0], strict=True):
        for step, other in zip(a.gradients, b.gradients, strict=True):
            assert step.keys() == other.keys()
            assert all(torch.equal(step[name], other[name]) for name in step)
        assert all(torch.equal(x, y) for x, y in zip(a.stage.parameters(), b.stage.parameters(), strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("k", "spec"), [(0, SPEC), (SPEC.d_model // 8, DOCUMENTS)], ids=["llama", "compressed, documents"]
)
@pytest.mark.parametrize("cuts", CUTS)
def test_every_stage_has_the_same_bits(cuts: tuple[int, ...], k: int, spec: Any, device: str) -> None:
    k = k if cuts else 0
    found = both(cuts, k, spec, device)
    blocks = [any(shard.startswith("block.") for shard in trainer.shards) for trainer in found[0]]
    assert len(MADE) == (sum(blocks) if cuts else 0), "a full replica computes for longer than launching it takes"
    assert all(made.recorded for made in MADE)
    if device == "cpu" and cuts:
        replayed = {made.replayed for made in MADE}
        whole = 2 * 2 * LONG.micro_batches  # two of three steps
        # a micro-batch of one document has no mask, and is not replayed
        assert replayed == {whole} if spec is SPEC else 0 < min(replayed) <= max(replayed) <= whole


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("k", [0, SPEC.d_model // 8])
def test_activations_that_are_computed_anew(k: int, device: str) -> None:
    """A stage that keeps only what came in needs one slot, however many micro-batches are under way."""
    options = {"depth": 4, "depths": Depths(plain=1, held=1, most=4)}
    both((2, 4), k, SPEC, device, **options)
    assert [made.recorded for made in MADE] == [1, 1, 1]


def test_as_many_slots_as_micro_batches_are_between_forward_and_backward() -> None:
    steps(Records, (2, 4), 8, SPEC, "cpu", depth=3, pick_depth=lambda *_: 3)
    first, middle, last = (made.recorded for made in MADE)
    assert 1 <= middle <= first <= 3
    assert last == 1


@pytest.mark.parametrize("most", [0, 1])
def test_without_memory_for_a_recording_blocks_are_called(most: int) -> None:
    found = steps(records(most=most), (2, 4), 8, SPEC, "cpu", depth=3)
    same(found, steps(Unrecorded, (2, 4), 8, SPEC, "cpu", depth=3))
    assert all(made.recorded <= most for made in MADE)
    assert not any(trainer.piece_rows for trainer in found[0])


class _Traced(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        compiled.where_it_pays(torch.neg, torch.device("cuda"))(torch.ones(1))
        return x


def test_nothing_is_recorded_while_a_thread_compiles() -> None:
    """Blocks are called as they are then, and would be for ever."""
    while_compiling = iter([True, True])

    def called_first() -> None:
        if next(while_compiling, False):
            torch.fx.symbolic_trace(_Traced())

    trainer = make_chain((2, 4), 8, LONG, kind=records(called_first=staticmethod(called_first)))[1]
    ids = torch.tensor(ids_of(1, SPEC, LONG))[: LONG.rows]
    wire = torch.ones(LONG.rows, LONG.sequence, 8)
    replayed = []
    for step in range(1, 5):
        trainer.forward(0, ids, wire)
        trainer.backward(0, wire)
        trainer.step(step, 1.0)
        replayed.append(MADE[1].replayed)
    assert replayed == [0, 0, 0, 2], "one step is not to be recorded, the next two could not be"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA's graphs need a card")
def test_after_a_recording_that_failed_random_numbers_and_recordings_go_on() -> None:
    graphs, x = Graphs(torch.device("cuda")), torch.ones(4, device="cuda")

    def waits() -> Tensor:
        torch.cuda.current_stream().synchronize()
        return x

    for _ in range(2):
        with pytest.raises(RuntimeError):
            graphs.record(waits, lambda: x, False)
        assert torch.randn(4, device="cuda").isfinite().all()
        (y, again), (z, back) = graphs.record(lambda: x + 1, lambda: x * 3, False)
        again()
        back()
        assert y.tolist() == [2.0] * 4
        assert z.tolist() == [3.0] * 4


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_that_is_broken_off_leaves_nothing(device: str) -> None:
    """Nor does one whose gradients were replaced, as where several devices add theirs up."""
    found = []
    for kind in (Unrecorded, Records):
        trainer = steps(kind, (2, 4), 8, SPEC, device)[0][1]
        ids = torch.tensor(ids_of(9, SPEC, LONG)).reshape(4, LONG.rows, -1)
        wire = torch.linspace(-1, 1, LONG.rows * LONG.sequence * 8).reshape(LONG.rows, LONG.sequence, 8).to(device)
        trainer.forward(0, ids[0], wire)
        trainer.forward(1, ids[1], wire)
        trainer.backward(0, wire)
        trainer.reset()
        for micro in (0, 1):
            trainer.forward(micro, ids[micro], wire)
        trainer.backward(0, wire)
        for parameter in trainer.stage.parameters():
            parameter.grad = 2 * parameter.grad
        trainer.backward(1, wire)
        found.append([total.clone() for total in trainer.stage.make_gradients()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_other_shapes_are_called_and_another_round_goes_on(device: str) -> None:
    found = []
    for kind in (Unrecorded, Records):
        trainer = steps(kind, (2, 4), 8, SPEC, device)[0][1]
        trainer.end_round()
        trainer.begin_round(random_theta(trainer.spec, seed=2))
        sent = []
        for rows in (LONG.rows, 1, LONG.rows):
            ids = torch.tensor(ids_of(9, SPEC, LONG))[:rows]
            wire = torch.linspace(-1, 1, rows * LONG.sequence * 8).reshape(rows, LONG.sequence, 8).to(device)
            sent += [trainer.forward(0, ids, wire).clone(), trainer.backward(0, wire).clone()]
        found.append([*sent, *(p.grad.clone() for p in trainer.stage.parameters())])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


class Rounded(Records):
    """A processor, too, has bf16 between the blocks of a compressed chain's stage."""

    forms: ClassVar = {"cpu": torch.bfloat16, "cuda": torch.bfloat16}


class RoundedUnrecorded(Unrecorded):
    forms = Rounded.forms


@pytest.mark.parametrize("cuts", CUTS[1:4])
@pytest.mark.parametrize("again", [False, True])
def test_a_compressed_chain_in_half_the_bits_learns_the_same(cuts: tuple[int, ...], again: bool) -> None:
    k = SPEC.d_model // 8
    options = {"depths": Depths(plain=1, held=1, most=4)} if again else {}
    found = steps(Rounded, cuts, k, SPEC, "cpu", **options)
    same(found, steps(RoundedUnrecorded, cuts, k, SPEC, "cpu", **options))
    exact = steps(Unrecorded, cuts, k, SPEC, "cpu", **options)
    for rounded, other in zip(found[0], exact[0], strict=True):
        assert rounded.stage.form == torch.bfloat16
        for name, gradient in other.gradients[0].items():
            if not gradient.any():  # of a stage without blocks
                continue
            assert 0 < relative(rounded.gradients[0][name], gradient) < 2e-2, name
