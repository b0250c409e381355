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
from typing import Any

import numpy as np

from peer.corpus.tokenizer_process import TokenizerProcess
from peer.log import gguf_file
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
from protocol.wire.schema import SchemaError, build

WEIGHTS, CONFIG, TOKENIZER = "model.safetensors", "config.json", "tokenizer.json"
_SIZES = {
    "vocab_size": "vocab_size",
    "d_model": "hidden_size",
    "d_ff": "intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "context": "max_position_embeddings",
    "rope_theta": "rope_theta",
    "norm_eps": "rms_norm_eps",
}
_ROPE = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings"),
}
"""Which fields of a RopeScaling its type has."""


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
        scaling = {"rope_type": kind, **{name: getattr(spec.rope_scaling, name) for name in _ROPE[kind]}}
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


def _spec(found: dict[str, Any]) -> ModelSpec:
    """The inverse of `config`. Raises SchemaError, KeyError or TypeError."""
    heads, shared = found["num_attention_heads"], found["num_key_value_heads"]
    fields = {
        **{ours: found[theirs] for ours, theirs in _SIZES.items()},
        "num_key_value_heads": 0 if shared == heads else shared,
        "tie_word_embeddings": found["tie_word_embeddings"],
        "use_qk_norm": found["model_type"] == "qwen3",
        "rope_scaling": found.get("rope_scaling"),
        "document_end_id": found.get("document_end_id", -1),
        "residual_width": found.get("residual_width", 0),
    }
    return build(ModelSpec, fields)


_EMBED, _ANCHOR = "model.embed_tokens.weight", "model.embed_tokens.anchor"


def _is_narrow(spec: ModelSpec, name: str) -> bool:
    """Returns whether a LLaMA's tensor of this name has more rows."""
    return spec.residual_width > 0 and name.endswith(("o_proj.weight", "down_proj.weight"))


def _as_llama(spec: ModelSpec, tensors: dict[str, Array]) -> dict[str, Array]:
    """The tensors of a LLaMA that computes the same."""
    behind = spec.d_model - spec.written
    found = {name: np.pad(x, ((0, behind), (0, 0))) if _is_narrow(spec, name) else x for name, x in tensors.items()}
    if _ANCHOR in found:
        found[_EMBED] = np.concatenate((found[_EMBED], found.pop(_ANCHOR)), axis=1)
    return found


def _from_llama(spec: ModelSpec, tensors: dict[str, Array]) -> dict[str, Array]:
    """The inverse of `_as_llama`. Raises ValueError for a matrix that writes more columns."""
    w, narrow = spec.written, [name for name in tensors if _is_narrow(spec, name)]
    if any(tensors[name][w:].any() for name in narrow):
        raise ValueError
    found = tensors | {name: tensors[name][:w] for name in narrow}
    if spec.residual_width:
        both = found[_EMBED]
        found |= {_EMBED: np.ascontiguousarray(both[:, :w]), _ANCHOR: np.ascontiguousarray(both[:, w:])}
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
        for (name, _), array in zip(layout.tensors(spec, shard), theta[shard], strict=True)
    }


def read(folder: Path, disk: Disk, room_for: Callable[[ModelSpec], Empty]) -> Exported:
    """Reads a folder that `write` wrote. room_for: makes the allocator of the arrays. Raises UsageError."""
    try:
        found = json.loads(disk.read(folder / CONFIG))
        spec = _spec(found)
        if found != config(spec, found["eos_token_id"]):
            raise ValueError
        written, about = tensor_file.read(disk, folder / WEIGHTS, room_for(spec))
        tensors = _from_llama(spec, written)
        theta = {
            shard: [tensors[name] for name, _ in layout.tensors(spec, shard)] for shard in layout.shard_names(spec)
        }
        if any(tuple(a.shape for a in arrays) != layout.shapes(spec, shard) for shard, arrays in theta.items()):
            raise ValueError
        sequence = int(about["sequence"])
        if not 1 <= sequence <= spec.context:
            raise ValueError
        tokenizer, end = disk.read(folder / TOKENIZER), found["eos_token_id"]
        return Exported(spec, theta, tokenizer, about["name"], int(about["round"]), sequence, end, about)
    except OSError as error:
        reason = f"{Path(error.filename or folder).name}: {error.strerror}"
    except tensor_file.Damaged as error:
        reason = f"{WEIGHTS}: {error}"
    except (SchemaError, ValueError, LookupError, TypeError, RecursionError):
        reason = "is not as potluck export writes it"
    raise UsageError(f"model {folder}: {reason}; give a folder of potluck export, or a log")
