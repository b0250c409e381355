"""Single keys from a terminal, while it shows something else. The terminal is as it was when the block ends, however it ends."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import select
import termios
import threading
import tty
from collections.abc import Callable
from types import TracebackType

_KEY = re.compile(r"\x1b\[[0-9;]*[A-Za-z~]|\x1bO[A-Z]|.", re.DOTALL)
"""An escape sequence, as arrows send it, or one character."""


def can_read(fd: int) -> bool:
    """Whether somebody sits at the terminal `fd` and types for this process."""
    try:
        return os.isatty(fd) and os.tcgetpgrp(fd) == os.getpgrp()
    except OSError:
        return False


class Keys:
    """Tells each key that is typed at the terminal `fd`, on a thread of its own. Ctrl-C and Ctrl-Z do what they always do."""

    def __init__(self, fd: int, tell: Callable[[str], None]) -> None:
        self._fd, self._tell = fd, tell
        self._before = termios.tcgetattr(fd)
        self._wake, self._end = os.pipe()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Keys:
        atexit.register(self._restore)
        tty.setcbreak(self._fd)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.write(self._end, b".")
        self._thread.join()
        os.close(self._wake)
        os.close(self._end)
        self._restore()
        atexit.unregister(self._restore)

    def _restore(self) -> None:
        with contextlib.suppress(termios.error):  # it is gone
            termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)

    def _read(self) -> None:
        while True:
            ready, _, _ = select.select([self._fd, self._wake], [], [])
            if self._wake in ready:
                return
            try:
                typed = os.read(self._fd, 256)
            except OSError:  # the terminal is gone
                return
            if not typed:
                return
            for key in _KEY.findall(typed.decode("utf-8", "replace")):
                self._tell(key)
