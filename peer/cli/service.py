"""`potluck service`: a peer or a bootstrap node that the system keeps running, without an administrator.

systemd (Linux) or launchd (macOS) starts the command when the user's services start, and again after a crash, after a
pause that grows to LONGEST_PAUSE_SECONDS, except after exit code 0 or one of FINAL. To stop, it sends SIGTERM to the
peer alone; STOP_SECONDS are left for the handover.
"""

from __future__ import annotations

import hashlib
import os
import plistlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from peer.cli import bootstrap, join
from peer.cli.options import group, with_options
from peer.config import home, user_name
from peer.net.disk import Disk
from peer.node.open_run import here
from peer.ui.text import typed as as_typed
from protocol.errors import FINAL, LocalError, UsageError

app = group()
Dir = Annotated[
    Path, typer.Option("--dir", help="The folder of the peer or node, as it was given to install.", show_default=True)
]
FOLDER = Path("potluck-peer")
LOG = "potluck.log"
LINGERING = Path("/var/lib/systemd/linger")
"""Has a file for every user whose services run without a login."""
FIRST_PAUSE_SECONDS = 10
LONGEST_PAUSE_SECONDS = 320
"""systemd before version 254 keeps the first pause."""
STOP_SECONDS = 90
"""Twenty for the inner step under way and the handover (handover.LEAVE_SECONDS), the rest for a checkpoint on a slow
disk. systemd gives 120 to all services of a user."""
WAIT_SECONDS = 2 * STOP_SECONDS

_FINAL_CODES = "|".join(f":{code}" for code in FINAL)
_RESTARTS = f"""\
stop= child= told=
tell() {{ [ -z "$stop" ] || [ -z "$child" ] || [ -n "$told" ] || {{ told=1; kill -TERM "$child" 2>/dev/null; }}; }}
trap 'stop=1; tell' TERM INT
pause={FIRST_PAUSE_SECONDS}
while :; do
    child=; "$@" & child=$!; tell
    wait "$child"; code=$?
    while kill -0 "$child" 2>/dev/null; do wait "$child"; code=$?; done
    case "$stop:$code" in :0|{_FINAL_CODES}|1:*) exit 0 ;; esac
    child=; sleep "$pause" & child=$!; tell
    wait "$child"
    [ -z "$stop" ] || exit 0
    pause=$((pause * 2)); [ "$pause" -le {LONGEST_PAUSE_SECONDS} ] || pause={LONGEST_PAUSE_SECONDS}
done
"""
"""launchd has neither growing pauses nor final exit codes. A signal ends `wait` early, while the process goes on. One
that comes before the process has started is passed on afterwards; the process gets one signal, since a second would
end its handover."""


def _retyped(context: typer.Context) -> list[str]:
    """The words of the command line of `context`, in a form that can be typed again."""
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


def _install_peer(options: join.JoinOptions, context: typer.Context) -> None:
    system, config = _service(options.dir), options.read()
    if config.dry_run:
        raise UsageError("--dry-run: a service trains; type potluck join with it instead")
    known = [] if options.run is not None else [str(Path(here(options.dir)).resolve())]
    _install(system, "join", config.folder, options.log_file, [*_retyped(context), *known])


def _install_node(options: bootstrap.BootstrapOptions, context: typer.Context) -> None:
    system = _service(options.dir)
    options.read()
    _install(system, "bootstrap", options.dir, options.log_file, _retyped(context))


app.command(
    "install",
    help="Join a run for weeks: the system starts `potluck join` with these options now, after each crash, and when the"
    " machine starts.",
    epilog="Example: potluck service install shakespeare@203.0.113.5#4mQ8yV2kLr9TzX1bNc --memory 8GB",
)(with_options(join.JoinOptions, _install_peer))
app.command(
    "install-node",
    help="Run a bootstrap node for weeks: the system starts `potluck bootstrap` with these options, as it does a peer.",
    epilog="Example: potluck service install-node my-run/run.toml --dir my-run/node --corpus my-run/corpus",
)(with_options(bootstrap.BootstrapOptions, _install_node))


def _install(system: Systemd | Launchd, command: str, folder: Path, given: Path | None, typed: list[str]) -> None:
    """Installs the service of `folder`. given: the log file that was typed."""
    log = given or folder / LOG
    kept = [] if given else [f"--log={log}"]
    system.install([sys.executable, "-P", "-m", "potluck", command, *kept, *typed], folder.resolve())
    print(f"service {system.name}: runs, and is started again after crashes; its file: {system.file}")
    print(f"its log: {log.resolve()}")
    for line in system.installed():
        print(line)


@app.command(epilog="Example: potluck service status --dir my-peer")
def status(dir: Dir = FOLDER) -> None:
    """See whether the service of a folder runs. Exit code 0: it does."""
    system = _service(dir, installed=True)
    runs, said = system.state()
    print(f"service {system.name}: {said}")
    print(f"its file: {system.file}")
    print(f"its log: {dir.resolve() / LOG}, unless --log named another file")
    raise SystemExit(0 if runs else 1)


@app.command(epilog="Example: potluck service remove --dir my-peer")
def remove(dir: Dir = FOLDER) -> None:
    """Stop the service of a folder politely, and forget it. The folder with its key and state stays."""
    system = _service(dir, installed=True)
    system.remove()
    print(f"service {system.name}: stopped and removed; the folder {dir} stays")


@dataclass(frozen=True, slots=True)
class _Defined:
    name: str
    file: Path


class Systemd(_Defined):
    """A unit of this user's systemd."""

    def install(self, command: list[str], folder: Path) -> None:
        """Defines and (re)starts it. command: the first word is an absolute path. Raises LocalError."""
        text = systemd(command, Path.cwd(), folder)
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
        """Notes for the user after the installation."""
        user = user_name()
        if not (LINGERING / user).exists():
            needed = as_typed("loginctl", "enable-linger", user)
            yield f"to keep it running when you log out, and start it with the machine, type this once: {needed}"

    def state(self) -> tuple[bool, str]:
        """Returns whether it runs, and a description. Raises LocalError."""
        asked = ("ActiveState", "SubState", "NRestarts", "ExecMainStatus", "ActiveEnterTimestamp")
        said = _ask("systemctl", "--user", "show", self.file.name, *(f"--property={name}" for name in asked))
        found = dict(line.split("=", 1) for line in said.splitlines() if "=" in line)
        runs = found.get("ActiveState") in ("active", "activating", "reloading")
        if found.get("ActiveState") == "active":
            return runs, f"runs since {found.get('ActiveEnterTimestamp')}; started again {found.get('NRestarts')} times"
        now = f"{found.get('ActiveState')} ({found.get('SubState')})"
        return runs, f"{now}, exit code {found.get('ExecMainStatus')}"

    def remove(self) -> None:
        """Stops and deletes it. Raises LocalError."""
        _ask("systemctl", "--user", "disable", "--now", self.file.name)
        self.file.unlink()
        _ask("systemctl", "--user", "daemon-reload")


class Launchd(_Defined):
    """An agent of this user's launchd."""

    def install(self, command: list[str], folder: Path) -> None:
        if self.file.exists():
            self.remove()
        Disk().make_folder(self.file.parent)
        Disk().write(self.file, launchd(self.name, command, Path.cwd()))
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
    return f"gui/{os.getuid()}"


def _service(folder: Path, *, installed: bool = False) -> Systemd | Launchd:
    """The service of the peer in `folder`. Raises UsageError if it must be installed and is not."""
    name, own = name_of(folder), home()
    if own is None:
        raise UsageError(
            f"service: user {user_name()} has no home folder, where services are kept; set HOME, or log in as a user"
            " who has one"
        )
    found: Systemd | Launchd
    if shutil.which("systemctl"):
        settings = Path(os.environ.get("XDG_CONFIG_HOME") or own / ".config")
        found = Systemd(name, settings / "systemd" / "user" / f"{name}.service")
    elif shutil.which("launchctl"):
        found = Launchd(name, own / "Library" / "LaunchAgents" / f"{name}.plist")
    else:
        raise UsageError(
            "service: this system has neither systemd nor launchd; let what starts programs here run potluck join"
        )
    if installed and not found.file.exists():
        raise UsageError(f"service: {found.file} is not there; give the --dir of the peer, or install it first")
    return found


def _ask(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LocalError(f"service: {' '.join(command[:3])}: {error}; look at it by hand") from None
    if done.returncode:
        why = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise LocalError(
            f"service: {' '.join(command[:3])}: {why}; it needs a session of this user, as after logging in (not su or"
            " sudo)"
        )
    return done.stdout


# --- definitions


def name_of(folder: Path) -> str:
    """The name of the service of `folder`: readable and unique."""
    whole = folder.resolve()
    words = re.sub(r"[^A-Za-z0-9]+", "-", whole.name).strip("-").removeprefix("potluck-") or "peer"
    return f"potluck-{words[:40]}-{hashlib.sha256(bytes(whole)).hexdigest()[:6]}"


def systemd(command: Sequence[str], at: Path, folder: Path) -> str:
    """A unit of systemd. at: working directory. Raises UsageError."""
    return f"""\
[Unit]
Description=Potluck in {_literal(str(folder))}
StartLimitIntervalSec=0

[Service]
WorkingDirectory={_literal(str(at))}
ExecStart={_words(command)}
Restart=on-failure
RestartPreventExitStatus={" ".join(map(str, FINAL))}
RestartSec={FIRST_PAUSE_SECONDS}
RestartSteps=5
RestartMaxDelaySec={LONGEST_PAUSE_SECONDS}
KillMode=mixed
TimeoutStopSec={STOP_SECONDS}

[Install]
WantedBy=default.target
"""


def _literal(text: str) -> str:
    """Escapes the value of a setting. Raises UsageError."""
    if not text.isprintable() or text != text.strip() or text.endswith("\\"):
        raise UsageError(
            f"service: {text!a} cannot be written into a unit of systemd; choose a folder with another name"
        )
    return text.replace("%", "%%")


def _words(command: Sequence[str]) -> str:
    """Escapes a command: quoted words with C's escapes; the colon makes $ literal. Raises UsageError."""
    if any("\0" in word for word in command):
        raise UsageError("service: a word of the command has a zero byte; leave it out")
    escaped = (re.sub(r'["\\]', r"\\\g<0>", word).replace("%", "%%") for word in (f":{command[0]}", *command[1:]))
    return " ".join('"' + re.sub(r"[\n\r\t]", lambda found: f"\\x{ord(found[0]):02x}", word) + '"' for word in escaped)


def launchd(name: str, command: Sequence[str], at: Path) -> bytes:
    """An agent of launchd. Parameters as of `systemd`."""
    return plistlib.dumps(
        {
            "Label": name,
            "ProgramArguments": ["/bin/sh", "-c", _RESTARTS, "sh", *command],
            "WorkingDirectory": str(at),
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ExitTimeOut": STOP_SECONDS,
        }
    )
