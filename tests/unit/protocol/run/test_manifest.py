"""Manifests: refused by field, digest stable, hints outside of the digest."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.codec import blob_hash
from protocol.errors import UsageError
from protocol.run import layout
from protocol.run.layout import ModelSpec, RopeScaling
from protocol.run.manifest import ChainSpec, DataSpec, HintSpec, Manifest, from_bytes, from_toml, parameters, to_toml
from protocol.wire.schema import plain
from tests.support import tiny


def _toml(field: str = "", value: str | None = None) -> bytes:
    """A good manifest file in which a field (`table.field`) has another value, or is missing."""
    lines = to_toml(tiny.manifest()).splitlines()
    if field:
        table, _, name = field.rpartition(".")
        start = lines.index(f"[{table}]") if table else 0
        at = next(i for i in range(start, len(lines)) if lines[i].startswith(f"{name} ="))
        lines[at : at + 1] = [] if value is None else [f"{name} = {value}"]
    return ("\n".join(lines) + "\n").encode()


def _refusal(raw: bytes) -> str:
    with pytest.raises(UsageError) as caught:
        from_toml(raw, "run.toml")
    text = str(caught.value)
    assert text.startswith("manifest run.toml: ")
    assert "\n" not in text
    return text


def test_toml_round_trip() -> None:
    manifest = tiny.manifest(hints=HintSpec(bootstrap=("/ip4/127.0.0.1/tcp/1/p2p/x",)))
    assert from_toml(to_toml(manifest).encode(), "t") == manifest


@given(name=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=64).filter(str.isprintable))
def test_any_printable_name_survives_both_forms(name: str) -> None:
    manifest = tiny.manifest(name=name)
    assert from_toml(to_toml(manifest).encode(), "t").name == name
    assert from_bytes(manifest.to_bytes(), "b").name == name


def test_the_travelling_form_has_no_hints_and_the_same_run() -> None:
    manifest = tiny.manifest(hints=HintSpec(bootstrap=("/dns/x/tcp/1/p2p/y",)))
    back = from_bytes(manifest.to_bytes(), "b")
    assert back == dataclasses.replace(manifest, hints=HintSpec())
    assert back.run_id == manifest.run_id


def test_the_run_id_is_frozen() -> None:
    """A change of this digest is a change of the format."""
    assert tiny.manifest().run_id == FROZEN


def test_the_digests_of_weights_to_begin_with_are_part_of_the_run() -> None:
    base, shards = tiny.manifest(), layout.shard_names(tiny.manifest().model)
    names = tuple(tiny.digest(shard) for shard in shards)
    made = tiny.manifest(initial_state=names)
    assert from_toml(to_toml(made).encode(), "t") == from_bytes(made.to_bytes(), "b") == made
    assert made.initial_digests == dict(zip(shards, names, strict=True))
    assert base.initial_digests == {}
    assert len({base.run_id, made.run_id, tiny.manifest(initial_state=names[::-1]).run_id}) == 3

    def refusal(*given: str) -> str:
        return _refusal(
            to_toml(base).replace("format = 1", f"format = 1\ninitial_state = {json.dumps(given)}").encode()
        )

    assert "initial_state must have a digest of each of the model's 6 shards" in refusal(*names[1:])
    assert "initial_state[1]: must be a digest of 32 bytes" in refusal(names[0], "x", *names[2:])
    assert "initial_state[0]: must be a digest of 32 bytes" in refusal(names[0].upper(), *names[1:])


def test_what_makes_no_sense_together_with_an_outer_momentum_is_refused() -> None:
    base = to_toml(tiny.manifest())
    dense, nesterov = 'topk = 4096\nvalues = "fp32"', 'optimizer = "nesterov"'

    def of(*lines: str, head: str = "") -> bytes:
        table, rest = base.split("[outer]\n")
        kept = [line for line in rest.splitlines() if not line.startswith(("topk", "values"))]
        return "\n".join([head, table, "[outer]", *lines, *kept]).encode()

    made = from_toml(of(dense, nesterov), "t")
    assert made.outer.momentum == 0.9
    assert made.state_bytes("head") == 2 * layout.shard_bytes(made.model, "head")
    assert made.state_shapes("head") == 2 * layout.shapes(made.model, "head")
    plain_run = from_toml(of(dense), "t")
    assert from_toml(of(dense, 'optimizer = "sgd"', "momentum = 0.9"), "t").run_id == plain_run.run_id
    assert len({made.run_id, plain_run.run_id, from_toml(of(dense, nesterov, "momentum = 0.8"), "t").run_id}) == 3
    digests = json.dumps(["1" * 64] * len(layout.shard_names(made.model)))
    for lines, head, text in [
        (['topk = 4096\nvalues = "sym2"', nesterov], "", 'outer: optimizer must be sgd where values is "sym2"'),
        ([dense, 'transform = "dct"'], "", "outer: transform must be none, sample 1 where values is fp32, which"),
        ([dense, "aggregate_topk = 256"], "", 'outer: aggregate_topk must be 0 where values is "fp32"'),
        ([dense, "sample = 0.5"], "", "outer: transform must be none, sample 1 where values is fp32, which"),
        ([dense, 'optimizer = "adam"'], "", 'outer: optimizer must be one of sgd, nesterov, not "adam"'),
        ([dense, nesterov, "momentum = 0.0"], "", "outer: momentum must be more than 0 and less than 1"),
        ([dense, nesterov, "momentum = 1.0"], "", "outer: momentum must be more than 0 and less than 1"),
        ([dense, nesterov], f"initial_state = {digests}", "initial_state must be empty where outer.optimizer is"),
    ]:
        assert text in _refusal(of(*lines, head=head))


def test_every_field_but_the_hints_is_in_the_run_id() -> None:
    base = tiny.manifest()
    changed = {
        "name": "other", "license": "mit", "seed": 2, "checkpoint_rounds": 3, "rounds": 6, "start_peers": 3,
        "model": dataclasses.replace(base.model, d_ff=32), "outer": dataclasses.replace(base.outer, beta=0.9),
        "train": dataclasses.replace(base.train, lr=2e-3), "timing": dataclasses.replace(base.timing, gone_after=13.0),
        "judging": dataclasses.replace(base.judging, clip=2.0),
        "evaluation": dataclasses.replace(base.evaluation, every=3),
        "admission": dataclasses.replace(base.admission, mode="listed"),
        "chains": dataclasses.replace(base.chains, forward="bf16"),
        "data": dataclasses.replace(base.data, corpus="1" * 64),
        "tokenizer": dataclasses.replace(base.tokenizer, digest="1" * 64),
        "initial_state": ("1" * 64,) * len(layout.shard_names(base.model)),
    }  # fmt: skip
    ids = {tiny.manifest(**{field: value}).run_id for field, value in changed.items()}
    assert len(ids | {base.run_id}) == len(changed) + 1
    assert {*changed, "hints", "operators", "quorum", "format"} == {f.name for f in dataclasses.fields(Manifest)}
    assert tiny.manifest(hints=HintSpec(bootstrap=("x",))).run_id == base.run_id


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("rounds", None, "rounds: missing field"),
        ("rounds", '"5"', "rounds: must be int, not str"),
        ("rounds", "0", "rounds: must be in 1..1000000000"),
        ("name", '""', "name must have 1 to 64 printable characters"),
        ("name", r'"a\nb"', "name must have 1 to 64 printable characters"),
        ("train.lr", "nan", "train.lr: must be a finite number"),
        ("train.lr", "-1.0", "train: lr must be more than 0 and at most 10, clip at most 1e+06"),
        ("model.d_model", "9", "model: d_model / n_heads must be an even whole number"),
        ("tokenizer.digest", '"xyz"', "must be a sha256 in 64 hexadecimal digits"),
        ("operators", '["me"]', "not an Ed25519 peer id"),
        ("operators", "[]", "operators must name at least quorum and at most 16 different peer ids"),
        ("quorum", "3", "quorum: 3 nodes bear no dishonest one, and stop when one is lost; use 1, 4 or 7"),
        ("quorum", "6", "quorum: 6 nodes bear one dishonest one, as 4 do; use 1, 4 or 7"),
        ("train.sequence", "9", "train.sequence must be at most model.context"),
        ("timing.gone_after", "61.0", "timing: heartbeat < gone_after < round_deadline must hold"),
        ("format", "2", "format 2 is not known to this version (knows 1)"),
        ("data.corpus", '"sotu"', "data: corpus must be a sha256 in 64 hexadecimal digits"),
        ("data.corpus", None, "data.corpus: missing field"),
        (
            "data.mirrors",
            '["http://a/b"]',
            'data: mirrors must begin with "https://" or "hf://", without blanks, not "http://a/b"',
        ),
        ("data.mirrors", '["https://a/b c"]', "without blanks"),
        *(
            ("data.mirrors", f'["https://{host}/corpus"]', "data: mirrors must be hosts of the internet, not")
            for host in (
                *("169.254.169.254", "10.0.0.1", "localhost", "a.localhost", "printer.local", "[::1]", "127.1"),
                *("a:b@example.com", "127.0.0.1:8443", "[::ffff:10.0.0.1]", "example.com:70000", "2130706433", ""),
            )
        ),
        ("timing.heartbeat", "1e-9", "timing.heartbeat: must be in 0.1.."),
        ("timing.round_deadline", "1e9", "timing.round_deadline: must be in 1.0..2592000.0"),
        ("timing.round_seconds", "1e-9", "timing: round_seconds must be 0 or in 1..0.8 round_deadline"),
        ("train.lr", "1e300", "train: lr must be more than 0 and at most 10"),
        ("train.clip", "1e300", "clip at most 1e+06"),
        ("outer.eta", "1e300", "outer: beta must be in [0, 1], eta more than 0 and at most 10"),
        ("train.micro_batches", "65537", "train.micro_batches: must be in 1..65536"),
        ("model.context", "16777216", "model.context: must be in 1..1048576"),
        ("tokenizer.file", r'"a\u0000b"', "tokenizer: file must have at most 128 printable characters"),
        ("hints.bootstrap", json.dumps(["x"] * 65), "hints.bootstrap: has 65 entries; at most 64"),
        ("data.mirrors", json.dumps(["https://a"] * 9), "data.mirrors: has 9 entries; at most 8"),
        (
            "data.mirrors",
            json.dumps(["https://" + "a" * 505]),
            "data.mirrors[0]: has 513 entries; at most 512",
        ),
        ("train.beta1", "1.0", "train: beta1 and beta2 must be in [0, 1)"),
        ("train.warmup_steps", "100", "train: warmup_steps must be less than total_steps"),
        ("outer.values", '"int3"', 'outer: values must be one of sym2, int4, int8, fp32, not "int3"'),
        ("outer.eta", "1.0\nsample = 1.5", "outer: sample must be at most 1 and at least topk / 4096"),
        ("outer.eta", "1.0\nsample = 0.0078", "outer: sample must be at most 1 and at least topk / 4096"),
        ("outer.values", '"int8"', "outer: topk must be 4096 where values is int8, which sends every element"),
        ("outer.eta", '1.0\ntransform = "fft"', 'outer: transform must be one of none, dct, not "fft"'),
        ("outer.indices", '"raw"', 'outer: indices must be rice, not "raw"'),
        ("rounds", "9" * 5000, "for integer string conversion"),
        ("train.lr", "9" * 400, "train.lr: must fit in 64 bits"),
        ("model.n_layers", "513", "model.n_layers: must be in 1..512"),
        ("model.d_ff", "16777217", "model.d_ff: must be in 1..16777216"),
        ("model.rope_theta", "1.0", "model: rope_theta must be more than 1"),
        ("data.mirrors", "[" * 5000, "manifest"),
        ("chains.forward", '"fp16"', 'chains: forward must be one of bf16, fp32, int8, int4, tah4, sym2, not "fp16"'),
        ("chains.backward", '""', "chains: backward must be one of bf16, fp32, int8, int4, tah4, sym2"),
    ],
)
def test_a_bad_field_is_refused_by_name(field: str, value: str | None, text: str) -> None:
    assert text in _refusal(_toml(field, value))


@pytest.mark.parametrize(("table", "line"), [("chains", "rank = [4]"), ("train", "scale_embedding_lr = true")])
def test_a_manifest_with_a_rank_or_a_rate_of_the_embedding_is_refused(table: str, line: str) -> None:
    old = to_toml(tiny.manifest()).replace(f"[{table}]", f"[{table}]\n{line}").encode()
    assert f"{table}.{line.partition(' ')[0]}: unknown field" in _refusal(old)


def test_chains_send_what_blocks_write() -> None:
    base = tiny.manifest()
    narrow = tiny.manifest(model=dataclasses.replace(base.model, residual_width=2))
    assert (base.model.written, narrow.model.written) == (8, 2)
    assert (base.chains.forward, base.chains.backward) == ("int8", "int4")
    assert narrow.run_id != base.run_id


@pytest.mark.parametrize(
    ("line", "text"),
    [('source = "sotu"', "data.source: "), ('files = ["a.txt"]', "data.files: "), ('digest = ""', "data.digest: ")],
)
def test_a_manifest_of_an_earlier_version_is_refused_by_the_field_that_is_gone(line: str, text: str) -> None:
    old = to_toml(tiny.manifest()).replace("[data]", f"[data]\n{line}").encode()
    assert text + "unknown field" in _refusal(old)


LLAMA3 = RopeScaling(rope_type="llama3", factor=32.0, original_max_position_embeddings=8192)
OPTIONS: dict[str, Any] = {
    "num_key_value_heads": 1, "tie_word_embeddings": True, "use_qk_norm": True, "rope_scaling": LLAMA3,
    "document_end_id": 3, "residual_width": 2,
}  # fmt: skip


@pytest.mark.parametrize("field", OPTIONS)
def test_an_option_of_the_model_is_another_run_and_survives_both_forms(field: str) -> None:
    base = tiny.manifest()
    manifest = tiny.manifest(model=dataclasses.replace(base.model, **{field: OPTIONS[field]}))
    assert manifest.run_id != base.run_id
    assert from_toml(to_toml(manifest).encode(), "t") == manifest == from_bytes(manifest.to_bytes(), "b")
    assert {f.name for f in dataclasses.fields(ModelSpec) if f.metadata} == set(OPTIONS)


def test_a_run_of_before_the_options_keeps_its_name() -> None:
    """What an earlier version wrote has none of them, and what is written of such a run has none either."""
    raw = tiny.manifest().to_bytes()
    assert not set(OPTIONS) & set(json.loads(raw)["model"])
    spelled = json.loads(raw)
    spelled["model"] |= {field: getattr(tiny.manifest().model, field) for field in OPTIONS}
    assert from_bytes(json.dumps(spelled).encode(), "b").run_id == FROZEN


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        ("num_key_value_heads = 3", "model: num_key_value_heads must divide n_heads, or be 0 for as many"),
        ("num_key_value_heads = -1", "model: num_key_value_heads must divide n_heads"),
        ("document_end_id = 16", "model: document_end_id must be an id of the vocabulary, or -1 for none"),
        ("document_end_id = -2", "model: document_end_id must be an id"),
        ("residual_width = 8", "model: residual_width must be at least 0 and less than d_model"),
        ("residual_width = -2", "model: residual_width must be at least 0 and less than d_model"),
        ("residual_width = 3", "model.residual_width = 3 has no int4: int4 needs an even number of values per token"),
        ("residual_width = 2.0", "model.residual_width: must be int, not float"),
        (
            "residual_width = 2\ntie_word_embeddings = true",
            "model: residual_width must be 0 where tie_word_embeddings is on",
        ),
        ("use_qk_norm = 1", "model.use_qk_norm: must be bool, not int"),
        ('rope_scaling = "yarn"', "model.rope_scaling: must be a table, not str"),
        ("rope_scaling = {}", "model.rope_scaling.rope_type: missing field"),
        ('rope_scaling = {rope_type = "dynamic", factor = 2.0}', "rope_type must be one of linear, llama3, yarn"),
        ('rope_scaling = {rope_type = "linear", factor = 0.5}', "model.rope_scaling.factor: must be in 1..1000000.0"),
        (
            'rope_scaling = {rope_type = "yarn", factor = 2.0}',
            "original_max_position_embeddings must be in 1..16777216",
        ),
        (
            'rope_scaling = {rope_type = "linear", factor = 2.0, low_freq_factor = 4.0}',
            "0 < low_freq_factor < high_freq_factor <= 1e+06 must hold",
        ),
        ('rope_scaling = {rope_type = "linear", factor = 2.0, beta_slow = 0.0}', "0 < beta_slow < beta_fast"),
        ('rope_scaling = {rope_type = "linear", factor = 2.0, theta = 1.0}', "model.rope_scaling.theta: unknown field"),
    ],
)  # fmt: skip
def test_a_bad_option_of_the_model_is_refused_by_name(lines: str, text: str) -> None:
    assert text in _refusal(_toml().replace(b"[model]", f"[model]\n{lines}".encode()))


def test_mirrors_are_kept_in_their_order() -> None:
    mirrors = tuple(f"hf://datasets/a/b{i}" for i in range(8))
    manifest = tiny.manifest(data=DataSpec(corpus="1" * 64, mirrors=mirrors))
    assert from_toml(to_toml(manifest).encode(), "t").data.mirrors == mirrors


SEVENTY_B = ModelSpec(vocab_size=152_000, d_model=8192, n_layers=80, n_heads=64, d_ff=28_672, context=4096)


def test_a_manifest_of_70b_is_taken() -> None:
    """Its embedding has 4.98 GB."""
    train = dataclasses.replace(tiny.manifest().train, sequence=4096)
    narrow = dataclasses.replace(SEVENTY_B, residual_width=2688)
    manifest = tiny.manifest(model=narrow, train=train)
    assert from_bytes(manifest.to_bytes(), "b") == manifest
    assert layout.shard_bytes(SEVENTY_B, "head") > 1 << 32
    assert (
        max(layout.shard_bytes(SEVENTY_B, shard) for shard in layout.shard_names(SEVENTY_B)) <= blob_hash.MAX_BLOB_BYTES
    )


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (
            {"vocab_size": 300_000},
            "model: head has 9.8 GB, a shard may have 8.6 GB; choose a smaller vocab_size or d_model",
        ),
        ({"d_ff": 90_112}, "model: block.0 has 9.9 GB, a shard may have 8.6 GB; choose a smaller d_model or d_ff"),
    ],
)  # fmt: skip
def test_a_shard_that_is_no_blob_is_refused(model: dict[str, int], text: str) -> None:
    data = plain(tiny.manifest(model=SEVENTY_B, train=dataclasses.replace(tiny.manifest().train, sequence=4)))
    data["model"] |= model
    with pytest.raises(UsageError) as caught:
        from_bytes(json.dumps(data).encode(), "run.toml")
    assert f"manifest run.toml: {text}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_micro_batch_that_is_no_frame_is_refused() -> None:
    """Whole activations of a 70B model: 4096 tokens of 4098 bytes."""
    data = plain(tiny.manifest(model=SEVENTY_B, chains=ChainSpec(forward="int4")))
    data["train"]["sequence"] = 4096
    with pytest.raises(
        UsageError, match=r": a micro-batch of 4096 tokens of 8192 values in int4 does not fit in a frame of 16777216"
    ):
        from_bytes(json.dumps(data).encode(), "run.toml")


def test_unknown_fields_are_refused_at_every_level() -> None:
    assert "colour: unknown field; known here: name, license, seed" in _refusal(b"colour = 1\n" + _toml())
    assert "model.colour: unknown field" in _refusal(_toml().replace(b"[model]", b"[model]\ncolour = 1"))


def test_what_a_stranger_wrote_is_shown_on_one_printable_line() -> None:
    for key in ("a\nb", "\x1b[2J", "\u202e", "k" * 60_000):
        with pytest.raises(UsageError) as caught:
            from_bytes(json.dumps({key: 1}).encode(), "m")
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("raw", [b"\xff\xfe", b"a = [", b"", b"x" * 100_000, b"[model]\n" * 2])
def test_what_is_no_manifest_is_refused(raw: bytes) -> None:
    _refusal(raw)


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b"3", b"\xff", b"[" * 60_000, b"{}" + b" " * 70_000])
def test_what_is_no_travelling_form_is_refused(raw: bytes) -> None:
    with pytest.raises(UsageError, match="manifest m: "):
        from_bytes(raw, "m")


def test_the_number_of_parameters() -> None:
    V, d, F, L = 16, 8, 16, 4
    assert parameters(tiny.manifest()) == 2 * V * d + d + L * (4 * d * d + 3 * d * F + 2 * d)


FROZEN = "f2a637950f908d769058adc29e58f8191c9b343e84848cd0f99f7fa47df6f6c8"


def test_the_optimizer_is_a_choice_that_old_manifests_did_not_have() -> None:
    """A manifest without it has the run id of before; another choice, and another momentum, are other runs."""
    base = tiny.manifest()
    plain, *others = (
        tiny.manifest(train=dataclasses.replace(base.train, **changes))
        for changes in ({"optimizer": "adamw"}, {"optimizer": "muon"}, {"optimizer": "muon", "momentum": 0.9})
    )
    assert plain.run_id == FROZEN
    assert len({FROZEN, *(manifest.run_id for manifest in others)}) == 3
    for manifest in others:
        assert from_toml(to_toml(manifest).encode(), "m").run_id == manifest.run_id
    for changes in ({"optimizer": "adam"}, {"momentum": 1.0}, {"momentum": -0.1}):
        with pytest.raises(ValueError, match="must be"):
            dataclasses.replace(base.train, **changes)


def test_a_licence_is_named_as_the_hub_writes_it() -> None:
    plain_run, named = tiny.manifest(), tiny.manifest(license="cc-by-sa-4.0")
    assert named.run_id != plain_run.run_id
    assert "license" not in to_toml(plain_run)
    assert from_toml(to_toml(named).encode(), "t") == named == from_bytes(named.to_bytes(), "b")
    for bad in ("Apache 2.0", 'mit"', "a" * 65, "-x", "mit\n"):
        with pytest.raises(ValueError, match="license"):
            tiny.manifest(license=bad)
