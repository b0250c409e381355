"""A monitor as a user starts it, on its own terminal and with a page, and what its processes cost."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import psutil

from tests.support import potluck

DEADLINE = 120.0
"""Seconds for anything to happen."""
KEPT = 4_000_000
"""Bytes that were drawn."""
_GETS = """
import sys, urllib.request
for url in sys.stdin:
    part = urllib.request.urlopen(url.strip(), timeout=float(sys.argv[1])).read()
    sys.stdout.buffer.write(b"%d\\n" % len(part) + part)
    sys.stdout.buffer.flush()
"""
"""A process that answers each line, an address, with what is there, and with its length before."""
_PAGE = re.compile(rb"http://127\.0\.0\.1:\d+/")


@dataclass(frozen=True, slots=True)
class Taken:
    """By the monitor's own process, and by its network daemon: resident bytes, processor seconds since their start."""

    own_bytes: int
    daemon_bytes: int
    own_seconds: float
    daemon_seconds: float

    @property
    def seconds(self) -> float:
        """Of both."""
        return self.own_seconds + self.daemon_seconds


@dataclass
class Watching:
    """A monitor that runs. `drawn`: what it wrote to its terminal, the newest part."""

    process: subprocess.Popen[bytes]
    drawn: bytearray = field(default_factory=bytearray)
    url: str = ""
    keys: int = -1
    """Where what is typed goes."""
    there: subprocess.Popen[bytes] | None = None
    """A process that asks for parts of its page, where that is served in another place than this one."""

    def press(self, key: bytes, sign: bytes) -> None:
        """Types a key, until `sign` is drawn."""
        before, end = self.drawn.rfind(sign), time.monotonic() + DEADLINE
        os.write(self.keys, key)
        while self.drawn.rfind(sign) <= before:
            assert time.monotonic() < end, (key, self.drawn[-2000:])
            time.sleep(0.05)  # a terminal has no other sign of news

    def taken(self) -> Taken:
        """As of now."""
        own, daemons = psutil.Process(self.process.pid), psutil.Process(self.process.pid).children(recursive=True)
        return Taken(
            own.memory_info().rss,
            sum(d.memory_info().rss for d in daemons),
            sum(own.cpu_times()[:2]),
            sum(sum(d.cpu_times()[:2]) for d in daemons),
        )

    def get(self, path: str) -> bytes:
        """A part of the page."""
        if self.there is not None:
            assert self.there.stdin is not None
            assert self.there.stdout is not None
            self.there.stdin.write(f"{self.url}{path}\n".encode())
            self.there.stdin.flush()
            return self.there.stdout.read(int(self.there.stdout.readline()))
        request = urllib.request.Request(self.url + path, headers={"Accept-Encoding": "identity"})
        with urllib.request.urlopen(request, timeout=DEADLINE) as reply:
            return bytes(reply.read())


@contextlib.contextmanager
def watching(
    *arguments: object,
    width: int = 120,
    height: int = 40,
    keys: bool = False,
    prefix: Sequence[object] = (),
    measured: bool = False,
) -> Iterator[Watching]:
    """`potluck monitor ARGUMENTS --web 0` on a terminal of this size, as soon as its page is there; ended with the
    block. `keys`: whether the terminal is its own, so that it takes what is typed; `prefix`: what its command begins
    with; `measured`: whether it is started as users start it, since what it takes counts."""
    outer, inner = pty.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
    words = ("monitor", *map(str, arguments), "--web", "0")
    files = {"stdin": inner, "stdout": inner, "stderr": inner, "env": os.environ | {"TERM": "xterm-256color"}}
    process: subprocess.Popen[bytes]
    if measured:
        process = subprocess.Popen([sys.executable, "-m", "peer.cli", *words], start_new_session=True, **files)
    else:
        process = potluck.Popen(*words, before=prefix, start_new_session=keys, **files)
    os.close(inner)
    found, there = Watching(process, keys=outer), threading.Event()

    def read() -> None:
        with contextlib.suppress(OSError):  # how the end of a terminal reads on Linux
            while part := os.read(outer, 65536):
                found.drawn += part
                if not there.is_set() and (said := _PAGE.search(found.drawn)) is not None:
                    found.url = said[0].decode()
                    there.set()
                del found.drawn[:-KEPT]
        there.set()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert there.wait(DEADLINE), found.drawn[-2000:]
        assert found.url, found.drawn[-2000:]
        if prefix:
            gets = [*map(str, prefix), sys.executable, "-c", _GETS, str(DEADLINE)]
            found.there = subprocess.Popen(gets, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        yield found
    finally:
        if found.there is not None:
            found.there.kill()
            found.there.communicate()
        process.terminate()
        process.wait(DEADLINE)
        reader.join()
        os.close(outer)
