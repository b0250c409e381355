"""Signals to processes that the event loop waits for."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal


def send(child: asyncio.subprocess.Process, number: int = signal.SIGKILL) -> None:
    """Sends a signal, unless the child has ended. Not by `child.kill()`: before Python 3.12 that looks first whether the child has just ended, and
    so takes away the exit code that the loop waits for, which then says so on standard error, and that it was 255."""
    if child.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, number)
