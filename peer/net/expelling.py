"""Ends the connections of those who are refused, over one connection to the network daemon's control socket that is kept.

Whoever is refused may come back at once, as often as it likes: so this has to cost us less than it costs them.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Callable

from peer.net.entry import whole

AT_ONCE = 64
"""Peers whose connections are being ended; of others it is asked when they come again."""


class Expelling:
    """`path`: of the daemon's control socket; `request(peer)`: the bytes that ask it to end all connections to `peer`."""

    def __init__(self, path: str, request: Callable[[str], bytes]) -> None:
        self._loop = asyncio.get_running_loop()
        self._path = path
        self._request = request
        self._conn: socket.socket | None = None
        self._asked: deque[str] = deque()
        self._came = b""

    @property
    def under_way(self) -> int:
        """How many peers' connections are being ended."""
        return len(self._asked)

    def end(self, peer: str) -> None:
        """Asks for it, unless that is under way already."""
        if peer in self._asked or len(self._asked) >= AT_ONCE:
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
        """An answer for each that was asked for, in that order."""
        assert self._conn is not None
        try:
            came = self._conn.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            came = b""
        self._came += came
        try:
            while self._came and (found := whole(self._came)) is not None:
                self._came = self._came[found[1] :]
                self._asked.popleft()
        except (ValueError, IndexError):
            came = b""
        if not came:
            self.close()

    def close(self) -> None:
        """Forgets what was asked; a later `end` begins anew."""
        conn, self._conn, self._came = self._conn, None, b""
        self._asked.clear()
        if conn is not None:
            with contextlib.suppress(ValueError):
                self._loop.remove_reader(conn.fileno())
            conn.close()
