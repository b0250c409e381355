"""`potluck bootstrap` runs a bootstrap node, and `potluck key` names it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from peer import events
from peer.cli import running
from peer.cli.auditing import audit_beside, auditor
from peer.cli.options import Announce, Dir, Host, Json, LogFile, Port, with_options
from peer.events import Emitter
from peer.log import reader
from peer.net import descriptors, keyfile
from peer.net.address import parse, peers_of
from peer.net.base import Transport
from peer.net.disk import LocalDisk
from peer.node.open_run import (
    FIRST_PAUSE,
    KEY,
    LONGEST_PAUSE,
    REACH_SECONDS,
    Door,
    Run,
    read_announced,
    read_manifest,
    remember,
    start_transport,
    tokenizer_bytes,
)
from peer.ui.lines import sink
from protocol.errors import RemoteError, UsageError
from protocol.identity import Identity
from protocol.ledger import schedule
from protocol.run.manifest import Manifest

if TYPE_CHECKING:
    from bootstrap.archive import Archive
    from peer.corpus.reader import CorpusReader


def hosting(
    context: typer.Context,
    manifest: Annotated[
        Path, typer.Argument(metavar="MANIFEST", help="The run's manifest, a TOML file (docs/guides/manifest.md).")
    ],
    dir: Dir = Path("potluck-bootstrap"),
    host: Host = "0.0.0.0",
    port: Port = 31337,
    announce: Announce = None,
    initial_peer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ADDRESS", help="Address of another bootstrap node of this run, as it prints it; may be repeated."
        ),
    ] = None,
    relay_limit: Annotated[
        str,
        typer.Option(help="Most that is passed on between peers who cannot reach each other, in all; 0: nothing."),
    ] = "100Mbps",
    corpus: Annotated[
        Path | None, typer.Option(help="Folder with the run's corpus (potluck data build), to serve it.")
    ] = None,
    audit: Annotated[
        bool, typer.Option("--audit", help="Follow the log beside the node; believe nobody else.")
    ] = False,
    log_file: LogFile = None,
    json: Json = False,
) -> NodeOptions:
    """Reads what is typed behind `potluck bootstrap` and `potluck service install-node`.

    Long because typer reads a command's options from its function's parameters.
    """
    return NodeOptions(
        manifest=manifest,
        folder=dir,
        door=Door(host=host, port=port, announce=tuple(announce or ())),
        initial_peers=tuple(initial_peer or ()),
        relay_limit=relay_limit,
        corpus=corpus,
        audit=audit,
        log=log_file,
        json=json,
    )


def key(dir: Dir = Path("potluck-bootstrap")) -> None:
    """Print the name of the node or peer in a folder, such as the first operator needs it; makes its key if there is none."""

    async def work() -> None:
        print(keyfile.load_or_create(dir / KEY).peer_id, flush=True)

    running.run(work())


def _remembering(emit: events.Emit, folder: Path, manifest: Manifest) -> events.Emit:
    """As `emit`; the node's folder knows where it listens, so that its operator need not type that."""

    def tell(body: events.Body) -> None:
        if isinstance(body, events.Listening) and body.addresses:
            with contextlib.suppress(UsageError):  # a full disk shows again where it matters
                remember(folder, Run(manifest, manifest.run_id, body.addresses))
        emit(body)

    return tell


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """What was typed; see `potluck bootstrap --help`."""

    manifest: Path
    folder: Path
    door: Door
    initial_peers: Sequence[str]
    relay_limit: str
    corpus: Path | None
    audit: bool
    log: Path | None
    json: bool


@dataclass(frozen=True, slots=True)
class Node:
    """What the options of a bootstrap node amount to. `others`: addresses of the run's other nodes; `text`: its corpus, if it has it."""

    manifest: Manifest
    key: Identity
    door: Door
    others: tuple[str, ...]
    relay_bps: int
    text: CorpusReader | None


def node_of(options: NodeOptions) -> Node:
    """Reads what was named, and makes the key if there is none. Raises UsageError."""
    from peer.training.device import parse_rate

    manifest = read_manifest(options.manifest)
    relay_bps = 0 if options.relay_limit.strip() == "0" else parse_rate(options.relay_limit)
    others = (*(address.partition("#")[0] for address in options.initial_peers), *manifest.hints.bootstrap)
    for address in others:
        parse(address)
    text = None if options.corpus is None else whole_corpus(options.corpus, manifest)
    key = keyfile.load_or_create(options.folder / KEY)
    if key.peer_id not in manifest.operators and not others:
        raise UsageError(
            f"manifest {options.manifest}: {key.peer_id}, the key in {options.folder}, is no operator of it; add it there before the run"
            " begins, or give --initial-peer ADDRESS of one of its nodes, and have the operators appoint this one"
        )
    door = options.door
    door = dataclasses.replace(door, announce=read_announced(door.announce, door.port, key.peer_id))
    return Node(manifest, key, door, others, relay_bps, text)


async def serve(options: NodeOptions) -> None:
    """`potluck bootstrap`."""
    from bootstrap.archive import Archive
    from bootstrap.node import BootstrapNode
    from bootstrap.service import serve_bootstrap
    from peer.corpus.tokenizer import check_document_end
    from protocol.round.questions import Question

    found, folder = node_of(options), options.folder
    manifest, key, text, relay_bps, audit = found.manifest, found.key, found.text, found.relay_bps, options.audit
    path, corpus = options.manifest, options.corpus
    tokenizer = tokenizer_bytes(manifest, path.parent, corpus)
    archive = Archive(folder, manifest)
    try:
        if text is not None:
            archive.serve_corpus(text.folder, text.raw)
        raw = tokenizer if tokenizer is not None else archive.tokenizer
        is_here = raw is not None and _has_digest(raw, manifest)
        if raw is not None and is_here:
            check_document_end(manifest.model, raw)
            archive.save_tokenizer(raw)
        if not is_here and not set(peers_of(found.others)) - {key.peer_id}:
            raise UsageError(
                f"tokenizer {manifest.tokenizer.file or manifest.tokenizer.digest[:12]}: not found; give --corpus with the folder of the run's"
                " corpus, which has it; or --initial-peer with the address of a node that has it"
            )
        emit = _remembering(Emitter("bootstrap", sink(options.json)), folder, manifest)
        if (too_low := descriptors.raise_limit()) is not None:
            emit(events.Warning(text=too_low))
        if archive.last is None and (odd := schedule.misfit(manifest)) is not None:
            emit(events.Warning(text=odd))
        transport = await start_transport(folder, found.door, manifest.run_id)
        try:
            if not is_here:
                await _fetch_tokenizer(found, transport, archive, emit)
            together = relay_bps * len(manifest.operators)  # others are taken to allow as much
            answer = functools.partial(Question.answer, relay_bps=together)
            node = BootstrapNode(manifest, key, transport, archive, emit, found.others, answer=answer)
            node.leader.witnesses.auditors = frozenset({auditor(folder)} if audit else ())
            async with running.shown_alive(folder), asyncio.TaskGroup() as group:
                auditing = audit and group.create_task(audit_beside(folder, manifest.run_id, transport.addresses, emit))
                await serve_bootstrap(node, transport, emit, relay_bps)  # until the operators dismiss it
                if auditing:
                    auditing.cancel()
        finally:
            await transport.aclose()
    finally:
        archive.close()


def _has_digest(tokenizer: bytes, manifest: Manifest) -> bool:
    return hashlib.sha256(tokenizer).hexdigest() == manifest.tokenizer.digest


async def _fetch_tokenizer(node: Node, transport: Transport, archive: Archive, emit: events.Emit) -> None:
    """The run's tokenizer from one of its other nodes; waits until one gives it. Raises UsageError, TransportLost."""
    from peer.corpus.tokenizer import check_document_end

    manifest, pause = node.manifest, FIRST_PAUSE
    nodes = [peer for peer in dict.fromkeys((*peers_of(node.others), *manifest.operators)) if peer != node.key.peer_id]
    log = reader.Remote(transport, nodes, archive.blobs)
    try:
        while True:
            try:
                await transport.connect(node.others, timeout=REACH_SECONDS)
                raw = await log.tokenizer(manifest)
                break
            except (RemoteError, UsageError) as error:
                if pause == FIRST_PAUSE:
                    text = f"tokenizer: none of the run's other nodes gives it ({error}); this node asks again until one does"
                    emit(events.Warning(text=text))
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
    finally:
        await log.aclose()
    check_document_end(manifest.model, raw)
    archive.save_tokenizer(raw)
    if node.text is None and not manifest.data.mirrors:
        text = "text: peers fetch it from the run's other nodes; to serve it here, too, copy the corpus of one, and add --corpus FOLDER"
        emit(events.Warning(text=text))


def whole_corpus(folder: Path, manifest: Manifest) -> CorpusReader:
    """The run's corpus in `folder`. Raises UsageError where it is another one, or not all there."""
    from peer.corpus.text import open_corpus

    found = open_corpus(folder, LocalDisk(), manifest)
    found.require_whole(f"--corpus {folder}")
    return found


command = with_options(hosting, lambda options, context: running.run(serve(options), log=options.log))
