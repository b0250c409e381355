"""Every option of the architecture, on and off: transformers computes the same logits from an export, a chain computes
what the whole model does, and text that grows is as text that is computed at once."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from peer.cli.model import Choice, replayed
from peer.log import export, model_folder
from peer.log.replay import State
from peer.net.disk import Disk
from peer.state import tensor_file
from peer.training import inference
from peer.training.inference import Dice
from peer.training.model import Past, Stage
from peer.training.trainer import StageTrainer
from peer.ui.progress import Progress
from protocol.codec.topk import in_memory
from protocol.errors import LocalError, UsageError
from protocol.run import layout
from protocol.run.layout import ModelSpec, RopeScaling
from protocol.run.manifest import TokenizerSpec
from tests.faults import history
from tests.faults.processes import Swarm
from tests.support import tiny
from tests.support.chains import (
    ANCHOR,
    SPEC,
    TRAIN,
    Oracle,
    gradients,
    make_chain,
    narrow,
    random_theta,
    relative,
    run_chain,
)

LLAMA3 = RopeScaling(rope_type="llama3", factor=8.0, original_max_position_embeddings=12)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"num_key_value_heads": 2},
    "one key head": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "qk norm": {"use_qk_norm": True},
    "linear": {"rope_scaling": RopeScaling(rope_type="linear", factor=4.0)},
    "llama3": {"rope_scaling": LLAMA3},
    "llama3, narrow": {
        "rope_scaling": RopeScaling(
            rope_type="llama3", factor=4.0, original_max_position_embeddings=200,
            low_freq_factor=0.5, high_freq_factor=9.0
        )
    },
    "yarn": {"rope_scaling": RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=512)},
    "yarn, sharp": {
        "rope_scaling": RopeScaling(
            rope_type="yarn", factor=2.0, original_max_position_embeddings=8, beta_slow=31.0, beta_fast=40.0
        )
    },
    "documents": {"document_end_id": 0},
    "narrow": {"residual_width": 24},
    "llama today": {
        "num_key_value_heads": 2, "tie_word_embeddings": True, "rope_scaling": LLAMA3, "document_end_id": 0,
    },
    "qwen today": {"num_key_value_heads": 2, "tie_word_embeddings": True, "use_qk_norm": True, "document_end_id": 0},
    "qwen untied": {"num_key_value_heads": 1, "use_qk_norm": True, "rope_scaling": LLAMA3, "document_end_id": 0},
}  # fmt: skip
ROUNDS = 2
SIZES = {"vocab_size", "d_model", "n_layers", "n_heads", "d_ff", "context"}
IN_CHAINS = ("grouped", "yarn", "documents", "qwen untied")
"""With all that a stage treats differently."""
IDS = torch.tensor(np.random.default_rng(3).integers(1, SPEC.vocab_size, (3, SPEC.context)))
PACKED = IDS.clone()
PACKED[0, 4] = PACKED[0, 9] = PACKED[1, 0] = PACKED[2, -1] = (
    0  # ends of documents: within, at the first token, at the last
)


def spec_of(name: str) -> ModelSpec:
    return dataclasses.replace(SPEC, norm_eps=1e-6, rope_theta=500.0, **OPTIONS[name])


def whole(spec: ModelSpec) -> Stage:
    stage = Stage(spec, 0, spec.n_layers, True, True)
    stage.load(random_theta(spec))
    return stage


def test_every_option_of_the_architecture_is_here() -> None:
    """Each option of a model has another value than its default in one of them; each RoPE kind and number is there."""
    varied = {name for option in OPTIONS for name in differing(spec_of(option))}
    assert varied == {f.name for f in dataclasses.fields(ModelSpec)} - SIZES
    scalings = [spec.rope_scaling for spec in map(spec_of, OPTIONS) if spec.rope_scaling is not None]
    assert {scaling.rope_type for scaling in scalings} == set(layout.ROPE_TYPES)
    assert set().union(*map(differing, scalings)) == {f.name for f in dataclasses.fields(RopeScaling)}


def differing(spec: ModelSpec | RopeScaling) -> set[str]:
    """The fields that are no sizes and whose values are not the defaults."""
    return {f.name for f in dataclasses.fields(spec) if f.name not in SIZES and getattr(spec, f.name) != f.default}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "model"


def words(spec: ModelSpec) -> bytes:
    """A tokenizer for it."""
    found = {"<|endoftext|>": 0} | {f"w{i}": i for i in range(1, spec.vocab_size)}
    return Tokenizer(WordLevel(found, unk_token="<|endoftext|>")).to_str().encode()  # type: ignore[arg-type]


def written(spec: ModelSpec, folder: Path) -> Path:
    digests = dict.fromkeys(layout.shard_names(spec), "0" * 64)
    export.write(tiny.manifest(model=spec), State(1, random_theta(spec), digests), words(spec), folder, Disk())
    return folder


@pytest.mark.parametrize(
    ("name", "shape", "reason"),
    [
        ("model.embed_tokens.weight", (5,), "has the shape"),
        ("model.layers.0.self_attn.o_proj.weight", (), "has the shape"),
        ("model.layers.1.mlp.down_proj.weight", (SPEC.d_model, SPEC.d_ff), "writes more than the first 24 columns"),
    ],
)
def test_an_export_that_is_no_model_of_its_residual_width_is_refused(
    name: str, shape: tuple[int, ...], reason: str, folder: Path
) -> None:
    path = written(spec_of("narrow"), folder) / model_folder.WEIGHTS
    tensors, about = tensor_file.read(Disk(), path)
    Disk().write(path, *tensor_file.pieces({**tensors, name: np.ones(shape, np.float32)}, about))
    with pytest.raises(UsageError, match=f"{name}: {reason}"):
        export.read(folder, Disk(), lambda spec: in_memory)


@pytest.mark.parametrize("name", OPTIONS)
def test_transformers_computes_the_logits_of_an_export(name: str, folder: Path) -> None:
    import transformers  # late: the import takes seconds

    spec = spec_of(name)
    ids = IDS if spec.document_end_id < 0 else PACKED
    theirs = transformers.AutoModelForCausalLM.from_pretrained(written(spec, folder)).eval()
    kind = transformers.Qwen3ForCausalLM if spec.use_qk_norm else transformers.LlamaForCausalLM
    assert type(theirs) is kind
    ours = {n for s in layout.shard_names(spec) for n, _ in layout.tensors(spec, s)}
    assert ours - {ANCHOR} == set(theirs.state_dict()) - ({"lm_head.weight"} if spec.tie_word_embeddings else set())
    found = logits(whole(spec), ids)
    with torch.no_grad():
        expected = theirs(ids, position_ids=places(spec, ids), use_cache=False).logits
    assert float((found - expected).abs().max()) < 1e-4
    without = dataclasses.replace(spec, rope_scaling=None, document_end_id=-1)
    if without != spec:
        assert relative(logits(whole(without), ids), expected) > 1e-3, "the option is felt"


@torch.no_grad()
def logits(stage: Stage, ids_BL: torch.Tensor) -> torch.Tensor:
    return stage.logits(stage(ids_BL))


def places(spec: ModelSpec, ids_BL: torch.Tensor) -> torch.Tensor | None:
    """As transformers packs documents: positions begin again behind each end."""
    if spec.document_end_id < 0:
        return None
    found = torch.zeros_like(ids_BL)
    for row, ids in enumerate(ids_BL.tolist()):
        for i, before in enumerate(ids[:-1]):
            found[row, i + 1] = 0 if before == spec.document_end_id else found[row, i] + 1
    return found


@pytest.mark.parametrize("name", OPTIONS)
def test_what_was_exported_is_read_again(name: str, folder: Path) -> None:
    spec = spec_of(name)
    back = export.read(written(spec, folder), Disk(), lambda _: in_memory)
    assert back.spec == spec
    for shard, arrays in random_theta(spec).items():
        for a, b in zip(arrays, back.theta[shard], strict=True):
            np.testing.assert_array_equal(a, b)
    path = folder / model_folder.CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_key_value_heads": 3}))
    with pytest.raises(UsageError, match="num_key_value_heads must divide n_heads"):
        export.read(folder, Disk(), lambda _: in_memory)


@pytest.mark.parametrize("name", ["plain", "llama today", "qwen untied"])
def test_the_log_a_full_replica_and_a_chains_members_give_the_same_files(name: str, tmp_path: Path) -> None:
    """Of a run that was not trained (tests/faults/history.py); runs that were are in tests/e2e/test_export.py."""
    spec = spec_of(name)
    manifest = tiny.manifest(model=spec, tokenizer=TokenizerSpec(digest=hashlib.sha256(words(spec)).hexdigest()))
    swarm = Swarm(tmp_path / "run", manifest, tiny.OPERATORS[:1], corpus=tmp_path)
    parts = {"a": (0, 1), "b": (1, spec.n_layers)} if not spec.tie_word_embeddings else {"a": (0, spec.n_layers)}
    history.write(swarm, ROUNDS, parts, whole=["full"], young=[])
    (swarm.folder / "node-0" / "tokenizer.json").write_bytes(words(spec))
    made = []
    for members in ([], ["full"], list(parts)):
        checkpoints = tuple(swarm.folder / member / f"checkpoint-{ROUNDS:08d}" for member in members)
        found = asyncio.run(replayed(Choice(str(swarm.folder / "node-0"), None, checkpoints), Progress()))
        export.write(found.manifest, found.state, found.tokenizer, tmp_path / f"model-{len(made)}", Disk())
        made.append({path.name: path.read_bytes() for path in (tmp_path / f"model-{len(made)}").iterdir()})
    assert model_folder.WEIGHTS in made[0]
    assert made[0] == made[1] == made[2]


@pytest.mark.parametrize("name", ["documents", "qwen today"])
def test_nothing_of_one_document_reaches_another(name: str) -> None:
    """Each document alone gives the logits that it has in the sequence."""
    ours, ids = whole(spec_of(name)), PACKED[0]
    packed = logits(ours, ids[None])[0]
    alone = [logits(ours, part[None])[0] for part in (ids[:5], ids[5:10], ids[10:])]
    assert float((packed - torch.cat(alone)).abs().max()) < 1e-4


@pytest.mark.parametrize("name", OPTIONS)
def test_text_that_grows_is_as_text_at_once(name: str) -> None:
    ours = whole(spec_of(name))
    for row in (IDS[0], *PACKED):
        past, expected = Past(), logits(ours, row[None])[0]
        with torch.no_grad():
            found = [ours.logits(ours.further(row[None, :6], past))[0]]
            found += [ours.logits(ours.further(row[None, i : i + 1], past))[0] for i in range(6, len(row))]
        assert float((torch.cat(found) - expected).abs().max()) < 1e-4
    sampled = inference.continuation(ours, [5, 0, 7], SPEC.context, Dice(0, temperature=1.0))
    assert all(0 <= next(sampled) < SPEC.vocab_size for _ in range(2 * SPEC.context))


# --- chains


def ends_in(step: int) -> np.ndarray:
    """Text of an inner step in which every row has some documents."""
    rng = np.random.default_rng(step)
    ids = rng.integers(1, SPEC.vocab_size, (TRAIN.step_rows, TRAIN.sequence + 1))
    ids[np.arange(len(ids)), rng.integers(0, TRAIN.sequence, len(ids))] = 0
    return ids


async def read(step: int) -> np.ndarray:
    return ends_in(step)


@pytest.mark.parametrize("name", IN_CHAINS)
def test_a_chain_has_the_bits_of_the_whole_model(name: str) -> None:
    spec = spec_of(name)
    chain, plain = make_chain((2, 4), 0, spec=spec), make_chain((), 0, spec=spec)
    reports, expected = (asyncio.run(run_chain(c, steps=2, read=read)) for c in (chain, plain))
    assert [(r.loss, r.norm) for r in reports[0]] == [(r.loss, r.norm) for r in expected[0]]
    for trainer in chain:
        for shard in trainer.shards:
            for a, b in zip(trainer.delta(shard), plain[0].delta(shard), strict=True):
                np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", IN_CHAINS)
def test_a_compressed_chain_trains_as_the_oracle(name: str) -> None:
    spec = spec_of(name)
    chain, oracle = make_chain((1, 3), 8, spec=spec), Oracle(narrow(8, spec), TRAIN, (1, 3))
    oracle.begin_round(random_theta(oracle.spec))
    reports, expected = (asyncio.run(run_chain(c, steps=2, read=read)) for c in (chain, [oracle]))
    assert [r.loss for r in reports[0]] == pytest.approx([r.loss for r in expected[0]], rel=1e-5)
    there, here = gradients(chain), gradients([oracle])
    assert set(there) == set(here)
    for key, gradient in there.items():
        assert relative(gradient, here[key]) < 1e-5, key


def test_a_tied_matrix_is_no_chains() -> None:
    for shards in (("embed", "block.0"), ("block.3", "head")):
        with pytest.raises(LocalError, match="tied embeddings: must be the whole model"):
            StageTrainer(spec_of("tied"), TRAIN, shards)
    with pytest.raises(ValueError, match="residual_width must be 0 where tie_word_embeddings is on"):
        narrow(8, spec_of("tied"))
