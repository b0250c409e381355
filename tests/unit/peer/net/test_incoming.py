"""What the daemon brings is checked before it is used, and a refused peer is expelled at little cost."""

from __future__ import annotations

import asyncio
import itertools
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from peer.net.incoming import (
    MAX_ACCEPTED,
    MAX_HEAD_BYTES,
    Disconnector,
    IncomingStream,
    StreamListener,
    StreamOrigin,
    message_span,
)

HEAD = b"\x05hello"


@pytest.fixture
def made() -> Iterator[Path]:
    """One whose path is short enough for a Unix socket."""
    with tempfile.TemporaryDirectory(dir="/tmp") as made:
        yield Path(made)


def read(raw: bytes) -> StreamOrigin:
    if raw == b"wrong":
        raise ValueError("wrong")
    return StreamOrigin(raw.decode(), "/ip4/203.0.113.5/tcp/1", "x")


def dial(path: Path) -> socket.socket:
    conn = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    conn.connect(str(path))
    conn.settimeout(10.0)
    return conn


async def until(wanted: Callable[[], bool]) -> None:
    while not wanted():
        await asyncio.sleep(0.001)


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"", None),
        (b"\x03ab", None),
        (b"\x03abc", (1, 4)),
        (b"\x03abcdef", (1, 4)),
        (b"\x80", None),
        (b"\x80\x01" + bytes(128), (2, 130)),
    ],
)
def test_a_head_is_whole_or_it_is_not(data: bytes, found: tuple[int, int] | None) -> None:
    assert message_span(data) == found


@pytest.mark.parametrize(
    "data", [b"\xff\xff\xff\xff", (MAX_HEAD_BYTES % 128 + 128).to_bytes() + (MAX_HEAD_BYTES // 128).to_bytes()]
)
def test_a_head_without_an_end_is_none(data: bytes) -> None:
    with pytest.raises(ValueError, match="head"):
        message_span(data)


async def test_streams_are_taken_a_few_at_a_time_and_what_is_refused_is_reset_unread(made: Path) -> None:
    came: list[tuple[StreamOrigin, socket.socket]] = []
    taken: list[int] = []
    entry = StreamListener(str(made / "s"), read, lambda who, conn, head: came.append((who, conn)))
    conns = [dial(made / "s") for _ in range(3 * MAX_ACCEPTED)]
    for conn in conns:
        conn.sendall(HEAD)
    while len(came) < len(conns):
        await asyncio.sleep(0)
        taken.append(len(came))
    assert max(b - a for a, b in itertools.pairwise(taken)) <= MAX_ACCEPTED
    assert {who.peer for who, _ in came} == {"hello"}
    came[0][1].close()
    with pytest.raises(ConnectionResetError):  # by which the daemon resets the stream, also of a silent peer
        conns[0].recv(1)
    assert came[1][1].recv(100) == HEAD, "what was looked at is still there"
    entry.close()
    for conn in (*conns, *(conn for _, conn in came)):
        conn.close()


async def test_a_head_that_comes_late_is_waited_for_and_one_that_is_wrong_is_not(made: Path) -> None:
    came: list[socket.socket] = []
    entry = StreamListener(str(made / "s"), read, lambda who, conn, head: came.append(conn))
    late, wrong, silent = (dial(made / "s") for _ in range(3))
    wrong.sendall(b"\x05wrong")
    late.sendall(HEAD[:3])
    assert await asyncio.to_thread(closed, wrong)
    late.sendall(HEAD[3:])
    await until(lambda: len(came) == 1)
    entry.close()
    assert await asyncio.to_thread(closed, silent), "and nothing is left open"
    for conn in (late, wrong, silent, *came):
        conn.close()


def closed(conn: socket.socket) -> bool:
    """Waits until the other end has closed it."""
    try:
        return conn.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_guest_is_a_bare_socket_until_it_is_served() -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    over: list[bool] = []
    guest = IncomingStream(ours)
    guest.over = lambda: over.append(True)
    assert not guest.is_over()
    theirs.close()
    assert guest.is_over(), "whoever opened it has closed it"
    guest.abort()
    guest.abort()
    assert (over, ours.fileno()) == ([True], -1)


async def test_who_says_nothing_is_heard_when_it_speaks_or_leaves_or_time_is_up(made: Path) -> None:
    told: list[str] = []
    pairs = {name: socket.socketpair() for name in ("speaks", "leaves", "neither", "ended")}
    guests = {}
    for name, (ours, _) in pairs.items():
        ours.setblocking(False)
        guests[name] = guest = IncomingStream(ours)
        assert guest.is_silent()
        guest.when_said(lambda name=name: told.append(name), 0.05 if name == "neither" else 60.0)  # type: ignore[misc]
    guests["ended"].abort()
    assert not guests["ended"].is_silent()
    assert pairs["ended"][0].fileno() == -1
    pairs["speaks"][1].send(b"a")
    pairs["leaves"][1].close()
    await until(lambda: len(told) == 3)
    assert sorted(told) == ["leaves", "neither", "speaks"], "each once, and not the one that ended"
    assert not guests["speaks"].is_silent()
    assert not guests["speaks"].is_over()
    assert not guests["leaves"].is_silent()
    assert guests["leaves"].is_over()
    assert guests["neither"].is_silent()
    pairs["neither"][1].send(b"a")
    await asyncio.sleep(0)
    assert len(told) == 3, "it is heard once"
    for guest in guests.values():
        guest.abort()
    for _, theirs in pairs.values():
        theirs.close()


async def test_one_is_expelled_over_one_connection_once_until_that_is_done(made: Path) -> None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(made / "s"))
    listener.listen()
    expelling = Disconnector(str(made / "s"), lambda peer: peer.encode())
    for peer in ("a", "b", "a", "a"):
        expelling.end(peer)
    conn, _ = listener.accept()
    assert conn.recv(100) == b"ab"
    conn.sendall(b"\x02ok")
    await until(lambda: expelling.under_way == 1)
    expelling.end("a")
    assert conn.recv(100) == b"a"
    conn.close()
    await until(lambda: expelling.under_way == 0)
    expelling.end("b")
    again, _ = listener.accept()
    assert again.recv(100) == b"b", "a daemon that has hung up is asked anew"
    for one in (again, listener):
        one.close()
    expelling.close()
