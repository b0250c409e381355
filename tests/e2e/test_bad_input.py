"""Bad input: one line with the thing, the reason and the remedy; exit code 2; nothing half-written."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bootstrap.archive import Archive
from peer.cli import main
from peer.corpus.text import CHUNKS, CorpusReader
from peer.demo import recipe
from peer.net.disk import Disk
from peer.state.storage import Checkpoint, Storage
from protocol.codec import blob_hash
from protocol.errors import UsageError
from protocol.run import layout
from protocol.run import manifest as manifests
from protocol.wire.commit import LeftOut
from tests.support import tiny
from tests.support.bad_input import RUN, log_of
from tests.support.potluck import Popen
from tests.support.texts import write_corpus


def potluck(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line that a refused command prints."""
    with pytest.raises(SystemExit) as end:
        main.main([*map(str, arguments)])
    lines = capsys.readouterr().err.strip().splitlines()
    assert end.value.code == 2, lines
    assert len(lines) == 1, lines
    assert lines[0].startswith("potluck: "), lines
    assert ";" in lines[0], f"no remedy: {lines[0]}"
    return lines[0]


OTHER = "/p2p/12D3KooWCPPWGMfAu9KZLRja98CHbFTJJVb8H9xPiDu9WtQSAMUU"


@pytest.mark.parametrize(
    ("address", "port", "named"),
    [
        ("203.0.113.5:40213", 4001, "--announce: address"),
        ("/ip4/203.0.113.5", 4001, "not a host, a TCP port and a peer id"),
        ("/ip4/203.0.113.5/udp/4001/quic-v1", 4001, "QUIC and UDP are not used"),
        ("/ip4/203.0.113.555/tcp/4001", 4001, "--announce: address"),
        ("/ip4/203.0.113.5/tcp/0", 4001, "0 is not a port"),
        (f"/ip4/203.0.113.5/tcp/4001{OTHER}", 4001, "not an address of this peer"),
        (f"/ip4/203.0.113.5/tcp/4001{OTHER}/p2p-circuit", 4001, "--announce"),
        ("/ip4/203.0.113.5/tcp/40213", 0, "goes with --port"),
    ],
)
def test_an_announced_address_that_nobody_can_dial(
    address: str, port: int, named: str, run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    boot = ["bootstrap", run_file, "--dir", tmp_path / "boot"]
    assert named in potluck(capsys, *boot, "--port", port, "--announce", address)
    line = f"/ip4/127.0.0.1/tcp/1{OTHER}#{'0' * 64}"
    join = ["join", line, "--dir", tmp_path / "peer", "--memory", "1GB"]
    assert named in potluck(capsys, *join, "--port", port, "--announce", address)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--site", "192.168.1.5:7100"), "--site and --rank go together"),
        (("--site", "0.0.0.0:7100", "--rank", "0/2"), "not an address of one network"),
        (("--site", "8.8.8.8:7100", "--rank", "0/2"), "an address of the internet"),
        (("--site", "192.168.1.5:7100", "--rank", "2/2"), "not K/N"),
        (("--site", "192.168.1.5:7100", "--rank", "1/2"), "the secret of the site is missing"),
        (("--site", "192.168.1.5:7100", "--rank", "0/2", "--devices", "0,1"), "each of its machines has one device"),
    ],
)
def test_a_place_among_machines_that_is_none(
    options: tuple[str, ...], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = f"/ip4/127.0.0.1/tcp/1{OTHER}#{'0' * 64}"
    assert named in potluck(capsys, "join", line, "--dir", tmp_path / "peer", *options)
    assert not (tmp_path / "peer").exists()


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("rounds = 3", "rounds = 3\ncolour = 1", "colour: unknown field"),
        ("rounds = 3", "", "rounds: missing field"),
        ("rounds = 3", 'rounds = "3"', "rounds: must be int, not str"),
        ("lr = ", "lr = true #", "train.lr: must be float, not bool"),
        ("rounds = 3", "rounds = ", "not TOML"),
        ("[model]", "[model]\nwidth = 3", "model.width: unknown field"),
        ("[data]", '[data]\nfiles = ["/home/me/.ssh/id_rsa"]', "data.files: unknown field"),
    ],
)
def test_manifest(
    run_file: Path,
    old: str,
    new: str,
    named: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_file.write_text(run_file.read_text().replace(old, new, 1))
    boot = run_file.parent / "boot"
    before = sorted(boot.iterdir())
    line = potluck(capsys, "bootstrap", run_file, "--dir", boot)
    assert str(run_file) in line
    assert named in line
    assert sorted(boot.iterdir()) == before, "nothing was written"


@pytest.mark.parametrize("command", ["join", "monitor", "plan", "sample", "export --out never", "log show"])
def test_what_is_too_long_for_a_files_name_is_no_run(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert "neither an address nor a file" in potluck(capsys, *command.split(), "x" * 300)


def test_manifest_is_missing_or_not_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "No such file" in potluck(capsys, "bootstrap", tmp_path / "none.toml")
    (tmp_path / "latin.toml").write_bytes(b'name = "caf\xe9"')
    assert "not UTF-8 at byte 11" in potluck(capsys, "join", tmp_path / "latin.toml")
    assert "copy the whole line" in potluck(capsys, "join", "/ip4/127.0.0.1/tcp/1/p2p/x")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--name", "<b>Ada"),
        ("--name", "a" * 13),
        ("--up-limit", "fast"),
        ("--store-limit", "-1GB"),
        ("--up-limit", "0Mbps"),
    ],
)
def test_limits(option: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    address = f"/ip4/127.0.0.1/tcp/1/p2p/{tiny.OPERATOR.peer_id}#{'0' * 64}"
    line = potluck(capsys, "join", address, "--dir", tmp_path / "peer", option, value)
    assert value in line
    assert not (tmp_path / "peer").exists()


def test_a_name_that_would_steer_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    address = f"/ip4/127.0.0.1/tcp/1/p2p/{tiny.OPERATOR.peer_id}#{'0' * 64}"
    line = potluck(capsys, "join", address, "--dir", tmp_path / "peer", "--name", "\x1b[2J\u202eAda")
    assert line.isprintable()
    assert line.endswith("write it as --name '2J Ada'")


def test_relay_limit(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    boot = run_file.parent / "boot"
    assert 'rate "fast"' in potluck(capsys, "bootstrap", run_file, "--dir", boot, "--relay-limit", "fast")


def test_tokenizer_with_another_digest(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_file.parent / recipe.TOKENIZER).write_text("{}")
    line = potluck(capsys, "bootstrap", run_file, "--dir", run_file.parent / "boot")
    assert recipe.TOKENIZER in line
    assert "sha256" in line


def test_operator_with_another_key(run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = potluck(capsys, "bootstrap", run_file, "--dir", tmp_path / "other")
    assert "operators" in line


def corpus_of(run_file: Path) -> Path:
    """A corpus of noise, for which the manifest is changed."""
    old = manifests.from_toml(run_file.read_bytes(), "run.toml")
    folder, train = run_file.parent / "corpus", old.train
    index, _ = write_corpus(folder, 20, train.sequence, old.model.vocab_size, old.tokenizer.digest)
    run_file.write_text(run_file.read_text().replace(old.data.corpus, index.digest, 1))
    return folder


def test_a_bootstrap_node_with_another_corpus(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    boot, folder = run_file.parent / "boot", run_file.parent / "corpus"
    assert "No such file" in potluck(capsys, "bootstrap", run_file, "--dir", boot, "--corpus", folder)
    before = run_file.read_bytes()
    corpus_of(run_file)
    run_file.write_bytes(before)
    line = potluck(capsys, "bootstrap", run_file, "--dir", boot, "--corpus", folder)
    assert f"corpus {folder}: its digest is " in line
    assert "use the run's own corpus" in line


def test_a_bootstrap_node_with_a_corpus_that_was_built_for_another_run(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = corpus_of(run_file)
    run_file.write_text(run_file.read_text().replace("sequence = 128", "sequence = 64"))
    line = potluck(capsys, "bootstrap", run_file, "--dir", run_file.parent / "boot", "--corpus", folder)
    assert "was built for train.sequence = 128, the manifest says 64; " in line


def test_a_bootstrap_node_whose_corpus_misses_a_chunk(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = corpus_of(run_file)
    chunk = CorpusReader(folder, Disk()).index.chunk(0).name
    (folder / CHUNKS / chunk).unlink()
    line = potluck(capsys, "bootstrap", run_file, "--dir", run_file.parent / "boot", "--corpus", folder)
    assert f"1 of its chunks are missing or cut off, such as {chunk[:12]}…; " in line


def test_a_peer_with_another_corpus(run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Said before anything is trained, or measured."""
    folder = corpus_of(run_file)
    words = ("bootstrap", run_file, "--dir", run_file.parent / "boot", "--corpus", folder)
    node = Popen(*words, "--host", "127.0.0.1", "--port", 0, "--json", stdout=subprocess.PIPE, text=True)
    try:
        assert node.stdout is not None
        told = (json.loads(line) for line in node.stdout)
        address = next(event["address"] for event in told if event["event"] == "listening")
        write_corpus(tmp_path / "other", 20, 128, 4096)
        join = ("join", address, "--dir", tmp_path / "peer", "--host", "127.0.0.1", "--device", "cpu")
        line = potluck(capsys, *join, "--corpus", tmp_path / "other")
    finally:
        node.terminate()
        node.communicate()
    assert f"corpus {tmp_path / 'other'}: its digest is " in line


@pytest.mark.parametrize(
    "text", ["no-such-file.toml", "/ip4/127.0.0.1/tcp/1/p2p/nobody#" + "0" * 64, "/ip4/127.0.0.1/tcp/1/p2p/x#12"]
)
def test_run_is_neither_file_nor_address(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    potluck(capsys, "join", text, "--dir", tmp_path / "peer", "--host", "127.0.0.1")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--residual-width", 41),
        ("--residual-width", 128),
        ("--residual-width", 4000),
        ("--stages", 9),
        ("--full", 0, "--chains", 0),
    ],
)
def test_demo_options(
    arguments: tuple[object, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    potluck(capsys, "demo", "--out", tmp_path / "out", *arguments)
    assert not (tmp_path / "out").exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_full_disk_at_a_checkpoint(small_disk: Path) -> None:
    storage = Storage(small_disk / "peer")
    small = Checkpoint(1, {"block.0": [np.zeros(8, np.float32)]}, {})
    large = Checkpoint(2, {"block.0": [np.zeros(1 << 20, np.float32)]}, {})
    digests = {"block.0": layout.shard_digest(small.theta["block.0"])}
    storage.save_checkpoint(small, digests)
    before = sorted(p.name for p in storage.folder.rglob("*"))
    with pytest.raises(UsageError, match=r"directory .*: No space left on device; free space or .*") as refused:
        storage.save_checkpoint(large, digests)
    assert refused.value.exit_code == 2
    assert "\n" not in str(refused.value)
    assert sorted(p.name for p in storage.folder.rglob("*")) == before, "nothing half-written is left"
    restored = storage.load_checkpoint()
    assert restored.round == 1
    storage.close()


def test_full_disk_at_a_payload(small_disk: Path) -> None:
    storage = Storage(small_disk / "peer")
    name = storage.blobs.put(bytes(300_000), 1)
    with pytest.raises(UsageError, match=r"^directory .*: No space left on device; free space or .*$"):
        storage.blobs.put(bytes(1_000_000), 2)
    assert [p.name for p in storage.blobs.folder.iterdir() if p.is_file()] == [name]
    part = storage.blobs.part(blob_hash.name_of(bytes(2_000_000)), 2_000_000)
    with pytest.raises(UsageError, match=r"^directory .*: No space left on device; free space or .*$"):  # noqa: PT012
        part.learn(blob_hash.leaves_of([bytes(2_000_000)])[1])
        for index in range(blob_hash.count(2_000_000)):
            part.write(index, bytes(2_000_000)[slice(*blob_hash.span(2_000_000, index))])
    assert [p for p in storage.blobs.folder.rglob("*") if p.is_file()] == [storage.blobs.folder / name]
    storage.blobs.put(bytes(400_000), 2)
    assert storage.blobs.get(name) == bytes(300_000)
    storage.close()


def test_full_disk_at_an_offer(small_disk: Path) -> None:
    storage = Storage(small_disk / "peer")
    storage.save_feedback(1, {"block.0": [np.ones(9, np.float32)]})
    with pytest.raises(UsageError, match="No space left on device"):
        storage.save_feedback(2, {"block.0": [np.ones(1 << 20, np.float32)]})
    assert storage.load_feedback().feedback["block.0"][0].tolist() == [1.0] * 9
    storage.close()


def test_full_disk_at_a_commit(small_disk: Path) -> None:
    """The log ends with the last whole commit, and goes on once there is room."""
    archive = Archive(small_disk / "boot", RUN)
    commits = log_of(3)
    archive.append(commits[0])
    filler = small_disk / "filler"
    filler.write_bytes(bytes(900_000))
    with contextlib.suppress(OSError), open(filler, "ab") as file:
        while True:
            file.write(bytes(1000))
            file.flush()
    before = (archive.folder / "log").read_bytes()
    large = dataclasses.replace(
        commits[1].commit, left_out=tuple(LeftOut(replica=i, reason="x" * 4000) for i in range(50))
    )
    with pytest.raises(UsageError, match="No space left on device"):
        archive.append(tiny.record(large))
    assert (archive.folder / "log").read_bytes() == before
    filler.unlink()
    for record in commits[1:]:
        archive.append(record)
    archive.close()
    again = Archive(small_disk / "boot", RUN)
    assert list(again.commits) == [record.commit for record in commits]
    again.close()


@pytest.fixture
def read_only(small_disk: Path) -> Path:
    """A folder that no user, root included, can write to; it held a peer and a bootstrap node."""
    Storage(small_disk / "peer").close()
    Archive(small_disk / "boot", RUN).close()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    return small_disk


def test_a_read_only_folder(read_only: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in ("peer", "new"):
        with pytest.raises(UsageError, match=r"^directory .*: Read-only file system; .*another folder.*$"):
            Storage(read_only / folder)
    with pytest.raises(UsageError, match=r"^directory .*: Read-only file system; .*another folder.*$"):
        Archive(read_only / "boot", RUN)
    address = f"/ip4/127.0.0.1/tcp/1/p2p/{tiny.OPERATOR.peer_id}#{'0' * 64}"
    line = potluck(capsys, "join", address, "--dir", read_only / "new", "--host", "127.0.0.1")
    assert "Read-only file system" in line
