"""A node's presence in a run: its announcement in the DHT, others' addresses, and a peer's sessions with the bootstrap nodes.

An announcement does not travel through the daemon: `Directory` writes ours and reads the others'. A session is one stream
to a bootstrap node: Hello, then messages both ways, a Beat at least every `heartbeat` seconds; when it breaks, it is opened
again with growing pauses, for ever, and the member machine tells again what matters. There is one with every operator's
node, so that whoever leads next knows what the one before knew.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import random
import time
from collections.abc import Awaitable, Callable, Sequence

from peer.events import Emitter
from peer.net.base import Stream, Transport
from protocol.errors import RemoteError
from protocol.identity import Identity
from protocol.run.manifest import Manifest
from protocol.wire import encoding, endpoints, sealed
from protocol.wire.announcement import VERSION, Announcement
from protocol.wire.commit import Record
from protocol.wire.encoding import Message
from protocol.wire.session import Ask, Beat, Finished, Hello, Mend, Offered

TTL_SECONDS = 60.0
PUBLISH_SECONDS = 5.0
RETRY_SECONDS = (0.5, 10.0)
OUTBOX = 256


class Directory:
    """Who is where: our announcement and everybody else's. `bootstrap`: addresses to begin with."""

    def __init__(
        self,
        manifest: Manifest,
        identity: Identity,
        transport: Transport,
        bootstrap: Sequence[str],
        announcement: Announcement,
    ) -> None:
        self.manifest = manifest
        self.announcement = announcement
        self.known: dict[str, Announcement] = {}
        self._identity = identity
        self._transport = transport
        self._bootstrap = tuple(bootstrap)
        self._reached: set[str] = set()

    def update(self, **fields: object) -> None:
        """Changes what the next announcement says."""
        self.announcement = dataclasses.replace(self.announcement, **fields)  # type: ignore[arg-type]

    async def announce(self) -> None:
        """Publishes the announcement, and again whenever it changed or a third of its life is over. Never returns."""
        published: Announcement | None = None
        published_at = 0.0
        while True:
            due = time.monotonic() - published_at > TTL_SECONDS / 3
            if self.announcement != published or due:
                published, published_at = self.announcement, time.monotonic()
                record = sealed.seal(self._identity, dataclasses.replace(published, serial=int(time.time() * 1000)))
                with contextlib.suppress(RemoteError):
                    key = endpoints.announcements_key(self.manifest.run_id)
                    await self._transport.store(key, self._transport.peer_id, record, ttl=TTL_SECONDS)
            await asyncio.sleep(PUBLISH_SECONDS)

    async def peers(self) -> list[str]:
        """Who is announced. Raises RemoteError."""
        await self.refresh()
        return list(self.known)

    async def refresh(self) -> None:
        """Reads the others' announcements. Raises RemoteError."""
        run = self.manifest.run_id
        records = await self._transport.get(endpoints.announcements_key(run))
        for subkey, record in records.items():
            announcement = sealed.unseal_announcement(record, subkey, run)
            if announcement is not None:
                self.known[subkey] = announcement

    async def reach(self, peer: str) -> None:
        """Connects to `peer`, once, at the addresses it announced or that we began with. Raises RemoteError."""
        if peer in self._reached:
            return
        addresses = [a for a in self._bootstrap if a.endswith(f"/p2p/{peer}")]
        if peer not in self.known and not addresses:
            await self.refresh()
        if peer in self.known:
            addresses += self.known[peer].addresses
        if not addresses:
            raise RemoteError(peer, f"peer {peer[-8:]}: no announcement in the DHT; it is tried again")
        await self._transport.connect(addresses, timeout=10.0)
        self._reached.add(peer)

    def lost(self, peer: str) -> None:
        """Forgets how `peer` was reached: it may come back elsewhere."""
        self._reached.discard(peer)
        self.known.pop(peer, None)

    async def connect(self) -> None:
        """Connects to any of the addresses that we began with, if there are any; failures are tried again by whoever needs it."""
        others = [a for a in self._bootstrap if not a.endswith(f"/p2p/{self._transport.peer_id}")]
        if others:
            with contextlib.suppress(RemoteError):
                await self._transport.connect(others, timeout=10.0)


class Sessions:
    """A peer's sessions. `on_message(message)` and `on_open()` are called in the event loop."""

    def __init__(self, directory: Directory, transport: Transport, emit: Emitter) -> None:
        self.directory = directory
        self.manifest = directory.manifest
        self._transport = transport
        self._emit = emit
        self._outboxes: dict[str, asyncio.Queue[Message]] = {}
        self._turns = itertools.count()
        self._stalled: set[str] = set()

    def tell(self, message: Message) -> None:
        """Queues a message for every bootstrap node, a request for one in turn; without a session it is dropped, and the
        machine sends it again later."""
        outboxes = list(self._outboxes.values())
        if isinstance(message, Ask) and outboxes:
            outboxes = [outboxes[next(self._turns) % len(outboxes)]]
        for outbox in outboxes:
            with contextlib.suppress(asyncio.QueueFull):
                outbox.put_nowait(message)

    async def run(
        self, on_message: Callable[[Message | Record], Awaitable[None]], on_open: Callable[[], Awaitable[None]]
    ) -> None:
        """Keeps the sessions open. Never returns."""
        async with asyncio.TaskGroup() as group:
            for operator in self.manifest.operators:
                group.create_task(self._session(operator, on_message, on_open))

    async def _session(
        self,
        node: str,
        on_message: Callable[[Message | Record], Awaitable[None]],
        on_open: Callable[[], Awaitable[None]],
    ) -> None:
        pause, upper = RETRY_SECONDS
        warned = False
        while True:
            try:
                await self.directory.reach(node)
                stream = await self._transport.open(node, endpoints.SESSION, timeout=10.0)
                try:
                    await stream.send(encoding.encode(Hello(run=self.manifest.run_id, version=VERSION)))
                    self._outboxes[node] = asyncio.Queue(OUTBOX)
                    pause, warned = RETRY_SECONDS[0], False
                    await on_open()
                    await self._talk(node, stream, self._outboxes[node], on_message)
                finally:
                    self._outboxes.pop(node, None)
                    await stream.close()
            except RemoteError as error:
                if not warned:
                    self._emit("warning", text=f"session with bootstrap node {node[-8:]}: {error}")
                    warned = True
            self.directory.lost(node)
            await self.directory.connect()
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(upper, pause * 2)

    async def _talk(
        self,
        node: str,
        stream: Stream,
        outbox: asyncio.Queue[Message],
        on_message: Callable[[Message | Record], Awaitable[None]],
    ) -> None:
        async def send() -> None:
            while True:
                try:
                    async with asyncio.timeout(self.manifest.timing.heartbeat):
                        message: Message = await outbox.get()
                except TimeoutError:
                    a = self.directory.announcement
                    message = Beat(phase=a.phase, round=a.round, step=a.step, loss=a.loss)
                await stream.send(encoding.encode(message))

        async def receive() -> None:
            while True:
                try:
                    async with asyncio.timeout(2 * self.manifest.timing.gone_after):
                        raw = await stream.recv()
                except TimeoutError:
                    raise RemoteError(node, "it is silent; dialling again") from None
                message = encoding.decode_any(bytes(raw), node)
                if isinstance(message, Beat):
                    self._watch(node, message)
                elif isinstance(message, Record | Finished | Offered | Mend):
                    await on_message(message)

        sender, receiver = asyncio.create_task(send()), asyncio.create_task(receive())
        try:
            done, _ = await asyncio.wait({sender, receiver}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (sender, receiver):
                task.cancel()
            await asyncio.gather(sender, receiver, return_exceptions=True)

    def _watch(self, node: str, beat: Beat) -> None:
        """Says once why nothing is decided."""
        if beat.phase != "stalled":
            self._stalled.discard(node)
        elif node not in self._stalled:
            self._stalled.add(node)
            text = f"bootstrap node {node[-8:]} hears too few of the others to decide round {beat.round}; the run waits"
            self._emit("warning", text=text)
