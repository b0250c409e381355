"""What `potluck doctor` does, in a process of its own: a step that hangs, or takes its process with it, is the command's to end.

    python -m peer.cli.examination OPTIONS UNTIL

prints a line of JSON for each step that it begins ({"step": …}) and for each finding (peer/cli/findings.py). Exit code 0: it is done;
OUT_OF_TIME: it was not when the time was over.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import secrets
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from peer import events
from peer.cli import running
from peer.cli.dry_run import REACHED, part_lines
from peer.cli.findings import BAD, GOOD, OUT_OF_TIME, WARNING, Find, Finding, Options, Time
from peer.cli.plan import known_by
from peer.net import keyfile, processes
from peer.net.base import Clock, ClockWrong, Transport
from peer.net.disk import Disk
from peer.net.relay import RelayedTransport
from peer.node.config import JoinConfig, Machine
from peer.node.open_run import KEY, Door, Run, manifest_of, parse_run
from peer.node.way_in import NetworkStart
from peer.training.device import Hardware, free_disk, name_of, parse_devices, parse_size, smallest_budget
from peer.ui.monitor import Monitor
from peer.ui.text import clean, rate, size
from protocol.errors import PotluckError
from protocol.identity import Identity
from protocol.run.manifest import Manifest
from protocol.wire.announcement import VERSION, Announcement

PYTHONS = ((3, 11), (3, 13))
TORCH_SECONDS = 40.0
"""That torch may take to be imported and to multiply, in a process of its own."""
SPEED_SECONDS = 8.0
ROLE_SECONDS = 3.0
"""That the measuring of the speed leaves to what follows."""
PROBE, PROBE_BYTES = "probe-", 64 * 1024 * 1024
SLOW_DISK = 20e6
"""Bytes a second: a checkpoint of a model of 178M parameters would take half a minute."""
LEAST_DISK = 2_000_000_000
LEAST_MEMORY = 500_000_000
AHEAD_SECONDS, BEHIND_SECONDS = 120.0, 30.0
"""By which our clock may differ from what a node last said: it says so once a minute, and what is said lives for five."""
TORCH = "import torch; x = torch.ones(64, 64, requires_grad=True); (x @ x).sum().backward(); print(torch.__version__)"


@dataclasses.dataclass(frozen=True, slots=True)
class Look:
    """What all steps need."""

    options: Options
    time: Time
    clock: Clock = dataclasses.field(default_factory=Clock)

    def at(self, step: str) -> None:
        """Says that this is looked at now."""
        print(json.dumps({"step": step}), flush=True)

    def find(self, finding: Finding) -> None:
        """Says what was found."""
        print(json.dumps(dataclasses.asdict(finding)), flush=True)

    @property
    def folder(self) -> Path:
        """That of the peer."""
        return Path(self.options.folder)

    @property
    def door(self) -> Door:
        """Where it would listen."""
        return Door(host=self.options.host, port=self.options.port)


async def examine(look: Look) -> None:
    """All findings. A run is only asked where this machine could join one. Raises SystemExit when the time is over."""
    try:
        async with asyncio.timeout(look.time.left()):
            await _examine(look)
    except TimeoutError:
        raise SystemExit(OUT_OF_TIME) from None


async def _examine(look: Look) -> None:
    run = None if look.options.run is None else parse_run(look.options.run)
    look.at("python")
    _python(look.find)
    look.at("torch")
    if not await _torch(look.find):
        return
    look.at("open files")
    _files(look.find)
    look.at("memory")
    hardware = _memory(look)
    look.at("port")
    free = _port(look.door, look.find)
    look.at("disk")
    if _disk(look.folder, look.find) and free and run is not None and hardware is not None:
        look.at("run")
        try:
            await _swarm(look, run, hardware)
        except ClockWrong as error:
            look.find(Finding("clock", BAD, *_split(str(error).removeprefix("clock: "))))
        except PotluckError as error:
            look.find(Finding("run", BAD, *_split(str(error))))


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
        find(Finding("torch", BAD, f"did nothing for {TORCH_SECONDS:g} s", "install PyTorch again"))
        return False
    finally:
        processes.send_signal(child)
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

    too_low = processes.raise_file_limit()
    if too_low is None:
        find(Finding("open files", GOOD, f"{processes.open_file_limit():,} at once"))
    else:
        text, remedy = _split(too_low.removeprefix("open files: "))
        find(Finding("open files", WARNING, text, remedy))
    left = sockets.sweep(sockets.socket_base())
    if left:
        find(Finding("leftovers", GOOD, f"sockets of killed processes, {left} of them, were removed"))


def _disk(folder: Path, find: Find) -> bool:
    """Whether there is a folder to write to, which nobody else uses."""
    disk, probe = Disk(), folder / f".{PROBE}{secrets.token_hex(4)}"
    made = not folder.exists()
    try:
        disk.make_folder(folder)
        disk.lock(folder, "potluck process").close()
        for left in folder.glob(f".*{PROBE}*"):  # by one of us that was killed
            left.unlink(missing_ok=True)
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


def _memory(look: Look) -> Hardware | None:
    options, find = look.options, look.find
    try:
        memory = None if options.memory == "auto" else parse_size(options.memory)
        found = Hardware.find(parse_devices(options.device, options.devices), memory)
    except PotluckError as error:
        find(Finding("device", BAD, *_split(str(error))))
        return None
    free, host = smallest_budget(found.devices), found.host_bytes
    each = " of each" if len(found.devices) > 1 else ""
    text = f"{name_of(found.devices)}, {size(found.memory_bytes)} would be offered{each}"
    text += f", {size(host)} of the host's beside" if host else ""
    if memory is not None and memory > free:
        find(
            Finding(
                "memory", WARNING, f"{text}, {size(free)} are free", "offer less with --memory, or close other programs"
            )
        )
    elif min(found.memory_bytes, host or found.memory_bytes) < LEAST_MEMORY:
        find(Finding("memory", WARNING, text, "close other programs, or join a run with a small model"))
    else:
        find(Finding("memory", GOOD, text))
    return found


# --- the run


async def _swarm(look: Look, run: Run, hardware: Hardware) -> None:
    """What joining would meet. Raises PotluckError."""
    find, key = look.find, keyfile.load_or_create(look.folder / KEY)
    way_in = NetworkStart(run, look.folder, look.door)
    transport = await way_in.start()
    try:
        manifest = await manifest_of(run, transport)
        find(
            Finding(
                "run", GOOD, f"{clean(manifest.name)} {manifest.run_id[:12]}, {manifest.rounds} rounds by its manifest"
            )
        )
        hardware = hardware.useful(
            manifest, lambda why: find(Finding("devices", WARNING, *_split(why.removeprefix("devices: "))))
        )
        look.at("reach")
        transport, reached = await way_in.find_reach(transport, manifest)
        if reached is not None:
            _reach(reached.how, find)
        transport = await RelayedTransport.begin(transport, key, manifest.operators)
        config = JoinConfig(run=run, folder=look.folder, door=look.door, threads=look.options.threads)
        await _role(look, manifest, key, transport, Machine(config, hardware, reached))
    finally:
        await transport.aclose()


def _reach(how: str, find: Find) -> None:
    if how == "private":
        remedy = "forward a TCP port of the router to this machine, and give it as --port: chains get faster by it"
        find(Finding("reach", WARNING, REACHED[how], remedy))
    else:
        find(Finding("reach", GOOD, REACHED[how]))


async def _role(look: Look, manifest: Manifest, key: Identity, transport: Transport, machine: Machine) -> None:
    from peer.node.peer import Peer
    from peer.state.storage import Storage

    find, warnings = look.find, list[str]()

    def emit(body: events.Body) -> None:
        if isinstance(body, events.Warning):
            warnings.append(body.text)
        if isinstance(body, events.Measured) and body.round_trip_ms is not None:
            text = (
                f"{rate(body.up_bps)} up, {rate(body.down_bps)} down, {body.round_trip_ms:.0f} ms to a bootstrap node"
            )
            find(Finding("line", GOOD, text))

    look.at("clock")
    monitor = Monitor(manifest, transport, bootstrap=machine.config.run.bootstrap)
    known = await known_by(monitor)
    check_nodes([monitor.peers[o] for o in manifest.operators if o in monitor.peers], look.clock, find)
    look.at("line")
    storage = Storage(look.folder)
    try:
        peer = Peer(manifest, key, transport, storage, machine, emit)
        own = await peer.rehearse()
    finally:
        storage.close()
    for warning in warnings:
        find(Finding("line", WARNING, *_split(warning)))
    look.at("speed")
    speed = await _speed(look, manifest, machine.hardware)
    look.at("role")
    for line in part_lines(known, dataclasses.replace(own, speed_flops=speed or 0)):
        find(Finding("role", GOOD, line))


async def _speed(look: Look, manifest: Manifest, hardware: Hardware) -> int | None:
    """In operations a second; None where it cannot be found in time."""
    from peer.training import speed_test

    within, began = look.time.left(but=ROLE_SECONDS), time.monotonic()
    speed = await speed_test.together(
        manifest,
        look.folder,
        hardware.devices,
        look.options.threads,
        hardware.memory_bytes,
        SPEED_SECONDS,
        within,
    )
    if speed is None:
        text = f"not known after {time.monotonic() - began:.0f} s of trying, others may be much faster"
        remedy = "try again when this machine has less to do, give --device a GPU, or join a run with a smaller model"
        look.find(Finding("speed", WARNING, text, remedy))
    else:
        added = ", without the time for adding up gradients" if len(hardware.devices) > 1 else ""
        look.find(Finding("speed", GOOD, f"{speed / 1e12:.3g} TFLOP/s in training{added}"))
    return speed


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


if __name__ == "__main__":
    running.run(examine(Look(Options(**json.loads(sys.argv[1])), Time(float(sys.argv[2])))), interrupted=1)
