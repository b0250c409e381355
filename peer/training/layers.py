"""The layers that a decoder is made of, without initial values: nn.Linear would spend minutes on random ones."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Table(nn.Module):
    """A `weight` that has no values before it is loaded."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))


class Linear(Table):
    """x W^T."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., columns] -> [..., rows] of the weight."""
        return functional.linear(x, self.weight)


class Norm(Table):
    """RMSNorm over the last dimension."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__(width)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> the same."""
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Embedding(Table):
    """A row of the table for each id."""

    def forward(self, ids_BL: Tensor) -> Tensor:
        """[B, L] -> [B, L, D]."""
        return functional.embedding(ids_BL, self.weight)


def wide(x: Tensor) -> Tensor:
    """The same in fp32, if its number format is a smaller one."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def sent(ids: Tensor, device: torch.device) -> Tensor:
    """Token ids, wherever they are, on the device. Nothing waits for it: what is not pinned, and in one piece, a GPU fetches only when it has done all
    else."""
    if device.type == "cuda" and ids.device.type == "cpu":
        ids = ids.contiguous().pin_memory()
    return ids.to(device, non_blocking=True)
