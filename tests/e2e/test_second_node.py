"""A second operator's node, from the manifest and an address alone, and commands that find it by its folder."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

from peer.cli.init import MANIFEST, NODE
from peer.demo.recipe import demo_corpus
from protocol.run.corpus import TOKENIZER
from tests.e2e.typed import running, until
from tests.faults.processes import DEADLINE
from tests.support.potluck import Popen, free_port, run
from tests.support.texts import write_corpus

LOOPBACK = ("--host", "127.0.0.1", "--json", "--port")


def potluck(at: Path, *words: object, code: int = 0) -> str:
    """What a command prints that is typed in the folder `at`; its errors if it fails as it should."""
    done = run(*words, cwd=at, text=True, timeout=DEADLINE)
    assert done.returncode == code, done
    return done.stderr if code else done.stdout


def test_a_second_node_takes_the_tokenizer_from_the_first(tmp_path: Path) -> None:
    """It waits for the first one, as after a power cut. Its folder then says where the run is."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    keys = [potluck(tmp_path, "key", "--dir", name).strip() for name in ("second/mine", "third", "fourth")]
    (first / "text").symlink_to(demo_corpus().folder)
    potluck(first, "init", "ours", "--corpus", "text", *(word for key in keys for word in ("--operator", key)))
    ours = first / "ours"
    shutil.copy(ours / MANIFEST, second)
    own = ("--dir", ours / NODE, "--corpus", first / "text")
    port = free_port()
    with running("bootstrap", ours / MANIFEST, *own, *LOOPBACK, port) as node:
        address = str(until(node, "listening")["address"])
    typed = ("bootstrap", second / MANIFEST, "--initial-peer", address, "--dir", second / "mine", *LOOPBACK, 0)
    with running(*typed) as late:
        assert "none of the run's other nodes gives it" in str(until(late, "warning")["text"])
        with running("bootstrap", ours / MANIFEST, *own, *LOOPBACK, port) as node:
            assert str(until(node, "listening")["address"]) == address
            assert "copy the corpus of one, and add --corpus FOLDER" in str(until(late, "warning")["text"])
            until(late, "listening")
            assert (second / "mine" / TOKENIZER).read_bytes() == (first / "text" / TOKENIZER).read_bytes()
            for at, words in (
                (first, ("ours/run.toml",)),
                (first, ("ours",)),
                (ours / NODE, (".",)),
                (second, (MANIFEST,)),
            ):
                said = json.loads(potluck(at, "monitor", *words, "--once", "--json"))
                assert said["run"] == address.partition("#")[2], "found by the folders"
            (ours / NODE).rename(first / "potluck-bootstrap")  # as it is called by default; it runs on
            assert json.loads(potluck(first, "monitor", "--once", "--json"))["run"] == address.partition("#")[2]
            assert "signed by 1 of 3" in first_line(first, "run", "set", "ours/run.toml", "--rounds", "9000")


def first_line(at: Path, *words: str) -> str:
    with Popen(*words, cwd=at, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        try:
            return process.stdout.readline()
        finally:
            process.kill()


def test_a_node_that_nobody_can_give_the_tokenizer_is_told_what_to_add(tmp_path: Path) -> None:
    write_corpus(tmp_path / "text", 100, 64, tokens=10**10)
    potluck(tmp_path, "init", "ours", "--corpus", "text")
    said = potluck(tmp_path, "bootstrap", f"ours/{MANIFEST}", "--dir", f"ours/{NODE}", code=2)
    assert said.count("\n") == 1
    assert "not found; give --corpus with the folder of the run's corpus" in said
