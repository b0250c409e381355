"""Optimizer moments for a peer that begins to train a shard: size, loss, and what an enemy can do."""

from __future__ import annotations

import dataclasses
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from peer.node.moments import STRANGERS_SHARDS, MomentsExchange
from peer.training import moments
from peer.training.trainer import StageTrainer
from protocol.codec import blob_hash
from protocol.codec.sparse import PayloadError
from protocol.run import init, layout
from protocol.run.layout import ModelSpec
from protocol.run.manifest import TrainSpec
from protocol.wire import calls
from protocol.wire.calls import MomentsAnswer, MomentsRequest
from protocol.wire.plan import Plan, ReplicaSpec, StageSpec
from tests.support import tiny
from tests.support.volunteers import Noise, Swarm, manifest

SPEC = ModelSpec(vocab_size=64, d_model=32, n_layers=1, n_heads=2, d_ff=64, context=16)
TRAIN = TrainSpec(inner_steps=4, micro_batches=1, rows=4, sequence=16, lr=1e-3, warmup_steps=0, total_steps=100)
MUON = dataclasses.replace(TRAIN, optimizer="muon")
BOTH = pytest.mark.parametrize("train", [TRAIN, MUON], ids=["adamw", "muon"])
SHARDS = layout.shard_names(SPEC)
SHARD = "block.0"


def trainer(train: TrainSpec = TRAIN) -> StageTrainer:
    made = StageTrainer(SPEC, train, SHARDS)
    made.begin_round({shard: init.initial_shard(SPEC, b"seed", shard) for shard in SHARDS})
    return made


def trained(steps: int, train: TrainSpec = TRAIN) -> StageTrainer:
    made = trainer(train)
    generator = torch.Generator().manual_seed(1)
    for step in range(1, steps + 1):
        made.forward(0, torch.randint(0, SPEC.vocab_size, (TRAIN.rows, TRAIN.sequence + 1), generator=generator))
        made.backward(0)
        made.step(step, sum(square for _, square in made.grad_sumsq()) ** 0.5)
    return made


def packed(of: StageTrainer, shard: str = SHARD) -> bytes:
    data = of.moments(shard)
    assert data is not None
    return data


@BOTH
def test_what_comes_out_is_near_to_what_went_in_and_small(train: TrainSpec) -> None:
    old, data = trained(12, train), packed(trained(12, train))
    found, exact = moments.unpack(SPEC, train, SHARD, data), old.optimizer_state()
    assert set(found) == {key for key in exact if key.startswith("model.layers.")}
    for name, shape in layout.tensors(SPEC, SHARD):
        one = train is MUON and len(shape) == 2
        m, m_found = (x[f"{name}/{'momentum_buffer' if one else 'exp_avg'}"] for x in (exact, found))
        assert float(np.sum(m * m_found)) / np.linalg.norm(m) / np.linalg.norm(m_found) > 0.6
        if one:
            continue
        assert float(found[f"{name}/step"]) == 12
        v = exact[f"{name}/exp_avg_sq"]
        if len(shape) == 1:
            np.testing.assert_array_equal(found[f"{name}/exp_avg_sq"], v)
        else:
            np.testing.assert_allclose(found[f"{name}/exp_avg_sq"].mean(axis=1), v.mean(axis=1), rtol=1e-4)
            np.testing.assert_allclose(found[f"{name}/exp_avg_sq"].mean(axis=0), v.mean(axis=0), rtol=1e-4)
    assert len(data) <= moments.largest(SPEC, train, SHARD) < 0.1 * 8 * layout.parameters(SPEC, SHARD)


@BOTH
def test_a_trainer_takes_them_for_what_it_has_none_of(train: TrainSpec) -> None:
    young, other = trainer(train), trained(3, train)
    assert young.moments(SHARD) is None
    assert not young.has_moments(SHARD)
    young.add_moments(moments.unpack(SPEC, train, SHARD, packed(other)))
    assert young.has_moments(SHARD)
    assert not young.has_moments("head")
    first = young.optimizer_state()
    young.add_moments(moments.unpack(SPEC, train, SHARD, packed(trained(5, train))))
    assert all(np.array_equal(x, first[key]) for key, x in young.optimizer_state().items()), "its own stay"


def test_first_moments_are_no_larger_than_those_of_an_honest_peer() -> None:
    exact = trained(5).optimizer_state()
    huge = {key: 1e6 * x if key.endswith("/exp_avg") else x for key, x in exact.items()}
    data = moments.pack(SPEC, TRAIN, SHARD, huge)
    assert data is not None
    found = moments.unpack(SPEC, TRAIN, SHARD, data)
    for name, _ in layout.tensors(SPEC, SHARD):
        assert np.all(np.abs(found[f"{name}/exp_avg"]) <= 1.2 * np.sqrt(found[f"{name}/exp_avg_sq"]) + 1e-12)


@pytest.mark.parametrize("scale", [1e3, float("inf"), float("nan"), -1.0])
def test_second_moments_that_clipped_gradients_cannot_have_are_refused(scale: float) -> None:
    exact = trained(2).optimizer_state()
    with np.errstate(invalid="ignore"):
        bad = {
            key: np.float32(scale) * (x + np.float32(1e-3)) if key.endswith("/exp_avg_sq") else x
            for key, x in exact.items()
        }
    data = moments.pack(SPEC, TRAIN, SHARD, bad)
    assert data is not None
    with pytest.raises(PayloadError):
        moments.unpack(SPEC, TRAIN, SHARD, data)


def test_a_momentum_that_clipped_gradients_cannot_have_is_refused() -> None:
    exact = trained(2, MUON).optimizer_state()
    total = sum(float(np.square(x).sum()) for key, x in exact.items() if key.endswith("/momentum_buffer"))
    for times, fits in ((0.5, True), (2.0, False)):
        scale = np.float32(times * MUON.clip / total**0.5)
        data = moments.pack(
            SPEC, MUON, SHARD, {key: scale * x if key.endswith("/momentum_buffer") else x for key, x in exact.items()}
        )
        assert data is not None
        if fits:
            moments.unpack(SPEC, MUON, SHARD, data)
        else:
            with pytest.raises(PayloadError, match="larger than clipped"):
                moments.unpack(SPEC, MUON, SHARD, data)


def test_moments_of_the_other_optimizer_are_refused() -> None:
    for ours, theirs in ((TRAIN, MUON), (MUON, TRAIN)):
        with pytest.raises(PayloadError):
            moments.unpack(SPEC, ours, SHARD, packed(trained(2, theirs)))


@BOTH
def test_bytes_that_are_no_moments_are_refused(train: TrainSpec) -> None:
    data = packed(trained(2, train))
    none, long = struct.pack("<I", 0) + data[4:], data[:4] + struct.pack("<Q", 2**63) + data[12:]
    for bad in (b"", data[:-1], data + b"\0", none, long, data[:11]):
        with pytest.raises(PayloadError):
            moments.unpack(SPEC, train, SHARD, bad)


class Knowing(Noise):
    """A peer that has moments, or gets them; `got` are those that came, by peer and shard."""

    got: dict[tuple[str, str], bytes]
    knows: bool

    def lacks_moments(self, shard: str) -> bool:
        return not self.knows and (self.peer, shard) not in self.got

    async def moments(self, shard: str) -> bytes | None:
        return f"moments of {shard}".encode() if self.knows else None

    def inherit(self, shard: str, data: bytes) -> None:
        self.got[self.peer, shard] = data


@pytest.mark.slow
async def test_who_begins_to_train_a_shard_gets_them_from_one_who_does(tmp_path: Path) -> None:
    async with Swarm(tmp_path, manifest(rounds=500, start_peers=2)) as swarm:
        got: dict[tuple[str, str], bytes] = {}
        elders: set[str] = set()

        def inner_loop(chosen: Any, peer: str, *_: object) -> Knowing:
            made = Knowing(swarm.hold, chosen, peer)
            made.got, made.knows = got, peer in elders
            return made

        swarm.inner_loop = inner_loop
        elders.update(swarm.start(name).id for name in ("a", "b"))
        await swarm.round(1)
        young = swarm.start("c")
        names = layout.shard_names(swarm.manifest.model)
        await swarm.until(lambda: len(got) == len(names))
        assert got == {(young.id, shard): f"moments of {shard}".encode() for shard in names}


class Desk:
    """What a peer answers others with; `handler` is what it answers them by."""

    async def answer(self, name: str, handler: Any, limit: int) -> None:
        self.handler = handler

    def keep(self, data: bytes) -> str:
        return blob_hash.name_of(data)

    def drop(self, name: str) -> None: ...


async def test_strangers_take_little_of_the_time_of_who_trains() -> None:
    """Planned peers get all that they ask for; any peer gets what is ready anyhow."""
    model = dataclasses.replace(tiny.manifest().model, n_layers=3 * STRANGERS_SHARDS)
    made, desk = tiny.manifest(model=model), Desk()
    asked: list[str] = []

    async def hold(peer: str, round: int) -> None: ...

    class Counting(Knowing):
        async def moments(self, shard: str) -> bytes | None:
            asked.append(shard)
            return await super().moments(shard)

    inner: Any = Counting(hold, made, "us")
    inner.got, inner.knows = {}, True
    exchange: Any = desk
    ours = MomentsExchange(made, "us", exchange, inner)
    await ours.serve()
    shards = layout.shard_names(model)

    async def get(who: str) -> list[bool]:
        raw = [await desk.handler(who, calls.write(MomentsRequest(shard=shard))) for shard in shards]
        return [calls.read(MomentsAnswer, one, "us", "moments").size > 0 for one in raw]

    stages = (StageSpec(peer="us", first=0, last=model.n_layers),)
    for round in (1, 2):
        asked.clear()
        ours.follow(Plan(round=round, replicas=(ReplicaSpec(stages=stages),), spares=("member",)))
        assert sum(await get("stranger")) == STRANGERS_SHARDS
        assert sum(await get("another")) == STRANGERS_SHARDS
        assert all(await get("member"))
        assert all(await get("stranger")), "they are ready now"
        assert sorted(asked) == sorted(shards), "each once"
    await ours.aclose()
