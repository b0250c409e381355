"""A peer has one session with a node, however many it opens at once (bootstrap/sessions.py)."""

from __future__ import annotations

import asyncio

import pytest

from bootstrap.sessions import Sessions
from peer.net.base import Timeout
from peer.net.guests import Guests
from protocol.errors import RemoteError
from protocol.wire import encoding
from protocol.wire.announcement import VERSION
from protocol.wire.session import Hello, NotAdmitted
from tests.support import tiny
from tests.support.moved import M, virtual_clock


class SlowStream:
    """It says Hello and is silent then. Ending it takes a while, as it does where the other side has vanished."""

    name = "session"
    received = 0

    def __init__(self, peer: str, version: int = VERSION) -> None:
        self.remote = peer
        self.closed = asyncio.Event()
        self.sent: list[bytes] = []
        self._hello = [encoding.encode(Hello(run=M.run_id, version=version))]

    async def send(self, *parts: bytes | memoryview, timeout: float = 1.0) -> None:
        self.sent += [bytes(part) for part in parts]

    async def recv(self, limit: int = 0, *, timeout: float | None = None) -> bytes:
        if self._hello:
            return self._hello.pop()
        try:
            await asyncio.wait_for(self.closed.wait(), timeout)
        except TimeoutError:
            raise Timeout(self.remote, "silent") from None
        raise RemoteError(self.remote, "ended")

    async def finish(self) -> None: ...

    async def close(self) -> None:
        await asyncio.sleep(0)
        self.closed.set()


class Host:
    """What sessions need of a transport."""

    def __init__(self) -> None:
        self.guests = Guests()
        self.doubted: list[str] = []

    def doubt(self, peer: str) -> None:
        self.doubted.append(peer)

    def seen_at(self, peer: str) -> str:
        return ""


async def test_of_sessions_that_are_opened_at_once_each_ends_the_one_before() -> None:
    async def hear(*said: object) -> None: ...

    host = Host()
    sessions = Sessions(M, virtual_clock(), hear, lambda session: None, host)  # type: ignore[arg-type]
    streams = [SlowStream(tiny.OPERATOR.peer_id) for _ in range(4)]
    serving = [asyncio.create_task(sessions.serve(stream)) for stream in streams[:1]]
    while not sessions.open:
        await asyncio.sleep(0)
    serving += [asyncio.create_task(sessions.serve(stream)) for stream in streams[1:]]
    async with asyncio.timeout(10):
        while sum(task.done() for task in serving) < 3:
            await asyncio.sleep(0)
    assert [stream.closed.is_set() for stream in streams] == [True, True, True, False]
    assert list(sessions.open) == [tiny.OPERATOR.peer_id]
    await streams[-1].close()
    await asyncio.gather(*serving, return_exceptions=True)
    assert not sessions.open


async def test_a_peer_of_another_version_is_told_which_one_the_node_speaks() -> None:
    async def hear(*said: object) -> None: ...

    sessions = Sessions(M, virtual_clock(), hear, lambda session: None, Host())  # type: ignore[arg-type]
    stream = SlowStream(tiny.OPERATOR.peer_id, VERSION + 1)
    with pytest.raises(RemoteError, match="its session was refused"):
        await sessions.serve(stream)  # type: ignore[arg-type]
    (raw,) = stream.sent
    word = encoding.expect(NotAdmitted, encoding.decode(raw, "node"), "node")
    assert (word.version, word.waits) == (VERSION, False)
