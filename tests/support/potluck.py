"""The command `potluck` as a process, for tests: forked from a server that has imported it (zygote.py), which takes a
hundredth of the processor time of a start, or started by the real command where what is asked for has to be there when
Python starts, and in benchmarks, which are not run by pytest: they tell of real starts, and of as many threads as users
have."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import json
import os
import secrets
import select
import socket
import subprocess
import sys
import termios
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PORTS = range(10_000, 32_000)
"""Below those of outgoing connections, 32,768 and more on Linux."""
FREE = frozenset(
    (
        "HOME",
        "LOGNAME",
        "TORCHINDUCTOR_CACHE_DIR",  # torch sets it when it compiles first
        "XDG_CACHE_HOME",
        "XDG_CONFIG_HOME",
        "PATH",
        "TERM",
        "COLUMNS",
        "LINES",
        "PYTEST_CURRENT_TEST",
    )
)
"""Environment variables that nothing reads while it is imported."""
FIRST = frozenset(("tests.faults.wall_clock",))
"""Modules that change something before anything is imported."""


BEGINNING = dict(os.environ)


class Zygote:
    """The server of this test session."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.zygote", str(theirs.fileno())],
                cwd=ROOT,
                env=BEGINNING,
                stdin=subprocess.PIPE,  # no file, whose position would be remembered
                stdout=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._lock = threading.Lock()
        atexit.register(self._close)

    def _close(self) -> None:
        self._socket.close()
        self._process.communicate()

    def fork(self, request: Mapping[str, Any], files: Sequence[int]) -> socket.socket:
        """Starts a process; the socket on which its id and its wait status come."""
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            socket.send_fds(self._socket, [b"\0"], [theirs.fileno(), *files])
        ours.sendall(json.dumps(request).encode() + b"\n")
        return ours


_STARTS = threading.Lock()


@functools.cache
def _started() -> Zygote:
    return Zygote()


def zygote() -> Zygote:
    """The only one, started when it is needed first."""
    with _STARTS:
        return _started()


class Popen(subprocess.Popen[Any]):
    """`potluck ARGUMENTS`, or another of our modules, with the keywords of subprocess.Popen. `before`: what its command
    begins with; in a network namespace (`ip netns exec NAME`) it is forked, too.

    With `start_new_session` a terminal that is its standard input becomes its own.
    """

    def __init__(
        self, *arguments: object, module: str = "peer.cli", before: Sequence[object] = (), **keywords: Any
    ) -> None:
        self._module, self._arguments = module, list(map(str, arguments))
        self._network = str(before[3]) if [*before[:3]] == ["ip", "netns", "exec"] else None
        elsewhere = len(before) > (4 if self._network else 0)
        self._forks = not elsewhere and module not in FIRST and _starts_alike(keywords)
        self._socket: socket.socket | None = None
        if not self._forks and keywords.get("start_new_session") and _is_terminal(keywords.get("stdin")):
            keywords.setdefault("preexec_fn", lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0))
        super().__init__([*map(str, before), sys.executable, "-m", module, *self._arguments], **keywords)

    def _execute_child(self, *given: Any) -> None:
        if not self._forks:
            super()._execute_child(*given)  # type: ignore[misc]
            return
        folder, env = given[5:7]
        pipes = given[10:16]
        files = (pipes[0], pipes[3], pipes[5])
        request = {
            "module": self._module,
            "arguments": self._arguments,
            "folder": os.path.abspath(folder or "."),
            "environment": dict(os.environ if env is None else env),
            "new_session": given[21],
            "network": self._network,
        }
        self._socket = zygote().fork(request, [own if file == -1 else file for own, file in enumerate(files)])
        self.pid = self._read("pid")
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def _read(self, wanted: str) -> int:
        """The process id (`pid`) or the wait status (`end`), which is told next."""
        assert self._socket is not None
        line = b""
        while not line.endswith(b"\n"):
            byte = self._socket.recv(1)
            assert byte, f"{self.args}: the server that forks it has ended"
            line += byte
        what, number = line.split()
        assert what.decode() == wanted, f"{self.args}: ended before it was what was asked for"
        return int(number)

    def _internal_poll(self, *given: Any, **keywords: Any) -> int | None:
        if self._socket is None:
            return super()._internal_poll(*given, **keywords)  # type: ignore[misc, no-any-return]
        return self._end(0.0)

    def _wait(self, timeout: float | None) -> int | None:
        if self._socket is None:
            return super()._wait(timeout)  # type: ignore[misc, no-any-return]
        if self._end(timeout) is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def _end(self, timeout: float | None) -> int | None:
        """The exit code, as soon as there is one, or None."""
        if self.returncode is None and select.select([self._socket], [], [], timeout)[0]:
            with self._waitpid_lock:  # type: ignore[attr-defined]
                if self.returncode is None:
                    self.returncode = os.waitstatus_to_exitcode(self._read("end"))
        return self.returncode


def run(
    *arguments: object, timeout: float | None = None, check: bool = False, capture_output: bool = True, **keywords: Any
) -> subprocess.CompletedProcess[Any]:
    """`potluck ARGUMENTS` to its end, as subprocess.run has it."""
    if capture_output:
        keywords |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(*arguments, **keywords) as process:
        try:
            out, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(process.args, process.returncode, out, errors)
    if check:
        done.check_returncode()
    return done


def _is_terminal(given: object) -> bool:
    return isinstance(given, int) and given >= 0 and os.isatty(given)


def _starts_alike(keywords: Mapping[str, Any]) -> bool:
    """Whether a process with these keywords begins as one that the server forks; that one has computed on one thread
    since it began (tests/conftest.py), since none with several can be forked."""
    if BEGINNING.get("OMP_NUM_THREADS") != "1":
        return False
    env = dict(keywords.get("env") or os.environ)
    if env.get("PYTHONPATH") == str(ROOT):  # where everything is imported from anyway
        del env["PYTHONPATH"]
    changed = {name for name, _ in env.items() ^ BEGINNING.items()}
    return keywords.get("preexec_fn") is None and changed <= FREE


def free_port() -> int:
    """A TCP port for a node, not one of those that the system gives to connections while the node is away."""
    while True:
        port = secrets.choice(PORTS)
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
