"""The subspace S = col(U) of a compressed chain: its stage boundaries and its token embedding.

SparseLoCo with heterogeneous replicas, stage boundary (LLaMA: no positional term); U [d, k] orthonormal and fixed:

    forward    Z = (X - T_perp[ids]) U        receiver: X^ = Z U^T + T_perp[ids]
    backward   send G U                       receiver: (G U) U^T
    embedding  TE = T_S + T_perp, T_S = A U^T with A [V, k] trained and T_perp frozen within a round

Of T_perp the rows of a micro-batch are made when they are asked for, out of the rows of TE: the table stays where it is, which may be
a file, and of a table of gigabytes only what is read needs memory.

That is autograd of X^ = (X - T_perp[ids]) U U^T + T_perp[ids]. Our choice where the paper leaves it open: A is the
parameter, so T_S stays in S exactly, whatever the optimizer does, and weight decay acts on T_S only. Splitting TE anew
at every round start is the paper's reprojection (R moves from T_S to T_perp).

Shapes: B rows, L positions, V vocabulary, D model width, K subspace width. k = 0 means no compression (no Boundary).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from protocol.codec import subspace

ROWS = 1 << 12
"""Of the embedding that are worked on at a time."""


def basis(seed: bytes, d: int, k: int, threads: int) -> np.ndarray:
    """U [D, K] (protocol/codec/subspace.py), on so many threads."""
    with ThreadPoolExecutor(threads, "basis") as pool:
        return subspace.basis(seed, d, k, pool.map)


def coordinates(te_VD: Tensor, u_DK: Tensor) -> Tensor:
    """A [V, K] of TE = A U^T + T_perp, where U is; some rows at a time, so that no more of TE than these is on U's device."""
    a_VK = u_DK.new_empty(te_VD.shape[0], u_DK.shape[1])
    for te_BD, a_BK in zip(te_VD.split(ROWS), a_VK.split(ROWS), strict=True):
        torch.mm(te_BD.to(u_DK.device), u_DK, out=a_BK)
    return a_VK


class Boundary:
    """What both sides of a stage boundary know: U, and T_perp by TE [V, D], which may lie in host memory or in a file. Works in the
    number format of its tensors."""

    def __init__(self, u_DK: Tensor, te_VD: Tensor) -> None:
        self.u_DK = u_DK
        self.te_VD = te_VD
        self._made: tuple[Tensor, Tensor] | None = (
            None  # the ids that came last, and T_perp[ids]: both ends of a stage ask for them
        )

    @property
    def k(self) -> int:
        """Values per token and direction."""
        return self.u_DK.shape[1]

    @torch.no_grad()
    def _perp(self, ids_BL: Tensor) -> Tensor:
        """T_perp[ids] [B, L, D]; the same bits for the same ids."""
        if self._made is not None and torch.equal(self._made[0], ids_BL):
            return self._made[1]
        self._made = None
        te_BLD = functional.embedding(ids_BL.to(self.te_VD.device), self.te_VD).to(self.u_DK.device)
        t_s_BLD = te_BLD @ self.u_DK @ self.u_DK.T
        self._made = ids_BL, torch.sub(te_BLD, t_s_BLD, out=t_s_BLD)
        return self._made[1]

    def compress(self, x_BLD: Tensor, ids_BL: Tensor) -> Tensor:
        """Z [B, L, K] = (X - T_perp[ids]) U."""
        return (x_BLD - self._perp(ids_BL)) @ self.u_DK

    def expand(self, z_BLK: Tensor, ids_BL: Tensor) -> Tensor:
        """X^ [B, L, D] = Z U^T + T_perp[ids]."""
        return z_BLK @ self.u_DK.T + self._perp(ids_BL)

    def compress_grad(self, g_BLD: Tensor) -> Tensor:
        """G U [B, L, K]."""
        return g_BLD @ self.u_DK

    def expand_grad(self, gz_BLK: Tensor) -> Tensor:
        """(G U) U^T [B, L, D]."""
        return gz_BLK @ self.u_DK.T

    def project(self, x_BLD: Tensor, ids_BL: Tensor) -> Tensor:
        """What the far side sees; differentiable: inserted into a whole model, it gives the oracle of a chain."""
        return self.expand(self.compress(x_BLD, ids_BL), ids_BL)
