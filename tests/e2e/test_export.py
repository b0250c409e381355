"""`potluck export`: what comes out is what the log gives, wherever it begins, and transformers computes the same with it."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from peer.cli import main
from peer.log import replay
from peer.log.export import WEIGHTS
from peer.training.model import Stage
from protocol.run import layout
from protocol.run.manifest import Manifest
from tests.e2e import swarms

ROUNDS = 3


@dataclass(frozen=True)
class Done:
    """A run that is over. `full`, `chain`: the first checkpoints of its full replica and of its chain's members."""

    folder: Path
    manifest: Manifest
    full: Path
    chain: tuple[Path, ...]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """A full replica and a chain of two, as processes."""
    out = tmp_path_factory.mktemp("export") / "run"
    chosen = swarms.options(out, full=1, chains=1, rank=(8,), rounds=ROUNDS, in_memory=False)
    swarms.run(chosen)
    first = {name: out / name / "checkpoint-00000001" for name in ("full-0", "chain-0-0", "chain-0-1")}
    return Done(out / "bootstrap", swarms.manifest(chosen), first["full-0"], (first["chain-0-0"], first["chain-0-1"]))


def potluck(*arguments: object) -> int:
    with pytest.raises(SystemExit) as end:
        main.main([*map(str, arguments)])
    assert isinstance(end.value.code, int)
    return end.value.code


def files(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def test_a_full_replica_a_chain_and_the_archive_give_the_same_files(done: Done, tmp_path: Path) -> None:
    assert potluck("export", done.folder, "--out", tmp_path / "archive") == 0
    assert potluck("export", done.folder, "--out", tmp_path / "full", "--checkpoint", done.full) == 0
    members = [word for path in done.chain for word in ("--checkpoint", path)]
    assert potluck("export", done.folder, "--out", tmp_path / "chain", *members) == 0
    assert files(tmp_path / "archive") == files(tmp_path / "full") == files(tmp_path / "chain")
    assert WEIGHTS in files(tmp_path / "archive")


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
    assert "nothing is written" in refused(damaged, *out, code=1)
    other = tmp_path / "checkpoint"
    shutil.copytree(done.full, other)
    shard = other / f"{layout.shard_names(done.manifest.model)[1]}.safetensors"
    shard.write_bytes(shard.read_bytes()[:-4] + b"\0\0\0\0")
    assert potluck("export", done.folder, *out, "--checkpoint", other) == 1, "the peers attested another state"
