"""`potluck doctor`: each fault is made, and found; a machine without one is told what it would do."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from peer.cli import doctor
from peer.cli.doctor import BAD, GOOD, MACHINE_STEPS, RUN_STEPS, UNKNOWN, WARNING, Finding
from peer.net.base import Clock
from peer.net.disk import Disk
from peer.net.sockets import SocketFolder
from protocol.wire import encoding
from protocol.wire.announcement import NODE_DEVICE, VERSION, Announcement
from tests.benchmarks import doctor as promises
from tests.e2e.typed import hanging, running, until
from tests.faults import bad_machine
from tests.faults.homes import homes
from tests.faults.processes import DEADLINE, Swarm
from tests.faults.roles import NODE
from tests.support import crowd, potluck, tiny
from tests.support.roles import make_manifest

Found = dict[str, Finding]
MINUTE = 60.0
LONG = 250
"""Seconds, so that no machine is too slow for what is asked of it here."""


def examined(
    *arguments: object,
    env: dict[str, str] | None = None,
    limit: int | None = None,
    place: Sequence[str] = (),
    within: float = LONG,
) -> tuple[Found, bool | None]:
    """What a machine is told in a process of its own, and whether joining would work; None: unknown. `limit`: of
    open files; `place`: what the command begins with, where it is to run elsewhere; `within`: the time that it has."""

    def limited() -> None:
        assert limit is not None
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))

    done = potluck.run(
        *("doctor", *arguments, "--within", within, "--json"),
        before=place,
        text=True,
        timeout=DEADLINE,
        env={**os.environ, **(env or {})},
        preexec_fn=None if limit is None else limited,
    )
    assert not done.stderr, done.stderr
    told = json.loads(done.stdout)
    found: Found = {}
    for one in (Finding(**one) for one in told["findings"]):
        before = f"{found[one.about].text}; " if one.about in found else ""
        found[one.about] = dataclasses.replace(one, text=before + one.text)
    assert done.returncode == (0 if told["would_work"] else 1)
    states = {one.state for one in found.values()}
    assert told["would_work"] is (False if BAD in states else None if UNKNOWN in states else True)
    assert all(one.remedy for one in found.values() if one.state != GOOD), found
    return found, told["would_work"]


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    """A node and one full replica, which have decided rounds."""
    manifest = make_manifest(start_peers=1)
    with Swarm(
        tmp_path_factory.mktemp("doctor") / "run", manifest, tiny.OPERATORS[:1], module="tests.faults.paced"
    ) as made:
        made.start_node(NODE)
        made.start("a")
        made.committed(NODE, 2)
        yield made


def test_a_machine_that_can_join_is_told_what_it_would_do(swarm: Swarm, tmp_path: Path) -> None:
    memory = tiny.full_memory(swarm.manifest)
    options = ("--dir", tmp_path / "b", "--host", "127.0.0.1", "--memory", memory, "--threads", 1, "--device", "cpu")
    found, works = examined(swarm.addresses[0], *options)
    assert works, found
    expected = {"python", "torch", "open files", "disk", "port", "run", "version", "clock", "line", "speed", "role"}
    assert expected <= set(found)
    assert "million a day" in found["role"].text
    assert "of text a round" in found["role"].text
    assert not list((tmp_path / "b").rglob("*probe*"))
    announced = [e.fields["speed_flops"] for e in swarm.events(NODE) if e.kind == "ready"]
    assert announced, "there was a peer whose speed is known"


def test_a_machine_with_two_devices_is_told_what_they_would_do_together(swarm: Swarm, tmp_path: Path) -> None:
    memory = tiny.full_memory(swarm.manifest)
    options = ("--dir", tmp_path / "b", "--host", "127.0.0.1", "--threads", 1, "--devices", "cpu,cpu")
    found, works = examined(swarm.addresses[0], *options, "--memory", memory)
    assert works, found
    assert found["memory"].text.startswith("2 x cpu, ")
    assert found["memory"].text.endswith(" would be offered of each")
    assert found["speed"].text.endswith("TFLOP/s in training, without the time for adding up gradients")
    assert re.search(r"a full replica: [\d,]+ tokens per second by its measured speed", found["role"].text)
    assert "devices" not in found
    assert not list((tmp_path / "b").glob("speed-test*"))
    found, works = examined(swarm.addresses[0], *options, "--memory", memory - 1)
    assert works, found
    assert found["devices"].text.startswith("each of the 2 must hold the whole model")
    assert "only cpu trains" in found["devices"].remedy


def test_nothing_is_promised_of_a_speed_that_cannot_be_measured(swarm: Swarm, tmp_path: Path) -> None:
    """Every process that would measure it is killed as it starts, as one to which the system gives no memory."""
    dies = (
        "import os, signal, sys\nif 'peer.training.speed_test' in sys.orig_argv: os.kill(os.getpid(), signal.SIGKILL)"
    )
    env = with_module(tmp_path / "site", "sitecustomize", dies)
    options = ("--dir", tmp_path / "b", "--host", "127.0.0.1", "--memory", tiny.full_memory(swarm.manifest))
    found, works = examined(swarm.addresses[0], *options, "--device", "cpu", env=env)
    assert works, found
    assert found["speed"].text.startswith("not known after")
    assert found["role"].text.startswith("it would be a full replica; how much it would train a day is not known")
    assert not re.search("million|tokens|of text", found["role"].text)


def test_devices_that_are_not_there(tmp_path: Path) -> None:
    found, works = examined("--dir", tmp_path / "new", "--devices", "0,99")
    assert not works
    assert found["device"].text.startswith('devices "0,99": PyTorch finds ')


def test_a_machine_alone(tmp_path: Path) -> None:
    found, works = examined("--dir", tmp_path / "new")
    assert works
    assert set(found) <= {"python", "torch", "open files", "disk", "port", "memory", "leftovers"}
    assert not (tmp_path / "new").exists(), "nothing is left"


def with_module(folder: Path, name: str, text: str) -> dict[str, str]:
    """The environment in which Python imports this module."""
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(text)
    return {"PYTHONPATH": f"{folder}{os.pathsep}{os.getcwd()}"}


@pytest.mark.parametrize(
    ("torch", "said"),
    [('raise ImportError("libtorch_cpu.so: cannot open it")', "libtorch_cpu.so"), ("import os\nos.abort()", "")],
)
def test_a_broken_torch(tmp_path: Path, torch: str, said: str) -> None:
    found, works = examined("--dir", tmp_path / "b", env=with_module(tmp_path, "torch", torch))
    assert not works
    assert found["torch"].state == BAD
    assert said in found["torch"].text


def test_few_open_files(tmp_path: Path) -> None:
    found, works = examined("--dir", tmp_path / "b", limit=1000)
    assert works
    assert found["open files"].state == WARNING
    assert "allows 1000 at once" in found["open files"].text


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        found, works = examined("--dir", tmp_path / "b", "--host", "127.0.0.1", "--port", taken.getsockname()[1])
    assert not works
    assert "another program listens on it" in found["port"].text


def test_a_folder_in_use(tmp_path: Path) -> None:
    lock = Disk().lock(tmp_path / "b", "potluck process")
    found, works = examined("--dir", tmp_path / "b")
    lock.close()
    assert not works
    assert "another potluck process uses it" in found["folder"].text


def test_a_full_disk(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    small = tmp_path / "disk"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small)], check=True)
    try:
        found, works = examined("--dir", small / "b")
        assert not works
        assert "No space left" in found["folder"].text
        assert not list(small.iterdir()), "nothing half-written"
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_a_slow_disk(tmp_path: Path) -> None:
    """The system lets these processes write so much a second to the disk on which their folder is, and no more; where
    it does not, as for a user's processes in a container, a call of the C library that brings a file to the disk waits
    as long."""
    with bad_machine.slow_disk(tmp_path) as (place, env):
        found, works = examined("--dir", tmp_path / "b", place=place, env=env)
    assert works
    assert found["disk"].state == WARNING
    speed = re.search(r"(\d+(?:\.\d)?) MB/s are written", found["disk"].text)
    assert float(speed[1]) * 1e6 <= bad_machine.MOST * bad_machine.BYTES_A_SECOND


def test_no_memory(tmp_path: Path) -> None:
    """The system says that other programs have it."""
    if os.geteuid() != 0:
        pytest.skip("changing what the system says needs root")
    told = re.sub(r"(MemAvailable: +)\d+", r"\g<1>300000", Path("/proc/meminfo").read_text())
    (tmp_path / "meminfo").write_text(told)
    bind = 'mount --bind "$0" /proc/meminfo && exec "$@"'
    place = ("unshare", "--mount", "sh", "-c", bind, str(tmp_path / "meminfo"))
    found, works = examined("--dir", tmp_path / "b", place=place)
    assert works
    assert found["memory"].state == WARNING
    assert "close other programs" in found["memory"].remedy


LIMIT = 700_000_000
"""Bytes of a container: doctor takes a quarter of it for itself."""


def test_a_container_with_little_memory(tmp_path: Path) -> None:
    """The system's own limit, of a control group in which the process is."""
    groups = Path("/sys/fs/cgroup")
    if (groups / "memory").is_dir():
        group, limit = groups / "memory" / f"potluck-{os.getpid()}", "memory.limit_in_bytes"
    else:
        group, limit = groups / f"potluck-{os.getpid()}", "memory.max"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"control groups: {error.strerror}; a limit of memory needs them")
    try:
        if not (group / limit).exists():
            pytest.skip("control groups: this system limits no memory by them")
        (group / limit).write_text(str(LIMIT))
        place = ("sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs"))
        found, works = examined("--dir", tmp_path / "b", place=place)
    finally:
        group.rmdir()
    assert works
    assert found["memory"].state == WARNING, found
    assert "close other programs" in found["memory"].remedy


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose path leaves room for that of a socket."""
    with tempfile.TemporaryDirectory(prefix="pl-", dir="/tmp") as name:
        yield Path(name)


def test_sockets_of_killed_processes(run_file: Path, tmp_path: Path, short: Path) -> None:
    """Sockets of a node and its daemon; those of a process that lives, here this one, stay, whatever the clock says."""
    where = ("bootstrap", run_file, "--dir", run_file.parent / "boot", "--host", "127.0.0.1", "--port", 0, "--json")
    here = {"TMPDIR": str(short)}
    with running(*where, env=here) as node:
        until(node, "listening")
        (left,) = short.glob("potluck-net-*")
        for process in (*psutil.Process(node.pid).children(recursive=True), node):
            process.kill()
        node.wait(DEADLINE)
    assert [path for path in left.glob("p2pd-*.sock") if path.is_socket()]
    lives = SocketFolder(short)
    os.utime(lives.path, (0, 0))
    found, works = examined("--dir", tmp_path / "b", env=here)
    assert works
    assert "killed processes, 1 of them" in found["leftovers"].text
    assert not left.exists()
    assert lives.path.exists()
    lives.close()
    assert not list(short.iterdir())


def test_too_little_memory(swarm: Swarm, tmp_path: Path) -> None:
    found, works = examined(swarm.addresses[0], "--dir", tmp_path / "b", "--host", "127.0.0.1", "--memory", "1kB")
    assert not works
    assert found["memory"].state == WARNING
    assert "one block of this model needs" in found["run"].text


@contextlib.contextmanager
def silent(swarm: Swarm) -> Iterator[str]:
    """The line of a node that is not there. A silent host is."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address, _, rest = swarm.addresses[0].partition("/tcp/")
        yield f"{address}/tcp/{server.getsockname()[1]}/{rest.partition('/')[2]}"


@pytest.mark.parametrize("says", ["refuses", "says nothing"])
def test_nobody_at_the_address(swarm: Swarm, tmp_path: Path, says: str) -> None:
    with contextlib.ExitStack() as stack:
        line = stack.enter_context(silent(swarm))
        if says == "refuses":
            stack.close()
        began = time.monotonic()
        found, works = examined(line, "--dir", tmp_path / "b", "--host", "127.0.0.1")
    assert not works
    assert found["run"].state == BAD
    assert time.monotonic() - began < MINUTE


def test_a_node_that_hangs(run_file: Path, tmp_path: Path) -> None:
    with hanging(run_file) as line:
        found, works = examined(line, "--dir", tmp_path / "b", "--host", "127.0.0.1")
    assert not works
    assert found["run"].state == BAD
    assert "answers, but not to the DHT" in found["run"].text


@pytest.mark.parametrize(("hangs", "within"), [("torch", 3), ("disk", 8)])
def test_it_ends_in_time_whatever_hangs(swarm: Swarm, tmp_path: Path, hangs: str, within: int) -> None:
    """A silent host at the address, a folder whose lock is a pipe without a reader, so that a process that opens
    it hangs within the system, and PyTorch, which is never imported. None of it ever ends."""
    assert doctor.WITHIN_SECONDS + 2 * doctor.GRACE_SECONDS < MINUTE
    folder, env = tmp_path / "b", {}
    folder.mkdir()
    os.mkfifo(folder / "lock")
    if hangs == "torch":
        env = with_module(tmp_path, "torch", "import threading\nthreading.Event().wait()")
    with silent(swarm) as line:
        found, works = examined(line, "--dir", folder, "--host", "127.0.0.1", env=env, within=within)
    assert works is None
    first = next(about for about, one in found.items() if one.state == UNKNOWN)
    steps = (*MACHINE_STEPS, *RUN_STEPS)
    never = steps[steps.index(first) :]
    assert hangs in never, "on a slow machine not even that was begun"
    assert tuple(found)[-len(never) :] == never
    assert "still looked at" in found[first].text
    assert all("not looked at" in found[about].text for about in never[1:])
    left = [one for one in psutil.process_iter() if str(folder) in " ".join(command_of(one))]
    goes_on = psutil.wait_procs(left, DEADLINE)[1]
    assert all(one.status() == psutil.STATUS_ZOMBIE for one in goes_on)


def command_of(process: psutil.Process) -> list[str]:
    """What was typed, where it is still there."""
    with contextlib.suppress(psutil.Error):
        return list(process.cmdline())
    return []


def test_a_router_that_lets_nobody_in(tmp_path: Path) -> None:
    """Compared with a machine to which others can connect, in the same run."""
    manifest = make_manifest(start_peers=1)
    memory = ("--memory", tiny.full_memory(manifest), "--threads", 1, "--device", "cpu")
    with (
        homes(NODE, "open", "shut") as there,
        Swarm(tmp_path / "run", manifest, tiny.OPERATORS[:1], places=there.places) as swarm,
    ):
        there.shut("shut")
        swarm.start_node(NODE)
        for home, how, state in (("open", "directly", GOOD), ("shut", "relays", WARNING)):
            options = ("--dir", tmp_path / home, "--host", "0.0.0.0", *memory)
            found, works = examined(swarm.addresses[0], *options, place=there.places[home][1])
            assert works, found
            assert found["reach"].state == state, found
            assert how in found["reach"].text
            assert ("forward a TCP port" in found["reach"].remedy) == (home == "shut")
            assert "role" in found


@pytest.mark.parametrize("off", [3600, -3600, 40])
def test_a_wrong_clock(swarm: Swarm, tmp_path: Path, short: Path, off: int) -> None:
    """Whatever asks the C library in these processes, Python or not, is told a time of day that is off. Only the
    network daemon asks the kernel itself, and that one does nothing by the time of day. The folder of sockets is their
    own: others' would look as old as that."""
    env = {**bad_machine.wrong_clock(tmp_path, off), "TMPDIR": str(short)}
    found, works = examined(swarm.addresses[0], "--dir", tmp_path / "b", "--host", "127.0.0.1", env=env)
    assert not works
    assert found["clock"].state == BAD, found
    assert "NTP" in found["clock"].remedy


@pytest.mark.parametrize(("version", "named"), [(VERSION + 1, "newer"), (VERSION - 1, "older")])
def test_another_version(tmp_path: Path, version: int, named: str) -> None:
    """That the run's node says it has."""

    def spoil(node: crowd.Node) -> None:
        run, peer, serial = node.made.manifest.run_id, tiny.OPERATOR.peer_id, int(1000 * time.time())
        said = Announcement(run=run, peer=peer, device=NODE_DEVICE, version=version, serial=serial)
        node.heard.add(tiny.OPERATOR.peer_id, encoding.seal(tiny.OPERATOR, said))

    with crowd.living(tmp_path / "node", spoil) as line:
        found, works = examined(line, "--dir", tmp_path / "b", "--host", "127.0.0.1")
    assert not works
    assert found["version"].state == BAD, found
    assert named in found["version"].remedy


def test_one_operator_of_three_does_not_decide_what_the_time_is() -> None:
    found: list[Finding] = []
    now = int(1000 * time.time())
    nodes = [
        Announcement(run="0" * 64, peer=o.peer_id, serial=s)
        for o, s in zip(tiny.OPERATORS, (2**53, now, now), strict=False)
    ]
    for some in (nodes, [dataclasses.replace(nodes[0], serial=0), *nodes[1:]]):
        doctor.check_nodes(some, Clock(), found.append)
    assert [one.state for one in found] == [GOOD] * 4


def test_help_needs_no_torch(tmp_path: Path) -> None:
    """A user with a broken one can read what to do."""
    env = {**os.environ, **with_module(tmp_path, "torch", "raise ImportError")}
    done = subprocess.run([sys.executable, "-m", "peer.cli", "--help"], env=env, capture_output=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stderr


@pytest.mark.campaign
@pytest.mark.parametrize("threads", [1, 2])
def test_a_healthy_machine_has_the_role_and_the_speed_that_it_is_promised(tmp_path: Path, threads: int) -> None:
    """In a run of its own, alone, and within 20 % (docs/results/doctor.md); asked in less than a minute."""
    began = time.monotonic()
    _, works = examined("--dir", tmp_path / "alone")
    assert works
    assert time.monotonic() - began < MINUTE
    options = ("--device", "cpu", "--threads", str(threads), "--memory", "1GB")
    promised, speed, role, real = promises.measure(tmp_path, 2, options)
    assert role in promised
    assert abs(real / speed - 1) <= promises.WITHIN
