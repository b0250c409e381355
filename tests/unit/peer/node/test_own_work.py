"""A round's update on the device (here the CPU by torch) and on the host: same payloads, same states."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from peer.node.training import add_to_feedback, encode_update
from peer.state.outer_optimizer import Outer
from peer.training.trainer import StageTrainer
from peer.training.update import DeviceUpdate
from protocol.codec.formats import Codec
from protocol.errors import LocalError
from protocol.run import layout
from tests.support.chains import TRAIN, ids_of, narrow, random_theta

NARROW = narrow(8)
NAMES = layout.shard_names(NARROW)
SPARSE = Codec(64)
FIRST, LAST, WHOLE = (*NAMES[:3], "anchor"), NAMES[3:], NAMES


class OnDevice(StageTrainer):
    """Takes the CPU for an accelerator."""

    update_devices = frozenset({"cpu"})


class Side:
    """One peer's state and its work."""

    def __init__(self, kind: type[StageTrainer], shards: tuple[str, ...], threads: int, codec: Codec = SPARSE) -> None:
        self.shards = shards
        self.trainer = kind(NARROW, TRAIN, shards)
        self.outer = Outer(NARROW, codec, 0.95, 1.0, threads=threads)
        self.outer.theta = dict(random_theta(NARROW))

    def learn(self, seed: int) -> None:
        """Any values of the parameters: what inner steps would leave behind."""
        self.trainer.begin_round(self.outer.theta)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.trainer.stage.parameters():
                parameter += 1e-3 * torch.randn(parameter.shape, generator=generator)

    def end_round(self) -> dict[str, tuple[bytes, float]]:
        """What was offered, which is then applied."""
        offered = dict(
            zip(self.shards, encode_update(self.outer, self.trainer, self.shards, b"of a round"), strict=True)
        )
        for shard, (payload, _) in offered.items():
            self.outer.apply(shard, [(0.5, payload), (0.25, payload)])
        return offered


def same(a: Side, b: Side) -> None:
    """State, feedback and parameters, bit for bit."""
    for shard in a.shards:
        assert a.outer.digest(shard) == b.outer.digest(shard)
        for x, y in zip(a.outer.feedback[shard], b.outer.feedback[shard], strict=True):
            assert x.tobytes() == y.tobytes()
    for p, q in zip(a.trainer.stage.parameters(), b.trainer.stage.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize(
    ("shards", "codec"),
    [
        (WHOLE, SPARSE),
        (FIRST, SPARSE),
        (LAST, SPARSE),
        (WHOLE, Codec(4096, "int8")),
        (FIRST, Codec(4096, "fp32")),
        (WHOLE, Codec(64, "int4", "dct", 0.1)),
        (WHOLE, Codec(64, sample=0.1)),
    ],
)
def test_rounds_are_the_same_with_a_device_and_without(shards: tuple[str, ...], codec: Codec) -> None:
    """Offered, kept, offered; the parameters of each round come from the state that the one before made."""
    host, device = (Side(kind, shards, threads, codec) for kind, threads in ((StageTrainer, 1), (OnDevice, 3)))
    assert host.trainer.on_device(shards[0]) is None
    for round in range(4):
        for side in (host, device):
            side.learn(round)
        if round == 1:  # a round that is not offered
            for side in (host, device):
                add_to_feedback(side.outer, side.trainer, shards)
        else:
            offered = host.end_round()
            assert offered == device.end_round()
            assert all(norm > 0 for _, norm in offered.values())
        same(host, device)


def test_a_device_trains_from_the_bits_of_the_state() -> None:
    host, device = (Side(kind, WHOLE, 1) for kind in (StageTrainer, OnDevice))
    for side in (host, device):
        side.trainer.begin_round(side.outer.theta)
    whole = torch.tensor(ids_of(1))
    for micro, ids in enumerate(whole.chunk(TRAIN.micro_batches)):
        assert torch.equal(host.trainer.forward(micro, ids), device.trainer.forward(micro, ids))
    same_parameters = zip(host.trainer.stage.parameters(), device.trainer.stage.parameters(), strict=True)
    assert all(torch.equal(p, q) for p, q in same_parameters)


@pytest.mark.parametrize("kind", [StageTrainer, OnDevice])
@pytest.mark.parametrize("shards", [WHOLE, FIRST])
def test_work_that_is_not_finite_is_refused_and_what_was_owed_stays(
    kind: type[StageTrainer], shards: tuple[str, ...]
) -> None:
    side = Side(kind, shards, 2)
    side.learn(0)
    side.end_round()
    before = [e.copy() for e in side.outer.feedback["embed"]]
    side.learn(1)
    with torch.no_grad():
        next(side.trainer.stage.parameters())[3, 2] = float("nan")
    with pytest.raises(LocalError, match="not finite"):
        add_to_feedback(side.outer, side.trainer, ["embed"])
    with pytest.raises(LocalError, match="not finite"):
        list(encode_update(side.outer, side.trainer, ["embed"]))
    assert [e.tobytes() for e in side.outer.feedback["embed"]] == [e.tobytes() for e in before]


def accumulated(local: torch.Tensor) -> np.ndarray:
    """β e + δ for e = 1."""
    e, theta = np.ones(tuple(local.shape), dtype=np.float32), np.zeros(tuple(local.shape), dtype=np.float32)
    DeviceUpdate("cpu", 2).accumulate([(theta, local)], [e], np.float32(0.5), 32, map)
    return e


def test_parts_for_which_the_device_is_short_of_memory_come_later() -> None:
    short: list[str] = []

    class Large(torch.Tensor):
        """The device has no memory for it as often as `short` says."""

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.Tensor.reshape and short:
                raise RuntimeError(short.pop())
            return super().__torch_function__(func, types, args, kwargs)

    plain = torch.randn(6400, 1536, generator=torch.Generator().manual_seed(2))
    large = plain.as_subclass(Large)
    short += ["CUDA out of memory. Tried to allocate more than there is."] * 2
    assert accumulated(large).tobytes() == accumulated(plain).tobytes()
    assert not short
    short += ["CUDA out of memory. Tried to allocate more than there is."] * 100
    with pytest.raises(RuntimeError, match="out of memory"):
        accumulated(large)
