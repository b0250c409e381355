"""The subspace S = col(U) of a compressed chain: its stage boundaries and its token embedding.

SparseLoCo with heterogeneous replicas, stage boundary (LLaMA: no positional term); U [d, k] orthonormal and fixed:

    forward    Z = (X - T_perp[ids]) U = X U  receiver: X^ = Z U^T + T_perp[ids]
    backward   send G U                       receiver: (G U) U^T
    embedding  TE = T_S + T_perp, T_S = A U^T with A [V, k] trained and T_perp frozen within a round

T_perp is orthogonal to S, T_perp U = 0, so the sender does not need it. The receiver does not make it either, but
computes

    X^ = TE[ids] + (Z - (TE U)[ids]) U^T

from the rows of TE for a micro-batch's tokens, so the table may be a file of gigabytes. A device with much free memory
keeps T_perp itself (`t_perp`). A is the parameter, so T_S stays in S with any optimizer, and weight decay acts on T_S
only. Splitting TE again at every round start is the paper's reprojection.

Shapes: B rows, L positions, V vocabulary, D model width, K subspace width, N different tokens of a micro-batch. k = 0:
no compression.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from protocol.codec import subspace

ROWS = 1 << 12
_T_PERP_SHARE = 0.05
"""Of a device's free memory that T_perp may take."""


def to_device(ids: Tensor, device: torch.device) -> Tensor:
    """Token ids on the device. Does not wait: a GPU fetches other than pinned, contiguous memory only after all its
    work."""
    if device.type == "cuda" and ids.device.type == "cpu":
        ids = ids.contiguous().pin_memory()
    return ids.to(device, non_blocking=True)


def basis(seed: bytes, d: int, k: int, threads: int) -> np.ndarray:
    """U [D, K] (protocol/codec/subspace.py)."""
    with ThreadPoolExecutor(threads, "basis") as pool:
        return subspace.basis(seed, d, k, pool.map)


def coordinates(te_VD: Tensor, u_DK: Tensor) -> Tensor:
    """A [V, K] of TE = A U^T + T_perp on U's device, by rows of TE."""
    a_VK = u_DK.new_empty(te_VD.shape[0], u_DK.shape[1])
    for te_BD, a_BK in zip(te_VD.split(ROWS), a_VK.split(ROWS), strict=True):
        torch.mm(te_BD.to(u_DK.device), u_DK, out=a_BK)
    return a_VK


def t_perp(te_VD: Tensor, u_DK: Tensor, form: torch.dtype) -> Tensor | None:
    """T_perp [V, D] = TE - TE U U^T in the number format `form` on U's device; None without much free memory there."""
    size = te_VD.numel() * form.itemsize
    if u_DK.device.type != "cuda" or size > _T_PERP_SHARE * torch.cuda.mem_get_info(u_DK.device)[0]:
        return None
    return without_subspace(te_VD, u_DK, form)


def without_subspace(te_VD: Tensor, u_DK: Tensor, form: torch.dtype) -> Tensor:
    """T_perp [V, D] on U's device; computed in fp64, since it serves a whole round."""
    found_VD = torch.empty(te_VD.shape, dtype=form, device=u_DK.device)
    u64_DK = u_DK.double()
    for te_BD, found_BD in zip(te_VD.split(ROWS), found_VD.split(ROWS), strict=True):
        te64_BD = te_BD.to(u_DK.device).double()
        found_BD.copy_(te64_BD - te64_BD @ u64_DK @ u64_DK.T)
    return found_VD


class Boundary:
    """The compression at a stage boundary, for both sides.

    te_VD: the embedding, on U's device, in host memory or in a file.
    form: the number format of X, X^, T_perp and products, except those of TE, which are in its own; default: U's.
    """

    def __init__(
        self, u_DK: Tensor, te_VD: Tensor, t_perp_VD: Tensor | None = None, form: torch.dtype | None = None
    ) -> None:
        self.u_DK = u_DK
        self.form = form or u_DK.dtype
        self._products_DK = u_DK.to(self.form)
        self.te_VD = te_VD
        self._t_perp_VD = t_perp_VD
        self._expected: tuple[Tensor, Tensor, Tensor] | None = None

    @property
    def k(self) -> int:
        return self.u_DK.shape[1]

    @torch.no_grad()
    def expect(self, ids_BL: Tensor) -> None:
        """Sends the rows of TE for the next `expand` while the device is busy."""
        if self.u_DK.device.type != "cpu" and self._t_perp_VD is None:
            self._expected = ids_BL, *self.rows(ids_BL)

    def rows(self, ids_BL: Tensor) -> tuple[Tensor, Tensor]:
        """TE [N, D] of the different tokens on U's device, and the token of each position [B, L]. The ids are on the
        host."""
        device = self.u_DK.device
        seen_V = torch.zeros(len(self.te_VD), dtype=torch.bool)
        seen_V[ids_BL.flatten()] = True
        tokens_N, which_BL = seen_V.nonzero()[:, 0], (seen_V.cumsum(0) - 1)[ids_BL]
        if device.type == "cuda":  # it copies from pinned memory beside its other work
            which_BL = which_BL.pin_memory()
        te_ND = torch.empty(
            len(tokens_N), self.te_VD.shape[1], dtype=self.te_VD.dtype, pin_memory=device.type == "cuda"
        )
        torch.index_select(self.te_VD, 0, tokens_N, out=te_ND)
        return te_ND.to(device, non_blocking=True), which_BL.to(device, non_blocking=True)

    @torch.no_grad()
    def _rows(self, ids_BL: Tensor) -> tuple[Tensor, Tensor]:
        """`rows`, which may have been sent by `expect`."""
        if self._expected is not None and _same(self._expected[0], ids_BL):
            _, te_ND, which_BL = self._expected
            self._expected = None
            return te_ND, which_BL
        return self.rows(ids_BL.cpu())  # a forward may be computed again before the expected one

    def compress(self, x_BLD: Tensor) -> Tensor:
        """Z [B, L, K] = X U."""
        return x_BLD.to(self.form) @ self._products_DK

    def expand(self, z_BLK: Tensor, ids_BL: Tensor, into: Tensor | None = None) -> Tensor:
        """X^ [B, L, D] = Z U^T + T_perp[ids], or without T_perp TE[ids] + (Z - (TE U)[ids]) U^T. `into`: memory for X^,
        without a gradient; None: new memory."""
        with torch.autocast(self.u_DK.device.type, enabled=False):  # TE is not to lose bits
            if self._t_perp_VD is not None:
                table_ND, which_BL, u_DK = self._t_perp_VD, to_device(ids_BL, self.u_DK.device), self._products_DK
            else:
                (table_ND, which_BL), u_DK = self._rows(ids_BL), self.u_DK
                z_BLK = z_BLK - functional.embedding(which_BL, table_ND @ u_DK)
            if into is None or into.dtype != table_ND.dtype:
                x_TD = functional.embedding(which_BL.flatten(), table_ND)
            else:
                x_TD = torch.index_select(table_ND, 0, which_BL.flatten(), out=into.flatten(0, 1))
            x_BLD = x_TD.addmm_(z_BLK.flatten(0, 1).to(x_TD.dtype), u_DK.T).unflatten(0, which_BL.shape)
            return x_BLD.to(self.form) if into is None or into.dtype == x_BLD.dtype else into.copy_(x_BLD)

    def compress_grad(self, g_BLD: Tensor) -> Tensor:
        """G U [B, L, K]."""
        return g_BLD.to(self.form) @ self._products_DK

    def expand_grad(self, gz_BLK: Tensor, into: Tensor | None = None) -> Tensor:
        """(G U) U^T [B, L, D], in new memory or in `into`."""
        return torch.matmul(gz_BLK.to(self.form), self._products_DK.T, out=into)

    def project(self, x_BLD: Tensor, ids_BL: Tensor) -> Tensor:
        """X^ at the other side, differentiable: in a whole model it gives the oracle of a chain."""
        return self.expand(self.compress(x_BLD), ids_BL)


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether they are one view of one living tensor; to compare values would wait for the device."""
    return (a.data_ptr(), a.shape, a.stride()) == (b.data_ptr(), b.shape, b.stride())
