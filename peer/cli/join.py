"""`potluck join`: takes part in a run. The network comes first: what trains is imported while the run's nodes are asked."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from peer import events
from peer.cli import dry_run as rehearsal
from peer.cli import own_folder, running
from peer.cli.options import Announce, Devices, Dir, Host, Json, LogFile, Port, with_options
from peer.cli.pauses import Look, Pauses, by_hours, while_busy
from peer.events import Emitter
from peer.net import bandwidth, keyfile, processes
from peer.net.address import interface_hosts
from peer.net.bandwidth import Measurement
from peer.net.base import Clock, Transport, TransportLost
from peer.net.disk import Disk
from peer.net.link_monitor import measured_downlink, read_rates
from peer.node.config import JoinConfig, Machine
from peer.node.open_run import KEY, Door, manifest_again, manifest_of, parse_run, read_announced
from peer.node.pausing import Hours
from peer.node.way_in import NetworkStart
from peer.training import device as devices_here
from peer.training.device import Hardware, parse_rate, parse_size
from peer.ui.lines import sink
from peer.ui.names import LONGEST, harmless_name
from peer.ui.text import clean, typed
from protocol.errors import UsageError
from protocol.ledger import access
from protocol.ledger.access import Ticket
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
        str | None, typer.Option(help='Measurement to announce, such as "100Mbps" (default: measured).')
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
) -> JoinConfig:
    """Reads what is typed behind `potluck join` and `potluck service install`. Raises UsageError.

    Long because typer reads a command's options from its function's parameters.
    """
    if dry_run and json:
        raise UsageError("--dry-run: says what it finds in words; give it without --json")
    if harmless_name(name) != name:
        raise UsageError(
            f"--name {clean(name, 40)}: a name has at most {LONGEST} letters, digits, spaces, - _ and .; give such as"
            f" {typed('--name', harmless_name(name) or 'Ada')}"
        )
    return JoinConfig(
        run=parse_run(run),
        folder=dir,
        door=Door(host=host, port=port, announce=tuple(announce or ())),
        devices=devices_here.parse_devices(device, devices),
        memory_bytes=None if memory == "auto" else parse_size(memory),
        up_bps=None if up is None else parse_rate(up),
        down_bps=None if down is None else parse_rate(down),
        up_limit_bps=None if up_limit is None else parse_rate(up_limit),
        store_bytes=parse_size(store_limit),
        threads=threads,
        trace=trace,
        corpus=corpus,
        data_bytes=parse_size(data_limit),
        hours=None if hours is None else Hours.parse(hours),
        pause_when_busy=pause_when_busy,
        name=name,
        dry_run=dry_run,
        log=log_file,
        json=json,
    )


async def join(read: Callable[[], JoinConfig], factories: Factories | None = None) -> None:
    """`potluck join`; its folder stays locked in pauses, too. `factories`: what the peer makes its parts with (default: the usual)."""
    from peer.net.relay import RelayedTransport
    from peer.state.storage import Storage

    devices_here.one_heap()
    config = read()
    run, folder = config.run, config.folder
    key = keyfile.load_or_create(folder / KEY)
    emit = Emitter(key.peer_id, sink(config.json, own=True))
    announced = read_announced(config.door.announce, config.door.port, key.peer_id)
    known: tuple[Manifest, Hardware] | None = None
    downlink: Measurement | None = None

    def warn(text: str) -> None:
        emit(events.Warning(text=text))

    async def meanwhile(transport: Transport) -> None:
        """A line's two ways are measured over two connections (peer/net/link_monitor.py): the first one ends with this transport, most often."""
        nonlocal downlink
        if known is not None and config.down_bps is None and downlink is None:
            downlink = await _measured(transport, known[0], folder)

    async def find(transport: Transport) -> Manifest:
        if config.dry_run:
            return await manifest_of(run, transport)
        return await manifest_again(run, folder, transport, warn)

    way_in = NetworkStart(run, folder, replace(config.door, announce=announced), meanwhile=meanwhile)

    async def take_part() -> None:
        nonlocal known
        while True:
            transport = await way_in.start()
            try:
                if known is None:  # later starts find their way by themselves, whether a bootstrap node is up or not
                    manifest, found = await asyncio.gather(find(transport), asyncio.to_thread(_hardware, config))
                    _check_ticket(run.ticket, manifest, key.peer_id)
                    emit(events.found(manifest))
                    known = manifest, found.useful(manifest, warn)
                manifest, hardware = known
                first, measured = transport, downlink
                transport, reached = await way_in.find_reach(first, manifest)
                if transport is first and downlink is not None and downlink is not measured:
                    await transport.disconnect(downlink.by)
                if reached is not None:
                    emit(events.Reachable(how=reached.how, addresses=reached.addresses, asked=reached.asked))
                    if announced and reached.how == "private":
                        warn(f"--announce {announced[0]}: nobody who tried got through; check where that port leads")
                transport = await RelayedTransport.begin(transport, key, manifest.operators)
                nodes = tuple(dict.fromkeys((*run.dialled, *manifest.operators)))
                machine = Machine(config, hardware, reached, announced, downlink)
                await own_folder.check_document_end(manifest, machine, transport, storage.blobs, nodes)
                from peer.node.peer import Peer

                peer = Peer(manifest, key, transport, storage, machine, emit, factories)
                if not config.dry_run:
                    await _run(peer, own_folder.keep(manifest, machine, transport, storage.blobs, nodes))
                    return
                for line in await rehearsal.dry_run(peer, transport):
                    print(line, flush=True)
                return
            except TransportLost as error:
                warn(f"{error}; starting it again from the state on disk")
            finally:
                await transport.aclose()

    clock = Clock() if factories is None else factories.clock
    storage = Storage(folder, config.store_bytes)
    try:
        if (too_low := processes.raise_file_limit()) is not None:
            warn(too_low)
        async with running.shown_alive(folder):
            await Pauses(_looks(config, clock), emit, freed=devices_here.free).between(take_part)
    finally:
        storage.close()


def _hardware(config: JoinConfig) -> Hardware:
    """Imports what trains, torch above all, which takes seconds. Raises UsageError."""
    import peer.node.peer  # noqa: F401

    return Hardware.find(config.devices, config.memory_bytes)


async def _measured(transport: Transport, manifest: Manifest, folder: Path) -> Measurement | None:
    """Our downlink, where the peer in `folder` does not know it from before."""
    clock = Clock()
    if read_rates(Disk(), folder, interface_hosts(), clock.wall()).down_bps is not None:
        return None
    most = bandwidth.probe_bytes(4 * layout.total_parameters(manifest.model))
    return await measured_downlink(transport, manifest.operators, clock, most)


async def _run(peer: Peer, beside: Coroutine[Any, Any, None]) -> None:
    """The peer, and `beside`, which matters less."""
    other = asyncio.ensure_future(beside)
    try:
        await peer.run()
    finally:
        other.cancel()
        await asyncio.gather(other, return_exceptions=True)


def _check_ticket(ticket: Ticket | None, manifest: Manifest, peer: str) -> None:
    """Raises UsageError where an invitation was changed on its way; whether an operator signed it, and it still holds, is for the nodes."""
    why = None if ticket is None else access.why_invalid(manifest, ticket.joined(peer), 0.0, (ticket.operator,))
    if why is not None:
        raise UsageError(f"RUN: {why}; copy the whole line, or ask for a new one")


def _looks(config: JoinConfig, clock: Clock) -> list[Look]:
    """What may keep the peer from training for a while."""
    if config.dry_run:
        return []
    looks = [] if config.hours is None else [by_hours(config.hours, clock)]
    return [*looks, while_busy(clock)] if config.pause_when_busy else looks


command = with_options(
    joining, lambda read, context: running.run(join(read, context.obj.factories), log=read.keywords["log_file"])
)
