"""Web server of `potluck monitor`: a page, `/state.json`, `/join.svg`, `/sample` and `/metrics`, for untrusted clients.

It answers only GET and HEAD of these paths. Requests, answers and connections are limited in size, time and number. An
answer is made at most once in FRESH_SECONDS, and once in SAME_SECONDS if nothing has happened.
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
from typing import Any

from peer.ui.state import State, to_json
from protocol.errors import UsageError

PAGE = Path(__file__).parent.parent / "assets" / "monitor.html"
MOST_CONNECTIONS = 64
REQUEST_BYTES = 8 * 1024
REQUEST_SECONDS = 5.0
ANSWER_SECONDS = 10.0
FRESH_SECONDS, SAME_SECONDS = 2.0, 10.0
"""Age of an answer at which it is made again, if something has happened since, and if not."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a path."""

    kind: str
    """Media type."""
    plain: bytes
    compressed: bytes
    """gzip."""
    policy: str
    """Content security policy."""
    status: int = 200
    """HTTP status."""


def answer(
    kind: str, text: str, policy: str = "default-src 'none'; frame-ancestors 'none'", status: int = 200
) -> Answer:
    """Makes an answer of a text."""
    raw = text.encode("utf-8", "replace")
    return Answer(kind, raw, gzip.compress(raw, 5, mtime=0), policy, status)


class CachedAnswer:
    """An answer to any query, made again when it is requested and too old. Any thread may call it.

    version: returns another value after something has happened.
    """

    def __init__(
        self,
        kind: str,
        make: Callable[[], str],
        version: Callable[[], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kind, self._make, self._version, self._clock = kind, make, version, clock
        self._lock = threading.Lock()
        self._made: tuple[float, object, Answer] | None = None

    def __call__(self, query: str = "") -> Answer:
        with self._lock:
            now = self._version()
            if self._made is not None:
                at, version, made = self._made
                if self._clock() < at + (SAME_SECONDS if now == version else FRESH_SECONDS):
                    return made
            made = answer(self._kind, self._make())
            self._made = self._clock(), now, made
            return made


def page(*, samples: bool = False) -> Answer:
    """The page. Its policy allows its own script and style, and requests to this server. samples: with the text box."""
    text = PAGE.read_text(encoding="utf-8")
    if samples:
        text = text.replace('<div id="try" hidden>', '<div id="try">')
    script, style = (_digests(text, name) for name in ("script", "style"))
    policy = (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self';"
        " img-src 'self' data:;"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return answer("text/html; charset=utf-8", text, policy=policy)


def _digests(text: str, element: str) -> str:
    """Sources for a policy: hashes of the contents of such elements."""
    inner = re.findall(rf"<{element}>(.*?)</{element}>", text, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(x.encode()).digest()).decode()}'" for x in inner)


def join_code(state: State) -> str:
    """The command to join as a QR code in SVG; an empty picture if anybody may not."""
    import segno

    if not state.about.join_line:
        return '<svg xmlns="http://www.w3.org/2000/svg"/>'
    made, out = segno.make_qr(f"potluck join {state.about.join_line}", error="l"), io.BytesIO()
    made.save(out, kind="svg", light="#fff", omitsize=True, xmldecl=False)
    return out.getvalue().decode()


Paths = Mapping[str, Callable[[str], Answer]]
"""Answers by path; they take the URL's query."""


def site(
    state: Callable[[], State], version: Callable[[], object], sample: Callable[[str], Answer] | None = None
) -> Paths:
    """The page and what it asks for. version: as of CachedAnswer; sample: continues the text of a query."""
    shown = page(samples=sample is not None)
    return ({} if sample is None else {"/sample": sample}) | {
        "/": lambda query: shown,
        "/state.json": CachedAnswer("application/json", lambda: to_json(state()), version),
        "/join.svg": CachedAnswer("image/svg+xml", lambda: join_code(state()), version),
    }


class _Handler(BaseHTTPRequestHandler):
    server: Server
    server_version, sys_version = "potluck", ""

    def setup(self) -> None:
        """Reads the whole head of the request within its limits, so that nothing waits for input later."""
        head, end = b"", time.monotonic() + self.server.request_seconds
        while b"\r\n\r\n" not in head and b"\n\n" not in head:
            left = end - time.monotonic()
            if left <= 0 or len(head) > REQUEST_BYTES:
                raise TimeoutError
            self.request.settimeout(left)
            got = self.request.recv(REQUEST_BYTES + 1 - len(head))
            if not got:
                raise ConnectionResetError
            head += got
        self.request.settimeout(self.server.answer_seconds)
        super().setup()
        self.rfile = io.BytesIO(head)  # type: ignore[assignment]

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        make = self.server.paths.get(path)
        if make is None:
            return self.send_error(404)
        found = make(query)
        small = "gzip" in (self.headers.get("Accept-Encoding") or "")
        data = found.compressed if small else found.plain
        self.send_response(found.status)
        self._head(found.kind, len(data), found.policy)
        self.send_header("Vary", "Accept-Encoding")
        if small:
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    do_HEAD = do_GET

    def _head(self, kind: str, length: int, policy: str) -> None:
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(length))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", policy)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Connection", "close")

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answers with a line that repeats nothing of the request."""
        text = f"{int(code)} {self.responses.get(code, ('refused', ''))[0]}\n".encode()
        self.send_response(code, "")
        self._head("text/plain", len(text), "default-src 'none'")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing."""


class Server(socketserver.ThreadingTCPServer):
    """Serves `paths` at an address in threads, within a `with` block. Raises UsageError if the address is unusable."""

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
        """URL of the root."""
        host, port = self.server_address[:2]
        return f"http://[{host!s}]:{port}/" if ":" in str(host) else f"http://{host!s}:{port}/"

    def __enter__(self) -> Server:
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.2}, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handles a connection in a thread; closes it if there are too many."""
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
        """Ignores clients that are gone or too slow."""


def read_where(text: str, option: str) -> tuple[str, int]:
    """Parses `PORT` or `HOST:PORT`. Raises UsageError."""
    host, mark, port = text.rpartition(":")
    if not port.isascii() or not port.isdigit() or int(port) > 65535 or (mark and not host):
        raise UsageError(f"{option} {text}: neither a port nor HOST:PORT; write it as 8080 or 0.0.0.0:8080")
    return host.strip("[]") or "127.0.0.1", int(port)
