"""A run's model as a folder for the library transformers, with a GGUF file on request (peer/log/gguf_file.py).

LlamaForCausalLM, or Qwen3ForCausalLM for models with normalized queries and keys, in fp32, with the run's tokenizer.
transformers does not know that documents do not attend to each other, nor of a residual width: o_proj and down_proj are
padded with rows of zeros. `document_end_id` and `residual_width` are in the file for Potluck.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from peer.corpus.tokenizer_process import TokenizerProcess
from peer.log import gguf_file, model_folder
from peer.log.model_folder import ANCHOR, CONFIG, EMBED, ROPE, TOKENIZER, WEIGHTS, is_narrow
from peer.log.replay import State
from peer.net.disk import Disk
from peer.state import tensor_file
from peer.state.storage import Shards
from peer.state.tensor_file import Array
from protocol.codec.topk import Empty
from protocol.errors import UsageError
from protocol.run import layout
from protocol.run.layout import ModelSpec
from protocol.run.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Exported:
    """An exported model."""

    spec: ModelSpec
    theta: Shards
    tokenizer: bytes
    name: str
    round: int
    sequence: int
    """Tokens of a sequence in training."""
    end: int | None
    """The id that ends a text."""
    about: Mapping[str, str]
    """Metadata of the file of weights."""


def config(spec: ModelSpec, end: int | None) -> dict[str, object]:
    """The configuration for transformers. end: the id that ends a text."""
    scaling: dict[str, object] = {}
    if spec.rope_scaling is not None:
        kind = spec.rope_scaling.rope_type
        scaling = {"rope_type": kind, **{name: getattr(spec.rope_scaling, name) for name in ROPE[kind]}}
    return {
        "architectures": ["Qwen3ForCausalLM" if spec.use_qk_norm else "LlamaForCausalLM"],
        "model_type": "qwen3" if spec.use_qk_norm else "llama",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.d_model,
        "intermediate_size": spec.d_ff,
        "num_hidden_layers": spec.n_layers,
        "num_attention_heads": spec.n_heads,
        "num_key_value_heads": spec.key_value_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.context,
        "rope_theta": spec.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope_theta} | scaling,
        **({"rope_scaling": scaling} if scaling else {}),  # what it is called before transformers 5
        "rms_norm_eps": spec.norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": spec.tie_word_embeddings,
        **({"document_end_id": spec.document_end_id} if spec.document_end_id >= 0 else {}),
        **({"residual_width": spec.residual_width} if spec.residual_width else {}),
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": None,
        "dtype": "float32",
    }


def _as_llama(spec: ModelSpec, tensors: dict[str, Array]) -> dict[str, Array]:
    """The tensors of a LLaMA that computes the same."""
    behind = spec.d_model - spec.written
    found = {name: np.pad(x, ((0, behind), (0, 0))) if is_narrow(spec, name) else x for name, x in tensors.items()}
    if ANCHOR in found:
        found[EMBED] = np.concatenate((found[EMBED], found.pop(ANCHOR)), axis=1)
    return found


def part_of(folder: Path) -> Path:
    """The folder in which `write` collects its files."""
    return folder.with_name(f".{folder.name}.part")


def write(
    manifest: Manifest,
    state: State,
    tokenizer: bytes,
    folder: Path,
    disk: Disk,
    beside: Mapping[str, bytes] | None = None,
    with_gguf: bool = False,
) -> None:
    """Writes the folder, all or nothing; it must not exist. The same state gives the same bytes.

    beside: other files, by name.
    with_gguf: whether there is a GGUF file of the model, too.

    Raises UsageError.
    """
    if folder.exists():
        raise UsageError(f"--out {folder}: is there already; choose another folder")
    spec = manifest.model
    tensors = _as_llama(spec, _tensors(spec, state.theta))
    with TokenizerProcess(tokenizer) as parsed:
        end, end_name = parsed.end, parsed.end_name
    about = {
        "format": "pt",
        "run": manifest.run_id,
        "round": str(state.round),
        "state": layout.state_digest(spec, state.digests),
        "name": manifest.name,
        "sequence": str(manifest.train.sequence),
    }
    words = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": spec.context}
    if end is not None:
        words["eos_token"] = end_name
    temporary = part_of(folder)
    disk.remove(temporary)
    disk.make_folder(temporary)
    try:
        disk.write(temporary / WEIGHTS, *tensor_file.pieces(tensors, about))
        disk.write(temporary / TOKENIZER, tokenizer)
        for name, content in (
            (CONFIG, config(spec, end)),
            ("tokenizer_config.json", words),
            ("generation_config.json", {"eos_token_id": end} if end is not None else {}),
        ):
            disk.write(temporary / name, json.dumps(content, indent=1).encode() + b"\n")
        for name, raw in (beside or {}).items():
            disk.write(temporary / name, raw)
        if with_gguf:
            gguf_file.write(temporary / gguf_file.GGUF, spec, tensors, tokenizer, end, about)
        disk.rename(temporary, folder)
    finally:
        disk.remove(temporary)


def add_gguf(folder: Path, found: Exported, disk: Disk) -> None:
    """Writes the GGUF file of what was read from `folder` into it, all or nothing. Raises UsageError."""
    temporary = folder / f".{gguf_file.GGUF}.part"
    try:
        tensors = _as_llama(found.spec, _tensors(found.spec, found.theta))
        gguf_file.write(temporary, found.spec, tensors, found.tokenizer, found.end, found.about)
        disk.rename(temporary, folder / gguf_file.GGUF)
    finally:
        disk.remove(temporary)


def _tensors(spec: ModelSpec, theta: Shards) -> dict[str, Array]:
    return {
        name: array
        for shard in layout.shard_names(spec)
        for (name, _), array in zip(layout.tensors(spec, shard), theta[shard], strict=False)
    }


def read(folder: Path, disk: Disk, room_for: Callable[[ModelSpec], Empty]) -> Exported:
    """Reads a folder that `write` wrote. room_for: makes the allocator of the arrays. Raises UsageError."""
    found = model_folder.open_model(folder, disk)
    try:
        name, round, sequence = found.about["name"], int(found.about["round"]), int(found.about["sequence"])
    except (KeyError, ValueError):
        raise UsageError(f"model {folder}: is not as potluck export writes it; give a folder of it, or a log") from None
    if not 1 <= sequence <= found.spec.context:
        raise UsageError(f"model {folder}: sequence = {sequence}: is longer than its context; export it again")
    empty = room_for(found.spec)
    theta = {shard: found.shard(shard, empty) for shard in layout.shard_names(found.spec)}
    return Exported(found.spec, theta, found.tokenizer, name, round, sequence, found.end, found.about)
