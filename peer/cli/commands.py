"""What the commands bootstrap and join do; peer/cli/main.py parses what was typed."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from peer import events
from peer.cli import own_folder
from peer.cli.alive import shown_alive
from peer.cli.auditing import audit_beside, auditor
from peer.cli.pauses import Look, Pauses, by_hours, while_busy
from peer.config import Downlink, JoinConfig, why_one_device
from peer.events import Emitter, Sink, json_sink
from peer.log import reader
from peer.net import bandwidth, descriptors, keyfile, known_line
from peer.net.address import parse, peers_of
from peer.net.base import Transport, TransportLost
from peer.net.clock import Clock
from peer.net.disk import LocalDisk
from peer.net.line import measured_downlink
from peer.net.own_addresses import interface_hosts
from peer.net.reach import Finding
from peer.node import hours
from peer.node.open_run import (
    FIRST_PAUSE,
    KEY,
    LONGEST_PAUSE,
    REACH_SECONDS,
    Door,
    Run,
    manifest_again,
    manifest_of,
    parse_run,
    read_announced,
    read_manifest,
    remember,
    start_transport,
    tokenizer_bytes,
)
from peer.node.way_in import WayIn
from peer.ui.lines import Lines, printer
from peer.ui.names import LONGEST, harmless_name
from peer.ui.text import clean, typed
from protocol.errors import RemoteError, UsageError
from protocol.identity import Identity
from protocol.ledger import invitations, schedule
from protocol.ledger.invitations import Ticket
from protocol.run import layout
from protocol.run.manifest import Manifest

if TYPE_CHECKING:
    from bootstrap.archive import Archive
    from peer.corpus.reader import CorpusReader
    from peer.node.peer import Factories, Peer


Devices = Annotated[
    str | None,
    typer.Option(
        metavar="N,N,...",
        help="Train on these GPUs of this machine together, as one peer, such as 0,1,2,3; --memory is then of each.",
        show_default=False,
    ),
]


def _sink(json: bool, *, own: bool = False) -> Sink:
    return json_sink() if json else printer(Lines(own=own))


def _raise_limits(emit: events.Emit) -> None:
    """Takes all that the system allows to a process that serves many."""
    too_low = descriptors.raise_limit()
    if too_low is not None:
        emit(events.Warning(text=too_low))


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


async def bootstrap(options: NodeOptions) -> None:
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
        emit = _remembering(Emitter("bootstrap", _sink(options.json)), folder, manifest)
        _raise_limits(emit)
        if not archive.records and (odd := schedule.misfit(manifest)) is not None:
            emit(events.Warning(text=odd))
        transport = await start_transport(folder, found.door, manifest.run_id)
        try:
            if not is_here:
                await _fetch_tokenizer(found, transport, archive, emit)
            together = relay_bps * len(manifest.operators)  # others are taken to allow as much
            answer = functools.partial(Question.answer, relay_bps=together)
            node = BootstrapNode(manifest, key, transport, archive, emit, found.others, answer=answer)
            node.leader.witnesses.auditors = frozenset({auditor(folder)} if audit else ())
            async with shown_alive(folder), asyncio.TaskGroup() as group:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinOptions:
    """What was typed; see `potluck join --help`."""

    run: str
    folder: Path
    door: Door
    device: str
    devices: str | None
    memory: str
    up: str | None
    down: str | None
    up_limit: str | None
    store_limit: str
    threads: int
    trace: Path | None
    corpus: Path | None
    data_limit: str
    hours: str | None
    pause_when_busy: bool
    name: str
    dry_run: bool
    log: Path | None
    json: bool


def config_of(options: JoinOptions) -> JoinConfig:
    """What the options amount to on this machine. Raises UsageError."""
    from peer.training import device as resources

    if options.hours is not None:
        hours.parse(options.hours)
    if harmless_name(options.name) != options.name:
        raise UsageError(
            f"--name {clean(options.name, 40)}: a name has at most {LONGEST} letters, digits, spaces, - _ and .; give such as"
            f" {typed('--name', harmless_name(options.name) or 'Ada')}"
        )
    (device, *more), memory = resources.chosen(options.device, options.devices), options.memory
    return JoinConfig(
        folder=options.folder,
        device=device,
        more_devices=tuple(more),
        memory_bytes=(resources.smallest_budget((device, *more)) if memory == "auto" else resources.parse_size(memory)),
        host_bytes=resources.host_budget(device),
        up_bps=None if options.up is None else resources.parse_rate(options.up),
        down_bps=None if options.down is None else resources.parse_rate(options.down),
        store_bytes=resources.parse_size(options.store_limit),
        up_limit_bps=None if options.up_limit is None else resources.parse_rate(options.up_limit),
        threads=options.threads,
        trace=options.trace,
        corpus=options.corpus,
        data_bytes=resources.parse_size(options.data_limit),
        name=options.name,
    )


async def join(options: JoinOptions, factories: Factories | None = None) -> None:
    """`potluck join`; its folder stays locked in pauses, too. `factories`: what the peer makes its parts with (default: the usual)."""
    from peer.cli import dry_run
    from peer.net.relay import RelayedTransport
    from peer.node.peer import Factories, Peer
    from peer.state.storage import Storage
    from peer.training import device

    device.one_heap()
    if options.dry_run and options.json:
        raise UsageError("--dry-run: says what it finds in words; give it without --json")
    run, folder = parse_run(options.run), options.folder
    config = dataclasses.replace(config_of(options), ticket=run.ticket)
    key = keyfile.load_or_create(folder / KEY)
    announce = read_announced(options.door.announce, options.door.port, key.peer_id)
    manifest: Manifest | None = None
    downlink: Downlink | None = None

    async def meanwhile(transport: Transport) -> None:
        """A line's two ways are measured over two connections (peer/net/line.py): the first one ends with this transport, most often."""
        nonlocal downlink
        if manifest is not None and config.down_bps is None and downlink is None:
            downlink = await _measured(transport, manifest, folder)

    async def find(transport: Transport) -> Manifest:
        if options.dry_run:
            return await manifest_of(run, transport)
        return await manifest_again(run, folder, transport, lambda text: emit(events.Warning(text=text)))

    way_in = WayIn(run, folder, dataclasses.replace(options.door, announce=announce), meanwhile=meanwhile)
    emit = Emitter(key.peer_id, _sink(options.json, own=True))

    async def take_part() -> None:
        nonlocal manifest, config
        while True:
            transport = await way_in.start()
            try:
                if manifest is None:  # later starts find their way by themselves, whether a bootstrap node is up or not
                    manifest = await find(transport)
                    _look_at(config.ticket, manifest, key.peer_id)
                    emit(events.found(manifest))
                    why = why_one_device(manifest, config)
                    if why is not None:
                        config = dataclasses.replace(config, more_devices=())
                        emit(events.Warning(text=why))
                first, measured = transport, downlink
                transport, found = await way_in.settle(first, manifest)
                if transport is first and downlink is not None and downlink is not measured:
                    await transport.disconnect(downlink.by)
                if found is not None:
                    config = _reached(config, found, key.peer_id, announce)
                    emit(events.Reachable(how=found.how, addresses=found.addresses, asked=found.asked))
                    if announce and found.how == "private":
                        text = f"--announce {announce[0]}: nobody who tried got through; check where that port leads"
                        emit(events.Warning(text=text))
                config = dataclasses.replace(config, downlink=downlink)
                transport = await RelayedTransport.begin(transport, key, manifest.operators)
                nodes = tuple(dict.fromkeys((*run.dialled, *manifest.operators)))
                await own_folder.check_document_end(manifest, config, transport, storage.blobs, nodes)
                peer = Peer(manifest, key, transport, storage, config, run.bootstrap, emit, factories)
                if not options.dry_run:
                    await _run(peer, own_folder.keep(manifest, config, transport, storage.blobs, nodes))
                    return
                for line in await dry_run.dry_run(peer, transport):
                    print(line, flush=True)
                return
            except TransportLost as error:
                emit(events.Warning(text=f"{error}; starting it again from the state on disk"))
            finally:
                await transport.aclose()

    looks = _looks(options, (factories or Factories()).clock)
    storage = Storage(folder, config.store_bytes)
    try:
        _raise_limits(emit)
        async with shown_alive(folder):
            await Pauses(looks, emit, freed=device.free).between(take_part)
    finally:
        storage.close()


async def _measured(transport: Transport, manifest: Manifest, folder: Path) -> Downlink | None:
    """Our downlink, where the peer in `folder` does not know it from before."""
    clock = Clock()
    if known_line.read(LocalDisk(), folder, interface_hosts(), clock.wall()).down_bps is not None:
        return None
    most = bandwidth.worth(4 * layout.total_parameters(manifest.model))
    return await measured_downlink(transport, manifest.operators, clock, most)


async def _run(peer: Peer, beside: Coroutine[Any, Any, None]) -> None:
    """The peer, and `beside`, which matters less."""
    other = asyncio.ensure_future(beside)
    try:
        await peer.run()
    finally:
        other.cancel()
        await asyncio.gather(other, return_exceptions=True)


def _look_at(ticket: Ticket | None, manifest: Manifest, peer: str) -> None:
    """Raises UsageError where an invitation was changed on its way; whether an operator signed it, and it still holds, is for the nodes."""
    why = None if ticket is None else invitations.why_invalid(manifest, ticket.joined(peer), 0.0, (ticket.operator,))
    if why is not None:
        raise UsageError(f"RUN: {why}; copy the whole line, or ask for a new one")


def _looks(options: JoinOptions, clock: Clock) -> list[Look]:
    """What may keep the peer from training for a while. Raises UsageError."""
    if options.dry_run:
        return []
    looks = [] if options.hours is None else [by_hours(hours.parse(options.hours), clock)]
    return [*looks, while_busy(clock)] if options.pause_when_busy else looks


def _reached(config: JoinConfig, found: Finding, peer: str, announce: tuple[str, ...]) -> JoinConfig:
    """With how others reach `peer`, that is us."""
    return dataclasses.replace(config, reachable=found.how, reached_at=found.whole(peer), announce=announce)
