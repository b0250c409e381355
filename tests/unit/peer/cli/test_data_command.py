"""`potluck data build` and `potluck data show`, as they are typed."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

from peer.cli.main import main
from tests.support import potluck

DEADLINE = 120.0


def run(*arguments: str | Path) -> int:
    """The exit code of what is typed after `potluck data`."""
    try:
        main(["data", *map(str, arguments)])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"Speech {i}. " + "We the people. " * 20}) + "\n" for i in range(100)))
    return path


def test_what_was_built_is_shown(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert run("build", source, "--tokenizer", "sotu-4k.json", "--sequence", "32", "--out", out, "--threads", "2") == 0
    built = capsys.readouterr().out.splitlines()
    assert run("show", out) == 0
    shown = capsys.readouterr().out.splitlines()
    assert built[-5:] == shown[:5]
    assert shown[0].startswith(f"corpus {out}: ")
    assert shown[1].startswith("source: 100 documents, ")
    assert "We the people" in shown[5], "how the text looks"


def test_a_corpus_that_is_not_whole_is_said(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    run("build", source, "--tokenizer", "sotu-4k.json", "--sequence", "32", "--out", out)
    for chunk in (out / "chunks").iterdir():
        chunk.unlink()
    capsys.readouterr()
    assert run("show", out) == 2
    assert "2 of its chunks are missing or cut off" in capsys.readouterr().err
    assert run("show", tmp_path) == 2
    assert capsys.readouterr().err.startswith(f"potluck: corpus {tmp_path}: No such file or directory; give the folder")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["a.jsonl", "--tokenizer", "none.json"], "potluck: tokenizer none.json: No such file or directory; "),
        (["a.jsonl", "--tokenizer", "a.jsonl"], "potluck: tokenizer: not a tokenizer: "),
        (
            ["a.jsonl", "--tokenizer", "sotu-4k.json", "--split", "test"],
            "potluck: --split test: is for data sets of the hub; ",
        ),
    ],
)
def test_what_is_wrong_is_one_line(
    arguments: list[str],
    told: str,
    source: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(source.parent)
    assert run("build", *arguments, "--sequence", "32", "--out", "out") == 2
    error = capsys.readouterr().err
    assert error.startswith(told)
    assert error.count("\n") == 1
    assert not Path("out").exists()


def test_a_build_that_is_interrupted_says_how_to_go_on(tmp_path: Path) -> None:
    out = tmp_path / "out"
    typed = ["data", "build", "sotu", "--tokenizer", "sotu-4k.json", "--sequence", "32", "--out", str(out)]
    process = potluck.Popen(*typed, stdout=subprocess.PIPE, text=True)
    try:
        end = time.monotonic() + DEADLINE
        while not (out / "tokenizer.json").exists():
            assert time.monotonic() < end
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=DEADLINE)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 1
    assert said.splitlines()[-1] == "stopping; type the same command again to go on"
    assert not out.exists(), "nothing was done yet that is worth keeping"
