"""What the commands bootstrap, join and monitor do; peer/cli/main.py parses what was typed."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bootstrap.archive import Archive
from bootstrap.node import Node
from peer.config import JoinConfig
from peer.events import Emitter, Event, Sink, json_sink
from peer.net import keyfile
from peer.net.address import parse
from peer.net.base import Transport, TransportLost, Validate
from peer.net.blobs import BlobStore, fetch_named
from peer.ui import monitor as watch
from peer.ui import screen as tui
from protocol.errors import RemoteError, UsageError, shown
from protocol.identity import Identity
from protocol.run import manifest as manifests
from protocol.run.manifest import Manifest
from protocol.wire import endpoints, sealed

if TYPE_CHECKING:
    from peer.log.reader import Source

KEY = "identity.key"
ASSETS = Path(__file__).parent.parent / "assets"


@dataclass(frozen=True, slots=True)
class Run:
    """What RUN names: a manifest, if it is known yet, the run id, and where bootstrap nodes are."""

    manifest: Manifest | None
    run_id: str
    bootstrap: tuple[str, ...]


def read_manifest(path: Path) -> Manifest:
    """The manifest in a file. Raises UsageError."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UsageError(f"manifest {path}: {error.strerror}; give the path of a run's TOML file") from None
    return manifests.from_toml(raw, str(path))


def parse_run(text: str) -> Run:
    """RUN as a person gives it: a file, or `ADDRESS#RUN-ID`. Raises UsageError."""
    address, mark, run_id = text.partition("#")
    if "/p2p/" in address and (mark or address.startswith(("/ip", "/dns"))):
        if len(run_id) != 64 or any(c not in "0123456789abcdef" for c in run_id):
            raise UsageError(
                f"RUN {text}: the part after # is not a run id of 64 hexadecimal digits; copy the whole line"
            )
        return Run(None, run_id, (address,))
    manifest = read_manifest(Path(text))
    if not manifest.hints.bootstrap:
        raise UsageError(
            f"manifest {text}: no bootstrap address; put one under [hints] bootstrap, or join with the one-line address"
            " that the bootstrap node prints"
        )
    return Run(manifest, manifest.run_id, manifest.hints.bootstrap)


def valid_record(run: str) -> Validate:
    """Whether a DHT record is an announcement for `run` signed by the peer whose subkey it has. Nothing else is kept."""

    def valid(key: str, subkey: str, value: bytes) -> bool:
        return key == endpoints.announcements_key(run) and sealed.unseal_announcement(value, subkey, run) is not None

    return valid


async def start_transport(folder: Path, host: str, port: int, run: str) -> Transport:
    """A hivemind daemon and DHT node of `run` with the key in `folder`, connected to nobody yet."""
    from peer.net import p2p

    return await p2p.start(folder / KEY, host=host, port=port, bootstrap=(), validate=valid_record(run))


def tokenizer_bytes(manifest: Manifest, beside: Path | None) -> bytes | None:
    """The run's tokenizer from a file: beside the manifest, or shipped. None where there is none. Raises UsageError."""
    name = manifest.tokenizer.file
    if not name:
        return None
    for folder in ([beside] if beside else []) + [ASSETS]:
        path = folder / name
        if path.is_file():
            raw = path.read_bytes()
            found = hashlib.sha256(raw).hexdigest()
            if found != manifest.tokenizer.digest:
                raise UsageError(
                    f"tokenizer {path}: its sha256 is {found[:12]}…, the manifest says"
                    f" {manifest.tokenizer.digest[:12]}…; use the file that the run was made with"
                )
            return raw
    return None


def _sink(json: bool, *, own: bool = False) -> Sink:
    if json:
        return json_sink()

    def show(event: Event) -> None:
        line = tui.line(event, own=own)
        if line:
            print(line, flush=True)

    return show


async def serve_bootstrap(
    manifest: Manifest,
    key: Identity,
    transport: Transport,
    archive: Archive,
    emit: Emitter,
    initial_peers: Sequence[str] = (),
) -> None:
    """The node, once everything that it needs is there; runs until it is cancelled."""
    node = Node(manifest, key, transport, archive, emit, initial_peers)
    address = next((a for a in transport.addresses if "/127." not in a), transport.addresses[0])
    emit("listening", address=f"{address}#{manifest.run_id}", addresses=list(transport.addresses))
    await node.run()


async def bootstrap(path: Path, folder: Path, host: str, port: int, initial_peers: Sequence[str], json: bool) -> None:
    """`potluck bootstrap`."""
    manifest = read_manifest(path)
    others = (*(address.partition("#")[0] for address in initial_peers), *manifest.hints.bootstrap)
    for address in others:
        parse(address)
    key = keyfile.load_or_create(folder / KEY)
    if key.peer_id not in manifest.operators:
        raise UsageError(
            f"manifest {path}: operators does not name {key.peer_id}, the key in {folder};"
            " add it there before the run begins, or start with the right --dir"
        )
    tokenizer = tokenizer_bytes(manifest, path.parent)
    archive = Archive(folder, manifest)
    try:
        if tokenizer is not None:
            archive.save_tokenizer(tokenizer)
        elif archive.tokenizer is None or hashlib.sha256(archive.tokenizer).hexdigest() != manifest.tokenizer.digest:
            raise UsageError(
                f"tokenizer {manifest.tokenizer.file or manifest.tokenizer.digest[:12]}: not found; put the JSON file"
                " beside the manifest and name it under [tokenizer] file"
            )
        transport = await start_transport(folder, host, port, manifest.run_id)
        try:
            await serve_bootstrap(manifest, key, transport, archive, Emitter("bootstrap", _sink(json)), others)
        finally:
            await transport.aclose()
    finally:
        archive.close()


def refuse_local_files(manifest: Manifest, node: str) -> None:
    """For a manifest that `node` sent: it may not name files of this machine, or who runs the run could have a volunteer train on
    his private key, and read it back from the updates. Raises UsageError."""
    if manifest.data.source == "files":
        raise UsageError(
            f"manifest from {node[-8:]}: data.files names local files, such as {shown(manifest.data.files[0])!r}, which a"
            " stranger may not choose; get the manifest file from the operator, read its [data] table, and join with that file"
        )


async def _manifest_of(run: Run, transport: Transport) -> Manifest:
    """Connects to the run and gives its manifest, from its file or from the bootstrap node. Raises UsageError, RemoteError."""
    try:
        await transport.connect(run.bootstrap, timeout=20.0)
    except RemoteError as error:
        raise UsageError(str(error)) from None
    if run.manifest is not None:
        return run.manifest
    peer = run.bootstrap[0].rpartition("/p2p/")[2]
    raw = await fetch_named(transport, peer, endpoints.MANIFEST_NAME, limit=manifests.MAX_BYTES)
    manifest = manifests.from_bytes(raw, f"from {peer[-8:]}")
    if manifest.run_id != run.run_id:
        raise UsageError(
            f"RUN: the node at {run.bootstrap[0]} serves run {manifest.run_id[:12]}…, not {run.run_id[:12]}…;"
            " copy the line again"
        )
    return manifest


async def join(
    text: str,
    folder: Path,
    host: str,
    port: int,
    device: str,
    memory: str,
    up: str,
    down: str,
    up_limit: str | None,
    store_limit: str,
    threads: int,
    trace: Path | None,
    json: bool,
) -> None:
    """`potluck join`."""
    from peer.node import peer as daemon
    from peer.state.storage import Storage
    from peer.training import device as resources

    run = parse_run(text)
    chosen = resources.choose_device(device)
    config = JoinConfig(
        folder=folder,
        device=chosen,
        memory_bytes=resources.memory_budget(chosen) if memory == "auto" else resources.parse_size(memory),
        up_bps=resources.parse_rate(up),
        down_bps=resources.parse_rate(down),
        store_bytes=resources.parse_size(store_limit),
        up_limit_bps=None if up_limit is None else resources.parse_rate(up_limit),
        threads=threads,
        trace=trace,
    )
    key = keyfile.load_or_create(folder / KEY)
    storage = Storage(folder, config.store_bytes)
    try:
        if run.manifest is not None:
            tokenizer = tokenizer_bytes(run.manifest, Path(text).parent)
            if tokenizer is not None:
                storage.save_tokenizer(tokenizer)
        emit = Emitter(key.peer_id, _sink(json, own=True))
        manifest: Manifest | None = None
        while True:
            transport = await start_transport(folder, host, port, run.run_id)
            try:
                if manifest is None:  # later starts find their way by themselves, whether a bootstrap node is up or not
                    manifest = await _manifest_of(run, transport)
                    if run.manifest is None:
                        refuse_local_files(manifest, manifest.operators[0])
                await daemon.join(manifest, key, transport, storage, config, run.bootstrap, emit)
                return
            except TransportLost as error:
                emit("warning", text=f"{error}; starting it again from the state on disk")
            finally:
                await transport.aclose()
    finally:
        storage.close()


async def monitor(text: str, json: bool) -> None:
    """`potluck monitor`."""
    import tempfile

    run = parse_run(text)
    with tempfile.TemporaryDirectory(prefix="potluck-monitor-") as name:
        folder = Path(name)
        transport = await start_transport(folder, "127.0.0.1", 0, run.run_id)
        try:
            manifest = await _manifest_of(run, transport)
            watcher = watch.Monitor(manifest, transport)
            if json:
                print(await watcher.snapshot_json())
                return
            with contextlib.suppress(asyncio.CancelledError), tui.Screen(manifest) as screen:
                await watcher.follow(screen.feed)
        finally:
            await transport.aclose()


@contextlib.asynccontextmanager
async def _log_of(text: str) -> AsyncIterator[tuple[Manifest | None, Source]]:
    """The manifest (None for a log without commits) and the log that DIR or RUN names. Raises UsageError, RemoteError."""
    import tempfile

    from peer.log import reader

    if Path(text).is_dir():
        folder = reader.Folder(Path(text))
        yield await folder.manifest(), folder
        return
    run = parse_run(text)
    with tempfile.TemporaryDirectory(prefix="potluck-log-") as name:
        transport = await start_transport(Path(name), "127.0.0.1", 0, run.run_id)
        try:
            manifest = await _manifest_of(run, transport)
            dialled = [address.rpartition("/p2p/")[2] for address in run.bootstrap]
            nodes = list(dict.fromkeys([*dialled, *manifest.operators]))
            source = reader.Remote(transport, nodes, BlobStore(Path(name) / "blobs"))
            try:
                yield manifest, source
            finally:
                await source.aclose()
        finally:
            await transport.aclose()


def _note(text: str) -> None:
    print(f"potluck: note: {text}", file=sys.stderr)


def _say(text: str) -> None:
    print(text, flush=True)


async def log_show(text: str, json: bool) -> None:
    """`potluck log show`."""
    import json as jsons

    from peer.log import reader

    async with _log_of(text) as (manifest, source):
        if manifest is None:
            _note(f"log {source.name}: has no rounds yet")
        elif json:
            await reader.show_json(manifest, source, lambda fields: _say(jsons.dumps(fields)), _note)
        else:
            await reader.show(manifest, source, _say, _note)


async def log_verify(text: str, checkpoint: Path | None) -> None:
    """`potluck log verify`."""
    from peer.log import reader

    async with _log_of(text) as (manifest, source):
        if manifest is None:
            _note(f"log {source.name}: has no rounds yet")
        else:
            await reader.verify(manifest, source, checkpoint, _say, _note)
