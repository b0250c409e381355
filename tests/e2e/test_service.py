"""`potluck service`: real processes, started as systemd would start them, survive what happens in weeks."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from peer.events import Event, from_json
from peer.net import keyfile
from peer.node.open_run import KEY, parse_run
from protocol.run import short_line
from protocol.run.manifest import TimingSpec
from tests.faults.homes import Homes, homes
from tests.faults.processes import DEADLINE, Swarm
from tests.faults.roles import NODE
from tests.support import potluck, systemd, tiny
from tests.support.images import IMAGES, make_a_run
from tests.support.lab import Place
from tests.support.roles import make_manifest

ADDRESS = f"/ip4/127.0.0.1/tcp/9/p2p/{tiny.OPERATOR.peer_id}#{'0' * 64}"
PEER = "a peer, 100% its own"
PLAIN = ("--device", "cpu", "--memory", "8GB")


@dataclass
class Home:
    """Of a user: a system whose programs are stand-ins."""

    path: Path
    programs: Path

    def potluck(self, *arguments: object, at: Path | None = None) -> subprocess.CompletedProcess[str]:
        """As typed in the folder `at` (default: the home)."""
        root = Path(__file__).parents[2]
        env = os.environ | {"HOME": str(self.path), "XDG_CONFIG_HOME": str(self.path / "settings")}
        env |= {"PATH": str(self.programs), "PYTHONPATH": str(root)}
        return potluck.run(*arguments, cwd=at or self.path, env=env, text=True, timeout=DEADLINE)

    def units(self) -> list[Path]:
        return sorted(self.path.rglob("*.service")) + sorted(self.path.rglob("*.plist"))


def home(folder: Path, *programs: str) -> Home:
    (folder / "home").mkdir()
    systemd.programs(folder / "bin", *programs)
    for name in ("sh", "basename"):
        (folder / "bin" / name).symlink_to(f"/usr/bin/{name}")
    return Home(folder / "home", folder / "bin")


def test_install_status_and_remove_with_systemd(tmp_path: Path) -> None:
    user = home(tmp_path, "systemctl")
    done = user.potluck("service", "install", ADDRESS, "--dir", "my peer", *PLAIN)
    assert done.returncode == 0, done.stderr
    (unit,) = user.units()
    assert "loginctl enable-linger " in done.stdout
    assert unit.parent == user.path / "settings" / "systemd" / "user"
    found = systemd.settings(unit.read_text())
    words = systemd.command(found["ExecStart"])
    assert words[:5] == [sys.executable, "-P", "-m", "potluck", "join"]
    assert set(words[5:]) == {
        "--log=my peer/potluck.log",
        "--dir=my peer",
        "--device=cpu",
        "--memory=8GB",
        "--",
        ADDRESS,
    }
    assert words[-2:] == ["--", ADDRESS]
    assert systemd.value(found["WorkingDirectory"]) == str(user.path)
    assert {"Restart": "on-failure", "RestartPreventExitStatus": "2 3 4", "KillMode": "mixed"}.items() <= found.items()

    assert user.potluck("service", "status").returncode == 2, "another folder"
    said = user.potluck("service", "status", "--dir", "my peer")
    assert said.returncode == 0
    assert "runs since today; started again 3 times" in said.stdout
    assert user.potluck("service", "remove", "--dir", user.path / "my peer").returncode == 0
    assert user.units() == []
    calls = [line.split()[2:] for line in (user.programs / "calls").read_text().splitlines()]
    name = unit.name
    assert calls[:3] == [["daemon-reload"], ["enable", name], ["restart", name]]
    assert calls[-2:] == [["disable", "--now", name], ["daemon-reload"]]


def test_install_status_and_remove_with_launchd(tmp_path: Path) -> None:
    user = home(tmp_path, "launchctl")
    assert user.potluck("service", "install", ADDRESS, *PLAIN).returncode == 0
    (agent,) = user.units()
    assert agent.parent == user.path / "Library" / "LaunchAgents"
    said = user.potluck("service", "status")
    assert (said.returncode, said.stderr) == (1, "")
    assert user.potluck("service", "remove").returncode == 0
    calls = [line.split()[1] for line in (user.programs / "calls").read_text().splitlines()]
    assert (calls, user.units()) == (["bootstrap", "print", "bootout"], [])


@pytest.mark.parametrize(
    ("programs", "typed", "code", "told"),
    [
        ((), [ADDRESS, *PLAIN], 2, "neither systemd nor launchd"),
        (("systemctl",), [ADDRESS, *PLAIN, "--dry-run"], 2, "--dry-run: a service trains"),
        (("systemctl",), [ADDRESS[:-1], *PLAIN], 2, "is not a run id"),
        (("systemctl",), [ADDRESS, "--memory", "lots"], 2, "lots"),
        (("systemctl", "broken"), [ADDRESS, *PLAIN], 1, "Failed to connect to bus; it needs a session of this user"),
    ],
)
def test_what_keeps_it_from_being_installed_is_one_line(
    tmp_path: Path, programs: tuple[str, ...], typed: list[str], code: int, told: str
) -> None:
    user = home(tmp_path, *programs)
    if "broken" in programs:
        (user.programs / "systemctl").write_text("#!/bin/sh\necho Failed to connect to bus >&2; exit 1\n")
    done = user.potluck("service", "install", *typed)
    assert done.returncode == code
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("potluck: ")
    assert told in line
    assert user.units() == []


def test_a_bootstrap_node_is_run_as_a_peer_is(tmp_path: Path) -> None:
    """The unit's command brings the same node back after a kill: its line stays, and the log that a service keeps has
    both starts. The run is made as docker/compose.yaml makes it, with a manifest that tells the peers where the node
    is."""
    user = home(tmp_path, "systemctl")
    make_a_run(user.path, {"potluck": f"{shlex.quote(sys.executable)} -P -m peer.cli"})
    where = ("--host", "127.0.0.1", "--port", potluck.free_port())
    words = ("run/run.toml", "--dir", "run/node", "--corpus", "run/corpus", *where)
    for wrong, told in (
        (("none.toml", *words[1:]), "none.toml"),
        ((*words, "--dir", "other"), "is no operator of it"),
    ):
        refused = user.potluck("service", "install-node", *wrong)
        assert refused.returncode == 2
        assert told in refused.stderr
        assert user.units() == []
    done = user.potluck("service", "install-node", *words)
    assert done.returncode == 0, done.stderr
    (unit,) = user.units()
    settings = systemd.settings(unit.read_text())
    lines = []
    for stop in (signal.SIGKILL, signal.SIGTERM):
        node = subprocess.Popen(
            systemd.command(settings["ExecStart"]),
            cwd=systemd.value(settings["WorkingDirectory"]),
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert node.stdout is not None
            lines.append(next(line.split("potluck join ")[1] for line in node.stdout if "to join" in line))
        finally:
            children = psutil.Process(node.pid).children(recursive=True)
            node.send_signal(stop)
            code = node.wait(DEADLINE)
            left_over = psutil.wait_procs(children, DEADLINE)[1]
        assert not left_over
        assert code == (-signal.SIGKILL if stop == signal.SIGKILL else 0)
    assert lines[0] == lines[1]
    told = parse_run(str(user.path / "join" / "run.toml"))
    line, node_id = short_line.parse(lines[0].strip()), keyfile.load_or_create(user.path / "run" / "node" / KEY).peer_id
    assert told.bootstrap == (f"/dns4/bootstrap/tcp/31337/p2p/{node_id}",)
    assert line is not None
    assert line.code == short_line.code_of(node_id, told.run_id)
    assert (user.path / "run" / "node" / "potluck.log").read_text().count(lines[0]) == 2
    assert user.potluck("service", "status", "--dir", "run/node").returncode == 0
    assert user.potluck("service", "remove", "--dir", "run/node").returncode == 0
    assert user.units() == []


class Service:
    """The unit that was installed for `name`, which is PEER or NODE of a swarm, run as systemd would run it. `place`:
    where it listens, and what a command begins with that is to run there."""

    def __init__(self, swarm: Swarm, user: Home, name: str = PEER, place: Place = ("127.0.0.1", [])) -> None:
        self.swarm, self.name = swarm, name
        self.folder, self.image = swarm.folder / name, IMAGES["bootstrap" if name == NODE else "peer"]
        host, self._prefix = place
        common = ("--dir", name, "--host", host, "--corpus", swarm.corpus, "--json")
        if name == NODE:
            words = ("install-node", swarm.file, *common, "--port", swarm.ports[NODE])
        else:
            offer = ("--device", "cpu", "--memory", tiny.full_memory(swarm.manifest), "--threads", 1)
            words = ("install", swarm.addresses[0], *common, *offer, "--up", "20Mbps", "--down", "100Mbps")
        before = user.units()
        done = user.potluck("service", *words, at=swarm.folder)
        assert done.returncode == 0, done.stderr
        (unit,) = set(user.units()) - set(before)
        self.settings = systemd.settings(unit.read_text())
        (swarm.folder / name).mkdir(exist_ok=True)

    def start(self, **files: object) -> subprocess.Popen[bytes]:
        command = [*self._prefix, *systemd.command(self.settings["ExecStart"])]
        return subprocess.Popen(command, cwd=systemd.value(self.settings["WorkingDirectory"]), **files)  # type: ignore[call-overload, no-any-return]

    def boot(self) -> None:
        folder = self.swarm.folder / self.name
        with open(folder / "events.jsonl", "ab") as out, open(folder / "stderr.txt", "ab") as errors:
            self.swarm.running[self.name] = self.start(stdout=out, stderr=errors)

    def refuses_a_second(self, who: str, *kinds: str) -> None:
        """Another start on its folder ends with one line, such that systemd does not try it again. The line is in the
        log that a service keeps, too, in addition to what the first one tells: events of these `kinds`."""
        second = self.start(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        (said,) = second.communicate(timeout=DEADLINE)[1].decode().splitlines()
        assert str(second.returncode) in self.settings["RestartPreventExitStatus"].split()
        assert said == f"potluck: directory {self.name}: another {who} uses it; stop that one or choose another folder"
        log = (self.swarm.folder / self.name / "potluck.log").read_text()
        assert f"another {who} uses it" in log
        assert {e.kind for line in log.splitlines() if (e := from_json(line))} >= set(kinds)

    def trains_again(self) -> None:
        """From now on."""
        self.swarm.wait(PEER, lambda e: e.kind == "started", "its start")
        seen = self.swarm.events(NODE)
        head = max((e.fields["round"] for e in seen if e.kind == "commit"), default=0)
        (peer,) = {e.fields["peer"] for e in self.swarm.events(PEER) if e.kind == "started"}

        def has_its_work(event: Event) -> bool:
            return event.kind == "commit" and event.fields["round"] > head and self.works_in(event, peer)

        self.swarm.wait(NODE, has_its_work, "a round with its work", after=len(seen))

    @staticmethod
    def works_in(event: Event, peer: str) -> bool:
        return any(peer in [s["peer"] for s in c["shares"]] and c["tokens"] for c in event.fields["contributions"])

    def daemons(self) -> list[psutil.Process]:
        """Its processes but the first one."""
        return psutil.Process(self.swarm.running[self.name].pid).children(recursive=True)

    def signal(self, number: int) -> None:
        """To all its processes."""
        for one in (*self.daemons(), self.swarm.running[self.name]):
            one.send_signal(number)

    def looks_alive(self) -> None:
        """To the health check of its image, as soon as it has done something for that."""
        self.image.becomes_healthy(self.folder)

    def looks_dead(self) -> None:
        """After a while, to the same check. It has stopped or ended."""
        if (process := self.swarm.running.get(self.name)) is not None:
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        self.image.age(self.folder)
        assert not self.image.is_healthy(self.folder)

    def loses_power(self) -> None:
        """All its processes end at once."""
        daemons, process = self.daemons(), self.swarm.running.pop(self.name)
        process.kill()
        for daemon in daemons:
            with contextlib.suppress(psutil.NoSuchProcess):
                daemon.kill()
        process.wait()
        assert not psutil.wait_procs(daemons, DEADLINE)[1]


def test_it_survives_a_kill_a_closed_lid_and_a_night_offline_with_a_reboot_in_it(tmp_path: Path) -> None:
    made = make_manifest(start_peers=1)
    manifest = dataclasses.replace(made, timing=dataclasses.replace(made.timing, round_seconds=1.0))
    user = home(tmp_path, "systemctl")
    with Swarm(tmp_path / "a run", manifest, tiny.OPERATORS[:1]) as swarm:
        swarm.ports[NODE] = potluck.free_port()
        node = Service(swarm, user, NODE)
        node.boot()
        swarm.addresses.append(swarm.wait(NODE, lambda e: e.kind == "listening", "its address").fields["address"])
        service = Service(swarm, user)
        service.boot()
        service.trains_again()
        for one in (node, service):
            one.image.age(one.folder)
        for one in (node, service):
            one.looks_alive()

        node.refuses_a_second("bootstrap node", "listening", "commit")
        service.refuses_a_second("potluck process", "started", "round")
        service.trains_again()

        left_over = service.daemons()
        swarm.kill(PEER)
        service.boot()
        service.trains_again()
        assert not psutil.wait_procs(left_over, DEADLINE)[1], "what a kill leaves over ends by itself"

        before = len(swarm.events(NODE))
        service.signal(signal.SIGSTOP)  # a lid is closed
        service.looks_dead()
        swarm.wait(NODE, lambda e: e.kind == "gone", "its silence", after=before)
        assert not service.image.is_healthy(service.folder), "nobody has touched the file since"
        swarm.running[NODE].send_signal(signal.SIGSTOP)  # it hangs, and its network daemon lives
        node.looks_dead()
        node.signal(signal.SIGCONT)
        service.signal(signal.SIGCONT)
        service.trains_again()
        for one in (node, service):
            one.looks_alive()

        node.loses_power()
        service.loses_power()
        for one in (node, service):
            one.looks_dead()
        told = len(swarm.events(PEER))
        service.boot()
        swarm.wait(
            PEER, lambda e: e.kind == "warning" and "tries again" in e.fields["text"], "what it waits for", after=told
        )
        node.boot()
        service.trains_again()

        swarm.running[PEER].terminate()
        assert swarm.ended(PEER) == 0, "so it is not started again"
        assert not service.image.is_healthy(service.folder), "at once, since it said goodbye"
        swarm.kill(NODE)
        assert swarm.check() >= 4


NIGHT = 30
"""Rounds that the others decide meanwhile: ten times as long as it takes until a silent peer is gone."""


@pytest.mark.slow
def test_it_survives_nights_without_any_network_and_changes_of_address_without_a_hand(tmp_path: Path) -> None:
    """Its line dies and lives again with another address: once while it runs, once before the machine's start."""
    made = make_manifest(start_peers=1)
    timing = TimingSpec(round_deadline=120.0, round_seconds=1.0, heartbeat=0.5, gone_after=3.0)
    manifest = dataclasses.replace(made, timing=timing)
    user = home(tmp_path, "systemctl")
    with (
        homes(NODE, "other", "laptop") as there,
        Swarm(
            tmp_path / "a run", manifest, tiny.OPERATORS[:1], places=there.places, module="tests.faults.paced"
        ) as swarm,
    ):
        swarm.start_node(NODE)
        swarm.start("other")
        service = Service(swarm, user, place=there.places["laptop"])
        service.boot()
        service.trains_again()
        first = swarm.running[PEER]

        there.move("laptop")
        service.trains_again()

        night(swarm, there)
        there.move("laptop")
        there.plug_in("laptop")
        service.trains_again()
        assert swarm.running[PEER] is first
        assert first.poll() is None, "nobody started it again"

        night(swarm, there)
        swarm.kill(PEER)
        told = len(swarm.events(PEER))
        service.boot()
        swarm.wait(
            PEER, lambda e: e.kind == "warning" and "tries again" in e.fields["text"], "what it waits for", after=told
        )
        there.move("laptop")
        there.plug_in("laptop")
        service.trains_again()

        swarm.running[PEER].terminate()
        assert swarm.ended(PEER) == 0
        for name in (NODE, "other"):
            swarm.kill(name)
        swarm.check()
        assert "Traceback" not in (swarm.folder / PEER / "stderr.txt").read_text()


def night(swarm: Swarm, there: Homes) -> None:
    """The laptop's line is dead, until the others have done NIGHT rounds without it."""
    before = swarm.events(NODE)
    head = max(e.fields["round"] for e in before if e.kind == "commit")
    there.unplug("laptop")
    swarm.wait(NODE, lambda e: e.kind == "gone", "its silence", after=len(before))
    swarm.wait(NODE, lambda e: e.kind == "commit" and e.fields["round"] >= head + NIGHT, "a night", after=len(before))
