"""The calls that a bootstrap node answers: for the log, for the roster, and for the operators' decrees.

The roster has the announcements of the peers that have a session with this node. Its cost is bounded: announcements are
small and limited in rate, for each peer and for all together, and only those of peers with sessions are kept. An older
announcement never replaces a newer one.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from bootstrap.archive import Archive
from peer.net import compression
from peer.net.base import MAX_RECORD, Transport, serve_calls
from peer.net.rate_limits import Rate, TokenBucket
from protocol.errors import RemoteError
from protocol.identity import short_peer
from protocol.ledger import access, board, schedule
from protocol.round.leader import Leader
from protocol.round.leader_events import DecreeSigned
from protocol.wire import encoding, endpoints
from protocol.wire.announcement import MOST_LOOKED_UP, Announcement, Lookup, Roster, RosterRequest
from protocol.wire.commit import votes_needed
from protocol.wire.decree import Decree, Motion, Motions
from protocol.wire.encoding import unseal_signed
from protocol.wire.session import LogRequest

# --- announcements

MAX_GONE = 4096
_ENTRY_BYTES = 96
"""Most bytes of an entry of an answer besides its announcement: a peer id and heads."""


class AnnouncementTable:
    """The newest announcement of each peer, in order of arrival.

    position: where the count of changes begins; later than any position of this node in an earlier life
    """

    def __init__(self, run: str, position: int) -> None:
        self._run = run
        self._begin = self._position = position
        self._known: OrderedDict[str, tuple[int, int, bytes]] = OrderedDict()
        self._gone: deque[tuple[int, str]] = deque()

    def __contains__(self, peer: str) -> bool:
        return peer in self._known

    def __len__(self) -> int:
        return len(self._known)

    def add(self, peer: str, raw: bytes) -> Announcement | None:
        """Keeps a sealed announcement. Returns None if it is not one of this run by `peer`, or not newer."""
        if len(raw) > MAX_RECORD:
            return None
        found = encoding.unseal_announcement(raw, peer, self._run)
        if found is None or found.serial <= self._known.get(peer, (0, -1, b""))[1]:
            return None
        self._position += 1
        self._known[peer] = (self._position, found.serial, raw)
        self._known.move_to_end(peer)
        return found

    def remove(self, peer: str) -> None:
        if self._known.pop(peer, None) is not None:
            self._position += 1
            self._gone.append((self._position, peer))
            if len(self._gone) > MAX_GONE:
                self._begin, _ = self._gone.popleft()

    def answer(self, request: Lookup | RosterRequest) -> bytes:
        """Returns the reply to a call, at most ROSTER_REPLY bytes."""
        reply = self._look_up(request) if isinstance(request, Lookup) else self._since(request.position)
        return encoding.encode(reply)

    def _look_up(self, request: Lookup) -> Roster:
        names = list(dict.fromkeys(p for p in request.peers[:MOST_LOOKED_UP] if p in self._known))
        by_chance = min(request.sample, MOST_LOOKED_UP - len(names), len(self._known))
        if by_chance > 0:
            names += random.sample(list(self._known), by_chance)
        return Roster(announcements=tuple(self._known[p][2] for p in dict.fromkeys(names)))

    def _since(self, position: int) -> Roster:
        is_whole = not self._begin <= position <= self._position
        position = -1 if is_whole else position
        known = ((at, peer, raw) for peer, (at, _, raw) in self._known.items() if at > position)
        gone = ((at, peer, b"") for at, peer in (() if is_whole else self._gone) if at > position)
        size, sent, more = _ENTRY_BYTES, list[tuple[int, str, bytes]](), False
        for change in heapq.merge(known, gone):  # each in order; no more is read than is sent
            size += _ENTRY_BYTES + len(change[2])
            if size > endpoints.ROSTER_REPLY:
                more = True
                break
            sent.append(change)
        return Roster(
            announcements=tuple(raw for _, _, raw in sent if raw),
            gone=tuple(peer for _, peer, raw in sent if not raw),
            position=sent[-1][0] if more else self._position,
            more=more,
            anew=is_whole,
        )


MAX_REQUEST_BYTES = 8192
REPORTS = Rate(1 / 60, 10.0)
"""Lines about decrees that wait for other operators."""


class LogAndRosterHandler:
    """Answers anyone from the `archive` and the `roster`."""

    def __init__(self, archive: Archive, roster: AnnouncementTable) -> None:
        self._archive = archive
        self._roster = roster

    async def serve(self, transport: Transport) -> None:
        await serve_calls(transport, endpoints.LOG, self._read_log, limit=MAX_REQUEST_BYTES)
        await serve_calls(transport, endpoints.ROSTER, self._read_roster, limit=MAX_REQUEST_BYTES)

    async def _read_log(self, remote: str, request: bytes) -> bytes:
        ask = encoding.decode(request, remote, LogRequest)
        return await asyncio.to_thread(lambda: compression.pack(self._archive.after(ask.after), compression.PLAIN))

    async def _read_roster(self, remote: str, request: bytes) -> bytes:
        kinds: tuple[type[Lookup | RosterRequest], ...] = (Lookup, RosterRequest)
        return self._roster.answer(encoding.decode(request, remote, *kinds))


@dataclass(eq=False)
class DecreeHandler:
    """The call with which operators decree, and its length (protocol/ledger/access.py).

    submit: gives an event to the leader's machine, and is awaited
    spread: sends a motion to the other operators' nodes
    living: the operators that give signs of life, by the quorum's machine
    tell: called with a text for this node's operator
    """

    leader: Leader
    submit: Callable[[DecreeSigned], Awaitable[None]]
    spread: Callable[[Motion], None]
    living: Callable[[], frozenset[str]]
    tell: Callable[[str], None] = lambda text: None

    def __post_init__(self) -> None:
        self._told: tuple[Decree | None, tuple[str, ...]] = (None, ())
        self._reports = TokenBucket(*REPORTS)

    async def serve(self, transport: Transport) -> None:
        await serve_calls(transport, endpoints.DECREES, self.answer, limit=MAX_REQUEST_BYTES)

    async def answer(self, remote: str, request: bytes) -> bytes:
        """Takes a motion, if the call has one. Returns how the run stands by its decrees. Raises RemoteError."""
        motion = encoding.decode(request, remote, Motion)
        decree = await self.receive(motion) if motion.sealed else None
        if decree is not None and not self._is_past(decree):
            self.spread(motion)
        manifest, head = self.leader.manifest, self.leader.head
        answer = Motions(
            number=access.decrees_after(head),
            schedule=schedule.of(manifest, head),
            board=board.of(manifest, head),
            wanted=self._votes_needed,
            signed=() if decree is None else self.leader.petitions.signers(decree),
            newest=self.leader.access.newest,
        )
        return encoding.encode(answer)

    @property
    def _votes_needed(self) -> int:
        return votes_needed(len(board.members_after(self.leader.manifest, self.leader.head)))

    async def receive(self, motion: Motion) -> Decree:
        """Checks a decree that an operator has signed, and gives it to the leader's machine. Raises RemoteError."""
        operator, message, signature = unseal_signed(motion.sealed)
        decree, manifest = encoding.expect(Decree, message, operator), self.leader.manifest
        if self._is_past(decree):
            return decree  # decided; its signer, who may be no operator any more, asks whether it was
        if operator not in board.members_after(manifest, self.leader.head):
            raise RemoteError(operator, f"{short_peer(operator)} is not among the operators who decide rounds now")
        if decree.run != manifest.run_id:
            raise RemoteError(operator, "that decree is of another run")
        if not access.is_signed(operator, decree, signature):  # such as with fields that this version does not know
            raise RemoteError(operator, "that decree is signed in a form that no commit has")
        if not decree.is_sound:
            raise RemoteError(operator, "that decree says nothing")
        if (refused := self._why_not(decree)) is not None:
            raise RemoteError(operator, f"that decree cannot be: {refused}")
        await self.submit(DecreeSigned(operator, decree, signature))
        self._report(decree)
        return decree

    def _report(self, decree: Decree) -> None:
        """Tells the operator once that a decree waits for other operators to sign it."""
        signers, wanted = self.leader.petitions.signers(decree), self._votes_needed
        if (decree, signers) == self._told or len(signers) >= wanted:
            return
        if not self._reports.take(asyncio.get_running_loop().time()):
            return  # an operator may sign one after the other
        self._told = decree, signers
        names = ", ".join(map(short_peer, signers))
        self.tell(
            f"decree {decree.action}: {len(signers)} of {wanted} operators have signed it ({names});"
            " it waits for others"
        )

    def _is_past(self, decree: Decree) -> bool:
        """Returns whether the run already has a decree with this one's number."""
        return decree.number < access.decrees_after(self.leader.head)

    def _why_not(self, decree: Decree) -> str | None:
        manifest, head = self.leader.manifest, self.leader.head
        if decree.schedule is not None:
            return schedule.why_not(manifest, head, decree.schedule)
        if decree.action in board.CHANGES:
            refused = board.why_not(manifest, head, decree)
            return refused or board.why_too_few(manifest, head, decree, self.living())
        return None
