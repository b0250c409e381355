"""A peer's sessions with the bootstrap nodes.

A session is one stream to a bootstrap node: Hello, then messages both ways, a Heartbeat at least every `heartbeat` seconds. When it
breaks, or nobody answers on its connection any more, it is opened again with growing pauses, for ever, and the member machine tells
again what matters. There is one with every present operator's node, so that whoever leads next knows what the one before knew, and hears
from us what we announce.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import Awaitable, Callable

from peer import events
from peer.net.base import SILENT_HEARTBEATS, Stream, Timeout, answer
from peer.net.keeping import Keeping
from peer.net.network import Network
from peer.node.refusals import Refusals
from protocol.errors import RemoteError
from protocol.identity import short_peer
from protocol.wire import encoding, endpoints
from protocol.wire.announcement import VERSION
from protocol.wire.commit import Record
from protocol.wire.decree import Joined
from protocol.wire.encoding import Message
from protocol.wire.session import (
    Announced,
    ChainReconfig,
    Finished,
    Heartbeat,
    Hello,
    Leave,
    LogRequest,
    NotAdmitted,
    Offered,
    TakeSeat,
    TimeUp,
)

RETRY_SECONDS = (0.5, 10.0)
LAST_WORD_SECONDS = 1.0
"""That a node's last word may take after the session has ended for who sends."""
LEAVE_SECONDS = 2.0
"""That it may take to tell the nodes that this peer leaves."""
OUTBOX = 256


class NotTaken(RemoteError):
    """A node says that this peer may not take part in the run, or not yet; `word` is what it said."""

    def __init__(self, peer: str, message: str, word: NotAdmitted) -> None:
        super().__init__(peer, message)
        self.word = word


class Sessions:
    """A peer's sessions. `on_message(message)` and `on_open()` are called in the event loop. `joining`: by which invitation it comes in. `refusals`
    hears which nodes refuse this peer."""

    def __init__(self, network: Network, joining: Joined | None = None, refusals: Refusals | None = None) -> None:
        self.directory = network.directory
        self.manifest = network.directory.manifest
        self._transport = network.transport
        self._emit = network.emit
        self._joining = joining
        self._refusals = refusals
        self._outboxes: dict[str, asyncio.Queue[Message]] = {}
        self._turns = itertools.count()
        self._keeping: Keeping | None = None
        self._leaves = False
        self._followed = self.directory.operators
        self._stalled: set[str] = set()

    def tell(self, message: Message) -> None:
        """Queues a message for every bootstrap node, a request for one in turn; without a session it is dropped, and the
        machine sends it again later."""
        outboxes = list(self._outboxes.values())
        if isinstance(message, LogRequest) and outboxes:
            outboxes = [outboxes[next(self._turns) % len(outboxes)]]
        for outbox in outboxes:
            with contextlib.suppress(asyncio.QueueFull):
                outbox.put_nowait(message)

    async def leave(self) -> bool:
        """Tells every node that this peer leaves; no session is opened any more. Whether one of them was told: sending may take LEAVE_SECONDS."""
        self._leaves = True
        outboxes = list(self._outboxes.values())
        self.tell(Leave())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_SECONDS):
                await asyncio.gather(*(outbox.join() for outbox in outboxes))
        return self.is_open

    async def run(
        self, on_message: Callable[[Message | Record], Awaitable[None]], on_open: Callable[[], Awaitable[None]]
    ) -> None:
        """Keeps the sessions open. Never returns."""
        self._keeping = Keeping(
            lambda: self.directory.operators, lambda operator: self._session(operator, on_message, on_open)
        )
        await self._keeping.run()

    @property
    def is_open(self) -> bool:
        """Whether there is one."""
        return bool(self._outboxes)

    def follow(self) -> None:
        """The directory knows other operators than before, perhaps."""
        if self.directory.operators != self._followed:
            self._followed = self.directory.operators
            if self._keeping is not None:
                self._keeping.changed.set()

    async def _session(
        self,
        node: str,
        on_message: Callable[[Message | Record], Awaitable[None]],
        on_open: Callable[[], Awaitable[None]],
    ) -> None:
        pause, upper = RETRY_SECONDS
        warned, refused = False, ""
        while True:
            try:
                await self.directory.reach(node)
                stream = await self._transport.open(node, endpoints.SESSION, timeout=10.0)
                try:
                    hello = Hello(run=self.manifest.run_id, version=VERSION, joining=self._joining)
                    await stream.send(encoding.encode(hello))
                    self._outboxes[node] = asyncio.Queue(OUTBOX)
                    if self.directory.sealed:
                        self._outboxes[node].put_nowait(Announced(sealed=self.directory.sealed))
                    if self._leaves:
                        self._outboxes[node].put_nowait(Leave())
                    await on_open()

                    def taken() -> None:
                        nonlocal pause, warned, refused
                        pause, warned, refused = RETRY_SECONDS[0], False, ""
                        if self._refusals is not None:
                            self._refusals.taken(node)

                    await self._talk(node, stream, on_message, taken)
                finally:
                    self._outboxes.pop(node, None)
                    await stream.close()
            except NotTaken as error:
                if str(error) != refused:
                    refused = str(error)
                    self._emit(events.Warning(text=f"bootstrap node {short_peer(node)}: {error}"))
                if self._refusals is not None:
                    self._refusals.refused(node, error.word)
                pause, warned = upper, True  # between two refusals its link may break, which is no news
            except RemoteError as error:
                if not warned:
                    self._emit(events.Warning(text=f"session with bootstrap node {short_peer(node)}: {error}"))
                    warned = True
            if self._leaves:
                await asyncio.Event().wait()  # no session is opened any more
            self.directory.lost(node)
            await self.directory.connect()
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(upper, pause * 2)

    async def _talk(
        self,
        node: str,
        stream: Stream,
        on_message: Callable[[Message | Record], Awaitable[None]],
        taken: Callable[[], None],
    ) -> None:
        """Until the session breaks. `taken()`: it is one, and the node has not refused it. Raises RemoteError, NotTaken."""
        outbox = self._outboxes[node]

        async def send() -> None:
            while True:
                try:
                    async with asyncio.timeout(self.manifest.timing.heartbeat):
                        message: Message = await outbox.get()
                except TimeoutError:
                    a = self.directory.announcement
                    beat = Heartbeat(phase=a.phase, round=a.round, step=a.step, loss=a.loss)
                    await stream.send(encoding.encode(beat))
                    continue
                await stream.send(encoding.encode(message))
                outbox.task_done()

        async def receive() -> None:
            while True:
                message = encoding.decode_any(await self._next(node, stream), node)
                if isinstance(message, NotAdmitted):
                    refused = f"it takes no work of ours: {message.reason}; ask the run's operators"
                    raise NotTaken(node, message.reason if message.waits else refused, message)
                taken()
                if isinstance(message, Heartbeat):
                    self._watch(node, message)
                elif isinstance(message, Record | Finished | Offered | ChainReconfig | TimeUp | TakeSeat):
                    if isinstance(message, Record) and message.commit.plan is not None:
                        self.directory.planned(message.commit.plan)
                    await on_message(message)

        sender, receiver = asyncio.create_task(send()), asyncio.create_task(receive())
        try:
            await asyncio.wait({sender, receiver}, return_when=asyncio.FIRST_COMPLETED)
            if not receiver.done():  # a node that refuses us says why before it ends the stream
                await asyncio.wait({receiver}, timeout=LAST_WORD_SECONDS)
            for task in (receiver, sender):
                if task.done():
                    task.result()
        finally:
            for task in (sender, receiver):
                task.cancel()
            await asyncio.gather(sender, receiver, return_exceptions=True)

    async def _next(self, node: str, stream: Stream) -> bytes:
        """The next message. Raises RemoteError."""
        timing = self.manifest.timing
        try:
            silence = SILENT_HEARTBEATS * timing.heartbeat
            return bytes(await answer(stream, self._transport.doubt, timeout=timing.gone_after, silence=silence))
        except Timeout:
            raise RemoteError(node, "it is silent; dialling again") from None

    def _watch(self, node: str, beat: Heartbeat) -> None:
        """Says once why nothing is decided."""
        if beat.phase != "stalled":
            self._stalled.discard(node)
        elif node not in self._stalled:
            self._stalled.add(node)
            text = f"bootstrap node {short_peer(node)} hears too few of the others to decide round {beat.round}; the run waits"
            self._emit(events.Warning(text=text))
