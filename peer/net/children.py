"""Processes that we start: signals to them, those that are not for them, and their end with ours."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys


def send(child: asyncio.subprocess.Process, number: int = signal.SIGKILL) -> None:
    """Sends a signal, unless the child has ended. Not by `child.kill()`: before Python 3.12 that looks first whether the child has just ended, and
    so takes away the exit code that the loop waits for, which then says so on standard error, and that it was 255."""
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


def apart() -> tuple[str, ...]:
    """What to put before a command that is to hear nothing of signals to our process group, such as Ctrl-C, and those of `timeout`. On Linux it ends
    with us, however we end."""
    return sys.executable, "-I", "-S", "-c", _APART, str(os.getpid())
