"""Before a network daemon starts: whether its port is free, and the folder of its Unix sockets."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import shutil
import socket
import tempfile
import time
from pathlib import Path

from peer.net.base import PortInUse, StartFailed
from protocol.errors import UsageError

FOLDER = "potluck-net-"
FOLDER_PATH_MAX = 48
"""The path of a Unix socket has at most 103 bytes; its name takes 50 of them."""
FRESH_SECONDS = 60.0
"""A younger folder may be that of a daemon that starts just now."""


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


def sweep(sockets: Path) -> int:
    """Removes the socket folders, in `sockets`, of processes that were killed; how many there were."""
    removed = 0
    for folder in sockets.glob(FOLDER + "*"):
        with contextlib.suppress(OSError):
            if folder.stat().st_uid != os.getuid() or time.time() - folder.stat().st_mtime < FRESH_SECONDS:
                continue
            alive = False
            for path in folder.glob("p2pd-*.sock"):
                with socket.socket(socket.AF_UNIX) as probe:
                    alive |= probe.connect_ex(str(path)) == 0
            if not alive:
                shutil.rmtree(folder, ignore_errors=True)
                removed += 1
    return removed
