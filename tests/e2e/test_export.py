"""`potluck export`, `sample` and `eval` give what the log gives, and transformers computes the same with it."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
import torch

from peer.cli import main, watch
from peer.log import replay
from peer.log.model_folder import WEIGHTS
from peer.training.model import Stage
from peer.ui.text import harmless
from protocol.run import layout
from protocol.run.layout import ModelSpec, RopeScaling
from protocol.run.manifest import Manifest
from protocol.wire import schema
from tests.e2e import swarms
from tests.support.family import FAMILY

ROUNDS = 3
SHARED: dict[str, Any] = {"num_key_value_heads": 1, "use_qk_norm": True, "document_end_id": 0}
LLAMA3 = RopeScaling(rope_type="llama3", factor=8.0, original_max_position_embeddings=64)
NEWER: dict[str, dict[str, Any]] = {
    "a chain": {**SHARED, "rope_scaling": LLAMA3, "residual_width": 8},
    "no chain": {**SHARED, "tie_word_embeddings": True},
}
"""What the architecture has besides that of `done`, all at once; a model with tied embeddings has no chains."""


@dataclass(frozen=True)
class Done:
    """A run that is over. `full`, `chain`: the first checkpoints of its full replica and of its chain's members."""

    folder: Path
    manifest: Manifest
    full: Path
    chain: tuple[Path, ...]


def trained(
    out: Path, chains: int = 1, in_memory: bool = False, outer: dict[str, Any] | None = None, **model: Any
) -> Done:
    """A full replica, and a chain of two or none. `outer`, `model`: fields of its OuterSpec and ModelSpec."""
    chosen = swarms.options(out, full=1, chains=chains, residual_width=8 * chains, rounds=ROUNDS, in_memory=in_memory)
    manifest = swarms.manifest(chosen, model=model, outer=outer or {})
    swarms.run(chosen, manifest)
    full, *chain = (
        out / name / "checkpoint-00000001" for name in ("full-0", "chain-0-0", "chain-0-1")[: 1 + 2 * chains]
    )
    return Done(out / "bootstrap", manifest, full, tuple(chain))


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """As processes."""
    return trained(tmp_path_factory.mktemp("export") / "run")


def potluck(*arguments: object) -> int:
    with pytest.raises(SystemExit) as end:
        main.main([*map(str, arguments)])
    assert isinstance(end.value.code, int)
    return end.value.code


def files(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def exports_agree(done: Done, folder: Path) -> None:
    """From the archive alone, from the full replica, and from the chain's members together, if there is one."""
    sources: dict[str, tuple[Path, ...]] = {"archive": (), "full": (done.full,)}
    if done.chain:
        sources["chain"] = done.chain
    for name, checkpoints in sources.items():
        given = [word for path in checkpoints for word in ("--checkpoint", path)]
        assert potluck("export", done.folder, "--out", folder / name, *given) == 0
    archive, *others = (files(folder / name) for name in sources)
    assert WEIGHTS in archive
    for other in others:
        assert other == archive


def test_a_full_replica_a_chain_and_the_archive_give_the_same_files(done: Done, tmp_path: Path) -> None:
    assert done.chain
    exports_agree(done, tmp_path)


def test_an_outer_momentum_is_part_of_the_state_and_not_of_the_model(tmp_path: Path) -> None:
    made = trained(tmp_path / "run", in_memory=True, outer=FAMILY["diloco in int8"])
    assert potluck("log", "verify", made.folder) == 0
    assert potluck("log", "verify", made.folder, "--checkpoint", made.full) == 0
    exports_agree(made, tmp_path)
    weights = (tmp_path / "archive" / WEIGHTS).stat().st_size
    assert weights < 1.5 * 4 * layout.total_parameters(made.manifest.model)
    held = (made.full / "head.safetensors").stat().st_size
    assert held > 1.9 * layout.shard_bytes(made.manifest.model, "head")


@pytest.mark.parametrize("kind", NEWER)
def test_they_do_with_every_later_option_of_the_architecture(kind: str, tmp_path: Path) -> None:
    """Trained in memory."""
    made = trained(tmp_path / "run", chains=int(kind == "a chain"), in_memory=True, **NEWER[kind])
    assert len(made.chain) == (2 if kind == "a chain" else 0)
    exports_agree(made, tmp_path)


def test_every_later_option_is_in_one_of_these() -> None:
    plain, options = swarms.MODEL, [dataclasses.replace(swarms.MODEL, **changes) for changes in NEWER.values()]
    later = {f.name for f in dataclasses.fields(ModelSpec) if f.metadata == schema.LATER}
    assert later == {name for name in later for spec in options if getattr(spec, name) != getattr(plain, name)}


def test_a_page_goes_on_with_a_visitors_text_within_bounds(done: Done, tmp_path: Path) -> None:
    told: list[str] = []
    sampler = watch.Sampler(done.folder, lambda text, level: told.append(f"{level}: {text}"))
    answers = [sampler("text=" + quote("--round=1 once\x00 upon\x1b[2J")), sampler("text=x")]
    assert [found.status for found in answers] == [200, 503], told
    assert json.loads(answers[0].plain)["written"]
    assert "It rests for" in json.loads(answers[1].plain)["refused"]
    broken = watch.Sampler(tmp_path, lambda text, level: told.append(f"{level}: {text}"))
    assert broken("text=x").status == 503
    assert len(told) == 1
    assert told[0].startswith(f"warning: --sample {tmp_path}: potluck: ")


def test_its_card_says_what_the_log_says(done: Done, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It loads in the hub's library. The commands that it names work."""
    from huggingface_hub import ModelCard

    folder = tmp_path / "model"
    out = said(capsys, "export", done.folder, "--out", folder, "--license", "cc0-1.0", "--round", 2)
    assert "README.md" in out
    assert f"potluck sample {folder} --interactive" in out
    assert f"potluck export {folder} --push OWNER/NAME" in out
    card = ModelCard.load(folder / "README.md")
    assert card.data.license == "cc0-1.0"
    assert card.data.library_name == "transformers"
    credits = [json.loads(line) for line in said(capsys, "log", "credits", done.folder, "--json").splitlines()]
    peers = {peer["peer"][-8:] for peer in credits if peer["tokens"]}
    assert len(peers) == 3
    assert peers <= set(re.findall(r"`(\w{8})`", card.text))
    assert f"run id: `{done.manifest.run_id}`" in card.text
    (digest,) = re.findall("state after round 2: `([0-9a-f]{64})`", card.text)
    (command,) = re.findall(r"^    potluck (export .*)$", card.text, re.MULTILINE)
    again = command.replace("ADDRESS", str(done.folder)).replace("again", str(tmp_path / "again")).split()
    assert f"state {digest[:12]}" in said(capsys, *again)
    assert files(tmp_path / "again")[WEIGHTS] == files(folder)[WEIGHTS]
    assert (folder / "loss.svg").read_text().startswith("<svg ")


@pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None, reason="llama.cpp is not installed: pip install llama-cpp-python"
)
def test_llama_cpp_goes_on_like_transformers_from_a_hundred_prompts(done: Done, tmp_path: Path) -> None:
    import llama_cpp
    import transformers

    assert potluck("export", done.folder, "--out", tmp_path / "model", "--gguf") == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    theirs = llama_cpp.Llama(
        str(tmp_path / "model" / "model.gguf"), n_ctx=128, verbose=False, n_threads=1, n_threads_batch=1
    )
    text = (Path(__file__).parents[2] / "README.md").read_text()
    for number in range(100):
        prompt = text[50 * number : 50 * number + 10 + number]
        ids = words(prompt)["input_ids"]
        assert theirs.tokenize(prompt.encode(), add_bos=False, special=True) == ids
        expected = model.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False)[0].tolist()[len(ids) :]
        theirs.reset()
        found = list(itertools.islice(theirs.generate(ids, temp=0.0, top_k=1, repeat_penalty=1.0), len(expected)))
        assert found == expected, prompt


def test_transformers_computes_the_same(done: Done, tmp_path: Path) -> None:
    import transformers

    assert potluck("export", done.folder, "--out", tmp_path / "model", "--round", 1) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    ids = torch.tensor([words("We the people of the United States")["input_ids"]])
    ours = Stage(done.manifest.model, 0, done.manifest.model.n_layers, True, True)
    ours.load(_after(done, 1))
    with torch.no_grad():
        expected = ours.logits(ours(ids))
        assert float((theirs(ids).logits - expected).abs().max()) < 1e-4
    assert theirs.dtype == torch.float32


def _after(done: Done, round: int) -> dict[str, list[object]]:
    """The state, replayed by the auditor's other way (peer/log/replay.py, `replay`)."""
    from bootstrap.archive import Archive

    archive = Archive(done.folder, done.manifest)
    try:
        states = replay.replay(done.manifest, archive.commits, archive.blobs.get)
        return next(dict(state.theta) for state in states if state.round == round)  # type: ignore[arg-type]
    finally:
        archive.close()


def test_what_cannot_be_is_refused_and_nothing_is_written(
    done: Done, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*arguments: object, code: int = 2) -> str:
        assert potluck("export", *arguments) == code
        assert not [path for path in tmp_path.iterdir() if "model" in path.name]
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1
        assert ";" in lines[0]
        return lines[0]

    out = ("--out", tmp_path / "model")
    assert "ends at round 3" in refused(done.folder, *out, "--round", 4)
    assert "none has" in refused(done.folder, *out, "--checkpoint", done.chain[0])
    assert "after --round 0" in refused(done.folder, *out, "--checkpoint", done.full, "--round", 0)
    assert "is there already" in refused(done.folder, "--out", done.folder)
    assert "has no log" in refused(tmp_path, *out)
    damaged = tmp_path / "bootstrap"
    shutil.copytree(done.folder, damaged)
    blob = max((damaged / "blobs").iterdir(), key=lambda path: path.stat().st_size)
    blob.write_bytes(b"\0" + blob.read_bytes()[1:])
    assert "no model is made of it" in refused(damaged, *out, code=1)
    other = tmp_path / "checkpoint"
    shutil.copytree(done.full, other)
    shard = other / f"{layout.shard_names(done.manifest.model)[1]}.safetensors"
    shard.write_bytes(shard.read_bytes()[:-4] + b"\0\0\0\0")
    assert potluck("export", done.folder, *out, "--checkpoint", other) == 1, "the peers attested another state"


# --- text from it


def said(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What a command prints that ends well."""
    capsys.readouterr()
    assert potluck(*arguments) == 0
    return capsys.readouterr().out


@pytest.fixture(scope="module")
def exported(done: Done, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "model"
    assert potluck("export", done.folder, "--out", folder) == 0
    return folder


def test_the_same_seed_gives_the_same_text_from_everywhere(
    done: Done, exported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("--prompt", "Our allies", "--tokens", 300)  # more than a window
    text = said(capsys, "sample", done.folder, *asked, "--seed", 1)
    assert text.startswith("Our allies")
    assert len(text) > 300
    assert said(capsys, "sample", done.folder, *asked, "--seed", 1) == text
    assert said(capsys, "sample", exported, *asked, "--seed", 1) == text
    members = [word for path in done.chain for word in ("--checkpoint", path)]
    assert said(capsys, "sample", done.folder, *members, *asked, "--seed", 1) == text
    assert said(capsys, "sample", done.folder, *asked, "--seed", 2) != text
    assert said(capsys, "sample", done.folder, *asked, "--seed", 1, "--round", 0) != text


def test_a_full_replicas_own_folder_is_a_model(done: Done, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It keeps what belongs to one, and nothing else is asked. The log is the nodes', which are gone."""
    own, member = tmp_path / "own", done.chain[0].parent
    shutil.copytree(done.full.parent, own)
    asked = ("--prompt", "Our allies", "--tokens", 30, "--seed", 1)
    text = said(capsys, "sample", own, *asked, "--round", 1)
    assert text == said(capsys, "sample", done.folder, *asked, "--round", 1)
    newest = max(int(path.name.rpartition("-")[2]) for path in own.glob("checkpoint-*"))
    assert said(capsys, "sample", own, *asked) == said(capsys, "sample", done.folder, *asked, "--round", newest)
    (tmp_path / "text.txt").write_text("We the people of the United States.\n" * 20)
    assert f"after round {newest}" in said(capsys, "eval", own, tmp_path / "text.txt")

    def refused(*arguments: object) -> str:
        assert potluck(*arguments) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    assert "and none of round 77" in refused("sample", own, "--round", 77)
    assert "without --checkpoint" in refused("sample", own, "--checkpoint", done.full)
    assert potluck("export", own, "--out", tmp_path / "model") == 0
    out, note = capsys.readouterr()
    assert "as a peer's checkpoint has it" in out
    assert "connection refused" in note
    assert "what follows is this peer's own checkpoint" in note
    assert "no log has confirmed it" in (tmp_path / "model" / "README.md").read_text()
    assert said(capsys, "sample", tmp_path / "model", *asked) == said(capsys, "sample", own, *asked)
    assert "holds a part of the model" in refused("sample", member)
    (own / "tokenizer.json").write_text("{}")
    assert "is another one than the run's" in refused("sample", own)
    (own / "tokenizer.json").unlink()
    assert "a peer's without tokenizer.json" in refused("sample", own)
    (own / "manifest.json").unlink()
    assert "a peer's without manifest.json" in refused("sample", own)


def test_the_likeliest_text_is_that_of_transformers(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(exported)
    words = transformers.AutoTokenizer.from_pretrained(exported)
    ids = words("<|endoftext|>Our allies", return_tensors="pt")
    expected = words.decode(model.generate(**ids, max_new_tokens=40, do_sample=False)[0], skip_special_tokens=True)
    asked = ("--prompt", "Our allies", "--tokens", 40, "--temperature", 0)
    assert said(capsys, "sample", exported, *asked) == harmless(expected) + "\n", (
        "what a terminal would obey is a space"
    )


def test_a_conversation(exported: Path) -> None:
    """A text without end is ended by Ctrl-C, the program by the end of what is typed."""
    command = [
        sys.executable,
        "-m",
        "peer.cli",
        "sample",
        exported,
        *["--interactive", "--tokens", "1000000000", "--seed", "1"],
    ]
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
    alarm = threading.Timer(swarms.DEADLINE, process.kill)
    alarm.start()
    try:
        for _ in range(2):
            assert process.stdout.read(2) == b"> "
            process.stdin.write(b"Our allies\n")
            process.stdin.flush()
            assert len(process.stdout.read(100)) == 100
            process.send_signal(signal.SIGINT)
            while process.stdout.read(1) != b"\n" or process.stdout.peek(2)[:2] != b"> ":
                assert process.poll() is None
        process.stdin.close()
        assert process.stdout.read().endswith(b"> \n")
        assert process.wait() == 0
    finally:
        alarm.cancel()
        process.kill()
        process.wait()


# --- how good it is


def test_the_loss_is_what_transformers_gives_and_the_bytes_are_those_of_the_files(
    done: Done, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import transformers

    text = tmp_path / "a.txt"
    text.write_text("Our allies, and the state of the Union. Größe 😀\n" * 60)
    rows = tmp_path / "b.jsonl"
    rows.write_text("".join(json.dumps({"text": f"The {number}th message. " * 9}) + "\n" for number in range(20)))
    found = json.loads(said(capsys, "eval", done.folder, text, rows, "--json"))

    words = transformers.AutoTokenizer.from_pretrained(exported)
    model = transformers.AutoModelForCausalLM.from_pretrained(exported)
    documents = [text.read_text(), *(json.loads(line)["text"] for line in rows.read_text().splitlines())]
    ids = words("".join(f"<|endoftext|>{document}" for document in documents) + "<|endoftext|>")["input_ids"]
    length, nats = done.manifest.train.sequence, 0.0
    for at in range(0, len(ids) - 1, length):
        window = ids[at : at + length + 1]
        with torch.no_grad():
            logits = model(torch.tensor([window[:-1]])).logits[0].double().numpy()
        right = logits[np.arange(len(window) - 1), window[1:]]
        nats += float((np.log(np.exp(logits).sum(1)) - right).sum())
    assert len(ids) > 3 * length
    size = len("".join(documents).encode())
    assert found["tokens"] == len(ids) - 1
    assert found["bytes"] == size == text.stat().st_size + sum(len(d) for d in documents[1:])
    assert found["documents"] == 21
    assert found["round"] == ROUNDS
    assert found["loss"] == pytest.approx(nats / (len(ids) - 1), rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(nats / (len(ids) - 1)), rel=1e-4)
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-5)
    assert json.loads(said(capsys, "eval", exported, text, rows, "--json")) == found
    assert f"{found['bits_per_byte']:.4f} bits per byte" in said(capsys, "eval", exported, text, rows)


STAND_IN = """
import json, os, sys
arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
folder = arguments["--model_args"].split(",")[0].removeprefix("pretrained=")
with open(os.environ["TOLD"], "w") as file:
    json.dump([sys.argv[1:], sorted(os.listdir(folder)), "HF_HUB_OFFLINE" in os.environ], file)
sys.exit("fails" in sys.argv[-1])
"""


def test_tasks_are_given_to_the_harness_on_an_export(
    done: Done, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, told = tmp_path / "lm_eval", tmp_path / "told"
    module.mkdir()
    (module / "__init__.py").write_text("")
    (module / "__main__.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.getcwd()}")
    monkeypatch.setenv("TOLD", str(told))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)

    def asked() -> Any:
        arguments, names, is_offline = json.loads(told.read_text())
        assert {*names} >= {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
        assert not is_offline, "it fetches the tasks"
        folder = arguments[3].split(",")[0].removeprefix("pretrained=")
        assert not os.path.lexists(folder), "it is removed"
        return arguments[:3], arguments[3].split(",")[1:], arguments[4:]

    for where in (done.folder, exported):
        assert potluck("eval", where, "--tasks", "hellaswag,arc_easy") == 0
        assert asked() == (["--model", "hf", "--model_args"], ["dtype=float32"], ["--tasks=hellaswag,arc_easy"])
    assert files(exported), "what was given is still there"
    capsys.readouterr()
    assert potluck("eval", exported, "--tasks", "fails") == 1
    assert capsys.readouterr().err == "potluck: lm_eval: ended with exit code 1; see what it says above\n"


def test_sample_and_eval_refuse_in_one_line(
    done: Done, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*arguments: object, code: int = 2) -> str:
        capsys.readouterr()
        assert potluck(*arguments) == code
        out, err = capsys.readouterr()
        assert not out.strip()
        lines = [line for line in err.splitlines() if not line.startswith("potluck: the model of ")]
        assert len(lines) == 1
        assert ";" in lines[0]
        return lines[0]

    text, table = tmp_path / "a.txt", tmp_path / "b.jsonl"
    text.write_text("")
    table.write_text('{"words": "some"}\n')
    assert "--tasks: lm-evaluation-harness is not installed" in refused("eval", exported, "--tasks", "hellaswag")
    assert "goes without files" in refused("eval", exported, text, "--tasks", "hellaswag")
    assert "name files" in refused("eval", exported)
    assert "is not a file" in refused("eval", exported, tmp_path)
    assert "no such file" in refused("eval", exported, tmp_path / "none")
    assert "have no text" in refused("eval", exported, text)
    assert "--column" in refused("eval", exported, table)
    table.write_text('{"text": "some"}\n{"text": 42}\n')
    said = refused("eval", exported, table)
    assert (
        said == f"potluck: source {table}: row 2, line 2: column text has no text but a number; mend or remove that row"
    )
    assert "leave one of them out" in refused("sample", exported, "--interactive", "--prompt", "a")
    assert "not UTF-8" in refused("sample", exported, "--prompt", "a\udcff")
    assert "--temperature inf" in refused("sample", exported, "--temperature", "inf")
    assert "is of one round" in refused("sample", exported, "--round", 1)
    assert "ends at round 3" in refused("sample", done.folder, "--round", 4)
    assert "holds a part of the model" in refused("sample", done.chain[0].parent)
    for name, change in (("config.json", b"{}"), ("model.safetensors", b"short"), ("tokenizer.json", b"{}")):
        damaged = tmp_path / name.partition(".")[0]
        shutil.copytree(exported, damaged)
        (damaged / name).write_bytes(change)
        refused("sample", damaged)
        (damaged / name).unlink()
        refused("sample", damaged)
