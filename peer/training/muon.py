"""Muon for the matrices inside blocks: momentum whose singular values are made about equal (Jordan and others, 2024).

    B = m B + (1 - m) G
    O = five steps of X <- a X + b (X X^T) X + c (X X^T)^2 X, from X = (1 - m) G + m B over its Frobenius norm
    W = (1 - rate decay) W - 0.2 sqrt(max(rows, columns)) rate O

The factor gives an update the root mean square that AdamW's usually have, 0.2 (Liu and others, 2025, arXiv 2502.16982), so one learning
rate and one decay serve both optimizers. A stage has whole matrices, so a chain does what a full replica does; a compressed chain's
embedding is AdamW's (docs/adr/0043-muon.md). torch.optim.Muon is the same in bf16 on every device, which takes
25 times as long on processors that have no instructions for it: here that is for CUDA only, and fp32 elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from protocol.run import layout
from protocol.run.layout import ModelSpec
from protocol.run.manifest import TrainSpec

STEPS = 5
A, B, C = 3.4445, -4.7750, 2.0315
"""Steepest at zero, so that small singular values grow; all end between 0.7 and 1.2, but for tiny ones."""
LENGTH = 0.2
_SMALL = 1e-7


def trained(spec: ModelSpec, train: TrainSpec, shards: Sequence[str]) -> frozenset[str]:
    """The names of the parameters of these shards that Muon trains."""
    return frozenset(
        name for shard in shards for name, shape in layout.tensors(spec, shard) if train.has_one_moment(shard, shape)
    )


class Space:
    """The memory in which updates of these matrices are computed, one after the other: it is there before the first of them changes, so that a
    step for which there is none has changed nothing."""

    def __init__(self, matrices: Sequence[Tensor]) -> None:
        self._least = max(min(x.shape) for x in matrices)
        self._device, self._dtype = matrices[0].device, torch.bfloat16 if matrices[0].is_cuda else torch.float32
        self._squares = [self._empty(self._least**2) for _ in range(2)]
        self._following, *copy = [self._empty(max(x.numel() for x in matrices)) for _ in range(1 + matrices[0].is_cuda)]
        self._copy = copy[0] if copy else None

    def _empty(self, size: int) -> Tensor:
        return torch.empty(size, dtype=self._dtype, device=self._device)

    def of(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """For a matrix [n, m], n <= m: itself in the number format of the products, two squares [n, n], and another [n, m] with its strides."""
        n = len(x)
        gram, inner = (square[: n * n].view(n, n) for square in self._squares)
        if self._copy is not None:
            x = self._like(self._copy, x).copy_(x)
        return x, gram, inner, self._like(self._following, x)

    def _like(self, flat: Tensor, x: Tensor) -> Tensor:
        return flat[: x.numel()].as_strided(x.shape, x.stride())


def orthogonal(x: Tensor, space: Space) -> Tensor:
    """O of a matrix, of the same shape; the same bits for the same matrix. Uses the matrix for what it computes; O lies there or in `space`."""
    is_tall = x.shape[0] > x.shape[1]
    x, gram, inner, following = space.of(x.T if is_tall else x)  # the product of rows is the smaller one then
    x.div_(x.norm().clamp(min=_SMALL))
    for _ in range(STEPS):
        torch.mm(x, x.T, out=gram)
        torch.addmm(gram, gram, gram, beta=B, alpha=C, out=inner)
        torch.addmm(x, inner, x, beta=A, out=following)
        x, following = following, x
    return x.T if is_tall else x


def step(
    parameters: Sequence[Parameter], momenta: Sequence[Tensor], train: TrainSpec, rate: float, space: Space
) -> None:
    """One step of all these matrices by their gradients, at a learning rate. Changes parameters, momenta and gradients."""
    for parameter, momentum in zip(parameters, momenta, strict=True):
        gradient = parameter.grad
        assert gradient is not None
        momentum.lerp_(gradient, 1 - train.momentum)
        update = orthogonal(gradient.lerp_(momentum, train.momentum), space)
        parameter.mul_(1 - rate * train.weight_decay)
        parameter.add_(update, alpha=-LENGTH * math.sqrt(max(parameter.shape)) * rate)
