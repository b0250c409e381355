"""The classes of errors that end commands end one here, as typed: by its exit code, with one line that has a remedy.

Which classes there are is not written down: a new one that is neither provoked here nor named as one that stays inside
fails a test.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from bootstrap.archive import Archive
from peer.cli import main
from peer.net import base, keyfile
from peer.net.base import Handler, Stream
from peer.node.open_run import NobodyThere
from peer.ui.monitor import BadLog
from protocol.errors import LocalError, PotluckError, RemoteError, UsageError
from protocol.identity import IdentityError
from protocol.ledger.history import Kept
from protocol.wire import endpoints, framing, logfile
from tests.docs.errors import classes
from tests.docs.test_documents import COMMANDS
from tests.e2e.typed import hanging, running, until
from tests.faults.processes import DEADLINE
from tests.support import crowd, potluck, systemd, tiny
from tests.support.bad_input import RUN, log_of

OFFER = ("--device", "cpu", "--memory", "1GB", "--host", "127.0.0.1")
NOWHERE = f"/ip4/127.0.0.1/tcp/1/p2p/{tiny.OPERATOR.peer_id}#{'0' * 64}"

INSIDE = {
    "Absent", "Busy", "Corrupt", "MirrorBusy", "NotTaken",  # another peer is asked, or it is tried again
    "Unreachable", "MessageError", "NeighbourLost", "OtherPeer", "Refused", "RelayFault",  # likewise
    "BadCommit", "BadList", "BadTensor", "FrameError", "NoiseError", "PayloadError", "SchemaError",  # the stream ends
    "Unreadable",  # its update is left out
    "RankLost",  # a round's work ends, and the next one begins
}  # fmt: skip
"""Those that end no command; other tests provoke them."""

ELSEWHERE = Path(__file__).parents[1] / "hostile" / "test_bans.py"
"""There a peer is banned, and a run is closed."""


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


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "nonsense": lambda key: b"nonsense",
    "empty": lambda key: b"",
    "cut off": lambda key: key[:-1],
    "its secret half changed": lambda key: key[:10] + bytes([key[10] ^ 1]) + key[11:],
    "its public half changed": lambda key: key[:-1] + bytes([key[-1] ^ 1]),
    "of another kind": lambda key: b"\x08\x00" + key[2:],
}
"""What may be wrong with a file that has a key."""


@pytest.mark.parametrize("damage", DAMAGES)
def test_identity_error(damage: str, run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "own" / "identity.key"
    keyfile.load_or_create(path)
    spoilt = DAMAGES[damage](path.read_bytes())
    path.write_bytes(spoilt)
    for words in (
        ("key",),
        ("join", NOWHERE, *OFFER),
        ("bootstrap", run_file, "--host", "127.0.0.1"),
        ("me", NOWHERE),
        ("invite", NOWHERE),
        ("run", "close", NOWHERE),
    ):
        assert str(path) in typed(capsys, IdentityError, *words, "--dir", path.parent)
    assert path.read_bytes() == spoilt, "nobody's key is overwritten"


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
        said = typed(capsys, base.PortInUse, "bootstrap", run_file, *where)
        assert str(port) in said
        assert "--port" in said


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
    """The daemon of a node is killed after the node has warned that the schedule does not fit the run."""
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
        records = list(node.archive.records)
        if round == 1:
            records[1] = records[1][:-1] + bytes([records[1][-1] ^ 1])
        else:
            records[2] = records[1]
        node.archive.records = Kept(records.__getitem__)
        for raw in records:
            node.archive.records.append(raw)

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
        words = ("join", line, "--dir", tmp_path / "peer", *offer)
        done = potluck.run(*words, module="tests.faults.wall_clock", text=True, timeout=DEADLINE)
    (said,) = done.stderr.strip().splitlines()
    assert done.returncode == base.ClockWrong.exit_code == 1
    assert said.startswith("potluck: clock: it differs by more than 3 s from that of ")
    assert said.endswith("; set it right (NTP), try again")


Wrong = Callable[[str, dict[str, int]], str]
WRONG: dict[str, Wrong] = {
    "dead": lambda line, ports: re.sub(r"/tcp/\d+", f"/tcp/{ports['dead']}", line),
    "silent": lambda line, ports: re.sub(r"/tcp/\d+", f"/tcp/{ports['silent']}", line),
    "of a host that lets nobody in": lambda line, ports: re.sub(r"/tcp/\d+", f"/tcp/{ports['full']}", line),
    "of no host": lambda line, ports: line.replace("/ip4/127.0.0.1/", "/dns4/nobody.invalid/"),
    "of another key": lambda line, ports: re.sub(r"/p2p/\w+", f"/p2p/{tiny.OPERATORS[1].peer_id}", line),
    "of another run": lambda line, ports: re.sub(r"#\w+", "#" + "0" * 64, line),
    "cut off": lambda line, ports: line[:-3],
    "misspelt": lambda line, ports: line.replace("/tcp/", "/tpc/"),
}
"""What may be wrong with a line, from a right one and the ports of `places`."""
SECONDS = 20.0


@contextlib.contextmanager
def places() -> Iterator[dict[str, int]]:
    """Ports of this machine: "dead", without a listener; "silent", whose listener says nothing; "full",
    where a caller hears nothing at all, as where a firewall drops what comes."""
    with contextlib.ExitStack() as stack:
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(full.getsockname())
        with pytest.raises(TimeoutError):
            socket.create_connection(full.getsockname(), timeout=0.5)
        with socket.create_server(("127.0.0.1", 0)) as free:
            dead = free.getsockname()[1]
        yield {"dead": dead, "silent": silent.getsockname()[1], "full": full.getsockname()[1]}


def in_time(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The one line with which a command ends in less than SECONDS."""
    capsys.readouterr()
    began = time.monotonic()
    with pytest.raises(SystemExit) as end:
        main.main([*map(str, words)])
    seconds = time.monotonic() - began
    (said,) = capsys.readouterr().err.strip().splitlines()
    assert said.startswith("potluck: ")
    assert ";" in said, f"no remedy: {said}"
    assert said.isprintable()
    assert len(said) < 500
    assert end.value.code in (1, 2)
    assert seconds < SECONDS, said
    return said


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_line_is_told_in_one_line_in_twenty_seconds(
    fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with crowd.living(tmp_path / "node") as line, places() as ports:
        wrong = WRONG[fault](line, ports)
        assert wrong != line
        in_time(capsys, "join", wrong, "--dir", tmp_path / "peer", *OFFER)


def test_the_line_of_a_node_that_hangs_is_told_so_too(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its process is stopped; its network daemon lives, and takes connections."""
    with hanging(run_file) as line:
        assert "answers, but not to the DHT" in in_time(capsys, "join", line, "--dir", tmp_path / "peer", *OFFER)


def test_who_sends_the_manifest_without_end_keeps_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An enemy's line: a byte comes now and then."""

    async def drips(stream: Stream) -> None:
        await stream.recv(1024, timeout=SECONDS)
        await stream.send(framing.pack_message({"size": 60_000}))
        while True:
            await stream.send(b"{")
            await asyncio.sleep(0.5)

    with crowd.living(tmp_path / "node", instead={endpoints.BLOB: drips}) as line:
        assert "did not come in 14 s" in in_time(capsys, "join", line, "--dir", tmp_path / "peer", *OFFER)


OTHERS: dict[str, tuple[str, ...]] = {
    "join": OFFER,
    "monitor": ("--once",),
    "plan": (),
    "me": (),
    "log show": (),
    "log verify": (),
    "log credits": (),
    "export": ("--out", "model"),
    "sample": ("--prompt", "a"),
    "eval": ("text.txt",),
    "invite": (),
    "run ban": (tiny.OPERATORS[2].peer_id,),
    "run admit": (tiny.OPERATORS[2].peer_id,),
    "run open": (),
    "run close": (),
    "run set": ("--rounds", "9"),
    "run appoint": (NOWHERE,),
    "run dismiss": (tiny.OPERATORS[2].peer_id,),
    "run quorum": ("1",),
}
"""Every command that looks for a run, with its arguments, but doctor, which goes on, `service install`, and
`run card`, which reads the node's folder."""
OWN_FOLDER = ("join", "me", "invite", "run")
"""Those whose --dir has a key."""


def test_every_command_says_of_a_dead_line_that_nobody_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    take_one = {
        name
        for name, command in COMMANDS.items()
        if any(p.param_type_name == "argument" and p.name in ("run", "where") for p in command.params)
    }
    assert {f"potluck {name}" for name in (*OTHERS, "doctor", "service install", "run card")} == take_one
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("We the people")
    keyfile.load_or_create(tmp_path / "own" / "identity.key")
    with places() as ports:
        dead = WRONG["dead"](NOWHERE, ports)
        for name, more in OTHERS.items():
            own = ("--dir", "own") if name.startswith(OWN_FOLDER) else ()
            said = in_time(capsys, *name.split(), dead, *more, *own)
            assert "connection refused" in said, (name, said)
            assert name != "join" or str(ports["dead"]) in said
    assert {path.name for path in tmp_path.iterdir()} == {"text.txt", "own"}, "nothing half-written"


async def has_none(stream: Stream) -> None:
    await stream.recv(1024, timeout=SECONDS)
    await stream.send(framing.pack_message({"size": None}))


async def hangs_up(stream: Stream) -> None:
    await stream.recv(1024, timeout=SECONDS)


async def fails(stream: Stream) -> None:
    raise RemoteError(stream.remote, "nothing is told of it; there")


async def floods(stream: Stream) -> None:
    await stream.recv(1024, timeout=SECONDS)
    await stream.send(bytes(100_000))


async def says_nothing(stream: Stream) -> None:
    await stream.recv(1024, timeout=SECONDS)
    await asyncio.Event().wait()


ALONE: dict[type[PotluckError], tuple[str, Handler, tuple[str, ...]]] = {
    RemoteError: (endpoints.BLOB, has_none, ("monitor", "--once")),
    base.Closed: (endpoints.BLOB, fails, ("plan",)),
    base.Ended: (endpoints.BLOB, hangs_up, ("export", "--out", "model")),
    base.Malformed: (endpoints.BLOB, floods, ("log", "credits")),
    base.Timeout: (endpoints.LOG, says_nothing, ("log", "show")),
    base.NotServed: (endpoints.QUORUM, says_nothing, ("run", "close", "--dir", "own")),
}
"""Faults of another peer that end a command where no other can be asked: the call, its answer and the command."""


@pytest.mark.parametrize("error", ALONE, ids=lambda error: error.__name__)
def test_the_only_node_is_to_blame(
    error: type[PotluckError], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    keyfile.load_or_create(tmp_path / "own" / "identity.key")
    endpoint, handler, (name, *more) = ALONE[error]
    with crowd.living(tmp_path / "node", instead={endpoint: handler}) as line:
        group = [name, more.pop(0)] if name in ("log", "run") else [name]
        typed(capsys, error, *group, line, *more)


def provoked() -> set[str]:
    """The classes of errors that end commands here and in ELSEWHERE, by the text of these files."""
    found = {error.__name__ for error in ALONE}
    texts = [path.read_text(encoding="utf-8") for path in (Path(__file__), ELSEWHERE)]
    for node in (node for text in texts for node in ast.walk(ast.parse(text))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "typed":
            found.add(ast.unparse(node.args[1]).rpartition(".")[2])
        if isinstance(node, ast.Attribute) and node.attr == "exit_code":
            found.add(ast.unparse(node.value).rpartition(".")[2])
    return found - {"error"}


def test_every_class_is_provoked_or_stays_inside() -> None:
    assert {c.__name__ for c in classes()} == provoked() | INSIDE
    assert not provoked() & INSIDE
