"""Helpers of the model tests: small specs, random states, chains over in-memory streams."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import random
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from peer.chain import quantize
from peer.chain.grad_norm import StageProgress, StepReport
from peer.chain.pipeline import StageSetup, run_steps
from peer.chain.reading import Read
from peer.net.base import Stream
from peer.net.memory import MemoryNetwork
from peer.training.trainer import StageTrainer, make_worker
from protocol.planning.pipeline_model import UNBOUNDED, Depths
from protocol.run import layout
from protocol.run.layout import ModelSpec
from protocol.run.manifest import TrainSpec

torch.set_num_threads(1)

SPEC = ModelSpec(vocab_size=97, d_model=64, n_layers=4, n_heads=4, d_ff=96, context=16)
TRAIN = TrainSpec(
    inner_steps=3, micro_batches=3, rows=2, sequence=12, lr=1e-3, warmup_steps=2, total_steps=20, clip=0.5
)
CUTS = [(), (3,), (1,), (5,), (2, 4), (1, 2), (2, 3, 4), (1, 2, 5)]
DEADLINE_S = 60.0
ANCHOR = "model.embed_tokens.anchor"


class Lagged:
    """A stream whose frames arrive a random number of loop turns late."""

    def __init__(self, stream: Stream, lag: random.Random) -> None:
        self.stream, self.lag, self.remote, self.name = stream, lag, stream.remote, stream.name

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    async def recv(self, limit: int = 1 << 24, *, timeout: float | None = None) -> bytes:
        frame = await self.stream.recv(limit, timeout=timeout)
        for _ in range(self.lag.randrange(200)):
            await asyncio.sleep(0)
        return frame


class Wired:
    """Peers P0 .. Pn-1 of a memory network and the streams between neighbours; use as `async with`."""

    def __init__(self, n: int, lag: random.Random | None = None) -> None:
        self.n, self.lag = n, lag

    async def __aenter__(self) -> Wired:
        network = MemoryNetwork()
        self.peers = [network.transport(f"P{i}") for i in range(self.n)]
        self.previous: list[Any] = [None] * self.n
        self.following: list[Any] = [None] * self.n
        for i in range(self.n - 1):
            arrived: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

            async def keep(stream: Any, arrived: asyncio.Future[Any] = arrived) -> None:
                arrived.set_result(stream)
                await asyncio.Event().wait()

            await self.peers[i + 1].serve("pipe", keep)
            self.following[i] = self._late(await self.peers[i].open(f"P{i + 1}", "pipe", timeout=DEADLINE_S))
            self.previous[i + 1] = self._late(await arrived)
        return self

    def _late(self, stream: Any) -> Any:
        return stream if self.lag is None else Lagged(stream, self.lag)

    async def __aexit__(self, *_: object) -> None:
        for peer in self.peers:
            await peer.aclose()


def random_theta(spec: ModelSpec = SPEC, seed: int = 1, std: float = 0.08) -> dict[str, list[np.ndarray]]:
    rng = np.random.default_rng(seed)
    return {
        shard: [
            (rng.standard_normal(shape) * std + (len(shape) == 1)).astype(np.float32)
            for shape in layout.shapes(spec, shard)
        ]
        for shard in layout.shard_names(spec)
    }


def narrow(k: int, spec: ModelSpec = SPEC) -> ModelSpec:
    """`spec` with blocks that write `k` columns of the residual stream; 0: all."""
    return dataclasses.replace(spec, residual_width=k)


def ids_of(step: int, spec: ModelSpec = SPEC, train: TrainSpec = TRAIN) -> np.ndarray:
    """The text of an inner step."""
    rng = np.random.default_rng(step)
    return rng.integers(0, spec.vocab_size, (train.step_rows, train.sequence + 1))


def read_of(spec: ModelSpec = SPEC, train: TrainSpec = TRAIN) -> Read:
    """Reads it."""

    async def read(step: int) -> np.ndarray:
        return ids_of(step, spec, train)

    return read


class Recording(StageTrainer):
    """Keeps the gradients, before the clip, and the norm of every step."""

    def step(self, step: int, total_norm: float) -> None:
        self.gradients = getattr(self, "gradients", [])
        self.norms = getattr(self, "norms", [])
        named = self.stage.named_parameters()
        self.gradients.append({n: p.grad.clone() for n, p in named if p.grad is not None})
        self.norms.append(total_norm)
        super().step(step, total_norm)


def split_shards(cuts: Sequence[int], spec: ModelSpec = SPEC) -> list[tuple[str, ...]]:
    """Stages of the chain that is cut before each of these shard positions. Each has `anchor`, where the model does."""
    names = layout.shard_names(spec)
    own, anchor = names[: spec.n_layers + 2], names[spec.n_layers + 2 :]
    return [(*own[a:b], *anchor) for a, b in itertools.pairwise([0, *cuts, None])]


def make_chain(
    cuts: Sequence[int],
    k: int,
    train: TrainSpec = TRAIN,
    theta=None,
    kind: type[Any] = Recording,
    device: str = "cpu",
    spec: ModelSpec = SPEC,
) -> list[Any]:
    """The trainers of a chain with residual width `k`, at the beginning of a round."""
    spec = narrow(k, spec)
    trainers = [kind(spec, train, shards, device=device) for shards in split_shards(cuts, spec)]
    for trainer in trainers:
        trainer.begin_round(theta if theta is not None else random_theta(spec))
    return trainers


@functools.cache
def worker(position: int) -> ThreadPoolExecutor:
    """The tensor thread of the stage at this position; threads cost more than these tests' arithmetic."""
    return make_worker()


async def steps_of(
    trainer: StageTrainer,
    executor: Executor,
    *,
    first_step: int = 1,
    steps: int = 1,
    previous: Stream | None = None,
    following: Stream | None = None,
    progress: StageProgress | None = None,
    resume: bool = False,
    wires: tuple[str, str] = ("fp32", "fp32"),
    timeout: float = DEADLINE_S,
    **setup: Any,
) -> tuple[StepReport, ...]:
    """`run_steps` with a setup of these fields."""
    setup.setdefault("read", read_of(trainer.spec, trainer.train))
    return await run_steps(
        StageSetup(trainer=trainer, worker=executor, wires=wires, timeout=timeout, **setup),
        first_step=first_step,
        steps=steps,
        previous=previous,
        following=following,
        progress=progress,
        resume=resume,
    )


async def run_chain(
    trainers: Sequence[StageTrainer],
    *,
    steps: int = 1,
    first_step: int = 1,
    wires: tuple[str, str] = ("fp32", "fp32"),
    lag: random.Random | None = None,
    depth: int = 2,
    depths: Depths = UNBOUNDED,
    stops: dict[int, asyncio.Event] | None = None,
    read: Read | None = None,
    trace=None,
    **setup: Any,
) -> list[tuple[StepReport, ...]]:
    """Runs all stages (peers P0, P1, ...) of one chain in this loop, each with a worker thread. `trace`: of P0."""
    train, spec = trainers[0].train, trainers[0].spec
    async with asyncio.timeout(DEADLINE_S), Wired(len(trainers), lag) as wired, asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(
                steps_of(
                    trainer,
                    worker(i),
                    first_step=first_step,
                    steps=steps,
                    wires=wires,
                    previous=wired.previous[i],
                    following=wired.following[i],
                    read=read or read_of(spec, train),
                    depth=depth,
                    depths=depths,
                    stop=(stops or {}).get(i),
                    trace=None if i else trace,
                    **setup,
                )
            )
            for i, trainer in enumerate(trainers)
        ]
    return [task.result() for task in tasks]


class Quantized(torch.autograd.Function):
    """What a boundary's number formats do to what crosses it: values forward, gradients backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, wires: tuple[str, str]) -> torch.Tensor:
        ctx.wires = wires
        return _rounded(x, wires[0])

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return _rounded(g, ctx.wires[1]), None


def _rounded(x: torch.Tensor, wire: str) -> torch.Tensor:
    return quantize.decode(quantize.encode(x, wire), x.shape, wire, x.device)


class Oracle(Recording):
    """One process that computes what a chain does: the whole model, with the number formats at every cut, and a copy of
    `anchor` for each stage, which is trained by itself.

    cuts: positions of shards before which the model is cut.
    copies: of `anchor`, those of the second stage and the ones behind it.
    """

    def __init__(
        self,
        spec: ModelSpec,
        train: TrainSpec,
        cuts: Sequence[int],
        wires: tuple[str, str] = ("fp32", "fp32"),
        device: str = "cpu",
    ) -> None:
        super().__init__(spec, train, layout.shard_names(spec), device=device)
        self.cuts, self.wires, anchor = tuple(cuts), wires, self.stage.model.embed_tokens.anchor
        self.copies = [torch.nn.Parameter(anchor.detach().clone()) for _ in cuts if anchor is not None]
        for number, copy in enumerate(self.copies):
            self.stage.register_parameter(f"copy_{number}", copy)
        self.stage.forward = self._forward_all

    def begin_round(self, theta, pace=None) -> None:
        super().begin_round(theta, pace)
        with torch.no_grad():
            for copy in self.copies:
                copy.copy_(torch.from_numpy(theta["anchor"][0]))

    def _forward_all(self, ids_BL: torch.Tensor, wire: torch.Tensor | None = None) -> torch.Tensor:
        stage, names = self.stage, layout.shard_names(self.spec)
        x_BLD, mask, w = stage.embed(ids_BL), stage.mask(ids_BL), self.spec.written
        for position, shard in enumerate(names[1 : self.spec.n_layers + 2], start=1):
            if position in self.cuts:
                sent = Quantized.apply(x_BLD[..., :w], self.wires)
                rows = [torch.nn.functional.embedding(ids_BL.to(sent.device), copy)
                        for copy in self.copies[self.cuts.index(position) :][:1]]  # fmt: skip
                x_BLD = torch.cat([sent, *rows], dim=-1)
            if shard != "head":
                x_BLD = stage.block(layout.block_index(shard), x_BLD, mask)
        return x_BLD

    def _gradients(self) -> list[tuple[str, torch.Tensor]]:
        return [*super()._gradients(), *(("embed", copy.grad) for copy in self.copies if copy.grad is not None)]


def gradients(trainers: Sequence[Recording], step: int = 0) -> dict[str, torch.Tensor]:
    """The gradients of a step, those of all copies of `anchor` added up."""
    found: dict[str, torch.Tensor] = {}
    for trainer in trainers:
        for name, gradient in trainer.gradients[step].items():
            name = ANCHOR if name.startswith("copy_") else name
            found[name] = found[name] + gradient if name in found else gradient
    return found


def relative(a: torch.Tensor | np.ndarray, b: torch.Tensor | np.ndarray) -> float:
    """|a - b| / |b| in float64."""
    a64, b64 = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    return float(np.linalg.norm(a64 - b64) / np.linalg.norm(b64))
