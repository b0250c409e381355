"""A contiguous range of a LLaMA-style decoder. The whole model is the stage that has everything.

Parameter names are those of Hugging Face (protocol/run/layout.py), with global block numbers, so a stage's state is a subset of the
whole model's. The one exception: the first stage of a compressed chain trains `model.embed_tokens.coordinates`
(A [V, K], see subspace.py) in place of `model.embed_tokens.weight`.

Shapes: B rows, L positions, V vocabulary, D model width, N heads, H head width, K subspace width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from peer.training import attention, compiled, cross_entropy
from peer.training.attention import Attention, Join
from peer.training.layers import Embedding, Linear, Norm, sent, wide
from peer.training.subspace import Boundary, coordinates, t_perp
from peer.training.update import Moved, WithinSubspace
from protocol.run import layout
from protocol.run.layout import ModelSpec

Theta = Mapping[str, Sequence[np.ndarray]]
"""Host values by shard: fp32 arrays in canonical order."""


def _shared(array: np.ndarray) -> Tensor:
    """The array as a tensor: without a copy where torch allows it."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


class _Coordinates(nn.Module):
    """A [V, K]: the trained part of a compressed chain's embedding."""

    def __init__(self, vocab_size: int, k: int) -> None:
        super().__init__()
        self.coordinates = nn.Parameter(torch.empty(vocab_size, k))


class Past:
    """The keys [B, N, L, H] and values of the tokens so far, by block, so that a text which grows at its end is computed once. It begins
    empty; later each pass brings one token. `length`: tokens so far."""

    def __init__(self) -> None:
        self.length = 0
        self._held: dict[int, tuple[Tensor, Tensor]] = {}

    def keep(self, count: int) -> None:
        """Forgets all but the last `count` tokens: those before are of another document. Positions go on."""
        self._held = {i: (k[:, :, -count:], v[:, :, -count:]) for i, (k, v) in self._held.items()} if count else {}

    def joined(self, block: int, k_BNLH: Tensor, v_BNLH: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values of a block, with these at the end."""
        if block in self._held:
            k_before, v_before = self._held[block]
            k_BNLH, v_BNLH = torch.cat((k_before, k_BNLH), dim=2), torch.cat((v_before, v_BNLH), dim=2)
        self._held[block] = k_BNLH, v_BNLH
        return k_BNLH, v_BNLH


class _FeedForward(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.gate_proj = Linear(spec.d_ff, spec.d_model)
        self.up_proj = Linear(spec.d_ff, spec.d_model)
        self.down_proj = Linear(spec.d_model, spec.d_ff)

    def forward(self, x_BLD: Tensor) -> Tensor:
        out_BLD: Tensor = self.down_proj(functional.silu(self.gate_proj(x_BLD)) * self.up_proj(x_BLD))
        return out_BLD


class Block(nn.Module):
    """One block of the decoder."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.input_layernorm = Norm(spec.d_model, spec.norm_eps)
        self.self_attn = Attention(spec)
        self.post_attention_layernorm = Norm(spec.d_model, spec.norm_eps)
        self.mlp = _FeedForward(spec)

    def forward(
        self, x_BLD: Tensor, cos_LH: Tensor, sin_LH: Tensor, mask: Tensor | None = None, join: Join | None = None
    ) -> Tensor:
        """X [B, L, D] -> the same, in the same number format; the sums within are fp32 at least."""
        form, x_BLD = x_BLD.dtype, wide(x_BLD)
        x_BLD = x_BLD + self.self_attn(self.input_layernorm(x_BLD), cos_LH, sin_LH, mask, join)
        out_BLD: Tensor = x_BLD + self.mlp(self.post_attention_layernorm(x_BLD))
        return out_BLD.to(form)


class Stage(nn.Module):
    """Blocks `first_block` up to, not including, `last_block`, with or without the embedding and the head.

    `u_DK` (orthonormal columns) makes it a member of a compressed chain; None: no compression. The parameters have no
    values before `load`. `form`: the number format of x before and after its blocks.
    """

    def __init__(
        self,
        spec: ModelSpec,
        first_block: int,
        last_block: int,
        has_embed: bool,
        has_head: bool,
        *,
        u_DK: Tensor | None = None,
        device: torch.device | str = "cpu",
        form: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.spec, self.form = spec, form
        self.shards: tuple[str, ...] = (
            *(("embed",) if has_embed else ()),
            *(f"block.{i}" for i in range(first_block, last_block)),
            *(("head",) if has_head else ()),
        )
        self.has_embed, self.has_head = has_embed, has_head
        self.boundary: Boundary | None = None
        self._u_DK = None if u_DK is None else u_DK.to(device)
        self._a0_VK: Tensor | None = None
        self.model = nn.Module()
        if has_embed:
            V = spec.vocab_size
            self.model.embed_tokens = Embedding(V, spec.d_model) if u_DK is None else _Coordinates(V, u_DK.shape[1])
        self.model.layers = nn.ModuleDict({str(i): Block(spec) for i in range(first_block, last_block)})
        if has_head:
            self.model.norm = Norm(spec.d_model, spec.norm_eps)
            if not spec.tie_word_embeddings:
                self.lm_head = Linear(spec.vocab_size, spec.d_model)
        self.to(device)
        self._cos, self._sin = attention.rope(spec, torch.device(device))

    @torch.no_grad()
    def load(self, theta: Theta, copy: Callable[[list[tuple[Tensor, np.ndarray]]], None] | None = None) -> None:
        """Takes this stage's shards from `theta`. In a compressed chain `embed` may not be copied, but read until the next time: it must
        not change. `copy` writes arrays into parameters, where the device has a better way than one after the other. Raises KeyError."""
        held = dict(self.named_parameters())
        if self._u_DK is not None:
            te_VD = _shared(theta["embed"][0])
            self.boundary = Boundary(self._u_DK, te_VD, t_perp(te_VD, self._u_DK, self.form), self.form)
            if self.has_embed:
                self._a0_VK = coordinates(te_VD, self._u_DK)
                held["model.embed_tokens.coordinates"].copy_(self._a0_VK)
        pairs: list[tuple[Tensor, np.ndarray]] = []
        for shard in self.shards:
            for (name, _), array in zip(layout.tensors(self.spec, shard), theta[shard], strict=True):
                if name in held:
                    pairs.append((held[name], array))
        if copy is not None:
            copy(pairs)
        else:
            for parameter, array in pairs:
                parameter.copy_(_shared(array))

    def moved(self, shard: str, theta: Theta) -> list[Moved]:
        """theta - this stage's values for each tensor in canonical order, with the values where they are: they change with the next
        step. `theta` is what was loaded. A compressed chain's embedding moves within S only: (A0 - A) U^T."""
        held = {name: parameter.detach() for name, parameter in self.named_parameters()}
        if shard == "embed" and self._u_DK is not None and self._a0_VK is not None:
            return [(None, WithinSubspace(self._a0_VK, held["model.embed_tokens.coordinates"], self._u_DK))]
        return [
            (array, held[name]) for (name, _), array in zip(layout.tensors(self.spec, shard), theta[shard], strict=True)
        ]

    def displacement(self, shard: str, theta: Theta) -> list[tuple[np.ndarray, np.ndarray | None]]:
        """The same on the host: (a, b) for each tensor, fp32, of which the difference is a - b, or a where b is None."""
        found: list[tuple[np.ndarray, np.ndarray | None]] = []
        for a, b in self.moved(shard, theta):
            if isinstance(b, WithinSubspace):
                found.append((np.ascontiguousarray(b.rows(0, len(b.a_VS)).cpu().numpy()), None))
            else:
                assert a is not None
                found.append((a, b.cpu().numpy()))
        return found

    def embed(self, ids_BL: Tensor) -> Tensor:
        """Token embeddings [B, L, D]. The ids may be on the host: there they are needed, too."""
        table, there_BL = self.model.embed_tokens, sent(ids_BL, self._cos.device)
        if isinstance(table, _Coordinates):
            assert self.boundary is not None, "load comes first"
            return self.boundary.expand(functional.embedding(there_BL, table.coordinates), ids_BL)
        x_BLD: Tensor = table(there_BL)  # type: ignore[operator]
        return x_BLD

    def mask(self, ids_BL: Tensor) -> Tensor | None:
        """What `block` has to know of these ids: which tokens see each other (peer/training/attention.py). The same on every stage."""
        return attention.document_mask(self.spec, ids_BL, self._cos.device)

    def block(self, index: int, x_BLD: Tensor, mask: Tensor | None = None) -> Tensor:
        """Block `index` (global number) applied to x."""
        length = x_BLD.shape[1]
        layer, angles = self.model.layers[str(index)], (self._cos[:length], self._sin[:length])  # type: ignore[index]
        if not torch.is_grad_enabled():  # evaluation has other shapes: to compile for them does not pay
            return Block.forward(layer, x_BLD, *angles, mask)  # type: ignore[arg-type]
        return compiled.where_it_pays(Block.forward, x_BLD.device)(layer, x_BLD, *angles, mask)  # type: ignore[arg-type]

    def forward(self, ids_BL: Tensor, x_BLD: Tensor | None = None) -> Tensor:
        """x [B, L, D] after this stage's blocks. `x_BLD` is what the previous stage made; None for the first stage."""
        if x_BLD is None:
            x_BLD = self.embed(ids_BL)
        mask = self.mask(ids_BL)
        for shard in self.shards:
            if shard.startswith("block."):
                x_BLD = self.block(layout.block_index(shard), x_BLD, mask)
        return x_BLD

    @torch.no_grad()
    def further(self, ids_BL: Tensor, past: Past) -> Tensor:
        """x [B, L, D] of the tokens that come after `past`, which has them then: as `forward` of all of them. L is 1 unless `past` is
        empty, B is 1. Needs the whole model, uncompressed."""
        assert ids_BL.shape[1] == 1 or not past.length
        end = past.length + ids_BL.shape[1]
        cos_LH, sin_LH = self._cos[past.length : end], self._sin[past.length : end]
        x_BLD, mask = self.embed(ids_BL), self.mask(ids_BL)
        for index in range(self.spec.n_layers):
            layer: Block = self.model.layers[str(index)]  # type: ignore[index, assignment]
            x_BLD = layer(x_BLD, cos_LH, sin_LH, mask, functools.partial(past.joined, index))
        past.length = end
        if (end_id := self.spec.document_end_id) >= 0 and end_id in (ids := ids_BL[0].tolist()):
            past.keep(ids[::-1].index(end_id))
        return x_BLD

    @property
    def head_VD(self) -> Tensor:
        """What makes logits: a matrix of its own, or the embedding's."""
        weight: Tensor = self.model.embed_tokens.weight if self.spec.tie_word_embeddings else self.lm_head.weight  # type: ignore[assignment, union-attr]
        return weight

    def logits(self, x_BLD: Tensor) -> Tensor:
        """[B, L, V] from what the last block made."""
        return functional.linear(self.model.norm(x_BLD), self.head_VD)  # type: ignore[operator]

    def loss(self, x_BLD: Tensor, targets_BL: Tensor) -> Tensor:
        """Mean cross-entropy, nats per token."""
        x_TD = self.model.norm(wide(x_BLD)).flatten(0, 1)  # type: ignore[operator]
        targets_T = sent(targets_BL, x_BLD.device).flatten()
        return cross_entropy.mean(x_TD, self.head_VD, targets_T)
