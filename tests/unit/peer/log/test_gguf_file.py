"""GGUF files of models: what the package `gguf` reads from them, and llama.cpp computes with them, where it is
installed (`pip install llama-cpp-python`)."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, pre_tokenizers

from peer.log import export, gguf_file, model_folder
from peer.net.disk import Disk
from peer.state import tensor_file
from peer.training.model import Stage
from protocol.codec.topk import in_memory
from protocol.errors import UsageError
from protocol.run.layout import ModelSpec, RopeScaling
from tests.support import tiny
from tests.support.chains import random_theta
from tests.support.exports import GPT2, PLAIN, TEXTS, tokenizer, written

YARN = RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
LLAMA3 = RopeScaling(
    rope_type="llama3", factor=8.0, original_max_position_embeddings=32, low_freq_factor=0.5, high_freq_factor=9.0
)
SPECS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"num_key_value_heads": 2},
    "tied": {"tie_word_embeddings": True},
    "qk norm": {"use_qk_norm": True, "num_key_value_heads": 1},
    "narrow": {"residual_width": 24},
    "llama3": {"rope_scaling": LLAMA3},
    "linear": {"rope_scaling": RopeScaling(rope_type="linear", factor=4.0)},
    "yarn": {"rope_scaling": YARN},
    "yarn, qk norm": {"rope_scaling": YARN, "use_qk_norm": True},
    "ids without tokens": {"vocab_size": 310},
}
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)"
    r"|\s+"
)
QWEN = LLAMA.replace("{1,3}", "")


def split(regex: str) -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(regex), "isolated"), BYTES])


SPLITS: dict[str, Any] = {
    "gpt-2": GPT2,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2]),
    "llama-bpe": split(LLAMA),
    "qwen2": split(QWEN),
}


def of_split(name: str, change: Callable[[dict[str, Any]], object] = lambda found: None) -> bytes:
    return tokenizer(SPLITS[name], change, whole_words=name == "llama-bpe")


def spec_of(name: str) -> ModelSpec:
    return dataclasses.replace(PLAIN, **SPECS[name])


@pytest.mark.parametrize("name", SPECS)
def test_its_tensors_and_numbers_are_the_models(name: str, tmp_path: Path) -> None:
    spec, folder = spec_of(name), written(tmp_path / "model", spec_of(name))
    theirs = gguf.GGUFReader(folder / gguf_file.GGUF)
    kind = "qwen3" if spec.use_qk_norm else "llama"

    def field(key: str) -> Any:
        return theirs.fields[key].contents()

    for key, value in {
        "general.architecture": kind,
        "general.name": "a name",
        "general.file_type": gguf.LlamaFileType.ALL_F32,
        "potluck.run": tiny.manifest(model=spec, name="a name").run_id,
        "potluck.round": "7",
        f"{kind}.block_count": 2,
        f"{kind}.context_length": 64,
        f"{kind}.embedding_length": 64,
        f"{kind}.feed_forward_length": 96,
        f"{kind}.attention.head_count": 4,
        f"{kind}.attention.head_count_kv": spec.key_value_heads,
        f"{kind}.rope.freq_base": 500.0,
        f"{kind}.vocab_size": spec.vocab_size,
    }.items():
        assert field(key) == value, key
    assert field(f"{kind}.attention.layer_norm_rms_epsilon") == pytest.approx(spec.norm_eps)
    scaling = spec.rope_scaling
    kept = (f"{kind}.rope.scaling.type", f"{kind}.rope.scaling.factor")
    if scaling is None or scaling.rope_type == "llama3":
        assert not set(kept) & set(theirs.fields)
    else:
        assert tuple(map(field, kept)) == (scaling.rope_type, scaling.factor)
    ours, _ = tensor_file.read(Disk(), folder / model_folder.WEIGHTS)
    found = {tensor.name: tensor.data for tensor in theirs.tensors}
    assert ("output.weight" in found) != spec.tie_word_embeddings
    assert ("rope_freqs.weight" in found) == (name == "llama3")
    found.pop("rope_freqs.weight", None)
    assert len(found) == len(ours)
    np.testing.assert_array_equal(found["token_embd.weight"], ours["model.embed_tokens.weight"])
    np.testing.assert_array_equal(found["blk.1.ffn_gate.weight"], ours["model.layers.1.mlp.gate_proj.weight"])
    np.testing.assert_array_equal(found["blk.1.attn_v.weight"], ours["model.layers.1.self_attn.v_proj.weight"])
    query, given = found["blk.0.attn_q.weight"], ours["model.layers.0.self_attn.q_proj.weight"]
    half = spec.head_dim // 2
    for head in range(spec.n_heads):
        for pair in range(half):
            for part in (0, 1):  # of a pair that is rotated: neighbours here, half a head apart in transformers
                row = head * spec.head_dim + (pair + part * half if spec.use_qk_norm else 2 * pair + part)
                np.testing.assert_array_equal(query[row], given[head * spec.head_dim + pair + part * half])


def test_its_tokens_are_the_tokenizers(tmp_path: Path) -> None:
    raw = tokenizer()
    theirs = gguf.GGUFReader(written(tmp_path / "model", spec_of("ids without tokens"), raw) / gguf_file.GGUF)
    fields = {key: value.contents() for key, value in theirs.fields.items() if key.startswith("tokenizer.")}
    made = Tokenizer.from_str(raw.decode())
    tokens = fields["tokenizer.ggml.tokens"]
    assert tokens[:300] == [made.id_to_token(number) for number in range(300)]
    assert tokens[300:] == [f"[PAD{number}]" for number in range(300, 310)]
    kinds = gguf.TokenType
    assert fields["tokenizer.ggml.token_type"] == [
        kinds.CONTROL,
        kinds.USER_DEFINED,
        *[kinds.NORMAL] * 298,
        *[kinds.UNUSED] * 10,
    ]
    assert fields["tokenizer.ggml.merges"] == [" ".join(pair) for pair in json.loads(raw)["model"]["merges"]]
    assert fields["tokenizer.ggml.model"] == "gpt2"
    assert fields["tokenizer.ggml.pre"] == "gpt-2"
    assert fields["tokenizer.ggml.eos_token_id"] == fields["tokenizer.ggml.bos_token_id"] == 0
    assert fields["tokenizer.ggml.add_bos_token"] is False


@pytest.mark.parametrize("name", SPLITS)
def test_llama_cpps_name_of_a_tokenizer(name: str) -> None:
    assert gguf_file.vocabulary(of_split(name)).pre == name
    normal = of_split(name, lambda found: found.update(normalizer={"type": "NFC"}))
    assert gguf_file.vocabulary(normal).pre == name
    other = tokenizer(SPLITS[name], whole_words=name != "llama-bpe")
    with pytest.raises(UsageError, match="has none that splits"):
        gguf_file.vocabulary(other)


def lowered(found: dict[str, Any]) -> None:
    found["normalizer"] = {"type": "Lowercase"}


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (tokenizer(pre_tokenizers.ByteLevel(add_prefix_space=True)), "has none that splits"),
        (tokenizer(BYTES), "has none that splits"),
        (tokenizer(split(r"\p{L}+|\s+")), "has none that splits"),
        (tokenizer(GPT2, lowered), "has none that splits"),
        (tokenizer(GPT2, lambda found: found["model"].update(byte_fallback=True)), "has none that splits"),
        (tokenizer(GPT2, lambda found: found["model"].pop("vocab")), "cannot be read"),
        (b"[" * 100_000, "cannot be read"),
        (b"\xff", "cannot be read"),
    ],
    ids=["prefix space", "no split", "another split", "lower case", "byte fallback", "no vocabulary", "deep", "bytes"],
)
def test_other_tokenizers_have_no_file(raw: bytes, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        gguf_file.check(PLAIN, raw)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": LLAMA3, "use_qk_norm": True},
        {"rope_scaling": dataclasses.replace(YARN, beta_fast=40.0)},
    ],
    ids=["llama3 with qk norm", "yarn, sharper"],
)
def test_models_that_llama_cpp_does_not_compute_have_none(changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="does not scale RoPE"):
        gguf_file.check(dataclasses.replace(PLAIN, **changes), tokenizer())


def test_nothing_is_left_of_an_export_whose_file_fails(tmp_path: Path) -> None:
    small = dataclasses.replace(PLAIN, vocab_size=299)
    with pytest.raises(UsageError, match="has ids that the model, of 299, has not"):
        written(tmp_path / "model", small)
    assert not list(tmp_path.iterdir())
    endless = tokenizer().replace(b"<|endoftext|>", b"<|x|>")
    with pytest.raises(UsageError, match="no token that ends a text"):
        written(tmp_path / "model", raw=endless)
    assert not list(tmp_path.iterdir())


def test_the_file_is_written_into_an_export_as_with_it(tmp_path: Path) -> None:
    folder = written(tmp_path / "model")
    path = folder / gguf_file.GGUF
    before = path.read_bytes()
    path.unlink()
    export.add_gguf(folder, export.read(folder, Disk(), lambda _: in_memory), Disk())
    assert path.read_bytes() == before
    assert not [name for name in Disk().names(folder) if name.startswith(".")]


def test_the_package_is_asked_for_before_any_work(tmp_path: Path) -> None:
    command = f"main(['export', {str(tmp_path)!r}, '--out', 'model', '--gguf'])"
    code = f"import sys; sys.modules['gguf'] = None; from peer.cli.main import main; {command}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "potluck: --gguf: the package gguf is not installed here; type pip install gguf, or leave --gguf out"
    ]


# --- llama.cpp itself

needs_llama_cpp = pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None, reason="llama.cpp is not installed: pip install llama-cpp-python"
)


def loaded(folder: Path) -> Any:
    import llama_cpp

    fp32 = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}  # else it keeps keys in fp16
    threads = {"n_threads": 1, "n_threads_batch": 1}  # more of them wait for each other on a busy machine
    path = str(folder / gguf_file.GGUF)
    return llama_cpp.Llama(path, n_ctx=64, logits_all=True, verbose=False, **fp32, **threads)


@needs_llama_cpp
@pytest.mark.parametrize("name", SPECS)
def test_llama_cpp_computes_the_same_logits(name: str, tmp_path: Path) -> None:
    spec = spec_of(name)
    ids = np.random.default_rng(3).integers(1, 300, 48)
    theirs = loaded(written(tmp_path / "model", spec))
    theirs.eval(ids.tolist())
    ours = Stage(spec, 0, spec.n_layers, True, True)
    ours.load(random_theta(spec))
    with torch.no_grad():
        expected = ours.logits(ours(torch.tensor([ids.tolist()])))[0].numpy()
    difference = np.abs(theirs.scores[:48, : spec.vocab_size] - expected)
    assert difference.max() < 1e-4
    assert np.abs(expected).max() > 0.1


@needs_llama_cpp
@pytest.mark.parametrize("name", SPLITS)
def test_llama_cpp_tokenizes_the_same(name: str, tmp_path: Path) -> None:
    raw = of_split(name)
    theirs, ours = loaded(written(tmp_path / "model", raw=raw)), Tokenizer.from_str(raw.decode())
    for text in (*TEXTS, " ", "\r\n\r\n x", "don't DON'T we'Ve", "1234567", "<|own|>a", "a\u00a0b", "…—«»"):
        assert theirs.tokenize(text.encode(), add_bos=False, special=True) == ours.encode(text).ids, text
