"""The trainer, the codec and the outer step together against the independent reference, for some rounds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from peer.state.outer_optimizer import Outer
from peer.training.trainer import StageTrainer
from protocol.codec import sparse, subspace
from protocol.codec.sparse import Codec
from protocol.rounds import judging
from protocol.rounds.comparing import Update
from protocol.run import init, layout
from protocol.run.layout import ModelSpec
from protocol.run.manifest import OuterSpec, TrainSpec
from tests import tiny
from tests.parity import reference

SPEC = ModelSpec(vocab_size=128, d_model=32, n_layers=3, n_heads=2, d_ff=48, context=16)
TRAIN = TrainSpec(
    inner_steps=3, micro_batches=2, rows=2, sequence=16, lr=3e-3, warmup_steps=2, total_steps=12, clip=0.5
)
ROUNDS, SEED, K, BETA, ETA = 3, b"parity", 8, 0.95, 0.8
REPLICAS = [  # (stages as blocks [first, last), k at the boundaries)
    ([(0, 3)], 0),
    ([(0, 1), (1, 2), (2, 3)], K),
    ([(0, 2), (2, 3)], 0),
]
WEIGHTS = [1 / 3] * 3


def windows(r: int, replica: int, step: int) -> np.ndarray:
    rng = np.random.default_rng((r, replica, step))
    return rng.integers(0, SPEC.vocab_size, (TRAIN.step_rows, TRAIN.sequence + 1))


def config(values: str, wire: str) -> dict[str, object]:
    return {
        "model": {name: getattr(SPEC, name) for name in ModelSpec.__slots__},
        "replicas": [{"stages": stages, "k": k} for stages, k in REPLICAS],
        "outer": {"topk": 256, "values": values, "beta": BETA, "eta": ETA, "clip": True},
        "rounds": ROUNDS,
        "wire": wire,
        **{name: getattr(TRAIN, name) for name in TrainSpec.__slots__},
    }


def shards_of(first: int, last: int) -> tuple[str, ...]:
    embed = ("embed",) if first == 0 else ()
    head = ("head",) if last == SPEC.n_layers else ()
    return (*embed, *(f"block.{i}" for i in range(first, last)), *head)


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


def scales(payloads: list[dict[str, bytes]], codec: Codec) -> list[float]:
    """What the leader's rule makes of a round."""
    manifest = tiny.manifest(model=SPEC, outer=OuterSpec(topk=codec.topk, values=codec.values))

    def update(sent: dict[str, bytes]) -> Update:
        return Update(lambda shard: sparse.decode(codec, layout.shapes(SPEC, shard), sent[shard]))

    names = [str(i) for i in range(len(payloads))]
    verdicts = judging.judge(manifest, "parent", names, [update(p) for p in payloads], judging.Before())
    assert all(verdict.reason is None for verdict in verdicts)
    return [verdict.scale for verdict in verdicts]


@pytest.mark.parametrize("values", ["sym2", "fp32"])
@pytest.mark.parametrize("wire", ["bf16", "fp32"])
def test_rounds_agree_with_the_reference(values: str, wire: str) -> None:
    torch.set_num_threads(1)
    theta0 = {shard: init.initial_shard(SPEC, SEED, shard) for shard in layout.shard_names(SPEC)}
    flat = {
        name: array
        for shard, arrays in theta0.items()
        for (name, _), array in zip(layout.tensors(SPEC, shard), arrays, strict=True)
    }
    basis = subspace.basis(SEED, SPEC.d_model, K)
    expected_losses, expected = reference.run(config(values, wire), flat, basis, windows)

    outers = [Outer(SPEC, Codec(256, values), BETA, ETA) for _ in REPLICAS]
    for outer in outers:
        outer.theta = {shard: [a.copy() for a in arrays] for shard, arrays in theta0.items()}
    replicas = [
        [StageTrainer(SPEC, TRAIN, shards_of(*stage), rank=k, basis=basis if k else None) for stage in stages]
        for stages, k in REPLICAS
    ]
    losses: list[list[float]] = []
    for r in range(ROUNDS):
        payloads: list[dict[str, bytes]] = []
        losses.append([])
        for m, (stages, outer) in enumerate(zip(replicas, outers, strict=True)):
            for stage in stages:
                stage.begin_round(outer.theta)
            for s in range(TRAIN.inner_steps):
                loss = inner_step(stages, torch.tensor(windows(r, m, s)), r * TRAIN.inner_steps + s + 1, wire)
                if s == 0:
                    losses[-1].append(loss)
            payloads.append({})
            for stage in stages:
                for shard in stage.shards:
                    outer.accumulate(shard, stage.displacement(shard))
                    payloads[-1][shard], _ = outer.encode(shard)
        scaled = [w * scale for w, scale in zip(WEIGHTS, scales(payloads, Codec(256, values)), strict=True)]
        assert min(scaled) < 1 / 3
        for outer in outers:
            for shard in layout.shard_names(SPEC):
                outer.apply(shard, [(w, p[shard]) for w, p in zip(scaled, payloads, strict=True)])
        assert len({tuple(outer.digest(shard) for shard in outer.theta) for outer in outers}) == 1

    np.testing.assert_allclose(losses, expected_losses, rtol=1e-4)
    moved = disagreement = 0.0
    for shard, arrays in outers[0].theta.items():
        for (name, _), array, start in zip(layout.tensors(SPEC, shard), arrays, theta0[shard], strict=True):
            moved += float(np.square(expected[name] - start, dtype=np.float64).sum())
            disagreement += float(np.square(expected[name] - array, dtype=np.float64).sum())
    assert (disagreement / moved) ** 0.5 < 0.02
