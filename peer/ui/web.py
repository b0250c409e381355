"""Serves what a monitor knows to browsers: a page, `/state.json`, `/metrics`. Whoever asks may be an enemy, and there may be thousands.

Only GET and HEAD of the paths that are served get an answer. A request has 8 KiB and five seconds, an answer ten; so many connections
are open at once, and more are closed. Every connection has one request. An answer is made once in two seconds at most, whoever asks, and
once in ten where nothing happens.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import re
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import TracebackType
from typing import Any

from protocol.errors import UsageError

PAGE = Path(__file__).parent.parent / "assets" / "monitor.html"
MOST_CONNECTIONS = 64
MOST_REQUEST = 8 * 1024
"""Bytes of a request's line and headers."""
REQUEST_SECONDS = 5.0
ANSWER_SECONDS = 10.0
FRESH_SECONDS, SAME_SECONDS = 2.0, 10.0
"""How old an answer may be, where something has happened since, and where nothing has."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a path gives: its type, its text as it is and compressed, and what a page may load (a CSP)."""

    kind: str
    plain: bytes
    small: bytes
    policy: str = "default-src 'none'; frame-ancestors 'none'"


def answer(kind: str, text: str, **fields: str) -> Answer:
    """An answer with this text."""
    raw = text.encode("utf-8", "replace")
    return Answer(kind, raw, gzip.compress(raw, 5, mtime=0), **fields)


class Fresh:
    """An answer that is made anew when it is asked for and too old. `told()`: differs when something has happened. Any thread may ask."""

    def __init__(
        self,
        kind: str,
        make: Callable[[], str],
        told: Callable[[], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kind, self._make, self._told, self._clock = kind, make, told, clock
        self._lock = threading.Lock()
        self._made: tuple[float, object, Answer] | None = None

    def __call__(self) -> Answer:
        with self._lock:
            told = self._told()
            if self._made is None or self._clock() >= self._made[0] + (
                SAME_SECONDS if told == self._made[1] else FRESH_SECONDS
            ):
                made = answer(self._kind, self._make())
                self._made = self._clock(), told, made
            return self._made[2]


def page() -> Answer:
    """The page, which may run its own script, have its own style, and ask this server; nothing else."""
    text = PAGE.read_text(encoding="utf-8")
    script, style = (_digests(text, name) for name in ("script", "style"))
    policy = (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; img-src data:;"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return answer("text/html; charset=utf-8", text, policy=policy)


def _digests(text: str, element: str) -> str:
    """Of what stands within such elements, as a policy names it."""
    inner = re.findall(rf"<{element}>(.*?)</{element}>", text, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(x.encode()).digest()).decode()}'" for x in inner)


Paths = Mapping[str, Callable[[], Answer]]
"""What is served under which path."""


class _Handler(BaseHTTPRequestHandler):
    """One request of one connection."""

    server: Server
    server_version, sys_version = "potluck", ""

    def setup(self) -> None:
        """Reads the whole head of the request at once, within its bounds, so that nothing afterwards waits for more."""
        head, end = b"", time.monotonic() + self.server.request_seconds
        while b"\r\n\r\n" not in head and b"\n\n" not in head:
            left = end - time.monotonic()
            if left <= 0 or len(head) > MOST_REQUEST:
                raise TimeoutError
            self.request.settimeout(left)
            got = self.request.recv(MOST_REQUEST + 1 - len(head))
            if not got:
                raise ConnectionResetError
            head += got
        self.request.settimeout(self.server.answer_seconds)
        super().setup()
        self.rfile = io.BytesIO(head)  # type: ignore[assignment]

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def _answer(self, *, body: bool) -> None:
        make = self.server.paths.get(self.path.partition("?")[0])
        if make is None:
            return self.send_error(404)
        found = make()
        small = "gzip" in (self.headers.get("Accept-Encoding") or "")
        data = found.small if small else found.plain
        self.send_response(200)
        self._head(found.kind, len(data), found.policy)
        self.send_header("Vary", "Accept-Encoding")
        if small:
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        if body:
            self.wfile.write(data)

    def _head(self, kind: str, length: int, policy: str) -> None:
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(length))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", policy)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Connection", "close")

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """A line that repeats nothing of what was sent."""
        text = f"{int(code)} {self.responses.get(code, ('refused', ''))[0]}\n".encode()
        self.send_response(code, "")
        self._head("text/plain", len(text), "default-src 'none'")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        """Nobody reads it."""


class Server(socketserver.ThreadingTCPServer):
    """Serves `paths` at an address, on threads of its own, within a `with` block. Raises UsageError where nobody can listen there."""

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(
        self,
        where: tuple[str, int],
        paths: Paths,
        most: int = MOST_CONNECTIONS,
        request_seconds: float = REQUEST_SECONDS,
        answer_seconds: float = ANSWER_SECONDS,
    ) -> None:
        self.paths = paths
        self.request_seconds, self.answer_seconds = request_seconds, answer_seconds
        self._free = threading.BoundedSemaphore(most)
        self.address_family = socket.AF_INET6 if ":" in where[0] else socket.AF_INET
        try:
            super().__init__(where, _Handler)
        except (OSError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise UsageError(
                f"{where[0]} port {where[1]}: {reason}; give an address and port of this machine"
            ) from None

    @property
    def url(self) -> str:
        """Of its root."""
        host, port = self.server_address[:2]
        return f"http://[{host!s}]:{port}/" if ":" in str(host) else f"http://{host!s}:{port}/"

    def __enter__(self) -> Server:
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.2}, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """On a thread of its own; where there are enough of them, not at all."""
        if not self._free.acquire(blocking=False):
            return self.shutdown_request(request)
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Whoever went away, or was too slow, is nobody's error."""


def read_where(text: str, option: str) -> tuple[str, int]:
    """`PORT` or `HOST:PORT` as a person gives it. Raises UsageError."""
    host, mark, port = text.rpartition(":")
    if not port.isascii() or not port.isdigit() or int(port) > 65535 or (mark and not host):
        raise UsageError(f"{option} {text}: neither a port nor HOST:PORT; give such as 8080 or 0.0.0.0:8080")
    return host.strip("[]") or "127.0.0.1", int(port)
