"""Shards of a model, the tensors of each, and the digest of a whole state.

Tensor names are those of Hugging Face's LlamaForCausalLM, or Qwen3ForCausalLM with `use_qk_norm`. Tied embeddings
belong to `embed`, and `head` is then the last norm only. A shard's host value is a list of C-contiguous fp32 arrays in
the order of `tensors`.

*The residual stream.* With `residual_width` = w < d, blocks add to the first w columns of the residual stream only (as
the weights of Subspace Networks, arXiv 2506.01260, write into a subspace); the other columns keep the token's
embedding, the shard `anchor`. A stage of a chain that knows the tokens needs only w values of each from the stage
before (docs/adr/0066-anchors.md). Padded with zeros, o_proj and down_proj are those of a LLaMA.

Shape letters: V vocabulary, d model width, w residual width, F feed-forward width.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from protocol.codec import blob_hash
from protocol.wire.schema import LATER, Within

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_SIZE = 1 << 24
"""Of every size of a model, so that a stranger's manifest cannot make anybody count without end."""
MAX_CONTEXT = 1 << 20
"""Tokens of a sequence, as in a corpus (protocol/run/corpus.py)."""
MAX_ROTATIONS = 1 << 27
"""Values in either table of RoPE, `context` x d_model / n_heads: 1 GiB on a peer."""
MAX_LAYERS = 512
"""A peer and a leader look at every range of blocks."""
MAX_THETA = 1e12
MAX_FACTOR = 1e6
ROPE_TYPES = ("linear", "llama3", "yarn")
Size = Annotated[int, Within(1, MAX_SIZE)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Scaling of RoPE for contexts beyond `original_max_position_embeddings`, as Hugging Face's `rope_parameters`.

    linear: all angles by `factor`; llama3: slow ones, between wavelengths of original / `low_freq_factor` and
    original / `high_freq_factor`; yarn (Peng et al., 2023, arXiv:2309.00071): slow ones, between `beta_slow` and
    `beta_fast` turns in the original context, and attention by (0.1 ln factor + 1)^2
    """

    rope_type: str
    factor: Annotated[float, Within(1, MAX_FACTOR)]
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            raise ValueError(f'rope_type must be one of {", ".join(ROPE_TYPES)}, not "{self.rope_type}"')
        if self.rope_type != "linear" and not 1 <= self.original_max_position_embeddings <= MAX_SIZE:
            raise ValueError(f"original_max_position_embeddings must be in 1..{MAX_SIZE}")
        for slow, fast in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            if not 0 < getattr(self, slow) < getattr(self, fast) <= MAX_FACTOR:
                raise ValueError(f"0 < {slow} < {fast} <= {MAX_FACTOR:g} must hold")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder like LLaMA (RoPE, SwiGLU, RMSNorm); later fields are named as in Hugging Face's configurations.

    num_key_value_heads: each shared by several query heads, 0: one for each; use_qk_norm: as Qwen3
    document_end_id: attention does not look beyond this id, -1: it sees the whole sequence
    residual_width: columns of the residual stream that blocks write, 0: all (LLaMA)
    """

    vocab_size: Size
    d_model: Size
    n_layers: Annotated[int, Within(1, MAX_LAYERS)]
    n_heads: Size
    d_ff: Size
    context: Annotated[int, Within(1, MAX_CONTEXT)]
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    num_key_value_heads: int = field(default=0, metadata=LATER)
    tie_word_embeddings: bool = field(default=False, metadata=LATER)
    use_qk_norm: bool = field(default=False, metadata=LATER)
    rope_scaling: RopeScaling | None = field(default=None, metadata=LATER)
    document_end_id: int = field(default=-1, metadata=LATER)
    residual_width: int = field(default=0, metadata=LATER)

    def __post_init__(self) -> None:
        if self.d_model % self.n_heads or (self.d_model // self.n_heads) % 2:
            raise ValueError("d_model / n_heads must be an even whole number (RoPE rotates pairs)")
        if self.num_key_value_heads < 0 or self.n_heads % (self.num_key_value_heads or self.n_heads):
            raise ValueError("num_key_value_heads must divide n_heads, or be 0 for as many")
        if self.context * self.head_dim > MAX_ROTATIONS:
            raise ValueError(f"context x d_model / n_heads must be at most {MAX_ROTATIONS}")
        if not 1 < self.rope_theta <= MAX_THETA:
            raise ValueError(f"rope_theta must be more than 1 and at most {MAX_THETA:g}")
        if not 0 < self.norm_eps < 1:
            raise ValueError("norm_eps must be more than 0 and less than 1")
        if not -1 <= self.document_end_id < self.vocab_size:
            raise ValueError("document_end_id must be an id of the vocabulary, or -1 for none")
        if not 0 <= self.residual_width < self.d_model:
            raise ValueError("residual_width must be at least 0 and less than d_model")
        if self.residual_width and self.tie_word_embeddings:
            raise ValueError("residual_width must be 0 where tie_word_embeddings is on")
        for shard, sizes in (
            ("block.0", "d_model or d_ff"),
            ("head", "vocab_size or d_model"),
            ("embed", "vocab_size or d_model"),
        ):
            if shard_bytes(self, shard) > blob_hash.MAX_BLOB_BYTES:
                size, most = (f"{count / 1e9:.1f} GB" for count in (shard_bytes(self, shard), blob_hash.MAX_BLOB_BYTES))
                raise ValueError(f"{shard} has {size}, a shard may have {most}; choose a smaller {sizes}")

    @property
    def written(self) -> int:
        """w: columns of the residual stream that blocks write, and values of a token that a chain's stages exchange."""
        return self.residual_width or self.d_model

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_heads

    @property
    def key_value_heads(self) -> int:
        return self.num_key_value_heads or self.n_heads

    @property
    def key_value_width(self) -> int:
        """Width of all keys, and of all values, of a token."""
        return self.key_value_heads * self.head_dim


def shard_names(spec: ModelSpec) -> tuple[str, ...]:
    """All shards in canonical order: embed, block.0 … block.L-1, head, and anchor if the blocks do not write all."""
    anchor = ("anchor",) if spec.residual_width else ()
    return ("embed", *(f"block.{i}" for i in range(spec.n_layers)), "head", *anchor)


def tensors(spec: ModelSpec, shard: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Names and shapes of one shard's tensors in canonical order. Raises KeyError for an unknown shard."""
    V, d, w, F, kv = spec.vocab_size, spec.d_model, spec.written, spec.d_ff, spec.key_value_width
    if shard == "embed":
        return (("model.embed_tokens.weight", (V, w)),)
    if shard == "anchor" and spec.residual_width:
        return (("model.embed_tokens.anchor", (V, d - w)),)
    if shard == "head":
        matrix = () if spec.tie_word_embeddings else (("lm_head.weight", (V, d)),)
        return (("model.norm.weight", (d,)), *matrix)
    index = block_index(shard)
    if not 0 <= index < spec.n_layers:
        raise KeyError(shard)
    prefix, h = f"model.layers.{index}.", spec.head_dim
    norms = (("self_attn.q_norm.weight", (h,)), ("self_attn.k_norm.weight", (h,))) if spec.use_qk_norm else ()
    return tuple(
        (prefix + name, shape)
        for name, shape in (
            ("input_layernorm.weight", (d,)),
            ("self_attn.q_proj.weight", (d, d)),
            ("self_attn.k_proj.weight", (kv, d)),
            ("self_attn.v_proj.weight", (kv, d)),
            ("self_attn.o_proj.weight", (w, d)),
            *norms,
            ("post_attention_layernorm.weight", (d,)),
            ("mlp.gate_proj.weight", (F, d)),
            ("mlp.up_proj.weight", (F, d)),
            ("mlp.down_proj.weight", (w, F)),
        )
    )


def block_index(shard: str) -> int:
    """The i of `block.i`. Raises KeyError for anything else."""
    head, _, number = shard.partition(".")
    if head != "block" or not number.isdecimal() or str(int(number)) != number:
        raise KeyError(shard)
    return int(number)


def shapes(spec: ModelSpec, shard: str) -> tuple[tuple[int, ...], ...]:
    return tuple(shape for _, shape in tensors(spec, shard))


def parameters(spec: ModelSpec, shard: str) -> int:
    return sum(math.prod(shape) for shape in shapes(spec, shard))


def total_parameters(spec: ModelSpec) -> int:
    return sum(parameters(spec, shard) for shard in shard_names(spec))


def shard_bytes(spec: ModelSpec, shard: str) -> int:
    return 4 * parameters(spec, shard)


def shard_pieces(tensors: Sequence[NDArray[np.float32]]) -> list[memoryview]:
    """The bytes of a shard: its tensors as little-endian fp32 in canonical order."""
    import numpy as np

    return [np.ascontiguousarray(tensor, dtype="<f4").reshape(-1).data.cast("B") for tensor in tensors]


def shard_digest(tensors: Sequence[NDArray[np.float32]]) -> str:
    """The blob name (protocol/codec/blob_hash.py) of a shard's bytes."""
    return blob_hash.name_of(*shard_pieces(tensors))


def state_digest(spec: ModelSpec, digests: Mapping[str, str]) -> str:
    """One digest (sha256, hex) of a whole state from its shards' digests. Raises KeyError if one is missing."""
    text = "".join(f"{shard}={digests[shard]}\n" for shard in shard_names(spec))
    return hashlib.sha256(text.encode()).hexdigest()
