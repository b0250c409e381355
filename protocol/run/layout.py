"""What a model is made of: its shards, the tensors of each shard, and the digest of a whole state.

Tensor names are those of Hugging Face's LlamaForCausalLM, one to one. A shard's host value is a list of C-contiguous
fp32 arrays in the order that `tensors` gives. Shape letters: V vocabulary, d model width, F feed-forward width.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from protocol.codec import blob_hash

MAX_SIZE = 1 << 24
"""Of every size of a model, so that a stranger's manifest cannot make anybody count without end."""
MAX_LAYERS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A LLaMA-style decoder: RoPE, SwiGLU, RMSNorm, untied head, one key/value head per query head."""

    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    d_ff: int
    context: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("vocab_size", "d_model", "n_layers", "n_heads", "d_ff", "context"):
            if not 1 <= getattr(self, name) <= MAX_SIZE:
                raise ValueError(f"{name} must be in 1..{MAX_SIZE}")
        if self.n_layers > MAX_LAYERS:
            raise ValueError(f"n_layers must be at most {MAX_LAYERS}")
        if self.d_model % self.n_heads or (self.d_model // self.n_heads) % 2:
            raise ValueError("d_model / n_heads must be an even whole number (RoPE rotates pairs)")
        for shard, sizes in (("block.0", "d_model or d_ff"), ("head", "vocab_size or d_model")):
            if shard_bytes(self, shard) > blob_hash.MAX_BLOB:
                raise ValueError(
                    f"{shard} has {shard_bytes(self, shard) / 1e9:.1f} GB, a shard may have {blob_hash.MAX_BLOB / 1e9:.1f} GB;"
                    f" choose a smaller {sizes}"
                )


def shard_names(spec: ModelSpec) -> tuple[str, ...]:
    """All shards in canonical order: embed, block.0 … block.L-1, head."""
    return ("embed", *(f"block.{i}" for i in range(spec.n_layers)), "head")


def tensors(spec: ModelSpec, shard: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Names and shapes of one shard's tensors in canonical order. Raises KeyError for an unknown shard."""
    V, d, F = spec.vocab_size, spec.d_model, spec.d_ff
    if shard == "embed":
        return (("model.embed_tokens.weight", (V, d)),)
    if shard == "head":
        return (("model.norm.weight", (d,)), ("lm_head.weight", (V, d)))
    index = block_index(shard)
    if not 0 <= index < spec.n_layers:
        raise KeyError(shard)
    prefix = f"model.layers.{index}."
    return tuple(
        (prefix + name, shape)
        for name, shape in (
            ("input_layernorm.weight", (d,)),
            ("self_attn.q_proj.weight", (d, d)),
            ("self_attn.k_proj.weight", (d, d)),
            ("self_attn.v_proj.weight", (d, d)),
            ("self_attn.o_proj.weight", (d, d)),
            ("post_attention_layernorm.weight", (d,)),
            ("mlp.gate_proj.weight", (F, d)),
            ("mlp.up_proj.weight", (F, d)),
            ("mlp.down_proj.weight", (d, F)),
        )
    )


def block_index(shard: str) -> int:
    """The i of `block.i`. Raises KeyError for anything else."""
    head, _, number = shard.partition(".")
    if head != "block" or not number.isdecimal() or str(int(number)) != number:
        raise KeyError(shard)
    return int(number)


def shapes(spec: ModelSpec, shard: str) -> tuple[tuple[int, ...], ...]:
    """Shapes of one shard's tensors in canonical order."""
    return tuple(shape for _, shape in tensors(spec, shard))


def parameters(spec: ModelSpec, shard: str) -> int:
    """How many parameters (elements) a shard has."""
    return sum(math.prod(shape) for shape in shapes(spec, shard))


def total_parameters(spec: ModelSpec) -> int:
    """How many parameters (elements) the model has."""
    return sum(parameters(spec, shard) for shard in shard_names(spec))


def shard_bytes(spec: ModelSpec, shard: str) -> int:
    """How many bytes a shard's tensors have in fp32."""
    return 4 * parameters(spec, shard)


def shard_digest(tensors: Sequence[npt.NDArray[np.float32]]) -> str:
    """The digest of a shard: the blob name (protocol/codec/blob_hash.py) of its tensors as little-endian fp32 in canonical order."""
    return blob_hash.name_of(*(np.ascontiguousarray(tensor, dtype="<f4").reshape(-1).data for tensor in tensors))


def state_digest(spec: ModelSpec, digests: Mapping[str, str]) -> str:
    """One digest (sha256, hex) of a whole state from its shards' digests. Raises KeyError if one is missing."""
    text = "".join(f"{shard}={digests[shard]}\n" for shard in shard_names(spec))
    return hashlib.sha256(text.encode()).hexdigest()
