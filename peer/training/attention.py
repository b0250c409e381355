"""Attention of one block: RoPE and its scaling, heads that share keys and values, normalized queries and keys, documents that do not see
each other.

*Documents.* Where the model has a `document_end_id`, a token sees those of its own document only: the tokens behind the last end before
it. Positions go on across documents. Packed training with transformers counts them anew in each document (`position_ids`), which
is the same: RoPE turns a query and a key by their distance, and that is the same either way. The mask follows from the token ids, which every
stage of a chain has, so no stage sends it.

Shapes: B rows, L positions, D model width, N query heads, K heads of keys and values, H head width.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from peer.training.layers import Linear, Norm, sent
from protocol.run.layout import ModelSpec, RopeScaling

Join = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Adds keys and values [B, K, L, H] to those of the tokens before, and returns all."""


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
    """What cos and sin are multiplied by."""
    return 0.1 * math.log(scaling.factor) + 1.0 if scaling.rope_type == "yarn" else 1.0


def _scaled(scaling: RopeScaling, theta: float, rate: Tensor) -> Tensor:
    """Angles a position [H / 2], of those without scaling."""
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
    """Which keys each query sees [B, 1, L, L]: 0, or -inf for those that it does not; None where the model sees whole sequences, or no row has
    a token behind an end. In the number format of attention: of booleans every block would make, and keep, such a mask of its own."""
    if spec.document_end_id < 0:
        return None
    ends_BL = ids_BL[:, :-1] == spec.document_end_id
    if ids_BL.device.type == "cpu" and not bool(ends_BL.any()):
        return None
    document_BL = sent(functional.pad(ends_BL.cumsum(1), (1, 0)), device)
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
        self.o_proj = Linear(spec.d_model, spec.d_model)
        if spec.use_qk_norm:
            self.q_norm, self.k_norm = (Norm(spec.head_dim, spec.norm_eps) for _ in range(2))
        self.normalizes = spec.use_qk_norm

    def forward(
        self, x_BLD: Tensor, cos_LH: Tensor, sin_LH: Tensor, mask: Tensor | None = None, join: Join | None = None
    ) -> Tensor:
        """What is added to x [B, L, D]. `mask` [B, 1, L, L]: what is added to scores, where a query does not see all before it."""
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
        if grouped and mask is not None and x_BLD.is_cuda:  # what takes a mask there takes no shared heads
            k_BKLH, v_BKLH = (x.repeat_interleave(self.groups, dim=1) for x in (k_BKLH, v_BKLH))
            grouped = False
        options = {"enable_gqa": True} if grouped else {}
        out_BNLH = functional.scaled_dot_product_attention(
            q_BNLH, k_BKLH, v_BKLH, attn_mask=mask, is_causal=is_causal, **options
        )
        out_BLD: Tensor = self.o_proj(out_BNLH.transpose(1, 2).flatten(-2))
        return out_BLD
