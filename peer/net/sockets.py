"""Checks a port, and makes the folder of Unix sockets, before a network daemon starts."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import secrets
import shutil
import socket
import tempfile
from pathlib import Path

from peer.net.base import PortInUse, StartFailed
from peer.net.disk import try_lock
from protocol.errors import UsageError

FOLDER = "potluck-net-"
LOCK = "lock"
OTHER_PLACES = ("/tmp", "/var/tmp", "/dev/shm")
"""Places for sockets, if the folder for temporary files has a long path, or a disk without sockets."""
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
    everywhere, itself = _BOTH
    known = everywhere | itself
    meant = hosts(host, port) or [host]
    for one in meant:
        if (failed := _why_not(known.get(one, version), one, port)) is not None:
            raise port_error(host, port, failed.strerror or str(failed))


def _why_not(version: int, host: str, port: int) -> OSError | None:
    """Why we cannot listen there; None where we can."""
    try:
        with socket.socket(socket.AF_INET if version == 4 else socket.AF_INET6) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if version == 6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind((host, port))
            probe.listen(1)
    except OSError as error:
        return error
    return None


_BOTH = ({"0.0.0.0": 4, "::": 6}, {"127.0.0.1": 4, "::1": 6})
"""All addresses of a machine, and its own to itself, by the version of IP."""
_NO_FAMILY = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
"""A machine that has this version of IP not at all."""


def hosts(host: str, port: int) -> list[str]:
    """Returns the addresses to listen on: 0.0.0.0 and :: are every IPv4 and IPv6 address that this machine has."""
    everywhere, itself = _BOTH
    if host not in everywhere and host not in itself:
        return [host]
    there = [one for one, of in (everywhere if host in everywhere else itself).items() if _has(of, one, port)]
    return there if host in everywhere else sorted(there, key=lambda one: one != host)[:1]


def _has(version: int, host: str, port: int) -> bool:
    """Returns whether this machine has the address at all; the port may be taken."""
    failed = _why_not(version, host, port)
    return failed is None or failed.errno not in _NO_FAMILY


def port_error(host: str, port: int, reason: str) -> UsageError:
    """Why we cannot listen there, for a reader."""
    if "in use" in reason:
        return PortInUse(f"port {port}: another program listens on it; choose another one with --port")
    return StartFailed(f"port {port} on {host}: {reason}; choose others with --host and --port")


def socket_base() -> Path:
    """Returns where socket folders are made: a folder with a short path, on a disk that can have sockets."""
    own = Path(os.path.realpath(tempfile.gettempdir()))
    places = [own, *(Path(place) for place in OTHER_PLACES)]
    short = [place for place in places if len(os.fsencode(place)) <= FOLDER_PATH_MAX]
    return next((place for place in short if _has_sockets(place)), short[0])


def _has_sockets(folder: Path) -> bool:
    path = folder / f".{FOLDER}{secrets.token_hex(8)}"
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.bind(os.fspath(path))
    except OSError:
        return False
    finally:
        path.unlink(missing_ok=True)
    return True


class SocketFolder:
    """A new folder `path` for a daemon's sockets, never swept while its process lives. Raises StartFailed."""

    def __init__(self, sockets: Path) -> None:
        made: Path | None = None
        try:
            made = Path(tempfile.mkdtemp(prefix=f".{FOLDER}", dir=sockets))
            self._lock = open(made / LOCK, "xb")  # noqa: SIM115  (held until it is closed)
            with contextlib.suppress(OSError):  # without locks there, nobody sweeps either
                try_lock(self._lock)
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
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def sweep(sockets: Path) -> int:
    """Removes the socket folders in `sockets` of processes that were killed. Returns their number."""
    removed = 0
    for folder in sockets.glob(FOLDER + "*"):
        with contextlib.suppress(OSError):
            if folder.lstat().st_uid != os.getuid():
                continue
            with open(os.open(folder / LOCK, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), "rb") as lock:
                if try_lock(lock):
                    shutil.rmtree(folder, ignore_errors=True)
                    removed += 1
    return removed
