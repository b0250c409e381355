"""`potluck doctor`: would this machine do, and if not, what is to be done? Each finding has one remedy.

Without a run it looks at this machine alone. With one it does what `potluck join` does before it trains, fetches nothing large, and
says what role the next plan would give to this machine, and how many tokens a day.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json as jsons
import os
import secrets
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from peer import events
from peer.cli import running
from peer.cli.commands import Devices
from peer.cli.dry_run import REACHED, part_lines
from peer.cli.plan import known_by
from peer.config import JoinConfig, why_one_device
from peer.net import descriptors, keyfile
from peer.net.base import ClockWrong, Transport
from peer.net.clock import Clock
from peer.net.disk import LocalDisk
from peer.net.relay import RelayedTransport
from peer.node.open_run import KEY, Door, Run, manifest_of, parse_run
from peer.node.way_in import WayIn
from peer.ui.monitor import Monitor
from peer.ui.text import clean, rate, size
from protocol.errors import PotluckError
from protocol.identity import Identity
from protocol.run.manifest import Manifest
from protocol.wire.announcement import VERSION, Announcement

GOOD, WARNING, BAD = "good", "warning", "bad"
MARKS = {GOOD: "✓", WARNING: "!", BAD: "✗"}
PYTHONS = ((3, 11), (3, 13))
TORCH_SECONDS = 40.0
"""That torch may take to be imported and to multiply, in a process of its own."""
SPEED_SECONDS = 8.0
PROBE_BYTES = 64 * 1024 * 1024
SLOW_DISK = 20e6
"""Bytes a second: a checkpoint of a model of 178M parameters would take half a minute."""
LEAST_DISK = 2_000_000_000
LEAST_MEMORY = 500_000_000
AHEAD_SECONDS, BEHIND_SECONDS = 120.0, 30.0
"""By which our clock may differ from what a node last said: it says so once a minute, and what is said lives for five."""
TORCH = "import torch; x = torch.ones(64, 64, requires_grad=True); (x @ x).sum().backward(); print(torch.__version__)"


@dataclass(frozen=True, slots=True)
class Finding:
    """`state`: GOOD, WARNING or BAD, with which joining would not work; `text` says what was found, `remedy` what to do; empty where
    nothing is to be done."""

    about: str
    state: str
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{MARKS[self.state]} {self.about}: {self.text}" + (f"; {self.remedy}" if self.remedy else "")


Find = Callable[[Finding], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What was typed; see `potluck doctor --help`."""

    run: str | None
    folder: Path
    door: Door
    device: str
    devices: str | None
    memory: str
    threads: int
    json: bool


def doctor(
    context: typer.Context,
    run: Annotated[
        str | None,
        typer.Argument(help="The run that this machine is to join, as for potluck join.", show_default=False),
    ] = None,
    dir: Annotated[Path, typer.Option("--dir", help="Folder for this node's key and state.")] = Path("potluck-peer"),
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "0.0.0.0",
    port: Annotated[int, typer.Option(min=0, max=65535, help="TCP port to listen on; 0 takes a free one.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
    devices: Devices = None,
    memory: Annotated[str, typer.Option(help='Memory to offer, such as "8GB"; auto: most of what is free.')] = "auto",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads for training.")] = max(1, (os.cpu_count() or 2) // 2),
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object: findings, and whether joining would work.")
    ] = False,
) -> None:
    """`potluck doctor`.

    Long because typer reads a command's options from its function's parameters.
    """
    options = Options(
        run=run,
        folder=dir,
        door=Door(host=host, port=port),
        device=device,
        devices=devices,
        memory=memory,
        threads=threads,
        json=json,
    )
    running.run(_doctor(options, context.obj.clock if context.obj is not None else Clock()), interrupted=1)


async def _doctor(options: Options, clock: Clock) -> None:
    """Prints the findings as they come. Raises SystemExit: 0 where joining would work, else 1."""
    found: list[Finding] = []

    def find(finding: Finding) -> None:
        found.append(finding)
        if not options.json:
            print(finding, flush=True)

    run = None if options.run is None else parse_run(options.run)
    await examine(options, run, clock, find)
    bad = [finding for finding in found if finding.state == BAD]
    if options.json:
        print(jsons.dumps({"would_work": not bad, "findings": [dataclasses.asdict(one) for one in found]}))
    elif bad:
        print(f"potluck join would not work here: {', '.join(one.about for one in bad)}")
    else:
        print(
            "potluck join would work here" if run is not None else "this machine can join a run; name one to know more"
        )
    raise SystemExit(1 if bad else 0)


async def examine(options: Options, run: Run | None, clock: Clock, find: Find) -> None:
    """All findings. A run is only asked where this machine could join one."""
    _python(find)
    if not await _torch(find):
        return
    _files(find)
    config = _memory(options, find)
    if _port(options.door, find) & _disk(options.folder, find) and run is not None and config is not None:
        try:
            await _swarm(options, run, config, clock, find)
        except ClockWrong as error:
            find(Finding("clock", BAD, *_split(str(error).removeprefix("clock: "))))
        except PotluckError as error:
            find(Finding("run", BAD, *_split(str(error))))


def _split(error: str) -> tuple[str, str]:
    """A line for an error: what it is, and what to do."""
    text, _, remedy = error.partition("; ")
    return clean(text), clean(remedy)


# --- this machine


def _python(find: Find) -> None:
    version = ".".join(map(str, sys.version_info[:3]))
    if PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]:
        find(Finding("python", GOOD, version))
    else:
        find(Finding("python", WARNING, f"{version} was not tried with Potluck", "use Python 3.11 to 3.13"))


async def _torch(find: Find) -> bool:
    """Asks another process: a broken installation may take its process with it."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", TORCH, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(TORCH_SECONDS):
            said, complained = await child.communicate()
    except TimeoutError:
        child.kill()
        await child.communicate()
        find(Finding("torch", BAD, f"did nothing for {TORCH_SECONDS:g} s", "install PyTorch again"))
        return False
    if child.returncode:
        reason = (complained.decode(errors="replace").strip().splitlines() or [f"exit code {child.returncode}"])[-1]
        find(
            Finding(
                "torch", BAD, clean(reason), "install PyTorch again (python -m pip install --force-reinstall torch)"
            )
        )
        return False
    find(Finding("torch", GOOD, clean(said.decode(errors="replace").strip())))
    return True


def _files(find: Find) -> None:
    from peer.net import sockets

    too_low = descriptors.raise_limit()
    if too_low is None:
        find(Finding("open files", GOOD, f"{descriptors.limit():,} at once"))
    else:
        text, remedy = _split(too_low.removeprefix("open files: "))
        find(Finding("open files", WARNING, text, remedy))
    left = sockets.sweep(sockets.socket_base())
    if left:
        find(Finding("leftovers", GOOD, f"sockets of killed processes, {left} of them, were removed"))


def _disk(folder: Path, find: Find) -> bool:
    """Whether there is a folder to write to, which nobody else uses."""
    from peer.training.device import free_disk

    disk, probe = LocalDisk(), folder / f".probe-{secrets.token_hex(4)}"
    made = not folder.exists()
    try:
        disk.make_folder(folder)
        disk.lock(folder, "potluck process").close()
        free, began = free_disk(folder), time.perf_counter()
        disk.write(probe, os.urandom(PROBE_BYTES))
        speed = PROBE_BYTES / max(time.perf_counter() - began, 1e-6)
    except PotluckError as error:
        find(Finding("folder", BAD, *_split(str(error))))
        return False
    finally:
        probe.unlink(missing_ok=True)
        if made:
            (folder / "lock").unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                folder.rmdir()
    text = f"{size(free)} free, {size(speed)}/s are written"
    if free < LEAST_DISK:
        find(Finding("disk", WARNING, text, "free some space, or choose another folder with --dir"))
    elif speed < SLOW_DISK:
        find(Finding("disk", WARNING, text, "choose a folder on a faster disk with --dir"))
    else:
        find(Finding("disk", GOOD, text))
    return True


def _port(door: Door, find: Find) -> bool:
    from peer.net import sockets

    try:
        sockets.check_port(door.host, door.port)
    except PotluckError as error:
        find(Finding("port", BAD, *_split(str(error))))
        return False
    find(Finding("port", GOOD, f"{door.port} is free" if door.port else "any"))
    return True


def _memory(options: Options, find: Find) -> JoinConfig | None:
    from peer.training import device as resources

    try:
        device, *more = resources.chosen(options.device, options.devices)
        free = resources.smallest_budget((device, *more))
        memory = free if options.memory == "auto" else resources.parse_size(options.memory)
    except PotluckError as error:
        find(Finding("device", BAD, *_split(str(error))))
        return None
    text = f"{resources.name_of((device, *more))}, {size(memory)} would be offered" + (" of each" if more else "")
    if memory > free:
        find(
            Finding(
                "memory", WARNING, f"{text}, {size(free)} are free", "offer less with --memory, or close other programs"
            )
        )
    elif memory < LEAST_MEMORY:
        find(Finding("memory", WARNING, text, "close other programs, or join a run with a small model"))
    else:
        find(Finding("memory", GOOD, text))
    return JoinConfig(
        folder=options.folder,
        device=device,
        more_devices=tuple(more),
        memory_bytes=memory,
        up_bps=None,
        down_bps=None,
        threads=options.threads,
    )


# --- the run


async def _swarm(options: Options, run: Run, config: JoinConfig, clock: Clock, find: Find) -> None:
    """What joining would meet. Raises PotluckError."""
    key = keyfile.load_or_create(options.folder / KEY)
    way_in = WayIn(run, options.folder, options.door)
    transport = await way_in.start()
    try:
        manifest = await manifest_of(run, transport)
        find(
            Finding(
                "run", GOOD, f"{clean(manifest.name)} {manifest.run_id[:12]}, {manifest.rounds} rounds by its manifest"
            )
        )
        alone = why_one_device(manifest, config)
        if alone is not None:
            config = dataclasses.replace(config, more_devices=())
            find(Finding("devices", WARNING, *_split(alone.removeprefix("devices: "))))
        transport, reached = await way_in.settle(transport, manifest)
        if reached is not None:
            config = dataclasses.replace(config, reachable=reached.how, reached_at=reached.whole(key.peer_id))
            _reach(reached.how, find)
        transport = await RelayedTransport.begin(transport, key, manifest.operators)
        await _role(manifest, key, transport, run, config, clock, find)
    finally:
        await transport.aclose()


def _reach(how: str, find: Find) -> None:
    if how == "private":
        remedy = "forward a TCP port of the router to this machine, and give it as --port: chains get faster by it"
        find(Finding("reach", WARNING, REACHED[how], remedy))
    else:
        find(Finding("reach", GOOD, REACHED[how]))


async def _role(
    manifest: Manifest, key: Identity, transport: Transport, run: Run, config: JoinConfig, clock: Clock, find: Find
) -> None:
    from peer.node.peer import Peer
    from peer.state.storage import Storage
    from peer.training import speed_test

    warnings: list[str] = []

    def emit(body: events.Body) -> None:
        if isinstance(body, events.Warning):
            warnings.append(body.text)
        if isinstance(body, events.Measured) and body.round_trip_ms is not None:
            text = (
                f"{rate(body.up_bps)} up, {rate(body.down_bps)} down, {body.round_trip_ms:.0f} ms to a bootstrap node"
            )
            find(Finding("line", GOOD, text))

    monitor = Monitor(manifest, transport, dialled=run.dialled)
    known = await known_by(monitor)
    check_nodes([monitor.peers[o] for o in manifest.operators if o in monitor.peers], clock, find)
    storage = Storage(config.folder)
    try:
        peer = Peer(manifest, key, transport, storage, config, run.bootstrap, emit)
        own = await peer.rehearse()
    finally:
        storage.close()
    for warning in warnings:
        find(Finding("line", WARNING, *_split(warning)))
    speed = await speed_test.together(
        manifest, config.folder, config.devices, config.threads, config.memory_bytes, SPEED_SECONDS
    )
    if speed is None:
        text = f"not known after {SPEED_SECONDS:g} s of this model; others may be much faster"
        find(Finding("speed", WARNING, text, "give --device a GPU, or join a run with a smaller model"))
    else:
        added = ", without the time for adding up gradients" if config.more_devices else ""
        find(Finding("speed", GOOD, f"{speed / 1e12:.3g} TFLOP/s in training{added}"))
    for line in part_lines(known, dataclasses.replace(own, speed_flops=speed or 0)):
        find(Finding("role", GOOD, line))


def check_nodes(nodes: Sequence[Announcement], clock: Clock, find: Find) -> None:
    """Our version and our clock, by what the operators' nodes announce of themselves; of three, one that lies does not decide."""
    other = next((node.version for node in nodes if node.version != VERSION), None)
    if other is not None:
        remedy = (
            f"install the version of Potluck that the run has ({'older' if other < VERSION else 'newer'} than this)"
        )
        find(
            Finding("version", BAD, f"the run's nodes speak version {other} of the protocol, this is {VERSION}", remedy)
        )
    elif nodes:
        find(Finding("version", GOOD, f"{VERSION}, as the run's nodes have"))
    if nodes:
        off = clock.wall() - statistics.median_low(node.serial for node in nodes) / 1000
        if -BEHIND_SECONDS <= off <= AHEAD_SECONDS:
            find(Finding("clock", GOOD, "as the run's nodes have it"))
        else:
            way = "ahead of" if off > 0 else "behind"
            text = (
                f"is {abs(off):,.0f} s {way} that of the run's nodes: nobody would believe what this machine announces"
            )
            find(Finding("clock", BAD, text, "set the time of this machine, best by NTP (timedatectl set-ntp true)"))
