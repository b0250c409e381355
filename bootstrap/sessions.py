"""The sessions of a run's peers with a bootstrap node: who has one, what waits to be sent, and when each peer was heard.

A peer may say so much a second, in messages and in bytes. Whoever says more is read more slowly, and who goes on so for long is refused
for a while (peer/net/guests.py). The next message of a session is read when the one before was dealt with: so each has the same share of
this node's time, however much any of them says. A peer has one session: a new one ends the one before.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Container, Iterable
from dataclasses import dataclass, field

from peer.net.base import REQUEST_SECONDS, SILENT_HEARTBEATS, Clock, Stream, Transport, answer
from peer.net.token_bucket import Rate, TokenBucket
from protocol.errors import RemoteError, apart, shown
from protocol.identity import short_peer
from protocol.ledger import access, part_lists
from protocol.ledger.ranges import range_of
from protocol.round.leader import Leader
from protocol.round.leader_events import Knock
from protocol.run.manifest import Manifest
from protocol.wire import encoding
from protocol.wire.announcement import VERSION
from protocol.wire.commit import Share
from protocol.wire.encoding import Message
from protocol.wire.invitation import Joined
from protocol.wire.session import Hello, NotAdmitted, Offered

WAITS = "it is invited, and comes in with the next commit"
TOO_MANY = "it is invited, but too many wait to come in; it asks again"


class Doorman:
    """Looks into the `leader`'s machine; `hand_in(event)` gives it an event, and is awaited."""

    def __init__(self, leader: Leader, hand_in: Callable[[Knock], Awaitable[None]], clock: Clock) -> None:
        self._leader = leader
        self._hand_in = hand_in
        self._clock = clock

    def why_not(self, peer: str) -> str | None:
        """Why it may not take part now. The auditor beside this node always may: it belongs to its operator, and trains nothing."""
        return None if peer in self._leader.witnesses.auditors else self._leader.access.why_not(peer)

    def crowded(self, peer: str, others: Iterable[str]) -> NotAdmitted | None:
        """What `peer` is told where as many strangers as may be have a session, of the `others` from its range of addresses; None: it has
        one, too."""
        standing = self._leader.standing
        most = standing.limits.range_sessions
        if not most or standing.is_exempt(peer):
            return None
        if sum(not standing.is_exempt(other) for other in others) < most:
            return None
        reason = f"{most} others from its range of addresses take part, which is all that may; it asks again, or an operator admits it"
        return NotAdmitted(reason=reason, waits=True)

    async def welcome(self, peer: str, joining: Joined | None) -> NotAdmitted | None:
        """What `peer` is told that wants a session and shows this; None: it has one."""
        if self.why_not(peer) is None:
            return None
        leader, time = self._leader, self._clock.wall()
        refused = access.why_kept_out(leader.manifest, leader.access, leader.head, peer, joining, time)
        if refused is not None:
            return NotAdmitted(reason=refused)
        assert joining is not None, "it lets in whom nothing else does"
        if not self._leader.guests.has_place(joining, self._clock.steady()):
            return NotAdmitted(reason=TOO_MANY, waits=True)
        await self._hand_in(Knock(joining))
        return NotAdmitted(reason=WAITS, waits=True)


LONGEST_HELLO = 2048
"""Bytes of one with the longest invitation."""
LONGEST = 64 * 1024
"""Bytes of a message of a session, besides a list of all the model's parts or digests: names of a chain's members, an announcement."""
ANNOUNCED_PER_SECOND, ANNOUNCED_AT_ONCE = 0.5, 4.0
"""Announcements of one peer that are looked at."""
MESSAGES = Rate(50.0, 100.0)
"""Of one session: a dozen in a round, and a heartbeat now and then."""
ROUNDS_PER_SECOND = 10.0
"""Of a run so small that rounds are quick: so often a peer may say the longest that there is to say."""
PATIENCE_SECONDS, MANY_IN_A_ROW, PAUSE_SECONDS = 10.0, 100, 0.002
"""A session whose next message was always there already, for so long and so many of them, says too much."""
RECORDS_PER_SECOND, RECORDS_AT_ONCE = 1000.0, 4096.0
"""Of the log, that one peer is sent when it asks."""
OUTBOX = 1024
"""Messages that wait for one peer; to somebody who does not read, later ones are dropped."""


@dataclass(slots=True)
class Session:
    """One peer's open stream; `outbox` is drained by the session's own task. `range`: where it comes from (protocol/ledger/ranges.py).
    `leaves`: it has said so."""

    outbox: asyncio.Queue[bytes] = field(default_factory=lambda: asyncio.Queue(OUTBOX))
    messages: TokenBucket = field(default_factory=lambda: TokenBucket(*MESSAGES))
    amounts: TokenBucket = field(default_factory=lambda: TokenBucket(1e6, 1e7))
    paused_at: float = 0.0
    in_a_row: int = 0
    records: TokenBucket = field(default_factory=lambda: TokenBucket(RECORDS_PER_SECOND, RECORDS_AT_ONCE))
    announcements: TokenBucket = field(default_factory=lambda: TokenBucket(ANNOUNCED_PER_SECOND, ANNOUNCED_AT_ONCE))
    has_announced: bool = False
    attested: int = -1
    tells: TokenBucket = field(default_factory=lambda: TokenBucket(0.2, 10.0))
    range: str = ""
    leaves: bool = False

    def may_announce(self, all_of_them: TokenBucket, now: float) -> bool:
        """Whether an announcement is to be looked at; the first one is, whatever the allowance of all peers together."""
        first, self.has_announced = not self.has_announced, True
        return self.announcements.take(now) and (first or all_of_them.take(now))

    def may_tell(self, round: int, now: float) -> bool:
        """Whether an attestation is worth an event: the first of a newer round is, others now and then; what is told is kept on disks."""
        if round > self.attested:
            self.attested = round
            return True
        return self.tells.take(now)

    def pace(self, size: int, now: float) -> float:
        """Seconds until the next message of this session is read, after one of so many bytes."""
        return max(self.messages.spend(now), self.amounts.spend(now, size))

    def floods(self, waited: float, now: float) -> bool:
        """Whether it has said so much for so long without a pause that nobody honest does. `waited`: seconds for its newest message."""
        if waited > PAUSE_SECONDS:
            self.paused_at, self.in_a_row = now, 0
        self.in_a_row += 1
        return self.in_a_row > MANY_IN_A_ROW and now - self.paused_at > PATIENCE_SECONDS

    def post(self, raw: bytes) -> None:
        """Queues a message. One that finds no place is dropped: what matters is asked for or sent again."""
        with contextlib.suppress(asyncio.QueueFull):
            self.outbox.put_nowait(raw)

    def post_records(self, records: Iterable[bytes], now: float) -> None:
        """Queues as much of the log as may be asked for, now."""
        for raw in records:
            if not self.records.take(now):
                return
            self.post(raw)

    @property
    def is_crowded(self) -> bool:
        """Whether only what decides something should be queued: commits must find space."""
        return self.outbox.qsize() >= OUTBOX // 2


class Sessions:
    """All of them. `heard`: when each peer gave its last sign of life, in steady seconds. `hear(peer, session, message)` is awaited with
    whatever a peer says, `opened(session)` once it has said who it is, `doubt(peer)` when it has been silent for some heartbeats, or
    begins anew. `doorman`: whom it lets in; None: everybody."""

    def __init__(
        self,
        manifest: Manifest,
        clock: Clock,
        hear: Callable[[str, Session, Message], Awaitable[None]],
        opened: Callable[[Session], None],
        transport: Transport,
        doorman: Doorman | None = None,
    ) -> None:
        self.open: dict[str, Session] = {}
        self.heard: dict[str, float] = {}
        self._manifest = manifest
        self._clock = clock
        self._hear = hear
        self._opened = opened
        self._doubt = transport.doubt
        self._seen_at = transport.seen_at
        self._guests = transport.guests
        self._doorman = doorman
        self._streams: dict[str, Stream] = {}
        self._longest = LONGEST + part_lists.longest(manifest)
        self._bytes = Rate(ROUNDS_PER_SECOND * self._longest, 4 * ROUNDS_PER_SECOND * self._longest)
        self._silence = SILENT_HEARTBEATS * manifest.timing.heartbeat

    async def serve(self, stream: Stream) -> None:
        """One session, from Hello to its end."""
        peer = stream.remote
        hello = encoding.expect(
            Hello, encoding.decode(await stream.recv(LONGEST_HELLO, timeout=REQUEST_SECONDS), peer), peer
        )
        if hello.run != self._manifest.run_id:
            asked, served = apart(shown(hello.run), self._manifest.run_id)
            raise RemoteError(peer, f"run {asked} is not served here, {served} is; check RUN")
        if hello.version != VERSION:
            reason = f"it speaks version {hello.version} of the protocol, and the run's nodes version {VERSION}"
            await stream.send(encoding.encode(NotAdmitted(reason=reason, version=VERSION)))
            raise RemoteError(peer, f"peer {short_peer(peer)}: {reason}; its session was refused")
        where = range_of(self._seen_at(peer))
        refusal = await self._doorman.welcome(peer, hello.joining) if self._doorman is not None else None
        if refusal is None and where and self._doorman is not None:
            others = (p for p, session in self.open.items() if session.range == where and p != peer)
            refusal = self._doorman.crowded(peer, others)
        if refusal is not None:
            await stream.send(encoding.encode(refusal))
            raise RemoteError(peer, f"peer {short_peer(peer)}: {refusal.reason}; its session was refused")
        before = self._streams.get(peer)
        session = Session(amounts=TokenBucket(*self._bytes), paused_at=self._clock.steady(), range=where)
        self.open[peer], self._streams[peer] = (
            session,
            stream,
        )  # at once: of several new ones, too, each ends the one before
        self.heard[peer] = self._clock.steady()
        sender = asyncio.create_task(self._send(stream, session))
        try:
            self._opened(session)
            if before is not None:
                self._doubt(peer)  # it has moved: that session's connection is dead, and others would be opened on it
                await before.close()
            while True:
                began = self._clock.steady()
                raw = await answer(stream, self._doubt, self._longest, silence=self._silence)
                self.heard[peer] = now = self._clock.steady()
                if session.floods(now - began, now):
                    self._guests.refuse(peer, "says too much in its session", asyncio.get_running_loop().time())
                await self._hear(peer, session, encoding.decode(raw, peer))
                await asyncio.sleep(session.pace(len(raw), self._clock.steady()))
        finally:
            sender.cancel()
            if self.open.get(peer) is session:
                del self.open[peer], self._streams[peer]
            await asyncio.gather(sender, return_exceptions=True)

    async def _send(self, stream: Stream, session: Session) -> None:
        while True:
            await stream.send(await session.outbox.get())

    def forget(self, ready: Container[str]) -> None:
        """Forgets when those were heard who have no session and are not `ready`."""
        for peer in [p for p in self.heard if p not in self.open and p not in ready]:
            del self.heard[peer]

    async def dismiss(self) -> None:
        """Ends the sessions of those who may take part no more."""
        for peer in [p for p in self.open if self._doorman is not None and self._doorman.why_not(p) is not None]:
            await self._streams[peer].close()

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


PAUSE_SECONDS = 0.005
"""For each session; to send one message to one takes about 50 microseconds."""
MOST_SHARES = 4096
"""Of one message."""


class News:
    """`tell` sends a message to everybody, `sessions` says how many those are."""

    def __init__(self, tell: Callable[[Offered], None], sessions: Callable[[], int]) -> None:
        self._tell = tell
        self._sessions = sessions
        self._waiting: deque[tuple[int, Share]] = deque()
        self._something = asyncio.Event()

    def add(self, round: int, share: Share) -> None:
        """All of this share, which was offered to `round`, is here."""
        self._waiting.append((round, share))
        self._something.set()

    async def run(self) -> None:
        """Tells what is added. Never returns."""
        while True:
            await self._something.wait()
            self._something.clear()
            for message in self._messages():
                self._tell(message)
                await asyncio.sleep(PAUSE_SECONDS * self._sessions())

    def _messages(self) -> list[Offered]:
        rounds: dict[int, list[Share]] = {}
        for _ in range(min(MOST_SHARES, len(self._waiting))):
            round, share = self._waiting.popleft()
            rounds.setdefault(round, []).append(share)
        if self._waiting:
            self._something.set()
        return [Offered(round=round, shares=tuple(shares)) for round, shares in rounds.items()]
