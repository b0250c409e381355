"""The classes of errors that end commands end one here, as typed: by its exit code, with one line that has a remedy.

Which classes there are is not written down: a new one that is neither provoked here nor named as one that stays inside fails a test.
"""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from bootstrap.archive import Archive
from peer.cli import main
from peer.net import base
from peer.node.open_run import NobodyThere
from peer.ui.monitor import BadLog
from protocol.errors import LocalError, PotluckError, UsageError
from protocol.identity import IdentityError
from protocol.wire import logfile
from tests import crowd, systemd, tiny
from tests.docs.errors import classes
from tests.e2e.test_bad_input import RUN, log_of
from tests.e2e.typed import running, until
from tests.faults.processes import DEADLINE

NOWHERE = f"/ip4/127.0.0.1/tcp/1/p2p/{tiny.OPERATOR.peer_id}#{'0' * 64}"

INSIDE = {
    "Absent", "Busy", "Corrupt", "Lie", "NotTaken",  # another peer is asked, or it is tried again
    "Closed", "Ended", "Malformed", "NotServed", "Timeout", "Unreachable", "MessageError", "NeighbourLost", "Refused", "RelayFault", "RemoteError",  # likewise
    "BadCommit", "BadList", "BadTensor", "FrameError", "NoiseError", "PayloadError", "SchemaError",  # the stream ends, or the update is refused
}  # fmt: skip
"""Those that end no command; other tests provoke them."""


def typed(capsys: pytest.CaptureFixture[str], error: type[PotluckError], *words: object) -> str:
    """The line with which a command ends by an error of just this class."""
    with pytest.raises(SystemExit) as end:
        main.main([*map(str, words)])
    assert type(end.value.__context__) is error
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert end.value.code == error.exit_code
    assert line.startswith("potluck: ")
    assert ";" in line, f"no remedy: {line}"
    assert len(line) < 400
    return line


def test_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no-such.toml" in typed(capsys, UsageError, "join", "no-such.toml")


def test_identity_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "identity.key"
    path.write_bytes(b"nonsense")
    path.chmod(0o600)
    assert str(path) in typed(capsys, IdentityError, "key", "--dir", tmp_path)
    assert path.read_bytes() == b"nonsense", "nobody's key is overwritten"


def test_bad_address(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = NOWHERE.partition("#")[0].replace("/tcp/", "/udp/")
    where = ("--dir", run_file.parent / "boot", "--host", "127.0.0.1")
    assert "only TCP" in typed(capsys, base.BadAddress, "bootstrap", run_file, *where, "--initial-peer", other)


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert "connection refused" in typed(capsys, NobodyThere, "monitor", NOWHERE, "--once")


def test_port_in_use(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        where = ("--dir", run_file.parent / "boot", "--host", "127.0.0.1", "--port", port)
        assert str(port) in typed(capsys, base.PortInUse, "bootstrap", run_file, *where)


def test_start_failed(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At an address that is not this machine's (TEST-NET-3, RFC 5737)."""
    where = ("--dir", run_file.parent / "boot", "--host", "203.0.113.77")
    assert "203.0.113.77" in typed(capsys, base.StartFailed, "bootstrap", run_file, *where)


def test_damaged_log(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A bootstrap node rather does not start than forget rounds."""
    archive = Archive(run_file.parent / "noted", RUN)
    for record in log_of(3):
        archive.append(record)
    archive.close()
    raw = bytearray((run_file.parent / "noted" / "log").read_bytes())
    raw[60] ^= 1
    path = run_file.parent / "boot" / "log"
    path.write_bytes(raw)
    where = ("--dir", path.parent, "--host", "127.0.0.1")
    assert "is damaged" in typed(capsys, logfile.Damaged, "bootstrap", run_file, *where)
    assert path.read_bytes() == raw


def test_local_error(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's own program refuses."""
    systemd.programs(tmp_path / "bin", "systemctl")
    (tmp_path / "bin" / "systemctl").write_text("#!/bin/sh\necho no session >&2\nexit 1\n")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    words = ("service", "install", NOWHERE, "--dir", tmp_path / "peer", "--device", "cpu", "--memory", "1GB")
    assert "no session" in typed(capsys, LocalError, *words)
    assert not list(tmp_path.rglob("*.service")), "nothing is left"


@pytest.mark.slow
def test_transport_lost(run_file: Path) -> None:
    """The daemon of a bootstrap node is killed. Before that it has told its operator that his schedule does not fit the run."""
    run_file.write_text(re.sub(r"(?m)^total_steps = ", "total_steps = 1", run_file.read_text()))
    with running("bootstrap", run_file, "--dir", run_file.parent / "boot", "--host", "127.0.0.1", "--json") as node:
        assert str(until(node, "warning")["text"]).startswith("train.total_steps: is 1")
        until(node, "listening")
        for child in psutil.Process(node.pid).children(recursive=True):
            if "p2pd" in child.name():
                child.send_signal(signal.SIGKILL)
        said, _ = node.communicate()
    assert node.returncode == base.TransportLost.exit_code == 1
    assert said.splitlines()[-1].startswith("potluck: network daemon: ")
    assert "start" in said.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "round"), [(("monitor", "--once"), 1), (("monitor", "--once", "--json"), 2), (("plan",), 1)]
)
def test_bad_log(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], round: int) -> None:
    """A node serves a commit whose vote has another byte than its operator has signed, or the same commit twice."""

    def spoil(node: crowd.Node) -> None:
        records = node.archive.records
        if round == 1:
            records[1] = records[1][:-1] + bytes([records[1][-1] ^ 1])
        else:
            records[2] = records[1]

    with crowd.living(tmp_path / "node", spoil) as line:
        said = typed(capsys, BadLog, words[0], line, *words[1:])
    assert f"the commit of round {round} " in said
    assert said.endswith("; ask another bootstrap node")


@pytest.mark.parametrize("hours", [1, -1])
def test_clock_wrong(tmp_path: Path, hours: int) -> None:
    """All of the process takes another time for the right one, hivemind too; so it is one of its own."""
    (tmp_path / "peer").mkdir()
    (tmp_path / "peer" / "wall").write_text(str(3600 * hours))
    offer = ("--device", "cpu", "--memory", "1GB", "--up", "20Mbps", "--down", "100Mbps", "--host", "127.0.0.1")
    with crowd.living(tmp_path / "node") as line:
        done = subprocess.run(
            [sys.executable, "-m", "tests.faults.wall_clock", "join", line, "--dir", str(tmp_path / "peer"), *offer],
            capture_output=True,
            text=True,
            timeout=DEADLINE,
        )
    (said,) = done.stderr.strip().splitlines()
    assert done.returncode == base.ClockWrong.exit_code == 1
    assert said.startswith("potluck: clock: it differs by more than 3 s from that of ")
    assert said.endswith("; set it right (NTP), try again")


WRONG: dict[str, Callable[[str, str, str], str]] = {
    "dead": lambda line, dead, silent: re.sub(r"/tcp/\d+", f"/tcp/{dead}", line),
    "silent": lambda line, dead, silent: re.sub(r"/tcp/\d+", f"/tcp/{silent}", line),
    "of another key": lambda line, dead, silent: re.sub(r"/p2p/\w+", f"/p2p/{tiny.OPERATORS[1].peer_id}", line),
    "of another run": lambda line, dead, silent: re.sub(r"#\w+", "#" + "0" * 64, line),
    "cut off": lambda line, dead, silent: line[:-3],
    "misspelt": lambda line, dead, silent: line.replace("/tcp/", "/tpc/"),
}
"""What may be wrong with a line, from a right one, a port where nobody listens and one where somebody listens and says nothing."""
SECONDS = 20.0


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_line_is_told_in_one_line_in_twenty_seconds(
    fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with crowd.living(tmp_path / "node") as line, socket.create_server(("127.0.0.1", 0)) as silent:
        with socket.create_server(("127.0.0.1", 0)) as free:
            dead = free.getsockname()[1]
        wrong = WRONG[fault](line, str(dead), str(silent.getsockname()[1]))
        assert wrong != line
        offer = ("--device", "cpu", "--memory", "1GB", "--host", "127.0.0.1")
        began = time.monotonic()
        with pytest.raises(SystemExit) as end:
            main.main(["join", wrong, "--dir", str(tmp_path / "peer"), *offer])
        seconds = time.monotonic() - began
    (said,) = capsys.readouterr().err.strip().splitlines()
    assert said.startswith("potluck: ")
    assert ";" in said, f"no remedy: {said}"
    assert end.value.code in (1, 2)
    assert seconds < SECONDS, said


PROVOKED = {BadLog, base.ClockWrong, UsageError, IdentityError, base.BadAddress, NobodyThere, base.PortInUse, base.StartFailed, logfile.Damaged, LocalError, base.TransportLost}  # fmt: skip


def test_every_class_is_provoked_or_stays_inside() -> None:
    assert {c.__name__ for c in classes()} == {c.__name__ for c in PROVOKED} | INSIDE
    assert not {c.__name__ for c in PROVOKED} & INSIDE
