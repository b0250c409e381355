"""RUN as it is typed: found by the folders that have been in it; wrong input is told in one line."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from peer.cli.join import JoinOptions
from peer.cli.main import arguments_of, main
from peer.net import keyfile, p2p
from peer.net.address import parse
from peer.net.base import Transport
from peer.net.blobs import BlobServer, BlobStore
from peer.net.memory import MemoryNetwork
from peer.node.open_run import (
    KEY,
    NobodyThere,
    Run,
    here,
    manifest_of,
    node_folder,
    parse_run,
    remember,
    run_in,
    spelled_out,
)
from protocol.errors import UsageError
from protocol.identity import Identity
from protocol.run import manifest as manifests
from protocol.run import short_line
from protocol.run.manifest import HintSpec, Manifest
from protocol.run.short_line import ShortLine
from protocol.wire import endpoints
from tests.support import tiny

OTHER = Identity(bytes(32))


def address(peer: str, host: str = "10.0.0.1") -> str:
    return f"/ip4/{host}/tcp/31337/p2p/{peer}"


class Folders:
    """As `potluck init` and a node that was started once leave them."""

    def __init__(self, path: Path) -> None:
        self.node = path / "my-run" / "node"
        key = keyfile.load_or_create(self.node / KEY)
        self.manifest: Manifest = dataclasses.replace(tiny.manifest(), operators=(key.peer_id,), quorum=1)
        self.toml = path / "my-run" / "run.toml"
        self.toml.write_text(manifests.to_toml(self.manifest))
        self.address = address(key.peer_id)
        self.run = Run(None, self.manifest.run_id, (self.address,))


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folders:
    monkeypatch.chdir(tmp_path)
    return Folders(tmp_path)


def test_a_manifest_without_address_is_enough_where_its_node_lies_beside_it(folders: Folders) -> None:
    text = str(folders.toml)
    with pytest.raises(UsageError, match=r"no bootstrap address; start its node here once"):
        parse_run(text)
    remember(folders.node, folders.run)
    assert parse_run(text) == Run(folders.manifest, folders.manifest.run_id, (folders.address,))
    assert node_folder(text, Path("potluck-bootstrap")) == folders.node
    assert node_folder(str(folders.toml.parent), Path("potluck-bootstrap")) == folders.node
    assert node_folder(text, Path("another")) == Path("another"), "what is typed is what is meant"


def test_what_the_manifest_says_comes_first(folders: Folders) -> None:
    remember(folders.node, folders.run)
    hint = address(OTHER.peer_id)
    folders.toml.write_text(manifests.to_toml(dataclasses.replace(folders.manifest, hints=HintSpec(bootstrap=(hint,)))))
    assert parse_run(str(folders.toml)).bootstrap == (hint,)


def test_a_node_of_another_run_beside_a_manifest_is_not_taken(folders: Folders) -> None:
    remember(folders.node, Run(None, "0" * 64, (folders.address,)))
    with pytest.raises(UsageError, match="no bootstrap address"):
        parse_run(str(folders.toml))


def test_the_node_comes_before_a_peer(folders: Folders) -> None:
    """What an operator decrees goes to his own node."""
    peer = folders.toml.parent / "a-peer"
    keyfile.load_or_create(peer / KEY)
    remember(peer, Run(None, folders.manifest.run_id, (address(OTHER.peer_id),)))
    remember(folders.node, folders.run)
    assert parse_run(str(folders.toml)).bootstrap == (folders.address,)


def test_without_run_the_peer_and_the_node_of_this_folder_are_looked_at(folders: Folders) -> None:
    with pytest.raises(
        UsageError, match=r"^RUN: is missing, and there is no peer or node in potluck-peer or potluck-bootstrap"
    ):
        here()
    Path("potluck-bootstrap").mkdir()
    remember(Path("potluck-bootstrap"), folders.run)
    assert here() == "potluck-bootstrap"
    Path("ada").mkdir()
    remember(Path("ada"), folders.run)
    assert here(Path("ada")) == "ada"
    assert parse_run(here(Path("ada"))) == folders.run


def test_the_folder_of_init_is_a_run_and_one_with_several_runs_is_none(folders: Folders) -> None:
    remember(folders.node, folders.run)
    assert run_in(folders.toml.parent) == folders.run
    other = folders.toml.parent / "other"
    other.mkdir()
    remember(other, Run(None, "0" * 64, (folders.address,)))
    with pytest.raises(UsageError, match="has folders of several runs"):
        parse_run(str(folders.toml.parent))


@pytest.mark.parametrize(
    "garbage", [b"", b"0" * 64, b"\xff\x00\n", b"no address#" + b"0" * 64, b"a#b\nc#d\n", b"x" * 10_000_000]
)
def test_a_folder_that_knows_nothing_of_use_is_passed_over(garbage: bytes, folders: Folders) -> None:
    """Such as one of an earlier version, with the run's id alone."""
    (folders.node / "found").write_bytes(garbage)
    assert run_in(folders.node) is None
    with pytest.raises(UsageError, match="no bootstrap address"):
        parse_run(str(folders.toml))


@pytest.mark.parametrize(
    "form",
    [
        "potluck join {}",
        "potluck join {} --memory 8GB",
        "10:00:01 · to join: potluck join {}",
        "join {}",
        "potluck monitor {}",
    ],
)
def test_a_whole_line_in_quotes_is_told_what_to_type(form: str, folders: Folders) -> None:
    line = folders.run.lines[0]
    with pytest.raises(UsageError) as refused:
        parse_run(form.format(line))
    assert str(refused.value).endswith(f"; give the address alone: {line}")
    assert parse_run(f" {line} ") == folders.run, "spaces around it mean nothing"


@pytest.mark.parametrize("command", [["join"], ["monitor"], ["me"], ["sample"], ["service", "install"], ["run", "ban"]])
@pytest.mark.parametrize("pasted", ["potluck join {}", "10:00:01 · to join: potluck join {} --memory 8GB", "join {}"])
@pytest.mark.parametrize("is_quoted", [False, True])
def test_a_whole_line_in_place_of_an_address_is_the_address(
    command: list[str], pasted: str, is_quoted: bool, folders: Folders
) -> None:
    line = folders.run.lines[0]
    whole = pasted.format(line)
    words = [whole] if is_quoted else whole.split()
    assert arguments_of([*command, *words]) == [*command, line, *whole.partition(line)[2].split()]


def test_what_is_not_pasted_stays_as_it_is(folders: Folders) -> None:
    line = folders.run.lines[0]
    for typed in (["join", line], ["join", "--name", "join", line], ["sample", "a b", "--prompt", "join us"], []):
        assert arguments_of(typed) == typed
    assert arguments_of(["help", "run", "ban"]) == ["run", "ban", "--help"]
    assert arguments_of(["help"]) == ["--help"]


@pytest.mark.parametrize("pasted", ["{}", "potluck join {}", "10:00:01 · to join: potluck join {} --memory 8GB"])
def test_a_short_line_may_be_pasted_too(pasted: str) -> None:
    line = "shakespeare@203.0.113.5#4mQ8yV2kLr9TzX1bNc"
    assert arguments_of(["join", *pasted.format(line).split()])[:2] == ["join", line]
    assert arguments_of(["join", pasted.format(line)])[:2] == ["join", line]
    assert arguments_of(["run", "ban", "--reason", "b@c#d e", line]) == ["run", "ban", "--reason", "b@c#d e", line]


@contextlib.asynccontextmanager
async def a_node(folders: Folders, path: Path) -> AsyncIterator[tuple[ShortLine, str]]:
    """Serves the run's manifest on loopback, with the key of its operator. Yields its short and its long line."""
    node = await p2p.start(folders.node / KEY, host="127.0.0.1", validate=lambda *_: True)
    named = {endpoints.MANIFEST_NAME: folders.manifest.to_bytes()}
    try:
        await BlobServer(BlobStore(path / "blobs"), named=named).serve(node)
        (address,) = (a for a in node.addresses if a.startswith("/ip4/127.0.0.1/"))
        line = short_line.short_line(folders.manifest.name, address, folders.manifest.run_id)
        assert line is not None
        yield line, f"{address}#{folders.manifest.run_id}"
    finally:
        await node.aclose()


async def test_a_short_line_leads_to_the_node_whose_key_it_was_made_of_and_to_no_other(
    folders: Folders, tmp_path: Path
) -> None:
    async with a_node(folders, tmp_path) as (line, whole):
        assert await spelled_out(line, []) == whole
        moved = dataclasses.replace(line, code=short_line.code_of(OTHER.peer_id, folders.manifest.run_id))
        bent = dataclasses.replace(line, code=short_line.code_of(parse(whole.partition("#")[0]).peer, "0" * 64))
        for wrong in (moved, bent):
            with pytest.raises(UsageError, match="another run or another operator's node; copy the whole line again"):
                await spelled_out(wrong, [])
        with pytest.raises(UsageError, match=f"the run there is called {line.name}"):
            await spelled_out(dataclasses.replace(line, name="llama"), [])
    with pytest.raises(NobodyThere) as refused:
        await spelled_out(line, [])
    assert str(refused.value).startswith(f"RUN {line}: ")
    assert str(refused.value).count("/p2p/") == 0, "the peer that was dialled is nobody's"


async def test_who_has_been_in_the_run_needs_no_answer_to_read_its_short_line(folders: Folders, tmp_path: Path) -> None:
    """Such as a service that starts while there is no network."""

    async def begin(*_: object, **__: object) -> Transport:
        raise AssertionError("it is known here")

    line = short_line.short_line("tiny", folders.address, folders.manifest.run_id)
    assert line is not None
    remember(folders.node, folders.run)
    assert await spelled_out(line, [tmp_path, folders.node], begin) == folders.run.lines[0]
    with pytest.raises(AssertionError, match="it is known here"):
        await spelled_out(dataclasses.replace(line, host="10.0.0.2"), [folders.node], begin)


@pytest.mark.parametrize("typed", ["tiny@203.0.113.5", "tiny@203.0.113.5#", "tiny@203.0.113.5#4mQ8", "a@b#c"])
def test_half_of_a_short_line_is_said_to_be_half(typed: str, folders: Folders) -> None:
    with pytest.raises(UsageError, match=r"not the whole line, NAME@HOST#CODE; copy it again"):
        parse_run(typed)


@pytest.mark.parametrize(
    "command", [["me"], ["monitor", "--once"], ["log", "show"], ["sample"], ["run", "open"], ["invite"], ["plan"]]
)
def test_a_run_that_nothing_here_knows_is_one_line(
    command: list[str], folders: Folders, capsys: pytest.CaptureFixture[str]
) -> None:
    keyfile.load_or_create(Path("potluck-peer") / KEY)
    with pytest.raises(SystemExit) as end:
        main(command)
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("potluck: RUN: is missing")
    assert said.count("\n") == 1


async def test_a_node_of_another_run_is_said_such_that_the_two_differ(folders: Folders, tmp_path: Path) -> None:
    """As after one wrong digit at the end of a line."""
    right = folders.manifest.run_id
    wrong = right[:-1] + ("0" if right[-1] != "0" else "1")

    network = MemoryNetwork()
    node, peer = (network.transport(name, lambda *_: None) for name in (folders.run.dialled[0], OTHER.peer_id))
    served = BlobServer(BlobStore(tmp_path / "blobs"), named={endpoints.MANIFEST_NAME: folders.manifest.to_bytes()})
    await served.serve(node)
    run = Run(None, wrong, (f"/memory/p2p/{node.peer_id}",))
    with pytest.raises(UsageError) as refused:
        await manifest_of(run, peer)
    assert f"serves run {right[:12]}…{right[-5:]}, not {wrong[:12]}…{wrong[-5:]}; copy the line again" in str(
        refused.value
    )


def test_join_without_a_line_goes_on_with_the_run_of_its_folder(
    folders: Folders, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["join"])
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith("potluck: RUN: is missing, and there is no peer or node in potluck-peer")
    Path("ada").mkdir()
    remember(Path("ada"), folders.run)
    assert JoinOptions(dir=Path("ada")).read().run == folders.run
