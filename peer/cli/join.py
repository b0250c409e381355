"""`potluck join`: takes part in a run."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from peer import events
from peer.cli import dry_run, own_folder, running
from peer.cli.options import Announce, Devices, Dir, Host, Json, LogFile, Port, with_options
from peer.cli.pauses import Look, Pauses, by_hours, while_busy
from peer.config import Downlink, JoinConfig, why_one_device
from peer.events import Emitter
from peer.net import bandwidth, descriptors, keyfile, known_line
from peer.net.base import Transport, TransportLost
from peer.net.clock import Clock
from peer.net.disk import LocalDisk
from peer.net.line import measured_downlink
from peer.net.own_addresses import interface_hosts
from peer.net.reach import Finding
from peer.node import hours
from peer.node.open_run import (
    KEY,
    Door,
    manifest_again,
    manifest_of,
    parse_run,
    read_announced,
)
from peer.node.way_in import WayIn
from peer.ui.lines import sink
from peer.ui.names import LONGEST, harmless_name
from peer.ui.text import clean, typed
from protocol.errors import UsageError
from protocol.ledger import invitations
from protocol.ledger.invitations import Ticket
from protocol.run import layout
from protocol.run.manifest import Manifest

if TYPE_CHECKING:
    from peer.node.peer import Factories, Peer


def joining(
    context: typer.Context,
    run: Annotated[
        str,
        typer.Argument(metavar="RUN", help="A manifest file, or the one-line address that a bootstrap node prints."),
    ],
    dir: Dir = Path("potluck-peer"),
    host: Host = "0.0.0.0",
    port: Port = 0,
    announce: Announce = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
    devices: Devices = None,
    memory: Annotated[str, typer.Option(help='Memory to offer, such as "8GB"; auto: most of what is free.')] = "auto",
    up: Annotated[str | None, typer.Option(help='Uplink to announce, such as "20Mbps" (default: measured).')] = None,
    down: Annotated[
        str | None, typer.Option(help='Downlink to announce, such as "100Mbps" (default: measured).')
    ] = None,
    up_limit: Annotated[
        str | None,
        typer.Option(
            help='Most uplink that chains and serving others may take, such as "18Mbps" (default: nine tenths of what was'
            " measured; no limit with --up)."
        ),
    ] = None,
    store_limit: Annotated[str, typer.Option(help="Disk for payloads that are kept for others.")] = "4GB",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads for training.")] = max(1, (os.cpu_count() or 2) // 2),
    trace: Annotated[
        Path | None,
        typer.Option(help="Record what this machine computes and waits for in this file, for ui.perfetto.dev."),
    ] = None,
    corpus: Annotated[
        Path | None,
        typer.Option(help="Folder with the run's corpus, if it is on this machine (default: it is fetched)."),
    ] = None,
    data_limit: Annotated[str, typer.Option(help="Disk for text that was fetched.")] = "2GB",
    hours: Annotated[
        str | None,
        typer.Option(
            metavar="FROM-TO",
            help="Train at these hours of this machine's clock only, such as 22-7 or 22:30-7:15.",
            show_default=False,
        ),
    ] = None,
    pause_when_busy: Annotated[
        bool,
        typer.Option(
            "--pause-when-busy",
            help="Leave while other programs use most of the processors, or the GPU, and come back.",
        ),
    ] = False,
    name: Annotated[
        str,
        typer.Option(
            help="What screens call this machine, for everybody to see. Others may take the same; the id tells them apart.",
            show_default=False,
        ),
    ] = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what this machine would do in the run, and leave before it trains.")
    ] = False,
    log_file: LogFile = None,
    json: Json = False,
) -> JoinOptions:
    """Reads what is typed behind `potluck join` and `potluck service install`.

    Long because typer reads a command's options from its function's parameters.
    """
    return JoinOptions(
        run=run,
        folder=dir,
        door=Door(host=host, port=port, announce=tuple(announce or ())),
        device=device,
        devices=devices,
        memory=memory,
        up=up,
        down=down,
        up_limit=up_limit,
        store_limit=store_limit,
        threads=threads,
        trace=trace,
        corpus=corpus,
        data_limit=data_limit,
        hours=hours,
        pause_when_busy=pause_when_busy,
        name=name,
        dry_run=dry_run,
        log=log_file,
        json=json,
    )


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
    emit = Emitter(key.peer_id, sink(options.json, own=True))

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
        if (too_low := descriptors.raise_limit()) is not None:
            emit(events.Warning(text=too_low))
        async with running.shown_alive(folder):
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


command = with_options(
    joining, lambda options, context: running.run(join(options, context.obj.factories), log=options.log)
)
