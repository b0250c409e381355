"""`potluck bootstrap` runs a bootstrap node, and `potluck key` names it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
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
from peer.log.recompute import Recomputer, store_state
from peer.net import keyfile, processes
from peer.net.address import parse, peers_of
from peer.net.base import Transport
from peer.net.disk import Disk
from peer.node import open_run
from peer.node.open_run import KEY, Door, Run
from peer.training.device import parse_rate
from peer.ui.lines import sink
from protocol.errors import RemoteError, UsageError
from protocol.identity import Identity
from protocol.ledger import schedule
from protocol.run import short_line
from protocol.run.manifest import Manifest

if TYPE_CHECKING:
    from bootstrap.archive import Archive
    from peer.corpus.text import CorpusReader


@dataclass(frozen=True, slots=True, kw_only=True)
class BootstrapOptions:
    """The options of `potluck bootstrap` and `potluck service install-node`, as typed."""

    manifest: Annotated[
        Path, typer.Argument(metavar="MANIFEST", help="The run's manifest, a TOML file (docs/guides/manifest.md).")
    ]
    dir: Dir = Path("potluck-bootstrap")
    host: Host = "0.0.0.0"
    port: Port = short_line.PORT
    announce: Announce = None
    initial_peer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ADDRESS", help="Address of another bootstrap node of this run, as it prints it; may be repeated."
        ),
    ] = None
    relay_limit: Annotated[
        str, typer.Option(help="Most bandwidth for relaying between peers who cannot reach each other; 0: no relaying.")
    ] = "100Mbps"
    corpus: Annotated[
        Path | None, typer.Option(help="Folder with the run's corpus (potluck data build), to serve it.")
    ] = None
    audit: Annotated[
        bool, typer.Option("--audit", help="Follow the log in a process beside the node, and trust only its states.")
    ] = False
    log_file: LogFile = None
    json: Json = False

    def read(self) -> NodeConfig:
        """Parses and checks them; makes the key. Raises UsageError."""
        from peer.corpus.text import open_corpus

        given = open_run.read_manifest(self.manifest)
        relay_bps = 0 if self.relay_limit.strip() == "0" else parse_rate(self.relay_limit)
        others = (*(address.partition("#")[0] for address in self.initial_peer or ()), *given.hints.bootstrap)
        for address in others:
            parse(address)
        text = None if self.corpus is None else open_corpus(self.corpus, Disk(), given)
        if text is not None:
            text.require_whole(f"--corpus {self.corpus}")
        identity = keyfile.load_or_create(self.dir / KEY)
        if identity.peer_id not in given.operators and not others:
            raise UsageError(
                f"manifest {self.manifest}: {identity.peer_id}, the key in {self.dir}, is no operator of it; add it"
                " there before the run begins, or give --initial-peer ADDRESS of one of its nodes, and have the"
                " operators appoint this one"
            )
        announced = open_run.read_announced(self.announce or (), self.port, identity.peer_id)
        return NodeConfig(
            options=self,
            manifest=given,
            tokenizer=open_run.tokenizer_bytes(given, self.manifest.parent, self.corpus),
            key=identity,
            door=Door(host=self.host, port=self.port, announce=announced),
            others=others,
            relay_bps=relay_bps,
            text=text,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """The options of `potluck bootstrap`, read once."""

    options: BootstrapOptions
    manifest: Manifest
    tokenizer: bytes | None
    """The run's tokenizer, if it is in a file."""
    key: Identity
    door: Door
    """Where the node listens."""
    others: tuple[str, ...]
    """Addresses of the run's other nodes."""
    relay_bps: int
    """Relay limit; 0: no relaying."""
    text: CorpusReader | None
    """The run's text."""


def key(dir: Dir = Path("potluck-bootstrap")) -> None:
    print(keyfile.load_or_create(dir / KEY).peer_id, flush=True)


def _remembering(emit: events.Emit, folder: Path, manifest: Manifest) -> events.Emit:
    """Wraps `emit`; notes the node's addresses in its folder, so that its operator need not type them."""

    def tell(body: events.Body) -> None:
        if isinstance(body, events.Listening) and body.addresses:
            with contextlib.suppress(UsageError):  # a full disk shows again where it matters
                open_run.remember(folder, Run(manifest, manifest.run_id, body.addresses))
        emit(body)

    return tell


async def serve(config: NodeConfig) -> None:
    """Runs the node until the run is over or its operator is dismissed."""
    from bootstrap.archive import Archive
    from bootstrap.node import BootstrapNode, Work
    from peer.corpus.tokenizer_process import check_document_end
    from protocol.round.leader_events import Question

    options, manifest, folder, identity = config.options, config.manifest, config.options.dir, config.key
    archive = Archive(folder, manifest)
    try:
        if config.text is not None:
            archive.serve_corpus(config.text.folder, config.text.raw)
        has_others = bool(set(peers_of(config.others)) - {identity.peer_id})
        await check_initial_state(archive, has_others)
        raw = config.tokenizer if config.tokenizer is not None else archive.tokenizer
        if raw is not None and hashlib.sha256(raw).hexdigest() != manifest.tokenizer.digest:
            raw = None
        if raw is not None:
            check_document_end(manifest.model, raw)
            archive.save_tokenizer(raw)
        elif not has_others:
            raise UsageError(
                f"tokenizer {manifest.tokenizer.file or manifest.tokenizer.digest[:12]}: not found; give --corpus with"
                " the folder of the run's corpus, which has it; or --initial-peer with the address of a node that has"
                " it"
            )
        emit = _remembering(Emitter("bootstrap", sink(options.json)), folder, manifest)
        if (too_low := processes.raise_file_limit()) is not None:
            emit(events.Warning(text=too_low))
        if not archive.records and (odd := schedule.misfit(manifest)) is not None:
            emit(events.Warning(text=odd))
        transport = await open_run.start_transport(folder, config.door, manifest.run_id)
        try:
            if raw is None:
                await _fetch_tokenizer(config, transport, archive, emit)
            together = config.relay_bps * len(manifest.operators)  # assumes the same limit for all nodes
            auditors = frozenset({auditor(folder)} if options.audit else ())
            recomputer = Recomputer(manifest, archive.commits, archive.blobs.get, newest_state=archive.newest_state)
            work = Work(
                functools.partial(Question.answer, relay_bps=together),
                recomputer.digest,
                functools.partial(store_state, manifest, archive.commits, archive.blobs),
            )
            node = BootstrapNode(identity, transport, archive, emit, config.others, auditors=auditors, work=work)
            async with running.shown_alive(folder), asyncio.TaskGroup() as group:
                auditing = options.audit and group.create_task(
                    audit_beside(folder, manifest.run_id, transport.addresses, emit)
                )
                await node.serve(config.relay_bps)  # until the operators dismiss it
                if auditing:
                    auditing.cancel()
        finally:
            await transport.aclose()
    finally:
        archive.close()


async def check_initial_state(archive: Archive, has_others: bool) -> None:
    """Raises UsageError where the weights that the run begins with are needed and cannot be had. has_others: whether
    other nodes are known, from which they are fetched (bootstrap/states.py)."""
    if not archive.commits:
        await asyncio.to_thread(archive.drop_damaged, 0)
    if archive.states.begin == 0 and (lacking := archive.lacks(0)) and not has_others:
        raise UsageError(
            f"directory {archive.folder}: the weights with which the run begins are missing or damaged"
            f" ({lacking[0]}); give --dir with the folder node that potluck init --from made, or --initial-peer with"
            " the address of a node that has them"
        )


async def _fetch_tokenizer(node: NodeConfig, transport: Transport, archive: Archive, emit: events.Emit) -> None:
    """Fetches the run's tokenizer from another node; retries until one has it. Raises UsageError, TransportLost."""
    from peer.corpus.tokenizer_process import check_document_end

    manifest, pause = node.manifest, open_run.FIRST_PAUSE_SECONDS
    nodes = [peer for peer in dict.fromkeys((*peers_of(node.others), *manifest.operators)) if peer != node.key.peer_id]
    log = reader.Remote(transport, nodes, archive.blobs)
    try:
        while True:
            try:
                await transport.connect(node.others, timeout=open_run.REACH_SECONDS)
                raw = await log.tokenizer(manifest)
                break
            except (RemoteError, UsageError) as error:
                if pause == open_run.FIRST_PAUSE_SECONDS:
                    why = f"none of the run's other nodes gives it ({error})"
                    emit(events.Warning(text=f"tokenizer: {why}; this node asks again until one does"))
            await asyncio.sleep(pause)
            pause = min(2 * pause, open_run.LONGEST_PAUSE_SECONDS)
    finally:
        await log.aclose()
    await asyncio.to_thread(check_document_end, manifest.model, raw)
    archive.save_tokenizer(raw)
    if node.text is None and not manifest.data.mirrors:
        remedy = "to serve it here, too, copy the corpus of one, and add --corpus FOLDER"
        emit(events.Warning(text=f"text: peers fetch it from the run's other nodes; {remedy}"))


def _start(options: BootstrapOptions, context: typer.Context) -> None:
    running.run(serve(options.read()), log=options.log_file)


command = with_options(BootstrapOptions, _start)
