"""Before a network daemon starts: whether its port is free, and the folder of its Unix sockets."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import shutil
import socket
import tempfile
from pathlib import Path

from peer.net.base import PortInUse, StartFailed
from protocol.errors import UsageError

FOLDER = "potluck-net-"
LOCK = "lock"
"""In such a folder: locked by the process whose daemon it is."""
FOLDER_PATH_MAX = 48
"""The path of a Unix socket has at most 103 bytes; its name takes 50 of them."""


def check_port(host: str, port: int) -> None:
    """Raises PortInUse or UsageError if we cannot listen there."""
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        raise UsageError(f"--host {host}: not an IP address; give one of this machine's, or 0.0.0.0") from None
    if not 0 <= port < 65536:
        raise UsageError(f"--port {port}: not a port; give one between 1 and 65535, or 0 for any")
    with socket.socket(socket.AF_INET if version == 4 else socket.AF_INET6) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            raise port_error(host, port, error.strerror or str(error)) from None


def port_error(host: str, port: int, reason: str) -> UsageError:
    """Why we cannot listen there, for a reader."""
    if "in use" in reason:
        return PortInUse(f"port {port}: another program listens on it; choose another one with --port")
    return StartFailed(f"port {port} on {host}: {reason}; choose others with --host and --port")


def socket_base() -> Path:
    """Where socket folders are made, unless told otherwise."""
    base = os.path.realpath(tempfile.gettempdir())
    return Path(base if len(base.encode()) <= FOLDER_PATH_MAX else "/tmp")


class SocketFolder:
    """A new folder for a daemon's sockets, in `sockets`, at `path`. While it is open and its process lives, nobody sweeps it. Raises StartFailed."""

    def __init__(self, sockets: Path) -> None:
        made: Path | None = None
        try:
            made = Path(tempfile.mkdtemp(prefix=f".{FOLDER}", dir=sockets))
            self._lock = open(made / LOCK, "xb")  # noqa: SIM115  (held until it is closed)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            self.path = made.with_name(made.name[1:])
            made.rename(self.path)  # until now nobody could take it for one that was left behind
        except OSError as error:
            if made is not None:
                shutil.rmtree(made, ignore_errors=True)
            raise StartFailed(
                f"folder {sockets}: {error.strerror}, so that a network daemon has no place for its sockets; "
                "make room there, or set TMPDIR to another folder"
            ) from None

    def close(self) -> None:
        """Removes it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def sweep(sockets: Path) -> int:
    """Removes the socket folders, in `sockets`, of processes that were killed; how many there were. It asks no clock, which may just have been set.
    `sockets` is everybody's: what somebody else has put there is not opened."""
    removed = 0
    for folder in sockets.glob(FOLDER + "*"):
        with contextlib.suppress(OSError):
            if folder.lstat().st_uid != os.getuid():
                continue
            with open(os.open(folder / LOCK, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), "rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
                removed += 1
    return removed
