"""The norms of a stage's gradients: what peer/chain/grad_norm.py makes the replica's one norm of."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from protocol.errors import LocalError

_PART = 1 << 18
"""Elements of a gradient whose norm is computed at a time on a CPU, where torch makes a copy of them in fp64."""
Held = Sequence[tuple[str, Tensor]]
"""Gradients, each with the shard to which it belongs."""


def launch(held: Held) -> list[tuple[str, Tensor]]:
    """The L2 norm [] of each gradient, or part of one, in fp64 where there is that, with its shard; nothing waits for the device."""
    kind = held[0][1].device.type if held else "cpu"
    if kind == "cuda":  # some kernels for all
        return list(zip([s for s, _ in held], torch._foreach_norm([g for _, g in held], 2, torch.float64), strict=True))
    if kind == "cpu":
        held = [(shard, part) for shard, gradient in held for part in gradient.flatten().split(_PART)]
    precision = torch.float64 if kind != "mps" else None
    return [(shard, torch.linalg.vector_norm(part, dtype=precision)) for shard, part in held]


def squares(norms: Held, shards: Sequence[str]) -> list[tuple[str, float]]:
    """Sum of the squares by shard, in the order of `shards`. Raises LocalError for one that is not finite."""
    sums = dict.fromkeys(shards, 0.0)
    values = torch.stack([norm for _, norm in norms]).tolist() if norms else []
    for (shard, _), norm in zip(norms, values, strict=True):
        sums[shard] += norm**2
    for shard, total in sums.items():
        if not math.isfinite(total):
            raise LocalError(f"training: the gradients of {shard} are not finite; the learning rate may be too high")
    return list(sums.items())
