"""`potluck init --from`: a run that goes on from an exported model, with real processes."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path

import pytest

from peer.cli import main
from peer.cli.init import MANIFEST, NODE
from peer.demo.recipe import demo_corpus
from peer.events import Event
from peer.log import export
from peer.log.export import Exported
from peer.log.model_folder import CONFIG, TOKENIZER
from peer.net import keyfile
from peer.net.disk import Disk
from peer.node.open_run import KEY, read_manifest
from peer.training import inference
from protocol.codec.topk import in_memory
from protocol.run import layout
from protocol.run.manifest import EvaluationSpec, Manifest, TimingSpec
from tests.e2e import swarms
from tests.faults.processes import DEADLINE, Swarm
from tests.support import exports
from tests.support import potluck as processes

ROUNDS = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model that a demo has trained."""
    out = tmp_path_factory.mktemp("demo") / "run"
    swarms.run(swarms.options(out, full=1, rounds=2, inner_steps=20))
    potluck("export", out / "bootstrap", "--out", out / "model")
    return out / "model"


@pytest.fixture
def at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the demo's text in it."""
    monkeypatch.chdir(tmp_path)
    Path("text").symlink_to(demo_corpus().folder)
    return tmp_path


def potluck(*arguments: object, code: int = 0) -> None:
    with pytest.raises(SystemExit) as end:
        main.main([*map(str, arguments)])
    assert end.value.code == code


def said(*arguments: object, code: int = 0) -> str:
    """What a command prints, errors too."""
    done = processes.run(*arguments, text=True, timeout=DEADLINE)
    assert done.returncode == code, done
    return str(done.stdout + done.stderr)


def read(folder: Path) -> Exported:
    return export.read(folder, Disk(), lambda _: in_memory)


def quick(manifest: Manifest) -> Manifest:
    """The run with short rounds, in which there is time to measure its first state."""
    return dataclasses.replace(
        manifest,
        timing=TimingSpec(round_deadline=60.0, round_seconds=3.0),
        evaluation=EvaluationSpec(every=5, sequences=5),
    )


@pytest.mark.timeout(900)
def test_a_run_goes_on_from_an_exported_model(model: Path, at_home: Path) -> None:
    """A volunteer with an empty folder fetches the weights by the line alone."""
    there = read(model)
    told = said("init", "again", "--corpus", "text", "--from", model, "--rounds", ROUNDS)
    assert f"weights: state {there.about['state'][:12]}…" in told
    assert "that is 3 times what a preset's model of this width sends: its blocks write all columns" in told
    init = at_home / "again"
    made = read_manifest(init / MANIFEST)
    assert (made.model, made.train.sequence) == (there.spec, there.sequence)
    assert layout.state_digest(made.model, made.initial_digests) == there.about["state"]
    manifest, key = quick(made), keyfile.load_or_create(init / NODE / KEY)
    with Swarm(at_home / "run", manifest, (key,), memory={"volunteer": 10**9}) as swarm:
        shutil.copytree(init / NODE / "blobs", swarm.folder / "node-0" / "blobs")
        swarm.fetches.add("volunteer")
        swarm.start_all("volunteer")

        def measured(event: Event) -> bool:
            return event.kind == "commit" and any(x["round"] == 0 for x in event.fields["evaluations"])

        (first,) = swarm.wait("node-0", measured, "a held-out loss").fields["evaluations"]
        taken = swarm.wait("volunteer", lambda e: e.kind == "recovered", "the weights")
        assert set(taken.fields["bases"].values()) == {0}
        line = swarm.addresses[0]
        assert swarm.ended("volunteer") == 0
        over = said("log", "verify", line)
        said("export", line, "--round", 0, "--out", "begun")
        swarm.kill("node-0")
        swarm.check()
    windows = demo_corpus(made.train.sequence).held_out(5)
    loss = inference.nats(inference.load(there.spec, there.theta, "cpu"), windows) / windows[:, 1:].size
    assert first["loss"] == pytest.approx(loss, rel=1e-5)
    assert loss < math.log(there.spec.vocab_size) - 0.3, "a trained model's"
    assert (at_home / "begun" / TOKENIZER).read_bytes() == there.tokenizer
    begun = read(at_home / "begun")
    assert (begun.round, begun.about["state"]) == (0, there.about["state"])
    folder = swarm.folder / "node-0"
    for text in (over, said("log", "verify", folder)):
        assert f"the run begins with the weights that its manifest names: state {there.about['state']}" in text
        assert "from round 0 on" in text
    assert "went on from weights" in (at_home / "begun" / "README.md").read_text()
    path = folder / "blobs" / made.initial_digests["head"]
    path.write_bytes(path.read_bytes()[:-4] + b"\0\0\0\0")
    damaged = said("log", "verify", folder, code=1)
    assert "round 0: the state to replay from is not in the archive, or is damaged" in damaged


def test_a_node_refuses_damaged_weights_and_a_folder_without_them(model: Path, at_home: Path) -> None:
    potluck("init", "ours", "--corpus", "text", "--from", model, "--rounds", ROUNDS)
    node = at_home / "ours" / NODE
    path = node / "blobs" / read_manifest(at_home / "ours" / MANIFEST).initial_digests["embed"]
    path.write_bytes(path.read_bytes()[:-4] + b"\0\0\0\0")
    command = ("bootstrap", f"ours/{MANIFEST}", "--corpus", "text", "--dir")
    refused = said(*command, node, code=2)
    assert "the weights with which the run begins are missing or damaged (embed); give --dir" in refused
    assert refused.count("\n") == 1
    shutil.rmtree(node / "blobs")
    assert "missing or damaged (embed)" in said(*command, node, code=2)
    (at_home / "ours" / MANIFEST).unlink()
    potluck("init", "ours", "--corpus", "text", "--from", model, "--rounds", ROUNDS)
    assert path.is_file(), "the same command makes them again"


def test_text_is_tokenized_by_the_models_own_tokenizer(model: Path, at_home: Path) -> None:
    Path("a.txt").write_text("".join(f"{i} We the people of the United States.\n" for i in range(20_000)))
    potluck("init", "ours", "a.txt", "--from", model, "--rounds", ROUNDS)
    made, there = read_manifest(at_home / "ours" / MANIFEST), read(model)
    assert (at_home / "ours" / "corpus" / TOKENIZER).read_bytes() == there.tokenizer
    assert made.train.sequence == there.sequence


def test_what_does_not_fit_is_refused_in_one_line(
    model: Path, at_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*arguments: object) -> str:
        capsys.readouterr()
        potluck("init", "ours", *arguments, code=2)
        (line,) = capsys.readouterr().err.splitlines()
        assert ";" in line
        assert not Path("ours", MANIFEST).exists()
        return line

    assert "give it without --preset and without --tokenizer" in refused("--from", model, "--preset", "tiny")
    assert "config.json: No such file" in refused("--from", at_home)
    other = exports.written(at_home / "other")
    assert "was built with another tokenizer than that of --from" in refused("--corpus", "text", "--from", other)
    changed = json.loads((other / CONFIG).read_text()) | {"vocab_size": 299}
    (other / CONFIG).write_text(json.dumps(changed))
    assert "its tokenizer has 300 ids, its model 299" in refused("text", "--from", other)
    small = "We the people of the United States. " * 400
    Path("small.txt").write_text(small)
    assert f"are too few for --from {model}, which would read them" in refused("small.txt", "--from", model)
