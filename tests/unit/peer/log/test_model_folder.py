"""Folders of models as transformers writes them: what is read, bit for bit, and what is refused by the name of its
key."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from peer.log.model_folder import CONFIG, INDEX, WEIGHTS, open_model
from peer.net.disk import Disk
from peer.training.model import Stage
from protocol.errors import UsageError
from protocol.run import layout
from tests.support import exports
from tests.support.chains import random_theta

SIZES = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "head_dim": 16,
}  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama tied": ("Llama", {"tie_word_embeddings": True}),
    "qwen": ("Qwen3", {"tie_word_embeddings": False}),
}
IDS = torch.tensor([[5, 9, 299, 7, 0, 3, 3, 250]])


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., tuple[Path, Any]]:
    """Makes a folder by transformers' own hand, and the model in it."""

    def make(kind: str, dtype: torch.dtype = torch.float32, **saving: Any) -> tuple[Path, Any]:
        import transformers  # late: the import takes seconds

        name, more = KINDS[kind]
        torch.manual_seed(1)
        config = getattr(transformers, f"{name}Config")(**SIZES, **more)
        model = getattr(transformers, f"{name}ForCausalLM")(config).to(dtype).eval()
        model.save_pretrained(tmp_path / "model", **saving)
        (tmp_path / "model" / "tokenizer.json").write_bytes(exports.tokenizer())
        return tmp_path / "model", model

    return make


def computes_as(model: Any, folder: Path) -> bool:
    """Whether what is read gives the logits of the model."""
    found = open_model(folder, Disk())
    ours = Stage(found.spec, 0, found.spec.n_layers, True, True)
    ours.load({shard: found.shard(shard) for shard in layout.shard_names(found.spec)})
    with torch.no_grad():
        expected, logits = model.float()(IDS, use_cache=False).logits, ours.logits(ours(IDS))
    assert float(expected.abs().max()) > 0.01
    return bool((logits - expected).abs().max() < 1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_of_transformers_computes_the_same_here(kind: str, made: Callable[..., tuple[Path, Any]]) -> None:
    folder, model = made(kind)
    assert computes_as(model, folder)
    spec = open_model(folder, Disk()).spec
    assert (spec.d_model, spec.num_key_value_heads, spec.use_qk_norm) == (64, 2, kind == "qwen")
    assert spec.tie_word_embeddings == (kind == "llama tied")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_and_several_files_are_read(dtype: torch.dtype, made: Callable[..., tuple[Path, Any]]) -> None:
    folder, model = made("llama", dtype, max_shard_size="50KB")
    assert (folder / INDEX).is_file()
    assert not (folder / WEIGHTS).is_file()
    assert computes_as(model, folder), "each value is one of fp32"


def changed(folder: Path, **config: Any) -> None:
    path = folder / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | config))


def read(folder: Path) -> None:
    found = open_model(folder, Disk())
    for shard in layout.shard_names(found.spec):
        found.shard(shard)


def refusal(folder: Path) -> str:
    with pytest.raises(UsageError) as caught:
        read(folder)
    text = str(caught.value)
    assert text.startswith(f"model {folder}: ")
    assert text.endswith("; give a folder of potluck export, or of a Llama or Qwen3 like it")
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "gpt2"}, "model_type = gpt2: is not known here, but llama and qwen3 are"),
        ({"hidden_act": "gelu"}, "hidden_act = gelu: blocks have SwiGLU here"),
        ({"attention_bias": True}, "attention_bias = True: matrices have no biases here"),
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"head_dim": 32}, "head_dim = 32: is hidden_size / num_attention_heads here, 16"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"use_sliding_window": True}, "use_sliding_window = True: attention sees the whole sequence here"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types: attention sees"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "rope_type = longrope: is not known here"),
        ({"rope_parameters": None, "rope_scaling": {"type": "dynamic"}}, "rope_type = dynamic"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "mscale": 0.7}},
            "mscale = 0.7: RoPE of kind yarn has none here",
        ),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_scaling.factor: missing field"),
        ({"hidden_size": 63}, "d_model / n_heads must be an even whole number"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: must be in 1..512"),
        ({"vocab_size": 301}, "model.embed_tokens.weight: has the shape [300, 64], not [301, 64]"),
        ({"num_hidden_layers": 3}, "model.layers.2.input_layernorm.weight: is missing"),
        ({"num_hidden_layers": 1}, "model.layers.1.input_layernorm.weight: a model of this architecture has no such"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings: must be bool"),
        ({"residual_width": 8}, "writes more than the first 8 columns"),
    ],
)
def test_what_is_not_represented_is_refused_by_its_key(config: dict[str, Any], reason: str, tmp_path: Path) -> None:
    folder = exports.written(tmp_path / "model")
    changed(folder, **config)
    assert reason in refusal(folder)


def test_a_missing_size_is_named(tmp_path: Path) -> None:
    folder = exports.written(tmp_path / "model")
    config = json.loads((folder / CONFIG).read_text())
    del config["intermediate_size"]
    (folder / CONFIG).write_text(json.dumps(config))
    assert "intermediate_size: is missing" in refusal(folder)
    (folder / CONFIG).write_text("[")
    assert "config.json: is not JSON of one object" in refusal(folder)
    (folder / CONFIG).unlink()
    assert "config.json: No such file or directory" in refusal(folder)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("model.norm.weight", torch.ones(64, dtype=torch.int64), "has I64; weights are F32, F16, BF16"),
        ("model.norm.weight", torch.full((64,), float("nan")), "has values that are no numbers"),
        ("model.layers.0.self_attn.q_proj.bias", torch.ones(64), "a model of this architecture has no such tensor"),
        ("lm_head.weight", torch.ones(300, 63), "has the shape [300, 63]"),
    ],
)
def test_other_tensors_are_refused_by_their_name(name: str, value: torch.Tensor, reason: str, tmp_path: Path) -> None:
    folder = exports.written(tmp_path / "model")
    save_file({**load_file(folder / WEIGHTS), name: value}, folder / WEIGHTS)
    assert f"{name}: {reason}" in refusal(folder)


def test_files_that_are_cut_off_or_elsewhere_are_refused(tmp_path: Path) -> None:
    folder = exports.written(tmp_path / "model")
    raw = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(raw[:-4])
    assert "is not where it should be" in refusal(folder)
    (folder / WEIGHTS).unlink()
    (folder / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": "../model.safetensors"}}))
    assert "../model.safetensors is no file of this folder" in refusal(folder)


def test_a_residual_width_is_read_as_it_was_written(tmp_path: Path) -> None:
    spec = dataclasses.replace(exports.PLAIN, residual_width=24)
    found = open_model(exports.written(tmp_path / "model", spec), Disk())
    assert found.spec == spec
    for shard, arrays in random_theta(spec).items():
        for ours, theirs in zip(arrays, found.shard(shard), strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("value", [None, [], ["x"], {}, {"rope_type": []}, "x", "", True, -1, 0.5, 1e308, 10**30])
def test_no_value_of_any_key_is_more_than_refused(value: object, tmp_path: Path) -> None:
    folder = exports.written(tmp_path / "model")
    config = json.loads((folder / CONFIG).read_text())
    for key in (*config, "rope_scaling", "layer_types", "quantization_config", "residual_width", "document_end_id"):
        (folder / CONFIG).write_text(json.dumps(config | {key: value}))
        with contextlib.suppress(UsageError):
            read(folder)


@pytest.mark.parametrize("value", [None, [], "x", [0.5, 1], [-1, 3], [0, 10**30], [0, "Infinity"], {"a": 1}])
@pytest.mark.parametrize("field", ["shape", "data_offsets", "dtype"])
def test_no_header_of_weights_is_more_than_refused(field: str, value: object, tmp_path: Path) -> None:
    folder = exports.written(tmp_path / "model")
    raw = (folder / WEIGHTS).read_bytes()
    length = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:length])
    header["model.norm.weight"][field] = value
    changed = json.dumps(header).replace('"Infinity"', "Infinity").encode()
    (folder / WEIGHTS).write_bytes(len(changed).to_bytes(8, "little") + changed + raw[length:])
    refusal(folder)
