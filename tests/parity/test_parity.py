"""The trainer, the codec and the outer step together against the independent reference, for some rounds."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import numpy as np
import pytest
import torch

from peer.state.outer_optimizer import Outer
from peer.training.trainer import StageTrainer
from protocol.codec import sparse
from protocol.planning.memory import stage_shards
from protocol.round import judging
from protocol.round.comparing import Update
from protocol.run import init, layout
from protocol.run.layout import ModelSpec, RopeScaling
from protocol.run.manifest import Manifest, OuterSpec, TrainSpec
from tests.parity import reference
from tests.support import tiny
from tests.support.family import FAMILY

SPEC = ModelSpec(vocab_size=128, d_model=32, n_layers=3, n_heads=2, d_ff=48, context=16)
TRAIN = TrainSpec(
    inner_steps=3, micro_batches=2, rows=2, sequence=16, lr=3e-3, warmup_steps=2, total_steps=12, clip=0.5
)
ROUNDS, SEED = 3, b"parity"
OUTER = OuterSpec(topk=256, eta=0.8)
Replicas = list[list[tuple[int, int]]]
REPLICAS: Replicas = [[(0, 3)], [(0, 1), (1, 2), (2, 3)], [(0, 2), (2, 3)]]
"""Stages of each as blocks [first, last)."""
WEIGHTS = [1 / 3] * 3


ROPE = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 12}
OPTIONS: dict[str, dict[str, Any]] = {
    "grouped": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "qk norm": {"use_qk_norm": True},
    "linear": {"rope_scaling": RopeScaling(rope_type="linear", factor=4.0)},
    "llama3": {"rope_scaling": RopeScaling(**ROPE)},
    "yarn": {"rope_scaling": RopeScaling(**{**ROPE, "rope_type": "yarn"})},
    "documents": {"document_end_id": 5},
    "all but tied": {
        "residual_width": 8, "num_key_value_heads": 1, "use_qk_norm": True, "rope_scaling": RopeScaling(**ROPE),
        "document_end_id": 5,
    },
    "all": {
        "num_key_value_heads": 1, "use_qk_norm": True, "rope_scaling": RopeScaling(**ROPE), "document_end_id": 5,
        "tie_word_embeddings": True,
    },
}  # fmt: skip


def windows(r: int, replica: int, step: int) -> np.ndarray:
    rng = np.random.default_rng((r, replica, step))
    return rng.integers(0, SPEC.vocab_size, (TRAIN.step_rows, TRAIN.sequence + 1))


def config(outer: OuterSpec, wire: str, spec: ModelSpec, replicas: Replicas, train: TrainSpec) -> dict[str, object]:
    return {
        "model": dataclasses.asdict(spec),
        "replicas": [{"stages": stages} for stages in replicas],
        "outer": {**dataclasses.asdict(outer), "clip": True, "seed": tiny.manifest().seed_bytes},
        "rounds": ROUNDS,
        "wire": wire,
        **dataclasses.asdict(train),
    }


def inner_step(stages: list[StageTrainer], ids: torch.Tensor, number: int, wire: str) -> float:
    """One inner step of a replica, as the pipeline does it but for the network. Returns its mean loss."""
    rounded = (lambda x: x.bfloat16().float()) if wire == "bf16" else (lambda x: x)
    loss = 0.0
    for micro, part in enumerate(ids.chunk(TRAIN.micro_batches)):
        sent: object = None
        for stage in stages:
            sent = stage.forward(micro, part, None if sent is None else rounded(sent))
        loss += float(sent) / TRAIN.micro_batches  # type: ignore[arg-type]
        back = None
        for stage in reversed(stages):
            back = stage.backward(micro, None if back is None else rounded(back))
    norm = sum(square for stage in stages for _, square in stage.grad_sumsq()) ** 0.5
    for stage in stages:
        stage.step(number, norm)
    return loss


def scales(payloads: list[dict[str, list[bytes]]], manifest: Manifest) -> list[float]:
    """What the leader's rule makes of a round."""
    codec, spec = manifest.outer.codec, manifest.model

    def update(sent: dict[str, list[bytes]]) -> Update:
        return Update(lambda shard: [sparse.decode(codec, layout.shapes(spec, shard), x) for x in sent[shard]])

    names = [str(i) for i in range(len(payloads))]
    verdicts = judging.judge(manifest, "parent", names, [update(p) for p in payloads], judging.PreviousRound())
    assert all(verdict.reason is None for verdict in verdicts)
    return [verdict.scale for verdict in verdicts]


@pytest.mark.parametrize("width", [0, 8])
@pytest.mark.parametrize("wire", ["bf16", "fp32"])
def test_rounds_agree_with_the_reference(wire: str, width: int) -> None:
    agree(wire, dataclasses.replace(SPEC, residual_width=width))


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_of_the_architecture_agrees_with_the_reference(name: str) -> None:
    spec = dataclasses.replace(SPEC, **OPTIONS[name])
    without = dataclasses.replace(spec, rope_scaling=None, document_end_id=-1)
    found = agree("fp32", spec, grown=5)
    if without != spec:
        plain = agree("fp32", without, grown=5)
        assert np.abs(np.array(found) / plain - 1).max() > 1e-3, "the option is felt"


@pytest.mark.parametrize("wire", ["bf16", "fp32"])
def test_muon_agrees_with_the_reference(wire: str) -> None:
    """Of a full replica, and of chains."""
    fast, spec = dataclasses.replace(TRAIN, lr=1e-2), dataclasses.replace(SPEC, residual_width=8)
    within = 0.05 if wire == "bf16" else 0.02  # where a value is rounded the other way, large steps magnify it
    by_muon = agree(wire, spec, grown=3, train=dataclasses.replace(fast, optimizer="muon"), within=within)
    plain = agree(wire, spec, grown=3, train=fast, within=within)
    assert by_muon[0] == plain[0], "nothing has moved yet"
    assert np.abs(np.array(by_muon[1:]) / plain[1:] - 1).max(axis=0).min() > 1e-4, (
        "the optimizer is felt by all, more than what may differ"
    )


@pytest.mark.parametrize("name", FAMILY)
def test_every_outer_step_agrees_with_the_reference(name: str) -> None:
    """Samples of updates in 4 bits (CocktailSGD), transformed ones (DeMo), federated averaging, and DiLoCo, with all
    values of an update or 8 bits of each."""
    spec = dataclasses.replace(SPEC, residual_width=8)
    found, plain = (agree("fp32", spec, outer=OuterSpec(**FAMILY[method])) for method in (name, "averaging"))
    assert found[0] == plain[0], "nothing has moved yet"
    if "optimizer" in FAMILY[name]:
        assert np.abs(np.array(found[2:]) / plain[2:] - 1).max() > 5e-4, "the momentum is felt"


@functools.cache  # several options have the same model without them
def agree(
    wire: str,
    spec: ModelSpec,
    grown: float = 1.0,
    train: TrainSpec = TRAIN,
    within: float = 0.02,
    outer: OuterSpec = OUTER,
) -> list[list[float]]:
    """Some rounds of the trainer, the codec and the outer step are those of the reference; their losses. Tied
    embeddings have no chains. `grown`: how many times as large the first weights are as usual, so that attention is no
    mean of all."""
    members: Replicas = REPLICAS if not spec.tie_word_embeddings else [[(0, spec.n_layers)]] * len(REPLICAS)
    torch.set_num_threads(1)
    manifest = tiny.manifest(model=spec, outer=outer)
    theta0 = {
        shard: [a * (grown if a.ndim > 1 else 1) for a in init.initial_state(manifest, shard)]
        for shard in layout.shard_names(spec)
    }
    flat = {
        name: array
        for shard, arrays in theta0.items()
        for (name, _), array in zip(layout.tensors(spec, shard), arrays, strict=False)
    }
    expected_losses, expected = reference.run(config(outer, wire, spec, members, train), flat, windows)

    replicas = [[StageTrainer(spec, train, stage_shards(manifest, *stage)) for stage in stages] for stages in members]
    outers = [[Outer.of(manifest) for _ in stages] for stages in replicas]
    for state in itertools.chain(*outers):
        state.theta = {shard: [a.copy() for a in arrays] for shard, arrays in theta0.items()}
    losses: list[list[float]] = []
    for r in range(ROUNDS):
        payloads: list[dict[str, list[bytes]]] = []
        losses.append([])
        for m, (stages, own) in enumerate(zip(replicas, outers, strict=True)):
            for stage, state in zip(stages, own, strict=True):
                stage.begin_round(state.theta)
            for s in range(TRAIN.inner_steps):
                loss = inner_step(stages, torch.tensor(windows(r, m, s)), r * TRAIN.inner_steps + s + 1, wire)
                if s == 0:
                    losses[-1].append(loss)
            payloads.append({})
            for stage, state in zip(stages, own, strict=True):
                for shard in stage.shards:
                    state.accumulate(shard, stage.displacement(shard))
                    payloads[-1].setdefault(shard, []).append(state.encode(shard, seed=manifest.sample_seed(r + 1))[0])
        scaled = [w * scale for w, scale in zip(WEIGHTS, scales(payloads, manifest), strict=True)]
        assert min(scaled) < 1 / 3
        everybody = [*itertools.chain(*outers)]
        for state in everybody:
            for shard in layout.shard_names(spec):
                state.apply(shard, [(w, x) for w, p in zip(scaled, payloads, strict=True) for x in p[shard]])
        assert len({tuple(state.digest(shard) for shard in state.theta) for state in everybody}) == 1

    np.testing.assert_allclose(losses, expected_losses, rtol=1e-4)
    moved = disagreement = 0.0
    for shard, arrays in outers[0][0].theta.items():
        for (name, _), array, start in zip(layout.tensors(spec, shard), arrays, theta0[shard], strict=False):
            moved += float(np.square(expected[name] - start, dtype=np.float64).sum())
            disagreement += float(np.square(expected[name] - array, dtype=np.float64).sum())
    assert (disagreement / moved) ** 0.5 < within
    return losses
