"""The inner optimizer's arithmetic: the learning rate of a step, the norms of gradients, and Muon.

Muon, for the matrices inside blocks, makes the singular values of the momentum about equal (Jordan and others, 2024):

    B = m B + (1 - m) G
    O = five steps of X <- a X + b (X X^T) X + c (X X^T)^2 X, from X = (1 - m) G + m B over its Frobenius norm
    W = (1 - rate decay) W - 0.2 sqrt(max(rows, columns)) rate O

The factor gives an update the root mean square that AdamW's usually have (Liu and others, 2025, arXiv 2502.16982), so
both optimizers share one learning rate and one decay (docs/adr/0043-muon.md). bf16 is for CUDA only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import Parameter

from protocol.errors import LocalError
from protocol.run import layout
from protocol.run.layout import ModelSpec
from protocol.run.manifest import TrainSpec

MUON_STEPS = 5
MUON_A, MUON_B, MUON_C = 3.4445, -4.7750, 2.0315
"""Steepest at zero, so that small singular values grow; all end between 0.7 and 1.2, but for tiny ones."""
MUON_RMS = 0.2
_LEAST_NORM = 1e-7
_NORM_PART = 1 << 18
"""Elements of a gradient per norm on a CPU, where torch makes a copy of them in fp64."""
OfShards = Sequence[tuple[str, Tensor]]
"""Gradients or their norms, each with the shard to which it belongs."""


# --- learning rate


def learning_rate(train: TrainSpec, step: float) -> float:
    """Rate at place `step` of the schedule: inner steps from 1 over the whole run, `inner_steps` of them a round."""
    if step <= train.warmup_steps:
        return train.lr * step / train.warmup_steps
    progress = min(1.0, (step - train.warmup_steps) / (train.total_steps - train.warmup_steps))
    return train.lr * (0.1 + 0.45 * (1.0 + math.cos(math.pi * progress)))


@dataclass(frozen=True, slots=True)
class Pace:
    """The inner steps of one replica in one round.

    They are spread over the `inner_steps` that every round has in the schedule: the learning rate follows the run.

    before: steps of the schedule before the round.
    steps: inner steps, at most.
    micro_batches: of each step.
    total_steps: of the schedule; None: the manifest's.
    joined: micro-batches that are computed as one.
    """

    before: int
    steps: int
    micro_batches: int
    total_steps: int | None = None
    joined: int = 1

    def place(self, train: TrainSpec, step: int) -> float:
        """The place in the schedule of inner step `step`; the round's first one is `before` + 1."""
        return self.before + (step - self.before) * train.inner_steps / self.steps

    def rate(self, train: TrainSpec, step: int) -> float:
        """The learning rate of inner step `step`."""
        spec = train if self.total_steps is None else replace(train, total_steps=self.total_steps)
        return learning_rate(spec, self.place(train, step))


# --- gradient norms


def launch_norms(gradients: OfShards) -> OfShards:
    """The L2 norm [] of each gradient, or of each part of one, in fp64 where the device has it. Does not wait for the
    device."""
    kind = gradients[0][1].device.type if gradients else "cpu"
    if kind == "cuda":  # a few kernels for all
        found = torch._foreach_norm([g for _, g in gradients], 2, torch.float64)
        return list(zip([s for s, _ in gradients], found, strict=True))
    if kind == "mps":
        return [(shard, torch.linalg.vector_norm(g)) for shard, g in gradients]
    parts = [(shard, part) for shard, g in gradients for part in g.flatten().split(_NORM_PART)]
    norms = torch.empty(len(parts), dtype=torch.float64).unbind()  # one by one they would leave holes in the heap
    for (_, part), norm in zip(parts, norms, strict=True):
        torch.linalg.vector_norm(part, dtype=torch.float64, out=norm)
    return [(shard, norm) for (shard, _), norm in zip(parts, norms, strict=True)]


def sum_squares(norms: OfShards, shards: Sequence[str]) -> list[tuple[str, float]]:
    """Sum of the squared norms of each of `shards`, in their order. Raises LocalError for one that is not finite."""
    sums = dict.fromkeys(shards, 0.0)
    values = torch.stack([norm for _, norm in norms]).tolist() if norms else []
    for (shard, _), norm in zip(norms, values, strict=True):
        sums[shard] += norm**2
    for shard, total in sums.items():
        if not math.isfinite(total):
            raise LocalError(f"training: the gradients of {shard} are not finite; the learning rate may be too high")
    return list(sums.items())


# --- Muon


def muon_parameters(spec: ModelSpec, train: TrainSpec, shards: Sequence[str]) -> frozenset[str]:
    """The names of the parameters of these shards that Muon trains."""
    return frozenset(
        name for shard in shards for name, shape in layout.tensors(spec, shard) if train.has_one_moment(shard, shape)
    )


class MuonBuffers:
    """Scratch memory for the updates of these matrices, used by one after the other. Allocated before any of them
    changes: a step that runs out of memory has changed nothing."""

    def __init__(self, matrices: Sequence[Tensor]) -> None:
        on_gpu, device = matrices[0].is_cuda, matrices[0].device
        square, most = max(min(x.shape) for x in matrices) ** 2, max(x.numel() for x in matrices)
        sizes = [square, square, most] + [most] * on_gpu
        buffers = [torch.empty(n, dtype=torch.bfloat16 if on_gpu else torch.float32, device=device) for n in sizes]
        self._gram, self._inner, self._following, *copy = buffers
        self._copy = copy[0] if copy else None

    def of(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """For a matrix [n, m], n <= m: itself in the format of the products, two squares [n, n], and a second [n,
        m]."""
        n = len(x)
        gram, inner = (square[: n * n].view(n, n) for square in (self._gram, self._inner))
        if self._copy is not None:
            x = _shaped(self._copy, x).copy_(x)
        return x, gram, inner, _shaped(self._following, x)


def _shaped(flat: Tensor, like: Tensor) -> Tensor:
    return flat[: like.numel()].as_strided(like.shape, like.stride())


def orthogonal(x: Tensor, buffers: MuonBuffers) -> Tensor:
    """O of a matrix, of the same shape, bit for bit reproducible. Overwrites `x`; O lies there or in `buffers`."""
    is_tall = x.shape[0] > x.shape[1]
    x, gram, inner, following = buffers.of(x.T if is_tall else x)  # the product of rows is the smaller one then
    x.div_(x.norm().clamp(min=_LEAST_NORM))
    for _ in range(MUON_STEPS):
        torch.mm(x, x.T, out=gram)
        torch.addmm(gram, gram, gram, beta=MUON_B, alpha=MUON_C, out=inner)
        torch.addmm(x, inner, x, beta=MUON_A, out=following)
        x, following = following, x
    return x.T if is_tall else x


def muon_step(parameters: Sequence[Parameter], momenta: Sequence[Tensor], train: TrainSpec, rate: float) -> None:
    """One step of all these matrices by their gradients. Changes parameters, momenta and gradients."""
    buffers = MuonBuffers(parameters)
    for parameter, momentum in zip(parameters, momenta, strict=True):
        gradient = parameter.grad
        assert gradient is not None
        momentum.lerp_(gradient, 1 - train.momentum)
        update = orthogonal(gradient.lerp_(momentum, train.momentum), buffers)
        parameter.mul_(1 - rate * train.weight_decay)
        parameter.add_(update, alpha=-MUON_RMS * math.sqrt(max(parameter.shape)) * rate)
