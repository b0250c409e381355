"""Reads a model in a folder of transformers: of `potluck export`, or a public one of the same architecture.

LlamaForCausalLM, or Qwen3ForCausalLM, whose heads are hidden_size / num_attention_heads wide, without biases; weights
in fp32, fp16 or bf16, in one file or several. What a ModelSpec cannot say is refused by the name of its key. A shard is
read at a time, as fp32.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from peer.net.disk import Disk
from peer.state import tensor_file
from peer.state.tensor_file import Array, Place
from protocol.codec.topk import Empty, in_memory
from protocol.errors import UsageError, shown
from protocol.run import layout
from protocol.run.layout import ModelSpec
from protocol.wire.schema import SchemaError, build

WEIGHTS, CONFIG, TOKENIZER = "model.safetensors", "config.json", "tokenizer.json"
INDEX = "model.safetensors.index.json"
"""Of weights in several files."""
ROPE = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings"),
}
"""Which fields of a RopeScaling its type has."""
EMBED, ANCHOR = "model.embed_tokens.weight", "model.embed_tokens.anchor"
_KINDS = {"llama": False, "qwen3": True}
"""model_type -> whether queries and keys are normalized."""
_SIZES = {
    "vocab_size": "vocab_size",
    "d_model": "hidden_size",
    "d_ff": "intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "context": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
}
_FIXED = {
    "hidden_act": ("silu", "blocks have SwiGLU here"),
    "attention_bias": (False, "matrices have no biases here"),
    "mlp_bias": (False, "matrices have no biases here"),
    "use_sliding_window": (False, "attention sees the whole sequence here"),
    "quantization_config": (None, "weights are not quantized here"),
}
"""Key -> its only value, which is transformers' default, and the reason."""


class Misfit(Exception):
    """A model that is damaged, or that a ModelSpec cannot describe; the text names the key and says why."""


def is_narrow(spec: ModelSpec, name: str) -> bool:
    """Returns whether a LLaMA's tensor of this name has more rows than ours."""
    return spec.residual_width > 0 and name.endswith(("o_proj.weight", "down_proj.weight"))


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """An open folder.

    end: the id that ends a text
    about: metadata of the file of weights
    """

    path: Path
    spec: ModelSpec
    tokenizer: bytes = field(repr=False)
    end: int | None
    about: Mapping[str, str]
    _disk: Disk
    _places: Mapping[str, tuple[Path, Place]]

    def shard(self, shard: str, empty: Empty = in_memory) -> list[Array]:
        """A shard's tensors. Raises UsageError."""
        spec = self.spec
        w, arrays = spec.written, empty(layout.shapes(spec, shard))
        with _refusals(self.path):
            for (name, shape), array in zip(layout.tensors(spec, shard), arrays, strict=True):
                if spec.residual_width and name in (EMBED, ANCHOR):
                    whole = self._read(EMBED, np.empty((spec.vocab_size, spec.d_model), np.float32))
                    array[...] = whole[:, :w] if name == EMBED else whole[:, w:]
                elif is_narrow(spec, name):
                    whole = self._read(name, np.empty((spec.d_model, *shape[1:]), np.float32))
                    if whole[w:].any():
                        raise Misfit(f"{name}: writes more than the first {w} columns, which residual_width allows")
                    array[...] = whole[:w]
                else:
                    self._read(name, array)
                if not np.isfinite(array).all():
                    raise Misfit(f"{name}: has values that are no numbers")
        return arrays

    def _read(self, name: str, array: Array) -> Array:
        """Reads a tensor of the files into `array`. Raises Misfit, OSError."""
        if name not in self._places:
            raise Misfit(f"{name}: is missing")
        path, place = self._places[name]
        if place.shape != array.shape:
            raise Misfit(f"{name}: has the shape {list(place.shape)}, not {list(array.shape)}")
        try:
            tensor_file.load(self._disk, path, place, array)
        except tensor_file.Damaged as error:
            raise Misfit(f"{name}: {error}") from None
        return array


def open_model(folder: Path, disk: Disk) -> ModelFolder:
    """Opens a folder; the weights are read later. Raises UsageError."""
    with _refusals(folder):
        config = _json(disk, folder / CONFIG)
        spec, end = _spec(config), config.get("eos_token_id")
        places, about = _all_places(folder, disk)
        known = {name for shard in layout.shard_names(spec) for name, _ in layout.tensors(spec, shard)} | {EMBED}
        known |= {"lm_head.weight"} if spec.tie_word_embeddings else set()  # a copy
        for name in places:
            if name not in known and not name.endswith("rotary_emb.inv_freq"):
                raise Misfit(f"{name}: a model of this architecture has no such tensor here")
        if type(end) is not int:
            end = None
        return ModelFolder(folder, spec, disk.read(folder / TOKENIZER), end, about, disk, places)


@contextlib.contextmanager
def _refusals(folder: Path) -> Iterator[None]:
    """Raises UsageError in place of Misfit and OSError."""
    try:
        yield
    except OSError as error:
        reason = f"{Path(error.filename or folder).name}: {error.strerror}"
    except Misfit as error:
        reason = shown(str(error))
    else:
        return
    raise UsageError(f"model {folder}: {reason}; give a folder of potluck export, or of a Llama or Qwen3 like it")


def _json(disk: Disk, path: Path) -> dict[str, Any]:
    try:
        found = json.loads(disk.read(path))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise Misfit(f"{path.name}: is not JSON of one object")
    return found


def _all_places(folder: Path, disk: Disk) -> tuple[dict[str, tuple[Path, Place]], Mapping[str, str]]:
    """Where the tensors are, by name, and the metadata of a single file. Raises Misfit, OSError."""
    names, about = [WEIGHTS], dict[str, str]()
    if WEIGHTS not in disk.names(folder) and INDEX in disk.names(folder):
        listed = _json(disk, folder / INDEX).get("weight_map")
        names = sorted({str(name) for name in listed.values()}) if isinstance(listed, dict) else []
    found = dict[str, tuple[Path, Place]]()
    for name in names:
        if Path(name).name != name:
            raise Misfit(f"{INDEX}: {name} is no file of this folder")
        try:
            places, about = tensor_file.places(disk, folder / name)
        except tensor_file.Damaged as error:
            raise Misfit(f"{name}: {error}") from None
        found |= {tensor: (folder / name, place) for tensor, place in places.items()}
    return found, about


def _spec(config: Mapping[str, Any]) -> ModelSpec:
    """The model that a configuration of transformers describes. Raises Misfit."""
    kind = str(config.get("model_type"))
    if kind not in _KINDS:
        raise Misfit(f"model_type = {kind}: is not known here, but {' and '.join(_KINDS)} are")
    for key, (only, reason) in _FIXED.items():
        if (value := config.get(key, only)) != only:
            raise Misfit(f"{key} = {value}: {reason}")
    kinds = config.get("layer_types") or []
    if not isinstance(kinds, list) or any(each != "full_attention" for each in kinds):
        raise Misfit("layer_types: attention sees the whole sequence here")
    for key in _SIZES.values():
        if key not in config:
            raise Misfit(f"{key}: is missing")
    theta, scaling = _rope(config)
    heads, shared = config["num_attention_heads"], config.get("num_key_value_heads")
    fields = {
        **{ours: config[theirs] for ours, theirs in _SIZES.items()},
        "rope_theta": theta,
        "num_key_value_heads": 0 if shared in (None, heads) else shared,
        "tie_word_embeddings": config.get("tie_word_embeddings", False),
        "use_qk_norm": _KINDS[kind],
        "rope_scaling": scaling,
        "document_end_id": config.get("document_end_id", -1),
        "residual_width": config.get("residual_width", 0),
    }
    try:
        spec = build(ModelSpec, fields)
    except SchemaError as error:
        field = error.field if error.field != "top level" else ""
        raise Misfit(f"{_SIZES.get(field, field) or CONFIG}: {error.reason}") from None
    if (width := config.get("head_dim") or spec.head_dim) != spec.head_dim:
        raise Misfit(f"head_dim = {width}: is hidden_size / num_attention_heads here, {spec.head_dim}")
    return spec


def _rope(config: Mapping[str, Any]) -> tuple[Any, dict[str, Any] | None]:
    """rope_theta, and the fields of RopeScaling if there is one. Raises Misfit."""
    said = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(said, dict):
        raise Misfit("rope_scaling: is not a table")
    kind = str(said.get("rope_type", said.get("type", "default")))
    known = {"default": (), **ROPE}
    if kind not in known:
        raise Misfit(f"rope_type = {kind}: is not known here, but {', '.join(ROPE)} are")
    for key, value in (*said.items(), ("partial_rotary_factor", config.get("partial_rotary_factor"))):
        turns_all = key == "partial_rotary_factor" and value in (None, 1.0)
        if key not in (*known[kind], "rope_type", "type", "rope_theta") and value is not None and not turns_all:
            raise Misfit(f"{key} = {value}: RoPE of kind {kind} has none here")
    fields = {name: said[name] for name in known[kind] if said.get(name) is not None}
    theta = said.get("rope_theta", config.get("rope_theta", 10_000.0))
    return theta, {"rope_type": kind, **fields} if kind != "default" else None
