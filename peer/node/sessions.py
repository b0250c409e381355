"""A peer's sessions with the bootstrap nodes.

A session is one stream to a node: Hello, then messages both ways, with a Heartbeat at least every `heartbeat` seconds.
When it breaks or falls silent it is opened again with growing pauses, and the member machine repeats what matters.
There is one with every operator's node of the newest commit (protocol/ledger/board.py); until the log is here, also
with those that the first nodes name.

A node refuses a peer that is banned, or not admitted to a closed run (NotAdmitted). One node may lie, so the peer ends
only when as many of the deciding nodes as a commit needs votes refuse it, and the log, which the peer checks itself
(protocol/ledger/access.py), keeps it out. Where nodes speak another version of the protocol, their votes alone decide.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import typing
from collections.abc import Awaitable, Callable, Sequence

from peer import events
from peer.net.address import peers_of
from peer.net.base import SILENT_HEARTBEATS, Stream, Timeout, answer, cancel, decode_in_turn
from peer.net.network import Network
from peer.net.node_calls import ask_operators, log_page
from peer.net.task_set import TaskSet
from protocol.errors import BannedError, ClosedError, RemoteError, UsageError, shown
from protocol.identity import short_peer
from protocol.ledger import access, board, history
from protocol.ledger.history import BadCommit
from protocol.run.manifest import Manifest
from protocol.wire import encoding, endpoints
from protocol.wire.announcement import VERSION
from protocol.wire.commit import Commit, Record, votes_needed
from protocol.wire.decree import Board, Joined, Motions
from protocol.wire.encoding import Message, RecordHead
from protocol.wire.session import Announced, Heartbeat, Hello, Leave, LogRequest, NodeMessage, NotAdmitted

RETRY_SECONDS = (0.5, 10.0)
"""Pauses before a session is opened again: the first and the longest."""
LAST_WORD_SECONDS = 1.0
"""For a node's reason after it has ended the stream."""
LEAVE_SECONDS = 2.0
FIND_SECONDS = 5.0
"""For a node to name the operators; a node from the command line may be gone for good."""
LOST_SECONDS = 10.0
OUTBOX_MESSAGES = 256

OnMessage = Callable[[str, Message | Record], Awaitable[None]]
"""Is awaited with a node and its message."""
IsNews = Callable[[RecordHead], bool]
"""Whether a record with this head is to be decoded."""
SAID_BY_NODES = (*typing.get_args(NodeMessage), Heartbeat)
OnOpen = Callable[[], Awaitable[None]]


class NotTaken(RemoteError):
    """A node refuses this peer, or does not admit it yet; `word` is its answer."""

    def __init__(self, peer: str, message: str, word: NotAdmitted) -> None:
        super().__init__(peer, message)
        self.word = word


class Refusals:
    """The nodes that refuse this peer.

    joining: the invitation that it shows.
    run: the run's address, as an operator types it.
    """

    def __init__(self, manifest: Manifest, network: Network, joining: Joined | None, run: str) -> None:
        self._manifest = manifest
        self._network = network
        self._joining = joining
        self._run = run
        self._by: dict[str, NotAdmitted] = {}
        self._changed = asyncio.Event()
        self._head: Commit | None = None
        self._access = access.of(manifest)

    def refused(self, node: str, word: NotAdmitted) -> None:
        """`node` opens no session."""
        self._by[node] = word
        self._changed.set()

    def taken(self, node: str) -> None:
        """`node` has a session with this peer."""
        self._by.pop(node, None)

    async def run(self) -> None:
        """Checks after every refusal whether it is final. Never returns. Raises BannedError, ClosedError,
        UsageError."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self._are_enough(of_version=True):
                self._raise_for_version()
            if self._are_enough(of_version=False) and await self._read_log() and self._are_enough(of_version=False):
                self._raise_if_kept_out()

    def _are_enough(self, *, of_version: bool) -> bool:
        """Whether the refusals, for the peer's version or its admission, are as many as the votes for a commit."""
        members = board.members_after(self._manifest, self._head)
        final = [n for n, word in self._by.items() if not word.waits and bool(word.version) == of_version]
        return len(set(final) & set(members)) >= votes_needed(len(members))

    async def _read_log(self) -> bool:
        for node in self._network.directory.operators:
            try:
                after = -1 if self._head is None else self._head.round
                while raws := await log_page(self._network.transport, node, after):
                    for raw in raws:
                        self._head = commit = history.follow(self._manifest, self._head, raw).commit
                        self._access, after = self._access.after(commit.decree, commit.joined), commit.round
                return True
            except (RemoteError, BadCommit):
                continue
        return False

    def _raise_if_kept_out(self) -> None:
        peer, wall = self._network.transport.peer_id, self._network.clock.wall()
        if self._access.why_not(peer) is None:
            return  # the nodes do not know the newest decree yet
        time = wall if self._head is None else max(wall, self._head.time)
        why = access.why_kept_out(self._manifest, self._access, self._head, peer, self._joining, time)
        thing, typed = f"run {shown(self._manifest.name)}", f"potluck run admit {self._run} {peer}"
        if self._access.is_banned(peer):
            raise BannedError(f"{thing}: peer {peer}: {why}; ask an operator, who lets it in again with: {typed}")
        why = why or next(iter(self._by.values())).reason
        raise ClosedError(
            f"{thing}: peer {peer}: {shown(why)}; send this id to an operator, who types: {typed}, and join again;"
            " or ask for an invitation (potluck invite) and join with its line"
        )

    def _raise_for_version(self) -> None:
        other = next(word.version for word in self._by.values() if word.version)
        if other != VERSION:
            way = "older" if other < VERSION else "newer"
            raise UsageError(
                f"run {shown(self._manifest.name)}: its nodes speak version {other} of the protocol, this is {VERSION};"
                f" install the version of Potluck that the run has ({way} than this)"
            )


class Sessions:
    """One session with each operator's node.

    joining: the invitation by which this peer comes in.
    refusals: gets the nodes' refusals.
    """

    def __init__(self, network: Network, joining: Joined | None = None, refusals: Refusals | None = None) -> None:
        self.directory = network.directory
        self.manifest = network.directory.manifest
        self._transport = network.transport
        self._emit = network.emit
        self._joining = joining
        self._refusals = refusals
        self._outboxes: dict[str, asyncio.Queue[Message]] = {}
        self._turns = itertools.count()
        self._keeping: TaskSet | None = None
        self._leaves = False
        self._followed = self.directory.operators
        self._stalled: set[str] = set()

    def tell(self, message: Message) -> None:
        """Queues a message for every node, a request for one in turn. Without a session it is dropped: the machine
        repeats it."""
        outboxes = list(self._outboxes.values())
        if isinstance(message, LogRequest) and outboxes:
            outboxes = [outboxes[next(self._turns) % len(outboxes)]]
        for outbox in outboxes:
            with contextlib.suppress(asyncio.QueueFull):
                outbox.put_nowait(message)

    async def leave(self) -> bool:
        """Sends Leave to every node within LEAVE_SECONDS, and opens no more sessions. Whether there was one."""
        self._leaves = True
        outboxes = list(self._outboxes.values())
        self.tell(Leave())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_SECONDS):
                await asyncio.gather(*(outbox.join() for outbox in outboxes))
        return self.is_open

    async def run(self, on_message: OnMessage, on_open: OnOpen, is_news: IsNews) -> None:
        """Keeps the sessions open. Never returns."""
        self._keeping = TaskSet(
            lambda: self.directory.operators, lambda node: self._keep_session(node, on_message, on_open, is_news)
        )
        await self._keeping.run()

    @property
    def is_open(self) -> bool:
        return bool(self._outboxes)

    def follow_operators(self) -> None:
        """Opens and closes sessions if the directory's operators have changed."""
        if self.directory.operators != self._followed:
            self._followed = self.directory.operators
            if self._keeping is not None:
                self._keeping.changed.set()

    async def _keep_session(self, node: str, on_message: OnMessage, on_open: OnOpen, is_news: IsNews) -> None:
        pause, longest = RETRY_SECONDS
        warned, refused = False, ""

        def taken() -> None:
            nonlocal pause, warned, refused
            pause, warned, refused = RETRY_SECONDS[0], False, ""
            if self._refusals is not None:
                self._refusals.taken(node)

        while True:
            try:
                await self._session(node, on_message, on_open, is_news, taken)
            except NotTaken as error:
                if str(error) != refused:
                    refused = str(error)
                    self._emit(events.Warning(text=f"bootstrap node {short_peer(node)}: {error}"))
                if self._refusals is not None:
                    self._refusals.refused(node, error.word)
                pause, warned = longest, True  # a link that breaks between two refusals is no news
            except RemoteError as error:
                if not warned:
                    self._emit(events.Warning(text=f"session with bootstrap node {short_peer(node)}: {error}"))
                    warned = True
            if self._leaves:
                await asyncio.Event().wait()  # no session is opened any more
            self.directory.lost(node)
            await self.directory.connect()
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(longest, pause * 2)

    async def _session(
        self, node: str, on_message: OnMessage, on_open: OnOpen, is_news: IsNews, taken: Callable[[], None]
    ) -> None:
        """One session, until it breaks. `taken()`: the node has accepted it. Raises RemoteError, NotTaken."""
        await self.directory.reach(node)
        stream = await self._transport.open(node, endpoints.SESSION, timeout=10.0)
        try:
            hello = Hello(run=self.manifest.run_id, version=VERSION, joining=self._joining)
            await stream.send(encoding.encode(hello))
            outbox = self._outboxes[node] = asyncio.Queue(OUTBOX_MESSAGES)
            if self.directory.sealed:
                outbox.put_nowait(Announced(sealed=self.directory.sealed))
            if self._leaves:
                outbox.put_nowait(Leave())
            await on_open()
            sender = asyncio.create_task(self._send(stream, outbox))
            receiver = asyncio.create_task(self._receive(node, stream, on_message, is_news, taken))
            try:
                await asyncio.wait({sender, receiver}, return_when=asyncio.FIRST_COMPLETED)
                if not receiver.done():  # a node that refuses us says why before it ends the stream
                    await asyncio.wait({receiver}, timeout=LAST_WORD_SECONDS)
                for task in (receiver, sender):
                    if task.done():
                        task.result()
            finally:
                await cancel(sender, receiver)
        finally:
            self._outboxes.pop(node, None)
            await stream.close()

    async def _send(self, stream: Stream, outbox: asyncio.Queue[Message]) -> None:
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

    async def _receive(
        self, node: str, stream: Stream, on_message: OnMessage, is_news: IsNews, taken: Callable[[], None]
    ) -> None:
        timing = self.manifest.timing
        silence = SILENT_HEARTBEATS * timing.heartbeat
        while True:
            try:
                raw = await answer(stream, self._transport.doubt, timeout=timing.gone_after, silence=silence)
            except Timeout:
                raise RemoteError(node, "it is silent; dialling again") from None
            said = encoding.head(raw, node, *SAID_BY_NODES)
            if isinstance(said, RecordHead) and not is_news(said):
                taken()
                continue
            match message := await decode_in_turn(stream, said):
                case NotAdmitted():
                    refused = f"it refuses this machine's work: {message.reason}; ask the run's operators"
                    raise NotTaken(node, message.reason if message.waits else refused, message)
                case Heartbeat():
                    self._warn_if_stalled(node, message)
            taken()
            await on_message(node, message)

    def _warn_if_stalled(self, node: str, beat: Heartbeat) -> None:
        if beat.phase != "stalled":
            self._stalled.discard(node)
        elif node not in self._stalled:
            self._stalled.add(node)
            text = f"bootstrap node {short_peer(node)} hears too few of the others to decide round {beat.round}"
            self._emit(events.Warning(text=f"{text}; the run waits"))


class Operators:
    """The nodes that this peer takes for the run's operators.

    dialled: the nodes that it began with.
    head: gives the newest commit that counts, None before the first.
    """

    def __init__(
        self,
        manifest: Manifest,
        network: Network,
        sessions: Sessions,
        bootstrap: Sequence[str],
        head: Callable[[], Commit | None],
    ) -> None:
        self.dialled = peers_of(bootstrap)
        self._manifest = manifest
        self._network = network
        self._sessions = sessions
        self._head = head
        self._hint: Motions | None = None
        self._followed: tuple[Commit | None, Motions | None] | None = None

    async def find(self) -> None:
        """Asks the nodes that it began with, and the known ones."""
        known = dict.fromkeys((*self.dialled, *self._network.directory.operators))
        await asyncio.gather(*(self._ask(node) for node in known if node != self._network.transport.peer_id))
        self.follow(self._head())

    async def _ask(self, node: str) -> None:
        with contextlib.suppress(RemoteError, TimeoutError):
            async with asyncio.timeout(FIND_SECONDS):
                await self._network.directory.reach(node)
                found = await ask_operators(self._network.transport, node)
            if self._hint is None or found.number > self._hint.number:
                self._hint = found

    def follow(self, head: Commit | None) -> None:
        """Takes the operators of `head`, the newest commit that counts, and as hints those that nodes name."""
        if self._followed is not None and self._followed[0] is head and self._followed[1] is self._hint:
            return
        self._followed = head, self._hint
        if head is not None and head.plan is not None:
            self._network.directory.planned(head.plan)
        known, hint = board.of(self._manifest, head), self._hint
        others: tuple[str, ...] = ()
        if hint is not None and access.decrees_after(head) < hint.number:
            others = (*self.dialled, *hint.board.names)
            known = Board(operators=(*known.operators, *hint.board.operators), quorum=known.quorum)
        self._network.directory.follow(known, others)
        self._sessions.follow_operators()

    async def run(self) -> None:
        """Searches again while there is no session. Never returns."""
        while True:
            await asyncio.sleep(LOST_SECONDS)
            if not self._sessions.is_open:
                await self.find()
