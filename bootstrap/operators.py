"""A node's connections to the other operators' nodes of its run.

Each node opens one stream to each of the others, and only sends on it. The node's own log says who operates the run
(protocol/ledger/board.py). A node without members asks every node that it can reach for newer commits, checks them, and
connects to the operators that the newest one names. A dismissed node ends once enough operators have that commit.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from bootstrap.archive import Archive
from bootstrap.sessions import Session
from peer.net.address import peers_of
from peer.net.base import Stream, Transport
from peer.net.directory import Directory
from peer.net.node_calls import log_page
from peer.net.task_set import TaskSet
from protocol.errors import RemoteError
from protocol.identity import short_peer
from protocol.ledger import board, history
from protocol.ledger.history import BadCommit
from protocol.quorum.paxos import Quorum
from protocol.wire import encoding, endpoints
from protocol.wire.commit import Commit, Record, votes_needed
from protocol.wire.encoding import Message

RECONNECT_SECONDS = 2.0
POLL_SECONDS = 2.0
"""Interval of the checks whether other nodes have to be asked for newer commits."""
ASK_SECONDS = 30.0
"""Longest time that one node is asked at once; the rest is asked for the next time."""
LINGER_SECONDS = 5.0
"""A dismissed node ends after these: the command that dismissed it still asks it whether that is decided."""
MAX_KNOCKING = 8
"""Most nodes outside our log that are asked because they opened a stream to us."""


class Dismissed(Exception):
    """This node no longer operates the run, and the nodes that do have the commit that says so."""


class Operators:
    """The other operators' nodes, as seen by one node.

    others: addresses of nodes to begin with
    receive: awaited with (node, message) for each message of another node
    tell: called once with a text for this node's operator
    """

    def __init__(
        self,
        directory: Directory,
        transport: Transport,
        archive: Archive,
        others: Sequence[str],
        quorum: Quorum,
        receive: Callable[[str, Message | Record], Awaitable[None]],
        tell: Callable[[str], None],
    ) -> None:
        self.links: dict[str, Session] = {}
        """The messages that wait to be sent, by node."""
        self._manifest = archive.manifest
        self._peer = transport.peer_id
        self._transport = transport
        self._directory = directory
        self._others = peers_of(others)
        self._quorum = quorum
        self._receive = receive
        self._tell = tell
        self._senders = TaskSet(lambda: self.links, self._send)
        self._incoming = Counter[str]()  # open streams, by node
        self._streams: dict[str, set[Stream]] = {}
        self._newest_shown: Commit | None = None
        self._following = asyncio.Lock()
        self._knocking: dict[str, None] = {}
        self._was_named = self._peer in self._manifest.operators or self._peer in archive.named
        self._told = False

    # --- streams

    async def serve(self) -> None:
        """Accepts the other nodes' streams."""
        await self._transport.serve(endpoints.QUORUM, self._accept)

    async def run(self) -> None:
        """Keeps our streams open. Never returns."""
        await self._senders.run()

    def broadcast(self, message: Message) -> None:
        """Queues a message for every other node."""
        for link in self.links.values():
            link.post(encoding.encode(message))

    async def _send(self, node: str) -> None:
        queue = self.links[node].outbox
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
            await asyncio.sleep(RECONNECT_SECONDS)

    async def _accept(self, stream: Stream) -> None:
        node = stream.remote
        if node not in self.links:
            self._knocking[node] = None
            while len(self._knocking) > MAX_KNOCKING:
                del self._knocking[next(iter(self._knocking))]
            raise RemoteError(node, f"peer {short_peer(node)}: not an operator of this run; it has no vote")
        if self._incoming[node]:
            self._transport.doubt(node)  # it has moved: its older stream is dead, and so is ours to it
        self._incoming[node] += 1
        self._streams.setdefault(node, set()).add(stream)
        try:
            while node in self.links:
                await self._receive(node, encoding.decode_any(bytes(await stream.recv()), node))
        finally:
            self._incoming[node] -= 1
            self._streams.get(node, set()).discard(stream)

    # --- who they are

    @property
    def head(self) -> Commit | None:
        """The newest known commit, of our log or shown by another node."""
        head, shown = self._quorum.head, self._newest_shown
        return shown if shown is not None and shown.round > (-1 if head is None else head.round) else head

    @property
    def is_named(self) -> bool:
        """Whether this node operates the run, by the newest known commit."""
        return self._peer in board.operators(self._manifest, self.head)

    async def follow(self) -> None:
        """Connects to the operators of the newest known commit, and to no others."""
        async with self._following:  # the last call knows most, and has the last word
            quorum, head = self._quorum, self.head
            self._directory.follow(board.of(self._manifest, head))
            names = {*quorum.reached, *board.operators(self._manifest, head)} - {self._peer}
            self._was_named = self._was_named or self._peer in quorum.operators
            if not self.is_named and not self._was_named:
                names = set()
            for node in [n for n in self.links if n not in names]:
                del self.links[node]
                self._senders.end(node)
                for stream in self._streams.pop(node, ()):
                    await stream.close()
            for node in sorted(names - self.links.keys()):
                self.links[node] = Session()
            self._senders.changed.set()

    async def watch(self) -> None:
        """Asks other nodes for newer commits where that is needed. Raises Dismissed."""
        while True:
            if not self.is_named and self._was_named:
                await self._ask_all()
                if not self.is_named:
                    await self._end_if_decided()
            else:
                lost = not self.is_named or self._quorum.leadership.has_stalled
                if lost or self._knocking:
                    await self._ask_all(lost)
            if not self.is_named and not self._was_named and not self._told:
                self._told = True
                self._tell(
                    f"{self._peer} is no operator of it; this node waits until the operators appoint it:"
                    " potluck run appoint"
                )
            await asyncio.sleep(POLL_SECONDS)

    async def _ask_all(self, lost: bool = True) -> None:
        """Asks the nodes that knocked and, where this node is `lost`, all that it knows."""
        known = (*self._others, *board.of(self._manifest, self.head).names) if lost else ()
        here = [name for name in self._knocking if name not in known]
        self._knocking.clear()
        names = [name for name in (*dict.fromkeys(known), *here) if name != self._peer]
        await asyncio.gather(*(self._ask(name, name in known) for name in names))

    async def _ask(self, node: str, dial: bool) -> None:
        """Takes the commits of `node` that are newer than ours, and follows them.

        dial: whether to connect first; a node that knocked is connected to us
        """
        before = self.head
        try:
            async with asyncio.timeout(ASK_SECONDS):
                if dial:
                    await self._directory.reach(node)
                while await self._read(node):
                    pass
        except (RemoteError, TimeoutError):
            self._directory.lost(node)
        if self.head is not before:
            await self.follow()

    async def _read(self, node: str) -> bool:
        head = self.head
        found = await log_page(self._transport, node, -1 if head is None else head.round)
        for raw in found:
            try:
                head = history.follow(self._manifest, head, raw).commit
            except BadCommit:
                return False
            await asyncio.sleep(0)
        known = self.head
        if head is not None and (known is None or head.round > known.round):
            self._newest_shown = head
        return bool(found)

    async def _end_if_decided(self) -> None:
        """Raises Dismissed once enough of the current operators have the commit that dismissed this node."""
        head = self._quorum.head
        if head is None:
            return
        members = board.members_after(self._manifest, head)
        have = 0
        for node in members:
            try:
                await self._directory.reach(node)
                for raw in (await log_page(self._transport, node, head.round - 1))[:1]:
                    have += encoding.decode_record(raw, node).commit.digest == head.digest
            except RemoteError:
                self._directory.lost(node)
        if have >= votes_needed(len(members)):
            await asyncio.sleep(LINGER_SECONDS)
            raise Dismissed
