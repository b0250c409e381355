"""`potluck doctor`: each fault is made, and found; a machine without one is told what it would do. And `potluck join
--dry-run`, which says what a stranger is told before he joins."""

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
from protocol.planning import budget
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
    expected = {
        "python",
        "torch",
        "open files",
        "disk",
        "port",
        "run",
        "version",
        "clock",
        "bandwidth",
        "speed",
        "role",
    }
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
    assert found["speed"].text.endswith("TFLOP/s in training, without the time for exchanges between them")
    assert re.search(r"a full replica: [\d,]+ tokens per second by its measured speed", found["role"].text)
    assert "devices" not in found
    assert not list((tmp_path / "b").glob("speed-test*"))
    together = sum(budget.needs_of(swarm.manifest, 0, swarm.manifest.model.n_layers, "2 x cpu"))
    assert together < memory
    tight = ("--memory", together - 1)
    found, works = examined(swarm.addresses[0], *options, *tight, env=unmeasured(tmp_path / "site"))
    assert works, found
    assert found["devices"].text.startswith("the 2 do not hold the whole model together")
    assert "only cpu trains" in found["devices"].remedy


def unmeasured(folder: Path) -> dict[str, str]:
    """The environment in which every process that would measure a speed is killed as it starts, as one to which the
    system gives no memory."""
    dies = (
        "import os, signal, sys\nif 'peer.training.speed_test' in sys.orig_argv: os.kill(os.getpid(), signal.SIGKILL)"
    )
    return with_module(folder, "sitecustomize", dies)


def test_nothing_is_promised_of_a_speed_that_cannot_be_measured(swarm: Swarm, tmp_path: Path) -> None:
    options = ("--dir", tmp_path / "b", "--host", "127.0.0.1", "--memory", tiny.full_memory(swarm.manifest))
    found, works = examined(swarm.addresses[0], *options, "--device", "cpu", env=unmeasured(tmp_path / "site"))
    assert works, found
    assert found["speed"].text.startswith("not known after")
    assert found["role"].text.startswith("it would be a full replica; how much it would train a day is not known")
    assert not re.search("million|tokens|of text", found["role"].text)


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


def test_all_that_is_in_the_way_is_told_at_once(tmp_path: Path) -> None:
    """Devices that are not there, a port that is taken, a folder in use."""
    lock = Disk().lock(tmp_path / "b", "potluck process")
    with lock, socket.create_server(("127.0.0.1", 0)) as taken:
        where = ("--dir", tmp_path / "b", "--host", "127.0.0.1", "--port", taken.getsockname()[1])
        found, works = examined(*where, "--devices", "0,99")
    assert not works
    assert found["device"].text.startswith('devices "0,99": PyTorch finds ')
    assert "another program listens on it" in found["port"].text
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


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose path leaves room for that of a socket."""
    with tempfile.TemporaryDirectory(prefix="pl-", dir="/tmp") as name:
        yield Path(name)


def test_what_a_machine_has_little_of_keeps_it_from_nothing(run_file: Path, tmp_path: Path, short: Path) -> None:
    """Few open files; a slow disk: the system lets these processes write so much a second to the disk on which their
    folder is, and no more, or, where it does not, as for a user's processes in a container, a call of the C library
    that brings a file to the disk waits as long; memory, where the system can be made to say that other programs have
    it. And sockets of a node and its daemon that were killed; those of a process that lives, here this one, stay,
    whatever the clock says."""
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
    can_lie = os.geteuid() == 0
    told = re.sub(r"(MemAvailable: +)\d+", r"\g<1>300000", Path("/proc/meminfo").read_text())
    (tmp_path / "meminfo").write_text(told)
    bind = ("sh", "-c", 'mount --bind "$0" /proc/meminfo && exec "$@"', str(tmp_path / "meminfo"))
    full = ("unshare", "--mount", *bind) if can_lie else ()
    with bad_machine.slow_disk(tmp_path) as (place, env):
        found, works = examined("--dir", tmp_path / "b", limit=1000, place=(*place, *full), env={**env, **here})
    assert works
    assert found["open files"].state == WARNING
    assert "allows 1000 at once" in found["open files"].text
    assert found["disk"].state == WARNING
    speed = re.search(r"(\d+(?:\.\d)?) MB/s are written", found["disk"].text)
    assert float(speed[1]) * 1e6 <= bad_machine.MOST * bad_machine.BYTES_A_SECOND
    if can_lie:
        assert found["memory"].state == WARNING
        assert "close other programs" in found["memory"].remedy
    assert "killed processes, 1 of them" in found["leftovers"].text
    assert not left.exists()
    assert lives.path.exists()
    lives.close()
    assert not list(short.iterdir())


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
    assert "not over after" in found[first].text
    assert all("not checked" in found[about].text for about in never[1:])
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


def test_a_wrong_clock(swarm: Swarm, tmp_path: Path, short: Path) -> None:
    """Whatever asks the C library in these processes, Python or not, is told a time of day that is off. Only the
    network daemon asks the kernel itself, and that one does nothing by the time of day. The folder of sockets is their
    own: others' would look as old as that."""
    env = {**bad_machine.wrong_clock(tmp_path, 40), "TMPDIR": str(short)}
    found, works = examined(swarm.addresses[0], "--dir", tmp_path / "b", "--host", "127.0.0.1", env=env)
    assert not works
    assert found["clock"].state == BAD, found
    assert "NTP" in found["clock"].remedy


def test_another_version(tmp_path: Path) -> None:
    """That the run's node says it has."""

    def spoil(node: crowd.Node) -> None:
        run, peer, serial = node.made.manifest.run_id, tiny.OPERATOR.peer_id, int(1000 * time.time())
        said = Announcement(run=run, peer=peer, device=NODE_DEVICE, version=VERSION + 1, serial=serial)
        node.heard.add(tiny.OPERATOR.peer_id, encoding.seal(tiny.OPERATOR, said))

    with crowd.living(tmp_path / "node", spoil) as line:
        found, works = examined(line, "--dir", tmp_path / "b", "--host", "127.0.0.1")
    assert not works
    assert found["version"].state == BAD, found
    assert "newer" in found["version"].remedy


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


@pytest.mark.parametrize("off", [3600, -3600, 40])
def test_a_clock_is_compared_with_the_nodes_either_way_and_so_is_a_version(off: int) -> None:
    found: list[Finding] = []
    node = Announcement(run="0" * 64, peer=tiny.OPERATOR.peer_id, serial=int(1000 * (time.time() + off)))
    doctor.check_nodes([dataclasses.replace(node, version=VERSION - 1)], Clock(), found.append)
    version, clock = found
    assert (version.state, clock.state) == (BAD, BAD)
    assert "older" in version.remedy
    assert ("behind" if off > 0 else "ahead of") in clock.text
    assert "NTP" in clock.remedy


def test_help_needs_no_torch(tmp_path: Path) -> None:
    """A user with a broken one can read what to do."""
    env = {**os.environ, **with_module(tmp_path, "torch", "raise ImportError")}
    done = subprocess.run([sys.executable, "-m", "peer.cli", "--help"], env=env, capture_output=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stderr


# --- a peer that rehearses


def rehearse(address: str, folder: Path, *options: object) -> subprocess.CompletedProcess[str]:
    """A peer of its own, with an empty home."""
    here = ("--host", "127.0.0.1", "--device", "cpu", "--dir", folder)
    return potluck.run("join", address, "--dry-run", *here, *options, text=True, timeout=DEADLINE)


def test_a_dry_run_says_what_this_machine_would_do_and_leaves(swarm: Swarm, tmp_path: Path) -> None:
    whole = tiny.full_memory(swarm.manifest)
    said = rehearse(swarm.addresses[0], tmp_path / "b", "--memory", whole, "--up", "20Mbps", "--down", "100Mbps")
    assert said.returncode == 0, said.stderr
    found, disk, sent, beside, run, machine, line, role, fetch, end = said.stdout.splitlines()
    assert re.search(r"a full replica keeps at most \S+ [kMG]B of states on disk", disk)
    assert re.search(r"it sends at most \S+ [kMG]B of updates a day", sent)
    assert "it spends at most 4% of its time measuring" in beside
    assert beside.endswith("its text comes from the run's nodes and peers")
    assert f"run {swarm.manifest.run_id[:12]}… demo: " in found
    assert re.fullmatch(
        rf"run {swarm.manifest.run_id[:12]} demo: round \d+ of 1000000 is decided, 1 other peer there", run
    )
    assert machine.startswith("this machine: cpu, ")
    assert line == "its bandwidth: 20 Mb/s up, 100 Mb/s down"
    assert role == "it would be a full replica; how much it would train a day is not known, since its speed is not"
    assert re.fullmatch(r"it would fetch \S+ [kMG]B of state first \(\d+ s at its bandwidth\)", fetch)
    assert "nothing was trained" in end
    ready = {e.fields["peer"] for e in swarm.events(NODE) if e.kind == "ready"}
    assert ready <= {swarm.started("a")}


def test_a_spare_is_told_why(swarm: Swarm, tmp_path: Path) -> None:
    said = rehearse(
        swarm.addresses[0], tmp_path / "c", "--memory", tiny.full_memory(swarm.manifest) - 1, "--up", "1Mbps"
    )
    assert said.returncode == 0, said.stderr
    assert "it would wait as a spare: its memory holds " in said.stdout
    assert "its bandwidth: 1 Mb/s up, " in said.stdout, "the downlink was measured"


@pytest.mark.parametrize(
    ("options", "told"),
    [(("--memory", "1kB"), "memory: 0 MB offered, one block of this model needs"), (("--json",), "without --json")],
)
def test_what_would_keep_a_dry_run_from_joining_is_one_line(
    swarm: Swarm, tmp_path: Path, options: tuple[str, ...], told: str
) -> None:
    said = rehearse(swarm.addresses[0], tmp_path / "d", *options)
    assert said.returncode == 2
    (line,) = said.stderr.strip().splitlines()
    assert told in line


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
