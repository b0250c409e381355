"""The streams between the operators' nodes of a run, over which they vote: each node opens one to each of the others, and only sends on it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable

from bootstrap.sessions import Session
from peer.net.base import Stream, Transport
from peer.net.directory import Directory
from peer.net.keeping import Keeping
from protocol.errors import RemoteError
from protocol.identity import short_peer
from protocol.wire import encoding, endpoints
from protocol.wire.commit import Record
from protocol.wire.encoding import Message

RETRY_SECONDS = 2.0


class Links:
    """Those of one node, with whom `follow` names. `hear(node, message)` is awaited with whatever another node says. What could not be sent is
    made again. `knock(node)` is called when somebody else wants to say something."""

    def __init__(
        self,
        transport: Transport,
        directory: Directory,
        hear: Callable[[str, Message | Record], Awaitable[None]],
        knock: Callable[[str], None],
    ) -> None:
        self.to: dict[str, Session] = {}
        """What waits to be sent, by node."""
        self._knock = knock
        self._keeping = Keeping(lambda: self.to, self._keep)
        self._transport = transport
        self._directory = directory
        self._hear = hear
        self._open = Counter[str]()  # streams that the others opened
        self._streams: dict[str, set[Stream]] = {}

    async def serve(self) -> None:
        """Lets the others open theirs."""
        await self._transport.serve(endpoints.QUORUM, self._listen)

    async def run(self) -> None:
        """Keeps ours open, until it is cancelled."""
        await self._keeping.run()

    async def follow(self, nodes: Iterable[str]) -> None:
        """From now on these are the others."""
        names = set(nodes)
        for node in [n for n in self.to if n not in names]:
            del self.to[node]
            self._keeping.end(node)
            for stream in self._streams.pop(node, ()):
                await stream.close()
        for node in sorted(names - self.to.keys()):
            self.to[node] = Session()
        self._keeping.changed.set()

    async def _keep(self, node: str) -> None:
        queue = self.to[node].outbox
        while True:
            try:
                await self._directory.reach(node)
                stream = await self._transport.open(node, endpoints.QUORUM, timeout=10.0)
                try:
                    while not queue.empty():
                        queue.get_nowait()
                    while True:
                        await stream.send(await queue.get())
                finally:
                    await stream.close()
            except RemoteError:
                self._directory.lost(node)
                await self._directory.connect()
            await asyncio.sleep(RETRY_SECONDS)

    async def _listen(self, stream: Stream) -> None:
        node = stream.remote
        if node not in self.to:
            self._knock(node)
            raise RemoteError(node, f"peer {short_peer(node)}: not an operator of this run; it has no vote")
        if self._open[node]:
            self._transport.doubt(node)  # it has moved: this stream's forerunner is dead, and so is our own to it
        self._open[node] += 1
        self._streams.setdefault(node, set()).add(stream)
        try:
            while node in self.to:
                await self._hear(node, encoding.decode_any(bytes(await stream.recv()), node))
        finally:
            self._open[node] -= 1
            self._streams.get(node, set()).discard(stream)
