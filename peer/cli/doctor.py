"""`potluck doctor`: checks whether this machine can join a run. Each finding has one remedy.

Without a run it checks the machine alone. With one it does what `potluck join` does before it trains, and predicts the
machine's role in the next plan. `python -m peer.cli.doctor OPTIONS UNTIL` does the checks and is killed when the time
is over. It prints a line of JSON for each step that it begins ({"step": ...}) and for each Finding.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json as jsons
import os
import secrets
import signal
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
from peer.cli.options import DEFAULT_THREADS, Device, Devices, Dir, Host, Memory, Port, Threads, with_options
from peer.cli.plan import REACHED, known_by, part_lines
from peer.net import keyfile, processes
from peer.net.base import Clock, ClockWrong, Transport
from peer.net.disk import Disk
from peer.net.relay import RelayedTransport
from peer.node.config import JoinConfig, Machine
from peer.node.open_run import KEY, Door, Run, here, manifest_of, parse_run
from peer.node.way_in import NetworkStart
from peer.training.device import Hardware, free_disk, name_of, parse_devices, parse_size, smallest_budget, try_torch
from peer.ui.lines import price
from peer.ui.monitor import Monitor
from peer.ui.text import clean, rate, size
from protocol.errors import PotluckError, UsageError
from protocol.identity import Identity
from protocol.run.manifest import Manifest
from protocol.wire.announcement import VERSION, Announcement

GOOD, WARNING, BAD, UNKNOWN = "good", "warning", "bad", "unknown"
MARKS = {GOOD: "✓", WARNING: "!", BAD: "✗", UNKNOWN: "?"}
MACHINE_STEPS = ("python", "torch", "open files", "memory", "port", "disk")
RUN_STEPS = ("run", "reach", "clock", "bandwidth", "speed", "role")
OPTIONAL_STEPS = ("speed", "role")
"""Joining works without them."""
WITHIN_SECONDS = 45.0
"""Default time limit. With GRACE_SECONDS and the start of the command it is less than a minute."""
GRACE_SECONDS = 5.0
OUT_OF_TIME = 75
"""Exit code of the checks when their time is over."""
LONGER_SECONDS = 300
"""Limit that is advised if the time was too short."""
KILLED_SECONDS = 1.0
"""Wait for the system to end a killed process; one that hangs in the system cannot be killed."""
PYTHONS = ((3, 11), (3, 13))
SPEED_SECONDS = 8.0
ROLE_SECONDS = 3.0
"""Time that the speed test leaves to the last step."""
PROBE, PROBE_BYTES = "probe-", 64 * 1024 * 1024
SLOW_DISK_BYTES_PER_SECOND = 20e6
"""A checkpoint of a model of 178M parameters would take half a minute."""
LEAST_DISK_BYTES = 2_000_000_000
LEAST_MEMORY_BYTES = 500_000_000
AHEAD_SECONDS, BEHIND_SECONDS = 120.0, 30.0
"""Allowed offset of our clock from a node's last announcement: one a minute, valid for five."""
REINSTALL_TORCH = "install PyTorch again (python -m pip install --force-reinstall torch)"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check."""

    about: str
    state: str
    """GOOD, WARNING, BAD: joining would not work; or UNKNOWN."""
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{MARKS[self.state]} {self.about}: {self.text}" + (f"; {self.remedy}" if self.remedy else "")


Find = Callable[[Finding], None]


@dataclass(frozen=True, slots=True)
class Time:
    """A time limit that several processes share."""

    until: float
    """By the steady clock, which all processes of a machine share."""

    @classmethod
    def of(cls, seconds: float) -> Time:
        """A limit that begins now."""
        return cls(time.monotonic() + seconds)

    def left(self, but: float = 0.0) -> float:
        """Seconds left, minus `but` for later steps."""
        return max(0.0, self.until - but - time.monotonic())


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorOptions:
    """The options of `potluck doctor`."""

    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="The run that this machine is to join, as for potluck join (default: the one in which the peer in"
            " --dir has been, if any).",
        ),
    ] = None
    dir: Dir = Path("potluck-peer")
    host: Host = "0.0.0.0"
    port: Port = 0
    device: Device = "auto"
    devices: Devices = None
    memory: Memory = "auto"
    threads: Threads = DEFAULT_THREADS
    within: Annotated[
        float, typer.Option(min=1, help="Seconds that it may take; checks that were not done by then are named.")
    ] = WITHIN_SECONDS
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object: findings, and whether joining would work.")
    ] = False

    def to_json(self) -> str:
        """For another process."""
        return jsons.dumps(dataclasses.asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> DoctorOptions:
        """Of `to_json`."""
        fields = jsons.loads(text)
        return cls(**fields | {"dir": Path(fields["dir"])})


def _start(options: DoctorOptions, context: typer.Context) -> None:
    time = Time.of(options.within)
    if options.run is None:
        with contextlib.suppress(UsageError):
            options = dataclasses.replace(options, run=here(options.dir))
    running.run(_doctor(options, time), interrupted=1)


command = with_options(DoctorOptions, _start)


async def _doctor(options: DoctorOptions, time: Time) -> None:
    """Prints the findings as they come. Raises SystemExit: 0 if joining would work, else 1."""
    found: list[Finding] = []

    def find(finding: Finding) -> None:
        found.append(finding)
        if not options.json:
            print(finding, flush=True)

    if options.run is not None:
        parse_run(options.run)
    await _examined(options, time, find)
    bad, unknown = ([f.about for f in found if f.state == state] for state in (BAD, UNKNOWN))
    if options.json:
        works = False if bad else None if unknown else True
        print(jsons.dumps({"would_work": works, "findings": [dataclasses.asdict(one) for one in found]}))
    elif bad:
        print(f"potluck join would not work here: {', '.join(bad)}")
    elif unknown:
        print(f"potluck join may not work here; not known: {', '.join(unknown)}")
    elif options.run is not None:
        print("potluck join would work here")
    else:
        print("this machine can join a run; name one to know more")
    raise SystemExit(1 if bad or unknown else 0)


async def _examined(options: DoctorOptions, time: Time, find: Find) -> None:
    """Runs the checks in another process and passes on its findings, and the steps that it did not reach in time."""
    steps = MACHINE_STEPS if options.run is None else MACHINE_STEPS + RUN_STEPS
    current, code = steps[0], OUT_OF_TIME
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "peer.cli.doctor", options.to_json(), str(time.until)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert child.stdout is not None
    try:
        async with asyncio.timeout(time.left() + GRACE_SECONDS):
            async for line in child.stdout:
                said = jsons.loads(line)
                if "step" in said:
                    current = said["step"]
                else:
                    find(Finding(**said))
            code = await child.wait()
    except TimeoutError:
        pass
    finally:
        await _end(child, GRACE_SECONDS if time.left() else 0.0)
    if code == OUT_OF_TIME:
        for finding in _unfinished(steps[steps.index(current) :], options.within):
            find(finding)
    elif code:
        text = f"the check ended with exit code {code}"
        remedy = "close other programs, and try again; install Potluck again if that does not help"
        remedy = REINSTALL_TORCH if current == "torch" else remedy
        find(Finding(current, BAD, text, remedy))


def _unfinished(steps: tuple[str, ...], within: float) -> list[Finding]:
    """Findings for the steps that are missing when the time is over; the first was under way."""
    remedy = f"try again when this machine has less to do, or give it more time (--within {LONGER_SECONDS})"
    under_way, never = f"the check was not over after {within:g} s", f"not checked: {within:g} s were over"
    return [
        Finding(step, WARNING if step in OPTIONAL_STEPS else UNKNOWN, never if i else under_way, remedy)
        for i, step in enumerate(steps)
    ]


async def _end(child: asyncio.subprocess.Process, seconds: float) -> None:
    """Ends the process and all that it has started; it has some seconds to end itself."""
    try:
        if child.returncode is None and seconds:
            processes.send_signal(child, signal.SIGTERM)
            await _wait(child, seconds)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        await _wait(child, KILLED_SECONDS)


async def _wait(child: asyncio.subprocess.Process, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await child.wait()


# --- the checks


@dataclasses.dataclass(frozen=True, slots=True)
class Look:
    """The context of all checks."""

    options: DoctorOptions
    time: Time
    clock: Clock = dataclasses.field(default_factory=Clock)

    def at(self, step: str) -> None:
        """Reports that a step begins."""
        print(jsons.dumps({"step": step}), flush=True)

    def find(self, finding: Finding) -> None:
        """Reports a finding."""
        print(jsons.dumps(dataclasses.asdict(finding)), flush=True)

    @property
    def door(self) -> Door:
        """The addresses on which the peer would listen."""
        return Door(host=self.options.host, port=self.options.port)


async def examine(look: Look) -> None:
    """Runs all checks; those of a run only if the machine could join one. Raises SystemExit when the time is over."""
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
    if not _torch(look.find):
        return
    look.at("open files")
    _files(look.find)
    look.at("memory")
    hardware = _memory(look)
    look.at("port")
    free = _port(look.door, look.find)
    look.at("disk")
    if _disk(look.options.dir, look.find) and free and run is not None and hardware is not None:
        look.at("run")
        try:
            await _swarm(look, run, hardware)
        except PotluckError as error:
            look.find(_failed("clock" if isinstance(error, ClockWrong) else "run", error))


def _failed(about: str, error: object, state: str = BAD) -> Finding:
    """The finding of an error or a warning: `[about: ]text; remedy`."""
    text, _, remedy = str(error).removeprefix(f"{about}: ").partition("; ")
    return Finding(about, state, clean(text), clean(remedy))


# --- this machine


def _python(find: Find) -> None:
    version = ".".join(map(str, sys.version_info[:3]))
    if PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]:
        find(Finding("python", GOOD, version))
    else:
        find(Finding("python", WARNING, f"{version} was not tried with Potluck", "use Python 3.11 to 3.13"))


def _torch(find: Find) -> bool:
    """Returns whether torch computes. What ends this process there is reported by the command."""
    try:
        find(Finding("torch", GOOD, try_torch()))
    except Exception as error:
        find(Finding("torch", BAD, clean(f"{type(error).__name__}: {error}"), REINSTALL_TORCH))
        return False
    return True


def _files(find: Find) -> None:
    from peer.net import sockets

    too_low = processes.raise_file_limit()
    if too_low is None:
        find(Finding("open files", GOOD, f"{processes.open_file_limit():,} at once"))
    else:
        find(_failed("open files", too_low, WARNING))
    left = sockets.sweep(sockets.socket_base())
    if left:
        find(Finding("leftovers", GOOD, f"sockets of killed processes, {left} of them, were removed"))


def _disk(folder: Path, find: Find) -> bool:
    """Returns whether the folder can be written and no other process uses it."""
    disk, probe = Disk(), folder / f".{PROBE}{secrets.token_hex(4)}"
    made = not folder.exists()
    try:
        disk.make_folder(folder)
        disk.lock(folder, "potluck process").close()
        for left in folder.glob(f".*{PROBE}*"):  # of a check that was killed
            left.unlink(missing_ok=True)
        free, began = free_disk(folder), time.perf_counter()
        disk.write(probe, os.urandom(PROBE_BYTES))
        speed = PROBE_BYTES / max(time.perf_counter() - began, 1e-6)
    except PotluckError as error:
        find(_failed("folder", error))
        return False
    finally:
        probe.unlink(missing_ok=True)
        if made:
            (folder / "lock").unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                folder.rmdir()
    text = f"{size(free)} free, {size(speed)}/s are written"
    if free < LEAST_DISK_BYTES:
        find(Finding("disk", WARNING, text, "free some space, or choose another folder with --dir"))
    elif speed < SLOW_DISK_BYTES_PER_SECOND:
        find(Finding("disk", WARNING, text, "choose a folder on a faster disk with --dir"))
    else:
        find(Finding("disk", GOOD, text))
    return True


def _port(door: Door, find: Find) -> bool:
    from peer.net import sockets

    try:
        sockets.check_port(door.host, door.port)
    except PotluckError as error:
        find(_failed("port", error))
        return False
    find(Finding("port", GOOD, f"{door.port} is free" if door.port else "any"))
    return True


def _memory(look: Look) -> Hardware | None:
    options, find = look.options, look.find
    try:
        memory = None if options.memory == "auto" else parse_size(options.memory)
        found = Hardware.find(parse_devices(options.device, options.devices), memory)
    except PotluckError as error:
        find(_failed("device", error))
        return None
    free, host = smallest_budget(found.devices), found.host_bytes
    each = " of each" if len(found.devices) > 1 else ""
    text = f"{name_of(found.devices)}, {size(found.memory_bytes)} would be offered{each}"
    text += f", {size(host)} of the host's beside" if host else ""
    if memory is not None and memory > free:
        remedy = "offer less with --memory, or close other programs"
        find(Finding("memory", WARNING, f"{text}, {size(free)} are free", remedy))
    elif min(found.memory_bytes, host or found.memory_bytes) < LEAST_MEMORY_BYTES:
        find(Finding("memory", WARNING, text, "close other programs, or join a run with a small model"))
    else:
        find(Finding("memory", GOOD, text))
    return found


# --- the run


async def _swarm(look: Look, run: Run, hardware: Hardware) -> None:
    """Checks what joining would need. Raises PotluckError."""
    find, folder = look.find, look.options.dir
    key = keyfile.load_or_create(folder / KEY)
    way_in = NetworkStart(run, folder, look.door)
    transport = await way_in.start()
    try:
        manifest = await manifest_of(run, transport)
        text = f"{clean(manifest.name)} {manifest.run_id[:12]}, {manifest.rounds} rounds by its manifest"
        find(Finding("run", GOOD, text))
        for line in price(events.found(manifest)):
            find(Finding("cost", GOOD, line))
        hardware = hardware.useful(manifest, lambda why: find(_failed("devices", why, WARNING)))
        look.at("reach")
        transport, reached = await way_in.find_reach(transport, manifest)
        if reached is not None and reached.how == "private":
            remedy = "forward a TCP port of the router to this machine, and give it as --port: chains get faster by it"
            find(Finding("reach", WARNING, REACHED[reached.how], remedy))
        elif reached is not None:
            find(Finding("reach", GOOD, REACHED[reached.how]))
        transport = await RelayedTransport.begin(transport, key, manifest.operators)
        config = JoinConfig(run=run, folder=folder, door=look.door, threads=look.options.threads)
        await _role(look, manifest, key, transport, Machine(config, hardware, reached))
    finally:
        await transport.aclose()


async def _role(look: Look, manifest: Manifest, key: Identity, transport: Transport, machine: Machine) -> None:
    from peer.node.peer import Peer
    from peer.state.storage import Storage

    find, warnings = look.find, list[str]()

    def emit(body: events.Body) -> None:
        if isinstance(body, events.Warning):
            warnings.append(body.text)
        if isinstance(body, events.Measured) and body.round_trip_ms is not None:
            line = f"{rate(body.up_bps)} up, {rate(body.down_bps)} down"
            find(Finding("bandwidth", GOOD, f"{line}; {body.round_trip_ms:.0f} ms to a bootstrap node"))

    look.at("clock")
    monitor = Monitor(manifest, transport, bootstrap=machine.config.run.bootstrap)
    known = await known_by(monitor)
    check_nodes([monitor.peers[o] for o in manifest.operators if o in monitor.peers], look.clock, find)
    look.at("bandwidth")
    storage = Storage(look.options.dir)
    try:
        peer = Peer(manifest, key, transport, storage, machine, emit)
        own = await peer.rehearse()
    finally:
        storage.close()
    for warning in warnings:
        find(_failed("bandwidth", warning, WARNING))
    look.at("speed")
    speed = await _speed(look, manifest, machine.hardware)
    look.at("role")
    for line in part_lines(known, dataclasses.replace(own, speed_flops=speed or 0)):
        find(Finding("role", GOOD, line))


async def _speed(look: Look, manifest: Manifest, hardware: Hardware) -> int | None:
    """Operations per second; None if they cannot be measured in time."""
    from peer.training import speed_test

    options, within, began = look.options, look.time.left(but=ROLE_SECONDS), time.monotonic()
    devices, memory = hardware.devices, hardware.memory_bytes
    speed = await speed_test.together(manifest, options.dir, devices, options.threads, memory, SPEED_SECONDS, within)
    if speed is None:
        text = f"not known after {time.monotonic() - began:.0f} s of trying; other machines may be much faster"
        remedy = "try again when this machine has less to do, give --device a GPU, or join a run with a smaller model"
        look.find(Finding("speed", WARNING, text, remedy))
    else:
        added = ", without the time for exchanges between them" if len(hardware.devices) > 1 else ""
        look.find(Finding("speed", GOOD, f"{speed / 1e12:.3g} TFLOP/s in training{added}"))
    return speed


def check_nodes(nodes: Sequence[Announcement], clock: Clock, find: Find) -> None:
    """Compares our version and clock with the announcements of the operators' nodes; a minority cannot decide."""
    other = next((node.version for node in nodes if node.version != VERSION), None)
    if other is not None:
        age = "older" if other < VERSION else "newer"
        text = f"the run's nodes speak version {other} of the protocol, this is {VERSION}"
        find(Finding("version", BAD, text, f"install the version of Potluck that the run has ({age} than this)"))
    elif nodes:
        find(Finding("version", GOOD, f"{VERSION}, as the run's nodes have"))
    if nodes:
        off = clock.wall() - statistics.median_low(node.serial for node in nodes) / 1000
        if -BEHIND_SECONDS <= off <= AHEAD_SECONDS:
            find(Finding("clock", GOOD, "as the run's nodes have it"))
        else:
            way = "ahead of" if off > 0 else "behind"
            text = f"is {abs(off):,.0f} s {way} that of the run's nodes: they would refuse this machine's announcements"
            find(Finding("clock", BAD, text, "set the time of this machine, best by NTP (timedatectl set-ntp true)"))


if __name__ == "__main__":
    options, limit = DoctorOptions.from_json(sys.argv[1]), Time(float(sys.argv[2]))
    running.run(examine(Look(options, limit)), interrupted=1)
