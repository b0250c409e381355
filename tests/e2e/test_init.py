"""`potluck init`: from a text to the manifest of one's own run. That the run trains: test_new_user.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import pre_tokenizers

from peer.cli import main
from peer.cli.init import CORPUS, MANIFEST, NODE, commented
from peer.node.open_run import read_manifest
from protocol.identity import Identity
from protocol.run import manifest as manifests
from protocol.run.presets import PRESETS, PROBATION, RANGE_SESSIONS
from tests.support.exports import GPT2, tokenizer
from tests.support.texts import write_corpus

TEXT = "Strangers cook one meal together. Each brings what there is at home, and nobody leaves hungry.\n"


@pytest.fixture
def at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with some text in it."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("".join(f"{i} {TEXT}" for i in range(20_000)))
    return tmp_path


def potluck(*arguments: object) -> int:
    """Runs a command here; its exit code."""
    with pytest.raises(SystemExit) as end:
        main.main([*map(str, arguments)])
    assert isinstance(end.value.code, int)
    return end.value.code


def test_it_ends_with_the_line_that_starts_the_run(at_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert potluck("init", "ours", "text.txt", "--license", "Apache 2.0") == 2
    assert not Path("ours").exists()
    assert potluck("init", "ours", "text.txt", "--rounds", 2, "--license", "apache-2.0") == 0
    said = capsys.readouterr().out
    manifest = read_manifest(at_home / "ours" / MANIFEST)
    assert (manifest.rounds, manifest.license) == (2, "apache-2.0")
    assert manifest.admission.probation == 0, "it would last longer than the run"
    assert 0 < manifest.model.residual_width < manifest.model.d_model // 2
    assert manifest.train.optimizer == "muon"
    assert f"run ours {manifest.run_id[:12]}" in said
    assert said.splitlines()[-1] == "    potluck bootstrap ours/run.toml --dir ours/node --corpus ours/corpus"


@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
def test_it_says_if_llama_cpp_does_not_know_the_tokenizer(
    known: bool, at_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pre = GPT2 if known else pre_tokenizers.ByteLevel(add_prefix_space=True)
    Path("tokenizer.json").write_bytes(tokenizer(pre))
    assert potluck("init", "ours", "text.txt", "--rounds", 2, "--tokenizer", "tokenizer.json") == 0
    said = "llama.cpp has none like it: no GGUF, so no Ollama"
    assert (said in capsys.readouterr().out) is not known
    (at_home / "ours" / MANIFEST).unlink()
    assert potluck("init", "ours", "--corpus", f"ours/{CORPUS}", "--rounds", 2) == 0
    assert (said in capsys.readouterr().out) is not known, "of a corpus that is there, too"


def test_it_is_made_again_where_it_was_interrupted(at_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The manifest is written last: without it, the same command goes on; with it, nothing is touched."""
    assert potluck("init", "ours", "text.txt") == 0
    path = at_home / "ours" / MANIFEST
    before, key = path.read_text(), (at_home / "ours" / NODE / "identity.key").read_bytes()
    path.unlink()
    assert potluck("init", "ours", "text.txt", "--preset", "178m") == 2
    assert not path.exists(), "this text is cut into sequences of another length"
    capsys.readouterr()
    assert potluck("init", "ours", "--corpus", f"ours/{CORPUS}") == 0
    assert path.read_text() == before
    assert (at_home / "ours" / NODE / "identity.key").read_bytes() == key
    assert potluck("init", "ours", "text.txt") == 2
    assert "is there already" in capsys.readouterr().err
    assert path.read_text() == before


@pytest.mark.parametrize("preset", ["1b", "178m"])
def test_far_too_little_text_is_refused_with_the_preset_that_fits(
    preset: str, at_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And leaves nothing behind, so that the other preset can be typed at once."""
    assert potluck("init", "ours", "text.txt", "--preset", preset) == 2
    told = capsys.readouterr().err
    assert f"are too few for --preset {preset}" in told
    assert "; choose --preset tiny, or give " in told
    assert told.count("\n") == 1
    assert not Path("ours").exists()
    assert potluck("init", "ours", "text.txt", "--preset", "tiny") == 0


def test_four_operators_and_machines_that_are_named(at_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = []
    for name in ("second", "third", "fourth"):
        assert potluck("key", "--dir", name) == 0
        keys.append(capsys.readouterr().out.strip())
    Path("peers.toml").write_text('[[peers]]\nmemory = "8GB"\nup = "20Mbps"\nspeed = "1TFLOPS"\ncount = 2\n')
    operators = [word for key in keys for word in ("--operator", key)]
    assert potluck("init", "ours", "text.txt", *operators, "--peers", "peers.toml") == 0
    manifest = read_manifest(at_home / "ours" / MANIFEST)
    assert manifest.operators[1:] == tuple(keys)
    assert manifest.quorum == 4
    said = capsys.readouterr().out
    assert "with 2 machines (2 replicas, 0 spares)" in said
    assert "operators: 4, who decide rounds together: " in said
    assert "the run goes on with 1 of 4 nodes that are down or lie" in said


@pytest.mark.parametrize(
    ("others", "reason"),
    [
        (1, "2 nodes bear no dishonest one, and stop when one is lost"),
        (2, "3 nodes bear no dishonest one, and stop when one is lost"),
        (4, "5 nodes bear one dishonest one, as 4 do"),
        (7, "8 nodes cannot decide"),
    ],
)
def test_other_numbers_of_operators_are_refused_in_one_line_before_anything_is_made(
    others: int, reason: str, at_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = [Identity(bytes([number] * 32)).peer_id for number in range(others)]
    assert potluck("init", "ours", "text.txt", *(word for key in keys for word in ("--operator", key))) == 2
    said = f"potluck: --operator: quorum: {reason}; use 1, 4 or 7, the own node among them\n"
    assert capsys.readouterr().err == said
    assert not Path("ours").exists()


def test_one_operator_is_told_nothing_of_quorums(at_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_corpus(Path("corpus"), 100, 64, tokens=10**10)
    assert potluck("init", "ours", "--corpus", "corpus") == 0
    assert "operators" not in capsys.readouterr().out


@pytest.mark.parametrize("name", PRESETS)
def test_a_manifest_with_comments_is_the_same_run(name: str, at_home: Path) -> None:
    write_corpus(Path("corpus"), 100, 64, tokens=10**10)
    assert potluck("init", "ours", "--corpus", "corpus", "--preset", name) == 0
    manifest = read_manifest(at_home / "ours" / MANIFEST)
    assert manifests.from_toml(commented(manifest).encode(), "again") == manifest
    assert manifest.train.sequence == 64, "what the corpus was built for"
    assert manifest.train.total_steps == manifest.rounds * manifest.train.inner_steps
    assert (manifest.admission.probation, manifest.admission.range_sessions) == (PROBATION, RANGE_SESSIONS)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["a/b"], "NAME a/b: not a name"),
        (["x" * 65], "not a name"),
        (["ours", "--preset", "13b"], "choose one of tiny, 178m"),
        (["ours", "none.txt"], "source none.txt: no such file or folder"),
        (["ours", "text.txt", "--corpus", "corpus"], "without SOURCE"),
        (["ours", "--corpus", "nowhere"], "nowhere"),
        (["ours", "text.txt", "--tokenizer", "none.json"], "tokenizer none.json"),
        (["ours", "text.txt", "--operator", "12D3KooW"], "12D3KooW"),
        (["ours", "--peers", "none.toml"], "peers none.toml: No such file"),
        (["ours", "text.txt", "--peers", "small.toml"], "these machines make no replica"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    arguments: list[str], named: str, at_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("small.toml").write_text('[[peers]]\nmemory = "1MB"\n')
    assert potluck("init", *arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert named in lines[0]
    assert ";" in lines[0], "no remedy"
    assert not list(at_home.rglob(MANIFEST))
