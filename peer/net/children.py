"""Signals to processes that we have started, and those of a terminal, which are not for them."""

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


APART = "import os, sys; os.setpgid(0, 0); os.execvp(sys.argv[1], sys.argv[1:])"
"""Becomes what it is given, in a process group of its own."""


def apart() -> tuple[str, ...]:
    """What to put before a command that is not to hear of Ctrl-C. Nothing where there is no terminal: whoever started us there may end us by our
    process group."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return ()
    return sys.executable, "-I", "-S", "-c", APART
