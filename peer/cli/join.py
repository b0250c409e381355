"""`potluck join`: takes part in a run. Training modules are imported while the run's nodes are asked."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
import math
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from peer import events
from peer.cli import plan, running
from peer.cli.options import (
    DEFAULT_THREADS,
    Announce,
    Device,
    Devices,
    Dir,
    Host,
    Json,
    LogFile,
    Memory,
    Port,
    Rank,
    SiteAddress,
    Threads,
    with_options,
)
from peer.events import Emitter, Event, Sink
from peer.log import reader
from peer.net import bandwidth, keyfile, processes
from peer.net.address import interface_hosts
from peer.net.bandwidth import Measurement
from peer.net.base import Clock, Transport, TransportLost, cancel
from peer.net.blobs import BlobStore
from peer.net.disk import Disk
from peer.net.link_monitor import measured_downlink, read_rates
from peer.node import open_run
from peer.node.config import JoinConfig, Machine
from peer.node.open_run import KEY, Door, Run
from peer.node.pausing import SUPPLIES, Busy, Hours, OtherPrograms, Use, on_battery, on_metered_connection
from peer.node.way_in import NetworkStart
from peer.training import device as devices_here
from peer.training.device import Hardware, parse_rate, parse_size
from peer.training.site import WAIT_SECONDS, Gathering, Site, connect
from peer.ui.join_screen import JoinScreen
from peer.ui.text import LONGEST_NAME, clean, harmless_name, typed
from protocol.errors import RemoteError, UsageError, first_line
from protocol.identity import Identity
from protocol.ledger import access
from protocol.ledger.access import Ticket
from protocol.planning import budget
from protocol.run import layout
from protocol.run.corpus import TOKENIZER
from protocol.run.manifest import Manifest
from protocol.wire import logfile

if TYPE_CHECKING:
    from peer.node.peer import Factories, Peer
    from peer.state.storage import Storage

PAUSE_CHECK_SECONDS = 5.0
METERED_CHECK_SECONDS = 15.0
"""A check starts a program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinOptions:
    """The options of `potluck join` and `potluck service install`, as typed."""

    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="The line that a bootstrap node prints, or a manifest file (default: the run in which the peer of"
            " --dir, or one in this folder, has been).",
        ),
    ] = None
    dir: Dir = Path("potluck-peer")
    host: Host = "0.0.0.0"
    port: Port = 0
    announce: Announce = None
    device: Device = "auto"
    devices: Devices = None
    site: SiteAddress = None
    rank: Rank = None
    memory: Memory = "auto"
    up: Annotated[str | None, typer.Option(help='Uplink to announce, such as "20Mbps" (default: measured).')] = None
    down: Annotated[str | None, typer.Option(help='Downlink to announce, such as "100Mbps" (default: measured).')] = (
        None
    )
    up_limit: Annotated[
        str | None,
        typer.Option(
            help='Most uplink that chains and serving others may take, such as "18Mbps" (default: nine tenths of what'
            " was measured; no limit with --up)."
        ),
    ] = None
    store_limit: Annotated[str, typer.Option(help="Disk for payloads that are kept for others.")] = "4GB"
    threads: Threads = DEFAULT_THREADS
    trace: Annotated[
        Path | None,
        typer.Option(help="Record in this file what this machine computes and waits for; ui.perfetto.dev shows it."),
    ] = None
    corpus: Annotated[
        Path | None,
        typer.Option(help="Folder with the run's corpus, if it is on this machine (default: it is fetched)."),
    ] = None
    data_limit: Annotated[str, typer.Option(help="Disk for text that was fetched.")] = "2GB"
    hours: Annotated[
        str | None,
        typer.Option(
            metavar="FROM-TO", help="Train at these hours of this machine's clock only, such as 22-7 or 22:30-7:15."
        ),
    ] = None
    pause_when_busy: Annotated[
        bool,
        typer.Option(
            "--pause-when-busy",
            help="Leave the run while other programs use most of the processors or the GPU, and come back afterwards.",
        ),
    ] = False
    on_battery: Annotated[
        bool, typer.Option("--on-battery", help="Train on battery, too (default: pause until plugged in).")
    ] = False
    on_metered: Annotated[
        bool,
        typer.Option("--on-metered", help="Use a metered connection, too (default: pause until there is another)."),
    ] = False
    name: Annotated[
        str,
        typer.Option(
            help="What screens call this machine, for everybody to see. Others may take the same; the id tells them"
            " apart."
        ),
    ] = ""
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what this machine would do in the run, and leave before it trains.")
    ] = False
    log_file: LogFile = None
    plain: Annotated[
        bool, typer.Option("--plain", help="Print lines instead of a screen, as without a terminal and with --log.")
    ] = False
    json: Json = False

    def read(self) -> JoinConfig:
        """Parses and checks them; makes a key to announce an address. Raises UsageError."""
        if self.dry_run and self.json:
            raise UsageError("--dry-run: says what it finds in words; give it without --json")
        if harmless_name(self.name) != self.name:
            raise UsageError(
                f"--name {clean(self.name, 40)}: a name has at most {LONGEST_NAME} letters, digits, spaces, - _ and .;"
                f" write it as {typed('--name', harmless_name(self.name) or 'Ada')}"
            )
        if self.site is not None and self.devices is not None:
            raise UsageError("--site: each of its machines has one device; give --device in place of --devices")
        found = open_run.parse_run(self.run or open_run.here(self.dir))
        announced: tuple[str, ...] = ()
        if self.announce:
            peer = keyfile.load_or_create(self.dir / KEY).peer_id
            announced = open_run.read_announced(self.announce, self.port, peer)
        return JoinConfig(
            run=found,
            folder=self.dir,
            door=Door(host=self.host, port=self.port, announce=announced),
            devices=devices_here.parse_devices(self.device, self.devices),
            memory_bytes=None if self.memory == "auto" else parse_size(self.memory),
            up_bps=None if self.up is None else parse_rate(self.up),
            down_bps=None if self.down is None else parse_rate(self.down),
            up_limit_bps=None if self.up_limit is None else parse_rate(self.up_limit),
            store_bytes=parse_size(self.store_limit),
            threads=self.threads,
            trace=self.trace,
            corpus=self.corpus,
            data_bytes=parse_size(self.data_limit),
            hours=None if self.hours is None else Hours.parse(self.hours),
            pause_when_busy=self.pause_when_busy,
            on_battery=self.on_battery,
            on_metered=self.on_metered,
            name=self.name,
            site=Site.parse(self.site, self.rank),
            dry_run=self.dry_run,
            plain=self.plain or self.log_file is not None or self.dry_run,
            json=self.json,
        )


def _start(options: JoinOptions, context: typer.Context) -> None:
    config = options.read()
    work = join(config, context.obj.factories) if config.site is None or not config.site.rank else take_rank(config)
    running.run(work, log=options.log_file)


command = with_options(JoinOptions, _start)


async def join(config: JoinConfig, factories: Factories | None = None) -> None:
    """Takes part in the run until it is over. The peer's folder stays locked in pauses.

    factories: make the peer's parts (default: the usual ones).
    """
    from peer.state.storage import Storage

    devices_here.one_heap()
    folder = config.folder
    key = keyfile.load_or_create(folder / KEY)
    clock = Clock() if factories is None else factories.clock
    screen = JoinScreen(key.peer_id, config.name)
    tally = Tally(events.json_sink() if config.json else screen.feed, folder)
    emit, began = Emitter(key.peer_id, tally.take), clock.steady()
    storage, closing = Storage(folder, config.store_bytes), contextlib.ExitStack()
    try:
        if (too_low := processes.raise_file_limit()) is not None:
            emit(events.Warning(text=too_low))
        taking_part = _taking_part(config, key, storage, emit, factories, closing)
        async with running.shown_alive(folder):
            with contextlib.nullcontext() if config.plain or config.json else screen:
                checks = _checks(config, clock, SUPPLIES if factories is None else factories.supplies)
                await Pauses(checks, emit, freed=devices_here.free).between(taking_part)
    finally:
        closing.close()
        storage.close()
        if not config.dry_run:
            emit(tally.sum(clock.steady() - began))


def _taking_part(
    config: JoinConfig,
    key: Identity,
    storage: Storage,
    emit: events.Emit,
    factories: Factories | None,
    closing: contextlib.ExitStack,
) -> Callable[[], Awaitable[None]]:
    """Returns a function that takes part in the run until it is over, as often as it is called.

    closing: what is closed at the end.
    """
    from peer.net.relay import RelayedTransport

    run, folder = config.run, config.folder
    known: tuple[Manifest, Hardware] | None = None
    site: Gathering | None = None
    downlink: Measurement | None = None

    def warn(text: str) -> None:
        emit(events.Warning(text=text))

    async def measure(transport: Transport) -> None:
        """Measures the downlink over a first connection, which usually ends then (peer/net/link_monitor.py)."""
        nonlocal downlink
        if known is not None and config.down_bps is None and downlink is None:
            downlink = await _measured_downlink(transport, known[0], folder)

    way_in = NetworkStart(run, folder, config.door, meanwhile=measure)

    async def take_part() -> None:
        nonlocal known, site
        while True:
            transport = await way_in.start()
            try:
                if known is None:  # later starts do not need a bootstrap node
                    find = functools.partial(open_run.manifest_again, run, folder, transport, warn)
                    if config.dry_run:
                        find = functools.partial(open_run.manifest_of, run, transport)
                    manifest, found = await asyncio.gather(find(), asyncio.to_thread(_hardware, config))
                    _check_ticket(run.ticket, manifest, key.peer_id)
                    emit(events.found(manifest))
                    if config.site is None:
                        known = manifest, found.useful(manifest, warn)
                    else:
                        site = closing.enter_context(_gathering(config.site, key, manifest))
                        known = manifest, await _all_ranks(site, config.run, manifest, found, warn)
                manifest, hardware = known
                first, measured = transport, downlink
                transport, reached = await way_in.find_reach(first, manifest)
                if transport is first and downlink is not None and downlink is not measured:
                    await transport.disconnect(downlink.by)
                if reached is not None:
                    emit(events.Reachable(how=reached.how, addresses=reached.addresses, asked=reached.asked))
                    if config.door.announce and reached.how == "private":
                        at = config.door.announce[0]
                        warn(f"--announce {at}: nobody who tried got through; check where that port leads")
                transport = await RelayedTransport.begin(transport, key, manifest.operators)
                nodes = tuple(dict.fromkeys((*run.dialled, *manifest.operators)))
                tokenizer = functools.partial(fetch_tokenizer, manifest, config, transport, storage.blobs, nodes)
                await check_document_end(manifest, tokenizer)
                from peer.node.peer import Peer

                machine = Machine(config, hardware, reached, downlink, site)
                peer = Peer(manifest, key, transport, storage, machine, emit, factories)
                if not config.dry_run:
                    await _run(peer, _keep_model_files(manifest, machine, tokenizer))
                    return
                for line in await plan.dry_run(peer, transport):
                    print(line, flush=True)
                return
            except TransportLost as error:
                warn(f"{error}; starting it again from the state on disk")
            finally:
                await transport.aclose()

    return take_part


class Tally:
    """Passes events on, and adds up the rounds that they report."""

    def __init__(self, sink: Sink, folder: Path) -> None:
        self._sink = sink
        self._sum = events.Left(
            folder=str(folder), seconds=0.0, rounds=0, own_tokens=0, tokens=0, first_loss=None, last_loss=None
        )

    def take(self, event: Event) -> None:
        self._sink(event)
        done, before = event.body, self._sum
        if isinstance(done, events.Round) and done.holds and done.round:
            self._sum = dataclasses.replace(
                before,
                rounds=before.rounds + 1,
                own_tokens=before.own_tokens + done.own_tokens,
                tokens=before.tokens + done.tokens,
                first_loss=done.loss if before.first_loss is None else before.first_loss,
                last_loss=before.last_loss if done.loss is None else done.loss,
            )

    def sum(self, seconds: float) -> events.Left:
        """The sum after so many seconds."""
        return dataclasses.replace(self._sum, seconds=seconds)


# --- several machines as one peer

RETRY_SECONDS = 2.0


def _gathering(site: Site, key: Identity, manifest: Manifest) -> contextlib.closing[Gathering]:
    """Rank 0's side of a site, whose secret follows from the peer's key: it stays. Raises UsageError."""
    secret = hashlib.sha256(key.sign(b"potluck site")).hexdigest()[:32]
    return contextlib.closing(Gathering(dataclasses.replace(site, secret=secret), manifest.run_id))


async def _all_ranks(
    gathering: Gathering, run: Run, manifest: Manifest, own: Hardware, warn: Callable[[str], None]
) -> Hardware:
    """The hardware of a site, once all its machines are there. Raises LocalError, UsageError."""
    site, line = gathering.site, run.lines[0] if run.lines else "RUN"
    others = ", ".join(f"{rank}/{site.ranks}" for rank in range(1, site.ranks))
    typed = f"potluck join {line} --site {site.address}/{site.secret} --rank K/{site.ranks}"
    warn(f"site: waiting for rank {others}; type there, with its K: {typed}")
    try:
        members = await asyncio.to_thread(gathering.wait, WAIT_SECONDS)
    except asyncio.CancelledError:
        gathering.close()
        raise
    for member in members:
        if member.device != devices_here.name_of(own.devices):
            raise UsageError(
                f"site {site.address}: {clean(member.host)} trains on {clean(member.device)}, this machine on"
                f" {own.device}; give all of them the same kind with --device"
            )
    least = min(own.memory_bytes, *(member.memory_bytes for member in members))
    found = dataclasses.replace(own, devices=own.devices * site.ranks, memory_bytes=least)
    if not budget.holds_whole(manifest, found.budget):
        needed, _ = budget.needs_of(manifest, 0, manifest.model.n_layers, found.budget.device)
        raise UsageError(
            f"site {site.address}: the {site.ranks} machines do not hold the model together, which needs"
            f" {needed / 1e6:.0f} MB of each, and {least / 1e6:.0f} MB are offered; offer more with --memory, or add a"
            " machine"
        )
    return found


async def take_rank(config: JoinConfig) -> None:
    """Trains a part of rank 0's model, whenever it asks, until it is cancelled. Raises UsageError."""
    from peer.training.several_devices import begin

    site, run_id, tells = config.site, config.run.run_id, True
    assert site is not None
    found = await asyncio.to_thread(Hardware.find, config.devices, config.memory_bytes)
    while True:
        name = devices_here.name_of(found.devices)
        try:
            way = await asyncio.to_thread(connect, site, run_id, name, found.memory_bytes)
        except OSError as error:
            if tells:
                print(
                    f"site: rank 0 at {site.address} does not answer: {first_line(error)}; it is tried again",
                    flush=True,
                )
            tells = False
        else:
            with way:
                child = begin(way, found.device, config.threads)
            print(f"site: rank {site.rank}/{site.ranks} of the peer at {site.address}", flush=True)
            try:
                await asyncio.to_thread(child.wait)
            finally:
                child.kill()
                child.wait()
            print("site: the connection to rank 0 has ended; it is tried again", flush=True)
            tells = False
        await asyncio.sleep(RETRY_SECONDS)


def _hardware(config: JoinConfig) -> Hardware:
    """Imports what trains, which takes seconds because of torch. Raises UsageError."""
    import peer.node.peer  # noqa: F401

    return Hardware.find(config.devices, config.memory_bytes)


async def _measured_downlink(transport: Transport, manifest: Manifest, folder: Path) -> Measurement | None:
    """The measured downlink; None if the peer in `folder` knows it from an earlier start."""
    clock = Clock()
    if read_rates(Disk(), folder, interface_hosts(), clock.wall()).down_bps is not None:
        return None
    most = bandwidth.probe_bytes(4 * layout.total_parameters(manifest.model))
    return await measured_downlink(transport, manifest.operators, clock, most)


async def _run(peer: Peer, beside: Coroutine[Any, Any, None]) -> None:
    """Runs the peer; `beside` runs with it and is cancelled at its end."""
    other = asyncio.ensure_future(beside)
    try:
        await peer.run()
    finally:
        await cancel(other)


def _check_ticket(ticket: Ticket | None, manifest: Manifest, peer: str) -> None:
    """Raises UsageError if the invitation was altered. The nodes check the operator's signature and the expiry."""
    why = None if ticket is None else access.why_invalid(manifest, ticket.joined(peer), 0.0, (ticket.operator,))
    if why is not None:
        raise UsageError(f"RUN: {why}; copy the whole line, or ask for a new one")


# --- the run's tokenizer


async def fetch_tokenizer(
    manifest: Manifest, config: JoinConfig, transport: Transport, blobs: BlobStore, nodes: Sequence[str]
) -> bytes:
    """The tokenizer from a file, or from one of the `nodes`. Raises UsageError, RemoteError, TransportLost."""
    if _has_tokenizer(config.folder, manifest):
        return (config.folder / TOKENIZER).read_bytes()
    raw = open_run.tokenizer_bytes(manifest, config.folder, config.corpus)
    return raw if raw is not None else await reader.Remote(transport, nodes, blobs).tokenizer(manifest)


def _has_tokenizer(folder: Path, manifest: Manifest) -> bool:
    path = folder / TOKENIZER
    return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == manifest.tokenizer.digest


async def check_document_end(manifest: Manifest, tokenizer: Callable[[], Awaitable[bytes]]) -> None:
    """Raises UsageError if the tokenizer ends documents otherwise than the manifest says; TransportLost.

    Skipped for runs without document ends, and if no node has the tokenizer now.
    """
    if manifest.model.document_end_id >= 0:
        from peer.corpus.tokenizer_process import check_document_end as check

        with contextlib.suppress(RemoteError):
            raw = await tokenizer()
            await asyncio.to_thread(check, manifest.model, raw)


async def _keep_model_files(manifest: Manifest, machine: Machine, tokenizer: Callable[[], Awaitable[bytes]]) -> None:
    """Writes the manifest into the peer's folder, and the tokenizer if the peer can hold the whole model.

    With its checkpoints the folder is then a model for peer/cli/model.py. Raises UsageError if the disk refuses.
    """
    disk, folder = Disk(), machine.config.folder
    disk.write(folder / logfile.MANIFEST, manifest.to_bytes())
    if budget.holds_whole(manifest, machine.hardware.budget) and not _has_tokenizer(folder, manifest):
        with contextlib.suppress(RemoteError, TransportLost):  # the next start tries again
            disk.write(folder / TOKENIZER, await tokenizer())


# --- pauses

Check = Callable[[], Awaitable[str | None]]
"""Returns a reason to pause; None: no reason."""


def _checks(config: JoinConfig, clock: Clock, supplies: Path) -> list[Check]:
    if config.dry_run:
        return []
    checks = [] if config.hours is None else [by_hours(config.hours, clock)]
    if not config.on_battery:
        checks.append(while_on_battery(supplies))
    if not config.on_metered:
        checks.append(while_metered(clock))
    return [*checks, while_busy(clock)] if config.pause_when_busy else checks


def by_hours(hours: Hours, clock: Clock) -> Check:
    """Pauses outside of the hours."""

    async def check() -> str | None:
        return None if hours.has(clock.wall()) else f"outside of its hours, {hours}"

    return check


def while_on_battery(supplies: Path) -> Check:
    """Pauses while this machine runs on its battery."""

    async def check() -> str | None:
        return "until plugged in (--on-battery goes on)" if on_battery(supplies) else None

    return check


def while_metered(clock: Clock) -> Check:
    """Pauses while this machine's connection is metered."""
    metered, due = False, -math.inf

    async def check() -> str | None:
        nonlocal metered, due
        if clock.steady() >= due:
            metered, due = await on_metered_connection(), clock.steady() + METERED_CHECK_SECONDS
        return "a metered line (--on-metered goes on)" if metered else None

    return check


def while_busy(clock: Clock, others: Callable[[], Awaitable[Use]] | None = None) -> Check:
    """Pauses while other programs use the machine. others: measures their use (default: of this machine)."""
    busy, measured = Busy(), others or OtherPrograms().look

    async def check() -> str | None:
        use = await measured()
        if not busy.see(clock.steady(), use):
            return None
        return f"other programs use {use.cpu:.0%} of the processors and {use.gpu:.0%} of the GPU"

    return check


class Pauses:
    """Runs a peer between its pauses.

    checks: evaluated every `seconds`; one that raises is dropped.
    freed: called when the peer has left the run.
    """

    def __init__(
        self,
        checks: Sequence[Check],
        emit: events.Emit,
        freed: Callable[[], None],
        seconds: float = PAUSE_CHECK_SECONDS,
    ) -> None:
        self._checks, self._emit, self._freed, self._seconds = list(checks), emit, freed, seconds

    async def between(self, work: Callable[[], Awaitable[None]]) -> None:
        """Runs `work` to its end; a pause cancels it, and it is called again afterwards."""
        reason = await self._reason()
        while True:
            if reason is not None:
                self._emit(events.Paused(reason=reason))
                while await self._reason() is not None:
                    await asyncio.sleep(self._seconds)
                self._emit(events.Resumed())
            try:
                async with asyncio.timeout(None) as limit:
                    watching = asyncio.create_task(self._interrupt(limit))
                    try:
                        return await work()
                    finally:
                        watching.cancel()
            except TimeoutError:
                if not limit.expired():
                    raise
            reason = watching.result()
            self._freed()

    async def _interrupt(self, limit: asyncio.Timeout) -> str:
        while (reason := await self._reason()) is None:
            await asyncio.sleep(self._seconds)
        limit.reschedule(asyncio.get_running_loop().time())
        return reason

    async def _reason(self) -> str | None:
        for check in tuple(self._checks):
            try:
                reason = await check()
            except Exception as error:  # the peer goes on without it
                self._checks.remove(check)
                text = f"pauses: {error}; this machine is looked at no more until the next start"
                self._emit(events.Warning(text=text))
                continue
            if reason is not None:
                return reason
        return None
