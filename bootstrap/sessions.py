"""The sessions of a run's peers with a bootstrap node: who has one, what waits to be sent, and when each peer was heard."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field

from peer.net.allowance import Allowance
from peer.net.base import REQUEST_SECONDS, SILENT_HEARTBEATS, Stream, answer
from peer.net.clock import Clock
from protocol.errors import RemoteError
from protocol.identity import short_peer
from protocol.run.manifest import Manifest
from protocol.wire import encoding
from protocol.wire.announcement import VERSION
from protocol.wire.encoding import Message
from protocol.wire.session import Hello

ANNOUNCED_PER_SECOND, ANNOUNCED_AT_ONCE = 0.5, 4.0
"""Announcements of one peer that are looked at."""
OUTBOX = 1024
"""Messages that wait for one peer; to somebody who does not read, later ones are dropped."""


@dataclass(slots=True)
class Session:
    """One peer's open stream; `outbox` is drained by the session's own task."""

    outbox: asyncio.Queue[bytes] = field(default_factory=lambda: asyncio.Queue(OUTBOX))
    announcements: Allowance = field(default_factory=lambda: Allowance(ANNOUNCED_PER_SECOND, ANNOUNCED_AT_ONCE))
    has_announced: bool = False

    def may_announce(self, all_of_them: Allowance, now: float) -> bool:
        """Whether an announcement is to be looked at; the first one is, whatever the allowance of all peers together."""
        first, self.has_announced = not self.has_announced, True
        return self.announcements.take(now) and (first or all_of_them.take(now))

    def post(self, raw: bytes) -> None:
        """Queues a message. One that finds no place is dropped: what matters is asked for or sent again."""
        with contextlib.suppress(asyncio.QueueFull):
            self.outbox.put_nowait(raw)

    @property
    def is_crowded(self) -> bool:
        """Whether only what decides something should be queued: commits must find space."""
        return self.outbox.qsize() >= OUTBOX // 2


class Sessions:
    """All of them. `heard`: when each peer gave its last sign of life, in steady seconds. `hear(peer, session, message)` is called with
    whatever a peer says, `opened(session)` once it has said who it is, `doubt(peer)` when it has been silent for some heartbeats, or
    begins anew."""

    def __init__(
        self,
        manifest: Manifest,
        clock: Clock,
        hear: Callable[[str, Session, Message], None],
        opened: Callable[[Session], None],
        doubt: Callable[[str], None],
    ) -> None:
        self.open: dict[str, Session] = {}
        self.heard: dict[str, float] = {}
        self._manifest = manifest
        self._clock = clock
        self._hear = hear
        self._opened = opened
        self._doubt = doubt
        self._silence = SILENT_HEARTBEATS * manifest.timing.heartbeat

    async def serve(self, stream: Stream) -> None:
        """One session, from Hello to its end."""
        peer = stream.remote
        hello = encoding.expect(Hello, encoding.decode(await stream.recv(timeout=REQUEST_SECONDS), peer), peer)
        if hello.run != self._manifest.run_id or hello.version != VERSION:
            raise RemoteError(peer, f"run {hello.run[:12]} version {hello.version} is not served here; check RUN")
        if peer in self.open:
            self._doubt(peer)  # it has moved: that session's connection is dead, and others would be opened on it
        session = Session()
        self.open[peer] = session
        self.heard[peer] = self._clock.steady()
        sender = asyncio.create_task(self._send(stream, session))
        try:
            self._opened(session)
            while True:
                message = encoding.decode(await answer(stream, self._doubt, silence=self._silence), peer)
                self.heard[peer] = self._clock.steady()
                self._hear(peer, session, message)
        finally:
            sender.cancel()
            if self.open.get(peer) is session:
                del self.open[peer]
            await asyncio.gather(sender, return_exceptions=True)

    async def _send(self, stream: Stream, session: Session) -> None:
        while True:
            await stream.send(await session.outbox.get())

    def forget(self, ready: Container[str]) -> None:
        """Forgets when those were heard who have no session and are not `ready`."""
        for peer in [p for p in self.heard if p not in self.open and p not in ready]:
            del self.heard[peer]

    def post(self, peers: Iterable[str], message: Message) -> None:
        """To those of `peers` who have a session."""
        raw = encoding.encode(message)
        for peer in peers:
            if peer in self.open:
                self.open[peer].post(raw)

    def post_all(self, raw: bytes) -> None:
        """To everybody who has a session."""
        for session in self.open.values():
            session.post(raw)


def unexpected(peer: str, where: str, message: object) -> encoding.MessageError:
    """For a message that has no place `where` it came."""
    return encoding.MessageError(peer, f"{where} of {short_peer(peer)}: unexpected {type(message).__name__}")
