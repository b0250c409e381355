"""The subspace S = col(U) of a compressed chain: its stage boundaries and its token embedding.

SparseLoCo with heterogeneous replicas, stage boundary (LLaMA: no positional term); U [d, k] orthonormal and fixed:

    forward    Z = (X - T_perp[ids]) U        receiver: X^ = Z U^T + T_perp[ids]
    backward   send G U                       receiver: (G U) U^T
    embedding  TE = T_S + T_perp, T_S = A U^T with A [V, k] trained and T_perp frozen within a round

That is autograd of X^ = (X - T_perp[ids]) U U^T + T_perp[ids]. Our choice where the paper leaves it open: A is the
parameter, so T_S stays in S exactly, whatever the optimizer does, and weight decay acts on T_S only. Splitting TE anew
at every round start is the paper's reprojection (R moves from T_S to T_perp).

Shapes: B rows, L positions, V vocabulary, D model width, K subspace width. k = 0 means no compression (no Boundary).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def split(te_VD: Tensor, u_DK: Tensor) -> tuple[Tensor, Tensor]:
    """The embedding as (A [V, K], T_perp [V, D]) with TE = A U^T + T_perp up to rounding."""
    a_VK = te_VD @ u_DK
    t_s_VD = a_VK @ u_DK.T
    return a_VK, torch.sub(te_VD, t_s_VD, out=t_s_VD)


class Boundary:
    """What both sides of a stage boundary know: U and T_perp. Works in the number format of its tensors."""

    def __init__(self, u_DK: Tensor, t_perp_VD: Tensor) -> None:
        self.u_DK = u_DK
        self.t_perp_VD = t_perp_VD

    @property
    def k(self) -> int:
        """Values per token and direction."""
        return self.u_DK.shape[1]

    def _perp(self, ids_BL: Tensor) -> Tensor:
        return functional.embedding(ids_BL, self.t_perp_VD)

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
