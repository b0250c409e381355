"""A run's model as one GGUF file, for llama.cpp and what is built on it; written by the package `gguf`.

Llama, or Qwen3 for models with normalized queries and keys, in fp32. In a Llama's file RoPE rotates neighbouring
values, so the rows of its queries and keys are in another order than in transformers' files. llama.cpp splits text
before the merges by rules of its own, each with a name; a tokenizer that splits by none of them has no GGUF file. It
applies no normalization, also where the tokenizer says NFC, as Qwen's does.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from peer.net.disk import disk_errors
from peer.state.tensor_file import Array
from protocol.errors import UsageError
from protocol.run.layout import ModelSpec, RopeScaling

GGUF = "model.gguf"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {
    "bytes": ("gpt-2", False),
    "digits, bytes": ("smollm", False),
    rf"{_WORDS}\p{{N}}{{1,3}}{_REST}": ("llama-bpe", True),
    rf"{_WORDS}\p{{N}}{_REST}": ("qwen2", False),
}
"""How a tokenizer splits text (`_split`) -> llama.cpp's name of that, and whether whole words need no merges there."""
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
"""Kinds of tokens in the file."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer as a GGUF file has it."""

    pre: str
    """llama.cpp's name of its way to split text."""
    tokens: dict[int, str]
    kinds: dict[int, int]
    merges: list[str]


def require_library() -> None:
    """Raises UsageError unless the package `gguf` is installed."""
    if importlib.util.find_spec("gguf") is None:
        raise UsageError("--gguf: the package gguf is not installed here; type pip install gguf, or leave --gguf out")


def vocabulary(tokenizer: bytes) -> Vocabulary:
    """Reads a tokenizer's JSON file, without its library. Raises UsageError if llama.cpp would tokenize differently."""
    try:
        found = json.loads(tokenizer)
        model = found["model"]
        name, ignores_merges = _SPLITS.get(_split(found["pre_tokenizer"]), ("", False))
        plain = not any(model.get(key) for key in ("dropout", "byte_fallback", "end_of_word_suffix"))
        plain &= not any(model.get(key) for key in ("continuing_subword_prefix", "fuse_unk", "unk_token"))
        fits = model["type"] == "BPE" and plain and bool(model.get("ignore_merges")) == ignores_merges
        fits &= found["decoder"]["type"] == "ByteLevel" and (found["normalizer"] or {"type": "NFC"})["type"] == "NFC"
        if not (name and fits):
            raise UsageError(
                "tokenizer: llama.cpp has none that splits text as this one does; leave --gguf out, or make runs with"
                " the tokenizer that potluck init makes, or with one of GPT-2, Llama 3, Qwen2 or SmolLM"
            )
        tokens, kinds = {int(number): str(text) for text, number in model["vocab"].items()}, {}
        for added in found["added_tokens"]:
            tokens[int(added["id"])] = str(added["content"])
            kinds[int(added["id"])] = _CONTROL if added["special"] else _USER_DEFINED
        merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
        return Vocabulary(name, tokens, kinds, merges)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UsageError("tokenizer: cannot be read as a tokenizer.json of BPE; leave --gguf out") from None


def _split(pre: Any) -> str:
    """How a pre-tokenizer splits text: the key of `_SPLITS`, or empty."""
    *first, last = pre["pretokenizers"] if pre["type"] == "Sequence" else [pre]
    if last["type"] != "ByteLevel" or last["add_prefix_space"]:
        return ""
    with_regex = last.get("use_regex", True)
    if not first:
        return "bytes" if with_regex else ""
    step: dict[str, Any] = first[0] if len(first) == 1 else {"type": ""}
    if step["type"] == "Digits" and step["individual_digits"] and with_regex:
        return "digits, bytes"
    if step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"] and not with_regex:
        return str(step["pattern"].get("Regex", ""))
    return ""


def check(spec: ModelSpec, tokenizer: bytes) -> None:
    """Raises UsageError if there is no GGUF file of this model, or no package to write it."""
    require_library()
    vocabulary(tokenizer)
    scaling = spec.rope_scaling
    if scaling is None:
        return
    other = scaling.rope_type == "yarn" and (scaling.beta_fast, scaling.beta_slow) != (32.0, 1.0)
    if other or (scaling.rope_type == "llama3" and spec.use_qk_norm):
        raise UsageError(
            f"model: llama.cpp does not scale RoPE as this one does ({scaling.rope_type}); leave --gguf out"
        )


def write(
    path: Path,
    spec: ModelSpec,
    tensors: Mapping[str, Array],
    tokenizer: bytes,
    end: int | None,
    about: Mapping[str, str],
) -> None:
    """Writes the file.

    tensors: as transformers names them (peer/log/export.py).
    end: the id that ends a text.
    about: the run, as in the metadata of the file for transformers.

    Raises UsageError.
    """
    import gguf

    check(spec, tokenizer)
    if end is None:
        raise UsageError("tokenizer: has no token that ends a text, and llama.cpp asks for one; leave --gguf out")
    architecture = gguf.MODEL_ARCH.QWEN3 if spec.use_qk_norm else gguf.MODEL_ARCH.LLAMA
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    try:
        _describe(writer, spec, about)
        _add_tokenizer(writer, vocabulary(tokenizer), spec.vocab_size, end)
        names = gguf.get_tensor_name_map(architecture, spec.n_layers).mapping
        for name, array in tensors.items():
            if not spec.use_qk_norm and name.endswith(("q_proj.weight", "k_proj.weight")):
                array = _neighbouring(array, spec.head_dim)
            theirs = names[name.removesuffix(".weight")][1] + ".weight"
            writer.add_tensor(theirs, np.ascontiguousarray(array))
        if spec.rope_scaling is not None and spec.rope_scaling.rope_type == "llama3":
            writer.add_tensor("rope_freqs.weight", _llama3_factors(spec, spec.rope_scaling))
        with disk_errors(path.parent):
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
    finally:
        writer.close()


def _describe(writer: Any, spec: ModelSpec, about: Mapping[str, str]) -> None:
    import gguf

    writer.add_name("".join(c if c.isprintable() else " " for c in about["name"]))
    for key in ("run", "round", "state"):
        writer.add_string(f"potluck.{key}", about[key])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_vocab_size(spec.vocab_size)
    writer.add_context_length(spec.context)
    writer.add_embedding_length(spec.d_model)
    writer.add_block_count(spec.n_layers)
    writer.add_feed_forward_length(spec.d_ff)
    writer.add_head_count(spec.n_heads)
    writer.add_head_count_kv(spec.key_value_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    writer.add_rope_dimension_count(spec.head_dim)
    writer.add_rope_freq_base(spec.rope_theta)
    if spec.rope_scaling is not None and spec.rope_scaling.rope_type != "llama3":
        writer.add_rope_scaling_type(gguf.RopeScalingType(spec.rope_scaling.rope_type))
        writer.add_rope_scaling_factor(spec.rope_scaling.factor)
        if spec.rope_scaling.rope_type == "yarn":
            writer.add_rope_scaling_orig_ctx_len(spec.rope_scaling.original_max_position_embeddings)


def _add_tokenizer(writer: Any, known: Vocabulary, size: int, end: int) -> None:
    """Adds the tokens of all `size` ids, those that the tokenizer lacks as unused ones."""
    if any(not 0 <= number < size for number in known.tokens):
        raise UsageError(f"tokenizer: has ids that the model, of {size}, has not; leave --gguf out")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(known.pre)
    writer.add_token_list([known.tokens.get(number, f"[PAD{number}]") for number in range(size)])
    writer.add_token_types(
        [known.kinds.get(number, _NORMAL if number in known.tokens else _UNUSED) for number in range(size)]
    )
    writer.add_token_merges(known.merges)
    writer.add_bos_token_id(end)
    writer.add_eos_token_id(end)
    writer.add_add_bos_token(False)


def _neighbouring(rows: Array, width: int) -> Array:
    """The rows of each head, of `width`, such that the two of a rotated pair are neighbours, not half a head apart."""
    halves = rows.reshape(-1, 2, width // 2, rows.shape[-1])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def _llama3_factors(spec: ModelSpec, scaling: RopeScaling) -> Array:
    """By what each pair's angle is divided [H / 2] (as peer/training/model.py scales them)."""
    rate = 1.0 / spec.rope_theta ** (np.arange(0, spec.head_dim, 2, dtype=np.float32) / spec.head_dim)
    turns = scaling.original_max_position_embeddings * rate / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / (kept + (1 - kept) / scaling.factor)).astype(np.float32)
