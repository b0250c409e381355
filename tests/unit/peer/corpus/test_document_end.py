"""The manifest's `document_end_id` is the id with which the run's tokenizer ends documents: told in one line where a
node starts and where a peer joins, and shown with the text."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import hashlib
import json
from pathlib import Path

import pytest

from peer.cli import join
from peer.cli.main import main
from peer.corpus.tokenizer_process import check_document_end
from peer.net import keyfile
from peer.net.blobs import BlobServer, BlobStore
from peer.net.memory import MemoryNetwork
from peer.node.config import Machine
from peer.node.open_run import ASSETS, KEY
from protocol.errors import UsageError
from protocol.run import manifest as manifests
from protocol.run.manifest import Manifest, TokenizerSpec
from protocol.wire import endpoints
from tests.support import machines, tiny

RAW = (ASSETS / "sotu-4k.json").read_bytes()
"""Ends documents with 0."""
TOLD = (
    "manifest: document_end_id is 5, but the run's tokenizer ends documents with id 0; "
    "write 0 under [model], or leave it out"
)


def run_of(end: int, raw: bytes = RAW, **changes: object) -> Manifest:
    model = dataclasses.replace(tiny.manifest().model, document_end_id=end)
    return tiny.manifest(model=model, tokenizer=TokenizerSpec(digest=hashlib.sha256(raw).hexdigest()), **changes)


def without_an_end() -> bytes:
    plain = json.loads(RAW)
    plain["added_tokens"] = []
    plain["model"]["vocab"] = {token: i for token, i in plain["model"]["vocab"].items() if not token.startswith("<|")}
    return json.dumps(plain).encode()


def typed(*arguments: object) -> object:
    """The exit code of `potluck`."""
    try:
        main([str(argument) for argument in arguments])
    except SystemExit as end:
        return end.code or 0
    return 0


def test_it_is_the_tokenizers_or_none() -> None:
    check_document_end(run_of(0).model, RAW)
    check_document_end(run_of(-1).model, b"is not even read")
    with pytest.raises(UsageError) as error:
        check_document_end(run_of(5).model, RAW)
    assert str(error.value) == TOLD
    with pytest.raises(UsageError, match="ends documents with no id; leave it out"):
        check_document_end(run_of(0).model, without_an_end())


@pytest.mark.parametrize("from_its_folder", [False, True])
def test_a_node_does_not_start(from_its_folder: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whether its tokenizer is found now, or was found at an earlier start."""
    key = keyfile.load_or_create(tmp_path / "node" / KEY)
    manifest = run_of(5, operators=(key.peer_id,))
    (tmp_path / "run.toml").write_text(manifests.to_toml(manifest))
    ((tmp_path / "node") if from_its_folder else tmp_path).joinpath("tokenizer.json").write_bytes(RAW)
    if not from_its_folder:
        manifest = dataclasses.replace(
            manifest, tokenizer=dataclasses.replace(manifest.tokenizer, file="tokenizer.json")
        )
        (tmp_path / "run.toml").write_text(manifests.to_toml(manifest))
    assert typed("bootstrap", tmp_path / "run.toml", "--dir", tmp_path / "node", "--host", "127.0.0.1") == 2
    assert capsys.readouterr().err == f"potluck: {TOLD}\n"


async def checked(manifest: Manifest, machine: Machine, served: bytes | None) -> None:
    """What a peer finds, where its node gives these bytes, or does not answer."""
    network = MemoryNetwork()
    node, peer = network.transport(manifest.operators[0]), network.transport("Peer")
    if served is not None:
        await BlobServer(BlobStore(machine.config.folder / "node"), named={endpoints.TOKENIZER_NAME: served}).serve(
            node
        )
    try:
        async with asyncio.timeout(60):
            blobs = BlobStore(machine.config.folder / "blobs")
            tokenizer = functools.partial(
                join.fetch_tokenizer, manifest, machine.config, peer, blobs, manifest.operators
            )
            await join.check_document_end(manifest, tokenizer)
    finally:
        await peer.aclose()
        await node.aclose()


@pytest.mark.parametrize("place", ["node", "folder", "corpus"])
def test_a_peer_does_not_join(place: str, tmp_path: Path) -> None:
    """Wherever it has the tokenizer from."""
    folder = tmp_path / "peer"
    for name in ("peer", "corpus"):
        (tmp_path / name).mkdir()
    machine = machines.machine(folder, 1, corpus=tmp_path / "corpus")
    if place != "node":
        {"folder": folder, "corpus": tmp_path / "corpus"}[place].joinpath("tokenizer.json").write_bytes(RAW)
    served = RAW if place == "node" else None
    with pytest.raises(UsageError) as error:
        asyncio.run(checked(run_of(5), machine, served))
    assert str(error.value) == TOLD
    asyncio.run(checked(run_of(0), machine, served))


def test_a_peer_asks_nobody_where_it_does_not_matter_and_goes_on_where_nobody_answers(tmp_path: Path) -> None:
    machine = machines.machine(tmp_path, 1)
    asyncio.run(checked(run_of(-1), machine, b"another run's"))
    asyncio.run(checked(run_of(5), machine, None))
