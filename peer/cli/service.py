"""`potluck service`: a peer or a bootstrap node that the system keeps running, by systemd on Linux and by launchd on macOS. Only this user's own services are
touched, so nothing needs an administrator."""

from __future__ import annotations

import abc
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from peer.cli import bootstrap, join, running, units
from peer.cli.options import group, with_options
from peer.config import home, user_name
from peer.net.disk import Disk
from peer.node.config import JoinConfig
from peer.ui.text import typed as as_typed
from protocol.errors import LocalError, UsageError

app = group()
Dir = Annotated[
    Path, typer.Option("--dir", help="The folder of the peer or node, as it was given to install.", show_default=True)
]
FOLDER = Path("potluck-peer")
LOG = "potluck.log"
"""In the peer's folder, unless another is named."""
LINGERING = Path("/var/lib/systemd/linger")
"""Has a file for every user whose services run while he is not logged in."""
WAIT_SECONDS = 2 * units.STOP_SECONDS
"""That the system may take to stop a peer."""


def _retyped(context: typer.Context) -> list[str]:
    """What was typed behind the command of `context`, as far as it is not the default, such that it can be typed again."""
    words: list[str] = []
    last: list[str] = []
    for parameter in context.command.params:
        name, option = parameter.name or "", parameter.opts[0]
        source, value = context.get_parameter_source(name), context.params.get(name)
        if source is None or source.name != "COMMANDLINE":
            continue
        if parameter.param_type_name == "argument":
            last.append(str(value))
        elif isinstance(value, bool):
            words.append(option)
        else:
            words += [f"{option}={one}" for one in (value if isinstance(value, list | tuple) else [value])]
    return [*words, "--", *last]


def _install_peer(read: Callable[[], JoinConfig], context: typer.Context) -> None:
    with running.reporting():
        config = read()
        if config.dry_run:
            raise UsageError("--dry-run: a service trains; type potluck join with it instead")
        _install(_system(config.folder), "join", config.folder, config.log, _retyped(context))


def _install_node(read: Callable[[], bootstrap.NodeConfig], context: typer.Context) -> None:
    with running.reporting():
        config = read()
        _install(_system(config.folder), "bootstrap", config.folder, config.log, _retyped(context))


app.command(
    "install",
    help="Join a run for weeks: the system starts `potluck join` with these options now, again after crashes, and when it starts itself.",
    epilog="Example: potluck service install /ip4/203.0.113.5/tcp/31337/p2p/12D3KooW...#9f86d0... --memory 8GB",
)(with_options(join.joining, _install_peer))
app.command(
    "install-node",
    help="Run a bootstrap node for weeks: the system starts `potluck bootstrap` with these options, as it does a peer.",
    epilog="Example: potluck service install-node my-run/run.toml --dir my-run/node --corpus my-run/corpus",
)(with_options(bootstrap.hosting, _install_node))


def _install(system: Service, command: str, folder: Path, given: Path | None, typed: list[str]) -> None:
    """`given`: a log file that was typed."""
    log = given or folder / LOG
    kept = [] if given else [f"--log={log}"]
    system.install([sys.executable, "-P", "-m", "peer.cli", command, *kept, *typed], folder.resolve())
    print(f"service {system.name}: runs, and is started again after crashes; its file: {system.file}")
    print(f"what it says: {log.resolve()}")
    for line in system.installed():
        print(line)


@app.command(epilog="Example: potluck service status --dir my-peer")
def status(dir: Dir = FOLDER) -> None:
    """See whether the service of a folder runs. Exit code 0: it does."""
    with running.reporting():
        system = _system(dir)
        system.require()
        runs, said = system.state()
        print(f"service {system.name}: {said}")
        print(f"its file: {system.file}")
        print(f"what it says: {dir.resolve() / LOG}, unless --log named another")
        raise SystemExit(0 if runs else 1)


@app.command(epilog="Example: potluck service remove --dir my-peer")
def remove(dir: Dir = FOLDER) -> None:
    """Stop the service of a folder politely, and forget it. The folder with its key and state stays."""
    with running.reporting():
        system = _system(dir)
        system.require()
        system.remove()
        print(f"service {system.name}: stopped and removed; {dir} is as it was")


@dataclass(frozen=True, slots=True)
class Service(abc.ABC):
    """One that has `name` and is described by `file`."""

    name: str
    file: Path

    def require(self) -> None:
        """Raises UsageError where it is not installed."""
        if not self.file.exists():
            raise UsageError(f"service: {self.file} is not there; give the --dir of the peer, or install it first")

    @abc.abstractmethod
    def install(self, command: list[str], folder: Path) -> None:
        """Describes what runs `command` for the peer in `folder`, and starts it, anew if it runs. Raises LocalError, and leaves nothing then."""

    @abc.abstractmethod
    def installed(self) -> Iterator[str]:
        """When it begins, and what else there is to say once it is installed."""

    @abc.abstractmethod
    def state(self) -> tuple[bool, str]:
        """Whether it runs, and how, in words. Raises LocalError."""

    @abc.abstractmethod
    def remove(self) -> None:
        """Stops it, and it is not started any more. Raises LocalError."""


class Systemd(Service):
    """A unit of this user's systemd."""

    def install(self, command: list[str], folder: Path) -> None:
        text = units.systemd(command, Path.cwd(), folder)
        Disk().make_folder(self.file.parent)
        Disk().write(self.file, text.encode())
        try:
            _ask("systemctl", "--user", "daemon-reload")
            _ask("systemctl", "--user", "enable", self.file.name)
            _ask("systemctl", "--user", "restart", self.file.name)
        except LocalError:
            self.file.unlink()
            raise

    def installed(self) -> Iterator[str]:
        user = user_name()
        if not (LINGERING / user).exists():
            yield f"to go on when you log out, and begin when the machine starts, it needs this once: {as_typed('loginctl', 'enable-linger', user)}"

    def state(self) -> tuple[bool, str]:
        asked = ("ActiveState", "SubState", "NRestarts", "ExecMainStatus", "ActiveEnterTimestamp")
        said = _ask("systemctl", "--user", "show", self.file.name, *(f"--property={name}" for name in asked))
        found = dict(line.split("=", 1) for line in said.splitlines() if "=" in line)
        runs = found.get("ActiveState") in ("active", "activating", "reloading")
        if found.get("ActiveState") == "active":
            return runs, f"runs since {found.get('ActiveEnterTimestamp')}; started again {found.get('NRestarts')} times"
        now = f"{found.get('ActiveState')} ({found.get('SubState')})"
        return runs, f"{now}, exit code {found.get('ExecMainStatus')}"

    def remove(self) -> None:
        _ask("systemctl", "--user", "disable", "--now", self.file.name)
        self.file.unlink()
        _ask("systemctl", "--user", "daemon-reload")


class Launchd(Service):
    """An agent of this user's launchd."""

    def install(self, command: list[str], folder: Path) -> None:
        if self.file.exists():
            self.remove()
        Disk().make_folder(self.file.parent)
        Disk().write(self.file, units.launchd(self.name, command, Path.cwd()))
        try:
            _ask("launchctl", "bootstrap", _domain(), str(self.file))
        except LocalError:
            self.file.unlink()
            raise

    def installed(self) -> Iterator[str]:
        yield "it begins whenever you log in"

    def state(self) -> tuple[bool, str]:
        try:
            said = _ask("launchctl", "print", f"{_domain()}/{self.name}")
        except LocalError:
            return False, "is not loaded; install it again"
        runs = "state = running" in said
        return runs, "runs" if runs else "does not run; what it was told is wrong, or the run is over"

    def remove(self) -> None:
        _ask("launchctl", "bootout", f"{_domain()}/{self.name}")
        self.file.unlink()


def _domain() -> str:
    """Where launchd has what belongs to this user's session."""
    return f"gui/{os.getuid()}"


def _system(folder: Path) -> Service:
    """The service of the peer in `folder`, on this system. Raises UsageError."""
    name = units.name_of(folder)
    own = home()
    if own is None:
        raise UsageError(
            f"service: user {user_name()} has no home folder, where services are kept; set HOME, or log in as a user who has one"
        )
    if shutil.which("systemctl"):
        settings = Path(os.environ.get("XDG_CONFIG_HOME") or own / ".config")
        return Systemd(name, settings / "systemd" / "user" / f"{name}.service")
    if shutil.which("launchctl"):
        return Launchd(name, own / "Library" / "LaunchAgents" / f"{name}.plist")
    raise UsageError(
        "service: this system has neither systemd nor launchd; let what starts programs here run potluck join"
    )


def _ask(*command: str) -> str:
    """What a program of the system prints. Raises LocalError where it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LocalError(f"service: {' '.join(command[:3])}: {error}; look at it by hand") from None
    if done.returncode:
        why = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise LocalError(
            f"service: {' '.join(command[:3])}: {why}; it needs a session of this user, as after logging in (not su or sudo)"
        )
    return done.stdout
