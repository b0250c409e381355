"""A list of runs: an operator's card, a list served from a folder, a run joined by its name, and forged entries."""

from __future__ import annotations

import dataclasses
import functools
import http.server
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from peer.cli import runs
from peer.cli.main import main, spelled_out
from peer.net import keyfile
from peer.node.open_run import KEY, Run, remember
from protocol.identity import Identity
from protocol.run.card import MAX_LIST_BYTES, Card, cards
from protocol.run.manifest import AdmissionSpec
from tests.support import long_logs, tiny

NAMES = ("Verse", "Prose 2026", "code")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def node(folder: Path, number: int, **changes: Any) -> tuple[Path, Run]:
    """A node's folder after three rounds of its run, and where the node is. changes: of the manifest."""
    path = folder / f"node-{number}"
    key = keyfile.load_or_create(path / KEY)
    manifest = dataclasses.replace(
        tiny.manifest(), name=NAMES[number], license="cc0-1.0", operators=(key.peer_id,), quorum=1, **changes
    )
    peers = tuple(Identity(bytes([i]) * 32).peer_id for i in (1, 2))
    long_logs.write(path, manifest, long_logs.records(long_logs.commits(manifest, 3, peers), key))
    run = Run(None, manifest.run_id, (f"/ip4/127.0.0.1/tcp/{4000 + number}/p2p/{key.peer_id}",))
    remember(path, run)
    return path, run


@pytest.fixture
def entries(folder: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What `potluck run card` prints for each of three runs."""
    found = []
    for number in range(3):
        path, _ = node(folder, number)
        told = ["--about", f"writes {NAMES[number]}", "--text", "Müller's “works”"]
        typed_without_error(["run", "card", str(path), "--dir", str(path), *told])
        found.append(capsys.readouterr().out)
    return found


def typed_without_error(words: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert not end.value.code


@pytest.fixture
def server(folder: Path) -> Iterator[str]:
    """The address of a web server of the folder's files."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder))) as found:
        serving = threading.Thread(target=found.serve_forever)
        serving.start()
        yield f"http://127.0.0.1:{found.server_port}"
        found.shutdown()
        serving.join()


def test_three_runs_of_a_folder_are_listed_and_one_is_joined_by_its_name(
    folder: Path, entries: list[str], server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "runs.jsonl").write_text("".join(entries))
    typed_without_error(["runs", f"{server}/runs.jsonl"])
    said = capsys.readouterr()
    assert said.err == ""
    for number, name in enumerate(("verse", "prose-2026", "code")):
        card = Card(**json.loads(entries[number]))
        assert f"{name}  0.0M parameters; writes {NAMES[number]}; text: Müller's “works”\n" in said.out
        assert f"    potluck join {name}@127.0.0.1:{4000 + number}#" in said.out
        assert (card.round, card.rounds, card.tokens, card.loss, card.open) == (3, 5, 3 * 2 * 64, 4.0, True)
    assert "    licence: cc0-1.0; for everybody, from " in said.out
    assert re.search(r"\n    round 3 of 5, 0\.0M tokens, loss 4\.000, [0-9:]+ (s|min) ago\n", said.out)

    path, run = folder / "node-1", node(folder, 1)[1]
    assert spelled_out(["join", "prose-2026", "--dir", str(path)])[1] == run.lines[0]
    assert spelled_out(["join", "poetry"]) == ["join", "poetry"]
    (folder / "runs.jsonl").unlink()
    (folder / "runs.jsonl").write_text(entries[2])
    typed_without_error(["runs"])
    assert capsys.readouterr().out.endswith(f"1 run in {server}/runs.jsonl; potluck join NAME takes part\n")
    assert runs.line_of("verse") is None


def test_the_card_of_a_closed_run_names_no_address(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, _ = node(folder, 0, admission=AdmissionSpec(mode="listed"))
    typed_without_error(["run", "card", str(path), "--dir", str(path)])
    entry = capsys.readouterr().out
    assert "127.0.0.1" not in entry
    (folder / "list").write_text(entry)
    typed_without_error(["runs", "list"])
    said = capsys.readouterr()
    assert said.err == ""
    assert "for invited peers only" in said.out
    assert "potluck join verse" not in said.out
    assert runs.line_of("verse") is None
    forged = dataclasses.replace(Card(**json.loads(entry)), about="free money")
    (folder / "list").write_text(forged.json())
    typed_without_error(["runs", "list"])
    assert "is not signed by its operator's node" in capsys.readouterr().err


def test_what_is_forged_is_left_out(folder: Path, entries: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    real, other = Card(**json.loads(entries[0])), Identity(b"x" * 32)
    for forged, why in (
        (dataclasses.replace(real, operator=other.peer_id).signed(other), "has the line of another run or node"),
        (dataclasses.replace(real, run="0" * 64).signed(other), "has the line of another run or node"),
        (dataclasses.replace(real, about="free money"), "is not signed by its operator's node"),
        (real.signed(other), "is not signed by its operator's node"),
        (dataclasses.replace(real, signature="xyz"), "is not signed by its operator's node"),
        (dataclasses.replace(real, name="code"), "has the line of another run or node"),
        (dataclasses.replace(real, line="/ip4/127.0.0.1/tcp/1"), "has no line to join"),
        (dataclasses.replace(real, loss=float("nan")), "loss: must be in 0.0..1000000.0"),
        (dataclasses.replace(real, about="a" * 10_000), "about: has 10000 entries; at most 200"),
    ):
        (folder / "list").write_text(f"{forged.json()}\n# a comment\n\n{entries[1]}")
        typed_without_error(["runs", "list"])
        said = capsys.readouterr()
        assert said.err.startswith("potluck: list list: line 1")
        assert why in said.err
        assert said.err.endswith("; it is left out\n")
        assert said.err.count("\n") == 1
        assert runs.line_of("verse") is None
        assert said.out.count("potluck join prose-2026@") == 1


@pytest.mark.parametrize(
    "raw", [b"", b"\n\n# nothing\n", b"{}\n" * 1001, b"x" * (MAX_LIST_BYTES + 1)], ids=["empty", "blank", "long", "big"]
)
def test_what_is_no_list_is_one_line(raw: bytes, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "list").write_bytes(raw)
    with pytest.raises(SystemExit) as end:
        main(["runs", "list"])
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith("potluck: list list: is empty, or has more than 1000 lines or 1 MB")


@pytest.mark.parametrize("line", [b"\xff\xfe", b"[" * 100_000, b"1", b"null", b'{"name": 5}', b"{" + b'"a":{' * 9_999])
def test_a_line_of_nonsense_is_left_out(line: bytes) -> None:
    (said,) = cards(line, "list")
    assert isinstance(said, str)
    assert said.startswith("line 1: ")


def test_two_runs_of_one_name_are_told_apart_by_their_lines(folder: Path, entries: list[str]) -> None:
    card = Card(**json.loads(entries[0]))
    key = keyfile.load_or_create(folder / "node-0" / KEY)
    moved = dataclasses.replace(card, line=card.line.replace(":4000", ":4999")).signed(key)
    (folder / "list").write_text(f"{card.json()}\n{moved.json()}\n")
    typed_without_error(["runs", "list"])
    with pytest.raises(SystemExit) as end:
        main(["join", "verse"])
    assert end.value.code == 2


@pytest.mark.parametrize(
    ("typed", "code", "said"),
    [
        ([], 2, "LIST: is missing, and none was read before"),
        (["nowhere"], 2, "list nowhere: No such file or directory"),
        (["http://example.org/runs"], 2, "list http://example.org/runs: give an address that begins with https://"),
        (["http://127.0.0.1:9/runs"], 1, "list http://127.0.0.1:9/runs: "),
        (["http://[::1/runs"], 1, "list http://[::1/runs: "),
    ],
)
def test_a_list_that_cannot_be_had_is_one_line(
    typed: list[str], code: int, said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["runs", *typed])
    assert end.value.code == code
    told = capsys.readouterr().err
    assert told.startswith(f"potluck: {said}")
    assert told.count("\n") == 1


def test_a_card_needs_the_node_of_the_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, _ = node(folder, 0)
    other = folder / "other"
    keyfile.load_or_create(other / KEY)
    with pytest.raises(SystemExit) as end:
        main(["run", "card", str(path), "--dir", str(other)])
    assert end.value.code == 2
    assert "its node has not run yet" in capsys.readouterr().err
