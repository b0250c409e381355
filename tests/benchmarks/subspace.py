"""The boundary of "Heterogeneous Low-Bandwidth Pre-Training of LLMs" (arXiv 2601.02360, sections 2.2 to 2.4), which the
product does not have (docs/adr/0066-anchors.md), as an arm of tests/benchmarks/arms.py.

U [D, K] is orthonormal and random, the same for all replicas of a seed; P(y) = y U U^T. The embedding is T_S + T_perp
with T_S = P(TE). Behind a cut

    X <- P(X - T_perp[ids]) + T_perp[ids]

and the gradient is that of this line, so K values of a token cross a cut each way; here they are fp32 and count as
bf16. A chain's inner steps change TE within the subspace only, full replicas train all of it, and after each outer step
TE is split again. Options of an arm, `s=K` and of Table 5:

    fixed       T_perp stays that of θ(0): no adaptation of the token embedding (5a)
    weights     o_proj and down_proj of a chain are projected onto the subspace after each inner step (5b)
    grassmann   U moves every GRASSMANN_ROUNDS rounds (5c)
    rowwise     AdamW's second moment is the mean over a row of the embedding, and over a column of o_proj and
                down_proj, so that steps of gradients within the subspace lie in it, too (5d)

The paper names the last two after Subspace Networks (arXiv 2506.01260) without equations; these are our reading. For
`grassmann`: M is the mean of G^T G over all gradients G at the cuts since the last time, and U becomes the orthonormal
part of U + (I - U U^T) M U / trace(M), a step of gradient descent on what is lost of the gradients.

Shapes: E elements, T tokens, V vocabulary, D width, K of the subspace.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from peer.corpus.text import CorpusReader
from protocol.run.manifest import Manifest
from tests.benchmarks.arms import ALL, EMBED, Arm, Params, Swarm, rows

GRASSMANN_ROUNDS = 4
"""The paper's 500 of 19,500 inner steps are 54 of 2,100."""
WRITERS = ("o_proj.weight", "down_proj.weight")


class Subspace(Swarm):
    """An arm with the option `s=K`. Parameters as in Swarm.

    basis: U [E, D, K]. perp: T_perp [E, V, D]. moment: M times the trained steps [E, D, D].
    """

    STATE = (*Swarm.STATE, "basis", "perp", "moment")

    def __init__(
        self,
        arm: Arm,
        made: Manifest,
        seeds: Sequence[int],
        device: torch.device,
        cuts: Sequence[int] | None = None,
        text: CorpusReader | None = None,
    ) -> None:
        super().__init__(arm, made, seeds, device, cuts, text)
        width = made.model.d_model
        drawn = [np.linalg.qr(np.random.default_rng(seed).standard_normal((width, arm.rank)))[0] for seed in seeds]
        each = torch.from_numpy(np.stack(drawn)).float().repeat_interleave(self.R, 0)
        self.basis = each.to(device)
        self.perp = self._outside(self.theta[EMBED])
        self.moment = torch.zeros(self.E, width, width, device=device)
        self._chain = self.is_chain[:, None, None] > 0

    def _inside(self, y_EnD: Tensor, of: slice = ALL) -> Tensor:
        """P of rows."""
        return (y_EnD @ self.basis[of]) @ self.basis[of].mT

    def _outside(self, y_EnD: Tensor) -> Tensor:
        return y_EnD - self._inside(y_EnD)

    def cut(self, p: Params, i: int, x: Tensor, at_ET: Tensor, of: slice) -> Tensor:
        fixed = rows(self.perp[of], at_ET)
        x = self._inside(x - fixed, of) + fixed
        if "grassmann" in self.arm.options and x.requires_grad:
            x.register_hook(self._met)
        return x

    def _met(self, g_ETD: Tensor) -> None:
        g_ETD = g_ETD.float()
        self.moment += (g_ETD.mT @ g_ETD) * self._chain

    def _gradient(self, name: str, g: Tensor) -> Tensor:
        return torch.where(self._chain, self._inside(g), g) if name == EMBED else g

    def adamw(self, name: str, g: Tensor, rate: float) -> None:
        x = self.parameters[name]
        confined = name == EMBED and self.arm.is_sparse
        before = x.clone() if confined else x
        super().adamw(name, g, rate)
        if confined:
            x.copy_(torch.where(self._chain, before + self._inside(x - before), x))
        elif "weights" in self.arm.options and name.endswith(WRITERS):
            x.copy_(torch.where(self._chain, self._inside(x.mT).mT, x))

    def _square(self, name: str, g: Tensor) -> Tensor:
        square = super()._square(name, g)
        if "rowwise" in self.arm.options and (name == EMBED or name.endswith(WRITERS)):
            return square.mean(2 if name == EMBED else 1, keepdim=True).expand_as(square)
        return square

    def step(self, ids_EBL: Tensor) -> None:
        super().step(ids_EBL)
        if not self.arm.is_sparse:  # each step ends with an outer one
            self._split(self.parameters[EMBED])

    @torch.no_grad()
    def begin_round(self) -> None:
        super().begin_round()
        self._split(self.begin[EMBED])

    @torch.no_grad()
    def _split(self, table_EVD: Tensor) -> None:
        if "fixed" not in self.arm.options:
            self.perp.copy_(self._outside(table_EVD))

    @torch.no_grad()
    def end_round(self) -> None:
        super().end_round()
        if "grassmann" in self.arm.options and self.steps % (GRASSMANN_ROUNDS * self.made.train.inner_steps) == 0:
            M = self._mean(self.moment).expand_as(self._by_seed(self.moment)).flatten(0, 1)
            M = M / M.diagonal(dim1=1, dim2=2).sum(1)[:, None, None].clamp(min=1e-30)
            self.basis.copy_(torch.linalg.qr(self.basis + self._outside((M @ self.basis).mT).mT)[0])
            self.moment.zero_()
        self._split(self.theta[EMBED])
