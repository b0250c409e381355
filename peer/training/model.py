"""A contiguous range of a LLaMA-style decoder. The whole model is the stage that has everything.

Parameter names are those of Hugging Face (protocol/run/layout.py), with global block numbers, so a stage's state is a
subset of the whole model's.

*The residual stream* x [B, L, D] is a token's W values, from the embedding or the stage before, and behind them the
D - W values of its row of `anchor`, which every stage has and trains. Blocks add to the first W only.

*Documents.* Where the model has a `document_end_id`, a token sees those of its own document only. Positions go on
across documents: RoPE turns a query and a key by their distance.

*The loss* is computed in slices of tokens: of the logits [T, V] only a slice exists at a time. A slice's gradient is
made right after its logits.

    logits = x W^T
    loss = mean over t of (logsumexp(logits_t) - logits_t[target_t])      d loss / d logits = (softmax - onehot) / T

Shapes: B rows, L positions, T tokens, V vocabulary, D model width, W residual width, N query heads, K heads of keys
and values, H head width.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from peer.training import compiled
from peer.training.update import Moved
from protocol.planning.memory import GPU_LOGITS, LOGITS
from protocol.run import layout
from protocol.run.layout import ModelSpec, RopeScaling


class Table(nn.Module):
    """A `weight` without initial values: nn.Linear would spend minutes on random ones."""

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


class Embedding(nn.Module):
    """`weight` [V, W], in the first stage, and `anchor` [V, D - W]: a row of both is a token's embedding."""

    def __init__(self, spec: ModelSpec, has_weight: bool) -> None:
        super().__init__()
        behind = spec.d_model - spec.written
        self.weight = nn.Parameter(torch.empty(spec.vocab_size, spec.written)) if has_weight else None
        self.anchor = nn.Parameter(torch.empty(spec.vocab_size, behind)) if behind else None

    def forward(self, ids_BL: Tensor, x_BLW: Tensor | None = None) -> Tensor:
        """[B, L, D] of the tokens; `x_BLW` takes the place of their rows of `weight`."""
        if x_BLW is None:
            assert self.weight is not None
            x_BLW = functional.embedding(ids_BL, self.weight)
        if self.anchor is None:
            return x_BLW
        return torch.cat((x_BLW, functional.embedding(ids_BL, self.anchor).to(x_BLW.dtype)), dim=-1)


def wide(x: Tensor) -> Tensor:
    """Returns x in fp32 or wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def to_device(ids: Tensor, device: torch.device) -> Tensor:
    """Token ids on the device. Does not wait: a GPU fetches other than pinned, contiguous memory only after all its
    work."""
    if device.type == "cuda" and ids.device.type == "cpu":
        ids = ids.contiguous().pin_memory()
    return ids.to(device, non_blocking=True)


def plus(x_BLD: Tensor, residual_BLW: Tensor) -> Tensor:
    """x with the residual added to its first W values."""
    w = residual_BLW.shape[-1]
    if w == x_BLD.shape[-1]:
        return x_BLD + residual_BLW
    if torch.compiler.is_compiling():  # it makes one pass of both, and keeps neither
        return x_BLD + functional.pad(residual_BLW, (0, x_BLD.shape[-1] - w))
    return torch.cat((x_BLD[..., :w] + residual_BLW, x_BLD[..., w:]), dim=-1)


Join = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Adds keys and values [B, K, L, H] to those of the tokens before. Returns all."""


def rope(spec: ModelSpec, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos, sin [context, H] of the "rotate half" convention: both halves carry the same angles."""
    rate = 1.0 / spec.rope_theta ** (torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim)
    scale = 1.0
    if spec.rope_scaling is not None:
        rate, scale = _scaled(spec.rope_scaling, spec.rope_theta, rate), _temperature(spec.rope_scaling)
    angle = torch.outer(torch.arange(spec.context, dtype=torch.float32), rate)
    angle = torch.cat((angle, angle), dim=-1)
    return (angle.cos() * scale).to(device), (angle.sin() * scale).to(device)


def _temperature(scaling: RopeScaling) -> float:
    """The factor of cos and sin."""
    return 0.1 * math.log(scaling.factor) + 1.0 if scaling.rope_type == "yarn" else 1.0


def _scaled(scaling: RopeScaling, theta: float, rate: Tensor) -> Tensor:
    """Scaled angles per position [H / 2]."""
    slow = rate / scaling.factor
    if scaling.rope_type == "linear":
        return slow
    original = scaling.original_max_position_embeddings
    if scaling.rope_type == "llama3":
        turns = original * rate / (2 * math.pi)  # in the original context
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = ((turns - low) / (high - low)).clamp(0, 1)
    else:  # yarn: the passage is linear in the place of the pair, and begins and ends at whole ones
        pairs, width = len(rate), 2 * len(rate)

        def place(turns: float) -> float:
            return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

        first = max(math.floor(place(scaling.beta_fast)), 0)
        last = min(math.ceil(place(scaling.beta_slow)), width - 1)
        last_or_more = last if last != first else first + 0.001
        kept = 1 - ((torch.arange(pairs, dtype=torch.float32) - first) / (last_or_more - first)).clamp(0, 1)
    return kept * rate + (1 - kept) * slow


def _rotate(x_BNLH: Tensor, cos_LH: Tensor, sin_LH: Tensor) -> Tensor:
    first, second = x_BNLH.chunk(2, dim=-1)
    return x_BNLH * cos_LH + torch.cat((-second, first), dim=-1) * sin_LH


def document_mask(spec: ModelSpec, ids_BL: Tensor, device: torch.device) -> Tensor | None:
    """Mask of attention [B, 1, L, L]: 0 for the keys that a query sees, else -inf; None where the model sees whole
    sequences, or no row has a token behind an end. In the number format of attention: every block would make, and keep,
    its own of booleans."""
    if spec.document_end_id < 0:
        return None
    ends_BL = ids_BL[:, :-1] == spec.document_end_id
    if ids_BL.device.type == "cpu" and not bool(ends_BL.any()):
        return None
    document_BL = to_device(functional.pad(ends_BL.cumsum(1), (1, 0)), device)
    sees_BLL = (document_BL[:, :, None] == document_BL[:, None, :]).tril_()
    kind = device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else torch.float32
    return torch.zeros(sees_BLL.shape, dtype=dtype, device=device).masked_fill_(~sees_BLL, -math.inf)[:, None]


class Attention(nn.Module):
    """Causal self-attention. Parameters have Hugging Face's names."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.width, self.shared = spec.head_dim, spec.key_value_heads < spec.n_heads
        self.groups = spec.n_heads // spec.key_value_heads
        self.q_proj = Linear(spec.d_model, spec.d_model)
        self.k_proj, self.v_proj = (Linear(spec.key_value_width, spec.d_model) for _ in range(2))
        self.o_proj = Linear(spec.written, spec.d_model)
        if spec.use_qk_norm:
            self.q_norm, self.k_norm = (Norm(spec.head_dim, spec.norm_eps) for _ in range(2))
        self.normalizes = spec.use_qk_norm

    def forward(
        self, x_BLD: Tensor, cos_LH: Tensor, sin_LH: Tensor, mask: Tensor | None = None, join: Join | None = None
    ) -> Tensor:
        """The residual [B, L, W] for x [B, L, D]. `mask` [B, 1, L, L] is added to the scores; None: a query sees all
        before it."""
        q_BLNH, k_BLKH, v_BLKH = (
            projection(x_BLD).unflatten(-1, (-1, self.width)) for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.normalizes:
            q_BLNH, k_BLKH = self.q_norm(q_BLNH), self.k_norm(k_BLKH)
        q_BNLH, k_BKLH, v_BKLH = (x.transpose(1, 2) for x in (q_BLNH, k_BLKH, v_BLKH))
        q_BNLH, k_BKLH = _rotate(q_BNLH, cos_LH, sin_LH), _rotate(k_BKLH, cos_LH, sin_LH)
        is_causal = mask is None
        if join is not None:
            is_causal = is_causal and x_BLD.shape[1] > 1  # a single token sees all
            k_BKLH, v_BKLH = join(k_BKLH, v_BKLH)
        grouped = self.shared
        if grouped and mask is not None and x_BLD.is_cuda:  # the kernels with masks have no shared heads
            k_BKLH, v_BKLH = (x.repeat_interleave(self.groups, dim=1) for x in (k_BKLH, v_BKLH))
            grouped = False
        options = {"enable_gqa": True} if grouped else {}
        out_BNLH = functional.scaled_dot_product_attention(
            q_BNLH, k_BKLH, v_BKLH, attn_mask=mask, is_causal=is_causal, **options
        )
        out_BLW: Tensor = self.o_proj(out_BNLH.transpose(1, 2).flatten(-2))
        return out_BLW


_LOGITS_AT_ONCE = {"cuda": GPU_LOGITS}
"""Logits at a time, by kind of device, if not LOGITS."""


def cross_entropy(x_TD: Tensor, weight_VD: Tensor, targets_T: Tensor) -> Tensor:
    """Mean cross-entropy [] fp32, nats per token. Products are in the number format of autocast where that is on."""
    trained = torch.is_grad_enabled()
    loss: Tensor = _CrossEntropy.apply(x_TD, weight_VD, targets_T, trained)  # type: ignore[no-untyped-call]
    return loss


def _slice_loss(logits_TV: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor]:
    """This slice's sum of losses, and its gradient with respect to the logits, in their number format."""
    log_TV, targets_T1 = functional.log_softmax(logits_TV.float(), 1), targets_T[:, None]
    loss = -log_TV.gather(1, targets_T1).sum()
    if logits_TV.is_cuda:  # the compiler makes one pass of this
        is_target_TV = torch.arange(log_TV.shape[1], device=log_TV.device) == targets_T1
        gradient_TV = log_TV.exp() - is_target_TV.float()
    else:  # here each operation is a pass, and in place it needs no memory
        gradient_TV = log_TV.exp_().scatter_add_(1, targets_T1, log_TV.new_full(targets_T1.shape, -1.0))
    return loss, gradient_TV.to(logits_TV.dtype)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, trained: bool) -> Tensor:
        kind, tokens = x_TD.device.type, len(x_TD)
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x_TD.dtype
        x, weight = x_TD.to(dtype), weight_VD.to(dtype)
        step = max(1, _LOGITS_AT_ONCE.get(kind, LOGITS) // len(weight))
        grad_x = torch.empty_like(x) if trained else None
        grad_weight = torch.zeros_like(weight_VD) if trained else None
        loss = torch.zeros((), device=x.device)
        part_of = compiled.where_it_pays(_slice_loss, x.device)
        with torch.autocast(kind, enabled=False):
            for at in range(0, tokens, step):
                part, targets = x[at : at + step], targets_T[at : at + step]
                lost, gradient = part_of(part @ weight.T, targets)
                loss += lost
                if grad_x is not None and grad_weight is not None:
                    torch.mm(gradient, weight, out=grad_x[at : at + step])
                    if dtype == grad_weight.dtype:
                        torch.addmm(grad_weight, gradient.T, part, out=grad_weight)
                    else:  # sums of slices are fp32
                        grad_weight += gradient.T @ part
        ctx.save_for_backward(grad_x, grad_weight)
        ctx.dtype, ctx.tokens = x_TD.dtype, tokens
        return loss / tokens

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:  # type: ignore[override]
        grad_x, grad_weight = ctx.saved_tensors
        scale = gradient / ctx.tokens
        return grad_x.to(ctx.dtype) * scale, grad_weight.mul_(scale), None, None


Theta = Mapping[str, Sequence[np.ndarray]]
"""Host values by shard: fp32 arrays in canonical order."""


def _shared(array: np.ndarray) -> Tensor:
    """The array as a tensor: without a copy where torch allows it."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


class Past:
    """Keys [B, N, L, H] and values of the tokens so far, by block, for a text that grows token by token. `length`:
    tokens so far."""

    def __init__(self) -> None:
        self.length = 0
        self._held: dict[int, tuple[Tensor, Tensor]] = {}

    def keep(self, count: int) -> None:
        """Forgets all but the last `count` tokens, which begin a document. Positions go on."""
        self._held = {i: (k[:, :, -count:], v[:, :, -count:]) for i, (k, v) in self._held.items()} if count else {}

    def joined(self, block: int, k_BNLH: Tensor, v_BNLH: Tensor) -> tuple[Tensor, Tensor]:
        """Appends to the keys and values of a block, and returns all."""
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
        self.down_proj = Linear(spec.written, spec.d_ff)

    def forward(self, x_BLD: Tensor) -> Tensor:
        """The residual [B, L, W]."""
        out_BLW: Tensor = self.down_proj(functional.silu(self.gate_proj(x_BLD)) * self.up_proj(x_BLD))
        return out_BLW


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
        x_BLD = plus(x_BLD, self.self_attn(self.input_layernorm(x_BLD), cos_LH, sin_LH, mask, join))
        return plus(x_BLD, self.mlp(self.post_attention_layernorm(x_BLD))).to(form)


class Stage(nn.Module):
    """Blocks `first_block` up to, not including, `last_block`, with or without the embedding and the head. Parameters
    have no values before `load`.

    form: the number format of x before and after the blocks.
    empty: parameters have no memory (peer/training/sharded.py).
    """

    def __init__(
        self,
        spec: ModelSpec,
        first_block: int,
        last_block: int,
        has_embed: bool,
        has_head: bool,
        *,
        device: torch.device | str = "cpu",
        form: torch.dtype = torch.float32,
        empty: bool = False,
    ) -> None:
        super().__init__()
        self.spec, self.form = spec, form
        self.shards: tuple[str, ...] = (
            *(("embed",) if has_embed else ()),
            *(f"block.{i}" for i in range(first_block, last_block)),
            *(("head",) if has_head else ()),
            *(("anchor",) if spec.residual_width else ()),
        )
        self.has_embed, self.has_head = has_embed, has_head
        self.model = nn.Module()
        with torch.device("meta" if empty else device):
            self.model.embed_tokens = Embedding(spec, has_embed)
            self.model.layers = nn.ModuleDict({str(i): Block(spec) for i in range(first_block, last_block)})
            if has_head:
                self.model.norm = Norm(spec.d_model, spec.norm_eps)
                if not spec.tie_word_embeddings:
                    self.lm_head = Linear(spec.vocab_size, spec.d_model)
        self._cos, self._sin = rope(spec, torch.device(device))

    @torch.no_grad()
    def load(self, theta: Theta, copy: Callable[[list[tuple[Tensor, np.ndarray]]], None] | None = None) -> None:
        """Takes this stage's shards from `theta`, whose lists may have more arrays behind. Raises KeyError.

        copy: writes arrays into parameters; None: one after the other.
        """
        held = dict(self.named_parameters())
        pairs = [
            (held[name], array)
            for shard in self.shards
            for (name, _), array in zip(layout.tensors(self.spec, shard), theta[shard], strict=False)
        ]
        if copy is not None:
            copy(pairs)
        else:
            for parameter, array in pairs:
                parameter.copy_(_shared(array))

    @property
    def device(self) -> torch.device:
        return self._cos.device

    def parameters_of(self, shard: str) -> dict[str, nn.Parameter]:
        """The trained parameters of a held shard by name, in canonical order."""
        held = dict(self.named_parameters())
        return {name: held[name] for name, _ in layout.tensors(self.spec, shard)}

    def make_gradients(self) -> list[Tensor]:
        """The gradient sums of all parameters in their order; zeros where there is none yet."""
        for parameter in self.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return [p.grad for p in self.parameters() if p.grad is not None]

    def moved(self, shard: str, theta: Theta) -> list[Moved]:
        """For each tensor in canonical order `theta`, as loaded, and this stage's values, which the next step
        changes."""
        held = {name: parameter.detach() for name, parameter in self.named_parameters()}
        names = [name for name, _ in layout.tensors(self.spec, shard)]
        return [(array, held[name]) for name, array in zip(names, theta[shard], strict=False)]

    def displacement(self, shard: str, theta: Theta) -> list[tuple[np.ndarray, np.ndarray]]:
        """`moved` on the host: (a, b) for each tensor, fp32, with the difference a - b."""
        return [(a, b.cpu().numpy()) for a, b in self.moved(shard, theta)]

    def embed(self, ids_BL: Tensor, wire_BLW: Tensor | None = None) -> Tensor:
        """x [B, L, D] before the blocks. The ids are best on the host; `wire_BLW`: from the stage before, None in the
        first one."""
        if wire_BLW is not None and not self.spec.residual_width:
            return wire_BLW
        x_BLD: Tensor = self.model.embed_tokens(to_device(ids_BL, self.device), wire_BLW)  # type: ignore[operator]
        return x_BLD.to(self.form)

    def outward(self, x_BLD: Tensor) -> Tensor:
        """The values [B, L, W] of the blocks' output for the next stage."""
        return x_BLD[..., : self.spec.written]

    def mask(self, ids_BL: Tensor) -> Tensor | None:
        """The mask for `block`: which tokens see each other. The same on every stage."""
        return document_mask(self.spec, ids_BL, self.device)

    def block(self, index: int, x_BLD: Tensor, mask: Tensor | None = None) -> Tensor:
        """Block `index` (global number) applied to x."""
        length = x_BLD.shape[1]
        layer, angles = self.model.layers[str(index)], (self._cos[:length], self._sin[:length])  # type: ignore[index]
        if not torch.is_grad_enabled():  # other shapes, for which compiling does not pay
            return Block.forward(layer, x_BLD, *angles, mask)  # type: ignore[arg-type]
        forward = compiled.where_it_pays(Block.forward, x_BLD.device)
        return forward(layer, x_BLD, *angles, mask)  # type: ignore[arg-type]

    def forward(self, ids_BL: Tensor, wire_BLW: Tensor | None = None) -> Tensor:
        """x [B, L, D] after this stage's blocks. `wire_BLW`: from the stage before; None in the first one."""
        x_BLD, mask = self.embed(ids_BL, wire_BLW), self.mask(ids_BL)
        for shard in self.shards:
            if shard.startswith("block."):
                x_BLD = self.block(layout.block_index(shard), x_BLD, mask)
        return x_BLD

    @torch.no_grad()
    def further(self, ids_BL: Tensor, past: Past) -> Tensor:
        """x [B, L, D] of the tokens after `past`, which are added to it: as in `forward` of all. L is 1 unless `past`
        is empty, B is 1. Needs the whole model, uncompressed."""
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
        """The matrix of the logits: its own, or the embedding's."""
        head = self.model.embed_tokens if self.spec.tie_word_embeddings else self.lm_head
        weight: Tensor = head.weight  # type: ignore[assignment, union-attr]
        return weight

    def logits(self, x_BLD: Tensor) -> Tensor:
        """[B, L, V] from the last block's output."""
        return functional.linear(self.model.norm(x_BLD), self.head_VD)  # type: ignore[operator]

    def loss(self, x_BLD: Tensor, targets_BL: Tensor) -> Tensor:
        """Mean cross-entropy, nats per token."""
        x_TD = self.model.norm(wide(x_BLD)).flatten(0, 1)  # type: ignore[operator]
        targets_T = to_device(targets_BL, x_BLD.device).flatten()
        return cross_entropy(x_TD, self.head_VD, targets_T)
