"""Bare sockets to the network daemon: incoming streams, and ending the connections of refused peers.

The daemon connects to a socket of ours for every incoming stream, and writes first who opened it and under what name.
A refused stream costs an `accept`, a look at these bytes, and a `close`. One connection to the daemon's control socket
is kept for ending connections of refused peers.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from peer.net.guests import Abortable

BACKLOG = 4096
"""Streams that wait until our loop accepts them; the system may allow fewer (net.core.somaxconn)."""
MAX_ACCEPTED = 8
MAX_HEAD_BYTES = 1024
RETRY_SECONDS = (0.0005, 0.005, 0.05, 0.5, 5.0)
"""Until we look again for what the daemon has not written yet; then the stream is given up."""
FULL_SECONDS = 1.0
MAX_EXPELLED = 64
"""Peers whose connections are being ended; others are ended when they come again."""


@dataclass(frozen=True, slots=True)
class StreamOrigin:
    """The opener of a stream: its peer id, multiaddress and protocol name."""

    peer: str
    where: str
    name: str


class Arrive(Protocol):
    """Takes a stream, after reading its first `head` bytes, or closes `conn`."""

    def __call__(self, came: StreamOrigin, conn: socket.socket, head: int, /) -> None: ...


class StreamListener:
    """Accepts streams at the Unix socket `path`. `read` parses what the daemon wrote; it may raise ValueError."""

    def __init__(self, path: str, read: Callable[[bytes], StreamOrigin], arrive: Arrive) -> None:
        self._loop = asyncio.get_running_loop()
        self._read = read
        self._arrive = arrive
        self._later: dict[socket.socket, asyncio.TimerHandle] = {}
        self._pause: asyncio.TimerHandle | None = None
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind(path)
        self._listener.listen(BACKLOG)
        self._begin()

    def _begin(self) -> None:
        self._loop.add_reader(self._listener.fileno(), self._take)

    def _take(self) -> None:
        for _ in range(MAX_ACCEPTED):
            try:
                conn, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:  # no descriptor is left
                self._loop.remove_reader(self._listener.fileno())
                self._pause = self._loop.call_later(FULL_SECONDS, self._begin)
                return
            conn.setblocking(False)
            self._look(conn, 0)

    def _look(self, conn: socket.socket, looks: int) -> None:
        self._later.pop(conn, None)
        try:
            head = conn.recv(MAX_HEAD_BYTES, socket.MSG_PEEK)
            found = message_span(head) if head else None
            came = None if found is None else self._read(head[found[0] : found[1]])
        except BlockingIOError:
            found = came = None
        except (OSError, ValueError):
            return conn.close()
        if found is not None and came is not None:
            self._arrive(came, conn, found[1])
        elif looks < len(RETRY_SECONDS):
            self._later[conn] = self._loop.call_later(RETRY_SECONDS[looks], self._look, conn, looks + 1)
        else:
            conn.close()

    def close(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
        with contextlib.suppress(ValueError):
            self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        for conn, later in self._later.items():
            later.cancel()
            conn.close()
        self._later.clear()


def message_span(data: bytes) -> tuple[int, int] | None:
    """Returns start and end of a message after its length, a varint; None if incomplete. Raises ValueError."""
    size = 0
    for at, byte in enumerate(data[:3]):
        size |= (byte & 0x7F) << (7 * at)
        if byte < 0x80:
            end = at + 1 + size
            if end > MAX_HEAD_BYTES:
                raise ValueError("a stream's head is too long")
            return (at + 1, end) if len(data) >= end else None
    if len(data) >= 3:
        raise ValueError("a stream's head has no length")
    return None


class IncomingStream:
    """An incoming stream: a bare socket until it is served. `over()` is called if it ends before that."""

    __slots__ = ("_listens", "conn", "ended", "later", "over", "served", "stream")

    def __init__(self, conn: socket.socket) -> None:
        self._listens = False
        self.conn = conn
        self.later: asyncio.TimerHandle | None = None
        self.stream: Abortable | None = None
        self.over: Callable[[], None] = lambda: None
        self.served = self.ended = False

    def is_silent(self) -> bool:
        """Returns whether it is open and nothing has come on it yet."""
        try:
            self.conn.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return not self.ended
        except OSError:
            pass
        return False

    def when_said(self, go: Callable[[], None], seconds: float) -> None:
        """Calls `go` when something comes on it or it is closed, and after `seconds` at the latest."""
        loop = asyncio.get_running_loop()

        def said() -> None:
            self._stop_listening()
            go()

        self._listens = True
        self.later = loop.call_later(seconds, said)
        loop.add_reader(self.conn.fileno(), said)

    def _stop_listening(self) -> None:
        if self.later is not None:
            self.later.cancel()
            self.later = None
        if self._listens:
            self._listens = False
            asyncio.get_running_loop().remove_reader(self.conn.fileno())

    def is_over(self) -> bool:
        """Returns whether it has ended, or was closed without a byte."""
        try:
            return self.ended or not self.conn.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def abort(self) -> None:
        if self.stream is not None:
            self.stream.abort()
        elif not self.ended:
            self.ended = True
            self._stop_listening()
            if not self.served:
                self.conn.close()
                self.over()


class Disconnector:
    """Ends connections over the daemon's control socket `path`. `request(peer)`: the bytes that ask for it."""

    def __init__(self, path: str, request: Callable[[str], bytes]) -> None:
        self._loop = asyncio.get_running_loop()
        self._path = path
        self._request = request
        self._conn: socket.socket | None = None
        self._asked: deque[str] = deque()
        self._came = b""

    @property
    def under_way(self) -> int:
        return len(self._asked)

    def end(self, peer: str) -> None:
        """Asks the daemon to end all connections to `peer`, unless that is under way already."""
        if peer in self._asked or len(self._asked) >= MAX_EXPELLED:
            return
        try:
            if self._conn is None:
                self._conn = self._connect()
            self._conn.send(self._request(peer))
        except OSError:  # the daemon is busy, or has ended
            return self.close()
        self._asked.append(peer)

    def _connect(self) -> socket.socket:
        conn = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            conn.setblocking(False)
            conn.connect(self._path)
        except OSError:
            conn.close()
            raise
        self._loop.add_reader(conn.fileno(), self._hear)
        return conn

    def _hear(self) -> None:
        """Reads the answers, which come in the order of the requests."""
        assert self._conn is not None
        try:
            came = self._conn.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            came = b""
        self._came += came
        try:
            while self._came and (found := message_span(self._came)) is not None:
                self._came = self._came[found[1] :]
                self._asked.popleft()
        except (ValueError, IndexError):
            came = b""
        if not came:
            self.close()

    def close(self) -> None:
        """Closes the connection; a later `end` opens another one."""
        conn, self._conn, self._came = self._conn, None, b""
        self._asked.clear()
        if conn is not None:
            with contextlib.suppress(ValueError):
                self._loop.remove_reader(conn.fileno())
            conn.close()
