"""Recipes for runs of usual sizes: a model, how it is trained, and rounds that fit homes. `potluck init` writes them
into manifests.

The shapes of 178M and 512M are those of *Heterogeneous low-bandwidth pre-training of LLMs*; 1B and 7B are LLaMA's;
llama-* and qwen-* have the widths, heads and angles of Llama 3 and Qwen3. Embeddings are not tied: such models would
have no chains.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from protocol.run import layout
from protocol.run.layout import ModelSpec

TOKENS_PER_PARAMETER = 20
"""Of a training that spends its computing well (Hoffmann et al., 2022)."""
HOMES, HOME_FLOPS = 8, 20e12
"""Assumed swarm of a new run: GPUs, and operations a second that training gets out of one."""
HOME_UP_BPS, HOME_DOWN_BPS = 20_000_000, 100_000_000

RESIDUAL_64THS = 21
"""Of the model's width that blocks write: a chain then sends 8 times fewer bytes than bf16 of all (docs/results/
learning.md)."""
CHECKPOINT_ROUNDS = 320
"""A checkpoint has 12 bytes a parameter: so seldom, a peer's disk takes less than 0.04 of them a round."""
PROBATION, RANGE_SESSIONS = 8, 16
"""Defaults of an open run: probation in rounds (if ten times as long), and sessions of a range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A model for a tokenizer made for it, its training, and `round_seconds` of training a round."""

    model: ModelSpec
    rows: int
    micro_batches: int
    inner_steps: int
    lr: float
    round_seconds: float
    rounds: int = 0
    """0: as many as a swarm of HOMES needs for TOKENS_PER_PARAMETER."""

    def model_for(self, vocab_size: int, context: int) -> ModelSpec:
        """The model for a tokenizer of `vocab_size` ids, and sequences of `context` tokens."""
        return replace(self.model, vocab_size=vocab_size, context=context)


def _model(*, d_model: int, **more: Any) -> ModelSpec:
    return ModelSpec(d_model=d_model, residual_width=2 * (RESIDUAL_64THS * d_model // 128), **more)


PRESETS = {
    "tiny": Preset(
        model=_model(d_model=256, n_layers=6, n_heads=4, d_ff=688, context=256, vocab_size=4096),
        rows=4, micro_batches=4, inner_steps=20, lr=2e-3, round_seconds=30.0, rounds=200,
    ),
    "178m": Preset(
        model=_model(d_model=1024, n_layers=9, n_heads=8, d_ff=2688, context=2048, vocab_size=32_000),
        rows=4, micro_batches=16, inner_steps=200, lr=1e-3, round_seconds=60.0,
    ),
    "512m": Preset(
        model=_model(d_model=1536, n_layers=12, n_heads=12, d_ff=5440, context=2048, vocab_size=32_000),
        rows=2, micro_batches=32, inner_steps=200, lr=8e-4, round_seconds=120.0,
    ),
    "1b": Preset(
        model=_model(d_model=2048, n_layers=16, n_heads=16, d_ff=8192, context=2048, vocab_size=32_000),
        rows=1, micro_batches=64, inner_steps=200, lr=6e-4, round_seconds=300.0,
    ),
    "7b": Preset(
        model=_model(d_model=4096, n_layers=32, n_heads=32, d_ff=11_008, context=2048, vocab_size=32_000),
        rows=1, micro_batches=128, inner_steps=200, lr=3e-4, round_seconds=600.0,
    ),
    "llama-1b": Preset(
        model=_model(
            d_model=2048, n_layers=16, n_heads=32, d_ff=8192, context=2048, vocab_size=32_000,
            num_key_value_heads=8, rope_theta=500_000.0,
        ),
        rows=1, micro_batches=64, inner_steps=200, lr=6e-4, round_seconds=300.0,
    ),
    "qwen-1.7b": Preset(
        model=_model(
            d_model=2048, n_layers=28, n_heads=16, d_ff=6144, context=2048, vocab_size=32_000,
            num_key_value_heads=8, rope_theta=1_000_000.0, use_qk_norm=True, norm_eps=1e-6,
        ),
        rows=1, micro_batches=64, inner_steps=200, lr=5e-4, round_seconds=300.0,
    ),
    "llama-8b": Preset(
        model=_model(
            d_model=4096, n_layers=32, n_heads=32, d_ff=14_336, context=2048, vocab_size=32_000,
            num_key_value_heads=8, rope_theta=500_000.0,
        ),
        rows=1, micro_batches=128, inner_steps=200, lr=3e-4, round_seconds=600.0,
    ),
}  # fmt: skip
"""By name."""


def nearest(parameters: int) -> Preset:
    """The preset whose model is nearest in size."""
    return min(PRESETS.values(), key=lambda of: abs(math.log(layout.total_parameters(of.model) / parameters)))


def rounds_for(parameters: int, tokens_a_second: float, round_seconds: float) -> int:
    """Rounds after which such a swarm has trained TOKENS_PER_PARAMETER of each parameter."""
    return max(1, math.ceil(TOKENS_PER_PARAMETER * parameters / (tokens_a_second * round_seconds)))


def homes_rate(parameters: int) -> float:
    """Tokens a second of HOMES machines: 6 operations a parameter and token."""
    return HOMES * HOME_FLOPS / (6 * parameters)
