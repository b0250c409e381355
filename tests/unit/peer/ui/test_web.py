"""The monitor's server: what it answers, and what it does not; and that its page runs nothing but its own script."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import io
import json
import re
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import segno

from peer.ui import web
from peer.ui.state import state
from peer.ui.web import CachedAnswer, Server, answer, read_where
from protocol.errors import UsageError
from tests.support.state import watched
from tests.support.watched import MadeUp

DEADLINE = 30.0


@contextlib.contextmanager
def serving(**options: float) -> Iterator[Server]:
    paths: web.Paths = {
        "/": lambda query: web.page(),
        "/state.json": lambda query: answer("application/json", json.dumps({"name": "x" * 5000})),
        "/sample": lambda query: answer("text/plain", query, status=503),
    }
    with Server(("127.0.0.1", 0), paths, **options) as server:  # type: ignore[arg-type]
        yield server


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as found:
        yield found


def port(server: Server) -> int:
    return int(server.server_address[1])


def ask(server: Server, path: str, method: str = "GET", **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
    line = http.client.HTTPConnection("127.0.0.1", port(server), timeout=DEADLINE)
    try:
        line.request(method, path, headers=headers)
        reply = line.getresponse()
        return reply, reply.read()
    finally:
        line.close()


def raw(server: Server, sent: bytes) -> bytes:
    """All that comes back, until the server closes."""
    with socket.create_connection(("127.0.0.1", port(server)), DEADLINE) as line:
        got = b""
        with contextlib.suppress(ConnectionError):
            line.sendall(sent)
            while part := line.recv(65536):
                got += part
        return got


def answered(server: Server) -> int | None:
    """The status of the first answer that is not refused for want of connections."""
    end = time.monotonic() + DEADLINE
    while time.monotonic() < end:
        with contextlib.suppress(ConnectionError, http.client.HTTPException):
            return ask(server, "/", "HEAD")[0].status
    return None


def test_the_page_and_the_state(server: Server) -> None:
    page, text = ask(server, "/")
    assert (page.status, page.getheader("Content-Type")) == (200, "text/html; charset=utf-8")
    assert text == web.PAGE.read_bytes()
    state, plain = ask(server, "/state.json?now")
    assert (state.status, state.getheader("Content-Type")) == (200, "application/json")
    small, packed = ask(server, "/state.json", **{"Accept-Encoding": "br, gzip"})
    assert small.getheader("Content-Encoding") == "gzip"
    assert gzip.decompress(packed) == plain
    assert len(packed) == int(small.getheader("Content-Length") or 0) < len(plain) / 10
    head, nothing = ask(server, "/state.json", "HEAD")
    assert (head.status, nothing) == (200, b"")
    assert head.getheader("Content-Length") == str(len(plain))


def test_an_answer_to_a_query_has_a_status_of_its_own(server: Server) -> None:
    reply, text = ask(server, "/sample?text=a%20b?c")
    assert (reply.status, text) == (503, b"text=a%20b?c")


@pytest.mark.parametrize("path", ["/favicon.ico", "/../state.json", "/state.json/", "/metrics", "/%2e%2e/etc/passwd"])
def test_other_paths_are_not_there(server: Server, path: str) -> None:
    reply, text = ask(server, path)
    assert (reply.status, text) == (404, b"404 Not Found\n")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT", "<SCRIPT>"])
def test_other_methods_are_refused(server: Server, method: str) -> None:
    reply = raw(server, f"{method} / HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    assert reply.startswith(b"HTTP/1.0 501 ")
    assert b"SCRIPT" not in reply


@pytest.mark.parametrize(
    "sent",
    [
        b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / nonsense\r\n\r\n",
        b"\x00\xff\xfe\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\n\n",
        b"GET /<script> HTTP/1.1\r\n" + b"a: b\r\n" * 500 + b"\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\xff: \r\n\r\n",
    ],
)
def test_what_is_no_request_does_no_harm(server: Server, sent: bytes) -> None:
    reply = raw(server, sent)
    assert b"<script" not in reply.split(b"\r\n\r\n")[0]
    assert ask(server, "/state.json")[0].status == 200


def test_a_request_has_a_size(server: Server) -> None:
    assert raw(server, b"GET /" + b"a" * (1 << 20) + b" HTTP/1.1\r\n\r\n") == b""
    assert raw(server, b"GET / HTTP/1.1\r\n" + b"a: " + b"b" * (1 << 20) + b"\r\n\r\n") == b""
    assert ask(server, "/state.json")[0].status == 200


def test_who_sends_slowly_is_cut_off_though_bytes_come() -> None:
    """A byte now and then does not keep a connection."""
    with (
        serving(request_seconds=0.5) as server,
        socket.create_connection(("127.0.0.1", port(server)), DEADLINE) as line,
    ):
        line.settimeout(0.05)
        end = time.monotonic() + DEADLINE
        closed = False
        while not closed and time.monotonic() < end:
            try:
                line.sendall(b"G")
                closed = line.recv(1) == b""
            except TimeoutError:
                continue
            except ConnectionError:
                closed = True
        assert closed


def test_who_does_not_read_is_cut_off() -> None:
    """His thread ends, and with one connection allowed the next one is answered."""
    large = answer("text/plain", "".join(chr(33 + i % 90) for i in range(20_000_000)))
    with (
        Server(("127.0.0.1", 0), {"/": lambda query: large}, most=1, answer_seconds=0.5) as server,
        socket.create_connection(("127.0.0.1", port(server)), DEADLINE) as line,
    ):
        line.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert line.recv(16)
        assert answered(server) == 200


def test_a_flood_of_connections_is_closed_and_those_who_wait_are_answered() -> None:
    with serving(most=4, request_seconds=DEADLINE) as server:
        lines = [socket.create_connection(("127.0.0.1", port(server)), DEADLINE) for _ in range(40)]
        try:
            closed, kept = 0, []
            for line in lines[4:]:
                with contextlib.suppress(ConnectionError):
                    assert line.recv(1) == b""
                closed += 1
            for line in lines[:4]:
                line.sendall(b"HEAD /state.json HTTP/1.1\r\n\r\n")
                kept.append(line.recv(12))
            assert closed == 36
            assert kept == [b"HTTP/1.0 200"] * 4
        finally:
            for line in lines:
                line.close()
        assert answered(server) == 200


def test_a_thousand_visitors_cost_one() -> None:
    made, told, now = 0, 0, 100.0

    def make() -> str:
        nonlocal made
        made += 1
        return str(made)

    fresh = CachedAnswer("text/plain", make, lambda: told, lambda: now)
    asking = [threading.Thread(target=fresh) for _ in range(50)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert (made, fresh().plain) == (1, b"1")
    told += 1
    assert fresh().plain == b"1", "that is not old enough"
    now += web.FRESH_SECONDS
    assert [fresh().plain, fresh().plain] == [b"2", b"2"]
    now += web.FRESH_SECONDS
    assert fresh().plain == b"2", "nothing has happened since"
    now += web.SAME_SECONDS - web.FRESH_SECONDS
    assert fresh().plain == b"3"


def test_the_page_needs_nothing_else_and_runs_nothing_else(server: Server) -> None:
    text = web.PAGE.read_text(encoding="utf-8")
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text), "no other host"
    for word in [
        "innerHTML",
        "outerHTML",
        "insertAdjacent",
        "document.write",
        "eval(",
        "Function(",
        "srcdoc",
        "style=",
    ]:
        assert word not in text
    assert not re.search(r"<[^>]*\son\w+=", text), "no handlers in markup: the policy would not let them run"
    policy = ask(server, "/")[0].getheader("Content-Security-Policy") or ""
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert len(re.findall(r"'sha256-[\w+/=]{44}'", policy)) == 2, "of the script and the style"
    other = ask(server, "/state.json")[0]
    assert "default-src 'none'" in (other.getheader("Content-Security-Policy") or "")
    assert other.getheader("X-Content-Type-Options") == "nosniff"


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("8080", ("127.0.0.1", 8080)),
        ("0.0.0.0:80", ("0.0.0.0", 80)),
        ("[::1]:80", ("::1", 80)),
        ("localhost:0", ("localhost", 0)),
    ],
)
def test_where_it_listens(text: str, where: tuple[str, int]) -> None:
    assert read_where(text, "--web") == where


@pytest.mark.parametrize("text", ["", "x", "1:", ":80", "-1", "65536", "0.0.0.0", "８０"])
def test_where_it_cannot_listen(text: str) -> None:
    with pytest.raises(UsageError, match="--web"):
        read_where(text, "--web")


def test_the_page_of_a_run_has_a_code_of_the_line_to_join_where_anybody_may() -> None:
    one = watched(MadeUp(5), 2)
    asked = web.site(lambda: state(one, 0.0), lambda: one.join_line)
    assert asked["/join.svg"]().plain == b'<svg xmlns="http://www.w3.org/2000/svg"/>'
    for line in ("/ip4/203.0.113.5/tcp/31330/p2p/a#" + "b" * 64, "/dns4/run.example.org/tcp/31330/p2p/a#" + "b" * 64):
        one.join_line = line
        drawn = web.site(lambda: state(one, 0.0), lambda: 0)["/join.svg"]()
        assert (drawn.kind, drawn.policy) == ("image/svg+xml", "default-src 'none'; frame-ancestors 'none'")
        assert drawn.plain.decode() == code(f"potluck join {line}")
        assert len(drawn.compressed) < 4000
    one.is_open = False
    assert b"path" not in web.site(lambda: state(one, 0.0), lambda: 0)["/join.svg"]().plain


def code(text: str) -> str:
    """A QR code of this text."""
    out = io.BytesIO()
    segno.make_qr(text, error="l").save(out, kind="svg", light="#fff", omitsize=True, xmldecl=False)
    return out.getvalue().decode()


def test_a_port_that_is_taken_is_one_line(server: Server) -> None:
    with pytest.raises(UsageError, match=r"127\.0\.0\.1 port \d+: .*in use; give"):
        Server(("127.0.0.1", port(server)), {})
    with pytest.raises(UsageError, match="give an address"):
        Server(("192.0.2.1", 80), {})
