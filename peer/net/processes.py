"""Child processes, and how many files and sockets this process may have open.

A session takes one of our descriptors and two of the network daemon's, which inherits our limit; so does every served
stream. Many systems begin with a soft limit of 1024 and let the process raise it to the hard one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import sys

ENOUGH = 4096
"""Of descriptors: the daemon keeps as many connections (peer/net/daemon.py)."""
_UNLIMITED = (1 << 20, 1 << 16, 10_240)
"""Tried in turn where the hard limit is none: some systems then refuse what is above limits of their own."""


RESERVED = 256
"""Descriptors that are left for files, and for what we open ourselves."""


def open_file_limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def most_streams() -> int:
    """Most streams of others: half of what this process may have open, so that files can still be opened."""
    soft = open_file_limit()
    return 1 << 16 if soft == sys.maxsize else max(64, (soft - RESERVED) // 2)


def raise_file_limit(enough: int = ENOUGH) -> str | None:
    """Raises the soft limit to the hard one. Returns a warning if it still is below `enough`, else None."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _UNLIMITED if hard == resource.RLIM_INFINITY else (hard,)
    for limit in wanted:
        if soft == resource.RLIM_INFINITY or soft >= limit:
            break
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            break
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= enough:
        return None
    return (
        f"open files: this system allows {soft} at once, a run of many peers takes {enough}; "
        "raise the hard limit (ulimit -Hn, LimitNOFILE= of a service)"
    )


def send_signal(child: asyncio.subprocess.Process, number: int = signal.SIGKILL) -> None:
    """Sends a signal, unless the child has ended. Does not reap the child, as `child.kill()` does."""
    if child.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, number)


_APART = """
import os, signal, sys
os.setpgid(0, 0)
if sys.platform == "linux":
    try:
        import ctypes
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it is sent when the thread ends that started us
    except ImportError:  # a Python without ctypes: the daemon ends some time after us
        pass
if os.getppid() == int(sys.argv[1]):  # else that was too late
    os.execvp(sys.argv[2], sys.argv[2:])
"""
"""Becomes what it is given, in a process group of its own."""


def own_group_command() -> tuple[str, ...]:
    """Returns a prefix for a command that ignores signals to our process group; on Linux it ends with us."""
    return sys.executable, "-I", "-S", "-c", _APART, str(os.getpid())
