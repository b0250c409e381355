"""A server from which tests fork `potluck` processes: it has imported everything once.

    python -m tests.support.zygote DESCRIPTOR    (a stream socket of the test session)

It has also what a library imports when it is used first, as typer and multiaddr do.

A request is one byte and four descriptors: a socket of the process that is to be started, and its standard input,
output and error. The process reads the rest, a line of JSON, from its socket, and answers with its process id as soon
as it is what was asked for. The server adds the wait status of its end. When the session's socket is closed, the server
kills what it has started and ends.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import pkgutil
import runpy
import selectors
import signal
import socket
import sys
import termios
from pathlib import Path
from typing import Any

import bootstrap
import peer
import protocol
from protocol.identity import Identity


class End:
    """The end of a process. Objects are not freed one by one, which would touch all memory that is shared."""

    def __init__(self) -> None:
        self.code: object = None
        atexit.register(self._leave)

    def of(self, module: str) -> None:
        """Runs `python -m MODULE` to its end."""
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            self.code = end.code
        except KeyboardInterrupt:
            self.code = -signal.SIGINT
        except BaseException:
            sys.excepthook(*sys.exc_info())
            self.code = 1

    def _leave(self) -> None:
        code = self.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except OSError:
            code = 120
        if code == -signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(code & 0xFF)


END = End()
gc.disable()  # what is imported stays, and to look through it is a fifth of the time
for package in (protocol, bootstrap, peer):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
for name in ("_strptime", "numpy.random", "pydantic.type_adapter", "typer._adapters"):
    with contextlib.suppress(ModuleNotFoundError):  # of another version
        importlib.import_module(name)
for name in ("multiaddr", "hivemind.utils.multiaddr"):
    importlib.import_module(name).Multiaddr(f"/ip4/127.0.0.1/tcp/4001/p2p/{Identity(bytes(32)).peer_id}").to_bytes()


def serve(session: socket.socket) -> socket.socket:
    """Forks a process for each request. Returns in a forked process, with its socket."""
    woken, wakes = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wakes, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes)
    children: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(session, selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        while True:
            ready = {key.fd for key, _ in selector.select()}
            if woken in ready:
                os.read(woken, 4096)
                reap(children)
            if session.fileno() not in ready:
                continue
            byte, received, _, _ = socket.recv_fds(session, 1, 4)
            if not byte:
                for pid in children:
                    os.kill(pid, signal.SIGKILL)
                os._exit(0)
            own = socket.socket(fileno=received[0])
            pid = os.fork()
            if pid == 0:
                break
            for descriptor in received[1:]:
                os.close(descriptor)
            children[pid] = own
    signal.set_wakeup_fd(-1)
    for number in range(3):
        os.dup2(received[1 + number], number)
    for descriptor in (woken, wakes, *received[1:]):
        os.close(descriptor)
    for other in (session, *children.values()):
        other.close()
    return own


def reap(children: dict[int, socket.socket]) -> None:
    """Says which processes have ended."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            with children.pop(ended[0]) as own:
                tell(own, "end", ended[1])


def tell(own: socket.socket, what: str, number: int) -> None:
    with contextlib.suppress(OSError):  # without a waiter
        own.sendall(f"{what} {number}\n".encode())


def become(request: dict[str, Any]) -> None:
    """Makes this forked process one that was started by a command: the state that `python -m MODULE` begins with."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if request["new_session"]:
        os.setsid()
        if os.isatty(0):
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    if request["network"] is not None:
        enter(request["network"])
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.modules["numpy.random"].seed()
    sys.argv[:] = ["potluck", *request["arguments"]]
    sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]


def enter(network: str) -> None:
    """Moves this process to a network namespace, as `ip netns exec` does."""
    with open(f"/run/netns/{network}", "rb") as space:
        if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), 0x40000000):  # CLONE_NEWNET
            raise OSError(ctypes.get_errno(), f"network namespace {network}")


def main() -> None:
    tasks = Path("/proc/self/task")
    assert not tasks.exists() or len(list(tasks.iterdir())) == 1, "a process with threads cannot be forked"
    gc.freeze()  # so that memory stays shared
    gc.enable()
    with serve(socket.socket(fileno=int(sys.argv[1]))) as own, own.makefile("r", encoding="utf-8") as lines:
        request = json.loads(lines.readline())
        become(request)
        tell(own, "pid", os.getpid())
    END.of(request["module"])


if __name__ == "__main__":
    main()
