"""The peers' sessions with a bootstrap node: admission, rate limits, outboxes, and when each peer was last heard.

A peer above its limit of messages and bytes a second is read more slowly, then refused for a while
(peer/net/guests.py). What waits for a peer that does not read is bounded in bytes; beyond that its session ends. A peer
has one session: a new one ends the one before.

*Operators.* Each node opens one stream to each of the other operators' nodes, and only sends on it. The node's own log
says who operates the run (protocol/ledger/board.py). A node without members asks every operator that it can reach for
newer commits, checks them, and connects to the operators that the newest one names. It calls no other node: one that it
does not know is asked on the stream that this one opened. A dismissed node ends once enough operators have that
commit.
"""

from __future__ import annotations

import asyncio
import contextlib
import typing
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field

from bootstrap.archive import Archive
from peer.net.address import peers_of
from peer.net.base import (
    REQUEST_SECONDS,
    SILENT_HEARTBEATS,
    Clock,
    Stream,
    Transport,
    answer,
    cancel,
    decode_in_turn,
    now,
)
from peer.net.directory import Directory
from peer.net.guests import Held
from peer.net.node_calls import log_page
from peer.net.rate_limits import Rate, TokenBucket
from peer.net.stream import NONSENSE_OFFENCES
from peer.net.task_set import TaskSet
from protocol.errors import RemoteError, apart, shown
from protocol.identity import short_peer
from protocol.ledger import access, board, history, part_lists
from protocol.ledger.history import BadCommit
from protocol.ledger.ranges import range_of
from protocol.quorum.paxos import Quorum
from protocol.round.leader import Leader
from protocol.round.leader_events import JoinRequest
from protocol.run import layout
from protocol.run.manifest import Manifest
from protocol.wire import encoding, endpoints
from protocol.wire.announcement import VERSION
from protocol.wire.ballot import QuorumMessage
from protocol.wire.claims import Claim, Evaluation
from protocol.wire.commit import Commit, Record, Share, votes_needed
from protocol.wire.decree import Joined, Motion
from protocol.wire.encoding import Message, MessageError, MessageHead, RecordHead
from protocol.wire.framing import MAX_MESSAGE
from protocol.wire.session import ChainReconfig, Heartbeat, Hello, LogRequest, NotAdmitted, Offered, PeerMessage

MAX_HELLO_BYTES = 2048
MAX_MESSAGE_BYTES = 16 * 1024
"""Of a message in a session, besides two lists of all shards."""
MAX_MESSAGE_VALUES, VALUES_OF_A_SHARD = 128, 8
"""The same for a message's values: an offer has six for each shard."""
SAID_BY_PEERS = (*typing.get_args(PeerMessage), ChainReconfig, *typing.get_args(Claim))
SAID_BY_OPERATORS = (*typing.get_args(QuorumMessage), Heartbeat, LogRequest, Motion, Evaluation)
Said = Message | Record | MessageHead | RecordHead
"""A message or record of an operator; its head, if it can change nothing."""
MESSAGES = Rate(50.0, 100.0)
"""Messages of one session: a dozen a round, and heartbeats."""
ROUNDS_PER_SECOND = 10.0
"""The fastest rounds, of a tiny run: each peer may send the longest message once a round."""
ANNOUNCEMENTS = Rate(0.5, 4.0)
ATTEST_EVENTS = Rate(0.2, 10.0)
RECORDS = Rate(1000.0, 4096.0)
"""Records of the log that are sent to one peer."""
LOG_BYTES = Rate(1e6, 4e6)
"""Bytes of them; a reader of a long log calls for its pages (bootstrap/calls.py)."""
FLOOD_SECONDS, FLOOD_MESSAGES, PAUSE_SECONDS = 10.0, 100, 0.002
"""A session floods after so many messages in a row, over so long, without a pause between two of them."""
OUTBOX = 1024
OUTBOX_BYTES = MAX_MESSAGE
RECORDS_BYTES = 512 * 1024
"""Of the log's records that wait in an outbox; a reader asks again for those after them."""
OFFER_PAUSE_SECONDS = 0.005
"""For each session; sending one message to one takes about 50 microseconds."""
MAX_SHARES = 4096
WAITS = "it is invited, and comes in with the next commit"
TOO_MANY = "it is invited, but too many wait to come in; it asks again"


class AdmissionControl:
    """Decides which peers get a session: those that may take part, and a few unknown ones of each address range.

    A peer with a valid invitation waits for the commit that admits it.

    submit: gives an event to the leader's machine, and is awaited
    """

    def __init__(self, leader: Leader, submit: Callable[[JoinRequest], Awaitable[None]], clock: Clock) -> None:
        self._leader = leader
        self._submit = submit
        self._clock = clock

    def why_not(self, peer: str) -> str | None:
        """Returns why `peer` may not take part now; this node's own auditor always may."""
        return None if peer in self._leader.witnesses.auditors else self._leader.access.why_not(peer)

    def crowded(self, peer: str, others: Iterable[str]) -> NotAdmitted | None:
        """Returns a refusal if too many unknown peers of its address range, of the `others` there, have a session."""
        standing = self._leader.standing
        most = standing.limits.range_sessions
        if not most or standing.is_exempt(peer) or sum(not standing.is_exempt(other) for other in others) < most:
            return None
        reason = f"{most} others from its range of addresses take part, which is all that may"
        return NotAdmitted(reason=f"{reason}; it asks again, or an operator admits it", waits=True)

    async def welcome(self, peer: str, joining: Joined | None) -> NotAdmitted | None:
        """Returns None if `peer` is admitted, else a refusal, after its invitation `joining` was queued."""
        if self.why_not(peer) is None:
            return None
        leader, time = self._leader, self._clock.wall()
        refused = access.why_kept_out(leader.manifest, leader.access, leader.head, peer, joining, time)
        if refused is not None:
            return NotAdmitted(reason=refused)
        assert joining is not None, "only an invitation admits a peer that is kept out"
        if not self._leader.guests.has_place(joining, self._clock.steady()):
            return NotAdmitted(reason=TOO_MANY, waits=True)
        await self._submit(JoinRequest(joining))
        return NotAdmitted(reason=WAITS, waits=True)


def _bucket(rate: Rate) -> Callable[[], TokenBucket]:
    return lambda: TokenBucket(*rate)


class Outbox(asyncio.Queue[bytes]):
    """Messages that wait to be sent.

    size: their bytes
    held: the same, as its peer's guests count them
    """

    def __init__(self) -> None:
        super().__init__(OUTBOX)
        self.size = 0
        self.held: Held | None = None

    def _put(self, item: bytes) -> None:
        super()._put(item)
        self.size += len(item)
        if self.held is not None:
            self.held.add(len(item), now())

    def _get(self) -> bytes:
        item = super()._get()
        self.size -= len(item)
        if self.held is not None:
            self.held.read(len(item), now())
        return item

    def clear(self) -> None:
        """Drops all of them."""
        while not self.empty():
            self.get_nowait()


@dataclass(slots=True)
class Session:
    """One peer's open stream."""

    outbox: Outbox = field(default_factory=Outbox)
    messages: TokenBucket = field(default_factory=_bucket(MESSAGES))
    amounts: TokenBucket = field(default_factory=_bucket(Rate(1e6, 1e7)))
    paused_at: float = 0.0
    in_a_row: int = 0
    records: TokenBucket = field(default_factory=_bucket(RECORDS))
    log_bytes: TokenBucket | None = None
    announcements: TokenBucket = field(default_factory=_bucket(ANNOUNCEMENTS))
    has_announced: bool = False
    attested: int = -1
    attests: TokenBucket = field(default_factory=_bucket(ATTEST_EVENTS))
    range: str = ""  # the address range that it comes from (protocol/ledger/ranges.py)
    leaves: bool = False  # whether it has said so

    def may_announce(self, all_sessions: TokenBucket, now: float) -> bool:
        """Whether an announcement is within the limits; the first one of a session needs none of `all_sessions`."""
        first, self.has_announced = not self.has_announced, True
        return self.announcements.take(now) and (first or all_sessions.take(now))

    def may_tell(self, round: int, now: float) -> bool:
        """Whether an attestation is worth an event, which disks keep: the first of a newer round, others at a rate."""
        if round > self.attested:
            self.attested = round
            return True
        return self.attests.take(now)

    def pace(self, size: int, now: float) -> float:
        """Seconds until the next message is read, after one of `size` bytes."""
        return max(self.messages.spend(now), self.amounts.spend(now, size))

    def floods(self, waited: float, now: float) -> bool:
        """Returns whether the session floods (FLOOD_MESSAGES). `waited`: seconds until its newest message came."""
        if waited > PAUSE_SECONDS:
            self.paused_at, self.in_a_row = now, 0
        self.in_a_row += 1
        return self.in_a_row > FLOOD_MESSAGES and now - self.paused_at > FLOOD_SECONDS

    def post(self, raw: bytes) -> None:
        """Queues a message, or drops it when the outbox is full: what matters is asked for or sent again.

        A session with too many bytes in its outbox ends.
        """
        if self.outbox.size and self.outbox.size + len(raw) > OUTBOX_BYTES:
            if self.outbox.held is not None:
                self.outbox.held.end()
            return
        with contextlib.suppress(asyncio.QueueFull):
            self.outbox.put_nowait(raw)

    def post_records(self, records: Iterable[bytes], now: float) -> None:
        """Queues as many of the log's records as the limits allow; none is read before there is room for it."""
        found = iter(records)
        while self.outbox.size <= RECORDS_BYTES and (self.log_bytes is None or not self.log_bytes.wait(now)):
            if not self.records.take(now) or (raw := next(found, None)) is None:
                return
            self.post(raw)
            if self.log_bytes is not None:
                self.log_bytes.spend(now, len(raw))

    @property
    def is_crowded(self) -> bool:
        """Whether the outbox is half full: the rest is for commits."""
        return self.outbox.qsize() >= OUTBOX // 2 or self.outbox.size >= OUTBOX_BYTES // 2


@dataclass(eq=False)
class Sessions:
    """All of a node's sessions.

    receive: awaited with (peer, session, message) for each message
    opened: called with a new session, once its peer is known
    admission: decides which peers get one; None: all of them
    heard: when each peer was last heard, in steady seconds
    """

    manifest: Manifest
    clock: Clock
    receive: Callable[[str, Session, Message], Awaitable[None]]
    opened: Callable[[Session], None]
    transport: Transport
    admission: AdmissionControl | None = None

    def __post_init__(self) -> None:
        self.open: dict[str, Session] = {}
        self.heard: dict[str, float] = {}
        self._streams: dict[str, Stream] = {}
        self._ending = set[asyncio.Task[None]]()
        self._max_message_bytes = MAX_MESSAGE_BYTES + 2 * part_lists.longest(self.manifest)
        self._most_values = most_values(self.manifest)
        bytes_per_second = ROUNDS_PER_SECOND * self._max_message_bytes
        self._bytes = Rate(bytes_per_second, 4 * bytes_per_second)
        self._silence = SILENT_HEARTBEATS * self.manifest.timing.heartbeat

    async def serve(self, stream: Stream) -> None:
        """Serves one session, from its Hello to its end."""
        peer = stream.remote
        hello = encoding.decode(await stream.recv(MAX_HELLO_BYTES, timeout=REQUEST_SECONDS), peer, Hello)
        if hello.run != self.manifest.run_id:
            asked, served = apart(shown(hello.run), self.manifest.run_id)
            raise RemoteError(peer, f"run {asked} is not served here, {served} is; check RUN")
        if hello.version != VERSION:
            reason = f"it speaks version {hello.version} of the protocol, and the run's nodes version {VERSION}"
            await stream.send(encoding.encode(NotAdmitted(reason=reason, version=VERSION)))
            raise RemoteError(peer, f"peer {short_peer(peer)}: {reason}; its session was refused")
        where = range_of(self.transport.seen_at(peer))
        refusal = await self.admission.welcome(peer, hello.joining) if self.admission is not None else None
        if refusal is None and where and self.admission is not None:
            others = (p for p, session in self.open.items() if session.range == where and p != peer)
            refusal = self.admission.crowded(peer, others)
        if refusal is not None:
            await stream.send(encoding.encode(refusal))
            raise RemoteError(peer, f"peer {short_peer(peer)}: {refusal.reason}; its session was refused")
        before = self._streams.get(peer)
        session = Session(
            amounts=TokenBucket(*self._bytes),
            log_bytes=TokenBucket(*LOG_BYTES),
            paused_at=self.clock.steady(),
            range=where,
        )
        session.outbox.held = Held(self.transport.guests, peer, lambda: self._end(stream))
        # before anything is awaited: of several new ones each ends the one before
        self.open[peer], self._streams[peer] = session, stream
        self.heard[peer] = self.clock.steady()
        sender = asyncio.create_task(self._send(stream, session))
        try:
            self.opened(session)
            if before is not None:
                self.transport.doubt(peer)  # it has moved: its old connection is dead
                await before.close()
            while True:
                began = self.clock.steady()
                raw = await answer(stream, self.transport.doubt, self._max_message_bytes, silence=self._silence)
                self.heard[peer] = now = self.clock.steady()
                if session.floods(now - began, now):
                    self.transport.guests.refuse(
                        peer, "says too much in its session", asyncio.get_running_loop().time()
                    )
                await self.receive(peer, session, encoding.decode(raw, peer, *SAID_BY_PEERS, values=self._most_values))
                await asyncio.sleep(session.pace(len(raw), self.clock.steady()))
        finally:
            sender.cancel()
            if self.open.get(peer) is session:
                del self.open[peer], self._streams[peer]
            session.outbox.clear()
            await asyncio.gather(sender, return_exceptions=True)

    async def _send(self, stream: Stream, session: Session) -> None:
        while True:
            await stream.send(await session.outbox.get())

    def _end(self, stream: Stream) -> None:
        """Ends a session whose peer does not read."""
        task = asyncio.get_running_loop().create_task(stream.close())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def forget(self, ready: Container[str]) -> None:
        """Forgets when peers were heard that have no session and are not `ready`."""
        for peer in [p for p in self.heard if p not in self.open and p not in ready]:
            del self.heard[peer]

    async def dismiss(self) -> None:
        """Ends the sessions of peers that are no longer admitted."""
        for peer in [p for p in self.open if self.admission is not None and self.admission.why_not(p) is not None]:
            await self._streams[peer].close()

    def post(self, peers: Iterable[str], message: Message) -> None:
        """Queues a message for those of `peers` that have a session."""
        raw = encoding.encode(message)
        for peer in peers:
            if peer in self.open:
                self.open[peer].post(raw)

    def post_all(self, raw: bytes) -> None:
        for session in self.open.values():
            session.post(raw)


def unexpected(peer: str, where: str, message: object) -> encoding.MessageError:
    """Returns the error for a message that has no place `where` it came."""
    return encoding.MessageError(peer, f"{where} of {short_peer(peer)}: unexpected {type(message).__name__}")


def most_values(manifest: Manifest) -> int:
    """Of a message in a session of this run."""
    return MAX_MESSAGE_VALUES + VALUES_OF_A_SHARD * len(layout.shard_names(manifest.model))


class OfferAnnouncer:
    """Announces the shares of offers that may be fetched, to all sessions, in batches, with a pause in proportion to
    the number of sessions.

    send: sends a message to all sessions
    sessions: their number
    """

    def __init__(self, send: Callable[[Offered], None], sessions: Callable[[], int]) -> None:
        self._send = send
        self._sessions = sessions
        self._waiting: deque[tuple[int, Share]] = deque()
        self._added = asyncio.Event()

    def add(self, round: int, share: Share) -> None:
        """Queues a share, offered to `round`, whose payloads are all here."""
        self._waiting.append((round, share))
        self._added.set()

    async def run(self) -> None:
        """Never returns."""
        while True:
            await self._added.wait()
            rounds: dict[int, list[Share]] = {}
            for _ in range(min(MAX_SHARES, len(self._waiting))):
                round, share = self._waiting.popleft()
                rounds.setdefault(round, []).append(share)
            if not self._waiting:
                self._added.clear()
            for round, shares in rounds.items():
                self._send(Offered(round=round, shares=tuple(shares)))
                await asyncio.sleep(OFFER_PAUSE_SECONDS * self._sessions())


# --- operators

RECONNECT_SECONDS = 2.0
POLL_SECONDS = 2.0
"""Interval of the checks whether other nodes have to be asked for newer commits."""
ASK_SECONDS = 30.0
"""Longest time that one node is asked at once; the rest is asked for the next time."""
LINGER_SECONDS = 5.0
"""A dismissed node ends after these: the command that dismissed it still asks it whether that is decided."""
MAX_ASKED_BYTES = 1024
SHOWN_AT_ONCE = OUTBOX // 4
"""Records after which a node that shows us the log is asked for more; it sends OUTBOX // 2 at most."""


class Dismissed(Exception):
    """This node no longer operates the run, and the nodes that do have the commit that says so."""


@dataclass(eq=False)
class Operators:
    """The other operators' nodes, as seen by one node.

    others: addresses of nodes to begin with
    receive: awaited with (node, message) for each message of another node
    tell: called once with a text for this node's operator
    """

    directory: Directory
    transport: Transport
    archive: Archive
    others: Sequence[str]
    quorum: Quorum
    receive: Callable[[str, Said], Awaitable[None]]
    tell: Callable[[str], None]

    def __post_init__(self) -> None:
        self.transport.guests.operators = lambda: self.links
        self.links: dict[str, Session] = {}
        """The messages that wait to be sent, by node."""
        self._manifest = self.archive.manifest
        self._peer = self.transport.peer_id
        self._others = peers_of(self.others)
        self._senders = TaskSet(lambda: self.links, self._send)
        self._incoming = Counter[str]()  # open streams, by node
        self._streams: dict[str, set[Stream]] = {}
        self._newest_shown: Commit | None = None
        self._following = asyncio.Lock()
        self._was_named = self._peer in self._manifest.operators or self._peer in self.archive.named
        self._told = False

    # --- streams

    async def serve(self) -> None:
        """Accepts the other nodes' streams."""
        await self.transport.serve(endpoints.QUORUM, self._accept)

    async def run(self) -> None:
        """Keeps our streams open. Never returns."""
        await self._senders.run()

    def broadcast(self, message: Message) -> None:
        """Queues a message for every other node."""
        for link in self.links.values():
            link.post(encoding.encode(message))

    async def _send(self, node: str) -> None:
        outbox = self.links[node].outbox
        while True:
            try:
                await self.directory.reach(node)
                stream = await self.transport.open(node, endpoints.QUORUM, timeout=10.0)
                asked = asyncio.create_task(self._asked(node, stream))
                try:
                    outbox.clear()
                    while True:
                        await stream.send(await outbox.get())
                finally:
                    await cancel(asked)
                    await stream.close()
            except RemoteError:
                self.directory.lost(node)
                await self.directory.connect()
            await asyncio.sleep(RECONNECT_SECONDS)

    async def _asked(self, node: str, stream: Stream) -> None:
        """Answers a node that does not know us yet, and asks for the log on the stream that we opened."""
        with contextlib.suppress(RemoteError):
            while True:
                await self.receive(node, encoding.decode(await stream.recv(MAX_ASKED_BYTES), node, LogRequest))

    async def _accept(self, stream: Stream) -> None:
        node = stream.remote
        if node not in self.links:
            await self._be_shown(stream)
        if self._incoming[node]:
            self.transport.doubt(node)  # it has moved: its older stream is dead, and so is ours to it
        self._incoming[node] += 1
        self._streams.setdefault(node, set()).add(stream)
        try:
            while node in self.links:
                await self.receive(node, await self.read_message(stream))
        finally:
            self._incoming[node] -= 1
            self._streams.get(node, set()).discard(stream)

    async def read_message(self, stream: Stream) -> Said:
        """The next message of an operator; of one with a commit that can change nothing now, the head. The others are
        decoded once the operator may take the turns for that."""
        node = stream.remote
        said = encoding.head(await stream.recv(MAX_MESSAGE), node, *SAID_BY_OPERATORS)
        if isinstance(said, RecordHead):
            if said.commit.round != self.quorum.round:
                return said
            if (reason := history.why_not_after(self._manifest, self.quorum.head, said)) is not None:
                raise MessageError(node, f"record from {short_peer(node)}: {reason}; it was dropped")
        elif said.kind in encoding.WITH_COMMIT and not self.quorum.hears(node, said):
            return said
        return await decode_in_turn(stream, said)

    async def _be_shown(self, stream: Stream) -> None:
        """Reads newer commits from a node that is not in our log, on its own stream, until one names it as operator.

        Each has to be the next one, which its head shows before it is decoded. Raises RemoteError.
        """
        node, came, end = stream.remote, SHOWN_AT_ONCE, now() + ASK_SECONDS
        while node not in self.links:
            if came >= SHOWN_AT_ONCE:
                await stream.send(encoding.encode(LogRequest(after=self._newest_round)))
                came = 0
            raw = await stream.recv(MAX_MESSAGE, timeout=max(0.0, end - now()))
            shown = encoding.head(raw, node, *SAID_BY_OPERATORS)
            if isinstance(shown, MessageHead) or shown.commit.round != self._newest_round + 1:
                # it is for a node that knows the sender; or it came another way, or those before it are still to come
                if len(raw) > MAX_ASKED_BYTES:
                    self.transport.guests.offend(node, "shows a log that leads nowhere", now(), NONSENSE_OFFENCES)
                continue
            if (reason := history.why_not_after(self._manifest, self.head, shown)) is not None:
                what = f"peer {short_peer(node)}: not an operator of this run, and a commit that it shows {reason}"
                raise MessageError(node, f"{what}; it has no vote")
            record = await decode_in_turn(stream, shown)
            if history.why_not_content(self._manifest, self.head, record.commit) is not None:
                raise MessageError(node, f"peer {short_peer(node)}: shows what is no commit of this run")
            came, self._newest_shown = came + 1, record.commit
            await self.follow()

    @property
    def _newest_round(self) -> int:
        return -1 if self.head is None else self.head.round

    # --- members

    @property
    def head(self) -> Commit | None:
        """The newest known commit, of our log or shown by another node."""
        head, shown = self.quorum.head, self._newest_shown
        return shown if shown is not None and shown.round > (-1 if head is None else head.round) else head

    @property
    def is_named(self) -> bool:
        """Whether this node operates the run, by the newest known commit."""
        return self._peer in board.operators(self._manifest, self.head)

    async def follow(self) -> None:
        """Connects to the operators of the newest known commit, and to no others."""
        async with self._following:  # the last call knows most, and has the last word
            quorum, head = self.quorum, self.head
            self.directory.follow(board.of(self._manifest, head))
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
                self.links[node] = Session(log_bytes=TokenBucket(*LOG_BYTES))
            self._senders.changed.set()

    async def watch(self) -> None:
        """Asks other nodes for newer commits where that is needed. Raises Dismissed."""
        while True:
            if not self.is_named and self._was_named:
                await self._ask_all()
                if not self.is_named:
                    await self._end_if_decided()
            else:
                if not self.is_named or self.quorum.leadership.has_stalled:
                    await self._ask_all()
            if not self.is_named and not self._was_named and not self._told:
                self._told = True
                self.tell(
                    f"{self._peer} is no operator of it; this node waits until the operators appoint it:"
                    " potluck run appoint"
                )
            await asyncio.sleep(POLL_SECONDS)

    async def _ask_all(self) -> None:
        """Asks all nodes that it knows of: those that it began with, and the operators."""
        known = dict.fromkeys((*self._others, *board.of(self._manifest, self.head).names))
        await asyncio.gather(*(self._ask(name) for name in known if name != self._peer))

    async def _ask(self, node: str) -> None:
        """Takes the commits of `node` that are newer than ours, and follows them."""
        before = self.head
        try:
            async with asyncio.timeout(ASK_SECONDS):
                await self.directory.reach(node)
                while await self._read(node):
                    pass
        except (RemoteError, TimeoutError):
            self.directory.lost(node)
        if self.head is not before:
            await self.follow()

    async def _read(self, node: str) -> bool:
        head = self.head
        found = await log_page(self.transport, node, -1 if head is None else head.round)
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
        head = self.quorum.head
        if head is None:
            return
        members = board.members_after(self._manifest, head)
        have = 0
        for node in members:
            try:
                await self.directory.reach(node)
                for raw in (await log_page(self.transport, node, head.round - 1))[:1]:
                    have += encoding.decode_record(raw, node).commit.digest == head.digest
            except RemoteError:
                self.directory.lost(node)
        if have >= votes_needed(len(members)):
            await asyncio.sleep(LINGER_SECONDS)
            raise Dismissed
